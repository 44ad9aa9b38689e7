/* serve_api.js - calls of the server: the key, errors, events as a stream, media, whether the server answers.
 * SPDX-License-Identifier: Apache-2.0 */
"use strict";

/* Who wants to know: a job was created, changed its status, came into view; the server answers again. */
esa.on = { created: [], changed: [], shown: [], back: [] };
/* Says a sentence to screen readers. */
esa.say = function (text) { esa.byId("said").textContent = text; };
/* The word at the top: wait, ready, busy or off, and a text. */
esa.state = function (state, text) {
  esa.byId("server").setAttribute("data-state", state);
  esa.byId("server-text").textContent = text;
};

esa.api = (function () {
  const KEY = "esa-serve-key";
  let key = null, asking = null, failures = 0, retry = 0, timer = 0;
  try { key = sessionStorage.getItem(KEY); } catch (e) { /* no storage: the key lives as long as the page */ }

  /* What the server refuses: a message for people, and the name of the field if it is about one. */
  class Refusal extends Error {
    constructor(status, error) {
      super(error && error.message ? error.message : "The server answered with status " + status + ".");
      this.status = status;
      this.param = error && error.param || null;
    }
  }

  /* ---- the key: asked for once, however many calls need it. Calls wait until there is one. */
  function ask(message) {
    const dialog = esa.byId("key-dialog"), input = esa.byId("key"), error = esa.byId("key-error");
    error.hidden = !message;
    error.textContent = message || "";
    if (asking) return asking;
    asking = new Promise(function (done) {
      const form = esa.byId("key-form");
      function accept(event) {
        event.preventDefault();
        if (!input.value) return;
        key = input.value;
        try { sessionStorage.setItem(KEY, key); } catch (e) { /* as above */ }
        input.value = "";
        form.removeEventListener("submit", accept);
        dialog.close();
        asking = null;
        done();
      }
      form.addEventListener("submit", accept);
    });
    dialog.addEventListener("cancel", function (event) { event.preventDefault(); });
    dialog.showModal();
    return asking;
  }

  /* ---- offline: a bar with the time of the next try; every call that succeeds takes it away. */
  function tell(seconds) {
    esa.byId("offline-text").textContent = "The server does not answer. " +
      (seconds > 0 ? "Next try in " + seconds + " s." : "Trying again …");
  }
  function lost() {
    esa.byId("offline").hidden = false;
    esa.state("off", "no answer");
    if (timer) return;
    failures++;
    retry = Math.min(30, Math.pow(2, failures - 1));
    tell(retry);
    timer = setInterval(function () {
      if (--retry > 0) return tell(retry);
      again();
    }, 1000);
  }
  async function again() {
    clearInterval(timer);
    timer = 0;
    tell(0);
    try {
      const answer = await fetch("/health", { cache: "no-store" });
      if (answer.ok) back();
      else lost();
    } catch (e) { lost(); }
  }
  function back() {
    clearInterval(timer);
    timer = failures = 0;
    if (esa.byId("offline").hidden) return;
    esa.byId("offline").hidden = true;
    esa.say("The server answers again.");
    esa.on.back.forEach(function (f) { f(); });
  }
  esa.byId("offline-retry").addEventListener("click", again);

  /* A call: the response. Throws a Refusal, or an error of the network, which the bar shows. */
  async function call(method, path, body, signal) {
    const headers = key ? { Authorization: "Bearer " + key } : {}, used = key;
    let data = body;
    if (body && !(body instanceof FormData)) {
      headers["Content-Type"] = "application/json";
      data = JSON.stringify(body);
    }
    let answer;
    try {
      answer = await fetch(path, { method: method, headers: headers, body: data, signal: signal, cache: "no-store" });
    } catch (error) {
      if (error.name !== "AbortError") lost();
      throw error;
    }
    back();
    if (answer.status === 401) {
      if (used === key) await ask(used ? "The server refused this key." : "");
      return call(method, path, body, signal);
    }
    if (!answer.ok) {
      let said = null;
      try { said = (await answer.json()).error; } catch (e) { /* no JSON: the status has to do */ }
      throw new Refusal(answer.status, said);
    }
    return answer;
  }
  async function json(method, path, body) { return (await call(method, path, body)).json(); }

  /* ---- server-sent events. fetch reads them, because EventSource sends no key. Ends when the stream ends. */
  async function events(path, tell_event, signal) {
    const answer = await call("GET", path, null, signal), reader = answer.body.getReader(), text = new TextDecoder();
    let rest = "";
    for (;;) {
      const part = await reader.read();
      if (part.done) return;
      const blocks = (rest + text.decode(part.value, { stream: true })).replace(/\r\n?/g, "\n").split("\n\n");
      rest = blocks.pop();
      blocks.forEach(function (block) {
        let name = "message", data = [];
        block.split("\n").forEach(function (line) {
          if (line.startsWith("event:")) name = line.slice(6).trim();
          else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        });
        if (data.length) tell_event(name, JSON.parse(data.join("\n")));
      });
    }
  }

  /* ---- media. Pictures and videos cannot send the key: with one they are fetched, and shown from memory. */
  async function media(path) {
    if (!key) return path;
    return URL.createObjectURL(await (await call("GET", path)).blob());
  }
  function release(url) { if (url && url.startsWith("blob:")) URL.revokeObjectURL(url); }

  return { call: call, json: json, events: events, media: media, release: release, Refusal: Refusal };
})();
