# SPDX-License-Identifier: Apache-2.0
"""A small host that behaves as ComfyUI's attention hook does: overrides, boxed tensors, options of Wan, HunyuanVideo
and MiniMax-H3, model patchers with callbacks and wrappers, a sampling loop. Written from the hook's description, for
tests without ComfyUI."""
import sys
import types
import uuid

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

HEADS, DIM = 2, 16


def install():
    """Makes `import comfy.patcher_extension` work."""
    comfy = sys.modules.setdefault("comfy", types.ModuleType("comfy"))
    names = types.ModuleType("comfy.patcher_extension")
    names.CallbacksMP = types.SimpleNamespace(ON_PREPARE_STATE="on_prepare_state", ON_CLEANUP="on_cleanup")
    names.WrappersMP = types.SimpleNamespace(DIFFUSION_MODEL="diffusion_model")
    comfy.patcher_extension = sys.modules["comfy.patcher_extension"] = names


class Box:
    """A tensor that an attention function takes over."""

    def __init__(self, tensor):
        self.tensor = tensor

    def take(self):
        tensor, self.tensor = self.tensor, None
        return tensor


def attention(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
    """The host's dense attention."""
    q, k, v = (x.take() if isinstance(x, Box) else x for x in (q, k, v))
    if not skip_reshape:
        q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    out = sdpa(q, k, v, attn_mask=mask, scale=kwargs.get("scale"))
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def optimized_attention(*args, **kwargs):
    """What models call: the override, if there is one, gets the dense function first."""
    override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
    if override is None:
        return attention(*args, **kwargs)
    kwargs["_inside_attn_wrapper"] = True
    return override(attention, *args, **kwargs)


class Model(nn.Module):
    """What both models share: wrappers around forward, and random projections."""
    patch_size = (1, 2, 2)

    def project(self, x, number):
        weight = torch.randn(x.shape[-1], 3 * HEADS * DIM, generator=torch.Generator().manual_seed(number))
        return (x @ weight / x.shape[-1]**0.5).chunk(3, -1)

    def forward(self, x, timestep, context, transformer_options, **kwargs):
        call = self._forward
        for wrapper in transformer_options.get("wrappers", {}).get("diffusion_model", {}).values():
            call = (lambda inner, w: lambda *a, **k: w(inner, *a, **k))(call, wrapper)
        return call(x, timestep, context, transformer_options, **kwargs)

    def patchify(self, x):
        batch, _, t, h, w = x.shape
        cells = x.reshape(batch, -1, t, h // 2, 2, w // 2, 2).permute(0, 2, 3, 5, 1, 4, 6)
        return cells.reshape(batch, t * (h // 2) * (w // 2), -1), (t, h // 2, w // 2)


class WanModel(Model):
    def __init__(self, layers=3, boxed=False):
        super().__init__()
        self.blocks, self.boxed = nn.ModuleList(nn.Identity() for _ in range(layers)), boxed

    def _forward(self, x, timestep, context, transformer_options, references=None):
        x, grid = self.patchify(x)
        if references is not None:
            x = torch.cat((references, x), 1)
        transformer_options["grid_sizes"], transformer_options["total_blocks"] = grid, len(self.blocks)
        transformer_options["block_type"] = "double"
        for i in range(len(self.blocks)):
            transformer_options["block_index"] = i
            q, k, v = self.project(x, i)
            q, k, v = map(Box, (q, k, v)) if self.boxed else (q, k, v)
            y = optimized_attention(q, k, v, HEADS, transformer_options=transformer_options)
            ck, cv, _ = self.project(context, 100 + i)
            y = y + optimized_attention(y, ck, cv, HEADS, transformer_options=transformer_options)
            y = y + optimized_attention(y, y, y, HEADS, transformer_options=transformer_options,
                                        low_precision_attention=False)
            x = x + y[..., :x.shape[-1]]
        return x


class HunyuanVideo(Model):
    """Video, then text; two stacks of blocks; heads apart (skip_reshape); no grid among the options."""

    def __init__(self):
        super().__init__()
        self.double_blocks, self.single_blocks = (nn.ModuleList(nn.Identity() for _ in range(n)) for n in (2, 3))

    def _forward(self, x, timestep, context, transformer_options):
        x = torch.cat((self.patchify(x)[0], context), 1)
        for kind, blocks in (("double", self.double_blocks), ("single", self.single_blocks)):
            transformer_options["block_type"] = kind
            for i in range(len(blocks)):
                transformer_options["block_index"] = i
                q, k, v = (y.unflatten(2, (HEADS, DIM)).transpose(1, 2) for y in self.project(x, i))
                y = optimized_attention(q, k, v, HEADS, skip_reshape=True, transformer_options=transformer_options)
                x = x + y[..., :x.shape[-1]]
        return x


class MiniMaxH3Model(Model):
    """Text, a keyframe, sound and video in one sequence, behind a refiner of the text alone; boxed heads; the segments
    of the sequence among the options. Latents are a list: video and sound."""

    def __init__(self, layers=3, keyframe=True):
        super().__init__()
        self.blocks, self.keyframe = nn.ModuleList(nn.Identity() for _ in range(layers)), keyframe

    def attend(self, x, number, transformer_options):
        q, k, v = (Box(y.unflatten(2, (HEADS, DIM)).transpose(1, 2)) for y in self.project(x, number))
        y = optimized_attention(q, k, v, HEADS, preferred_attention=None, mask=None, skip_reshape=True,
                                transformer_options=transformer_options)
        return x + y[..., :x.shape[-1]]

    def _forward(self, x, timestep, context, transformer_options):
        video, (t, h, w) = self.patchify(x[0])
        parts = {"text": context, "cond": video[:, :h * w] if self.keyframe else video[:, :0], "audio": x[1],
                 "video": video}
        ends = torch.tensor([y.shape[1] for y in parts.values()]).cumsum(0).tolist()
        segments = [(a, b, kind) for a, b, kind in zip([0, *ends], ends, parts, strict=False) if a < b]
        transformer_options["minimax_h3_layout"] = types.SimpleNamespace(
            segments=segments, seq_len=ends[-1], signature=(context.shape[1], t, 2 * h, 2 * w, x[1].shape[1] // 2))
        parts["text"] = self.attend(context, 100, transformer_options)          # no block_index at the first step
        y = torch.cat(list(parts.values()), 1)
        for i in range(len(self.blocks)):
            transformer_options["block_index"] = i
            y = self.attend(y, i, transformer_options)
        return y


class Patcher:
    """A MODEL."""

    def __init__(self, model):
        self.model, self.model_options, self.callbacks = model, {"transformer_options": {}}, {}

    def clone(self):
        copy = Patcher(self.model)
        copy.model_options = {"transformer_options": dict(self.model_options["transformer_options"])}
        copy.callbacks = {kind: dict(calls) for kind, calls in self.callbacks.items()}
        return copy

    def get_model_object(self, name):
        # a flow model: sigma falls from 1 to 0
        return self.model if name == "diffusion_model" else types.SimpleNamespace(percent_to_sigma=lambda p: 1 - p)

    def add_callback_with_key(self, kind, key, call):
        self.callbacks.setdefault(kind, {})[key] = call

    def add_wrapper_with_key(self, kind, key, wrapper):
        options = self.model_options["transformer_options"]
        wrappers = options["wrappers"] = {k: dict(v) for k, v in options.get("wrappers", {}).items()}
        wrappers.setdefault(kind, {})[key] = wrapper

    def sample(self, x, context, steps=4, receipts=None, together=False, guided=True, **kwargs):
        """Both guidance branches in every step, or one; returns the outputs of the last. together: in one batch, the
        branch without the prompt first. x is a list for models that make sound, too, and have no batch."""
        sigmas, names = torch.linspace(1, 0, steps + 1), [uuid.uuid4(), uuid.uuid4()]
        options = {"transformer_options": dict(self.model_options["transformer_options"])}
        outputs = []
        for step in range(steps):
            now = sigmas[step] * torch.ones(1)
            for call in self.callbacks.get("on_prepare_state", {}).values():
                call(self, now, options)
            outputs = []
            for branches in ([1, 0],) if together else ([0], [1]) if guided else ([0],):
                given = dict(options["transformer_options"], sigmas=now, sample_sigmas=sigmas,
                             uuids=[names[branch] for branch in branches], cond_or_uncond=branches)
                if receipts is not None:
                    given["attention_backend_receipts_v1"] = receipts
                words = torch.cat([context + branch for branch in branches])
                batch = x if isinstance(x, list) else x.expand(len(branches), *x.shape[1:])
                out = self.model(batch, now, words, given, **kwargs)
                outputs += reversed(out.chunk(len(branches)))
        for call in self.callbacks.get("on_cleanup", {}).values():
            call(self)
        return outputs
