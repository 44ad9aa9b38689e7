#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The page of `esa serve` in a headless Chromium: check_serve_browser.py ESA MODELS [CLASS...]. Exits 77 (skipped)
where there is no browser.

A server with wan-tiny is started on a free port, and its page used as a person would: prompt, progress, stop, compare,
reload, a picture, without a mouse. In the end the console must be clean, and the page must have asked its own server
only. Screenshots go to a temporary folder, or to $ESA_TEST_SHOTS."""
import base64
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import packages

packages.need("requirements-browser.txt", "playwright", "jsonschema")
import browser  # noqa: E402
import playwright.sync_api  # noqa: E402
import serve_kit  # noqa: E402
from browser import wait  # noqa: E402

ESA, MODELS = map(os.path.abspath, sys.argv[1:3])
TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RED = "a red ball rolls to the right over a blue floor"
STAR = "a large yellow star spins in place over a purple background"
WIDE = {"width": 1280, "height": 800}
VIEWS = {
    "desktop": dict(viewport=WIDE, color_scheme="light"), "dark": dict(viewport=WIDE, color_scheme="dark"),
    "phone": dict(viewport={"width": 390, "height": 844}, color_scheme="light", device_scale_factor=2, is_mobile=True,
                  has_touch=True),
    "narrow": dict(viewport={"width": 360, "height": 640}, color_scheme="dark", is_mobile=True, has_touch=True)
}
# Seconds from the start of the server to the first video in the page, with the model's own settings. On two cores that
# others used too (load 14 to 19) it took 68 to 169; a server that hangs takes longer than this.
FIRST_VIDEO = 500
DONE = "document.querySelector('.player video') && document.querySelector('.player video').readyState >= 2"
STATUS = "(document.querySelector('.job-head .chip') || {dataset: {}}).dataset.status || ''"
TIMES = "Array.from(document.querySelectorAll('.player video')).map(v => v.currentTime)"
SETTLED = "Array.from(document.querySelectorAll('.player video')).every(v => v.readyState >= 2 && !v.seeking)"
# The brightness of the picture that a video shows, at the middle of each of 8 x 8 fields.
FIELDS = """variant => {
    const v = document.querySelector(`video[data-variant=${variant}]`);
    const o = new OffscreenCanvas(v.videoWidth, v.videoHeight);
    const x = o.getContext('2d', {willReadFrequently: true}), out = [];
    x.drawImage(v, 0, 0);
    for (let i = 0; i < 64; i++)
      out.push(...x.getImageData((i % 8 + 0.5) * o.width / 8, ((i >> 3) + 0.5) * o.height / 8, 1, 1).data.slice(0, 3));
    return out;
  }"""
# Watches what a run shows: values of the bar, and previews by their pixels.
WATCH = """(() => {
    window.seen = {bar: [], previews: [], lines: [], said: []};
    const hash = image => {
      const o = new OffscreenCanvas(32, 32), x = o.getContext('2d', {willReadFrequently: true});
      x.drawImage(image, 0, 0, 32, 32);
      return x.getImageData(0, 0, 32, 32).data.join();
    };
    const add = (list, value) => { if (value && list[list.length - 1] !== value) list.push(value); };
    const look = () => {
      const bar = document.querySelector('progress[value]'), image = document.querySelector('.making > img');
      if (bar) add(seen.bar, bar.value);
      if (image && image.complete) add(seen.previews, hash(image));
      add(seen.lines, (document.querySelector('.line') || {}).textContent);
      add(seen.said, document.getElementById('said').textContent);
      requestAnimationFrame(look);
    };
    look();
  })()"""
# The elements that Tab reaches in the form, by id or text; the chosen one of a group of radio buttons stands for all.
STOPS = """Array.from(document.querySelectorAll('#form :is(textarea, input, select, button, summary)'))
    .filter(e => e.checkVisibility() && !e.disabled && !(e.type === 'radio' && !e.checked))
    .map(e => e.id || e.value || e.textContent.trim())"""


class Page(unittest.TestCase):
    """Tests with a server of their own, self.server, and pages of it."""
    words = ()

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name
        started = time.monotonic()
        cls.server = serve_kit.Server(ESA, os.path.join(cls.folder, "videos"), *cls.options())
        cls.started = started
        cls.addClassCleanup(lambda: cls.server.stop())
        driver = playwright.sync_api.sync_playwright().start()
        cls.addClassCleanup(driver.stop)
        cls.chromium = driver.chromium.launch(executable_path=browser.find(), args=["--no-sandbox"])
        cls.addClassCleanup(cls.chromium.close)
        cls.shots = os.environ.get("ESA_TEST_SHOTS", cls.folder)

    def tearDown(self):
        """The next test finds a server with nothing to do."""
        for job in self.server.get("/v1/videos?limit=100").json.get("data", []):
            if job["status"] in ("queued", "in_progress"):
                self.server.ask("DELETE", "/v1/videos/" + job["id"])

    @classmethod
    def options(cls):
        return ["--model", os.path.join(MODELS, "wan-tiny")]

    def open(self, view="desktop", expected=(), path="/"):
        """A page in a context of its own. In the end the console must hold nothing but expected texts."""
        context = self.chromium.new_context(**VIEWS[view])
        page = context.new_page()
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text)
                if said.type in ("error", "warning", "assert") and not any(e in said.text for e in expected) else None)
        page.on("request", lambda request: errors.append("asks " + request.url[:200])
                if not request.url.startswith((self.server.url + "/", "data:", "blob:" + self.server.url)) else None)

        def end():
            context.close()
            self.assertEqual(errors, [])
        self.addCleanup(end)
        page.goto(self.server.url + path)
        wait(page, "document.getElementById('server').dataset.state !== 'wait' ||"
             "document.getElementById('key-dialog').open")
        return page

    def small(self, page, prompt=RED, steps=2, frames=9, size=64, **fields):
        """Fills the form for a small clip."""
        page.fill("#prompt", prompt)
        page.select_option("#size", "own")
        page.fill("#width", str(size))
        page.fill("#height", str(size))
        page.fill("#seconds", str(frames / 16))
        page.fill("#steps", str(steps))
        for name, value in fields.items():
            page.fill("#" + name.replace("_", "-"), str(value))

    def status(self, page, *wanted, seconds=serve_kit.PATIENCE):
        wait(page, f"{json.dumps(wanted)}.includes({STATUS})", seconds)

    def current(self, page):
        """The job in view, as the API has it."""
        name = page.evaluate("location.hash.slice(1)")
        return self.server.get("/v1/videos/" + name).json

    def shot(self, page, name, full=False):
        """A screenshot that is not blank."""
        path = os.path.join(self.shots, f"serve-{name}.png")
        data = page.screenshot(path=path, full_page=full)
        empty = self.chromium.new_page()
        try:
            colours = empty.evaluate(browser.COLOURS, "data:image/png;base64," + base64.b64encode(data).decode())
        finally:
            empty.close()
        # text, its edges, cards and the page itself
        self.assertGreater(colours, 10, path)

    def sound(self, page):
        """What every page must do in every state."""
        self.assertEqual(page.evaluate(browser.UNNAMED), [])
        self.assertEqual(page.evaluate(browser.FAINT), [])
        self.assertLessEqual(browser.wide(page), 0, "the page is wider than the screen")
        twice = page.evaluate("Array.from(document.querySelectorAll('[id]')).map(e => e.id)"
                              ".filter((id, i, all) => all.indexOf(id) !== i)")
        self.assertEqual(twice, [])
        lost = page.evaluate("['aria-describedby', 'aria-errormessage'].flatMap(name =>"
                             "Array.from(document.querySelectorAll(`[${name}]`)).map(e => e.getAttribute(name)))"
                             ".flatMap(text => text.split(' ')).filter(id => !document.getElementById(id))")
        self.assertEqual(lost, [])


class First(Page):
    """The first minute with esa: a server, a page, a prompt, a video."""

    def test_first_video(self):
        page = self.open()
        ready = time.monotonic() - self.started
        self.shot(page, "desktop-empty")
        page.evaluate(WATCH)
        page.keyboard.type(RED)                         # the prompt has the focus from the start
        page.keyboard.press("Control+Enter")
        self.status(page, "in_progress", "completed")
        wait(page, "window.seen.previews.length > 0 && document.querySelector('progress').value > 20",
             serve_kit.PATIENCE)
        self.sound(page)
        self.shot(page, "desktop-running")
        self.status(page, "completed", seconds=FIRST_VIDEO)
        wait(page, DONE)
        seconds = time.monotonic() - self.started
        print(f"first video in the browser after {seconds:.1f} s, page ready after {ready:.1f} s", flush=True)
        self.assertLess(seconds, FIRST_VIDEO)
        seen = page.evaluate("window.seen")
        self.assertEqual(seen["bar"], sorted(seen["bar"]), "progress goes back")
        self.assertGreater(len(seen["bar"]), 4, seen["bar"])
        previews = [[int(value) for value in text.split(",")] for text in seen["previews"]]
        self.assertGreater(len(previews), 2, "previews that change")
        # they come nearer to the last one: what is seen sharpens
        far = [sum(abs(a - b) for a, b in zip(picture, previews[-1])) for picture in previews[:-1]]
        self.assertGreater(far[0], 1.5 * far[-1], far)
        self.assertTrue(any("left" in line for line in seen["lines"]), seen["lines"])
        self.assertTrue(any("finished" in text for text in seen["said"]), seen["said"])
        # what plays is the file of the API, with its size
        job = self.current(page)
        self.assertEqual(page.evaluate("(v => [v.videoWidth, v.videoHeight])(document.querySelector('.player video'))"),
                         [128, 128])
        self.assertEqual((job["prompt"], job["status"], job["size"]), (RED, "completed", "128x128"))
        wait(page, "document.querySelector('.player video').currentTime > 0")
        self.sound(page)
        self.shot(page, "desktop-done")


class Use(Page):
    """Everything else, with small clips."""

    def test_stop(self):
        """Without a mouse: Tab to Stop, Enter."""
        page = self.open()
        self.small(page, steps=400)
        page.keyboard.press("Control+Enter")
        wait(page, "(document.querySelector('.line') || {}).textContent && /^Step [1-9]/.test("
             "document.querySelector('.line').textContent)")
        name = self.current(page)["id"]
        self.small(page, STAR, steps=2)                 # a second one waits, and is listed under the first
        page.keyboard.press("Control+Enter")
        wait(page, "document.querySelectorAll('#queue-list li').length === 1")
        self.assertIn(STAR, page.inner_text("#queue-list"))
        self.sound(page)
        self.shot(page, "desktop-queue", True)
        page.focus("#submit")
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "Stop":
                break
        started = time.monotonic()
        page.keyboard.press("Enter")
        self.status(page, "deleted", seconds=20)
        self.assertLess(time.monotonic() - started, 20)
        self.assertIn("Stopped at step", page.inner_text("#job"))
        self.assertEqual(self.server.get("/v1/videos/" + name).status, 404)
        self.assertEqual(page.evaluate("document.activeElement.id"), "now")
        # the second one runs now, and can be stopped or shown from the list
        wait(page, "document.querySelectorAll('#queue-list li').length === 0", serve_kit.PATIENCE)
        self.sound(page)

    def test_compare(self):
        page = self.open()
        self.small(page, steps=4, size=96)
        page.check("#compare")
        page.click("#submit")
        self.status(page, "completed")
        wait(page, SETTLED + " && document.querySelectorAll('.player video').length === 2")
        job = self.current(page)
        compare = job["esa"]["compare"]
        text = page.inner_text("#job .tiles")
        self.assertIn(f"{compare['psnr']:.1f} dB", text)
        self.assertIn(f"{compare['speedup']:.2f} ×", text)
        self.assertIn(f"{round(100 * job['esa']['work'])} %", text)
        # both play, at one time
        wait(page, TIMES + "[0] > 0")
        for _ in range(20):
            a, b = page.evaluate(TIMES)
            if min(a, b) > 2 / 16:                      # after a jump to the start one may be a frame ahead
                self.assertLess(abs(a - b), 2 / 16)
            time.sleep(0.05)
        page.keyboard.press("Escape")
        page.focus(".play")
        if page.get_attribute(".play", "aria-label") == "Pause":
            page.keyboard.press("Space")
        page.focus(".seek")
        page.keyboard.press("Home")
        for _ in range(4):
            page.keyboard.press("ArrowRight")
        wait(page, SETTLED)
        self.assertEqual(page.evaluate(TIMES), [4.5 / 16] * 2)
        # they are two videos of one thing
        dense, sparse = (page.evaluate(FIELDS, name) for name in ("dense", "sparse"))
        apart = [abs(a - b) for a, b in zip(dense, sparse)]
        self.assertGreater(max(apart), 0)
        self.assertLess(sum(apart) / len(apart), 40)
        # the wipe without a mouse, and what it shows
        wait(page, "!document.querySelector('.stage-note:not([hidden])')")
        page.focus(".wipe")
        self.assertEqual(page.input_value(".wipe"), "50")
        for key, value in (("ArrowLeft", "49"), ("End", "100"), ("Home", "0"), ("PageUp", "10")):
            page.keyboard.press(key)
            self.assertEqual(page.input_value(".wipe"), value)
            self.assertEqual(page.get_attribute(".wipe", "aria-valuetext"),
                             f"{value} % dense, {100 - int(value)} % sparse")
            cut = page.evaluate("getComputedStyle(document.querySelector('video[data-variant=dense]')).clipPath")
            self.assertIn(f"{100 - int(value)}%", cut.replace("calc(", "").replace("0%)", "0%"))
        pictures = set()
        for key in ("Home", "End"):
            page.keyboard.press(key)
            pictures.add(page.locator(".stage").screenshot())
        self.assertEqual(len(pictures), 2, "the wipe shows another video")
        box = page.locator(".stage").bounding_box()     # and with one
        page.mouse.click(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)
        self.assertAlmostEqual(int(page.input_value(".wipe")), 25, delta=2)
        handle = page.locator(".handle").bounding_box()
        middle = handle["x"] + handle["width"] / 2 - box["x"]
        self.assertAlmostEqual(middle, box["width"] / 4, delta=0.03 * box["width"])
        self.sound(page)
        self.shot(page, "desktop-compare")
        page.click("[data-view=beside]")
        self.assertEqual(page.evaluate("Array.from(document.querySelectorAll('.player video')).map(v =>"
                                       "getComputedStyle(v).clipPath)"), ["none", "none"])
        self.shot(page, "desktop-beside")
        for view in ("dark", "phone"):
            other = self.open(view, path="/#" + job["id"])
            wait(other, SETTLED + " && document.querySelectorAll('.player video').length === 2")
            self.sound(other)
            self.shot(other, view + "-compare", True)

    def test_reload(self):
        page = self.open()
        self.small(page, steps=60)
        page.click("#submit")
        wait(page, "document.querySelector('progress') && document.querySelector('progress').value >= 10")
        before = self.current(page)
        # in a new tab without an address too
        for again in (page.reload, lambda: page.goto(self.server.url)):
            again()
            self.status(page, "in_progress")
            self.assertEqual(page.evaluate("location.hash.slice(1)"), before["id"])
            self.assertEqual(page.inner_text("#job h2"), RED)
            self.assertEqual(page.input_value("#prompt"), RED)
            self.assertEqual(page.input_value("#steps"), "60")
            wait(page, f"document.querySelector('progress').value >= {before['progress']}")
        wait(page, "document.querySelector('.making > img')", serve_kit.PATIENCE)
        self.status(page, "completed")
        wait(page, DONE)
        page.reload()
        wait(page, DONE)

    def test_refusals(self):
        """The server's sentence stands beside the field, which has the focus."""
        page = self.open(expected=("400", "422"))
        page.fill("#prompt", "")
        page.click("#submit")
        self.assertIn("Say what", page.inner_text("[data-param=prompt] .error"))
        for field, value in (("#option-work", "7"), ("#steps", "-3"), ("#width", "3")):
            self.small(page)
            page.evaluate("document.getElementById('advanced').open = false")
            page.evaluate(f"(e => {{ e.value = '{value}'; e.dispatchEvent(new Event('input', {{bubbles: true}})); }})"
                          f"(document.querySelector('{field}'))")
            page.click("#submit")
            wait(page, f"document.querySelector('{field}').closest('.field').querySelector('.error')")
            self.assertEqual(page.evaluate("'#' + document.activeElement.id"), field)
            self.assertEqual(page.get_attribute(field, "aria-invalid"), "true")
            told = page.evaluate(f"document.getElementById(document.querySelector('{field}').getAttribute("
                                 "'aria-errormessage')).textContent")
            self.assertGreater(len(told), 10)
            self.sound(page)
            if field == "#option-work":
                self.shot(page, "desktop-refused")
            page.fill(field, "")
            self.assertEqual(page.locator(".field .error").count(), 0)
        self.assertEqual(self.server.get("/health").status, 200)

    def test_history(self):
        """Thirteen clips: a page of twelve, then one. Their settings, their files, deleting them."""
        have = len(self.server.get("/v1/videos?limit=100").json["data"])
        made = []
        for i in range(max(2, 13 - have)):
            name = self.server.make(prompt=f"{STAR} {i}", size="64x64", num_frames=5, num_inference_steps=1,
                                    seed=40 + i, guidance_scale=1, esa={"carry": "off"})
            self.assertEqual(self.server.wait(name)["status"], "completed")
            made.append(name)
        page = self.open()
        wait(page, "document.querySelectorAll('#cards li').length === 12")
        page.focus("#history-more")
        page.keyboard.press("Enter")
        wait(page, "document.querySelectorAll('#cards li').length > 12")
        self.assertTrue(page.evaluate("document.activeElement.closest('#cards') !== null"))
        page.evaluate("document.querySelector('#cards button').focus()")
        page.keyboard.press("Enter")
        wait(page, DONE)
        self.assertEqual(page.evaluate("location.hash.slice(1)"), made[-1])
        wait(page, "document.querySelector('#cards .thumb > *')")
        page.click("text=Use these settings again")
        fields = ("prompt", "steps", "seed", "guidance", "option-carry")
        self.assertEqual([page.input_value("#" + name) for name in fields],
                         [f"{STAR} {len(made) - 1}", "1", str(39 + len(made)), "1", "off"])
        self.assertEqual((page.input_value("#width"), page.inner_text("#frames-hint")), ("64", "5 frames"))
        self.assertNotIn("Not used", page.inner_text("#preset-hint"))
        page.evaluate("document.getElementById('advanced').open = true")
        page.fill("#option-work", "0.5")                # says the same thing as a preset
        self.assertIn("Not used", page.inner_text("#preset-hint"))
        with page.expect_download() as download:
            page.click("#job >> text=Download")
        with open(download.value.path(), "rb") as file:
            self.assertEqual(file.read(), self.server.get(f"/v1/videos/{made[-1]}/content").body)
        self.assertTrue(download.value.suggested_filename.endswith(".mp4"))
        page.click("#job >> text=Delete")
        wait(page, "!document.getElementById('empty').hidden")
        self.assertEqual(self.server.get("/v1/videos/" + made[-1]).status, 404)
        wait(page, f"!document.querySelector('[data-id={made[-1]}]')")

    def test_without_a_mouse(self):
        """Tab goes through the form as it is read, and reaches everything."""
        for view in VIEWS:
            with self.subTest(view=view):
                page = self.open(view)
                wait(page, "document.querySelectorAll('#presets input').length > 1")
                self.sound(page)
                page.focus("#prompt")
                stops = page.evaluate(STOPS)
                reached = []
                for _ in range(60):
                    name = page.evaluate("(e => e.id || e.value || e.textContent.trim())(document.activeElement)")
                    if name in stops and name not in reached:
                        reached.append(name)
                    if name == "submit":
                        break
                    page.keyboard.press("Tab")
                first = stops.index("prompt")
                self.assertEqual(reached, stops[first:stops.index("submit") + 1])
                ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                self.assertNotEqual(ring, "none", "the focus can be seen")
                page.evaluate("document.getElementById('advanced').open = true;"
                              "document.getElementById('more').open = true")
                self.sound(page)
                self.shot(page, view + "-advanced", True)

    def test_examples(self):
        """Prompts that the model knows, one after the other."""
        page = self.open()
        prompts = self.server.get("/v1/models").json["data"][0]["esa"]["prompts"]
        self.assertGreater(len(prompts), 3)
        self.assertIn(prompts[0], page.get_attribute("#prompt", "placeholder"))
        for prompt in prompts[:2]:
            page.click("#example")
            self.assertEqual(page.input_value("#prompt"), prompt)
        self.assertEqual(page.evaluate("document.querySelector('input[name=preset]:checked').value"), "balanced")

    def test_quiet_motion(self):
        """Who asks for less motion gets no animation, and a clip that stands."""
        name = self.server.make(prompt=RED, size="64x64", num_frames=9, num_inference_steps=1)
        self.server.wait(name)
        context = self.chromium.new_context(viewport=WIDE, reduced_motion="reduce")
        self.addCleanup(context.close)
        page = context.new_page()
        page.goto(self.server.url + "/#" + name)
        wait(page, DONE)
        time.sleep(0.5)
        self.assertTrue(page.evaluate("document.querySelector('.player video').paused"))
        self.assertEqual(page.evaluate("document.getAnimations().length"), 0)

    def test_other_people(self):
        """A prompt is text: markup in it does nothing."""
        prompt = "<img src=x onerror=\"document.title='broken'\"><b>bold</b> & \"quotes\""
        name = self.server.make(prompt=prompt, size="64x64", num_frames=5, num_inference_steps=1)
        self.server.wait(name)
        page = self.open(path="/#" + name)
        wait(page, DONE)
        self.assertEqual(page.inner_text("#job h2"), prompt)
        self.assertEqual(page.locator("#job h2 *, #cards .prompt *").count(), 0)
        self.assertNotEqual(page.title(), "broken")


