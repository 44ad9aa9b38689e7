# SPDX-License-Identifier: Apache-2.0
"""esa.hosts.vllm_omni inside the released vLLM-Omni: omni_checks.py FOLDER, where FOLDER holds its unpacked wheel and
a dist-info with our entry points. test_vllm_omni.py runs this in a process of its own.

Real: plugin loading, registry, selection with its platform checks, configuration, forward context, attention layer and
the Wan block. Stand-ins: omni_host.py."""
import functools
import json
import sys
import types

import torch
from omni_host import prepare, said
from stubs import fails
from torch import nn

prepare(sys.argv[1])
from vllm_omni.diffusion.attention.backends.abstract import (  # noqa: E402
    AttentionMetadata, VideoTokenLayout, VideoTokenSpan)
from vllm_omni.diffusion.attention.layer import Attention  # noqa: E402
from vllm_omni.diffusion.attention.selector import get_attn_backend_for_role  # noqa: E402
from vllm_omni.diffusion.config import set_current_diffusion_config  # noqa: E402
from vllm_omni.diffusion.data import parse_attention_config  # noqa: E402
from vllm_omni.diffusion.forward_context import get_forward_context, set_forward_context  # noqa: E402
from vllm_omni.diffusion.models.wan2_2.wan2_2_transformer import WanTransformerBlock  # noqa: E402
from vllm_omni.plugins import load_omni_general_plugins  # noqa: E402

GRID, HEADS, DIM = (8, 8, 20), 2, 32
TOKENS = 8 * 8 * 20


def config(text, **parallel):
    words = {"ring_degree": 1, "ulysses_degree": 1, "allgather_degree": 1, "sequence_parallel_size": 1, **parallel}
    return types.SimpleNamespace(diffusion_attention_config=parse_attention_config(json.loads(text)),
                                 parallel_config=types.SimpleNamespace(**words), model_class_name=None)


def sparse(esa=None, **block_sparse):
    spec = {"backend": "RAINFUSION_ATTN"}
    if block_sparse:
        spec["block_sparse"] = block_sparse
    if esa is not None:
        spec["skip_calibration"] = {"esa": esa}
    return config(json.dumps({"default": spec}))


def layer(settings, number=0, role="self", **words):
    with set_current_diffusion_config(settings), set_forward_context(omni_diffusion_config=settings):
        return Attention(num_heads=HEADS, head_size=DIM, causal=False, softmax_scale=DIM**-0.5, role=role,
                         qkv_layout="BSND", prefix=f"blocks.{number}.attn1", **words)


def call(module, settings, step, *tensors, total=None, metadata="wan", **layout):
    metadata = AttentionMetadata(video_layout=VideoTokenLayout(
        **(layout or {"prefix_len": 0, "latent_grid": GRID, "used_len": TOKENS}))) if metadata == "wan" else metadata
    with set_forward_context(omni_diffusion_config=settings, denoise_step_idx=step):
        get_forward_context().total_denoise_steps = total
        with torch.no_grad():
            return module(*tensors, metadata)


def random(tokens=TOKENS, heads=HEADS, seed=0):
    return torch.randn(3, 1, tokens, heads, DIM, generator=torch.Generator().manual_seed(seed)).unbind()


def close(a, b):
    return (a - b).abs().max() < 1e-5 * (1 + b.abs().max())     # float32 sums in another order


# ---- before the plugin: refused, as the documentation of vLLM-Omni says
wan = sparse(sparsity=0.5)
fails("runs on npu only", lambda: get_attn_backend_for_role("self", DIM, wan.diffusion_attention_config))
# ---- the plugin, found by its entry point
load_omni_general_plugins()
import esa  # noqa: E402
from esa.hosts import vllm_omni as ours  # noqa: E402

backend, _ = get_attn_backend_for_role("self", 64, wan.diffusion_attention_config)
assert backend is ours.EsaBackend and backend.supported_platforms is None and backend.get_name() == "RAINFUSION_ATTN"
ours.register()                                             # again
assert get_attn_backend_for_role("self", 65, wan.diffusion_attention_config)[0] is ours.EsaBackend


def reference(q, k, v, sparsity, **words):
    return esa.sparse_attention(q, k, v, input_layout="BSND", head_num=q.shape[2], sparse_type="rf_v2",
                                sparsity=sparsity, scale=DIM**-0.5, **words)


