# SPDX-License-Identifier: Apache-2.0
"""ComfyUI: a node that makes the attention of a model sparse, MODEL in, MODEL out (docs/hosts.md).

It puts a function on the hook `transformer_options["optimized_attention_override"]`. Calls that are not ours (masks,
cross-attention, short sequences, steps outside of the window) go on to the override that was there before, or to
ComfyUI's own attention. Grid, layer, sigma and guidance branch come from transformer_options; a wrapper around the
model adds the grid where a model does not publish one (HunyuanVideo). MiniMax-H3 publishes the segments of its packed
sequence: text, pictures and sound are kept whole, and so are calls of another length (its token refiner).

The folder compat/comfyui declares the node to ComfyUI."""
from __future__ import annotations

import logging
import re
from typing import Any

import torch

from ..core.config import EsaConfig
from ..core.layout import Layout
from .run import Dense, HostRun, carries, config_of

log = logging.getLogger("esa")
KEY = "esa_sparse_attention"            # of callbacks, wrappers and receipts
H3 = "minimax_h3_layout"                # of the segments of a packed sequence
OVERRIDE = "optimized_attention_override"
# How ComfyUI's own sparse node tells step forecasters which calls were sparse; same keys, same fields.
RECEIPTS, POLICIES, VERSION = "attention_backend_receipts_v1", "attention_backend_history_v1", 1
# Lists of transformer blocks in ComfyUI's models, in the order they run, and the block_type of their calls.
_STACKS = {"blocks": None, "double_blocks": "double", "single_blocks": "single", "transformer_blocks": None}
# Video models that put reference tokens behind the video; the other Wan models put them in front.
_BEHIND = ("S2V", "Humo", "HunyuanVideo")


def layer_numbers(text: str) -> tuple[int, ...]:
    """"0, 1, 47-49" as numbers."""
    numbers: set[int] = set()
    for part in filter(None, re.split(r"[,\s]+", re.sub(r"\s*-\s*", "-", text.strip()))):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if found is None:
            raise ValueError(f"dense_layers must be layer numbers such as '0, 1, 47-49', not {text!r}")
        first, last = int(found[1]), int(found[2] or found[1])
        numbers.update(range(min(first, last), max(first, last) + 1))
    return tuple(sorted(numbers))


