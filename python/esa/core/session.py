# SPDX-License-Identifier: Apache-2.0
"""Sessions: one model run, in which the library decides per call what runs dense, online, cached or recorded."""
from __future__ import annotations

import ctypes as C
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import structs as T
from . import tensor as X
from .carry import SPARE, CarryMemory
from .config import EsaConfig, has_trait, recommended
from .context import Context, shared_context, usable
from .layout import Layout
from .library import EsaError
from .mask import MaskFile
from .work import WorkPlan


@dataclasses.dataclass(frozen=True)
class Stats:
    """What ran: of a whole video, of one layer, of one step, or of one layer at one step. Times in seconds; density and
    mass are means over the sparse calls (NaN without any; mass also where the selector has no estimate of its own).
    work is the arithmetic of self-attention as a share of dense, everything counted; work_asked is NaN if none was
    asked for. eight_calls ran in 8 bits. Of the sparse calls, anchor_calls also ran dense and made a difference to
    carry, and carried_calls added one, whose anchor was carry_age steps ago in the mean (NaN without any); carry_bytes
    and carry_host_bytes are the memory of differences, on the device (CPU: main memory) and page-locked for a device.
    computed_steps and skipped_steps count the steps at which the model ran, and those that the step cache left out."""
    calls: int
    dense_calls: int
    sparse_calls: int
    fallback_calls: int
    masks_made: int
    masks_loaded: int
    density_asked: float
    density: float
    mass: float
    select_seconds: float
    attention_seconds: float
    device_bytes: int
    kernel: str
    work: float = math.nan
    work_asked: float = math.nan
    eight_calls: int = 0
    anchor_calls: int = 0
    carried_calls: int = 0
    carry_age: float = math.nan
    carry_bytes: int = 0
    carry_host_bytes: int = 0
    # of esa.apply, which sees whole steps; 0 elsewhere
    computed_steps: int = 0
    skipped_steps: int = 0


