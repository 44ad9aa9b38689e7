# SPDX-License-Identifier: Apache-2.0
"""esa.apply computes what it says: nothing changes at density 1, and below it the model is the one with masked
attention."""
import esa
import minis
import pytest
import torch

FAMILIES = list(minis.MAKERS)
# A forward in float32 against one with attention in float64; activations are of order 1, two layers deep.
EXACT, MASKED = 1e-5, 1e-4


@pytest.fixture(scope="module", params=FAMILIES)
def mini(request):
    return minis.MAKERS[request.param]()


def sparse(**settings):
    return esa.EsaConfig(**{
        "block": minis.BLOCK, "warmup_frac": 0.0, "dense_first_layer": False, "budget": 0.4, "tail": "none", **settings
    })


def difference(a, b):
    return (a - b).abs().max().item()


@pytest.mark.parametrize("selector", ["entropy", "rf_v2", "ada_bsa", "random"])
@pytest.mark.parametrize("tail", ["none", "pooled", "centroid"])
@pytest.mark.parametrize("order", [None, "raster"])
def test_density_one_changes_nothing(mini, selector, tail, order):
    """In the default order, which is Hilbert (rf_v2: tile), and without any reordering."""
    want = mini()
    with esa.apply(mini.model, sparse(selector=selector, budget=1.0, tail=tail, order=order)) as handle:
        got = mini()
        assert handle.stats().sparse_calls == mini.layers and handle.stats().density == 1.0
    assert difference(got, want) <= EXACT


def test_dense_selector_changes_nothing(mini):
    want = mini()
    with esa.apply(mini.model, sparse(selector="dense")) as handle:
        assert difference(mini(), want) <= EXACT
        assert handle.stats().dense_calls == mini.layers


@pytest.mark.parametrize("selector", ["entropy", "rf_v2", "ada_bsa", "random"])
@pytest.mark.parametrize("tail", ["none", "pooled", "centroid"])
def test_sparse_equals_masked_attention(mini, selector, tail):
    config = sparse(selector=selector, tail=tail)
    dense = mini()
    with minis.reference(mini, config):
        want = mini()
    with esa.apply(mini.model, config) as handle:
        got = mini()
        stats = handle.stats()
    assert stats.sparse_calls == mini.layers and stats.fallback_calls == 0
    assert 0.3 < stats.density < 0.75           # asked 0.4; text and ada_bsa's rows keep more
    assert difference(got, want) <= MASKED
    assert difference(got, dense) > 10 * MASKED, "the mask must matter, or this test shows nothing"


@pytest.mark.parametrize("order,window", [("raster", None), ("tile", None), ("tile3d", (1, 5, 4)), ("hilbert", None)])
@pytest.mark.parametrize("protect", [False, True])
def test_orders(mini, order, window, protect):
    config = sparse(order=order, window=window, protect_first_frame=protect, tail="pooled")
    with minis.reference(mini, config):
        want = mini()
    with esa.apply(mini.model, config):
        assert difference(mini(), want) <= MASKED


@pytest.mark.parametrize("family", FAMILIES)
def test_default_blocks_and_incomplete_ends(family):
    """256 x 128 blocks over a length that no block divides."""
    mini = minis.MAKERS[family](grid=(3, 13, 17), layers=1)
    config = sparse(block=None, budget=0.5, tail="pooled")
    with minis.reference(mini, config):
        want = mini()
    with esa.apply(mini.model, config):
        assert difference(mini(), want) <= MASKED


@pytest.mark.parametrize("family", FAMILIES)
def test_first_layer_and_listed_layers_are_dense(family):
    mini = minis.MAKERS[family](**({"single_layers": 2} if family == "hunyuan" else {"layers": 3}))
    assert mini.layers == 3
    config = sparse(dense_first_layer=True, dense_layers=(2,))
    with minis.reference(mini, config, dense_layers=(0, 2)):
        want = mini()
    with esa.apply(mini.model, config) as handle:
        assert difference(mini(), want) <= MASKED
        assert [handle.stats(layer=i).sparse_calls for i in range(3)] == [0, 1, 0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(family, dtype):
    """Against the same model in the same precision: rounding of two different summation orders, bounded by a few ulp
    of order-1 values."""
    mini = minis.MAKERS[family]()
    mini.model.to(dtype)
    inputs = {
        k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() and k not in ("timestep", "guidance") else v
        for k, v in mini.inputs.items()
    }
    want = mini(**inputs)
    with esa.apply(mini.model, sparse(budget=1.0)):
        got = mini(**inputs)
    assert got.dtype == want.dtype
    # Eight roundings of values up to 4 (eps is 2^-8 and 2^-11 relative) on the way through two layers.
    assert difference(got.float(), want.float()) <= 8 * 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast(family):
    mini = minis.MAKERS[family]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = mini()
        with esa.apply(mini.model, sparse(budget=1.0)):
            got = mini()
    assert difference(got.float(), want.float()) <= 8 * 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("family", FAMILIES)
def test_orders_are_applied_once_around_the_stack(family):
    """Attention is told that its tokens stand in order already; between embedding and last projection they do."""
    mini = minis.MAKERS[family]()
    seen = []
    with esa.apply(mini.model, sparse(selector="rf_v2", tail="pooled")) as handle:
        run = handle._run
        assert run.reorders
        attend = run.attention

        def listening(layer, *tensors):
            seen.append(run.session.layout.order_applied if run.session is not None else None)
            return attend(layer, *tensors)
        run.attention = listening
        mini()
        assert run.session.layout.order_applied and run.session.layout.order == "tile"
    with esa.apply(mini.model, sparse()) as handle:                 # Hilbert unless another order is asked for
        mini()
        assert handle._run.reorders and handle._run.session.layout.order == "hilbert"
    with esa.apply(mini.model, sparse(order="raster")) as handle:
        assert not handle._run.reorders and not mini.model.proj_out._forward_hooks
    assert len(seen) == mini.layers and not mini.model.proj_out._forward_hooks


def test_orders_with_a_timestep_per_token():
    """Wan 2.2's TI2V model gives every token a timestep of its own: they must move with the tokens."""
    mini = minis.wan()
    times = torch.arange(360, dtype=torch.float32)[None] * 2
    for config in (sparse(budget=1.0, order="hilbert"), sparse(order="tile3d", window=(1, 5, 4), tail="pooled")):
        if config.density == 1.0:
            want = mini(timestep=times)
        else:
            with minis.reference(mini, config):
                want = mini(timestep=times)
        with esa.apply(mini.model, config):
            assert difference(mini(timestep=times), want) <= MASKED
