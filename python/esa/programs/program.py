# SPDX-License-Identifier: Apache-2.0
"""What the programs (`python -m esa.calibrate` and its siblings) share: options, prompts, the pipeline, progress,
files, exit statuses.

A program ends with 0, or with one message on standard error and 1 (2 for wrong options, 130 after Ctrl-C). Files
appear whole or not at all."""
from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..compat import K_BLOCK, Q_BLOCK
from ..core.config import EsaConfig
from ..core.files import read_text, write_file
from ..core.library import EsaError
from ..core.structs import ORDERS, carry, groups
from .prompts import BUILT_IN, built_in

BLOCK = (Q_BLOCK, K_BLOCK)          # of the programs that the original has
DTYPES = ("auto", "float32", "bfloat16", "float16")
LONGEST_PROMPTS = 1 << 24           # bytes of a file of prompts, as in cli/clip/prompts.c


class Stop(Exception):
    """Ends a program with a message and an exit status; an empty message prints nothing."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class Parser(argparse.ArgumentParser):
    """argparse with one message for what is wrong, and no abbreviated options (a typo must not become another
    option)."""

    def __init__(self, name: str, about: str) -> None:
        super().__init__(prog=f"python -m esa.{name}", description=about, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message}; --help lists the options\n")
        raise SystemExit(2)


def run(name: str, main: Callable[[Sequence[str] | None], None], arguments: Sequence[str] | None = None) -> int:
    """Runs a program's main and returns its exit status; what users can get wrong becomes one message."""
    from ..diffusers import parallel
    try:
        main(arguments)
    except Stop as stop:
        if str(stop):
            sys.stderr.write(f"esa.{name}: {stop}\n")
        return stop.status
    except KeyboardInterrupt:
        sys.stderr.write(f"\nesa.{name}: interrupted; what was finished is on disk\n")
        return 130
    except (EsaError, ValueError, TypeError, OSError, ImportError) as error:
        if os.environ.get("ESA_TRACEBACK"):
            raise
        sys.stderr.write(f"esa.{name}: {' '.join(str(error).split())}\n")
        return 1
    finally:
        parallel.finish()
    return 0


def done_by_others(args: argparse.Namespace, name: str, arguments: Sequence[str]) -> bool:
    """With --gpus N: starts the processes and waits for them. False if this process has to do the work."""
    from ..diffusers import parallel
    status = parallel.launch(args.gpus, args.device, f"esa.{name}", arguments)
    if status:
        raise Stop("", status)              # the process that failed has said why
    return status is not None


# ---------------------------------------------------------------- options

