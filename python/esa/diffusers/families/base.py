# SPDX-License-Identifier: Apache-2.0
"""What a family must say about itself, and what the processors of all families share."""
from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...core.torch_op import autocast

REST = -1
"""In the sizes of a family: as many tokens as the attention call has besides the others."""

Sizes = tuple[int, int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The tokens of one self-attention call: [text in front][t * h * w video tokens][text behind]. Text is whatever
    has no place in the grid: the prompt, reference images, the past. One side may be REST."""
    grid: tuple[int, int, int]
    text_front: int = 0
    text_back: int = 0

    @property
    def video(self) -> int:
        t, h, w = self.grid
        return t * h * w

    @property
    def tokens(self) -> int:
        return self.text_front + self.video + self.text_back

    def fill(self, tokens: int) -> Geometry:
        """The same with REST replaced, for a call of that many tokens."""
        if self.text_front == REST:
            return dataclasses.replace(self, text_front=max(0, tokens - self.video - self.text_back))
        if self.text_back == REST:
            return dataclasses.replace(self, text_back=max(0, tokens - self.video - self.text_front))
        return self


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family: a row of the table that `esa.supported()` prints.

    name, transformer_classes, pipelines
        The name for reports, the classes of diffusers that are recognised, and their pipelines (for the table only).
    attention
        The self-attention modules in the order they run, which numbers the layers: "blocks.*.attn1" is attn1 of each
        of `transformer.blocks`, "blocks.*.attn|attn2" both of each block; those that are None are left out.
    sizes(config, inputs)
        (t, h, w, text in front, text behind) of a call, from the transformer's config and the arguments of its forward
        by name. torch.compile traces it: shapes and Python numbers only. One text may be REST. t = 0: `ids` tells the
        grid.
    ids, rows
        Name of the forward argument with the position (t, h, w) of each token (tokens.py), read once per tensor. rows:
        that of the argument with the rows of the sequence that are video, where positions are those of all tokens.
    noise(inputs)
        The noise level of the forward as a tensor, which falls from step to step, where the argument timestep is
        something else. torch.compile traces it.
    text_mask
        Name of the forward argument that marks valid text tokens, which come first. None: all are valid, or the mask
        comes with the attention call.
    processor, replaces
        The class that stands in for the processors of diffusers named in `replaces`. None: diffusers' own processor
        runs, with its attention call led to esa (borrow.py). replaces (): any.
    around
        Where an order can be applied once around all blocks: modules of the transformer and how their output is
        ordered (reorder.py). (): each attention call orders its own tokens.
    first_frame(config)
        True if the first frame is given (image to video): it is protected unless the config says otherwise. Pipelines
        called image-to-video count as well.
    batched
        True if guidance doubles the batch; else each branch is a call of its own.
    guided
        False if the model never has guidance: one call per step.
    short
        Up to so many tokens attention is a small part of the model's work, and a config that says nothing of how much
        attention to compute leaves it dense. 0: at no length.
    """
    name: str
    transformer_classes: tuple[str, ...]
    attention: tuple[str, ...]
    sizes: Callable[[Any, Mapping[str, Any]], Sizes]
    pipelines: tuple[str, ...] = ()
    ids: str | None = None
    rows: str | None = None
    noise: Callable[[Mapping[str, Any]], torch.Tensor | None] | None = None
    text_mask: str | None = None
    processor: type["Processor"] | None = None
    replaces: tuple[str, ...] = ()
    around: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    first_frame: Callable[[Any], bool] | None = None
    batched: bool = False
    guided: bool = True
    short: int = 0

    def modules(self, transformer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The self-attention modules with their names, in the order they run."""
        for pattern in self.attention:
            stack, _, names = pattern.partition(".*.")
            try:
                blocks: Any = transformer.get_submodule(stack)
            except AttributeError as error:
                raise ValueError(f"{type(transformer).__name__} has no {stack}, where {self.name} has its blocks"
                                 ) from error
            for i, block in enumerate(blocks):
                for name in names.split("|"):
                    *path, last = name.split(".")
                    module = getattr(block.get_submodule(".".join(path)), last, None)
                    if module is not None:
                        yield f"{stack}.{i}.{name}", module


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

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of (B, N, H, D) tensors, the result laid out alike and contiguous. mask marks the valid keys, of
        all tokens or of the text alone: (B, keys), or with dimensions of 1 between."""
        query, key, value = autocast(query, key, value)         # norms leave q and k in float32 there
        if self._parallel_config is not None:
            if mask is not None:
                raise ValueError("esa does not run under context parallelism where this model masks its text")
            return parallel_attention(self, query, key, value)
        return torch.ops.esa.session_attention(self.handle, self.layer, query, key, value, mask)


def parallel_attention(processor: Processor, query: torch.Tensor, key: torch.Tensor,
                       value: torch.Tensor) -> torch.Tensor:
    """Attention under diffusers' context parallelism: tokens are spread over the ranks, Ulysses exchanges them for
    heads."""
    from ..parallel import ulysses_attention
    return ulysses_attention(processor, query, key, value)


def latent_grid(shape: Sequence[int], patch_t: int, patch_h: int, patch_w: int) -> tuple[int, int, int]:
    """The grid of latents of the shape [..., t, h, w]."""
    frames, height, width = shape[-3:]
    return frames // patch_t, height // patch_h, width // patch_w


def text_length(inputs: Mapping[str, Any]) -> int:
    """Tokens of encoder_hidden_states."""
    text = inputs.get("encoder_hidden_states")
    return text.shape[1] if isinstance(text, torch.Tensor) else 0


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, N, H * D) -> (B, N, H, D)."""
    return x.unflatten(2, (heads, -1))


def merge_heads(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(B, N, H, D) -> (B, N, H * D) in the dtype of the query."""
    return x.flatten(2, 3).to(like.dtype)


def refuse_mask(attention_mask: Any) -> None:
    if attention_mask is not None:
        raise ValueError("esa.apply got an attention mask where this model has none: remove esa for this call")
