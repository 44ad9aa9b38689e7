/* serve_player.js - a finished clip: one video, or dense and sparse over each other with a wipe, or beside each other. Both are moved by
 * one set of controls and stand at the same time.
 * SPDX-License-Identifier: Apache-2.0 */
"use strict";

esa.player = (function () {
  const PLAY = "M4 2v12l10-6z", PAUSE = "M3 2h4v12H3zM9 2h4v12H9z";
  const calm = window.matchMedia("(prefers-reduced-motion: reduce)");

  function icon(path) { return esa.svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, esa.svg("path", { d: path })); }

  /* A video of the stage; says in words what it is. */
  function video(name, label) {
    const node = esa.el("video", { playsinline: true, preload: "auto", "aria-label": label, "data-variant": name, tabindex: "-1" });
    node.muted = true;                                  /* no clip has sound; browsers start silent ones only */
    return node;
  }

  /* node: to be shown; done(): releases what it holds. job: a finished one. */
  function make(job) {
    const both = esa.job.has(job, "dense");
    const fps = job.fps || 16, frames = Math.max(1, job.num_frames || 1);
    const sparse = video("sparse", both ? "Sparse video" : "Video: " + job.prompt);
    const dense = both ? video("dense", "Dense video") : null;
    const videos = both ? [sparse, dense] : [sparse], urls = [];
    const size = (job.size || "16x9").split("x").map(Number);
    let frame = 0, playing = false, rate = 1, gone = false;

    const stage = esa.el("div", { class: "stage" });
    stage.style.setProperty("--ratio", String(size[0] / size[1]));
    const note = esa.el("p", { class: "stage-note", hidden: true });

    /* ---- controls */
    const toggle = esa.el("button", { type: "button", class: "play", click: function () { playing ? pause() : play(); } });
    const seek = esa.el("input", { type: "range", class: "grow seek", min: "0", max: String(frames - 1), value: "0", step: "1",
      "aria-label": "Frame", input: function () { pause(); show(Number(seek.value)); } });
    const clock = esa.el("output", { class: "clock" });
    const speed = esa.el("select", { "aria-label": "Speed", change: function () { rate = Number(speed.value); set_rate(); } },
      [["1", "1 ×"], ["0.5", "½ ×"], ["0.25", "¼ ×"]].map(function (s) { return esa.el("option", { value: s[0] }, s[1]); }));
    const controls = esa.el("div", { class: "controls" }, [toggle, seek, clock, speed]);

    /* ---- the wipe: a slider as large as the stage. Left of the handle the dense video shows, right of it the sparse one. */
    let wipe = null, views = null;
    if (both) {
      const handle = esa.el("div", { class: "handle", "aria-hidden": "true" }, esa.el("span", null, icon("M6 3v10L1 8zM10 3v10l5-5z")));
      wipe = esa.el("input", { type: "range", class: "wipe", min: "0", max: "100", step: "1", value: "50",
        "aria-label": "Wipe between dense, left, and sparse, right", input: place });
      stage.append(sparse, dense, esa.el("span", { class: "tag left", "aria-hidden": "true" }, "dense"),
        esa.el("span", { class: "tag right", "aria-hidden": "true" }, "sparse"), wipe, handle, note);
      views = esa.el("div", { class: "segments views", role: "group", "aria-label": "View" },
        [["wipe", "Wipe"], ["beside", "Side by side"]].map(function (v) {
          return esa.el("button", { type: "button", "data-view": v[0], click: function () { view(v[0]); } }, v[1]);
        }));
      controls.append(views);
      view("wipe");
      place();
    } else stage.append(sparse, note);
    function place() {
      stage.style.setProperty("--wipe", wipe.value + "%");
      wipe.setAttribute("aria-valuetext", wipe.value + " % dense, " + (100 - wipe.value) + " % sparse");
    }
    function view(name) {
      stage.classList.toggle("beside", name === "beside");
      wipe.hidden = name === "beside";
      views.querySelectorAll("button").forEach(function (b) {
        b.setAttribute("aria-pressed", String(b.getAttribute("data-view") === name));
      });
    }

    /* ---- time. The first video leads, the other follows; at the end both begin again together. */
    function tell() {
      seek.value = String(frame);
      seek.setAttribute("aria-valuetext", "frame " + (frame + 1) + " of " + frames);
      clock.textContent = (frame + 1) + " / " + frames;
      toggle.replaceChildren(icon(playing ? PAUSE : PLAY));
      toggle.setAttribute("aria-label", playing ? "Pause" : "Play");
    }
    function show(to) {
      frame = Math.max(0, Math.min(frames - 1, to));
      videos.forEach(function (v) { v.currentTime = (frame + 0.5) / fps; });
      tell();
    }
    function set_rate() { videos.forEach(function (v) { v.playbackRate = rate; }); }
    function start(v) {
      const promise = v.play();
      if (promise) promise.catch(function () { /* interrupted by a pause */ });
    }
    function play() {
      if (frame >= frames - 1) show(0);
      playing = true;
      set_rate();
      videos.forEach(start);
      tell();
      requestAnimationFrame(tick);
    }
    function pause() {
      if (!playing) return;
      playing = false;
      videos.forEach(function (v) { v.pause(); });
      set_rate();
      show(frame);
    }
    function tick() {
      if (!playing || gone) return;
      const time = sparse.currentTime;
      if (sparse.ended || time * fps >= frames - 0.05) {
        show(0);
        videos.forEach(start);
      } else {
        frame = Math.min(frames - 1, Math.floor(time * fps + 1e-3));
        if (dense) esa.beside(dense, time, fps, rate);
        tell();
      }
      requestAnimationFrame(tick);
    }

    function broken() {
      note.hidden = false;
      note.textContent = "This browser cannot play the file. It can still be downloaded.";
    }
    async function load() {
      try {
        const base = "/v1/videos/" + job.id + "/content";
        for (const v of videos) {
          const url = await esa.api.media(base + (v === dense ? "?variant=dense" : ""));
          if (gone) return esa.api.release(url);
          urls.push(url);
          v.addEventListener("error", broken);
          v.src = url;
        }
        await Promise.all(videos.map(function (v) {
          return v.readyState >= 2 ? null : new Promise(function (done) { v.addEventListener("loadeddata", done, { once: true }); });
        }));
        if (!gone && !calm.matches) play();
      } catch (error) {
        note.hidden = false;
        note.textContent = error.message;
      }
    }
    tell();
    load();
    return {
      node: esa.el("div", { class: "player" }, [stage, controls]),
      done: function () {
        gone = true;
        pause();
        videos.forEach(function (v) { v.removeEventListener("error", broken); v.removeAttribute("src"); v.load(); });
        urls.forEach(esa.api.release);
      }
    };
  }
  return { make: make };
})();
