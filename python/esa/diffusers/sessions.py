# SPDX-License-Identifier: Apache-2.0
"""The sessions of a run: one for each geometry of a video.

Most models have one. Stable Diffusion 3.5 attends with and without text, and a model that calls once per guidance
branch may have prompts of two lengths. The next video of the same geometry goes on in the same session; what the last
video did not need, or needed for another size, is freed before something new is made."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.library import EsaError
from ..core.session import Stats
from .families import Geometry


@dataclasses.dataclass(frozen=True)
class Key:
    """What a session is made for."""
    geometry: Geometry
    steps: int
    device: torch.device
    branches: int = 0                               # that run at each step; 0: unknown, or it does not matter

    def __str__(self) -> str:
        text = self.geometry.text_front + self.geometry.text_back
        return f"{self.geometry.grid} video tokens, {text} of text and {self.steps} steps"


class Sessions:
    """Makes sessions with `make` as calls need them."""

    def __init__(self, make: Callable[[Key], Any]) -> None:
        self.make = make
        self.last: Any = None                       # the session of the last call
        self._now: dict[Key, Any] = {}              # of this video
        self._before: dict[Key, Any] = {}           # of the video before, not needed in this one yet

    def next_video(self) -> None:
        self._before, self._now = self._now, {}

    def get(self, key: Key, recording: bool) -> Any:
        """The session for a call of this video."""
        if key not in self._now:
            session = self._before.pop(key, None)
            if session is None:
                other = next((k for k in (*self._before, *self._now)), None)
                if recording and other is not None:
                    raise EsaError(f"a recording holds one size: it was begun with {other}, this call has {key}")
                self._before.clear()                # first, because both would hold GPU memory
                self.last = None
                session = self.make(key)
            session.begin()
            self._now[key] = session
        self.last = self._now[key]
        return self.last

    def trim(self) -> None:
        """Gives the memory of carried differences back, also of a video that was broken off. Statistics stay."""
        self._before.clear()
        for session in self._now.values():
            session.trim()

    def stats(self, layer: int, step: int) -> Stats:
        """Of all sessions of this video."""
        return combine([(session.stats(layer, step), key.geometry.tokens) for key, session in self._now.items()])


def combine(parts: Sequence[tuple[Stats, int]]) -> Stats:
    """Statistics of calls of several sizes, given with their numbers of tokens, as one. Counts and times are summed,
    densities are means over sparse calls and ages over carried ones, work is weighed by what dense attention would
    cost."""
    if len(parts) == 1:
        return parts[0][0]

    def mean(name: str, weights: Sequence[float]) -> float:
        pairs = [(getattr(s, name), x) for (s, _), x in zip(parts, weights) if x and not math.isnan(getattr(s, name))]
        total = sum(x for _, x in pairs)
        return sum(value * x for value, x in pairs) / total if total else math.nan
    sparse = [float(s.sparse_calls) for s, _ in parts]
    cost = [float(s.calls) * tokens * tokens for s, tokens in parts]
    values: dict[str, Any] = {
        "density_asked": parts[0][0].density_asked,
        "density": mean("density", sparse),
        "mass": mean("mass", sparse),
        "work": mean("work", cost),
        "work_asked": mean("work_asked", cost),
        "carry_age": mean("carry_age", [float(s.carried_calls) for s, _ in parts]),
        "kernel": next((s.kernel for s, _ in parts if s.kernel), "")
    }
    # Every other field is a count or a time, so a new one is summed too.
    names = [f.name for f in dataclasses.fields(Stats) if f.name not in values]
    return Stats(**values, **{name: sum(getattr(s, name) for s, _ in parts) for name in names})
