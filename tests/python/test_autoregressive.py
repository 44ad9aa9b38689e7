# SPDX-License-Identifier: Apache-2.0
"""Autoregressive Wan: chunks over a growing cache against plain attention under the rectangular mask."""
import minis
import pytest
import torch
import torch.nn.functional as F
from esa import EsaConfig, Layout
from esa.core.functional import select
from esa.sparse_attention_processor import AutoregressiveState, SparseAttentionProcessor, autoregressive_mode

GRID = (2, 6, 8)            # of a chunk: 96 tokens, three blocks of 32
CHUNKS, STEPS = 4, 2
SEED = 5


def chunks_of(mini):
    torch.manual_seed(SEED)
    return [torch.randn_like(mini.inputs["hidden_states"]) for _ in range(CHUNKS)]


def run(mini, config, before=None, **options):
    """Every output of a video of four chunks with two guidance branches, and the state."""
    outputs = []
    text = [mini.inputs["encoder_hidden_states"], torch.zeros_like(mini.inputs["encoder_hidden_states"])]
    with torch.no_grad(), autoregressive_mode(mini.model, config, steps=STEPS, **options) as state:
        if before is not None:
            before(state)
        for latents in chunks_of(mini):
            for step, t in enumerate((900, 400)):
                both = []
                for branch in range(2):
                    state.step(step, branch)
                    both.append(mini.model(latents, torch.tensor([t]), text[branch], return_dict=False)[0])
                outputs += both
                latents = latents - 0.3 * (both[1] + 2.0 * (both[0] - both[1]))
            for branch in range(2):
                state.commit(latents, torch.tensor([0]), text[branch], branch=branch)
    return outputs, state


def reference(config, past_seen):
    """Attention of the chunk by torch in float64, under the mask the selector gives for the same rectangle."""
    def attention(state, layer, query, key, value):
        cache = state._cache(state._branch)
        keys, values = cache.with_past(layer, key, value)
        q, k, v = (x.transpose(1, 2) for x in (query, keys, values))
        frames = keys.shape[1] // (GRID[1] * GRID[2])
        past_seen.append((query.shape[1], keys.shape[1]))
        # layer 0 and the first of two steps are dense (warm-up 0.2)
        sparse = not state._writing and layer > 0 and state._step >= 1
        mask = None
        if sparse:
            layout = Layout(grid=GRID, grid_k=(frames, *GRID[1:]), order=config.order,
                            protect_first_frame=config.protect_first_frame)
            mask = torch.from_numpy(select(q.contiguous(), k.contiguous(), config, layout=layout).tokens())
            assert 0 < mask.float().mean() < 1
        if state._writing:
            cache.put(layer, keys, values)
        return F.scaled_dot_product_attention(q.double(), k.double(), v.double(),
                                              attn_mask=mask).to(query.dtype).transpose(1, 2)
    return attention


@pytest.fixture(scope="module")
def mini():
    return minis.wan(seed=SEED, layers=3, grid=GRID)


@pytest.mark.parametrize("config", [EsaConfig(budget=0.5, block=32, tail="none"),
                                    EsaConfig(selector="rf_v2", budget=0.4, block=32, tail="none"),
                                    EsaConfig(selector="ada_bsa", cdf_threshold=0.8, block=32, tail="none"),
                                    EsaConfig(budget=0.5, block=(64, 32), order="hilbert", tail="none")],
                         ids=lambda c: f"{c.selector}-{c.order}")
def test_chunks_equal_masked_attention(mini, config, monkeypatch):
    got, state = run(mini, config)
    seen = []
    monkeypatch.setattr(AutoregressiveState, "attention", reference(config, seen))
    want, _ = run(mini, config)
    assert len(got) == len(want) == CHUNKS * STEPS * 2
    # the cache grows by a chunk each time
    assert sorted(set(seen)) == [(96, 96 * n) for n in range(1, CHUNKS + 1)]
    for a, b in zip(got, want):
        # float32 against float64 attention; two layers of a sequence of 96 x 384 lie well inside, a wrong block does
        # not.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert state.chunk == CHUNKS and state.frames == CHUNKS * GRID[0]
    for stats in state.history:
        assert stats.fallback_calls == 0
        assert stats.sparse_calls == 2 * 2          # one sparse step of two branches in two layers
        assert 0 < stats.density < 1


