# SPDX-License-Identifier: Apache-2.0
"""The ComfyUI node in a host that behaves as ComfyUI's hook does (hosts/comfy_host.py)."""
import importlib.util
import logging
import pathlib

import esa
import pytest
import torch
from hosts import comfy_host as host

host.install()
from esa.hosts import comfyui  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
GRID = (4, 6, 8)                        # of latents 4 x 12 x 16
TOKENS = 4 * 6 * 8
PLAIN = {"preset": "density", "density": 0.5, "selector": "entropy", "start_percent": 0.0, "end_percent": 1.0,
         "dense_layers": "", "masks_file": "", "strict": True, "min_tokens": 64,
         "precision": "16", "carry": "auto"}


def inputs(seed=0):
    r = torch.Generator().manual_seed(seed)
    return torch.randn(1, 4, 4, 12, 16, generator=r), torch.randn(1, 20, 16, generator=r)


def node(model, **changes):
    return comfyui.EsaSparseAttention().apply(model, **{**PLAIN, **changes})[0]


class Listener:
    """An override that hears every call and runs it dense."""

    def __init__(self):
        self.calls = []

    def __call__(self, func, q, k, v, heads, **kwargs):
        self.calls.append((q, k, v, kwargs))
        return func(q, k, v, heads, **kwargs)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 16 tokens, so that a small video has some to choose from."""
    config_of = comfyui.config_of
    monkeypatch.setattr(comfyui, "config_of", lambda options, what: config_of({**options, "block": 16}, what))


def patch_of(model):
    return model.model_options["transformer_options"][comfyui.POLICIES][comfyui.KEY]


@pytest.mark.parametrize("boxed", [False, True])
@pytest.mark.parametrize("references", [0, 24])
def test_wan_equals_a_session(boxed, references, seed):
    x, context = inputs(seed)
    extra = torch.randn(1, references, 16) if references else None
    seen, session = [], esa.Session(
        esa.EsaConfig(selector="entropy", budget=0.5, block=16, warmup_frac=0.0, dense_first_layer=False,
                      order="hilbert"), layers=3, steps=4, branches=2, device="cpu",
        layout=esa.Layout(grid=GRID, text_front=references))
    session.begin()
    model = node(host.Patcher(host.WanModel(boxed=boxed)))
    attend = comfyui.Patch.attend

    def spy(self, q, k, v, heads, options, *rest):
        out = attend(self, q, k, v, heads, options, *rest)
        seen.append((int(options["block_index"]), options["uuids"][0], float(options["sigmas"][0]), q, k, v, out))
        return out

    patch_of(model).attend = spy.__get__(patch_of(model))
    out = model.sample(x, context, references=extra)
    assert len(seen) == 3 * 4 * 2 and torch.isfinite(out[0]).all()
    names = list(dict.fromkeys(name for _, name, *_ in seen))
    for layer, name, sigma, q, k, v, got in seen:
        session.step(round((1 - sigma) * 4), names.index(name))
        want = session.attention(layer, *(t.unflatten(2, (2, 16)) for t in (q, k, v)), input_layout="BSND")
        assert torch.equal(got, want.flatten(2))
    assert session.stats().density == pytest.approx(0.5, abs=0.1) and session.stats().sparse_calls == 24


@pytest.mark.parametrize("make", [host.WanModel, host.HunyuanVideo])
def test_density_1_changes_nothing(make, seed):
    x, context = inputs(seed)
    dense = host.Patcher(make()).sample(x, context)
    sparse = node(host.Patcher(make()), density=1.0, selector="rf_v2").sample(x, context)
    for a, b in zip(dense, sparse):
        assert (a - b).abs().max() < 1e-4 * a.abs().max()       # float32 sums in another order, through five layers
    other = node(host.Patcher(make()), density=0.2).sample(x, context)
    assert (other[0] - dense[0]).abs().max() > 1e-2


def test_hunyuan_video_without_a_grid_of_its_own(seed):
    x, context = inputs(seed)
    model, receipts = node(host.Patcher(host.HunyuanVideo())), []
    model.sample(x, context, steps=2, receipts=receipts)
    assert [item[3] for item in receipts] == [0, 1, 2, 3, 4] * 4        # double blocks, then single blocks
    assert {item[5] for item in receipts} == {TOKENS + 20}
    patch = patch_of(model)
    assert patch.layout({comfyui.KEY + "_grid": GRID}, TOKENS + 20).text_back == 20


@pytest.mark.parametrize("keyframe", [True, False])
def test_minimax_h3_keeps_all_but_the_video(keyframe, seed):
    """Every call over the whole sequence is that of a session whose text in front holds text, keyframe and sound; the
    refiner's calls are dense without a word, though they have no block."""
    x, context = inputs(seed)
    latents = [x, torch.randn(1, 18, 16, generator=torch.Generator().manual_seed(seed))]
    front = 20 + keyframe * GRID[1] * GRID[2] + 18
    session = esa.Session(
        esa.EsaConfig(work=0.95, carry=1, block=16), layers=3, steps=8, device="cpu", step_branches=1,
        sigma=[1 - i / 8 for i in range(8)], layout=esa.Layout(grid=GRID, text_front=front, order="adaptive"))
    session.begin()
    listener, seen = Listener(), []
    model = host.Patcher(host.MiniMaxH3Model(keyframe=keyframe))
    model.model_options["transformer_options"][comfyui.OVERRIDE] = listener
    model = node(model, preset="balanced", selector="error", carry="1", min_tokens=0)
    patch = patch_of(model)
    patch.config, attend = patch.config.replace(preset=None, work=0.95), comfyui.Patch.attend

    def spy(self, q, k, v, heads, options, *rest):
        out = attend(self, q, k, v, heads, options, *rest)
        seen.append((int(options["block_index"]), q, k, v, out))
        return out

    patch.attend = spy.__get__(patch)
    model.sample(latents, context, steps=8, guided=False)
    assert len(seen) == 3 * 8 and [call[0].shape[2] for call in listener.calls] == [20] * 8
    for number, (layer, q, k, v, out) in enumerate(seen):
        session.step(number // 3)
        want = session.attention(layer, q, k, v, input_layout="BNSD")
        assert torch.equal(out, want.transpose(1, 2).flatten(2))
    stats = session.stats()
    assert stats.sparse_calls == 24 and stats.anchor_calls == 3 and stats.density < 0.95


def test_minimax_h3_without_its_video(seed, caplog):
    """Segments that are not what the latents make: dense, with one line, or an error."""
    x, context = inputs(seed)
    latents = [x, torch.zeros(1, 18, 16)]

    class Odd(host.MiniMaxH3Model):
        patch_size = (1, 2, 4)

    dense = host.Patcher(Odd()).sample(latents, context, guided=False)[0]
    with caplog.at_level(logging.WARNING, "esa"):
        out = node(host.Patcher(Odd()), strict=False).sample(latents, context, guided=False)[0]
    assert torch.equal(out, dense) and len(caplog.records) == 1
    assert "publishes no video segment of 4x6x4 tokens" in caplog.text
    with pytest.raises(esa.EsaError, match="esa is strict, but this call would be dense: Odd publishes no video"):
        node(host.Patcher(Odd())).sample(latents, context, guided=False)


def test_other_overrides_are_chained(seed):
    x, context = inputs(seed)
    before, after = Listener(), Listener()
    model = host.Patcher(host.WanModel(layers=2))
    model.model_options["transformer_options"]["optimized_attention_override"] = before
    model = node(model, start_percent=0.3, end_percent=0.8, dense_layers="1")
    model.sample(x, context)
    # steps at sigma 1, .75, .5, .25: only the middle two are inside, only layer 0 is sparse there
    plain = [c for c in before.calls if c[1].shape == c[0].shape and "low_precision_attention" not in c[3]]
    assert len(plain) == 2 * (2 * 2 + 2 * 1) and all(c[3]["skip_reshape"] is False for c in plain)
    assert sum(c[1].shape[1] == 20 for c in before.calls) == 16         # cross-attention
    assert sum("low_precision_attention" in c[3] for c in before.calls) == 16
    # a node that takes the hook later is chained to, not over
    model.model_options["transformer_options"]["optimized_attention_override"] = after
    receipts = []
    model.sample(x, context, receipts=receipts)
    assert len(receipts) == 4 and len(after.calls) == 16 * 3 - 4


def test_receipts_and_policies(seed):
    x, context = inputs(seed)
    model, receipts = node(host.Patcher(host.WanModel()), dense_layers="1"), []
    model.sample(x, context, steps=1, receipts=receipts)
    patch = patch_of(model)
    name = (comfyui.KEY, 1, id(patch))
    assert receipts == [(*name, layer, "sparse", TOKENS, (0, 0), (0, 0)) for layer in (0, 2, 0, 2)]
    assert patch.accept_receipts(receipts[:2]) and not patch.accept_receipts(receipts)
    assert not patch.accept_receipts(receipts[:1]) and not patch.accept_receipts([("other",) * 8] * 2)
    options = {**model.model_options["transformer_options"], "sigmas": torch.ones(1)}
    assert patch(options=options)[:4] == (*name, "sparse")
    assert patch(options={**options, "optimized_attention_override": None}) is None
    receipts = []
    node(host.Patcher(host.WanModel()), min_tokens=1000).sample(x, context, receipts=receipts)
    assert not receipts                                                 # short sequences count as nothing


def sampled(model, x, context, steps=8, together=False):
    """The last outputs, the receipts, and what the session counted."""
    receipts, stats, patch = [], [], patch_of(model)
    reset = patch.reset

    def spy():
        if patch.run is not None:
            stats.append(patch.run.stats())
        reset()
    patch.reset = spy
    out = model.sample(x, context, steps=steps, receipts=receipts, together=together)
    return out, receipts, stats[0]


def test_carry(seed):
    """The widget, what is counted, and what forecasters of steps read."""
    x, context = inputs(seed)
    words = {"preset": "balanced", "selector": "error"}
    for carry, anchors in (("auto", len(esa.EsaConfig().anchors(8))), ("off", 0), ("2", 2), ("0, 3,5", 3)):
        model = node(host.Patcher(host.WanModel()), **words, carry=carry)
        _, receipts, stats = sampled(model, x, context)
        # each branch takes the first one's difference
        assert (stats.anchor_calls, stats.sparse_calls) == (3 * anchors, 3 * 8 * 2), carry
        assert stats.carried_calls == (stats.sparse_calls - stats.anchor_calls if anchors else 0)
        word = "carry" if anchors else "sparse"
        assert {item[4] for item in receipts} == {word} and len(receipts) == 3 * 8 * 2
        options = {**model.model_options["transformer_options"], "sigmas": torch.ones(1)}
        assert patch_of(model)(options={**options, "sample_sigmas": torch.linspace(1, 0, 9)})[3] == word
    with pytest.raises(ValueError, match="the node: carry must be 'auto', 'off', a number of anchors, or their steps"):
        node(host.Patcher(host.WanModel()), **words, carry="often")
    model = node(host.Patcher(host.WanModel()), carry="2")          # another selector, if it is asked to
    assert sampled(model, x, context)[2].anchor_calls == 3 * 2 * 2


def test_carry_of_branches_in_one_batch(seed):
    """The host batches the branches as it likes: the one with the prompt runs dense at anchors in any case."""
    x, context = inputs(seed)
    words = {"preset": "balanced", "selector": "error", "carry": "3"}
    apart, _, one = sampled(node(host.Patcher(host.WanModel()), **words), x, context)
    together, receipts, other = sampled(node(host.Patcher(host.WanModel()), **words), x, context, together=True)
    assert (one.anchor_calls, one.calls) == (other.anchor_calls, other.calls) == (3 * 3, 3 * 8 * 2)
    assert len(receipts) == 3 * 8
    for a, b in zip(apart, together):
        assert (a - b).abs().max() < 1e-3 * a.abs().max()      # products of two entries may be summed otherwise
    whole = node(host.Patcher(host.WanModel()), **{**words, "carry": "off"})
    assert sampled(whole, x, context, together=True)[2].calls == 3 * 8


def test_presets_masks_and_memory(seed, tmp_path):
    x, context = inputs(seed)
    model = node(host.Patcher(host.WanModel()), preset="fast", selector="error", strict=True)
    model.sample(x, context, steps=3)
    patch = patch_of(model)
    assert patch.config.preset == "fast" and patch.run is None           # cleaned up
    with pytest.raises(ValueError, match="preset 'fast' needs selector 'error'"):
        node(host.Patcher(host.WanModel()), preset="fast", selector="rf_v2")
    with pytest.raises(ValueError, match="dense_layers names layer 7, WanModel has layers 0 to 2"):
        node(host.Patcher(host.WanModel()), dense_layers="7")
    with pytest.raises(ValueError, match="the node: masks names .*none.safetensors', which is not a file"):
        node(host.Patcher(host.WanModel()), masks_file=str(tmp_path / "none.safetensors"))


def test_strict_or_one_warning(seed, caplog):
    x, context = inputs(seed)

    class Silent(host.WanModel):
        """Publishes no block numbers."""

        def _forward(self, x, timestep, context, transformer_options):
            q, k, v = self.project(self.patchify(x)[0], 0)
            return host.optimized_attention(q, k, v, 2, transformer_options=transformer_options)

    with pytest.raises(esa.EsaError, match="esa is strict, but this call would be dense: .* no block_index"):
        node(host.Patcher(Silent())).sample(x, context)
    with caplog.at_level(logging.WARNING, "esa"):
        out = node(host.Patcher(Silent()), strict=False).sample(x, context)
    assert torch.equal(out[0], host.Patcher(Silent()).sample(x, context)[0])
    assert [r.message for r in caplog.records] == ["esa stays dense: transformer_options has no block_index"]


def test_layer_lists():
    assert comfyui.layer_numbers("0, 1, 47-49") == (0, 1, 47, 48, 49) and comfyui.layer_numbers(" ") == ()
    assert comfyui.layer_numbers("3 - 2 7") == (2, 3, 7)
    with pytest.raises(ValueError, match="not 'first'"):
        comfyui.layer_numbers("first")


def test_the_folder_declares_the_node():
    spec = importlib.util.spec_from_file_location("custom_node", ROOT / "compat" / "comfyui" / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cls = module.NODE_CLASS_MAPPINGS["EsaSparseAttention"]
    assert module.NODE_DISPLAY_NAME_MAPPINGS.keys() == module.NODE_CLASS_MAPPINGS.keys()
    widgets = {**cls.INPUT_TYPES()["required"], **cls.INPUT_TYPES()["optional"]}
    assert set(widgets) - {"model"} == set(PLAIN) and cls.RETURN_TYPES == ("MODEL",)
    text = (ROOT / "compat" / "comfyui" / "pyproject.toml").read_text()
    assert "[tool.comfy]" in text and f'version = "{esa.__version__}"' in text
