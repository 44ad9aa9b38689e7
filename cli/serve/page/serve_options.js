/* serve_options.js - the options of `esa generate` under Advanced. Names, ranges and texts come from the server's /openapi.json, so
 * that they are written once; here is only which stand first, and which the form has already.
 * SPDX-License-Identifier: Apache-2.0 */
"use strict";

esa.options = (function () {
  const FIRST = ["work", "cache", "carry", "precision", "method", "budget", "masks", "lora"];
  const PLACED = ["preset", "compare", "prompt", "negative_prompt", "image", "seed", "steps", "height", "width", "frames", "fps",
    "guidance", "guidance_2", "flow_shift"];
  const UPPER = { lora: "LoRA", lora_2: "LoRA 2", cdf: "CDF", mp4_quality: "MP4 quality", vae_tile: "VAE tile" };
  const fields = {};                              /* name in the API -> { input, schema } */

  function key(name) { return name.replace(/-/g, "_"); }
  function label(name) {
    const text = key(name).replace(/_/g, " ");
    return UPPER[key(name)] || text[0].toUpperCase() + text.slice(1);
  }
  function choices(schema) { return schema.enum || (schema.anyOf || []).reduce(function (all, s) { return all.concat(s.enum || []); }, []); }
  function type(schema) { return [].concat(schema.type || (schema.anyOf || []).map(function (s) { return s.type; })); }
  function numeric(schema) { return type(schema).length > 0 && type(schema).every(function (t) { return t === "number" || t === "integer"; }); }

  function fill_select(select, values) {
    const before = select.value;
    select.replaceChildren(esa.el("option", { value: "" }, "default"));
    values.forEach(function (v) { select.append(esa.el("option", { value: String(v) }, String(v))); });
    select.value = values.map(String).indexOf(before) >= 0 ? before : "";
  }
  function make_input(name, schema, id) {
    const list = choices(schema), boolean = type(schema)[0] === "boolean";
    if (list.length && list.length === (schema.enum || []).length || boolean || key(name) === "masks" || key(name) === "plan") {
      const select = esa.el("select", { id: id });
      fill_select(select, boolean ? ["true", "false"] : list);
      return select;
    }
    if (numeric(schema))
      return esa.el("input", { type: "number", id: id, min: schema.minimum, max: schema.maximum, inputmode: "decimal",
        step: type(schema).indexOf("number") < 0 ? "1" : "any", placeholder: "default" });
    return esa.el("input", { type: "text", id: id, autocomplete: "off", spellcheck: "false", placeholder: "default",
      list: /^lora/.test(key(name)) ? "loras" : null });
  }
  function add(box, name, schema) {
    const id = "option-" + key(name), input = make_input(name, schema, id);
    const field = esa.el("div", { class: "field", "data-param": "esa." + name + " " + name }, esa.el("label", { for: id }, label(name)));
    field.append(input);
    if (schema.description) {
      const text = schema.description.replace(/--(?=\w)/g, "");
      field.append(esa.el("p", { class: "hint", id: id + "-hint" }, text[0].toUpperCase() + text.slice(1)));
      input.setAttribute("aria-describedby", id + "-hint");
    }
    box.append(field);
    fields[name] = { input: input, schema: schema };
  }

  /* One request for the description; without an answer there are no such fields, and everything else works. */
  async function load() {
    const about = await esa.api.json("GET", "/openapi.json");
    const schemas = about.components && about.components.schemas || {}, own = schemas.Esa && schemas.Esa.properties || {};
    const names = Object.keys(own).filter(function (name) { return PLACED.indexOf(key(name)) < 0; });
    const rank = function (name) { const at = FIRST.indexOf(key(name)); return at < 0 ? FIRST.length : at; };
    names.sort(function (a, b) { return rank(a) - rank(b); });
    names.forEach(function (name) {
      add(esa.byId(rank(name) < FIRST.length ? "options" : "more-options"), name, own[name]);
    });
    esa.byId("more").hidden = !names.some(function (name) { return rank(name) === FIRST.length; });
    document.body.append(esa.el("datalist", { id: "loras" }));
  }

  /* What a model brings: masks and LoRAs by the names that the server knows. */
  function use_model(about) {
    const loras = esa.byId("loras");
    Object.keys(fields).forEach(function (name) {
      const names = { masks: about.masks, plan: about.plans }[key(name)];
      if (names) fill_select(fields[name].input, names);
    });
    if (loras) loras.replaceChildren(...(about.loras || []).map(function (name) { return esa.el("option", { value: name }); }));
  }

  function values() {
    const out = {};
    Object.keys(fields).forEach(function (name) {
      const text = fields[name].input.value.trim(), schema = fields[name].schema, kinds = type(schema);
      if (!text) return;
      if (kinds[0] === "boolean") out[name] = text === "true";
      else out[name] = numeric(schema) ? Number(text) : text;         /* lists go as text with commas, as on the command line */
    });
    return out;
  }
  function fill(given) {
    Object.keys(fields).forEach(function (name) {
      const value = given[name];
      fields[name].input.value = value === undefined || value === null ? "" : String(value);
    });
  }
  /* The name of the option that says how much is computed, where one is set: it takes the preset's place. */
  function amount() {
    return ["work", "quality", "budget"].find(function (name) { return fields[name] && fields[name].input.value.trim(); }) || null;
  }
  return { load: load, use_model: use_model, values: values, fill: fill, amount: amount };
})();
