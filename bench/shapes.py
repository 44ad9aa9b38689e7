# SPDX-License-Identifier: Apache-2.0
"""The shapes of bench/shapes.def, for Python.

    from shapes import SHAPES
    SHAPES["wan-1.3b-480p"].tokens      # 32760
"""
from __future__ import annotations

import pathlib
import re
import typing


class Shape(typing.NamedTuple):
    heads: int
    tokens: int                     # video and text
    head_dim: int
    grid: tuple[int, int, int]      # t, h, w of the video tokens
    text: tuple[int, int]           # tokens in front and behind


def read(path):
    shapes = {}
    for name, numbers in re.findall(r'^SHAPE\("([^"]+)", ([\d, ]+)\)', path.read_text(), re.M):
        heads, head_dim, t, h, w, front, back = map(int, numbers.split(","))
        shapes[name] = Shape(heads, t * h * w + front + back, head_dim, (t, h, w), (front, back))
    return shapes


SHAPES = read(pathlib.Path(__file__).with_name("shapes.def"))
