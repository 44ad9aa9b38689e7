# SPDX-License-Identifier: Apache-2.0
"""What test_together.py needs: a mask file with other masks at every step, a loop like a pipeline's, and the same loop
without esa, in which every self-attention that is computed is SDPA under the mask of its true step and layer."""
from __future__ import annotations

import contextlib

import numpy
import torch
from esa.compat.original_masks import TensorWriter
from esa.diffusers.families import detect
from torch.overrides import TorchFunctionMode

STEPS, WARMUP = 9, 2
BLOCK = 16
_U8, _I32 = 8, 5


def write_masks(path, mini, heads=2, seed=0):
    """Random masks that keep half of the blocks, others for every layer and step. Returns bool [layer, step, head, q,
    k]."""
    n = -(-mini.layout.tokens // BLOCK)
    rng = numpy.random.default_rng(seed)
    places = rng.random((mini.layers, STEPS, heads, n, n)).argsort(-1)
    masks = places < n // 2
    grid, text = ",".join(map(str, mini.layout.grid)), f"{mini.layout.text_front},{mini.layout.text_back}"
    about = {
        "format": "esa.masks", "format_version": 1, "model": "", "config_hash": "", "selector": "given",
        "mode": "fixed", "layers": mini.layers, "steps": STEPS, "groups": STEPS, "branches": 1, "heads": heads,
        "tokens_q": mini.layout.tokens, "tokens_k": mini.layout.tokens, "block": f"{BLOCK},{BLOCK}", "causal": 0,
        "samples": 0, "scale": 0, "order": "raster", "window": "0,0,0", "protect_first_frame": 0, "grid_q": grid,
        "grid_k": grid, "text_q": text, "text_k": text, "prompts": 1, "warmup_frac": WARMUP / STEPS,
        "dense_first_layer": 1, "importance": "none"
    }
    bits = numpy.packbits(masks, axis=-1, bitorder="little")
    with TensorWriter(str(path)) as writer:
        for key, value in about.items():
            writer.metadata(key, str(value))
        for name, size in (("step_group", STEPS), ("stored_layers", mini.layers), ("stored_groups", STEPS)):
            writer.declare(name, _I32, (size,))
        writer.declare("mask.0500.bits", _U8, bits.shape)
        for size in (STEPS, mini.layers, STEPS):
            writer.write(torch.arange(size, dtype=torch.int32))
        writer.write(torch.from_numpy(bits))
    return torch.from_numpy(masks)


class Video:
    """A denoising loop like a pipeline's. `step` and `timestep` say where it is; other caches ask for them."""

    def __init__(self, mini, names):
        self.mini, self.names = mini, names
        self.told = False               # whether cache contexts carry the step, as WanPipeline's do in newer diffusers
        self.step, self.timestep, self.branch = 0, 1000, 0

    def run(self, left_out=()):
        """The latents at the end. Steps that are left out use the outputs of the step before."""
        mini = self.mini
        x, text = mini.inputs["hidden_states"].clone(), mini.inputs["encoder_hidden_states"]
        for step in range(STEPS):
            self.step, self.timestep = step, 1000 - 100 * step
            if step not in left_out:
                v = [self.forward(x, branch, text.flip(-1) if branch else text) for branch in range(len(self.names))]
            x = x - (v[-1] + 3 * (v[0] - v[-1])) * 0.05
        if getattr(mini.model, "is_cache_enabled", False):
            mini.model._reset_stateful_cache()          # pipelines do that at their end
        return x

    def forward(self, x, branch, text):
        self.branch, mini = branch, self.mini
        about = {"step_index": self.step, "sigma": self.timestep / 1000, "num_inference_steps": STEPS}
        given = {**mini.inputs, "hidden_states": x, "encoder_hidden_states": text,
                 "timestep": torch.full_like(mini.inputs["timestep"], self.timestep)}
        with torch.no_grad(), mini.model.cache_context(self.names[branch], **(about if self.told else {})):
            return mini.model(**given, return_dict=False)[0]


class Reference(TorchFunctionMode):
    """Without esa: self-attention of a sparse layer and step is SDPA under `masks`. Layers are known by their module,
    steps by the loop. `calls` lists what was computed."""

    def __init__(self, video, masks):
        super().__init__()
        self.video, self.masks, self.calls, self.layer = video, masks, [], None
        self.tokens = video.mini.layout.tokens
        self.rows = torch.arange(self.tokens) // BLOCK

    @contextlib.contextmanager
    def listening(self):
        def note(layer):
            def hook(*_):
                self.layer = layer
            return hook
        model = self.video.mini.model
        hooks = [module.register_forward_pre_hook(note(layer))
                 for layer, (_, module) in enumerate(detect(model).modules(model))]
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is not torch.nn.functional.scaled_dot_product_attention:
            return function(*args, **kwargs)
        q, k = args[:2] if args else (kwargs["query"], kwargs["key"])
        if not q.shape[2] == k.shape[2] == self.tokens:
            return function(*args, **kwargs)
        step, layer = self.video.step, self.layer
        self.calls.append((step, self.video.branch, layer))
        if self.masks is not None and step >= WARMUP and layer > 0:
            seen = self.masks[layer, step][:, self.rows][:, :, self.rows][None]
            given = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            kwargs["attn_mask"] = seen if given is None else seen & given
            args = (*args[:3], *((kwargs.pop("attn_mask"),) if len(args) > 3 else ()), *args[4:])
        return function(*args, **kwargs)


def note_calls(handle):
    """Every attention call that esa computes from now on as (step, branch, layer), as esa's clock sees it."""
    calls, run = [], handle._run
    attention = run.attention

    def listening(layer, *tensors):
        calls.append((run.moment.step, run.moment.branch, layer))
        return attention(layer, *tensors)
    run.attention = listening
    return calls
