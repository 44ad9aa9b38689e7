/* serve.js - how the page begins: models, the last draft, and the video of the address or the one that runs.
 * SPDX-License-Identifier: Apache-2.0 */
"use strict";

(async function () {
  async function begin() {
    await esa.form.load();
    try { await esa.options.load(); } catch (error) { /* no description: the form without further options */ }
    esa.form.ready();
    await esa.history.refresh();
    const wanted = location.hash.slice(1), jobs = esa.history.jobs();
    const running = jobs.find(function (j) { return j.status === "in_progress"; }) || jobs.filter(esa.job.active).pop();
    if (/^video_gen_\w+$/.test(wanted)) {
      try { return esa.job.show(await esa.api.json("GET", "/v1/videos/" + wanted)); } catch (error) { /* gone: as without one */ }
    }
    if (running) esa.job.show(running);
    else if (wanted) history.replaceState(null, "", "/");
  }
  esa.on.created.push(function (job) {
    if (esa.job.busy()) esa.say("Added to the queue. " + esa.job.label(job));
    else {
      esa.job.show(job);
      const box = esa.byId("now").getBoundingClientRect();
      if (box.top > window.innerHeight - 200) esa.byId("now").scrollIntoView({ block: "start" });
      esa.say("Started. " + esa.job.label(job));
    }
    esa.history.refresh();
  });
  esa.on.changed.push(function () { esa.history.refresh(); esa.form.load().catch(function () { /* the bar says so */ }); });
  esa.on.shown.push(esa.history.draw);
  let begun = false;
  async function start() {
    try {
      await begin();
      begun = true;
      if (window.matchMedia("(hover: hover)").matches && !location.hash) esa.byId("prompt").focus({ preventScroll: true });
    } catch (error) { esa.state("off", "no answer"); }
  }
  esa.on.back.push(function () { begun ? esa.history.refresh() : start(); });
  window.addEventListener("hashchange", function () {
    const id = location.hash.slice(1), current = esa.job.current();
    if (!id || current && current.id === id) return;
    esa.api.json("GET", "/v1/videos/" + id).then(esa.job.show, function (error) { esa.say(error.message); });
  });
  start();
})();
