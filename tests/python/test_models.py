# SPDX-License-Identifier: Apache-2.0
"""Every model that esa.supported() lists, as a mini of its real class: nothing changes at density 1, below it the model
is the one with masked attention, and what was put in comes out again. Models that are not listed can be described."""
import dataclasses
import pathlib
import re

import diffusers
import esa
import minis
import model_minis
import pytest
import torch
from esa.diffusers import families

# A forward in float32 against one with attention in float64; activations are of order 1, two layers deep.
EXACT, MASKED = 2e-5, 1e-4
NAMES = [name for name in model_minis.MODELS if name not in model_minis.MISSING]


def sparse(**settings):
    return esa.EsaConfig(**{
        "block": 32, "warmup_frac": 0.0, "dense_first_layer": False, "budget": 0.4, "tail": "none", **settings
    })


def difference(a, b):
    return (a - b).abs().max().item()


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return model_minis.make(request.param)


def test_density_one_changes_nothing(model):
    before = [m.processor for _, m in families.detect(model.model).modules(model.model)]
    want = model()
    with esa.apply(model.model, sparse(selector="entropy", budget=1.0)) as handle:
        got = model()
        stats = handle.stats()
    assert stats.sparse_calls == stats.calls == model.layers == len(before) and stats.density == 1.0
    assert difference(got, want) <= EXACT
    assert [m.processor for _, m in families.detect(model.model).modules(model.model)] == before
    assert torch.equal(model(), want)


@pytest.mark.parametrize("settings", [{"selector": "rf_v2"}, {"selector": "entropy", "tail": "pooled"}],
                         ids=["rf_v2", "entropy, pooled"])
def test_sparse_equals_masked_attention(model, settings):
    config = sparse(**settings)
    dense = model()
    with model_minis.reference(model, config) as seen:
        want = model()
    with esa.apply(model.model, config) as handle:
        got = model()
        stats = handle.stats()
    assert seen.calls >= model.layers and stats.sparse_calls == model.layers and stats.fallback_calls == 0
    assert stats.density < 0.95
    assert difference(got, want) <= MASKED
    assert difference(got, dense) > 10 * MASKED, "the mask must matter, or this test shows nothing"


def test_default_selector(model):
    """The error selector, for which each head has its own order. It reads v and replaces what it drops by means, so
    there is no mask to compare with; it must come closer to dense than random blocks of the same number."""
    dense = model()
    errors = []
    for settings in ({"selector": "error", "tail": "pooled", "budget": 0.6}, {"selector": "random", "budget": 0.6}):
        with esa.apply(model.model, sparse(**settings), steps=1) as handle:
            errors.append((model() - dense).square().mean().sqrt().item())
            assert handle.stats().sparse_calls == model.layers
            assert handle._run.session.layout.order == ("adaptive" if settings["selector"] == "error" else "hilbert")
    assert 0 < errors[0] < errors[1]


# HunyuanVideo 1.5 branches on the values of a tensor: it is not one graph without esa either.
COMPILED = [name for name in NAMES if name != "hunyuan_15"]
QUICK = ("flux", "minimax_h3", "wan_vace")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COMPILED])
def test_compiled_transformer(name):
    """The whole transformer in one graph, borrowed processors and root hook included, and none more for later
    steps."""
    torch._dynamo.reset()
    model = model_minis.make(name)
    times = [model.later(t) for t in (900, 500, 100)]
    with esa.apply(model.model, sparse(selector="entropy"), steps=3) as handle:
        want = [model(**t) for t in times]
        handle.begin()
        compiled = torch.compile(model.model, fullgraph=True, backend="eager")
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
            got = [compiled(**{**model.inputs, **t}, return_dict=False)[0] for t in times]
        assert handle.videos == 2 and handle.step == 2 and handle.stats().calls == 3 * model.layers
    assert max(difference(a, b) for a, b in zip(got, want)) <= EXACT


# ---------------------------------------------------------------- the table


def test_every_class_of_the_table_has_a_mini():
    made = {type(model_minis.make(name).model).__name__ for name in NAMES}
    listed = {name for family in families.FAMILIES for name in family.transformer_classes}
    assert made | {name for name in listed if not hasattr(diffusers, name)} == listed


def test_supported():
    rows = {row.family: row for row in esa.supported()}
    assert [row.family for row in esa.supported()][:2] == ["Wan", "Wan VACE"] and len(rows) == len(families.FAMILIES)
    for row in rows.values():
        there = hasattr(diffusers, row.transformers[0])
        assert bool(row.missing) != there and bool(row.pipelines) == there
    assert str(rows["Mochi"]) == "Mochi: MochiPipeline"
    if diffusers.__version__ >= "0.42":                         # names that no diffusers has would never be noticed
        assert {name for family in families.FAMILIES for name in family.pipelines} <= set(dir(diffusers))


