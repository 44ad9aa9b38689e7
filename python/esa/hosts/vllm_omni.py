# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni: its RAINFUSION_ATTN, on NVIDIA GPUs and CPUs.

The entry point `esa` in the group vllm_omni.general_plugins calls `register` in every process. From then on the flag
`--diffusion-attention-backend RAINFUSION_ATTN` and its `block_sparse` JSON mean esa, and the JSON may hold settings of
EsaConfig (docs/hosts.md).

Layer, step and layout come from what vLLM-Omni publishes: the layer's prefix, the forward context, and
AttentionMetadata.video_layout. The host's own dense backend computes what stays dense."""
from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm_omni.diffusion.attention.backends.abstract import AttentionBackend, AttentionImpl
from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum, register_diffusion_backend
from vllm_omni.diffusion.config import get_current_diffusion_config_or_none
from vllm_omni.diffusion.forward_context import get_forward_context, is_forward_context_available
from vllm_omni.platforms import current_omni_platform

from ..core.layout import Layout
from ..core.library import load
from . import omni_capabilities
from .run import SETTINGS, Dense, Model, Models, check_settings, config_of, rain_fusion

logger = init_logger(__name__)
NAME = "RAINFUSION_ATTN"
# Shorter videos do not pay for selection; the host's own backend has the same limit.
MIN_VIDEO_TOKENS = 32 * 128
_models = Models()


def register() -> None:
    """The entry point. May be called again."""
    register_diffusion_backend(DiffusionAttentionBackendEnum[NAME], f"{__name__}.EsaBackend")


def _settings(role: str) -> tuple[Mapping[str, Any], int | None]:
    """esa's own settings of a role, and the number of steps among them. They travel in skip_calibration, the one field
    of the host's JSON that it hands on unread, because the JSON is checked before plugins are loaded."""
    config = get_current_diffusion_config_or_none()
    if config is None:
        return {}, None
    spec, _ = config.diffusion_attention_config.resolve_with_source(role=role)
    found = (getattr(spec, "skip_calibration", None) or {}).get("esa")
    if found is None:
        return {}, None
    check_settings(found, "skip_calibration.esa", (*SETTINGS, "steps"))
    steps = found.get("steps")
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ValueError(f"skip_calibration.esa: steps must be an integer of at least 1, not {steps!r}")
    return {name: value for name, value in found.items() if name != "steps"}, steps


class EsaBackend(AttentionBackend):
    accept_output_buffer = True
    supported_platforms = None              # any: what a GPU lacks, validate_available says
    supports_prefix_kv_slicing = True       # padding after the used tokens is never read

    @classmethod
    def validate_available(cls) -> None:
        load()                              # raises an ImportError that says what is missing
        if torch.cuda.is_available():
            from ..core.context import shared_context
            context, count = shared_context(torch.cuda.current_device()), ctypes.c_int32()
            context.run(context.lib.c.esa_device_count, context.ptr, ctypes.byref(count))

    # ---- what the host asks before it runs anything (from 0.31 on; masks always)

    @classmethod
    def resolve_capabilities(cls, context: Any) -> Any:
        """Ulysses yes, ring no, self-attention only; the host's dense backend computes cross-attention."""
        if omni_capabilities.is_cross(context.computation):
            return _dense_backend(context.head_dim).resolve_capabilities(context)
        return omni_capabilities.path(NAME, context, omni_capabilities.limit(NAME, context))

    @classmethod
    def supports_attention_mask(cls, attention_spec: Any = None) -> bool:
        """Calls with a mask go to the dense backend; so do those of the next three kinds."""
        return bool(_dense_backend().supports_attention_mask())

    @classmethod
    def supports_cross_kv_mask(cls, attention_spec: Any = None) -> bool:
        return bool(_dense_backend().supports_cross_kv_mask())

    @classmethod
    def supports_cross_pair_mask(cls, attention_spec: Any = None) -> bool:
        return bool(_dense_backend().supports_cross_pair_mask())

    @classmethod
    def supports_cross_head_geometry(cls, q_heads: int, kv_heads: int) -> bool:
        return bool(_dense_backend().supports_cross_head_geometry(q_heads, kv_heads))

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return []                           # any up to 256

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[EsaImpl]:
        return EsaImpl


