#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""--carry in the commands that make videos, as a user runs them: check_carry.py ESA MODELS (the folder with wan-tiny in
it). Standard library only.

Runs that are compared bit for bit ask for a budget: a work would give other densities to other anchors."""
import json
import os
import shutil
import sys
import unittest

import kit
import schemas

ESA, MODELS = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
LAYERS = 8
SIZE = ["--frames", 5, "--height", 48, "--width", 48, "--block", "16x16", *kit.ONE]
STEPS = 6
SMALL = [*SIZE, "--steps", STEPS, "--method", "error", "--budget", 0.3]
# long enough to carry by itself
LONG_STEPS = 12
LONG = [*SIZE, "--steps", LONG_STEPS, "--method", "error", "--budget", 0.3]
ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("HF_")}, "ESA_MODELS": MODELS}


def esa(*args, cwd):
    return kit.run(ESA, *args, cwd=cwd, env=ENV)


class Base(kit.Folder):
    call = staticmethod(esa)
    progress = True

    def made(self, *words, name="a", small=SMALL):
        """The record and the bytes of a video."""
        self.works("generate", *small, *words, "--out", name + ".npy", "--json", name + ".json")
        return json.loads(self.read(name + ".json"))["videos"][0], self.read(name + ".npy")

    def anchors(self, *words, small=SMALL):
        return self.made(*words, small=small)[0]["carry"]["anchors"]


class Words(Base):
    def test_wrong_words(self):
        for text in ("", "on", "0", "-1", "1.5", "20000", "0,", ",0", "0,x", "0,1.5", "0 ,1", "0,-1"):
            self.fails("generate", "--carry=" + text, status=2,
                       says=[f"generate: --carry was given '{text}'", "auto, off, a number of anchors", "0,5,10,18"])
        for text, says in (("0,5,5", "names step 5 twice"), ("0,10,5", "names step 5 behind step 10"),
                           (",".join(map(str, range(65))), "more than 64 steps")):
            self.fails("generate", "--carry", text, status=2, says=[says])
        for command in (["generate"], ["bench", "video", "--csv", "c.csv"], ["bench", "model"],
                        ["experiment", "run", "--tag", "t", "--method", "error"], ["calibrate", "--plan", "p"]):
            self.fails(*command, "--carry", "5,0", status=2, says=["--carry names step 0 behind step 5"])
            self.fails(*command, "--carry-format", "fp8", status=2, says=["--carry-format", "e4m3|bf16"])
        self.fails("generate", "--carry", "off", "--carry-format", "bf16", status=2, says=["--carry-format needs"])
        self.fails("calibrate", "--output", "m", "--carry", 2, status=2, says=["need --plan FILE"])

    def test_what_carries(self):
        """What skips no blocks leaves nothing out. Masks and orders belong to the anchors."""
        self.fails("generate", "--method", "dense", "--carry", 2, status=2, says=["--carry", "not with dense"])
        for word in ("--refresh", "--order-every"):
            for command in (["generate"], ["generate", "--method", "entropy"], ["bench", "video", "--csv", "c.csv"]):
                self.fails(*command, "--carry", 2, word, 2, status=2, says=["at the anchors", "leave out --refresh"])

    def test_more_than_there_are(self):
        """Said before the model is opened where the steps are given, and after it where they are its own."""
        for steps in (["--steps", 6], ["--sigmas", "1,0.8,0.6,0.4,0.2,0.1"]):
            self.fails("generate", "--model", "none", *steps, "--carry", 7, status=2,
                       says=["asks for 7 anchors, but the run has 6 steps"])
            self.fails("generate", "--model", "none", *steps, "--carry", "0,6", status=2,
                       says=["names step 6, but the run has 6 steps, 0 to 5"])
        self.fails("generate", "--carry", 9, status=2, says=["9 anchors, but the run has 8 steps"])

    def test_help(self):
        for command in (["generate"], ["bench", "video"], ["bench", "model"], ["experiment", "run"], ["calibrate"]):
            text = self.works(*command, "--help")
            self.assertIn("--carry auto|off|N|STEP,...", text, command)
            self.assertIn("(off; error: auto, but off with --refresh or --order-every)", text, command)
            self.assertIn("--carry-format e4m3|bf16", text, command)


class Videos(Base):
    def test_default(self):
        """The error selector carries by itself, by the library's rule; the same anchors by number and by steps."""
        usual, video = self.made(small=LONG)
        carry = usual["carry"]
        anchors = carry["anchors"]
        self.assertTrue(0 < len(anchors) < LONG_STEPS and anchors[0] == 0, anchors)
        # the prompt alone runs dense at an anchor
        self.assertEqual((carry["asked"], carry["format"]), ("auto", "e4m3"))
        self.assertEqual(carry["anchor_calls"], LAYERS * len(anchors))
        self.assertEqual(carry["carried_calls"], usual["calls"] - carry["anchor_calls"])
        ages = [step - max(a for a in anchors if a <= step) for step in range(LONG_STEPS)]
        self.assertEqual(carry["step_age"], ages)
        # two calls a step and layer carry, one at an anchor
        calls = [1 if step in anchors else 2 for step in range(LONG_STEPS)]
        self.assertAlmostEqual(carry["age"], sum(map(int.__mul__, ages, calls)) / sum(calls), places=6)
        self.assertGreater(carry["bytes"], 0)
        for text in (len(anchors), ",".join(map(str, anchors))):
            again, same = self.made("--carry", text, small=LONG)
            self.assertEqual((again["carry"]["asked"], again["carry"]["anchors"]), (str(text), anchors))
            self.assertEqual(same, video, text)

    def test_former_default(self):
        """--carry off is the former default: no anchors, early masks and orders, two exact rows."""
        record, video = self.made("--carry", "off")
        self.assertEqual(record["carry"], {
            "asked": "off", "format": None, "anchors": [], "anchor_calls": 0, "carried_calls": 0, "age": None,
            "step_age": [], "bytes": 0, "host_bytes": 0
        })
        early = ["--refresh", "early", "--order-every", "early", "--exact-rows", 2]
        self.assertEqual(self.made("--carry", "off", *early)[1], video)
        for words in (early[:2], early[2:4]):
            self.assertEqual(self.made(*words)[1], video)                # whoever names a schedule has one
        self.assertNotEqual(self.made("--carry", "off", "--exact-rows", 0)[1], video)
        self.assertNotEqual(self.made("--carry", 2)[1], video)

    def test_presets(self):
        """Their works come from the library: with carry less than without, which are 0.57, 0.44 and 0.30."""
        small = [*SIZE, "--steps", 12]
        asked = {}
        for preset, work in (("faithful", 0.57), ("balanced", 0.44), ("fast", 0.30)):
            for carry in ("off", "auto"):
                record = self.made("--preset", preset, "--carry", carry, small=small)[0]
                asked[preset, carry] = record["attention_work"]["asked"]
            self.assertEqual(asked[preset, "off"], work)
            self.assertLess(asked[preset, "auto"], work)
        self.assertEqual(self.made(small=small)[0]["attention_work"]["asked"], asked["balanced", "auto"])

    def test_closer_to_dense(self):
        """At equal work, and the line below the table says what was carried."""
        words = [*SIZE, "--height", 96, "--width", 96, "--steps", 10, "--compare", "dense", "--work", 0.5, "--block",
                 "32x32", "--order", "hilbert"]
        psnr = {}
        for carry in ("auto", "off"):
            out = self.works("generate", *words, "--carry", carry, "--out", "a.npy", "--json", "a.json")
            video = json.loads(self.read("a.json"))["videos"][0]
            psnr[carry] = video["psnr"]
            self.assertAlmostEqual(video["attention_work"]["realised"], 0.5, delta=0.03)
            self.assertEqual(video["dense"]["carry"]["asked"], "off")
            anchors = video["carry"]["anchors"]
            line = f"\ncarry: {len(anchors)} anchors, steps {', '.join(map(str, anchors))}; d is "
            self.assertEqual((len(anchors) > 1, line in out), (carry == "auto",) * 2, out)
        # 5 dB on whole clips of this length; here the video is short
        self.assertGreater(psnr["auto"], psnr["off"] + 1)
        schemas.check(self.path("a.json"), "generate")

    def test_format(self):
        one, small = self.made("--carry", 2)
        two, large = self.made("--carry", 2, "--carry-format", "bf16")
        self.assertEqual(two["carry"]["format"], "bf16")
        # a byte a value, and four for the 64 of a token and head
        self.assertEqual(two["carry"]["bytes"] * 68, one["carry"]["bytes"] * 128)
        self.assertNotEqual(small, large)

    def test_other_methods(self):
        for method in ("entropy", "rf_v2", "ada_bsa"):
            small = [*SIZE, "--steps", 4, "--method", method, "--budget", 0.4, "--warmup", 0.25]
            self.assertEqual(self.anchors(small=small), [])
            # the first sparse step; layer 0 is dense, and branches have their own masks
            record = self.made("--carry", "0,2", small=small)[0]
            self.assertEqual(record["carry"]["anchors"], [1, 2], method)
            self.assertEqual(record["carry"]["anchor_calls"], 2 * 2 * (LAYERS - 1))
        self.works("calibrate", *SIZE, "--steps", 4, "--num-prompts", 1, "--method", "error", "--work", "0.5,0.8",
                   "--output", "m")
        small = [*SIZE[:-4], *kit.ONE, "--steps", 4, "--method", "cached", "--masks", "m", "--work", 0.8]
        self.assertEqual(self.anchors(small=small), [])
        self.assertEqual(self.anchors("--carry", "0,2", small=small), [0, 2])

    def test_branches(self):
        """Without guidance there is one branch; masks of its own give each branch its own differences."""
        alone = self.made("--carry", 2, "--guidance", 1)[0]["carry"]
        shared = self.made("--carry", 2)[0]["carry"]
        own = self.made("--carry", 2, "--share-branches", 0)[0]["carry"]
        self.assertEqual([c["anchor_calls"] for c in (alone, shared, own)], [2 * LAYERS, 2 * LAYERS, 4 * LAYERS])
        self.assertEqual(alone["bytes"], shared["bytes"])
        self.assertEqual(own["bytes"], 2 * shared["bytes"])

    def test_several_videos(self):
        """Nothing of one video reaches the next."""
        self.works("generate", *SMALL, "--seed", "0,1", "--output-dir", "d")
        self.works("generate", *SMALL, "--seed", 1, "--output-dir", "e")
        ending = os.path.splitext(sorted(os.listdir(self.path("d")))[0])[1]
        self.assertEqual(self.read("d/000-s1" + ending), self.read("e/000" + ending))

    def test_step_cache(self):
        """Steps that are left out are no anchors, and age what is carried: all but steps 0, 1 and 5 are left out."""
        record, _ = self.made("--carry", "0,3", "--cache", 100)
        self.assertEqual(record["computed_steps"], 3)
        self.assertEqual(record["carry"]["anchors"], [0, 5])             # step 3 is left out
        self.assertEqual(record["carry"]["step_age"], [0, 1, None, None, None, 0])
        record, _ = self.made("--carry", 1, "--cache", 100)
        self.assertEqual(record["carry"]["step_age"], [0, 1, None, None, None, 5])

    def test_two_transformers(self):
        """The switch drops what was carried. With the same weights twice, the run is that of one transformer with an
        anchor at the switch."""
        shutil.copytree(os.path.join(MODELS, "wan-tiny"), self.path("two"))
        shutil.copytree(self.path("two/transformer"), self.path("two/transformer_2"))
        index = json.loads(self.read("two/model_index.json"))
        index.update(transformer_2=["diffusers", "WanTransformer3DModel"], boundary_ratio=0.9)
        self.put("two/model_index.json", json.dumps(index))
        words = ["--guidance", 2.5, "--prompt", "a red ball"]
        record, video = self.made("--carry", 1, "--model", "two", *words, "--guidance-2", 2.5)
        anchors = record["carry"]["anchors"]
        self.assertEqual((len(anchors), anchors[0]), (2, 0))             # where the second begins
        self.assertEqual(self.made("--carry", ",".join(map(str, anchors)), *words)[1], video)
        self.assertNotEqual(self.made("--carry", 1, *words)[1], video)
        # masks of a file hold no branches apart: the engine names the step
        size = [*SIZE[:-4], *kit.ONE, "--steps", STEPS, "--model", "two"]
        self.works("calibrate", *size, "--block", "16x16", "--num-prompts", 1, "--method", "error", "--work", 0.8,
                   "--output", "m")
        cached = [*size, "--method", "cached", "--masks", "m", "--budget", 0.8]
        self.assertEqual(self.anchors("--carry", 1, small=cached)[-1], anchors[-1])
        # the differences of the first are gone when those of the second are there
        self.assertEqual(record["carry"]["bytes"], self.made("--carry", 1)[0]["carry"]["bytes"])


