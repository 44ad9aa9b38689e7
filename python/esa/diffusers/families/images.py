# SPDX-License-Identifier: Apache-2.0
"""Image models: Flux 1 and 2, Qwen-Image, Stable Diffusion 3 and 3.5. An image is a video of one frame. Attention is
joint over text and image; a picture to edit stands behind the image as more frames where it has the same size, else as
tokens that are always attended.

Flux packs its latents and says where each token is in `img_ids`; Qwen-Image says it in `img_shapes` and masks padded
text; Stable Diffusion 3.5 medium has a second attention in some blocks, over the image alone."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import REST, Family, Sizes, text_length


def _sizes_flux(config: Any, inputs: Mapping[str, Any]) -> Sizes:
    return 0, 0, 0, text_length(inputs), REST                   # img_ids tell


def _sizes_qwen(config: Any, inputs: Mapping[str, Any]) -> Sizes:
    first = inputs["img_shapes"][0]                             # of the first image in the batch; all are alike
    (frames, height, width), *others = first if isinstance(first[0], (list, tuple)) else [first]
    rest = 0
    for t, h, w in others:
        if (h, w) == (height, width) and not rest:
            frames += t
        else:
            rest += t * h * w
    return frames, height, width, text_length(inputs), rest


def _sizes_sd3(config: Any, inputs: Mapping[str, Any]) -> Sizes:
    height, width = inputs["hidden_states"].shape[-2:]
    return 1, height // config.patch_size, width // config.patch_size, 0, REST


FLUX = Family(
    name="Flux", transformer_classes=("FluxTransformer2DModel", ), sizes=_sizes_flux, ids="img_ids",
    attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    replaces=("FluxAttnProcessor", "FluxAttnProcessor2_0", "FusedFluxAttnProcessor2_0"),
    pipelines=("FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline", "FluxFillPipeline", "FluxControlPipeline",
               "FluxControlNetPipeline", "FluxKontextPipeline"))
FLUX2 = Family(
    name="Flux 2", transformer_classes=("Flux2Transformer2DModel", ), sizes=_sizes_flux, ids="img_ids",
    attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    replaces=("Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor"),
    pipelines=("Flux2Pipeline", "Flux2KleinPipeline", "Flux2KleinInpaintPipeline"))
QWEN_IMAGE = Family(
    name="Qwen-Image", transformer_classes=("QwenImageTransformer2DModel", ), attention=("transformer_blocks.*.attn", ),
    sizes=_sizes_qwen, replaces=("QwenDoubleStreamAttnProcessor2_0", ),
    pipelines=("QwenImagePipeline", "QwenImageImg2ImgPipeline", "QwenImageInpaintPipeline", "QwenImageEditPipeline",
               "QwenImageEditPlusPipeline", "QwenImageControlNetPipeline"))
SD3 = Family(
    name="Stable Diffusion 3", transformer_classes=("SD3Transformer2DModel", ), sizes=_sizes_sd3, batched=True,
    attention=("transformer_blocks.*.attn|attn2", ), replaces=("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0"),
    pipelines=("StableDiffusion3Pipeline", "StableDiffusion3Img2ImgPipeline", "StableDiffusion3InpaintPipeline",
               "StableDiffusion3ControlNetPipeline"))