class EsaImpl(AttentionImpl):
    """One attention layer."""

    def __init__(self, num_heads: int, head_size: int, softmax_scale: float, causal: bool = False,
                 num_kv_heads: int | None = None, prefix: str = "", qkv_layout: str | None = None,
                 backend_kwargs: dict[str, Any] | None = None, role: str = "self", computation: Any = None,
                 **extra: Any) -> None:
        given = backend_kwargs or {}
        cross = role == "cross" or omni_capabilities.is_cross(computation)
        esa, self.steps = _settings(role)
        self.sparsity, self.precision = float(given.get("sparsity", 0.0)), str(given.get("precision", "bf16"))
        self.start_step, self.end_step = int(given.get("start_step", 0)), int(given.get("end_step", 0))
        self.skip_layers = frozenset(given.get("skip_layers") or ())
        eight = {"precision": 8} if self.precision in ("mix", "fp8") else {}
        self.config = (config_of({**esa, **eight}, "skip_calibration.esa") if esa
                       else rain_fusion(self.sparsity).replace(**eight))
        self.enabled = self.config.selector != "dense" and (bool(esa) or self.sparsity > 0)
        self.num_heads, self.scale, self.qkv_layout = num_heads, softmax_scale, qkv_layout
        try:
            self.layer = extract_layer_index(prefix) if prefix else None
        except (AssertionError, ValueError):
            self.layer = None
        # The host's settings count layers by their names; sessions need a number of its own for each.
        self.model: Model | None = None
        self.number = 0
        if not cross:
            self.model, self.number = _models.place((prefix, role))
        if self.enabled:
            self._check(causal)
        self.dense = _dense_backend(head_size).get_impl_cls()(
            num_heads=num_heads, head_size=head_size, softmax_scale=softmax_scale, causal=causal,
            num_kv_heads=num_kv_heads, prefix=prefix, qkv_layout=qkv_layout, role=role,
            **({} if computation is None else {"computation": computation}))

    def _check(self, causal: bool) -> None:
        parallel = getattr(get_current_diffusion_config_or_none(), "parallel_config", None)
        for name, words in (("ring_degree", "ring"), ("allgather_degree", "AllGather-KV")):
            if (getattr(parallel, name, 1) or 1) > 1:
                raise ValueError(f"{NAME} on esa needs all keys of a head in one place, which {words} sequence "
                                 f"parallelism ({name}={getattr(parallel, name)}) does not give: use Ulysses")
        if causal:
            raise ValueError(f"{NAME} on esa is for bidirectional attention: select another backend for causal roles")
        if self.precision not in ("bf16", "mix", "fp8"):
            raise ValueError(f"block_sparse.precision must be 'bf16', 'mix' or 'fp8', not {self.precision!r}")
        if self.qkv_layout is not None and self.qkv_layout.upper() != "BSND":
            raise ValueError(f"{NAME} on esa takes BSND tensors, this layer declares qkv_layout={self.qkv_layout!r}")

    @torch.compiler.disable
    def forward_cuda(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                     attn_metadata: Any = None) -> torch.Tensor:
        try:
            return self._sparse(query, key, value, attn_metadata)
        except Dense as reason:
            reason.report(f"{NAME} on esa", self.config.strict, functools.partial(logger.warning_once, "%s"))
        return self.dense.forward(query, key, value, attn_metadata)

    def resolve_execution_path(self, context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                               attn_metadata: Any) -> Any:
        """Which way a call goes: esa's, or that of the host's dense backend."""
        try:
            self._plan(query, key, attn_metadata)
        except Dense as reason:
            if self.config.strict and not reason.by_policy:
                return omni_capabilities.path(NAME, context, str(reason))
            return self.dense.resolve_execution_path(context, query, key, value, attn_metadata)
        return omni_capabilities.path(NAME, context, omni_capabilities.limit(NAME, context))

    def _plan(self, query: torch.Tensor, key: torch.Tensor, metadata: Any) -> tuple[Layout, int, int, int | None]:
        """Layout and number of tokens of a sparse call, its step, and the number of steps; Dense if it cannot be."""
        step, steps = self._moment()
        # Cross-attention carries no metadata: it is dense by nature.
        if metadata is None or self.model is None or key.shape[1] != query.shape[1]:
            raise Dense("cross-attention", by_policy=True)
        layout, used = _layout_of(metadata, query.shape[1], self.config.min_tokens or MIN_VIDEO_TOKENS)
        if self.qkv_layout is None:
            raise Dense("this layer does not say that its tensors are BSND (qkv_layout)")
        if step is None:
            raise Dense("the forward context has no step (denoise_step_idx)")
        return layout, used, step, steps

    def _sparse(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: Any) -> torch.Tensor:
        layout, used, step, steps = self._plan(query, key, metadata)
        assert self.model is not None
        run = self.model.run(self.config)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        run.attention(self.number, query[:, :used], key[:, :used], value[:, :used], layout=layout, step=step,
                      steps=steps, scale=self.scale, heads=self._heads(query.shape[2]), out=out[:, :used])
        if used < query.shape[1]:
            out[:, used:] = 0               # padding is never read, but it should be finite
        logger.info_once("%s on esa: %s, layout %s", NAME, repr(self.config), str(layout))
        return out

    def _moment(self) -> tuple[int | None, int | None]:
        """Step and number of steps, if this step is not dense by policy."""
        if not self.enabled or self.layer in self.skip_layers:
            raise Dense("as configured", by_policy=True)
        context = get_forward_context() if is_forward_context_available() else None
        step, steps = (None, None) if context is None else (context.denoise_step_idx, context.total_denoise_steps)
        steps = self.steps if steps is None else steps
        if step is not None and (step < self.start_step or (
                steps is not None and self.end_step and step >= steps - self.end_step)):
            raise Dense("as configured", by_policy=True)
        if self.end_step and steps is None:
            raise Dense("end_step needs the number of steps, which this pipeline does not publish: give it as "
                        'skip_calibration {"esa": {"steps": N}}')
        return step, steps

    def _heads(self, local: int) -> tuple[int, int]:
        """Which heads of a mask file this rank has: tensor parallelism splits them first, then Ulysses."""
        if self.config.masks is None:
            return (0, 0)
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
        from vllm_omni.diffusion.distributed.parallel_state import get_ulysses_parallel_rank
        first = get_tensor_model_parallel_rank() * self.num_heads
        if local < self.num_heads:
            first += get_ulysses_parallel_rank() * local
        return (first, get_tensor_model_parallel_world_size() * self.num_heads)


