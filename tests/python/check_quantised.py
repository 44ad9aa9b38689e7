# SPDX-License-Identifier: Apache-2.0
"""esa.apply with linear layers of torchao and bitsandbytes (docs/models.md). `make test-all` runs it, in an
environment of its own (requirements-quantised.txt): torchao slows every import of diffusers down, and bitsandbytes is
120 MB.

    python -m pytest tests/python/check_quantised.py

A video with esa must equal the same loop without esa, in which self-attention is SDPA under the same masks: both have
the same quantised projections, so only attention differs."""
import bitsandbytes
import esa
import pipelines
import pytest
import torch
import torchao.quantization as ao
from diffusers import TorchAoConfig, WanTransformer3DModel
from loops import STEPS, WARMUP, Reference, Video, note_calls, write_masks

import minis

# Of the largest value: as in test_together.py. Activations in int8 are rounded to 1/127 of the largest of a token, some
# of them the other way. Masks of the neighbouring step must differ by three times as much.
EXACT, ROUNDED = 1e-4, 3e-3


def make():
    return Video(minis.wan(layers=3, grid=(2, 7, 7)), ("cond", "uncond"))


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    path = tmp_path_factory.mktemp("masks") / "masks"
    blocks = write_masks(path, make().mini)
    return esa.EsaConfig(masks=path, budget=0.5, warmup_frac=WARMUP / STEPS, tail="none"), blocks


def linears(module, name):
    return isinstance(module, torch.nn.Linear) and name.startswith("blocks.")


def int8_weights(model):
    ao.quantize_(model, ao.Int8WeightOnlyConfig(), filter_fn=linears)


def int8_both(model):
    ao.quantize_(model, ao.Int8DynamicActivationInt8WeightConfig(), filter_fn=linears)


def float8_weights(model):
    ao.quantize_(model, ao.Float8WeightOnlyConfig(), filter_fn=linears)


def _exchange(model, make_layer):
    for name, module in list(model.named_modules()):
        if linears(module, name):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], make_layer(module))


def _filled(layer, module, weight):
    layer.weight = weight
    layer.bias = module.bias
    return layer.to("cpu")              # bitsandbytes quantises when a layer moves to a device


def nf4(model):
    def layer(module):
        made = bitsandbytes.nn.LinearNF4(module.in_features, module.out_features, compute_dtype=module.weight.dtype)
        return _filled(made, module, bitsandbytes.nn.Params4bit(module.weight.data, requires_grad=False,
                                                                quant_type="nf4"))
    _exchange(model, layer)


def bnb_int8(model):
    def layer(module):
        made = bitsandbytes.nn.Linear8bitLt(module.in_features, module.out_features, has_fp16_weights=False)
        return _filled(made, module, bitsandbytes.nn.Int8Params(module.weight.data, requires_grad=False,
                                                                has_fp16_weights=False))
    _exchange(model, layer)


WAYS = {"torchao int8 weights": int8_weights, "torchao int8": int8_both, "torchao float8 weights": float8_weights,
        "bitsandbytes nf4": nf4, "bitsandbytes int8": bnb_int8}


@pytest.mark.parametrize("way", list(WAYS))
def test_quantised_linears(way, masks):
    config, blocks = masks
    plain = make().run()
    video = make()
    WAYS[way](video.mini.model)
    kinds = {type(m.weight).__name__ for n, m in video.mini.model.named_modules() if n.endswith("to_q")}
    assert kinds.isdisjoint({"Parameter", "Tensor"}), kinds
    assert not torch.equal(video.run(), plain)
    with Reference(video, blocks).listening() as reference:
        want = video.run()
    with esa.apply(video.mini.model, config, steps=STEPS) as handle:
        calls = note_calls(handle)
        got = video.run()
        assert calls == reference.calls and handle.stats().fallback_calls == 0
    with Reference(video, blocks.roll(1, dims=1)).listening():
        wrong = video.run()
    allowed = ROUNDED if way == "torchao int8" else EXACT
    error, seen = ((x - want).abs().max().item() / want.abs().max().item() for x in (got, wrong))
    print(f"{way}: difference {error:.1e}, with masks of another step {seen:.1e}")
    assert error <= allowed < seen / 3


@pytest.mark.parametrize("way", ["torchao int8 weights"])
def test_quantised_after_esa(way, masks):
    """The other order: the model is quantised while esa is applied."""
    config, _ = masks
    video = make()
    WAYS[way](video.mini.model)
    with esa.apply(video.mini.model, config, steps=STEPS):
        want = video.run()
    video = make()
    with esa.apply(video.mini.model, config, steps=STEPS):
        WAYS[way](video.mini.model)
        assert torch.equal(video.run(), want)


def test_loaded_as_users_do(tmp_path):
    """from_pretrained(quantization_config=...), then esa.apply: density 1 equals the model without esa. diffusers
    refuses to load with bitsandbytes where there is no GPU."""
    folder = pipelines.make_wan(str(tmp_path / "wan"))
    model = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer", torch_dtype=torch.float32,
                                                  quantization_config=TorchAoConfig(ao.Int8WeightOnlyConfig()))
    assert type(model.blocks[0].attn1.to_q.weight).__name__ not in ("Parameter", "Tensor")
    torch.manual_seed(0)
    channels = model.config.in_channels
    inputs = {"hidden_states": torch.randn(1, channels, 3, 12, 16), "timestep": torch.tensor([500]),
              "encoder_hidden_states": torch.randn(1, 9, model.config.text_dim)}
    with torch.no_grad():
        want = model(**inputs, return_dict=False)[0]
        with esa.apply(model, esa.EsaConfig(budget=1.0, block=16, warmup_frac=0.0), steps=2) as handle:
            got = model(**inputs, return_dict=False)[0]
            assert handle.stats().sparse_calls > 0
    assert (got - want).abs().max() <= EXACT * want.abs().max()
