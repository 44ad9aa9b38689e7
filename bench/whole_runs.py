# SPDX-License-Identifier: Apache-2.0
"""What bench/diffusers_run.py and bench/together.py share: options of programs that run whole videos of several shapes,
their checks, and the loop over the shapes."""
from __future__ import annotations

import gc
import json
import time

import diffusers_step as base
import torch

import esa


def add_options(parser, rounds, of):
    """The options that both programs have. `of` says what --rounds counts."""
    parser.add_argument("--steps", type=int, default=50, help="denoising steps (50)")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"{of} ({rounds})")
    parser.add_argument("--mini", action="store_true", help="a tiny model instead (also on the CPU)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu (with --mini)")
    parser.add_argument("--json", metavar="FILE", help="everything measured, for machines")


def checked(parser, args, known, usual, least_steps):
    """The names of the shapes to run: those of --shapes, or the usual ones. What cannot run ends the program with a
    message."""
    if args.steps < least_steps or args.rounds < 1:
        parser.error(f"--steps must be at least {least_steps}, --rounds at least 1")
    names = args.shapes.split(",") if args.shapes else usual
    unknown = [n for n in names if n not in known]
    if unknown:
        parser.error(f"unknown shape {unknown[0]!r}, expected {', '.join(known)}")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch sees no GPU here (--mini --device cpu runs a tiny model on the CPU)")
    return names


def machine(args, **more):
    """What ran where, for the head of the output."""
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    return {"machine": name, "torch": torch.__version__, "esa": esa.__version__, "commit": base.commit(),
            "steps": args.steps, **more, "date": time.strftime("%Y-%m-%d", time.gmtime())}


def write(path, about, results):
    with open(path, "w", encoding="utf-8") as file:
        json.dump({**about, "shapes": results}, file, indent=1)


def run(names, known, args, run_shape, **more):
    """run_shape(name, shape, args) for each name. The JSON file is written after every shape, so a run that is stopped
    leaves what it has. `more` goes into its head."""
    about, results = machine(args, **more), []
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    for name in names:
        results.append(run_shape(name, known[name], args))
        gc.collect()                            # a model goes before the next one comes
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()
        if args.json:
            write(args.json, about, results)
    return results
