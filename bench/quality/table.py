#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tables of the study's results.

    bench/quality/table.py results.json [more.json ..] [--against WORDS] [--sort]

For every setting and every work: PSNR, its difference to the project's former default at the same work with the
standard error over the clips, SSIM, LPIPS (- without its weights), worst frame, flicker, and the work that was
realised."""
import argparse
import json
import math


def read(names):
    """Runs of several files, the last of equal ones."""
    runs = {}
    for name in names:
        with open(name) as f:
            for r in json.load(f)["runs"]:
                runs[r["label"], r["asked"], r.get("clips", "")] = r
    return list(runs.values())


def difference(r, base):
    """Mean of the paired differences in dB and its standard error."""
    x = [p - q for p, q in zip(r["psnrs"], base["psnrs"])]
    m = sum(x) / len(x)
    return m, math.sqrt(sum((y - m) ** 2 for y in x) / max(1, len(x) - 1) / len(x))


def mean(values):
    """None if one of the values was not measured."""
    return None if None in values else sum(values) / len(values)


def distance(records):
    """Text: mean LPIPS of runs or clips; - if it was not measured for all of them."""
    found = mean([r.get("lpips") for r in records])
    return "-" if found is None else f"{found:.4f}"


def signed(r, base):
    mean, error = difference(r, base)
    return f"{mean:+6.2f} ~{error:4.2f}"


def reference(runs, work, label="base"):
    """The former default at this work. Where its dense calls alone cost more, the same rule without dense calls."""
    for name in (label, "warm=0 l0=0"):
        for r in runs:
            if r["label"] == name and r["asked"] == work:
                return r
    return None


def table(runs, against="base", by_gain=False):
    out = []
    for work in sorted({r["asked"] for r in runs}, reverse=True):
        base = reference(runs, work, against)
        mine = [r for r in runs if r["asked"] == work]
        if by_gain:
            mine.sort(key=lambda r: -r["psnr"])
        out.append(f"\nwork {work:g}" + (f", against: {base['label']}" if base else ""))
        out.append(f"{'setting':92s} realised   PSNR   difference    SSIM  LPIPS   worst flicker  blocks  tail  scores"
                   "  order")
        for r in mine:
            diff = signed(r, base) if base else " " * 12
            p = r["parts"]
            out.append(f"{r['label']:92s} {r['work']:8.4f} {r['psnr']:6.2f} {diff} {r['ssim']:7.4f} "
                       f"{distance([r]):>6s} {r['psnr_min']:7.2f} {r['flicker']:7.3f} {p['exact']:7.4f} "
                       f"{p['tail']:.4f} {p['scores']:.4f} {p['order']:.4f}")
    return "\n".join(out)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("files", nargs="+")
    ap.add_argument("--against", default="base", help="setting that differences are taken to (its label)")
    ap.add_argument("--sort", action="store_true", help="best first, instead of the order of the runs")
    a = ap.parse_args()
    print(table(read(a.files), a.against, a.sort))


if __name__ == "__main__":
    main()
