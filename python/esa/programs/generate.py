# SPDX-License-Identifier: Apache-2.0
"""Videos from a diffusers pipeline, dense or sparse, one file per prompt.

    python -m esa.generate --model wan-t2v-1.3b --method dense --output-dir results/dense
    python -m esa.generate --model wan-t2v-1.3b --method entropy --budget 0.5 --output-dir results/sparse-0.5
    python -m esa.generate --model wan-t2v-1.3b --preset balanced --output-dir results/balanced

Files are 000.safetensors, 001.safetensors, ...: one tensor `frames`, uint8 [frames, height, width, 3], every pixel as
it was made. `python -m esa.evaluate` and `esa evaluate` compare such folders, `python -m esa.export_mp4` makes MP4
of them; --format mp4 writes MP4 at once."""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from ..diffusers import parallel
from . import native, program
from .program import Stop, say


def parser() -> program.Parser:
    from . import clips
    p = program.Parser("generate", "Makes videos with a diffusers pipeline.")
    program.add_model(p)
    program.add_prompts(p, 1)
    clips.add_method(p)
    program.add_size(p)
    program.add_sparse(p)
    # The method error has other defaults than the original's methods: clips.method_of chooses.
    p.set_defaults(tail=None, warmup_frac=None, dense_first_layer=None)
    p.add_argument("--step-map", choices=("exact", "nearest"), default="exact",
                   help="cached: masks made for another number of steps (exact)")
    p.add_argument("--output-dir", metavar="DIR", help="folder of the videos; made if it is not there")
    p.add_argument("--out", metavar="FILE",
                   help="one video: .mp4, .y4m, .safetensors, .npy, or a folder of PNG (a name that ends in /)")
    p.add_argument("--format", choices=("safetensors", "mp4", "both"), default="safetensors",
                   help="format of the files in --output-dir (safetensors)")
    p.add_argument("--fps", type=float, metavar="X", help="frames per second of the files (the model's own)")
    p.add_argument("--json", metavar="FILE", help="write what was measured")
    return p


def targets(args: argparse.Namespace, number: int) -> list[list[str]]:
    """The files of each video."""
    if (args.out is None) == (args.output_dir is None):
        raise Stop("say where to: --output-dir DIR for a folder of videos, or --out FILE for one", 2)
    if args.out is not None:
        if number > 1:
            raise Stop(f"{number} prompts need --output-dir DIR, not --out", 2)
        return [[args.out]]
    endings = {"safetensors": [".safetensors"], "mp4": [".mp4"], "both": [".safetensors", ".mp4"]}[args.format]
    return [[os.path.join(args.output_dir, f"{i:03d}{ending}") for ending in endings] for i in range(number)]


def generate(args: argparse.Namespace) -> None:
    from ..core.media import Frames
    from ..diffusers.models import model_of
    from . import clips
    prompts = program.prompts_of(args)
    files = targets(args, len(prompts))
    method = clips.chosen_method(args, args.step_map)
    if args.masks and not os.path.exists(args.masks):
        raise Stop(f"the mask file '{args.masks}' does not exist")
    if args.output_dir is not None:
        program.make_folder(args.output_dir)
    pipe = program.load(args)
    settings = program.video_settings(args, pipe)
    fps = args.fps or model_of(pipe, args.model).fps
    progress = program.Progress(len(prompts), settings["num_inference_steps"])
    made: list[dict[str, Any]] = []
    for prompt, names in zip(prompts, files):
        video, record = clips.make(pipe, prompt, method, args.model, settings, progress.callback(method.name))
        progress.done()
        if parallel.rank() == 0:
            frames = Frames.of(video, fps)
            for name in names:
                frames.save(name, fps=fps)
        made.append({"prompt": prompt, "files": names, **record})
        count, height, width, _ = video.shape
        density = "" if record["density"] is None else f" at density {record['density']:.3f}"
        work = record["attention_work"]
        if density and work["realised"] is not None:
            density += f", attention work {work['realised']:.3f}"
            density += "" if work["asked"] is None else f" (asked {work['asked']:g})"
        say(f"{names[0]}: {count} frames of {width} x {height}, {settings['num_inference_steps']} steps, seed "
            f"{args.seed}, {method.name}{density}; "
            f"{program.clock(record['seconds'])} (text {record['text_seconds']:.1f}, denoising "
            f"{record['denoise_seconds']:.1f}, decoding {record['decode_seconds']:.1f})")
    if args.json and parallel.rank() == 0:
        program.write_json(
            args.json, {
                **native.about_machine(), "model": args.model, "method": method.name, "budget": method.budget,
                "settings": settings, "videos": made
            })


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser().parse_args(given)
    if not program.done_by_others(args, "generate", given):
        generate(args)