def _dense_backend(head_size: int | None = None) -> Any:
    """The host's backend for what stays dense: the platform's usual one."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    return resolve_obj_by_qualname(current_omni_platform.get_diffusion_attn_backend_cls(None, head_size or 128))


def _layout_of(metadata: Any, tokens: int, least: int) -> tuple[Layout, int]:
    """Where the video is, and how many of the tokens are used; the rest is padding."""
    video = metadata.video_layout
    if video is None:
        raise Dense("the model publishes no video_layout for this attention")
    mask = metadata.attn_mask               # with used_len, a mask of keys says where the padding is and nothing else
    padding = mask is None or (video.used_len is not None and mask.ndim == 2 and mask.dtype == torch.bool)
    if metadata.full_attn_spans is not None or not padding:
        raise Dense("this call has a mask of its own")
    clips = tuple(sorted(video.video_spans, key=lambda span: span.start))
    if clips:
        length, used = sum(math.prod(span.latent_grid) for span in clips), video.used_len
        if len(clips) == 1 and used is not None:        # one clip is a video with text beside it
            layout = Layout(grid=tuple(clips[0].latent_grid), text_front=clips[0].start,
                            text_back=used - clips[0].start - length)
        else:
            layout = Layout(spans=tuple((span.start, tuple(span.latent_grid)) for span in clips))
    elif video.latent_grid is not None and video.prefix_len is not None:
        length = math.prod(video.latent_grid)
        used = video.prefix_len + length
        layout = Layout(grid=tuple(video.latent_grid), text_front=video.prefix_len)
    else:
        raise Dense("the published video_layout names neither a grid nor clips")
    document = metadata.extra.get("max_seqlen_q", video.used_len)
    if used is None or document is None or int(document) != used or used > tokens:
        raise Dense(f"the video_layout covers {used} tokens, the sequence has {document} of {tokens}")
    if length < least:
        raise Dense(f"{length} video tokens are fewer than {least}, where sparse attention begins to pay (min_tokens)")
    return layout, int(used)
