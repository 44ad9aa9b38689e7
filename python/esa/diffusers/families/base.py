# SPDX-License-Identifier: Apache-2.0
"""What a family must say about itself, and what the processors of all families share."""
from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ...core.torch_op import autocast


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The tokens of one self-attention call: [text in front][t * h * w video tokens][text behind]."""
    grid: tuple[int, int, int]
    text_front: int = 0
    text_back: int = 0

    @property
    def tokens(self) -> int:
        t, h, w = self.grid
        return self.text_front + t * h * w + self.text_back


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family.

    `modules` lists the self-attention modules in the order they run, with their names; that order numbers the layers.
    `geometry(config, latent_shape, text_length)` says how the tokens lie; latent_shape is that of the transformer's
    hidden_states. `text_mask` names the forward argument that marks valid text tokens (they come first), or is None:
    all are valid. `replaces` are the processors of diffusers that `processor` stands in for; any other one in their
    place is refused."""
    name: str
    transformer_classes: tuple[str, ...]
    replaces: tuple[str, ...]
    processor: type["Processor"]
    modules: Callable[[nn.Module], Iterable[tuple[str, nn.Module]]]
    geometry: Callable[[Any, tuple[int, ...], int], Geometry]
    text_mask: str | None = None


class Processor:
    """Base of the processors. The kernel is called through `attend`, which is one torch operator.

    `handle` and `layer` are tensors without dimensions on the CPU: as Python numbers they would make torch.compile
    specialise the graph of every layer. The two class attributes are what diffusers looks for in a processor
    (`set_attention_backend`, `enable_parallelism`)."""
    _attention_backend: Any = None
    _parallel_config: Any = None

    def __init__(self, handle: torch.Tensor, layer: int, original: Any) -> None:
        self.handle, self.layer, self.original = handle, torch.tensor(layer, dtype=torch.int64), original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of (B, N, H, D) tensors, the result laid out alike and contiguous."""
        query, key, value = autocast(query, key, value)         # norms leave q and k in float32 there
        if self._parallel_config is not None:
            return parallel_attention(self, query, key, value)
        return torch.ops.esa.session_attention(self.handle, self.layer, query, key, value)


def parallel_attention(processor: Processor, query: torch.Tensor, key: torch.Tensor,
                       value: torch.Tensor) -> torch.Tensor:
    """Attention under diffusers' context parallelism: tokens are spread over the ranks, Ulysses exchanges them for
    heads."""
    from ..parallel import ulysses_attention
    return ulysses_attention(processor, query, key, value)


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, N, H * D) -> (B, N, H, D)."""
    return x.unflatten(2, (heads, -1))


def merge_heads(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(B, N, H, D) -> (B, N, H * D) in the dtype of the query."""
    return x.flatten(2, 3).to(like.dtype)


def refuse_mask(attention_mask: Any) -> None:
    if attention_mask is not None:
        raise ValueError("esa.apply got an attention mask where this model has none: remove esa for this call")