q, k, v = random()
dense = esa.attention(q, k, v, input_layout="BSND", scale=DIM**-0.5)
ours.MIN_VIDEO_TOKENS = 128
# ---- block_sparse: rf_v2, its steps and layers
module = layer(wan)
assert torch.equal(call(module, wan, 0, q, k, v), reference(q, k, v, 0.5, latent_shape_q=GRID))
timed = sparse(sparsity=0.5, start_step=3, end_step=2, skip_layers="1")
module = layer(timed)
for step, total, kept in ((2, 10, False), (3, 10, True), (7, 10, True), (8, 10, False), (0, 10, False)):
    out = call(module, timed, step, q, k, v, total=total)
    assert close(out, dense) != kept, (step, total)
assert close(call(layer(timed, 1), timed, 5, q, k, v, total=10), dense)
assert not said, said                                       # all of that was asked for
assert close(call(module, timed, 5, q, k, v), dense) and "end_step needs the number of steps" in said[0]
# ---- a text prefix with padding behind the document, and several clips
text = random(100 + TOKENS + 30, seed=1)
out = call(layer(wan), wan, 0, *text, metadata=AttentionMetadata(
    extra={"max_seqlen_q": 100 + TOKENS}, video_layout=VideoTokenLayout(prefix_len=100, latent_grid=GRID)))
used = [x[:, :100 + TOKENS] for x in text]
assert torch.equal(out[:, :100 + TOKENS], reference(*used, 0.5, latent_shape_q=GRID, txt_len=100))
assert bool(torch.isfinite(out).all())
spans = (VideoTokenSpan(200, (3, 8, 16), "target"), VideoTokenSpan(10, (2, 9, 10), "reference"))
clips = random(200 + 384 + 60, seed=2)
out = call(layer(wan), wan, 0, *clips, used_len=644, video_spans=spans)
assert torch.equal(out, reference(*clips, 0.5, video_spans=[{"start": 10, "latent_shape": [2, 9, 10]},
                                                            {"start": 200, "latent_shape": [3, 8, 16]}]))
# ---- the Wan block: what its attention layer got and gave
with set_current_diffusion_config(wan), set_forward_context(omni_diffusion_config=wan):
    torch.manual_seed(0)
    block = WanTransformerBlock(HEADS * DIM, 128, HEADS, cross_attn_norm=True, prefix="blocks.0")
for parameter in block.parameters():
    nn.init.normal_(parameter, std=0.2)
seen = {}
block.attn1.attn.register_forward_hook(lambda m, given, out: seen.update(self=(given, out)))
block.attn2.attn.register_forward_hook(lambda m, given, out: seen.update(cross=(given, out)))
hidden, context, temb = torch.randn(1, TOKENS, HEADS * DIM), torch.randn(1, 40, HEADS * DIM), torch.randn(1, 6, 64)
with set_forward_context(omni_diffusion_config=wan, denoise_step_idx=0), torch.no_grad():
    block(hidden, context, temb, None, vsa_dit_seq_shape=GRID)
(*given, _), out = seen["self"]
assert torch.equal(out, reference(*given, 0.5, latent_shape_q=GRID))
(*given, _), out = seen["cross"]
assert close(out, esa.attention(*given, input_layout="BSND", scale=DIM**-0.5))
# ---- the same block as vLLM-Omni compiles it, without waiting for a compiler: our call is a break in the graph
block.attn1.attn._forward_hooks.clear()
block.attn2.attn._forward_hooks.clear()
with set_forward_context(omni_diffusion_config=wan, denoise_step_idx=0), torch.no_grad():
    plain = block(hidden, context, temb, None, vsa_dit_seq_shape=GRID)
    compiled = torch.compile(block.forward, dynamic=True, backend="eager")
    for _ in range(2):
        assert close(compiled(hidden, context, temb, None, vsa_dit_seq_shape=GRID), plain)
# ---- what Ulysses hands over: all tokens, some heads
whole = call(layer(wan), wan, 0, q, k, v)
part = call(layer(wan), wan, 0, *(x[:, :, 1:].contiguous() for x in (q, k, v)))
assert torch.equal(part, whole[:, :, 1:])
ring = sparse(sparsity=0.5)
ring.parallel_config.ring_degree = 2
with set_current_diffusion_config(ring):
    fails("use Ulysses", lambda: ours.EsaImpl(HEADS, DIM, 1.0, backend_kwargs={"sparsity": 0.5}, qkv_layout="BSND"))
