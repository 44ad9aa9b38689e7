# SPDX-License-Identifier: Apache-2.0
"""esa.hosts.sglang inside the released SGLang: sglang_checks.py FOLDER, where FOLDER holds its unpacked wheel and a
dist-info with our entry points. test_sglang.py runs this in a process of its own.

Real: plugin loader, hook registry, platform enum and CUDA platform, backend interface, forward context. Stand-ins:
sglang_host.py."""
import sys
import types

import torch
from sglang_host import prepare
from stubs import fails

args = prepare(sys.argv[1])
args.attention_backend_config.update(sparsity=0.5, skip_first_steps=1)

from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context  # noqa: E402
from sglang.multimodal_gen.runtime.platforms import plugins  # noqa: E402
from sglang.multimodal_gen.runtime.platforms.cuda import CudaPlatformBase  # noqa: E402
from sglang.multimodal_gen.runtime.platforms.interface import AttentionBackendEnum  # noqa: E402


def ask(name):
    return CudaPlatformBase.get_attn_backend_cls_str(AttentionBackendEnum[name], 64, torch.bfloat16)


# ---- before the plugin
fails("Invalid attention backend for cuda", lambda: ask("RAIN_FUSION_ATTN"))
sdpa = ask("TORCH_SDPA")
# ---- SGLang's own two phases
plugins.load_plugins()
assert "esa.hosts.sglang" not in sys.modules                # the first phase imports nothing of the runtime
plugins.apply_plugin_hooks()
assert ask("RAIN_FUSION_ATTN") == "esa.hosts.sglang.EsaBackend" and ask("TORCH_SDPA") == sdpa
fails("Invalid attention backend for cuda", lambda: ask("LASER_ATTN"))

import esa  # noqa: E402
from esa.hosts import sglang as ours  # noqa: E402

assert ours.EsaBackend.get_enum() is AttentionBackendEnum.RAIN_FUSION_ATTN
assert ours.EsaBackend.supports_packed_varlen() and not ours.EsaBackend.supports_ring_rotation()
GRID, HEADS, DIM = (8, 8, 20), 2, 32
TOKENS = 8 * 8 * 20
said = []
ours.logger = types.SimpleNamespace(warning_once=lambda line: line in said or said.append(line))


def layer(prefix="blocks.0.attn1", **words):
    return ours.EsaImpl(num_heads=HEADS, head_size=DIM, softmax_scale=DIM**-0.5, prefix=prefix, **words)


def call(impl, step, *tensors, steps=None, latents=(1, 16, 8, 16, 40), **words):
    metadata = ours.EsaBackend.get_builder_cls()().build(
        current_timestep=step, raw_latent_shape=latents, patch_size=(1, 2, 2),
        **{"skip_first_steps": 1, "sparsity": 0.5, **words})
    batch = types.SimpleNamespace(num_inference_steps=steps)
    with set_forward_context(step, metadata, batch), torch.no_grad():
        return impl.forward(*tensors, metadata)


def close(a, b):
    return (a - b).abs().max() < 1e-5           # float32 sums of values of order 1 in another order


def tensors(tokens=TOKENS, keys=None, seed=0):
    r = torch.Generator().manual_seed(seed)
    return [torch.randn(1, n, HEADS, DIM, generator=r) for n in (tokens, keys or tokens, keys or tokens)]


def reference(q, k, v, **words):
    return esa.sparse_attention(q, k, v, input_layout="BSND", head_num=HEADS, sparse_type="rf_v2", sparsity=0.5,
                                **words)


q, k, v = tensors()
dense = esa.attention(q, k, v, input_layout="BSND")
# ---- the host's settings
impl = layer()
assert close(call(impl, 0, q, k, v), dense) and not said
assert torch.equal(call(impl, 1, q, k, v), reference(q, k, v, latent_shape_q=GRID))
assert torch.equal(call(impl, 2, *(x[:, :, 1:].contiguous() for x in (q, k, v))), call(impl, 2, q, k, v)[:, :, 1:])
cross = tensors(keys=40)
assert close(call(layer(is_cross_attention=True), 3, *cross), esa.attention(*cross, input_layout="BSND"))
assert not said
# text behind the video, as HunyuanVideo has it
text = tensors(TOKENS + 50, seed=1)
out = call(layer(), 1, *text)
config = esa.EsaConfig(selector="rf_v2", sparsity=0.5, tail="none", warmup_frac=0, dense_first_layer=False)
session = esa.Session(config, layers=1, steps=9, layout=esa.Layout(grid=GRID, text_back=50, order="tile"), device="cpu")
session.begin()
session.step(1)
assert torch.equal(out, session.attention(0, *text, input_layout="BSND"))
# ---- settings of esa
args.attention_backend_config["esa"] = {"selector": "entropy", "budget": 0.3, "warmup_frac": 0.5, "order": "hilbert",
                                        "dense_layers": [1], "dense_first_layer": False}
first, second = layer("blocks.0.attn1"), layer("blocks.1.attn1")
assert first.model is second.model and (first.layer, second.layer) == (0, 1)
for step in range(4):
    for impl in (first, second):
        assert close(call(impl, step, q, k, v, steps=4), dense) == (step < 2 or impl is second)
run = first.model.run(first.own)
assert run.stats().calls == 8 and run.stats().sparse_calls == 2 and run.layers == 2
assert layer("blocks.0.attn1").model is not first.model             # the next transformer
# ---- carry, with the words of EsaConfig: one difference for both branches
for carry, anchors in (({}, len(esa.EsaConfig().anchors(8))), ({"carry": [0, 3]}, 2), ({"carry": "off"}, 0)):
    args.attention_backend_config["esa"] = {"preset": "fast", "order": "hilbert", **carry}
    impl = layer("blocks.0.attn1")
    for step in range(8):
        for seed in range(2):
            call(impl, step, *tensors(seed=seed), steps=8)
    counted = impl.model.run(impl.own).stats()
    assert (counted.anchor_calls, counted.carried_calls) == (anchors, 16 - anchors if anchors else 0)
args.attention_backend_config["esa"] = {"carry": "often"}
fails("carry must be 'auto', 'off', a number of anchors", lambda: layer("z"))
args.attention_backend_config["esa"] = {"selector": "entropy", "budget": 0.3, "warmup_frac": 0.5}
first = layer("blocks.0.attn1")
# ---- strict, or dense with one warning
for _ in range(2):
    assert close(call(first, 0, q, k, v), dense)
assert len(said) == 1 and "the number of steps is not known" in said[0]
args.attention_backend_config["esa"]["strict"] = True
fails("is strict, but this call would be dense", lambda: call(layer("x"), 0, q, k, v))
args.attention_backend_config["esa"]["budgets"] = 3
fails("has no setting 'budgets'", lambda: layer("y"))
print("SGLang: ok")
