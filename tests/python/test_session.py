# SPDX-License-Identifier: Apache-2.0
"""Sessions from Python: policy and numbers are the library's (tests/session); here that every setting and every
answer gets across."""
import gc
import math

import esa
import numpy as np
import pytest
import torch
from esa import EsaConfig, Layout, Session
from esa.core.context import Context
from torch.nn.functional import scaled_dot_product_attention as sdpa

GRID = (4, 8, 8)
N = 256


def qkv(seed, batch=1, heads=2):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, heads, N, 32, generator=g) for _ in range(3))


def video(session, seed=0, steps=4, layers=3, branches=1, **words):
    """Runs all calls of one video; returns the outputs by (step, branch, layer)."""
    session.begin()
    out = {}
    for step in range(steps):
        for branch in range(branches):
            session.step(step, branch)
            for layer in range(layers):
                out[step, branch, layer] = session.attention(layer, *qkv(seed + 100 * step + 10 * branch + layer),
                                                             **words)
    return out


@pytest.mark.parametrize("selector", ["entropy", "rf_v2", "ada_bsa"])
@pytest.mark.parametrize("tail", ["none", "pooled"])
def test_online(selector, tail, seed):
    config = EsaConfig(selector=selector, budget=0.5, block=32, tail=tail, warmup_frac=0.5)
    layout = Layout(grid=GRID)
    session = Session(config, layers=3, steps=4, branches=2, layout=layout)
    out = video(session, seed, branches=2)
    for (step, branch, layer), o in out.items():
        q, k, v = qkv(seed + 100 * step + 10 * branch + layer)
        mask = None if step < 2 or layer == 0 else esa.select(q, k, config, layout=layout)
        assert torch.equal(o, esa.attention(q, k, v, mask, tail=tail))
    total = session.stats()
    assert (total.calls, total.dense_calls, total.sparse_calls, total.fallback_calls, total.masks_made) == (24, 16, 8,
                                                                                                            0, 8)
    assert total.density_asked == 0.5 and abs(total.density -
                                              0.5) < 0.2 and total.kernel and total.attention_seconds > 0
    assert session.stats(layer=0).sparse_calls == 0 and session.stats(step=3).sparse_calls == 4 and session.stats(
        1, 3).sparse_calls == 2
    assert math.isnan(session.stats(0, 0).density)
    session.begin()
    assert session.stats().calls == 0


def test_layouts_and_arrays(seed):
    config = EsaConfig(selector="rf_v2", sparsity=0.5, block=32, warmup_frac=0, dense_first_layer=False)
    session = Session(config, layers=1, steps=1, layout=Layout(grid=GRID))
    session.begin()
    session.step(0)
    q, k, v = qkv(seed, batch=2)
    o = session.attention(0, q, k, v)
    turned = session.attention(0, *(x.transpose(1, 2) for x in (q, k, v)), input_layout="BSND")
    assert torch.equal(o, turned.transpose(1, 2))
    assert np.array_equal(o.numpy(), session.attention(0, *(x.numpy() for x in (q, k, v))))
    out, lse = torch.empty(2, N, 2, 32), torch.empty(2, 2, N)
    assert session.attention(0, *(x.transpose(1, 2) for x in (q, k, v)), input_layout="BSND", out=out, lse=lse) is out
    assert torch.equal(out, turned) and bool(torch.isfinite(lse).all())
    cross = session.attention(0, q, k[:, :, :77], v[:, :, :77], kind="cross")
    assert (cross - sdpa(q, k[:, :, :77], v[:, :, :77])).abs().max() < 1e-5         # float32 sums in another order
    with pytest.raises(ValueError, match="kind must be one of 'self', 'cross', not 'both'"):
        session.attention(0, q, k, v, kind="both")


