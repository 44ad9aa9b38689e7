# SPDX-License-Identifier: Apache-2.0
"""A whole experiment with a diffusers pipeline: calibrate, then make dense and sparse videos of prompts the masks have
not seen, and measure speed and quality.

    python -m esa.run_experiment --model wan-t2v-1.3b --height 720 --width 1280 --budget 0.5 --tag 1.3b-720p-b05

    results/<tag>/config.json            the settings; a later run must ask for the same
                  masks.safetensors      calibration (unless --masks names another file)
                  videos/<variant>/000.mp4 ..
                  speed.json, quality.json
                  work/                  until the end: a record and the frames of each finished video

Only the videos are made here. `esa experiment begin` writes or compares config.json and `esa experiment finish` writes
the results, so the files are those of `esa experiment run` (docs/schemas). What is there is not made again: a run that
was stopped goes on where it was."""
from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

from ..core.config import EsaConfig
from ..diffusers import parallel
from . import calibrate, native, program
from .program import BLOCK, Stop, say
from .prompts import BUILT_IN, built_in


def parser() -> program.Parser:
    from . import clips
    p = program.Parser("run_experiment", "Calibrates, generates, and measures speed and quality of one setting.")
    program.add_model(p)
    p.add_argument("--tag", required=True, metavar="NAME", help="name of the experiment and of its folder")
    p.add_argument("--budget", "--budgets", dest="budgets", type=program._shares, default=(0.5,), metavar="X[,X]",
                   help="kept fractions of key blocks (0.5)")
    program.add_size(p)
    p.add_argument("--prompts", metavar="FILE", help="calibration prompts, one per line")
    p.add_argument("--num-prompts", type=program._whole(1, BUILT_IN), metavar="N",
                   help="calibrate with the first N built-in prompts (5)")
    p.add_argument("--eval-prompts", default="3", metavar="N|FILE",
                   help="prompts of the videos: the built-in ones behind those of the calibration, or a file (3)")
    p.add_argument("--skip-calibrate", action="store_true", help="the mask file must be there already")
    p.add_argument("--masks", metavar="FILE", help="use this mask file instead of making one")
    p.add_argument("--results", default="results", metavar="DIR", help="where experiments are kept (results)")
    p.add_argument("--lpips", "--lpips-weights", metavar="FILE",
                   help="weights of LPIPS, as python -m esa.evaluate takes them")
    p.add_argument("--keep-frames", action="store_true", help="keep the frames as they were before compression (work/)")
    program.add_sparse(p)
    clips.add_tail(p)
    p.set_defaults(prompt=None, default_prompts=5)
    return p


class Experiment:
    """Settings worked out, and where its files are."""

    def __init__(self, args: argparse.Namespace, pipe: Any) -> None:
        from . import clips
        self.args, self.pipe = args, pipe
        self.folder = os.path.join(args.results, args.tag)
        self.masks = args.masks or self.path("masks.safetensors")
        self.settings = program.video_settings(args, pipe)
        self.calibration, self.evaluation = self._prompts()
        self.variants = [("dense", clips.Method("dense", None))] + [
            (f"b{budget:g}", clips.method_of(args, "cached", budget, masks=self.masks)) for budget in args.budgets
        ]

    def request(self, command: str) -> dict[str, Any]:
        """What `esa experiment begin` is told; docs/schemas/experiment-config.schema.json has the settings."""
        from ..diffusers.models import find_model
        args, s = self.args, self.settings
        name, config_hash = program.identity(self.pipe, args.model)
        block = args.block or BLOCK
        return {
            "tag": args.tag, "command": command, "model": find_model(args.model),
            "skip_calibrate": args.skip_calibrate, "settings": {
                "model": name, "config_hash": config_hash or "", "frames": s["num_frames"], "height": s["height"],
                "width": s["width"], "steps": s["num_inference_steps"], "seed": s["seed"],
                "guidance": s["guidance_scale"], "negative_prompt": s["negative_prompt"], "scheduler": "model",
                "flow_shift": 0.0, "methods": ["cached"], "budgets": list(args.budgets), "tail": args.tail,
                "order": args.order or "default", "window": [], "block": f"{block[0]}x{block[1]}",
                "samples": EsaConfig.samples, "cdf": 1.0, "refresh": 1, "step_map": "exact",
                "warmup": args.warmup_frac, "dense_first_layer": args.dense_first_layer, "dense_layers": [],
                "masks": args.masks, "calibration_prompts": self.calibration, "evaluation_prompts": self.evaluation,
                "lpips_net": None, "lpips_weights": args.lpips
            }
        }

    def path(self, *parts: str) -> str:
        return os.path.join(self.folder, *parts)

    def files(self, variant: str, number: int) -> tuple[str, str, str]:
        """Frames, video and record of one clip. The record is written last: it says that the others are there."""
        return (self.path("work", "frames", variant, f"{number:03d}.safetensors"),
                self.path("videos", variant, f"{number:03d}.mp4"),
                self.path("work", "clips", f"{variant}-{number:03d}.json"))

    def _prompts(self) -> tuple[list[str], list[str]]:
        args = self.args
        first = 0 if args.prompts else args.num_prompts or args.default_prompts
        seen = [] if args.masks or args.skip_calibrate else program.prompts_of(args)
        if not args.eval_prompts.isdigit():
            return seen, program.prompts_of(
                argparse.Namespace(prompt=None, prompts=args.eval_prompts, num_prompts=None, model=args.model))
        number = int(args.eval_prompts)
        if number < 1 or first + number > BUILT_IN:
            raise Stop(
                f"{first} prompts for calibration and {number} for the videos are not between 1 and the {BUILT_IN} "
                "built-in ones; give files (--prompts, --eval-prompts)")
        return seen, built_in(first + number, tiny=program.is_tiny(args.model))[first:]


