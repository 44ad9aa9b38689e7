# SPDX-License-Identifier: Apache-2.0
"""Training-free block-sparse attention for video diffusion transformers.

    import esa
    o = esa.sparse_attention(q, k, v, head_num=24, sparse_type="rf_v2", sparsity=0.8)      # MindIE-SD's call
    with esa.apply(pipe, esa.EsaConfig.video()) as handle: ...                             # a diffusers pipeline

Everything is computed by the C library libesa, through ctypes; torch and diffusers are imported only by what needs
them. docs/python.md is the guide."""
from __future__ import annotations

import importlib
from typing import Any

from ._lib import EsaError, EsaFileError, EsaMemoryError, EsaValueError, get_num_threads, load, set_num_threads
from .config import EsaConfig
from .functional import attention, select
from .layout import Layout
from .mask import Mask, MaskFile, build_mask_file
from .session import Session, Stats
from .sparse import sparse_attention

__version__ = load().version()

# name: module. Imported when first asked for, because these modules need torch or diffusers. A module may not have the
# name of a function here: importing it would put the module in the function's place.
_LATER = {"apply": "apply_model", "register_backend": "backend"}

__all__ = [
    "EsaConfig", "EsaError", "EsaFileError", "EsaMemoryError", "EsaValueError", "Layout", "Mask", "MaskFile", "Session",
    "Stats", "__version__", "attention", "build_mask_file", "get_num_threads", "select", "set_num_threads",
    "sparse_attention", *_LATER
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        value = getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'esa' has no attribute {name!r}")