def test_dense_chunks_equal_one_causal_sequence(mini):
    """With everything dense, cache and positions must give what one pass over all chunks gives where each sees
    itself and the past."""
    config = EsaConfig(selector="dense")
    chunks, text, t = chunks_of(mini), mini.inputs["encoder_hidden_states"], torch.tensor([0])
    outputs = []
    with torch.no_grad(), autoregressive_mode(mini.model, config, steps=1) as state:
        for latents in chunks:
            state.step(0)
            outputs.append(mini.model(latents, t, text, return_dict=False)[0])
            state.commit(latents, t, text)
    block = torch.arange(CHUNKS).repeat_interleave(GRID[0] * GRID[1] * GRID[2])
    causal = block[:, None] >= block[None, :]

    class Causal(minis.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if function is F.scaled_dot_product_attention and kwargs["key"].shape[2] == len(block):
                kwargs["attn_mask"] = causal
            return function(*args, **kwargs)

    with torch.no_grad(), Causal():
        whole = mini.model(torch.cat(chunks, dim=2), t, text, return_dict=False)[0]
    # float32, sums in another order
    torch.testing.assert_close(torch.cat(outputs, dim=2), whole, rtol=1e-4, atol=1e-5)


def test_window_and_sink(mini):
    config = EsaConfig(budget=0.5, block=32)
    _, state = run(mini, config, sink_frames=1, window_frames=3)
    assert state._cache(0).frames == 4 and state._cache(1).frames == 4
    tokens = 4 * GRID[1] * GRID[2]
    assert all(k.shape[1] == v.shape[1] == tokens for k, v in zip(state._cache(0).keys, state._cache(0).values))
    assert state.frames == CHUNKS * GRID[0]             # positions go on counting
    # What stays: the very first frame, and the last three.
    _, whole = run(mini, config)
    first = GRID[1] * GRID[2]
    torch.testing.assert_close(state._cache(0).keys[0][:, :first], whole._cache(0).keys[0][:, :first])


def test_model_is_restored(mini):
    before = dict(mini.model.attn_processors)
    want = mini()
    with pytest.raises(RuntimeError, match="stop"), autoregressive_mode(mini.model, steps=4):
        assert any(isinstance(p, SparseAttentionProcessor) for p in mini.model.attn_processors.values())
        raise RuntimeError("stop")
    assert dict(mini.model.attn_processors) == before
    torch.testing.assert_close(mini(), want, rtol=0, atol=0)


def test_second_video(mini):
    config = EsaConfig(budget=0.5, block=32)
    first = run(mini, config)[0]
    with torch.no_grad(), autoregressive_mode(mini.model, config, steps=STEPS) as state:
        latents, text = chunks_of(mini)[0], mini.inputs["encoder_hidden_states"]
        state.commit(latents, torch.tensor([0]), text)
        state.reset()
        state.step(0)
        again = mini.model(latents, torch.tensor([900]), text, return_dict=False)[0]
    torch.testing.assert_close(again, first[0], rtol=0, atol=0)


@pytest.mark.parametrize("wrong, words", [
    (lambda m: autoregressive_mode(minis.cogvideox().model, steps=4), "takes a WanTransformer3DModel"),
    (lambda m: autoregressive_mode(m.model, EsaConfig(masks="x"), steps=4), "cached masks"),
    (lambda m: autoregressive_mode(m.model, steps=0), "steps must be at least 1"),
    (lambda m: autoregressive_mode(m.model, EsaConfig(kernel="fa4"), steps=1), "own kernels"),
])
def test_refusals(mini, wrong, words):
    with pytest.raises((ValueError, TypeError), match=words), wrong(mini):
        pass


def test_wrong_use(mini):
    with autoregressive_mode(mini.model, EsaConfig(budget=0.5, block=32), steps=2) as state:
        with pytest.raises(ValueError, match="steps 0 to 1"):
            state.step(2)
        with pytest.raises(ValueError, match="branch 2"):
            state.step(0, 2)
        with pytest.raises(RuntimeError, match="forward only"):
            mini.model(**mini.inputs)
