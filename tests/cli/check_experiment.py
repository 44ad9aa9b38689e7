#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`esa experiment` as a user runs it: check_experiment.py ESA MODELS (the folder with wan-tiny in it) [CLASS ...].


Every failure must be one message on stderr and an exit status; what is on disk is whole at every moment. Clips are
tiny: 5 frames of 64 x 64, two steps. The cluster is a stand-in here (a program called sbatch); tests/slurm has a
real one."""
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import kit
import schemas

ESA, MODELS = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
SMALL = [
    "--frames", 5, "--height", 64, "--width", 64, "--steps", 2, "--warmup", 0.5, "--num-prompts", 1, "--eval-prompts",
    2, *kit.ONE
]
BUDGETS = ["--budgets", "0.5,0.3"]
ENV = {**{k: v for k, v in os.environ.items() if not k.startswith(("HF_", "SLURM"))}, "ESA_MODELS": MODELS}
SEED = int(os.environ.get("ESA_TEST_SEED", "1"))


def esa(*args, cwd=None, env=None):
    return kit.run(ESA, "experiment", *args, cwd=cwd, env={**ENV, **(env or {})})


def tree(folder):
    """Every file of a folder with its bytes."""
    return {
        os.path.relpath(os.path.join(top, name), folder): kit.read(os.path.join(top, name))
        for top, _, names in os.walk(folder)
        for name in names
    }


class Base(kit.Folder):
    call = staticmethod(esa)
    progress = True


class Words(Base):
    def test_help(self):
        for command in ("run", "submit", "collect"):
            code, out, err = esa(command, "--help")
            self.assertEqual((code, err), (0, ""))
            self.assertIn(f"usage: esa experiment {command}", out)
        code, out, err = esa("--help")
        self.assertEqual((code, err), (0, ""))
        self.fails("rum", status=2, says=["did you mean 'esa experiment run'"])

    def test_wrong_words(self):
        for command in ("run", "submit"):
            self.fails(command, status=2, says=["--tag"])
            for tag in ("", "a/b", "../x", ".hidden", "-x", "a b", "ä", "x" * 300):
                self.fails(command, "--tag", tag, status=2, says=["--tag"])
            for args in (["--budget", "1.5"], ["--budget", "x"], ["--budget",
                                                                  "0.5,0.5"], ["--budget", "0.5", "--budgets",
                                                                               "0.3"], ["--method", "dense"],
                         ["--method", "cached,cached"], ["--num-prompts",
                                                         "0"], ["--num-prompts", "1", "--prompts",
                                                                "f"], ["--skip-calibrate", "--only-calibrate"],
                         ["--method", "entropy",
                          "--skip-calibrate"], ["--method", "rf_v2", "--masks",
                                                "m"], ["--steps", "0"], ["--block",
                                                                         "64"], ["--window",
                                                                                 "1,2,3"], ["--bugdet",
                                                                                            "0.5"], ["word"]):
                self.fails(command, "--tag", "x", *args, status=2)
        self.fails("run", "--tag", "x", "--bugdet", "0.5", status=2, says=["did you mean --budget"])
        self.fails("collect", "word", status=2)

    def test_weights_of_lpips_are_read_first(self):
        with open(self.path("junk"), "w", encoding="utf-8") as file:
            file.write("no weights")
        for option in ("--lpips", "--lpips-weights"):
            for name in ("none", "junk"):
                self.fails("run", "--tag", "x", *SMALL, option, name, says=[name])

    def test_wrong_things(self):
        self.fails("run", "--tag", "x", "--model", "wan-tyni", says=["did you mean wan-tiny?"])
        self.fails("run", "--tag", "x", "--skip-calibrate", *SMALL,
                   says=["--skip-calibrate", "results/x/masks.safetensors"])
        self.fails("run", "--tag", "x", "--prompts", "none.txt", *SMALL[:10], says=["none.txt"])
        self.fails("run", "--tag", "x", *SMALL[:10], "--eval-prompts", "none.txt", says=["none.txt"])
        self.fails("run", "--tag", "x", *SMALL[:10], "--eval-prompts", "0", status=2, says=["--eval-prompts"])
        self.fails("run", "--tag", "x", *SMALL[:10], "--num-prompts", 10, "--eval-prompts", 3, says=["built-in"])
        self.fails("run", "--tag", "x", *SMALL, "--height", 63, says=["63"])
        with open(self.path("file"), "w", encoding="utf-8"):
            pass
        self.fails("run", "--tag", "x", "--results", "file", *SMALL, says=["file"])
        self.fails("collect", says=["results"])
        os.mkdir(self.path("results"))
        self.fails("collect", says=["no results"])


    def test_foreign_entries(self):
        """work/ and the frames that are to be replaced are emptied at the end: foreign entries are refused before."""
        run = ["run", "--tag", "x", *SMALL, *BUDGETS]
        for folder, name, more in (("work", "thesis.txt", []), ("work", "clips/notes", []),
                                   ("work", "frames/dense/000.png", []), ("work", "more/", []),
                                   ("frames", "thesis.txt", ["--keep-frames"]),
                                   ("frames", "dense/film.mov", ["--keep-frames"])):
            path = self.put(f"results/x/{folder}/{name}" + ("x" if name.endswith("/") else ""), "text")
            self.fails(*run, *more, says=[f"results/x/{folder}'", f"'{name}', which this command did not write"])
            self.assertEqual(kit.read(path), b"text")
            shutil.rmtree(self.path("results"))
        self.put("elsewhere/thesis.txt", "text")
        os.makedirs(self.path("results/x"))
        os.symlink("../../elsewhere", self.path("results/x/work"))
        self.fails(*run, says=["'thesis.txt', which"])
        self.assertEqual(self.read("elsewhere/thesis.txt"), b"text")


class Run(Base):
    """One small experiment, made once; the tests look at it and work on copies."""

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.made = scratch.name
        code, cls.out, cls.err = esa("run", "--tag", "x", *SMALL, *BUDGETS, cwd=cls.made)
        assert code == 0, cls.err
        cls.result = os.path.join(cls.made, "results", "x")

    def copy(self):
        shutil.copytree(os.path.join(self.made, "results"), self.path("results"))

    def test_files(self):
        ending = "mp4" if os.path.exists(os.path.join(self.result, "videos", "dense", "000.mp4")) else "y4m"
        expected = ["config.json", "masks.safetensors", "quality.json", "speed.json"]
        expected += [f"videos/{v}/00{i}.{ending}" for v in ("dense", "b0.5", "b0.3") for i in range(2)]
        self.assertEqual(sorted(tree(self.result)), sorted(expected))
        config, speed, quality = (schemas.check(os.path.join(self.result, f"{n}.json"), f"experiment-{n}")
                                  for n in ("config", "speed", "quality"))
        self.assertIn("--warmup 0.5", config["command"])
        self.assertEqual(
            len(set(config["settings"]["evaluation_prompts"]) | set(config["settings"]["calibration_prompts"])), 3,
            "prompts seen twice")
        self.assertEqual([v["name"] for v in speed["variants"]], ["dense", "b0.5", "b0.3"])
        self.assertEqual([v["name"] for v in quality["variants"]], ["b0.5", "b0.3"])
        self.assertEqual(speed["calibration"]["bytes"], os.path.getsize(os.path.join(self.result, "masks.safetensors")))
        self.assertGreater(speed["calibration"]["seconds"], 0)
        self.assertEqual(speed["tokens"], 3 * 8 * 8)                     # latents 3 x 16 x 16 in patches of 1 x 2 x 2
        dense = speed["variants"][0]
        for variant in speed["variants"]:
            self.assertEqual(len(variant["videos"]), 2)
            for i, video in enumerate(variant["videos"]):
                self.assertEqual((video["index"], video["prompt"]), (i, config["settings"]["evaluation_prompts"][i]))
                self.assertTrue(os.path.exists(os.path.join(self.result, video["file"])))
                self.assertEqual(len(video["record"]["step_seconds"]), 2)
            # The figures are those of the clips: mean step of each, the median of both is their mean.
            steps = [sum(v["record"]["step_seconds"]) / 2 for v in variant["videos"]]
            self.assertAlmostEqual(variant["step_seconds"]["median"], sum(steps) / 2, delta=1e-7)
            self.assertAlmostEqual(variant["step_seconds"]["lowest"], min(steps), delta=1e-7)
            late = [v["record"]["step_seconds"][1] for v in variant["videos"]]
            self.assertAlmostEqual(variant["step_seconds_sparse"]["highest"], max(late), delta=1e-7)
            against = [d["record"]["step_seconds"][1] / t for d, t in zip(dense["videos"], late)]
            self.assertAlmostEqual(variant["speedup_without_warmup"], sum(against) / 2, delta=1e-6)
        self.assertEqual((dense["speedup"], dense["density"]), (1, 1))
        for variant in quality["variants"]:
            self.assertAlmostEqual(variant["density"], variant["budget"], delta=0.2)    # few blocks: counts are rounded
            self.assertAlmostEqual(variant["mean"]["ssim"], sum(v["ssim"] for v in variant["videos"]) / 2, delta=1e-7)
            self.assertGreater(variant["mean"]["psnr"], 5)
        self.assertGreater(quality["variants"][0]["mean"]["psnr"], quality["variants"][1]["mean"]["psnr"],
                           "fewer blocks, better video?")

    def table(self):
        """The last thing it printed."""
        return self.out[self.out.index("tag  "):]

    def test_table(self):
        rows = [line.split() for line in self.table().splitlines()]
        self.assertEqual([row[3] for row in rows], ["variant", "dense", "b0.5", "b0.3"])

    def test_again(self):
        """What is complete is not touched."""
        self.copy()
        before = {name: os.stat(self.path("results/x", name)).st_mtime_ns for name in tree(self.path("results/x"))}
        code, out, err = esa("run", "--tag", "x", *SMALL, *BUDGETS, cwd=self.dir)
        self.assertEqual((code, out), (0, self.table()), err)
        self.assertIn("complete", err)
        self.assertEqual(
            {name: os.stat(self.path("results/x", name)).st_mtime_ns
             for name in tree(self.path("results/x"))}, before)
        self.works("run", "--tag", "x", *SMALL, *BUDGETS, "--skip-calibrate")

    def test_other_settings(self):
        """A message that names what differs, then and now."""
        self.copy()
        for args, says in ((["--steps", 3], ["steps", "2", "3"]), (["--budgets",
                                                                    "0.5"], ["budgets", "[0.5, 0.3]", "[0.5]"]),
                           (["--tail", "none"], ["tail", '"pooled"', '"none"']), (["--seed", 9], ["seed", "0", "9"]),
                           (["--refresh", "early"], ["refresh 1", 'asks for "early"']),
                           (["--eval-prompts",
                             1], ["evaluation_prompts"]), (["--negative-prompt",
                                                            "blur"], ["negative_prompt", "nothing", '"blur"'])):
            line = self.fails("run", "--tag", "x", *SMALL, *BUDGETS, *args, says=says)
            self.assertIn("another --tag", line)

    def test_settings_of_an_older_folder(self):
        """An older esa did not write some settings: they were not asked for then, so they may not be asked for now."""
        self.copy()
        config = kit.load(self.path("results/x/config.json"))
        self.assertEqual(config["settings"]["tail"], "pooled")
        for name in ("exact_rows", "order_every", "share_branches", "score_groups", "carry", "carry_format"):
            self.assertIsNone(config["settings"].pop(name))
        self.put("results/x/config.json", json.dumps(config))
        schemas.check(self.path("results/x/config.json"), "experiment-config")
        self.works("run", "--tag", "x", *SMALL, *BUDGETS)
        self.works("run", "--tag", "x", *SMALL, *BUDGETS, "--tail", "pooled")        # the default, said aloud
        self.fails("run", "--tag", "x", *SMALL, *BUDGETS, "--exact-rows", 2, says=["exact_rows", "nothing", "2"])
        self.fails("run", "--tag", "x", *SMALL, *BUDGETS, "--score-groups", "4x2",
                   says=["score_groups", "nothing", '"4x2"'])
        self.fails("run", "--tag", "x", *SMALL, *BUDGETS, "--carry", 1, says=["carry", "nothing", '"1"'])
        # with the error method, which carries by itself now, the settings differ from those of an older folder
        self.fails("run", "--tag", "x", *SMALL, *BUDGETS, "--method", "cached,error", says=["methods"])

    def model(self):
        shutil.copytree(os.path.join(MODELS, "wan-tiny"), self.path("model"))
        return self.path("model")

    def change_weights(self, part="transformer/diffusion_pytorch_model.safetensors"):
        """One bit of one number, the size and the times as they were."""
        path = self.path("model", part)
        about = os.stat(path)
        with open(path, "r+b") as file:
            file.seek(about.st_size // 2)
            byte = file.read(1)[0]
            file.seek(about.st_size // 2)
            file.write(bytes([byte ^ 1]))
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))

    def test_other_weights(self):
        """Clips of two states of a model must not meet in one experiment; a copy of the same weights with other
        times is the same model."""
        args = ["run", "--tag", "x", *SMALL, *BUDGETS, "--model", self.model()]
        self.works(*args)
        for top, _, names in os.walk(self.path("model")):
            for name in names:
                os.utime(os.path.join(top, name))
        self.works(*args)
        for part in ("transformer/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors",
                     "text_encoder/model.safetensors"):
            self.change_weights(part)
            line = self.fails(*args, says=["other weights", "model", "results/x", "another --tag"])
            self.assertNotIn("fnv", line)
            self.change_weights(part)                                    # and back
        self.works(*args)
        config = json.loads(self.read("results/x/config.json"))
        del config["settings"]["weights_hash"]                           # of an esa that did not look at weights
        with open(self.path("results/x/config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        self.works(*args)

    def test_stopped_before_its_first_clip(self):
        """The masks are there, no clip is: they belong to the settings they were made with."""
        process = self.start()
        while not os.path.exists(self.path("results/x/config.json")):
            self.assertIsNone(process.poll(), "it ended")
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        self.assertTrue(os.path.exists(self.path("results/x/masks.safetensors")))
        self.assertEqual(
            json.loads(self.read("results/x/config.json"))["settings"],
            json.loads(kit.read(os.path.join(self.result, "config.json")))["settings"])
        with open(self.path("prompt"), "w", encoding="utf-8") as file:
            file.write("another prompt\n")
        small = SMALL[:SMALL.index("--num-prompts")]
        self.fails("run", "--tag", "x", *small, "--eval-prompts", 2, *BUDGETS, "--prompts", "prompt",
                   says=["calibration_prompts"])
        self.works("run", "--tag", "x", *SMALL, *BUDGETS)
        self.assertEqual(self.read("results/x/quality.json"), kit.read(os.path.join(self.result, "quality.json")))

    def test_damaged_config(self):
        self.copy()
        for text in ("", "{", "[]", '{"format": 2}', '{"format": 1, "format": 1}', '{"format": NaN}'):
            with open(self.path("results/x/config.json"), "w", encoding="utf-8") as file:
                file.write(text)
            self.fails("run", "--tag", "x", *SMALL, *BUDGETS, says=["config.json"])

    def test_masks_elsewhere(self):
        """One mask file for several experiments; --skip-calibrate makes none."""
        self.copy()
        masks = self.path("results/x/masks.safetensors")
        self.works("run", "--tag", "y", *SMALL, "--budget", 0.3, "--masks", masks, "--skip-calibrate")
        self.assertFalse(os.path.exists(self.path("results/y/masks.safetensors")))
        mine, theirs = (schemas.check(self.path("results", tag, "quality.json"), "experiment-quality") for tag in "yx")
        self.assertEqual(mine["variants"][0], theirs["variants"][1])
        speed = schemas.check(self.path("results/y/speed.json"), "experiment-speed")
        self.assertEqual((speed["calibration"]["file"], speed["calibration"]["seconds"]), (masks, None))

    def test_only_calibrate(self):
        """Makes the mask file, leaves nothing else, and takes nothing away from an experiment that is under way."""
        self.works("run", "--tag", "x", *SMALL, *BUDGETS, "--only-calibrate")
        self.assertEqual(self.files(), ["results", "results/x", "results/x/masks.safetensors"])
        self.assertEqual(self.read("results/x/masks.safetensors"),
                         kit.read(os.path.join(self.result, "masks.safetensors")))
        self.works("run", "--tag", "y", *SMALL, *BUDGETS, "--only-calibrate", "--masks", "elsewhere/m")
        self.assertEqual(self.files(),
                         ["elsewhere", "elsewhere/m", "results", "results/x", "results/x/masks.safetensors"])
        os.makedirs(self.path("results/x/work/clips"))
        self.works("run", "--tag", "x", *SMALL, *BUDGETS, "--only-calibrate")
        self.assertTrue(os.path.exists(self.path("results/x/work/clips")))

    def test_online(self):
        """Methods that need no masks are not calibrated."""
        self.works("run", "--tag", "z", *SMALL, "--eval-prompts", 1, "--budget", 0.5, "--method", "entropy",
                   "--keep-frames")
        self.assertFalse(os.path.exists(self.path("results/z/masks.safetensors")))
        speed = schemas.check(self.path("results/z/speed.json"), "experiment-speed")
        self.assertEqual([v["name"] for v in speed["variants"]], ["dense", "entropy-b0.5"])
        self.assertEqual(speed["calibration"]["file"], None)
        self.assertFalse(os.path.exists(self.path("results/z/work")))
        self.assertTrue(os.path.exists(self.path("results/z/frames/dense/000.safetensors")))

    def test_error(self):
        """The error selector beside another one: each has its own defaults, and config.json says so."""
        args = ["run", "--tag", "e", *SMALL[:8], "--eval-prompts", 1, "--budget", 0.5, "--method", "entropy,error"]
        self.works(*args)
        config, speed = (schemas.check(self.path(f"results/e/{n}.json"), f"experiment-{n}")
                         for n in ("config", "speed"))
        self.assertEqual([v["name"] for v in speed["variants"]], ["dense", "entropy-b0.5", "error-b0.5"])
        self.assertEqual(config["settings"]["tail"], "default")
        for name in ("refresh", "warmup", "dense_first_layer", "exact_rows", "order_every", "share_branches"):
            self.assertIsNone(config["settings"][name], name)
        self.fails(*args, "--warmup", 0.5, says=["warmup", "nothing", "0.5"])
        self.fails("run", "--tag", "x", "--method", "entropy,error", "--order", "adaptive", status=2,
                   says=["adaptive", "--method error", "not entropy"])
        self.fails("run", "--tag", "x", "--method", "error", "--tail", "centroid", status=2, says=["centroid"])
        self.fails("run", "--tag", "x", "--work", 0.5, status=2, says=["--work"])

    def test_collect(self):
        self.copy()
        os.mkdir(self.path("results/other"))                            # no experiment: not our business
        os.makedirs(self.path("results/stopped"))
        shutil.copy(self.path("results/x/config.json"), self.path("results/stopped"))
        code, out, err = esa("collect", "--csv", "t.csv", "--markdown", "t.md", cwd=self.dir)
        self.assertEqual(code, 0, err)
        self.assertEqual(err, "results/stopped is not complete: running, or stopped\n")
        with open(self.path("t.csv"), encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual([row["variant"] for row in rows], ["dense", "b0.5", "b0.3"])
        quality = json.loads(self.read("results/x/quality.json"))
        speed = json.loads(self.read("results/x/speed.json"))
        for row, variant in zip(rows[1:], quality["variants"]):
            self.assertAlmostEqual(float(row["psnr"]), variant["mean"]["psnr"], delta=1e-6)
            self.assertAlmostEqual(float(row["ssim"]), variant["mean"]["ssim"], delta=1e-8)
        for row, variant in zip(rows, speed["variants"]):
            self.assertAlmostEqual(float(row["seconds_per_step"]), variant["step_seconds"]["median"], delta=1e-8)
        self.assertEqual((rows[0]["psnr"], rows[0]["speedup"]), ("", "1"))
        markdown = self.read("t.md").decode().splitlines()
        self.assertEqual(len(markdown), 5)
        self.assertEqual(len({line.count("|") for line in markdown}), 1)
        self.assertIn("dB", markdown[3])
        with open(self.path("results/x/speed.json"), "w", encoding="utf-8") as file:
            file.write('{"format": 1')
        self.fails("collect", says=["speed.json"])
        shutil.rmtree(self.path("results/x"))
        code, _, err = esa("collect", cwd=self.dir)
        self.assertEqual(code, 1)
        self.assertIn("holds no results yet", err)

    def start(self):
        return subprocess.Popen([ESA, "experiment", "run", "--tag", "x", *map(str, SMALL), *BUDGETS], cwd=self.dir,
                                env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def whole(self, final):
        """Whatever stands in the folder under its own name is complete: JSON as its schema says, videos and masks as
        they will be."""
        folder = self.path("results/x")
        for name, data in tree(folder).items() if os.path.isdir(folder) else ():
            if name in ("config.json", "speed.json", "quality.json"):
                schemas.check(os.path.join(folder, name), "experiment-" + name[:-5])
            elif name.startswith("work/clips/") and name.endswith(".json"):
                json.loads(data)
            elif name in final and name.startswith(("videos/", "masks")):
                self.assertEqual(data, final[name], f"{name} is not whole")

    def test_killed_anywhere(self):
        """kill -9 at moments of chance until it is done: every moment leaves whole files, and the end is the same
        bytes."""
        final, rng, kills = tree(self.result), random.Random(SEED), 0
        for attempt in range(13):
            process = self.start()
            try:
                # The whole takes a second on a fast machine: four kills must come before that. The last attempt is let
                # end, however slow the machine.
                process.wait(timeout=rng.uniform(0.02, 0.15) + 0.015 * attempt if attempt < 12 else None)
                self.assertEqual(process.returncode, 0, process.stderr.read())
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
                self.whole(final)
            finally:
                process.stderr.close()
            if process.returncode == 0:
                break
        self.assertGreater(kills, 3, f"killed {kills} times only; seed {SEED}")
        again = tree(self.path("results/x"))
        self.assertEqual(sorted(again), sorted(final), f"seed {SEED}")
        for name in final:
            if name not in ("speed.json", "config.json"):               # times, and the moment of the machine
                self.assertEqual(again[name], final[name], f"{name}, seed {SEED}")
        schemas.check(self.path("results/x/speed.json"), "experiment-speed")

    def test_interrupted(self):
        """A signal ends it with a message and 130; a second run beside it is refused; the same command goes on."""
        process = self.start()
        while not os.path.exists(self.path("results/x/work/clips/dense-000.json")):
            self.assertIsNone(process.poll(), "it ended before its first clip")
            time.sleep(0.005)
        self.fails("run", "--tag", "x", *SMALL, *BUDGETS, says=["another run is working"
                                                                ]) if process.poll() is None else None
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
        if process.returncode != 0:                                     # it may have been faster
            self.assertEqual(process.returncode, 130, err)
            self.assertEqual(len([line for line in err.splitlines() if line.startswith("esa: ")]), 1, err)
            self.assertIn("the same command", err.splitlines()[-1])
        self.works("run", "--tag", "x", *SMALL, *BUDGETS)
        self.assertEqual(self.read("results/x/quality.json"), kit.read(os.path.join(self.result, "quality.json")))


class Submit(Base):
    """The scripts, and how sbatch is called."""

    def sbatch(self, text):
        """A stand-in that writes down its arguments and answers like sbatch, or as text says."""
        os.makedirs(self.path("bin"), exist_ok=True)
        for name, body in (("sbatch", text), ("scancel", 'echo "$@" >> "$CALLS/cancelled"')):
            with open(self.path("bin", name), "w", encoding="utf-8") as file:
                file.write("#!/bin/bash\n" + body + "\n")
            os.chmod(self.path("bin", name), 0o755)
        return {"PATH": self.path("bin") + ":" + os.environ["PATH"], "CALLS": self.dir}

    GOOD = """n=$(ls "$CALLS" | grep -c ^call)
