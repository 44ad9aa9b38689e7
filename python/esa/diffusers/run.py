# SPDX-License-Identifier: Apache-2.0
"""Run: the state of one `esa.apply`. It is told of each forward of the transformers, makes a fitting session, and
passes attention on to it."""
from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from ..compat.original_masks import OriginalMasks, is_original
from ..core.config import EsaConfig, protects_first_frame
from ..core.layout import Layout
from ..core.library import EsaError
from ..core.mask import MaskFile
from ..core.session import Session, Stats, mode_of
from . import operators, reorder
from .clock import Clock, Moment
from .families import Family, Geometry
from .hooks import install
from .sessions import Key, Sessions
from .step_cache import StepCache, check_parallel
from .tokens import grid_of_positions, text_behind, valid_tokens, video_of_rows

# Guidance passes a transformer may have; a session keeps masks apart by them. Files know the usual two.
_BRANCHES, _FILE_BRANCHES = 4, 2
# Steps of a session whose number of steps is unknown and decides nothing.
_OPEN_ENDED = 1000


@dataclasses.dataclass(frozen=True)
class Recording:
    """Settings of a calibration run; see `esa.Session`."""
    groups: int = 0
    per_branch: bool = False


class Run:
    """Attention of the transformers of one pipeline."""

    def __init__(self, family: Family, transformers: Sequence[torch.nn.Module], config: EsaConfig, clock: Clock, *,
                 record: Recording | None = None, resume: str | None = None, model: str | None = None,
                 config_hash: str | None = None) -> None:
        self.family, self.transformers, self.config, self.clock = family, list(transformers), config, clock
        self.record, self.resume, self.model, self.config_hash = record, resume, model, config_hash
        # Listed once: while a forward runs, cache-dit shows other blocks in the place of the model's.
        self.modules = [list(family.modules(t)) for t in self.transformers]
        self.layers = max(map(len, self.modules))
        if not self.layers:
            raise ValueError(
                f"{type(self.transformers[0]).__name__} has no attention modules {' or '.join(family.attention)}")
        # the arguments of each transformer's forward, in order
        self.names = [list(inspect.signature(type(t).forward).parameters)[1:] for t in self.transformers]
        self.handle = operators.register(self)
        self.sessions = Sessions(self._make)
        self.moment: Moment | None = None
        self.geometry: Geometry | None = None                       # of the last call, or of the forward about to run
        self.videos = 0
        self.first_frame = is_given_first_frame(clock.pipe, family, self.transformers)
        self.dense: set[Geometry] = set()                           # too short for the model to gain
        self.computed: set[int] = set()                             # steps of the video in hand at which the model ran
        self.skipped: set[int] = set()                              # and those that the step cache left out
        self._entered = -1                                          # the clock's number of that video
        self._expected: Geometry | None = None                      # of the forward in hand
        self._positions: tuple[Any, Any, Geometry] | None = None
        self._video = -1                                            # the clock's number of the sessions' video
        self._steps_now: int | None = None
        self._guided = 0                                            # _guided_half of that video
        self._lengths: dict[int, torch.Tensor] = {}                 # valid keys per batch entry, by branch
        self._known = False                                         # those of this forward are there
        self._branch = 0
        self._masks: OriginalMasks | MaskFile | None = None
        self.cache: StepCache | None = None
        self._check()
        self.reorders = reorder.wanted(self, self._layout(Geometry((1, 1, 1))))
        self._permutations: dict[tuple[Geometry, torch.device], reorder.Permutation] = {}
        self._permutation: reorder.Permutation | None = None

    @property
    def session(self) -> Any:
        """The session of the last call, None before the first."""
        return self.sessions.last

    def _layout(self, geometry: Geometry) -> Layout:
        mode, protect = mode_of(self.config, self.record is not None), None
        if self.first_frame and self.config.protect_first_frame is None:
            protect = protects_first_frame(mode, self.config.selector, given=True)
        layout = Layout(grid=geometry.grid, text_front=geometry.text_front, text_back=geometry.text_back,
                        protect_first_frame=protect)
        if not isinstance(self._masks, MaskFile):
            return layout
        stored = layout_of(self._masks, layout)
        if self.config.order is None:
            return stored
        return dataclasses.replace(layout, protect_first_frame=stored.protect_first_frame)

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
        for name in ("dense_layers", "layers16"):
            bad = [i for i in getattr(config, name) if not 0 <= i < self.layers]
            if bad:
                raise ValueError(f"{name} names layer {bad[0]}, the model has layers 0 to {self.layers - 1}")
        if config.masks is not None and self.record is None:
            self._masks = OriginalMasks(config.masks) if is_original(config.masks) else MaskFile(config.masks)
            if isinstance(self._masks, MaskFile) and self._masks.info.layers != self.layers:
                raise ValueError(
                    f"{config.masks} was made for a model of {self._masks.info.layers} layers, this one has "
                    f"{self.layers}")
        if self.record is not None and self.record.per_branch and self.family.batched:
            raise ValueError(
                f"{self.family.name} computes both guidance branches in one call: they cannot be recorded apart")
        if config.kernel == "fa4":
            from . import fa4
            fa4.check(config)
        if config.step_cache:
            if self.record is not None:
                raise ValueError("a recording needs every step: step_cache must be 0")
            check_parallel(self)
            self.cache = StepCache(self, float(config.step_cache))

    def argument(self, which: int, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An argument of a forward by its name, None if it is not given."""
        return {**dict(zip(self.names[which], args)), **kwargs}.get(name)

    def session_of(self, moment: Moment) -> Any:
        """The session of the last call, None if there was none in the video of this moment."""
        return self.session if self._video == moment.video else None

    # ---- one forward of a transformer

    def enter(self, which: int, sizes: Sequence[int], device: torch.device, timestep: torch.Tensor | None,
              text_mask: torch.Tensor | None, ids: torch.Tensor | None, rows: torch.Tensor | None) -> None:
        """Before each forward: transformer number `which` is about to run on tokens of these sizes (families.Sizes)."""
        install(self, which)                # processors may have been exchanged since (fuse_qkv_projections does)
        t, h, w, front, back = (int(size) for size in sizes)
        told = Geometry((t, h, w), front, back) if t else self._placed(ids, rows, front, back)
        self._expected = self.geometry = geometry = told
        self.moment = moment = self.clock.tick(timestep)
        if moment.video != self._entered:
            self._entered = moment.video
            self.computed.clear()
            self.skipped.clear()
        self.computed.add(moment.step)
        if self.cache is not None:
            self.cache.install(which)       # for the next forward, if it was lost
            self.cache.announce(moment)
        if self.reorders:
            key = (geometry, device)
            if key not in self._permutations:
                self._permutations[key] = reorder.Permutation(reorder.resolve(self, self._layout(geometry)), geometry,
                                                              device)
            self._permutation = self._permutations[key]
        self._branch = self._branch_of(moment, which)
        self._known = False
        if text_mask is not None:
            self._keep_lengths(
                text_mask.sum(dim=tuple(range(1, text_mask.ndim)), dtype=torch.int32) + geometry.video)

    def _placed(self, ids: torch.Tensor | None, rows: torch.Tensor | None, front: int, back: int) -> Geometry:
        """The geometry of tokens at these positions, read once per tensor."""
        mark = None if ids is None else (_mark(ids), None if rows is None else _mark(rows))
        if mark is None or self._positions is None or self._positions[0] != mark:
            what = str(self.family.ids)
            told = (Geometry(grid_of_positions(ids, what), front, back) if self.family.rows is None else
                    video_of_rows(ids, rows, what, self.family.rows))
            # The tensors are kept, so that others cannot get their addresses.
            self._positions = (mark, (ids, rows), told)
        return self._positions[2]

    def _keep_lengths(self, valid: torch.Tensor) -> None:
        kept = self._lengths.get(self._branch)
        # The same array again where it fits: to a session on a GPU another array means other lengths.
        if kept is not None and kept.shape == valid.shape and kept.device == valid.device:
            kept.copy_(valid)
        else:
            self._lengths[self._branch] = valid.contiguous()
        self._known = True

    def _branch_of(self, moment: Moment, which: int) -> int:
        most = _FILE_BRANCHES if self.config.masks is not None or self.record is not None else _BRANCHES
        if moment.branch >= most:
            raise EsaError(
                f"the model was called {moment.branch + 1} times in step {moment.step}; at most {most} guidance "
                "passes are known: say where it stands with handle.pin(step, branch)")
        # Wan2.2: masks kept between steps belong to the transformer that made them. Files hold one mask per step, hence
        # of one transformer.
        return moment.branch + (which * _BRANCHES if most == _BRANCHES else 0)

    def attention(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                  mask: torch.Tensor | None = None) -> torch.Tensor:
        """One self-attention call, (B, N, H, D) in and out. mask marks valid keys, unless they are known already."""
        if self.moment is None or self._expected is None:
            raise EsaError(
                "esa's attention was called outside of a forward of the transformer: call the transformer itself, not "
                "its parts (and not .forward, which skips hooks)")
        self.geometry = geometry = self._expected.fill(query.shape[1])
        if query.shape[1] != geometry.tokens:
            raise EsaError(
                f"layer {layer} attends {query.shape[1]} tokens where {geometry.grid} video tokens and "
                f"{geometry.text_front + geometry.text_back} of text were expected ({geometry.tokens})")
        if geometry.tokens != geometry.video and self._parallel() is not None:
            raise EsaError(
                f"esa does not run under context parallelism in {self.family.name}: its attention has text beside the "
                "video, and every process holds a part of both")
        query, key, value = query.detach(), key.detach(), value.detach()
        if mask is None:
            known = self._known and self.family.text_mask is not None
            return self._attend(layer, query, key, value, geometry, self._lengths[self._branch] if known else None)
        valid = valid_tokens(mask, geometry, query.shape[0])
        if not self._known:                             # all layers of a forward have the same mask
            self._keep_lengths(valid.sum(1, dtype=torch.int32) + geometry.video)
        lengths = self._lengths[self._branch]
        if not geometry.text_front:
            return self._attend(layer, query, key, value, geometry, lengths)
        moved = text_behind(query, key, value, geometry, valid)
        out = self._attend(layer, moved.query, moved.key, moved.value, moved.geometry, lengths)
        return moved.back(out, geometry.text_front)

    def _attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, geometry: Geometry,
                lengths: torch.Tensor | None) -> torch.Tensor:
        assert self.moment is not None
        if self._video != self.moment.video:
            self._steps_now = self._steps(self.moment)
            self._guided = self._guided_half(query.shape[0])
            self.sessions.next_video()
            self._video = self.moment.video
            self.videos += 1
        assert self._steps_now is not None
        session = self.sessions.get(Key(geometry, self._steps_now, query.device, self._step_branches()),
                                    recording=self.record is not None)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for branch, part in self._parts(query.shape[0]):
            session.step(self.moment.step, branch)
            session.attention(layer, query[part], key[part], value[part], input_layout="BSND", out=out[part],
                              kv_len=None if lengths is None else lengths[part])
        return out

    # ---- guidance in one batch

    def _guided_half(self, batch: int) -> int:
        """Entries of one guidance branch, if this video's calls hold both, [without prompt | with prompt], and shall
        be split, so that one branch's difference serves both as it does in models that call twice. Else 0."""
        shares = self.config.share_branches
        if isinstance(self._masks, MaskFile):
            shares = self._masks.info.branches == 1
        split = self.family.batched and shares and batch % 2 == 0 and self._guides()
        return batch // 2 if split and self._anchors() else 0

    def _parts(self, batch: int) -> list[tuple[int, slice]]:
        """The calls that one call of the model becomes: branch and batch entries, the guided branch first."""
        half = self._guided
        if not half:
            return [(self._branch, slice(None))]
        first = self._branch // _BRANCHES * _BRANCHES               # of this transformer
        if batch == 2 * half and self._branch == first:
            return [(first, slice(half, None)), (first + 1, slice(0, half))]
        # A further pass of one branch is numbered 1 where contexts do not name it, which is taken here.
        return [(first + 3 if self._branch == first + 1 else self._branch, slice(None))]

    def _guides(self) -> bool | None:
        """True if the pipeline computes two guidance branches, None if it does not say."""
        pipe = self.clock.pipe
        guides = getattr(pipe, "do_classifier_free_guidance", None)
        scale = getattr(pipe, "guidance_scale", None)
        if guides is None and self.family.batched and isinstance(scale, (int, float)):      # CogVideoX
            return scale > 1
        return None if guides is None else bool(guides)

    def _passes(self) -> int | None:
        """The calls that the guiders of a pipeline make at this step, None if it has none."""
        guiders = (getattr(self.clock.pipe, name, None) for name in ("guider", "audio_guider"))
        counts = [getattr(guider, "num_conditions", None) for guider in guiders]
        return max((n for n in counts if isinstance(n, int)), default=None)

    # ---- sessions

    def _guidance(self) -> int:
        """The guidance branches of a step; 0: not known. A step of a pipeline of diffusers that does not say whether it
        guides has one (HunyuanVideo)."""
        pipe = self.clock.pipe
        if not self.family.guided:
            return 1
        passes = self._passes()
        if pipe is None or passes:
            return min(passes or 0, _BRANCHES)
        guides = self._guides()
        if guides is None and not any(kind.__name__ == "DiffusionPipeline" for kind in type(pipe).__mro__):
            return 0
        return 2 if guides else 1

    def _step_branches(self) -> int:
        """How many calls of a step may share masks, for a run that spends work; 0: not known. A doubled batch that is
        not split is one call."""
        if not self.config.spends_work or self.record is not None:
            return 0
        whole = self.family.batched and not self._guided and not self._passes()
        return min(1, self._guidance()) if whole else self._guidance()

    def _steps(self, moment: Moment) -> int:
        if moment.steps is not None:
            return moment.steps
        config = self.config
        if config.masks is None and self.record is None and not config.spends_work and not isinstance(
                config.carry, int) and (config.warmup_frac == 0 or config.selector == "dense"):
            return _OPEN_ENDED
        raise EsaError(
            "the number of steps is not known here (no pipeline runs the transformer): esa.apply(transformer, config, "
            "steps=50), or EsaConfig(warmup_frac=0)")

    def _anchors(self) -> tuple[int, ...]:
        """The anchors of the video in hand. Where steps are not counted, none can be placed."""
        assert self._steps_now is not None and self.moment is not None
        if self.record is not None or self.config.selector == "dense" or (
                self.moment.steps is None and self.config.carry == "auto"):
            return ()
        return self.config.anchors(self._steps_now, self._switch(self._steps_now), self._guidance())

    def _switch(self, steps: int) -> int | None:
        """The step at which the second transformer takes over, None if the pipeline does not say (Wan 2.2 does)."""
        pipe: Any = self.clock.pipe
        scheduler: Any = getattr(pipe, "scheduler", None)
        ratio = getattr(getattr(pipe, "config", None), "boundary_ratio", None)
        timesteps: Any = getattr(scheduler, "timesteps", None)
        if len(self.transformers) < 2 or ratio is None or not torch.is_tensor(timesteps) or len(timesteps) < steps:
            return None
        return int((timesteps[-steps:] >= ratio * scheduler.config.num_train_timesteps).sum())

    def _sigma(self, steps: int) -> list[float] | None:
        """Noise levels of the steps, if the pipeline's scheduler has them."""
        sigmas: Any = getattr(getattr(self.clock.pipe, "scheduler", None), "sigmas", None)
        if not torch.is_tensor(sigmas) or sigmas.ndim != 1 or sigmas.numel() < steps:
            return None
        values = [float(x) for x in sigmas[:steps].cpu()]
        falling = all(a > b for a, b in zip(values, values[1:], strict=False))
        return values if falling and 0 <= values[-1] and values[0] <= 1 else None

    def _make(self, key: Key) -> Any:
        # the session sees attention only; the step cache is ours
        config, geometry = self.config.replace(step_cache=0.0) if self.cache else self.config, key.geometry
        if self.is_short(geometry):
            return Session(config.replace(selector="dense", carry="off"), layers=self.layers, steps=key.steps,
                           branches=_BRANCHES * len(self.transformers), device=key.device)
        if config.carry != "off":
            anchors = self._anchors()
            if not anchors:
                config = config.replace(carry="off")
            elif anchors != config.anchors(key.steps, branches=key.branches):
                # one more, at the second transformer's first step
                config = config.replace(carry=anchors)
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
                          heads=self._heads(), sigma=self._sigma(key.steps) if config.spends_work else None,
                          step_branches=key.branches)
        if self.resume is not None:
            session.load_recording(self.resume)
        return session

    def is_short(self, geometry: Geometry) -> bool:
        """True if calls of this geometry stay dense, because attention is a small part of the model there and the
        config leaves it open. Says so once."""
        short = self.record is None and self.config.open and geometry.tokens <= self.family.short
        if short and geometry not in self.dense:
            self.dense.add(geometry)
            warnings.warn(f"{self.dense_words(geometry)}; EsaConfig(min_tokens=0) makes it sparse", stacklevel=2)
        return short

    def dense_words(self, geometry: Geometry) -> str:
        return (f"{self.family.name} stays dense at {geometry.tokens} tokens, because attention is a small part of it "
                f"up to {self.family.short}")

    def _heads(self) -> tuple[int, int]:
        """Which heads the calls of this process have, under diffusers' context parallelism."""
        transformer: Any = self.transformers[0]
        parallel = self._parallel()
        if parallel is None:
            return (0, 0)
        from .parallel import heads_of
        return heads_of(parallel, transformer.config.num_attention_heads)

    def _parallel(self) -> Any:
        _, module = self.modules[0][0]
        return getattr(module.processor, "_parallel_config", None)

    # ---- what ran

    def stats(self, layer: int = -1, step: int = -1) -> Stats:
        if self.session is None:
            nan = math.nan
            return Stats(0, 0, 0, 0, 0, 0, self.config.density, nan, nan, 0.0, 0.0, 0, "", nan,
                         self.config.work or nan)
        steps = [sum(step in (-1, i) for i in which) for which in (self.computed, self.skipped)]
        return dataclasses.replace(self.sessions.stats(layer, step), computed_steps=steps[0], skipped_steps=steps[1])

    @property
    def steps(self) -> int | None:
        """Steps of the video in hand, None before the first."""
        return self._steps_now

    def close(self) -> None:
        """Releases what belongs to the model. Statistics stay readable."""
        if self.cache is not None:
            self.cache.close()
        self.sessions.trim()
        self._lengths.clear()
        self._permutations.clear()
        self.moment = self._permutation = self._positions = None


def _mark(x: torch.Tensor) -> tuple[Any, ...]:
    """Tells a tensor with its contents from others, as long as it is kept."""
    return x.data_ptr(), x.shape, x.stride(), 0 if x.is_inference() else x._version


def is_given_first_frame(pipe: Any, family: Family, transformers: Sequence[Any]) -> bool:
    """True for image-to-video models, by the names diffusers gives their pipelines or by the transformer's config."""
    name = type(pipe).__name__
    return any(word in name for word in ("ImageToVideo", "Image2Video", "I2V", "VideoToWorld")) or (
        family.first_frame is not None and any(family.first_frame(t.config) for t in transformers))


def layout_of(masks: MaskFile, layout: Layout) -> Layout:
    """The layout with the order a mask file was made in: tokens must be cut into the same blocks."""
    from ..core import structs as T
    info = masks.info.layout
    word = None if info.order < 0 else T.word(T.ORDERS, info.order)
    return dataclasses.replace(
        layout, order=word, window=tuple(info.window) if word == "tile3d" else None,
        protect_first_frame=None if info.protect_first_frame < 0 else bool(info.protect_first_frame))
