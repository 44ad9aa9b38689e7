# SPDX-License-Identifier: Apache-2.0
"""One clip: a pipeline, a prompt, a method; the video and the record of how it was made. The programs make their videos
here.

A record has the fields of docs/schemas/common.schema.json ("record"), so that `esa report` and `esa experiment collect`
read what the programs write. What a run through diffusers does not measure (time in matrix products; attention of
the dense baseline, which is torch's own) is None."""
from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..core.config import EsaConfig
from ..core.structs import CARRY_FORMATS, PRESETS
from . import program
from .program import BLOCK, Stop

METHODS = ("dense", "entropy", "rf_v2", "ada_bsa", "cached", "error")


@dataclasses.dataclass(frozen=True)
class Method:
    """How self-attention runs. config None: torch's own attention, as the pipeline has it."""
    name: str
    config: EsaConfig | None

    @property
    def budget(self) -> float | None:
        """Kept fraction of key blocks that was asked for; None if a work was asked for instead."""
        if self.config is None:
            return 1.0
        return None if self.config.spends_work else self.config.density


def add_method(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("method")
    group.add_argument("--method", choices=METHODS,
                       help="how self-attention runs (entropy; with --work or --preset: error)")
    group.add_argument("--budget", type=program._share, metavar="X",
                       help="kept fraction of key blocks (0.5; error has --preset balanced instead)")
    group.add_argument("--work", type=program._share, metavar="X",
                       help="instead of --budget: attention work of the whole video as a share of dense, everything "
                       "counted; cached: the largest work in the mask file that is not above it")
    group.add_argument("--preset", choices=tuple(PRESETS), help="instead of --work: a work by name")
    group.add_argument("--masks", metavar="FILE", help="mask file of --method cached")
    add_tail(group, "levels")
    group.add_argument("--carry", type=program._carry, metavar="auto|off|N|STEP,...",
                       help="at these steps, the anchors, layers keep what sparse attention leaves out; it is added at "
                       "the steps that follow: as many as suit the number of steps, none, so many, or these (off; "
                       "error: auto)")
    group.add_argument("--carry-format", choices=tuple(CARRY_FORMATS), default="e4m3",
                       help="how the differences are kept: one byte or two a value (e4m3)")
    group.add_argument("--cdf-threshold", type=float, default=1.0, metavar="X",
                       help="ada_bsa: share of the attention to keep (1.0: off)")


def add_tail(group: Any, *more: str) -> None:
    """more: tails of the method error."""
    group.add_argument("--tail", choices=("none", "pooled", "centroid", *more), default="none",
                       help="what stands in for skipped blocks (none, as the original" +
                       "".join(f"; error: {tail}" for tail in more) + ")")


def chosen_method(args: argparse.Namespace, step_map: str) -> Method:
    """The method of the options of add_method."""
    amounts = {name: getattr(args, name) for name in ("budget", "work", "preset") if getattr(args, name) is not None}
    if len(amounts) > 1:
        raise Stop(f"{' and '.join('--' + name for name in amounts)} say the same thing; give one", 2)
    spends = "budget" not in amounts and bool(amounts)
    name = args.method or ("error" if spends else "entropy")
    if name == "dense" and spends:
        raise Stop("--work and --preset are for methods that choose blocks, not for dense", 2)
    if not amounts and name != "error":                 # error has its preset
        amounts["budget"] = 0.5
    return method_of(args, name, masks=args.masks, step_map=step_map, **amounts)


def method_of(args: argparse.Namespace, name: str, budget: float | None = None, *, masks: str | None = None,
              step_map: str = "exact", **work: Any) -> Method:
    """A method with the options of add_sparse and add_tail. work: work or preset, instead of a budget."""
    carry = {"carry": getattr(args, "carry", None), "carry_format": getattr(args, "carry_format", "e4m3")}
    if name == "dense":
        if carry["carry"] not in (None, "off"):
            raise Stop("--carry is for methods that skip blocks, not for dense", 2)
        return Method("dense", None)
    if name == "cached" and not masks:
        raise Stop("--method cached needs --masks FILE (made by `python -m esa.calibrate`)", 2)
    if name != "cached" and masks:
        raise Stop("--masks is read by --method cached only", 2)
    block = args.block or (BLOCK if name == "entropy" else None)
    chosen = {
        "tail": args.tail or (None if name == "error" else "none"), "warmup_frac": args.warmup_frac,
        "dense_first_layer": args.dense_first_layer
    }
    common = {"budget": budget, **work, **carry, **{key: value for key, value in chosen.items() if value is not None}}
    if name == "cached":
        return Method(name, EsaConfig(masks=masks, step_map=step_map, **common))
    # the original does not reorder
    order = args.order or (None if name in ("rf_v2", "error") else "raster")
    return Method(name, EsaConfig(selector=name, block=block, order=order,
                                  cdf_threshold=getattr(args, "cdf_threshold", 1.0), **common))


# ---------------------------------------------------------------- making

class _Watch:
    """Times text encoding, steps and decoding. Waits for the GPU before it reads the clock."""

    def __init__(self, pipe: Any) -> None:
        self.first = 0.0
        self.ends: list[float] = []
        parts = [
            part for part in (getattr(pipe, name, None) for name in ("transformer", "transformer_2"))
            if part is not None
        ]
        self.gpu = torch.cuda.is_available()
        self._hooks = [part.register_forward_pre_hook(self._entered) for part in parts]

    def now(self) -> float:
        if self.gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _entered(self, *arguments: Any) -> None:
        if not self.first:
            self.first = self.now()

    def on_step_end(self, pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        self.ends.append(self.now())
        return kwargs

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def steps(self) -> list[float]:
        return [end - begin for begin, end in zip([self.first, *self.ends], self.ends)]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _peak() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make(pipe: Any, prompt: str, method: Method, name: str, settings: dict[str, Any],
         callback: Callable[..., Any] | None = None, *, decode: bool = True,
         **more: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """The video and its record. `name` is the model's, `settings` are those of program.video_settings, `more` goes to
    the pipeline. decode=False stops before the VAE: latents come back, for measuring steps."""
    from ..diffusers.apply_model import apply
    handle = apply(pipe, method.config) if method.config is not None else None
    watch = _Watch(pipe)
    if watch.gpu:
        torch.cuda.reset_peak_memory_stats()
    begin = watch.now()
    try:
        video = _run(pipe, prompt, name, settings, decode,
                     callback_on_step_end=program.both(watch.on_step_end, callback), **more)
        end = watch.now()
    finally:
        watch.remove()
        if handle is not None:
            handle.remove()
    steps = watch.steps
    record: dict[str, Any] = {
        "seconds": end - begin, "text_seconds": watch.first - begin, "denoise_seconds": sum(steps),
        "attention_seconds": None, "select_seconds": 0.0, "gemm_seconds": None, "decode_seconds": end - watch.ends[-1],
        "peak_bytes": _peak(), "density_asked": None, "density": None, "kept_mass": None,
        "attention_work": {"asked": None, "realised": None if handle is not None else 1.0}, "calls": 0,
        "sparse_calls": 0, "kernel": "torch", "warmup_steps": 0, "step_seconds": steps,
        "carry": {"asked": "off", "format": None, "anchors": [], "anchor_calls": 0, "carried_calls": 0, "age": None,
                  "step_age": [], "bytes": 0, "host_bytes": 0},
        "step_select_seconds": [None] * len(steps), "step_attention_seconds": [None] * len(steps), "layer_density": [],
        "head_density": []
    }
    if handle is not None and method.config is not None:
        _add_stats(record, handle, len(steps))
        record["carry"] = _carry_of(handle, len(steps))
    return video, record


def _run(pipe: Any, prompt: str, name: str, settings: dict[str, Any], decode: bool, **more: Any) -> torch.Tensor:
    from ..diffusers.models import generate_video
    if decode:
        return generate_video(pipe, prompt, name, **settings, **more)
    given = {key: value for key, value in settings.items() if key != "seed" and value is not None}
    noise = torch.Generator("cpu").manual_seed(settings["seed"])
    return pipe(prompt=prompt, generator=noise, output_type="latent", **given, **more).frames


def _add_stats(record: dict[str, Any], handle: Any, steps: int) -> None:
    total, each = handle.stats(), [handle.stats(step=i) for i in range(steps)]
    layers = [handle.stats(layer=i) for i in range(handle.layers)]
    sparse = [i for i, s in enumerate(each) if s.sparse_calls]
    record.update(attention_seconds=total.select_seconds + total.attention_seconds, select_seconds=total.select_seconds,
                  density_asked=_number(total.density_asked) if sparse else None, density=_number(total.density),
                  kept_mass=_number(total.mass), attention_work={
                      "asked": _number(total.work_asked), "realised": _number(total.work)
                  }, calls=total.calls, sparse_calls=total.sparse_calls,
                  kernel=total.kernel, warmup_steps=sparse[0] if sparse else 0,
                  step_select_seconds=[s.select_seconds
                                       for s in each], step_attention_seconds=[s.attention_seconds for s in each],
                  layer_density=[_number(s.density) for s in layers])
    if total.fallback_calls:
        raise Stop(f"{total.fallback_calls} calls ran dense although they should not have: {handle.report()}")


def _carry_of(handle: Any, steps: int) -> dict[str, Any]:
    """The object "carry" of docs/schemas/common.schema.json."""
    asked, total, each = handle.config.carry, handle.stats(), [handle.stats(step=i) for i in range(steps)]
    return {
        "asked": ",".join(map(str, asked)) if isinstance(asked, tuple) else str(asked),
        "format": handle.config.carry_format if total.anchor_calls else None,
        "anchors": [i for i, s in enumerate(each) if s.anchor_calls], "anchor_calls": total.anchor_calls,
        "carried_calls": total.carried_calls, "age": _number(total.carry_age),
        "step_age": [_number(s.carry_age) for s in each] if total.anchor_calls else [],
        "bytes": total.carry_bytes, "host_bytes": total.carry_host_bytes
    }


# ---------------------------------------------------------------- figures over several clips

def spread(values: Iterable[float | None]) -> dict[str, float | None]:
    """Median, lowest and highest.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'lowest': 1.0, 'highest': 3.0}
    """
    found = [v for v in values if v is not None]
    if not found:
        return {"median": None, "lowest": None, "highest": None}
    return {"median": statistics.median(found), "lowest": min(found), "highest": max(found)}


def step_mean(record: dict[str, Any], *, warmup: int = 0) -> float | None:
    """Mean seconds of a step, the first `warmup` left out; None if that leaves none."""
    steps = record["step_seconds"][warmup:]
    return statistics.fmean(steps) if steps else None


def speedup(dense: list[dict[str, Any]], sparse: list[dict[str, Any]], *, without_warmup: bool) -> float | None:
    """Speedup of the denoising steps, median over clips; without_warmup leaves out the steps that both run dense."""
    found = []
    for d, s in zip(dense, sparse):
        warmup = s["warmup_steps"] if without_warmup else 0
        a, b = step_mean(d, warmup=warmup), step_mean(s, warmup=warmup)
        if a and b:
            found.append(a / b)
    return statistics.median(found) if found else None
