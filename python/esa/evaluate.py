# SPDX-License-Identifier: Apache-2.0
"""How near generated videos are to their references: PSNR, SSIM, LPIPS and flicker, per frame, per video, and in the
mean.

    python -m esa.evaluate --reference results/dense --generated results/sparse-0.5 --output
    results/sparse-0.5/metrics.json

Two videos, or two folders whose videos are paired by name without ending (000.safetensors with 000.mp4). A missing
partner, another number of frames or another size is an error that names both. Everything is measured by libesa_video,
as `esa evaluate` does. LPIPS needs its weights (--lpips-weights)."""
from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from . import program
from .media import Comparison, Frames, Lpips, compare, pairs
from .metrics import WITHOUT_WEIGHTS, find_lpips
from .program import say

MEASURES = ("psnr", "ssim", "lpips", "flicker")


def parser() -> program.Parser:
    p = program.Parser("evaluate", "Compares generated videos with their references.")
    p.add_argument("--reference", required=True, metavar="DIR|FILE", help="the videos to compare with, e.g. dense ones")
    p.add_argument("--generated", required=True, metavar="DIR|FILE", help="the videos in question")
    p.add_argument("--output", metavar="FILE", help="JSON file; may lie among the videos")
    p.add_argument("--lpips-weights", dest="lpips", metavar="FILE",
                   help="made once by tools/convert_lpips.py ($ESA_MODELS/lpips-alex.safetensors)")
    return p


def evaluate_pair(reference: str, generated: str, lpips: Lpips | None) -> Comparison:
    a, b = Frames.read(reference), Frames.read(generated)
    if a.shape != b.shape:
        def size(f: Frames) -> str:
            return f"{f.shape[0]} frames of {f.shape[2]} x {f.shape[1]}"
        raise program.Stop(f"'{reference}' has {size(a)}, '{generated}' has {size(b)}")
    return compare(a, b, lpips)


def figures(c: Comparison) -> dict[str, Any]:
    """Of one video, for JSON; PSNR of equal videos is null."""
    return {
        "psnr": c.psnr, "ssim": c.ssim, "lpips": c.lpips, "flicker": c.flicker, "psnr_min": c.psnr_min,
        "ssim_min": c.ssim_min, "lpips_max": c.lpips_max, "identical": c.identical
    }


def means(found: list[Comparison]) -> dict[str, float | None]:
    """Over videos; PSNR over those that differ from their reference."""
    out: dict[str, float | None] = {}
    for name in MEASURES:
        values = [getattr(c, name) for c in found if math.isfinite(getattr(c, name))]
        out[name] = statistics.fmean(values) if values else None
    return out


def evaluate(args: argparse.Namespace) -> None:
    found = pairs(args.reference, args.generated)
    lpips = find_lpips(args.lpips)
    results: list[Comparison] = []
    say(f"{'video':<24}{'PSNR':>10}{'SSIM':>9}{'LPIPS':>9}{'flicker':>9}")
    for stem, reference, generated in found:
        results.append(evaluate_pair(reference, generated, lpips))
        _row(stem, results[-1].psnr, results[-1].ssim, results[-1].lpips, results[-1].flicker)
    mean = means(results)
    if len(results) > 1:
        _row(
            "mean",
            *(math.inf
              if name == "psnr" and mean[name] is None else math.nan if mean[name] is None else float(mean[name] or 0)
              for name in MEASURES))
    if lpips is None:
        say(f"note: {WITHOUT_WEIGHTS}")
    if args.output:
        videos = [{"name": stem, "reference": reference, "generated": generated, **figures(c), "each": list(c.each)}
                  for (stem, reference, generated), c in zip(found, results)]
        program.write_json(
            args.output, {
                "reference": args.reference, "generated": args.generated, "lpips": lpips.net if lpips else None,
                "identical": sum(c.identical for c in results), "mean": mean, "videos": videos
            })


def _row(name: str, psnr: float, ssim: float, lpips: float, flicker: float) -> None:
    def text(value: float, form: str) -> str:
        return "-" if math.isnan(value) else "equal" if math.isinf(value) else format(value, form)
    say(f"{name:<24}{text(psnr, '.2f'):>10}{text(ssim, '.4f'):>9}{text(lpips, '.4f'):>9}{text(flicker, '.3f'):>9}")


def main(arguments: Sequence[str] | None = None) -> None:
    evaluate(parser().parse_args(list(sys.argv[1:] if arguments is None else arguments)))


if __name__ == "__main__":
    raise SystemExit(program.run("evaluate", main))
