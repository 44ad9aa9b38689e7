# SPDX-License-Identifier: Apache-2.0
"""`esa.apply` puts sparse attention into a diffusers pipeline or transformer; `Handle.remove` takes it out.

A model gets one processor per self-attention module, one forward pre-hook at the transformer, hooks that order its
tokens, and a wrapper around `cache_context` that listens; with a step cache also a gate in front of `forward`
(step_cache.py). Classes and libraries are not patched, so two pipelines do not interfere, and `remove` leaves no trace.
The pre-hook is torch's own, not a replaced `forward`, because accelerate's offloading exchanges `forward` between two
videos."""
from __future__ import annotations

import functools
import math
import os
import warnings
from types import TracebackType
from typing import Any

from torch import nn

from ..core import structs as T
from ..core.config import EsaConfig
from ..core.session import Stats
from . import reorder
from .clock import Clock
from .families import Family, detect, known_classes
from .hooks import Ear, RootHook, install, uninstall
from .run import Recording, Run

_MARK = "_esa_handle"
# Transformers of a pipeline in the order they run; transformer_ref is MiniMax-H3's for references.
PARTS = ("transformer", "transformer_2", "transformer_ref")


def apply(target: Any, config: EsaConfig | None = None, *, steps: int | None = None,
          record: Recording | bool | None = None, resume: str | None = None, model: str | None = None,
          config_hash: str | None = None) -> Handle:
    """Puts sparse attention into a diffusers pipeline (all its transformers) or into one transformer.

    target
        A pipeline or a transformer that `esa.supported()` lists, recognised by class; others are an error that lists
        these, until `esa.register_family` describes them.
    config
        `EsaConfig`; None: its defaults (selector "error" with the preset "balanced"). Without an order in the config
        each head has its own, adaptive one; with other selectors tokens are put into Hilbert order (rf_v2: tile; a mask
        file: the file's).
    steps
        Steps of a video, for a transformer without its pipeline. A pipeline knows them.
    record, resume, model, config_hash
        Calibration: everything runs dense and block importance (selector "error": error scores) is recorded
        (`Handle.save_recording`). resume adds an earlier recording; model and config_hash are written into the file.

    Returns a handle; `handle.remove()`, or leaving its `with` block, restores the model. ::

        with esa.apply(pipe, esa.EsaConfig(budget=0.3)) as handle:
            video = pipe("A cat walking on grass").frames
        print(handle.report())
    """
    config = EsaConfig.check(config)
    if steps is not None and (not T.whole(steps) or steps < 1):
        raise ValueError(f"steps must be an integer of at least 1, not {steps!r}")
    if record is not None and not isinstance(record, (bool, Recording)):
        raise TypeError(f"record must be True, False or an esa.diffusers.Recording, not {type(record).__name__}")
    if resume is not None and not record:
        raise ValueError("resume goes on with a recording: it needs record=True")
    if resume is not None and not os.path.isfile(resume):
        raise FileNotFoundError(f"there is no recording {os.fspath(resume)!r} to resume")
    pipe, transformers, family = _look(target)
    for transformer in transformers:
        if getattr(transformer, _MARK, None) is not None:
            raise ValueError(
                f"esa is already applied to this {type(transformer).__name__}: remove it first (handle.remove())")
    recording = Recording() if record is True else record or None
    run = Run(family, transformers, config, Clock(pipe, steps), record=recording, resume=resume, model=model,
              config_hash=config_hash)
    return Handle(run)


def _look(target: Any) -> tuple[Any, list[nn.Module], Family]:
    """Pipeline (or None), its transformers in the order they run, and their family."""
    if isinstance(target, nn.Module):
        pipe, parts = None, [target]
    else:
        pipe = target
        parts = [
            part for part in (getattr(target, name, None) for name in PARTS)
            if isinstance(part, nn.Module)
        ]
        if not parts and any(getattr(target, name, "none") is None for name in PARTS):
            raise TypeError(
                f"this {type(target).__name__} was loaded without its transformer: there is nothing to apply esa to "
                "(modular pipelines: load_components() first)")
        if isinstance(target, (str, os.PathLike)):
            raise TypeError(
                "esa.apply takes a pipeline or a transformer, not a name: "
                f"esa.models.load_pipeline({os.fspath(target)!r}) loads one")
    parts = [_unwrap(part) for part in parts]
    families = [detect(part) for part in parts]
    if not parts or None in families or len({f.name for f in families if f is not None}) != 1:
        unknown = next((type(p).__name__ for p, f in zip(parts, families) if f is None), type(target).__name__)
        raise TypeError(
            f"esa.apply does not know {unknown} (esa.register_family teaches it another model); it takes pipelines "
            f"with, or transformers of the classes: {known_classes()}")
    assert families[0] is not None
    return pipe, parts, families[0]