def test_missing_models_are_named(monkeypatch):
    new = dataclasses.replace(families.FAMILIES[0], name="New", transformer_classes=("NewTransformer3DModel", ))
    monkeypatch.setattr(families, "FAMILIES", (new, ))
    assert str(esa.supported()[0]) == (f"New: diffusers {diffusers.__version__} has no NewTransformer3DModel; a newer "
                                       "one may")


# ---------------------------------------------------------------- single rules


def test_the_given_frame_is_protected():
    model = model_minis.make("wan_i2v")
    for settings, protected in (({}, True), ({"protect_first_frame": False}, False), ({"selector": "error"}, None)):
        with esa.apply(model.model, sparse(**settings)) as handle:
            model()
            assert bool(handle._run.session.layout.protect_first_frame) == bool(protected)
    mini = minis.wan()

    class WanImageToVideoPipeline:
        transformer, scheduler = mini.model, None
    for pipe, protected in ((WanImageToVideoPipeline(), True), (mini.model, False)):
        with esa.apply(pipe, sparse(), steps=1) as handle:
            mini()
            assert handle._run.session.layout.protect_first_frame == protected


@pytest.mark.parametrize("name", ["flux", "sd3", "wan_vace"])
def test_fused_projections(name):
    """Before and while esa is applied, against diffusers with fused projections (in SD3, whose processors are exchanged
    for others, norms of q and k are then left out, and blocks with two attentions do not run)."""
    model = model_minis.make(name, **({"dual": ()} if name == "sd3" else {}))
    plain, config = model(), sparse(budget=1.0)
    model.model.fuse_qkv_projections()
    fused = model()
    with esa.apply(model.model, config) as handle:
        assert difference(model(), fused) <= EXACT and handle.stats().sparse_calls == model.layers
        model.model.unfuse_qkv_projections()
        assert difference(model(), plain) <= EXACT
        model.model.fuse_qkv_projections()
        assert difference(model(), fused) <= EXACT and handle.stats().sparse_calls == model.layers
    assert torch.equal(model(), fused)
    model.model.unfuse_qkv_projections()
    assert difference(model(), plain) <= EXACT
    assert not any("Esa" in type(p).__name__ for p in model.model.attn_processors.values())


def test_padding_anywhere_in_the_text():
    """Qwen-Image's mask may have any pattern."""
    model = model_minis.make("qwen_padded")
    mask = torch.rand(2, model_minis.TEXT) > 0.4
    model.inputs["encoder_hidden_states_mask"] = mask
    model = dataclasses.replace(model, valid=mask if model.valid is not None else None)
    want = model()
    with esa.apply(model.model, sparse(budget=1.0)):
        assert difference(model(), want) <= EXACT
    config = sparse(selector="rf_v2")
    with model_minis.reference(model, config):
        want = model()
    with esa.apply(model.model, config):
        assert difference(model(), want) <= MASKED


def test_mochi_with_padded_text():
    """diffusers cuts the text of each batch entry; esa masks the padding of both."""
    torch.manual_seed(0)
    model = model_minis.mochi(valid=7)
    want = model()
    with esa.apply(model.model, sparse(budget=1.0)):
        assert difference(model(), want) <= EXACT


def test_prompts_of_two_lengths_in_one_video():
    """Guidance in two calls: each length has its session, and what ran is counted over both."""
    model = model_minis.make("qwen")
    short = {"encoder_hidden_states": model.inputs["encoder_hidden_states"][:, :9]}
    if "txt_seq_lens" in model.inputs:
        short["txt_seq_lens"] = [9, 9]
    want = model(), model(**short)
    with esa.apply(model.model, sparse(budget=1.0), steps=2) as handle:
        for video in (1, 2):
            for timestep in (0.9, 0.4):
                got = []
                for branch, more in enumerate(({}, short)):
                    handle.pin(0 if timestep == 0.9 else 1, branch)
                    got.append(model.at(timestep, **more))
                if timestep == 0.9:
                    assert max(difference(a, b) for a, b in zip(got, want)) <= EXACT
            stats = handle.stats()
            assert handle.videos == video and stats.calls == 2 * 2 * model.layers == stats.sparse_calls
            assert stats.density == 1.0 and stats.work >= 1.0
        assert len(handle._run.sessions._now) == 2
        with pytest.raises(esa.EsaError, match="recording holds one size"), torch.no_grad():
            handle.remove()
            with esa.apply(model.model, sparse(), steps=1, record=True):
                model()
                model(**short)


