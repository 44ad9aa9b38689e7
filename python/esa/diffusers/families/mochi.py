# SPDX-License-Identifier: Apache-2.0
"""Mochi. Every `transformer_blocks.{i}.attn1` is joint attention over [video | valid text]. diffusers cuts the text of
each batch entry to its valid tokens and attends one entry after the other; here the padding stays and is masked as
keys, so the batch is one call."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .base import Family, Processor, Sizes, latent_grid, merge_heads, split_heads, text_length


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Adjacent channels are the pairs; each head has its own frequencies."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


class MochiEsaProcessor(Processor):
    """Stands in for MochiAttnProcessor2_0. Outputs of padding are other than diffusers' zeros; no key sees them."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor,
                 attention_mask: torch.Tensor,
                 image_rotary_emb: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = (split_heads(f(hidden_states), attn.heads) for f in (attn.to_q, attn.to_k, attn.to_v))
        query, key = attn.norm_q(query), attn.norm_k(key)
        if image_rotary_emb is not None:
            query, key = _rotate(query, *image_rotary_emb), _rotate(key, *image_rotary_emb)
        text_query, text_key, text_value = (
            split_heads(f(encoder_hidden_states), attn.heads)
            for f in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj))
        query = torch.cat([query, attn.norm_added_q(text_query)], dim=1)
        key = torch.cat([key, attn.norm_added_k(text_key)], dim=1)
        value = torch.cat([value, text_value], dim=1)
        out = merge_heads(self.attend(query, key, value, attention_mask), value)
        video, text = out.split_with_sizes((hidden_states.shape[1], encoder_hidden_states.shape[1]), dim=1)
        video = attn.to_out[1](attn.to_out[0](video))
        return video, attn.to_add_out(text) if hasattr(attn, "to_add_out") else text


def _sizes(config: Any, inputs: Mapping[str, Any]) -> Sizes:
    grid = latent_grid(inputs["hidden_states"].shape, 1, config.patch_size, config.patch_size)
    return (*grid, 0, text_length(inputs))


MOCHI = Family(name="Mochi", transformer_classes=("MochiTransformer3DModel", ), sizes=_sizes, batched=True,
               attention=("transformer_blocks.*.attn1", ), replaces=("MochiAttnProcessor2_0", ),
               processor=MochiEsaProcessor, pipelines=("MochiPipeline", ))
