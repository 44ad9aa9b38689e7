# SPDX-License-Identifier: Apache-2.0
"""Calibration of a diffusers pipeline: dense runs over a few prompts, block importance (or with --method error, error
scores) recorded at every layer and step, masks for each budget or total work.

    python -m esa.calibrate --model wan-t2v-1.3b --num-prompts 5 --budgets 0.7,0.5,0.3 --output masks/wan-1.3b.pt

The mask file is the one `esa calibrate` writes, whatever its name, and serves cached mode here and in the native
engine. After each prompt the recording is saved beside it; started again with the same options the run goes on behind
the last finished prompt, with the same bits in the end. --shard i/n does every n-th prompt and leaves a recording for
`esa masks merge`; --gpus N does the same on N GPUs of this machine and merges by itself."""
from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

from ..diffusers import parallel
from . import program
from .program import BLOCK, Stop, say

_LEAST_LEFT = 1 << 28           # bytes that stay free on the disk


def parser() -> program.Parser:
    p = program.Parser("calibrate",
                       "Records which key blocks matter in a dense model and writes a mask file for cached mode.")
    program.add_model(p)
    program.add_size(p)
    program.add_prompts(p, 5)
    program.add_sparse(p)
    p.add_argument(
        "--budgets", type=program._shares, default=(0.7, 0.5, 0.3), metavar="X,X",
        help="prebuilt budgets (0.7,0.5,0.3); any other one is "
        "derived from the stored importance when it is asked for")
    p.add_argument("--method", choices=("entropy", "error"), default="entropy",
                   help="what is recorded: entropy (importance; masks per budget), error (error scores; masks for "
                   "total works, spread over layers and steps) (entropy)")
    p.add_argument("--work", type=program._shares, metavar="X,X",
                   help="--method error: attention works of a whole video as shares of dense, one set of masks each "
                   f"({','.join(f'{w:g}' for w in preset_works())})")
    p.add_argument("--weights", metavar="PLAN", help="--method error: work plan that says how much each layer and step "
                   "matters (all alike)")
    p.add_argument("--exact-rows", type=program._whole(0, 16), metavar="N",
                   help="--method error: queries of each block that are computed exactly and correct the others; the "
                   "work includes them (2)")
    p.add_argument("--score-groups", type=program._groups, metavar="QxK",
                   help="--method error: query x key tokens of a mean that is scored, 1, 2, 4, 8 or 16 each; smaller "
                   "is more exact and slower (8x4; from query blocks of 128 on: 16x4)")
    p.add_argument("--output", required=True, metavar="FILE", help="mask file to write; its folder is made")
    p.add_argument("--importance", choices=("u8", "f16", "none"), default="u8",
                   help="how importance is stored; none: only prebuilt budgets (u8)")
    p.add_argument("--step-groups", type=program._whole(1, 10000), metavar="N",
                   help="average steps in N groups: a smaller file (one per step)")
    p.add_argument("--samples", type=program._whole(1, 256), default=4, metavar="N",
                   help="queries scored per query block (4)")
    p.add_argument("--per-branch", action="store_true", help="keep the guidance branches apart")
    p.add_argument("--shard", metavar="i/n",
                   help="only prompts i, i + n, ... (i from 0); writes a recording instead of a mask file")
    return p


def preset_works() -> tuple[float, ...]:
    """The works of the presets."""
    from ..core import structs as T
    from ..core.library import load
    return tuple(load().c.esa_preset_work(number) for number in T.PRESETS.values())


def _shard(text: str | None) -> tuple[int, int]:
    if text is None:
        return (0, 1)
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count) <= 4096):
        raise Stop(f"--shard {text} is not i/n with i from 0 to n - 1, such as 0/4", 2)
    return (int(index), int(count))


def _block(args: argparse.Namespace) -> tuple[int, int] | None:
    """Block sizes of the options; None: the library's own, which depend on the number of tokens."""
    return args.block or (None if args.method == "error" else BLOCK)


