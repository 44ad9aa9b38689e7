# SPDX-License-Identifier: Apache-2.0
"""The model families `esa.apply` knows: how each lays out its tokens, which modules are self-attention, and one
processor each."""
from __future__ import annotations

from typing import Any

from .base import Family, Geometry
from .cogvideox import COGVIDEOX
from .hunyuan import HUNYUAN
from .wan import WAN

FAMILIES: tuple[Family, ...] = (WAN, COGVIDEOX, HUNYUAN)


def supported() -> str:
    """The classes that can be given to `esa.apply`, for messages."""
    return ", ".join(f"{name} ({family.name})" for family in FAMILIES for name in family.transformer_classes)


def detect(transformer: Any) -> Family | None:
    """The family of a transformer, by the names of its class and the classes it derives from."""
    names = [cls.__name__ for cls in type(transformer).__mro__]
    for family in FAMILIES:
        if any(name in names for name in family.transformer_classes):
            return family
    return None


__all__ = ["FAMILIES", "Family", "Geometry", "detect", "supported"]
