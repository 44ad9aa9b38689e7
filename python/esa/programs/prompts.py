# SPDX-License-Identifier: Apache-2.0
"""The built-in prompts: two text files beside this one, which the build also puts into the `esa` command."""
from __future__ import annotations

import pathlib


def _lines(name: str) -> tuple[str, ...]:
    text = (pathlib.Path(__file__).parent / name).read_text(encoding="utf-8")
    return tuple(line for line in text.splitlines() if line and not line.startswith("#"))


TINY = _lines("prompts_tiny.txt")
LARGE = _lines("prompts_large.txt")
BUILT_IN = len(LARGE)


def built_in(number: int, *, tiny: bool = False) -> list[str]:
    """The first so many prompts.

    >>> built_in(1, tiny=True)
    ['a red ball rolls to the right over a blue floor']
    """
    if not 1 <= number <= BUILT_IN:
        raise ValueError(f"there are {BUILT_IN} built-in prompts, {number} were asked for")
    return list((TINY if tiny else LARGE)[:number])
