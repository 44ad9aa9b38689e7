# SPDX-License-Identifier: Apache-2.0
"""CogVideoX and CogVideoX 1.5. Every `transformer_blocks.{i}.attn1` is joint attention over [text | video]; padded text
is attended like any other."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .base import Family, Processor, Sizes, merge_heads, refuse_mask, text_length


class CogVideoXEsaProcessor(Processor):
    """Stands in for CogVideoXAttnProcessor2_0 and its fused form, whichever was there: `fuse_qkv_projections` leaves
    the single projections in place, so only the processor tells which ones count."""

    def __init__(self, handle: torch.Tensor, layer: int, original: Any) -> None:
        super().__init__(handle, layer, original)
        self.fused = type(original).__name__.startswith("Fused")

    def __call__(self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor,
                 attention_mask: torch.Tensor | None = None,
                 image_rotary_emb: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        from diffusers.models.embeddings import apply_rotary_emb
        refuse_mask(attention_mask)
        text = encoder_hidden_states.size(1)
        hidden_states = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        if self.fused:
            query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        # B, H, N, D
        query, key, value = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in (query, key, value))
        if attn.norm_q is not None:
            query = attn.norm_q(query)
        if attn.norm_k is not None:
            key = attn.norm_k(key)
        if image_rotary_emb is not None:
            query = torch.cat([query[:, :, :text], apply_rotary_emb(query[:, :, text:], image_rotary_emb)], dim=2)
            key = torch.cat([key[:, :, :text], apply_rotary_emb(key[:, :, text:], image_rotary_emb)], dim=2)
        out = self.attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        out = attn.to_out[1](attn.to_out[0](merge_heads(out, query)))
        return out[:, text:], out[:, :text]


def _sizes(config: Any, inputs: Mapping[str, Any]) -> Sizes:
    _, frames, _, height, width = inputs["hidden_states"].shape         # frames before channels, unlike the others
    patch, patch_t = config.patch_size, config.patch_size_t
    if patch_t is not None:                                             # CogVideoX 1.5
        frames = (frames + patch_t - 1) // patch_t
    return frames, height // patch, width // patch, text_length(inputs), 0


COGVIDEOX = Family(
    name="CogVideoX", transformer_classes=("CogVideoXTransformer3DModel", ), attention=("transformer_blocks.*.attn1", ),
    pipelines=("CogVideoXPipeline", "CogVideoXImageToVideoPipeline", "CogVideoXVideoToVideoPipeline",
               "CogVideoXFunControlPipeline"),
    replaces=("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0"), processor=CogVideoXEsaProcessor,
    sizes=_sizes, batched=True,
    # rotary positions come as an argument: hooks.RootHook
    around=(("patch_embed", {"dim": 1}), ("proj_out", {"dim": 1, "back": True})))
