#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a whole denoising run in one process: dense, and each preset with carry (the default) and without it; or,
with --works, the former default (entropy, with a fifth of the steps and layer 0 dense), the default without carry and
the default at equal attention work.

    python bench/diffusers_run.py --json run.json               Wan 1.3B at 480p and 720p; a GPU of 80 GB
    python bench/diffusers_run.py --shapes wan-1.3b-480p --works 0.44 --real
    python bench/diffusers_run.py --mini --device cpu           a tiny model, to see whether the program runs

Models, inputs and environment are those of diffusers_step.py: real configurations, random bf16 weights, eager on both
sides, transformer alone. A run has --steps steps of two guidance branches. The program times forwards of each kind that
a run has: dense, with a new mask (and order), with a mask that is kept, in the branch that makes masks and in the other
one. `run` multiplies them out by how often the run has each. --real also makes the whole run and shows its seconds.
With carry a step that makes masks is an anchor. At equal work the attention has the same arithmetic; what differs is
the time for making masks and orders, for gathering tokens, and how well kernels use the GPU. `memory` is the most that
torch's allocator held, weights and carried differences included."""
from __future__ import annotations

import argparse
import contextlib
import sys

import diffusers_step as base
import torch
import whole_runs

import esa

RULES = {"former default": dict(selector="entropy"), "default without carry": dict(carry="off"), "default": {}}
AT_PRESETS = ("default without carry", "default")
PRESETS = ("faithful", "balanced", "fast")


def kinds_of(handle, steps):
    """{kind: (step to time, how many steps are of this kind)}. A dense step has only dense calls; a step that makes
    masks is told from one that keeps them by what the library did there."""
    made, dense = [], []
    for step in range(steps):
        stats = handle.stats(step=step)
        (dense if not stats.sparse_calls else made if stats.masks_made else []).append(step)
    kept = [s for s in range(steps) if s not in made and s not in dense]
    return {name: found for name, found in (("dense", dense), ("new masks", made), ("kept masks", kept)) if found}


def whole(model, inputs, handle, steps):
    handle.begin()
    for step in range(steps):
        for branch in (0, 1):
            handle.pin(step, branch)
            model(**inputs)


def settings(args):
    """(rule, words of its EsaConfig) in the order in which they run."""
    if args.works:
        return [(rule, {**words, "work": work}) for work in args.works for rule, words in RULES.items()]
    return [(rule, {**RULES[rule], "preset": preset}) for preset in args.presets for rule in AT_PRESETS]


