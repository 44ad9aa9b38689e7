/* masks.js - the masks of mask files, decoded from their bits, one picture at a time: layer, step group, head. A cell of a file is
 * (branch, layer, step group); bit j % 8 of byte j / 8 of a row says whether key block j is kept.
 * SPDX-License-Identifier: Apache-2.0 */
"use strict";

esa.bytes = function (base64) {
  var text = atob(base64), bytes = new Uint8Array(text.length);
  for (var i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
};

esa.viewer = (function () {
  var box = esa.byId("masks");
  if (!box || !esa.data.masks.length) return null;
  var state = { file: 0, budget: 0, branch: 0, layer: 0, group: 0, head: 0 };
  var canvas = esa.byId("mask-canvas"), readout = esa.byId("mask-readout"), thumbs = esa.byId("mask-thumbs"), facts = esa.byId("mask-facts"), listeners = [], timer = 0;
  esa.data.masks.forEach(function (file) {
    file.budgets.forEach(function (b) { b.row_bytes = Math.ceil(file.nk / 8); b.bytes = null; });
  });
  /* Of the budgets the one in the middle is shown first. */
  state.budget = Math.floor((esa.data.masks[0].budgets.length - 1) / 2);
  function file() { return esa.data.masks[state.file]; }
  function budget() { return file().budgets[state.budget]; }
  /* Where the bits of the head's mask begin; the picture axes are those of which bits are in the page. */
  function bits() {
    var b = budget();
    if (!b.bytes) b.bytes = esa.bytes(b.bits);
    return b.bytes;
  }
  function offset(head) {
    var f = file(), b = budget();
    return (((state.branch * f.shown_layers.length + state.layer) * f.shown_groups.length + state.group) * f.heads + head) * f.nq * b.row_bytes;
  }
  function paint(target, head, width, lines) {
    var f = file(), data = bits(), base = offset(head), row_bytes = budget().row_bytes;
    var small = esa.el("canvas", { width: f.nk, height: f.nq }), ctx = small.getContext("2d"), image = ctx.createImageData(f.nk, f.nq);
    var kept = esa.colour("--kept").match(/[0-9a-f]{2}/gi).map(function (h) { return parseInt(h, 16); });
    var none = esa.colour("--skipped").match(/[0-9a-f]{2}/gi).map(function (h) { return parseInt(h, 16); });
    for (var i = 0, at = 0; i < f.nq; i++)
      for (var j = 0; j < f.nk; j++, at += 4) {
        var colour = data[base + i * row_bytes + (j >> 3)] >> (j & 7) & 1 ? kept : none;
        image.data[at] = colour[0]; image.data[at + 1] = colour[1]; image.data[at + 2] = colour[2]; image.data[at + 3] = 255;
      }
    ctx.putImageData(image, 0, 0);
    target.width = width;
    target.height = Math.max(1, Math.round(width * f.tokens_q / f.tokens_k));
    var out = target.getContext("2d");
    out.imageSmoothingEnabled = false;
    /* The last block may be shorter than the others: the picture is drawn in tokens. */
    var wide = f.nk * f.block_k / f.tokens_k * target.width, high = f.nq * f.block_q / f.tokens_q * target.height;
    out.drawImage(small, 0, 0, wide, high);
    if (!lines || !f.frames_lie_together) return;
    out.strokeStyle = esa.colour("--frame-line");
    out.lineWidth = Math.max(1, width / 600);
    out.beginPath();
    for (var t = 0; t <= f.grid[0]; t++) {
      var token = f.text_front + t * f.grid[1] * f.grid[2], x = token / f.tokens_k * target.width, y = token / f.tokens_q * target.height;
      if (token > 0 && token < f.tokens_k) { out.moveTo(x, 0); out.lineTo(x, target.height); }
      if (token > 0 && token < f.tokens_q) { out.moveTo(0, y); out.lineTo(target.width, y); }
    }
    out.stroke();
  }
  function steps_of(f, group) { var s = f.group_steps[group]; return s[0] === s[1] ? "step " + (s[0] + 1) : "steps " + (s[0] + 1) + "–" + (s[1] + 1); }
  function number(table) {
    var f = file(), layer = f.layers.indexOf(f.shown_layers[state.layer]), group = f.groups.indexOf(f.shown_groups[state.group]);
    return table ? table[state.branch][layer][group] : null;
  }
  function slider(id, count, value, text) {
    var input = esa.byId(id);
    input.max = String(count - 1);
    input.value = String(value);
    input.setAttribute("aria-valuetext", text);
    esa.byId(id + "-text").textContent = text;
    input.disabled = count < 2;
    input.parentNode.querySelectorAll("button").forEach(function (b) { b.disabled = count < 2; });
  }
  function show() {
    var f = file(), density = number(budget().density), entropy = number(f.entropy), mass = number(budget().mass);
    slider("mask-layer", f.shown_layers.length, state.layer, "layer " + f.shown_layers[state.layer]);
    slider("mask-group", f.shown_groups.length, state.group, steps_of(f, f.shown_groups[state.group]));
    slider("mask-head", f.heads, state.head, "head " + state.head);
    var text = "Mask of layer " + f.shown_layers[state.layer] + ", " + steps_of(f, f.shown_groups[state.group]) + ", head " + state.head + ", budget " + budget().budget +
      (density ? ": " + (100 * density[state.head]).toFixed(0) + " % of the blocks kept" : "");
    canvas.setAttribute("aria-label", text);
    paint(canvas, state.head, Math.min(1400, Math.max(f.nk, Math.ceil(600 / f.nk) * f.nk)), true);
    facts.replaceChildren();
    [["density", density && density[state.head]], ["entropy", entropy && entropy[state.head]], ["kept attention mass", mass && mass[state.head]]].forEach(function (fact) {
      if (esa.known(fact[1])) facts.append(esa.el("dt", {}, fact[0]), esa.el("dd", {}, fact[1].toFixed(3)));
    });
    if (thumbs.children.length !== f.heads || thumbs.getAttribute("data-file") !== String(state.file)) {
      thumbs.setAttribute("data-file", String(state.file));
      thumbs.replaceChildren.apply(thumbs, Array.from({ length: f.heads }, function (_, h) {
        return esa.el("button", { "aria-label": "head " + h, click: function () { go({ head: h }); } }, [esa.el("canvas", { "aria-hidden": "true" }), esa.el("span", {}, String(h))]);
      }));
    }
    Array.from(thumbs.children).forEach(function (button, h) {
      button.setAttribute("aria-pressed", String(h === state.head));
      paint(button.querySelector("canvas"), h, f.nk, false);
    });
    listeners.forEach(function (listener) { listener(); });
  }
  function go(change) {
    Object.assign(state, change);
    var f = file();
    state.budget = Math.min(state.budget, f.budgets.length - 1);
    state.branch = Math.min(state.branch, f.branches - 1);
    state.layer = (state.layer + f.shown_layers.length) % f.shown_layers.length;
    state.group = (state.group + f.shown_groups.length) % f.shown_groups.length;
    state.head = (state.head + f.heads) % f.heads;
    show();
  }
  function fill(menu, names, value) {
    menu.replaceChildren.apply(menu, names.map(function (name, i) { return esa.el("option", { value: i, selected: i === value }, name); }));
    menu.closest("label").classList.toggle("hidden", names.length < 2);
  }
  function menus() {
    var f = file();
    fill(esa.byId("mask-file"), esa.data.masks.map(function (m) { return m.name; }), state.file);
    fill(esa.byId("mask-budget"), f.budgets.map(function (b) { return String(b.budget); }), state.budget);
    fill(esa.byId("mask-branch"), Array.from({ length: f.branches }, function (_, b) { return String(b); }), state.branch);
    esa.byId("mask-note").textContent = f.note || "";
    esa.byId("mask-note").classList.toggle("hidden", !f.note);
    esa.byId("mask-about").textContent = f.about;
  }
  ["file", "budget", "branch"].forEach(function (what) {
    esa.byId("mask-" + what).addEventListener("change", function (event) {
      var change = {};
      change[what] = Number(event.target.value);
      go(change);
      menus();
    });
  });
  ["layer", "group", "head"].forEach(function (what) {
    function by(d) { var change = {}; change[what] = state[what] + d; go(change); }
    esa.byId("mask-" + what).addEventListener("input", function (event) { var change = {}; change[what] = Number(event.target.value); go(change); });
    var buttons = esa.byId("mask-" + what).parentNode.querySelectorAll("button");
    buttons[0].addEventListener("click", function () { by(-1); });
    buttons[1].addEventListener("click", function () { by(1); });
  });
  var film = esa.byId("mask-play");
  film.addEventListener("click", function () {
    if (timer) { clearInterval(timer); timer = 0; } else timer = setInterval(function () { go({ group: state.group + 1 }); }, 350);
    film.textContent = timer ? "Stop" : "Play through the steps";
    film.setAttribute("aria-pressed", String(!!timer));
  });
  canvas.addEventListener("click", function () { go({ head: state.head + 1 }); });
  canvas.addEventListener("keydown", function (event) {
    var change = { ArrowRight: { head: state.head + 1 }, ArrowLeft: { head: state.head - 1 }, ArrowDown: { layer: state.layer + 1 }, ArrowUp: { layer: state.layer - 1 },
      PageDown: { group: state.group + 1 }, PageUp: { group: state.group - 1 } }[event.key];
    if (!change) return;
    event.preventDefault();
    go(change);
  });
  function place(token, f) {
    if (!f.frames_lie_together || token < f.text_front) return "";
    var frame = Math.floor((token - f.text_front) / (f.grid[1] * f.grid[2]));
    return frame < f.grid[0] ? ", latent frame " + frame : "";
  }
  canvas.addEventListener("pointermove", function (event) {
    var f = file(), frame = canvas.getBoundingClientRect();
    var j = Math.floor((event.clientX - frame.left) / frame.width * f.tokens_k / f.block_k), i = Math.floor((event.clientY - frame.top) / frame.height * f.tokens_q / f.block_q);
    if (i < 0 || j < 0 || i >= f.nq || j >= f.nk) return;
    var kept = bits()[offset(state.head) + i * budget().row_bytes + (j >> 3)] >> (j & 7) & 1;
    readout.textContent = "query block " + i + place(i * f.block_q, f) + " × key block " + j + place(j * f.block_k, f) + ": " + (kept ? "kept" : "skipped");
  });
  canvas.addEventListener("pointerleave", function () { readout.textContent = " "; });
  esa.repaint.push(show);
  menus();
  show();
  return { state: state, go: go, file: file, listeners: listeners, layer_of: function (layer) { return file().shown_layers.indexOf(layer); } };
})();
