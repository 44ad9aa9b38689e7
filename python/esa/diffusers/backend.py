# SPDX-License-Identifier: Apache-2.0
"""The name "esa" among diffusers' attention backends, for models that `esa.apply` does not know.

    esa.register_backend(esa.EsaConfig(selector="rf_v2", sparsity=0.6))
    transformer.set_attention_backend("esa")

A backend is told nothing but q, k, v and a mask: no layer, no step, no grid. So every self-attention call (as many keys
as queries) selects its blocks anew, nothing is warmed up or reordered, and cross-attention goes to torch. It reaches
models whose processors use diffusers' dispatcher (Wan from 0.35, HunyuanVideo from 0.36; never CogVideoX). Where
esa.apply knows the model, it does better.

The list of backends is a closed enumeration in diffusers. The name is added to it as other projects do, after a check
that it is still built as expected. A name that another package registered is left alone."""
from __future__ import annotations

import inspect
from typing import Any

import torch

from ..core import structs as T
from ..core.config import EsaConfig
from ..core.functional import attention, select
from ..core.sparse import Settings
from ..core.torch_op import attention as attention_op

_settings: dict[str, tuple[EsaConfig, list[float]]] = {}


def _numbers(config: EsaConfig) -> list[float]:
    """The settings as the operator esa::attention carries them."""
    block_q, block_k = config.blocks
    return Settings(selector=-1 if config.selector == "dense" else T.SELECTORS[config.selector],
                    mode=T.MODES[config.mode], block_q=block_q, block_k=block_k, budget=config.density,
                    cdf_threshold=config.cdf_threshold, keep_sink=int(config.keep_sink),
                    keep_recent=int(config.keep_recent), causal=0, scale=0.0, tail=T.TAILS[config.tail],
                    order=T.ORDER_DEFAULT, window=(0, 0, 0), protect_first_frame=-1, grid_q=(0, 0, 0), grid_k=(0, 0, 0),
                    text=0, precision=config.precision).numbers()


def _lengths(mask: torch.Tensor, keys: int) -> torch.Tensor:
    """Key lengths of a boolean mask [B, 1, 1, keys] whose valid keys come first, which is all that diffusers' video
    models make."""
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, 1) or mask.shape[3] != keys:
        raise ValueError(
            f"the attention backend 'esa' takes boolean masks [B, 1, 1, keys] of valid keys first, not {mask.dtype} "
            f"{tuple(mask.shape)}")
    return mask[:, 0, 0].sum(-1, dtype=torch.int32)


def _attend(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
            dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool) -> torch.Tensor:
    """(B, N, H, D) in and out."""
    config, numbers = _settings[name]
    if query.shape[1] != key.shape[1] or query.shape[1] < (config.min_tokens or 0):
        out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)),
                                                               attn_mask=attn_mask, is_causal=is_causal, scale=scale,
                                                               enable_gqa=enable_gqa)
        return out.transpose(1, 2)
    if dropout_p or is_causal or scale is not None:
        raise ValueError(
            "the attention backend 'esa' computes plain attention: no dropout, not causal, the usual scale")
    if attn_mask is None:
        return attention_op(query, key, value, numbers, "BSND")
    lengths = _lengths(attn_mask, key.shape[1]).expand(query.shape[0]).contiguous()
    query, key, value = query.detach(), key.detach(), value.detach()
    mask = None if config.selector == "dense" else select(query, key, config, input_layout="BSND", kv_len=lengths)
    return attention(query, key, value, mask, tail=config.tail, input_layout="BSND", kv_len=lengths,
                     precision=config.precision)


def register_backend(config: EsaConfig | None = None, name: str = "esa") -> str:
    """Makes `name` known to diffusers (`set_attention_backend(name)`, `attention_backend(name)`); again with other
    settings changes them.

    config None: selector "entropy" with its defaults. Of config what a single call can obey counts: selector, budget,
    block, samples (4), tail, cdf_threshold, keep_sink, keep_recent, mode, min_tokens, precision. masks, order,
    refresh_every, carry, steps16_first, steps16_last and layers16 are an error, warm-up and dense layers do not exist
    here. Returns the name."""
    config = EsaConfig(selector="entropy") if config is None else EsaConfig.check(config)
    if not isinstance(name, str) or not name:
        raise ValueError(f"name must be a word for set_attention_backend, not {name!r}")
    if config.spends_work or config.selector == "error":
        raise ValueError(
            "an attention backend knows no layers and steps: work and selector 'error' belong to esa.apply")
    if config.masks is not None or config.order not in (
            None, "raster") or config.refresh_every != 1 or config.kernel != "auto" or config.step_cache or \
            config.carry != "off" or config.steps16_first or config.steps16_last or config.layers16:
        raise ValueError(
            "an attention backend knows no layers, steps or grid: masks, order, refresh_every, kernel, step_cache, "
            "carry, steps16_first, steps16_last and layers16 belong to esa.apply")
    numbers = _numbers(config)
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName as Names
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
        tables = (Names._member_map_, Names._value2member_map_, Registry._backends, Registry._constraints,
                  Registry._supported_arg_names)
        if not issubclass(Names, str) or not all(isinstance(table, dict) for table in tables):
            raise AttributeError("AttentionBackendName")
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"this diffusers keeps its attention backends in another way than esa knows ({error}): use esa.apply"
        ) from error
    if name in Names._value2member_map_ and name not in _settings:
        raise ValueError(
            f"diffusers already has an attention backend {name!r}, which is not esa's: choose another name")
    _settings[name] = (config, numbers)
    if name in Names._value2member_map_:
        return name

    def backend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
                dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
                _parallel_config: Any = None) -> torch.Tensor:
        if _parallel_config is not None:
            raise ValueError("the attention backend 'esa' does not run under context parallelism: esa.apply does")
        return _attend(name, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    member: Any = str.__new__(Names, name)
    member._name_, member._value_ = name.upper(), name
    Names._member_map_[name.upper()] = member
    Names._value2member_map_[name] = member
    Registry._backends[member] = backend
    Registry._constraints[member] = []
    Registry._supported_arg_names[member] = set(inspect.signature(backend).parameters)
    return name
