# SPDX-License-Identifier: Apache-2.0
"""SGLang diffusion: its backend rain_fusion_attn, on NVIDIA GPUs.

The entry point `esa` in the group sglang.multimodal_gen.plugins (`esa.hosts.register_sglang`) wraps the function that
turns a backend's name into a class; for rain_fusion_attn, which that function refuses on CUDA, it answers with
`EsaBackend`. The backend's settings sparsity and skip_first_steps mean what they mean on NPUs, and the part
`"esa": {...}` of --attention-backend-config holds settings of EsaConfig (docs/hosts.md).

SGLang builds the metadata of that backend itself: the step and the size of the latents. MiniMax-H3 has no metadata: its
attention calls hold one packed sequence, and a hook around its loop over the steps says where the video is in it."""
from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from sglang.multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    trailing_padding_used_len,
)
from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context_or_none
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum
from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

from ..core.config import EsaConfig
from ..core.functional import attention
from ..core.layout import Layout
from ..core.library import EsaError
from ..core.packed import target_video
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


@dataclasses.dataclass(frozen=True)
class Packed:
    """One video of MiniMax-H3: where it is in the packed sequence, and the noise level of each step. why: the reason
    why that is not known."""
    layout: Layout = Layout()
    sigma: tuple[float, ...] = ()
    why: str = "the pipeline runs MiniMax-H3 in a loop of its own, of which esa knows nothing"


_packed = Packed()


@contextlib.contextmanager
def packed_video(loop: Mapping[str, Any]) -> Iterator[None]:
    """While MiniMax-H3's loop runs with these arguments, its attention calls know their layout and the noise levels.
    Positions are read here, once per video."""
    global _packed
    before, positive = _packed, loop["positive"]
    fixed = positive.static_kwargs
    used = int(fixed["packed_seq_params"]["max_seqlen_q"])
    try:
        grid, front = target_video(fixed["img_position_ids"][0], positive.img_pos, "img_position_ids", "img_pos")
        layout = Layout(grid=grid, text_front=front, text_back=used - front - math.prod(grid))
        _packed = Packed(layout, tuple(float(x) for x in loop["sigmas_video"][:-1]), "")
    except EsaError as error:
        _packed = Packed(why=str(error))
    try:
        yield
    finally:
        _packed = before


class EsaImpl(AttentionImpl):
    """One attention layer. Layers are numbered in the order they are made, which is that of the model."""

    def __init__(self, num_heads: int, head_size: int, softmax_scale: float, causal: bool = False,
                 num_kv_heads: int | None = None, prefix: str = "", is_cross_attention: bool = False,
                 **extra: Any) -> None:
        self.num_heads, self.scale, self.causal = num_heads, softmax_scale, causal
        self.own = _settings()                              # None: the host's settings
        self.model: Model | None = None
        self.layer = 0
        # MiniMax-H3 runs its text through attention, too (token_refiner).
        if not is_cross_attention and not causal and not prefix.startswith("token_refiner"):
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

    @torch.compiler.disable
    def forward_varlen(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, cu_seqlens: torch.Tensor,
                       max_seqlen: int, cu_seqlens_host: tuple[int, ...] | None = None) -> torch.Tensor:
        """(T, H, D) in and out: documents one behind the other. MiniMax-H3 has one, with padding behind it that is
        never read."""
        bounds = tuple(cu_seqlens.tolist()) if cu_seqlens_host is None else cu_seqlens_host
        used = trailing_padding_used_len(query.shape[0], max_seqlen, bounds)
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for part in itertools.starmap(slice, [(0, used)] if used else itertools.pairwise(bounds)):
            if part.start < part.stop:
                out[part] = self._document(query[None, part], key[None, part], value[None, part])[0]
        return out

    def _document(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        try:
            return self._sparse_packed(query, key, value)
        except Dense as reason:
            reason.report(f"{NAME} on esa", self.own is not None and self.own.strict, logger.warning_once)
        return attention(query, key, value, input_layout="BSND", scale=self.scale, causal=self.causal)

    def _sparse_packed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self.model is None:
            raise Dense("text", by_policy=True)
        video, step = _packed, getattr(get_forward_context_or_none(), "current_timestep", None)
        if video.why or step is None:
            raise Dense(video.why or "the forward context has no step")
        if video.layout.tokens != query.shape[1]:
            raise Dense(f"the packed layout has {video.layout.tokens} tokens, the sequence has {query.shape[1]}")
        sparsity, dense_steps = _rain_fusion_settings()
        if self.own is None and (step < dense_steps or sparsity <= 0):
            raise Dense("as configured", by_policy=True)
        config = self.own or rain_fusion(sparsity)
        return self.model.run(config).attention(
            self.layer, query, key, value, layout=video.layout, step=int(step), steps=len(video.sigma),
            scale=self.scale, sigma=video.sigma if config.spends_work else None, step_branches=1,
            heads=self._heads(query.shape[2]) if config.masks is not None else (0, 0))

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


def _server_settings() -> Mapping[str, Any]:
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args
    return getattr(get_global_server_args(), "attention_backend_config", None) or {}


def _settings() -> EsaConfig | None:
    """esa's part of --attention-backend-config."""
    options = _server_settings().get("esa")
    return config_of(options, "attention_backend_config.esa") if options else None


def _rain_fusion_settings() -> tuple[float, int]:
    """The host's own settings where it makes no metadata of them, with its defaults: sparsity, and how many of the
    first steps run dense."""
    settings = _server_settings()
    return float(settings.get("sparsity", 0.2)), int(settings.get("skip_first_steps", 10))


def _steps() -> int | None:
    batch = getattr(get_forward_context_or_none(), "forward_batch", None)
    steps = getattr(batch, "num_inference_steps", None)
    return int(steps) if steps else None
