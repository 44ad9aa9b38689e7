#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Seconds and PSNR of whole clips by diffusers' WanPipeline on the CPU: esa, caches of others, and both.

    python bench/together_clips.py --frames 9 --json clips.json         the table of docs/quality.md, about an hour
    python bench/together_clips.py --frames 5 --steps 10 --clips 1      does the program run?

wan-tiny, a trained model, makes the clips. Each row makes the same --clips clips (prompts and seeds of
tools/train_wan_tiny). PSNR is against the dense run without any cache, mean over the clips. Seconds are the processor
time of the pipeline up to the latents, with --threads threads, median over the clips: text encoder, transformer and
scheduler, but no VAE. `attention calls` counts those that were computed, as a share of all.

Thresholds are such that most caches leave out about two fifths of the steps, as the step cache of esa does at 0.03."""
from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import json
import math
import platform
import sys
import time

import diffusers
import torch

import esa
from esa.diffusers.families import detect
from esa.models import load_pipeline

PROMPTS = ["a red ball rolls to the right over a blue floor",
           "a large yellow star spins in place over a purple background",
           "a white square moves to the left over a green striped background",
           "a small orange triangle moves up over a black background",
           "a large green ring grows over a white checkered background",
           "a purple ball moves in a circle over an orange gradient background"]


# ---------------------------------------------------------------- caches: each returns how to take it off


def first_block(pipe, args):
    pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=args.first_block))
    return pipe.transformer.disable_cache


def taylor_seer(pipe, args):
    pipe.transformer.enable_cache(
        diffusers.TaylorSeerCacheConfig(use_lite_mode=True, cache_interval=2, disable_cache_before_step=args.warmup,
                                        disable_cache_after_step=args.steps - 1, taylor_factors_dtype=torch.float32))
    return pipe.transformer.disable_cache


def mag_cache(pipe, args):
    pipe.transformer.enable_cache(
        diffusers.MagCacheConfig(num_inference_steps=args.steps, mag_ratios=magnitudes(pipe, args),
                                 threshold=args.mag, retention_ratio=0.2))
    return pipe.transformer.disable_cache


def sea_cache(pipe, args):
    pipe.transformer.enable_cache(diffusers.SeaCacheConfig(threshold=args.sea, retention_steps=args.warmup))
    return pipe.transformer.disable_cache


def cache_dit_blocks(pipe, args):
    import cache_dit
    cache_dit.enable_cache(
        pipe, cache_config=cache_dit.DBCacheConfig(Fn_compute_blocks=1, Bn_compute_blocks=0,
                                                   max_warmup_steps=args.warmup, residual_diff_threshold=args.residual,
                                                   max_continuous_cached_steps=2))
    return lambda: cache_dit.disable_cache(pipe)


def int8_weights(pipe, args):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    kept = pipe.transformer.state_dict()
    kept = {name: tensor.clone() for name, tensor in kept.items()}
    quantize_(pipe.transformer, Int8WeightOnlyConfig(),
              filter_fn=lambda m, name: isinstance(m, torch.nn.Linear) and name.startswith("blocks."))

    def back():
        for name, module in pipe.transformer.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.weight = torch.nn.Parameter(kept[f"{name}.weight"], requires_grad=False)
    return back


CACHES = {"FirstBlockCache": first_block, "TaylorSeer": taylor_seer, "MagCache": mag_cache, "SeaCache": sea_cache,
          "cache-dit": cache_dit_blocks, "torchao int8 weights": int8_weights}
NEEDS = {"cache-dit": "cache_dit", "torchao int8 weights": "torchao"}      # packages beside diffusers
_RATIOS = {}


def magnitudes(pipe, args):
    """MagCache's ratios of this model, from one dense clip, as its documentation tells to make them."""
    if args.steps not in _RATIOS:
        pipe.transformer.enable_cache(diffusers.MagCacheConfig(num_inference_steps=args.steps, calibrate=True))
        text = io.StringIO()
        try:
            with contextlib.redirect_stdout(text):
                clip(pipe, args, 0)
        finally:
            pipe.transformer.disable_cache()
        lists = [ast.literal_eval(line) for line in text.getvalue().splitlines() if line.startswith("[") and "," in line
                 and not line.startswith("[Mag")]
        _RATIOS[args.steps] = torch.tensor(lists[0])
    return _RATIOS[args.steps]


# ---------------------------------------------------------------- clips


def clip(pipe, args, i):
    """The latents of clip i."""
    with torch.no_grad():
        return pipe(PROMPTS[i], generator=torch.Generator().manual_seed(100 + i), num_frames=args.frames, height=128,
                    width=128, num_inference_steps=args.steps, guidance_scale=2.5, output_type="latent").frames


def frames(pipe, latents):
    """Latents as the pipeline decodes them."""
    vae = pipe.vae
    mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
    with torch.no_grad():
        video = vae.decode((latents.to(vae.dtype) * std + mean).to(vae.dtype), return_dict=False)[0]
    return pipe.video_processor.postprocess_video(video, output_type="np")[0]


