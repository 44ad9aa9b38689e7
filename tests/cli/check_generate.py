#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`esa generate` as a user runs it: check_generate.py ESA MODELS (the folder with wan-tiny in it). Standard library
only. $ESA_TEST_STAND_IN is a plugin whose GPU is the processor.

Every failure must be one message on stderr, an exit status, and nothing left on disk. Videos are tiny: 9 frames of
32 x 32, two steps, five blocks of tokens in a row."""
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
import unittest

import kit
import video_files as vf

ESA, MODELS = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
STAND_IN = os.environ.get("ESA_TEST_STAND_IN")
SMALL = ["--frames", 9, "--height", 32, "--width", 32, "--steps", 2, "--block", "16x16", *kit.ONE]
# enough tokens that a work below 1 can be had
LARGER = ["--frames", 9, "--height", 64, "--width", 64, "--steps", 2, *kit.ONE]
ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("HF_")}, "ESA_MODELS": MODELS}


def esa(*args, cwd=None, env=None, limit=None):
    return kit.run(ESA, "generate", *args, cwd=cwd, env={**ENV, **(env or {})}, limit=limit)


class Base(kit.Folder):
    call = staticmethod(esa)
    progress = True


class Words(Base):
    def test_help(self):
        code, out, err = esa("--help")
        self.assertEqual((code, err), (0, ""))
        self.assertIn("usage: esa generate", out)
        lines = out.splitlines()
        for i, line in enumerate(lines):                                 # every option is explained
            if line.startswith("  --"):
                self.assertTrue(len(line) > 33 or lines[i + 1].startswith(" " * 33), line)

    def test_dtype(self):
        """The type of linear layers: what the processor gains from, what was asked for, or a refusal."""
        frames = {}
        for word in ("auto", "f32"):
            self.works(*SMALL, "--device", "cpu", "--dtype", word, "--out", f"{word}.npy", "--json", f"{word}.json",
                       env={"ESA_CPU": "avx2"})
            self.assertEqual(kit.load(self.path(f"{word}.json"))["dtype"], "f32")
            with open(self.path(f"{word}.npy"), "rb") as file:
                frames[word] = file.read()
        self.assertEqual(frames["auto"], frames["f32"])
        self.fails(*SMALL, "--device", "cpu", "--dtype", "bf16", "--out", "b.npy", env={"ESA_CPU": "ref"},
                   says=["no bf16 products", "ref"])
        self.fails(*SMALL, "--device", "cpu", "--dtype", "bf16", "--hold", "f32", "--out", "b.npy",
                   says=["held in f32", "give one"])

    def test_wrong_values(self):
        for args in (["--frames", 0], ["--frames", "x"], ["--steps", 0], ["--budget", 1.5], ["--budget", "nan"],
                     ["--method", "magic"], ["--height", -16], ["--seed", -1], ["--seed", 1.5], ["--threads", 1000],
                     ["--num-prompts", 0], ["--num-prompts",
                                            13], ["--compare",
                                                  "sparse"], ["--block", "64"], ["--block", "x64"], ["--window", "1,2"],
                     ["--mp4-quality", 101], ["--out"],
                     ["--out", "-"], ["word"], ["--guidance", "inf"], ["--hold", "f64"], ["--dtype", "f64"]):
            self.fails(*args, status=2)
        self.fails("--seed", 10**16, status=2, says=["0 .. 9e+15"])
        self.fails("--promt", "x", status=2, says=["did you mean --prompt?"])
        self.fails("--method", "entrpoy", status=2, says=["did you mean entropy?"])

    def test_contradictions(self):
        for args in (["--prompt", "a", "--prompts", "f"], ["--prompt", "a", "--num-prompts",
                                                           2], ["--prompt-embeds", "f", "--prompt",
                                                                "a"], ["--out", "a.mp4", "--output-dir",
                                                                       "d"], ["--method", "cached"],
                     ["--method", "entropy", "--masks", "m"],
                     ["--method", "dense", "--compare",
                      "dense"], ["--dense-out", "d.y4m"], ["--beside-out",
                                                           "d.y4m"], ["--window",
                                                                      "1,2,3"], ["--num-prompts", 2, "--out",
                                                                                 "a.y4m"], ["--num-prompts", 2],
                     ["--num-prompts", 2, "--output-dir", "d", "--save-embeds",
                      "e"], ["--seed", "1,2"], ["--seed", "1,2", "--out",
                                                "a.y4m"], ["--seed", "1,2", "--output-dir", "d", "--save-latents", "l"],
                     ["--compare", "dense", "--out", "a.y4m", "--dense-out",
                      "a.y4m"], ["--compare", "dense", "--out", "a.npy", "--beside-out",
                                 "a.npy"], ["--compare", "dense", "--dense-out", "d.npy", "--beside-out", "d.npy"]):
            self.fails(*args, status=2)


class Models(Base):
    def copy(self):
        shutil.copytree(os.path.join(MODELS, "wan-tiny"), self.path("model"))
        return self.path("model")

    def test_check(self):
        out = self.works("--check")
        self.assertIn("every name and shape", out)
        self.assertEqual(
            self.works("--check", "--model", os.path.join(MODELS, "wan-tiny")).splitlines()[:-1],
            out.splitlines()[:-1])
        self.assertEqual(self.files(), [])

    def test_room_in_the_repository(self):
        """25 MB of model and 5 MB of goldens, all files together."""
        for folder, most in ((os.path.join(MODELS,
                                           "wan-tiny"), 25e6), (os.path.join(os.path.dirname(MODELS), "tests",
                                                                             "golden"), 5e6)):
            self.assertLess(
                sum(os.path.getsize(os.path.join(top, name)) for top, _, names in os.walk(folder) for name in names),
                most)

    def test_names(self):
        self.fails("--model", "wan-tyni", says=["did you mean wan-tiny?"])
        self.fails("--model", "no/such/folder", says=["no/such/folder"])
        self.fails("--model", "nothing-like-it", says=["nothing-like-it", "wan-tiny"])
        self.fails("--model", ESA, says=["is a file"])
        self.fails("--model", self.dir, says=["model_index.json"])
        nowhere = {"HF_HUB_CACHE": self.dir, "ESA_MODELS": self.dir}
        self.fails("--model", "wan-t2v-1.3b", env=nowhere,
                   says=["wan-t2v-1.3b", "ESA_MODELS", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"])
        self.fails("--model", "hunyuan-video", env=nowhere, says=["hunyuanvideo-community/HunyuanVideo"])
        self.fails("--model", "cogvideox-2b", env=nowhere, says=["cogvideox-2b", "ESA_MODELS", "THUDM/CogVideoX-2b"])

    def test_other_families(self):
        parts = {name: ["diffusers", "X"] for name in ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")}
        os.mkdir(self.path("other"))
        with open(self.path("other/model_index.json"), "w") as file:
            json.dump({"_class_name": "MochiPipeline", **parts}, file)
        self.fails("--model", "other", says=["MochiPipeline", "expected one of WanPipeline", "CogVideoXPipeline"])

    def test_hub_cache(self):
        repository = self.path("hub/models--Wan-AI--Wan2.1-T2V-1.3B-Diffusers")
        os.makedirs(repository + "/refs")
        os.makedirs(repository + "/snapshots")
        with open(repository + "/refs/main", "w") as file:
            file.write("0123abcd")
        # any model will do to be found
        os.symlink(os.path.join(MODELS, "wan-tiny"), repository + "/snapshots/0123abcd")
        for env in ({"HF_HUB_CACHE": self.path("hub")}, {"HF_HOME": self.dir}):
            self.assertIn("0123abcd", self.works("--check", "--model", "wan-t2v-1.3b", env=env))

    def test_missing_and_broken_files(self):
        for name in ("model_index.json", "transformer/config.json", "vae/config.json",
                     "scheduler/scheduler_config.json", "text_encoder/config.json",
                     "transformer/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors",
                     "text_encoder/model.safetensors", "tokenizer/spiece.model"):
            model = self.copy()
            path = os.path.join(model, name)
            data = kit.read(path)
            os.unlink(path)
            folder = os.path.basename(os.path.dirname(path)) if "/" in name else name
            # what is right is listed all the same
            code, _, err = esa("--model", "model", "--check", cwd=self.dir)
            self.assertEqual((code, len(err.splitlines())), (1, 1), (name, err))
            self.assertIn(folder, err)
            with open(path, "wb") as file:
                file.write(data[:len(data) // 2])                        # half downloaded
            code, _, err = esa("--model", "model", "--out", "a.y4m", *SMALL, cwd=self.dir)
            self.assertEqual((code, len(err.splitlines())), (1, 1), (name, err))
            shutil.rmtree(model)
        self.assertEqual(self.files(), [])

    def test_absurd_config(self):
        for name, key, value in (("transformer", "num_layers", 10**9), ("transformer", "num_attention_heads", -4),
                                 ("transformer", "ffn_dim", 1e30), ("transformer", "patch_size", [0, 2, 2]),
                                 ("transformer", "in_channels", 48), ("vae", "z_dim", 0), ("vae", "base_dim", 2**40),
                                 ("text_encoder", "d_model", 64), ("text_encoder", "vocab_size", 10**12)):
            model = self.copy()
            path = os.path.join(model, name, "config.json")
            config = json.loads(kit.read(path))
            config[key] = value
            with open(path, "w") as file:
                json.dump(config, file)
            self.fails("--model", "model", "--out", "a.y4m")
            shutil.rmtree(model)


    def test_changed_files(self):
        """Any value in any configuration, any bytes of any file: a video or one message, never a crash, nothing
        half written."""
        seed = int(os.environ.get("ESA_TEST_SEED", "1"))
        rng = random.Random(seed)
        values = [
            0, 1, 2, -1, 3, 7, 64, 65536, 2**31, 2**63 - 1, 1e308, 1e-300, 0.5, None, True, "x", [], {}, [1], [0, 0, 0],
            [1, 1, 1, 1]
        ]
        model = self.copy()
        names = sorted(
            os.path.join(top, name) for top, _, files in os.walk(model) for name in files
            if name not in ("README.md", "prompts.png"))
        configs = [name for name in names if name.endswith(("config.json", "index.json"))]
        for run in range(30):
            path = rng.choice(configs if run % 3 else names)
            data = kit.read(path)
            if run % 3:
                changed = json.loads(data)
                for key in rng.sample(sorted(changed), min(len(changed), rng.choice((1, 1, 2, 3)))):
                    changed[key] = rng.choice(values)
                changed = json.dumps(changed).encode()
            else:
                changed = bytearray(data)
                for _ in range(rng.choice((1, 2, 8))):
                    changed[rng.randrange(min(len(changed), rng.choice((64, 4096, len(changed)))))] = rng.randrange(256)
            with open(path, "wb") as file:
                file.write(changed)
            code, _, err = esa("--model", "model", "--frames", 3, "--height", 16, "--width", 16, "--steps", 1,
                               "--threads", 1, "--out", "a.y4m", cwd=self.dir)
            about = (f"seed {seed}, run {run}", os.path.relpath(path, model), code, err)
            self.assertIn(code, (0, 1), about)
            self.assertEqual([line.startswith("esa: ") for line in err.splitlines()[-1:]], [code == 1], about)
            self.assertEqual(sorted(os.listdir(self.dir)), ["model"] if code else ["a.y4m", "model"], about)
            if not code:
                os.unlink(self.path("a.y4m"))
            with open(path, "wb") as file:
                file.write(data)


class Refusals(Base):
    def test_outputs(self):
        os.mkdir(self.path("d.y4m"))
        with open(self.path("file"), "w"):
            pass
        self.fails("--out", "a", says=["ending"])
        self.fails("--out", "a.gif", says=["ending", ".npy", ".safetensors"])
        # said before the work, not after it
        self.fails("--out", "a.png", says=["one picture", "33 frames", "a folder"])
        self.fails("--out", "none/a.y4m", says=["none", "No such file"])
        self.fails("--out", "file/a.y4m", says=["file"])
        self.fails("--out", "file/", says=["file"])
        self.fails("--out", "", says=["0 bytes"])
        self.fails("--out", "n" * 5000 + ".y4m", says=["cannot be written"])
        self.fails("--output-dir", "file", says=["file"])
        self.fails("--output-dir", "file/d", says=["file/d", "Not a directory"])
        # folders made on the way are taken back
        self.fails("--output-dir", "none/d", "--height", 60, says=["height"])
        self.fails("--out", "a.y4m", "--compare", "dense", "--dense-out", "none/d.y4m", says=["none"])
        for option in ("--save-embeds", "--save-latents", "--json"):
            self.fails("--out", "a.y4m", option, "none/file", says=["none", "No such file"])

    def test_devices(self):
        none = {"env": {"ESA_CUDA_LIB": "/no/such/libesa_cuda.so"}}
        self.fails("--device", "gpu", status=2, says=["--device", "'gpu'", "cuda:N"])
        self.fails("--device", "cuda:x", status=2, says=["--device", "'cuda:x'"])
        self.fails("--device", "cuda", status=1, says=["--device cuda", "/no/such/libesa_cuda.so"], **none)
        self.fails("--device", "cpu", "--linear", "fp8", status=1, says=["--linear fp8 ", "GPU"])
        self.fails("--device", "cpu", "--linear", "fp8-fast", status=1, says=["--linear fp8-fast ", "GPU"])
        self.fails("--device", "cpu", "--max-vram", "16G", status=1, says=["--max-vram", "GPU"])
        self.fails("--max-vram", "16Q", status=2, says=["--max-vram", "16Q", "16G"])
        self.fails("--keep", "blocks.3.*", status=2, says=["--keep", "--linear fp8"])

    @unittest.skipUnless(STAND_IN, "without a stand-in for the GPU")
    def test_memory_of_a_gpu(self):
        """The plan is printed once, before the first step, and says what the JSON says."""
        code, _, err = esa(*SMALL[2:], "--frames", 1, "--max-vram", "22M", "--compare", "dense", "--method", "entropy",
                           "--out", "a.y4m", "--json", "a.json", cwd=self.dir,
                           env={"ESA_CUDA_LIB": STAND_IN, "ESA_STAND_IN_OPEN": "1"})
        self.assertEqual(code, 0, err)
        lines = err.splitlines()
        with open(self.path("a.json")) as file:
            memory = json.load(file)["memory"]
        blocks = f"{memory['resident_blocks']} of {memory['blocks']} blocks stay on the GPU"
        self.assertTrue(lines[0].startswith("device    cuda:0: stand-in"), err)
        self.assertTrue(lines[1].startswith("weights   transformer"), err)
        self.assertIn(blocks, err)
        self.assertTrue(lines[2].startswith("copies    ") and lines[3].startswith("memory    "), err)
        self.assertEqual(len(set(lines)), len(lines), err)

    def test_folder_of_others(self):
        os.mkdir(self.path("mine"))
        with open(self.path("mine/notes.txt"), "w"):
            pass
        self.fails(*SMALL, "--out", "mine/", says=["mine", "not pictures"])

    def at_once(self, *args, **more):
        """Refused before anything was computed: nothing stands in front of the message."""
        before = self.files()
        code, out, err = esa(*args, cwd=self.dir)
        self.assertEqual((code, out, len(err.splitlines())), (1, "", 1), (args, err))
        for word in more["says"]:
            self.assertIn(word, err)
        self.assertEqual(self.files(), before)

    def test_before_the_work(self):
        os.mkdir(self.path("mine"))
        os.mkdir(self.path("s-dense.y4m"))
        with open(self.path("mine/notes.txt"), "w"):
            pass
        with open(self.path("s-dense.y4m/notes.txt"), "w"):
            pass
        self.at_once(*SMALL, "--out", "mine/", says=["mine", "not pictures"])
        self.at_once(*SMALL, "--out", ".", says=["not pictures"])
        self.at_once(*SMALL, "--compare", "dense", "--out", "a.y4m", "--dense-out", "mine",
                     says=["mine", "not pictures"])
        self.at_once(*SMALL, "--compare", "dense", "--out", "a.y4m", "--beside-out", "mine",
                     says=["mine", "not pictures"])
        self.at_once(*SMALL, "--compare", "dense", "--out", "s.y4m", says=["s-dense.y4m", "not pictures"])
        self.at_once(*SMALL, "--out", "a.y4m", "--fps", 0.001, says=["fps", "0.001"])
        self.at_once(*SMALL, "--out", "a.y4m", "--vae-tile", 15, says=["15", "multiple of 16"])
        self.at_once(*SMALL, "--out", "a.y4m", "--block", "1x64", says=["block_q is 1"])
        for option in ("--save-embeds", "--save-latents", "--json"):
            self.at_once(*SMALL, "--out", "a.y4m", option, "mine", says=["mine", "folder"])

    def test_sizes(self):
        self.fails("--height", 60, "--out", "a.y4m", says=["height", "60", "a multiple of 8"])
        self.fails("--width", 4, "--out", "a.y4m", says=["width", "4"])
        self.fails("--height", 16384, "--width", 16384, "--frames", 9, "--out", "a.y4m")

    def test_prompts(self):
        with open(self.path("empty"), "w") as file:
            file.write("\n# nothing\n\n")
        with open(self.path("zeros"), "wb") as file:
            file.write(b"a\0b\n")
        self.fails("--prompts", "none", "--output-dir", "d", says=["none"])
        self.fails("--prompts", "empty", "--output-dir", "d", says=["no prompt"])
        self.fails("--prompts", "zeros", "--output-dir", "d", says=["zero"])
        self.fails(*SMALL, "--prompt", b"a red \xff ball", "--out", "a.y4m", says=["UTF-8"])
        self.fails(*SMALL, "--prompt", "ball " * 2000, "--out", "a.y4m", says=["10000"])

    def test_embeddings(self):
        with open(self.path("junk"), "w") as file:
            file.write("no tensors")
        self.fails(*SMALL, "--prompt-embeds", "none", "--out", "a.y4m", says=["none"])
        self.fails(*SMALL, "--prompt-embeds", "junk", "--out", "a.y4m", says=["junk"])
        header = json.dumps({"prompt_embeds": {"dtype": "F32", "shape": [1, 4, 8], "data_offsets": [0, 128]}}).encode()
        with open(self.path("narrow"), "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header + bytes(128))
        self.fails(*SMALL, "--prompt-embeds", "narrow", "--out", "a.y4m", says=["[1, 4, 8]", "[any, 192]"])
        self.fails(*SMALL, "--latents", "junk", "--out", "a.y4m", says=["junk"])
        self.fails(*SMALL, "--method", "cached", "--masks", "junk", "--out", "a.y4m", says=["junk"])

    def test_full_disk(self):
        for out in ("a.y4m", "a/", "a.mp4"):
            code, _, err = esa("--frames", 5, "--height", 32, "--width", 32, "--steps", 1, "--out", out, cwd=self.dir,
                               limit=200)
            if "no FFmpeg" in err:
                continue
            self.assertEqual(code, 1, err)
            self.assertRegex(err.splitlines()[-1], "generate: a(.y4m|.mp4|/00000.png) cannot be written")
            self.assertEqual(self.files(), [])


class Videos(Base):
    def test_same_seed_same_video(self):
        for name, more in (("a", []), ("b", []), ("two", ["--threads", 2]), ("three", ["--threads", 3]),
                           ("usual", ["--threads", 0]), ("other", ["--seed", 1])):
            self.works(*SMALL, *more, "--out", name + ".y4m")
        first = self.read("a.y4m")
        self.assertTrue(first.startswith(b"YUV4MPEG2 W32 H32 F16:1 "))
        self.assertEqual(first.count(b"FRAME\n"), 9)
        for name in ("b", "two", "three", "usual"):
            self.assertEqual(self.read(name + ".y4m"), first, name)
        self.assertNotEqual(self.read("other.y4m"), first)
        self.assertEqual(self.files(), [name + ".y4m" for name in ("a", "b", "other", "three", "two", "usual")])

    def test_methods(self):
        self.works(*SMALL, "--method", "dense", "--out", "dense.y4m")
        dense = self.read("dense.y4m")
        for method in ("entropy", "rf_v2", "ada_bsa"):
            for tail in ("none", "pooled", "centroid"):
                out = self.works(*SMALL, "--method", method, "--budget", 0.4, "--tail", tail, "--warmup", 0, "--out",
                                 "s.y4m")
                self.assertIn("at density 0.", out)
                self.assertNotEqual(self.read("s.y4m"), dense, (method, tail))
        for order in ("tile", "tile3d", "hilbert"):                      # an order alone changes nothing but roundings
            window = ["--window", "2,4,4"] if order == "tile3d" else []
            report = self.path("r.json")
            self.works(*SMALL, "--budget", 1, "--order", order, *window, "--compare", "dense", "--out", "s.y4m",
                       "--json", report)
            self.assertGreater(json.loads(kit.read(report))["videos"][0]["psnr"] or 99, 50)

    def test_tensors(self):
        """The pixels of the pictures, in both forms; the rate stands in the one that has room for it. A single frame
        may be a picture."""
        self.works(*SMALL, "--out", "a.npy")
        self.works(*SMALL, "--fps", 12, "--compare", "dense", "--dense-out", "d.npy", "--out", "a.safetensors")
        self.works(*SMALL, "--out", "p/")
        data = self.read("a.npy")
        self.assertTrue(data.startswith(b"\x93NUMPY"))
        self.assertIn(b"(9, 32, 32, 3)", data[:128])
        pixels = data[-9 * 32 * 32 * 3:]
        tensor = self.read("a.safetensors")
        size = struct.unpack("<Q", tensor[:8])[0]
        header = json.loads(tensor[8:8 + size])
        self.assertEqual((header["frames"]["dtype"], header["frames"]["shape"]), ("U8", [9, 32, 32, 3]))
        self.assertEqual(float(header["__metadata__"]["fps"]), 12)
        self.assertEqual(tensor[8 + size:], pixels)
        self.assertNotEqual(self.read("d.npy")[-len(pixels):], pixels)
        self.works("--frames", 1, "--height", 32, "--width", 32, "--steps", 1, "--out", "one.png")
        self.assertTrue(self.read("one.png").startswith(b"\x89PNG"))
        done = subprocess.run([ESA, "evaluate", "--reference", "a.npy", "--generated", "p", "--output", "m.json"],
                              cwd=self.dir, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(self.read("m.json"))["videos"][0]["ssim"], 1)

    def test_frames_are_rounded_down(self):
        self.works("--frames", 10, "--height", 32, "--width", 32, "--steps", 1, "--out", "p/")
        self.assertEqual(self.files(), ["p"] + [f"p/{i:05d}.png" for i in range(9)])
        self.assertTrue(self.read("p/00000.png").startswith(b"\x89PNG"))
        # an older folder, without its slash
        self.works("--frames", 1, "--height", 32, "--width", 32, "--steps", 1, "--guidance", 1, "--out", "p")
        self.assertEqual(self.files(), ["p", "p/00000.png"])

    def test_compare(self):
        out = self.works(*SMALL, "--compare", "dense", "--budget", 0.5, "--warmup", 0, "--dense-out", "d.y4m",
                         "--beside-out", "both.y4m", "--out", "s.y4m", "--json", "r.json")
        for word in ("speedup", "density", "PSNR", "SSIM", "d.y4m", "s.y4m"):
            self.assertIn(word, out)
        self.assertEqual(self.files(), ["both.y4m", "d.y4m", "r.json", "s.y4m"])
        self.assertTrue(self.read("both.y4m").startswith(b"YUV4MPEG2 W64 H32 "))
        report = json.loads(self.read("r.json"))
        self.assertEqual((report["model"], report["seed"]), ("wan-tiny", 0))
        self.assertEqual(report["budget"], 0.5)
        self.assertNotIn("asked", out)
        video = report["videos"][0]
        self.assertLess(abs(video["density"] - 0.5), 0.15)
        self.assertGreater(video["psnr"], 10)
        self.assertLess(video["ssim"], 1)
        self.works(*SMALL, "--method", "dense", "--out", "d2.y4m")
        self.assertEqual(self.read("d2.y4m"), self.read("d.y4m"))

    def test_compare_with_lpips(self):
        """In the table and the JSON, the value of `esa evaluate`; without weights null."""
        self.put("w.safetensors", vf.lpips_weights())
        args = [*SMALL, "--compare", "dense", "--budget", 0.5, "--warmup", 0, "--dense-out", "d.npy", "--out", "s.npy",
                "--json", "r.json"]
        self.assertNotIn("LPIPS", self.works(*args))
        without = json.loads(self.read("r.json"))["videos"][0]
        self.assertIsNone(without["lpips"])
        out = self.works(*args, "--lpips", "w.safetensors")
        video = json.loads(self.read("r.json"))["videos"][0]
        self.assertEqual((video["psnr"], video["ssim"]), (without["psnr"], without["ssim"]))
        self.assertRegex(out, rf"speedup.* SSIM +LPIPS\n(.*\n)+s\.npy.* {video['lpips']:.4f}\n")
        code, _, err = kit.run(ESA, "evaluate", "--reference", "d.npy", "--generated", "s.npy", "--lpips",
                               "w.safetensors", "--output", "m.json", cwd=self.dir, env=ENV)
        self.assertEqual(code, 0, err)
        self.assertAlmostEqual(video["lpips"], json.loads(self.read("m.json"))["videos"][0]["lpips"], 8)
        self.assertGreater(video["lpips"], 0.001)

    def test_weights_of_lpips_are_read_first(self):
        self.put("w.safetensors", vf.lpips_weights())
        self.put("junk", b"no weights")
        args = [*SMALL, "--compare", "dense", "--out", "s.y4m", "--lpips"]
        self.fails(*args, "none", says=["none"])
        self.fails(*args, "junk", says=["junk"])
        self.fails(*args, "w.safetensors", "--width", 16, says=["alex needs", "31 x 31", "16 x 32"])
        self.fails(*SMALL, "--lpips", "w.safetensors", status=2, says=["--compare dense"])

    def test_reference_has_no_cache(self):
        self.works("--frames", 1, "--height", 32, "--width", 32, "--steps", 4, "--guidance", 1, "--method", "entropy",
                   "--compare", "dense", "--cache", 100, "--out", "a.y4m", "--json", "a.json")
        video = json.loads(self.read("a.json"))["videos"][0]
        self.assertLess(video["computed_steps"], 4)
        self.assertEqual(video["dense"]["computed_steps"], 4)

    def test_precision(self):
        """All calls in 8 bits but none of the dense clip; then some steps and layers in 16."""
        self.works(*SMALL, "--method", "dense", "--precision", 16, "--out", "d.y4m")
        self.works(*SMALL, "--budget", 0.5, "--warmup", 0, "--precision", 8, "--compare", "dense", "--out", "s.y4m",
                   "--dense-out", "d2.y4m", "--json", "r.json")
        self.assertEqual(self.read("d2.y4m"), self.read("d.y4m"))
        video = json.loads(self.read("r.json"))["videos"][0]
        self.assertEqual((video["eight_calls"], video["dense"]["eight_calls"]), (video["calls"], 0))
        self.assertEqual(video["kernel"], "cpu-8bit")
        out = self.works(*SMALL, "--method", "dense", "--precision", 8, "--steps16-first", 1, "--layers16", "0,2",
                         "--out", "e.y4m", "--json", "e.json")
        video = json.loads(self.read("e.json"))["videos"][0]
        # one of two steps, six of eight layers
        self.assertEqual(video["eight_calls"], video["calls"] * 6 // 16)
        self.assertIn(f"{video['eight_calls']} of {video['calls']} calls in 8 bits", out)
        self.assertNotEqual(self.read("e.y4m"), self.read("d.y4m"))
        self.fails(*SMALL, "--precision", 12, status=2)
        self.fails(*SMALL, "--steps16-last", 1, status=2, says=["need --precision 8"])
        self.fails(*SMALL, "--precision", 8, "--layers16", 8, "--out", "f.y4m", says=["layers16 names layer 8"])
        self.fails(*SMALL, "--precision", 8, "--steps16-first", 3, "--out", "f.y4m", says=["steps16_first is 3"])

    def test_what_nothing_means(self):
        """No method, budget or work: the error selector and the preset balanced. A clip as short as this one cannot
        reach it and takes the least work; a work that was asked for and cannot be reached is an error."""
        self.works(*LARGER, "--out", "a.y4m", "--json", "a.json")
        self.works(*LARGER, "--out", "b.y4m", "--method", "error", "--preset", "balanced")
        video = json.loads(self.read("a.json"))["videos"][0]
        self.assertEqual((video["method"], video["attention_work"]["asked"]), ("error", 0.44))
        self.assertEqual(self.read("a.y4m"), self.read("b.y4m"))
        line = self.fails(*LARGER, "--work", 0.44, "--out", "c.y4m", says=["work is 0.44, but at the lowest density"])
        least = float(line.split()[-1])
        # whole blocks: 7 in a row, so a row is 1/7 dearer or cheaper than the mean that was solved for
        self.assertAlmostEqual(video["attention_work"]["realised"], least, delta=0.03)
        self.works(*LARGER, "--budget", 0.3, "--out", "d.y4m", "--json", "d.json")
        self.assertEqual(json.loads(self.read("d.json"))["videos"][0]["method"], "entropy")

    def test_works_are_shown(self):
        """Asked and realised work on the terminal, and no budget in the JSON, because none counts."""
        out = self.works(*LARGER, "--work", 0.9, "--compare", "dense", "--out", "a.y4m", "--json", "a.json")
        report = json.loads(self.read("a.json"))
        work = report["videos"][0]["attention_work"]
        self.assertEqual((report["budget"], work["asked"]), (None, 0.9))
        head, dense, sparse = out.splitlines()[:3]
        cell = f"{work['realised']:.3f} (asked 0.9)"
        end = head.index("work") + len("work")                           # numbers are right-aligned
        self.assertEqual((dense[:end].split()[-1], sparse[:end][-len(cell):]), ("1", cell))
        out = self.works(*LARGER, "--work", 0.9, "--out", "a.y4m")
        self.assertIn(f"attention work {work['realised']:.3f} (asked 0.9);", out)
        for method, budget in (("dense", 1), ("entropy", 0.5)):
            self.works(*SMALL, "--method", method, "--out", "a.y4m", "--json", "a.json")
            self.assertEqual(json.loads(self.read("a.json"))["budget"], budget)

    def test_names_beside_each_other(self):
        self.works(*SMALL, "--compare", "dense", "--out", "v.y4m")
        self.assertEqual(self.files(), ["v-dense.y4m", "v.y4m"])
        os.mkdir(self.path("p"))                                         # a folder that is there needs no slash
        self.works(*SMALL, "--compare", "dense", "--out", "v.y4m", "--dense-out", "p")
        self.assertEqual(len(os.listdir(self.path("p"))), 9)

    def test_several_prompts(self):
        with open(self.path("prompts"), "w") as file:
            file.write(
                "# two\n a red ball rolls to the right over a blue floor \r\n\n"
                "a green ring grows over a white background\n"
            )
        # a folder that is made on the way
        self.works(*SMALL, "--prompts", "prompts", "--output-dir", "videos", "--json", "videos/r.json")
        os.unlink(self.path("videos/r.json"))
        names = os.listdir(self.path("videos"))
        self.assertEqual([os.path.splitext(name)[0] for name in sorted(names)], ["000", "001"])
        self.assertNotEqual(*(self.read("videos/" + name) for name in names))

    def test_several_seeds(self):
        """One file per prompt and seed, the same as made one by one; parents of the folder are made."""
        self.works(*SMALL, "--num-prompts", 2, "--seed", "3,1", "--output-dir", "a/b/videos", "--json", "r.json")
        names = sorted(os.listdir(self.path("a/b/videos")))
        self.assertEqual([os.path.splitext(name)[0] for name in names], ["000-s1", "000-s3", "001-s1", "001-s3"])
        self.assertEqual(len({self.read("a/b/videos/" + name) for name in names}), 4)
        self.assertEqual([video["seed"] for video in json.loads(self.read("r.json"))["videos"]], [3, 1, 3, 1])
        self.works(*SMALL, "--seed", 1, "--output-dir", "one")
        self.assertEqual(kit.read(self.path("one/000" + os.path.splitext(names[0])[1])),
                         self.read("a/b/videos/" + names[0]))

    def test_embeddings_and_latents(self):
        self.works(*SMALL, "--save-embeds", "e", "--save-latents", "l", "--out", "a.y4m")
        self.works(*SMALL, "--prompt-embeds", "e", "--out", "b.y4m")
        self.assertEqual(self.read("a.y4m"), self.read("b.y4m"))
        self.works(*SMALL, "--prompt-embeds", "e", "--latents", "l", "--out", "c.y4m")
        self.assertNotEqual(self.read("a.y4m"), self.read("c.y4m"))

    def test_pipes_and_devices(self):
        """Every option that names a file to read refuses a pipe and a device, and waits for neither."""
        os.mkfifo(self.path("pipe"))
        for option in ("--masks", "--plan", "--prompt-embeds", "--latents", "--transformer", "--lora"):
            for path, says in (("pipe", "not a regular file"), ("/dev/zero", "not a regular file")):
                more = ["--work", "0.9"] if option == "--plan" else []
                done = subprocess.run([ESA, "generate", *map(str, SMALL), "--out", "a.y4m", option, path, *more],
                                      cwd=self.dir, env=ENV, capture_output=True, text=True, timeout=60)
                self.assertNotEqual(done.returncode, 0, option)
                self.assertIn(says, done.stderr, option)
                self.assertEqual(self.files(), ["pipe"])

    def test_prompts_from_streams(self):
        self.fails(*SMALL, "--output-dir", "o", "--prompts", "/dev/zero", says=["16 MB", "not a file of prompts"])
        done = subprocess.run([ESA, "generate", *map(str, SMALL), "--output-dir", "o", "--prompts", "/dev/stdin"],
                              cwd=self.dir, env=ENV, input="a cat\n", capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([os.path.splitext(name)[0] for name in self.files()], ["o", "o/000"])

    def test_waiting_for_prompts_can_be_ended(self):
        """One signal ends a run that waits for a writer of its pipe, before or after it listens for signals."""
        os.mkfifo(self.path("pipe"))
        run = subprocess.Popen([ESA, "generate", *map(str, SMALL), "--output-dir", "o", "--prompts", "pipe"],
                               cwd=self.dir, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(run.kill)
        time.sleep(2)
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
        self.assertIn(run.returncode, (130, -signal.SIGTERM))
        self.assertEqual(self.files(), ["pipe"])

    def test_weights_that_become_shorter(self):
        """A message and status 1, not a crash."""
        model = self.path("model")
        shutil.copytree(os.path.join(MODELS, "wan-tiny"), model)
        weights = [os.path.join(model, "transformer", name) for name in os.listdir(os.path.join(model, "transformer"))
                   if name.endswith(".safetensors")]
        before = self.files()
        run = subprocess.Popen([
            ESA, "generate", "--model", model, "--hold", "file", "--frames", "9", "--height", "64", "--width", "64",
            "--steps", "2000", "--out", "a.npy"
        ], cwd=self.dir, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(run.kill)
        self.assertIn("compute ", run.stderr.readline())              # the plan
        self.assertIn("step 1/2000", run.stderr.readline())
        for path in weights:
            os.truncate(path, 1000)
        _, err = run.communicate(timeout=60)
        self.assertEqual(run.returncode, 1, err)
        self.assertIn("became shorter", err.splitlines()[-1])
        self.assertEqual(self.files(), before)

    def test_interrupt(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            run = subprocess.Popen([
                ESA, "generate", "--frames", "9", "--height", "64", "--width", "64", "--steps", "2000", "--output-dir",
                "d"
            ], cwd=self.dir, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.assertIn("compute ", run.stderr.readline())              # the plan
            self.assertIn("step 1/2000", run.stderr.readline())
            run.send_signal(number)
            out, err = run.communicate(timeout=60)
            self.assertEqual((run.returncode, out), (130, ""))
            self.assertIn("interrupted", err.splitlines()[-1])
            self.assertEqual(self.files(), [])

    def test_interrupt_twice(self):
        """A layer of 16,384 tokens takes seconds; the second signal does not wait for it, and nothing stands under
        the video's name."""
        run = subprocess.Popen([
            ESA, "generate", "--frames", "1", "--height", "1024", "--width", "1024", "--steps", "9", "--method",
            "dense", "--out", "a.y4m"
        ], cwd=self.dir, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(run.kill)
        time.sleep(1)
        run.send_signal(signal.SIGINT)
        time.sleep(0.2)
        begun = time.monotonic()
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=60)
        # the latter where a slow machine had not begun to listen
        self.assertIn(run.returncode, (130, -signal.SIGINT))
        self.assertLess(time.monotonic() - begun, 5)
        self.assertEqual(self.files(), [])


