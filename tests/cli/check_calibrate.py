#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`esa calibrate`, cached masks in `esa generate`, and `esa bench model`, as a user runs them: check_calibrate.py
ESA MODELS (the folder with wan-tiny in it). ESA_TEST_SEED chooses the moments of the kills; the
one in use is printed.

Clips are tiny (9 frames of 32 x 32, two steps, blocks of 16 tokens): masks are made of bits, and bits either are the
same or are not."""
import glob
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
import unittest

import kit
import schemas

ESA, MODELS = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
SIZE = ["--frames", 9, "--height", 32, "--width", 32, *kit.ONE]
SMALL = [*SIZE, "--steps", 2, "--block", "16x16"]
ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("HF_")}, "ESA_MODELS": MODELS}
SEED = int(os.environ.get("ESA_TEST_SEED", time.time_ns() % 10**9))


def start(*args, cwd, **more):
    return subprocess.Popen([ESA, *map(str, args)], cwd=cwd, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, **more)


def esa(*args, cwd):
    return kit.run(ESA, *args, cwd=cwd, env=ENV)


class Base(kit.Folder):
    call = staticmethod(esa)
    progress = True

    def calibrate(self, output, *more, prompts=2):
        return self.works("calibrate", *SMALL, "--num-prompts", prompts, "--output", output, *more)

    def info(self, name):
        self.works("masks", "info", name, "--json", "info.json")
        found = json.loads(self.read("info.json"))
        os.unlink(self.path("info.json"))
        return found

    def begin(self, output, *more, prompts=3):
        """A run that was killed with -9 while it worked on its second prompt."""
        run = start("calibrate", *SMALL, "--num-prompts", prompts, "--output", output, *more, cwd=self.dir)
        for line in run.stderr:
            if line.startswith("prompt 2/"):
                break
        run.send_signal(signal.SIGKILL)
        run.communicate()


class Words(Base):
    def test_help(self):
        for command in (["calibrate"], ["bench", "model"]):
            code, out, err = esa(*command, "--help", cwd=self.dir)
            self.assertEqual((code, err), (0, ""))
            lines = out.splitlines()
            for i, line in enumerate(lines):                             # every option is explained
                if line.startswith("  --"):
                    self.assertTrue(len(line) > 33 or lines[i + 1].startswith(" " * 33), line)

    def test_wrong_words(self):
        self.fails("calibrate", status=2, says=["--output FILE is required"])
        self.fails("calibrate", "--output", "", status=2, says=["--output"])
        self.fails("calibrate", "--outptu", "x", status=2, says=["did you mean --output?"])
        for args in (["--budgets", "1.5"], ["--budgets",
                                            "x"], ["--steps", 0], ["--num-prompts",
                                                                   0], ["--num-prompts",
                                                                        99], ["--block", "64"], ["--importance", "f32"],
                     ["--prompts", "p", "--num-prompts",
                      2], ["--shard", "1"], ["--shard", "2/2"], ["--shard", "-1/2"], ["--shard",
                                                                                      "a/b"], ["--shard", "0/0"],
                     ["--shard", "0/2",
                      "--keep-recording"], ["--window",
                                            "1,2,3"], ["word"], ["--budgets",
                                                                 "0.5,0.3,0.5"], ["--budgets", "0.5,0.5001"]):
            self.fails("calibrate", "--output", "x", *args, status=2)
        for args in (["--mode", "cached"], ["--masks", "m", "--mode",
                                            "online"], ["--mode", "fast"], ["--mode", "dense",
                                                                            "--skip-dense"], ["--rounds",
                                                                                              0], ["--budgets", 2]):
            self.fails("bench", "model", *args, status=2)


class Refusals(Base):
    def test_inputs(self):
        os.mkdir(self.path("folder"))
        with open(self.path("file"), "w"):
            pass
        small = ["calibrate", *SMALL, "--num-prompts", 1, "--output"]
        self.fails(*small, "folder", says=["folder", "not a regular file"])
        self.fails(*small, "file/x", says=["file", "Not a directory"])
        self.fails(*small, "n" * 5000, says=["5000 bytes"])
        self.fails(*small, "new/folders/x", "--model", "wan-tyni", says=["did you mean wan-tiny?"])
        # the folders made on the way are gone again
        self.fails(*small, "new/folders/x", "--height", 60, says=["height", "60"])
        self.fails(*small, "x", "--prompts", "none", status=2)
        self.fails("calibrate", *SMALL, "--prompts", "none", "--output", "x", says=["none"])
        self.fails(*small, "x", "--shard", "1/2", says=["shard 1 of 2", "no prompt"])
        self.fails(*small, "x", "--step-groups", 3, says=["--step-groups 3", "2 steps"])
        self.fails(*small, "x", "--record-steps", 3, says=["--record-steps 3", "2 steps"])
        self.fails(*small, "x", "--dense-layers", 99, says=["99"])
        self.fails(*small, "x", "--warmup", 1, says=["no mask is stored"])

    def test_disk_is_checked_first(self):
        """Half a million prompts fill thousands of recordings of some gigabytes; no disk here holds that."""
        with open(self.path("prompts"), "w") as file:
            file.write("a\n" * 500000)
        code, out, err = esa("calibrate", "--frames", 9, "--height", 384, "--width", 384, "--steps", 10, "--block",
                             "16x16", "--prompts", "prompts", "--output", "m/x", cwd=self.dir)
        self.assertEqual((code, out), (1, ""), err)
        last = err.splitlines()[-1]
        self.assertRegex(last, r"needed in '.*' and .*B are free|of memory and this machine has")
        self.assertIn("on disk while it works", err)
        self.assertEqual(self.files(), ["prompts"])


    def contents(self):
        """Every file with its bytes, and where links lead."""
        return {name: os.readlink(self.path(name)) if os.path.islink(self.path(name)) else self.read(name)
                for name in self.files() if not os.path.isdir(self.path(name))}

    def test_foreign_entries(self):
        """A folder with entries that calibrate did not write is refused by name, and stays as it is."""
        run = ["calibrate", *SMALL, "--num-prompts", 1, "--output", "m"]
        settings = '{"format": "esa.calibration"}'
        for entries, says in (({"thesis.txt": "text"}, ["'thesis.txt', which"]),
                              ({"b": "1", "a": "2", "c": "3"}, ["'a' and 2 more entries"]),
                              ({".hidden": "1", "b/c": "2"}, ["'.hidden' and 1 more entry"]),
                              ({"recording.0": "1"}, ["'recording.0', which"]),
                              ({"masks": "1"}, ["'masks', which"]),
                              ({"settings.json": '{"format": "another program"}', "recording.0": "1"},
                               ["'recording.0' and 1 more entry"]),
                              ({"settings.json": "no JSON"}, ["'settings.json', which"]),
                              ({"settings.json": settings, "recording.0/x": "1"}, ["'recording.0/', which"]),
                              ({"settings.json": settings, "recording.0.backup": "1"}, ["'recording.0.backup'"]),
                              ({"lock": "of another program"}, ["'lock', which"])):
            for name, text in entries.items():
                self.put("m.part/" + name, text)
            before = self.contents()
            for more in ([], ["--restart"]):
                self.fails(*run, *more, says=["'m.part'", "did not write", *says])
                self.assertEqual(self.contents(), before)
            shutil.rmtree(self.path("m.part"))
        self.put("m.shard-0-of-1.recording.part/x", "1")
        self.fails(*run, "--shard", "0/1", says=["'x', which"])

    def test_foreign_entries_behind_links(self):
        run = ["calibrate", *SMALL, "--num-prompts", 1, "--output", "m"]
        self.put("elsewhere/thesis.txt", "text")
        os.symlink("elsewhere", self.path("m.part"))
        before = self.contents()
        for more in ([], ["--restart"]):
            self.fails(*run, *more, says=["'thesis.txt', which"])
            self.assertEqual(self.contents(), before)
        os.unlink(self.path("m.part"))
        # links in the folder are foreign as well, and files are not made behind them
        for name in ("recording.0", "settings.json", "masks"):
            os.mkdir(self.path("m.part"))
            os.symlink("../elsewhere/thesis.txt", self.path("m.part", name))
            before = self.contents()
            self.fails(*run, "--restart", says=[f"'{name}', which"])
            self.assertEqual(self.contents(), before)
            shutil.rmtree(self.path("m.part"))
        os.mkdir(self.path("m.part"))
        os.symlink("../elsewhere/new", self.path("m.part/lock"))
        self.fails(*run, says=["m.part/lock"])


class Calibrate(Base):
    def test_file(self):
        out = self.calibrate("masks/deep/x.safetensors", "--json", "c.json", "--threads", 1)
        self.assertEqual(self.files(), ["c.json", "masks", "masks/deep", "masks/deep/x.safetensors"])
        self.assertIn("kept mass", out)
        schemas.check(self.path("c.json"), "calibrate")
        info = self.info("masks/deep/x.safetensors")
        self.assertEqual((info["model"], info["prompts"], info["steps"], info["groups"], info["budgets"]),
                         ("wan-tiny", 2, 2, 2, [0.3, 0.5, 0.7]))
        self.assertEqual((info["stored_layers"], info["layers"], info["Nq"], info["nq"]), (7, 8, 80, 5))
        self.calibrate("again", "--threads", 2)                          # the name says nothing, threads change nothing
        self.assertEqual(self.read("again"), self.read("masks/deep/x.safetensors"))
        self.calibrate("again", "--seed", 1)                             # replaced, and other noise is another file
        self.assertNotEqual(self.read("again"), self.read("masks/deep/x.safetensors"))

    def test_steps_and_samples(self):
        self.calibrate("g", "--step-groups", 1, prompts=1)
        self.assertEqual(self.info("g")["groups"], 1)
        self.calibrate("b", "--per-branch", "--store-dense", "--samples", 2, "--importance", "none", "--budgets", 0.5,
                       prompts=1)
        info = self.info("b")
        self.assertEqual((info["branches"], info["stored_layers"], info["stored_groups"], info["importance"]),
                         (2, 8, 2, "none"))
        self.works("calibrate", *SIZE, "--block", "16x16", "--steps", 7, "--record-steps", 2, "--num-prompts", 1,
                   "--output", "r", "--json", "r.json")
        info, report = self.info("r"), json.loads(self.read("r.json"))
        self.assertEqual((info["steps"], info["groups"], report["steps"], report["recorded_steps"]), (7, 2, 7, 2))
        schemas.check(self.path("r.json"), "calibrate")
        self.works("generate", *SIZE, "--steps", 7, "--method", "cached", "--masks", "r", "--out", "r.y4m")

    def test_derived_budget_is_the_prebuilt_one(self):
        """Bit for bit: the file, and the video."""
        self.calibrate("few", "--budgets", 0.6)
        self.calibrate("all", "--budgets", "0.6,0.35,0.8")
        self.works("masks", "derive", "few", "--budgets", "0.35,0.6,0.8", "--out", "derived")
        self.assertEqual(self.read("derived"), self.read("all"))
        for name in ("few", "all"):
            self.works("generate", *SIZE, "--steps", 2, "--method", "cached", "--masks", name, "--budget", 0.35,
                       "--out", name + ".y4m")
        self.assertEqual(self.read("few.y4m"), self.read("all.y4m"))


class Resume(Base):
    def test_killed_at_any_moment(self):
        """kill -9 at random moments, again and again, until a run comes through: the same bits as an uninterrupted
        one."""
        rng = random.Random(SEED)
        print(f"check_calibrate: ESA_TEST_SEED={SEED}", flush=True)
        began = time.monotonic()
        self.calibrate("whole", prompts=3)
        seconds = time.monotonic() - began
        for trial in range(3):
            kills = 0
            while True:
                run = start("calibrate", *SMALL, "--num-prompts", 3, "--output", f"m/{trial}", cwd=self.dir)
                try:
                    out, err = run.communicate(timeout=rng.uniform(0, 1.1 * seconds) if kills < 6 else None)
                except subprocess.TimeoutExpired:
                    run.send_signal(signal.SIGKILL)
                    run.communicate()
                    kills += 1
                    continue
                break
            self.assertEqual(run.returncode, 0, err)
            print(f"check_calibrate: trial {trial}: killed {kills} times", flush=True)
            self.assertEqual(self.read(f"m/{trial}"), self.read("whole"), f"trial {trial}, seed {SEED}")
        # also nothing of the killed ones
        self.assertEqual(self.files(), ["m", "m/0", "m/1", "m/2", "whole"])

    def test_other_settings_are_refused(self):
        self.begin("x")
        self.assertIn("x.part/recording.0", self.files())
        schemas.check(self.path("x.part/settings.json"), "calibration-settings")
        small = ["calibrate", *SIZE, "--block", "16x16", "--output", "x"]
        self.fails(*small, "--steps", 3, "--num-prompts", 3,
                   says=["x.part", '"recorded_steps": 2 there', '"recorded_steps": 3 here', "--restart"])
        self.fails(*small, "--steps", 2, "--num-prompts", 2, says=["x.part", "--restart"])
        self.fails(*small, "--num-prompts", 3, "--sigmas", "1,0.5", says=["x.part", '"sigmas": null', "--restart"])
        out = self.works(*small, "--steps", 2, "--num-prompts", 2, "--restart")
        self.assertIn("2 prompts", out)
        self.assertEqual(self.files(), ["x"])

    def test_other_weights_are_refused(self):
        """The transformers and the text encoders are recorded with; the decoder has no part in it."""
        shutil.copytree(os.path.join(MODELS, "wan-tiny"), self.path("model"))
        small = ["calibrate", "--model", "model", *SMALL, "--num-prompts", 2, "--output", "x"]
        run = start(*small, cwd=self.dir)
        while not os.path.exists(self.path("x.part/recording.0")) and run.poll() is None:
            time.sleep(0.002)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        self.assertTrue(os.path.exists(self.path("x.part/recording.0")), "it was not stopped in time")
        for folder in ("transformer_2", "text_encoder_2"):
            shutil.copytree(self.path("model/text_encoder"), self.path("model/" + folder))
            self.fails(*small, says=["x.part", "other weights", "--restart"])
            shutil.rmtree(self.path("model/" + folder))
        for name in ("vae/diffusion_pytorch_model.safetensors", "transformer/diffusion_pytorch_model.safetensors"):
            with open(self.path("model/" + name), "r+b") as file:
                file.seek(-1, os.SEEK_END)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([byte ^ 1]))
            if name.startswith("transformer"):
                self.fails(*small, says=["x.part", "other weights", "--restart"])
        self.works(*small, "--restart")

    def test_foreign_entries(self):
        """Beside the files of a run that is under way, too: then nothing of either is lost."""
        self.begin("x")
        self.put("x.part/notes", "text")
        before = {name: self.read(name) for name in self.files() if name not in ("x.part", "x.part/lock")}
        small = ["calibrate", *SMALL, "--output", "x", "--num-prompts", 3]
        for more in ([], ["--restart"]):
            self.fails(*small, *more, says=["'notes', which"])
        self.assertEqual({name: self.read(name) for name in before}, before)
        os.rename(self.path("x.part/notes"), self.path("notes"))
        code, _, err = esa(*small, cwd=self.dir)
        self.assertEqual(code, 0, err)
        self.assertIn("1 already recorded", err)
        self.assertEqual(self.files(), ["notes", "x"])

    def test_goes_on(self):
        self.begin("x")
        # budgets come last: they may change
        code, _, err = esa("calibrate", *SMALL, "--num-prompts", 3, "--output", "x", "--budgets", 0.4, cwd=self.dir)
        self.assertEqual(code, 0, err)
        self.assertIn("1 already recorded", err)
        self.assertNotIn("prompt 1/3", err)
        self.calibrate("whole", "--budgets", 0.4, prompts=3)
        self.assertEqual(self.read("x"), self.read("whole"))

    def test_one_run_at_a_time(self):
        run = start("calibrate", *SMALL, "--num-prompts", 2, "--output", "x", cwd=self.dir)
        for line in run.stderr:
            if line.startswith("prompt 1/"):
                break
        run.send_signal(signal.SIGSTOP)
        self.fails("calibrate", *SMALL, "--num-prompts", 2, "--output", "x", says=["another run is working", "x.part"])
        run.send_signal(signal.SIGCONT)
        run.communicate()
        self.assertEqual((run.returncode, self.files()), (0, ["x"]))

    def test_interrupt(self):
        run = start("calibrate", *SMALL, "--num-prompts", 3, "--output", "x", cwd=self.dir)
        for line in run.stderr:
            if line.startswith("prompt 2/"):
                break
        run.send_signal(signal.SIGTERM)
        out, err = run.communicate()
        if run.returncode != 0:                                          # it may have been over by then
            self.assertEqual((run.returncode, out), (130, ""))
            self.assertRegex(err.splitlines()[-1], "interrupted; [12] of 3 prompts are recorded in 'x.part'")

    def test_ignored_signals(self):
        """nohup, and shells for jobs in the background, start programs with signals ignored: they stay so."""
        def ignore():
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)

        for words, begun in ((["calibrate", *SMALL, "--num-prompts", 2, "--output", "x"], "prompt 1/2"),
                             (["generate", *SMALL, "--out", "x.y4m"], "step 1/2")):
            run = start(*words, cwd=self.dir, preexec_fn=ignore)
            for line in run.stderr:
                if begun in line:
                    break
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                run.send_signal(number)
            _, err = run.communicate()
            self.assertEqual(run.returncode, 0, err)
        self.assertEqual(self.files(), ["x", "x.y4m"])

    def test_hangup(self):
        """Signals that are not ignored end it, SIGHUP like the others."""
        for number in (signal.SIGHUP, signal.SIGINT):
            run = start("generate", *SMALL, "--steps", 500, "--out", "x.y4m", cwd=self.dir)
            for line in run.stderr:
                if "step 1/" in line:
                    break
            run.send_signal(number)
            _, err = run.communicate()
            self.assertEqual(run.returncode, 130, err)
            self.assertIn("interrupted", err.splitlines()[-1])
            self.assertEqual(self.files(), [])

    def test_shards(self):
        """Shards, merged by the line that the command prints, are one run; so are the same shards in another order."""
        self.calibrate("one", "--budgets", "0.6,0.4", "--warmup", 0.3, prompts=3)
        words = ["calibrate", *SMALL, "--num-prompts", 3, "--budgets", "0.6,0.4", "--warmup", 0.3, "--output", "m/all"]
        for shard in (1, 0):
            out = self.works(*words, "--shard", f"{shard}/2", "--json", "s.json")
            schemas.check(self.path("s.json"), "calibrate")
            schemas.check(self.path(f"m/all.shard-{shard}-of-2.json"), "calibration-settings")
            if shard == 1:
                self.assertRegex(out, "m/all.shard-1-of-2.recording: complete, 1 prompt")
        before = self.read("m/all.shard-0-of-2.recording")
        out = self.works(*words, "--shard", "0/2")
        self.assertIn("complete already", out)
        self.assertEqual(self.read("m/all.shard-0-of-2.recording"), before)
        line = out.splitlines()[1].strip()
        self.assertTrue(line.startswith("esa masks merge "), out)
        subprocess.run(["bash", "-c", shlex.quote(ESA) + line[3:]], cwd=self.dir, env=ENV, check=True,
                       stdout=subprocess.DEVNULL)
        self.assertEqual(self.read("m/all"), self.read("one"))
        parts = sorted(glob.glob(self.path("m/*.recording")), reverse=True)
        self.works("masks", "merge", *parts, "--budgets", "0.4,0.6", "--warmup-frac", 0.3, "--out", "other")
        self.assertEqual(self.read("other"), self.read("one"))
        self.fails("calibrate", *SMALL, "--num-prompts", 5, "--output", "m/all", "--shard", "0/2",
                   says=["other settings"])

    def test_names_of_shards(self):
        """The printed command holds for names with quotes and blanks, and takes no shards of another number."""
        name = "it's; a \"mask\" $(touch oops)"
        for i, n in ((0, 2), (1, 2), (0, 20)):
            out = self.works("calibrate", *SMALL, "--num-prompts", 2, "--budgets", 0.5, "--output", name, "--shard",
                             f"{i}/{n}")
            line = out.splitlines()[1].strip()
            if n == 2:
                merge = line
        subprocess.run(["bash", "-c", shlex.quote(ESA) + merge[3:]], cwd=self.dir, env=ENV, check=True,
                       stdout=subprocess.DEVNULL)
        self.assertEqual(self.info(name)["prompts"], 2)
        self.assertNotIn("oops", self.files())

    def test_many_prompts(self):
        """A recording's sums take 255 contributions: more prompts go into further ones."""
        lines = [f"a red ball number {i}\n" for i in range(3)]
        with open(self.path("prompts"), "w") as file:
            file.writelines(lines)
        size = [*SIZE, "--frames", 1, "--steps", 86, "--step-groups", 2, "--block", "16x16", "--budgets", 0.5]
        # 43 steps x 2 branches: 2 prompts a recording
        self.works("calibrate", *size, "--prompts", "prompts", "--output", "all")
        self.assertEqual(self.info("all")["prompts"], 3)
        for i in range(2):
            self.works("calibrate", *size, "--prompts", "prompts", "--output", "s", "--shard", f"{i}/2")
        self.works("masks", "merge", *glob.glob(self.path("s.shard-*.recording")), "--budgets", 0.5, "--out", "joined")
        self.assertEqual(self.read("all"), self.read("joined"))


