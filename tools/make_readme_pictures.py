#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the two pictures of README.md: docs/frames.png and docs/chart.png.

    pip install matplotlib pillow
    make command
    python3 tools/make_readme_pictures.py

frames.png shows frames of the clip of `make demo`: dense, and sparse with two presets. The script makes the clips with
build/esa (a minute or two), or takes them from --clips FOLDER if an earlier run left them there. chart.png shows
quality against the work of attention, from docs/results/quality-h200.csv, and speed against density, from
docs/results/diffusers-h200.md. --only chart leaves the frames as they are."""
import argparse
import collections
import csv
import io
import json
import pathlib
import re
import subprocess
import tempfile

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parents[1]
PRESETS = ("balanced", "fast")
FRAMES = (0, 6, 13, 19, 26, 32)
LARGEST = 200_000           # bytes of one picture
INK = "#1f2430"
SOFT = "#8a93a6"
COLOURS = ("#2458d3", "#d1495b", "#2a9d6f", "#b7791f")


def make_clips(esa, folder):
    """dense/, balanced/ and fast/ as folders of PNG, each sparse one with its figures in JSON."""
    for preset in PRESETS:
        sparse = folder / preset
        if (folder / f"{preset}.json").exists():
            continue
        subprocess.run([esa, "generate", "--preset", preset, "--compare", "dense", "--dense-out", f"{folder}/dense/",
                        "--out", f"{sparse}/", "--json", f"{sparse}.json"], check=True)


def save(figure, path):
    """As a PNG of 256 colours: the pictures have few, and the file is a third of the size."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=140, facecolor="white")
    plt.close(figure)
    Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    assert size < LARGEST, f"{path} has {size} bytes, more than {LARGEST}"
    print(f"{path.relative_to(ROOT)}: {size // 1000} KB")


def draw_frames(folder, path):
    rows = [("dense/", "dense", "100% work")]
    for preset in PRESETS:
        with open(folder / f"{preset}.json", encoding="utf-8") as file:
            video = json.load(file)["videos"][0]
        work = video["attention_work"]["realised"]
        rows.append((f"{preset}/", f"esa, {preset}", f"{work:.0%} work, {video['psnr']:.1f} dB"))
    height = 128 * 2 // 3                       # the ball rolls over the lower two thirds
    figure, axes = plt.subplots(len(rows), len(FRAMES), figsize=(9, 0.86 * len(rows) + 0.22))
    for (clip, title, remark), line in zip(rows, axes):
        for frame, axis in zip(FRAMES, line):
            axis.imshow(Image.open(folder / clip / f"{frame:05d}.png").crop((0, 128 - height, 128, 128)),
                        interpolation="lanczos")
            axis.set_xticks([])
            axis.set_yticks([])
            for side in axis.spines.values():
                side.set_visible(False)
        line[0].text(-0.12, 0.62, title, transform=line[0].transAxes, ha="right", va="center", fontsize=11,
                     fontweight="bold", color=INK)
        line[0].text(-0.12, 0.34, remark, transform=line[0].transAxes, ha="right", va="center", fontsize=8, color=INK)
    for frame, axis in zip(FRAMES, axes[-1]):
        axis.set_xlabel(f"frame {frame}", fontsize=8, color=INK, labelpad=3)
    figure.subplots_adjust(left=0.16, right=0.995, top=0.99, bottom=0.085, wspace=0.03, hspace=0.06)
    save(figure, path)


def quality(path, kind, settings):
    """[(mean work, mean PSNR)] of the settings of wan-tiny whose 16 clips are all there, by work."""
    found = collections.defaultdict(list)
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["kind"] == kind and re.fullmatch(settings, row["words"]):
                found[row["words"]].append((float(row["work"]), float(row["psnr"])))
    return sorted(tuple(sum(x) / 16 for x in zip(*clips)) for clips in found.values() if len(clips) == 16)


def speed(path):
    """{shape: {density: speedup}} of the rows "entropy online"."""
    found, shape = {}, None
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) < 6:
            continue
        shape = cells[0].split(",")[0] or shape
        asked = re.fullmatch(r"entropy online ([\d.]+)", cells[2])
        if asked:
            found.setdefault(shape, {1.0: 1.0})[float(asked.group(1))] = float(cells[5])
    return found


