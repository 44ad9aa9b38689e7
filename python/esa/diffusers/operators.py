# SPDX-License-Identifier: Apache-2.0
"""The torch operators through which a compiled or eager model reaches a run.

    esa::session_enter(handle, which, hidden_states, timestep?, text_mask?, ids?, rows?, sizes) -> hidden_states
    esa::session_attention(handle, layer, query, key, value, mask?) -> out                    (B, N, H, D) in and out
    esa::session_order(handle, x, dim, back) -> x with its tokens ordered, or put back        (reorder.py)

All are opaque to torch.compile: counting steps, choosing masks and calling C happen inside, at run time, and do not
become part of a graph. `handle` and `layer` are tensors without dimensions on the CPU, because Python numbers would be
compiled in, layer by layer. session_enter returns a copy of its input (operators may not return their arguments), so
that a graph cannot drop it or move it behind the attention it prepares. Forward only: asking for a gradient is an
error."""
from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..core.torch_op import _TAGS, refuse_backward

if TYPE_CHECKING:
    from .run import Run

_runs: weakref.WeakValueDictionary[int, "Run"] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register(run: Run) -> torch.Tensor:
    """A handle for a run, valid while the run lives."""
    number = next(_numbers)
    _runs[number] = run
    return torch.tensor(number, dtype=torch.int64)


def _find(handle: torch.Tensor) -> Run:
    run = _runs.get(int(handle))
    if run is None:
        raise RuntimeError(
            "esa was removed from this model, but one of its attention processors is still in use: set the processors "
            "anew")
    return run


# Schemas are written out: torch 2.4 cannot read them from postponed annotations.
@functools.partial(torch.library.custom_op, "esa::session_attention", mutates_args=(), **_TAGS,
                   schema="(Tensor handle, Tensor layer, Tensor query, Tensor key, Tensor value, Tensor? mask=None) "
                   "-> Tensor")
def _session_attention(handle: torch.Tensor, layer: torch.Tensor, query: torch.Tensor, key: torch.Tensor,
                       value: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return _find(handle).attention(int(layer), query, key, value, mask)


@_session_attention.register_fake
def _(handle: torch.Tensor, layer: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
      mask: torch.Tensor | None = None) -> torch.Tensor:
    return query.new_empty(query.shape)


@functools.partial(torch.library.custom_op, "esa::session_enter", mutates_args=(), **_TAGS,
                   schema="(Tensor handle, Tensor which, Tensor hidden_states, Tensor? timestep, Tensor? text_mask, "
                   "Tensor? ids, Tensor? rows, SymInt[] sizes) -> Tensor")
def _session_enter(handle: torch.Tensor, which: torch.Tensor, hidden_states: torch.Tensor,
                   timestep: torch.Tensor | None, text_mask: torch.Tensor | None, ids: torch.Tensor | None,
                   rows: torch.Tensor | None, sizes: Sequence[int]) -> torch.Tensor:
    _find(handle).enter(int(which), sizes, hidden_states.device, timestep, text_mask, ids, rows)
    return hidden_states.clone()


@_session_enter.register_fake
def _(handle: torch.Tensor, which: torch.Tensor, hidden_states: torch.Tensor, timestep: torch.Tensor | None,
      text_mask: torch.Tensor | None, ids: torch.Tensor | None, rows: torch.Tensor | None,
      sizes: Sequence[int]) -> torch.Tensor:
    return torch.empty_like(hidden_states)


@functools.partial(torch.library.custom_op, "esa::session_order", mutates_args=(), **_TAGS,
                   schema="(Tensor handle, Tensor x, int dim, bool back) -> Tensor")
def _session_order(handle: torch.Tensor, x: torch.Tensor, dim: int, back: bool) -> torch.Tensor:
    return _find(handle).order(x, dim, back)


@_session_order.register_fake
def _(handle: torch.Tensor, x: torch.Tensor, dim: int, back: bool) -> torch.Tensor:
    return x.new_empty(x.shape)


# Inputs may require gradients (a model used without no_grad); only asking for them is an error.
_session_attention.register_autograd(refuse_backward)
_session_order.register_autograd(refuse_backward)
_session_enter.register_autograd(lambda ctx, gradient: (None, None, gradient, None, None, None, None, None))