class Cached(Base):
    def test_generate(self):
        self.calibrate("m")
        small = ["generate", *SIZE, "--method", "cached", "--masks", "m", "--out", "a.y4m"]
        self.works(*small, "--steps", 2, "--json", "r.json")
        video = json.loads(self.read("r.json"))["videos"][0]
        self.assertEqual((video["method"], video["warmup_steps"]), ("cached", 1))
        self.assertAlmostEqual(video["density"], 0.5, delta=0.03)        # whole blocks: 5 x 5 of them
        self.assertIsNone(video["layer_density"][0])
        self.assertAlmostEqual(sum(video["head_density"][3]) / 4, video["layer_density"][3], places=6)
        self.fails(*small, "--steps", 3, says=["2 steps", "3", "--step-map nearest"])
        self.works(*small, "--steps", 3, "--step-map", "nearest")
        self.fails("generate", "--frames", 9, "--height", 32, "--width", 64, "--steps", 2, "--method", "cached",
                   "--masks", "m", "--out", "b.y4m", says=["grid 5x4x4", "grid 5x4x8"])
        self.fails("generate", *SIZE, "--steps", 2, "--method", "cached", "--masks", "none", "--out", "b.y4m",
                   says=["none"])
        # all blocks kept: dense, but for roundings (as in check_generate.py)
        for budget, least in ((1, 50), (0.5, 5)):
            self.works(*small, "--steps", 2, "--budget", budget, "--tail", "none", "--compare", "dense", "--json",
                       "r.json")
            psnr = json.loads(self.read("r.json"))["videos"][0]["psnr"]
            self.assertGreater(psnr or 99, least)                        # null: equal
            self.assertEqual(budget == 1, (psnr or 99) > 50)

    def test_recordings_are_no_masks(self):
        self.calibrate("m", "--keep-recording", prompts=1)
        self.assertEqual(self.files(), ["m", "m.recording"])
        self.fails("generate", *SIZE, "--steps", 2, "--method", "cached", "--masks", "m.recording", "--out", "a.y4m",
                   says=["recording"])
        self.works("masks", "merge", "m.recording", "--out", "merged")
        self.assertEqual(self.read("merged"), self.read("m"))


