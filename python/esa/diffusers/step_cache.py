# SPDX-License-Identifier: Apache-2.0
"""`EsaConfig(step_cache=...)`: steps whose output is expected to differ little from the last computed one use that
output, and the forward of the transformer is left out.

The rule is the library's (src/rules/step_cache.h, the same as in the native engine), reached through the session, which
knows the steps and the warm-up. Here are the parts that need torch: outputs are kept, one for each guidance branch, and
the sums of magnitudes that the rule reads are made on the device, with one read back per step. All branches of a step
are computed or left out together.

A `Gate` stands in for `transformer.forward`, because a hook cannot leave a forward out. Accelerate and diffusers'
caches exchange `forward`, too, so the gate is put back, outside of theirs, before it is needed: when a cache context is
entered, and at each forward for the next one."""
from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from ..core.library import EsaError
from .clock import Moment

if TYPE_CHECKING:
    from .run import Run

# Guidance branches that the rule knows.
_BRANCHES = 2


def _magnitudes(x: torch.Tensor) -> torch.Tensor:
    return x.abs().sum(dtype=torch.float32 if x.device.type == "mps" else torch.float64)


def _difference(x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return _magnitudes(x.float() - before.float())


def _sample(output: Any) -> torch.Tensor:
    """The one tensor that a transformer returns."""
    found = output[0] if isinstance(output, tuple) else getattr(output, "sample", None)
    if not isinstance(found, torch.Tensor) or len(output) != 1:
        raise EsaError(
            "step_cache keeps the one tensor that a transformer returns, but this one returned "
            f"{type(output).__name__}: set step_cache=0")
    return found


class Gate:
    """Stands in for `forward` of one transformer: runs it, or returns what it returned at an earlier step."""

    def __init__(self, cache: StepCache, which: int, original: Any) -> None:
        self.cache, self.which, self.original = cache, which, original
        self.__wrapped__ = original             # inspect.signature shows the arguments of the model
        self.__name__ = "forward"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo)       # a bound method is copied bound to the copy

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """cache-dit binds the forward that it puts back; a gate that is no longer needed ends there."""
        return self.original if self.cache.closed else self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.cache.passing(self, args, kwargs)


