#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`esa calibrate --plan`, and `esa generate` with a work, a quality and a plan, as a user runs them: check_plan.py
ESA MODELS (the folder with wan-tiny in it)."""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

import kit
import schemas

ESA, MODELS = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
# so few tokens and steps: with adaptive orders no work below 0.4 can be had
TINY = ["--frames", 5, "--height", 96, "--width", 96, "--steps", 2, "--block", "32x32", *kit.ONE]
SMALL = [*TINY, "--order", "hilbert"]
ADAPTIVE = ["--order", "adaptive"]
OFF = ["--carry", "off"]                            # what two steps have by themselves
PLAN = ["calibrate", *SMALL, "--num-prompts", 1, "--held-out", 1, "--groups", 2, "--speedup", 2]
ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("HF_")}, "ESA_MODELS": MODELS}


def esa(*args, cwd):
    return kit.run(ESA, *args, cwd=cwd, env=ENV)


class Base(kit.Folder):
    call = staticmethod(esa)
    progress = True

    def video(self, *more):
        self.works("generate", *SMALL, "--out", "a.y4m", "--json", "r.json", *more)
        return json.loads(self.read("r.json"))["videos"][0]


class Words(Base):
    def test_wrong_words(self):
        for args, says in ((["--work", 0.5, "--budget", 0.5], "say the same thing"),
                           (["--work", 0.5, "--preset", "fast"], "say the same thing"),
                           (["--plan", "p"], "--plan needs"), (["--quality", 40], "--mp4-quality"),
                           (["--work", 0.5, "--method", "dense"], "choose blocks"),
                           (["--work", 1.5], "--work"), (["--preset", "fats"], "did you mean fast?"),
                           (["--refresh", "late"],
                            "--refresh was given 'late', expected early or a whole number in 0 .. 1000"),
                           (["--refresh", -1], "--refresh was given '-1'"),
                           (["--order-every", "often"], "--order-every was given 'often', expected early or")):
            self.fails("generate", *args, status=2, says=[says])
        for args, says in ((["--plan", "p", "--output", "m"], "give one kind"),
                           (["--plan", "p", "--quality", 40, "--speedup", 2], "one of --quality and --speedup"),
                           (["--output", "m", "--speedup", 2], "need --plan")):
            self.fails("calibrate", *args, status=2, says=[says])


class Refusals(Base):
    def test_inputs(self):
        self.fails("calibrate", *SMALL, "--plan", "p", "--num-prompts", 12, "--held-out", 5,
                   says=["12 prompts", "12 are measured and 5 held out"])
        self.fails("generate", *SMALL, "--work", 0.5, "--plan", "none", "--out", "a.y4m", says=["none"])
        self.fails("generate", *SMALL, "--work", 0.01, "--out", "a.y4m", says=["work is 0.01"])
        self.put("text", b"no plan")
        self.fails("generate", *SMALL, "--work", 0.5, "--plan", "text", "--out", "a.y4m", says=["text"])


    def test_foreign_entries(self):
        """A folder with entries that --plan did not write is refused by name, and stays as it is."""
        for name, text in (("thesis.txt", "text"), ("state.json", '{"format": "another program"}'),
                           ("dense-0.safetensors", "1"), ("elsewhere/x", "2")):
            path = self.put("p.part/" + name, text)
            for more in ([], ["--restart"]):
                self.fails(*PLAN, "--plan", "p", *more,
                           says=["'p.part'", f"'{name.replace('/x', '/')}', which this command did not write"])
                self.assertEqual(kit.read(path, "r"), text)
            shutil.rmtree(self.path("p.part"))
        self.put("elsewhere/thesis.txt", "text")
        os.symlink("elsewhere", self.path("p.part"))
        self.fails(*PLAN, "--plan", "p", says=["'thesis.txt', which"])
        self.assertEqual(self.read("elsewhere/thesis.txt"), b"text")

    def test_one_run_at_a_time(self):
        """The second of two runs on one file is refused, and the first one ends as if it was alone."""
        run = subprocess.Popen([ESA, *map(str, [*PLAN, "--plan", "p"])], cwd=self.dir, env=ENV,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line in run.stderr:
            if line.startswith("errors of prompt"):
                break
        run.send_signal(signal.SIGSTOP)
        for more in ([], ["--restart"]):
            self.fails(*PLAN, "--plan", "p", *more, says=["another run is working in 'p.part'"])
        run.send_signal(signal.SIGCONT)
        _, err = run.communicate()
        self.assertEqual((run.returncode, self.files()), (0, ["p"]), err)


class Work(Base):
    """One plan, made once; the tests use it, and make it again."""

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        code, cls.out, err = esa(*PLAN, "--plan", "p", "--json", "p.json", cwd=scratch.name)
        assert code == 0, err
        assert sorted(os.listdir(scratch.name)) == ["p", "p.json"]
        cls.plan = os.path.join(scratch.name, "p")

    def test_generate(self):
        """The work that was asked for is spent, by every method that chooses blocks."""
        for more, asked in ((["--work", 0.6, *ADAPTIVE], 0.6), (["--preset", "balanced"], 0.44),
                            (["--work", 0.65, "--method", "entropy"], 0.65),
                            (["--work", 0.6, *ADAPTIVE, *OFF, "--refresh", 0, "--order-every", 0], 0.6)):
            video = self.video(*more)
            self.assertEqual(video["attention_work"]["asked"], asked)
            # whole blocks: 14 of 32 tokens in a row, split between heads or over the layer
            self.assertAlmostEqual(video["attention_work"]["realised"], asked, delta=0.03)
        # a dense step, a dense layer and one block in every row: entropy cannot spend less
        self.fails("generate", *SMALL, "--out", "b.y4m", "--work", 0.6, "--method", "entropy",
                   says=["work is 0.6", "lowest density", "take 0.635"])
        # early is what the error selector does without carry
        usual = self.video("--work", 0.6, *ADAPTIVE)
        early = ["--refresh", "early", "--order-every=early", "--exact-rows", 2]
        same = self.video("--work", 0.6, *ADAPTIVE, *OFF, *early)
        other = self.video("--work", 0.6, *ADAPTIVE, *OFF, "--refresh", 0, "--order-every", 0)
        self.assertEqual(same["layer_density"], usual["layer_density"])
        self.assertNotEqual(other["layer_density"], usual["layer_density"])
        video = self.video("--budget", 0.5)
        self.assertIsNone(video["attention_work"]["asked"])
        self.assertEqual((video["method"], self.video("--work", 0.6)["method"]), ("entropy", "error"))

    def test_plan(self):
        self.assertIn("work 0.500: expected", self.out)
        found = schemas.check(self.plan + ".json", "plan")
        self.assertEqual((found["layers"], found["steps"], found["prompts"], found["work"]),
                         (8, 2, 1, [0.22, 0.3, 0.4, 0.55, 0.7, 0.85]))
        self.assertGreater(found["psnr"][-1], found["psnr"][0])
        even, planned = self.video("--work", 0.5), self.video("--work", 0.5, "--plan", self.plan)
        self.assertAlmostEqual(planned["attention_work"]["realised"], 0.5, delta=0.03)
        self.assertNotEqual(even["layer_density"], planned["layer_density"])
        asked = self.video("--quality", (found["psnr"][1] + found["psnr"][2]) / 2, "--plan", self.plan)
        self.assertTrue(found["work"][1] <= asked["attention_work"]["asked"] <= found["work"][2])
        self.fails("generate", *SMALL, "--quality", 99, "--plan", self.plan, "--out", "b.y4m", says=["99", "at most"])
        # another number of steps: by noise level
        self.works("generate", *SMALL, "--steps", 3, "--work", 0.5, "--plan", self.plan, "--out", "b.y4m")

    def test_left_out(self):
        """Works that so few tokens cannot reach are left out before anything is measured. Adaptive orders cost more."""
        plan = ["calibrate", *TINY, *ADAPTIVE, "--plan", "q", "--num-prompts", 1, "--held-out", 1, "--groups", 1]
        code, out, err = esa(*plan, "--curve-prompts", 2, "--json", "q.json", cwd=self.dir)
        self.assertEqual(code, 0, err)
        self.assertIn("leaves out work 0.12 0.16 0.22 0.3 0.4, which 432 tokens and 2 steps cannot reach", err)
        self.assertIn("10 clips: errors, 1 groups of layers and 1 groups of steps for 1 prompts, 3 works for 2", err)
        self.assertIn("q: 2 prompts", out)
        found = schemas.check(self.path("q.json"), "plan")
        self.assertEqual((found["work"], found["prompts"]), ([0.55, 0.7, 0.85], 1))
        self.assertTrue(all(spread > 0 for spread in found["spread"]))
        planned = self.video("--work", 0.55, "--plan", "q", *ADAPTIVE)
        self.assertAlmostEqual(planned["attention_work"]["realised"], 0.55, delta=0.03)
        for args, says in ((["--steps", 1, "--frames", 1, "--height", 64, "--width", 64],
                            "64 tokens and 1 steps: masks, orders, exact rows and the blocks that every row keeps take "
                            "1.000"),
                           (["--speedup", 5], "so work 0.2 cannot be reached")):
            self.fails(*plan, "--plan", "r", *args, says=[says])
        self.assertEqual(self.files(), ["a.y4m", "q", "q.json", "r.json"])

    def test_bench_quality(self):
        """A row for every quality that is asked for, with the work it took."""
        found = json.loads(kit.read(self.plan + ".json"))
        bench = ["bench", "video", *SMALL, "--csv", "b.csv", "--plan", self.plan, "--num-prompts", 1]
        asked = [round(found["psnr"][i] + 0.5, 2) for i in (1, 3)]
        out = self.works(*bench, "--seeds", "0,1", "--quality", ",".join(map(str, asked)))
        rows = [line.split(",") for line in self.read("b.csv").decode().splitlines()[1:]]
        works = {row[5]: float(row[15]) for row in rows if row[3] == "0"}
        self.assertEqual([row[4] for row in rows], ["dense", "error", "error"] * 2)
        names = [f"quality {x:g}" for x in asked]
        self.assertEqual(list(works), ["1.00", *names])
        for name, i in zip(names, (1, 3)):
            # between two works of the curve, which spend what they say within 0.03
            self.assertTrue(found["work"][i] - 0.03 < works[name] < found["work"][i + 1] + 0.03, works)
            self.assertIn(name, out)
        self.assertIn("0 clips made, 4 were there", self.works(*bench, "--seeds", "0,1", "--quality",
                                                               ",".join(map(str, asked))))
        self.fails(*bench, "--quality", "20,99", says=["99", "at most"])
        self.fails(*bench, "--quality", 20, "--work", 0.5, status=2, says=["say the same thing"])
        self.fails("bench", "video", "--csv", "c.csv", "--quality", 20, "--method", "error", "--tail", "levels",
                   status=2, says=["--quality needs --plan"])

    def test_killed(self):
        """The same command continues; the plan has the same bits as one that was never interrupted."""
        run = subprocess.Popen([ESA, *map(str, [*PLAN, "--plan", "cut"])], cwd=self.dir, env=ENV,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line in run.stderr:
            if line.startswith("step group 1/"):
                break
        run.send_signal(signal.SIGKILL)
        run.communicate()
        self.assertIn("cut.part", self.files())
        self.fails(*PLAN, "--plan", "cut", "--guidance", 2, says=["other settings", "--restart"])
        code, _, err = esa(*PLAN, "--plan", "cut", cwd=self.dir)
        self.assertEqual(code, 0, err)
        self.assertNotIn("errors of prompt", err)
        self.assertEqual(self.read("cut"), kit.read(self.plan))
        self.assertNotIn("cut.part", self.files())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
