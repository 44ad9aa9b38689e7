#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares a fresh run of a part of tests/quality/results.csv with the committed file: check_quality.py ESA RESULTS.

The whole file is made by `esa bench quality --out tests/quality/results.csv`; a change of its numbers is a diff to
accept in a commit of its own. The data is the same everywhere, but kernel sets round differently, and where two blocks
are nearly equal the one or the other is kept. One such exchange moves at most the difference of two nearly equal
shares; MASS and ERROR allow about a dozen of them in a head of 60 x 60 blocks and are far below what a changed rule
or a wrong block does (0.05 and more)."""
import csv
import io
import subprocess
import sys

MASS = 0.004    # absolute, of the attention mass of a head
ERROR = 0.01    # relative to the committed error, plus FLOOR
FLOOR = 0.002   # absolute: errors are written with four digits and random parts of them are that small
SUBSET = ["--density", "0.3,0.1", "--order", "raster,tile3d"]
KEY = ("head", "selector", "order", "density_asked", "tail")


def table(text):
    return {tuple(row[name] for name in KEY): row for row in csv.DictReader(io.StringIO(text))}


def main():
    esa, path = sys.argv[1:3]
    with open(path, encoding="utf-8") as file:
        committed = table(file.read())
    fresh = table(subprocess.run([esa, "bench", "quality", *SUBSET], check=True, capture_output=True, text=True).stdout)
    bad = []
    if len(committed) != 4 * 4 * 4 * 4 * 3 or len(fresh) != 4 * 4 * 2 * 2 * 3:
        bad.append(f"{len(committed)} committed and {len(fresh)} fresh rows, expected 768 and 192")
    for key, row in fresh.items():
        old = committed.get(key)
        if old is None:
            bad.append(f"{key}: not in the committed file")
            continue
        # entropy budgets may move by a block in a head
        if abs(float(row["density"]) - float(old["density"])) > 0.002:
            bad.append(f"{key}: density {row['density']}, committed {old['density']}")
        if abs(float(row["kept_mass"]) - float(old["kept_mass"])) > MASS:
            bad.append(f"{key}: kept mass {row['kept_mass']}, committed {old['kept_mass']}")
        if abs(float(row["output_error"]) - float(old["output_error"])) > ERROR * float(old["output_error"]) + FLOOR:
            bad.append(f"{key}: output error {row['output_error']}, committed {old['output_error']}")
    # What the numbers must show whatever their digits: looking beats chance, and the tail helps where blocks were
    # skipped.
    for head in ("local", "temporal", "sink"):
        for selector in ("entropy", "rf_v2", "ada_bsa"):
            here = fresh[head, selector, "tile3d", "0.10", "none"]
            chance = fresh[head, "random", "tile3d", "0.10", "none"]
            tail = fresh[head, selector, "tile3d", "0.10", "pooled"]
            if not float(here["kept_mass"]) > float(chance["kept_mass"]) + 0.1:
                bad.append(f"{head}, {selector}: keeps {here['kept_mass']}, chance keeps {chance['kept_mass']}")
            if not float(tail["output_error"]) < float(here["output_error"]):
                bad.append(
                    f"{head}, {selector}: error {tail['output_error']} with the tail, {here['output_error']} without")
    print("\n".join(bad) or f"{len(fresh)} rows agree")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