printf '%s\\n' "$@" > "$CALLS/call.$n"
echo "$((41 + n));cluster\""""

    def test_dry_run(self):
        out = self.works("submit", "--dry-run", "--tag", "x", "--budgets", "0.7,0.5", *SMALL, "--negative-prompt",
                         "it's $HOME; \"x\"", "--", "--partition=a")
        self.assertEqual(os.listdir(self.dir), [])
        first, second = out.split("# results/x/array.sbatch")
        for text in (first, second.split("\n", 1)[1]):
            self.assertEqual(subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode, 0, text)
        for line in ("#SBATCH --gres=gpu:1", "#SBATCH --cpus-per-task=8", "#SBATCH --mem=64G", "#SBATCH --time=6:00:00",
                     "#SBATCH --requeue"):
            self.assertIn(line + "\n", first)
            self.assertIn(line + "\n", second)
        self.assertIn("#SBATCH --array=0-1\n", second)
        self.assertNotIn("--array", first)
        # What the shell makes of the scripts: the words as they were typed.
        for text, task, tag, budget, mode in ((first, "", "x", "0.7,0.5", "--only-calibrate"),
                                              (second.split("\n", 1)[1], "1", "x-b0.5", "0.5", "--skip-calibrate")):
            shown = subprocess.run(["bash"], input=text.replace(f"exec {ESA}", "printf '%s\\n'"), text=True,
                                   capture_output=True, env={**ENV, "SLURM_ARRAY_TASK_ID": task}, check=True)
            words = shown.stdout.splitlines()
            self.assertEqual(words[:2], ["experiment", "run"])
            self.assertIn(mode, words)
            self.assertEqual(words[words.index("--tag") + 1], tag)
            self.assertEqual(words[max(i for i, w in enumerate(words) if w in ("--budget", "--budgets")) + 1], budget)
            self.assertEqual(words[words.index("--negative-prompt") + 1], "it's $HOME; \"x\"")
            self.assertEqual(words[words.index("--masks") + 1], "results/x/masks.safetensors")
            self.assertNotIn("--dry-run", words)
        self.assertNotIn("gres", self.works("submit", "--dry-run", "--tag", "x", "--gpus", "0"))

    def test_calls(self):
        out = self.works("submit", "--tag", "x", "--budgets", "0.7,0.5", *SMALL, "--results", "r e s", "--",
                         "--partition=a b", "--qos=high", env=self.sbatch(self.GOOD))
        calls = [self.read(f"call.{i}").decode().splitlines() for i in (0, 1)]
        self.assertEqual(calls[0], [
            "--parsable", "--output=r e s/x/logs/%x-%j.log", "--partition=a b", "--qos=high", "r e s/x/calibrate.sbatch"
        ])
        self.assertEqual(calls[1], [
            "--parsable", "--output=r e s/x/logs/%x-%A_%a.log", "--dependency=afterok:41", "--kill-on-invalid-dep=yes",
            "--partition=a b", "--qos=high", "r e s/x/array.sbatch"
        ])
        self.assertIn("job 41", out)
        self.assertIn("job 42", out)
        dry = self.works("submit", "--dry-run", "--tag", "x", "--budgets", "0.7,0.5", *SMALL, "--results", "r e s")
        for name in ("calibrate", "array"):
            self.assertIn(self.read(f"r e s/x/{name}.sbatch").decode(), dry)

    def test_masks_are_there(self):
        with open(self.path("m"), "w", encoding="utf-8"):
            pass
        self.works("submit", "--tag", "x", "--masks", "m", "--skip-calibrate", env=self.sbatch(self.GOOD))
        self.assertEqual([name for name in self.files() if name.startswith("call")], ["call.0"])
        self.assertNotIn("dependency", self.read("call.0").decode())

    def test_refusals(self):
        code, out, err = esa("submit", "--tag", "x", cwd=self.dir, env={"PATH": "/nonexistent"})
        self.assertEqual((code, out), (1, ""))
        self.assertIn("sbatch was not found", err)
        self.assertEqual(len(err.splitlines()), 1)
        code, _, err = esa("submit", "--tag", "x", cwd=self.dir,
                           env=self.sbatch("echo 'sbatch: error: no such partition' >&2; exit 1"))
        self.assertEqual(code, 1)
        self.assertIn("no such partition", err)
        self.assertIn("sbatch refused", err.splitlines()[-1])
        code, _, err = esa("submit", "--tag", "x", cwd=self.dir, env=self.sbatch("echo nonsense"))
        self.assertIn("not a job number", err)
        # The array is refused: its calibration must not run for nothing.
        code, _, err = esa("submit", "--tag", "x", cwd=self.dir,
                           env=self.sbatch('case "$*" in *array*) exit 1 ;; esac; echo 7'))
        self.assertEqual((code, self.read("cancelled")), (1, b"7\n"))
        self.fails("submit", "--tag", "y", "--model", "wan-tyni", says=["did you mean wan-tiny?"])
        self.fails("submit", "--tag", "y", "--skip-calibrate", says=["masks.safetensors"])
        self.fails("submit", "--tag", "y", "--eval-prompts", "none.txt", says=["none.txt"])
        self.fails("submit", "--tag", "y", "--only-calibrate", status=2)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=1)
