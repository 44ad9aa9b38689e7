# SPDX-License-Identifier: Apache-2.0
"""The torch operator of `esa.sparse_attention`:

    esa::attention(Tensor query, Tensor key, Tensor value, float[] settings, str input_layout) -> Tensor

Opaque to torch.compile (a fake tells the result's shape: contiguous, like query), so a model that calls it compiles
into one graph. It holds no state: layers and steps that call it with the same settings share one graph. Under autocast
its inputs are cast as those of torch's own attention are. Forward only. On a GPU it enqueues on torch's current stream
and, after the first call of a shape, neither allocates device memory of its own nor waits; what lies under it
decides per call, so it is marked as unfit for capture into CUDA graphs."""
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from . import sparse

SCHEMA = "(Tensor query, Tensor key, Tensor value, float[] settings, str input_layout) -> Tensor"
# torch 2.9 and newer know the tag; older ones have no word for it.
_KNOWS = hasattr(torch.Tag, "cudagraph_unsafe") and "tags" in inspect.signature(torch.library.custom_op).parameters
_TAGS: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if _KNOWS else {}


@functools.partial(torch.library.custom_op, "esa::attention", mutates_args=(), schema=SCHEMA, **_TAGS)
def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: list[float],
               input_layout: str) -> torch.Tensor:
    return sparse.run(query, key, value, tuple(settings), input_layout)


@_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: list[float],
      input_layout: str) -> torch.Tensor:
    return query.new_empty(query.shape)


def refuse_backward(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError(
        "esa computes attention forward only: gradients are not available (use torch.no_grad(), or detach the inputs)")


_attention.register_autograd(refuse_backward)


def autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tensors in autocast's dtype where autocast is on, as torch casts those of scaled_dot_product_attention."""
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def cast_under_autocast(library: torch.library.Library, name: str, device: str, operator: Callable[..., Any]) -> None:
    """Makes autocast cast the operator's tensors also where it is called by its own name."""
    def run(*arguments: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return operator(*(_cast(a, dtype) if isinstance(a, torch.Tensor) else a for a in arguments))

    library.impl(name, run, f"Autocast{device.upper()}")


_library = torch.library.Library("esa", "FRAGMENT")
for _device in ("cpu", "cuda"):
    cast_under_autocast(_library, "attention", _device, torch.ops.esa.attention.default)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, settings: list[float],
              input_layout: str) -> torch.Tensor:
    return torch.ops.esa.attention(q, k, v, settings, input_layout)
