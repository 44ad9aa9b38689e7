# SPDX-License-Identifier: Apache-2.0
"""The video, step and guidance branch a diffusion model is at, learned from what diffusers does anyway. No callback is
needed.

A pipeline calls its transformer once per step and guidance branch (Wan, HunyuanVideo: inside `cache_context("cond")`,
then `("uncond")`) or once per step with both branches in the batch (CogVideoX). Sources, best first:

 1. `Clock.pin(step, branch)`, for loops that are not a pipeline's;
 2. the cache context, if it carries `step_index` (Wan in newer diffusers);
 3. the pipeline: `_current_timestep` is an element of `scheduler.timesteps`, and its index is the step. Only addresses
    are compared; nothing is read from the GPU. A modular pipeline has no such attribute, but its scheduler counts the
    steps it has taken (`step_index`);
 4. the timestep given to the transformer: another value is another step, a larger one another video (timesteps
    descend). Reading it waits for a GPU once per forward.

A new video begins when `scheduler.timesteps` is another tensor (every pipeline call makes a new one, also after a call
that ended in an exception) or when steps go backwards."""
from __future__ import annotations

import dataclasses
from typing import Any

import torch

# Names the pipelines of diffusers give their calls. Others are numbered as they come.
_BRANCHES = {"cond": 0, "cond_uncond": 0, "pred_cond": 0, "uncond": 1, "pred_uncond": 1}


@dataclasses.dataclass(frozen=True)
class Moment:
    """One forward of the transformer. `steps` is None if the number of steps is unknown."""
    video: int
    step: int
    branch: int
    steps: int | None


@dataclasses.dataclass(frozen=True)
class Context:
    """What `transformer.cache_context(name, ...)` said."""
    name: str
    step_index: int | None = None
    num_inference_steps: int | None = None


def _place(t: Any, timesteps: Any) -> int | None:
    """Index of t in timesteps if t is a view of one of its elements."""
    if not (torch.is_tensor(t) and torch.is_tensor(timesteps)) or timesteps.ndim != 1 or t.numel() != 1:
        return None
    try:
        if t.untyped_storage().data_ptr() != timesteps.untyped_storage().data_ptr() or timesteps.stride(0) < 1:
            return None
    except (RuntimeError, NotImplementedError):         # tensors without storage (meta, functional wrappers)
        return None
    index, rest = divmod(t.storage_offset() - timesteps.storage_offset(), timesteps.stride(0))
    return index if rest == 0 and 0 <= index < timesteps.numel() else None


