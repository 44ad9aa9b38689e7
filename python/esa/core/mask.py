# SPDX-License-Identifier: Apache-2.0
"""Masks (which key blocks each query block attends) and mask files: Python objects around the library's."""
from __future__ import annotations

import ctypes as C
import os
from collections.abc import Callable
from typing import Any

from . import structs as T
from .context import Context, shared_context, usable
from .layout import Layout, order
from .library import load
from .work import WorkPlan


class Mask:
    """A filled mask: per (batch, head, query block) an ascending list of key blocks. Immutable.

    Made by `esa.select`, by `esa.sparse_attention(..., return_mask=True)`, from a mask file, or by one of the from_
    methods. `shape` is (B, H, nq, nk); B is 1 or the batch of the call it is used in.

    >>> import numpy as np
    >>> mask = Mask.from_blocks(np.eye(4, dtype=bool)[None, None], 512, 512, block=128)
    >>> mask.shape, mask.density
    ((1, 1, 4, 4), 0.25)
    >>> mask.blocks()[0, 0, 2].tolist()
    [False, False, True, False]
    """

    def __init__(self, context: Context, ptr: C.c_void_p) -> None:
        """Takes the pointer over."""
        self._context, self._ptr = context, ptr
        self._info: T.MaskInfo | None = None
        context.own(ptr, context.lib.c.esa_mask_free)

    def __del__(self, usable: Callable[[int], bool] = usable) -> None:
        if getattr(self, "_ptr", None) and usable(self._context.process):
            self._context.release(self._ptr)

    @property
    def ptr(self) -> C.c_void_p:
        """The esa_mask *, owned by this object."""
        return self._ptr

    @property
    def info(self) -> T.MaskInfo:
        """The library's esa_mask_info. On a GPU the first look waits for the work that fills the mask."""
        if self._info is None:
            info = T.MaskInfo(struct_size=C.sizeof(T.MaskInfo))
            self._context.run(self._context.lib.c.esa_mask_get_info, self._ptr, C.byref(info))
            self._info = info
        return self._info

    @property
    def shape(self) -> tuple[int, int, int, int]:
        i = self.info
        return (i.B, i.H, i.nq, i.nk)

    @property
    def block(self) -> tuple[int, int]:
        """Block sizes (query, key)."""
        return (self.info.block_q, self.info.block_k)

    @property
    def density(self) -> float:
        """Kept share of the blocks that exist."""
        return float(self.info.density)

    @property
    def fine(self) -> int:
        """Means per block on the fine level; 0: the mask has none."""
        return int(self.info.fine)

    @property
    def density_asked(self) -> float:
        return float(self.info.density_asked)

    @property
    def selector(self) -> str:
        """The selector that made it; "given" for masks from elsewhere."""
        return "given" if self.info.selector < 0 else T.word(T.SELECTORS, self.info.selector)

    @property
    def runnable(self) -> bool:
        """False for a compat mask whose blocks the kernels do not have. It can be read, but attention refuses it."""
        return bool(self.info.runnable)

    def __repr__(self) -> str:
        (b, h, nq, nk), (bq, bk) = self.shape, self.block
        return f"<esa.Mask {b}x{h}x{nq}x{nk} of {bq}x{bk} blocks, {self.selector}, density {self.density:.3f}>"

    # ---- what is in it, as numpy arrays

    def bits(self) -> Any:
        """uint8 [B, H, nq, ceil(nk/8)]; bit j is byte j/8, bit j%8."""
        import numpy
        b, h, nq, nk = self.shape
        out: Any = numpy.zeros((b, h, nq, (nk + 7) // 8), numpy.uint8)
        self._context.run(self._context.lib.c.esa_mask_to_bits, self._ptr, out.ctypes.data)
        return out

    def blocks(self) -> Any:
        """bool [B, H, nq, nk]."""
        import numpy
        return numpy.unpackbits(self.bits(), axis=-1, count=self.shape[3], bitorder="little").astype(bool)

    def levels(self) -> Any:
        """uint8 [B, H, nq, nk]: 0 exact, 1 on the fine level, 2 neither."""
        import numpy
        out: Any = numpy.zeros(self.shape, numpy.uint8)
        self._context.run(self._context.lib.c.esa_mask_to_levels, self._ptr, out.ctypes.data)
        return out

    def orders(self) -> tuple[Any, Any] | None:
        """The adaptive order of every head, position -> token: int32 [B, H, Nq] and [B, Hkv, Nk]. None: the layout has
        no adaptive order."""
        import numpy
        i, heads = self.info, C.c_int64()
        if i.layout.order != T.ORDERS["adaptive"]:
            return None
        run, get = self._context.run, self._context.lib.c.esa_mask_get_orders
        run(get, self._ptr, None, None, C.byref(heads))
        perm_q: Any = numpy.zeros((i.B, i.H, i.Nq), numpy.int32)
        perm_k: Any = numpy.zeros((i.B, heads.value, i.Nk), numpy.int32)
        run(get, self._ptr, perm_q.ctypes.data, perm_k.ctypes.data, None)
        return perm_q, perm_k

    def fa4(self) -> tuple[Any, Any]:
        """FlashAttention-4's exchange: full_block_cnt int32 [B, H, nq] and full_block_idx int32 [B, H, nq, nk]."""
        import numpy
        count: Any = numpy.zeros(self.shape[:3], numpy.int32)
        index: Any = numpy.zeros(self.shape, numpy.int32)
        self._context.run(self._context.lib.c.esa_mask_to_fa4, self._ptr, count.ctypes.data, index.ctypes.data)
        return count, index

    def tokens(self) -> Any:
        """bool [B, H, Nq, Nk] in the caller's order of tokens: the mask a dense attention would need. For inspection
        and comparison, not for long sequences."""
        import numpy
        i = self.info
        mode = T.word(T.MODES, i.mode)
        rows, columns = numpy.arange(i.Nq) // i.block_q, numpy.arange(i.Nk) // i.block_k
        own = self.orders()
        if own is not None:
            # Sorting the tokens of an order by number gives the position of each token.
            q, k = own[0].argsort(-1), numpy.repeat(own[1].argsort(-1), i.H // own[1].shape[1], 1)
            kept = numpy.take_along_axis(self.blocks(), rows[q][..., None], 2)
            return numpy.take_along_axis(kept, columns[k][:, :, None, :], 3)
        if not i.layout.order_applied:
            for side, count, where in (("q", i.Nq, rows), ("k", i.Nk, columns)):
                perm = order(i.layout, count, side=side, mode=mode)
                where[perm] = where.copy()
        return self.blocks()[:, :, rows][:, :, :, columns]

    # ---- masks from elsewhere

    @classmethod
    def _given(cls, function: str, arrays: tuple[Any, ...], batch: int, heads: int, Nq: int, Nk: int,
               block: int | tuple[int, int], layout: Layout | None, fine: int = 0) -> Mask:
        context = shared_context()
        bq, bk = (block, block) if isinstance(block, int) else block
        info = T.MaskInfo(struct_size=C.sizeof(T.MaskInfo), block_q=bq, block_k=bk, B=batch, H=heads, Nq=Nq, Nk=Nk)
        info.layout, info.fine = (layout or Layout()).struct(), fine
        ptr = C.c_void_p()
        context.run(getattr(context.lib.c, function), context.ptr, C.byref(ptr), C.byref(info),
                    *(a.ctypes.data for a in arrays))
        return cls(context, ptr)

    @classmethod
    def from_blocks(cls, blocks: Any, Nq: int, Nk: int, *, block: int | tuple[int, int] = 128,
                    layout: Layout | None = None) -> Mask:
        """From bool [B, H, nq, nk]."""
        import numpy
        blocks = numpy.asarray(blocks, bool)
        bq, bk = (block, block) if isinstance(block, int) else block
        want = (-(-Nq // bq), -(-Nk // bk))
        if blocks.ndim != 4 or blocks.shape[2:] != want:
            raise ValueError(
                f"blocks must have the shape (B, H, {want[0]}, {want[1]}) for {Nq} and {Nk} tokens, it is "
                f"{blocks.shape}")
        bits = numpy.ascontiguousarray(numpy.packbits(blocks, axis=-1, bitorder="little"))
        return cls._given("esa_mask_from_bits", (bits,), blocks.shape[0], blocks.shape[1], Nq, Nk, (bq, bk), layout)

    @classmethod
    def from_fa4(cls, full_block_cnt: Any, full_block_idx: Any, Nq: int, Nk: int, *,
                 block: int | tuple[int, int] = (256, 128), layout: Layout | None = None) -> Mask:
        """From full_block_cnt int32 [B, H, nq] and full_block_idx int32 [B, H, nq, nk]."""
        import numpy
        count, index = numpy.ascontiguousarray(full_block_cnt,
                                               numpy.int32), numpy.ascontiguousarray(full_block_idx, numpy.int32)
        bq, bk = (block, block) if isinstance(block, int) else block
        want = (-(-Nq // bq), -(-Nk // bk))
        if count.ndim != 3 or count.shape[2] != want[0] or index.shape != (*count.shape, want[1]):
            raise ValueError(
                f"full_block_cnt must be (B, H, {want[0]}) and full_block_idx (B, H, {want[0]}, {want[1]}) for {Nq} "
                f"and {Nk} tokens, they are {count.shape} and {index.shape}")
        return cls._given("esa_mask_from_fa4", (count, index), count.shape[0], count.shape[1], Nq, Nk, (bq, bk), layout)

    @classmethod
    def from_levels(cls, levels: Any, Nq: int, Nk: int, *, fine: int = 4, block: int | tuple[int, int] = 128,
                    layout: Layout | None = None, orders: tuple[Any, Any] | None = None) -> Mask:
        """From uint8 [B, H, nq, nk]: 0 exact, 1 on the fine level (`fine` means per block), 2 neither. orders: for a
        layout of order "adaptive", int32 [B, H, Nq] and [B, Hkv, Nk]."""
        import numpy
        levels = numpy.ascontiguousarray(levels, numpy.uint8)
        bq, bk = (block, block) if isinstance(block, int) else block
        want = (-(-Nq // bq), -(-Nk // bk))
        if levels.ndim != 4 or levels.shape[2:] != want:
            raise ValueError(
                f"levels must have the shape (B, H, {want[0]}, {want[1]}) for {Nq} and {Nk} tokens, it is "
                f"{levels.shape}")
        batch, heads = levels.shape[:2]
        mask = cls._given("esa_mask_from_levels", (levels,), batch, heads, Nq, Nk, (bq, bk), layout, fine)
        if orders is None:
            return mask
        perm_q, perm_k = (numpy.ascontiguousarray(perm, numpy.int32) for perm in orders)
        if perm_q.shape != (batch, heads, Nq) or perm_k.ndim != 3 or (perm_k.shape[0], perm_k.shape[2]) != (batch, Nk):
            raise ValueError(f"orders must have the shapes ({batch}, {heads}, {Nq}) and ({batch}, Hkv, {Nk}), they are "
                             f"{perm_q.shape} and {perm_k.shape}")
        context = mask._context
        context.run(context.lib.c.esa_mask_set_orders, context.ptr, mask._ptr, perm_q.ctypes.data, perm_k.ctypes.data,
                    perm_k.shape[1])
        return mask

    def to(self, device: Any) -> Mask:
        """A copy on the CPU ("cpu") or on a GPU ("cuda:1", a torch.device, or an ordinal)."""
        kind, _, index = str(device).partition(":")
        cpu = kind == "cpu"
        if not cpu and not (kind.isdigit() or (kind == "cuda" and (index.isdigit() or not index))):
            raise ValueError(f"device must be 'cpu', 'cuda', 'cuda:N' or an ordinal, not {device!r}")
        # To the CPU it travels with the context that made it, which knows the GPU.
        context = self._context if cpu else shared_context(int(kind if kind.isdigit() else index or 0))
        ptr = C.c_void_p()
        context.run(context.lib.c.esa_mask_to_device, context.ptr, C.byref(ptr), self._ptr, T.CPU if cpu else T.CUDA)
        return Mask(context, ptr)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a mask file of one layer and one step. A batch is stored as branches."""
        context = self._context
        context.run(context.lib.c.esa_mask_file_save, context.ptr, os.fsencode(path), self._ptr)


class MaskFile:
    """A mask file, opened by mapping it into memory; recognised by its content, whatever its name.

    `info` has everything the file says about itself (layers, steps, groups, H, Nq, Nk, blocks, prebuilt budgets,
    layout, model, ...)."""

    def __init__(self, path: str | os.PathLike[str], context: Context | None = None) -> None:
        self.context = context or shared_context()
        self.path = os.fspath(path)
        self.ptr = C.c_void_p()
        lib = self.context.lib.c
        self.context.run(lib.esa_mask_file_open, self.context.ptr, C.byref(self.ptr), os.fsencode(path))
        self.context.own(self.ptr, lib.esa_mask_file_free)
        self.info = T.MaskFileInfo(struct_size=C.sizeof(T.MaskFileInfo))
        self.context.run(lib.esa_mask_file_get_info, self.ptr, C.byref(self.info))

    def __del__(self, usable: Callable[[int], bool] = usable) -> None:
        if getattr(self, "ptr", None) and usable(self.context.process):
            self.context.release(self.ptr)

    @property
    def budgets(self) -> list[float]:
        """Budgets whose masks are stored; others are derived from the stored importance. Of a file from recordings of
        errors: total works, and there are no others."""
        return [p / 1000 for p in self.info.budget_permille[:self.info.budget_count]]

    @property
    def model(self) -> str:
        return str(self.info.model.decode(errors="replace"))

    def stored(self, layer: int, step: int) -> bool:
        """False for a dense layer or a warm-up step, which are not in the file."""
        return bool(self.context.lib.c.esa_mask_file_stored(self.ptr, layer, step))

    def mask(self, layer: int, step: int, *, budget: float, branch: int = 0) -> Mask:
        """The mask of one cell."""
        ptr = C.c_void_p()
        self.context.run(self.context.lib.c.esa_mask_file_get, self.ptr, C.byref(ptr), layer, step, branch, budget)
        return Mask(self.context, ptr)

    def density(self, layer: int, step: int, *, budget: float, branch: int = 0) -> float:
        """The budget of one cell; 1: it runs dense. Cells differ in files from recordings of errors."""
        value = C.c_double()
        self.context.run(self.context.lib.c.esa_mask_file_density, self.ptr, C.byref(value), layer, step, branch,
                         budget)
        return value.value

    @property
    def exact_rows(self) -> int:
        """Exact rows of each query block that a session with a file from recordings of errors has; its works include
        them. 0 for other files: there the config decides."""
        return int(self.info.exact_rows)

    def work(self, budget: float) -> float:
        """Attention work of a whole run with the masks of budget as a share of dense, counted from the masks, with the
        exact rows of the file."""
        value = C.c_double()
        self.context.run(self.context.lib.c.esa_mask_file_work, self.ptr, C.byref(value), budget)
        return value.value

    def importance(self, layer: int, step: int, branch: int = 0) -> Any:
        """Recorded block importance of one cell, float32 [H, nq, nk]."""
        import numpy
        out = numpy.empty((self.info.H, self.info.nq, self.info.nk), numpy.float32)
        self.context.run(self.context.lib.c.esa_mask_file_importance, self.ptr, out.ctypes.data, layer, step, branch)
        return out

    def __repr__(self) -> str:
        i = self.info
        return (f"<esa.MaskFile {self.path}: {i.layers} layers, {i.steps} steps, {i.H} heads, {i.Nq} tokens, "
                f"budgets {self.budgets}>")


def build_mask_file(output: str | os.PathLike[str], recordings: list[str | os.PathLike[str]], *,
                    budgets: tuple[float, ...] = (), importance: str | None = None, store_dense: bool = False,
                    dense_first_layer: bool | None = None, warmup_frac: float | None = None, steps: int = 0,
                    works: tuple[float, ...] = (), plan: WorkPlan | str | os.PathLike[str] | None = None,
                    exact_rows: int | None = None) -> None:
    """Sums recordings of the same run (`Session.save_recording`) and writes a mask file.

    budgets
        Budgets whose masks are stored.
    importance
        How importance is stored: "u8", "f16" or "none".
    store_dense, dense_first_layer, warmup_frac
        Which cells run dense and are left out of the file; store_dense keeps them.
    steps
        Steps the file will serve; 0: those recorded.
    works, plan
        For recordings of errors, instead of budgets: attention works of a whole run as shares of dense, for each of
        which masks are stored; and a work plan that says how much each layer and step matters (None: all alike).
    exact_rows
        For recordings of errors: queries of each query block that are computed exactly. The works include them, and
        sessions take the number from the file.

    None stands for the library's default (u8, True, 0.2; recordings of errors: no importance, False, 0, two exact
    rows)."""
    if isinstance(recordings, (str, bytes, os.PathLike)) or not len(recordings):
        raise ValueError(f"recordings must be a list of files, at least one, not {recordings!r}")
    for name, value in (("budgets", budgets), ("works", works)):
        if not isinstance(value, (tuple, list)):
            raise ValueError(f"{name} must be a list of numbers, not {value!r}")
    if budgets and works:
        raise ValueError("give budgets for recordings of importance or works for recordings of errors, not both")
    lib = load()
    context = shared_context()
    build = lib.c.esa_mask_build_default()
    amounts = works or budgets
    values = (C.c_double * max(1, len(amounts)))(*amounts)
    build.budgets, build.budget_count = values, len(amounts)
    opened = plan if plan is None or isinstance(plan, WorkPlan) else WorkPlan(plan, context)
    build.plan = opened.ptr if opened else None
    build.store_dense, build.steps = int(store_dense), steps
    if importance is not None:
        build.importance = T.number(T.IMPORTANCES, importance, "importance")
    if dense_first_layer is not None:
        build.dense_first_layer = int(dense_first_layer)
    if warmup_frac is not None:
        build.warmup_frac = warmup_frac
    if exact_rows is not None:
        build.exact_rows = T.exact_rows(exact_rows)
    paths = (C.c_char_p * len(recordings))(*(os.fsencode(p) for p in recordings))
    context.run(lib.c.esa_mask_file_build, context.ptr, os.fsencode(output), paths, len(recordings), C.byref(build))