def _whole(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value
    return read


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _shares(text: str) -> tuple[float, ...]:
    values = tuple(_share(part.strip()) for part in text.split(",") if part.strip())
    if not values:
        raise argparse.ArgumentTypeError("a list of budgets such as 0.7,0.5,0.3 is expected")
    if len({round(1000 * v) for v in values}) != len(values):
        raise argparse.ArgumentTypeError(f"{text} names a budget twice (budgets are told apart by whole per mille)")
    return values


def _block(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    try:
        sizes = tuple(int(p) for p in parts)
    except ValueError:
        sizes = ()
    if len(sizes) != 2 or any(s < 16 or s > 256 or s % 16 for s in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not two multiples of 16 between 16 and 256, such as 256x128")
    return (sizes[0], sizes[1])


def _groups(text: str) -> tuple[int, int]:
    try:
        return groups(int(part) for part in text.lower().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not two of 1, 2, 4, 8, 16 with an x between them, such as 8x4") from None


def _carry(text: str) -> Any:
    try:
        return carry(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither auto, off, a number of anchors, nor their steps in ascending order, such as "
            "0,5,10,18") from None


def add_model(parser: argparse.ArgumentParser, default: str | None = "wan-t2v-1.3b") -> None:
    """--model, and options that say where and how it runs."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", default=default, metavar="NAME|FOLDER",
        help=f"wan-t2v-1.3b, wan-t2v-14b, cogvideox-5b, hunyuan-video, wan-tiny, or a diffusers folder ({default})")
    group.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 (the GPU if there is one)")
    group.add_argument("--dtype", choices=DTYPES, default="auto",
                       help="dtype of the weights (bfloat16 on a GPU, float32 on the CPU)")
    group.add_argument("--cpu-offload", action="store_true",
                       help="parts wait in main memory and visit the GPU in turn (14B on one GPU)")
    group.add_argument("--gpus", type=_whole(1, 64), default=1, metavar="N", help="share the work among N GPUs (1)")
    group.add_argument("--download", action="store_true",
                       help="let the hub be asked for a model that is not there; nothing else uses the network")


def add_size(parser: argparse.ArgumentParser) -> None:
    """Size, steps, guidance and seed of the video. The defaults are the model's own."""
    group = parser.add_argument_group("video")
    for name in ("--height", "--width"):
        group.add_argument(name, type=_whole(1, 16384), metavar="N", help="pixels (the model's own)")
    group.add_argument("--frames", "--num-frames", dest="frames", type=_whole(1, 100000), metavar="N",
                       help="frames of the video (the model's own)")
    group.add_argument("--steps", type=_whole(1, 10000), metavar="N",
                       help="denoising steps (the model's own, 50 for the four large ones)")
    group.add_argument("--guidance", type=float, metavar="X", help="guidance scale (the model's own)")
    group.add_argument("--negative-prompt", metavar="TEXT", help="what to keep away from")
    group.add_argument("--seed", type=_whole(0, 2 ** 63 - 1), default=0, metavar="N", help="seed of the noise (0)")


def add_prompts(parser: argparse.ArgumentParser, number: int) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompt", metavar="TEXT", help="one prompt")
    group.add_argument("--prompts", metavar="FILE",
                       help="one prompt per line; empty lines and lines that begin with # do not count")
    group.add_argument("--num-prompts", type=_whole(1, BUILT_IN), metavar="N",
                       help=f"the first N built-in prompts ({number})")
    parser.set_defaults(default_prompts=number)


def add_sparse(parser: argparse.ArgumentParser) -> None:
    """Settings of sparse attention that mean the same in every program."""
    group = parser.add_argument_group("sparse attention")
    group.add_argument("--warmup-frac", type=_share, default=EsaConfig(selector="entropy").warmup_frac, metavar="X",
                       help=f"first share of the steps that runs dense ({EsaConfig(selector='entropy').warmup_frac:g})")
    group.add_argument("--order", choices=tuple(order for order in ORDERS if order != "tile3d"),
                       help="order of the tokens that blocks are cut from (raster, as the original; rf_v2: tile; a "
                       "mask file brings its own)")
    group.add_argument("--no-dense-first-layer", dest="dense_first_layer", action="store_false",
                       help="layer 0 may run sparse too")
    group.add_argument("--block", type=_block, metavar="QxK",
                       help="tokens of a query and of a key block (256x128; rf_v2, ada_bsa: 128x128; error: 64x64 up "
                       "to 8192 tokens, else 128x128)")


# ---------------------------------------------------------------- prompts

def prompts_of(args: argparse.Namespace) -> list[str]:
    """The prompts of the options."""
    if sum(x is not None for x in (args.prompt, args.prompts, args.num_prompts)) > 1:
        raise Stop("--prompt, --prompts and --num-prompts are three ways to say one thing; give one", 2)
    if args.prompt is not None:
        return [args.prompt]
    if args.prompts is not None:
        with open(args.prompts, "rb") as file:                     # may be a pipe
            text = file.read(LONGEST_PROMPTS + 1)
        if len(text) > LONGEST_PROMPTS:
            raise Stop(f"'{args.prompts}' is longer than {LONGEST_PROMPTS >> 20} MB and is not a file of prompts")
        lines = [line.strip() for line in text.decode("utf-8").splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise Stop(f"'{args.prompts}' holds no prompt")
        return found
    return built_in(args.num_prompts or args.default_prompts, tiny=is_tiny(args.model))


def is_tiny(model: str) -> bool:
    return os.path.basename(os.path.normpath(model)) == "wan-tiny"


# ---------------------------------------------------------------- pipelines

def load(args: argparse.Namespace, *, ulysses: bool = True) -> Any:
    """The pipeline of --model on its device; with --gpus N and ulysses, this process's share of it."""
    import torch
    from diffusers.utils import logging

    from ..diffusers import parallel
    from ..diffusers.models import load_pipeline
    logging.disable_progress_bar()
    with contextlib.suppress(ImportError):
        from transformers.utils import logging as others
        others.disable_progress_bar()
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    if args.cpu_offload and not torch.cuda.is_available():
        say("--cpu-offload: there is no GPU here, everything runs on the CPU anyway")
    pipe = load_pipeline(args.model, torch_dtype=dtype, device=parallel.device(args.device),
                         cpu_offload=args.cpu_offload, download=args.download)
    pipe.set_progress_bar_config(disable=True)
    if ulysses and parallel.size() > 1:
        parallel.enable_ulysses(pipe)
    return pipe


def video_settings(args: argparse.Namespace, pipe: Any) -> dict[str, Any]:
    """Keyword arguments of esa.models.generate_video, all filled in from the options and the model."""
    from ..diffusers.models import model_of
    model = model_of(pipe, args.model)
    return {
        "height": args.height or model.height, "width": args.width or model.width,
        "num_frames": args.frames or model.num_frames, "num_inference_steps": args.steps or model.num_inference_steps,
        "guidance_scale": model.guidance_scale if args.guidance is None else args.guidance,
        "negative_prompt": args.negative_prompt, "seed": args.seed
    }


def identity(pipe: Any, model: str) -> tuple[str, str | None]:
    """A model's name and the hash of its transformer's configuration, as mask files hold them; both are the native
    engine's."""
    from ..diffusers.models import MODELS, find_model
    name = model if model in MODELS else os.path.basename(os.path.normpath(model))
    return name, config_hash(find_model(model))


def config_hash(folder: str) -> str | None:
    """Hash of transformer/config.json as libesa_video makes it; None where that library was not built."""
    import ctypes

    from ..core.context import shared_context
    from ..core.library import load as library
    context = shared_context()
    try:
        function = library().video.esa_model_config_hash
    except (ImportError, AttributeError):
        return None
    out = ctypes.create_string_buffer(80)
    context.run(function, context.ptr, out, os.fsencode(folder))
    return out.value.decode()


# ---------------------------------------------------------------- saying how far it is

def say(text: str) -> None:
    """A line of output; with several processes only the first one speaks."""
    from ..diffusers import parallel
    if parallel.rank() == 0:
        print(text, flush=True)


def clock(seconds: float) -> str:
    """Seconds as a person says them.

    >>> clock(65), clock(7384), clock(2.5)
    ('1:05', '2:03:04', '2.5 s')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


class Progress:
    """Steps of one or more videos, with the time left. On a terminal one line that is written over; otherwise a line
    per video."""

    def __init__(self, videos: int, steps: int) -> None:
        self.videos, self.steps, self.video, self.begin = videos, steps, 0, time.perf_counter()
        from ..diffusers import parallel
        self.live = sys.stderr.isatty() and parallel.rank() == 0

    def callback(self, label: str) -> Callable[..., Any]:
        """A callback_on_step_end that shows where the video is."""
        def on_step_end(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
            if self.live:
                done = self.video * self.steps + step + 1
                left = (time.perf_counter() - self.begin) / done * (self.videos * self.steps - done)
                sys.stderr.write(
                    f"\r\033[K{label}: video {self.video + 1} of {self.videos}, step {step + 1} of {self.steps}, "
                    f"{clock(left)} left")
                sys.stderr.flush()
            return kwargs
        return on_step_end

    def done(self) -> None:
        self.video += 1
        if self.live:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def both(*callbacks: Callable[..., Any] | None) -> Callable[..., Any]:
    """Several callback_on_step_end as one."""
    def on_step_end(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        for callback in callbacks:
            if callback is not None:
                kwargs = callback(pipe, step, timestep, kwargs)
        return kwargs
    return on_step_end


# ---------------------------------------------------------------- files

def make_folder(folder: str) -> str:
    try:
        os.makedirs(folder, exist_ok=True)
    except FileExistsError:
        raise Stop(f"'{folder}' is a file, a folder of that name is needed") from None
    return folder


def _plain(value: Any) -> Any:
    """NaN and infinity have no place in JSON: null."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    make_folder(os.path.dirname(os.fspath(path)) or ".")
    write_file(path, (json.dumps(_plain(value), indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: str | os.PathLike[str]) -> Any:
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise Stop(f"'{os.fspath(path)}' is no JSON file ({error})") from None