class Errors(Base):
    """--method error: masks for total works."""
    WORKS = ["--method", "error", "--work", "0.7,0.55"]

    def test_killed_and_sharded(self):
        """A killed run that goes on, and shards merged by the printed line, make the file of one run."""
        self.calibrate("one", *self.WORKS, prompts=3)
        self.calibrate("three", *self.WORKS, "--exact-rows", 3, "--keep-recording", "--json", "c.json", prompts=3)
        self.assertEqual(json.loads(self.read("c.json"))["exact_rows"], 3)
        self.works("masks", "merge", "three.recording", "--work", "0.7,0.55", "--out", "merged")
        self.assertEqual(self.read("merged"), self.read("one"))
        self.works("masks", "merge", "three.recording", "--work", "0.7,0.55", "--exact-rows", 3, "--out", "merged")
        self.assertEqual(self.read("merged"), self.read("three"))
        info = self.info("three")
        self.assertEqual(info["exact_rows"], 3)
        for asked, counted in zip(info["budgets"], info["works"]):
            self.assertAlmostEqual(asked, counted, delta=0.002)
        self.fails("masks", "merge", "three.recording", "--work", 0.2, "--exact-rows", 16, "--out", "x",
                   says=["work is 0.200", "16 exact rows per query block"])
        self.begin("killed", *self.WORKS)
        out = self.calibrate("killed", *self.WORKS, "--json", "c.json", prompts=3)
        self.assertIn("error removed", out)
        schemas.check(self.path("c.json"), "calibrate")
        self.assertEqual(self.read("killed"), self.read("one"))
        for shard in (1, 0):
            out = self.works("calibrate", *SMALL, "--num-prompts", 3, *self.WORKS, "--output", "m/all", "--shard",
                             f"{shard}/2")
            schemas.check(self.path(f"m/all.shard-{shard}-of-2.json"), "calibration-settings")
        line = out.splitlines()[1].strip()
        self.assertTrue(line.startswith("esa masks merge ") and "--work 0.7,0.55" in line, out)
        subprocess.run(["bash", "-c", shlex.quote(ESA) + line[3:]], cwd=self.dir, env=ENV, check=True,
                       stdout=subprocess.DEVNULL)
        self.assertEqual(self.read("m/all"), self.read("one"))
        part = glob.glob(self.path("m/*shard-0*.recording"))[0]
        self.fails("masks", "merge", part, "--budgets", 0.5, "--out", "x", status=2, says=["--work", "error scores"])
        self.calibrate("old", "--keep-recording", prompts=1)
        self.fails("masks", "merge", part, "old.recording", "--out", "x", says=["error scores", "importance"])
        for word in ("--work", 0.5), ("--exact-rows", 2):
            self.fails("masks", "merge", "old.recording", *word, "--out", "x", status=2, says=["--method error"])
        self.begin("other", *self.WORKS)
        self.fails("calibrate", *SMALL, "--num-prompts", 3, "--output", "other", says=["other settings"])

    def test_generate(self):
        self.calibrate("m", *self.WORKS)
        info = self.info("m")
        self.assertEqual((info["selector"], info["format_version"], info["tail"], info["fine"], info["exact_rows"],
                          info["budgets"]), ("error", 2, "levels", 4, 2, [0.55, 0.7]))
        for asked, counted in zip(info["budgets"], info["works"]):
            self.assertAlmostEqual(asked, counted, delta=0.002)
        self.works("masks", "info", "m", "--layer", 0, "--step", 0, "--json", "i.json")
        schemas.check(self.path("i.json"), "masks-info")
        small = ["generate", *SIZE, "--steps", 2, "--method", "cached", "--masks", "m", "--out", "a.y4m", "--json",
                 "r.json"]
        for words, asked, work in ((["--work", 0.6], 0.6, info["works"][0]), (["--budget", 0.7], 0.7, info["works"][1]),
                                   (["--preset", "faithful"], 0.57, info["works"][0])):
            self.works(*small, *words)
            video = json.loads(self.read("r.json"))["videos"][0]
            self.assertAlmostEqual(video["attention_work"]["asked"], asked, delta=1e-6)
            self.assertAlmostEqual(video["attention_work"]["realised"], work, delta=1e-6)
            self.assertEqual(video["warmup_steps"], 0)
        # the works include the exact rows of the file, and no other number goes with them
        self.works(*small, "--work", 0.6, "--exact-rows", 2)
        realised = json.loads(self.read("r.json"))["videos"][0]["attention_work"]["realised"]
        self.assertAlmostEqual(realised, info["works"][0], delta=1e-6)
        self.fails(*small, "--work", 0.6, "--exact-rows", 4, says=["exact_rows is 4", "include 2 exact rows"])
        self.fails(*small, "--work", 0.4, says=["0.400", "0.550"])
        self.fails(*small, "--budget", 0.5, says=["total works 0.550, 0.700"])
        self.works("bench", "video", *SIZE, "--steps", 2, "--csv", "b.csv", "--num-prompts", 1, "--seeds", 0,
                   "--method", "cached", "--masks", "m", "--work", "0.6,0.7", "--tail", "levels")
        rows = [line.split(",") for line in self.read("b.csv").decode().splitlines()]
        self.assertEqual([row[5] for row in rows[2:]], ["work 0.60", "work 0.70"])
        for row, counted in zip(rows[2:], info["works"]):
            work = float(row[rows[0].index("attention_work")])
            self.assertAlmostEqual(work, counted, delta=1e-4)                          # four decimals in the table
        self.calibrate("old", prompts=1)
        self.fails("generate", *SIZE, "--steps", 2, "--method", "cached", "--masks", "old", "--work", 0.5, "--out",
                   "b.y4m", says=["total works"])

    def test_score_groups(self):
        """Groups are a setting of the recording: the file names them, and a run with others does not go on."""
        self.calibrate("m", *self.WORKS, "--keep-recording", prompts=1)
        self.calibrate("coarse", *self.WORKS, "--score-groups", "4x2", "--keep-recording", prompts=1)
        usual, coarse = self.info("m"), self.info("coarse")
        self.assertEqual((coarse["group_q"], coarse["group_k"]), (4, 2))
        self.assertEqual((usual["group_q"], usual["group_k"]), (1, 1))      # blocks of 16 are scored token by token
        self.assertNotEqual(self.read("coarse"), self.read("m"))
        self.fails("masks", "merge", "m.recording", "coarse.recording", "--work", 0.6, "--out", "x",
                   says=["scores of 1x1", "4x2"])
        self.begin("killed", *self.WORKS, "--score-groups", "4x2")
        self.fails("calibrate", *SMALL, "--num-prompts", 3, *self.WORKS, "--output", "killed",
                   says=["other settings", "group"])
        small = ["generate", *SMALL, "--out", "a.y4m"]
        works = []
        for groups in ([], ["--score-groups", "1x1"]):
            self.works(*small, "--method", "error", "--budget", 0.5, *groups, "--json", "r.json")
            works.append(json.loads(self.read("r.json"))["videos"][0]["attention_work"]["realised"])
        self.assertGreater(works[1], works[0])              # finer scores cost more
        self.fails(*small, "--method", "entropy", "--score-groups", "4x2", status=2, says=["--method error"])
        self.fails("bench", "video", *SIZE, "--steps", 2, "--csv", "b.csv", "--method", "entropy", "--score-groups",
                   "4x2", status=2, says=["--method error"])

    def test_wrong_words(self):
        for args in (["--method", "error", "--budgets", 0.5], ["--method", "error", "--importance", "u8"],
                     ["--method", "error", "--samples", 2], ["--work", 0.5], ["--weights", "p"], ["--exact-rows", 2],
                     ["--score-groups", "8x4"], ["--method", "error", "--score-groups", "8x3"],
                     ["--method", "error", "--work", "0.5,0.5001"], ["--method", "rf_v2"]):
            self.fails("calibrate", "--output", "x", *args, status=2)
        self.fails("calibrate", *SMALL, "--num-prompts", 1, "--output", "x", "--method", "error", "--weights", "none",
                   says=["none"])


