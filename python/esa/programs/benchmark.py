# SPDX-License-Identifier: Apache-2.0
"""Seconds per step of a diffusers pipeline: dense (torch's own attention) against sparse attention at several budgets,
online masks.

    python -m esa.benchmark --model wan-t2v-1.3b --steps 5 --budgets 0.7,0.5,0.3

Text encoding and decoding are not counted. Every method runs --repeats times, in turns, after one run that is not
counted; medians are printed, with the spread in the JSON file. Speedup is given twice: over all steps, and without the
warm-up steps, which run dense. python -m esa.benchmark_cached measures cached masks."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ..diffusers import parallel
from . import native, program
from .program import Stop, say


def parser(
        name: str = "benchmark",
        about: str = "Measures seconds per step, dense against sparse with masks made while it runs."
) -> program.Parser:
    from . import clips
    p = program.Parser(name, about)
    program.add_model(p)
    p.add_argument("--budgets", type=program._shares, default=(0.7, 0.5, 0.3), metavar="X,X",
                   help="kept fractions of key blocks (0.7,0.5,0.3)")
    program.add_size(p)
    program.add_sparse(p)
    clips.add_tail(p)
    p.add_argument("--repeats", type=program._whole(1, 1000), default=1, metavar="N", help="runs of each method (1)")
    p.add_argument("--prompt", default="A cat walking on grass", metavar="TEXT",
                   help="prompt of the video (A cat walking on grass)")
    p.add_argument("--json", "--output", dest="json", metavar="FILE", help="write everything that was measured")
    return p


def measure(args: argparse.Namespace, variants: Sequence[Any]) -> list[dict[str, Any]]:
    """Runs every variant and returns one entry each, dense first."""
    from . import clips
    pipe = program.load(args)
    settings = program.video_settings(args, pipe)
    say(f"{args.model}: {settings['num_frames']} frames of {settings['width']} x {settings['height']}, "
        f"{settings['num_inference_steps']} steps, {args.repeats} run{'s' if args.repeats > 1 else ''} each")
    progress = program.Progress(1 + args.repeats * len(variants), settings["num_inference_steps"])
    clips.make(pipe, args.prompt, variants[0], args.model, settings, progress.callback("first run"), decode=False)
    progress.done()
    records: list[list[dict[str, Any]]] = [[] for _ in variants]
    for _ in range(args.repeats):
        for variant, found in zip(variants, records):
            found.append(
                clips.make(pipe, args.prompt, variant, args.model, settings, progress.callback(variant.name),
                           decode=False)[1])
            progress.done()
    return [_entry(variant, records[0], found) for variant, found in zip(variants, records)]


def _entry(variant: Any, dense: list[dict[str, Any]], found: list[dict[str, Any]]) -> dict[str, Any]:
    from . import clips
    same = found is dense
    return {
        "method": variant.name, "budget": variant.budget, "runs": len(found), "density": found[0]["density"],
        "kernel": found[0]["kernel"], "denoise_seconds": clips.spread(r["denoise_seconds"] for r in found),
        "step_seconds": clips.spread(clips.step_mean(r) for r in found),
        "step_seconds_sparse": clips.spread(clips.step_mean(r, warmup=r["warmup_steps"]) for r in found
                                            ), "select_seconds": clips.spread(r["select_seconds"] for r in found),
        "attention_seconds": clips.spread(r["attention_seconds"] for r in found),
        "speedup": None if same else clips.speedup(dense, found, without_warmup=False),
        "speedup_without_warmup": None if same else clips.speedup(dense, found, without_warmup=True), "records": found
    }


def show(entries: list[dict[str, Any]]) -> None:
    """The table."""
    def text(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    say(f"{'method':<10}{'budget':>8}{'density':>9}{'s/step':>10}{'speedup':>9}{'s/step*':>10}{'speedup*':>10}"
        f"{'selecting':>11}")
    for e in entries:
        steps, sparse, select = (e[key]["median"] for key in ("step_seconds", "step_seconds_sparse", "select_seconds"))
        say(f"{e['method']:<10}{e['budget']:>8.2f}{text(e['density'], '.3f'):>9}{text(steps, '.4f'):>10}"
            f"{text(e['speedup'], '.2f'):>8}x{text(sparse, '.4f'):>10}"
            f"{text(e['speedup_without_warmup'], '.2f'):>9}x{text(select, '.4f'):>10}s")
    say("*: without the warm-up steps, which run dense; selecting: seconds a video spends on making masks")


def finish(args: argparse.Namespace, entries: list[dict[str, Any]], mode: str) -> None:
    show(entries)
    if args.json and parallel.rank() == 0:
        program.write_json(args.json, {
            **native.about_machine(), "model": args.model, "mode": mode, "variants": entries
        })


def benchmark(args: argparse.Namespace) -> None:
    from . import clips
    variants = [clips.Method("dense", None), *(clips.method_of(args, "entropy", budget) for budget in args.budgets)]
    finish(args, measure(args, variants), "online")


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser().parse_args(given)
    if not program.done_by_others(args, "benchmark", given):
        benchmark(args)


__all__ = ["Stop", "benchmark", "finish", "main", "measure", "parser", "show"]

