# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo. Two stacks of joint attention over [video | text]; text is padded at the end and the padding masked as
keys. The token refiner's attention (text alone) stays diffusers'."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .base import Family, Geometry, Processor, merge_heads, split_heads


def _norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)


class HunyuanEsaProcessor(Processor):
    """Stands in for HunyuanVideoAttnProcessor2_0. attention_mask says what the lengths of the run say already (the
    transformer makes it from encoder_attention_mask, of which the root hook takes the sum) and is not looked at."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None,
                 attention_mask: torch.Tensor | None = None,
                 image_rotary_emb: Any = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        from diffusers.models.embeddings import apply_rotary_emb
        single = attn.add_q_proj is None            # the second stack projects text and video with the same weights
        text = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        if single and encoder_hidden_states is not None:
            hidden_states = torch.cat([hidden_states, encoder_hidden_states], dim=1)
        query = _norm(attn.norm_q, split_heads(attn.to_q(hidden_states), attn.heads))
        key = _norm(attn.norm_k, split_heads(attn.to_k(hidden_states), attn.heads))
        value = split_heads(attn.to_v(hidden_states), attn.heads)
        if image_rotary_emb is not None:
            if single and text:
                query = torch.cat(
                    [apply_rotary_emb(query[:, :-text], image_rotary_emb, sequence_dim=1), query[:, -text:]], dim=1)
                key = torch.cat([apply_rotary_emb(key[:, :-text], image_rotary_emb, sequence_dim=1), key[:, -text:]],
                                dim=1)
            else:
                query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
                key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)
        if not single and encoder_hidden_states is not None:
            text_query = _norm(attn.norm_added_q, split_heads(attn.add_q_proj(encoder_hidden_states), attn.heads))
            text_key = _norm(attn.norm_added_k, split_heads(attn.add_k_proj(encoder_hidden_states), attn.heads))
            query, key = torch.cat([query, text_query], dim=1), torch.cat([key, text_key], dim=1)
            value = torch.cat([value, split_heads(attn.add_v_proj(encoder_hidden_states), attn.heads)], dim=1)
        out = merge_heads(self.attend(query, key, value), query)
        if encoder_hidden_states is None:
            return out, None
        video = out.shape[1] - text
        out, text_out = out[:, :video], out[:, video:]
        if getattr(attn, "to_out", None) is not None:
            out = attn.to_out[1](attn.to_out[0](out))
        if getattr(attn, "to_add_out", None) is not None:
            text_out = attn.to_add_out(text_out)
        return out, text_out


def _modules(transformer: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    for stack in ("transformer_blocks", "single_transformer_blocks"):       # in the order they run
        blocks: Any = getattr(transformer, stack)
        for i, block in enumerate(blocks):
            yield f"{stack}.{i}.attn", block.attn


def _geometry(config: Any, shape: tuple[int, ...], text_length: int) -> Geometry:
    _, _, frames, height, width = shape
    return Geometry((frames // config.patch_size_t, height // config.patch_size, width // config.patch_size),
                    text_back=text_length)


HUNYUAN = Family(name="HunyuanVideo", transformer_classes=("HunyuanVideoTransformer3DModel", ),
                 replaces=("HunyuanVideoAttnProcessor2_0", ), processor=HunyuanEsaProcessor, modules=_modules,
                 geometry=_geometry, text_mask="encoder_attention_mask")
