/* heads.js - density and entropy per layer and head as heat maps: from the budgets of mask files, and as measured while running.
 * SPDX-License-Identifier: Apache-2.0 */
"use strict";

/* Colour of x in 0 .. 1 between the four of the ramp. */
esa.ramp = function () {
  var stops = [0, 1, 2, 3].map(function (i) { return esa.colour("--ramp" + i).match(/[0-9a-f]{2}/gi).map(function (h) { return parseInt(h, 16); }); });
  return function (x) {
    var at = Math.max(0, Math.min(1, x)) * 3, i = Math.min(2, Math.floor(at)), f = at - i;
    return "rgb(" + stops[i].map(function (c, k) { return Math.round(c + f * (stops[i + 1][k] - c)); }).join(",") + ")";
  };
};

esa.mean = function (list) {
  var good = list.filter(esa.known);
  return good.length ? good.reduce(function (a, b) { return a + b; }, 0) / good.length : null;
};

/* The round tenths around all values, so that small differences have colours too. */
esa.tenths = function (rows) {
  var all = [].concat.apply([], rows.map(function (r) { return r.values || []; })).filter(esa.known);
  if (!all.length) return [0, 1];
  var lo = Math.floor(Math.min.apply(null, all) * 10 + 1e-6) / 10, hi = Math.ceil(Math.max.apply(null, all) * 10 - 1e-6) / 10;
  return hi > lo ? [lo, hi] : [Math.max(0, lo - 0.1), lo + 0.1];
};

/* rows: [{ label, values: [..] or null }]; pick(row, column) is called for clicks; chosen() says which cell is marked; the first and last
 * child of scale say what the ends of the colours mean (ends: words behind the numbers). */