class Key(Page):
    """A server with a key: the page asks for it."""
    KEY = "correct-horse-battery-staple"

    @classmethod
    def options(cls):
        path = os.path.join(cls.folder, "key")
        with open(path, "w", encoding="utf-8") as file:
            file.write(cls.KEY + "\n")
        os.chmod(path, 0o600)
        return [*super().options(), "--api-key-file", path]

    def test_key(self):
        self.server.key = self.KEY
        page = self.open(expected=("401",))             # its state is known after the first answer with a key
        wait(page, "document.getElementById('key-dialog').open")
        self.sound(page)
        self.shot(page, "desktop-key")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        wait(page, "document.getElementById('key-dialog').open && !document.getElementById('key-error').hidden")
        page.fill("#key", self.KEY)
        page.keyboard.press("Enter")
        wait(page, "document.getElementById('model').options.length > 0")
        self.small(page)
        page.click("#submit")
        self.status(page, "completed")
        wait(page, DONE)
        self.assertTrue(page.evaluate("document.querySelector('.player video').src").startswith("blob:"))
        page.reload()                                   # the tab still knows it
        wait(page, DONE)
        self.assertFalse(page.evaluate("document.getElementById('key-dialog').open"))
        self.assertEqual(page.evaluate("Object.values(localStorage).join()").count(self.KEY), 0)


