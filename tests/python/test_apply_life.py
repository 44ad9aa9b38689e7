# SPDX-License-Identifier: Apache-2.0
"""What esa.apply puts into a model comes out again, models do not meet each other, and what cannot work is said in
one message."""
import copy
import threading

import esa
import minis
import pytest
import torch
from esa.diffusers import Recording

FAMILIES = list(minis.MAKERS)
SPARSE = esa.EsaConfig(block=minis.BLOCK, warmup_frac=0.0, dense_first_layer=False, budget=0.4)


def traces(model):
    """Everything of a model that esa.apply touches."""
    return {
        "processors": {n: p
                       for n, p in model.attn_processors.items()}, "hooks": list(model._forward_pre_hooks),
        "attributes": sorted(k for k in model.__dict__ if not k.startswith("__")), "forward": model.forward.__func__
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_remove_leaves_no_trace(family):
    mini = minis.MAKERS[family]()
    before, want = traces(mini.model), mini()
    handle = esa.apply(mini.model, SPARSE)
    assert not torch.equal(mini(), want) and handle.applied
    handle.remove()
    handle.remove()
    assert traces(mini.model) == before and not handle.applied
    assert torch.equal(mini(), want)
    assert handle.stats().sparse_calls == mini.layers           # still readable


@pytest.mark.parametrize("family", FAMILIES)
def test_exceptions_restore(family):
    mini = minis.MAKERS[family]()
    before = traces(mini.model)
    with pytest.raises(KeyError), esa.apply(mini.model, SPARSE):
        raise KeyError("in the middle")
    assert traces(mini.model) == before
    with pytest.raises(RuntimeError), esa.apply(mini.model, SPARSE):
        mini(encoder_hidden_states=torch.zeros(1, 1, 1))        # the model fails inside
    assert traces(mini.model) == before


def test_a_failed_apply_restores():
    mini = minis.wan(layers=3)

    class Strange:
        pass
    mini.model.blocks[1].attn1.processor = Strange()
    before = traces(mini.model)
    with pytest.raises(ValueError, match=r"blocks\.1\.attn1 has the attention processor Strange"):
        esa.apply(mini.model, SPARSE)
    assert traces(mini.model) == before


def test_the_handle_need_not_be_kept():
    mini = minis.wan()
    esa.apply(mini.model, SPARSE)
    import gc
    gc.collect()
    mini()
    assert mini.model._esa_handle.stats().sparse_calls == 2


def test_applying_twice_is_an_error():
    mini = minis.wan()
    with esa.apply(mini.model, SPARSE), pytest.raises(ValueError, match="already applied"):
        esa.apply(mini.model, SPARSE)
    with esa.apply(mini.model, SPARSE):
        mini()


def test_unknown_families_list_the_known():
    from diffusers import DiTTransformer2DModel
    other = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, num_layers=1, sample_size=8)
    with pytest.raises(
            TypeError, match="does not know DiTTransformer2DModel.*register_family.*WanTransformer3DModel.*Flux"):
        esa.apply(other)
    with pytest.raises(TypeError, match="does not know object"):
        esa.apply(object())
    with pytest.raises(TypeError, match="does not know Linear"):
        esa.apply(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"not a name: esa\.models\.load_pipeline\('wan-t2v-1\.3b'\)"):
        esa.apply("wan-t2v-1.3b")

    class Pipeline:
        transformer = None
    with pytest.raises(TypeError, match="this Pipeline was loaded without its transformer"):
        esa.apply(Pipeline())


def test_a_removed_handle_is_not_entered():
    """It would look as if the model ran sparse."""
    mini = minis.wan()
    with esa.apply(mini.model, SPARSE) as handle:
        pass
    with pytest.raises(ValueError, match="this handle was removed.*call esa.apply again"), handle:
        pass
    with esa.apply(mini.model, SPARSE) as handle:
        for step, branch in ((-1, 0), (1.0, 0), (0, "cond")):
            with pytest.raises(ValueError, match="must be an integer of at least 0"):
                handle.pin(step, branch)