class Bench(Base):
    def test_model(self):
        self.calibrate("m", prompts=1)
        out = self.works("bench", "model", *SMALL, "--steps", 4, "--masks", "m", "--budgets", "0.6,0.4", "--rounds", 2,
                         "--json", "b.json")
        for word in ("dense", "online entropy", "cached", "end to end", "with warm-up", "speedup"):
            self.assertIn(word, out)
        report = json.loads(self.read("b.json"))
        schemas.check(self.path("b.json"), "bench-model")
        rows = report["rows"]
        self.assertEqual([(row["mode"], row["budget"]) for row in rows],          # masks of 2 steps were mapped to 4
                         [("dense", 1), ("online", 0.6), ("online", 0.4), ("cached", 0.6), ("cached", 0.4)])
        for row in rows:
            self.assertEqual(len(row["round"]), 2)
            self.assertEqual(row["warmup_steps"], 0 if row["mode"] == "dense" else 1)
            for each in row["round"]:
                self.assertEqual(len(each["step_seconds"]), 4)
                # one clock read apart
                self.assertLessEqual(sum(each["step_seconds"]), each["denoise_seconds"] * 1.001 + 1e-3)
            for name in ("step_seconds", "denoise_seconds", "end_to_end_seconds"):
                self.assertTrue(0 < row[name]["min"] <= row[name]["median"] <= row[name]["max"], (row["mode"], name))
            if row["mode"] != "dense":
                self.assertAlmostEqual(row["density"], row["budget"], delta=0.03)
        self.fails("bench", "model", *SMALL, "--masks", "none", says=["none"])
        self.works("bench", "model", *SMALL, "--mode", "online", "--method", "rf_v2", "--budgets", 0.5, "--rounds", 1,
                   "--skip-dense", "--no-decode", "--json", "s.json")
        report = json.loads(self.read("s.json"))
        schemas.check(self.path("s.json"), "bench-model")
        self.assertEqual((len(report["rows"]), report["rows"][0]["speedup"], report["decoded"]), (1, None, False))

    def test_default(self):
        """Without a method, a budget or a work it measures what `esa generate` makes without options."""
        size = ["--frames", 9, "--height", 64, "--width", 64, "--steps", 2, *kit.ONE]
        self.works("generate", *size, "--out", "a.y4m", "--json", "a.json")
        video = json.loads(self.read("a.json"))["videos"][0]
        for more, method, asked in (([], "error", 0.44), (["--method", "error"], "error", 0.44),
                                    (["--preset", "fast"], "error", 0.3), (["--budgets", 0.5], "entropy", None)):
            out = self.works("bench", "model", *size, "--rounds", 1, "--no-decode", "--json", "b.json", *more)
            dense, row = json.loads(self.read("b.json"))["rows"]
            self.assertEqual((dense["method"], row["method"], row["attention_work"]["asked"]), ("dense", method, asked))
            self.assertIn("online " + method, out)
            if asked == 0.44:
                self.assertEqual(row["attention_work"], video["attention_work"])
                self.assertEqual(row["round"][0]["layer_density"], video["layer_density"])
        self.works("bench", "model", *size, "--rounds", 1, "--no-decode", "--json", "b.json", "--method", "entropy",
                   "--skip-dense")
        self.assertEqual([row["budget"] for row in json.loads(self.read("b.json"))["rows"]], [0.7, 0.5, 0.3])

    def test_turns(self):
        """Every round waits for its line, and input that ends too early ends the run without a result."""
        words = ["bench", "model", *SMALL, "--mode", "dense", "--rounds", 2, "--no-decode", "--turns", "--json",
                 "t.json"]
        run = start(*words, cwd=self.dir, stdin=subprocess.PIPE)
        for _ in range(2):
            self.assertEqual(run.stdout.readline(), "ready\n")
            self.assertFalse(os.path.exists(self.path("t.json")))
            run.stdin.write("\n")
            run.stdin.flush()
        out, err = run.communicate(timeout=60)
        self.assertEqual((run.returncode, out.count("ready")), (0, 0), err)
        self.assertEqual(len(json.loads(self.read("t.json"))["rows"][0]["round"]), 2)
        os.unlink(self.path("t.json"))
        run = start(*words, cwd=self.dir, stdin=subprocess.PIPE)
        out, err = run.communicate("\n", timeout=60)
        self.assertEqual((run.returncode, out, self.files()), (1, "ready\n" * 2, []))
        self.assertIn("standard input ended before round 2 of 2", err)

    def test_signal_while_it_waits(self):
        """One signal is enough where the command waits for input."""
        run = start("bench", "model", *SMALL, "--mode", "dense", "--rounds", 2, "--no-decode", "--turns",
                    cwd=self.dir, stdin=subprocess.PIPE)
        self.assertEqual(run.stdout.readline(), "ready\n")
        run.send_signal(signal.SIGTERM)
        self.assertEqual(run.wait(timeout=60), 130)
        out, err = run.communicate()
        self.assertEqual(out, "")
        self.assertTrue(err.splitlines()[-1].endswith("interrupted, nothing was written"), err)

    def test_video(self):
        """`esa bench video` with cached masks: a row per clip that names the mask file."""
        self.calibrate("masks.safetensors", prompts=1)
        small = [
            "bench", "video", *SMALL, "--num-prompts", 1, "--seeds", 1, "--budget", 0.5, "--tail", "none", "--csv",
            "q.csv"
        ]
        self.fails(*small, "--method", "cached", status=2, says=["--masks"])
        self.fails(*small, "--method", "entropy", "--masks", "masks.safetensors", status=2, says=["--masks"])
        self.works(*small, "--method", "entropy,cached", "--masks", "masks.safetensors")
        rows = [line.split(",") for line in self.read("q.csv").decode().splitlines()]
        self.assertEqual([row[4] for row in rows], ["method", "dense", "entropy", "cached:masks"])
        self.assertGreater(float(rows[3][9]), 5)                         # PSNR


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
