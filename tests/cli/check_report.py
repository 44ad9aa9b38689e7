#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`esa report` without a browser: check_report.py ESA MAKE_RECORDING.

The page is made from a results folder with made-up numbers, parsed, and what is embedded in it compared with what it
was made from."""
import base64
import functools
import html.parser
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import zlib

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import kit
import report_fixture

ESA, MAKE_RECORDING = map(os.path.abspath, sys.argv[1:3])
SEED = int(os.environ.get("ESA_TEST_SEED", "1"))
EMPTY = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


def esa(*args, cwd=None):
    return kit.run(ESA, *args, cwd=cwd)


def y4m(frames, width=64, height=48, fps=16):
    """Every frame has another shade, and the first one depends on how many there are."""
    header = f"YUV4MPEG2 W{width} H{height} F{fps}:1 Ip A1:1 C444\n".encode()
    return header + b"".join(b"FRAME\n" + bytes([(37 * i + frames) % 200 + 20]) * (3 * width * height)
                             for i in range(frames))


@functools.cache
def mp4(codec="h264", frames=9):
    """The bytes of an MP4 file that esa has written."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "v.y4m"), "wb") as file:
            file.write(y4m(frames))
        code, _, err = esa("export", "v.y4m", "--out", "v.mp4", "--codec", codec, cwd=folder)
        if code:
            raise AssertionError(f"no MP4 in {codec}: {err}")
        return kit.read(os.path.join(folder, "v.mp4"))


def png(width, height, shade):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    rows = b"".join(b"\0" + bytes([shade]) * width for _ in range(height))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)) + chunk(
        b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


class Parsed(html.parser.HTMLParser):
    """Elements with their attributes and texts; every tag must be closed where it should be."""
    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.faults = [], [], []
        self.feed(text)
        self.close()
        if self.open:
            self.faults.append(f"not closed: {[e['tag'] for e in self.open]}")

    def handle_starttag(self, tag, attributes):
        element = {
            "tag": tag, "text": "", "inside": [e["tag"] for e in self.open], **{"@" + k: v
                                                                                for k, v in attributes}
        }
        if len({k for k, _ in attributes}) != len(attributes):
            self.faults.append(f"an attribute twice: {tag} {attributes}")
        self.elements.append(element)
        if tag not in EMPTY:
            self.open.append(element)

    def handle_startendtag(self, tag, attributes):      # <path .../> of a picture
        self.handle_starttag(tag, attributes)
        if tag not in EMPTY:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open[-1]["tag"] != tag:
            self.faults.append(f"</{tag}> closes {self.open[-1]['tag'] if self.open else 'nothing'} at {self.getpos()}")
        else:
            self.open.pop()

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag, **attributes):
        return [
            e for e in self.elements if e["tag"] == tag and all(
                e.get("@" + k.rstrip("_").replace("_", "-")) == v for k, v in attributes.items())
        ]


class Base(kit.Folder):
    def call(self, *args, cwd):
        return esa("report", *args, cwd=cwd)

    def page(self, *args, notes=0):
        """Makes a page; its parsed form and its data. Whatever the page: well-formed, names once, no address
        outside."""
        code, out, err = esa("report", *args, "--output", "page.html", cwd=self.dir)
        self.assertEqual(code, 0, err)
        self.assertEqual(len(err.splitlines()), notes, err)
        text = self.read("page.html").decode()
        page = Parsed(text)
        self.assertEqual(page.faults, [])
        self.assertTrue(text.startswith("<!DOCTYPE html>"))
        ids = [e["@id"] for e in page.elements if "@id" in e]
        self.assertEqual(len(ids), len(set(ids)))
        for e in page.elements:
            for name in ("@src", "@href"):
                if name in e:
                    self.assertTrue(e[name].startswith(("data:", "#")), e[name][:80])
        for e in page.all("a"):
            self.assertIn(e["@href"][1:], ids)
        self.assertNotIn("<!--esa:", text)
        style = page.all("style")[0]["text"]
        self.assertNotRegex(style, r"url\(|@import")
        self.assertEqual(len(page.all("script")), 2)
        self.assertEqual([e["tag"] for e in page.elements if e["tag"] in ("iframe", "object", "embed", "form")], [])
        for e in page.all("label"):
            self.assertTrue(e["text"].strip(), "a label says nothing")
        return page, json.loads(page.all("script", id="esa-data")[0]["text"])

    def masks(self, name="m.safetensors", *options):
        subprocess.run([MAKE_RECORDING, self.path("rec"), "7", "2"], check=True)
        code, _, err = esa("masks", "merge", "rec", "--out", name, *options, cwd=self.dir)
        self.assertEqual(code, 0, err)
        os.unlink(self.path("rec"))
        return self.path(name)

    def results(self, name="res", videos=None, **more):
        if videos is None:
            videos = [self.put(f"made/{i}.mp4", mp4(frames=9 + i)) for i in range(4)]
        return report_fixture.make(self.path(name), name, videos, **more)