def test_bad_settings():
    mini = minis.wan()
    for config, error, text in ((SPARSE.replace(dense_layers=(7, )), ValueError,
                                 "layer 7, the model has layers 0 to 1"), (SPARSE.replace(selector="full"), ValueError,
                                                                           "selector='dense'"),
                                (SPARSE.replace(masks="/nowhere/masks"), esa.EsaFileError,
                                 "/nowhere/masks"), ("entropy", TypeError, "must be an EsaConfig, not str"),
                                (0.5, TypeError, "must be an EsaConfig, not float"), (esa.EsaConfig, TypeError,
                                                                                      "not the class itself")):
        with pytest.raises(error, match=text):
            esa.apply(mini.model, config)
    with pytest.raises(ValueError, match="steps must be an integer"):
        esa.apply(mini.model, SPARSE, steps=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'budget'"):
        esa.apply(mini.model, budget=0.5)
    with pytest.raises(TypeError, match="record must be True, False or an esa.diffusers.Recording, not str"):
        esa.apply(mini.model, SPARSE, record="calibration.safetensors")
    with pytest.raises(ValueError, match="resume goes on with a recording: it needs record=True"):
        esa.apply(mini.model, SPARSE, resume="before")
    with pytest.raises(FileNotFoundError, match="there is no recording '/nowhere/before' to resume"):
        esa.apply(mini.model, SPARSE, record=True, resume="/nowhere/before")
    with pytest.raises(ValueError, match="cannot be recorded apart"):
        esa.apply(minis.cogvideox().model, SPARSE, record=Recording(per_branch=True))
    with esa.apply(mini.model, SPARSE) as handle, pytest.raises(ValueError, match="nothing is recorded"):
        handle.save_recording("x")


def test_a_mask_in_self_attention_is_refused():
    mini = minis.wan()
    attn = mini.model.blocks[0].attn1
    with esa.apply(mini.model, SPARSE):
        mini()
        with pytest.raises(ValueError, match="attention mask"):
            attn(torch.zeros(1, 360, 64), None, torch.ones(1, 1, 1, 360), None)


def test_attention_outside_of_a_forward_is_refused():
    mini = minis.wan()
    with esa.apply(mini.model, SPARSE), torch.no_grad():
        with pytest.raises(esa.EsaError, match="outside of a forward"):
            mini.model.blocks[0].attn1(torch.zeros(1, 360, 64))
        mini()
        with pytest.raises(esa.EsaError, match="attends 17 tokens"):
            mini.model.blocks[0].attn1(torch.zeros(1, 17, 64))


def test_a_processor_that_outlives_its_run():
    mini = minis.wan()
    handle = esa.apply(mini.model, SPARSE)
    kept = mini.model.blocks[0].attn1.processor
    handle.remove()
    del handle
    import gc
    gc.collect()
    mini.model.blocks[0].attn1.set_processor(kept)
    with pytest.raises(RuntimeError, match="esa was removed from this model"):
        mini()


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_come_without(family):
    mini = minis.MAKERS[family]()
    want = mini()
    with esa.apply(mini.model, SPARSE) as handle:
        twin = copy.deepcopy(mini.model)
        sparse = mini()
        calls = handle.stats().calls
        with torch.no_grad():
            with twin.cache_context("cond"):
                assert torch.equal(twin(**mini.inputs, return_dict=False)[0], want)
        assert handle.stats().calls == calls
        with esa.apply(twin, SPARSE) as other, torch.no_grad():
            assert torch.equal(twin(**mini.inputs, return_dict=False)[0], sparse)
            assert other.stats().calls == mini.layers


def test_two_models_do_not_mix():
    """Two models, two configurations, forwards in turn: each as if it were alone."""
    minis_ = [minis.wan(seed=1), minis.wan(seed=2, grid=(2, 9, 7)), minis.hunyuan(seed=3)]
    configs = [
        SPARSE.replace(budget=0.3, refresh_every=10),
        SPARSE.replace(selector="rf_v2", refresh_every=10),
        SPARSE.replace(refresh_every=10)
    ]
    times = (900, 500, 100)
    alone = []
    for mini, config in zip(minis_, configs):
        with esa.apply(mini.model, config, steps=3):
            alone.append([mini.at(t) for t in times])
    handles = [esa.apply(m.model, c, steps=3) for m, c in zip(minis_, configs)]
    together = [[] for _ in minis_]
    for t in times:
        for mini, results in zip(minis_, together):
            results.append(mini.at(t))
    for handle in handles:
        assert handle.videos == 1 and handle.stats().masks_made == handle.layers
        handle.remove()
    assert all(torch.equal(a, b) for one, two in zip(alone, together) for a, b in zip(one, two))


def test_two_models_in_two_threads():
    minis_ = [minis.wan(seed=1), minis.cogvideox(seed=2)]
    alone = []
    for mini in minis_:
        with esa.apply(mini.model, SPARSE, steps=5):
            alone.append([mini.at(900 - 100 * i) for i in range(5)])
    results, errors = [None, None], []

    def work(i):
        try:
            with esa.apply(minis_[i].model, SPARSE, steps=5):
                results[i] = [minis_[i].at(900 - 100 * step) for step in range(5)]
        except Exception as error:      # a thread's exception would be lost
            errors.append(error)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(torch.equal(a, b) for one, two in zip(alone, results) for a, b in zip(one, two))


@pytest.mark.parametrize("family", ["wan", "hunyuan"])
def test_guidance_branches_do_not_mix(family):
    """With masks kept over all steps each branch must keep using the one it made itself."""
    mini = minis.MAKERS[family]()
    other = {
        "encoder_hidden_states": torch.randn_like(mini.inputs["encoder_hidden_states"]),
        "hidden_states": mini.inputs["hidden_states"].flip(-1)
    }
    config = SPARSE.replace(refresh_every=100, tail="none", budget=0.3)
    times, kept = (900, 600, 300), {}

    def forwards():
        out = []
        for t in times:
            for name, changes in (("cond", {}), ("uncond", other)):
                with mini.model.cache_context(name):
                    out.append(mini.at(t, **changes))
        return out

    with esa.apply(mini.model, config, steps=3) as handle:
        got = forwards()
        assert handle.stats().masks_made == 2 * mini.layers

    def attention(layer, q, k, v):
        branch = (mode.calls - 1) // mini.layers % 2
        if (layer, branch) not in kept:
            kept[layer, branch] = minis.make_mask(q, k, config, mini.layout, mini.kv_len)
        return minis.masked_attention(q, k, v, kept[layer, branch], "none", mini.kv_len)
    with minis.ReferenceMode(mini, attention) as mode:
        want = forwards()
    # float32 against float64, as in test_apply_math
    assert max((a - b).abs().max().item() for a, b in zip(got, want)) <= 1e-4
    swapped = {key: kept[key[0], 1 - key[1]] for key in kept}
    assert any((kept[key].blocks() != swapped[key].blocks()).any()
               for key in kept), "the branches' masks must differ, or this shows nothing"


def test_report_says_what_ran():
    mini = minis.wan()
    with esa.apply(mini.model, SPARSE, steps=2) as handle:
        assert handle.stats().calls == 0 and "kernel none" in handle.report()
        mini.at(900)
        mini.at(100)
        lines = handle.report().splitlines()
    assert lines[0].startswith("Wan, 2 layers, kernel ") and "4 sparse at density 0.4" in lines[0]
    assert [line.split(":")[0] for line in lines[1:]] == ["step 0", "step 1"]
    assert repr(handle).startswith("<esa.Handle Wan, removed, EsaConfig(")
