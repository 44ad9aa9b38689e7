# SPDX-License-Identifier: Apache-2.0
"""Training-free block-sparse attention for video diffusion transformers.

    import esa
    esa.apply(pipe)                                                  # a diffusers pipeline
    esa.apply(pipe, esa.EsaConfig(preset="faithful"))                # with more attention, closer to dense
    mask = esa.select(q, k, esa.EsaConfig(budget=0.5))               # single calls, of torch or numpy arrays
    o = esa.attention(q, k, v, mask)
    o = esa.sparse_attention(q, k, v, head_num=24, sparse_type="rf_v2", sparsity=0.8)      # MindIE-SD's call

The C library libesa computes everything, called through ctypes. torch and diffusers are imported only by what needs
them. docs/python.md is the guide.

    esa.core        the binding, masks, layouts, sessions, the torch operator
    esa.diffusers   apply, models, the attention backend
    esa.programs    calibrate, generate, benchmark, run_experiment with a pipeline
    esa.compat      the names and mask files of the original ESA
    esa.hosts       esa inside vLLM-Omni, ComfyUI, SGLang and LightX2V"""
from __future__ import annotations

import importlib
from typing import Any

from .core.config import EsaConfig
from .core.context import get_num_threads, set_num_threads
from .core.functional import Carry, attention, select
from .core.layout import Layout
from .core.library import EsaError, EsaFileError, EsaMemoryError, EsaValueError, load
from .core.mask import Mask, MaskFile, build_mask_file
from .core.session import Session, Stats
from .core.sparse import sparse_attention
from .core.work import WorkPlan

__version__ = load().version()

# name: module. Imported on first use, because these modules need torch. A module must not have the name of a function
# here: importing it would put the module in the function's place.
_LATER = {"apply": "diffusers.apply_model", "register_backend": "diffusers.backend",
          "register_family": "diffusers.families", "supported": "diffusers.families"}

__all__ = [
    "Carry", "EsaConfig", "EsaError", "EsaFileError", "EsaMemoryError", "EsaValueError", "Layout", "Mask", "MaskFile",
    "Session", "Stats", "WorkPlan", "__version__", "attention", "build_mask_file", "get_num_threads", "select",
    "set_num_threads", "sparse_attention", *_LATER
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        try:
            value = getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("esa"):
                raise
            raise ImportError(f"esa.{name} needs {error.name}, which is not installed: "
                              "pip install 'esa-attention[diffusers]'") from None
        globals()[name] = value
        return value
    raise AttributeError(f"module 'esa' has no attribute {name!r}")
