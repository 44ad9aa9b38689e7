#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a whole video with esa, with cache-dit, and with both, beside dense attention, in one run.

    python bench/together.py --json together.json               Wan 1.3B at 480p; a GPU of 80 GB, about five minutes
    python bench/together.py --shapes wan-1.3b-720p --first 8 --esa balanced
    python bench/together.py --compile --json compiled.json     the same with compiled blocks on all sides
    python bench/together.py --mini --device cpu --steps 8      a tiny model, to see whether the program runs

Models, inputs and environment are those of diffusers_step.py: real configurations, random bf16 weights made on the GPU,
transformer alone. A video has --steps steps of two guidance branches; every forward of it is run and timed, nothing is
multiplied out. cache-dit is a pure Python package: a folder with it on PYTHONPATH is enough.

What a cache leaves out depends on what a model computes, and random weights compute nothing. So cache-dit gets a fixed
list of computed steps (its own steps_mask, --policy), the same with and without esa. The other steps run the first
--first blocks and add what the rest contributed last time. `computed` counts attention calls, as a share of all."""
from __future__ import annotations

import argparse
import contextlib
import inspect
import sys

import diffusers_step as base
import torch
import whole_runs

import esa

ESA = {"balanced": {}, "faithful": {"preset": "faithful"}, "fast": {"preset": "fast"},
       "0.2": {"selector": "entropy", "budget": 0.2, "warmup_frac": base.WARMUP}}


def video(model, inputs, steps):
    """The loop of a pipeline with guidance: two forwards a step, and a small movement of the sample."""
    x = inputs["hidden_states"]
    tells = "kwargs" in inspect.signature(type(model).cache_context).parameters         # not in diffusers 0.36
    for step in range(steps):
        about = {"step_index": step, "num_inference_steps": steps} if tells else {}
        timestep = torch.full_like(inputs["timestep"], 999 - step * 999 // steps)
        given = {**inputs, "hidden_states": x, "timestep": timestep}
        with model.cache_context("cond", **about):
            v = model(**given)[0]
        with model.cache_context("uncond", **about):
            u = model(**given)[0]
        x = x - (u + 5 * (v - u)) * (0.1 / steps)
    return x


class Cached:
    """cache-dit around one transformer, with a fixed list of computed steps."""

    def __init__(self, model, first, steps, policy):
        import cache_dit
        self.model, self.off = model, cache_dit.disable_cache
        self.mask = cache_dit.steps_mask(total_steps=steps, mask_policy=policy)
        cache_dit.enable_cache(
            model, cache_config=cache_dit.DBCacheConfig(
                Fn_compute_blocks=first, Bn_compute_blocks=0, max_warmup_steps=1, num_inference_steps=steps,
                enable_separate_cfg=True, steps_computation_mask=self.mask, steps_computation_policy="static"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.off(self.model)


def layers_of(model):
    return sum(1 for _ in base.detect(model).modules(model))


def measure(model, inputs, config, first, args, clock):
    """One video: its seconds, and what was computed. cache-dit begins anew each time."""
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(Cached(model, first, args.steps, args.policy)) if first else None
        handle = stack.enter_context(esa.apply(model, config, steps=args.steps)) if config is not None else None
        seconds = clock(lambda: video(model, inputs, args.steps))
        layers = layers_of(model)
        steps = sum(cache.mask) if cache is not None else args.steps
        calls = 2 * (layers * steps + (first or 0) * (args.steps - steps))
        row = {"seconds": seconds, "computed_steps": steps, "computed": calls / (2 * layers * args.steps)}
        if handle is not None:
            stats = handle.stats()
            if stats.calls != calls or handle.step != args.steps - 1:
                raise RuntimeError(f"esa computed {stats.calls} calls where {calls} were expected, and ended at step "
                                   f"{handle.step} of {args.steps}")
            row.update(work=stats.work, density=stats.density, attention_s=stats.attention_seconds,
                       select_s=stats.select_seconds, fallback_calls=stats.fallback_calls, kernel=stats.kernel)
    return row


def run_shape(name, shape, args):
    gpu = args.device.startswith("cuda")
    clock = base.Clock(gpu)
    model, inputs = base.build(shape, args.device, torch.bfloat16 if gpu else torch.float32)
    result = {"shape": name, "tokens": base.tokens_of(shape), "rows": []}
    block = {"block": 16} if args.mini else {}
    with torch.no_grad():
        best = base.measure_dense(model, inputs, shape, base.tokens_of(shape), clock, lambda _: 1)[0]
        if args.compile:
            model.compile_repeated_blocks(fullgraph=True)
        result["sdpa"] = best
        print(f"\n{name}: {result['tokens']} tokens, {args.steps} steps of two branches, {best} SDPA"
              f"{', compiled blocks' if args.compile else ''}", flush=True)
        firsts = [n for n in args.first if n < layers_of(model)]
        rows = [(None, 0), *((None, n) for n in firsts)]
        rows += [(which, n) for which in args.esa for n in (0, *firsts)]
        for which, first in rows:
            words = [f"esa {which}"] if which else []
            words += [f"cache-dit F{first}"] if first else []
            config = esa.EsaConfig(**ESA[which], **block) if which else None
            with base.sdpa_backends(gpu)[best]():
                if args.compile or which:               # compilers and tuned kernels are not part of a video
                    warm = argparse.Namespace(**{**vars(args), "steps": 8})
                    measure(model, inputs, config, first, warm, clock)
                rounds = [measure(model, inputs, config, first, args, clock) for _ in range(args.rounds)]
            seconds = [r["seconds"] for r in rounds]
            row = {"row": " + ".join(words) or "dense", **rounds[-1], "seconds": base.median(seconds),
                   "all_seconds": seconds}
            dense = result["rows"][0]["seconds"] if result["rows"] else row["seconds"]
            row["speedup"] = dense / row["seconds"]
            result["rows"].append(row)
            more = f", attention work {row['work']:.3f}, {row['kernel']}" if "work" in row else ""
            print(f"  {row['row']:28s} {row['seconds']:8.2f} s  {row['speedup']:5.2f}x  {row['computed_steps']:3d} "
                  f"steps computed, attention calls {row['computed']:.2f}{more}", flush=True)
    return result


def numbers(parser, text, name):
    try:
        found = [int(x) for x in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        parser.error(f"{name} must be positive integers with commas, not {text!r}")
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="", help=f"comma-separated, of {', '.join(base.SHAPES)} (wan-1.3b-480p)")
    parser.add_argument("--esa", default="balanced,0.2", help=f"settings of esa, of {', '.join(ESA)} (balanced,0.2)")
    parser.add_argument("--first", default="1,8", help="blocks that cache-dit always computes (1,8)")
    parser.add_argument("--policy", default="medium", choices=["slow", "medium", "fast", "ultra"],
                        help="how many steps cache-dit computes (medium)")
    parser.add_argument("--compile", action="store_true", help="compile the blocks on all sides")
    whole_runs.add_options(parser, rounds=1, of="videos of each row")
    args = parser.parse_args(arguments)
    args.first = numbers(parser, args.first, "--first")
    args.esa = args.esa.split(",")
    unknown = [x for x in args.esa if x not in ESA]
    if unknown:
        parser.error(f"unknown setting {unknown[0]!r}, expected {', '.join(ESA)}")
    known = {n: s for n, s in (base.MINIS if args.mini else base.SHAPES).items() if s.family == "wan"}
    names = whole_runs.checked(parser, args, known, [next(iter(known))], least_steps=8)
    try:
        import cache_dit
    except ImportError:
        parser.error("cache-dit is not installed: pip install cache-dit, or put a folder with it on PYTHONPATH")
    import diffusers
    whole_runs.run(names, known, args, run_shape, diffusers=diffusers.__version__, cache_dit=cache_dit.__version__,
                   policy=args.policy, compiled=args.compile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
