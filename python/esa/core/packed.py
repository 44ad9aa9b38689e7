# SPDX-License-Identifier: Apache-2.0
"""Where the video is in a packed sequence, as MiniMax-H3 has it: text, pictures, sound and video in one sequence, told
by the position (t, h, w) of each token. Positions are read from the GPU, which waits for it, so callers keep the
result."""
from __future__ import annotations

from typing import TYPE_CHECKING

from .library import EsaError

if TYPE_CHECKING:
    import torch


def run_of(x: torch.Tensor) -> int:
    """How many of the first rows are equal."""
    other = (x != x[0]).any(1).nonzero()
    return int(other[0]) if len(other) else len(x)


def target_video(positions: torch.Tensor | None, rows: torch.Tensor | None, what: str,
                 which: str) -> tuple[tuple[int, int, int], int]:
    """The grid and the first token of the video that is made.

    positions are [tokens, 3]; rows are the tokens that are video, pictures and clips for conditioning first. The target
    is the last of the clips that rows name: frames of equal size, in the order of time, without other tokens between.
    what and which name the two in messages."""
    import torch
    if positions is None or rows is None or positions.ndim != 2 or positions.shape[1] != 3 or rows.ndim != 1:
        raise EsaError(f"esa needs {what} [tokens, 3] and {which} [video tokens] to tell the grid of the tokens")
    last = rows.detach().cpu()
    if not len(last):
        raise EsaError(f"esa cannot tell the grid of the tokens: {which} is empty")
    breaks = (last[1:] != last[:-1] + 1).nonzero()
    first, end = int(last[int(breaks[-1]) + 1 if len(breaks) else 0]), int(last[-1]) + 1
    x = positions.detach().cpu()[first:end].flip(0)             # the last frame first
    frame = run_of(x[:, :1])
    width = run_of(x[:frame, :2])
    place = x[:frame, 1:]
    if frame % width or not torch.equal(place[:, 1].view(-1, width), place[:width, 1].expand(frame // width, width)):
        raise EsaError(f"esa knows tokens in rows and columns only; {what} gives rows of {width} in frames of {frame}")
    frames = 1
    while True:
        other, later = x[frames * frame:(frames + 1) * frame], x[frames * frame - 1, 0]
        if not torch.equal(other[:, 1:], place) or run_of(other[:, :1]) != frame or other[0, 0] >= later:
            break                                               # a keyframe has the time of a frame that is made
        frames += 1
    return (frames, frame // width, width), end - frames * frame
