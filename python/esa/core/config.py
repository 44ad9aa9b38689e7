# SPDX-License-Identifier: Apache-2.0
"""EsaConfig: a user's settings of sparse attention in a model, checked when the object is made."""
from __future__ import annotations

import ctypes as C
import dataclasses
import functools
import math
import numbers
import os
from typing import Any

from . import structs as T
from .library import load

SELECTORS = ("error", "entropy", "rf_v2", "ada_bsa", "random", "full", "dense")
KERNELS = ("auto", "fa4")
_ALIASES = {"rf_v3": "rf_v2"}           # MindIE-SD's rf_v3 has rf_v2's mask rule


def recommended(mode: str, selector: str) -> T.SessionParams:
    """The product's default rules, which the library holds: order, blocks, tail, warm-up of a model run. Blocks are
    the selector's own, which the library chooses at the first call."""
    number = T.SELECTORS.get(selector, T.SELECTORS["entropy"])
    return load().c.esa_session_params_recommended(T.SESSION_MODES[mode], number, 0)


def protects_first_frame(mode: str, selector: str, given: bool = False) -> bool:
    """The library's rule of frame 0 in a run whose settings leave it open. given: the frame is a picture that the model
    was given."""
    return bool(load().c.esa_protects_first_frame(recommended(mode, selector).select.selector, int(given)))


@functools.cache
def has_trait(selector: str, trait: str) -> bool:
    """What the library's row of a selector says; "dense" is none and has no trait."""
    return bool(load().c.esa_selector_traits(T.SELECTORS.get(selector, -1)) & T.TRAITS[trait])


_DEFAULT = recommended("online", "entropy")
# Fields that make the default of carry "off": they say when masks and orders are made, which carry decides otherwise.
_SCHEDULES = ("refresh_every", "order_every")


def _defaults(selector: str, masks: Any = None) -> dict[str, Any]:
    p = recommended("online", selector)
    best = p if masks is None else recommended("cached", selector)
    return {"tail": T.word(T.TAILS, best.attention.tail), "warmup_frac": p.warmup_frac,
            "dense_first_layer": bool(p.dense_first_layer),
            "refresh_every": T.schedule_word(p.refresh_every), "order_every": T.schedule_word(p.order_every),
            "share_branches": bool(p.share_branches), "carry": T.carry_word(best.carry)}