def _pass(gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Not traced by torch.compile, and neither are `before` and `after`; the original forward is compiled as usual."""
    branch, kept = gate.cache.before(gate, args, kwargs)
    if kept is not None:
        return kept
    output = gate.original(*args, **kwargs)
    if branch is not None:
        gate.cache.after(branch, output)
    return output


def _before(gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | None, Any]:
    """The guidance branch of this forward, None if it does not concern the cache; and what it returns if it is left
    out."""
    cache = gate.cache
    moment = cache.take()
    if moment is None:                  # removed, a gate inside another one, or a call that skips the root hook
        return None, None
    kept = cache.ask(moment, gate.which, cache.run.argument(gate.which, "hidden_states", args, kwargs))
    if kept is None:
        return moment.branch, None
    if cache.run.argument(gate.which, "return_dict", args, kwargs) is False:
        return moment.branch, (kept,)
    if cache.kind is None:
        from diffusers.models.modeling_outputs import Transformer2DModelOutput
        cache.kind = Transformer2DModelOutput
    return moment.branch, cache.kind(sample=kept)


class StepCache:
    """The kept outputs of one run, and where it stands."""

    def __init__(self, run: Run, threshold: float) -> None:
        self.run, self.threshold = run, threshold
        self.passing: Any = torch.compiler.disable(_pass, recursive=False)
        self.before: Any = torch.compiler.disable(_before)
        self.after: Any = torch.compiler.disable(self.keep)
        self.closed = False
        self.kind: Any = None                           # what the transformer returns unless a tuple is asked for
        self._pending: Moment | None = None             # the forward that the root hook has announced
        self._at: Moment | None = None                  # the first forward of the step in hand
        self._which = 0
        self._x: torch.Tensor | None = None             # its input
        self._skip = False
        self._session: Any = None                       # the one whose rule decides in this video
        self._irregular = False                         # a branch came that was not there before: begin anew
        self._called: set[int] = set()                  # branches of this step
        self._kept: dict[int, torch.Tensor] = {}        # outputs of the last computed step, by branch
        self._before: dict[int, torch.Tensor] = {}      # and of the one before it
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}      # their size and change

    # ---- life

    def install(self, which: int) -> None:
        """Puts the gate in front of whatever `forward` is now, unless it is there."""
        transformer: Any = self.run.transformers[which]
        there = transformer.forward
        if not self.closed and not (isinstance(there, Gate) and there.cache is self):
            transformer.forward = Gate(self, which, there)

    def close(self) -> None:
        """Takes the gates out. One that others have wrapped since stays there and passes every call on."""
        self.closed = True
        for transformer in self.run.transformers:
            gate = transformer.__dict__.get("forward")
            if not (isinstance(gate, Gate) and gate.cache is self):
                continue
            of_class = getattr(gate.original, "__func__", None) is type(transformer).forward
            if of_class and gate.original.__self__ is transformer:
                del transformer.forward
            else:
                transformer.forward = gate.original     # type: ignore[method-assign]
        self._forget()

    def _forget(self) -> None:
        self._irregular = self._skip = False
        self._x = self._session = None
        for kept in (self._kept, self._before, self._sums):
            kept.clear()

    # ---- one forward

    def announce(self, moment: Moment) -> None:
        """The root hook: this forward comes next."""
        self._pending = moment

    def take(self) -> Moment | None:
        moment, self._pending = self._pending, None
        return None if self.closed else moment

    def ask(self, moment: Moment, which: int, x: torch.Tensor) -> torch.Tensor | None:
        """A copy of the kept output if this forward is left out, else None."""
        if self._at is None or (moment.video, moment.step) != (self._at.video, self._at.step):
            self._arrive(moment, which, x)
        self._check(moment)
        self._called.add(moment.branch)
        kept = self._kept.get(moment.branch) if self._skip else None
        if kept is None:
            self._irregular = self._irregular or self._skip
            self.run.skipped.discard(moment.step)
            return None
        self.run.computed.discard(moment.step)
        self.run.skipped.add(moment.step)
        return kept.clone()

    def keep(self, branch: int, output: Any) -> None:
        """The output of a forward that ran."""
        v = _sample(output).detach().clone()            # pipelines may change theirs
        self.kind = self.kind if isinstance(output, tuple) else type(output)
        before = self._before.get(branch)
        fits = before is not None and before.shape == v.shape and before.device == v.device
        self._irregular = self._irregular or (bool(self._before) and not fits)
        size = _magnitudes(v.float())
        self._kept[branch] = v
        self._sums[branch] = (size, _difference(v, before) if fits and before is not None else torch.zeros_like(size))

    def _check(self, moment: Moment) -> None:
        if moment.branch >= _BRANCHES:
            raise EsaError(
                f"the model was called {moment.branch + 1} times in step {moment.step}; step_cache knows at most "
                f"{_BRANCHES} guidance passes: set step_cache=0")
        if moment.branch in self._called:
            raise EsaError(
                f"guidance branch {moment.branch} came twice in step {moment.step}: step_cache follows loops that call "
                "the model once for each step and branch. Set step_cache=0, or say where a new video begins with "
                "handle.begin()")

    def _arrive(self, moment: Moment, which: int, x: torch.Tensor) -> None:
        """The first forward of a step: decides for all its branches."""
        if moment.steps is None:
            raise EsaError(
                "step_cache needs the number of steps, which is not known here (no pipeline runs the transformer): "
                "esa.apply(transformer, config, steps=50)")
        at, last = self._at, self._x
        goes_on = (at is not None and last is not None and bool(self._kept) and not self._irregular
                   and (moment.video, moment.step) == (at.video, at.step + 1) and which == self._which
                   and (x.shape, x.dtype, x.device) == (last.shape, last.dtype, last.device))
        if goes_on and at is not None and last is not None:
            self._skip = self._decide(at, _difference(x, last))
        else:
            check_parallel(self.run)
            self._forget()
        if not self._skip:
            self._before, self._kept, self._sums = self._kept, {}, {}
        self._at, self._which, self._x = moment, which, x.detach().clone()
        self._called = set()

    def _decide(self, at: Moment, change: torch.Tensor) -> bool:
        """Asks the rule about the step after `at`. The one place where the host waits for the device."""
        if self._session is None:
            # kept for the video: another call may have another session
            self._session = self.run.session_of(at)
            if self._session is None:                   # another cache left all attention out so far
                return False
            self._session.cache_begin(self.threshold)
        computed = not self._skip
        sums = [s.to(change.device) for b in range(_BRANCHES) for s in self._sums.get(b, ())] if computed else []
        x_change, *rest = torch.stack([change, *sums]).tolist()
        pairs = {b: (rest.pop(0), rest.pop(0)) for b in sorted(self._sums)} if computed else {}
        size, changes = zip(*(pairs.get(b, (0.0, 0.0)) for b in range(_BRANCHES)))
        return bool(self._session.cache_next(at.step, computed, x_change, size, changes))


def check_parallel(run: Run) -> None:
    """Processes that share a video would have to decide alike."""
    for modules in run.modules:
        if any(getattr(module.processor, "_parallel_config", None) is not None for _, module in modules):
            raise EsaError("step_cache does not run under context parallelism: set step_cache=0")
