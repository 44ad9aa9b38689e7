# SPDX-License-Identifier: Apache-2.0
"""esa inside other programs, one module each: `vllm_omni`, `comfyui`, `sglang`, `lightx2v`.

A module imports its host, so nothing here is imported until the host asks for it. `run` is what they share: sessions
for calls whose layer, step and layout the host tells."""
from __future__ import annotations

from typing import Any

_SGLANG = "sglang.multimodal_gen.runtime.platforms.cuda.CudaPlatformBase.get_attn_backend_cls_str"
_SGLANG_H3 = ("sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3.denoise_loop."
              "minimax_h3_denoise_loop")


def register_sglang() -> None:
    """The entry point for SGLang: two hooks, which SGLang applies when its platform is ready. They are here and not in
    `sglang`, because SGLang loads plugins before it may import what that module imports."""
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType
    HookRegistry.register(_SGLANG, _resolve_sglang, HookType.AROUND)
    HookRegistry.register(_SGLANG_H3, _loop_sglang, HookType.AROUND)


def _resolve_sglang(original: Any, cls: Any, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
    """Around the function that gives the class of a backend."""
    if getattr(selected_backend, "name", None) == "RAIN_FUSION_ATTN":
        return "esa.hosts.sglang.EsaBackend"
    return str(original(cls, selected_backend, *args, **kwargs))


def _loop_sglang(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Around MiniMax-H3's loop over the steps of a video, which knows what its attention calls do not."""
    from .sglang import packed_video
    with packed_video(kwargs):
        return original(*args, **kwargs)
