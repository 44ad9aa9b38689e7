# SPDX-License-Identifier: Apache-2.0
"""Small random transformers of the three families with inputs, and attention as it should come out, written down
plainly.

Sequences are long enough for a dozen blocks of 32 tokens with an incomplete one at the end, weights wide enough for
attention to prefer some blocks. The reference never touches esa's kernels: diffusers' own processors run, and every
self-attention they ask torch for is computed here in float64 under the mask that the selector gives for the same q
and k."""
from __future__ import annotations

import contextlib
import dataclasses
import math

import esa
import numpy
import torch
from esa.core.functional import select
from esa.core.layout import Layout, order
from torch.overrides import TorchFunctionMode

BLOCK = 32


@dataclasses.dataclass
class Mini:
    """A transformer, what it is called with, and how its tokens lie."""
    name: str
    model: torch.nn.Module
    inputs: dict
    layout: Layout
    layers: int
    kv_len: torch.Tensor | None = None

    def __call__(self, **changes):
        with torch.no_grad():
            return self.model(**{**self.inputs, **changes}, return_dict=False)[0]

    def at(self, timestep, **changes):
        """A forward at another timestep."""
        return self(timestep=torch.full_like(self.inputs["timestep"], timestep), **changes)


def spread(model, gain=3.0):
    """Random weights attend nearly uniformly; larger ones give the selectors something to choose between."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "to_q.weight" in name or "to_k.weight" in name or "norm_q.weight" in name or "norm_k.weight" in name:
                p.mul_(gain)
    return model.eval()


def wan(seed=0, layers=2, heads=2, dim=32, grid=(3, 10, 12), batch=1):
    from diffusers import WanTransformer3DModel
    torch.manual_seed(seed)
    model = WanTransformer3DModel(patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=dim,
                                  in_channels=4, out_channels=4, text_dim=16, freq_dim=32, ffn_dim=64,
                                  num_layers=layers, rope_max_seq_len=64)
    t, h, w = grid
    inputs = {"hidden_states": torch.randn(batch, 4, t, 2 * h, 2 * w), "timestep": torch.full((batch,), 900),
              "encoder_hidden_states": torch.randn(batch, 12, 16)}
    return Mini("wan", spread(model), inputs, Layout(grid=grid), layers)


def cogvideox(seed=0, layers=2, heads=2, dim=32, grid=(3, 10, 12), batch=2, text=20):
    from diffusers import CogVideoXTransformer3DModel
    from diffusers.models.embeddings import get_3d_rotary_pos_embed
    torch.manual_seed(seed)
    t, h, w = grid
    model = CogVideoXTransformer3DModel(num_attention_heads=heads, attention_head_dim=dim, in_channels=4,
                                        out_channels=4, time_embed_dim=8, text_embed_dim=16, num_layers=layers,
                                        sample_width=2 * w, sample_height=2 * h, sample_frames=4 * t - 3, patch_size=2,
                                        temporal_compression_ratio=4, max_text_seq_length=text,
                                        use_rotary_positional_embeddings=True)
    rope = get_3d_rotary_pos_embed(embed_dim=dim, crops_coords=((0, 0), (h, w)), grid_size=(h, w), temporal_size=t)
    inputs = {"hidden_states": torch.randn(batch, t, 4, 2 * h, 2 * w), "timestep": torch.full((batch,), 900),
              "encoder_hidden_states": torch.randn(batch, text, 16), "image_rotary_emb": rope}
    return Mini("cogvideox", spread(model), inputs, Layout(grid=grid, text_front=text), layers)


def hunyuan(seed=0, layers=1, single_layers=1, heads=2, dim=32, grid=(3, 10, 12), batch=2, text=24):
    from diffusers import HunyuanVideoTransformer3DModel
    torch.manual_seed(seed)
    t, h, w = grid
    model = HunyuanVideoTransformer3DModel(in_channels=4, out_channels=4, num_attention_heads=heads,
                                           attention_head_dim=dim, num_layers=layers, num_single_layers=single_layers,
                                           num_refiner_layers=1, mlp_ratio=2.0, patch_size=2, patch_size_t=1,
                                           text_embed_dim=16, pooled_projection_dim=8,
                                           rope_axes_dim=(dim // 4, 3 * dim // 8, 3 * dim // 8))
    mask = torch.ones(batch, text)
    mask[0, 13:] = 0                    # the first prompt is shorter than the second
    inputs = {"hidden_states": torch.randn(batch, 4, t, 2 * h, 2 * w), "timestep": torch.full((batch,), 900.0),
              "encoder_hidden_states": torch.randn(batch, text, 16), "encoder_attention_mask": mask,
              "pooled_projections": torch.randn(batch, 8), "guidance": torch.full((batch,), 6000.0)}
    kv_len = (t * h * w + mask.sum(1)).to(torch.int32)
    return Mini("hunyuan", spread(model), inputs, Layout(grid=grid, text_back=text), layers + single_layers, kv_len)


MAKERS = {"wan": wan, "cogvideox": cogvideox, "hunyuan": hunyuan}

# ---------------------------------------------------------------- attention as it should be


def make_mask(q, k, config, layout, kv_len=None, v=None):
    """The selector's mask for q and k [B, H, N, D], by the library's one-call interface (sessions have nothing to do
    with it). Selector "error" needs v too."""
    default = "tile" if config.selector == "rf_v2" else "hilbert"               # of esa.apply
    layout = dataclasses.replace(layout, order=config.order or default, window=config.window,
                                 protect_first_frame=config.protect_first_frame)
    return select(q.contiguous(), k.contiguous(), config, layout=layout, kv_len=kv_len,
                  v=None if v is None else v.contiguous())


def masked_attention(q, k, v, mask, tail="none", kv_len=None):
    """softmax over the kept blocks, and over one column for each skipped block where there is a tail; float64."""
    B, H, N, D = q.shape
    info = mask.info
    perm = torch.from_numpy(numpy.asarray(order(info.layout, N, side="q"), numpy.int64))
    kept = torch.from_numpy(mask.blocks()).expand(B, H, -1, -1)
    scale = D ** -0.5
    q64, k64, v64 = (x.double()[:, :, perm] for x in (q, k, v))
    rows, columns = torch.arange(N) // info.block_q, torch.arange(N) // info.block_k
    lengths = torch.full((B,), N) if kv_len is None else kv_len.long()
    # B, N: keys in the ordered sequence that exist
    valid = perm[None, :] < lengths[:, None]
    seen = kept[:, :, rows][:, :, :, columns] & valid[:, None, None, :]
    scores = (q64 @ k64.transpose(-1, -2) * scale).masked_fill(~seen, -math.inf)
    values = v64
    if tail != "none":
        nk = kept.shape[-1]
        member = (columns[:, None] == torch.arange(nk)[None, :]).double()[None] * valid[:, :, None]       # B, N, nk
        size = member.sum(1)                                                                               # B, nk
        mean_k = torch.einsum("bnj,bhnd->bhjd", member, k64) / size.clamp(min=1)[:, None, :, None]
        mean_v = torch.einsum("bnj,bhnd->bhjd", member, v64) / size.clamp(min=1)[:, None, :, None]
        speaker = q64
        # every query of a block speaks with their mean
        if tail == "centroid":
            same = (rows[:, None] == rows[None, :]).double()
            speaker = (same / same.sum(-1, keepdim=True)) @ q64
        bias = torch.where(size > 0, size.clamp(min=1).log(), -math.inf)
        extra = speaker @ mean_k.transpose(-1, -2) * scale + bias[:, None, None, :]
        extra = extra.masked_fill(kept[:, :, rows], -math.inf)
        scores, values = torch.cat([scores, extra], -1), torch.cat([v64, mean_v], -2)
    out = torch.softmax(scores, -1).nan_to_num(0.0) @ values
    back = torch.empty_like(out)
    back[:, :, perm] = out
    return back.to(q.dtype)


class ReferenceMode(TorchFunctionMode):
    """Every self-attention that diffusers asks torch for is `attention(layer, q, k, v)` instead."""

    def __init__(self, mini, attention):
        super().__init__()
        self.mini, self.attention, self.calls = mini, attention, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            q, k, v = (args + tuple(kwargs[n] for n in ("query", "key", "value")[len(args):]))[:3]
            if q.shape[2] == k.shape[2] == self.mini.layout.tokens:
                layer = self.calls % self.mini.layers
                self.calls += 1
                return self.attention(layer, q, k, v)
        return function(*args, **kwargs)


@contextlib.contextmanager
def reference(mini, config, dense_layers=()):
    """Inside, the model runs diffusers' processors with attention masked as config asks."""
    def attention(layer, q, k, v):
        if layer in dense_layers:
            full = make_mask(q, k, esa.EsaConfig(selector="full", block=BLOCK), mini.layout)
            return masked_attention(q, k, v, full, "none", mini.kv_len)
        mask = make_mask(q, k, config, mini.layout, mini.kv_len)
        return masked_attention(q, k, v, mask, config.tail, mini.kv_len)
    with ReferenceMode(mini, attention) as mode:
        yield mode
    assert mode.calls % mini.layers == 0 and mode.calls > 0, f"{mode.calls} calls were seen in {mini.layers} layers"
