# SPDX-License-Identifier: Apache-2.0
"""Videos of tensors (what python -m esa.generate writes) as MP4.

    python -m esa.export_mp4 results/dense                  every tensor in the folder, 000.safetensors -> 000.mp4
    python -m esa.export_mp4 results/dense/000.safetensors --out cat.mp4

Written by libesa_video through FFmpeg, as `esa export` does. The tensors stay."""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import program
from ._types import CODECS
from .media import TENSOR_ENDINGS, Frames
from .program import Stop, say


def parser() -> program.Parser:
    p = program.Parser("export_mp4", "Makes MP4 files of video tensors.")
    p.add_argument("source", metavar="DIR|FILE", nargs="+",
                   help="folders of tensors (.safetensors, .npy), or single ones")
    p.add_argument("--out", metavar="FILE",
                   help="of a single tensor; the ending chooses the format (its own name with .mp4)")
    p.add_argument("--output-dir", metavar="DIR", help="where the files go (beside the tensors)")
    p.add_argument("--fps", type=float, default=0.0, metavar="X", help="(what the tensor file says, else 16)")
    p.add_argument("--quality", type=program._whole(0, 100), default=0, metavar="N",
                   help="1 to 100 (the codec's usual)")
    p.add_argument("--codec", choices=tuple(CODECS), default="auto", help="(auto: H.264, else MPEG-4)")
    return p


def sources(args: argparse.Namespace) -> list[str]:
    found: list[str] = []
    for source in args.source:
        if os.path.isdir(source):
            inside = sorted(name for name in os.listdir(source) if name.lower().endswith(TENSOR_ENDINGS))
            if not inside:
                raise Stop(f"there is no tensor file ({', '.join(TENSOR_ENDINGS)}) in '{source}'")
            found += [os.path.join(source, name) for name in inside]
        elif os.path.exists(source):
            found.append(source)
        else:
            raise Stop(f"'{source}' does not exist")
    if args.out is not None and len(found) > 1:
        raise Stop(f"{len(found)} videos cannot all become '{args.out}'; --output-dir DIR takes several", 2)
    return found


def export(args: argparse.Namespace) -> None:
    found = sources(args)
    targets = [
        args.out or os.path.join(args.output_dir or os.path.dirname(path),
                                 os.path.splitext(os.path.basename(path))[0] + ".mp4") for path in found
    ]
    if len(set(targets)) != len(targets):
        raise Stop("two of the tensors would become one file; export them one by one with --out")
    for path, target in zip(found, targets):
        frames = Frames.read(path)
        program.make_folder(os.path.dirname(target) or ".")
        frames.save(target, fps=args.fps, quality=args.quality, codec=args.codec)
        count, height, width, _ = frames.shape
        say(f"{target}: {count} frames of {width} x {height}, {args.fps or frames.fps:g} per second")


def main(arguments: Sequence[str] | None = None) -> None:
    export(parser().parse_args(list(sys.argv[1:] if arguments is None else arguments)))


if __name__ == "__main__":
    raise SystemExit(program.run("export_mp4", main))
