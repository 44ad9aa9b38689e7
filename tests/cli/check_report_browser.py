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
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import browser
import report_fixture

ESA, MAKE_RECORDING, MODELS = map(os.path.abspath, sys.argv[1:4])
FRAMES, FPS = 9, 16
# Seconds between two players that count as the same moment: under a frame.
FRAME = 1 / FPS
VIEWS = {
    "light": dict(width=1280), "dark": dict(width=1280, dark=True), "phone": dict(width=390, height=844, phone=True)
}
TIMES = "Array.from(document.querySelectorAll('.clip:not(.hidden) video')).map(v => v.currentTime)"
SETTLED = "Array.from(document.querySelectorAll('.clip:not(.hidden) video')).every(v => v.readyState >= 2 && !v.seeking)"
# The pixels of a canvas, read from a copy: reading the page's own would make the browser warn.
COPY = "const copy = c => { const o = new OffscreenCanvas(c.width, c.height), x = o.getContext('2d', {willReadFrequently: true}); x.drawImage(c, 0, 0); return x; };"
# A number that changes with the picture.
PICTURE = "(() => { " + COPY + " const c = document.getElementById('mask-canvas'), d = copy(c).getImageData(0, 0, c.width, c.height).data; let h = 0;" \
          " for (let i = 0; i < d.length; i += 4) h = (h * 31 + d[i] + d[i + 1]) % 4294967291; return h; })()"
# Share of the blocks whose middle has the colour of kept ones.
KEPT = "(() => { " + COPY + " const c = document.getElementById('mask-canvas'), x = copy(c), f = esa.viewer.file(), style = getComputedStyle(document.documentElement);" \
       " const [r, g, b] = style.getPropertyValue('--kept').trim().match(/[0-9a-f]{2}/gi).map(h => parseInt(h, 16)); let n = 0;" \
       " const middle = (i, block, tokens) => (i * block + Math.min(tokens, (i + 1) * block)) / 2 / tokens;" \
       " for (let i = 0; i < f.nq; i++) for (let j = 0; j < f.nk; j++) {" \
       " const p = x.getImageData(Math.floor(middle(j, f.block_k, f.tokens_k) * c.width), Math.floor(middle(i, f.block_q, f.tokens_q) * c.height), 1, 1).data;" \
       " n += p[0] === r && p[1] === g && p[2] === b; } return n / (f.nq * f.nk); })()"

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
                page = self.browser.open(self.url, **view)
                page.wait(SETTLED)
                test(self, name, page)
                self.assertEqual(page.errors, [])
    return every


