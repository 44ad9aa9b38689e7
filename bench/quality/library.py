#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the library itself gives, where study.py simulates: clips through diffusers and esa.apply against dense ones.

    bench/quality/library.py --group main --embeds embeds.pt --out library.json
    bench/quality/library.py --runs "work=0.57; fast: work=0.3 exact_rows=4 block=64; selector=entropy,budget=0.3"
    bench/quality/library.py --group ideas --study study.json --minutes 4 [--diffusers FOLDER] [--dtype bf16]
    bench/quality/library.py --group main,ideas --list

A run is an EsaConfig, written as words; `name:` may come before it and `| words of the study's setting` behind it. The
clips are those of tests/quality/video.csv: prompt i / 2, seed i mod 2, same noise as `esa bench video`. Results are
written after every clip to --out and, one row per clip, to the CSV beside it; the same command goes on. Needs torch,
diffusers (without its pipelines is enough) and libesa, which $ESA_LIB may name; transformers only without --embeds."""
import argparse
import inspect
import json
import os
import platform
import sys
import time
import traceback

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import library_runs
import library_table
import metrics
import model
from prompts import EVAL, OTHERS

TEXT_ROWS = 512         # WanPipeline's max_sequence_length


def add_model(ap):
    """Options that say what Pipe runs."""
    ap.add_argument("--model", default="models/wan-tiny")
    ap.add_argument("--transformer", default="", help="folder of another transformer, or of a model with one "
                    "(default: the model's)")
    ap.add_argument("--diffusers", default="", help="folder that holds the package (default: the installed one)")
    ap.add_argument("--embeds", default="", help="file of encoded prompts, see study.py (default: encode now)")
    ap.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    ap.add_argument("--dtype", default="f32", choices=("f32", "bf16"), help="of the transformer; the VAE is f32")
    ap.add_argument("--steps", type=int, default=8)
    ap.add_argument("--guidance", type=float, default=2.5)
    ap.add_argument("--frames", type=int, default=33)
    ap.add_argument("--side", type=int, default=128)
    ap.add_argument("--threads", type=int, default=0, help="torch's threads (default: its own)")


def options():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(ap)
    ap.add_argument("--group", default="", help="named runs, several with commas: " + " ".join(library_runs.GROUPS))
    ap.add_argument("--runs", default="", help="own runs, ; between them")
    ap.add_argument("--masks", default="", help="a mask file: runs at each of its budgets too")
    ap.add_argument("--minutes", type=float, default=1e9, help="no clip is begun later")
    ap.add_argument("--clips", type=int, default=16, help="1 to 16")
    ap.add_argument("--heldout", type=int, default=0, help="judge so many of the other prompts (from the end) instead")
    ap.add_argument("--keep", default="", help="folder for all clips as NPY, which `esa evaluate` reads; dense clips "
                    "that are in it are not made again")
    metrics.add_lpips(ap)
    ap.add_argument("--study", nargs="*", default=[], help="results of study.py, shown beside")
    ap.add_argument("--engine", default="", help="table of `esa bench video`, shown beside")
    ap.add_argument("--done", default="", help="earlier results to go on from (default: --out)")
    ap.add_argument("--out", default="library.json", help="results (library.json)")
    ap.add_argument("--list", action="store_true", help="print the runs and stop")
    return ap.parse_args()


class Pipe:
    """What esa.apply reads of a diffusers pipeline (transformer, scheduler, where the loop stands), and WanPipeline's
    loop over encoded prompts. diffusers' own needs transformers and a text encoder."""

    def __init__(self, a, embeds):
        self.device = torch.device(a.device)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        inner = os.path.join(a.transformer, "transformer")
        folder = inner if a.transformer and os.path.isdir(inner) else a.transformer
        self.transformer, self.vae, self.scheduler = model.load(a.model, folder, a.diffusers, self.device)
        self.dtype = torch.float32
        if a.dtype == "bf16":
            self.dtype = torch.bfloat16
            keep = set(type(self.transformer)._keep_in_fp32_modules)    # as from_pretrained(torch_dtype=..) does
            for name, p in self.transformer.named_parameters():
                if not keep & set(name.split(".")):
                    p.data = p.data.to(self.dtype)
        c = self.vae.config
        side = a.side // c.scale_factor_spatial
        self.latent = (1, c.z_dim, (a.frames - 1) // c.scale_factor_temporal + 1, side, side)
        self.steps, self.guidance, self.embeds = a.steps, a.guidance, embeds
        self.do_classifier_free_guidance = a.guidance > 1
        # diffusers up to 0.36 tells caches the branch alone
        self.told = len(inspect.signature(self.transformer.cache_context).parameters) > 1
        self._current_timestep, self._num_timesteps = None, a.steps

    def text(self, prompt):
        x = self.embeds[prompt]
        x = torch.cat([x, x.new_zeros(TEXT_ROWS - x.shape[0], x.shape[1])])
        return x[None].to(self.device, self.dtype)

    def velocity(self, branch, i, latents, t, text):
        more = {"step_index": i, "sigma": float(self.scheduler.sigmas[i]), "num_inference_steps": self.steps}
        with self.transformer.cache_context(branch, **(more if self.told else {})):
            return self.transformer(hidden_states=latents.to(self.dtype), timestep=t.expand(1),
                                    encoder_hidden_states=text, return_dict=False)[0]

    def denoise(self, prompt, seed):
        """Last latents of a clip."""
        x = torch.randn(self.latent, generator=torch.Generator("cpu").manual_seed(seed)).to(self.device)
        text, empty = self.text(prompt), self.text("")
        self.scheduler.set_timesteps(self.steps, device=self.device)
        self.scheduler.set_begin_index(0)
        for i, t in enumerate(self.scheduler.timesteps):
            self._current_timestep = t
            v = self.velocity("cond", i, x, t, text)
            if self.guidance > 1:
                free = self.velocity("uncond", i, x, t, empty)
                v = free + self.guidance * (v - free)
            x = self.scheduler.step(v, t, x, return_dict=False)[0]
        self._current_timestep = None
        return x

    def decode(self, x):
        """u8 [1, 3, T, H, W]."""
        c = self.vae.config
        mean, std = (torch.tensor(y, device=x.device).view(1, -1, 1, 1, 1) for y in (c.latents_mean, c.latents_std))
        video = self.vae.decode(x.float() / (1.0 / std) + mean, return_dict=False)[0]
        return ((video * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)

    def wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def finite(x):
    return x if x == x and abs(x) != float("inf") else None


class Bench:
    def __init__(self, a):
        self.a, self.start = a, time.time()
        self.path = a.out
        clips = f"heldout {a.heldout}" if a.heldout else "judged"
        size = f"{a.steps} steps guidance {a.guidance:g} {a.frames}x{a.side}"
        name = os.path.basename(os.path.normpath(a.transformer or a.model))
        self.kind = f"{name} {size} {a.dtype} {a.device} {clips}"
        self.study_kind = f"{name} {size} " + (clips if a.heldout else "clips 16")
        self.results = {"runs": [], "notes": []}
        earlier = a.done or (self.path if os.path.exists(self.path) else "")
        if earlier:
            with open(earlier, encoding="utf-8") as f:
                self.results["runs"] = json.load(f)["runs"]
        if a.heldout:
            chosen = OTHERS[-a.heldout:]
            self.clips = [(len(EVAL) + OTHERS.index(p), p, 500 + i) for i, p in enumerate(chosen)]
        else:
            self.clips = [(i // 2, EVAL[i // 2], i % 2) for i in range(min(16, a.clips))]
        self.dense = {}

    def left(self):
        return self.a.minutes * 60 - (time.time() - self.start)

    def save(self):
        self.results["seconds"] = time.time() - self.start
        with open(self.path + ".tmp", "w", encoding="utf-8") as f:
            json.dump(self.results, f, indent=1)
        os.replace(self.path + ".tmp", self.path)
        library_table.write_csv(os.path.splitext(self.path)[0] + ".csv", self.results["runs"])

    def note(self, text):
        self.results["notes"].append(text)
        print("note:", text, flush=True)

    def prepare(self):
        a = self.a
        if a.threads:
            torch.set_num_threads(a.threads)
        self.lpips = metrics.Lpips.open(a.lpips, a.device)
        prompts = sorted({p for _, p, _ in self.clips} | {""})
        embeds = torch.load(a.embeds, weights_only=True) if a.embeds else model.encode(a.model, prompts)
        self.pipe = Pipe(a, embeds)
        import esa
        from esa.core.library import load
        self.esa = esa
        gpu = torch.cuda.get_device_name() if a.device == "cuda" else platform.processor()
        self.results["machine"] = {"torch": torch.__version__, "device": gpu, "libesa": str(load().path),
                                   "esa": esa.__version__}
        print(f"{self.kind}: {gpu}, torch {torch.__version__}, esa {esa.__version__}, "
              f"ready after {time.time() - self.start:.0f} s", flush=True)

    # ---- clips

    def npy(self, run, prompt, seed, frames=None):
        """Keeps a clip, or reads it: [T, H, W, 3]."""
        if not self.a.keep:
            return None
        import numpy
        folder = os.path.join(self.a.keep, "".join(c if c.isalnum() or c in ".=-" else "_" for c in run))
        path = os.path.join(folder, f"{prompt}-{seed}.npy")
        if frames is not None:
            os.makedirs(folder, exist_ok=True)
            numpy.save(path, frames[0].permute(1, 2, 3, 0).cpu().numpy())
        elif os.path.exists(path):
            return torch.from_numpy(numpy.load(path)).permute(3, 0, 1, 2)[None].to(self.pipe.device)
        return None

    def reference(self, number, prompt, seed):
        """The dense clip by diffusers' own attention, made at its first use."""
        if (number, seed) not in self.dense:
            name = f"dense {self.kind}"
            frames = self.npy(name, number, seed)
            if frames is None:
                frames = self.pipe.decode(self.pipe.denoise(prompt, seed))
                self.npy(name, number, seed, frames)
            self.dense[number, seed] = frames
        return self.dense[number, seed]

    def clip(self, run, handle, number, prompt, seed):
        """The record of one clip; the dense one was made before esa was applied."""
        self.pipe.wait()
        begun = time.perf_counter()
        last = self.pipe.denoise(prompt, seed)
        self.pipe.wait()
        seconds = time.perf_counter() - begun
        frames = self.pipe.decode(last)
        found = {name: x[0] for name, x in metrics.compare(self.dense[number, seed], frames, self.lpips).items()}
        self.npy(f"{run.words} {self.kind}", number, seed, frames)
        s = handle.stats()
        kernels = {handle.stats(layer, step).kernel for layer in range(handle.layers) for step in range(handle.steps)}
        return {"prompt": number, "seed": seed, **found, "work_asked": finite(s.work_asked), "work": finite(s.work),
                "density": finite(s.density), "calls": s.calls, "dense_calls": s.dense_calls,
                "masks_made": s.masks_made, "fallback_calls": s.fallback_calls, "seconds": seconds,
                "select_seconds": s.select_seconds, "attention_seconds": s.attention_seconds,
                "kernel": "+".join(sorted(k for k in kernels if k))}

    # ---- runs

    def one(self, run):
        mine = next((r for r in self.results["runs"] if (r["words"], r["kind"]) == (run.words, self.kind)), None)
        if mine is None:
            mine = {"name": run.name, "words": run.words, "study": run.study, "kind": self.kind,
                    "study_kind": self.study_kind, "clips": []}
            self.results["runs"].append(mine)
        there = {(c["prompt"], c["seed"]) for c in mine["clips"]}
        todo = [c for c in self.clips if (c[0], c[2]) not in there]
        if not todo:
            return
        for number, prompt, seed in todo:
            if self.left() > 0:
                self.reference(number, prompt, seed)
        config = run.config()
        mine["config"] = repr(config)
        with self.esa.apply(self.pipe, config) as handle:
            for number, prompt, seed in todo:
                if self.left() <= 0 or (number, seed) not in self.dense:
                    print(f"no time for the rest of {run.words}", flush=True)
                    break
                mine["clips"].append(self.clip(run, handle, number, prompt, seed))
                self.save()
        if mine["clips"]:
            m = {name: library_table.mean(mine, name) for name in ("work", "psnr", "ssim")}
            print(f"{run.name}: {run.words}: {len(mine['clips'])} clips, work {m['work']:.4f}, {m['psnr']:.2f} dB, "
                  f"SSIM {m['ssim']:.4f}, {library_table.middle(mine, 'seconds'):.3f} s a clip, kernel "
                  f"{mine['clips'][-1]['kernel']}, {time.time() - self.start:.0f} s", flush=True)

    def all(self, runs):
        for run in runs:
            if self.left() <= 0:
                self.note(f"no time for {run.words}")
                continue
            try:
                self.one(run)
            except Exception as e:      # a run that fails is noted, the next one runs
                where = traceback.extract_tb(e.__traceback__)[-1]
                self.note(f"{run.words}: {type(e).__name__} {str(e)[:400]} "
                          f"({os.path.basename(where.filename)}:{where.lineno})")
                if self.a.device == "cuda":
                    torch.cuda.empty_cache()
        self.save()


def main():
    a = options()
    torch.set_grad_enabled(False)
    runs = library_runs.wanted(a.group, a.runs)
    if a.list:
        for run in runs:
            print(f"{run.name}: {run.words}" + (f" | {run.label()}" if run.study else ""))
        print(len(runs), "runs")
        return
    bench = Bench(a)
    bench.prepare()
    if a.masks:
        runs += library_runs.recorded(a.masks, bench.esa.MaskFile(a.masks).budgets)
    bench.all(runs)
    engine = library_table.engine_rows(a.engine) if a.engine else None
    print(library_table.table(bench.results["runs"], library_table.studies(a.study), engine), flush=True)
    print(f"{len(bench.results['runs'])} runs, {time.time() - bench.start:.0f} s -> {bench.path}", flush=True)
    if bench.results["notes"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