class Patch:
    """One application of the node: its settings, and the run of the model it was applied to."""

    def __init__(self, config: EsaConfig, model: Any, sigma_start: float, sigma_end: float,
                 dense_layers: tuple[int, ...], min_tokens: int) -> None:
        self.config, self.window = config, (sigma_end, sigma_start)
        self.dense_layers, self.min_tokens = frozenset(dense_layers), min_tokens
        self.overrides: dict[Any, Any] = {}     # by the override they chain to
        self.name = type(model).__name__
        self.patch_size = getattr(model, "patch_size", None)
        self.offsets: dict[Any, int] = {}
        self.layers = 0
        for stack, kind in _STACKS.items():
            count = len(getattr(model, stack, None) or ())
            if count:
                self.offsets[kind] = self.layers
                self.layers += count
        bad = [i for i in sorted(self.dense_layers) if self.layers and i >= self.layers]
        if bad:
            raise ValueError(f"dense_layers names layer {bad[0]}, {self.name} has layers 0 to {self.layers - 1}")
        self.reset()

    def reset(self) -> None:
        """After a sampling run: its session and its memory go."""
        self.run: HostRun | None = None
        self._sigmas: Any = None
        self._schedule: tuple[Any, tuple[float, ...] | None] = (None, None)
        self._moment: tuple[int, int | None, float] | None = None
        self._told: set[str] = set()

    # ---- what the host says

    def moment(self, options: Any) -> tuple[int, int | None, float]:
        """Step, number of steps and sigma. Sigmas lie on the GPU, so they are read once per step."""
        now, schedule = options.get("sigmas"), options.get("sample_sigmas")
        if now is None:
            raise Dense("transformer_options has no sigmas")
        if now is not self._sigmas or self._moment is None:
            sigma = float(now.flatten()[0])
            step, steps = 0, None
            if schedule is not None and len(schedule) > 1:
                step, steps = int((schedule[:-1].float().cpu() - sigma).abs().argmin()), len(schedule) - 1
            elif self._moment is not None:
                # without a schedule steps are counted: sigma falls, and rises for a new video
                step = 0 if sigma > self._moment[2] else self._moment[0] + (sigma < self._moment[2])
            self._sigmas, self._moment = now, (step, steps, sigma)
        return self._moment

    def noise(self, options: Any) -> tuple[float, ...] | None:
        """Noise levels of the steps, if they fall within 1 to 0: a work plan looks steps up by them."""
        schedule = options.get("sample_sigmas")
        if schedule is not self._schedule[0]:
            values = tuple(float(x) for x in schedule[:-1].float().cpu())
            falling = all(a > b for a, b in zip(values, values[1:]))
            self._schedule = schedule, values if values and falling and values[0] <= 1 and values[-1] >= 0 else None
        return self._schedule[1]

    def layer(self, options: Any) -> int:
        index, kind = options.get("block_index"), options.get("block_type")
        if index is None:
            raise Dense("transformer_options has no block_index")
        layer = int(index) + self.offsets.get(kind, self.offsets.get(None, 0))
        if layer >= (self.layers or layer + 1):
            raise Dense(f"block_index is {index}, the model has {self.layers} blocks")
        return layer

    def packed(self, packed: Any, tokens: int) -> Layout:
        """Where MiniMax-H3's video is. Its segments are (first token, end, kind), its signature (text, t, h, w, sound)
        with the size of the latents."""
        video = next(((start, end) for start, end, kind in packed.segments if kind == "video"), None)
        t, h, w = (int(n) // p for n, p in zip(packed.signature[1:4], self.patch_size or (1, 2, 2)))
        if video is None or video[1] - video[0] != t * h * w:
            raise Dense(f"{self.name} publishes no video segment of {t}x{h}x{w} tokens")
        return Layout(grid=(t, h, w), text_front=int(video[0]), text_back=tokens - int(video[1]))

    def layout(self, options: Any, tokens: int) -> Layout:
        """The grid that the model publishes. Tokens beside it are text or references, which stay dense."""
        if H3 in options:
            return self.packed(options[H3], tokens)
        grid = options.get("grid_sizes") or options.get(KEY + "_grid")
        if grid is None:
            raise Dense(f"{self.name} publishes no grid_sizes")
        t, h, w = (int(n) for n in grid)
        extra = tokens - t * h * w
        if extra < 0:
            raise Dense(f"the grid {t}x{h}x{w} has more tokens than the sequence ({tokens})")
        behind = any(word in self.name for word in _BEHIND) or "Wan" not in self.name
        return Layout(grid=(t, h, w), text_front=0 if behind else extra, text_back=extra if behind else 0)

    # ---- one call

    def attend(self, q: Any, k: Any, v: Any, heads: int, options: Any, skip_reshape: bool, skip_output_reshape: bool,
               scale: float | None) -> torch.Tensor:
        if H3 in options and options[H3].seq_len != q.shape[2 if skip_reshape else 1]:
            raise Dense("MiniMax-H3's text alone", by_policy=True)
        step, steps, sigma = self.moment(options)
        layer = self.layer(options)
        if not self.window[0] <= sigma <= self.window[1] or layer in self.dense_layers:
            raise Dense("as configured", by_policy=True)
        if skip_reshape:                # (B, H, N, D)
            batch, _, tokens, dim = q.shape
            views = q, k, v
        else:                           # (B, N, H * D)
            batch, tokens, dim = q.shape[0], q.shape[1], q.shape[2] // heads
            views = tuple(x.unflatten(2, (-1, dim)) for x in (q, k, v))
        layout = self.layout(options, tokens)
        if self.run is None:
            self.run = HostRun(self.config, self.layers or int(options.get("total_blocks") or layer + 1))
        out = torch.empty((batch, tokens, heads, dim), dtype=q.dtype, device=q.device)
        told = out.transpose(1, 2) if skip_reshape else out
        branches = 1 if H3 in options else 0                    # it is made for runs without guidance
        for branch, part in self.parts(options, batch, steps):
            self.run.attention(layer, *(x[part] for x in views), layout=layout, step=step, steps=steps, branch=branch,
                               scale=scale, sigma=self.noise(options) if self.config.spends_work else None,
                               input_layout="BNSD" if skip_reshape else "BSND", out=told[part],
                               step_branches=branches)
        receipts = options.get(RECEIPTS)
        if receipts is not None:
            receipts.append((KEY, VERSION, id(self), layer, self.kind(steps, branches), tokens, (0, 0), (0, 0)))
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    def parts(self, options: Any, batch: int, steps: int | None) -> list[tuple[Any, slice]]:
        """The guidance branches of a call and their batch entries. Where one branch's difference serves all, a batch
        of several is split, those with the prompt first (0 in cond_or_uncond)."""
        names = tuple(map(str, options.get("uuids") or ()))
        conds = tuple(options.get("cond_or_uncond") or ())
        count = len(names or conds)
        shared = self.config.share_branches and carries(self.config, steps)
        if count < 2 or batch % count or not shared:
            return [(names or conds or None, slice(None))]
        size = batch // count
        ranks = conds if len(conds) == count else (0,) * count
        return [((names or conds)[i:i + 1], slice(i * size, (i + 1) * size))
                for i in sorted(range(count), key=lambda i: int(ranks[i]))]

    def kind(self, steps: int | None, branches: int = 0) -> str:
        """The word for sparse calls in receipts and policies. It is one word for the whole run: a forecaster begins
        anew where it changes, and carried outputs and those of anchors are close to each other."""
        return "carry" if carries(self.config, steps, branches) else "sparse"

    def tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            log.warning("%s", line)

    # ---- forecasters of steps: what the next evaluation would be, and whether receipts agree

    def __call__(self, *, layout: Any = None, options: Any, model: Any = None) -> tuple[Any, ...] | None:
        if options.get(OVERRIDE) not in self.overrides.values():
            return None
        try:
            _, steps, sigma = self.moment(options)
        except Dense:
            return None
        sparse = self.window[0] <= sigma <= self.window[1]
        kind = self.kind(steps, 1 if H3 in options else 0) if sparse else "dense"
        return (KEY, VERSION, id(self), kind, repr(self.config), *self.window,
                tuple(sorted(self.dense_layers)), tuple(map(str, options.get("uuids") or ())))

    def accept_receipts(self, receipts: Any) -> bool:
        """True if receipts are ours, complete, and of one length."""
        wanted = set(range(self.layers)) - self.dense_layers
        ours = [item for item in receipts if isinstance(item, tuple) and len(item) == 8 and item[:3] == (KEY, VERSION,
                                                                                                         id(self))]
        return (len(ours) == len(receipts) == len(wanted) and {item[3] for item in ours} == wanted
                and len({item[5] for item in ours}) == 1)


def make_override(patch: Patch, previous: Any) -> Any:
    """The function on the hook. previous: the one it chains to."""
    @torch.compiler.disable
    def override(func: Any, q: Any, k: Any, v: Any, heads: int, mask: Any = None, attn_precision: Any = None,
                 skip_reshape: bool = False, skip_output_reshape: bool = False, **kwargs: Any) -> Any:
        q, k, v = (x if isinstance(x, torch.Tensor) else x.take() for x in (q, k, v))       # boxed tensors
        options = kwargs.get("transformer_options") or {}
        place = 2 if skip_reshape else 1
        tokens = q.shape[place]
        # Not ours, and nothing to tell: masks, cross-attention, short sequences, calls that must stay precise.
        ours = (mask is None and k.shape[place] == tokens == v.shape[place] and tokens >= patch.min_tokens
                and kwargs.get("low_precision_attention") is not False)
        if ours:
            try:
                return patch.attend(q, k, v, heads, options, skip_reshape, skip_output_reshape, kwargs.get("scale"))
            except Dense as reason:
                reason.report("esa", patch.config.strict, patch.tell)
        kwargs.update(mask=mask, attn_precision=attn_precision, skip_reshape=skip_reshape,
                      skip_output_reshape=skip_output_reshape)
        return func(q, k, v, heads, **kwargs) if previous is None else previous(func, q, k, v, heads, **kwargs)

    return override


def install(patch: Patch, options: Any) -> None:
    """Puts the patch on top of the hook. Done again before each step, so that a node applied later is chained to and
    does not replace it."""
    current = options.get(OVERRIDE)
    if current not in patch.overrides.values():
        if current not in patch.overrides:
            patch.overrides[current] = make_override(patch, current)
        options[OVERRIDE] = patch.overrides[current]
    policies = options.get(POLICIES)
    if policies is None or isinstance(policies, dict):
        options[POLICIES] = {**(policies or {}), KEY: patch}


def publish_grid(patch: Patch) -> Any:
    """A wrapper around the diffusion model that says which grid its latents make."""
    def wrapper(executor: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        options = kwargs.get("transformer_options") or next((a for a in reversed(args) if isinstance(a, dict)), None)
        if options is not None and patch.patch_size is not None and getattr(x, "ndim", 0) == 5:
            sizes = patch.patch_size if len(patch.patch_size) == 3 else (1, *patch.patch_size)
            options[KEY + "_grid"] = tuple((n + p // 2) // p for n, p in zip(x.shape[2:], sizes))
        return executor(x, *args, **kwargs)

    return wrapper


class EsaSparseAttention:
    """The node."""
    CATEGORY, FUNCTION, RETURN_TYPES = "model/patch", "apply", ("MODEL",)
    DESCRIPTION = ("Sparse attention for video models (MiniMax-H3, Wan, HunyuanVideo): only the key blocks that matter "
                   "are computed. Short sequences and cross-attention stay as they are.")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        percent = {"min": 0.0, "max": 1.0, "step": 0.01}
        return {
            "required": {
                "model": ("MODEL",),
                "preset": (["balanced", "faithful", "fast", "density"], {
                    "tooltip": "How much attention to compute; density: as the widget density says"}),
                "density": ("FLOAT", {"default": 0.3, **percent, "tooltip": "Share of key blocks to compute"}),
                "selector": (["error", "entropy", "rf_v2", "ada_bsa"], {
                    "tooltip": "How blocks are chosen; presets need error"}),
                "start_percent": ("FLOAT", {"default": 0.0, **percent, "tooltip": "Before this, attention is dense"}),
                "end_percent": ("FLOAT", {"default": 1.0, **percent, "tooltip": "After this, attention is dense"}),
                "dense_layers": ("STRING", {"default": "", "tooltip": "Layers that stay dense: 0, 1, 47-49"}),
                "masks_file": ("STRING", {"default": "", "tooltip": "Masks of esa calibrate; nothing is chosen then"}),
                "strict": ("BOOLEAN", {"default": False, "tooltip": "Stop instead of running dense"}),
            },
            "optional": {
                "min_tokens": ("INT", {"default": 4096, "min": 0, "max": 1 << 20, "tooltip": "Shorter stays dense"}),
                "precision": (["16", "8"], {"tooltip": "Bits of the products of sparse attention"}),
                "carry": ("STRING", {"default": "auto", "tooltip": "What sparse attention leaves out, measured at a "
                                     "few steps and added at the others: auto, off, how often (6), or at which steps "
                                     "(0, 5, 10)"}),
            },
        }

    def apply(self, model: Any, preset: str, density: float, selector: str, start_percent: float, end_percent: float,
              dense_layers: str, masks_file: str, strict: bool, min_tokens: int = 4096,
              precision: str = "16", carry: str = "auto") -> tuple[Any]:
        import comfy.patcher_extension as names
        # Dense steps and layers are the node's own windows, so everything that reaches the session is sparse.
        settings: dict[str, Any] = {"strict": strict, "warmup_frac": 0.0, "dense_first_layer": False,
                                    "precision": int(precision)}
        if masks_file:
            settings.update(masks=masks_file, budget=density)
        elif preset == "density":
            settings.update(selector=selector, budget=density)
        elif selector == "error":
            settings.update(preset=preset)
        else:
            raise ValueError(f"preset {preset!r} needs selector 'error'; selector {selector!r} needs preset 'density'")
        if carry.strip() != "auto":         # the usual of the selector
            settings["carry"] = carry.strip()
        sampling = model.get_model_object("model_sampling")
        patch = Patch(config_of(settings, "the node"), model.get_model_object("diffusion_model"),
                      float(sampling.percent_to_sigma(start_percent)), float(sampling.percent_to_sigma(end_percent)),
                      layer_numbers(dense_layers), min_tokens)
        model = model.clone()
        install(patch, model.model_options.setdefault("transformer_options", {}))
        model.add_callback_with_key(names.CallbacksMP.ON_PREPARE_STATE, KEY,
                                    lambda patcher, timestep, options, *rest: install(patch,
                                                                                      options["transformer_options"]))
        model.add_callback_with_key(names.CallbacksMP.ON_CLEANUP, KEY, lambda patcher: patch.reset())
        model.add_wrapper_with_key(names.WrappersMP.DIFFUSION_MODEL, KEY, publish_grid(patch))
        return (model,)


NODE_CLASS_MAPPINGS = {"EsaSparseAttention": EsaSparseAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"EsaSparseAttention": "Sparse Attention (esa)"}