class Clock:
    """Counts for all transformers of one pipeline. `pipe` may be None; `steps` is used where nothing else tells how
    many there are."""

    def __init__(self, pipe: Any = None, steps: int | None = None) -> None:
        self.pipe, self.given_steps = pipe, steps
        self.modular = any(kind.__name__ == "ModularPipeline" for kind in type(pipe).__mro__)
        self.context: Context | None = None
        self.video = self.step = -1
        self._pinned: tuple[int, int] | None = None
        self._restart = True
        self._timesteps: Any = None         # kept alive, so that another tensor cannot get its address
        self._mark: Any = None              # what told steps apart last: a tensor (compared by identity) or a number
        self._seen: set[str] = set()        # names of the calls of this step
        self._names: dict[str, int] = {}

    # ---- what others say

    def begin(self) -> None:
        """The next forward belongs to a new video."""
        self._restart = True
        self._pinned = None

    def pin(self, step: int, branch: int = 0) -> None:
        """The next forwards are step and branch, until pinned again or a new video begins."""
        if self._pinned is not None and step < self._pinned[0]:
            self._restart = True
        self._pinned = (step, branch)

    # ---- what the pipeline shows

    def _scheduler_timesteps(self) -> Any:
        return getattr(getattr(self.pipe, "scheduler", None), "timesteps", None)

    def _total(self) -> int | None:
        if self.context is not None and self.context.num_inference_steps:
            return int(self.context.num_inference_steps)
        if self.pipe is not None and getattr(self.pipe, "_current_timestep", None) is not None:
            total = getattr(self.pipe, "_num_timesteps", None)
            if isinstance(total, int) and total > 0:
                return total
        if self.given_steps:
            return self.given_steps
        timesteps = self._scheduler_timesteps()
        # A scheduler that was never asked for steps holds all its training steps: that says nothing.
        if torch.is_tensor(timesteps) and getattr(getattr(self.pipe, "scheduler", None), "num_inference_steps", None):
            return int(timesteps.numel()) - (self._begin() if self.modular else 0)
        return None

    def _begin(self) -> int:
        """The first step of the scheduler that runs."""
        return int(getattr(self.pipe.scheduler, "begin_index", None) or 0)

    def _counted(self, timesteps: Any) -> int | None:
        """Steps that the scheduler of a modular pipeline has taken in this video, None if it does not count them."""
        scheduler: Any = getattr(self.pipe, "scheduler", None)
        if not self.modular or not torch.is_tensor(timesteps) or not hasattr(scheduler, "step_index"):
            return None
        taken = scheduler.step_index
        return 0 if taken is None else max(0, int(taken) - self._begin())

    def _branch(self, repeated: int) -> int:
        if self.context is None:
            return repeated
        name = self.context.name
        if name in _BRANCHES:
            return _BRANCHES[name]
        return self._names.setdefault(name, 2 + len(self._names))

    # ---- one forward

    def tick(self, timestep: Any = None) -> Moment:
        """Called before each forward of a transformer, in the order of the calls."""
        steps = self._total()
        timesteps = self._scheduler_timesteps() if self.pipe is not None else None
        fresh = self._restart or self.video < 0 or (timesteps is not None and timesteps is not self._timesteps)
        if self._pinned is not None:
            step, branch = self._pinned
            self._settle(fresh, step, timesteps)
            return Moment(self.video, step, branch, steps)
        name = self.context.name if self.context is not None else ""
        if self.context is not None and self.context.step_index is not None:
            step = int(self.context.step_index)
            fresh = fresh or step < self.step or (timesteps is None and step == self.step and name in self._seen)
        else:
            step, fresh = self._learn(fresh, timestep, timesteps, steps, name)
        if fresh or step != self.step:
            self._seen.clear()
            self._repeated = 0
        else:
            self._repeated += 1
        self._seen.add(name)
        self._settle(fresh, step, timesteps)
        return Moment(self.video, step, self._branch(self._repeated), steps)

    _repeated = 0

    def _settle(self, fresh: bool, step: int, timesteps: Any) -> None:
        if fresh:
            self.video += 1
            self._restart = False
        self.step = step
        self._timesteps = timesteps

    def _learn(self, fresh: bool, timestep: Any, timesteps: Any, steps: int | None, name: str) -> tuple[int, bool]:
        """The step and whether a video begins, from the pipeline or the timestep."""
        now = getattr(self.pipe, "_current_timestep", None) if self.pipe is not None else None
        if now is not None:
            place = _place(now, timesteps)
            if place is not None:
                # Pipelines that start from a video run the last of the scheduler's steps only.
                step = max(0, place - (timesteps.numel() - steps)) if steps else place
                return step, fresh or step < self.step
            another, self._mark = now is not self._mark, now
            return (0 if fresh else self.step + another), fresh
        counted = self._counted(timesteps)
        if counted is not None:
            return counted, fresh or counted < self.step
        value = _value(timestep)
        last, self._mark = self._mark, value
        if fresh or not isinstance(last, float) or value is None:
            return 0, True
        # The same timestep again is the other guidance branch, unless its name, or a third call, says it is another
        # video.
        again = value == last and (name in self._seen if name else self._repeated >= 1)
        if value > last or again:
            return 0, True
        return self.step + (value != last), False


def _value(timestep: Any) -> float | None:
    """The timestep as a number: of several the largest (image-to-video gives 0 to the frames it must not change)."""
    if timestep is None:
        return None
    if torch.is_tensor(timestep):
        return float(timestep.max().item()) if timestep.numel() else None
    return float(timestep)
