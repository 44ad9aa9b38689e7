#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a whole denoising run through the engine on a GPU, at true shapes with random weights: the settings whose
runs through diffusers bench/diffusers_run.py timed.

    bench/diffusers_run.py --json run.json
    bench/engine_run.py --esa build-cuda/esa --from run.json --json engine.json

A short run of `esa bench model` at the density that the row of FILE had gives the seconds of a step of each kind: the
first step makes masks (with carry it is an anchor), the others keep them; both guidance branches. `run` multiplies them
out by how often the whole run has each kind, as diffusers_run.py counted. The decoder is left out on both sides."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

STEPS = 4


def short_run(args, shape, words):
    """Seconds of each step of a short run, and the most device memory it took."""
    with tempfile.TemporaryDirectory(prefix="esa-engine-run-") as folder:
        path = os.path.join(folder, "out.json")
        command = [args.esa, "bench", "model", "--random-weights", "--device", args.device, "--model", shape,
                   "--linear", args.linear, "--guidance", "5", "--steps", str(STEPS), "--rounds", "1", "--no-decode",
                   "--json", path]
        done = subprocess.run(command + words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"engine_run.py: {shape} {' '.join(words)}: {(done.stderr.strip().splitlines() or ['died'])[-1]}")
        with open(path, encoding="utf-8") as file:
            found = json.load(file)["rows"][0]["round"][0]
    return found["step_seconds"], found["peak_bytes"], found["kernel"]


def words_of(row):
    """Options of `esa bench model` for a row of diffusers_run.py."""
    words = ["--skip-dense", "--mode", "online", "--budgets", f"{row['density_asked']:.6f}"]
    if row["rule"] == "default":
        return words + ["--method", "error", "--carry", "1"]
    if row["rule"] == "default without carry":
        return words + ["--method", "error", "--carry", "off", "--refresh", "0", "--order-every", "0"]
    return None


def shape_rows(shape, source, args):
    steps = sum(next(r for r in source["rows"] if "steps" in r)["steps"].values())
    seconds, peak, kernel = short_run(args, shape, ["--mode", "dense"])
    dense = steps * statistics.median(seconds)
    print(f"\n{shape}: dense {dense:.1f} s for {steps} steps of two branches, {peak / 1e9:.1f} GB, {kernel}",
          flush=True)
    rows = [{"rule": "dense", "run_s": dense, "step_s": seconds, "memory": peak}]
    for row in source["rows"]:
        words = words_of(row) if "steps" in row else None
        if words is None or set(row["steps"]) - {"new masks", "kept masks"}:
            continue
        seconds, peak, kernel = short_run(args, shape, words)
        made, kept = seconds[0], statistics.median(seconds[1:])
        run = made * row["steps"].get("new masks", 0) + kept * row["steps"].get("kept masks", 0)
        label = f"{row.get('preset', 'work')} {row['asked']:g}, {row['rule']}"
        print(f"  {label}: run {run:.1f} s, {dense / run:.2f}x; steps: new masks {made:.3f}, kept {kept:.3f}; "
              f"{peak / 1e9:.1f} GB; {kernel}", flush=True)
        rows.append({"rule": row["rule"], "preset": row.get("preset"), "asked": row["asked"], "run_s": run,
                     "speedup": dense / run, "step_s": seconds, "steps": row["steps"], "memory": peak,
                     "kernel": kernel})
    return {"shape": shape, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--esa", default="build-cuda/esa", help="path of the command (build-cuda/esa)")
    parser.add_argument("--from", dest="source", required=True, metavar="FILE", help="JSON of bench/diffusers_run.py")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:1")
    parser.add_argument("--linear", default="bf16", help="type of the linear layers: bf16, fp8 or fp8-fast (bf16)")
    parser.add_argument("--json", metavar="FILE", help="everything measured, for machines")
    args = parser.parse_args()
    try:
        with open(args.source, encoding="utf-8") as file:
            source = json.load(file)
    except (OSError, json.JSONDecodeError) as error:
        parser.error(f"--from: {error}")
    about = {key: source.get(key) for key in ("machine", "steps")}
    about["commit"] = subprocess.run([args.esa, "--version"], capture_output=True, text=True).stdout.strip()
    print(", ".join(f"{k} {v}" for k, v in about.items()), flush=True)
    shapes = []
    for shape in source["shapes"]:
        shapes.append(shape_rows(shape["shape"], shape, args))
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump({**about, "shapes": shapes}, file, indent=1)


if __name__ == "__main__":
    main()
