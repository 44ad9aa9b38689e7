# SPDX-License-Identifier: Apache-2.0
"""Wan 2.1 and 2.2. Self-attention is `blocks.{i}.attn1` over video tokens alone; text comes by cross-attention,
which stays diffusers'."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .base import Family, Geometry, Processor, merge_heads, refuse_mask, split_heads


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Adjacent channels are the pairs; diffusers stores every frequency twice."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out.type_as(x)


class WanEsaProcessor(Processor):
    """Stands in for WanAttnProcessor on self-attention."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None,
                 attention_mask: torch.Tensor | None = None,
                 rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        if encoder_hidden_states is not None:
            raise ValueError("esa.apply got text in Wan's self-attention: this is not a module it knows")
        refuse_mask(attention_mask)
        if getattr(attn, "fused_projections", False):
            query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        # The norms go over all heads at once, so they come before the split.
        query = split_heads(attn.norm_q(query), attn.heads)
        key = split_heads(attn.norm_k(key), attn.heads)
        value = split_heads(value, attn.heads)
        if rotary_emb is not None:
            query, key = _rotate(query, *rotary_emb), _rotate(key, *rotary_emb)
        out = merge_heads(self.attend(query, key, value), query)
        return attn.to_out[1](attn.to_out[0](out))


def _modules(transformer: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    blocks: Any = transformer.blocks
    for i, block in enumerate(blocks):
        yield f"blocks.{i}.attn1", block.attn1


def _geometry(config: Any, shape: tuple[int, ...], text_length: int) -> Geometry:
    _, _, frames, height, width = shape
    t, h, w = config.patch_size
    return Geometry((frames // t, height // h, width // w))


WAN = Family(name="Wan", transformer_classes=("WanTransformer3DModel", ),
             replaces=("WanAttnProcessor", "WanAttnProcessor2_0"), processor=WanEsaProcessor, modules=_modules,
             geometry=_geometry)
