#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`esa report` in a headless Chromium: check_report_browser.py ESA MAKE_RECORDING MODELS. Exits 77 (skipped) where
there is no browser.

The page is made from small videos of wan-tiny and opened wide and light, wide and dark, and as wide as a phone. Nothing
may complain in the console or ask the network for anything; players must stand at the same time after every way of
moving them; mask pictures must change when one clicks through them."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import packages

packages.need("requirements-browser.txt", "playwright", "jsonschema")
import browser  # noqa: E402
import playwright.sync_api  # noqa: E402
import report_fixture  # noqa: E402
from browser import wait  # noqa: E402

ESA, MAKE_RECORDING, MODELS = map(os.path.abspath, sys.argv[1:4])
FRAMES, FPS = 9, 16
# Seconds between two players that count as the same moment: under a frame.
FRAME = 1 / FPS
WIDE = {"width": 1280, "height": 900}
VIEWS = {
    "light": dict(viewport=WIDE, color_scheme="light"), "dark": dict(viewport=WIDE, color_scheme="dark"),
    "phone": dict(viewport={"width": 390, "height": 844}, color_scheme="light", device_scale_factor=2, is_mobile=True)
}
VIDEOS = "Array.from(document.querySelectorAll('.clip:not(.hidden) video'))"
TIMES = VIDEOS + ".map(v => v.currentTime)"
SETTLED = VIDEOS + ".every(v => v.readyState >= 2 && !v.seeking)"
# The pixels of a canvas, read from a copy: reading the page's own would make the browser warn.
COPY = """
    const copy = c => {
      const o = new OffscreenCanvas(c.width, c.height), x = o.getContext('2d', {willReadFrequently: true});
      x.drawImage(c, 0, 0);
      return x;
    };"""
# A number that changes with the picture.
PICTURE = "(() => {" + COPY + """
    const c = document.getElementById('mask-canvas'), d = copy(c).getImageData(0, 0, c.width, c.height).data;
    let h = 0;
    for (let i = 0; i < d.length; i += 4) h = (h * 31 + d[i] + d[i + 1]) % 4294967291;
    return h;
  })()"""
# Share of the blocks whose middle has the colour of kept ones.
KEPT = "(() => {" + COPY + """
    const c = document.getElementById('mask-canvas'), x = copy(c), f = esa.viewer.file();
    const kept = getComputedStyle(document.documentElement).getPropertyValue('--kept').trim();
    const [r, g, b] = kept.match(/[0-9a-f]{2}/gi).map(h => parseInt(h, 16));
    const middle = (i, block, tokens) => (i * block + Math.min(tokens, (i + 1) * block)) / 2 / tokens;
    let n = 0;
    for (let i = 0; i < f.nq; i++)
      for (let j = 0; j < f.nk; j++) {
        const column = Math.floor(middle(j, f.block_k, f.tokens_k) * c.width);
        const row = Math.floor(middle(i, f.block_q, f.tokens_q) * c.height);
        const p = x.getImageData(column, row, 1, 1).data;
        n += p[0] === r && p[1] === g && p[2] === b;
      }
    return n / (f.nq * f.nk);
  })()"""
# The sum of the pixels of each canvas over a video.
SUMS = "(() => {" + COPY + """
    return Array.from(document.querySelectorAll('.clip:not(.hidden) .stage canvas')).map(c => {
      const d = copy(c).getImageData(0, 0, c.width, c.height).data;
      let s = 0;
      for (let i = 0; i < d.length; i += 4) s += d[i] + d[i + 1] + d[i + 2];
      return s;
    });
  })()"""
# Numbers of the pictures of a pile that are visible.
SHOWN = """
  Array.from(document.querySelectorAll('.clip:not(.hidden) .frames img'))
    .map((p, i) => getComputedStyle(p).display !== 'none' ? i : -1).filter(i => i >= 0)"""
CHOSEN = """
  ['data-row', 'data-column'].map(name => document.querySelector('#density-heat rect.chosen').getAttribute(name))"""


def set_value(page, name, value, event):
    """Sets a control as a user would."""
    page.evaluate(f"(() => {{ const e = document.getElementById('{name}'); e.value = {value};"
                  f" e.dispatchEvent(new Event('{event}')); }})()")


def make_page(folder):
    """Two videos of the tiny model, in turn, and a pile of pictures as the last variant of the last prompt."""
    env = {**os.environ, "ESA_MODELS": MODELS}
    small = ["--frames", str(FRAMES), "--height", "64", "--width", "64", "--steps", "1", "--guidance", "1"]
    for name, seed in (("a.mp4", 0), ("b.mp4", 1), ("c/", 2)):
        subprocess.run(
            [ESA, "generate", "--method", "dense", *small, "--seed",
             str(seed), "--out",
             os.path.join(folder, name)], check=True, env=env, capture_output=True)
    subprocess.run([MAKE_RECORDING, folder + "/rec", "3", "2"], check=True)
    subprocess.run([ESA, "masks", "merge", folder + "/rec", "--out", folder + "/m.safetensors"], check=True,
                   capture_output=True)
    a, b, c = (os.path.join(folder, name) for name in ("a.mp4", "b.mp4", "c"))
    report_fixture.make(folder + "/res", "res", [a, a, a, b, b, b, a, a, a, b, a, c], size=(FRAMES, 64, 64))
    subprocess.run(
        [ESA, "report", folder + "/res", "--masks", folder + "/m.safetensors", "--output", folder + "/page.html"],
        check=True, capture_output=True)
    return "file://" + folder + "/page.html"