def _unwrap(module: nn.Module) -> nn.Module:
    """The model inside torch.compile's wrapper."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


class Handle:
    """Sparse attention in one model. `step`, `steps` and `videos` say where it stands."""

    def __init__(self, run: Run) -> None:
        self._run: Run = run
        self._hooks: list[Any] = []
        self._ears: list[Ear] = []
        self._applied = True
        self._told = False
        self.steps_done = 0             # what a step callback said last (esa.processor._make_step_callback)
        try:
            for which, transformer in enumerate(run.transformers):
                setattr(transformer, _MARK, self)
                install(run, which)
                self._hooks.append(transformer.register_forward_pre_hook(RootHook(run, which), with_kwargs=True))
                if run.cache is not None:
                    run.cache.install(which)
                if run.reorders:
                    self._hooks += reorder.install(run, transformer)
                if hasattr(transformer, "cache_context"):
                    prepare = None if run.cache is None else functools.partial(run.cache.install, which)
                    ear = Ear(transformer, run.clock, prepare)
                    self._ears.append(ear)
                    transformer.cache_context = ear     # type: ignore[assignment]
        except BaseException:
            self.remove()
            raise

    # ---- life

    def remove(self) -> None:
        """Restores the model. May be called again; statistics stay readable."""
        if not self._applied:
            return
        self._applied = False
        for hook in self._hooks:
            hook.remove()
        for ear in self._ears:
            if ear.transformer.__dict__.get("cache_context") is ear:
                del ear.transformer.cache_context
        for transformer in self._run.transformers:
            uninstall(self._run, transformer)
            if getattr(transformer, _MARK, None) is self:
                delattr(transformer, _MARK)
        self._run.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a model is a model without esa: it has no handle."""

    def __enter__(self) -> Handle:
        if not self._applied:
            raise ValueError("this handle was removed, the model inside would run dense: call esa.apply again")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.remove()

    @property
    def applied(self) -> bool:
        return self._applied

    # ---- loops of one's own

    def begin(self) -> None:
        """The next forward begins a new video. Pipelines need no such call."""
        self._run.clock.begin()

    def pin(self, step: int, branch: int = 0) -> None:
        """The next forwards are this step and guidance branch: for loops that are not a pipeline's."""
        for name, value in (("step", step), ("branch", branch)):
            if not T.whole(value) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, not {value!r}")
        self._run.clock.pin(step, branch)

    # ---- what ran

    @property
    def config(self) -> EsaConfig:
        return self._run.config

    @property
    def family(self) -> str:
        return self._run.family.name

    @property
    def layers(self) -> int:
        return self._run.layers

    @property
    def step(self) -> int:
        """The step of the last forward, -1 before the first."""
        return self._run.clock.step

    @property
    def steps(self) -> int | None:
        """Steps of the video in hand, None before the first forward."""
        return self._run.steps

    @property
    def videos(self) -> int:
        """Videos begun so far."""
        return self._run.videos

    def stats(self, layer: int = -1, step: int = -1) -> Stats:
        """What ran in the video in hand (or the last one): of all, of one layer, of one step, or of one layer at one
        step. Warns once if a whole video took more than 2 % more work than was asked for."""
        found = self._run.stats(layer, step)
        whole = layer < 0 and step < 0 and self.steps is not None and self.step + 1 == self.steps
        # Steps and blocks that a cache leaves out were to take less than their share.
        whole = whole and found.calls == self._run.stats(step=0).calls * (self.steps or 0)
        if whole and not self._told and found.work > 1.02 * found.work_asked:
            self._told = True
            warnings.warn(
                f"work {found.work_asked:.3f} was asked for, but {found.work:.3f} was spent: blocks are whole, and "
                "every row keeps at least one, which counts in short videos", stacklevel=2)
        return found

    def report(self) -> str:
        """The same as text: a line in all and one per step."""
        total = self.stats()
        lines = [
            f"{self.family}, {self.layers} layers, kernel {total.kernel or 'none'}: {total.calls} calls, "
            f"{total.dense_calls} dense, "
            f"{total.sparse_calls} sparse at density {total.density:.3f} (asked {total.density_asked:.3f}), "
            f"{total.fallback_calls} fallbacks, attention work {total.work:.3f} of dense"
            + ("" if math.isnan(total.work_asked) else f" (asked {total.work_asked:.3f})")
        ]
        lines += [self._run.dense_words(geometry) for geometry in self._run.dense]
        if self.config.step_cache:
            lines.append(f"step cache: {total.computed_steps} steps computed, {total.skipped_steps} left out")
        if total.anchor_calls:
            lines.append(
                f"carry: {total.anchor_calls} calls at anchors, {total.carried_calls} carried, age "
                f"{total.carry_age:.1f} steps, {total.carry_bytes / 1e6:.1f} MB on the device and "
                f"{total.carry_host_bytes / 1e6:.1f} MB in main memory")
        for step in range(min(self.step + 1, self.steps or 0)):
            s = self.stats(step=step)
            if s.skipped_steps:
                lines.append(f"step {step}: left out")
                continue
            lines.append(
                f"step {step}: {s.calls} calls, {s.dense_calls} dense, {s.sparse_calls} sparse, density "
                f"{s.density:.3f}, select {s.select_seconds:.3f} s, attention {s.attention_seconds:.3f} s"
                + (", anchor" if s.anchor_calls else ""))
        return "\n".join(lines)

    def save_recording(self, path: str) -> None:
        """Writes what was recorded so far (`apply(..., record=True)`)."""
        if self._run.record is None:
            raise ValueError("nothing is recorded: apply(..., record=True) records")
        if self._run.session is None:
            raise ValueError("nothing was recorded yet: the model did not run")
        self._run.session.save_recording(path)

    def __repr__(self) -> str:
        return f"<esa.Handle {self.family}, {'applied' if self._applied else 'removed'}, {self.config!r}>"
