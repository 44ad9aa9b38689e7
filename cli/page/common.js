/* common.js - what the pages of the command share: elements, numbers, colours, the theme switch.
 * SPDX-License-Identifier: Apache-2.0 */
"use strict";
var esa = {};

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
/* Keeps a video beside another that plays and stands at time: it runs a little faster or slower, and jumps when it is more than a frame
 * and a half away. */
esa.beside = function (video, time, fps, rate) {
  var off = (video.currentTime - time) * fps;
  if (Math.abs(off) > 1.5 && !video.seeking) video.currentTime = time;
  else video.playbackRate = rate * (off > 0.25 ? 0.94 : off < -0.25 ? 1.06 : 1);
};

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