def in_every_view(test):
    """Runs a test in each view, on a page of its own, which must have nothing to complain about in the end."""
    def every(self):
        for name, view in VIEWS.items():
            with self.subTest(view=name):
                page = self.open(self.url, **view)
                wait(page, SETTLED)
                test(self, name, page)
                self.assertEqual(self.errors, [])
    return every


class Report(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.url = make_page(cls.folder.name)
        driver = playwright.sync_api.sync_playwright().start()
        cls.addClassCleanup(driver.stop)
        cls.browser = driver.chromium.launch(executable_path=browser.find(), args=["--no-sandbox"])
        cls.addClassCleanup(cls.browser.close)

    def open(self, url, **view):
        """A page in a context of its own. self.errors: what the console complained about, and requests that leave the
        page."""
        page = self.browser.new_context(**view).new_page()
        self.addCleanup(page.context.close)
        self.errors = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda said: self.errors.append(said.text)
                if said.type in ("error", "warning", "assert") else None)
        page.on("request", lambda request: self.errors.append("asks the network for " + request.url[:200])
                if request.url != url and not request.url.startswith(("data:", "about:", "blob:")) else None)
        page.goto(url)
        return page

    def together(self, page, frame=None):
        """All players stand at the same frame (that one)."""
        wait(page, SETTLED)
        times = page.evaluate(TIMES)
        self.assertGreater(len(times), 1)
        self.assertLess(max(times) - min(times), FRAME, times)
        if frame is not None:
            for t in times:
                self.assertEqual(int(t * FPS), frame, times)
            self.assertEqual(page.evaluate("Number(document.getElementById('seek').value)"), frame)

    @in_every_view
    def test_everything_is_drawn_and_fits(self, name, page):
        self.assertEqual(page.evaluate("document.documentElement.getAttribute('data-theme')"),
                         "dark" if name == "dark" else "light")
        self.assertEqual(page.evaluate("document.querySelectorAll('#quality-charts svg').length"), 6)
        self.assertEqual(page.evaluate("document.querySelectorAll('#quality-charts circle').length"), 18)
        self.assertEqual(page.evaluate("document.querySelectorAll('#step-charts path').length"), 4)
        self.assertEqual(page.evaluate("document.querySelectorAll('#time-bars .row').length"), 4)
        self.assertEqual(page.evaluate("document.querySelectorAll('#density-heat rect.cell').length"), 4)
        self.assertEqual(page.evaluate("document.querySelectorAll('#entropy-heat rect.cell').length"), 4)
        self.assertEqual(browser.wide(page), 0, "the page is wider than the screen")
        unnamed = page.evaluate(browser.UNNAMED)
        self.assertEqual(unnamed, [])

    @in_every_view
    def test_players_move_together(self, name, page):
        self.together(page, 0)
        set_value(page, "seek", 5, "input")
        self.together(page, 5)
        page.click("#next")
        self.together(page, 6)
        page.click("#back")
        page.click("#back")
        self.together(page, 4)
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("ArrowRight")
        self.together(page, 5)
        page.keyboard.press(",")
        self.together(page, 4)
        page.click("#first")
        self.together(page, 0)
        page.click("#play")
        wait(page, "Number(document.getElementById('seek').value) >= 3")
        page.click("#play")
        self.assertFalse(page.evaluate("esa.players.state.playing"))
        self.together(page, page.evaluate("Number(document.getElementById('seek').value)"))
        self.assertTrue(page.evaluate("Array.from(document.querySelectorAll('video')).every(v => v.paused)"))

    @in_every_view
    def test_playing_goes_round(self, name, page):
        page.evaluate("document.activeElement.blur()")
        page.evaluate(f"esa.players.seek({FRAMES - 2})")
        wait(page, SETTLED)
        page.keyboard.press("Space")
        wait(page, f"esa.players.state.playing && esa.players.state.frame < {FRAMES - 3}")
        page.keyboard.press("Space")
        self.together(page)

    @in_every_view
    def test_prompts_and_pictures(self, name, page):
        """The third prompt has a pile of pictures among its videos: it moves with them."""
        set_value(page, "clip", 2, "change")
        self.assertEqual(page.evaluate("document.querySelectorAll('.clip:not(.hidden)').length"), 1)
        for frame in (3, 8, 0):
            page.evaluate(f"esa.players.seek({frame})")
            self.together(page, frame)
            shown = page.evaluate(SHOWN)
            self.assertEqual(shown, [frame])

    @in_every_view
    def test_difference(self, name, page):
        page.click("#difference")
        wait(page, SETTLED)
        wait(page, "document.querySelectorAll('.clip:not(.hidden) .stage canvas').length === 3")
        sums = page.evaluate(SUMS)
        self.assertGreater(sums[0], 0)              # another video than dense
        self.assertEqual(sums[1], 0)                # the dense video itself
        page.click("#difference")
        self.assertEqual(page.evaluate("document.querySelectorAll('.stage canvas').length"), 0)

    @in_every_view
    def test_masks_change(self, name, page):
        seen = {}
        for what, selector in (("first", None), ("head", "#mask-canvas"), ("layer", "#mask-layer + button"),
                               ("step", "#mask-group + button"), ("thumb",
                                                                  "#mask-thumbs button:not([aria-pressed=true])")):
            if selector:
                page.click(selector)
            seen[what] = page.evaluate(PICTURE)
            density = page.evaluate("esa.viewer.file().budgets[esa.viewer.state.budget].density[0]")
            s = page.evaluate("esa.viewer.state")
            # what is drawn is what the file says
            self.assertAlmostEqual(page.evaluate(KEPT), density[s["layer"]][s["group"]][s["head"]], 3)
        self.assertEqual(len(set(seen.values())), len(seen), seen)
        before = page.evaluate(PICTURE)
        set_value(page, "mask-budget", 2, "change")
        self.assertNotEqual(page.evaluate(PICTURE), before)
        page.evaluate("document.getElementById('mask-canvas').focus()")
        label = page.evaluate("document.getElementById('mask-canvas').getAttribute('aria-label')")
        page.keyboard.press("PageDown")
        self.assertNotEqual(page.evaluate("document.getElementById('mask-canvas').getAttribute('aria-label')"), label)

    @in_every_view
    def test_heat_map_leads_to_the_mask(self, name, page):
        page.click("#density-heat rect.cell:not(.chosen)")
        state = page.evaluate("esa.viewer.state")
        self.assertEqual(
            page.evaluate(CHOSEN), [str(page.evaluate("esa.viewer.file().shown_layers[esa.viewer.state.layer]")),
                str(state["head"])])

    @in_every_view
    def test_theme_switch(self, name, page):
        for choice in ("dark", "light"):
            page.click(f"[data-theme-choice={choice}]")
            self.assertEqual(page.evaluate("document.documentElement.getAttribute('data-theme')"), choice)
            dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)[0] < 60")
            self.assertEqual(dark, choice == "dark")
        page.click("[data-theme-choice=auto]")
        self.assertEqual(page.evaluate("document.documentElement.getAttribute('data-theme')"),
                         "dark" if name == "dark" else "light")

    def test_details_and_paper(self):
        page = self.open(self.url, **VIEWS["light"])
        page.click("details[data-file='speed.json'] summary")
        wait(page, "document.querySelector(\"details[data-file='speed.json'] pre\").textContent.length > 100")
        shown = json.loads(page.evaluate("document.querySelector(\"details[data-file='speed.json'] pre\").textContent"))
        with open(self.folder.name + "/res/speed.json", encoding="utf-8") as file:
            self.assertEqual(shown, json.load(file))
        page.emulate_media(media="print")
        self.assertEqual(page.evaluate("getComputedStyle(document.querySelector('.bar')).display"), "none")
        self.assertEqual(page.evaluate("getComputedStyle(document.getElementById('transport')).display"), "none")
        self.assertEqual(self.errors, [])

    def test_without_scripts(self):
        """Tables and videos are there, each with the browser's own controls."""
        page = self.open(self.url, viewport=WIDE, java_script_enabled=False)
        count = {s: page.locator(s).count() for s in ("video[controls]", "tbody tr", "noscript p")}
        self.assertEqual(count, {"video[controls]": 11, "tbody tr": 4, "noscript p": 1})
        self.assertEqual(self.errors, [])

    def test_pages_with_parts_missing(self):
        """Masks alone, and results without quality, speed or videos."""
        folder = self.folder.name
        os.makedirs(folder + "/part", exist_ok=True)
        # no videos, no LPIPS
        report_fixture.make(folder + "/poor", "poor", [], lpips=False, budgets=(0.5,), prompts=["one"])
        for name in ("speed.json", "quality.json"):
            with open(f"{folder}/res/{name}", encoding="utf-8") as file, open(f"{folder}/part/{name}", "w",
                                                                              encoding="utf-8") as out:
                out.write(file.read())
            for args in ([folder + "/part"], [folder + "/poor"], [folder + "/part", folder + "/res", "--no-videos"],
                         ["--masks", folder + "/m.safetensors"]):
                subprocess.run([ESA, "report", *args, "--output", folder + "/part.html"], check=True,
                               capture_output=True)
                self.open("file://" + folder + "/part.html", viewport=WIDE)
                self.assertEqual(self.errors, [], args)
            os.unlink(f"{folder}/part/{name}")


if __name__ == "__main__":
    if not browser.find():
        print("skipped: no Chromium or Chrome on this machine (scripts/setup.sh test-all installs one on Debian)")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1] + sys.argv[4:])
