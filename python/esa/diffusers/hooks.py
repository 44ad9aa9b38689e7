# SPDX-License-Identifier: Apache-2.0
"""What esa.apply puts into a transformer and takes out again: processors, the root hook, and a wrapper that listens to
`cache_context`.

A copy (copy.deepcopy) of such a model has none of them, because two models must not share a run."""
from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .clock import Clock, Context
from .families.base import Processor

if TYPE_CHECKING:
    from .run import Run


class NoHook:
    def __call__(self, *arguments: Any) -> None:
        return None


class RootHook:
    """Forward pre-hook of a transformer. Under torch.compile this is traced, so it only picks arguments and calls
    one operator."""

    def __init__(self, run: Run, which: int) -> None:
        transformer = run.transformers[which]
        self.handle, self.which = run.handle, torch.tensor(which, dtype=torch.int64)
        self.text_mask = run.family.text_mask
        self.reorders = run.reorders
        names = [name for name in inspect.signature(type(transformer).forward).parameters if name != "self"]
        self.place = {name: i for i, name in enumerate(names)}

    def __deepcopy__(self, memo: dict[int, Any]) -> NoHook:
        return NoHook()

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        i = self.place.get(name, len(args))
        return args[i] if i < len(args) else None

    def __call__(self, module: nn.Module, args: tuple[Any, ...],
                 kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        hidden_states = self._argument("hidden_states", args, kwargs)
        timestep = self._argument("timestep", args, kwargs)
        text = self._argument("encoder_hidden_states", args, kwargs)
        mask = self._argument(self.text_mask, args, kwargs) if self.text_mask is not None else None
        if not isinstance(hidden_states, torch.Tensor):
            return None                                 # the model itself reports what is missing
        if timestep is not None and not isinstance(timestep, torch.Tensor):
            timestep = torch.tensor(timestep)
        hidden_states = torch.ops.esa.session_enter(self.handle, self.which, hidden_states, timestep, mask,
                                                    text.shape[1] if isinstance(text, torch.Tensor) else 0)
        changed = {"hidden_states": hidden_states}
        if self.reorders:               # per-token arguments are ordered as the tokens are
            if isinstance(timestep, torch.Tensor) and timestep.ndim == 2:
                changed["timestep"] = torch.ops.esa.session_order(self.handle, timestep, 1, False)
            rope = self._argument("image_rotary_emb", args, kwargs)
            if rope is not None:
                changed["image_rotary_emb"] = tuple(torch.ops.esa.session_order(self.handle, x, 0, False) for x in rope)
        positional = list(args)
        for name, value in changed.items():
            if name not in kwargs and self.place[name] < len(positional):
                positional[self.place[name]] = value
            else:
                kwargs = {**kwargs, name: value}
        return tuple(positional), kwargs


class Ear:
    """Wraps transformer.cache_context and notes what it is told. It is an attribute of the one transformer and hides
    the method of its class."""

    def __init__(self, transformer: Any, clock: Clock) -> None:
        self.transformer, self.clock, self.original = transformer, clock, transformer.cache_context

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo)       # a bound method is copied bound to the copy

    @contextlib.contextmanager
    def __call__(self, name: str, **about: Any) -> Iterator[None]:
        before = self.clock.context
        self.clock.context = Context(name, about.get("step_index"), about.get("num_inference_steps"))
        try:
            with self.original(name, **about):
                yield
        finally:
            self.clock.context = before


def install(run: Run, which: int) -> None:
    """Puts processors where they are missing: all of them at first, and those that diffusers has exchanged since."""
    for layer, (name, module) in enumerate(run.family.modules(run.transformers[which])):
        there: Any = module.processor
        if isinstance(there, Processor):
            if there.handle is not run.handle:
                raise ValueError(f"{name} belongs to another esa.apply: remove that first")
            continue
        if type(there).__name__ not in run.family.replaces:
            raise ValueError(
                f"{name} has the attention processor {type(there).__name__}, which esa cannot replace (it knows "
                f"{', '.join(run.family.replaces)})")
        ours = run.family.processor(run.handle, layer, there)
        ours._parallel_config = getattr(there, "_parallel_config", None)
        module.set_processor(ours)      # type: ignore[operator]


def uninstall(run: Run, transformer: nn.Module) -> None:
    """The processors that were there before, also in the list that unfuse_qkv_projections would bring back."""
    for _, module in run.family.modules(transformer):
        there: Any = module.processor
        if isinstance(there, Processor) and there.handle is run.handle:
            module.set_processor(there.original)        # type: ignore[operator]
    kept = getattr(transformer, "original_attn_processors", None)
    if isinstance(kept, dict):
        for name, processor in kept.items():
            if isinstance(processor, Processor) and processor.handle is run.handle:
                kept[name] = processor.original
