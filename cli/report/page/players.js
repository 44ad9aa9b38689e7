/* players.js - the videos of one prompt side by side, moved by one set of controls. A player is a video, or a pile of pictures where
 * the browser could not play the file. Frames are counted from 0; a video is asked for the middle of a frame, so that rounding of times
 * cannot show its neighbour.
 * SPDX-License-Identifier: Apache-2.0 */
"use strict";

esa.players = (function () {
  var section = esa.byId("videos");
  if (!section) return null;
  var clips = Array.from(section.querySelectorAll(".clip")).map(function (node) {
    var players = Array.from(node.querySelectorAll(".player[data-frames]")).map(function (figure) {
      return { figure: figure, video: figure.querySelector("video"), pictures: Array.from(figure.querySelectorAll(".frames img")),
        fps: Number(figure.getAttribute("data-fps")), frames: Number(figure.getAttribute("data-frames")), canvas: null };
    });
    return { node: node, players: players };
  });
  var transport = esa.byId("transport"), slider = esa.byId("seek"), clock = esa.byId("clock"), toggle = esa.byId("play"), difference = esa.byId("difference");
  var state = { clip: null, frame: 0, frames: 0, fps: 16, playing: false, rate: 1, difference: false, started: 0, from: 0 };

  function each(f) { if (state.clip) state.clip.players.forEach(f); }
  function show_picture(p, frame) {
    p.pictures.forEach(function (picture, i) { picture.style.display = i === Math.min(frame, p.pictures.length - 1) ? "block" : "none"; });
  }
  function source(p) { return p.video || p.pictures.find(function (picture) { return picture.style.display !== "none"; }); }

  /* |dense - sparse| through a canvas that is never read: brightened by its style. */
  function draw_difference() {
    if (!state.difference || !state.clip) return;
    var reference = state.clip.players.find(function (p) { return p.figure.hasAttribute("data-reference"); });
    each(function (p) {
      if (!p.canvas || !reference || p === reference) return;
      var a = source(reference), b = source(p), w = b.videoWidth || b.naturalWidth, h = b.videoHeight || b.naturalHeight;
      if (!w || !h) return;
      if (p.canvas.width !== w || p.canvas.height !== h) { p.canvas.width = w; p.canvas.height = h; }
      var ctx = p.canvas.getContext("2d");
      ctx.globalCompositeOperation = "source-over";
      ctx.drawImage(a, 0, 0, w, h);
      ctx.globalCompositeOperation = "difference";
      ctx.drawImage(b, 0, 0, w, h);
    });
  }
  function set_difference(on) {
    state.difference = on;
    difference.setAttribute("aria-pressed", String(on));
    clips.forEach(function (clip) {
      clip.players.forEach(function (p) {
        if (p.canvas) { p.canvas.remove(); p.canvas = null; }
        if (!on || p.figure.hasAttribute("data-reference")) return;
        p.canvas = esa.el("canvas", { style: "filter:brightness(4)", role: "img", "aria-label": "difference to dense, four times brighter" });
        p.figure.querySelector(".stage").append(p.canvas);
      });
    });
    draw_difference();
  }

  function tell() {
    slider.value = String(state.frame);
    slider.setAttribute("aria-valuetext", "frame " + (state.frame + 1) + " of " + state.frames);
    clock.textContent = "frame " + (state.frame + 1) + " / " + state.frames + " · " + ((state.frame + 0.5) / state.fps).toFixed(2) + " s";
    toggle.textContent = state.playing ? "Pause" : "Play";
    toggle.setAttribute("aria-label", state.playing ? "Pause all videos" : "Play all videos");
  }
  function seek(frame) {
    state.frame = Math.max(0, Math.min(state.frames - 1, Math.round(frame)));
    state.from = state.frame;
    state.started = performance.now();
    each(function (p) {
      if (p.video) p.video.currentTime = (state.frame + 0.5) / p.fps;
      else show_picture(p, state.frame);
    });
    tell();
    draw_difference();
  }
  function pause() {
    state.playing = false;
    each(function (p) { if (p.video) { p.video.pause(); p.video.playbackRate = state.rate; } });
    seek(state.frame);
  }
  function play() {
    if (state.frame >= state.frames - 1) seek(0);
    state.playing = true;
    state.from = state.frame;
    state.started = performance.now();
    each(function (p) {
      if (!p.video) return;
      p.video.playbackRate = state.rate;
      var promise = p.video.play();
      if (promise) promise.catch(function () { /* interrupted by a pause: nothing to do */ });
    });
    tell();
    requestAnimationFrame(tick);
  }
  /* The first video leads (a clock does, where there is none); the others follow. */
  function tick() {
    if (!state.playing) return;
    var videos = state.clip.players.filter(function (p) { return p.video; }), leader = videos[0];
    var time = leader ? leader.video.currentTime : (state.from + 0.5) / state.fps + (performance.now() - state.started) / 1000 * state.rate;
    var frame = Math.floor(time * state.fps + 1e-3);
    if (frame >= state.frames || (leader && leader.video.ended)) {
      seek(0);
      each(function (p) { if (p.video && p.video.paused) { var again = p.video.play(); if (again) again.catch(function () { /* as above */ }); } });
    } else {
      state.frame = frame;
      videos.slice(1).forEach(function (p) {
        esa.beside(p.video, time, p.fps, state.rate);
      });
      each(function (p) { if (!p.video) show_picture(p, frame); });
      tell();
      draw_difference();
    }
    requestAnimationFrame(tick);
  }

  function choose(index) {
    if (state.playing) pause();
    state.clip = clips[index];
    clips.forEach(function (clip, i) { clip.node.classList.toggle("hidden", i !== index); });
    var players = state.clip.players;
    transport.classList.toggle("hidden", players.length === 0);
    if (!players.length) return;
    state.frames = Math.min.apply(null, players.map(function (p) { return p.frames; }));
    state.fps = players[0].fps;
    slider.max = String(state.frames - 1);
    difference.classList.toggle("hidden", players.length < 2 || !players.some(function (p) { return p.figure.hasAttribute("data-reference"); }));
    seek(Math.min(state.frame, state.frames - 1));
  }

  clips.forEach(function (clip) {
    clip.players.forEach(function (p) {
      if (!p.video) return;
      p.video.removeAttribute("controls");
      p.video.addEventListener("seeked", draw_difference);
      p.video.addEventListener("loadeddata", function () { if (!state.playing) { p.video.currentTime = (state.frame + 0.5) / p.fps; } });
      p.video.addEventListener("error", function () {
        p.figure.querySelector(".stage").append(esa.el("p", { class: "why" }, "This browser cannot play the video (H.264 in MP4)."));
      });
      p.figure.addEventListener("click", function () { if (state.playing) pause(); else play(); });
    });
  });
  var menu = esa.byId("clip");
  if (menu) menu.addEventListener("change", function () { choose(Number(menu.value)); });
  toggle.addEventListener("click", function () { if (state.playing) pause(); else play(); });
  slider.addEventListener("input", function () { var on = state.playing; if (on) pause(); seek(Number(slider.value)); });
  esa.byId("first").addEventListener("click", function () { if (state.playing) pause(); seek(0); });
  esa.byId("back").addEventListener("click", function () { if (state.playing) pause(); seek(state.frame - 1); });
  esa.byId("next").addEventListener("click", function () { if (state.playing) pause(); seek(state.frame + 1); });
  esa.byId("rate").addEventListener("change", function (event) { state.rate = Number(event.target.value); if (state.playing) { pause(); play(); } });
  difference.addEventListener("click", function () { set_difference(!state.difference); });
  /* Keys work while the focus is in this section, or nowhere in particular. */
  document.addEventListener("keydown", function (event) {
    var at = document.activeElement, here = !at || at === document.body || section.contains(at);
    if (!here || event.ctrlKey || event.metaKey || event.altKey || !state.clip || !state.clip.players.length) return;
    if (at && (at.tagName === "SELECT" || at.tagName === "SUMMARY")) return;
    if (at && at.tagName === "BUTTON" && (event.key === " " || event.key === "Enter")) return;
    var frame = { ",": state.frame - 1, ".": state.frame + 1, ArrowLeft: state.frame - 1, ArrowRight: state.frame + 1, Home: 0, End: state.frames - 1 }[event.key];
    if (event.key === " " || event.key === "k") { if (state.playing) pause(); else play(); }
    else if (event.key === "d" && !difference.classList.contains("hidden")) set_difference(!state.difference);
    else if (frame !== undefined && (at && section.contains(at) || event.key.length === 1 || event.key.indexOf("Arrow") === 0)) { if (state.playing) pause(); seek(frame); }
    else return;
    event.preventDefault();
  });
  document.addEventListener("visibilitychange", function () { if (document.hidden && state.playing) pause(); });
  window.addEventListener("beforeprint", function () { if (state.playing) pause(); });

  if (clips.length) choose(0);
  return { seek: seek, play: play, pause: pause, state: state };
})();
