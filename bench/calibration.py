#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What masks from a few prompts are worth on prompts they have not seen, and what a cheaper calibration loses: the
tables of docs/quality.md.

    bench/calibration.py --esa build/esa --work /somewhere [-- options of the clips, e.g. --frames 17 --height
    64 --width 64]

Calibrates with 2 and with 8 prompts and in the cheaper ways, then makes clips of 5 other prompts: dense, online, and
cached with each mask file. PSNR and SSIM are against the dense clip of the same prompt and seed. Whatever is in --work
is not made again: it may be stopped and started. Standard library only."""
import argparse
import csv
import json
import math
import os
import subprocess
import sys

SEEN = [
    "a red ball rolls to the right over a blue floor",
    "a large yellow star spins in place over a purple background",
    "a white square moves to the left over a green striped background",
    "a small orange triangle moves up over a black background",
    "a large green ring grows over a white checkered background",
    "a blue cross bounces up and down over a yellow floor",
    "a purple ball moves in a circle over an orange gradient background",
    "a large black square shrinks over a red dotted background",
]
UNSEEN = [
    "a small white ball rolls to the left behind a large red triangle over a blue background",
    "a red star falls down and a small blue ring spins over a white background",
    "a yellow triangle swings from side to side over a black striped background",
    "a green cross moves to the right in front of a large orange ball over a purple floor",
    "a blue star bounces up and down over a green floor",
]
CHEAPER = [("samples1", "2 prompts, `--samples 1`", ["--samples", "1"]),
           ("groups2", "2 prompts, `--step-groups 2`", ["--step-groups", "2"]),
           ("half", "2 prompts, half the steps run (`--record-steps`)", None),
           ("quarter", "2 prompts, a quarter of the steps run", None)]


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--esa", default="build/esa")
    ap.add_argument("--work", required=True, help="folder for masks, clips and times; what is in it is not made again")
    ap.add_argument("--budgets", default="0.5,0.3")
    ap.add_argument("--tails", default="none,pooled")
    ap.add_argument("--part", choices=["prompts", "cheaper", "all"], default="all",
                    help="which of the two tables (all)")
    ap.add_argument("--steps", type=int, default=8)
    ap.add_argument("--threads", type=int, default=0)
    ap.add_argument("clip", nargs="*", help="further options of all clips, behind --")
    args = ap.parse_args()
    os.makedirs(args.work, exist_ok=True)

    def at(name):
        return os.path.join(args.work, name)

    budgets, tails = args.budgets.split(","), args.tails.split(",")
    common = [*args.clip, "--steps", str(args.steps), "--threads", str(args.threads)]

    def run(*words):
        print("+ esa", *words, file=sys.stderr, flush=True)
        subprocess.run([args.esa, *map(str, words)], check=True, stdout=subprocess.DEVNULL)

    def calibrate(name, prompts, more):
        with open(at(f"prompts-{prompts}.txt"), "w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in SEEN[:prompts])
        if not os.path.exists(at(name + ".json")):
            run("calibrate", *common, "--prompts", at(f"prompts-{prompts}.txt"), "--seed", 100, "--budgets",
                args.budgets, *more, "--output", at(name + ".safetensors"), "--json", at(name + ".json"))
        with open(at(name + ".json"), encoding="utf-8") as file:
            return json.load(file)

    with open(at("unseen.txt"), "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in UNSEEN)
    bench = [
        "bench", "video", *common, "--csv",
        at("clips.csv"), "--dense-dir",
        at("dense"), "--prompts",
        at("unseen.txt"), "--seeds", 7
    ]
    taken = {"two": calibrate("two", 2, []), "eight": calibrate("eight", 8, [])}
    both = ["two", "eight"]
    for tail in tails if args.part != "cheaper" else []:
        run(*bench, "--budget", args.budgets, "--tail", tail, "--method", "entropy")
        for name in both:
            run(*bench, "--budget", args.budgets, "--tail", tail, "--method", "cached", "--masks",
                at(name + ".safetensors"))
    shares = {"half": 2, "quarter": 4}
    for name, _, more in CHEAPER if args.part != "prompts" else []:
        taken[name] = calibrate(name, 2, more if more else ["--record-steps", str(max(1, args.steps // shares[name]))])
    for name in [*both, *(n for n, _, _ in CHEAPER)] if args.part != "prompts" else []:
        run(*bench, "--budget", budgets[0], "--tail", tails[0], "--method", "cached", "--masks",
            at(name + ".safetensors"))

    with open(at("clips.csv"), encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))

    def mean(method, budget, tail):
        found = [r for r in rows if r["method"] == method and float(r["budget"]) == float(budget) and r["tail"] == tail]
        psnr = [float(r["psnr"]) for r in found if math.isfinite(float(r["psnr"]))]
        return f"{sum(psnr) / len(psnr):.2f} dB | {sum(float(r['ssim']) for r in found) / len(found):.4f}"

    one = taken["two"]
    print(
        f"{one['model']}, {one['frames']} frames of {one['width']} x {one['height']}, {one['steps']} steps, "
        f"{one['tokens']} tokens; "
        f"{len(UNSEEN)} unseen prompts; {one['machine']['cpu']}, commit {one['commit']}")
    if args.part != "cheaper":
        print("\n| masks | tail |" + "".join(f" PSNR at {b} | SSIM |" for b in budgets))
        print("|---|---|" + "---|---|" * len(budgets))
        for tail in tails:
            for method, name in (("entropy", "online"), ("cached:two", "cached, 2 prompts"), ("cached:eight",
                                                                                              "cached, 8 prompts")):
                print(f"| {name} | {tail} |" + "".join(f" {mean(method, b, tail)} |" for b in budgets))
    if args.part != "prompts":
        print("\n| calibration | seconds a prompt | of which recording | file "
              f"| PSNR at {budgets[0]}, tail {tails[0]} | SSIM |")
        print("|---|---|---|---|---|---|")
        for name, title in [("two", "2 prompts, every step, 4 samples"), *((n, t) for n, t, _ in CHEAPER),
                            ("eight", "8 prompts, every step, 4 samples")]:
            t = taken[name]
            recording = t["record_seconds"] / max(1, t["prompts_recorded_now"])
            quality = mean("cached:" + name, budgets[0], tails[0])
            print(f"| {title} | {t['seconds_per_prompt']:.1f} | {recording:.2f} | {t['bytes'] / 1e6:.2f} MB "
                  f"| {quality} |")


if __name__ == "__main__":
    main()
