# SPDX-License-Identifier: Apache-2.0
"""What the hosts share: a user's options, and sessions for calls whose layer, step and layout the host tells."""
from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ..core import structs as T
from ..core.config import EsaConfig, recommended
from ..core.layout import Layout
from ..core.library import EsaError
from ..core.mask import MaskFile
from ..core.session import Session, Stats, mode_of

# Guidance passes that a model may have per step. Mask files know the usual two.
_BRANCHES, _FILE_BRANCHES = 4, 2
# Steps of a session whose number of steps decides nothing.
_OPEN_ENDED = 1000
# Settings that hosts take: all but those that need esa.apply.
SETTINGS = tuple(f.name for f in dataclasses.fields(EsaConfig) if f.name not in ("kernel", "step_cache"))
# How the library begins the reason why a call cannot be sparse.
_PLACE = re.compile(r"^layer \d+, step \d+ would have run dense: ")


class Dense(Exception):
    """Why a call stays dense. by_policy: the user asked for it, so it is neither an error nor worth a warning."""

    def __init__(self, reason: str, by_policy: bool = False) -> None:
        super().__init__(reason)
        self.by_policy = by_policy

    def report(self, who: str, strict: bool, warn: Callable[[str], None]) -> None:
        """Before the host runs the call dense: an error if the user wants none of that, else a warning."""
        if self.by_policy:
            return
        if strict:
            raise EsaError(f"{who} is strict, but this call would be dense: {self}") from self
        warn(f"{who} stays dense: {self}")


def check_settings(options: Any, what: str, names: Sequence[str] = SETTINGS) -> None:
    """A ValueError unless options map names of settings to values. what names the JSON in messages."""
    if not isinstance(options, Mapping):
        raise ValueError(f'{what} must hold settings by name, such as {{"budget": 0.3}}, not {options!r}')
    unknown = [name for name in options if name not in names]
    if unknown:
        raise ValueError(f"{what} has no setting {unknown[0]!r}; it takes {', '.join(names)}")


def config_of(options: Mapping[str, Any], what: str) -> EsaConfig:
    """An EsaConfig from a host's JSON. Unlike in EsaConfig itself, strict is off unless it is asked for: hosts stay
    dense where they cannot be sparse. what names the JSON in messages."""
    check_settings(options, what)
    values: dict[str, Any] = {"strict": False}
    for name, value in options.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    try:
        config = EsaConfig(**values)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    if config.selector == "full":
        raise ValueError(f"{what}: selector 'full' keeps every block; selector 'dense' does the same faster")
    for name, path in (("masks", config.masks), ("plan", config.plan)):
        if path is not None and not os.path.isfile(path):
            raise ValueError(f"{what}: {name} names {os.fspath(path)!r}, which is not a file")
    return config


@functools.cache
def rain_fusion(sparsity: float) -> EsaConfig:
    """RainFusion as its hosts mean it: rf_v2 in every call, nothing in place of dropped blocks."""
    return EsaConfig(selector="rf_v2", sparsity=sparsity, tail="none", warmup_frac=0.0, dense_first_layer=False,
                     strict=False)


def needs_steps(config: EsaConfig) -> bool:
    """True if the number of steps decides what a run does."""
    if config.selector == "dense":
        return False
    return (config.masks is not None or config.spends_work or config.warmup_frac > 0 or isinstance(config.carry, int)
            or config.steps16_first > 0 or config.steps16_last > 0)


def carries(config: EsaConfig, steps: int | None, branches: int = 0) -> bool:
    """True if a run of so many steps, with so many guidance branches (0: not known), carries differences; where the
    number of steps is unknown, "auto" places no anchors."""
    if config.carry == "off" or (steps is None and config.carry == "auto"):
        return False
    return bool(config.anchors(steps or _OPEN_ENDED, branches=branches))


def order_of(config: EsaConfig, layout: Layout) -> Layout:
    """The layout with the order that suits the selector (esa.apply's), or a mask file's, if the config names none."""
    if layout.order is not None or config.order is not None or config.mode != "fixed":
        return layout
    if config.masks is not None:
        info = MaskFile(config.masks).info.layout
        word = T.word(T.ORDERS, info.order)
        return dataclasses.replace(layout, order=word, window=tuple(info.window) if word == "tile3d" else None,
                                   protect_first_frame=bool(info.protect_first_frame))
    order = recommended(mode_of(config, False), config.selector).select.layout.order
    word = "raster" if order == T.ORDER_DEFAULT else T.word(T.ORDERS, order)
    # clips take no adaptive order
    return dataclasses.replace(layout, order="hilbert" if word == "adaptive" and layout.spans else word)


class Model:
    """The attention layers of one transformer in a host."""

    def __init__(self) -> None:
        self.names: set[Hashable] = set()
        self.layers = 0
        self._runs: dict[EsaConfig, HostRun] = {}

    def run(self, config: EsaConfig) -> HostRun:
        """The run of these settings, made once all layers are known: at the first call."""
        if config not in self._runs:
            self._runs[config] = HostRun(config, self.layers)
        return self._runs[config]


