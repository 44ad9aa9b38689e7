# SPDX-License-Identifier: Apache-2.0
"""LTX-Video and LTX-2. Latents come packed, [B, tokens, C]; the grid comes beside them, or positions do. Text comes by
cross-attention. LTX-2 makes sound too: only the video's self-attention (attn1) is esa's.

Frames that a picture or clip is given for (LTXConditionPipeline) stand in front of the video as frames of their own;
LTX2ConditionPipeline appends theirs behind it. LTX-2, 2.3 and 2.5 share a class and differ in its config: gates, rotary
positions in halves, modulation of the text, pictures between. Their attention calls are the same."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import REST, Family, Sizes


def _sizes(config: Any, inputs: Mapping[str, Any]) -> Sizes:
    frames, height, width = inputs.get("num_frames"), inputs.get("height"), inputs.get("width")
    if frames is None or height is None or width is None:
        return 0, 0, 0, 0, REST                                 # video_coords tell
    return frames, height, width, 0, REST                       # the in-context pipeline appends its references


# 121 frames of 544 x 960 are 8,160 tokens, of whose arithmetic attention is 22 %; at twice the size, the second stage,
# it is 53 % of 32,640 tokens.
_SHORT = 8192

LTX = Family(
    name="LTX-Video", transformer_classes=("LTXVideoTransformer3DModel", ), attention=("transformer_blocks.*.attn1", ),
    sizes=_sizes, ids="video_coords", replaces=("LTXVideoAttnProcessor", "LTXVideoAttentionProcessor2_0"), batched=True,
    pipelines=("LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline", "LTXI2VLongMultiPromptPipeline"))
LTX2 = Family(
    name="LTX-2", transformer_classes=("LTX2VideoTransformer3DModel", ), attention=("transformer_blocks.*.attn1", ),
    sizes=_sizes, ids="video_coords", replaces=("LTX2AudioVideoAttnProcessor", "LTX2PerturbedAttnProcessor"),
    pipelines=("LTX2Pipeline", "LTX2ImageToVideoPipeline", "LTX2ConditionPipeline", "LTX2InContextPipeline",
               "LTX2ModularPipeline"),
    batched=True, short=_SHORT)