def recording_size(layers: int, groups: int, heads: int, tokens: int, block: tuple[int, int], branches: int,
                   errors: bool = False) -> int:
    """Bytes of a recording's sums."""
    return (16 if errors else 4) * layers * groups * branches * heads * -(-tokens // block[0]) * -(-tokens // block[1])


class Checkpoint:
    """A recording beside the output and a note of which prompts are in it. The note names its recording; a recording
    without a fitting note is not used."""

    def __init__(self, output: str, key: dict[str, Any]) -> None:
        self.note, self.key = output + ".resume.json", key
        self.output, self.done = output, 0
        self.recording: str | None = None

    def load(self) -> None:
        if not os.path.exists(self.note):
            return
        note = program.read_json(self.note)
        if note.get("settings") != json.loads(json.dumps(self.key)):
            raise Stop(
                f"'{self.note}' belongs to a run with other settings: finish that one, or remove the file to begin anew"
            )
        if os.path.exists(note["recording"]):
            self.done, self.recording = int(note["done"]), note["recording"]

    def save(self, handle: Any, done: int) -> None:
        """Writes the new recording under its own name, then the note, then removes the old recording. Wherever it is
        killed, one pair is whole."""
        name = f"{self.output}.{done}.recording"
        handle.save_recording(name)
        program.write_json(self.note, {"settings": self.key, "done": done, "recording": name})
        if self.recording is not None and self.recording != name:
            os.remove(self.recording)
        self.done, self.recording = done, name

    def forget(self) -> None:
        for path in (self.note, self.recording):
            if path is not None and os.path.exists(path):
                os.remove(path)


def record(args: argparse.Namespace, pipe: Any, jobs: list[tuple[int, str]], settings: dict[str, Any],
           output: str) -> tuple[str, Checkpoint]:
    """Runs the prompts, given with their numbers, dense and returns the recording with its checkpoint. The noise of a
    prompt belongs to its number, so that shards record what one run would."""
    from ..core.config import EsaConfig
    from ..diffusers.apply_model import apply
    from ..diffusers.models import generate_video
    from ..diffusers.run import Recording
    name, config_hash = program.identity(pipe, args.model)
    key = {
        "model": name, "config_hash": config_hash, "prompts": jobs, "samples": args.samples,
        "block": _block(args), "order": args.order, "step_groups": args.step_groups or 0,
        "per_branch": args.per_branch, **({"method": "error"} if args.method == "error" else {}),
        **({"score_groups": args.score_groups} if args.score_groups else {}), **settings
    }
    checkpoint = Checkpoint(output, key)
    checkpoint.load()
    if checkpoint.done:
        say(f"{checkpoint.done} of {len(jobs)} prompts are recorded already")
    if checkpoint.done == len(jobs):
        return checkpoint.recording or "", checkpoint
    if args.method == "error":
        config = EsaConfig(selector="error", block=_block(args), order=args.order, groups=args.score_groups)
    else:
        config = EsaConfig(selector="entropy", block=_block(args), samples=args.samples,
                           order=args.order or "raster")
    progress = program.Progress(len(jobs) - checkpoint.done, settings["num_inference_steps"])
    begin = time.perf_counter()
    with apply(pipe, config, record=Recording(args.step_groups or 0, args.per_branch), resume=checkpoint.recording,
               model=name, config_hash=config_hash) as handle:
        for i, (number, prompt) in enumerate(jobs[checkpoint.done:], checkpoint.done):
            watch = program.both(_disk_check(args, handle, output), progress.callback("calibrate"))
            generate_video(pipe, prompt, args.model, callback_on_step_end=watch,
                           **{**settings, "seed": settings["seed"] + number})
            progress.done()
            checkpoint.save(handle, i + 1)
            left = (time.perf_counter() - begin) / progress.video * (len(jobs) - i - 1)
            say(f"prompt {i + 1} of {len(jobs)} recorded" +
                (f", {program.clock(left)} left" if i + 1 < len(jobs) else ""))
    return checkpoint.recording or "", checkpoint


def _disk_check(args: argparse.Namespace, handle: Any, output: str) -> Any:
    """A callback for the first step, after which the model's shape is known: prints how much will be written, and stops
    if the disk has no room for it."""
    from ..core.context import shared_context
    from ..core.plan import own_blocks
    told = False

    def on_step_end(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        nonlocal told
        run = handle._run
        if not told and run.geometry is not None and handle.videos == 1 and step == 0:
            told = True
            heads, errors = run.transformers[0].config.num_attention_heads, args.method == "error"
            block = _block(args) or own_blocks(shared_context(), args.method, run.geometry.tokens)
            size = recording_size(run.layers, args.step_groups or run.steps, heads, run.geometry.tokens, block,
                                  2 if args.per_branch else 1, errors)
            # masks of a work have 2 bits per block, the recording has 16 bytes
            masks = (0.02 * len(args.work or preset_works()) if errors else
                     {"u8": 0.35, "f16": 0.6, "none": 0.05}[args.importance])
            need = 2 * size + int(size * masks)
            folder = os.path.dirname(os.path.abspath(output))
            free = shutil.disk_usage(folder).free
            say(f"{run.layers} layers, {heads} heads, {run.geometry.tokens} tokens: up to {need / 1e6:.0f} MB on disk "
                "while it runs")
            if need + _LEAST_LEFT > free:
                raise Stop(
                    f"{need / 1e9:.1f} GB are needed in '{folder}', {free / 1e9:.1f} GB are free; --step-groups makes "
                    "it less")
        return kwargs
    return on_step_end


def calibrate(args: argparse.Namespace) -> None:
    from ..core.mask import build_mask_file
    if args.method != "error" and (args.work or args.weights or args.exact_rows is not None or args.score_groups):
        raise Stop("--work, --weights, --exact-rows and --score-groups go with --method error", 2)
    shard, shards = _shard(args.shard)
    prompts = program.prompts_of(args)
    own = list(range(shard, len(prompts), shards))
    member, members = (parallel.rank(), parallel.size()) if parallel.size() > 1 else (0, 1)
    if member == 0:
        program.make_folder(os.path.dirname(os.path.abspath(args.output)))
    if os.path.isdir(args.output):
        raise Stop(f"'{args.output}' is a folder, --output names a file")
    mine = [(i, prompts[i]) for i in own[member::members]]
    if not mine:
        raise Stop(f"{len(own)} prompts cannot be shared by {members} GPUs" if members > 1 else
                   f"--shard {args.shard} of {len(prompts)} prompts is empty")
    # run_experiment has loaded it already
    pipe = getattr(args, "pipe", None) or program.load(args, ulysses=False)
    settings = program.video_settings(args, pipe)
    if args.step_groups and args.step_groups > settings["num_inference_steps"]:
        raise Stop(f"--step-groups {args.step_groups} is more than the {settings['num_inference_steps']} steps", 2)
    begin = time.perf_counter()
    name = args.output if members == 1 else f"{args.output}.{member}of{members}"
    recording, checkpoint = record(args, pipe, mine, settings, name)
    if members > 1:
        parallel.join(pipe.transformer.device)
        parallel.barrier()
    if member == 0:
        found = [recording
                 ] if members == 1 else [_recording_of(f"{args.output}.{i}of{members}") for i in range(members)]
        if args.shard is not None:
            _merge(args.output, found)
            say(f"{args.output}: recording of prompts {', '.join(str(i) for i in own)}; `esa masks merge` makes a "
                "mask file of all shards")
        else:
            errors = args.method == "error"
            amounts = (args.work or preset_works()) if errors else args.budgets
            if errors:
                build_mask_file(args.output, list(found), works=amounts, plan=args.weights,
                                exact_rows=args.exact_rows)
            else:
                build_mask_file(args.output, list(found), budgets=amounts, importance=args.importance,
                                dense_first_layer=args.dense_first_layer, warmup_frac=args.warmup_frac)
            say(f"{args.output}: masks for {'works' if errors else 'budgets'} "
                f"{', '.join(f'{b:g}' for b in amounts)} from {len(own)} "
                f"prompt{'s' if len(own) > 1 else ''}, "
                f"{os.path.getsize(args.output) / 1e6:.1f} MB; {program.clock(time.perf_counter() - begin)}")
    parallel.barrier()
    checkpoint.forget()


def _recording_of(output: str) -> str:
    return str(program.read_json(output + ".resume.json")["recording"])


def _merge(output: str, recordings: list[str]) -> None:
    import ctypes

    from ..core.context import shared_context
    from ..core.library import load
    context = shared_context()
    paths = (ctypes.c_char_p * len(recordings))(*(os.fsencode(r) for r in recordings))
    context.run(load().c.esa_recording_merge, context.ptr, os.fsencode(output), paths, len(recordings))


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser().parse_args(given)
    if not program.done_by_others(args, "calibrate", given):
        calibrate(args)


