# SPDX-License-Identifier: Apache-2.0
"""LightX2V: `import esa.hosts.lightx2v` before a runner is built registers

    esa_operator, esa_pooled_operator   our attention, for the block masks of any mask generator
    esa_mask_generator                  our selectors, for any operator

for `general_sparse_attn`, whose two parts they are, and

    esa_attn                            attention of MiniMax-H3 (lightx2v_h3.py)

(docs/hosts.md)."""
from __future__ import annotations

import dataclasses
from typing import Any

import torch
from lightx2v.utils.registry_factory import (
    ATTN_WEIGHT_REGISTER,
    SPARSE_MASK_GENERATOR_REGISTER,
    SPARSE_OPERATOR_REGISTER,
)

from ..core import structs as T
from ..core.config import protects_first_frame
from ..core.functional import attention, select
from ..core.layout import Layout, order
from ..core.mask import Mask
from .lightx2v_h3 import EsaAttn
from .run import check_settings, config_of, order_of

_SELECTORS = ("entropy", "rf_v2", "ada_bsa", "random")
# What a mask generator can do: it knows neither layers nor steps, and the operator has the blocks and the tail.
_SETTINGS = ("grid", "selector", "budget", "sparsity", "cdf_threshold", "keep_sink", "keep_recent", "samples", "order",
             "window", "protect_first_frame", "mode", "carry")


class Blocks:
    """A mask of ours on its way from generator to operator. To any other operator it is the tensor [B, H, nq, nk] that
    it expects, made when it asks: attributes, methods and functions of torch are those of the tensor."""

    def __init__(self, mask: Mask, device: torch.device) -> None:
        self.mask, self._device, self._tensor = mask, device, None

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            self._tensor = torch.from_numpy(self.mask.blocks()).to(self._device)    # type: ignore[assignment]
        return self._tensor                                                          # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def __getitem__(self, place: Any) -> torch.Tensor:
        return self.tensor[place]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [x.tensor if isinstance(x, cls) else x for x in args]
        return function(*plain, **{k: x.tensor if isinstance(x, cls) else x for k, x in (kwargs or {}).items()})


class EsaOperator:
    """Attention of (L, H, D) tensors over the blocks of a mask; returns (L, H * D)."""
    tail = "none"

    def __init__(self, q_block_size: int = 128, k_block_size: int = 128, operator_setting: Any = None) -> None:
        self.q_block_size, self.k_block_size = q_block_size, k_block_size
        self.tail = (operator_setting or {}).get("tail", self.tail)
        self._last: tuple[Any, Any] = (None, None)          # the mask that was converted last, and its version

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, cu_seqlens_q: Any = None,
                 cu_seqlens_kv: Any = None, max_seqlen_q: Any = None, max_seqlen_kv: Any = None,
                 **kwargs: Any) -> torch.Tensor:
        for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
            if ends is not None and len(ends) > 2:
                raise ValueError(f"esa_operator takes one sequence, but {name} names {len(ends) - 1}")
        found = mask.mask if isinstance(mask, Blocks) else self._convert(mask, q.shape[0], k.shape[0])
        out = attention(q[None], k[None], v[None], found, tail=self.tail, input_layout="BSND")
        return out[0].flatten(1)

    def _convert(self, mask: torch.Tensor, queries: int, keys: int) -> Mask:
        """Our mask of a tensor. Generators that keep one tensor for all calls have it converted once."""
        if self._last[0] is None or self._last[0][0] is not mask or self._last[0][1] != mask._version:
            blocks = mask if mask.ndim == 4 else mask[None]
            made = Mask.from_blocks(blocks.bool().cpu().numpy(), queries, keys,
                                    block=(self.q_block_size, self.k_block_size))
            self._last = (mask, mask._version), made
        return self._last[1]


class EsaPooledOperator(EsaOperator):
    """The same, with block means in place of dropped blocks."""
    tail = "pooled"