class Models:
    """Finds the transformer that an attention layer belongs to, in hosts whose layers do not know it. Layers are made
    one after another; a name that comes again belongs to the next transformer (Wan 2.2 has two)."""

    def __init__(self) -> None:
        self._newest: Model | None = None

    def place(self, name: Hashable) -> tuple[Model, int]:
        """The model and the number of a new layer; layers are numbered as they are made."""
        model = self._newest
        if model is None or name in model.names:
            model = self._newest = Model()
        model.names.add(name)
        model.layers += 1
        return model, model.layers - 1


class HostRun:
    """The attention of one model. A session serves all videos of one size, number of steps and device; another size
    makes another session. Calls come in the order of execution; a step that goes backwards begins a new video."""

    def __init__(self, config: EsaConfig, layers: int) -> None:
        for name in ("dense_layers", "layers16"):
            bad = [i for i in getattr(config, name) if i >= layers]
            if bad:
                raise ValueError(f"{name} names layer {bad[0]}, the model has layers 0 to {layers - 1}")
        self.config, self.layers = config, layers
        self.session: Session | None = None
        self.videos = 0
        self._key: Any = None
        self._step = -1
        self._calls: dict[int, int] = {}            # of each layer, in this step
        self._labels: dict[Hashable, int] = {}      # guidance branches of this video, by the host's names

    def attention(self, layer: int, q: Any, k: Any, v: Any, *, layout: Layout, step: int, steps: int | None = None,
                  branch: Hashable = None, scale: float | None = None, heads: tuple[int, int] = (0, 0),
                  sigma: tuple[float, ...] | None = None, step_branches: int = 0, input_layout: str = "BSND",
                  out: Any = None) -> Any:
        """One self-attention call.

        layout
            Of these tokens, with spans as tuples (it is compared).
        step, steps
            Where the model is; steps None: unknown, a Dense error if the config needs it.
        branch
            The host's name of the guidance branch; None: calls of a layer within one step are counted.
        step_branches
            How many of them run at each step, which share the price of masks; 0: not known, so two.

        A call that cannot be sparse is a Dense error, whatever config.strict says: the host decides what to do then.
        """
        try:
            return self._attention(layer, q, k, v, layout, step, branch, (steps, scale, heads, sigma, step_branches),
                                   input_layout, out)
        except (EsaError, ValueError) as error:
            # Hosts log a reason once, so it does not name the layer and the step.
            raise Dense(_PLACE.sub("", str(error))) from error

    def _attention(self, layer: int, q: Any, k: Any, v: Any, layout: Layout, step: int, branch: Hashable,
                   facts: tuple[Any, ...], input_layout: str, out: Any) -> Any:
        key = (layout, *facts, q.device, q.shape[-1])
        if key != self._key:
            self.session = self._key = None         # the old one goes first: both would hold GPU memory
            self.session = self._make(layout, facts, q.device)
            self._key, self._step = key, -1
        if step < self._step or self._step < 0:
            self.session.begin()                    # type: ignore[union-attr]
            self.videos += 1
            self._labels.clear()
        if step != self._step:
            self._calls.clear()
        self._step = step
        assert self.session is not None
        self.session.step(step, self._branch(layer, branch))
        return self.session.attention(layer, q.detach(), k.detach(), v.detach(), input_layout=input_layout, out=out)

    def _branch(self, layer: int, label: Hashable) -> int:
        if label is not None:
            number = self._labels.setdefault(label, len(self._labels))
        else:
            number = self._calls[layer] = self._calls.get(layer, -1) + 1
        most = _BRANCHES if self.config.masks is None else _FILE_BRANCHES
        if number >= most:
            raise Dense(f"layer {layer} was called {number + 1} times in step {self._step}; at most {most} guidance "
                        "passes are known")
        return number

    def _make(self, layout: Layout, facts: tuple[Any, ...], device: Any) -> Session:
        config, (steps, scale, heads, sigma, step_branches) = self.config, facts
        if steps is None and needs_steps(config):
            raise Dense("the number of steps is not known here, but the settings need it (a preset, work, masks or "
                        "warmup_frac): tell it, or use a budget with warmup_frac 0")
        if not carries(config, steps, step_branches):
            config = config.replace(carry="off")
        branches = _BRANCHES if config.masks is None else _FILE_BRANCHES
        # A session that is not strict would run dense by itself, and the host could not say why.
        return Session(config.replace(strict=True), layers=self.layers, steps=steps or _OPEN_ENDED, branches=branches,
                       layout=order_of(config, layout), scale=scale, heads=heads, device=device,
                       sigma=sigma if config.spends_work else None, step_branches=step_branches)

    @property
    def steps(self) -> int | None:
        """Steps of the session in hand, if they are known."""
        return self._key[1] if self._key is not None else None

    def stats(self) -> Stats:
        """What ran in the video in hand."""
        if self.session is None:
            raise EsaError("nothing ran yet")
        return self.session.stats()
