# SPDX-License-Identifier: Apache-2.0
"""The name "esa" among diffusers' attention backends."""
import esa
import minis
import pytest
import torch

CONFIG = esa.EsaConfig(block=minis.BLOCK, budget=0.4, tail="pooled")


def difference(a, b):
    return (a - b).abs().max().item()


@pytest.fixture(autouse=True)
def native_again():
    """set_attention_backend also makes the backend the process's own in newer diffusers."""
    yield
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    _AttentionBackendRegistry._active_backend = AttentionBackendName("native")


@pytest.mark.parametrize("family", ["wan", "hunyuan"])
def test_backend_equals_masked_attention(family):
    mini = minis.MAKERS[family]()
    mini.layout = esa.Layout(grid=None) if family == "wan" else mini.layout
    tokens = 360 if family == "wan" else mini.layout.tokens
    plain = mini()
    esa.register_backend(CONFIG)
    mini.model.set_attention_backend("esa")
    got = mini()
    mini.model.set_attention_backend("native")

    def attention(layer, q, k, v):          # the backend knows no grid and no text
        mask = esa.select(q.contiguous(), k.contiguous(), CONFIG, kv_len=mini.kv_len)
        return minis.masked_attention(q, k, v, mask, "pooled", mini.kv_len)

    class Here:
        layout = type("L", (), {"tokens": tokens})
        layers = mini.layers
    with minis.ReferenceMode(Here, attention) as mode:
        want = mini()
    assert mode.calls == mini.layers
    assert difference(got, want) <= 1e-4 < difference(got, plain)       # float32 against float64
    assert difference(mini(), plain) == 0


def test_settings_can_change_and_names_are_not_stolen():
    mini = minis.wan()
    plain = mini()
    assert esa.register_backend(CONFIG) == "esa"
    assert esa.register_backend(CONFIG.replace(budget=1.0)) == "esa"
    mini.model.set_attention_backend("esa")
    assert difference(mini(), plain) <= 1e-5
    mini.model.set_attention_backend("native")
    with pytest.raises(ValueError, match="already has an attention backend 'flash'"):
        esa.register_backend(CONFIG, name="flash")


def test_backend_compiles_in_one_graph():
    torch._dynamo.reset()
    mini = minis.wan()
    esa.register_backend(CONFIG)
    mini.model.set_attention_backend("esa")
    want = mini()
    compiled = torch.compile(mini.model, fullgraph=True, backend="eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert difference(compiled(**mini.inputs, return_dict=False)[0], want) <= 1e-5
    mini.model.set_attention_backend("native")


def test_what_a_backend_cannot_do():
    for changes in ({"masks": "x"}, {"order": "tile"}, {"refresh_every": 3}, {"kernel": "fa4", "tail": "none"}):
        with pytest.raises(ValueError, match="belong to esa.apply"):
            esa.register_backend(CONFIG.replace(**changes))
    esa.register_backend(CONFIG)
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    x = torch.randn(1, 64, 2, 16)
    with pytest.raises(ValueError, match="takes boolean masks"):
        dispatch_attention_fn(x, x, x, attn_mask=torch.zeros(1, 1, 64, 64), backend="esa")
    with pytest.raises(ValueError, match="not causal"):
        dispatch_attention_fn(x, x, x, is_causal=True, backend="esa")
