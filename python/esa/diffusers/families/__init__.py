# SPDX-License-Identifier: Apache-2.0
"""The model families `esa.apply` knows: how each lays out its tokens and which modules are self-attention. The families
below are a table; `register_family` adds a row."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .base import REST, Family, Geometry, Processor, Sizes
from .cogvideox import COGVIDEOX
from .cosmos import COSMOS
from .hunyuan import FRAMEPACK, HUNYUAN, HUNYUAN_15
from .images import FLUX, FLUX2, QWEN_IMAGE, SD3
from .ltx import LTX, LTX2
from .minimax import MINIMAX_H3
from .mochi import MOCHI
from .wan import SKYREELS, WAN, WAN_ANIMATE, WAN_VACE

FAMILIES: tuple[Family, ...] = (WAN, WAN_VACE, WAN_ANIMATE, SKYREELS, COGVIDEOX, HUNYUAN, HUNYUAN_15, FRAMEPACK, LTX,
                                LTX2, MINIMAX_H3, MOCHI, COSMOS, FLUX, FLUX2, QWEN_IMAGE, SD3)
_registered: dict[str, Family] = {}


def _all() -> tuple[Family, ...]:
    """The user's families first: they may replace one of ours."""
    return (*_registered.values(), *FAMILIES)


def known_classes() -> str:
    """The classes that can be given to `esa.apply`, for messages."""
    return ", ".join(f"{name} ({family.name})" for family in _all() for name in family.transformer_classes)


def detect(transformer: Any) -> Family | None:
    """The family of a transformer, by the names of its class and the classes it derives from."""
    names = [cls.__name__ for cls in type(transformer).__mro__]
    for family in _all():
        if any(name in names for name in family.transformer_classes):
            return family
    return None


@dataclasses.dataclass(frozen=True)
class Supported:
    """One row of `esa.supported()`. `pipelines` are those that the installed diffusers has; `missing` is empty, or the
    message that says what it does not have."""
    family: str
    transformers: tuple[str, ...]
    pipelines: tuple[str, ...]
    missing: str

    def __str__(self) -> str:
        return f"{self.family}: {self.missing or ', '.join(self.pipelines) or ', '.join(self.transformers)}"


def supported() -> list[Supported]:
    """The models that `esa.apply` knows, with what the installed diffusers has of them.

    >>> print(*supported()[:2], sep="\\n")                  # doctest: +ELLIPSIS
    Wan: WanPipeline, WanImageToVideoPipeline, WanVideoToVideoPipeline
    Wan VACE: WanVACEPipeline
    """
    import diffusers
    names = set(dir(diffusers))                         # does not import them, which would take a while
    rows = []
    for family in _all():
        own = family.name in _registered
        there = [name for name in family.transformer_classes if own or name in names]
        absent = "" if there else (f"diffusers {diffusers.__version__} has no {family.transformer_classes[0]}; a newer "
                                   "one may")
        rows.append(
            Supported(family.name, family.transformer_classes,
                      tuple(name for name in family.pipelines if own or (there and name in names)), absent))
    return rows


def register_family(name: str, *, transformer: str | Sequence[str], attention: str | Sequence[str],
                    grid: Callable[[Any, Mapping[str, Any]], Sequence[int]], text: str | None = None,
                    pipelines: Sequence[str] = (), processor: type[Processor] | None = None,
                    batched: bool = False) -> None:
    """Teaches `esa.apply` another model; the same name again replaces it. docs/models.md has an example.

    name
        For reports.
    transformer
        Name of the transformer's class, or several.
    attention
        Its self-attention modules, "blocks.*.attn1": attn1 of each of `transformer.blocks`. Several stacks in the order
        they run; several modules of a block as "blocks.*.attn|attn2".
    grid(config, inputs)
        (t, h, w) of the video tokens: config is `transformer.config`, inputs are the arguments of its forward by name.
        Under torch.compile it may look at shapes and Python numbers only. An image has t = 1.
    text
        Where the other tokens of these attention calls stand: None (there are none), "front" or "back". They are
        always attended. If the model masks padded text, valid text must come first (text="back"); the mask is boolean.
    pipelines
        Names for `esa.supported()`.
    processor
        A subclass of esa.diffusers.families.Processor that replaces the model's attention processors. None: theirs
        run, with their attention call led to esa.
    batched
        True if guidance doubles the batch instead of calling twice.
    """
    if text not in (None, "front", "back"):
        raise ValueError(f"text must be None, 'front' or 'back', not {text!r}")
    if not callable(grid):
        raise TypeError(f"grid must be a function of config and inputs, not {type(grid).__name__}")
    if processor is not None and not (isinstance(processor, type) and issubclass(processor, Processor)):
        raise TypeError(f"processor must be a subclass of esa.diffusers.families.Processor, not {processor!r}")
    _words(name, "name")
    classes, patterns = _words(transformer, "transformer"), _words(attention, "attention")
    bad = next((p for p in patterns if p.count(".*.") != 1), None)
    if bad is not None:
        raise ValueError(f"attention must be patterns such as 'blocks.*.attn1', with one '.*.', not {bad!r}")
    front, back = (REST if text == "front" else 0), (REST if text == "back" else 0)

    def sizes(config: Any, inputs: Mapping[str, Any]) -> Sizes:
        found = grid(config, inputs)
        if not isinstance(found, (tuple, list)) or len(found) != 3 or any(
                not isinstance(n, (int, torch.SymInt)) for n in found):
            raise ValueError(f"the grid function of {name} must return three integers t, h, w, not {found!r}")
        return found[0], found[1], found[2], front, back
    _registered[name] = Family(name=name, transformer_classes=classes, attention=patterns, sizes=sizes,
                               pipelines=_words(pipelines, "pipelines", 0), processor=processor, batched=batched)


def _words(value: Any, what: str, least: int = 1) -> tuple[str, ...]:
    """One text or several, as a tuple."""
    words = (value, ) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else (None, )
    if len(words) < least or not all(isinstance(word, str) and word for word in words):
        raise TypeError(f"{what} must be text{'' if what == 'name' else ', or a list of texts'}, not {value!r}")
    return words


__all__ = ["FAMILIES", "Family", "Geometry", "Processor", "Supported", "detect", "known_classes", "register_family",
           "supported"]
