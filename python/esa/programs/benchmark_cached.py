# SPDX-License-Identifier: Apache-2.0
"""Seconds per step of a diffusers pipeline: dense against sparse attention with the masks of a file.

    python -m esa.benchmark_cached --model wan-t2v-1.3b --masks masks/wan-1.3b.pt --budgets 0.7,0.5,0.3 --steps 5

As python -m esa.benchmark; masks made for another number of steps are mapped to the nearest step."""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import program
from .benchmark import finish, measure
from .benchmark import parser as online_parser
from .program import Stop


def parser() -> program.Parser:
    p = online_parser("benchmark_cached", "Measures seconds per step, dense against sparse with the masks of a file.")
    p.add_argument("--masks", required=True, metavar="FILE",
                   help="mask file (made by python -m esa.calibrate or esa calibrate)")
    return p


def benchmark_cached(args: argparse.Namespace) -> None:
    from . import clips
    if not os.path.exists(args.masks):
        raise Stop(f"the mask file '{args.masks}' does not exist; python -m esa.calibrate makes one")
    variants = [
        clips.Method("dense", None),
        *(clips.method_of(args, "cached", budget, masks=args.masks, step_map="nearest") for budget in args.budgets)
    ]
    finish(args, measure(args, variants), "cached")


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser().parse_args(given)
    if not program.done_by_others(args, "benchmark_cached", given):
        benchmark_cached(args)


