# SPDX-License-Identifier: Apache-2.0
"""`EsaConfig(kernel="fa4")`: masks are ours, attention is computed by an installed FlashAttention-4 (package
flash_attn.cute).

FA4 takes q, k, v as (B, N, H, D) and the kept blocks as full_block_cnt int32 [B, H, nq] and full_block_idx int32 [B, H,
nq, nk], in one BlockSparseTensorsTorch (or, in early versions, as arguments of their own). On Blackwell its blocks are
256 x 128, which are the entropy selector's. It has no tail, no key lengths and no token orders: what needs them is
refused."""
from __future__ import annotations

import importlib
import inspect
import math
from typing import Any

import torch

from ..core.config import EsaConfig
from ..core.functional import select
from ..core.layout import Layout
from ..core.library import EsaError
from ..core.library import load as library
from ..core.mask import Mask, MaskFile
from ..core.session import Stats

_MODULES = ("flash_attn.cute.interface", "flash_attn.cute")


def load() -> tuple[Any, Any]:
    """flash_attn_func of an installed FA4 and its BlockSparseTensorsTorch (None where it takes the lists as
    arguments)."""
    for name in _MODULES:
        try:
            function = getattr(importlib.import_module(name), "flash_attn_func", None)
        except ImportError:
            continue
        if function is None:
            continue
        names = inspect.signature(function).parameters
        if "block_sparse_tensors" in names:
            return function, importlib.import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
        if "full_block_cnt" in names:
            return function, None
        raise EsaError(f"{name} has no block-sparse attention: a newer FlashAttention-4 is needed for kernel='fa4'")
    raise EsaError(
        "kernel='fa4' needs FlashAttention-4 (the Python package flash-attn-4, module flash_attn.cute), which is not "
        "installed; kernel='auto' uses esa's own")


def keywords_of(lists: Any, count: torch.Tensor, index: torch.Tensor, block: tuple[int, int]) -> dict[str, Any]:
    """The kept blocks as arguments of flash_attn_func; lists: the second result of `load`."""
    if lists is None:
        return {"full_block_cnt": count, "full_block_idx": index}
    given = {"full_block_cnt": count, "full_block_idx": index, "mask_block_cnt": torch.zeros_like(count),
             "mask_block_idx": torch.zeros_like(index), "block_size": block}
    known = inspect.signature(lists).parameters
    return {"block_sparse_tensors": lists(**{name: x for name, x in given.items() if name in known})}


def check(config: EsaConfig) -> None:
    """Refuses what FA4 cannot do, before the model runs."""
    if config.precision != 16:
        raise ValueError("kernel='fa4' computes in 16 bits: say precision=16")
    if config.tail != "none":
        raise ValueError(f"kernel='fa4' knows no tail: say tail='none' (it is {config.tail!r})")
    if config.order not in (None, "raster"):
        raise ValueError(f"kernel='fa4' does not reorder tokens: order must be 'raster' or None, not {config.order!r}")
    if config.spends_work or config.selector == "error":
        raise ValueError("kernel='fa4' knows neither work nor selector 'error'")
    if config.carry != "off":
        raise ValueError(f"kernel='fa4' does not carry: say carry='off' (it is {config.carry!r})")
    if config.refresh_every != 1:
        raise ValueError("kernel='fa4' makes a mask at every call: refresh_every must be 1")
    if config.mode != "fixed":
        raise ValueError(f"kernel='fa4' takes mode 'fixed' only, not {config.mode!r}")
    if config.step_cache:
        raise ValueError("kernel='fa4' has no step cache: step_cache must be 0")
    load()


class Fa4Session:
    """The part of `esa.Session` that a run uses, with FA4 as the kernel."""

    def __init__(self, config: EsaConfig, *, layers: int, steps: int, layout: Layout) -> None:
        self.config, self.layers, self.steps, self.layout = config, layers, steps, layout
        self._function, self._lists = load()
        self._masks = MaskFile(config.masks) if config.masks is not None else None
        self._warmup = library().c.esa_warmup_steps(config.warmup_frac, steps)
        self._at = (-1, 0)
        self._cells: dict[tuple[int, int], list[float | None]] = {}     # density of each call, None: dense

    def begin(self) -> None:
        self._cells.clear()

    def trim(self) -> None:
        """It keeps no differences."""

    def step(self, step: int, branch: int = 0) -> None:
        self._at = (step, branch)

    def _mask(self, layer: int, query: torch.Tensor, key: torch.Tensor) -> Mask | None:
        """The mask of this call, None where policy says dense."""
        c, step = self.config, self._at[0]
        dense_layer = (c.dense_first_layer and layer == 0) or layer in c.dense_layers
        if step < self._warmup or dense_layer or c.selector == "dense" or query.shape[1] < (c.min_tokens or 0):
            return None
        if self._masks is not None:
            return self._masks.mask(layer, step, budget=c.density,
                                    branch=self._at[1] if self._masks.info.branches > 1 else 0)
        return select(query, key, c, layout=self.layout, input_layout="BSND")

    def attention(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *,
                  input_layout: str = "BSND", out: torch.Tensor, kv_len: torch.Tensor | None = None) -> torch.Tensor:
        """One call, (B, N, H, D) in and out."""
        if kv_len is not None:
            raise EsaError(
                "kernel='fa4' does not take key lengths, which this model needs for its padded text: use kernel='auto'")
        mask = self._mask(layer, query, key)
        keywords: dict[str, Any] = {}
        if mask is not None:
            count, index = (torch.from_numpy(x).to(query.device) for x in mask.fa4())
            if count.shape[0] != query.shape[0]:
                count, index = (x.expand(query.shape[0], *x.shape[1:]).contiguous() for x in (count, index))
            keywords = keywords_of(self._lists, count, index, mask.block)
        result = self._function(query, key, value, **keywords)
        out.copy_(result[0] if isinstance(result, tuple) else result)
        self._cells.setdefault((layer, self._at[0]), []).append(None if mask is None else mask.density)
        return out

    def stats(self, layer: int = -1, step: int = -1) -> Stats:
        """Counted here; FA4's time is not measured."""
        calls = [
            d for (lay, st), values in self._cells.items() for d in values if layer in (-1, lay) and step in (-1, st)
        ]
        sparse = [d for d in calls if d is not None]
        made, loaded = (0, len(sparse)) if self._masks is not None else (len(sparse), 0)
        return Stats(len(calls), len(calls) - len(sparse), len(sparse), 0, made, loaded, self.config.density,
                     sum(sparse) / len(sparse) if sparse else math.nan, math.nan, 0.0, 0.0, 0, "fa4" if calls else "")