@pytest.mark.parametrize("name", ["flux", "qwen_padded", "mochi"])
def test_inference_mode(name):
    """Tensors made in it have no version counter."""
    model = model_minis.make(name)
    want = model()
    with torch.inference_mode(), esa.apply(model.model, sparse(budget=1.0)) as handle:
        inputs = {key: x.clone() if torch.is_tensor(x) else x for key, x in model.inputs.items()}
        for _ in range(2):
            assert difference(model(**inputs), want) <= EXACT
        if name == "flux":                      # other positions are read anew
            inputs["img_ids"] = inputs["img_ids"].clone().view(15, 20, 3).transpose(0, 1).reshape(-1, 3)
            inputs["img_ids"] = inputs["img_ids"][:, [0, 2, 1]]
            model(**inputs)
            assert handle._run.geometry.grid == (1, 20, 15)


def test_what_cannot_work_is_said():
    model = model_minis.make("flux")
    with esa.apply(model.model, sparse()), pytest.raises(esa.EsaError, match="called without img_ids"):
        model(img_ids=None)
    places = model.inputs["img_ids"].clone()
    places[3, 1] = 5
    with esa.apply(model.model, sparse()), pytest.raises(esa.EsaError, match="rows and columns only; img_ids"):
        model(img_ids=places)
    model = model_minis.make("skyreels")
    model.model._set_ar_attention(3)
    with esa.apply(model.model, sparse()), pytest.raises(ValueError, match="attention mask where this model has none"):
        model()
    model = model_minis.make("ltx")
    mask = torch.ones(2, 1, 360)
    with esa.apply(model.model, sparse()):
        model()
        attn = model.model.transformer_blocks[0].attn1
        with pytest.raises(esa.EsaError, match=r"masks of valid keys.*this call has torch.float32 \(2, 2, 1, 360\)"):
            attn(torch.zeros(2, 360, 64), None, mask)
        with pytest.raises(ValueError, match="attends 7 keys with 360 queries: this is not self-attention"):
            attn(torch.zeros(2, 360, 64), torch.zeros(2, 7, 64))


def test_context_parallelism_needs_video_alone(monkeypatch):
    """Each process would hold a part of the text and a part of the image: not the order that blocks are cut in."""
    model = model_minis.make("flux")
    with esa.apply(model.model, sparse()) as handle:
        run, words = handle._run, "under context parallelism in Flux: its attention has text beside the video"
        monkeypatch.setattr(run, "_parallel", lambda: "two processes")
        with pytest.raises(esa.EsaError, match=words):
            model()


def test_processors_that_cannot_be_borrowed():
    from esa.diffusers.families.borrow import borrow

    class Weights(torch.nn.Module):
        def __call__(self, attn):
            return attn

    class Other:
        def __call__(self, attn):
            return attn

    class Causal:
        def __call__(self, attn, q):
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    for cls, words in ((Weights, "has weights of its own"), (Other, "calls neither dispatch_attention_fn nor"),
                       (type("Built", (), {"__call__": len}), "its source cannot be read")):
        with pytest.raises(ValueError, match=f"cannot lead the attention of {cls.__name__} to itself: .*{words}"):
            borrow(cls)
    assert borrow(Causal) is borrow(Causal)
    with pytest.raises(ValueError, match="Causal asks for attention that is causal"):
        borrow(Causal)(torch.tensor(0), 0, Causal())(None, torch.zeros(1, 2, 40, 8))


@pytest.mark.parametrize("name", ["wan_vace", "ltx", "flux", "hunyuan_15"])
def test_masks_from_a_recording(name, tmp_path):
    """Recorded in the order that each call applies, and used again: the masks are those of the recording, call by
    call."""
    model = model_minis.make(name)
    recorded, masks = str(tmp_path / "recording"), str(tmp_path / "masks")
    config = sparse(selector="entropy")
    with esa.apply(model.model, config, steps=2, record=True) as handle:
        want = [model.at(t) for t in (900, 300)]
        handle.save_recording(recorded)
    assert difference(want[0], model.at(900)) <= EXACT
    esa.build_mask_file(masks, [recorded], budgets=(0.4, 1.0), warmup_frac=0.0, dense_first_layer=False)
    with esa.apply(model.model, config.replace(masks=masks, budget=1.0), steps=2) as handle:
        assert max(difference(a, model.at(t)) for a, t in zip(want, (900, 300))) <= EXACT
    with esa.apply(model.model, config.replace(masks=masks), steps=2) as handle:
        got = [model.at(t) for t in (900, 300)]
        stats = handle.stats()
        assert stats.masks_loaded and not stats.masks_made and stats.sparse_calls == 2 * model.layers
        assert handle._run.session.layout.order == "hilbert" and stats.density < 0.95
    assert 10 * EXACT < max(difference(a, b) for a, b in zip(got, want)) < 1


