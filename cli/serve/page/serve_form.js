/* serve_form.js - the form of a new video: what a model offers, the first picture, what is sent, and refusals beside their fields.
 * SPDX-License-Identifier: Apache-2.0 */
"use strict";

esa.form = (function () {
  const DRAFT = "esa-serve-draft", OWN = "own";
  const $ = esa.byId, form = $("form");
  const PRESETS = {
    faithful: "Closest to dense attention.", balanced: "Close to dense and clearly faster. The default.",
    fast: "The least attention work.", dense: "Full attention: the slowest, and what the others are compared with."
  };
  let models = [], model = null, picture = null, picture_url = null, example = -1;

  function about() { return model ? model.esa || {} : {}; }
  function defaults() { return about().defaults || {}; }

  /* ---- sizes: the model's own, others with as many pixels, a small one for trying, and any */
  function sizes() {
    const d = defaults(), by = about().multiple || {}, w = d.width || 128, h = d.height || 128, list = [];
    const round = function (x, m) { return Math.max(m, Math.round(x / m) * m); };
    function add(x, y, name) {
      const a = round(x, by.width || 16), b = round(y, by.height || 16), value = a + "x" + b;
      if (!list.some(function (s) { return s.value === value; })) list.push({ value: value, text: a + " × " + b + (name ? " · " + name : "") });
    }
    const side = Math.sqrt(w * h);
    add(w, h, "");
    if (w !== h) add(h, w, h > w ? "portrait" : "landscape");
    add(side, side, "square");
    if (w === h) { add(side * 4 / 3, side * 3 / 4, "landscape"); add(side * 3 / 4, side * 4 / 3, "portrait"); }
    add(w / 2, h / 2, "small");
    return list;
  }
  function fill_sizes() {
    $("size").replaceChildren(...sizes().map(function (s) { return esa.el("option", { value: s.value }, s.text); }),
      esa.el("option", { value: OWN }, "Own size …"));
    ["width", "height"].forEach(function (name) {
      $(name).step = $(name).min = String((about().multiple || {})[name] || 16);
      $(name).value = String(defaults()[name] || "");
    });
  }
  function set_size(text) {
    const known = Array.from($("size").options).some(function (o) { return o.value === text; });
    $("size").value = known ? text : OWN;
    const pair = text.split("x");
    $("width").value = pair[0];
    $("height").value = pair[1];
    show_own_size();
  }
  function show_own_size() { $("own-size").hidden = $("size").value !== OWN; }
  function size() { return $("size").value === OWN ? $("width").value + "x" + $("height").value : $("size").value; }

  /* ---- seconds: frames are 1 + k times the model's factor */
  function fps() { return Number($("fps").value) || defaults().fps || 16; }
  function frames() {
    const by = (about().multiple || {}).frames || 1, seconds = Number($("seconds").value);
    if (!(seconds > 0)) return null;
    return Math.max(1, Math.round((seconds * fps() - 1) / by) * by + 1);
  }
  function tell_frames() {
    const n = frames();
    $("frames-hint").textContent = n ? n + (n === 1 ? " frame" : " frames") : "";
  }
  function set_frames(n) {
    $("seconds").value = String(Math.round(n / fps() * 100) / 100);
    tell_frames();
  }

  /* ---- presets: those of the server, and dense */
  function fill_presets() {
    const names = (about().presets || Object.keys(PRESETS).slice(0, 3)).concat("dense"), before = preset();
    $("presets").replaceChildren(...names.map(function (name) {
      return esa.el("label", null, [esa.el("input", { type: "radio", name: "preset", value: name, change: told }),
        esa.el("span", null, name[0].toUpperCase() + name.slice(1))]);
    }));
    const usual = "preset" in defaults() ? defaults().preset : "balanced";
    set_preset(names.indexOf(before) >= 0 ? before : usual);
  }
  function preset() {
    const checked = form.querySelector("input[name=preset]:checked");
    return checked ? checked.value : null;
  }
  function set_preset(name) {
    form.querySelectorAll("input[name=preset]").forEach(function (input) { input.checked = input.value === name; });
    told();
  }
  function told() {
    const amount = esa.options.amount(), name = preset(), dense = name === "dense";
    $("presets").classList.toggle("overruled", Boolean(amount) && !dense);
    $("preset-hint").textContent = amount && !dense ? "Not used: " + amount + " is set under Advanced."
      : name ? PRESETS[name] || "" : "None chosen: as the server was started.";
    $("compare").disabled = dense;
    if (dense) $("compare").checked = false;
  }

  /* ---- models */
  function use_model(id) {
    model = models.find(function (m) { return m.id === id; }) || models[0] || null;
    if (!model) return;
    const d = defaults(), image = about().image || "none", examples = about().prompts || [];
    $("model").value = model.id;
    fill_sizes();
    show_own_size();
    $("steps").value = String(d.steps || "");
    $("guidance").placeholder = esa.known(d.guidance) ? String(d.guidance) : "default";
    $("guidance-2").placeholder = esa.known(d.guidance_2) ? String(d.guidance_2) : "as guidance";
    $("guidance-2-field").hidden = !("guidance_2" in d) || d.guidance_2 === null;
    $("fps").placeholder = String(d.fps || 16);
    $("flow-shift").placeholder = esa.known(d.flow_shift) ? String(d.flow_shift) : "default";
    set_frames(d.frames || 1);
    $("picture-field").hidden = image === "none";
    $("picture-need").textContent = image === "required" ? "(needed)" : "(if you like)";
    if (image === "none") set_picture(null);
    $("example").hidden = examples.length === 0;
    $("prompt").placeholder = examples.length ? "for example: " + examples[0] : "What the video shows";
    esa.options.use_model(about());
    fill_presets();
  }
  async function load_models() {
    models = (await esa.api.json("GET", "/v1/models")).data;
    const before = $("model").value;
    $("model").replaceChildren(...models.map(function (m) {
      const warm = m.esa && m.esa.warm;
      return esa.el("option", { value: m.id }, m.id + (models.length > 1 ? warm ? " · ready" : " · loads first" : ""));
    }));
    if (!model) use_model(null);
    else if (before) $("model").value = before;
  }

  /* ---- the first picture: chosen, dropped anywhere, or pasted */
  function set_picture(file) {
    if (picture_url) URL.revokeObjectURL(picture_url);
    picture = file;
    picture_url = file ? URL.createObjectURL(file) : null;
    $("picture").hidden = $("picture-remove").hidden = !file;
    if (file) $("picture").src = picture_url;
    else $("picture").removeAttribute("src");
    $("picture").alt = file ? "The chosen picture, " + file.name : "";
    $("picture-text").textContent = file ? file.name : "Drop a picture here, paste one, or";
    $("drop").classList.toggle("full", Boolean(file));
    if (!file) $("picture-file").value = "";
    clear_errors($("picture-field"));
  }
  function take(files) {
    const file = Array.from(files || []).find(function (f) { return f.type.startsWith("image/"); });
    if (!file) return false;
    if (about().image === "none" || !about().image) {
      const other = models.find(function (m) { return m.esa && m.esa.image !== "none"; });
      if (!other) { form_error(model ? model.id + " makes videos from text alone; it takes no picture." : "No model."); return true; }
      use_model(other.id);
    }
    set_picture(file);
    esa.say("Picture added: " + file.name);
    return true;
  }

  /* ---- what is sent: the fields of the API by their names */
  function number(id) { const text = $(id).value.trim(); return text === "" ? undefined : Number(text); }
  function request() {
    const own = esa.options.values(), name = preset();
    if (name === "dense") own.method = "dense";
    else if (name && !esa.options.amount()) own.preset = name;
    if ($("compare").checked) own.compare = true;
    const out = { prompt: $("prompt").value.trim(), model: model ? model.id : undefined, size: size(), num_frames: frames() || undefined,
      num_inference_steps: number("steps"), seed: number("seed"), negative_prompt: $("negative").value.trim() || undefined,
      guidance_scale: number("guidance"), guidance_scale_2: number("guidance-2"), fps: number("fps"), flow_shift: number("flow-shift"),
      esa: own };
    Object.keys(out).forEach(function (key) { if (out[key] === undefined) delete out[key]; });
    return out;
  }
  function fill(r) {
    const own = Object.assign({}, r.esa);
    if (r.model) use_model(r.model);
    $("prompt").value = r.prompt || "";
    $("fps").value = r.fps || "";
    if (r.size) set_size(r.size);
    else if (r.width && r.height) set_size(r.width + "x" + r.height);
    if (r.num_frames) set_frames(r.num_frames);
    else if (r.seconds) { $("seconds").value = r.seconds; tell_frames(); }
    if (r.num_inference_steps) $("steps").value = r.num_inference_steps;
    $("seed").value = r.seed === undefined || r.seed === null ? "" : r.seed;
    $("negative").value = r.negative_prompt || "";
    [["guidance", "guidance_scale"], ["guidance-2", "guidance_scale_2"], ["flow-shift", "flow_shift"]].forEach(function (pair) {
      $(pair[0]).value = r[pair[1]] === undefined || r[pair[1]] === null ? "" : r[pair[1]];
    });
    const name = own.method === "dense" ? "dense" : own.preset || ("preset" in defaults() ? defaults().preset : "balanced");
    if (own.method === "dense") delete own.method;
    esa.options.fill(own);
    set_preset(name);
    $("compare").checked = own.compare === true;
  }
  function keep_draft() {
    try { sessionStorage.setItem(DRAFT, JSON.stringify(request())); } catch (e) { /* no storage: a reload starts anew */ }
  }
  function restore_draft() {
    try { const text = sessionStorage.getItem(DRAFT); if (text) fill(JSON.parse(text)); } catch (e) { /* as above */ }
  }

  /* ---- refusals: beside the field they are about, or above the button */
  function clear_errors(box) {
    box.querySelectorAll("[data-param] > .error").forEach(function (p) { p.remove(); });
    if (box.matches("[data-param]")) box.querySelectorAll(":scope > .error").forEach(function (p) { p.remove(); });
    box.querySelectorAll("[aria-invalid]").forEach(function (input) {
      input.removeAttribute("aria-invalid");
      input.removeAttribute("aria-errormessage");
    });
    if (box === form) $("form-error").hidden = true;
  }
  function form_error(message) {
    $("form-error").textContent = message;
    $("form-error").hidden = false;
    $("form-error").scrollIntoView({ block: "nearest" });
  }
  /* The message without the field's name, which the label says. */
  function plain(error) {
    const prefix = error.param + ": ", text = error.message;
    if (!error.param || !text.startsWith(prefix)) return text;
    return text[prefix.length].toUpperCase() + text.slice(prefix.length + 1);
  }
  function field_of(param) {
    return Array.from(form.querySelectorAll("[data-param]")).find(function (f) {
      return f.getAttribute("data-param").split(" ").indexOf(param) >= 0;
    });
  }
  function refuse(message, param) {
    let field = param ? field_of(param === "size" && !$("own-size").hidden ? "width" : param) : null;
    if (field && field.hidden && field.id === "own-size") field = field_of("size");
    if (!field || field.hidden) return form_error(message);
    for (let fold = field.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    const id = "error-" + param.replace(/\W/g, "-"), input = field.querySelector("textarea, select, input");
    field.append(esa.el("p", { class: "error", id: id, role: "alert" }, message));
    if (!input) return;
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-errormessage", id);
    input.focus();
  }

  async function submit() {
    const data = request(), button = $("submit");
    if (button.getAttribute("aria-disabled") === "true") return;
    clear_errors(form);
    if (!data.prompt) return refuse("Say what the video shows.", "prompt");
    if (data.seed === undefined) data.seed = crypto.getRandomValues(new Uint32Array(1))[0];
    button.setAttribute("aria-disabled", "true");
    try {
      let body = data;
      if (picture) {
        body = new FormData();
        Object.keys(data).forEach(function (key) { body.append(key, key === "esa" ? JSON.stringify(data.esa) : String(data[key])); });
        body.append("input_reference", picture, picture.name || "picture.png");
      }
      const job = await esa.api.json("POST", "/v1/videos", body);
      esa.on.created.forEach(function (f) { f(job); });
    } catch (error) {
      if (error instanceof esa.api.Refusal) refuse(plain(error), error.param);
      else form_error("The server did not answer. Nothing was lost; try again.");
    } finally {
      button.removeAttribute("aria-disabled");
    }
  }

  /* ---- events */
  form.addEventListener("submit", function (event) { event.preventDefault(); submit(); });
  document.addEventListener("keydown", function (event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !$("key-dialog").open) { event.preventDefault(); submit(); }
  });
  form.addEventListener("input", function (event) {
    const field = event.target.closest("[data-param]");
    if (field) clear_errors(field);
    told();
    tell_frames();
    keep_draft();
  });
  $("model").addEventListener("change", function () { use_model($("model").value); keep_draft(); });
  $("size").addEventListener("change", show_own_size);
  $("seed-clear").addEventListener("click", function () { $("seed").value = ""; keep_draft(); });
  $("example").addEventListener("click", function () {
    const list = about().prompts || [];
    example = (example + 1) % list.length;
    $("prompt").value = list[example];
    keep_draft();
    esa.say(list[example]);
  });
  $("picture-file").addEventListener("change", function () { take($("picture-file").files); });
  $("picture-remove").addEventListener("click", function () { set_picture(null); $("picture-file").focus(); });
  document.addEventListener("paste", function (event) {
    if (event.clipboardData && take(event.clipboardData.files)) event.preventDefault();
  });
  ["dragenter", "dragover", "dragleave", "drop"].forEach(function (name) {
    document.addEventListener(name, function (event) {
      const files = event.dataTransfer && Array.from(event.dataTransfer.types).indexOf("Files") >= 0;
      if (!files) return;
      event.preventDefault();
      $("drop").classList.toggle("over", name === "dragenter" || name === "dragover");
      if (name === "drop") take(event.dataTransfer.files);
    });
  });

  /* Fills the form with a finished job's settings. */
  function again(job) {
    const e = job.esa || {}, given = e.request || { esa: e.settings || {} };
    fill(Object.assign({ prompt: job.prompt, model: job.model, size: job.size, num_frames: job.num_frames,
      num_inference_steps: e.steps }, given, { seed: e.seed }));
    clear_errors(form);
    keep_draft();
    $("prompt").focus();
    form.scrollIntoView({ block: "start" });
    const with_picture = given.image || given.input_reference || given.image_reference;
    esa.say("The form has the settings of that video." + (with_picture && !picture ? " Add its picture again." : ""));
    if (with_picture && !picture) refuse("Add the picture of that video again; the server does not send it back.", "input_reference");
  }
  /* Once models and options are there. */
  function ready() {
    if (model) esa.options.use_model(about());
    restore_draft();
    told();
  }
  return { load: load_models, ready: ready, again: again };
})();
