# SPDX-License-Identifier: Apache-2.0
"""LightX2V's MiniMax-H3 with `"attn_type": "esa_attn"`: attention that knows block, step and layout.

LightX2V gives the attention of this model its scheduler and the number of the block. The scheduler holds the packed
sequence, the step and the noise levels, and its config the settings, `"esa_attn_setting"`. Calls without a scheduler
are the text's (the token refiner) and stay dense."""
from __future__ import annotations

import logging
import math
import weakref
from typing import Any

import torch
from lightx2v.common.ops.attn.template import AttnWeightTemplate

from ..core.functional import attention
from ..core.layout import Layout
from ..core.library import EsaError
from ..core.packed import target_video
from .run import Dense, HostRun, config_of

log = logging.getLogger("esa")
SETTING = "esa_attn_setting"
_LAYERS = 50                            # of the released model, where the config does not say


class Video:
    """The attention of one scheduler: its settings, its sessions, and where the video is in the sequence in hand."""

    def __init__(self, options: Any) -> None:
        self.config = config_of(options.get(SETTING) or {}, SETTING)
        self.heads = options.get("num_attention_heads")
        self.run = HostRun(self.config, int(options.get("num_layers") or _LAYERS))
        self.told: set[str] = set()
        self._packed: Any = None
        self._layout = Layout()

    def layout(self, scheduler: Any) -> Layout:
        """Positions are read once per video; the scheduler keeps them in main memory, too."""
        packed = getattr(scheduler, "layout_cpu", None) or scheduler.layout
        if packed is None:
            raise Dense("the scheduler has no packed sequence")
        if packed is not self._packed:
            try:
                grid, front = target_video(packed.position_ids, packed.video_indices, "position_ids", "video_indices")
            except EsaError as error:
                raise Dense(str(error)) from error
            back = len(packed.position_ids) - front - math.prod(grid)
            self._packed, self._layout = packed, Layout(grid=grid, text_front=front, text_back=back)
        return self._layout

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scheduler: Any, block: int,
               scale: float | None) -> torch.Tensor:
        layout, sigma = self.layout(scheduler), tuple(float(x) for x in scheduler.video_sigmas[:-1])
        if layout.tokens != q.shape[0]:
            raise Dense(f"the packed sequence has {layout.tokens} tokens, this call {q.shape[0]}")
        if self.config.masks is not None and self.heads not in (None, q.shape[1]):
            raise Dense("masks of a file are for all heads, and this process has some")
        out: torch.Tensor = self.run.attention(
            block, q[None], k[None], v[None], layout=layout, step=int(scheduler.step_index),
            steps=int(scheduler.infer_steps), scale=scale, sigma=sigma if self.config.spends_work else None,
            step_branches=1)
        return out[0].flatten(1)

    def tell(self, line: str) -> None:
        if line not in self.told:
            self.told.add(line)
            log.warning("%s", line)


_videos: weakref.WeakKeyDictionary[Any, Video] = weakref.WeakKeyDictionary()


class EsaAttn(AttnWeightTemplate):                                                          # type: ignore[misc]
    """Attention of (L, H, D) tensors of one sequence; returns (L, H * D)."""

    def __init__(self) -> None:
        super().__init__("esa_attn")

    @torch.compiler.disable
    def apply(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: Any = None,
              cu_seqlens_kv: Any = None, max_seqlen_q: Any = None, max_seqlen_kv: Any = None, causal: bool = False,
              scheduler: Any = None, block_idx: int | None = None, softmax_scale: float | None = None,
              **kwargs: Any) -> torch.Tensor:
        for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
            if ends is not None and len(ends) > 2:
                raise ValueError(f"esa_attn takes one sequence, but {name} names {len(ends) - 1}")
        if scheduler is not None and block_idx is not None and not causal and q.shape[0] == k.shape[0]:
            if scheduler not in _videos:
                _videos[scheduler] = Video(getattr(scheduler, "config", None) or {})
            video = _videos[scheduler]
            try:
                return video.attend(q, k, v, scheduler, int(block_idx), softmax_scale)
            except Dense as reason:
                reason.report("esa_attn", video.config.strict, video.tell)
        out = attention(q[None], k[None], v[None], input_layout="BSND", scale=softmax_scale, causal=causal)
        return out[0].flatten(1)