def measure(model, inputs, family, config, steps, clock, rounds, real):
    """Times of one setting. A first run, with two layers unless it is to be shown, tells which steps are of which kind;
    then the first step of each kind is timed."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with esa.apply(model, config, steps=steps) as handle:
        with contextlib.nullcontext() if real else base.two_layers(model, family):
            seconds = clock(lambda: whole(model, inputs, handle, steps))
        kinds, timed = kinds_of(handle, steps), {}
        for _ in range(rounds):
            handle.begin()
            for step in range(max(found[0] for found in kinds.values()) + 1):
                for branch in (0, 1):
                    handle.pin(step, branch)
                    took = clock(lambda: model(**inputs))
                    for kind, found in kinds.items():
                        if step == found[0]:
                            timed.setdefault((kind, branch), []).append(took)
        each = {f"{kind}, branch {branch}": base.median(x) for (kind, branch), x in timed.items()}
        run = sum(base.median(timed[kind, branch]) * len(found) for kind, found in kinds.items() for branch in (0, 1))
        one = {kind: handle.stats(step=found[0]) for kind, found in kinds.items()}
        total = handle.stats()
    work = sum(one[kind].work * len(found) for kind, found in kinds.items()) / steps
    return {"run_s": run, "real_s": seconds if real else None, "forward_s": each,
            "steps": {kind: len(found) for kind, found in kinds.items()}, "work": work, "density": total.density,
            "density_asked": one["kept masks"].density_asked if "kept masks" in one else total.density_asked,
            "select_s": {kind: s.select_seconds for kind, s in one.items()},
            "attention_s": {kind: s.attention_seconds for kind, s in one.items()},
            "memory": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            "carry_bytes": total.carry_bytes, "carry_host_bytes": total.carry_host_bytes,
            "fallback_calls": total.fallback_calls, "kernel": total.kernel}


def run_shape(name, shape, args):
    gpu = args.device.startswith("cuda")
    clock = base.Clock(gpu)
    dtype = torch.bfloat16 if gpu else torch.float32
    model, inputs = base.build(shape, args.device, dtype)
    tokens = base.tokens_of(shape)
    result = {"shape": name, "tokens": tokens, "rows": []}
    with torch.no_grad():
        sdpa, seconds, attention = base.measure_dense(model, inputs, shape, tokens, clock, lambda _: args.rounds)
        dense = 2 * args.steps * base.median(seconds)
        result.update(sdpa=sdpa, dense_forward_s=base.median(seconds), dense_attention_s=attention, dense_run_s=dense)
        print(f"\n{name}: {tokens} tokens; dense, {sdpa} SDPA: {base.median(seconds):.3f} s per forward, {dense:.1f} s "
              f"for {args.steps} steps of two branches", flush=True)
        for rule, words in settings(args):
            config = esa.EsaConfig(**words, **({"block": 16} if args.mini else {}))
            asked = config.work_for(args.steps)
            label = f"{words.get('preset', 'work')} {asked:g}, {rule}"
            try:
                row = measure(model, inputs, shape.family, config, args.steps, clock, args.rounds, args.real)
            except esa.EsaError as error:
                print(f"  {label}: {error}", flush=True)
                result["rows"].append({"rule": rule, **words, "asked": asked, "error": str(error)})
                continue
            row = {"rule": rule, **words, "asked": asked, "speedup": dense / row["run_s"], **row}
            result["rows"].append(row)
            each = ", ".join(f"{kind} {x:.3f}" for kind, x in row["forward_s"].items())
            real = f", for real {row['real_s']:.1f} s" if args.real else ""
            memory = f"; {row['memory'] / 1e9:.1f} GB" if row["memory"] else ""
            print(f"  {label} (realised {row['work']:.3f}): run {row['run_s']:.1f} s, {row['speedup']:.2f}x{real}; "
                  f"forwards: {each}; {row['kernel']}{memory}", flush=True)
    return result


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="", help=f"comma-separated, of {', '.join(base.SHAPES)} "
                        "(wan-1.3b-480p,wan-1.3b-720p)")
    parser.add_argument("--presets", default=",".join(PRESETS), help=f"of {', '.join(PRESETS)} (all)")
    parser.add_argument("--works", default="", help="instead of presets: attention works of the whole run, all rules "
                        "at equal work")
    parser.add_argument("--real", action="store_true", help="also show the seconds of a run that was made whole")
    whole_runs.add_options(parser, rounds=3, of="timed forwards of each kind")
    args = parser.parse_args(arguments)
    try:
        args.works = [float(x) for x in args.works.split(",") if x]
    except ValueError:
        parser.error(f"--works must be numbers with commas, not {args.works!r}")
    if not all(0 < w <= 1 for w in args.works):
        parser.error("--works must be above 0 and at most 1")
    args.presets = args.presets.split(",")
    if unknown := [p for p in args.presets if p not in PRESETS]:
        parser.error(f"unknown preset {unknown[0]!r}, expected {', '.join(PRESETS)}")
    known = base.MINIS if args.mini else base.SHAPES
    usual = ["mini-wan"] if args.mini else ["wan-1.3b-480p", "wan-1.3b-720p"]
    names = whole_runs.checked(parser, args, known, usual, least_steps=2)
    whole_runs.run(names, known, args, run_shape, branches=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
