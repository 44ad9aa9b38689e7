# SPDX-License-Identifier: Apache-2.0
"""Wan 2.1 and 2.2 and the models built on them: VACE, Animate, SkyReels V2. Self-attention is `blocks.{i}.attn1` over
video tokens alone; text and the image's features come by cross-attention, which stays diffusers'.

VACE runs its control blocks first, over the same tokens; reference images are frames in front of the video. Animate's
first frame is the reference picture. Wan 2.2 A14B has two transformers, TI2V-5B a timestep per token."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .base import Family, Processor, Sizes, latent_grid, merge_heads, refuse_mask, split_heads


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


def _sizes(config: Any, inputs: Mapping[str, Any]) -> Sizes:
    return (*latent_grid(inputs["hidden_states"].shape, *config.patch_size), 0, 0)


def _image(config: Any) -> bool:
    return config.image_dim is not None


_OURS: dict[str, Any] = {"sizes": _sizes, "processor": WanEsaProcessor}
_REPLACES = ("WanAttnProcessor", "WanAttnProcessor2_0")

WAN = Family(
    name="Wan", transformer_classes=("WanTransformer3DModel", ), attention=("blocks.*.attn1", ), replaces=_REPLACES,
    pipelines=("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline"), first_frame=_image,
    around=(("patch_embedding", {"dim": 2, "grid": True}), ("rope", {"dim": 1}),
            ("proj_out", {"dim": 1, "back": True})), **_OURS)
WAN_VACE = Family(name="Wan VACE", transformer_classes=("WanVACETransformer3DModel", ), replaces=_REPLACES,
                  attention=("vace_blocks.*.attn1", "blocks.*.attn1"), pipelines=("WanVACEPipeline", ), **_OURS)
WAN_ANIMATE = Family(name="Wan Animate", transformer_classes=("WanAnimateTransformer3DModel", ), replaces=_REPLACES,
                     attention=("blocks.*.attn1", ), pipelines=("WanAnimatePipeline", ), first_frame=_image, **_OURS)
SKYREELS = Family(
    name="SkyReels V2", transformer_classes=("SkyReelsV2Transformer3DModel", ), attention=("blocks.*.attn1", ),
    replaces=("SkyReelsV2AttnProcessor", "SkyReelsV2AttnProcessor2_0"), first_frame=_image,
    pipelines=("SkyReelsV2Pipeline", "SkyReelsV2ImageToVideoPipeline", "SkyReelsV2DiffusionForcingPipeline",
               "SkyReelsV2DiffusionForcingImageToVideoPipeline", "SkyReelsV2DiffusionForcingVideoToVideoPipeline"),
    **_OURS)
