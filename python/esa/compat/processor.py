# SPDX-License-Identifier: Apache-2.0
"""ESA's online mode under its own names.

    from esa.processor import sparse_processor_mode, _make_step_callback
    with sparse_processor_mode(pipe, mean_budget=0.5) as state:
        video = pipe(prompt, callback_on_step_end=_make_step_callback(state)).frames

The callback is not needed: steps are learned from the pipeline. With or without it a step is counted once."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ..core.config import EsaConfig
from ..diffusers.apply_model import Handle, apply
from . import K_BLOCK, Q_BLOCK

__all__ = ["K_BLOCK", "Q_BLOCK", "_make_step_callback", "sparse_processor_mode"]


@contextlib.contextmanager
def sparse_processor_mode(pipe: Any, mean_budget: float = 0.5, warmup_frac: float = 0.2, dense_first_layer: bool = True,
                          **settings: Any) -> Iterator[Handle]:
    """Entropy-based sparse attention inside the `with` block; yields the state (an `esa.apply` handle: `.stats()`,
    `.step`).

    mean_budget
        Kept fraction of key blocks, on average over the heads.
    warmup_frac, dense_first_layer
        The first share of the steps, and layer 0, run dense.
    settings
        Other fields of `EsaConfig`. As in the original, nothing stands in for skipped blocks (tail="pooled" changes
        that) and tokens stay in raster order (order="hilbert" does).

    A second video inside the block starts from step 0 again. Leaving the block, also by an exception, restores the
    pipeline."""
    if "budget" in settings:
        raise TypeError("sparse_processor_mode() calls the budget mean_budget")
    settings = {"selector": "entropy", "tail": "none", **settings}
    if settings["selector"] != "rf_v2":
        settings.setdefault("order", "raster")          # the original does not reorder
    if settings["selector"] == "entropy" and settings.get("block") is None:
        settings["block"] = (Q_BLOCK, K_BLOCK)
    config = EsaConfig(budget=mean_budget, warmup_frac=warmup_frac, dense_first_layer=dense_first_layer, **settings)
    with apply(pipe, config) as state:
        yield state


def _make_step_callback(state: Handle) -> Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]:
    """A `callback_on_step_end` for pipelines: notes that step i is done and hands its tensors back unchanged."""
    def on_step_end(pipe: Any, i: int, t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        state.steps_done = i + 1
        return kwargs
    return on_step_end
