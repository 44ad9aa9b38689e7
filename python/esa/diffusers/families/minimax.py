# SPDX-License-Identifier: Apache-2.0
"""MiniMax-H3. One packed sequence [text][keyframes or references][audio][video] and full self-attention over it; there
is no cross-attention. Only the target video has a grid, which `position_ids` and `video_indices` tell; the tokens in
front of it are always attended. The token refiner's attention (text alone) stays diffusers'.

One forward serves rows of several noise levels: `timestep` holds the distinct levels, rising to 1, and
`timestep_indices` that of each row. Guidance is distilled into the weights."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .base import Family, Sizes


def _sizes(config: Any, inputs: Mapping[str, Any]) -> Sizes:
    return 0, 0, 0, 0, 0                                        # position_ids and video_indices tell


def _noise(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """That of the target video, whose rows are the last."""
    levels, places, rows = (inputs.get(name) for name in ("timestep", "timestep_indices", "video_indices"))
    if levels is None or places is None or rows is None:
        return None                                             # the model itself reports what is missing
    return 1 - levels.index_select(0, places.index_select(0, rows[-1:]))


MINIMAX_H3 = Family(
    name="MiniMax-H3", transformer_classes=("MiniMaxH3Transformer3DModel", ), attention=("transformer_blocks.*.attn", ),
    sizes=_sizes, ids="position_ids", rows="video_indices", noise=_noise, replaces=("MiniMaxH3AttnProcessor", ),
    pipelines=("MiniMaxH3ModularPipeline", ), guided=False)
