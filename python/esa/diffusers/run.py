# SPDX-License-Identifier: Apache-2.0
"""Run: the state of one `esa.apply`. It is told of each forward of the transformers, makes a fitting session, and
passes attention on to it."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..compat.original_masks import OriginalMasks, is_original
from ..core.config import EsaConfig
from ..core.layout import Layout
from ..core.library import EsaError
from ..core.mask import MaskFile
from ..core.session import Session, Stats
from . import operators, reorder
from .clock import Clock, Moment
from .families import Family, Geometry
from .hooks import install

# Guidance passes a transformer may have; a session keeps masks apart by them. Files know the usual two.
_BRANCHES, _FILE_BRANCHES = 4, 2
# Steps of a session whose number of steps is unknown and decides nothing.
_OPEN_ENDED = 1000


@dataclasses.dataclass(frozen=True)
class Recording:
    """Settings of a calibration run; see `esa.Session`."""
    groups: int = 0
    per_branch: bool = False


@dataclasses.dataclass(frozen=True)
class _Key:
    """What a session is made for. Another key is another session; the same one is the next video of the same
    session."""
    geometry: Geometry
    steps: int
    device: torch.device


class Run:
    """Attention of the transformers of one pipeline."""

    def __init__(self, family: Family, transformers: Sequence[torch.nn.Module], config: EsaConfig, clock: Clock, *,
                 record: Recording | None = None, resume: str | None = None, model: str | None = None,
                 config_hash: str | None = None) -> None:
        self.family, self.transformers, self.config, self.clock = family, list(transformers), config, clock
        self.record, self.resume, self.model, self.config_hash = record, resume, model, config_hash
        self.layers = max(sum(1 for _ in family.modules(t)) for t in self.transformers)
        self.handle = operators.register(self)
        self.session: Any = None
        self.moment: Moment | None = None
        self.geometry: Geometry | None = None
        self.videos = 0
        self._key: _Key | None = None
        self._video = -1                                            # the clock's number of the video the session is in
        self._lengths: dict[int, torch.Tensor] = {}                 # valid keys per batch entry, by branch
        self._branch = 0
        self._masks: OriginalMasks | MaskFile | None = None
        self._check()
        self.reorders = reorder.wanted(self, self._layout(Geometry((1, 1, 1))))
        self._permutations: dict[tuple[Geometry, torch.device], reorder.Permutation] = {}
        self._permutation: reorder.Permutation | None = None

    def _layout(self, geometry: Geometry) -> Layout:
        layout = Layout(grid=geometry.grid, text_front=geometry.text_front, text_back=geometry.text_back)
        return layout_of(self._masks,
                         layout) if isinstance(self._masks, MaskFile) and self.config.order is None else layout

    def order(self, x: torch.Tensor, dim: int, back: bool) -> torch.Tensor:
        """Tokens of one dimension in the order of the run, or back."""
        if self._permutation is None:
            raise EsaError(
                "esa's order was asked for outside of a forward of the transformer: call the transformer itself, not "
                "its parts")
        return self._permutation(x, dim, back)

    def _check(self) -> None:
        """Checks all that can be checked before the model runs."""
        config = self.config
        if config.selector == "full":
            raise ValueError("selector 'full' keeps every block: selector='dense' is the same and says so")
        bad = [i for i in config.dense_layers if not 0 <= i < self.layers]
        if bad:
            raise ValueError(f"dense_layers names layer {bad[0]}, the model has layers 0 to {self.layers - 1}")
        if config.masks is not None and self.record is None:
            self._masks = OriginalMasks(config.masks) if is_original(config.masks) else MaskFile(config.masks)
            if isinstance(self._masks, MaskFile) and self._masks.info.layers != self.layers:
                raise ValueError(
                    f"{config.masks} was made for a model of {self._masks.info.layers} layers, this one has "
                    f"{self.layers}")
        if self.record is not None and self.record.per_branch and self.family.name == "CogVideoX":
            raise ValueError("CogVideoX computes both guidance branches in one call: they cannot be recorded apart")
        if config.kernel == "fa4":
            from . import fa4
            fa4.check(config)

    # ---- one forward of a transformer

    def enter(self, which: int, shape: tuple[int, ...], device: torch.device, timestep: torch.Tensor | None,
              text_mask: torch.Tensor | None, text_length: int) -> None:
        """Before each forward: transformer number `which` is about to run on latents of `shape`."""
        install(self, which)                # processors may have been exchanged since (fuse_qkv_projections does)
        transformer: Any = self.transformers[which]
        self.geometry = self.family.geometry(transformer.config, shape, text_length)
        self.moment = moment = self.clock.tick(timestep)
        if self.reorders:
            key = (self.geometry, device)
            if key not in self._permutations:
                self._permutations[key] = reorder.Permutation(reorder.resolve(self, self._layout(self.geometry)),
                                                              self.geometry, device)
            self._permutation = self._permutations[key]
        self._branch = self._branch_of(moment, which)
        if text_mask is None:
            self._lengths.pop(self._branch, None)
        else:
            valid = text_mask.sum(dim=tuple(range(1, text_mask.ndim)),
                                  dtype=torch.int32) + (self.geometry.tokens - text_length)
            kept = self._lengths.get(self._branch)
            # The same array again where it fits: to a session on a GPU another array means other lengths.
            if kept is not None and kept.shape == valid.shape and kept.device == valid.device:
                kept.copy_(valid)
            else:
                self._lengths[self._branch] = valid.contiguous()

    def _branch_of(self, moment: Moment, which: int) -> int:
        most = _FILE_BRANCHES if self.config.masks is not None or self.record is not None else _BRANCHES
        if moment.branch >= most:
            raise EsaError(
                f"the model was called {moment.branch + 1} times in step {moment.step}; at most {most} guidance "
                "passes are known: say where it stands with handle.pin(step, branch)")
        # Wan2.2: masks kept between steps belong to the transformer that made them. Files hold one mask per step, hence
        # of one transformer.
        return moment.branch + (which * _BRANCHES if most == _BRANCHES else 0)

    def attention(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """One self-attention call, (B, N, H, D) in and out."""
        if self.moment is None or self.geometry is None:
            raise EsaError(
                "esa's attention was called outside of a forward of the transformer: call the transformer itself, not "
                "its parts (and not .forward, which skips hooks)")
        if query.shape[1] != self.geometry.tokens:
            raise EsaError(
                f"layer {layer} attends {query.shape[1]} tokens where {self.geometry.grid} video tokens and "
                f"{self.geometry.text_front + self.geometry.text_back} of text were expected ({self.geometry.tokens})")
        session = self._session(query.device)
        session.step(self.moment.step, self._branch)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        session.attention(layer, query.detach(), key.detach(), value.detach(), input_layout="BSND", out=out,
                          kv_len=self._lengths.get(self._branch))
        return out

    # ---- sessions

    def _session(self, device: torch.device) -> Any:
        assert self.moment is not None and self.geometry is not None
        if self.session is not None and self._video == self.moment.video:
            return self.session
        key = _Key(self.geometry, self._steps(self.moment), device)
        if key != self._key:
            if self.record is not None and self._key is not None:
                old = self._key
                raise EsaError(
                    f"a recording holds one size: it was begun with {old.geometry.grid} video tokens and {old.steps} "
                    f"steps, this video has {key.geometry.grid} and {key.steps}")
            self.session = None                         # the old one goes first: both would hold GPU memory
            self.session = self._make(key)
            self._key = key
        self.session.begin()
        self._video = self.moment.video
        self.videos += 1
        return self.session

    def _steps(self, moment: Moment) -> int:
        if moment.steps is not None:
            return moment.steps
        if self.config.masks is None and self.record is None and not self.config.spends_work and (
                self.config.warmup_frac == 0 or self.config.selector == "dense"):
            return _OPEN_ENDED
        raise EsaError(
            "the number of steps is not known here (no pipeline runs the transformer): esa.apply(transformer, config, "
            "steps=50), or EsaConfig(warmup_frac=0)")

    def _sigma(self, steps: int) -> list[float] | None:
        """Noise levels of the steps, if the pipeline's scheduler has them."""
        sigmas: Any = getattr(getattr(self.clock.pipe, "scheduler", None), "sigmas", None)
        if not torch.is_tensor(sigmas) or sigmas.ndim != 1 or sigmas.numel() < steps:
            return None
        values = [float(x) for x in sigmas[:steps].cpu()]
        falling = all(a > b for a, b in zip(values, values[1:], strict=False))
        return values if falling and 0 <= values[-1] and values[0] <= 1 else None

    def _make(self, key: _Key) -> Any:
        config, geometry = self.config, key.geometry
        layout = self._layout(geometry)
        if isinstance(self._masks, OriginalMasks):
            path, budget = self._masks.convert(geometry.tokens, layout, config.density)
            config = config.replace(masks=path, budget=budget)
            layout = layout_of(MaskFile(path), layout)
        if reorder.may_order(self):
            layout = dataclasses.replace(reorder.resolve(self, layout), order_applied=self.reorders)
        if config.kernel == "fa4":
            from .fa4 import Fa4Session
            return Fa4Session(config, layers=self.layers, steps=key.steps, layout=layout)
        files = config.masks is not None or self.record is not None
        branches = _FILE_BRANCHES if files else _BRANCHES * len(self.transformers)
        record = self.record or Recording()
        session = Session(config, layers=self.layers, steps=key.steps, branches=branches, layout=layout,
                          model=self.model, config_hash=self.config_hash, record=self.record is not None,
                          record_groups=record.groups, record_per_branch=record.per_branch, device=key.device,
                          heads=self._heads(), sigma=self._sigma(key.steps) if config.spends_work else None)
        if self.resume is not None:
            session.load_recording(self.resume)
        return session

    def _heads(self) -> tuple[int, int]:
        """Which heads the calls of this process have, under diffusers' context parallelism."""
        transformer: Any = self.transformers[0]
        _, module = next(iter(self.family.modules(transformer)))
        parallel = getattr(module.processor, "_parallel_config", None)
        if parallel is None:
            return (0, 0)
        from .parallel import heads_of
        return heads_of(parallel, transformer.config.num_attention_heads)

    # ---- what ran

    def stats(self, layer: int = -1, step: int = -1) -> Stats:
        if self.session is None:
            nan = math.nan
            return Stats(0, 0, 0, 0, 0, 0, self.config.density, nan, nan, 0.0, 0.0, 0, "", nan,
                         self.config.work_asked or nan)
        return self.session.stats(layer, step)

    @property
    def steps(self) -> int | None:
        """Steps of the video in hand, None before the first."""
        return self._key.steps if self._key is not None else None

    def close(self) -> None:
        """Releases what belongs to the model. Statistics stay readable."""
        self._lengths.clear()
        self._permutations.clear()
        self.moment = self._permutation = None


def layout_of(masks: MaskFile, layout: Layout) -> Layout:
    """The layout with the order a mask file was made in: tokens must be cut into the same blocks."""
    from ..core import structs as T
    info = masks.info.layout
    word = None if info.order < 0 else T.word(T.ORDERS, info.order)
    return dataclasses.replace(
        layout, order=word, window=tuple(info.window) if word == "tile3d" else None,
        protect_first_frame=None if info.protect_first_frame < 0 else bool(info.protect_first_frame))
