#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The engine beside compiled diffusers: seconds per forward at true shapes with random weights, in turns.

    PYTHONPATH=python ESA_LIB=build-cuda/libesa.so bench/beside.py --esa build-cuda/esa --shapes wan-1.3b-720p

A hot card is slower than a cold one, and no two cards are equal. So both sides run on one GPU in one command, one after
the other, several times: diffusers dense and the engine dense, then diffusers with esa and the engine at the same
budget, in bf16 and with each --linear. diffusers' blocks are compiled, one graph each, with cuDNN's attention; its
process stays, so it compiles once. The engine runs `esa bench model` each time. Medians count, and a ratio is our time
over that of compiled diffusers. Layer 0 stays dense on both sides."""
import argparse
import json
import os
import subprocess
import sys
import tempfile

BUDGET = 0.2


def worker(args):
    """The process with the model of diffusers: reads "dense" or "esa" lines, answers with the seconds of a forward."""
    import torch

    import diffusers_step as step
    import esa
    gpu = args.device.startswith("cuda")
    shape = (step.MINIS if args.mini else step.SHAPES)[args.worker]
    clock, now, handle = step.Clock(gpu), None, None
    with torch.no_grad():
        model, inputs = step.build(shape, args.device, torch.bfloat16 if gpu else torch.float32)
        step.compile_blocks(model, shape.family)
        for line in sys.stdin:
            kind = line.strip()
            if kind != now and kind == "esa":
                config = esa.EsaConfig(budget=BUDGET, block=32 if args.mini else None, warmup_frac=step.WARMUP,
                                       tail="pooled")
                handle = esa.apply(model, config, steps=step.STEPS)
                handle.pin(step.STEPS - 1)
            elif kind != now and handle:
                handle.remove()
                handle = None
            with step.sdpa_backends(gpu)["cudnn" if gpu else "default"](), step.without_mask(model, shape.family):
                if kind != now:
                    model(**inputs)                                 # compiles
                seconds = clock(lambda: model(**inputs))
            now = kind
            print(json.dumps({"seconds": seconds}), file=args.answers, flush=True)
    return 0


class Diffusers:
    def __init__(self, name, args):
        words = [sys.executable, os.path.abspath(__file__), "--worker", name, "--device", args.device]
        self.process = subprocess.Popen(words + ["--mini"] * args.mini, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True)

    def __call__(self, kind):
        print(kind, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"beside.py: the process of diffusers ended with status {self.process.wait()}")
        return json.loads(answer)["seconds"]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def engine(args, name, dense, linear):
    """Seconds of one forward, the median of the steps."""
    with tempfile.TemporaryDirectory(prefix="esa-beside-") as folder:
        path = os.path.join(folder, "out.json")
        words = [args.esa, "bench", "model", "--rounds", "1", "--steps", str(args.steps), "--no-decode", "--json", path]
        words += ["--guidance", "1", "--dense-first-layer", "1", "--warmup", "0"]
        words += ["--mode", "dense"] if dense else ["--skip-dense", "--mode", "online", "--method", "entropy",
                                                    "--budgets", str(BUDGET)]
        words += args.engine.split() if args.engine else ["--random-weights", "--model", name, "--device", args.device,
                                                          "--linear", linear]
        done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"beside.py: {' '.join(words)}: {done.stderr.strip().splitlines()[-1]}")
        with open(path, encoding="utf-8") as file:
            return json.load(file)["rows"][0]["step_seconds"]["median"]


def median(values):
    return sorted(values)[len(values) // 2]


def measure(name, args):
    theirs = Diffusers(name, args)
    linear = args.linear.split(",")
    # HunyuanVideo does not run compiled with esa (diffusers_step.py): its sparse forwards stand beside dense ones.
    kinds = ["dense"] if "hunyuan" in name else ["dense", "esa"]
    found = {}

    def note(key, seconds):
        found.setdefault(key, []).append(seconds)
    for kind in kinds:
        for _ in range(args.rounds):
            note(("diffusers", kind), theirs(kind))
            if kind == "dense":
                note(("dense", "bf16"), engine(args, name, True, "bf16"))
            if kind == kinds[-1]:
                for one in linear:
                    note(("sparse", one), engine(args, name, False, one))
    theirs.close()
    seconds = {" ".join(key): median(values) for key, values in found.items()}
    print(f"\n{name}: " + ", ".join(f"{key} {value:.4f} s" for key, value in seconds.items()))
    for key, value in seconds.items():
        if key.startswith("diffusers"):
            continue
        other = f"diffusers {'dense' if key.startswith('dense') else kinds[-1]}"
        print(f"  {key:16s} {value / seconds[other]:.3f} of {other}", flush=True)
    return {"shape": name, "seconds": {" ".join(key): values for key, values in found.items()}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--esa", default="build-cuda/esa", help="the command (build-cuda/esa)")
    parser.add_argument("--shapes", default="wan-1.3b-480p", help="comma-separated, of bench/diffusers_step.py")
    parser.add_argument("--linear", default="bf16,fp8", help="types of the engine's sparse forwards (bf16,fp8)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind (3)")
    parser.add_argument("--steps", type=int, default=3, help="forwards of one run of the engine (3)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", metavar="FILE", help="every measured second")
    parser.add_argument("--mini", action="store_true", help="tiny models in diffusers, for trying it out")
    parser.add_argument("--engine", help="other options of `esa bench model` than those of the shape, with --mini")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        args.answers = os.fdopen(os.dup(1), "w")    # what libraries print must not look like an answer
        os.dup2(2, 1)
        return worker(args)
    results = [measure(name, args) for name in args.shapes.split(",")]
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"command": " ".join(sys.argv), "results": results}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    sys.exit(main())
