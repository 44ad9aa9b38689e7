# SPDX-License-Identifier: Apache-2.0
"""SGLang diffusion: its backend rain_fusion_attn, on NVIDIA GPUs.

The entry point `esa` in the group sglang.multimodal_gen.plugins (`esa.hosts.register_sglang`) wraps the function that
turns a backend's name into a class; for rain_fusion_attn, which that function refuses on CUDA, it answers with
`EsaBackend`. The backend's settings sparsity and skip_first_steps mean what they mean on NPUs, and the part
`"esa": {...}` of --attention-backend-config holds settings of EsaConfig (docs/sglang.md).

SGLang builds the metadata of that backend itself: the step and the size of the latents."""
from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from sglang.multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
)
from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context_or_none
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum
from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

from ..core.config import EsaConfig
from ..core.functional import attention
from ..core.layout import Layout
from .run import Dense, Model, Models, config_of, rain_fusion

logger = init_logger(__name__)
NAME = "rain_fusion_attn"
_models = Models()


class EsaBackend(AttentionBackend):
    accept_output_buffer = True

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return list(range(1, 257))

    @staticmethod
    def get_enum() -> AttentionBackendEnum:
        return AttentionBackendEnum.RAIN_FUSION_ATTN

    @staticmethod
    def get_impl_cls() -> type[EsaImpl]:
        return EsaImpl

    @staticmethod
    def get_metadata_cls() -> type[EsaMetadata]:
        return EsaMetadata

    @staticmethod
    def get_builder_cls() -> type[EsaMetadataBuilder]:
        return EsaMetadataBuilder


@dataclasses.dataclass
class EsaMetadata(AttentionMetadata):
    """One step: its number, the host's settings, and the video's grid in tokens."""
    current_timestep: int
    skip_first_steps: int
    sparsity: float
    grid: tuple[int, int, int]


class EsaMetadataBuilder(AttentionMetadataBuilder):
    def build(self, current_timestep: int = 0, skip_first_steps: int = 0, sparsity: float = 0.0,
              raw_latent_shape: Any = (), patch_size: Any = (1, 1, 1), **rest: Any) -> EsaMetadata:
        t, h, w = (int(n) // int(p) for n, p in zip(raw_latent_shape[-3:], patch_size, strict=True))
        return EsaMetadata(current_timestep, skip_first_steps, sparsity, (t, h, w))


class EsaImpl(AttentionImpl):
    """One attention layer. Layers are numbered in the order they are made, which is that of the model."""

    def __init__(self, num_heads: int, head_size: int, softmax_scale: float, causal: bool = False,
                 num_kv_heads: int | None = None, prefix: str = "", is_cross_attention: bool = False,
                 **extra: Any) -> None:
        self.num_heads, self.scale, self.causal = num_heads, softmax_scale, causal
        self.own = _settings()                              # None: the host's settings
        self.model: Model | None = None
        self.layer = 0
        if not is_cross_attention and not causal:
            self.model, self.layer = _models.place(prefix)

    @torch.compiler.disable
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                attn_metadata: Any = None) -> torch.Tensor:
        """(B, N, H, D) in and out; under Ulysses all tokens of some heads."""
        try:
            return self._sparse(query, key, value, attn_metadata)
        except Dense as reason:
            reason.report(f"{NAME} on esa", self.own is not None and self.own.strict, logger.warning_once)
        return attention(query, key, value, input_layout="BSND", scale=self.scale, causal=self.causal)

    def _sparse(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: Any) -> torch.Tensor:
        if self.model is None or query.shape[1] != key.shape[1]:
            raise Dense("cross-attention or causal attention", by_policy=True)
        if not isinstance(metadata, EsaMetadata):
            raise Dense("the pipeline gives this attention no metadata")
        if self.own is None and (metadata.current_timestep < metadata.skip_first_steps or metadata.sparsity <= 0):
            raise Dense("as configured", by_policy=True)
        text = query.shape[1] - math.prod(metadata.grid)
        if text < 0:
            raise Dense(f"the latents make {metadata.grid} tokens, the sequence has {query.shape[1]}")
        config = self.own or rain_fusion(metadata.sparsity)
        return self.model.run(config).attention(
            self.layer, query, key, value, layout=Layout(grid=metadata.grid, text_back=text),
            step=metadata.current_timestep, steps=_steps(), scale=self.scale,
            heads=self._heads(query.shape[2]) if config.masks is not None else (0, 0))

    def _heads(self, local: int) -> tuple[int, int]:
        """Which heads of a mask file this rank has."""
        if local == self.num_heads:
            return (0, 0)
        from sglang.multimodal_gen.runtime.distributed.parallel_state import get_ulysses_parallel_rank
        return (get_ulysses_parallel_rank() * local, self.num_heads)


def _settings() -> EsaConfig | None:
    """esa's part of --attention-backend-config."""
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args
    options = (getattr(get_global_server_args(), "attention_backend_config", None) or {}).get("esa")
    return config_of(options, "attention_backend_config.esa") if options else None


def _steps() -> int | None:
    batch = getattr(get_forward_context_or_none(), "forward_batch", None)
    steps = getattr(batch, "num_inference_steps", None)
    return int(steps) if steps else None
