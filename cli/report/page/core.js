/* core.js - what the parts of the report share: the data, variants, the tool tip.
 * SPDX-License-Identifier: Apache-2.0 */
"use strict";

esa.data = JSON.parse(document.getElementById("esa-data").textContent);

/* PSNR: equal videos have no finite one, and are marked as such. */
esa.decibel = function (v) { return v && v.identical ? "equal" : esa.show(v ? v.psnr : null, 2, " dB"); };

/* ---- variants: one way of running one experiment. Dense is grey everywhere; the others keep their colour through the page. */
esa.variants = [];
esa.data.runs.forEach(function (run, r) {
  run.variants.forEach(function (variant) {
    variant.run = run;
    variant.name = (esa.data.runs.length > 1 ? run.tag + " · " : "") + variant.label;
    esa.variants.push(variant);
  });
  run.index = r;
});
(function () {
  var next = 0;
  esa.variants.forEach(function (variant) {
    variant.tone = variant.dense ? "var(--dense)" : "var(--s" + next % 8 + ")";
    variant.dash = variant.dense ? "" : ["", "6 3", "2 3"][Math.floor(next / 8) % 3];
    if (!variant.dense) next++;
  });
})();

/* ---- one tool tip for the whole page */
esa.tip = (function () {
  var box = esa.el("div", { class: "tip hidden", role: "status" });
  document.body.append(box);
  function hide() { box.classList.add("hidden"); }
  window.addEventListener("scroll", hide, { passive: true });
  return {
    show: function (text, x, y) {
      box.textContent = text;
      box.classList.remove("hidden");
      var w = box.offsetWidth, h = box.offsetHeight;
      box.style.left = Math.max(8, Math.min(x + 14, window.innerWidth - w - 8)) + "px";
      box.style.top = (y - h - 12 < 8 ? y + 16 : y - h - 12) + "px";
    },
    hide: hide
  };
})();

/* Draws now and whenever the width of box changes. */
esa.fit = function (box, draw) {
  var last = 0;
  function again() {
    var width = Math.floor(box.clientWidth);
    if (width > 0 && width !== last) { last = width; draw(width); }
  }
  if (window.ResizeObserver) new ResizeObserver(again).observe(box);
  else window.addEventListener("resize", again);
  again();
};

/* ---- the files behind the page are written out when somebody looks */
document.querySelectorAll("details[data-file]").forEach(function (box) {
  box.addEventListener("toggle", function () {
    var pre = box.querySelector("pre");
    if (box.open && !pre.textContent) pre.textContent = esa.data.runs[box.getAttribute("data-run")].files[box.getAttribute("data-file")];
  });
});

/* ---- the bar at the top says where one is */
(function () {
  var links = document.querySelectorAll(".bar nav a");
  if (!window.IntersectionObserver) return;
  var seen = new IntersectionObserver(function (entries) {
    entries.forEach(function (entry) {
      if (!entry.isIntersecting) return;
      links.forEach(function (link) {
        if (link.getAttribute("href") === "#" + entry.target.id) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      });
    });
  }, { rootMargin: "-20% 0px -70% 0px" });
  document.querySelectorAll("main section[id]").forEach(function (section) { seen.observe(section); });
})();
