# SPDX-License-Identifier: Apache-2.0
"""Token orders, applied once around the stack of blocks instead of in every attention call.

Between the embedding of the latents and the last projection everything works token by token, except attention, whose
result does not depend on the order as long as the rotary positions are ordered alike. So the embedding's output and the
positions are permuted on the way in and the last projection's output on the way out. Attention is told that the order
is already applied (esa_layout.order_applied)."""
from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core import structs as T
from ..core.config import protects_first_frame, recommended
from ..core.layout import Layout, order
from ..core.session import mode_of
from .families import Geometry

if TYPE_CHECKING:
    from .run import Run


def default_order(mode: str, selector: str) -> str:
    """The order of a run that asks for none."""
    order = recommended(mode, selector).select.layout.order
    return "raster" if order == T.ORDER_DEFAULT else T.word(T.ORDERS, order)


def resolve(run: Run, layout: Layout) -> Layout:
    """The layout with its order and first-frame protection spelled out."""
    mode = mode_of(run.config, run.record is not None)
    word = layout.order or run.config.order or default_order(mode, run.config.selector)
    protect = layout.protect_first_frame if layout.protect_first_frame is not None else run.config.protect_first_frame
    if protect is None:
        protect = protects_first_frame(mode, run.config.selector)
    return dataclasses.replace(layout, order=word, window=layout.window or run.config.window,
                               protect_first_frame=protect)


def may_order(run: Run) -> bool:
    """False for the originals' rules, which have their own order in every call, and for FA4, which has none."""
    return run.config.mode == "fixed" and run.config.kernel != "fa4"


def wanted(run: Run, layout: Layout) -> bool:
    """True if tokens have to move and can be moved around the stack: the family says where, if at all. Image-to-video
    models that treat the first tokens as frame 0 need that frame to stay in front, unless it is protected."""
    resolved = resolve(run, layout)
    if not run.family.around:
        return False
    if any(
            getattr(module.processor, "_parallel_config", None) is not None for modules in run.modules
            for _, module in modules):
        # diffusers spreads the tokens over processes at the same places: attention orders them, call by call
        return False
    conditions = {getattr(t.config, "image_condition_type", None) for t in run.transformers}  # type: ignore[union-attr]
    # adaptive: every head has its own order, which each call applies
    return (resolved.order not in ("raster", "adaptive") and may_order(run)
            and ("token_replace" not in conditions or bool(resolved.protect_first_frame)))


class Permutation:
    """The permutations of one geometry on one device, there and back: whole sequence and video tokens alone."""

    def __init__(self, layout: Layout, geometry: Geometry, device: torch.device) -> None:
        whole = torch.from_numpy(order(layout, geometry.tokens)).long()
        first = geometry.text_front
        video = whole[first:geometry.tokens - geometry.text_back] - first
        self.there = {len(x): x.to(device) for x in (video, whole)}
        self.back = {len(x): torch.argsort(x).to(device) for x in (video, whole)}

    def __call__(self, x: torch.Tensor, dim: int, back: bool) -> torch.Tensor:
        table = self.back if back else self.there
        if x.shape[dim] not in table:
            raise RuntimeError(
                f"esa cannot order {x.shape[dim]} tokens where {' or '.join(map(str, table))} were expected")
        return x.index_select(dim, table[x.shape[dim]])


class _Hook:
    """Forward hook: orders what a module returns, or puts it back."""

    def __init__(self, handle: torch.Tensor, dim: int, back: bool = False, grid: bool = False) -> None:
        self.handle, self.dim, self.back, self.grid = handle, dim, back, grid

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        from .hooks import NoHook
        return NoHook()

    def one(self, x: torch.Tensor) -> torch.Tensor:
        if self.grid:                   # [B, d, t, h, w]
            return torch.ops.esa.session_order(self.handle, x.flatten(2), 2, self.back).view(x.shape)
        return torch.ops.esa.session_order(self.handle, x, self.dim, self.back)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return tuple(self.one(x) for x in output) if isinstance(output, tuple) else self.one(output)


def install(run: Run, transformer: Any) -> list[Any]:
    """Installs the hooks of one transformer; each has .remove()."""
    return [
        getattr(transformer, name).register_forward_hook(_Hook(run.handle, **settings))
        for name, settings in run.family.around
    ]
