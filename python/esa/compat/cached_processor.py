# SPDX-License-Identifier: Apache-2.0
"""ESA's cached mode under its own name: masks come from a file made by calibration, nothing is selected at run time.

    with cached_processor_mode(pipe, "masks/wan-1.3b-720p.pt", budget=0.5) as state:
        video = pipe(prompt, height=720, width=1280).frames

The file is one of ours (`esa calibrate`, `python -m esa.calibrate`) whatever its name, or one of the original's
torch files."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from ..core.config import EsaConfig
from ..diffusers.apply_model import Handle, apply


@contextlib.contextmanager
def cached_processor_mode(pipe: Any, masks: str | os.PathLike[str], budget: float = 0.5, warmup_frac: float = 0.2,
                          dense_first_layer: bool = True, **settings: Any) -> Iterator[Handle]:
    """Sparse attention with precomputed masks inside the `with` block; yields the state (an `esa.apply` handle).

    masks
        A mask file. It must have been made for this model, size and number of steps (step_map="nearest" takes another
        number).
    budget
        One the file has masks for, or any other if it holds importance: then they are derived once, now.
    settings
        Other fields of `EsaConfig` (tail, step_map, ...)."""
    config = EsaConfig(masks=masks, budget=budget, warmup_frac=warmup_frac, dense_first_layer=dense_first_layer,
                       **{"tail": "none", **settings})
    with apply(pipe, config) as state:
        yield state
