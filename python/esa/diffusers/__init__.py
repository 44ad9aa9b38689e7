# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in diffusers models: `apply`, the attention backend, autoregressive Wan, loading models.

The names below are imported when first used, because their modules need torch."""
from __future__ import annotations

import importlib
from typing import Any

_LATER = {
    "AutoregressiveState": "autoregressive", "Handle": "apply_model", "Recording": "run", "apply": "apply_model",
    "autoregressive_mode": "autoregressive", "generate_video": "models", "load_pipeline": "models",
    "register_backend": "backend"
}

__all__ = [*_LATER]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    raise AttributeError(f"module 'esa.diffusers' has no attribute {name!r}")
