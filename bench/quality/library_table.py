#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tables of what library.py measured.

    bench/quality/library_table.py library.json [more.json ..] [--study study.json] [--engine video.csv] [--markdown]
    bench/quality/library_table.py library.json [more.json ..] --csv docs/results/quality-h200.csv

Every run with its work (asked and realised), PSNR, the difference to the former default at equal work with the standard
error of the paired differences over the clips, SSIM, LPIPS (- without its weights), worst frame, flicker and seconds.
--study adds the simulation's PSNR of the same setting, --engine the mean difference to the rows that `esa bench video`
has of the same clips. --no-seconds leaves out the times, for runs that shared a machine. --csv writes one row per clip
and no table."""
import argparse
import csv
import json
import math
import re

from library_runs import TODAY, TODAY_FREE, Run, values
from table import difference, distance

EQUAL = 0.015       # works that differ by less are compared with one another
COLUMNS = ("prompt", "seed", "psnr", "ssim", "lpips", "psnr_min", "flicker", "work_asked", "work", "density", "calls",
           "dense_calls", "masks_made", "fallback_calls", "seconds", "select_seconds", "attention_seconds", "kernel")


def read(names):
    """Runs of several files, the last of equal ones."""
    runs = {}
    for name in names:
        with open(name, encoding="utf-8") as f:
            for r in json.load(f)["runs"]:
                runs[r["words"], r["kind"]] = r
    return list(runs.values())


def write_csv(path, runs):
    """One row per clip."""
    with open(path, "w", encoding="utf-8", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(("kind", "name", "words", *COLUMNS))
        for r in runs:
            for clip in r["clips"]:
                row = (clip.get(name) for name in COLUMNS)      # lpips: None without its weights
                out.writerow((r["kind"], r["name"], re.sub(r"masks=\S*/", "masks=", r["words"]),
                              *(f"{x:.6g}" if isinstance(x, float) else x for x in row)))


def mean(r, name):
    found = [c[name] for c in r["clips"] if c[name] is not None]
    return sum(found) / len(found) if found else math.nan


def middle(r, name):
    found = sorted(c[name] for c in r["clips"])
    return found[len(found) // 2]


def asked(r):
    """The work that a run was asked for; without one, what it took."""
    return values(r["words"]).get("work") or round(mean(r, "work"), 2)


def paired(r, base):
    """Mean difference in dB over the clips that both have, and its standard error; None without common clips."""
    mine, theirs = ({(c["prompt"], c["seed"]): c["psnr"] for c in x["clips"]} for x in (r, base))
    both = [k for k in mine if k in theirs]
    if not both:
        return None
    return difference({"psnrs": [mine[k] for k in both]}, {"psnrs": [theirs[k] for k in both]})


def reference(runs, r):
    """The former default at the work of a run. Where its dense calls alone cost more, the same without dense calls."""
    for name in (TODAY, TODAY_FREE):
        near = [x for x in runs if x["name"] == name and x["kind"] == r["kind"]
                and abs(mean(x, "work") - mean(r, "work")) < EQUAL]
        if near:
            return min(near, key=lambda x: abs(mean(x, "work") - mean(r, "work")))
    return None


def simulated(r, study):
    """PSNR of the study's same setting at the same work, over its judged clips with the same steps and guidance."""
    label = Run(r["name"], r["words"], r.get("study", "")).label()
    for x in study:
        if x["label"] == label and abs(x["asked"] - asked(r)) < EQUAL and r["study_kind"] in x["clips"]:
            return x["psnr"]
    return None


def engine_rows(path):
    """{(prompt, seed, method, budget, tail, order): PSNR} of `esa bench video`."""
    with open(path, encoding="utf-8", newline="") as f:
        return {(int(x["prompt"]), int(x["seed"]), x["method"], x["budget"], x["tail"], x["order"]): float(x["psnr"])
                for x in csv.DictReader(f) if x["method"] != "dense"}


def engine(r, rows):
    """Mean difference in dB to the engine's clips and how many clips both have."""
    given = values(r["words"])
    spent = "work" in given
    budget = f"work {given['work']:.2f}" if spent else f"{given.get('budget', 0.5):.2f}"
    method = given.get("selector", "error" if spent else "entropy")
    error = method == "error"
    rest = (method, budget, given.get("tail", "levels" if error else "pooled"),
            given.get("order", "adaptive" if error else "hilbert"))
    found = [c["psnr"] - rows[key] for c, key in ((c, (c["prompt"], c["seed"], *rest)) for c in r["clips"])
             if key in rows]
    return (sum(found) / len(found), len(found)) if found else None


def table(runs, study=(), rows=None, markdown=False, seconds=True):
    """Text: one part per kind of clips."""
    heads = ["run", "asked", "work", "PSNR", "to today", "SSIM", "LPIPS", "worst", "flicker", "clips"]
    heads += ["s a clip"] if seconds else []
    heads += ["study"] if study else []
    heads += ["to engine"] if rows else []
    out = []
    for kind in dict.fromkeys(r["kind"] for r in runs):
        mine = [r for r in runs if r["kind"] == kind and r["clips"]]
        lines = []
        for r in mine:
            base = reference(mine, r)
            diff = paired(r, base) if base is not None and base is not r else None
            line = [r["name"], f"{asked(r):g}", f"{mean(r, 'work'):.4f}", f"{mean(r, 'psnr'):.2f}",
                    f"{diff[0]:+.2f} ±{diff[1]:.2f}" if diff else "", f"{mean(r, 'ssim'):.4f}", distance(r["clips"]),
                    f"{mean(r, 'psnr_min'):.2f}", f"{mean(r, 'flicker'):.3f}", str(len(r["clips"]))]
            line += [f"{middle(r, 'seconds'):.3f}"] if seconds else []
            if study:
                sim = simulated(r, study)
                line.append("" if sim is None else f"{sim:.2f}")
            if rows:
                off = engine(r, rows)
                line.append("" if off is None else f"{off[0]:+.2f} ({off[1]})")
            lines.append(line)
        out.append(f"\n{kind}\n")
        if markdown:
            out += ["| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *lines)]
        else:
            wide = [max(len(line[i]) for line in (heads, *lines)) for i in range(len(heads))]
            out += ["  ".join(x.ljust(w) if i == 0 else x.rjust(w) for i, (x, w) in enumerate(zip(line, wide)))
                    for line in (heads, *lines)]
    return "\n".join(out)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("files", nargs="+")
    ap.add_argument("--study", nargs="*", default=[], help="results of study.py")
    ap.add_argument("--engine", default="", help="table of `esa bench video` with the same prompts")
    ap.add_argument("--markdown", action="store_true")
    ap.add_argument("--no-seconds", action="store_true")
    ap.add_argument("--csv", default="", help="write the clips of all files, one row each")
    a = ap.parse_args()
    if a.csv:
        write_csv(a.csv, read(a.files))
        return
    engine_table = engine_rows(a.engine) if a.engine else None
    print(table(read(a.files), studies(a.study), engine_table, a.markdown, not a.no_seconds))


def studies(names):
    """Runs of the study's files."""
    out = []
    for name in names:
        with open(name, encoding="utf-8") as f:
            out += json.load(f)["runs"]
    return out


if __name__ == "__main__":
    main()