# what a strict reader refuses: each is one mistake away from JSON
NOT_JSON = [" ", "{", "[1,]", '{"format": 1,}', '{"format" 1}', "{format: 1}", "[1 2]", "1", "[01]", "[+1]", "[.5]",
            "[1.]", "[1e]", "[-]", "[nul]", "[NaN]", "[Infinity]",
            "[1e999]", '["', '["\\x"]', '["\\u12"]', '["\\ud800"]',
            '["\\u0000"]', "{} x", '{"format": 1, "format": 1}', "{} // x", "['a']", "}", "[1]\0", "[" * 100000]


class Words(Base):
    def test_help(self):
        code, out, err = esa("report", "--help")
        self.assertEqual((code, err), (0, ""))
        for word in ("usage: esa report RESULTS...", "--output", "--masks", "--no-videos", "--max-prompts"):
            self.assertIn(word, out)

    def test_usage(self):
        self.fails(status=2, says=["results folder", "--masks", "--help"])
        self.fails("--output", "r.html", status=2, says=["results folder"])
        self.fails("res", "--outptu", "r.html", status=2, says=["did you mean --output?"])
        self.fails("res", "--output", "-", status=2)
        self.fails("res", "--output", "r.html", "--max-prompts", "0", status=2)
        self.fails("res", "--output", "r.html", "--mask-mb", "x", status=2)
        self.fails("--masks", "", "--output", "r.html", status=2, says=["--masks names no file"])
        self.fails("--masks", ",", "--output", "r.html", status=2, says=["--masks names no file"])
        code, _, err = esa("reprot")
        self.assertEqual(code, 2)
        self.assertIn("did you mean 'esa report'", err)

    def test_refusals(self):
        self.fails("none", "--output", "r.html", says=["no folder 'none'"])
        self.put("file", "x")
        self.fails("file", "--output", "r.html", says=["is a file", "--masks"])
        os.mkdir(self.path("empty"))
        self.fails("empty", "--output", "r.html", says=["not a results folder", "esa experiment run"])
        self.results()
        self.fails("res", "--output", "none/r.html", says=["none/r.html", "No such file"])
        self.fails("res", "--masks", "none", "--output", "r.html", says=["none"])
        self.fails("res", "--masks", "file", "--output", "r.html", says=["file"])
        self.fails("res", "empty", "--output", "r.html", says=["empty"])
        for name, text, says in (("speed.json", "{\n\"format\": 1,\n}", "line 3"), ("quality.json", "[1, 2", "line 1"),
                                 ("config.json", "{\"format\": 2}", "format"), ("speed.json", "", "line 1"),
                                 ("quality.json", b"{\"format\": 1, \"tag\": \"\xff\"}", "0xff"),
                                 ("speed.json", "[]", "format"),
                                 *(("speed.json", text, "is not JSON: line 1") for text in NOT_JSON)):
            self.results("broken")
            self.put("broken/" + name, text)
            self.fails("broken", "--output", "r.html", says=["broken/" + name, says])
            shutil.rmtree(self.path("broken"))
        self.results("early")
        for name in ("speed.json", "quality.json"):
            os.unlink(self.path("early/" + name))
        self.fails("early", "--output", "r.html", says=["has not finished"])
        self.results("bare")
        for name in ("speed.json", "quality.json"):
            self.put("bare/" + name, "{\"format\": 1}")
        self.fails("bare", "--output", "r.html", says=["no variants"])

    def test_variants_named_twice(self):
        for name in ("speed.json", "quality.json"):
            self.results("twice", [])
            data = kit.load(self.path("twice", name))
            data["variants"].append(data["variants"][-1])
            self.put("twice/" + name, json.dumps(data))
            self.fails("twice", "--output", "r.html", says=["twice/" + name, "names the variant 'b0.3' twice"])
            shutil.rmtree(self.path("twice"))

    def test_few_bytes_that_ask_for_much(self):
        self.results("much", [])
        data = kit.load(self.path("much", "speed.json"))
        video = data["variants"][0]["videos"][0]
        large = [{"name": f"v{i}", "videos": [{**video, "index": 99999}]} for i in range(200)]
        long = [{**video, "record": {"step_seconds": [1] * 10000}}] + [{}] * 10000
        for variants in (large, [{"name": "v", "videos": long}], [{"name": f"v{i}"} for i in range(5000)]):
            self.put("much/speed.json", json.dumps({**data, "variants": variants}))
            self.fails("much", "--output", "r.html", says=["variants and figures of", "expected at most"])
        ragged = {**video, "record": {"head_density": [[0.5] * 1000] + [[]] * 1000}}
        self.put("much/speed.json", json.dumps({**data, "variants": [{"name": "v", "videos": [ragged] + [{}] * 9}]}))
        code, _, err = esa("report", "much", "--no-videos", "--output", "r.html", cwd=self.dir)
        self.assertEqual((code, err), (0, ""))

    def test_default_name(self):
        self.results()
        code, out, err = esa("report", "res", cwd=self.dir)
        self.assertEqual((code, err), (0, ""))
        self.assertTrue(out.startswith("report.html: ") and os.path.exists(self.path("report.html")), out)

    def test_an_older_page_stays(self):
        self.put("r.html", "older")
        self.fails("none", "--output", "r.html")
        self.assertEqual(self.read("r.html"), b"older")