def test_where_a_call_writes(tmp_path, seed):
    """out and lse: strides are kept, and what cannot be written is refused before anything runs."""
    session = Session(EsaConfig(selector="dense"), layers=1, steps=1)
    session.begin()
    session.step(0)
    q, k, v = (x.numpy() for x in qkv(seed))
    want = session.attention(0, q, k, v)
    lse, turned = np.zeros((1, 2, N), np.float32), np.zeros((1, N, 2), np.float32)
    session.attention(0, q, k, v, lse=lse)
    session.attention(0, q, k, v, lse=turned.swapaxes(1, 2))
    assert lse.any() and np.array_equal(turned.swapaxes(1, 2), lse)
    np.save(tmp_path / "zeros.npy", np.zeros_like(q))
    np.save(tmp_path / "lse.npy", np.zeros_like(lse))
    frozen, frozen_lse = np.zeros_like(q), np.zeros_like(lse)
    frozen.flags.writeable = frozen_lse.flags.writeable = False
    calls = session.stats().calls
    repeated = np.broadcast_to(np.zeros(32, np.float32), q.shape)
    for out in (frozen, np.load(tmp_path / "zeros.npy", mmap_mode="r"), repeated):
        with pytest.raises(ValueError, match="out is read-only, expected an array that can be written"):
            session.attention(0, q, k, v, out=out)
        assert not out.any()
    for out in (frozen_lse, np.load(tmp_path / "lse.npy", mmap_mode="r")):
        with pytest.raises(ValueError, match="lse is read-only, expected an array that can be written"):
            session.attention(0, q, k, v, lse=out)
        assert not out.any()
    for out, given in ((np.zeros((1, 2, N, 1), np.float32), "4 dimensions"), ([0.0], "list")):
        with pytest.raises(ValueError, match=rf"lse must be .* \[B, heads, tokens\], not {given}"):
            session.attention(0, q, k, v, lse=out)
    assert session.stats().calls == calls
    mapped = np.load(tmp_path / "zeros.npy", mmap_mode="r+")
    assert session.attention(0, q, k, v, out=mapped) is mapped and np.array_equal(mapped, want)


def test_key_lengths(seed):
    """Text at the end of the joint sequence, of different length in each batch entry."""
    config = EsaConfig(budget=1.0, warmup_frac=0, dense_first_layer=False, tail="none")
    session = Session(config, layers=1, steps=1, layout=Layout(grid=(3, 8, 8), text_back=64))
    session.begin()
    session.step(0)
    q, k, v = qkv(seed, batch=2)
    lengths = torch.tensor([256, 200], dtype=torch.int32)
    for _ in range(2):
        o = session.attention(0, q, k, v, kv_len=lengths)
        for b in range(2):
            n = int(lengths[b])
            assert (o[b] - sdpa(q[b], k[b, :, :n], v[b, :, :n])).abs().max() < 1e-5
        lengths[1] = 220                                # read at every call
    assert (session.attention(0, q, k, v) - sdpa(q, k, v)).abs().max() < 1e-5


