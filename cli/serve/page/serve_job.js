/* serve_job.js - the video in view: waiting, being made with previews, finished, failed or stopped.
 * SPDX-License-Identifier: Apache-2.0 */
"use strict";

esa.job = (function () {
  const $ = esa.byId, el = esa.el;
  const STAGES = [["load", "Load"], ["text", "Prompt"], ["denoise", "Steps"], ["decode", "Decode"], ["save", "Save"]];
  const WORDS = { queued: "waiting", in_progress: "running", completed: "finished", failed: "failed", deleted: "stopped" };
  let job = null, stream = null, view = null, player = null, told = -1, left = null;
  let previews = { shown: null, wanted: null, loading: false };

  function active(j) { return j.status === "queued" || j.status === "in_progress"; }
  function has(j, variant) { return ((j.esa || {}).variants || []).indexOf(variant) >= 0; }
  function ordinal(n) { return n + (n % 100 > 10 && n % 100 < 14 ? "th" : ["th", "st", "nd", "rd"][n % 10] || "th"); }
  function percent(x) { return esa.known(x) ? Math.round(100 * x) + " %" : "–"; }
  function time(x) {
    if (!esa.known(x)) return "";
    if (x >= 3600) return Math.floor(x / 3600) + " h " + Math.round(x % 3600 / 60) + " min";
    if (x >= 90) return Math.floor(x / 60) + " min " + Math.round(x % 60) + " s";
    return (x >= 10 || Number.isInteger(x) ? Math.round(x) : x.toFixed(1)) + " s";
  }
  function label(j) {
    const e = j.esa || {};
    if (j.status === "queued") return e.queue_position > 0 ? "waiting, " + ordinal(e.queue_position) + " in the queue" : "waiting";
    if (j.status === "in_progress") return (j.progress || 0) + " %";
    return WORDS[j.status] || j.status;
  }

  /* ---- previews: the newest is fetched as soon as the last one is there; the picture before stays until then */
  async function preview(url) {
    previews.wanted = url;
    if (previews.loading || !view || !view.stage) return;
    const mine = previews;
    mine.loading = true;
    while (mine.wanted && view && view.stage) {
      const next = mine.wanted, image = new Image();
      mine.wanted = null;
      try {
        image.src = await esa.api.media(next);
        image.alt = "Preview";
        await image.decode();
        if (mine !== previews || !view || !view.stage) break;
        const before = mine.shown;
        view.stage.prepend(image);
        view.stage.classList.add("has-picture");
        mine.shown = image;
        if (before) setTimeout(function () { esa.api.release(before.src); before.remove(); }, 250);
      } catch (error) { /* the job went on, and the preview is gone: the next one comes */ }
    }
    mine.loading = false;
  }

  /* ---- parts of the view */
  function facts(j) {
    const e = j.esa || {}, d = j.duration_s, list = [["Model", j.model], ["Size", (j.size || "").replace("x", " × ")],
      ["Length", esa.known(d) ? esa.show(d, 1, " s") + ", " + j.num_frames + " frames" : j.seconds + " s"], ["Steps", e.steps],
      ["Seed", e.seed], ["Preset", e.preset || own_method(j)]];
    return el("dl", { class: "facts" }, list.filter(function (f) { return f[1] !== undefined && f[1] !== null && f[1] !== ""; })
      .map(function (f) { return el("div", null, [el("dt", null, f[0]), el("dd", null, String(f[1]))]); }));
  }
  function own_method(j) {
    const e = j.esa || {}, own = e.request && e.request.esa || e.settings || {};
    return own.method || null;
  }
  function tile(big, small, what) {
    return el("div", { class: "tile" }, [el("dt", null, what), el("dd", null, [el("b", null, big), small ? el("small", null, small) : null])]);
  }
  function tiles(j) {
    const e = j.esa || {}, c = e.compare, list = [];
    if (c) {
      list.push(tile(esa.show(c.speedup, 2, " ×"), time(c.sparse_seconds) + " instead of " + time(c.dense_seconds), "Speedup"));
      list.push(tile(esa.known(c.psnr) ? esa.show(c.psnr, 1, " dB") : "equal", "PSNR against dense", "Closeness"));
      list.push(tile(esa.show(c.ssim, 4), "SSIM against dense", "Structure"));
    } else list.push(tile(time(j.inference_time_s) || "–", "from start to file", "Time"));
    if (esa.known(e.work)) list.push(tile(percent(e.work), "of dense attention", "Work"));
    return el("dl", { class: "tiles" }, list);
  }
  async function download(variant) {
    const path = "/v1/videos/" + job.id + "/content" + (variant ? "?variant=" + variant : "");
    const name = (job.file_name || job.id + ".mp4").replace(/(\.\w+)$/, variant ? "-" + variant + "$1" : "$1");
    try {
      const url = await esa.api.media(path), link = el("a", { href: url, download: name });
      link.click();
      setTimeout(function () { esa.api.release(url); }, 10000);
    } catch (error) { esa.say(error.message); }
  }
  function button(text, act, kind) { return el("button", { type: "button", class: kind || null, click: act }, text); }

  async function remove(event) {
    const pressed = event.currentTarget, running = active(job);
    pressed.setAttribute("aria-disabled", "true");
    if (running) pressed.textContent = "Stopping …";
    try {
      await esa.api.call("DELETE", "/v1/videos/" + job.id);
    } catch (error) {
      if (!(error instanceof esa.api.Refusal) || error.status !== 404) {
        pressed.removeAttribute("aria-disabled");
        if (running) pressed.textContent = "Stop";
        return esa.say(error.message);
      }
    }
    if (running) update(Object.assign({}, job, { status: "deleted" }));
    else clear();
    esa.on.changed.forEach(function (f) { f(); });
    $("now").focus();
  }

  /* ---- the view of a job that waits or runs */
  function make_running(j) {
    const size = (j.size || "16x9").split("x").map(Number), v = { kind: "running" };
    v.stage = el("div", { class: "stage making" }, el("div", { class: "grain", "aria-hidden": "true" }));
    v.stage.style.setProperty("--ratio", String(size[0] / size[1]));
    v.bar = el("progress", { max: "100", "aria-label": "Progress" });
    v.percent = el("span", { class: "num" });
    v.line = el("p", { class: "line" });
    v.stages = STAGES.map(function (s) { return el("li", { "data-stage": s[0] }, s[1]); });
    v.stop = button("Stop", remove, "danger");
    v.node = el("div", { class: "running" }, [v.stage, el("div", { class: "bar-row" }, [v.bar, v.percent]),
      el("div", { class: "line-row" }, [v.line, v.stop]), el("ol", { class: "stages", "aria-label": "Parts of the work" }, v.stages)]);
    previews = { shown: null, wanted: null, loading: false };
    return v;
  }
  function stage_words(e) {
    if (e.stage === "denoise") return (e.passes > 1 && e.pass === 0 ? "Dense video, step " : "Step ") + (e.step || 0) + " of " + e.steps;
    if (e.stage === "load") return "Loading the model";
    if (e.stage === "text") return "Reading the prompt";
    if (e.stage === "decode") return "Decoding the frames";
    if (e.stage === "save") return "Writing the file";
    return e.stage ? "Working (" + e.stage + ")" : "Starting";
  }
  function tell_running(j) {
    const e = j.esa || {}, waiting = j.status === "queued", parts = [];
    if (waiting) parts.push(label(j)[0].toUpperCase() + label(j).slice(1));
    else {
      parts.push(stage_words(e));
      if (left) {
        const now = Math.max(0, left.seconds - (performance.now() - left.at) / 1000);
        parts.push(now < 1 ? "almost done" : "about " + time(Math.round(now)) + " left");
      }
      if (esa.known(e.density) && e.density < 1) parts.push(percent(e.density) + " of the blocks");
    }
    view.line.textContent = parts.join(" · ");
    if (waiting) view.bar.removeAttribute("value");
    else view.bar.value = j.progress || 0;
    view.percent.textContent = waiting ? "" : (j.progress || 0) + " %";
    const at = STAGES.findIndex(function (s) { return s[0] === e.stage; });
    view.stages.forEach(function (item, i) {
      item.className = i < at ? "past" : "";
      if (i === at) item.setAttribute("aria-current", "step");
      else item.removeAttribute("aria-current");
    });
    document.title = (waiting ? "waiting" : (j.progress || 0) + " %") + " · esa serve";
    const quarter = Math.floor((j.progress || 0) / 25);
    if (!waiting && quarter > told && quarter < 4) {
      if (quarter > 0) esa.say(j.progress + " percent. " + view.line.textContent);
      told = quarter;
    }
  }

  /* ---- the view of a job that has ended */
  function make_ended(j) {
    const v = { kind: j.status }, e = j.esa || {}, again = button("Use these settings again", function () { esa.form.again(job); });
    if (j.status === "completed") {
      player = esa.player.make(j);
      const both = has(j, "dense");
      const links = both ? [button("Download sparse", function () { download(""); }, "main"), button("Download dense", function () { download("dense"); })]
        : [button("Download", function () { download(""); }, "main")];
      v.node = el("div", null, [player.node, tiles(j), facts(j),
        el("div", { class: "actions" }, links.concat(again, button("Delete", remove, "danger quiet")))]);
    } else {
      const failed = j.status === "failed", step = e.step > 0 ? " at step " + e.step + " of " + e.steps : "";
      const text = failed ? j.error && j.error.message || "The run failed." : "Stopped" + step + ". Nothing was kept.";
      v.node = el("div", null, [el("p", { class: failed ? "note failed" : "note" }, text), facts(j),
        el("div", { class: "actions" }, [again].concat(failed ? button("Delete", remove, "danger quiet") : []))]);
    }
    document.title = WORDS[j.status] + " · esa serve";
    return v;
  }

  function draw() {
    const kind = active(job) ? "running" : job.status, fresh = !view || view.kind !== kind || view.id !== job.id;
    if (fresh) {
      const focus = $("job").contains(document.activeElement);
      if (player) player.done();
      player = null;
      view = kind === "running" ? make_running(job) : make_ended(job);
      view.id = job.id;
      view.chip = el("span", { class: "chip" });
      $("job").replaceChildren(el("div", { class: "job-head" }, [el("h2", null, job.prompt), view.chip]), view.node);
      $("empty").hidden = true;
      $("job").hidden = false;
      if (focus) $("now").focus();
    }
    view.chip.textContent = job.status === "queued" ? label(job) : WORDS[job.status] || job.status;
    view.chip.setAttribute("data-status", job.status);
    if (kind === "running") tell_running(job);
  }
  /* A newer state of the job in view. */
  function update(newer) {
    const before = job;
    job = newer;
    const seconds = (job.esa || {}).seconds_left;
    if (!left || left.seconds !== seconds) left = esa.known(seconds) ? { seconds: seconds, at: performance.now() } : null;
    draw();
    if (before && before.id === job.id && before.status !== job.status) {
      esa.say("The video is " + WORDS[job.status] + ". " + (job.error ? job.error.message : ""));
      esa.on.changed.forEach(function (f) { f(); });
    }
  }

  /* ---- events of the job in view. A stream that breaks is opened again; polling is not needed, its first event is the job. */
  async function watch(id) {
    const control = new AbortController();
    stream = control;
    for (let wait = 500; !control.signal.aborted && job && job.id === id && active(job); wait = Math.min(5000, 2 * wait)) {
      try {
        await esa.api.events("/v1/videos/" + id + "/events", function (name, data) {
          if (control.signal.aborted || !job || job.id !== id) return;
          wait = 500;
          if (name === "job") update(data);
          else if (name === "progress") {
            update(Object.assign({}, job, { status: "in_progress", progress: data.progress, esa: Object.assign({}, job.esa, data) }));
          } else if (name === "preview") preview(data.url);
        }, control.signal);
      } catch (error) {
        if (error instanceof esa.api.Refusal && error.status === 404 && job && job.id === id && active(job))
          return update(Object.assign({}, job, { status: "deleted" }));
      }
      if (!control.signal.aborted && job && job.id === id && active(job)) await new Promise(function (done) { setTimeout(done, wait); });
    }
  }
  setInterval(function () { if (view && view.kind === "running") tell_running(job); }, 1000);

  function show(j) {
    if (stream) stream.abort();
    told = -1;
    left = null;
    job = null;
    update(j);
    history.replaceState(null, "", "#" + j.id);
    esa.on.shown.forEach(function (f) { f(); });
    if (!active(j)) return;
    if (j.status === "in_progress" && has(j, "preview")) preview("/v1/videos/" + j.id + "/content?variant=preview");
    watch(j.id);
  }
  function clear() {
    if (stream) stream.abort();
    if (player) player.done();
    job = view = player = null;
    $("job").hidden = true;
    $("job").replaceChildren();
    $("empty").hidden = false;
    document.title = "esa serve";
    history.replaceState(null, "", "/");
    esa.on.shown.forEach(function (f) { f(); });
  }
  return {
    show: show, has: has, label: label, active: active, time: time, percent: percent,
    current: function () { return job; },
    busy: function () { return Boolean(job && active(job)); }
  };
})();
