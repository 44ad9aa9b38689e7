/* core.js - what the parts of the page share: the data, elements, numbers, colours, the theme switch, the tool tip.
 * SPDX-License-Identifier: Apache-2.0 */
"use strict";
var esa = {};

esa.data = JSON.parse(document.getElementById("esa-data").textContent);
esa.byId = function (id) { return document.getElementById(id); };

/* An element: attributes, then children (nodes, text, or lists of them; null is left out). Functions become listeners. */
esa.make = function (namespace, tag, attributes, children) {
  var node = namespace ? document.createElementNS(namespace, tag) : document.createElement(tag);
  Object.keys(attributes || {}).forEach(function (key) {
    var value = attributes[key];
    if (value === null || value === undefined || value === false) return;
    if (typeof value === "function") node.addEventListener(key, value);
    else if (key === "style") node.style.cssText = value;
    else node.setAttribute(key, value === true ? "" : value);
  });
  [].concat(children === undefined ? [] : children).forEach(function (child) {
    if (child !== null && child !== undefined) node.append(child);
  });
  return node;
};
esa.el = function (tag, attributes, children) { return esa.make(null, tag, attributes, children); };
esa.svg = function (tag, attributes, children) { return esa.make("http://www.w3.org/2000/svg", tag, attributes, children); };

esa.known = function (x) { return typeof x === "number" && isFinite(x); };
/* A number for people, or a dash. */
esa.show = function (x, digits, unit) { return esa.known(x) ? x.toFixed(digits) + (unit || "") : "–"; };
/* Seconds with three figures. */
esa.seconds = function (x) { return !esa.known(x) ? "–" : x >= 100 ? x.toFixed(0) + " s" : x >= 10 ? x.toFixed(1) + " s" : x >= 1 ? x.toFixed(2) + " s" : (1000 * x).toFixed(x >= 0.1 ? 0 : 1) + " ms"; };
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

/* The colour a CSS variable stands for now, for canvases. */
esa.colour = function (name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); };

/* ---- theme: what the system says, or what was chosen here. repaint is called after every change. */
esa.repaint = [];
(function () {
  var system = window.matchMedia ? window.matchMedia("(prefers-color-scheme: dark)") : { matches: false };
  var choice = "auto";
  try { choice = localStorage.getItem("esa-theme") || "auto"; } catch (e) { /* no storage for files in some browsers: then it is not remembered */ }
  function apply() {
    var dark = choice === "dark" || (choice === "auto" && system.matches);
    document.documentElement.setAttribute("data-theme", dark ? "dark" : "light");
    document.querySelectorAll(".theme button").forEach(function (button) {
      button.setAttribute("aria-pressed", String(button.getAttribute("data-theme-choice") === choice));
    });
    esa.repaint.forEach(function (paint) { paint(); });
  }
  document.querySelectorAll(".theme button").forEach(function (button) {
    button.addEventListener("click", function () {
      choice = button.getAttribute("data-theme-choice");
      try { localStorage.setItem("esa-theme", choice); } catch (e) { /* as above */ }
      apply();
    });
  });
  if (system.addEventListener) system.addEventListener("change", apply);
  document.documentElement.classList.add("js");
  apply();
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
