# SPDX-License-Identifier: Apache-2.0
"""What a run works out about the tokens of a call at run time: the grid from their positions, and which text is valid.

Positions are read from the GPU, which waits for it; the caller keeps the result as long as the tensor is the same."""
from __future__ import annotations

import dataclasses

import torch

from ..core.library import EsaError
from ..core.packed import run_of, target_video
from .families.base import Geometry


def grid_of_positions(positions: torch.Tensor | None, what: str) -> tuple[int, int, int]:
    """The grid of tokens whose positions (t, h, w, and more) are given as [tokens, 3], [B, tokens, 3], [B, 3, tokens]
    or [B, 3, tokens, 2]: the frames of equal size that the sequence begins with."""
    if positions is None:
        raise EsaError(f"esa cannot tell the grid of the tokens: the transformer was called without {what}")
    x = positions.detach()
    if x.ndim == 4:
        x = x[..., 0]
    if x.ndim == 3:
        x = x[0].T if x.shape[1] == 3 else x[0]
    if x.ndim != 2 or x.shape[1] not in (3, 4) or not len(x):
        raise EsaError(f"esa cannot tell the grid of the tokens from positions of the shape {tuple(positions.shape)}")
    x = x[:, :3].cpu()
    width = run_of(x[:, :2])
    frame = run_of(x[:, :1])
    if frame % width or not torch.equal(x[:frame, 2].view(-1, width), x[:width, 2].expand(frame // width, width)):
        raise EsaError(f"esa knows tokens in rows and columns only; {what} gives rows of {width} in frames of {frame}")
    frames = 1
    while torch.equal(x[frames * frame:(frames + 1) * frame, 1:], x[:frame, 1:]):
        frames += 1
    return frames, frame // width, width


def video_of_rows(positions: torch.Tensor | None, rows: torch.Tensor | None, what: str, which: str) -> Geometry:
    """The geometry of a packed sequence whose video tokens are `rows`. All tokens beside the target video are text to
    esa."""
    grid, front = target_video(positions, rows, what, which)
    assert positions is not None
    geometry = Geometry(grid, front)
    return dataclasses.replace(geometry, text_back=len(positions) - geometry.tokens)


def valid_tokens(mask: torch.Tensor, geometry: Geometry, batch: int) -> torch.Tensor:
    """The text part of a mask as booleans [B, text tokens]. The mask is of all tokens or of the text alone."""
    text = geometry.text_front + geometry.text_back
    flat = mask.flatten(1) if mask.ndim > 1 and all(size == 1 for size in mask.shape[1:-1]) else mask
    if mask.is_floating_point() and flat.ndim == 2 and flat.shape[1] == text:
        flat = flat > 0.5                               # ones and zeros, as tokenizers give them
    if flat.ndim != 2 or flat.is_floating_point() or flat.shape[1] not in (geometry.tokens, text):
        raise EsaError(
            f"esa takes masks of valid keys, [B, 1, 1, {geometry.tokens}] or [B, {text}]; this call has {mask.dtype} "
            f"{tuple(mask.shape)}: remove esa for it")
    flat = flat.bool()
    if flat.shape[1] != text:
        video = geometry.text_front + geometry.video
        flat = torch.cat([flat[:, :geometry.text_front], flat[:, video:]], dim=1)
    return flat.expand(batch, text)


@dataclasses.dataclass(frozen=True)
class Moved:
    """A call with all its text behind the video, where padding can be cut off: (B, N, H, D) tensors."""
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    geometry: Geometry

    def back(self, out: torch.Tensor, front: int) -> torch.Tensor:
        video = self.geometry.video
        return torch.cat([out[:, video:video + front], out[:, :video], out[:, video + front:]], dim=1)


def text_behind(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, geometry: Geometry,
                valid: torch.Tensor) -> Moved:
    """Text that stands in front moved behind the video, valid keys first, whatever their places were."""
    front, video = geometry.text_front, geometry.text_front + geometry.video
    places = torch.argsort(~valid, dim=1, stable=True)[:, :, None, None]

    def move(x: torch.Tensor, sort: bool) -> torch.Tensor:
        text = torch.cat([x[:, :front], x[:, video:]], dim=1)
        return torch.cat([x[:, front:video], text.gather(1, places.expand_as(text)) if sort else text], dim=1)
    moved = Geometry(geometry.grid, text_back=front + geometry.text_back)
    return Moved(move(query, False), move(key, True), move(value, True), moved)
