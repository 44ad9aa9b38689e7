#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Seconds per forward of the engine on a GPU, at true shapes with random weights, one guidance branch.

    bench/engine.py --esa build-cuda/esa [--shapes wan-1.3b-480p,...] [--linear bf16,fp8] [--steps 4] [--out DIR]

Each shape and type is one run of `esa bench model --random-weights`: dense, and entropy online at budget 0.2 with
Hilbert order and pooled tail. Layer 0 stays dense, as in bench/diffusers_step.py; --all-sparse makes it sparse. The
median of the steps counts. The times by kind say where a forward spends it, and what the products reach."""
import argparse
import json
import os
import subprocess
import sys

# name: layers, width, hidden layer, tokens, square matrices of a token's attention
SHAPES = {
    "wan-1.3b-480p": (30, 1536, 8960, 32760, 6),
    "wan-1.3b-720p": (30, 1536, 8960, 75600, 6),
    "wan-14b-480p": (40, 5120, 13824, 32760, 6),
    "wan-14b-720p": (40, 5120, 13824, 75600, 6),
    "cogvideox-2b": (30, 1920, 7680, 17776, 4),
    "cogvideox-5b": (42, 3072, 12288, 17776, 4),
    "hunyuan-544p": (60, 3072, 12288, 67576, 4),
}
KINDS = ["products", "attention", "selection", "cross_attention", "other"]


def product_tflop(shape):
    layers, d, ffn, tokens, squares = SHAPES[shape]
    return 2e-12 * layers * tokens * (squares * d * d + 2 * d * ffn)


def run(args, shape, linear):
    path = os.path.join(args.out, f"{shape}-{linear}.json")
    command = [args.esa, "bench", "model", "--random-weights", "--device", "cuda", "--model", shape, "--linear", linear]
    command += ["--guidance", "1", "--steps", str(args.steps), "--rounds", "1", "--no-decode", "--mode", "online"]
    command += ["--method", "entropy", "--budgets", str(args.budget), "--warmup", "0"]
    command += ["--dense-first-layer", "0" if args.all_sparse else "1"]
    command += ["--frames", str(args.frames)] if args.frames else []
    done = subprocess.run(command + ["--json", path], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{shape} {linear}: {done.stderr.strip().splitlines()[-1]}", flush=True)
        return None
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--esa", default="build-cuda/esa")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--linear", default="bf16,fp8")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--all-sparse", action="store_true")
    parser.add_argument("--frames", type=int, default=0, help="0: those of the shape")
    parser.add_argument("--out", default="engine-bench", help="folder for the JSON of every run")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    failed = 0
    for shape in args.shapes.split(","):
        for linear in args.linear.split(","):
            data = run(args, shape, linear)
            if not data:
                failed += 1
                continue
            peak = max(row["round"][0].get("device_peak_bytes", 0) for row in data["rows"])
            print(f"{shape} {linear}: {data['tokens']} tokens, {peak / 2**30:.1f} GiB")
            for row in data["rows"]:
                record = row["round"][0]
                parts = {kind: 1e3 * record["work_seconds"][kind] / record["computed_steps"] for kind in KINDS}
                rate = product_tflop(shape) / parts["products"] * 1e3 if not args.frames else float("nan")
                print(f"  {row['mode']:7} density {row['density']:.3f}: {1e3 * row['step_seconds']['median']:8.1f} ms;",
                      ", ".join(f"{kind} {ms:.1f}" for kind, ms in parts.items()), f"ms; products {rate:.0f} TFLOP/s",
                      flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
