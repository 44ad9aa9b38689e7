# SPDX-License-Identifier: Apache-2.0
"""What esa.apply puts into a transformer and takes out again: processors, the root hook, and a wrapper that listens to
`cache_context`.

A copy (copy.deepcopy) of such a model has none of them, because two models must not share a run."""
from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .clock import Clock, Context
from .families.base import Processor
from .families.borrow import borrow

if TYPE_CHECKING:
    from .run import Run


class NoHook:
    def __call__(self, *arguments: Any) -> None:
        return None


class RootHook:
    """Forward pre-hook of a transformer. Under torch.compile this is traced, so it only picks arguments and calls
    one operator."""

    def __init__(self, run: Run, which: int) -> None:
        self.handle, self.which = run.handle, torch.tensor(which, dtype=torch.int64)
        self.family, self.reorders = run.family, run.reorders
        self.names = run.names[which]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoHook:
        return NoHook()

    def __call__(self, module: Any, args: tuple[Any, ...],
                 kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        family = self.family
        inputs = {**dict(zip(self.names, args)), **kwargs}
        hidden_states, timestep = inputs.get("hidden_states"), inputs.get("timestep")
        if not isinstance(hidden_states, torch.Tensor):
            return None                                 # the model itself reports what is missing
        if timestep is not None and not isinstance(timestep, torch.Tensor):
            timestep = torch.tensor(timestep)
        sizes = family.sizes(module.config, inputs)
        mask = inputs.get(family.text_mask) if family.text_mask is not None else None
        ids = inputs.get(family.ids) if family.ids is not None and not sizes[0] else None
        rows = inputs.get(family.rows) if family.rows is not None else None
        level = timestep if family.noise is None else family.noise(inputs)
        hidden_states = torch.ops.esa.session_enter(self.handle, self.which, hidden_states, level, mask, ids, rows,
                                                    list(sizes))
        changed = {"hidden_states": hidden_states}
        if self.reorders:               # per-token arguments are ordered as the tokens are
            if isinstance(timestep, torch.Tensor) and timestep.ndim == 2:
                changed["timestep"] = torch.ops.esa.session_order(self.handle, timestep, 1, False)
            rope = inputs.get("image_rotary_emb")
            if rope is not None:
                changed["image_rotary_emb"] = tuple(torch.ops.esa.session_order(self.handle, x, 0, False) for x in rope)
        positional = list(args)
        for name, value in changed.items():
            if name not in kwargs and self.names.index(name) < len(positional):
                positional[self.names.index(name)] = value
            else:
                kwargs = {**kwargs, name: value}
        return tuple(positional), kwargs


class Ear:
    """Wraps transformer.cache_context and notes what it is told. It is an attribute of the one transformer and hides
    the method of its class."""

    def __init__(self, transformer: Any, clock: Clock, prepare: Callable[[], None] | None = None) -> None:
        self.transformer, self.clock, self.original = transformer, clock, transformer.cache_context
        self.prepare = prepare              # called before the forwards of a context

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo)       # a bound method is copied bound to the copy

    @contextlib.contextmanager
    def __call__(self, name: str, **about: Any) -> Iterator[None]:
        before = self.clock.context
        if self.prepare is not None:
            self.prepare()
        self.clock.context = Context(name, about.get("step_index"), about.get("num_inference_steps"))
        try:
            with self.original(name, **about):
                yield
        finally:
            self.clock.context = before


def _put(module: Any, processor: Any) -> None:
    if hasattr(module, "set_processor"):
        module.set_processor(processor)
    else:
        module.processor = processor                    # Mochi's attention has the attribute alone


def install(run: Run, which: int) -> None:
    """Puts processors where they are missing: all of them at first, and those that diffusers has exchanged since."""
    for layer, (name, module) in enumerate(run.modules[which]):
        there: Any = module.processor
        if isinstance(there, Processor):
            if there.handle is not run.handle:
                raise ValueError(f"{name} belongs to another esa.apply: remove that first")
            continue
        if run.family.replaces and type(there).__name__ not in run.family.replaces:
            raise ValueError(
                f"{name} has the attention processor {type(there).__name__}, which esa cannot replace (it knows "
                f"{', '.join(run.family.replaces)})")
        stand_in = run.family.processor or borrow(type(there))          # type: ignore[arg-type]
        ours = stand_in(run.handle, layer, there)
        ours._parallel_config = getattr(there, "_parallel_config", None)
        _put(module, ours)


def uninstall(run: Run, transformer: nn.Module) -> None:
    """The processors that were there before, also in the list that unfuse_qkv_projections would bring back."""
    for _, module in run.family.modules(transformer):
        there: Any = module.processor
        if isinstance(there, Processor) and there.handle is run.handle:
            _put(module, there.original)
    kept = getattr(transformer, "original_attn_processors", None)
    if isinstance(kept, dict):
        for name, processor in kept.items():
            if isinstance(processor, Processor) and processor.handle is run.handle:
                kept[name] = processor.original