@dataclasses.dataclass(frozen=True)
class EsaConfig:
    """How self-attention runs. Immutable; `replace` makes a changed copy.

    work, quality, preset, plan
        How much attention the whole video may cost, as a share of dense attention, everything counted: work (0.44), a
        preset ("faithful", "balanced", "fast"), or a quality, the PSNR against dense in dB that the plan shall reach.
        plan is the path of a work plan (`esa calibrate --plan`); without one the work is spread evenly. Give one
        of work, quality, preset, budget and sparsity; with none of them selector "error" has preset "balanced".
    selector
        "error" (the default: keeps what the tail would get most wrong), "entropy" (ESA: per-head budgets from attention
        entropy; the default with a budget, masks, kernel "fa4" or another mode than "fixed"), "rf_v2" (RainFusion 2.0;
        "rf_v3" is the same rule), "ada_bsa" (CDF threshold), "random" and "full" for measurements, "dense" for plain
        attention through the same path.
    budget, sparsity
        Kept fraction of key blocks in every sparse call, or its complement; give one of them. With tail "levels" it is
        the cost of blocks and means as a fraction of dense attention. Neither: 0.5, but selector "error" in a model
        has the preset instead.
    cdf_threshold, keep_sink, keep_recent
        ada_bsa only.
    block
        Block sizes (query, key), one int for both, or None: 256 x 128 for entropy, 128 x 128 for the others; for error
        64 x 64 up to 8192 tokens.
    samples
        entropy only: queries scored per query block.
    groups
        error only: queries and keys of a mean that is scored, 1, 2, 4, 8 or 16 each, or None: by block size, 8 and 4
        at blocks of 64, and 2 and 1 if scores are recorded. Smaller groups follow the true error more closely and cost
        more: with (1, 1) scores cost as much as dense attention, and on a GPU more than that.
    order, window
        "raster", "tile", "tile3d" (boxes of window t, h, w; 2, 8, 8), "hilbert", "adaptive" (an order per head, for
        selector "error"), or None. None in esa.apply: Hilbert, for rf_v2 tile, for error adaptive, with a mask file the
        file's order. None in a Session: tile for rf_v2, else raster.
    protect_first_frame
        Keep frame 0's rows and columns whole; None: as the selector's original does (rf_v2: yes), and in image to video
        with esa.apply yes, but for selector "error".
    tail
        What stands in for skipped blocks: "none", "pooled" (the default), "centroid", or "levels" (the default of
        selector "error" and of mask files).
    exact_rows
        Queries of each query block, 0 to 16, that are computed exactly and whose mean error corrects the others. None:
        2 for selector "error" without carry, else 0. R of them in a block of Bq queries cost R / Bq of a dense call.
        Not for causal attention. Masks from recordings of errors bring their own number, because their works include
        it: None or 0 takes that number, and any other one is an error.
    precision, steps16_first, steps16_last, layers16
        Bits of the two products of attention: 16, or 8 (docs/precision.md). Calls without an 8-bit kernel run in 16
        bits; statistics count those in 8. With 8, so many steps at the start and at the end and the listed layers stay
        in 16 bits nevertheless (none).
    warmup_frac, dense_first_layer, dense_layers, min_tokens
        What runs dense by policy: the first share of the steps (0.2; error: 0), layer 0 (yes; error: no), listed
        layers, shorter sequences.
    refresh_every, order_every
        A mask, or an adaptive order, is made at every n-th sparse step of its layer and branch and reused in between;
        0: only at the first; "early": at the first and at 1/8, 1/4 and 1/2 of the layer's sparse steps, because
        attention changes most early in a run (1; error: "early").
    share_branches
        All guidance branches use the masks, orders and carried differences of the first one that runs (no; error: yes).
    carry
        At a few steps, the anchors, a layer runs dense and sparse and keeps the difference; up to the next anchor that
        is added to its sparse output (docs/choosing.md). "auto" (the default of selector "error"): as many anchors as
        suit the number of steps, none if it is small or unknown. "off" (the default of the others, with masks, and
        where refresh_every or order_every is given, because with carry masks and orders are made at the anchors). A
        number: so many anchors, placed by the library. A list: their steps, ascending.
    carry_format, carry_memory
        The kept difference in "e4m3", with a scale for each token and head, or in "bf16"; and how much memory of the
        GPU it may take, in bytes or as "16G" (None: what is free, but for a tenth of the GPU's memory). What does not
        fit is kept in main memory and copied beside the work. On a CPU all of it is main memory.
    masks
        A mask file (made by calibration): cached mode, no selection at run time.
    step_map
        "exact": the masks must have been made for this number of steps; "nearest" maps steps proportionally.
    step_cache
        esa.apply only. Steps whose output is expected to have changed by less than this part of it (0.05) use the
        output of an earlier step: the whole forward is left out, for all guidance branches. Never in the warm-up, the
        first tenth of the steps and the last step. 0, the default: every step is computed.
    kernel
        "auto": the library's own; "fa4": hand block lists to an installed FlashAttention-4.
    mode
        "fixed" (the rules a user expects), "compat" or "compat-round" (the originals' rules, quirks included).
    strict
        Anything that would silently run dense instead of sparse is an error.

    >>> EsaConfig(selector="rf_v2", sparsity=0.75).density
    0.25
    >>> EsaConfig.video()
    EsaConfig(selector='rf_v2', sparsity=0.8)
    >>> EsaConfig(work=0.44).selector
    'error'
    >>> EsaConfig(preset="faithful", carry="off").work_for(steps=50)
    0.57
    >>> EsaConfig(budget=1.5)
    Traceback (most recent call last):
        ...
    ValueError: budget must lie between 0 and 1, not 1.5
    """

    selector: str = None  # type: ignore[assignment]  # __post_init__ sets it
    budget: float | None = None
    sparsity: float | None = None
    work: float | None = None
    quality: float | None = None
    preset: str | None = None
    plan: str | os.PathLike[str] | None = None
    cdf_threshold: float = 1.0
    keep_sink: bool = True
    keep_recent: bool = True
    block: int | tuple[int, int] | None = None
    samples: int = _DEFAULT.select.samples
    groups: tuple[int, int] | None = None
    order: str | None = None
    window: tuple[int, int, int] | None = None
    protect_first_frame: bool | None = None
    tail: str = None  # type: ignore[assignment]  # this and the others of _defaults: __post_init__ sets them
    exact_rows: int | None = None
    precision: int = 16
    steps16_first: int = 0
    steps16_last: int = 0
    layers16: tuple[int, ...] = ()
    warmup_frac: float = None  # type: ignore[assignment]
    dense_first_layer: bool = None  # type: ignore[assignment]
    dense_layers: tuple[int, ...] = ()
    min_tokens: int = 0
    refresh_every: int | str = None  # type: ignore[assignment]
    order_every: int | str = None  # type: ignore[assignment]
    share_branches: bool = None  # type: ignore[assignment]
    carry: str | int | tuple[int, ...] = None  # type: ignore[assignment]
    carry_format: str = "e4m3"
    carry_memory: int | str | None = None
    masks: str | os.PathLike[str] | None = None
    step_map: str = "exact"
    step_cache: float = 0.0
    kernel: str = "auto"
    mode: str = "fixed"
    strict: bool = True

    def __post_init__(self) -> None:
        put = object.__setattr__
        if isinstance(self.selector, str):
            put(self, "selector", _ALIASES.get(self.selector, self.selector))
        amounts = [name for name in ("work", "quality", "preset") if getattr(self, name) is not None]
        if self.selector is None:
            put(self, "selector", self._usual_selector)
        if self.carry is None and any(getattr(self, name) is not None for name in _SCHEDULES):
            put(self, "carry", "off")
        for name, value in _defaults(str(self.selector), self.masks).items():
            if getattr(self, name) is None:
                put(self, name, value)
        for name, choices in (("selector", SELECTORS), ("tail", tuple(T.TAILS)), ("mode", tuple(T.MODES)),
                              ("kernel", KERNELS), ("step_map", tuple(T.STEP_MAPS)),
                              ("carry_format", tuple(T.CARRY_FORMATS))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {getattr(self, name)!r}")
        if self.order is not None and self.order not in tuple(T.ORDERS):
            raise ValueError(f"order must be one of {', '.join(map(repr, T.ORDERS))} or None, not {self.order!r}")
        self._check_work(amounts)
        for name in ("budget", "sparsity", "warmup_frac"):
            value = getattr(self, name)
            if value is None and name != "warmup_frac":
                continue
            if not (isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 <= float(value) <= 1):
                raise ValueError(f"{name} must lie between 0 and 1, not {value!r}")
            if not isinstance(value, (int, float)):
                put(self, name, float(value))           # numpy's float32 is no Python float
        for name in ("keep_sink", "keep_recent", "dense_first_layer", "share_branches", "strict",
                     "protect_first_frame"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "protect_first_frame"):
                raise ValueError(f"{name} must be True or False, not {value!r}")
        if self.masks is not None and not isinstance(self.masks, (str, os.PathLike)):
            raise ValueError(f"masks must be the path of a mask file, not {self.masks!r}")
        if self.budget is not None and self.sparsity is not None:
            raise ValueError(
                f"budget ({self.budget}) and sparsity ({self.sparsity}) say the same thing: give one of them")
        if not isinstance(self.cdf_threshold, numbers.Real) or isinstance(
                self.cdf_threshold, bool) or self.cdf_threshold != self.cdf_threshold:
            raise ValueError(f"cdf_threshold must be a number, not {self.cdf_threshold!r}")
        put(self, "dense_layers", T.wholes(self.dense_layers, "dense_layers must be a list of layer numbers"))
        if self.block is not None:
            message = "block must be one or two multiples of 16 between 16 and 256"
            put(self, "block", T.wholes((self.block, self.block) if T.whole(self.block) else self.block, message))
            if len(self.blocks) != 2 or any(b < 16 or b > 256 or b % 16 for b in self.blocks):
                raise ValueError(f"{message}, not {self.block!r}")
        if self.window is not None:
            message = "window must be three numbers t, h, w of at least 1"
            put(self, "window", T.wholes(self.window, message))
            if len(self.window) != 3 or min(self.window) < 1:
                raise ValueError(f"{message}, not {self.window!r}")
        if self.groups is not None:
            put(self, "groups", T.groups(self.groups))
            if not has_trait(self.selector, "weighs_tail") or self.masks is not None:
                raise ValueError("groups is for scores of selector 'error', not for "
                                 + (repr(self.selector) if self.masks is None else "masks of a file"))
        if self.window is not None and self.order != "tile3d":
            raise ValueError(f"window belongs to order 'tile3d', not to {self.order!r}")
        if self.masks is None and self.order == "adaptive" and not has_trait(self.selector, "adaptive"):
            raise ValueError(f"order 'adaptive' is for selector 'error', not for {self.selector!r}")
        if self.masks is None and self.tail == "centroid" and self.selector in T.SELECTORS and not has_trait(
                self.selector, "centroid"):
            raise ValueError(f"selector {self.selector!r} takes tail 'none', 'pooled' or 'levels', not 'centroid'")
        for name in ("refresh_every", "order_every"):
            T.schedule(getattr(self, name), name)
        for name, least in (("samples", 1), ("min_tokens", 0)):
            if not T.whole(getattr(self, name)) or getattr(self, name) < least:
                raise ValueError(f"{name} must be an integer of at least {least}, not {getattr(self, name)!r}")
        if self.exact_rows is not None:
            put(self, "exact_rows", T.exact_rows(self.exact_rows))
        self._check_precision()
        self._check_carry()
        value = self.step_cache
        if not (isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf):
            raise ValueError(f"step_cache must be a finite number of at least 0 (0: off), not {value!r}")
        put(self, "step_cache", float(value))

    def _check_precision(self) -> None:
        T.precision(self.precision)
        object.__setattr__(self, "layers16", T.wholes(self.layers16, "layers16 must be a list of layer numbers"))
        for name in ("steps16_first", "steps16_last"):
            if not T.whole(getattr(self, name)) or getattr(self, name) < 0:
                raise ValueError(f"{name} must be an integer of at least 0, not {getattr(self, name)!r}")
        given = [name for name in ("steps16_first", "steps16_last", "layers16") if getattr(self, name)]
        if given and self.precision != 8:
            raise ValueError(f"{given[0]} says what stays in 16 bits: it needs precision=8")

    def _check_carry(self) -> None:
        object.__setattr__(self, "carry", T.carry(self.carry))
        if self.carry_memory is not None:
            T.size(self.carry_memory, "carry_memory")
        if self.carry == "off":
            return
        if self.selector in ("dense", "full"):
            raise ValueError(f"carry keeps what sparse attention leaves out, selector {self.selector!r} leaves nothing "
                             "out: say carry='off'")
        usual = _defaults(self.selector, self.masks)
        for name in _SCHEDULES:
            if getattr(self, name) != usual[name]:
                raise ValueError(f"with carry, masks and orders are made at its anchors, so {name} "
                                 f"({getattr(self, name)!r}) has no meaning: leave it out, or say carry='off'")

    def _check_work(self, amounts: list[str]) -> None:
        given = amounts + [name for name in ("budget", "sparsity") if getattr(self, name) is not None]
        if len(given) > 1 and amounts:
            raise ValueError(f"{' and '.join(given)} say the same thing: give one of them")
        for name, high in (("work", 1), ("quality", 200)):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, numbers.Real) and not isinstance(value, bool)
                                          and 0 < float(value) <= high):
                raise ValueError(f"{name} must be above 0 and at most {high}, not {value!r}")
        if self.preset is not None and self.preset not in tuple(T.PRESETS):
            raise ValueError(f"preset must be one of {', '.join(map(repr, T.PRESETS))}, not {self.preset!r}")
        if self.plan is not None and not isinstance(self.plan, (str, os.PathLike)):
            raise ValueError(f"plan must be the path of a work plan, not {self.plan!r}")
        if self.plan is not None and not amounts:
            raise ValueError("plan needs work, quality or preset: it says how to spend it")
        if self.quality is not None and self.plan is None:
            raise ValueError("quality needs a plan, which knows what to expect: `esa calibrate --plan` makes one")
        if amounts and self.selector in ("dense", "full"):
            raise ValueError(f"{amounts[0]} is for blocks that are chosen, not for selector {self.selector!r}")
        if self.masks is not None and (self.quality is not None or self.plan is not None):
            raise ValueError("quality and plan are for blocks chosen at run time: the masks of a file are built for "
                             "works (work=...), with the plan given to esa.build_mask_file")

    def work_for(self, steps: int) -> float:
        """The work that is asked for in a run of so many steps, given as work or as preset, or meant by neither; 0 for
        a quality, which needs its plan, and for a budget."""
        preset = "balanced" if self._unsaid else self.preset
        if preset is not None:
            return float(load().c.esa_preset_work_for(T.PRESETS[preset], steps, self.carry_number))
        return 0.0 if self.work is None else float(self.work)

    @property
    def carry_number(self) -> int:
        """carry as esa_session_params has it: a number of anchors, or the library's for "auto" and "off"."""
        if isinstance(self.carry, tuple):
            return len(self.carry)
        return {"off": T.CARRY_OFF, "auto": T.CARRY_AUTO}.get(self.carry, self.carry)   # type: ignore[arg-type,return-value]

    def anchors(self, steps: int) -> tuple[int, ...]:
        """The steps of the anchors in a run of so many steps; none without carry.

        >>> EsaConfig(carry=[0, 6, 12]).anchors(steps=50), EsaConfig(carry="off").anchors(steps=50)
        ((0, 6, 12), ())
        """
        if isinstance(self.carry, tuple):
            return self.carry
        found = (C.c_int32 * steps)()
        return tuple(found[:load().c.esa_carry_anchors(found, self.carry_number, steps)])

    @property
    def _usual_selector(self) -> str:
        """The selector where none is given."""
        if self.masks is not None:
            return "entropy"
        if self.work is not None or self.quality is not None or self.preset is not None:
            return "error"
        plain = self.budget is None and self.sparsity is None and self.kernel == "auto" and self.mode == "fixed"
        return "error" if plain else "entropy"

    @property
    def _unsaid(self) -> bool:
        """Nothing says how much, and the selector takes a work."""
        said = (self.work, self.quality, self.preset, self.budget, self.sparsity, self.masks)
        return has_trait(self.selector, "spends") and all(x is None for x in said)

    @property
    def spends_work(self) -> bool:
        """True if a work decides: work, quality or preset was given, or nothing and the selector is "error"."""
        return self._unsaid or self.work is not None or self.quality is not None or self.preset is not None

    @staticmethod
    def check(config: Any) -> EsaConfig:
        """The config itself, or the defaults for None. TypeError for anything else."""
        if config is None:
            return EsaConfig()
        if config is EsaConfig:
            raise TypeError("config must be an EsaConfig, not the class itself: write EsaConfig()")
        if not isinstance(config, EsaConfig):
            raise TypeError(f"config must be an EsaConfig, not {type(config).__name__}")
        return config

    @property
    def density(self) -> float:
        """The requested budget, given as budget or as sparsity."""
        if self.budget is not None:
            return float(self.budget)
        return float(_DEFAULT.select.budget) if self.sparsity is None else 1.0 - float(self.sparsity)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Block sizes (query, key); (0, 0): the selector's own."""
        return (0, 0) if self.block is None else tuple(
            self.block)  # type: ignore[arg-type]  # __post_init__ made it a tuple

    @classmethod
    def image(cls, **changes: Any) -> EsaConfig:
        """rf_v2 at sparsity 0.6, MindIE-SD's starting point for images."""
        return cls(selector="rf_v2", sparsity=0.6).replace(**changes)

    @classmethod
    def video(cls, **changes: Any) -> EsaConfig:
        """rf_v2 at sparsity 0.8, MindIE-SD's starting point for videos."""
        return cls(selector="rf_v2", sparsity=0.8).replace(**changes)

    def replace(self, **changes: Any) -> EsaConfig:
        """A changed copy. A new budget, sparsity, work, quality or preset replaces the old one. Settings that the
        selector decides follow a new selector, unless they were chosen, and carry follows a new schedule.

        >>> EsaConfig.video().replace(budget=0.3).density
        0.3
        """
        amounts = ("budget", "sparsity", "work", "quality", "preset")
        if any(changes.get(name) is not None for name in amounts):
            for name in amounts:
                changes.setdefault(name, None)
        usual = _defaults(self.selector, self.masks)
        if changes.get("selector", self.selector) != self.selector or "masks" in changes:
            for name, value in usual.items():
                if getattr(self, name) == value:
                    changes.setdefault(name, None)
        if any(changes.get(name) is not None for name in _SCHEDULES) and self.carry == usual["carry"]:
            changes.setdefault("carry", None)
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        usual = {"selector": self._usual_selector, **_defaults(self.selector, self.masks)}
        changed = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self)
                   if getattr(self, f.name) != usual.get(f.name, f.default))
        return f"EsaConfig({', '.join(changed)})"
