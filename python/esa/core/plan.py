# SPDX-License-Identifier: Apache-2.0
"""Plans: the decisions for one shape and one set of settings, made once and kept in the context. After the first call
nothing allocates or waits."""
from __future__ import annotations

import ctypes as C
from collections.abc import Sequence

from . import structs as T
from .context import Context
from .library import Library
from .mask import Mask

# A plan holds a mask of its shape, on a GPU some ten megabytes for a video of 720p.
MAX_PLANS = 8


class Plan:
    """One esa_plan and a mask to select into, owned by a context and used under its lock."""

    def __init__(self, context: Context, shapes: T.Shapes, select: T.SelectParams | None,
                 attention: T.AttentionParams) -> None:
        self._c = context.lib.c
        self.ptr, self.mask = C.c_void_p(), C.c_void_p()
        context.run(self._c.esa_plan_create, context.ptr, C.byref(self.ptr), C.byref(shapes),
                    None if select is None else C.byref(select), C.byref(attention))
        if select is not None:
            try:
                context.run(self._c.esa_mask_create, self.ptr, C.byref(self.mask))
            except BaseException:
                self.free()
                raise

    def free(self) -> None:
        self._c.esa_mask_free(self.mask)
        self._c.esa_plan_free(self.ptr)
        self.ptr, self.mask = C.c_void_p(), C.c_void_p()


def own_blocks(context: Context, selector: str, tokens: int) -> tuple[int, int]:
    """Block sizes (query, key) that the library takes for a sequence of this length where none are given."""
    c = context.lib.c
    shapes, select = c.esa_shapes_default(), c.esa_select_params_default(T.SELECTORS[selector])
    shapes.B = shapes.Hq = shapes.Hkv = 1
    shapes.Nq = shapes.Nk = tokens
    shapes.D = 16
    info = T.MaskInfo(struct_size=C.sizeof(T.MaskInfo))
    plan = Plan(context, shapes, select, c.esa_attention_params_default())
    try:
        context.run(c.esa_mask_get_info, plan.mask, C.byref(info))
    finally:
        plan.free()
    return info.block_q, info.block_k


def shapes_of(library: Library, q: T.Tensor, k: T.Tensor) -> T.Shapes:
    s = library.c.esa_shapes_default()
    s.dtype, s.device, s.device_index = q.dtype, q.device, q.device_index
    (s.B, s.Hq, s.Nq, s.D), s.Hkv, s.Nk = q.dim, k.dim[1], k.dim[2]
    return s


def plan_for(context: Context, q: T.Tensor, k: T.Tensor, select: T.SelectParams | None,
             attention: T.AttentionParams) -> Plan:
    """The context's plan for these views and settings, made at the first use. To be called under the context's lock."""
    shapes = shapes_of(context.lib, q, k)
    key = bytes(shapes) + (b"" if select is None else bytes(select)) + bytes(attention)
    plan = context.plans.get(key)
    if plan is None:
        plan = context.plans[key] = Plan(context, shapes, select, attention)
        while len(context.plans) > MAX_PLANS:
            context.plans.popitem(last=False)[1].free()
    context.plans.move_to_end(key)
    return plan


def select_and_attend(context: Context, views: Sequence[T.Tensor], select: T.SelectParams | None,
                      attention: T.AttentionParams, *, lse: T.Tensor | None = None,
                      own_mask: bool = False) -> Mask | None:
    """Attention of q, k, v into o over the blocks that the selector picks (None: over everything). The mask is the
    plan's own, overwritten by the next call, or with own_mask a new one that is returned."""
    c = context.lib.c
    q, k, v, o = map(C.byref, views)
    made: Mask | None = None
    with context.lock:
        plan = plan_for(context, views[0], views[1], select, attention)
        ptr = plan.mask
        if select is not None:
            if own_mask:
                ptr = C.c_void_p()
                context.run(c.esa_mask_create, plan.ptr, C.byref(ptr))
                made = Mask(context, ptr)
            context.run(c.esa_plan_select, plan.ptr, ptr, q, k, None)
        context.run(c.esa_plan_attention, plan.ptr, ptr, q, k, v, o, None if lse is None else C.byref(lse), None)
    return made


def attend(context: Context, views: Sequence[T.Tensor], mask: Mask | None, attention: T.AttentionParams, *,
           lse: T.Tensor | None = None, carry: T.Carry | None = None, use: int = T.CARRY_ADD) -> None:
    """Attention of q, k, v into o over the blocks of a mask (None: over everything); a mask on the CPU is copied to
    a GPU for this call. carry: the call adds or makes it (use: CARRY_*)."""
    if mask is not None and not isinstance(mask, Mask):
        raise TypeError(
            f"mask must be an esa.Mask or None, not {type(mask).__name__} (esa.Mask.from_blocks makes one of an array)")
    settings = T.AttentionParams.from_buffer_copy(attention)
    settings.lse = C.cast(C.pointer(lse), C.c_void_p) if lse is not None else None
    given = *map(C.byref, views), None if mask is None else mask.ptr, C.byref(settings)
    if carry is None:
        context.run(context.lib.c.esa_attention, context.ptr, *given)
    else:
        context.run(context.lib.c.esa_attention_carry, context.ptr, *given, C.byref(carry), use)