esa.heat = function (box, options) {
  function draw(width) {
    var rows = options.rows(), columns = Math.max.apply(null, rows.map(function (r) { return r.values ? r.values.length : 0; }));
    if (!(columns > 0)) { box.replaceChildren(esa.el("p", { class: "soft small" }, "Not known.")); return; }
    var left = 34, top = 20, size = Math.max(5, Math.min(110, (width - left) / columns)), height = Math.max(9, Math.min(24, size));
    var ramp = esa.ramp(), chosen = options.chosen(), range = esa.tenths(rows);
    options.scale.firstElementChild.textContent = range[0].toFixed(1) + options.ends[0];
    options.scale.lastElementChild.textContent = range[1].toFixed(1) + options.ends[1];
    var svg = esa.svg("svg", { viewBox: "0 0 " + width + " " + (top + rows.length * height + 2), role: "img", "aria-label": options.label });
    var every = Math.ceil(22 / size);
    for (var c = 0; c < columns; c += every) svg.append(esa.svg("text", { x: left + (c + 0.5) * size, y: top - 6, "text-anchor": "middle" }, String(c)));
    var skip = Math.ceil(12 / height);
    rows.forEach(function (row, r) {
      if (r % skip === 0) svg.append(esa.svg("text", { x: left - 6, y: top + (r + 0.5) * height + 4, "text-anchor": "end" }, row.label));
      for (var h = 0; h < columns; h++) {
        var value = row.values ? row.values[h] : null, known = esa.known(value);
        svg.append(esa.svg("rect", { class: known ? "cell" + (chosen && chosen[0] === row.label && chosen[1] === h ? " chosen" : "") : "none", x: left + h * size + 0.75, y: top + r * height + 0.75,
          width: size - 1.5, height: height - 1.5, rx: 1.5, style: known ? "fill:" + ramp((value - range[0]) / (range[1] - range[0])) : null, "data-row": r, "data-column": h }));
      }
    });
    function cell(event) {
      var rect = event.target.closest ? event.target.closest("rect") : null;
      return rect && svg.contains(rect) ? [Number(rect.getAttribute("data-row")), Number(rect.getAttribute("data-column"))] : null;
    }
    svg.addEventListener("pointermove", function (event) {
      var at = cell(event);
      if (!at) { esa.tip.hide(); return; }
      var row = rows[at[0]], value = row.values ? row.values[at[1]] : null;
      esa.tip.show("layer " + row.label + ", head " + at[1] + "\n" + (esa.known(value) ? options.name + " " + value.toFixed(3) : "runs dense: not in the file"), event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", esa.tip.hide);
    svg.addEventListener("click", function (event) { var at = cell(event); if (at && options.pick) options.pick(Number(rows[at[0]].label), at[1]); });
    box.replaceChildren(svg);
  }
  var width = 0;
  box.classList.add("heat");
  esa.fit(box, function (w) { width = w; draw(w); });
  function again() { if (width) draw(width); }
  esa.repaint.push(again);
  return again;
};

/* ---- density and entropy, layer x head */
(function () {
  var box = esa.byId("heads");
  if (!box) return;
  var sources = [], menu = esa.byId("head-source"), steps = esa.byId("head-steps");
  esa.data.masks.forEach(function (file, m) {
    file.budgets.forEach(function (b, i) { sources.push({ name: "mask file " + file.name + ", budget " + b.budget, file: file, m: m, budget: i }); });
  });
  esa.variants.forEach(function (v) { if (v.head_density && v.head_density.length) sources.push({ name: "as run: " + v.name, run: v }); });
  if (!sources.length) return;
  sources.forEach(function (s, i) { menu.append(esa.el("option", { value: i }, s.name)); });
  var now = sources.find(function (s) { return s.m === 0 && esa.viewer && s.budget === esa.viewer.state.budget; }) || sources[0], group = -1;
  menu.value = String(sources.indexOf(now));
  function rows(table, layers, all) {
    var list = [];
    for (var layer = 0; layer < all; layer++) {
      var at = layers.indexOf(layer);
      list.push({ label: String(layer), values: at < 0 ? null : table[at] });
    }
    return list;
  }
  function table(of) {         /* [layer][head] of branch 0 and the chosen steps */
    return of[0].map(function (groups) {
      return group >= 0 ? groups[group] : groups[0].map(function (_, h) { return esa.mean(groups.map(function (g) { return g[h]; })); });
    });
  }
  function density() {
    if (now.run) return now.run.head_density.map(function (values, layer) { return { label: String(layer), values: values }; });
    return rows(table(now.file.budgets[now.budget].density), now.file.layers, now.file.layer_count);
  }
  function entropy() { return now.file && now.file.entropy ? rows(table(now.file.entropy), now.file.layers, now.file.layer_count) : []; }
  function fill_steps() {
    var file = now.file;
    steps.closest("label").classList.toggle("hidden", !file || file.groups.length < 2);
    steps.replaceChildren(esa.el("option", { value: -1 }, "mean over steps"));
    (file ? file.groups : []).forEach(function (g, i) {
      var s = file.group_steps[g];
      steps.append(esa.el("option", { value: i }, s[0] === s[1] ? "step " + (s[0] + 1) : "steps " + (s[0] + 1) + "–" + (s[1] + 1)));
    });
    group = -1;
    esa.byId("entropy-cell").classList.toggle("hidden", !(file && file.entropy));
  }
  function chosen() {
    var viewer = esa.viewer;
    return viewer && now.file && viewer.state.file === now.m ? [String(now.file.shown_layers[viewer.state.layer]), viewer.state.head] : null;
  }
  function pick(layer, head) {
    if (!esa.viewer || !now.file) return;
    var change = { file: now.m, budget: now.budget, head: head }, at = now.file.shown_layers.indexOf(layer);
    if (at >= 0) change.layer = at;
    esa.viewer.go(change);
  }
  fill_steps();
  var again = [
    esa.heat(esa.byId("density-heat"), { label: "Density per layer (rows) and head (columns)", name: "density", scale: esa.byId("density-scale"), ends: ["", ""], rows: density, chosen: chosen, pick: pick }),
    esa.heat(esa.byId("entropy-heat"), { label: "Entropy per layer (rows) and head (columns)", name: "entropy", scale: esa.byId("entropy-scale"), ends: [" focused", " everywhere"], rows: entropy, chosen: chosen, pick: pick })
  ];
  function redraw() { again.forEach(function (draw) { draw(); }); }
  menu.addEventListener("change", function () { now = sources[Number(menu.value)]; fill_steps(); redraw(); });
  steps.addEventListener("change", function () { group = Number(steps.value); redraw(); });
  if (esa.viewer) esa.viewer.listeners.push(redraw);
})();
