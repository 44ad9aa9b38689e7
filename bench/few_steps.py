#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What is worth doing in runs of few steps: PSNR against the dense clip at equal work, by esa.apply on wan-tiny.

    bench/few_steps.py --clips 4 --steps 4 8                one call per step, as distilled models run
    bench/few_steps.py --guidance 2.5 --json few.json

Each row is one way to spend the same work: sparse at all steps alike, with the first step dense, or with carry.
wan-tiny is no distilled model: the rows say how errors of attention weigh in few steps, not how good a distilled clip is."""
import argparse
import json
import math
import pathlib
import statistics
import sys
import warnings

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python")]
import torch  # noqa: E402

import esa  # noqa: E402
from esa.models import load_pipeline  # noqa: E402


def prompts(count):
    lines = (ROOT / "python" / "esa" / "programs" / "prompts_tiny.txt").read_text().splitlines()
    found = [line for line in lines if line and not line.startswith("#")]
    return [found[i % len(found)] for i in range(count)]


def ways(steps):
    """Settings by name; work is added to each."""
    first = 1.0 / steps                 # share of the steps that is one step
    return {"as the library has it": {}, "carry off": {"carry": "off"},
            "first step dense": {"carry": "off", "warmup_frac": first},
            "first two dense": {"carry": "off", "warmup_frac": 2 * first},
            "one anchor": {"carry": 1}, "two anchors": {"carry": 2}, "masks made once": {"refresh_every": 0,
                                                                                        "order_every": 0}}


def clip(pipe, prompt, seed, args, steps):
    return torch.from_numpy(pipe(
        prompt=prompt, num_frames=33, height=args.size, width=args.size, num_inference_steps=steps,
        guidance_scale=args.guidance, output_type="np", generator=torch.Generator().manual_seed(seed)).frames[0])


def psnr(a, b):
    return -10 * math.log10(max(1e-12, (a.double() - b.double()).square().mean().item()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clips", type=int, default=4, help="clips per row (4)")
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 8], help="numbers of steps (4 8)")
    parser.add_argument("--work", type=float, nargs="+", default=[0.57, 0.44], help="works (0.57 0.44)")
    parser.add_argument("--size", type=int, default=128, help="height and width in pixels (128)")
    parser.add_argument("--guidance", type=float, default=1.0, help="1: one call per step (1)")
    parser.add_argument("--json", help="writes the rows there, too")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    pipe = load_pipeline("wan-tiny", device="cpu")
    pipe.set_progress_bar_config(disable=True)
    rows = []
    for steps in args.steps:
        dense = [clip(pipe, p, i, args, steps) for i, p in enumerate(prompts(args.clips))]
        for work in args.work:
            for name, settings in ways(steps).items():
                found = []
                try:
                    with esa.apply(pipe, esa.EsaConfig(work=work, **settings)) as handle:
                        for i, prompt in enumerate(prompts(args.clips)):
                            value = psnr(clip(pipe, prompt, i, args, steps), dense[i])
                            found.append((value, handle.stats().work))
                except esa.EsaError as error:
                    print(f"{steps} steps, work {work}: {name}: {error}")
                    continue
                values, spent = zip(*found)
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                rows.append({"steps": steps, "work": work, "way": name, "psnr": statistics.mean(values),
                             "spread": spread, "spent": statistics.mean(spent)})
                print(f"{steps} steps, work {work}: {name:22} {statistics.mean(values):5.1f} dB +- {spread:.1f}, "
                      f"{statistics.mean(spent):.3f} spent", flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
