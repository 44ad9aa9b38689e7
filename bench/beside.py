#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The engine beside compiled diffusers: seconds per forward at true shapes with random weights, in turns.

    PYTHONPATH=python ESA_LIB=build-cuda/libesa.so bench/beside.py --esa build-cuda/esa --shapes wan-1.3b-720p

A hot card is slower than a cold one, and no two cards are equal. So both sides run on one GPU in one command and take
turns: first diffusers dense and the engine dense in bf16, then diffusers with esa and the engine at the same budget
with each type of --linear. diffusers' blocks are compiled, one graph each, with cuDNN's attention. Before the first
dense turn, and again before the first sparse one, the processes start, compile and warm up one after the other. Each
keeps its model on the GPU until its last turn. A turn of diffusers is one forward, a turn of the engine is --steps
forwards. Medians count, and a ratio is our time over that of compiled diffusers. Layer 0 stays dense on both sides."""
import argparse
import json
import os
import statistics
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
                seconds = clock(lambda: model(**inputs))            # the first of a kind compiles
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


class Engine:
    """One setting of the engine: `esa bench model --turns` with as many rounds as there are turns."""

    def __init__(self, name, dense, linear, args):
        self.folder = tempfile.TemporaryDirectory(prefix="esa-beside-")
        self.json = os.path.join(self.folder.name, "out.json")
        words = [args.esa, "bench", "model", "--turns", "--rounds", str(args.rounds), "--steps", str(args.steps)]
        words += ["--no-decode", "--json", self.json, "--guidance", "1", "--dense-first-layer", "1", "--warmup", "0"]
        words += ["--mode", "dense"] if dense else ["--skip-dense", "--mode", "online", "--method", "entropy",
                                                    "--budgets", str(BUDGET)]
        words += args.engine.split() if args.engine else ["--random-weights", "--model", name, "--device", args.device,
                                                          "--linear", linear]
        self.words, self.errors = words, open(os.path.join(self.folder.name, "errors"), "w+", encoding="utf-8")
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
                                        text=True)
        self.wait()                                                 # it has made a dense step that does not count

    def wait(self):
        """Until it waits for its next turn, or begins its table after the last one."""
        if not self.process.stdout.readline():
            status = self.process.wait()
            self.errors.seek(0)
            last = self.errors.read().strip().splitlines() or [f"ended with status {status}"]
            sys.exit(f"beside.py: {' '.join(self.words)}: {last[-1]}")

    def turn(self):
        print(file=self.process.stdin, flush=True)
        self.wait()

    def close(self):
        """Seconds of a forward in each turn, the median of its steps."""
        self.process.communicate()
        with open(self.json, encoding="utf-8") as file:
            rounds = json.load(file)["rows"][0]["round"]
        self.errors.close()
        self.folder.cleanup()
        return [statistics.median(one["step_seconds"]) for one in rounds]


def measure(name, args):
    theirs = Diffusers(name, args)
    linear = args.linear.split(",")
    # HunyuanVideo does not run compiled with esa (diffusers_step.py): its sparse forwards stand beside dense ones.
    kinds = ["dense"] if "hunyuan" in name else ["dense", "esa"]
    found = {}
    for kind in kinds:
        ours = [("dense", "bf16")] if kind == "dense" else []
        ours += [("sparse", one) for one in linear] if kind == kinds[-1] else []
        theirs(kind)                                                # compiles
        engines = {key: Engine(name, key[0] == "dense", key[1], args) for key in ours}
        for _ in range(args.rounds):
            found.setdefault(("diffusers", kind), []).append(theirs(kind))
            for one in engines.values():
                one.turn()
        found.update({key: one.close() for key, one in engines.items()})
    theirs.close()
    seconds = {" ".join(key): statistics.median(values) for key, values in found.items()}
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
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (3)")
    parser.add_argument("--steps", type=int, default=3, help="forwards of one turn of the engine (3)")
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
    results = []
    for name in args.shapes.split(","):
        results.append(measure(name, args))
        if args.json:                               # after every shape: a run that is stopped leaves what it has
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump({"command": " ".join(sys.argv), "results": results}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    sys.exit(main())
