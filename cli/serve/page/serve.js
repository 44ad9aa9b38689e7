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
  /* A second video of this tab waits under the first; another person's video makes room at once. */
  const own = (function () {
    const name = "esa-serve-own";
    let ids = [];
    try { ids = JSON.parse(sessionStorage.getItem(name) || "[]"); } catch (e) { /* no storage: known as long as the page lives */ }
    return {
      has: function (id) { return ids.indexOf(id) >= 0; },
      add: function (id) {
        ids = ids.concat(id).slice(-100);
        try { sessionStorage.setItem(name, JSON.stringify(ids)); } catch (e) { /* as above */ }
      }
    };
  })();
  esa.on.created.push(function (job) {
    const keep = esa.job.busy() && own.has(esa.job.current().id);
    own.add(job.id);
    if (keep) esa.say("Added to the queue. " + esa.job.label(job));
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