def test_record_and_cached(tmp_path, seed):
    config = EsaConfig(selector="entropy", block=(64, 32), warmup_frac=0.25)
    words = {"layers": 3, "steps": 4, "layout": Layout(grid=GRID), "model": "test-model", "config_hash": "abc"}
    whole = Session(config, record=True, **words)
    for prompt in range(2):
        dense = video(whole, seed + 1000 * prompt)
        q, k, v = qkv(seed + 1000 * prompt)
        assert torch.equal(dense[0, 0, 0], esa.attention(q, k, v))
    whole.save_recording(tmp_path / "whole.rec")
    first = Session(config, record=True, **words)       # the same in two sittings
    video(first, seed)
    first.save_recording(tmp_path / "half.rec")
    second = Session(config, record=True, **words)
    second.load_recording(tmp_path / "half.rec")
    video(second, seed + 1000)
    second.save_recording(tmp_path / "both.rec")
    for name in ("whole", "both"):
        esa.build_mask_file(tmp_path / f"{name}.pt", [tmp_path / f"{name}.rec"], budgets=(0.5, 0.25), warmup_frac=0.25)
    assert (tmp_path / "whole.pt").read_bytes() == (tmp_path / "both.pt").read_bytes()
    esa.build_mask_file(tmp_path / "longer.pt", [tmp_path / "whole.rec"], budgets=(0.5,), warmup_frac=0.25, steps=8)
    assert esa.MaskFile(tmp_path / "longer.pt").info.steps == 8
    file = esa.MaskFile(tmp_path / "both.pt")
    assert file.budgets == [0.5, 0.25] or file.budgets == [0.25, 0.5]
    assert file.model == "test-model" and file.info.prompts == 2 and (file.info.layers, file.info.steps,
                                                                      file.info.H) == (3, 4, 2)
    assert not file.stored(0, 3) and not file.stored(1, 0) and file.stored(2, 3)
    # the code of the stored importance has steps of 1/48 octave
    assert np.allclose(file.importance(1, 2).sum(-1), 1, atol=1e-2)

    session = Session(EsaConfig(budget=0.25, masks=tmp_path / "both.pt", tail="none", warmup_frac=0.25), **words)
    assert session.mode == "cached"
    out = video(session, seed + 5000)
    q, k, v = qkv(seed + 5000 + 300 + 2)
    assert torch.equal(out[3, 0, 2], esa.attention(q, k, v, file.mask(2, 3, budget=0.25)))
    total = session.stats()
    assert total.masks_made == 0 and total.masks_loaded == total.sparse_calls == 6
    with pytest.raises(ValueError, match="other-model"):
        Session(EsaConfig(masks=tmp_path / "both.pt"), **{**words, "model": "other-model"})
    with pytest.raises(ValueError, match="steps"):
        Session(EsaConfig(masks=tmp_path / "both.pt"), **{**words, "steps": 7})
    Session(EsaConfig(masks=tmp_path / "both.pt", step_map="nearest"), **{**words, "steps": 8})


def test_recorded_errors(tmp_path, seed):
    config = EsaConfig(selector="error", block=32, order="hilbert")
    words = {"layers": 3, "steps": 4, "layout": Layout(grid=GRID), "model": "test-model", "config_hash": "abc"}
    recorder = Session(config, record=True, **words)
    video(recorder, seed)
    recorder.save_recording(tmp_path / "errors.rec")
    esa.build_mask_file(tmp_path / "errors.pt", [tmp_path / "errors.rec"], works=(0.5, 0.35))
    file = esa.MaskFile(tmp_path / "errors.pt")
    assert file.budgets == [0.35, 0.5] and file.info.fine == 4 and file.info.format_version == 2
    assert file.exact_rows == 2 and abs(file.work(0.35) - 0.35) < 0.002
    assert all(0 < file.density(layer, step, budget=0.5) <= 1 for layer in range(3) for step in range(4))
    mask = file.mask(1, 2, budget=0.35)
    assert mask.fine == 4 and mask.selector == "error"
    # Whether one of them has fine blocks depends on the seed.
    masks = [file.mask(layer, step, budget=0.35) for layer in range(3) for step in range(4)]
    assert any((one.levels() == 1).any() for one in masks)

    for amount in ({"budget": 0.35}, {"work": 0.4}):        # the largest stored work that is not above 0.4
        session = Session(EsaConfig(masks=tmp_path / "errors.pt", **amount), **words)
        out = video(session, seed + 5000)
        q, k, v = qkv(seed + 5000 + 200 + 1)
        if file.density(1, 2, budget=0.35) < 1:
            assert torch.equal(out[2, 0, 1], esa.attention(q, k, v, mask, tail="levels", exact_rows=2))
        total = session.stats()
        assert total.work == pytest.approx(file.work(0.35), abs=1e-9)
        assert total.work_asked == pytest.approx(amount.get("work", 0.35))
        assert total.fallback_calls == total.masks_made == 0
    Session(EsaConfig(masks=tmp_path / "errors.pt", work=0.36, exact_rows=2), **words)
    with pytest.raises(ValueError, match="exact_rows is 4, but the works of .* include 2 exact rows"):
        Session(EsaConfig(masks=tmp_path / "errors.pt", work=0.36, exact_rows=4), **words)
    esa.build_mask_file(tmp_path / "none.pt", [tmp_path / "errors.rec"], works=(0.35,), exact_rows=0)
    none = esa.MaskFile(tmp_path / "none.pt")
    assert none.exact_rows == 0 and abs(none.work(0.35) - 0.35) < 0.002
    with pytest.raises(ValueError, match="exact_rows must be an integer of 0 to 16"):
        esa.build_mask_file(tmp_path / "x", [tmp_path / "errors.rec"], works=(0.35,), exact_rows=17)
    with pytest.raises(ValueError, match="quality and plan"):
        EsaConfig(masks=tmp_path / "errors.pt", quality=40, plan="x")
    with pytest.raises(ValueError, match="not both"):
        esa.build_mask_file(tmp_path / "x", [tmp_path / "errors.rec"], works=(0.5,), budgets=(0.5,))