class Bench(Base):
    """`esa bench video`: a CSV that grows clip by clip."""
    ARGS = [*SMALL, "--warmup", 0, "--num-prompts", 1, "--seeds", "3", "--tail", "pooled"]

    def bench(self, *args):
        done = subprocess.run([ESA, "bench", "video", *map(str, args)], cwd=self.dir, env=ENV, capture_output=True,
                              text=True)
        return done.returncode, done.stdout, done.stderr

    def test_resumes(self):
        args = [*self.ARGS, "--method", "entropy,ada_bsa", "--budget", "0.5", "--csv", "q.csv", "--dense-dir", "dense"]
        code, out, err = self.bench(*args)
        self.assertEqual(code, 0, err)
        self.assertIn("2 clips made, 0 were there", out)
        lines = self.read("q.csv").decode().splitlines()
        self.assertEqual(len(lines), 4)                                  # header, dense, two methods
        self.assertEqual([line.split(",")[4] for line in lines], ["method", "dense", "entropy", "ada_bsa"])
        self.assertEqual([line.split(",")[7] for line in lines], ["order", "any", "hilbert", "hilbert"])
        self.assertGreater(float(lines[2].split(",")[9]), 10)            # PSNR
        before = self.read("q.csv")
        self.assertIn("0 clips made, 2 were there", self.bench(*args)[1])
        self.assertEqual(self.read("q.csv"), before)
        with open(self.path("q.csv"), "wb") as file:
            file.write(before[:-20])                                     # cut off within the last line
        self.assertIn("1 clips made, 1 were there", self.bench(*args)[1])
        again = self.read("q.csv").decode().splitlines()
        self.assertEqual(again[:3], lines[:3])
        self.assertEqual(again[3].split(",")[:13], lines[3].split(",")[:13])     # all but the times
        # Another order is another row; rf_v2 has its own.
        self.assertIn("2 clips made, 0 were there", self.bench(*args, "--order", "raster")[1])
        self.assertIn("1 clips made, 0 were there", self.bench(*args, "--method", "rf_v2")[1])
        last = [line.split(",")[4:8] for line in kit.read(self.path("q.csv")).decode().splitlines()[4:]]
        self.assertEqual([(line[0], line[3]) for line in last], [("entropy", "raster"), ("ada_bsa", "raster"),
                                                                 ("rf_v2", "tile")])
        self.assertEqual(self.files(), ["dense", "dense/wan-tiny-9x32x32x2-p0-s3.rgb", "q.csv"])

    def test_continues_older_files(self):
        """Files from before LPIPS was measured lack the last column, those from before work was counted the last two:
        they are empty, and the rows count."""
        args = [*self.ARGS, "--method", "entropy", "--budget", "0.5", "--steps", 1, "--csv", "q.csv"]
        self.assertIn("1 clips made, 0 were there", self.bench(*args)[1])
        lines = self.read("q.csv").decode().splitlines()
        self.assertTrue(lines[0].endswith(",attention_seconds,attention_work,lpips"))
        self.assertTrue(all(re.search(r",[01]\.[0-9]{4},$", line) for line in lines[1:]))       # no LPIPS
        for missing in (1, 2):
            older = "\n".join(line.rsplit(",", missing)[0] for line in lines) + "\n"
            self.put("q.csv", older)
            code, out, err = self.bench(*args)
            self.assertEqual(code, 0, err)
            self.assertIn("0 clips made, 1 were there", out)
            self.assertEqual(self.read("q.csv").decode(), older)             # nothing was made, so it stays as it is
            self.put("q.csv", older + lines[-1][:-30])                       # cut off within its last line
            self.assertIn("1 clips made, 0 were there", self.bench(*args, "--tail", "none")[1])
            again = self.read("q.csv").decode().splitlines()
            self.assertEqual(again[:-1], [lines[0], *(line + "," * missing for line in older.splitlines()[1:])])
            self.assertEqual(again[-1].split(",")[6], "none")
            self.assertRegex(again[-1], r",0\.[0-9]{4},$")
            self.assertIn("0 clips made, 2 were there", self.bench(*args, "--tail", "none,pooled")[1])
        for header in ("model,size\n", lines[0] + ",more\n", lines[0].replace("psnr", "PSNR") + "\n"):
            self.put("q.csv", header)
            code, _, err = self.bench(*args)
            self.assertEqual((code, self.read("q.csv").decode()), (1, header))
            self.assertIn("other columns", err)

    def test_lpips(self):
        """A column with the value of `esa generate`; rows from before stay without it, and the mean says so."""
        self.put("w.safetensors", vf.lpips_weights())
        args = [*self.ARGS, "--method", "entropy", "--budget", "0.5", "--csv", "q.csv", "--dense-dir", "dense"]
        code, out, err = self.bench(*args)
        self.assertEqual((code, "LPIPS" in out.splitlines()[0]), (0, False), err)
        old = self.read("q.csv").decode().splitlines()
        self.assertEqual([line.split(",")[-1] for line in old], ["lpips", "", ""])
        code, out, err = self.bench(*args, "--lpips", "w.safetensors", "--tail", "pooled,none")
        self.assertEqual(code, 0, err)
        self.assertIn("1 clips made, 1 were there", out)
        self.assertIn("LPIPS 0.", err)
        lines = self.read("q.csv").decode().splitlines()
        self.assertEqual(lines[:-1], old)
        value = lines[-1].split(",")[-1]
        self.works(*SMALL, "--seed", 3, "--budget", 0.5, "--warmup", 0, "--tail", "none", "--compare", "dense", "--out",
                   "s.y4m", "--lpips", "w.safetensors", "--json", "r.json")
        self.assertEqual(value, f"{json.loads(self.read('r.json'))['videos'][0]['lpips']:.6f}")
        self.assertGreater(float(value), 0.001)
        table = [line.split() for line in out.splitlines()[:3]]
        self.assertEqual([row[-1] for row in table], ["LPIPS", "-", f"{float(value):.4f}"])
        os.unlink(self.path("q.csv"))
        code, out, err = self.bench(*args, "--lpips", "w.safetensors")
        self.assertEqual(code, 0, err)
        self.assertEqual(self.read("q.csv").decode().splitlines()[1].split(",")[-1], "0.000000")        # dense
        code, out, err = self.bench(*args, "--lpips", "none")
        self.assertEqual((code, len(err.splitlines())), (1, 1))
        self.assertIn("none", err)

    def test_continues_the_table_of_the_repository(self):
        table = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "quality", "video.csv")
        shutil.copy(table, self.path("q.csv"))
        code, out, err = self.bench("--csv", "q.csv", "--order", "raster", "--num-prompts", 2, "--seeds", "0",
                                    "--method", "entropy,ada_bsa", "--budget", "0.7,0.2", "--tail", "none,pooled")
        self.assertEqual(code, 0, err)
        self.assertIn("0 clips made, 16 were there", out)

    def test_default(self):
        """Without method, amount and tail it makes the clip of `esa generate` without options."""
        args = [*LARGER, *self.ARGS[len(SMALL):-2], "--csv", "q.csv"]
        args.remove("--warmup")                     # --warmup 0
        args.remove(0)
        self.works(*LARGER, "--seed", 3, "--out", "a.y4m", "--json", "a.json")
        video = json.loads(self.read("a.json"))["videos"][0]
        code, out, err = self.bench(*args)
        self.assertEqual(code, 0, err)
        rows = [line.split(",") for line in self.read("q.csv").decode().splitlines()[1:]]
        self.assertEqual([row[4:8] for row in rows], [["dense", "1.00", "none", "any"],
                                                      ["error", "work 0.44", "levels", "adaptive"]])
        self.assertAlmostEqual(float(rows[1][15]), video["attention_work"]["realised"], places=4)
        self.assertIn("1 clips made, 0 were there", out)

    def test_what_works_mean(self):
        """Works without a method mean error; error without a tail has its own, and other methods have two."""
        args = [*LARGER, *self.ARGS[len(SMALL):-2], "--csv", "q.csv"]

        def rows():
            return [tuple(line.split(",")[4:7]) for line in self.read("q.csv").decode().splitlines()[1:]]
        code, out, err = self.bench(*args, "--work", 0.9)
        self.assertEqual((code, rows()), (0, [("dense", "1.00", "none"), ("error", "work 0.90", "levels")]), err)
        self.assertIn("0 clips made, 1 were there", self.bench(*args, "--work", 0.9, "--method", "error")[1])
        self.assertIn("clips made, 1 were there", self.bench(*args, "--work", 0.9, "--tail", "levels,none")[1])
        self.assertEqual(rows()[2:], [("error", "work 0.90", "none")])
        code, out, err = self.bench(*args, "--budget", 0.5, "--method", "error,entropy")
        self.assertEqual(code, 0, err)
        self.assertIn("3 clips made, 0 were there", out)
        self.assertEqual(rows()[3:], [("error", "0.50", "levels"), ("entropy", "0.50", "none"),
                                      ("entropy", "0.50", "pooled")])

    def test_shards(self):
        """Two shards' rows put together are the rows of one run, and the whole command finds nothing left to do."""
        args = [*self.ARGS, "--seeds", "3,4", "--method", "entropy", "--budget", "0.5", "--steps", 1]
        rows = []
        for shard in range(2):
            code, out, err = self.bench(*args, "--shard", f"{shard}/2", "--csv", f"{shard}.csv")
            self.assertEqual(code, 0, err)
            self.assertIn("1 clips made, 0 were there", out)
            header, *more = self.read(f"{shard}.csv").decode().splitlines()
            self.assertEqual([line.split(",")[3] for line in more], [str(3 + shard)] * 2)
            rows += more
        with open(self.path("all.csv"), "w") as file:
            file.write("\n".join([header, *rows]) + "\n")
        self.assertIn("0 clips made, 2 were there", self.bench(*args, "--csv", "all.csv")[1])
        self.assertIn("shard 2 of 3 has nothing to do", self.bench(*args, "--shard", "2/3", "--csv", "n.csv")[2])

    def test_refusals(self):
        with open(self.path("other.csv"), "w") as file:
            file.write("a,b,c\n")
        for args, status in ((["--csv", "other.csv"], 1), ([], 2), (["--csv", "none/q.csv", *self.ARGS], 1),
                             (["--csv", "q.csv", "--height",
                               60], 1), (["--csv", "q.csv", "--model",
                                          "nothing"], 1), (["--csv", "q.csv", "--shard", "2/2"], 2)):
            code, out, err = self.bench(*args)
            self.assertEqual((code, out), (status, ""), err)
            self.assertEqual(len([line for line in err.splitlines() if line.startswith("esa: ")]), 1, err)
        self.assertEqual(self.files(), ["other.csv"])

    def test_files_that_cannot_be_written_are_told_first(self):
        """Hours of work must not end at a path that cannot be written. /proc and /sys refuse files to root too."""
        os.mkdir(self.path("d"))
        open(self.path("file"), "w").close()
        commands = {"--json": (["bench", "model"], ["bench", "attention"], ["calibrate", "--output", "m"], ["generate"],
                               ["demo"], ["export", "file"], ["masks", "info", "file"]),
                    "--out": (["generate"], ["bench", "quality"], ["masks", "derive", "file"]),
                    "--csv": (["bench", "video"], ["experiment", "collect"]),
                    "--output": (["report", "d"], ["evaluate", "--reference", "a", "--generated", "b"]),
                    "--save-latents": (["generate"],)}
        names = ["none/x.y4m", "d", "/proc/x.y4m", "/sys/x.y4m", "file/x.y4m"]
        if os.geteuid():
            os.chmod(self.path("d"), 0o500)
            names.append("d/x.y4m")
        for option, command in ((option, command) for option, each in commands.items() for command in each):
            for name in names:
                if command == ["generate"] and option == "--out" and name == "d":
                    continue                                             # a folder of pictures
                if command[0] == "evaluate" and name.startswith("none"):
                    continue                                             # makes the folder
                done = subprocess.run([ESA, *command, option, name], cwd=self.dir, env=ENV, capture_output=True,
                                      text=True, timeout=60)
                self.assertEqual((done.returncode, done.stdout, len(done.stderr.splitlines())), (1, "", 1),
                                 (command, name, done.stderr))
                self.assertRegex(done.stderr, "cannot be (written|made)", (command, name))
        os.chmod(self.path("d"), 0o700)
        self.assertEqual(self.files(), ["d", "file"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