class Defaults(Page):
    """A server with defaults of its own: the page leaves them alone."""

    @classmethod
    def options(cls):
        return [*super().options(), "--work", "0.9", "--width", "64", "--height", "64", "--frames", "9", "--steps", "2"]

    def test_defaults(self):
        page = self.open()
        self.assertEqual(page.locator("input[name=preset]:checked").count(), 0)
        self.assertIn("as the server was started", page.inner_text("#preset-hint"))
        self.assertEqual((page.input_value("#size"), page.input_value("#steps"), page.inner_text("#frames-hint")),
                         ("64x64", "2", "9 frames"))
        page.fill("#prompt", RED)
        page.click("#submit")
        self.status(page, "completed")
        self.assertEqual(self.current(page)["esa"]["settings"], {})


class Offline(Page):
    """A server that goes away, and comes back."""

    def test_offline(self):
        page = self.open(expected=("ERR_CONNECTION", "ERR_EMPTY", "ERR_SOCKET", "ERR_INCOMPLETE"))
        self.small(page)
        page.click("#submit")
        self.status(page, "completed")
        port = self.server.port
        self.server.stop()
        wait(page, "!document.getElementById('offline').hidden", 30)
        self.assertIn("does not answer", page.inner_text("#offline"))
        self.sound(page)
        self.shot(page, "desktop-offline")
        page.click("#submit")
        wait(page, "!document.getElementById('form-error').hidden")
        type(self).server = serve_kit.Server(ESA, os.path.join(self.folder, "videos"), *self.options(), port=port)
        page.click("#offline-retry")
        wait(page, "document.getElementById('offline').hidden", 30)
        wait(page, "document.querySelectorAll('#cards li').length === 1")
        self.small(page, STAR)
        page.click("#submit")
        wait(page, f"document.querySelector('#job h2').innerText === '{STAR}'")  # that before is completed, too
        self.status(page, "completed")