@pytest.mark.parametrize(("block", "groups", "want"), [
    (None, None, (64, 2, 1)), (128, None, (128, 4, 4)), (32, None, (32, 1, 1)), (32, (2, 1), (32, 2, 1)),
    (32, (1, 1), (32, 1, 1))])
def test_groups_of_a_recording(tmp_path, seed, block, groups, want):
    """The file names the blocks and groups that the calls had."""
    config = EsaConfig(selector="error", block=block, order="hilbert", groups=groups)
    recorder = Session(config, record=True, layers=1, steps=1, layout=Layout(grid=GRID))
    video(recorder, seed, steps=1, layers=1)
    recorder.save_recording(tmp_path / "errors.rec")
    esa.build_mask_file(tmp_path / "errors.pt", [tmp_path / "errors.rec"], works=(0.9,))
    info = esa.MaskFile(tmp_path / "errors.pt").info
    assert (info.block_q, info.group_q, info.group_k) == want
    assert info.nq == -(-info.Nq // info.block_q)


def test_strict_sessions_do_not_fall_back(tmp_path, seed):
    config = EsaConfig(warmup_frac=0, dense_first_layer=False)
    short = tuple(x[:, :, :100] for x in qkv(seed))
    strict = Session(config, layers=1, steps=1, layout=Layout(grid=GRID))
    strict.begin()
    strict.step(0)
    with pytest.raises(esa.EsaError, match="layer 0, step 0 would have run dense"):
        strict.attention(0, *short)
    loose = Session(config.replace(strict=False), layers=1, steps=1, layout=Layout(grid=GRID))
    loose.begin()
    loose.step(0)
    assert torch.equal(loose.attention(0, *short), esa.attention(*short))
    assert loose.stats().fallback_calls == 1


def test_ends_in_any_order(tmp_path, seed, monkeypatch):
    """Python finalizes objects that hold each other in any order, so the context may go before what was made with
    it."""
    # as on a GPU, where each session has its own
    monkeypatch.setattr("esa.core.session._context", lambda device: Context())
    config = EsaConfig(block=64, tail="none", warmup_frac=0, dense_first_layer=False)
    words = {"layers": 1, "steps": 1, "layout": Layout(grid=GRID)}
    record = Session(config, record=True, **words)
    video(record, seed, steps=1, layers=1)
    record.save_recording(tmp_path / "r")
    esa.build_mask_file(tmp_path / "m", [tmp_path / "r"], budgets=(0.5,), dense_first_layer=False, warmup_frac=0)
    session = Session(config.replace(masks=tmp_path / "m"), **words)
    context, mask = session._context, session.masks.mask(0, 0, budget=0.5)
    assert len(context.owned) == 3                      # mask file, session, mask
    context.__del__()
    assert not context.owned and not context.ptr and not session._ptr and not session.masks.ptr and not mask.ptr
    for thing in (mask, session.masks, session, context):
        thing.__del__()                                 # and again when they really go
    with pytest.raises(esa.EsaError, match="closed"):
        session.begin()
    record.close()
    record.close()
    assert not record._context.owned
    cycle = Session(config, **words)
    cycle.me = cycle                                    # as hooks on a model make them
    del cycle, record, session, mask, context
    gc.collect()


def test_misuse():
    with pytest.raises(ValueError, match="layers"):
        Session(EsaConfig(), layers=0, steps=1)
    with pytest.raises(ValueError, match="steps must be an integer of at least 1, not '50'"):
        Session(EsaConfig(), layers=1, steps="50")
    with pytest.raises(TypeError, match="model and config_hash must be text, not int"):
        Session(EsaConfig(), layers=1, steps=1, model=14)
    with pytest.raises(ValueError, match="device must be 'cpu', 'cuda' or 'cuda:N', not 'npu:0'"):
        Session(EsaConfig(), layers=1, steps=1, device="npu:0")
    session = Session(EsaConfig(), layers=2, steps=1)
    with pytest.raises(esa.EsaError, match="before esa_session_begin"):
        session.step(0)
    session.begin()
    with pytest.raises(ValueError, match="step is 5 and branch is 0, but the session has 1 steps and 1 branches"):
        session.step(5)
    session.step(0)
    with pytest.raises(ValueError, match="layer"):
        session.attention(7, *qkv(0))
    with session as same:
        assert same is session
    with pytest.raises(esa.EsaError, match="the session was closed"):
        session.begin()


def test_what_is_no_array_or_mask(seed):
    q, k, v = qkv(seed)
    for tensors, name in ((([1.0], k, v), "q"), ((q, None, v), "k"), ((q, k, "v"), "v")):
        with pytest.raises(ValueError, match=f"{name} must be a torch tensor or a numpy array, not "):
            esa.attention(*tensors)
    blocks = np.ones((1, 2, 8, 8), bool)
    with pytest.raises(TypeError,
                       match="mask must be an esa.Mask or None, not ndarray .esa.Mask.from_blocks makes one"):
        esa.attention(q, k, v, blocks)
    with pytest.raises(ValueError, match="recordings must be a list of files, at least one, not 'a.recording'"):
        esa.build_mask_file("masks", "a.recording")
    with pytest.raises(ValueError, match="recordings must be a list of files, at least one"):
        esa.build_mask_file("masks", [])
    with pytest.raises(ValueError, match="budgets must be a list of numbers, not 0.5"):
        esa.build_mask_file("masks", ["a.recording"], budgets=0.5)


def test_two_sessions_do_not_mix(seed):
    configs = [EsaConfig(budget=b, block=32, warmup_frac=0, dense_first_layer=False) for b in (0.25, 0.75)]
    sessions = [Session(c, layers=1, steps=2) for c in configs]
    for s in sessions:
        s.begin()
    for step in range(2):
        for s in sessions:
            s.step(step)
            s.attention(0, *qkv(seed))
    assert [s.stats().density for s in sessions] == [0.25, 0.75]


def test_masks_travel_and_are_saved(tmp_path, seed):
    q, k, v = qkv(seed)
    mask = esa.select(q, k, EsaConfig(block=32, budget=0.5), layout=Layout(grid=GRID, order="hilbert"))
    copy = mask.to("cpu")
    assert np.array_equal(copy.bits(), mask.bits()) and torch.equal(esa.attention(q, k, v, copy),
                                                                    esa.attention(q, k, v, mask))
    count, index = mask.fa4()
    back = esa.Mask.from_fa4(count, index, N, N, block=32, layout=Layout(grid=GRID, order="hilbert"))
    assert np.array_equal(back.blocks(), mask.blocks()) and back.selector == "given"
    assert torch.equal(esa.attention(q, k, v, back), esa.attention(q, k, v, mask))
    mask.save(tmp_path / "one.safetensors")
    assert np.array_equal(esa.MaskFile(tmp_path / "one.safetensors").mask(0, 0, budget=0.5).bits(), mask.bits())
    with pytest.raises(ValueError, match="device must be 'cpu', 'cuda', 'cuda:N' or an ordinal, not 'npu'"):
        mask.to("npu")
    if not torch.cuda.is_available():
        with pytest.raises(esa.EsaError, match=r"plugin|GPU|CUDA"):
            mask.to("cuda:0")
    with pytest.raises(ValueError, match="full_block_cnt must be"):
        esa.Mask.from_fa4(count[:, :, :1], index, N, N, block=32)
