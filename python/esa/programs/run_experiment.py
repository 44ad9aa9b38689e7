# SPDX-License-Identifier: Apache-2.0
"""A whole experiment with a diffusers pipeline: calibrate, then dense and sparse videos of prompts the masks have not
seen, speed and quality.

    python -m esa.run_experiment --model wan-t2v-1.3b --height 720 --width 1280 --budget 0.5 --tag 1.3b-720p-b05

    results/<tag>/config.json            the settings, written first; a later run must ask for the same
                  masks.safetensors      calibration (unless --masks names another file)
                  videos/<variant>/000.mp4 ..
                  speed.json, quality.json
                  work/                  until the end: a record per finished video, frames as they were before compression

The files are those of `esa experiment run` (docs/schemas), so `esa experiment collect` and `esa report` read them. What
is there is not made
again: a run that was stopped anywhere goes on where it was."""
from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from ..diffusers import parallel
from . import calibrate, program
from .program import Stop, say
from .prompts import BUILT_IN, built_in

_FORMAT = 1


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
    p.add_argument("--lpips-weights", dest="lpips", metavar="FILE",
                   help="for LPIPS, as python -m esa.evaluate takes them")
    p.add_argument("--keep-frames", action="store_true", help="keep the frames as they were before compression (work/)")
    program.add_sparse(p)
    clips.add_tail(p)
    p.set_defaults(prompt=None, default_prompts=5)
    return p


class Experiment:
    """Settings worked out, and where its files are."""

    def __init__(self, args: argparse.Namespace, pipe: Any, command: str) -> None:
        from ..compat.metrics import find_lpips
        from ..diffusers.models import find_model
        from . import clips
        self.args, self.pipe = args, pipe
        self.folder = os.path.join(args.results, args.tag)
        self.masks = args.masks or self.path("masks.safetensors")
        self.settings = program.video_settings(args, pipe)
        self.name, self.hash = program.identity(pipe, args.model)
        self.lpips = find_lpips(args.lpips)
        self.calibration, self.evaluation = self._prompts()
        step_map = "exact"
        self.variants = [("dense", clips.Method("dense", None))] + [
            (f"b{budget:g}", clips.method_of(args, "cached", budget, masks=self.masks, step_map=step_map))
            for budget in args.budgets
        ]
        s = self.settings
        block = args.block or (256, 128)
        self.config = {
            "format": _FORMAT, "tag": args.tag, "command": command, "machine": clips.machine(),
            "commit": clips.commit(), "settings": {
                "model": self.name, "config_hash": self.hash or "",
                "weights_hash": program.weights_hash(find_model(args.model)), "frames": s["num_frames"],
                "height": s["height"], "width": s["width"], "steps": s["num_inference_steps"], "seed": s["seed"],
                "guidance": s["guidance_scale"], "negative_prompt": s["negative_prompt"], "scheduler": "model",
                "flow_shift": 0.0, "methods": ["cached"], "budgets": list(args.budgets), "tail": args.tail,
                "order": args.order or "default", "window": [], "cdf": 1.0, "refresh": 1, "step_map": "exact", "lpips_net": None,
                "lpips_weights": args.lpips, "block": f"{block[0]}x{block[1]}", "samples": 4,
                "warmup": args.warmup_frac, "dense_first_layer": args.dense_first_layer, "dense_layers": [],
                "masks": args.masks, "calibration_prompts": self.calibration, "evaluation_prompts": self.evaluation
            }
        }

    def path(self, *parts: str) -> str:
        return os.path.join(self.folder, *parts)

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

    def begin(self) -> None:
        """Writes config.json, or compares with the one that is there."""
        path = self.path("config.json")
        if not os.path.exists(path):
            program.write_json(path, self.config)
            return
        there, here = program.read_json(path).get("settings", {}), program._plain(self.config["settings"])
        for key in here:
            if key == "calibration_prompts" and self.args.skip_calibrate:
                # masks that are there already: what they came from does not matter any more
                continue
            if key == "weights_hash" and there.get(key) != here[key]:
                if key not in there:
                    continue                    # begun by an esa that did not look
                raise Stop(
                    f"'{self.folder}' was begun with other weights than those the model has now: give another --tag, "
                    "or remove the folder")
            if there.get(key) != here[key]:
                raise Stop(
                    f"'{path}' says {key} is {there.get(key)!r}, now {here[key]!r} is asked for: another setting "
                    "needs another --tag")


# ---------------------------------------------------------------- stages