class Measuring(Base):
    def test_bench_video(self):
        """The method of a row says what is carried; older rows, without carry, stay what they are."""
        bench = ["bench", "video", *LONG, "--num-prompts", 1, "--seeds", 0, "--csv", "q.csv"]
        for words in (["--carry", "off"], [], ["--carry", "0,4"], ["--carry", "0,4", "--carry-format", "bf16"],
                      ["--carry", len(self.anchors(small=LONG))]):
            out = self.works(*bench, *words)
        self.assertIn("0 clips made, 1 were there", out)                 # the rule gives so many
        names = [line.split(",")[4] for line in self.read("q.csv").decode().splitlines()[1:]]
        self.assertEqual(names, ["dense", "error", f"error carry{len(self.anchors(small=LONG))}", "error carry0-4",
                                 "error carry0-4-bf16"])

    def test_bench_model(self):
        out = self.works("bench", "model", *SIZE, "--steps", STEPS, "--budgets", 0.3, "--method", "error", "--rounds",
                         1, "--carry", "0,4", "--no-decode", "--json", "b.json")
        self.assertIn("online error, carry: 2 anchors, steps 0, 4; d is", out)
        found = schemas.check(self.path("b.json"), "bench-model")
        self.assertEqual([row["round"][0]["carry"]["anchors"] for row in found["rows"]], [[], [0, 4]])

    def test_plan(self):
        """Its curve is measured with carry, and it says so."""
        plan = ["calibrate", *SIZE, "--height", 96, "--width", 96, "--block", "32x32", "--order", "hilbert", "--steps",
                4, "--num-prompts", 1, "--held-out", 1, "--groups", 1, "--json", "p.json", "--plan", "p"]
        out = self.works(*plan, "--carry", 2)
        self.assertIn("8 layers, 4 steps, 2 anchors; PSNR against dense", out)
        found = schemas.check(self.path("p.json"), "plan")
        self.assertEqual(found["anchors"], 2)
        with open(self.path("p"), "rb") as file:
            header = json.loads(file.read(8 + int.from_bytes(file.read(8), "little") - 8))
        self.assertEqual(header["__metadata__"]["anchors"], "2")
        small = [*plan[1:plan.index("--num-prompts")], "--plan", "p"]
        asked = ["--quality", found["psnr"][1]]
        record = self.made(*asked, "--carry", 2, small=small)[0]
        self.assertAlmostEqual(record["attention_work"]["asked"], found["work"][1], delta=0.001)
        self.fails("generate", *small, *asked, "--carry", "off", "--out", "b.npy",
                   says=["measured with carry (2 anchors)", "turn carry on"])
        self.made("--work", 0.7, "--carry", "off", small=small)          # a work is a work
        out = self.works(*plan, "--carry", "off", "--restart")
        self.assertIn("4 steps, without carry; PSNR", out)
        self.assertEqual(schemas.check(self.path("p.json"), "plan")["anchors"], 0)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
