#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every command that writes a file, killed with SIGKILL at moments of chance: check_killed.py ESA MODELS
MAKE_RECORDING.

Whatever the moment, each of its results is what stood there before or the new one whole, byte for byte; beside them lie
at most files under temporary names. Half of the kills come when such a name appears, which is while a file is being
written. check_calibrate.py and check_experiment.py do the same for the commands that are taken up again where they
were."""
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import report_fixture
import video_files
from outcome import OLDER, TEMPORARY, contents, fill, without_times

ESA, MODELS, MAKE_RECORDING = map(os.path.abspath, sys.argv[1:4])
ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("HF_")}, "ESA_MODELS": MODELS}
SEED = int(os.environ.get("ESA_TEST_SEED", time.time_ns() % 10**9))
KILLS, ATTEMPTS = 8, 60         # a run may be faster than its kill, on a fast machine often
CLIP = ["--frames", 5, "--height", 32, "--width", 32, "--steps", 1]


class Killed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        print(f"check_killed: ESA_TEST_SEED={SEED}", flush=True)
        cls.rng = random.Random(SEED)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = folder.name
        self.made = os.path.join(self.dir, "out")
        os.mkdir(self.made)

    def path(self, name):
        return os.path.join(self.dir, name)

    def start(self, args):
        return subprocess.Popen([ESA, *map(str, args)], cwd=self.dir, env=ENV, stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE, text=True)

    def run_to_the_end(self, args):
        run = self.start(args)
        _, err = run.communicate()
        self.assertEqual(run.returncode, 0, err)

    def clip(self, name, frames=12, edge=48):
        pixels = self.rng.randbytes(frames * edge * edge * 3)
        video_files.write(self.path(name), video_files.npy(pixels, (frames, edge, edge, 3)))
        return name

    def kill(self, args, seconds, at_writing):
        """One run, ended at a moment of chance, or when a temporary name has appeared; False: it was faster."""
        run, begun = self.start(args), time.monotonic()
        end = begun + (5 * seconds if at_writing else self.rng.uniform(0, seconds))
        delay = self.rng.choice((0, 0, 0.001, 0.003))
        before = set(os.listdir(self.made))
        while run.poll() is None and time.monotonic() < end:
            if at_writing and set(os.listdir(self.made)) - before:
                time.sleep(delay)
                break
            time.sleep(0.0005)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        return run.returncode == -signal.SIGKILL

    def check(self, *args, results, older=None):
        """results: names in out/ that the command writes; older: what stands there before, if not OLDER."""
        begun = time.monotonic()
        self.run_to_the_end(args)
        seconds = time.monotonic() - begun
        final = {name: contents(os.path.join(self.made, name)) for name in results}
        self.assertTrue(all(data is not None for data in final.values()), final.keys())
        old = {name: (older or {}).get(name, OLDER) for name in results}
        killed = 0
        for attempt in range(ATTEMPTS):
            if killed == KILLS:
                break
            fill(self.made, old)
            killed += self.kill(args, seconds, attempt % 2)
            for name in sorted({*os.listdir(self.made), *results}):
                data = contents(os.path.join(self.made, name))
                told = f"{name} after kill {attempt}, seed {SEED}"
                if name not in results:
                    self.assertRegex(name, TEMPORARY, told)
                elif data != old[name]:
                    self.assertEqual(without_times(data), without_times(final[name]), told)
        self.assertEqual(killed, KILLS, f"killed {killed} times only, seed {SEED}")
        self.run_to_the_end(args)                                        # what a killed run leaves is in nobody's way
        for name in results:
            self.assertEqual(without_times(contents(os.path.join(self.made, name))), without_times(final[name]))

    def test_export(self):
        clip = self.clip("a.npy", 60)
        for name in ("v.y4m", "v.safetensors", "v.npy"):
            self.check("export", clip, "--out", "out/" + name, "--json", "out/e.json", results=[name, "e.json"])

    def test_export_pictures(self):
        """A folder of pictures that stood there is replaced whole."""
        self.clip("a.npy", 30)
        self.clip("b.npy", 20)
        self.run_to_the_end(["export", "b.npy", "--out", "out/p/"])
        self.check("export", "a.npy", "--out", "out/p/", results=["p"],
                   older={"p": contents(os.path.join(self.made, "p"))})

    def test_evaluate(self):
        self.check("evaluate", "--reference", self.clip("a.npy"), "--generated", self.clip("b.npy"), "--output",
                   "out/m.json", results=["m.json"])

    def test_report(self):
        """With videos that must be converted, so that there is a scratch folder too."""
        picture = b"FRAME\n" + bytes(range(256)) * 12
        with open(self.path("v.y4m"), "wb") as file:
            file.write(b"YUV4MPEG2 W32 H32 F8:1 Ip A1:1 C444\n" + picture * 40)
        report_fixture.make(self.path("res"), "res", [self.path("v.y4m")], prompts=["p"])
        self.check("report", "res", "--output", "out/page.html", results=["page.html"])

    def test_collect(self):
        report_fixture.make(self.path("results/x"), "x", [])
        self.check("experiment", "collect", "--csv", "out/t.csv", "--markdown", "out/t.md", results=["t.csv", "t.md"])

    def test_masks(self):
        subprocess.run([MAKE_RECORDING, self.path("rec"), "7", "2"], check=True)
        self.check("masks", "merge", "rec", "--out", "out/m.safetensors", results=["m.safetensors"])

    def test_generate(self):
        self.check("generate", *CLIP, "--compare", "dense", "--dense-out", "out/d.npy", "--out", "out/v.y4m",
                   "--save-latents", "out/l.safetensors", "--json", "out/r.json",
                   results=["d.npy", "v.y4m", "l.safetensors", "r.json"])

    def test_bench_attention(self):
        self.check("bench", "attention", "--shape", "1,1,256,64", "--rounds", 2, "--json", "out/b.json",
                   results=["b.json"])

    def test_bench_model(self):
        self.check("bench", "model", *CLIP, "--mode", "dense,online", "--budgets", 0.5, "--rounds", 1, "--json",
                   "out/b.json", results=["b.json"])

    def test_bench_video(self):
        """The table grows row by row: what stood there stays, and the last line is a whole one."""
        args = [
            "bench", "video", *CLIP, "--num-prompts", 2, "--seeds", 1, "--method", "entropy,rf_v2", "--budget", 0.5,
            "--tail", "none", "--csv", "out/q.csv"
        ]
        begun = time.monotonic()
        self.run_to_the_end(args)
        seconds = time.monotonic() - begun
        whole = without_times(contents(self.path("out/q.csv")))
        os.unlink(self.path("out/q.csv"))
        grown = []
        for attempt in range(KILLS):
            self.kill(args, seconds, attempt % 2)
            rows = contents(self.path("out/q.csv")) or b""
            self.assertEqual(rows[:len(b"".join(grown[-1:]))], b"".join(grown[-1:]), f"kill {attempt}, seed {SEED}")
            self.assertTrue(rows == b"" or rows.endswith(b"\n"), f"kill {attempt}, seed {SEED}")
            lines = [line.split(",")[:7] for line in rows.decode().splitlines()]
            self.assertEqual(lines, whole[0][:len(lines)], f"kill {attempt}, seed {SEED}")
            grown.append(rows)
        self.run_to_the_end(args)
        self.assertEqual(without_times(contents(self.path("out/q.csv"))), whole)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[4:])