def make_masks(e: Experiment) -> float | None:
    """Calibration; seconds, or None where the masks were there."""
    args = e.args
    if os.path.exists(e.masks):
        say(f"{e.masks}: there already")
        return None
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
    """Every video that is not there yet, variant by variant for each prompt, so that a slow machine's moods hit all
    variants alike."""
    from ..core.media import Frames
    from ..diffusers.models import model_of
    from . import clips
    fps = model_of(e.pipe, e.args.model).fps
    todo = [
        (i, prompt, name, method) for i, prompt in enumerate(e.evaluation) for name, method in e.variants
        if not all(os.path.exists(e.path("work", f"{name}-{i:03d}{ending}")) for ending in (".safetensors", ".json"))
    ]
    if todo:                                    # memory, caches and lazy loading are paid for before anything is timed
        short = {**e.settings, "num_inference_steps": 1}
        clips.make(e.pipe, todo[0][1], e.variants[0][1], e.args.model, short, decode=False)
    progress = program.Progress(len(todo), e.settings["num_inference_steps"])
    for i, prompt, name, method in todo:
        video, record = clips.make(e.pipe, prompt, method, e.args.model, e.settings, progress.callback(name))
        progress.done()
        if parallel.rank() == 0:
            frames = Frames.of(video, fps)
            for folder in (e.path("work"), e.path("videos", name)):
                program.make_folder(folder)
            frames.save(e.path("work", f"{name}-{i:03d}.safetensors"))
            frames.save(e.path("videos", name, f"{i:03d}.mp4"))
            geometry = {"frames": video.shape[0], "height": video.shape[1], "width": video.shape[2]}
            program.write_json(e.path("work", f"{name}-{i:03d}.json"), {"record": record, "video": geometry})
        parallel.barrier()
        say(f"{name}, prompt {i + 1} of {len(e.evaluation)}: {program.clock(record['seconds'])}, "
            f"{clips.step_mean(record):.3f} s a step")


def _records(e: Experiment, name: str) -> list[dict[str, Any]]:
    return [program.read_json(e.path("work", f"{name}-{i:03d}.json"))["record"] for i in range(len(e.evaluation))]


def write_speed(e: Experiment, calibration_seconds: float | None) -> None:
    from ..core.mask import MaskFile
    from . import clips
    info = MaskFile(e.masks).info
    dense, variants = _records(e, "dense"), []
    for name, method in e.variants:
        found = dense if name == "dense" else _records(e, name)
        densities = [1.0 if r["density"] is None else r["density"] for r in found]
        variants.append({
            "name": name, "method": method.name, "budget": method.budget, "clips": len(found),
            "density": sum(densities) / len(densities), "clip_seconds": clips.spread(r["seconds"] for r in found),
            "step_seconds": clips.spread(clips.step_mean(r) for r in found),
            "step_seconds_sparse": clips.spread(clips.step_mean(r, warmup=r["warmup_steps"]) for r in found
                                                ), "select_seconds": clips.spread(r["select_seconds"] for r in found),
            "attention_seconds": clips.spread(r["attention_seconds"] for r in found),
            "speedup": None if name == "dense" else clips.speedup(dense, found, without_warmup=False),
            "speedup_without_warmup": None if name == "dense" else clips.speedup(dense, found, without_warmup=True),
            "videos": [{"index": i, "prompt": prompt, "file": f"videos/{name}/{i:03d}.mp4", "record": record}
                       for i, (prompt, record) in enumerate(zip(e.evaluation, found))]
        })
    c = e.config
    masks = e.masks if e.args.masks else "masks.safetensors"
    program.write_json(
        e.path("speed.json"), {
            "format": _FORMAT, "tag": e.args.tag, "machine": c["machine"], "commit": c["commit"], "model": e.name,
            **_size(e), "tokens": int(info.Nq), "calibration": {
                "file": masks, "bytes": os.path.getsize(e.masks), "prompts": int(info.prompts),
                "seconds": calibration_seconds
            }, "variants": variants
        })


def _size(e: Experiment) -> dict[str, int]:
    s = e.settings
    return {"frames": s["num_frames"], "height": s["height"], "width": s["width"], "steps": s["num_inference_steps"]}


def evaluate_pair(reference: str, generated: str, lpips: Any) -> Any:
    from ..core.media import Frames, compare
    return compare(Frames.read(reference), Frames.read(generated), lpips)