def style(axis, title, below="key blocks computed"):
    axis.set_title(title, fontsize=10.5, fontweight="bold", color=INK, loc="left", pad=8)
    axis.grid(axis="y", color="#e4e7ee", linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(SOFT)
    axis.tick_params(colors=INK, labelsize=9)
    axis.set_xlabel(below, fontsize=9, color=INK)


def draw_lines(axis, lines, where):
    """lines: (label, {density: value}, colour, style); where: densities from left to right."""
    for label, values, colour, dash in lines:
        points = [(where.index(density), value) for density, value in values.items() if density in where]
        points.sort()
        axis.plot([x for x, _ in points], [y for _, y in points], dash, color=colour, label=label, linewidth=2,
                  marker="o", markersize=5)
        yield points
    axis.set_xticks(range(len(where)), [f"{density:.0%}" for density in where])
    axis.set_xlim(-0.25, len(where) - 0.75)


def draw_chart(path):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
    measured = ROOT / "docs" / "results" / "quality-h200.csv"
    kind = "wan-tiny 8 steps guidance 2.5 33x128 f32 cuda judged"
    for label, settings, colour, dash, below in (
            ("default", r"work=[\d.]+ block=64", COLOURS[0], "-", 9),
            ("masks from a file", r"masks=2x1-p8-rows2.*", COLOURS[2], "-", -14),
            ("former default: entropy", r"budget=[\d.]+ block=64", SOFT, "--", -14)):
        points = quality(measured, kind, settings)
        left.plot([x for x, _ in points], [y for _, y in points], dash, color=colour, label=label, linewidth=2,
                  marker="o", markersize=5)
        for x, y in points:
            left.annotate(f"{y:.1f}", (x, y), xytext=(0, below), textcoords="offset points", ha="center", fontsize=8,
                          color=INK)
    left.set_xlim(0.22, 0.73)
    left.set_xticks([0.3, 0.4, 0.5, 0.6, 0.7], ["30%", "40%", "50%", "60%", "70%"])
    left.set_ylim(22, 60)
    left.set_ylabel("PSNR against dense, dB", fontsize=9, color=INK)
    left.legend(fontsize=8, frameon=False, loc="upper left")
    style(left, "Quality: wan-tiny, 16 clips", "attention work of the whole clip, dense = 100%")

    measured = speed(ROOT / "docs" / "results" / "diffusers-h200.md")
    names = {"wan-1.3b-720p": "Wan 1.3B 720p", "hunyuan-544p": "HunyuanVideo 544p", "wan-14b-720p": "Wan 14B 720p",
             "cogvideox-5b": "CogVideoX 5B"}
    lines = [(names[shape], measured[shape], colour, "-") for shape, colour in zip(names, COLOURS)]
    for points in draw_lines(right, lines, [1.0, 0.5, 0.2, 0.1]):
        x, y = points[-1]
        right.annotate(f"{y:.2f}x", (x, y), xytext=(7, -3), textcoords="offset points", fontsize=8.5, color=INK)
    right.set_ylim(0.9, 3.05)
    right.set_yticks([1, 1.5, 2, 2.5, 3])
    right.set_xlim(-0.2, 3.45)
    right.set_ylabel("speedup of a whole step", fontsize=9, color=INK)
    right.legend(fontsize=8.5, frameon=False, loc="upper left")
    style(right, "Speed: one H200, in diffusers")
    figure.tight_layout(w_pad=2.5)
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--esa", default=ROOT / "build" / "esa", help="the command (build/esa)")
    parser.add_argument("--clips", type=pathlib.Path, help="folder for the clips (a temporary one)")
    parser.add_argument("--only", choices=("frames", "chart"), help="make one of the pictures (both)")
    args = parser.parse_args()
    if args.only != "frames":
        draw_chart(ROOT / "docs" / "chart.png")
    if args.only == "chart":
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.clips or pathlib.Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        make_clips(args.esa, folder)
        draw_frames(folder, ROOT / "docs" / "frames.png")


if __name__ == "__main__":
    main()
