# SPDX-License-Identifier: Apache-2.0
"""Where tokens are in the sequence, [text front][video t*h*w][text back] per side, and the order that makes blocks
homogeneous."""
from __future__ import annotations

import ctypes as C
import dataclasses
from collections.abc import Sequence
from typing import Any

from . import structs as T
from .context import Context, shared_context
from .library import load

Grid = Sequence[int]


def _grid(grid: Grid | None, name: str) -> tuple[int, int, int]:
    if grid is None:
        return (0, 0, 0)
    message = f"{name} must be three numbers t, h, w of at least 1"
    values = T.wholes(grid, message)
    if len(values) != 3 or min(values) < 1:
        raise ValueError(f"{message}, not {tuple(grid)!r}")
    return (values[0], values[1], values[2])


@dataclasses.dataclass(frozen=True)
class Layout:
    """Tokens of the query side (and of the key side where it differs).

    grid, grid_k
        (t, h, w) of the video tokens; None: no grid (only raster order, nothing protected). grid_k None with equal
        lengths: as the query side.
    text_front, text_back, text_front_k, text_back_k
        Text tokens before and after the video tokens.
    order, window, protect_first_frame
        As in EsaConfig. None: what suits the selector.
    order_applied
        True: q, k, v and o already stand in that order; False: the library gathers and scatters.
    spans
        Several clips in one sequence instead of a grid and text: (first token, (t, h, w)) each, at most 8, ascending.
        The other tokens are context, which is kept whole. Queries and keys are the same tokens.

    >>> Layout(grid=(2, 3, 4), text_back=5).tokens
    29
    """
    grid: Grid | None = None
    text_front: int = 0
    text_back: int = 0
    grid_k: Grid | None = None
    text_front_k: int = 0
    text_back_k: int = 0
    order: str | None = None
    window: Grid | None = None
    protect_first_frame: bool | None = None
    order_applied: bool = False
    spans: Sequence[tuple[int, Grid]] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the query side; 0 without a grid."""
        t, h, w = _grid(self.grid, "grid")
        return t * h * w + self.text_front + self.text_back if t else 0

    def struct(self) -> T.Layout:
        """The library's struct."""
        out = load().c.esa_layout_default()
        out.order = T.ORDER_DEFAULT if self.order is None else T.number(T.ORDERS, self.order, "order")
        out.order_applied = int(self.order_applied)
        out.protect_first_frame = -1 if self.protect_first_frame is None else int(self.protect_first_frame)
        if self.window is not None:
            out.window[:] = _grid(self.window, "window")
        if len(self.spans) > T.MAX_SPANS:
            raise ValueError(f"spans has {len(self.spans)} clips, at most {T.MAX_SPANS} are possible")
        out.span_count = len(self.spans)
        for span, (start, grid) in zip(out.span, self.spans):
            span.start, span.grid[:] = start, _grid(grid, "the grid of a span")
        out.grid_q[:] = _grid(self.grid, "grid")
        out.grid_k[:] = _grid(self.grid_k, "grid_k")
        for name in ("text_front", "text_back"):
            for side, field in (("_q", name), ("_k", name + "_k")):
                value = getattr(self, field)
                if not isinstance(value, int) or value < 0:
                    raise ValueError(f"{field} must be an integer of at least 0, not {value!r}")
                setattr(out, name + side, value)
        return out


def order(layout: Layout | T.Layout, tokens: int, *, side: str = "q", mode: str = "fixed",
          context: Context | None = None) -> Any:
    """The permutation of one side as an int32 numpy array: position p of the ordered sequence holds token perm[p].

    Here no selector is known: order None counts as raster.

    >>> order(Layout(grid=(1, 8, 16), order="tile", protect_first_frame=False), 128)[:10].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 16, 17]
    """
    import numpy
    context = context or shared_context()
    struct = layout.struct() if isinstance(layout, Layout) else layout
    perm: Any = numpy.empty(tokens, numpy.int32)
    if side not in ("q", "k"):
        raise ValueError(f"side must be 'q' or 'k', not {side!r}")
    context.run(context.lib.c.esa_order, context.ptr, perm.ctypes.data, tokens, C.byref(struct), int(side == "k"),
                T.number(T.MODES, mode, "mode"))
    return perm