class Session:
    """One model run: knows layer, step and guidance branch of every attention call and decides what it does.

    ::

        session = Session(EsaConfig(selector="entropy", budget=0.5), layers=30, steps=50, branches=2,
                          layout=Layout(grid=(21, 30, 52)))
        session.begin()                                  # a new video
        for step in range(50):
            for branch in range(2):                      # conditional, unconditional
                session.step(step, branch)
                for layer in range(30):
                    o = session.attention(layer, q, k, v)

    config
        The user's choices. `config.masks` makes the session cached, selector "dense" makes it dense, `record=True`
        records; else it is online.
    layers, steps, branches
        Sizes of the run. Layers are numbered in the order of execution; a branch is one guidance pass (a doubled batch
        is one branch).
    layout
        Where video and text tokens lie (`esa.Layout`); what it leaves open (order, window, protect_first_frame)
        comes from config. It holds for the session's life: another resolution is another session.
    model, config_hash
        Written into recordings; a mask file that names others is refused.
    record, record_groups, record_per_branch
        Calibration: every call runs dense and its block importance is summed, or with selector "error" its error
        scores. `save_recording` writes the sums, `load_recording` resumes, `esa.build_mask_file` makes a mask file of
        one or more recordings.
    device
        "cpu", "cuda", "cuda:1", a torch.device, or None: torch's current GPU where there is one. Calls take tensors of
        that GPU, or of the CPU.
    scale, causal
        Of the attention; scale None: D ** -0.5.
    sigma
        Noise level of each step, falling, within 0 .. 1; None: unknown. A work plan looks the steps up by it.
    step_branches
        For work: how many of the branches run at each step; 0: two, or one if there is but one.
    heads
        (first, total): calls have the heads from `first` on of `total` (sequence parallelism); (0, 0): all of them.

    What policy makes dense: warm-up steps, layer 0 with dense_first_layer, dense_layers, fewer tokens than min_tokens,
    kind "cross". Anything else that would have to run dense is an EsaError in a strict session (the default) and
    counted as a fallback otherwise.

    A session may be used by one thread at a time. GPU work is enqueued on torch's current stream, and nothing waits for
    it in the steady state; `stats` waits. Not for use in a child process after fork().

    >>> import numpy as np
    >>> config = EsaConfig(budget=0.5, block=16, warmup_frac=0.5)
    >>> session = Session(config, layers=2, steps=2, layout=Layout(grid=(4, 4, 8)))
    >>> x = np.random.default_rng(0).standard_normal((1, 2, 128, 16), dtype=np.float32)
    >>> session.begin()
    >>> for step in range(2):
    ...     session.step(step)
    ...     for layer in range(2):
    ...         o = session.attention(layer, x, x, x)
    >>> total = session.stats()
    >>> total.calls, total.dense_calls, total.sparse_calls, total.density
    (4, 3, 1, 0.5)
    """

    def __init__(self, config: EsaConfig, *, layers: int, steps: int, branches: int = 1, layout: Layout | None = None,
                 model: str | None = None, config_hash: str | None = None, record: bool = False, record_groups: int = 0,
                 record_per_branch: bool = False, device: Any = None, scale: float | None = None, causal: bool = False,
                 heads: tuple[int, int] = (0, 0), sigma: Sequence[float] | None = None, step_branches: int = 0) -> None:
        config = EsaConfig.check(config)
        if config.step_cache:
            raise ValueError(
                "step_cache leaves out forwards of a model, which esa.apply can do: a Session sees attention only")
        for name, value in (("layers", layers), ("steps", steps), ("branches", branches)):
            if not T.whole(value) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        self.config, self.layers, self.steps, self.branches = config, layers, steps, branches
        self.layout = complete_layout(layout or Layout(), config)
        self.mode = mode_of(config, record)
        self._ptr = C.c_void_p()
        self._context = _context(device)
        self._kv_len: Any = None
        self.masks = MaskFile(config.masks, self._context) if self.mode == "cached" else None  # type: ignore[arg-type]
        c = self._context.lib.c
        p = c.esa_session_params_default()
        p.mode, p.layers, p.steps, p.branches = T.SESSION_MODES[self.mode], layers, steps, branches
        p.strict, p.dense_first_layer = int(config.strict), int(config.dense_first_layer)
        p.refresh_every = T.schedule(config.refresh_every, "refresh_every")
        p.order_every = T.schedule(config.order_every, "order_every")
        p.warmup_frac, p.min_tokens = config.warmup_frac, config.min_tokens or 0
        p.step_map = T.STEP_MAPS[config.step_map]
        dense = (C.c_int32 * max(1, len(config.dense_layers)))(*config.dense_layers)
        p.dense_layers, p.dense_layer_count = dense, len(config.dense_layers)
        p.share_branches, p.step_branches = int(config.share_branches), step_branches
        p.model, p.config_hash = _text(model), _text(config_hash)
        self.plan = WorkPlan(config.plan, self._context) if config.plan is not None else None
        if self.mode == "online" and config.spends_work:
            p.work = self._work(step_branches or branches)
            p.plan = self.plan.ptr if self.plan else None
            p.work_or_least = int(config.work is None and config.quality is None)    # a preset suits any length
            if sigma is not None:
                p.sigma = (C.c_double * steps)(*sigma)
        if self.mode == "cached" and config.spends_work:
            p.work = config.work_for(steps, step_branches or branches)
        p.masks = self.masks.ptr if self.masks else None
        p.record_groups, p.record_per_branch = record_groups, int(record_per_branch)
        p.first_head, p.total_heads = heads
        p.select = select_params(config, self.layout, scale=scale, causal=causal, recording=record)
        p.attention.tail, p.attention.causal, p.attention.scale = T.TAILS[config.tail], int(causal), scale or 0.0
        # None: the session's choice for a selector. Mask files bring their own number, which 0 takes.
        choice = -1 if self.mode == "online" else 0
        p.attention.exact_rows = choice if config.exact_rows is None else config.exact_rows
        p.attention.precision = config.precision
        layers16 = (C.c_int32 * max(1, len(config.layers16)))(*config.layers16)
        p.layers16, p.layers16_count = layers16, len(config.layers16)
        p.steps16_first, p.steps16_last = config.steps16_first, config.steps16_last
        self._memory = memory = self._set_carry(p, device) if self.mode in ("online", "cached") else None
        self._at, self._calls, self._usual = -1, 0, 0       # the step, calls of its last layer, and of earlier steps
        self._most = 0                                      # bytes of differences that were given back
        self._context.run(c.esa_session_create, self._context.ptr, C.byref(self._ptr), C.byref(p))
        # memory: its functions must exist as long as the library's session
        self._context.own(self._ptr, lambda ptr, memory=memory: c.esa_session_free(ptr))  # type: ignore[misc]

    def _work(self, branches: int) -> float:
        """The work of the config, or the one that the plan expects to reach its quality."""
        config, plan = self.config, self.plan
        if config.quality is None or plan is None:
            return config.work_for(self.steps, branches)
        anchors = plan.info.anchors
        if anchors and not config.anchors(self.steps, branches=branches):
            raise ValueError(
                f"quality is {config.quality:g} dB, but the curve of {os.fspath(plan.path)} was measured with carry "
                f"({anchors} anchors), and this run has none: turn carry on, or give a work")
        return plan.reach(config.quality)

    def _set_carry(self, p: T.SessionParams, device: Any) -> CarryMemory | None:
        """The fields of carry. Returns what gives them memory of a GPU: torch, if torch is there to share it with."""
        config = self.config
        p.carry, p.carry_format = config.carry_number, T.CARRY_FORMATS[config.carry_format]
        if isinstance(config.carry, tuple):
            p.anchors, p.anchor_count = (C.c_int32 * len(config.carry))(*config.carry), len(config.carry)
        p.carry_room = -1 if config.carry_memory is None else T.size(config.carry_memory, "carry_memory")
        gpu = _gpu_of(device)
        if p.carry == T.CARRY_OFF or gpu is None or "torch" not in sys.modules:
            return None
        memory = CarryMemory(gpu, SPARE if config.carry_memory is None else 0.0)
        p.carry_alloc, p.carry_free = memory.pointers
        return memory

    def close(self) -> None:
        """Frees the session; calls after it are errors. Also done when the object goes away."""
        if getattr(self, "_ptr", None) and usable(self._context.process):
            self._context.release(self._ptr)
        self._ptr = C.c_void_p()

    def __del__(self, usable: Callable[[int], bool] = usable) -> None:
        if getattr(self, "_ptr", None) and usable(self._context.process):
            self.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, name: str, *arguments: Any) -> None:
        if not self._ptr:
            raise EsaError("the session was closed")
        self._context.run(getattr(self._context.lib.c, name), self._ptr, *arguments)

    def begin(self) -> None:
        """Starts a new video: steps, masks kept for reuse and statistics restart. A recording goes on and counts one
        more prompt."""
        self._run("esa_session_begin")
        self._kv_len = None
        self._at, self._calls, self._usual, self._most = -1, 0, 0, 0
        if self._memory is not None:
            self._memory.begin()

    def step(self, step: int, branch: int = 0) -> None:
        """Announces the step and the guidance branch of the calls that follow."""
        self._run("esa_session_step", step, branch)
        if step != self._at:
            self._at, self._calls, self._usual = step, 0, max(self._usual, self._calls)

    def trim(self) -> None:
        """Gives the memory of carried differences back. Calls add none until the next anchor. After the last call of a
        video, as far as a session on a GPU can tell (as many calls of its last layer as in earlier steps), that happens
        by itself, because what follows, such as a decoder, needs the memory."""
        if self._memory is None:
            self._most = max(self._most, int(self._raw_stats().carry_bytes))
        self._run("esa_session_trim")

    def _end_of_call(self, layer: int) -> None:
        self._calls += layer == self.layers - 1
        if self._at == self.steps - 1 and self._calls >= self._usual > 0 and self._memory is not None:
            self.trim()

    def cache_begin(self, threshold: float) -> None:
        """Starts the rule of the step cache for this video, or starts it anew (esa_session_cache_begin)."""
        self._run("esa_session_cache_begin", threshold)

    def cache_next(self, step: int, computed: bool, x_change: float, v_size: Sequence[float],
                   v_change: Sequence[float]) -> bool:
        """True if the step after `step` may use kept outputs. The arguments are the fields of esa_step_change."""
        change = T.StepChange(struct_size=C.sizeof(T.StepChange), step=step, computed=int(computed), x_change=x_change,
                              v_size=tuple(v_size), v_change=tuple(v_change))
        skip = C.c_int32()
        self._run("esa_session_cache_next", C.byref(change), C.byref(skip))
        return bool(skip.value)

    def attention(self, layer: int, q: Any, k: Any, v: Any, *, input_layout: str = "BNSD", kind: str = "self",
                  kv_len: Any = None, out: Any = None, lse: Any = None) -> Any:
        """One attention call of the model; returns o, laid out as q.

        q, k, v
            torch tensors or numpy arrays, [B, heads, tokens, D] or [B, tokens, heads, D] as input_layout says ("BNSD"
            or "BSND"); any strides with D dense, different for each; fewer key heads than query heads are shared (GQA).
        kind
            "self", or "cross" (always dense).
        kv_len
            Number of valid keys per batch entry (int32, on the tensors' device), or None: all. Keys beyond do not
            exist.
        out, lse
            Where to write; lse is float32 [B, heads, tokens] and receives the log-sum-exp. A read-only array is an
            error.
        """
        X.check_same(q, k, v)
        o = X.empty_like(q) if out is None else out
        views = [X.view(x, input_layout, name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
        views.append(X.view_written(o, input_layout, "out"))
        device = X.device_of(q)
        if device.kind == "cuda":
            self._context.set_stream(device.stream)
        if kind == "self" and not (kv_len is None and self._kv_len is None):
            self._kv_len = X.lengths(kv_len, q, views[0].dim[0])
            self._run("esa_session_set_kv_len", None if self._kv_len is None else X.address(self._kv_len))
        last = None if lse is None else C.byref(X.lse_view(lse))
        self._run("esa_session_attention", layer, T.number(T.CALL_KINDS, kind, "kind"), *map(C.byref, views), last)
        if kind == "self":
            self._end_of_call(layer)
        return o

    def _raw_stats(self, layer: int = -1, step: int = -1) -> T.SessionStats:
        s = T.SessionStats(struct_size=C.sizeof(T.SessionStats))
        self._run("esa_session_get_stats", C.byref(s), layer, step)
        return s

    def stats(self, layer: int = -1, step: int = -1) -> Stats:
        """Of the current video; of one layer, of one step, or of one cell of both. Waits for a GPU that has calls of
        this session to run."""
        s = self._raw_stats(layer, step)
        values = {f.name: getattr(s, f.name) for f in dataclasses.fields(Stats) if hasattr(s, f.name)}
        given_back = self._most if self._memory is None else self._memory.most
        values["carry_bytes"] = max(s.carry_bytes, given_back)
        return Stats(**{**values, "kernel": s.kernel.decode()})

    def save_recording(self, path: str | os.PathLike[str]) -> None:
        """Writes what was recorded so far, to a temporary name first."""
        self._run("esa_session_save_recording", os.fsencode(path))

    def load_recording(self, path: str | os.PathLike[str]) -> None:
        """Adds the sums of a recording made with the same settings."""
        self._run("esa_session_load_recording", os.fsencode(path))

    def __repr__(self) -> str:
        return f"<esa.Session {self.mode}, {self.layers} layers, {self.steps} steps, {self.branches} branches>"


def _text(value: str | None) -> bytes | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"model and config_hash must be text, not {type(value).__name__}")
    return None if value is None else value.encode()


def mode_of(config: EsaConfig, record: bool) -> str:
    """What kind of run a config asks for: "record", "cached", "dense" or "online"."""
    if record:
        return "record"
    if config.masks is not None:
        return "cached"
    return "dense" if config.selector == "dense" else "online"


def complete_layout(layout: Layout, config: EsaConfig) -> Layout:
    """The layout with the config's order, window and protection where it has none of its own."""
    changes: dict[str, Any] = {}
    if layout.order is None:
        changes.update(order=config.order, window=config.window)
    if layout.protect_first_frame is None:
        changes["protect_first_frame"] = config.protect_first_frame
    return dataclasses.replace(layout, **changes)


def _context(device: Any) -> Context:
    """The context of a session. The CPU's is shared, as its threads and memory are; a GPU's belongs to the session,
    with its stream."""
    gpu = _gpu_of(device)
    return shared_context() if gpu is None else Context(gpu)


def _gpu_of(device: Any) -> int | None:
    """The number of a session's GPU, None: it has none."""
    torch = sys.modules.get("torch")
    if device is None:
        gpu = torch is not None and torch.cuda.is_available()
        return torch.cuda.current_device() if torch is not None and gpu else None
    text = str(device)
    kind, _, index = text.partition(":")
    if kind == "cpu":
        return None
    if kind != "cuda" or not (index.isdigit() or not index):
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', not {text!r}")
    current = torch.cuda.current_device() if torch is not None and not index else 0
    return int(index) if index else current


def select_params(config: EsaConfig, layout: Layout, *, scale: float | None = None, causal: bool = False,
                  recording: bool = False) -> T.SelectParams:
    """The selector's settings as the library's struct."""
    best = recommended("record" if recording else "online", config.selector).select
    p = shared_context().lib.c.esa_select_params_default(best.selector)
    p.mode = T.MODES[config.mode]
    p.block_q, p.block_k = config.blocks
    p.samples, p.budget, p.cdf_threshold, p.scale = config.samples, config.density, config.cdf_threshold, scale or 0.0
    p.keep_sink, p.keep_recent, p.causal = int(config.keep_sink), int(config.keep_recent), int(causal)
    p.layout = layout.struct()
    if has_trait(T.word(T.SELECTORS, best.selector), "weighs_tail"):
        p.tail = T.TAILS[config.tail]
        p.group_q, p.group_k = config.groups or (best.group_q, best.group_k)
    return p