# ---- settings of esa through the same JSON
own = sparse({"selector": "entropy", "budget": 0.3, "tail": "pooled", "warmup_frac": 0.5, "dense_first_layer": False,
              "order": "hilbert", "steps": 4})
module = layer(own)
session = esa.Session(esa.EsaConfig(selector="entropy", budget=0.3, tail="pooled", warmup_frac=0.5,
                                    dense_first_layer=False, order="hilbert"), layers=1, steps=4,
                      layout=esa.Layout(grid=GRID), scale=DIM**-0.5, device="cpu")
session.begin()
for step in range(4):
    out = call(module, own, step, q, k, v)
    session.step(step)
    assert torch.equal(out, session.attention(0, q, k, v, input_layout="BSND"))
    assert close(out, dense) == (step < 2)
run = module.attention.model.run(module.attention.config)
assert run.stats().sparse_calls == 2 and run.videos == 1
call(module, own, 0, q, k, v)                               # the next video
assert run.videos == 2 and run.stats().calls == 1
fails("has no setting 'selektor'", lambda: layer(sparse({"selektor": "error"})))
fails("has no setting 'step'; it takes", lambda: layer(sparse({"step": 4})))
fails("must hold settings by name", lambda: layer(sparse("balanced")))
fails("steps must be an integer of at least 1, not '40'", lambda: layer(sparse({"steps": "40"})))
fails("say the same thing", lambda: layer(sparse({"budget": 0.3, "sparsity": 0.2})))
# the preset: each step twice, which are the guidance branches
preset = sparse({"preset": "fast", "steps": 3, "order": "hilbert"})
module = layer(preset)
for step in range(3):
    for _branch in range(2):
        assert call(module, preset, step, q, k, v).shape == q.shape
assert module.attention.model.run(module.attention.config).stats().calls == 6
# carry, with the words of EsaConfig: one difference for both branches
for carry, anchors in (({}, len(esa.EsaConfig().anchors(8))), ({"carry": [0, 3]}, 2), ({"carry": "off"}, 0)):
    preset = sparse({"preset": "fast", "steps": 8, "order": "hilbert", **carry})
    module = layer(preset)
    for step in range(8):
        for branch in range(2):
            out = call(module, preset, step, *random(seed=branch))
            full = esa.attention(*random(seed=branch), input_layout="BSND", scale=DIM**-0.5)
            assert anchors != 2 or torch.equal(out, full) == (branch == 0 and step in (0, 3))
    counted = module.attention.model.run(module.attention.config).stats()
    assert (counted.anchor_calls, counted.carried_calls) == (anchors, 16 - anchors if anchors else 0)
assert layer(wan).attention.config.carry == "off"
fails("carry must be 'auto', 'off', a number of anchors", lambda: layer(sparse({"carry": "often"})))
# ---- strict raises, otherwise dense and one warning
del said[:]
cases = ((q, k, v, {"metadata": AttentionMetadata()}, "publishes no video_layout"),
         (q, k, v, {"prefix_len": 0, "latent_grid": GRID, "used_len": 7}, "the sequence has 7 of 1280"),
         (*random(96, seed=3), {"prefix_len": 0, "latent_grid": (2, 6, 8), "used_len": 96}, "fewer than 128"))
for a, b, c, words, why in cases:
    module = layer(wan)
    for _ in range(2):
        out = call(module, wan, 0, a, b, c, **words)
        assert close(out, esa.attention(a, b, c, input_layout="BSND", scale=DIM**-0.5))
    assert len([line for line in said if why in line]) == 1, said
    strict = sparse({"selector": "rf_v2", "sparsity": 0.5, "warmup_frac": 0, "strict": True})
    fails("is strict, but this call would be dense",
          functools.partial(call, layer(strict), strict, 0, a, b, c, **words))
fails("block_sparse.precision must be one of", lambda: sparse(sparsity=0.5, precision="int4"))     # the host's words
for precision, bits in (("bf16", 16), ("mix", 8), ("fp8", 8)):
    assert layer(sparse(sparsity=0.5, precision=precision)).attention.config.precision == bits