# ---------------------------------------------------------------- models that are not in the table


@pytest.fixture
def allegro():
    torch.manual_seed(0)
    t, h, w = model_minis.GRID
    model = diffusers.AllegroTransformer3DModel(
        patch_size=2, patch_size_t=1, num_attention_heads=2, attention_head_dim=24, in_channels=4, out_channels=4,
        num_layers=2, cross_attention_dim=48, sample_height=2 * h, sample_width=2 * w, sample_frames=t,
        caption_channels=16)
    rope = tuple((torch.randn(t * h * w, 8), torch.randn(t * h * w, 8)) for _ in range(3))
    places = tuple(x.flatten()[None] for x in torch.meshgrid(*map(torch.arange, (t, h, w)), indexing="ij"))
    inputs = {"hidden_states": model_minis.latents(4), "timestep": torch.tensor([900]),
              "encoder_hidden_states": model_minis.words()[:, None], "image_rotary_emb": (rope, places)}
    yield model_minis.Model("allegro", minis.spread(model), inputs, minis.Layout(grid=model_minis.GRID), 2)
    families._registered.clear()


def describe(**changes):
    esa.register_family(**{
        **dict(name="Allegro", transformer="AllegroTransformer3DModel", attention="transformer_blocks.*.attn1",
               grid=lambda config, inputs: (inputs["hidden_states"].shape[2], inputs["hidden_states"].shape[3] // 2,
                                            inputs["hidden_states"].shape[4] // 2)), **changes})


def test_a_described_model(allegro):
    with pytest.raises(TypeError, match="does not know AllegroTransformer3DModel"):
        esa.apply(allegro.model)
    describe(pipelines=["AllegroPipeline"])
    assert str(esa.supported()[0]) == "Allegro: AllegroPipeline"
    dense, config = allegro(), sparse(selector="rf_v2")
    with esa.apply(allegro.model, sparse(budget=1.0)) as handle:
        assert difference(allegro(), dense) <= EXACT and handle.family == "Allegro"
    with model_minis.reference(allegro, config):
        want = allegro()
    with esa.apply(allegro.model, config):
        assert difference(allegro(), want) <= MASKED < difference(want, dense) / 10
    describe(grid=lambda config, inputs: (3, 10, 11))
    with esa.apply(allegro.model, config), pytest.raises(esa.EsaError, match=r"360 tokens where \(3, 10, 11\)"):
        allegro()
    for wrong in ((3, 10), (3.0, 10, 12), None):
        describe(grid=lambda config, inputs, wrong=wrong: wrong)
        with esa.apply(allegro.model, config), pytest.raises(ValueError, match="Allegro must return three integers"):
            allegro()
    for pattern, words in (("blocks.*.attn1", "Allegro.* has no blocks, where Allegro has its blocks"),
                           ("transformer_blocks.*.attn", r"has no attention modules transformer_blocks\.\*\.attn$")):
        describe(attention=pattern)
        with pytest.raises(ValueError, match=words):
            esa.apply(allegro.model, config)
    describe(grid=lambda config, inputs: (3, 10, 11), text="back")      # now the rest is text, always attended
    with esa.apply(allegro.model, sparse(budget=1.0)) as handle:
        assert difference(allegro(), dense) <= EXACT and handle._run.geometry.text_back == 30


def test_the_page_on_models(allegro):
    """docs/models.md names every class, and its example works."""
    text = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
    for family in families.FAMILIES:
        assert all(f"`{name}`" in text for name in family.transformer_classes), family.name
    example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert len(example.splitlines()) <= 30
    exec(compile(example, "docs/models.md", "exec"), {})
    dense = allegro()
    with esa.apply(allegro.model, sparse(budget=1.0)) as handle:
        assert difference(allegro(), dense) <= EXACT and handle.stats().sparse_calls == 2


@pytest.mark.parametrize("changes,error,words", [
    ({"text": "middle"}, ValueError, "text must be None, 'front' or 'back', not 'middle'"),
    ({"attention": "blocks.attn1"}, ValueError, r"patterns such as 'blocks\.\*\.attn1'.*not 'blocks\.attn1'"),
    ({"grid": (3, 10, 12)}, TypeError, "grid must be a function of config and inputs, not tuple"),
    ({"name": None}, TypeError, "name must be text, not None"),
    ({"transformer": []}, TypeError, r"transformer must be text, or a list of texts, not \[\]"),
    ({"transformer": torch.nn.Linear}, TypeError, "transformer must be text, or a list of texts, not <class"),
    ({"processor": object}, TypeError, "processor must be a subclass of esa.diffusers.families.Processor")])
def test_bad_descriptions(changes, error, words):
    with pytest.raises(error, match=words):
        describe(**changes)
    assert not families._registered
