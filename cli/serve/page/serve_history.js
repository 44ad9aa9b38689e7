/* serve_history.js - the videos of this server, newest first and a page at a time, and the queue under the video in view.
 * SPDX-License-Identifier: Apache-2.0 */
"use strict";

esa.history = (function () {
  const $ = esa.byId, el = esa.el, PAGE = 12;
  const cards = new Map();                        /* id -> its card */
  let jobs = [], more = false, timer = 0, loading = false;

  function ago(seconds) {
    const past = Math.max(0, Date.now() / 1000 - seconds);
    if (past < 60) return "just now";
    if (past < 3600) return Math.floor(past / 60) + " min ago";
    if (past < 86400) return Math.floor(past / 3600) + " h ago";
    return new Date(seconds * 1000).toLocaleDateString();
  }

  /* ---- pictures: fetched when they come into sight. A video without a preview shows a frame of its own. */
  const seen = new IntersectionObserver(function (entries) {
    entries.forEach(function (entry) {
      if (!entry.isIntersecting) return;
      seen.unobserve(entry.target);
      picture(entry.target);
    });
  }, { rootMargin: "200px" });
  async function picture(box) {
    const path = "/v1/videos/" + box.getAttribute("data-id") + "/content";
    try {
      if (!box.hasAttribute("data-preview")) throw new Error("no preview");
      const url = await esa.api.media(path + "?variant=preview"), image = el("img", { alt: "", src: url });
      await image.decode();
      box.replaceChildren(image);
    } catch (error) {
      try {
        const video = el("video", { preload: "metadata", playsinline: true, tabindex: "-1", src: await esa.api.media(path) + "#t=0.5" });
        video.muted = true;
        box.replaceChildren(video);
      } catch (e) { /* nothing to show: the tile stays grey */ }
    }
  }

  function make(job) {
    const card = { box: el("div", { class: "thumb", "data-id": job.id, "aria-hidden": "true" }), chip: el("span", { class: "chip" }),
      meta: el("span", { class: "meta" }), pictured: false };
    const size = (job.size || "16x9").split("x").map(Number);
    card.box.style.setProperty("--ratio", String(size[0] / size[1]));
    card.button = el("button", { type: "button", class: "tile-button", click: function () { open(job.id); } },
      [card.box, el("span", { class: "prompt" }, job.prompt), el("span", { class: "under" }, [card.meta, card.chip])]);
    card.node = el("li", null, card.button);
    return card;
  }
  function tell(card, job) {
    const e = job.esa || {}, c = e.compare, done = job.status === "completed", current = esa.job.current();
    const parts = [];
    if (done && c) parts.push(esa.show(c.speedup, 2, " ×"), esa.show(c.psnr, 1, " dB"));
    else if (done && esa.known(job.inference_time_s)) parts.push(esa.job.time(job.inference_time_s));
    parts.push(ago(job.created_at));
    card.meta.textContent = parts.join(" · ");
    card.chip.textContent = done ? "" : job.status === "queued" ? "waiting" : esa.job.label(job);
    card.chip.setAttribute("data-status", job.status);
    card.chip.hidden = !card.chip.textContent;
    if (current && current.id === job.id) card.button.setAttribute("aria-current", "true");
    else card.button.removeAttribute("aria-current");
    if (done && !card.pictured) {
      card.pictured = true;
      if (esa.job.has(job, "preview")) card.box.setAttribute("data-preview", "");
      seen.observe(card.box);
    }
  }

  /* Cards stay the same elements from one answer to the next, so that focus and pictures stay. */
  function draw() {
    const keep = new Set(jobs.map(function (job) { return job.id; }));
    cards.forEach(function (card, id) {
      if (keep.has(id)) return;
      card.node.remove();
      cards.delete(id);
    });
    jobs.forEach(function (job, i) {
      if (!cards.has(job.id)) cards.set(job.id, make(job));
      const card = cards.get(job.id), at = $("cards").children[i];
      if (at !== card.node) $("cards").insertBefore(card.node, at || null);
      tell(card, job);
    });
    $("history-empty").hidden = jobs.length > 0;
    $("history-more").hidden = !more;
    $("history-count").textContent = jobs.length ? jobs.length + (more ? " shown" : "") : "";
    queue();
  }

  /* ---- others that wait or run, under the one in view */
  function queue() {
    const current = esa.job.current();
    const rows = jobs.filter(function (job) { return esa.job.active(job) && (!current || job.id !== current.id); }).reverse();
    $("queue").hidden = rows.length === 0;
    const list = $("queue-list"), focus = document.activeElement && list.contains(document.activeElement) &&
      document.activeElement.getAttribute("data-key");
    list.replaceChildren(...rows.map(function (job) {
      return el("li", null, [el("span", { class: "prompt" }, job.prompt), el("span", { class: "chip", "data-status": job.status }, esa.job.label(job)),
        el("button", { type: "button", class: "quiet", "data-key": "show-" + job.id, "aria-label": "Show: " + job.prompt,
          click: function () { esa.job.show(job); } }, "Show"),
        el("button", { type: "button", class: "quiet danger", "data-key": "stop-" + job.id, "aria-label": "Stop: " + job.prompt,
          click: function () { stop(job.id); } }, "Stop")]);
    }));
    if (focus) {
      const again = list.querySelector("[data-key='" + focus + "']");
      if (again) again.focus();
    }
  }
  async function stop(id) {
    try {
      await esa.api.call("DELETE", "/v1/videos/" + id);
      esa.say("Stopped.");
    } catch (error) { esa.say(error.message); }
    refresh();
  }
  async function open(id) {
    try {
      esa.job.show(await esa.api.json("GET", "/v1/videos/" + id));
      esa.byId("now").scrollIntoView({ block: "nearest" });
      esa.byId("now").focus({ preventScroll: true });
    } catch (error) {
      esa.say(error.message);
      refresh();
    }
  }

  /* ---- the list: the newest page again and again, older pages once */
  async function refresh() {
    clearTimeout(timer);
    try {
      const answer = await esa.api.json("GET", "/v1/videos?order=desc&limit=" + PAGE);
      const new_ids = new Set(answer.data.map(function (job) { return job.id; }));
      const last = answer.data[answer.data.length - 1];
      const older = answer.has_more ? jobs.filter(function (job) {
        return !new_ids.has(job.id) && job.created_at <= last.created_at && !esa.job.active(job);
      }) : [];
      if (!older.length) more = answer.has_more;
      jobs = answer.data.concat(older);
      draw();
      const running = jobs.filter(function (j) { return j.status === "in_progress"; }).length;
      const waiting = jobs.filter(function (j) { return j.status === "queued"; }).length;
      esa.state(running ? "busy" : "ready", running || waiting ? [running ? running + " running" : "", waiting ? waiting + " waiting" : ""]
        .filter(Boolean).join(", ") : "ready");
    } catch (error) { /* offline: the bar says so */ }
    plan();
  }
  function plan() {
    clearTimeout(timer);
    if (document.hidden) return;
    timer = setTimeout(refresh, jobs.some(esa.job.active) ? 2000 : 10000);
  }
  async function older() {
    const last = jobs[jobs.length - 1];
    if (loading || !last) return;
    loading = true;
    try {
      const answer = await esa.api.json("GET", "/v1/videos?order=desc&limit=" + PAGE + "&after=" + last.id);
      const first = jobs.length;
      jobs = jobs.concat(answer.data);
      more = answer.has_more;
      draw();
      if (answer.data.length) cards.get(jobs[first].id).button.focus();
      esa.say(answer.data.length + " more videos.");
    } catch (error) { esa.say(error.message); }
    loading = false;
  }
  $("history-more").addEventListener("click", older);
  document.addEventListener("visibilitychange", function () { if (!document.hidden) refresh(); });

  return { refresh: refresh, draw: draw, jobs: function () { return jobs; } };
})();