# ---------------------------------------------------------------- stages

def make_masks(e: Experiment) -> None:
    """Calibrates, unless the masks are there, and notes how long it took and how many tokens there are."""
    from ..core.mask import MaskFile
    seconds = None
    if os.path.exists(e.masks):
        say(f"{e.masks}: there already")
    else:
        seconds = calibrate_now(e)
    note = e.path("work", "calibration.json")
    if parallel.rank() == 0 and not os.path.exists(note):
        program.write_json(note, {"seconds": seconds, "tokens": int(MaskFile(e.masks).info.Nq)})


def calibrate_now(e: Experiment) -> float:
    """Makes the mask file; the seconds it took."""
    args = e.args
    if args.skip_calibrate or args.masks:
        raise Stop(f"the mask file '{e.masks}' does not exist" +
                   ("; without --skip-calibrate it is made" if args.skip_calibrate else ""))
    begin = time.perf_counter()
    given = calibrate.parser().parse_args(["--output", e.masks])
    for key, value in vars(args).items():
        if hasattr(given, key) and key not in ("output", "budgets", "default_prompts"):
            setattr(given, key, value)
    given.budgets, given.pipe = args.budgets, e.pipe
    calibrate.calibrate(given)
    return time.perf_counter() - begin


def make_videos(e: Experiment) -> None:
    """Makes every video that is not there yet, variant by variant for each prompt, so that a slow machine's moods hit
    all variants alike."""
    from ..core.media import Frames
    from ..diffusers.models import model_of
    from . import clips
    fps = model_of(e.pipe, e.args.model).fps
    todo = [(i, prompt, name, method) for i, prompt in enumerate(e.evaluation) for name, method in e.variants
            if not all(map(os.path.exists, e.files(name, i)))]
    if todo:                                    # memory, caches and lazy loading are paid for before anything is timed
        short = {**e.settings, "num_inference_steps": 1}
        clips.make(e.pipe, todo[0][1], e.variants[0][1], e.args.model, short, decode=False)
    progress = program.Progress(len(todo), e.settings["num_inference_steps"])
    for i, prompt, name, method in todo:
        video, record = clips.make(e.pipe, prompt, method, e.args.model, e.settings, progress.callback(name))
        progress.done()
        if parallel.rank() == 0:
            frames = Frames.of(video, fps)
            tensor, movie, note = e.files(name, i)
            for path in (tensor, movie):
                program.make_folder(os.path.dirname(path))
                frames.save(path)
            program.write_json(note, {"index": i, "prompt": prompt, "file": os.path.relpath(movie, e.folder),
                                      "record": record})
        parallel.barrier()
        say(f"{name}, prompt {i + 1} of {len(e.evaluation)}: {program.clock(record['seconds'])}, "
            f"{clips.step_mean(record):.3f} s a step")


def experiment(args: argparse.Namespace, command: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+-]*", args.tag):
        raise Stop(
            f"--tag {args.tag!r} must consist of letters, digits and . _ + - and begin with a letter or digit: it "
            "names a folder",
            2)
    if args.masks and not os.path.exists(args.masks):
        raise Stop(f"the mask file '{args.masks}' does not exist")
    pipe = program.load(args)
    e = Experiment(args, pipe)
    if parallel.rank() == 0:
        program.write_json(e.path("work", "request.json"), e.request(command))
        native.run("experiment", "begin", e.folder)
    parallel.barrier()
    if not (os.path.exists(e.path("speed.json")) and os.path.exists(e.path("quality.json"))):
        if parallel.size() > 1 and not os.path.exists(e.masks):
            raise Stop(
                f"calibration is not part of a run on several GPUs: `python -m esa.calibrate --gpus {args.gpus} ... "
                f"--output {e.masks}` first, then this again")
        make_masks(e)
        make_videos(e)
    if parallel.rank() == 0:
        native.run("experiment", "finish", e.folder, *(["--keep-frames"] if args.keep_frames else []))
    parallel.barrier()


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser().parse_args(given)
    if not program.done_by_others(args, "run_experiment", given):
        experiment(args, shlex.join(["python", "-m", "esa.run_experiment", *given]))