class Report(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.url = make_page(cls.folder.name)
        cls.browser = browser.Browser()
        cls.addClassCleanup(cls.browser.__exit__)

    def together(self, page, frame=None):
        """All players stand at the same frame (that one)."""
        page.wait(SETTLED)
        times = page.run(TIMES)
        self.assertGreater(len(times), 1)
        self.assertLess(max(times) - min(times), FRAME, times)
        if frame is not None:
            for t in times:
                self.assertEqual(int(t * FPS), frame, times)
            self.assertEqual(page.run("Number(document.getElementById('seek').value)"), frame)

    @in_every_view
    def test_everything_is_drawn_and_fits(self, name, page):
        self.assertEqual(page.run("document.documentElement.getAttribute('data-theme')"),
                         "dark" if name == "dark" else "light")
        self.assertEqual(page.run("document.querySelectorAll('#quality-charts svg').length"), 6)
        self.assertEqual(page.run("document.querySelectorAll('#quality-charts circle').length"), 18)
        self.assertEqual(page.run("document.querySelectorAll('#step-charts path').length"), 4)
        self.assertEqual(page.run("document.querySelectorAll('#time-bars .row').length"), 4)
        self.assertEqual(page.run("document.querySelectorAll('#density-heat rect.cell').length"), 4)
        self.assertEqual(page.run("document.querySelectorAll('#entropy-heat rect.cell').length"), 4)
        wide = page.run("[document.documentElement.scrollWidth, window.innerWidth]")
        self.assertEqual(wide[0], wide[1], "the page is wider than the screen")
        unnamed = page.run(
            "Array.from(document.querySelectorAll('button, select, input, canvas, svg[role]')).filter(e => e.offsetParent !== null || e.tagName === 'svg')"
            ".filter(e => !e.getAttribute('aria-label') && !e.textContent.trim() && !(e.labels && e.labels.length) && !e.closest('[aria-hidden]')).map(e => e.outerHTML.slice(0, 90))"
        )
        self.assertEqual(unnamed, [])

    @in_every_view
    def test_players_move_together(self, name, page):
        self.together(page, 0)
        page.run(
            "(() => { const s = document.getElementById('seek'); s.value = 5; s.dispatchEvent(new Event('input')); })()"
        )
        self.together(page, 5)
        page.click("#next")
        self.together(page, 6)
        page.click("#back")
        page.click("#back")
        self.together(page, 4)
        page.run("document.activeElement.blur()")
        page.key("ArrowRight", 39)
        self.together(page, 5)
        page.key(",", 188)
        self.together(page, 4)
        page.click("#first")
        self.together(page, 0)
        page.click("#play")
        page.wait("Number(document.getElementById('seek').value) >= 3")
        page.click("#play")
        self.assertFalse(page.run("esa.players.state.playing"))
        self.together(page, page.run("Number(document.getElementById('seek').value)"))
        self.assertTrue(page.run("Array.from(document.querySelectorAll('video')).every(v => v.paused)"))

    @in_every_view
    def test_playing_goes_round(self, name, page):
        page.run("document.activeElement.blur()")
        page.run(f"esa.players.seek({FRAMES - 2})")
        page.wait(SETTLED)
        page.key(" ", 32)
        page.wait(f"esa.players.state.playing && esa.players.state.frame < {FRAMES - 3}")
        page.key(" ", 32)
        self.together(page)

    @in_every_view
    def test_prompts_and_pictures(self, name, page):
        """The third prompt has a pile of pictures among its videos: it moves with them."""
        page.run(
            "(() => { const m = document.getElementById('clip'); m.value = 2; m.dispatchEvent(new Event('change')); })()"
        )
        self.assertEqual(page.run("document.querySelectorAll('.clip:not(.hidden)').length"), 1)
        for frame in (3, 8, 0):
            page.run(f"esa.players.seek({frame})")
            self.together(page, frame)
            shown = page.run(
                "Array.from(document.querySelectorAll('.clip:not(.hidden) .frames img')).map((p, i) => getComputedStyle(p).display !== 'none' ? i : -1).filter(i => i >= 0)"
            )
            self.assertEqual(shown, [frame])

    @in_every_view
    def test_difference(self, name, page):
        page.click("#difference")
        page.wait(SETTLED)
        page.wait("document.querySelectorAll('.clip:not(.hidden) .stage canvas').length === 3")
        sums = page.run(
            "(() => { " + COPY +
            " return Array.from(document.querySelectorAll('.clip:not(.hidden) .stage canvas')).map(c => { const d = copy(c).getImageData(0, 0, c.width, c.height).data;"
            " let s = 0; for (let i = 0; i < d.length; i += 4) s += d[i] + d[i + 1] + d[i + 2]; return s; }); })()")
        self.assertGreater(sums[0], 0)              # another video than dense
        self.assertEqual(sums[1], 0)                # the dense video itself
        page.click("#difference")
        self.assertEqual(page.run("document.querySelectorAll('.stage canvas').length"), 0)

    @in_every_view
    def test_masks_change(self, name, page):
        seen = {}
        for what, selector in (("first", None), ("head", "#mask-canvas"), ("layer", "#mask-layer + button"),
                               ("step", "#mask-group + button"), ("thumb",
                                                                  "#mask-thumbs button:not([aria-pressed=true])")):
            if selector:
                page.click(selector)
            seen[what] = page.run(PICTURE)
            density = page.run("esa.viewer.file().budgets[esa.viewer.state.budget].density[0]")
            s = page.run("esa.viewer.state")
            # what is drawn is what the file says
            self.assertAlmostEqual(page.run(KEPT), density[s["layer"]][s["group"]][s["head"]], 3)
        self.assertEqual(len(set(seen.values())), len(seen), seen)
        before = page.run(PICTURE)
        page.run(
            "(() => { const m = document.getElementById('mask-budget'); m.value = 2; m.dispatchEvent(new Event('change')); })()"
        )
        self.assertNotEqual(page.run(PICTURE), before)
        page.run("document.getElementById('mask-canvas').focus()")
        label = page.run("document.getElementById('mask-canvas').getAttribute('aria-label')")
        page.key("PageDown", 34)
        self.assertNotEqual(page.run("document.getElementById('mask-canvas').getAttribute('aria-label')"), label)

    @in_every_view
    def test_heat_map_leads_to_the_mask(self, name, page):
        page.click("#density-heat rect.cell:not(.chosen)")
        state = page.run("esa.viewer.state")
        self.assertEqual(
            page.run(
                "[document.querySelector('#density-heat rect.chosen').getAttribute('data-row'), document.querySelector('#density-heat rect.chosen').getAttribute('data-column')]"
            ), [str(page.run("esa.viewer.file().shown_layers[esa.viewer.state.layer]")),
                str(state["head"])])

    @in_every_view
    def test_theme_switch(self, name, page):
        for choice in ("dark", "light"):
            page.click(f"[data-theme-choice={choice}]")
            self.assertEqual(page.run("document.documentElement.getAttribute('data-theme')"), choice)
            dark = page.run("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)[0] < 60")
            self.assertEqual(dark, choice == "dark")
        page.click("[data-theme-choice=auto]")
        self.assertEqual(page.run("document.documentElement.getAttribute('data-theme')"),
                         "dark" if name == "dark" else "light")

    def test_details_and_paper(self):
        page = self.browser.open(self.url, **VIEWS["light"])
        page.click("details[data-file='speed.json'] summary")
        page.wait("document.querySelector(\"details[data-file='speed.json'] pre\").textContent.length > 100")
        shown = json.loads(page.run("document.querySelector(\"details[data-file='speed.json'] pre\").textContent"))
        with open(self.folder.name + "/res/speed.json", encoding="utf-8") as file:
            self.assertEqual(shown, json.load(file))
        page.call("Emulation.setEmulatedMedia", media="print")
        self.assertEqual(page.run("getComputedStyle(document.querySelector('.bar')).display"), "none")
        self.assertEqual(page.run("getComputedStyle(document.getElementById('transport')).display"), "none")
        self.assertEqual(page.errors, [])

    def test_without_scripts(self):
        """Tables and videos are there, each with the browser's own controls."""
        page = self.browser.open("about:blank", width=1280)
        page.call("Emulation.setScriptExecutionDisabled", value=True)
        page.url = self.url
        page.call("Page.navigate", url=self.url)
        time.sleep(1)
        root = page.call("DOM.getDocument")["root"]["nodeId"]
        count = {
            s: len(page.call("DOM.querySelectorAll", nodeId=root, selector=s)["nodeIds"])
            for s in ("video[controls]", "tbody tr", "noscript p")
        }
        self.assertEqual(count, {"video[controls]": 11, "tbody tr": 4, "noscript p": 1})
        self.assertEqual(page.errors, [])

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
                page = self.browser.open("file://" + folder + "/part.html", width=1280)
                self.assertEqual(page.errors, [], args)
            os.unlink(f"{folder}/part/{name}")


if __name__ == "__main__":
    if not browser.find():
        print("skipped: no Chromium or Chrome on this machine (scripts/setup.sh test-all installs one on Debian)")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1] + sys.argv[4:])
