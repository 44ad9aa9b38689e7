# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo, 1.5 and Framepack. Joint attention over [video | text], in two stacks (1.5: one); text is padded at the
end and the padding masked as keys. The token refiner's attention (text alone) stays diffusers'."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .base import REST, Family, Processor, Sizes, latent_grid, merge_heads, split_heads, text_length


def _norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)


class HunyuanEsaProcessor(Processor):
    """Stands in for HunyuanVideoAttnProcessor2_0. attention_mask says what the lengths of the run say already (the
    transformer makes it from encoder_attention_mask, of which the root hook takes the sum) and is not looked at,
    unless `masked`."""
    masked = False

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
            if single and encoder_hidden_states is not None:
                video = query.shape[1] - text
                query, key = (
                    torch.cat([apply_rotary_emb(x[:, :video], image_rotary_emb, sequence_dim=1), x[:, video:]], dim=1)
                    for x in (query, key))
            else:
                query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
                key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)
        if not single and encoder_hidden_states is not None:
            text_query = _norm(attn.norm_added_q, split_heads(attn.add_q_proj(encoder_hidden_states), attn.heads))
            text_key = _norm(attn.norm_added_k, split_heads(attn.add_k_proj(encoder_hidden_states), attn.heads))
            query, key = torch.cat([query, text_query], dim=1), torch.cat([key, text_key], dim=1)
            value = torch.cat([value, split_heads(attn.add_v_proj(encoder_hidden_states), attn.heads)], dim=1)
        out = merge_heads(self.attend(query, key, value, attention_mask if self.masked else None), query)
        if encoder_hidden_states is None:
            return out, None
        video = out.shape[1] - text
        out, text_out = out[:, :video], out[:, video:]
        if getattr(attn, "to_out", None) is not None:
            out = attn.to_out[1](attn.to_out[0](out))
        if getattr(attn, "to_add_out", None) is not None:
            text_out = attn.to_add_out(text_out)
        return out, text_out


class MaskedHunyuanProcessor(HunyuanEsaProcessor):
    """The same where only the attention call knows which text is valid (1.5: several encoders and an image; Framepack:
    an image). The N x N mask that 1.5 makes of it is never made."""
    masked = True


_STACKS = ("transformer_blocks.*.attn", "single_transformer_blocks.*.attn")     # in the order they run


def _patches(config: Any, inputs: Mapping[str, Any]) -> tuple[int, int, int]:
    return latent_grid(inputs["hidden_states"].shape, config.patch_size_t, config.patch_size, config.patch_size)


def _sizes(config: Any, inputs: Mapping[str, Any]) -> Sizes:
    return (*_patches(config, inputs), 0, text_length(inputs))


def _sizes_15(config: Any, inputs: Mapping[str, Any]) -> Sizes:
    return (*_patches(config, inputs), 0, REST)


def _sizes_framepack(config: Any, inputs: Mapping[str, Any]) -> Sizes:
    """The past stands in front, in three resolutions; it has no place in the grid and is always attended."""
    past = 0
    for name, (t, h, w) in (("latents_clean", (1, 2, 2)), ("latents_history_2x", (2, 4, 4)),
                            ("latents_history_4x", (4, 8, 8))):
        latents = inputs.get(name)
        if latents is not None and inputs.get(name.replace("latents", "indices_latents")) is not None:
            frames, height, width = latents.shape[-3:]
            past += -(-frames // t) * -(-height // h) * -(-width // w)
    return (*_patches(config, inputs), past, REST)


HUNYUAN = Family(
    name="HunyuanVideo", transformer_classes=("HunyuanVideoTransformer3DModel", ), attention=_STACKS, sizes=_sizes,
    pipelines=("HunyuanVideoPipeline", "HunyuanVideoImageToVideoPipeline", "HunyuanSkyreelsImageToVideoPipeline"),
    replaces=("HunyuanVideoAttnProcessor2_0", ), processor=HunyuanEsaProcessor, text_mask="encoder_attention_mask",
    first_frame=lambda config: getattr(config, "image_condition_type", None) is not None,
    around=(("x_embedder", {"dim": 1}), ("rope", {"dim": 0}), ("proj_out", {"dim": 1, "back": True})))
HUNYUAN_15 = Family(
    name="HunyuanVideo 1.5", transformer_classes=("HunyuanVideo15Transformer3DModel", ), attention=_STACKS[:1],
    sizes=_sizes_15, pipelines=("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"),
    replaces=("HunyuanVideo15AttnProcessor2_0", ), processor=MaskedHunyuanProcessor,
    first_frame=lambda config: config.task_type == "i2v")
FRAMEPACK = Family(
    name="HunyuanVideo Framepack", transformer_classes=("HunyuanVideoFramepackTransformer3DModel", ), attention=_STACKS,
    sizes=_sizes_framepack, pipelines=("HunyuanVideoFramepackPipeline", ), replaces=("HunyuanVideoAttnProcessor2_0", ),
    processor=MaskedHunyuanProcessor)