@contextlib.contextmanager
def counted(model):
    """Counts self-attention calls that reach the processor."""
    count = [0]
    kept = []
    for _, module in detect(model).modules(model):
        inner = module.processor

        def call(*args, _inner=inner, **kwargs):
            count[0] += 1
            return _inner(*args, **kwargs)
        kept.append((module, inner))
        module.processor = call
    try:
        yield count
    finally:
        for module, inner in kept:
            module.processor = inner


def measure(pipe, args, config, cache):
    """Latents of all clips, and what they cost."""
    with contextlib.ExitStack() as stack:
        if cache is not None:
            stack.callback(CACHES[cache](pipe, args))
        handle = stack.enter_context(esa.apply(pipe, config)) if config is not None else None
        count = None if handle is not None else stack.enter_context(counted(pipe.transformer))
        latents, seconds, calls, steps = [], [], 0, 0
        for i in range(args.clips):
            start = time.process_time()
            latents.append(clip(pipe, args, i))
            seconds.append(time.process_time() - start)
            if handle is not None:
                stats = handle.stats()
                calls, steps = calls + stats.calls, steps + stats.computed_steps
        layers = sum(1 for _ in detect(pipe.transformer).modules(pipe.transformer))
        whole = args.clips * args.steps * 2 * layers
        row = {"seconds": sorted(seconds)[len(seconds) // 2], "all_seconds": seconds,
               "calls": (calls if handle is not None else count[0]) / whole}
        if handle is not None:
            row.update(work=stats.work, computed_steps=steps / args.clips)
    return latents, row


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wan-tiny", help="a Wan pipeline (wan-tiny)")
    parser.add_argument("--clips", type=int, default=3, help=f"clips of each row, at most {len(PROMPTS)} (3)")
    parser.add_argument("--frames", type=int, default=17, help="frames of a clip (17)")
    parser.add_argument("--steps", type=int, default=25, help="denoising steps (25)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch and esa (1)")
    parser.add_argument("--rows", default="", help=f"caches, of {', '.join(CACHES)}; default: all")
    parser.add_argument("--step-cache", type=float, default=0.03, help="threshold of esa's step cache (0.03)")
    parser.add_argument("--first-block", type=float, default=0.1, help="threshold of FirstBlockCache (0.1)")
    parser.add_argument("--residual", type=float, default=0.12, help="threshold of cache-dit (0.12)")
    parser.add_argument("--mag", type=float, default=0.03, help="threshold of MagCache (0.03)")
    parser.add_argument("--sea", type=float, default=0.25, help="threshold of SeaCache (0.25)")
    parser.add_argument("--json", metavar="FILE", help="everything measured, for machines")
    args = parser.parse_args(arguments)
    caches = args.rows.split(",") if args.rows else list(CACHES)
    unknown = [x for x in caches if x not in CACHES]
    if unknown:
        parser.error(f"unknown cache {unknown[0]!r}, expected {', '.join(CACHES)}")
    missing = [x for x in caches if x in NEEDS and importlib.util.find_spec(NEEDS[x]) is None]
    if missing:
        parser.error(f"{missing[0]!r} needs the package {NEEDS[missing[0]]}, which is not installed; --rows names the "
                     "caches to measure")
    if not 1 <= args.clips <= len(PROMPTS) or args.steps < 5:
        parser.error(f"--clips must be 1 to {len(PROMPTS)}, --steps at least 5")
    args.warmup = -(-args.steps // 5)
    torch.set_num_threads(args.threads)
    esa.set_num_threads(args.threads)
    pipe = load_pipeline(args.model, device="cpu", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    about = {"machine": platform.processor() or platform.machine(), "threads": args.threads,
             "torch": torch.__version__, "diffusers": diffusers.__version__, "esa": esa.__version__,
             "settings": {k: v for k, v in vars(args).items() if k != "json"}}
    print(", ".join(f"{k} {v}" for k, v in about.items()), flush=True)
    sparse = esa.EsaConfig()
    rows = [("dense", None, None), ("esa", sparse, None),
            ("esa's step cache", esa.EsaConfig(selector="dense", step_cache=args.step_cache), None),
            ("esa + its step cache", sparse.replace(step_cache=args.step_cache), None)]
    rows += [row for name in caches for row in ((name, None, name), (f"esa + {name}", sparse, name))]
    want, results = None, []
    for name, config, cache in rows:
        latents, row = measure(pipe, args, config, cache)
        pictures = [frames(pipe, x) for x in latents]
        want = want or pictures
        each = [-10 * math.log10(max(1e-10, ((a - b)**2).mean())) for a, b in zip(want, pictures)]
        row = {"row": name, **row, "psnr": sum(each) / len(each) if name != "dense" else None, "all_psnr": each}
        results.append(row)
        speed = results[0]["seconds"] / row["seconds"]
        quality = f"{row['psnr']:5.1f} dB" if row["psnr"] is not None else "       -"
        more = f", work {row['work']:.3f}" if "work" in row else ""
        print(f"{name:28s} {row['seconds']:7.1f} s  {speed:5.2f}x  {quality}  attention calls {row['calls']:.2f}{more}",
              flush=True)
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump({**about, "rows": results}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
