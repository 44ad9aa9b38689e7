# SPDX-License-Identifier: Apache-2.0
"""Cosmos 1, 2 and 2.5. Self-attention is `transformer_blocks.{i}.attn1` over video tokens alone; text comes by
cross-attention. Guidance is two calls without a cache context. Video2World gives the first frames in the latents."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Family, Sizes, latent_grid


def _sizes(config: Any, inputs: Mapping[str, Any]) -> Sizes:
    return (*latent_grid(inputs["hidden_states"].shape, *config.patch_size), 0, 0)


COSMOS = Family(
    name="Cosmos", transformer_classes=("CosmosTransformer3DModel", ), attention=("transformer_blocks.*.attn1", ),
    sizes=_sizes, replaces=("CosmosAttnProcessor2_0", "CosmosAttnProcessor2_5"),
    pipelines=("Cosmos2TextToImagePipeline", "Cosmos2VideoToWorldPipeline", "Cosmos2_5_PredictBasePipeline",
               "CosmosTextToWorldPipeline", "CosmosVideoToWorldPipeline"))