class Picture(Page):
    """Image to video: a mini of Wan 2.1 I2V, which the Python tests' environment makes."""

    @classmethod
    def options(cls):
        # `make test-all` makes this environment beside this test: its stamp comes last
        made = os.path.join(TOP, ".venv", "requirements")
        until = time.monotonic() + 1200
        while os.path.isdir(made) and not os.path.exists(os.path.join(made, "stamp")) and time.monotonic() < until:
            time.sleep(1)
        python = subprocess.run([os.path.join(TOP, "scripts", "python-env.sh")], check=True, stdout=subprocess.PIPE,
                                text=True).stdout.strip()
        code = "import pathlib, sys, torch, engine_minis; torch.set_grad_enabled(False);" \
               "engine_minis.make_wan_i2v(pathlib.Path(sys.argv[1]))"
        subprocess.run([python, "-c", code, os.path.join(cls.folder, "mini-i2v")], check=True, capture_output=True,
                       cwd=os.path.join(TOP, "tests", "python"),
                       env={**os.environ, "PYTHONPATH": os.path.join(TOP, "python"),
                            "ESA_LIB": os.path.join(os.path.dirname(ESA), "libesa.so")})
        return [*super().options(), "--model", os.path.join(cls.folder, "mini-i2v")]

    def give(self, page, how):
        """Drops or pastes the picture."""
        with open(os.path.join(self.folder, "picture.png"), "rb") as file:
            data = base64.b64encode(file.read()).decode()
        page.evaluate("""([data, how]) => {
            const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0)), carried = new DataTransfer();
            const file = new File([bytes], 'picture.png', {type: 'image/png'});
            carried.items.add(file);
            const events = how === 'paste' ? [new ClipboardEvent('paste', {clipboardData: carried, bubbles: true})]
              : ['dragenter', 'dragover', 'drop'].map(name =>
                  new DragEvent(name, {dataTransfer: carried, bubbles: true, cancelable: true}));
            for (const event of events) document.querySelector('main').dispatchEvent(event);
          }""", [data, how])

    def test_picture(self):
        page = self.open(expected=("400",))
        mini = page.evaluate("Array.from(document.getElementById('model').options).map(o => o.value)"
                             ".find(name => name.includes('i2v'))")
        self.assertTrue(page.evaluate("document.getElementById('picture-field').hidden"))
        page.select_option("#model", mini)
        self.small(page)
        page.click("#submit")                           # without one: the server's sentence is at the picture
        wait(page, "document.querySelector('#picture-field .error')")
        page.select_option("#model", "wan-tiny")
        for how in ("drop", "paste", "file"):
            if how == "file":
                page.click("#picture-remove")
                self.assertTrue(page.evaluate("document.getElementById('picture').hidden"))
                page.set_input_files("#picture-file", os.path.join(self.folder, "picture.png"))
            else:
                self.give(page, how)
            wait(page, "document.getElementById('picture').naturalWidth === 90")
            self.assertEqual(page.input_value("#model"), mini)     # dropping one takes a model that can use it
        self.small(page)
        self.sound(page)
        self.shot(page, "desktop-picture")
        page.click("#submit")
        self.status(page, "completed")
        wait(page, DONE)
        self.assertEqual(self.current(page)["model"], mini)
        page.click("text=Use these settings again")
        self.assertEqual(page.locator("#picture-field .error").count(), 0)     # the picture is still there
        page.click("#picture-remove")
        page.click("text=Use these settings again")
        self.assertIn("picture", page.inner_text("#picture-field .error"))


if __name__ == "__main__":
    if not browser.find():
        print("skipped: no Chromium or Chrome on this machine (scripts/setup.sh test-all installs one on Debian)")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