class Pages(Base):
    def test_files_are_in_the_page_as_they_are(self):
        config, speed, quality = self.results()
        _, data = self.page("res")
        files = data["runs"][0]["files"]
        self.assertEqual({name: json.loads(text) for name, text in files.items()},
                         {"config.json": config, "speed.json": speed, "quality.json": quality})
        for name, text in files.items():
            self.assertEqual(text.encode(), self.read("res", name))

    def test_figures(self):
        _, speed, quality = self.results(steps=7)
        page, data = self.page("res")
        run = data["runs"][0]
        self.assertEqual([v["id"] for v in run["variants"]], ["dense", "b0.7", "b0.5", "b0.3"])
        self.assertEqual(run["warmup"], 1)
        for v, s in zip(run["variants"], speed["variants"]):
            self.assertEqual(v["dense"], s["name"] == "dense")
            for ours, theirs in (("seconds", s["clip_seconds"]["median"]), ("step_seconds",
                                                                            s["step_seconds"]["median"]),
                                 ("sparse_seconds", s["step_seconds_sparse"]["median"]), ("speedup", s["speedup"] or 1),
                                 ("density", s["density"])):
                self.assertAlmostEqual(v[ours], theirs, 6, ours)
            record = s["videos"][0]["record"]
            self.assertEqual(len(v["steps"]), 7)
            for a, b in zip(v["steps"], record["step_seconds"]):
                self.assertAlmostEqual(a, b, 6)
            self.assertAlmostEqual(v["parts"]["total"],
                                   record["text_seconds"] + record["denoise_seconds"] + record["decode_seconds"], 6)
            self.assertAlmostEqual(sum(v["parts"][k] for k in ("text", "select", "attention", "rest", "decode")),
                                   v["parts"]["total"], 6)
            if v["dense"]:
                self.assertNotIn("head_density", v)
            else:
                self.assertEqual(v["head_density"], record["head_density"])
        for v, q in zip(run["variants"][1:], quality["variants"]):
            for name in ("psnr", "ssim", "lpips", "flicker"):
                self.assertAlmostEqual(v[name], q["mean"][name], 6)
        rows = [" ".join(e["text"].split()) for e in page.all("tr")]
        self.assertEqual(len(rows), 5)
        for row, q in zip(rows[2:], quality["variants"]):
            self.assertIn(f"{q['mean']['psnr']:.2f} dB", row)
            self.assertIn(f"{q['mean']['lpips']:.4f}", row)

    def test_carry(self):
        """A row of anchors and ages for each variant that has some; no card where there is none."""
        _, speed, _ = self.results(steps=6, anchors=(0, 4))
        page, data = self.page("res")
        sparse = data["runs"][0]["variants"][1:]
        age = round(speed["variants"][1]["videos"][0]["record"]["carry"]["age"], 8)      # the command writes 9 digits
        self.assertEqual([(v["anchors"], v["carry_age"]) for v in sparse], [(2, age)] * 3)
        self.assertIsNone(data["runs"][0]["variants"][0]["anchors"])
        rows = [row["text"] for row in page.all("tr") if "table" in row["inside"] and "●" in row["text"]]
        self.assertEqual(rows, [f"cached {budget}21.2●123●1" for budget in (0.7, 0.5, 0.3)])
        self.assertEqual(len(page.all("div", id="carry")), 1)
        self.results("off", steps=6)
        page, data = self.page("off")
        self.assertEqual(page.all("div", id="carry"), [])
        self.assertIsNone(data["runs"][0]["variants"][1]["anchors"])

    def test_carry_of_liars(self):
        """Anchors and ages that no run has: a page all the same."""
        self.results("odd", [])
        data = kit.load(self.path("odd", "speed.json"))
        for carry in ({"anchors": [-1, 1e300, "x", None, 2.5], "step_age": [1, "x", None, 1e300, -3]},
                      {"anchors": [0], "step_age": []}, {"anchors": 3, "step_age": 4}, [], {"anchors": [0] * 1000,
                                                                                            "step_age": [0]}):
            data["variants"][1]["videos"][0]["record"]["carry"] = carry
            self.put("odd/speed.json", json.dumps(data))
            self.page("odd", "--no-videos")

    def test_step_times_are_medians(self):
        _, speed, _ = self.results()
        for video, seconds in zip(speed["variants"][1]["videos"], (9.0, 1.0, 3.0)):
            video["record"] = {
                **video["record"], "step_seconds": [seconds] * 5, "seconds": 5 * seconds,
                "denoise_seconds": 5 * seconds, "decode_seconds": 0, "text_seconds": 0
            }
        self.put("res/speed.json", json.dumps(speed))
        variant = self.page("res")[1]["runs"][0]["variants"][1]
        self.assertEqual(variant["steps"], [3.0] * 5)
        self.assertEqual(variant["parts"]["total"], 15)                  # of one clip, the one in the middle

    def test_videos(self):
        self.results()
        page, _ = self.page("res")
        players, videos = page.all("figure", class_="player"), page.all("video")
        self.assertEqual((len(players), len(videos)), (12, 12))
        self.assertEqual(len([p for p in players if "@data-reference" in p]), 3)
        names = [f"videos/{v}/{i:03d}.mp4" for i in range(3) for v in ("dense", "b0.7", "b0.5", "b0.3")]
        for video, player, name in zip(videos, players, names):
            data = self.read("res/" + name)
            self.assertEqual(video["@src"], "data:video/mp4;base64," + base64.b64encode(data).decode(), name)
            frames = next(n for n in range(9, 13) if mp4(frames=n) == data)
            self.assertEqual((player["@data-fps"], int(player["@data-frames"])), ("16", frames))
            self.assertTrue(video["@aria-label"])
            self.assertEqual((video["@width"], video["@height"]), ("64", "48"))

    def test_words_of_others_are_words(self):
        """Prompts, tags and titles may hold anything: they are shown, not run."""
        self.results()
        page, _ = self.page("res", "--title", "</title><script>alert(1)</script> & \"x\"")
        self.assertEqual(page.all("h1")[0]["text"], "</title><script>alert(1)</script> & \"x\"")
        self.assertEqual(page.all("title")[0]["text"], "</title><script>alert(1)</script> & \"x\"")
        texts = [e["text"] for e in page.all("option")]
        for prompt in report_fixture.PROMPTS:
            self.assertIn(prompt, texts)
        self.assertIn("Example CPU <9000> & friends", page.all("header")[0]["text"])

    def test_same_inputs_same_bytes(self):
        self.results()
        masks = self.masks()
        self.page("res", "--masks", masks)
        first = self.read("page.html")
        self.page("res", "--masks", masks)
        self.assertEqual(self.read("page.html"), first)

    def test_several_runs(self):
        self.results("one", budgets=(0.5,))
        self.results("two", budgets=(0.3,), methods=("cached", "entropy"), lpips=False)
        page, data = self.page("one", "two/")
        self.assertEqual([r["tag"] for r in data["runs"]], ["one", "two"])
        self.assertEqual(data["runs"][0]["setting"], data["runs"][1]["setting"])
        self.assertEqual([v["label"] for v in data["runs"][1]["variants"]], ["dense", "cached 0.3", "entropy 0.3"])
        self.assertEqual(len(page.all("video")), 3 * 2 + 3 * 3)
        self.assertIsNone(data["runs"][1]["variants"][1]["lpips"])

    def test_older_folders(self):
        """Records that do not count the work give the same page."""
        self.results("new", work=True)
        self.results("old", work=False)
        self.assertNotEqual(self.read("new/speed.json"), self.read("old/speed.json"))
        self.assertNotIn(b"attention_work", self.read("old/speed.json"))
        pages = [self.page(name)[1]["runs"][0]["variants"] for name in ("new", "old")]
        self.assertEqual(pages[0], pages[1])

    def test_stages_that_are_missing(self):
        self.results()
        for name, gone in (("quality.json", "quality"), ("speed.json", "speed")):
            text = self.read("res/" + name)
            os.unlink(self.path("res/" + name))
            page, data = self.page("res")
            self.assertNotIn(gone, [e.get("@id") for e in page.all("section")])
            self.assertIn(name, page.all("p", class_="note")[-1]["text"])
            self.put("res/" + name, text)
        os.unlink(self.path("res/config.json"))
        page, data = self.page("res")
        self.assertEqual(data["runs"][0]["tag"], "res")
        self.assertEqual(data["runs"][0]["files"].keys(), {"speed.json", "quality.json"})

    def test_videos_that_cannot_be_shown(self):
        good = mp4()
        old = mp4("mpeg4")
        videos = (good, good[:200], b"no video", old[:old.index(b"mdat") + 60])
        self.results(videos=[self.put(f"v/{i}.mp4", data) for i, data in enumerate(videos)], prompts=["p"])
        page, _ = self.page("res", notes=1)
        self.assertEqual(len(page.all("video")), 1)
        why = [e["text"] for e in page.all("p", class_="why")]
        self.assertEqual(len(why), 3, why)
        for text in why:
            self.assertRegex(text, r"^'res/videos/.*\.mp4' .*\.$")
        self.assertEqual(len([e for e in page.all("figure") if "@data-frames" in e]), 1)
        self.results("gone", videos=[])
        page, _ = self.page("gone", notes=1)
        self.assertEqual(len(page.all("video")), 0)
        self.assertIn("No such file", page.all("p", class_="why")[0]["text"])

    def test_what_browsers_do_not_play_is_converted(self):
        """Older MPEG-4, and H.264 of RGB: shown with all their frames, but not as they are."""
        videos = [mp4(), mp4("mpeg4"), mp4("lossless"), mp4()]
        self.results(videos=[self.put(f"v/{i}.mp4", data) for i, data in enumerate(videos)], prompts=["p"])
        page, _ = self.page("res")
        shown = [base64.b64decode(v["@src"].split(",")[1]) for v in page.all("video")]
        self.assertEqual([a == b for a, b in zip(shown, videos, strict=True)], [True, False, False, True])
        self.assertEqual({(p["@data-fps"], p["@data-frames"]) for p in page.all("figure")}, {("16", "9")})

    def test_mp4_files_of_liars(self):
        """Lengths that point anywhere: never more than a message."""
        good = mp4(frames=2)
        fields = [*range(0, 64, 4), *range(good.index(b"moov") - 4, good.index(b"moov") + 600, 4)]
        lies = [good[:at] + value + good[at + 4:] for at in fields
                for value in (b"\0\0\0\0", b"\0\0\0\x07", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff")]
        lies += [good[:n] for n in range(0, len(good), 16)]
        self.results(videos=[self.put(f"v/{i:05d}.mp4", data) for i, data in enumerate(lies)],
                     prompts=[str(i) for i in range(len(lies))], budgets=(0.5, ))
        page, _ = self.page("res", notes=1)
        shown, left_out = len(page.all("video")), len(page.all("p", class_="why"))
        self.assertEqual(shown + left_out, 2 * len(lies))
        self.assertGreater(left_out, len(lies) // 4)                    # many fields do not matter
        for player in page.all("figure"):
            self.assertGreater(float(player.get("@data-fps", 1)), 0)

    def test_folders_of_pictures(self):
        for i in range(4):
            self.put(f"made/frames/{i:05d}.png", png(8, 6, 60 * i))
        self.put("made/frames/notes.txt", "not a picture")
        self.results(videos=[self.path("made/frames")], prompts=["p"])
        page, _ = self.page("res")
        pictures = page.all("img")
        self.assertEqual(len(pictures), 4 * 4)
        self.assertEqual([p["@src"] for p in pictures[:4]],
                         ["data:image/png;base64," + base64.b64encode(png(8, 6, 60 * i)).decode() for i in range(4)])
        self.assertEqual({p["@data-frames"] for p in page.all("figure")}, {"4"})
        self.put("res/videos/b0.5/000/00002.png", b"no picture")
        page, _ = self.page("res", notes=1)
        self.assertIn("00002.png", page.all("p", class_="why")[0]["text"])

    def test_only_videos_of_the_folder(self):
        """What lies elsewhere is left out, however it is named: the results may be a stranger's."""
        self.results(prompts=["one"])
        secret = self.put("secret.mp4", mp4(frames=30))
        inside = self.read("res/videos/dense/000.mp4")
        self.put("pile/00000.png", png(16, 16, 77))
        os.symlink(secret, self.path("res/linked.mp4"))
        os.symlink("..", self.path("res/up"))
        os.makedirs(self.path("res/pile"))
        self.put("res/pile/00000.png", png(16, 16, 78))
        os.symlink("../../pile/00000.png", self.path("res/pile/00001.png"))
        os.symlink("videos/dense/000.mp4", self.path("res/within.mp4"))
        # (its name in speed.json, whether it is shown)
        for name, shown in ((secret, False), ("../secret.mp4", False), ("videos/../../secret.mp4", False),
                            ("linked.mp4", False), ("up/secret.mp4", False), ("up/pile", False), ("pile", False),
                            ("up/res2/x.mp4", False), (self.path("pile"), False), ("within.mp4", True),
                            ("up/res/videos/dense/000.mp4", True), (self.path("res/within.mp4"), True)):
            for file in ("speed.json", "quality.json"):
                data = kit.load(self.path("res", file))
                for video in data["variants"][0]["videos"]:
                    video["file"] = name
                self.put("res/" + file, json.dumps(data))
            shutil.copytree(self.path("res"), self.path("res2"), symlinks=True)
            self.put("res2/x.mp4", mp4(frames=30))
            code, _, err = esa("report", "res", "--output", "r.html", cwd=self.dir)
            self.assertEqual(code, 0, err)
            text = self.read("r.html").decode()
            for hidden in (self.read("secret.mp4"), self.read("pile/00000.png")):
                self.assertNotIn(base64.b64encode(hidden).decode()[:200], text, name)
            self.assertEqual("is left out: it lies outside the results folder" in text, not shown, name)
            self.assertEqual("lies outside the results folder 'res'" in err, not shown, name)
            if shown:
                self.assertIn(base64.b64encode(inside).decode(), text)
            shutil.rmtree(self.path("res2"))

    def test_other_formats_are_converted(self):
        """Y4M: H.264 where FFmpeg has an encoder, else pictures."""
        picture = b"FRAME\n" + bytes(range(256)) * 12
        self.results(videos=[self.put("made/v.y4m", b"YUV4MPEG2 W32 H32 F8:1 Ip A1:1 C444\n" + picture * 5)],
                     prompts=["p"])
        code, _, err = esa("report", "res", "--output", "page.html", cwd=self.dir)
        self.assertEqual(code, 0, err)
        page, _ = self.page("res", notes=len(err.splitlines()))
        self.assertEqual({(p["@data-fps"], p["@data-frames"]) for p in page.all("figure")}, {("8", "5")})
        if page.all("video"):
            self.assertEqual((len(page.all("video")), err), (4, ""))
        else:
            self.assertEqual(len(page.all("img")), 20)
            self.assertIn("no H.264 encoder", err)

    def videos_to_convert(self, frames=5):
        picture = b"FRAME\n" + bytes(range(256)) * 12
        self.results(videos=[self.put("made/v.y4m", b"YUV4MPEG2 W32 H32 F8:1 Ip A1:1 C444\n" + picture * frames)],
                     prompts=["p"])
        shutil.rmtree(self.path("made"))

    def test_scratch_lies_beside_the_page(self):
        """Converting writes nothing where the user did not point to: not in $TMPDIR, not in the folder it runs in;
        and leaves nothing behind."""
        self.videos_to_convert()
        os.makedirs(self.path("out"))
        os.makedirs(self.path("elsewhere"))
        env = {**os.environ, "TMPDIR": self.path("none")}                # would fail if it were asked
        if os.geteuid() != 0:                                            # root writes anywhere
            os.chmod(self.path("elsewhere"), 0o555)
        before = self.files()
        done = subprocess.run([ESA, "report", self.path("res"), "--output",
                               self.path("out/page.html")], cwd=self.path("elsewhere"), env=env, capture_output=True,
                              text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.files(), sorted([*before, "out/page.html"]))
        page = Parsed(self.read("out/page.html").decode())
        self.assertEqual({p["@data-frames"] for p in page.all("figure")}, {"5"})
        traced = shutil.which("strace")
        if traced and subprocess.run([traced, "-o", os.devnull, "true"], capture_output=True).returncode:
            traced = None                                                # some containers forbid ptrace
        # every file it opens for writing lies in the page's folder
        if traced:
            subprocess.run(
                [
                    traced,
                    "-f",
                    "-e",
                    "trace=openat,mkdir,mkdirat,rename",
                    "-o",
                    self.path("trace"),
                    ESA,
                    "report",
                    self.path("res"),
                    "--output",
                    # leaks cannot be sought under ptrace
                    self.path("out/page.html")
                ],
                env={**env, "ASAN_OPTIONS": "detect_leaks=0"},
                check=True,
                capture_output=True)
            for line in self.read("trace").decode(errors="replace").splitlines():
                if "= -1" not in line and re.search(r"O_WRONLY|O_RDWR|mkdir|rename", line) and "/dev/" not in line:
                    self.assertIn(self.path("out"), line)
        into_pipe = subprocess.run([ESA, "report", self.path("res"), "--output", "/dev/stdout"], cwd=self.dir, env=env,
                                   capture_output=True, text=True)
        # no folder to convert in: a message in the video's place
        self.assertEqual(into_pipe.returncode, 0, into_pipe.stderr)
        self.assertIn("give --output a file", into_pipe.stdout)

    def test_interrupted(self):
        """A signal at moments of chance: the page as it was or the new one, one message, and no scratch."""
        self.videos_to_convert(frames=100)
        self.put("page.html", "older")
        before, rng, stopped = self.files(), random.Random(SEED), 0
        for attempt in range(12):
            run = subprocess.Popen([ESA, "report", "res", "--output", "page.html"], cwd=self.dir,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            wanted = time.monotonic() + rng.uniform(0, 0.2)
            while time.monotonic() < wanted and not any(
                    name.startswith("esa-report-") for name in os.listdir(self.dir)):
                time.sleep(0.001)
            time.sleep(0.02)                                             # the handler stands before anything is written
            run.send_signal(signal.SIGINT if attempt % 2 else signal.SIGTERM)
            out, err = run.communicate()
            self.assertEqual(self.files(), before, f"attempt {attempt}, seed {SEED}: {err}")
            if run.returncode == 130:
                self.assertEqual((out, err), ("", "esa: report: interrupted, nothing was written\n"))
                stopped += 1
            elif run.returncode == 0:
                self.assertTrue(self.read("page.html").startswith(b"<!DOCTYPE html>"))
                self.put("page.html", "older")
            else:
                self.assertIn(run.returncode, (-signal.SIGINT, -signal.SIGTERM), err)        # before it caught signals
            if run.returncode != 0:
                self.assertEqual(self.read("page.html"), b"older")
        self.assertGreater(stopped, 0, f"seed {SEED}")

    def test_scratch_goes_after_errors(self):
        """A disk that is full while a video is converted or the page is written."""
        self.videos_to_convert()
        before = self.files()
        for limit in (100, 3000, 100000):
            def tighten(limit=limit):
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

            done = subprocess.run([ESA, "report", "res", "--output", "page.html"], cwd=self.dir, capture_output=True,
                                  text=True, preexec_fn=tighten)
            if done.returncode == 0:
                os.unlink(self.path("page.html"))
            else:
                self.assertEqual((done.returncode, done.stdout), (1, ""), done.stderr)
            self.assertEqual(self.files(), before, (limit, done.stderr))

    def test_fewer_videos(self):
        self.results()
        self.assertEqual(len(self.page("res", "--max-prompts", 2)[0].all("video")), 8)
        page, _ = self.page("res", "--no-videos")
        self.assertEqual(len(page.all("video")), 0)
        self.assertNotIn("videos", [e.get("@id") for e in page.all("section")])

    def test_equal_videos(self):
        _, _, quality = self.results(budgets=(1.0,))
        v = quality["variants"][0]
        v["identical"], v["mean"]["psnr"] = 3, None
        for video in v["videos"]:
            video.update(identical=True, psnr=None, psnr_min=None)
        self.put("res/quality.json", json.dumps(quality))
        page, data = self.page("res")
        self.assertTrue(data["runs"][0]["variants"][1]["identical"])
        self.assertIn("equal", page.all("tr")[2]["text"])
        self.assertIn("equal to dense", page.all("figcaption")[1]["text"])


class Masks(Base):
    def bits(self, path):
        """The tensors of a mask file, read without esa."""
        data = kit.read(path)
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:8 + size])
        return {
            name: (t["shape"], data[8 + size + t["data_offsets"][0]:8 + size + t["data_offsets"][1]])
            for name, t in header.items() if name != "__metadata__"
        }

    def test_bits_and_figures(self):
        path = self.masks("m.safetensors", "--budgets", "0.7,0.3")
        page, data = self.page("--masks", path)
        file, tensors = data["masks"][0], self.bits(path)
        self.assertEqual(page.all("h1")[0]["text"], "Masks: m.safetensors")
        self.assertEqual((file["layers"], file["groups"], file["layer_count"]), ([1, 2], [1, 2, 3, 4], 3))
        self.assertEqual(file["group_steps"], [[i, i] for i in range(5)])
        self.assertEqual((file["shown_layers"], file["shown_groups"]), (file["layers"], file["groups"]))
        by_budget = {b["budget"]: b for b in file["budgets"]}
        self.assertEqual(set(by_budget), {0.7, 0.3})
        for budget, b in by_budget.items():
            shape, raw = tensors[f"mask.{round(1000 * budget):04d}.bits"]
            self.assertEqual(shape, [2, 4, file["heads"], file["nq"], (file["nk"] + 7) // 8])
            self.assertEqual(base64.b64decode(b["bits"]), raw)
            row = shape[3] * shape[4]
            for i in range(2 * 4 * file["heads"]):
                kept = sum(bin(x).count("1") for x in raw[i * row:(i + 1) * row])
                density = b["density"][0][i // file["heads"] // 4][i // file["heads"] % 4][i % file["heads"]]
                self.assertAlmostEqual(density, kept / (file["nq"] * file["nk"]), 3)
        entropy = struct.unpack(f"<{2 * 4 * file['heads']}f", tensors["entropy"][1])
        ours = [x for layer in file["entropy"][0] for group in layer for x in group]
        for a, b in zip(ours, entropy):
            self.assertAlmostEqual(a, b, 4)

    def test_large_files_are_thinned_out(self):
        """A file of 120 cells of 128 KB, of which 1 MB may go into the page."""
        path = self.masks("m.safetensors", "--budgets", "0.5", "--importance", "none")
        data = kit.read(path)
        size = struct.unpack("<Q", data[:8])[0]
        meta = json.loads(data[8:8 + size])["__metadata__"]
        L, T, H, nq, nk = 13, 12, 8, 128, 1024
        meta.update(layers=str(L), steps=str(T), groups=str(T), heads=str(H), tokens_q=str(nq * 64),
                    tokens_k=str(nk * 64), block="64,64", warmup_frac="0.2", importance="none")
        header, raw = {"__metadata__": meta}, b""
        row = b"\x01" * (nk // 8)
        for name, dtype, shape, content in (("step_group", "I32", [T], struct.pack(f"<{T}i", *range(T))),
                                            ("stored_layers", "I32", [L - 1], struct.pack(f"<{L - 1}i", *range(1, L))),
                                            ("stored_groups", "I32", [T - 3], struct.pack(f"<{T - 3}i", *range(3, T))),
                                            ("mask.0500.bits", "U8", [L - 1, T - 3, H, nq,
                                                                      nk // 8], row * ((L - 1) * (T - 3) * H * nq))):
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(raw), len(raw) + len(content)]}
            raw += content
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 64 + 56)
        self.put("large", struct.pack("<Q", len(text)) + text + raw)
        page, data = self.page("--masks", "large", "--mask-mb", 1)
        file = data["masks"][0]
        self.assertLessEqual(len(base64.b64decode(file["budgets"][0]["bits"])), 1 << 20)
        self.assertIn("--mask-mb", file["note"])
        self.assertEqual((file["shown_layers"][0], file["shown_groups"][-1]), (1, 11))     # the ends stay
        self.assertEqual(len(base64.b64decode(file["budgets"][0]["bits"])),
                         len(file["shown_layers"]) * len(file["shown_groups"]) * H * nq * nk // 8)
        self.assertEqual(len(file["budgets"][0]["density"][0]), L - 1)                     # figures of all
        self.assertNotIn("entropy", file)

    def test_budget_without_prebuilt(self):
        source = self.masks("all.safetensors")
        code, _, err = esa("masks", "derive", source, "--out", self.path("u8.safetensors"), "--budgets", "0.25",
                           cwd=self.dir)
        self.assertEqual(code, 0, err)
        _, data = self.page("--masks", "u8.safetensors,all.safetensors")
        self.assertEqual([[b["budget"] for b in m["budgets"]] for m in data["masks"]], [[0.25], [0.3, 0.5, 0.7]])

    def test_masks_of_the_results(self):
        self.results()
        shutil.move(self.masks("masks.safetensors"), self.path("res/masks.safetensors"))
        _, data = self.page("res")
        self.assertEqual([m["name"] for m in data["masks"]], ["masks.safetensors"])
        # --masks of the experiment, seen from where it was started
        _, speed, _ = self.results("given")
        speed["calibration"]["file"] = "m/elsewhere.safetensors"
        self.put("given/speed.json", json.dumps(speed))
        os.mkdir(self.path("m"))
        self.masks("m/elsewhere.safetensors")
        self.assertEqual([m["name"] for m in self.page("given", "given", "res")[1]["masks"]],
                         ["elsewhere.safetensors", "masks.safetensors"])
        self.put("res/masks.safetensors", "broken")
        self.fails("res", "--output", "r.html", says=["masks.safetensors"])


class Scripts(Base):
    def test_node_reads_them(self):
        node = shutil.which("node") or shutil.which("nodejs")
        if not node:
            kit.skip(self, "node is not installed")
        self.results()
        page, _ = self.page("res", "--masks", self.masks())
        path = self.put("page.js", page.all("script")[1]["text"])
        done = subprocess.run([node, "--check", path], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_elements_the_scripts_ask_for(self):
        """Every id the scripts look for is in the page with all its parts."""
        self.results()
        page, _ = self.page("res", "--masks", self.masks())
        ids = {e.get("@id") for e in page.elements}
        asked = set(re.findall(r'byId\("([a-z-]+)"\)', page.all("script")[1]["text"]))
        self.assertGreater(len(asked), 15)
        self.assertEqual(asked - ids, set())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
