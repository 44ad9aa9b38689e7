/* charts.js - line charts and bars as SVG, and the charts of this page: quality against density and speed, time per step, where time goes.
 * SPDX-License-Identifier: Apache-2.0 */
"use strict";

/* Round numbers that cover lo .. hi in about n steps. */
esa.ticks = function (lo, hi, n) {
  var raw = (hi - lo) / Math.max(1, n), power = Math.pow(10, Math.floor(Math.log10(raw)));
  var step = [1, 2, 2.5, 5, 10].map(function (m) { return m * power; }).find(function (s) { return s >= raw * 0.999; });
  var first = Math.floor(lo / step + 1e-9), last = Math.ceil(hi / step - 1e-9), list = [];
  for (var i = first; i <= last; i++) list.push(i * step);
  return { step: step, list: list, digits: Math.max(0, Math.min(6, Math.ceil(-Math.log10(step) - 1e-9) + (String(step / power) === "2.5" ? 1 : 0))) };
};

/* options: label (for readers), x and y: { name, format, zero }, series: [{ name, tone, dash, points: [{ x, y, text }] }], height,
 * cross (a line that follows the pointer, with all values), band ({ from, to, text }: shaded in x), bare (no dots). */
esa.chart = function (box, options) {
  function draw(width) {
    var height = options.height || 220, left = 52, right = 14, top = 12, bottom = 40;
    var points = [].concat.apply([], options.series.map(function (s) { return s.points; }));
    var xs = points.map(function (p) { return p.x; }), ys = points.map(function (p) { return p.y; });
    var xlo = Math.min.apply(null, xs), xhi = Math.max.apply(null, xs), ylo = Math.min.apply(null, ys), yhi = Math.max.apply(null, ys);
    if (options.y.zero) ylo = 0;
    if (xhi - xlo < 1e-9) { xlo -= 0.05 * Math.max(1, Math.abs(xlo)); xhi += 0.05 * Math.max(1, Math.abs(xhi)); }
    if (yhi - ylo < 1e-9) { ylo -= 0.02 * Math.max(0.05, Math.abs(ylo)); yhi += 0.02 * Math.max(0.05, Math.abs(yhi)); }
    var tx = esa.ticks(xlo, xhi, Math.max(2, Math.min(6, (width - left) / 80))), ty = esa.ticks(ylo, yhi, 4);
    if (!options.x.tight) { xlo = tx.list[0]; xhi = tx.list[tx.list.length - 1]; }
    ylo = ty.list[0];
    yhi = ty.list[ty.list.length - 1];
    function px(x) { return left + (x - xlo) / (xhi - xlo) * (width - left - right); }
    function py(y) { return height - bottom - (y - ylo) / (yhi - ylo) * (height - top - bottom); }
    var svg = esa.svg("svg", { viewBox: "0 0 " + width + " " + height, role: "img", "aria-label": options.label });
    if (options.band && options.band.to > options.band.from) {
      var from = Math.max(px(options.band.from), left), to = Math.min(px(options.band.to), width - right);
      svg.append(esa.svg("rect", { class: "band", x: from, y: top, width: Math.max(0, to - from), height: height - top - bottom }));
      svg.append(esa.svg("text", { x: from + 5, y: height - bottom - 6, style: "font-size:11px" }, options.band.text));
    }
    ty.list.forEach(function (y) {
      svg.append(esa.svg("line", { class: "grid", x1: left, x2: width - right, y1: py(y), y2: py(y) }));
      svg.append(esa.svg("text", { x: left - 7, y: py(y) + 4, "text-anchor": "end" }, y.toFixed(ty.digits)));
    });
    tx.list.forEach(function (x) {
      if (x < xlo - 1e-9 || x > xhi + 1e-9) return;
      svg.append(esa.svg("text", { x: px(x), y: height - bottom + 17, "text-anchor": "middle" }, x.toFixed(tx.digits)));
    });
    svg.append(esa.svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    svg.append(esa.svg("text", { x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" }, options.x.name));
    options.series.forEach(function (s) {
      var path = s.points.map(function (p, i) { return (i ? "L" : "M") + px(p.x).toFixed(1) + " " + py(p.y).toFixed(1); }).join("");
      if (s.points.length > 1) svg.append(esa.svg("path", { class: "series", d: path, style: "stroke:" + s.tone, "stroke-dasharray": s.dash || null }));
      if (options.bare) return;
      s.points.forEach(function (p) {
        function tell(event) {
          var r = dot.getBoundingClientRect();
          esa.tip.show(p.text, event.clientX || r.left, event.clientY || r.top);
        }
        var dot = esa.svg("circle", { class: "dot", cx: px(p.x), cy: py(p.y), r: 5, style: "fill:" + (p.tone || s.tone), tabindex: 0, role: "img",
          "aria-label": p.text.replace(/\n/g, ", "), pointerenter: tell, pointerleave: esa.tip.hide, focus: tell, blur: esa.tip.hide });
        svg.append(dot);
      });
    });
    if (options.cross) esa.follow(svg, options, px, top, height - bottom, width);
    box.replaceChildren(svg);
  }
  box.classList.add("chart");
  esa.fit(box, draw);
};

/* A vertical line at the x nearest to the pointer, and the values of every series there. */
esa.follow = function (svg, options, px, top, bottom, width) {
  var line = esa.svg("line", { class: "cross hidden", y1: top, y2: bottom });
  var xs = Array.from(new Set([].concat.apply([], options.series.map(function (s) { return s.points.map(function (p) { return p.x; }); })))).sort(function (a, b) { return a - b; });
  svg.append(line);
  function move(event) {
    var frame = svg.getBoundingClientRect(), at = (event.clientX - frame.left) * width / frame.width;
    var x = xs.reduce(function (best, one) { return Math.abs(px(one) - at) < Math.abs(px(best) - at) ? one : best; }, xs[0]);
    line.setAttribute("x1", px(x));
    line.setAttribute("x2", px(x));
    line.classList.remove("hidden");
    esa.tip.show([options.x.name + " " + options.x.format(x)].concat(options.series.map(function (s) {
      var p = s.points.find(function (q) { return q.x === x; });
      return p ? s.name + ": " + options.y.format(p.y) : null;
    }).filter(Boolean)).join("\n"), event.clientX, event.clientY);
  }
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerleave", function () { line.classList.add("hidden"); esa.tip.hide(); });
};

esa.legend = function (entries) {
  return esa.el("ul", { class: "legend" }, entries.map(function (s) {
    return esa.el("li", {}, [esa.svg("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" },
      esa.svg("line", { x1: 0, x2: 22, y1: 4, y2: 4, style: "stroke:" + s.tone, "stroke-width": 3, "stroke-dasharray": s.dash || null })), s.name]);
  }));
};

/* ---- quality: one line per family (same run, same method and tail), one dot per variant */
(function () {
  var box = esa.byId("quality-charts");
  if (!box) return;
  var families = [], colour = 0;
  esa.variants.forEach(function (v) {
    if (v.dense) return;
    var key = v.run.tag + "\n" + v.family, family = families.find(function (f) { return f.key === key; });
    if (!family) families.push(family = { key: key, name: (esa.data.runs.length > 1 ? v.run.tag + " · " : "") + v.family, members: [], tone: "var(--s" + colour++ % 8 + ")" });
    family.members.push(v);
  });
  /* Several runs of one budget each, as experiments over budgets leave them, are one line. */
  var merged = [];
  families.forEach(function (f) {
    var v = f.members[0], same = f.members.length === 1 && merged.find(function (g) {
      return g.single && g.members[0].family === v.family && g.members[0].run.setting === v.run.setting &&
        g.members.every(function (m) { return Math.abs(m.density - v.density) > 1e-6; });
    });
    if (same) { same.members.push(v); same.name = v.family; } else { f.single = f.members.length === 1; merged.push(f); }
  });
  merged.forEach(function (f, i) { f.tone = "var(--s" + i % 8 + ")"; });
  var metrics = [["psnr", "PSNR, dB", 2], ["ssim", "SSIM", 4], ["lpips", "LPIPS (lower is better)", 4]];
  var measured = merged.some(function (f) { return f.members.some(function (v) { return esa.known(v.lpips); }); });
  if (!measured) {
    metrics.pop();
    box.classList.add("two");
    box.after(esa.el("p", { class: "hint" }, "LPIPS was not measured: it needs weights, and esa evaluate --help says how to get them."));
  }
  var axes = [["density", "density (kept share of key blocks)", 2], ["speedup", "speedup over dense", 2]], drawn = 0;
  axes.forEach(function (axis) {
    metrics.forEach(function (metric) {
      var series = merged.map(function (f) {
        var points = f.members.filter(function (v) { return esa.known(v[axis[0]]) && esa.known(v[metric[0]]); }).map(function (v) {
          return { x: v[axis[0]], y: v[metric[0]], text: v.name + "\n" + axis[1] + " " + esa.show(v[axis[0]], axis[2]) + "\n" + metric[1] + " " + esa.show(v[metric[0]], metric[2]) };
        }).sort(function (a, b) { return a.x - b.x; });
        return { name: f.name, tone: f.tone, points: points };
      }).filter(function (s) { return s.points.length; });
      var cell = esa.el("div", {}, esa.el("h3", {}, metric[1].split(" (")[0] + " against " + axis[0]));
      var panel = esa.el("div");
      cell.append(panel);
      box.append(cell);
      if (series.length) {
        drawn++;
        esa.chart(panel, { label: metric[1] + " against " + axis[1], x: { name: axis[1] }, y: {}, series: series });
      } else panel.append(esa.el("p", { class: "soft small" }, "Not measured in these results."));
    });
  });
  if (drawn && merged.length > 1) box.after(esa.legend(merged));
})();

/* ---- time per step */
(function () {
  var box = esa.byId("step-charts");
  if (!box) return;
  esa.data.runs.forEach(function (run) {
    var series = run.variants.filter(function (v) { return v.steps && v.steps.length; }).map(function (v) {
      return { name: v.label, tone: v.tone, dash: v.dash, points: v.steps.map(function (y, i) { return { x: i + 1, y: y }; }).filter(function (p) { return esa.known(p.y); }) };
    }).filter(function (s) { return s.points.length; });
    if (!series.length) return;
    var panel = esa.el("div");
    box.append(esa.el("div", {}, [esa.data.runs.length > 1 ? esa.el("h3", {}, run.tag) : null, panel, esa.legend(series)]));
    esa.chart(panel, { label: "Seconds of every denoising step, one line per variant", height: 260, bare: true, cross: true, series: series,
      x: { name: "denoising step", tight: true, format: function (x) { return String(x); } }, y: { zero: true, format: esa.seconds },
      band: run.warmup ? { from: 1, to: Math.min(run.warmup + 0.5, run.steps), text: "dense warm-up" } : null });
  });
  if (!box.children.length) box.append(esa.el("p", { class: "soft" }, "These results hold no times of single steps."));
})();

/* ---- where the time of a video goes */
(function () {
  var box = esa.byId("time-bars");
  if (!box) return;
  var parts = [["text", "text encoder", "--p0"], ["select", "choosing blocks", "--p1"], ["attention", "self-attention", "--p2"], ["rest", "rest of denoising", "--p3"], ["decode", "decoder", "--p4"]];
  var with_parts = esa.variants.filter(function (v) { return v.parts && esa.known(v.parts.total); });
  if (!with_parts.length) { box.closest(".card").classList.add("hidden"); return; }
  var longest = Math.max.apply(null, with_parts.map(function (v) { return v.parts.total; }));
  with_parts.forEach(function (v) {
    var spans = parts.filter(function (p) { return v.parts[p[0]] > 0; });
    var text = spans.map(function (p) { return p[1] + " " + esa.seconds(v.parts[p[0]]); }).join("\n");
    box.append(esa.el("div", { class: "row" }, [esa.el("span", {}, v.name), esa.el("div", { class: "track", role: "img", "aria-label": v.name + ": " + text.replace(/\n/g, ", "),
      pointermove: function (e) { esa.tip.show(v.name + "\n" + text, e.clientX, e.clientY); }, pointerleave: esa.tip.hide },
      spans.map(function (p) { return esa.el("span", { style: "width:" + (100 * v.parts[p[0]] / longest).toFixed(2) + "%;background:var(" + p[2] + ")" }); })),
      esa.el("span", { class: "value" }, esa.seconds(v.parts.total))]));
  });
  box.after(esa.legend(parts.filter(function (p) { return with_parts.some(function (v) { return v.parts[p[0]] > 0; }); }).map(function (p) { return { name: p[1], tone: "var(" + p[2] + ")" }; })));
})();