def means(found: list[Any]) -> dict[str, float | None]:
    """Over videos; PSNR over those that differ from their reference."""
    out: dict[str, float | None] = {}
    for name in ("psnr", "ssim", "lpips", "flicker"):
        values = [getattr(c, name) for c in found if math.isfinite(getattr(c, name))]
        out[name] = statistics.fmean(values) if values else None
    return out


def write_quality(e: Experiment) -> None:
    variants = []
    for name, method in e.variants:
        found = [
            evaluate_pair(e.path("work", f"dense-{i:03d}.safetensors"), e.path("work", f"{name}-{i:03d}.safetensors"),
                          e.lpips) for i in range(len(e.evaluation))
        ]
        records = _records(e, name)
        mean = means(found)
        mean["flicker"] = mean["flicker"] or 0.0                # one frame does not flicker
        masses = [r["kept_mass"] for r in records if r["kept_mass"] is not None]
        densities = [1.0 if r["density"] is None else r["density"] for r in records]
        variants.append({
            "name": name, "method": method.name, "budget": method.budget, "density": sum(densities) / len(densities),
            "kept_mass": min(1.0,
                             sum(masses) / len(masses)) if masses else None,
            "identical": sum(c.identical for c in found), "mean": mean, "videos": [{
                "index": i, "prompt": prompt, "file": f"videos/{name}/{i:03d}.mp4",
                "reference": f"videos/dense/{i:03d}.mp4", "identical": c.identical, "psnr": c.psnr, "ssim": c.ssim,
                "lpips": c.lpips, "flicker": c.flicker if c.flicker == c.flicker else 0.0, "psnr_min": c.psnr_min,
                "ssim_min": c.ssim_min
            } for i, (prompt, c) in enumerate(zip(e.evaluation, found))]
        })
    program.write_json(
        e.path("quality.json"), {
            "format": _FORMAT, "tag": e.args.tag, "model": e.name, "config_hash": e.hash or "",
            **_size(e), "lpips": e.lpips.net if e.lpips else None, "variants": variants
        })


def show(e: Experiment) -> None:
    speed, quality = program.read_json(e.path("speed.json")), program.read_json(e.path("quality.json"))

    def text(value: Any, form: str, nothing: str = "-") -> str:
        return nothing if value is None else format(value, form)
    say(f"{'variant':<10}{'density':>9}{'s/step':>10}{'speedup':>9}{'speedup*':>10}{'PSNR':>9}{'SSIM':>9}{'LPIPS':>9}")
    for s, q in zip(speed["variants"], quality["variants"]):
        say(f"{s['name']:<10}{s['density']:>9.3f}{text(s['step_seconds']['median'], '.3f'):>10}{text(s['speedup'], '.2f'):>9}"
            f"{text(s['speedup_without_warmup'], '.2f'):>10}{text(q['mean']['psnr'], '.2f', 'equal'):>9}{q['mean']['ssim']:>9.4f}"
            f"{text(q['mean']['lpips'], '.4f'):>9}")
    say("*: without the warm-up steps, which run dense")


def experiment(args: argparse.Namespace, command: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+-]*", args.tag):
        raise Stop(
            f"--tag {args.tag!r} must consist of letters, digits and . _ + - and begin with a letter or digit: it "
            "names a folder",
            2)
    if args.masks and not os.path.exists(args.masks):
        raise Stop(f"the mask file '{args.masks}' does not exist")
    pipe = program.load(args)
    e = Experiment(args, pipe, command)
    first = parallel.rank() == 0
    if first:
        program.make_folder(e.folder)
        e.begin()
    parallel.barrier()
    if os.path.exists(e.path("speed.json")) and os.path.exists(e.path("quality.json")):
        say(f"{e.folder}: finished already")
        if first:
            show(e)
        return
    if parallel.size() > 1 and not os.path.exists(e.masks):
        raise Stop(
            f"calibration is not part of a run on several GPUs: `python -m esa.calibrate --gpus {args.gpus} ... "
            f"--output {e.masks}` first, then this again")
    seconds = make_masks(e)
    make_videos(e)
    if first:
        write_speed(e, seconds)
        write_quality(e)
        show(e)
        if not args.keep_frames:
            for name in os.listdir(e.path("work")):
                if name.endswith(".safetensors"):
                    os.remove(e.path("work", name))
        say(f"{e.path('speed.json')}, {e.path('quality.json')}")
    parallel.barrier()


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser().parse_args(given)
    if not program.done_by_others(args, "run_experiment", given):
        experiment(args, shlex.join(["python", "-m", "esa.run_experiment", *given]))


