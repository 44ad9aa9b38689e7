# SPDX-License-Identifier: Apache-2.0
"""Autoregressive Wan: a video made chunk by chunk, each new chunk attending the cached keys and values of the past and
itself.

The queries are the chunk, the keys the cache plus the chunk, so the mask is a rectangle: its rows are cut from the
chunk's grid of tokens, its columns from that of everything the chunk sees. Works with diffusers' WanTransformer3DModel,
whose layout of weights causal distillations keep. ::

    with autoregressive_mode(transformer, EsaConfig(budget=0.5), steps=4) as state:
        for latents in chunks:                          # noise of each chunk, [B, C, frames, h, w]
            for i, t in enumerate(timesteps):
                state.step(i)
                latents = update(latents, transformer(latents, t, text).sample)
            # One more pass: the finished chunk enters the cache.
            state.commit(latents, timestep=zero, encoder_hidden_states=text)

Guidance: `state.step(i, branch=1)` before the pass without the prompt; each branch has a cache of its own, commit it
with branch=1 too. What runs dense by policy is as everywhere: warm-up steps (of each chunk), layer 0, listed layers.
`window_frames` keeps the cache from growing without end, `sink_frames` are the first frames that stay in it all the
same."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..core.config import EsaConfig
from ..core.layout import Layout
from ..core.library import EsaError
from ..core.session import Session, Stats
from .families import detect
from .families.base import latent_grid, merge_heads, refuse_mask, split_heads
from .families.wan import WAN, _rotate

__all__ = ["AutoregressiveState", "KVCache", "SparseAttentionProcessor", "autoregressive_mode"]


class KVCache:
    """Keys (rotated) and values of the past, one pair per layer: (B, tokens, H, D)."""

    def __init__(self, layers: int) -> None:
        self.keys: list[torch.Tensor | None] = [None] * layers
        self.values: list[torch.Tensor | None] = [None] * layers
        self.frames = 0

    def get(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        key, value = self.keys[layer], self.values[layer]
        return None if key is None or value is None else (key, value)

    def with_past(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Past and new tokens in one row."""
        past = self.get(layer)
        return (key, value) if past is None else (torch.cat([past[0], key], dim=1), torch.cat([past[1], value], dim=1))

    def put(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.keys[layer], self.values[layer] = key, value

    def trim(self, tokens_per_frame: int, sink_frames: int, window_frames: int) -> None:
        """Keeps the first sink_frames and the last window_frames."""
        if not window_frames or self.frames <= sink_frames + window_frames:
            return
        sink, window = sink_frames * tokens_per_frame, window_frames * tokens_per_frame
        for rows in (self.keys, self.values):
            for layer, x in enumerate(rows):
                if x is not None:
                    rows[layer] = torch.cat([x[:, :sink], x[:, -window:]], dim=1)
        self.frames = sink_frames + window_frames


class SparseAttentionProcessor:
    """Stands in for WanAttnProcessor on the self-attention of one layer."""
    _attention_backend: Any = None
    _parallel_config: Any = None

    def __init__(self, state: AutoregressiveState, layer: int, original: Any) -> None:
        self.state, self.layer, self.original = state, layer, original

    def __call__(self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None,
                 attention_mask: torch.Tensor | None = None,
                 rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        if encoder_hidden_states is not None:
            raise ValueError("the autoregressive processor is for self-attention, it got text")
        if self._parallel_config is not None:
            raise ValueError("the autoregressive processor does not run under context parallelism")
        refuse_mask(attention_mask)
        if getattr(attn, "fused_projections", False):
            query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        query, key = split_heads(attn.norm_q(query), attn.heads), split_heads(attn.norm_k(key), attn.heads)
        value = split_heads(value, attn.heads)
        if rotary_emb is not None:
            query, key = _rotate(query, *rotary_emb), _rotate(key, *rotary_emb)
        out = self.state.attention(self.layer, query, key, value)
        return attn.to_out[1](attn.to_out[0](merge_heads(out, query)))


class AutoregressiveState:
    """Where the video stands: chunks and frames done, caches, sessions. Made by `autoregressive_mode`."""

    def __init__(self, transformer: nn.Module, config: EsaConfig, steps: int, sink_frames: int,
                 window_frames: int) -> None:
        self.transformer, self.config, self.steps = transformer, config, steps
        self.sink_frames, self.window_frames = sink_frames, window_frames
        self.layers = sum(1 for _ in WAN.modules(transformer))
        self.chunk = 0                          # finished chunks
        self.frames = 0                         # latent frames of the finished chunks (of branch 0)
        self._caches: dict[int, KVCache] = {}
        # frames that a branch has finished: where the next chunk's positions begin
        self._starts: dict[int, int] = {}
        self._session: Session | None = None
        self._key: Any = None
        self._begun = -1                        # the chunk whose calls the session counts
        self.history: list[Stats] = []          # what ran in each finished chunk
        self._step, self._branch, self._writing = 0, 0, False
        self._grid: tuple[int, int, int] | None = None

    # ---- the caller's side

    def step(self, step: int, branch: int = 0) -> None:
        """The next forward is this step of the chunk, and this guidance branch."""
        if not 0 <= step < self.steps:
            raise ValueError(f"step {step} was announced, a chunk has steps 0 to {self.steps - 1}")
        if not 0 <= branch < 2:
            raise ValueError(f"branch {branch} was announced, there are 0 (with the prompt) and 1 (without)")
        self._step, self._branch = step, branch

    def commit(self, hidden_states: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor, *,
               branch: int = 0, **more: Any) -> None:
        """Runs the finished chunk once more, dense, and puts its keys and values into the cache of a branch. The
        timestep is that of clean latents (0), as the model was trained to see its past."""
        if branch == 0 and self._session is not None and self._begun == self.chunk:
            self.history.append(self._session.stats())
        self._writing, self._branch = True, branch
        try:
            with torch.no_grad():
                self.transformer(hidden_states, timestep, encoder_hidden_states, return_dict=False, **more)
        finally:
            self._writing = False
        assert self._grid is not None
        cache = self._cache(branch)
        cache.frames += self._grid[0]
        self._starts[branch] = self._starts.get(branch, 0) + self._grid[0]
        cache.trim(self._grid[1] * self._grid[2], self.sink_frames, self.window_frames)
        if branch == 0:
            self.chunk += 1
            self.frames = self._starts[0]

    def reset(self) -> None:
        """Forgets the past: the next chunk is the first of a new video."""
        self._caches.clear()
        self._starts.clear()
        self.history.clear()
        self.chunk = self.frames = 0
        self._begun = -1

    def stats(self, layer: int = -1, step: int = -1) -> Stats | None:
        """What ran in the chunk in hand; None before the first. `history` has the totals of the finished ones."""
        return self._session.stats(layer, step) if self._session is not None else None

    # ---- the transformer's side

    def _cache(self, branch: int) -> KVCache:
        return self._caches.setdefault(branch, KVCache(self.layers))

    def enter(self, shape: tuple[int, ...]) -> None:
        """Before each forward, with the shape of the chunk's latents."""
        transformer: Any = self.transformer
        self._grid = latent_grid(shape, *transformer.config.patch_size)
        past = self._cache(self._branch)
        key = (self._grid, past.frames)
        if key != self._key:                    # another rectangle is another session
            t, h, w = self._grid
            layout = Layout(grid=self._grid, grid_k=(past.frames + t, h, w))
            self._session = Session(self.config, layers=self.layers, steps=self.steps, branches=2, layout=layout,
                                    device=transformer.device)
            self._key, self._begun = key, -1
        assert self._session is not None
        if self._begun != self.chunk:
            self._session.begin()
            self._begun = self.chunk
        self._session.step(self._step, self._branch)

    def positions(self, rope: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary angles of the chunk where it stands in the video: those of all frames up to its end, of which the
        last are its own."""
        start = self._starts.get(self._branch, 0)
        batch, channels, frames, height, width = hidden_states.shape
        transformer: Any = self.transformer
        patch = transformer.config.patch_size[0]
        if frames // patch + start > transformer.config.rope_max_seq_len:
            raise EsaError(
                f"the video has grown to {start + frames // patch} latent frames, the model knows positions up to "
                f"{transformer.config.rope_max_seq_len}: reset() begins a new one")
        whole = hidden_states.new_empty((1, 1, 1, 1, 1)).expand(batch, channels, frames + start * patch, height, width)
        cos, sin = type(rope).forward(rope, whole)
        assert self._grid is not None
        own = self._grid[0] * self._grid[1] * self._grid[2]
        return cos[:, -own:], sin[:, -own:]

    def attention(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of the chunk over past and chunk, (B, N, H, D) in and out."""
        if query.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("esa computes attention forward only: gradients are not available (use torch.no_grad())")
        assert self._session is not None
        cache = self._cache(self._branch)
        keys, values = cache.with_past(layer, key, value)
        # "cross" is the session's word for a call that is dense whatever the policy says.
        out = self._session.attention(layer, query, keys, values, input_layout="BSND",
                                      kind="cross" if self._writing else "self")
        if self._writing:
            cache.put(layer, keys, values)
        return out


@contextlib.contextmanager
def autoregressive_mode(target: Any, config: EsaConfig | None = None, *, steps: int, sink_frames: int = 0,
                        window_frames: int = 0) -> Iterator[AutoregressiveState]:
    """Chunk-by-chunk generation with sparse attention inside the `with` block.

    target
        A WanTransformer3DModel, or a pipeline that has one.
    config
        `EsaConfig`; None: selector "entropy" with its defaults. Cached masks belong to squares and are refused, and so
        is carry, for which chunks are too short.
    steps
        Denoising steps of a chunk.
    sink_frames, window_frames
        Latent frames that stay in the cache: the first ones and the last ones; window_frames 0: all of them.

    Leaving the block, also by an exception, restores the model."""
    config = config if config is not None else EsaConfig(selector="entropy")
    transformer = target if isinstance(target, nn.Module) else getattr(target, "transformer", None)
    if not isinstance(transformer, nn.Module) or detect(transformer) is not WAN:
        raise TypeError(
            f"autoregressive_mode takes a WanTransformer3DModel or a pipeline that has one, not {type(target).__name__}"
        )
    if config.masks is not None:
        raise ValueError(
            "cached masks were recorded for whole videos; the rectangles of an autoregressive run are chosen online")
    if not isinstance(steps, int) or steps < 1 or sink_frames < 0 or window_frames < 0:
        raise ValueError("steps must be at least 1, sink_frames and window_frames at least 0")
    if config.kernel != "auto":
        raise ValueError("autoregressive_mode runs the library's own kernels only")
    if config.step_cache:
        raise ValueError("step_cache is for esa.apply: chunks have few steps, and each is computed")
    if config.carry not in ("auto", "off"):
        raise ValueError(f"carry is for whole videos: a chunk has few steps, so carry must be 'auto' or 'off' (both do "
                         f"without), not {config.carry!r}")
    config = config.replace(carry="off")
    state = AutoregressiveState(transformer, config, steps, sink_frames, window_frames)
    model: Any = transformer
    originals = [(module, module.processor) for _, module in WAN.modules(transformer)]
    if any(type(p).__name__ not in WAN.replaces for _, p in originals):
        raise ValueError(
            f"the model has other attention processors than {', '.join(WAN.replaces)}: remove what put them there first"
        )

    def on_enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden_states = kwargs.get("hidden_states", args[0] if args else None)
        if isinstance(hidden_states, torch.Tensor):
            state.enter(tuple(hidden_states.shape))

    def on_rope(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return state.positions(module, args[0])

    hooks = [model.register_forward_pre_hook(on_enter, with_kwargs=True), model.rope.register_forward_hook(on_rope)]
    try:
        for layer, (module, processor) in enumerate(originals):
            module.set_processor(SparseAttentionProcessor(state, layer, processor))     # type: ignore[operator]
        yield state
    finally:
        for hook in hooks:
            hook.remove()
        for module, processor in originals:
            module.set_processor(processor)     # type: ignore[operator]