kept = layer(sparse({"selector": "rf_v2", "sparsity": 0.5, "steps16_first": 1}, precision="mix")).attention.config
assert (kept.precision, kept.steps16_first) == (8, 1)
# ---- one clip is a video with text beside it: the order of esa.apply, which several clips cannot have
one = random(40 + TOKENS + 25, seed=4)
clip = {"used_len": 40 + TOKENS + 25, "video_spans": (VideoTokenSpan(40, GRID, "target"),)}
own = sparse({"selector": "error", "budget": 0.5, "carry": "off", "warmup_frac": 0, "steps": 4})
module = layer(own)
out = call(module, own, 0, *one, **clip)
session = esa.Session(module.attention.config.replace(strict=True), layers=1, steps=4, scale=DIM**-0.5, device="cpu",
                      layout=esa.Layout(grid=GRID, text_front=40, text_back=25, order="adaptive"), branches=4)
session.begin()
session.step(0)
assert torch.equal(out, session.attention(0, *one, input_layout="BSND")) and session.stats().sparse_calls == 1
# ---- a mask of the text in cross-attention goes to the host's dense backend, with this backend chosen for all roles
masked = layer(wan, role="cross")
keys = torch.arange(40)[None] < 33
out = call(masked, wan, 0, q, k[:, :40], v[:, :40], metadata=AttentionMetadata(attn_mask=keys))
assert close(out, esa.attention(q, k[:, :33], v[:, :33], input_layout="BSND", scale=DIM**-0.5))
# ---- what newer versions ask (capabilities)
try:
    from vllm_omni.diffusion.attention import capabilities as ask
except ImportError:
    ask = None
if ask is not None:
    def context(**words):
        return ask.ExecutionContext(platform="cuda", head_dim=DIM, q_heads=HEADS, kv_heads=HEADS, **words)

    def answer(**words):
        found = ours.EsaBackend.resolve_capabilities(context(**words))
        return found.support.status.value, found.support.reason, found.backend

    for strategy in ask.ParallelStrategy:
        status, reason, name = answer(parallel_strategy=strategy)
        assert (status == "supported") == (strategy.value in ("none", "ulysses")), strategy
        assert name == "RAINFUSION_ATTN" and (reason is None or "use Ulysses" in reason)
    for words, why in (({"causal": True}, "bidirectional"), ({"paged_kv": True}, "paged KV")):
        assert answer(**words)[0] == "unsupported" and why in answer(**words)[1]
    assert answer(computation=ask.AttentionComputation.CROSS)[2] == "SDPA"
    eager = ours.EsaBackend.resolve_capabilities(context())
    assert eager.requested_support(context(require_fullgraph=True)).status.value == "unsupported"

    def way(module, settings, step=0, metadata=None, tensors=(q, k, v)):
        metadata = metadata or AttentionMetadata(video_layout=VideoTokenLayout(
            prefix_len=0, latent_grid=GRID, used_len=TOKENS))
        with set_forward_context(omni_diffusion_config=settings, denoise_step_idx=step):
            found = module.resolve_execution_path(context(), *tensors, metadata)
        return found.backend, found.path, found.support.status.value

    ours_way = ("RAINFUSION_ATTN", "esa_block_sparse", "supported")
    assert way(layer(wan), wan) == ours_way
    assert way(layer(timed), timed, 1)[0] == "SDPA" and way(layer(timed), timed, 3)[0] == "SDPA"    # no total: dense
    assert way(layer(wan), wan, metadata=AttentionMetadata())[0] == "SDPA"
    assert way(layer(strict), strict, metadata=AttentionMetadata())[::2] == ("RAINFUSION_ATTN", "unsupported")
    # cross-attention by its own argument, masked keys included: the host's dense backend
    cross = layer(wan, computation="cross", cross_mask_kind="kv")
    assert cross.attention.model is None and way(cross, wan, tensors=(q, k[:, :40], v[:, :40]))[0] == "SDPA"
    valid = torch.arange(40)[None] < 33
    with set_forward_context(omni_diffusion_config=wan, denoise_step_idx=0), torch.no_grad():
        out = cross(q, k[:, :40], v[:, :40], AttentionMetadata.for_cross_kv_mask(valid))
    assert close(out, esa.attention(q, k[:, :33], v[:, :33], input_layout="BSND", scale=DIM**-0.5))
print("vLLM-Omni: ok")