class EsaMaskGenerator:
    """Masks by our selectors. sparse_setting["esa"] holds settings of EsaConfig and `grid` [t, h, w]; with a grid,
    tokens are put into the selector's order around the operator."""

    def __init__(self, q_block_size: int = 128, k_block_size: int = 128, sparse_setting: Any = None,
                 attnmap_frame_num: int | None = None) -> None:
        options = (sparse_setting or {}).get("esa") or {}
        check_settings(options, "sparse_setting.esa", _SETTINGS)
        self.grid = _grid(options.get("grid"))
        self.config = config_of({"selector": "entropy", "block": [q_block_size, k_block_size],
                                 **{name: value for name, value in options.items() if name != "grid"}},
                                "sparse_setting.esa")
        if self.config.selector not in _SELECTORS:
            raise ValueError("sparse_setting.esa: a mask generator sees q and k only, so selector must be 'entropy', "
                             f"'rf_v2' or 'ada_bsa', not {self.config.selector!r}")
        if self.config.carry != "off":
            raise ValueError("sparse_setting.esa: a mask generator knows neither layers nor steps, so carry must be "
                             f"'off', not {options['carry']!r}")
        self._orders: dict[tuple[int, Any], tuple[torch.Tensor, torch.Tensor]] = {}
        self._ordered: tuple[Any, Any, Any, Any] | None = None      # q, k and the same in order

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> Blocks:
        layout = self._layout(q.shape[0])
        if self._moves(layout):
            there, _ = self._permutation(layout, q)
            self._ordered = q, k, q[there], k[there]
            q, k = self._ordered[2:]
            layout = dataclasses.replace(layout, order_applied=True)
        return Blocks(select(q[None], k[None], self.config, layout=layout, input_layout="BSND"), q.device)

    def reorg(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layout = self._layout(q.shape[0])
        if not self._moves(layout):
            return q, k, v
        there, _ = self._permutation(layout, q)
        kept, self._ordered = self._ordered, None
        if kept is not None and kept[0] is q and kept[1] is k:
            return kept[2], kept[3], v[there]
        return q[there], k[there], v[there]

    def restore(self, out: torch.Tensor) -> torch.Tensor:
        layout = self._layout(out.shape[0])
        return out[self._permutation(layout, out)[1]] if self._moves(layout) else out

    def _layout(self, tokens: int) -> Layout:
        if self.grid is None:
            return Layout()
        t, h, w = self.grid
        if tokens < t * h * w:
            raise ValueError(f"sparse_setting.esa.grid is {self.grid}, but there are {tokens} tokens")
        layout = order_of(self.config, Layout(grid=self.grid, text_back=tokens - t * h * w))
        protect = self.config.protect_first_frame
        if protect is None:
            protect = protects_first_frame("online", self.config.selector)
        return dataclasses.replace(layout, order=layout.order or self.config.order,
                                   window=layout.window or self.config.window, protect_first_frame=protect)

    @staticmethod
    def _moves(layout: Layout) -> bool:
        return layout.grid is not None and layout.order != "raster"

    def _permutation(self, layout: Layout, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = (x.shape[0], x.device)
        if key not in self._orders:
            there = torch.from_numpy(order(layout, x.shape[0])).long().to(x.device)
            self._orders[key] = there, torch.argsort(there)
        return self._orders[key]


def _grid(given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    message = "sparse_setting.esa: grid must be three numbers t, h, w of at least 1"
    grid = T.wholes(given, message)
    if len(grid) != 3 or min(grid) < 1:
        raise ValueError(f"{message}, not {given!r}")
    return grid


for _register, _name, _part in ((SPARSE_OPERATOR_REGISTER, "esa_operator", EsaOperator),
                                (SPARSE_OPERATOR_REGISTER, "esa_pooled_operator", EsaPooledOperator),
                                (SPARSE_MASK_GENERATOR_REGISTER, "esa_mask_generator", EsaMaskGenerator),
                                (ATTN_WEIGHT_REGISTER, "esa_attn", EsaAttn)):
    if _name not in _register:
        _register(_name)(_part)
