# SPDX-License-Identifier: Apache-2.0
"""Carried differences: esa.Carry, sessions that carry, and the memory that torch gives them."""
import ctypes as C
import math
import types

import esa
import numpy as np
import pytest
import torch
from esa import EsaConfig, Layout, Session
from esa.compat.original_masks import TensorWriter
from esa.core import carry as carry_module
from esa.core import structs as T
from esa.core import tensor as X
from esa.core.carry import CarryMemory
from esa.core.context import Context

GRID, HEADS, D, BLOCK = (4, 8, 8), 2, 16, 32
TOKENS = math.prod(GRID)
ONE = EsaConfig(selector="entropy", budget=0.4, block=BLOCK, warmup_frac=0, dense_first_layer=False)
PLAIN = ONE.replace(order="hilbert")


def qkv(seed, tokens=TOKENS, batch=1):
    return torch.randn(3, batch, HEADS, tokens, D, generator=torch.Generator().manual_seed(seed)) * 1.5


def step_of(seed, step):
    """q, k and v that change a little from step to step."""
    return qkv(seed) + 0.1 * step * qkv(seed + 1)


def session_of(config, steps=6, **more):
    return Session(config, **{"layers": 1, "steps": steps, "layout": Layout(grid=GRID), "device": "cpu", **more})


def run(session, seed, steps=range(6), branches=(0,)):
    """Outputs by (step, branch)."""
    session.begin()
    out = {}
    for step in steps:
        for branch in branches:
            session.step(step, branch)
            out[step, branch] = session.attention(0, *step_of(seed + 100 * branch, step))
    return out


# ---------------------------------------------------------------- single calls

@pytest.mark.parametrize(("kind", "tolerance"), [("e4m3", 2 ** -4), ("bf16", 2 ** -8)])
@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_one_call(seed, kind, tolerance, layout):
    """The sum is the dense output again, but for the rounding of the difference: half a step of the format, of the
    largest element of a row at most."""
    q, k, v = qkv(seed, tokens=150, batch=2)
    if layout == "BSND":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    words = {"tail": "pooled", "input_layout": layout}
    mask = esa.select(q, k, ONE, input_layout=layout)
    dense = esa.attention(q, k, v, input_layout=layout)
    before = dense.clone()
    carry = esa.Carry(q, k, v, dense, mask, format=kind, **words)
    assert torch.equal(dense, before)                   # MAKE leaves it as it is
    sparse = esa.attention(q, k, v, mask, **words)
    both, lse = esa.attention(q, k, v, mask, carry=carry, return_lse=True, **words)
    d = dense - sparse
    assert d.abs().max() > 0.01
    assert ((both - dense).abs() <= tolerance * d.abs().amax(-1, keepdim=True) + 1e-6).all()
    assert torch.equal(lse, esa.attention(q, k, v, mask, return_lse=True, **words)[1])
    rows = 2 * HEADS * 150
    assert carry.bytes == rows * D * (2 if kind == "bf16" else 1) + (0 if kind == "bf16" else 4 * rows)
    assert repr(carry) == f"<esa.Carry 2x{HEADS}x150x{D}, {kind}, {carry.bytes} bytes>"


def test_one_call_of_numpy(seed):
    q, k, v = (x.numpy() for x in qkv(seed))
    mask, dense = esa.select(q, k, ONE), esa.attention(q, k, v)
    carry = esa.Carry(q, k, v, dense, mask)
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    want = esa.attention(*tensors, mask, carry=esa.Carry(*tensors, torch.from_numpy(dense), mask))
    assert np.array_equal(esa.attention(q, k, v, mask, carry=carry), want.numpy())


def test_a_carry_of_one_entry_serves_a_batch(seed):
    q, k, v = qkv(seed, batch=3)
    mask = esa.select(q[:1], k[:1], ONE)
    carry = esa.Carry(q[:1], k[:1], v[:1], esa.attention(q[:1], k[:1], v[:1]), mask)
    masks = esa.Mask.from_blocks(np.repeat(mask.blocks(), 3, 0), TOKENS, TOKENS, block=BLOCK)
    flat = esa.Mask.from_blocks(mask.blocks(), TOKENS, TOKENS, block=BLOCK)
    got = esa.attention(q, k, v, masks, carry=carry)
    for i in range(3):
        one = esa.attention(q[i:i + 1], k[i:i + 1], v[i:i + 1], flat, carry=carry)
        assert torch.equal(got[i:i + 1], one)


def test_misuse(seed):
    q, k, v = qkv(seed)
    mask, dense = esa.select(q, k, ONE), esa.attention(q, k, v)
    carry = esa.Carry(q, k, v, dense, mask)
    with pytest.raises(TypeError, match="carry must be an esa.Carry or None, not Tensor"):
        esa.attention(q, k, v, mask, carry=dense)
    with pytest.raises(ValueError, match="mask is NULL: dense attention leaves nothing out"):
        esa.attention(q, k, v, carry=carry)
    with pytest.raises(ValueError, match=r"the carry has shape \[1,2,256,16\], but o has \[1,2,128,16\]"):
        short = tuple(x[:, :, :128] for x in (q, k, v))
        esa.attention(*short, esa.select(*short[:2], ONE), carry=carry)
    with pytest.raises(ValueError, match="format must be one of 'e4m3', 'bf16', not 'int8'"):
        esa.Carry(q, k, v, dense, mask, format="int8")
    with pytest.raises(ValueError, match="q has dtype float32 and dense bfloat16"):
        esa.Carry(q, k, v, dense.bfloat16(), mask)
    with pytest.raises(ValueError, match="dense must be a torch tensor or a numpy array, not NoneType"):
        esa.Carry(q, k, v, None, mask)
    with pytest.raises(ValueError, match="requires gradients"):
        esa.Carry(q, k, v, dense.requires_grad_(), mask)


# ---------------------------------------------------------------- sessions

@pytest.mark.parametrize("kind", ["e4m3", "bf16"])
def test_a_session_carries(seed, kind):
    """Call by call: dense at anchors, then the sparse output with the mask and the difference of the anchor."""
    config = PLAIN.replace(carry=[0, 3], carry_format=kind)
    session = session_of(config)
    out = run(session, seed)
    kept = {}
    for step in range(6):
        q, k, v = step_of(seed, step)
        if step in (0, 3):
            want = esa.attention(q, k, v)
            mask = esa.select(q, k, PLAIN, layout=Layout(grid=GRID))
            kept = {"mask": mask, "carry": esa.Carry(q, k, v, want, mask, tail=config.tail, format=kind)}
        else:
            want = esa.attention(q, k, v, tail=config.tail, **kept)
        assert torch.equal(out[step, 0], want), step
    total, anchor, second = session.stats(), session.stats(step=3), session.stats(step=5)
    assert (total.calls, total.sparse_calls) == (6, 6)
    assert (total.anchor_calls, total.carried_calls, total.masks_made) == (2, 4, 2)
    assert total.carry_age == 1.5 and second.carry_age == 2 and math.isnan(anchor.carry_age)
    assert anchor.anchor_calls == 1 and anchor.work > 1 and second.work < 0.6
    rows = HEADS * TOKENS
    assert total.carry_bytes == rows * (D + 4 if kind == "e4m3" else 2 * D) and total.carry_host_bytes == 0


def test_one_branch_for_both(seed):
    """share_branches: the first branch runs dense, the other adds its difference."""
    config = PLAIN.replace(carry=[0], share_branches=True)
    session = session_of(config, branches=2)
    out = run(session, seed, branches=(0, 1))
    total = session.stats()
    assert (total.anchor_calls, total.carried_calls) == (1, 11)
    q, k, v = step_of(seed, 0)
    dense, mask = esa.attention(q, k, v), esa.select(q, k, PLAIN, layout=Layout(grid=GRID))
    carry = esa.Carry(q, k, v, dense, mask, tail=config.tail)
    other = esa.attention(*step_of(seed + 100, 0), mask, tail=config.tail, carry=carry)
    assert torch.equal(out[0, 0], dense) and torch.equal(out[0, 1], other)
    apart = session_of(config.replace(share_branches=False), branches=2)
    run(apart, seed, branches=(0, 1))
    assert apart.stats().anchor_calls == 2 and apart.stats().carry_bytes == 2 * total.carry_bytes


def test_settings_that_carry_nothing(seed):
    """The former default: nothing of carry is left, masks are made early and two rows of a block are exact."""
    session = session_of(EsaConfig(carry="off", block=BLOCK), steps=8)
    plain = session_of(EsaConfig(work=0.44, refresh_every="early", order_every="early", exact_rows=2, block=BLOCK),
                       steps=8)
    out, want = run(session, seed, range(8)), run(plain, seed, range(8))
    assert all(torch.equal(out[key], want[key]) for key in want)
    stats = session.stats()
    assert (stats.anchor_calls, stats.carried_calls, stats.carry_bytes) == (0, 0, 0) and math.isnan(stats.carry_age)
    assert stats.work_asked == 0.44 and stats.masks_made == 4
    # too short to carry: the default is the same
    assert session_of(EsaConfig(block=BLOCK), steps=2).stats().work_asked == 0.44


def test_by_itself(seed):
    """The default carries as often as the library says, for the work of its preset."""
    steps = 24                                      # enough for less work than without carry
    config = EsaConfig(block=BLOCK)
    anchors = config.anchors(steps, branches=1)
    assert config.anchors(12, branches=1) == () != config.anchors(12)       # one branch pays for the whole step
    session = session_of(config, steps=steps)
    run(session, seed, range(steps))
    stats = session.stats()
    assert stats.anchor_calls == stats.masks_made == len(anchors) > 0
    assert stats.carried_calls == steps - stats.anchor_calls and stats.work_asked == config.work_for(steps, 1) < 0.44
    made = [session.stats(step=i).anchor_calls for i in range(steps)]
    assert made == [int(i in anchors) for i in range(steps)]


@pytest.mark.parametrize("change", ["video", "size", "lengths"])
def test_dropped(seed, change):
    """A difference that does not belong to a call any more is not added."""
    config = PLAIN.replace(carry=[0], order="raster")
    used, fresh = (session_of(config, layout=None) for _ in range(2))
    other = qkv(seed + 50, tokens=TOKENS if change != "size" else 224)
    words = {"kv_len": [200]} if change == "lengths" else {}
    used.begin()
    used.step(0)
    used.attention(0, *qkv(seed))
    if change == "video":
        used.begin()
    fresh.begin()
    for session in (used, fresh):
        session.step(2)
    got, want = used.attention(0, *other, **words), fresh.attention(0, *other, **words)
    # an anchor: the difference of the other call has no part in it, nor in what follows
    assert torch.equal(got, want) and torch.equal(want, esa.attention(*other, **words))
    for session in (used, fresh):
        session.step(3)
    assert torch.equal(used.attention(0, *(other * 1.1), **words), fresh.attention(0, *(other * 1.1), **words))
    assert used.stats(step=2).anchor_calls == 1 and used.stats(step=3).carried_calls == 1


def test_no_room(seed):
    """A strict session says so, another one runs without."""
    config = PLAIN.replace(carry=[0], carry_memory=1000)
    session = session_of(config)
    session.begin()
    session.step(0)
    with pytest.raises(esa.EsaMemoryError, match="carry needs .* bytes for each of 1 layers"):
        session.attention(0, *qkv(seed))
    loose = session_of(config.replace(strict=False))
    without = session_of(PLAIN.replace(refresh_every=0))
    out, want = run(loose, seed), run(without, seed)
    assert all(torch.equal(out[key], want[key]) for key in want)
    assert loose.stats().anchor_calls == loose.stats().carried_calls == loose.stats().carry_bytes == 0
    assert loose.stats().sparse_calls == 6
    fits = session_of(config.replace(carry_memory="1M"))
    run(fits, seed)
    assert fits.stats().carried_calls == 5


@pytest.mark.parametrize("anchors", [0, 4])
def test_quality_of_a_plan(tmp_path, anchors):
    """What a curve with anchors says, no run without them reaches."""
    about = {"format": "esa.plan", "format_version": 1, "model": "", "config_hash": "", "prompts": 1,
             "selector": T.SELECTORS["error"], "order": T.ORDERS["adaptive"], "tail": T.TAILS["levels"], "block_q": 64,
             "block_k": 64, "anchors": anchors}
    tensors = {"sigma": [1 - i / 8 for i in range(8)], "density": [0.25, 0.5], "error": [[[2.0, 1.0]] * 8],
               "weight": [[1.0] * 8], "quality.work": [0.3, 0.6], "quality.psnr": [30.0, 50.0],
               "quality.spread": [1.0, 1.0]}
    path = tmp_path / "plan"
    with TensorWriter(str(path)) as writer:
        for key, value in about.items():
            writer.metadata(key, str(value))
        values = {name: torch.tensor(value, dtype=torch.float64) for name, value in tensors.items()}
        for name, value in values.items():
            writer.declare(name, 3, tuple(value.shape))
        for value in values.values():
            writer.write(value)
    plan = esa.WorkPlan(path)
    assert plan.info.anchors == anchors and plan.reach(40) == pytest.approx(0.45)
    config = EsaConfig(quality=40, plan=path, block=BLOCK)
    assert session_of(config, steps=24).stats().work_asked == pytest.approx(0.45)
    off = config.replace(carry="off")
    if anchors:
        for words in (config.replace(refresh_every=2), off):
            with pytest.raises(ValueError, match=r"quality is 40 dB, but the curve of .*plan was measured with carry"):
                session_of(words, steps=24)
        with pytest.raises(ValueError, match=r".4 anchors., and this run has none: turn carry on, or give a work"):
            session_of(config, steps=3)
        off = off.replace(work=0.45, plan=path)
    assert session_of(off, steps=8).stats().work_asked == pytest.approx(0.45)


def test_memory_goes_back_after_the_last_call(seed):
    """On a GPU; here its memory is a stand-in. As many calls as in earlier steps are a step."""
    config = PLAIN.replace(carry=[0, 3], share_branches=True)
    plain = session_of(config, layers=2, branches=2)
    session = session_of(config, layers=2, branches=2)
    session._memory = types.SimpleNamespace(begin=lambda: None, most=4321)

    def raw(s):
        stats = T.SessionStats(struct_size=C.sizeof(T.SessionStats))
        s._run("esa_session_get_stats", C.byref(stats), -1, -1)
        return stats
    for _ in range(2):
        for s in (plain, session):
            s.begin()
        for step in range(6):
            for branch in range(2):
                outs = []
                for s in (plain, session):
                    s.step(step, branch)
                    outs.append([s.attention(layer, *step_of(seed + layer, step)) for layer in range(2)])
                assert all(torch.equal(a, b) for a, b in zip(*outs))
                last = (step, branch) == (5, 1)
                assert (raw(session).carry_bytes == 0) == last and raw(plain).carry_bytes > 0
        assert session.stats().carry_bytes == 4321 and session.stats().carried_calls == plain.stats().carried_calls
    session.trim()
    plain.trim()
    assert raw(plain).carry_bytes == 0 < plain.stats().carry_bytes
    # a loop with one branch alone
    session.begin()
    for step in range(6):
        session.step(step)
        for layer in range(2):
            session.attention(layer, *step_of(seed + layer, step))
            assert (raw(session).carry_bytes == 0) == ((step, layer) == (5, 1))


def test_refused():
    for words, message in (({"carry": 7}, "carry is 7, expected a number of anchors up to the 6 steps"),
                           ({"carry": [0, 6]}, "anchor 1 is step 6, expected ascending steps within 0 .. 5")):
        with pytest.raises(ValueError, match=message):
            session_of(PLAIN.replace(**words))
    with pytest.raises(esa.EsaError, match="causal attention does not carry"):
        session_of(PLAIN.replace(carry=2, order="raster"), causal=True)


def test_masks_of_a_file(tmp_path, seed):
    """Cached masks carry if they are asked to: masks change at anchors only."""
    record = session_of(PLAIN, record=True)
    run(record, seed)
    record.save_recording(tmp_path / "r")
    esa.build_mask_file(tmp_path / "m", [tmp_path / "r"], budgets=(0.4,), dense_first_layer=False, warmup_frac=0)
    masks = ONE.replace(selector="entropy", masks=tmp_path / "m")
    assert run(session_of(masks), seed) and masks.carry == "off"
    session = session_of(masks.replace(carry=[0, 3]), branches=2)
    out = run(session, seed, branches=(0, 1))
    file, stats = esa.MaskFile(tmp_path / "m"), session.stats()
    assert (stats.anchor_calls, stats.carried_calls, stats.masks_made) == (2, 10, 0)
    q, k, v = step_of(seed, 3)
    dense, mask = esa.attention(q, k, v), file.mask(0, 3, budget=0.4)
    carry = esa.Carry(q, k, v, dense, mask, tail=masks.tail)
    assert torch.equal(out[3, 0], dense)
    for step, branch in ((3, 1), (4, 0), (5, 1)):
        want = esa.attention(*step_of(seed + 100 * branch, step), mask, tail=masks.tail, carry=carry)
        assert torch.equal(out[step, branch], want)


def test_recordings_do_not_carry(tmp_path, seed):
    record = session_of(EsaConfig(selector="error", block=BLOCK, order="hilbert", carry=3), record=True)
    run(record, seed)
    assert record.stats().dense_calls == 6 and record.stats().anchor_calls == 0


# ---------------------------------------------------------------- memory of a GPU

class Tensor:
    """As much of a CUDA tensor as CarryMemory needs."""
    def __init__(self, size):
        self.memory, self.streams = (C.c_char * (size + 512))(), []

    def data_ptr(self):
        return -(-C.addressof(self.memory) // 512) * 512

    def record_stream(self, stream):
        self.streams.append(stream)


def test_memory(monkeypatch):
    made, room = [], [3]

    def empty(size, dtype, device):
        if len(made) == room[0]:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        made.append(Tensor(size))
        assert (dtype, device) == (torch.uint8, torch.device("cuda", 1))
        return made[-1]
    used = [500]
    cuda = types.SimpleNamespace(current_stream=lambda device: f"stream of {device}",
                                 mem_get_info=lambda device: (3000, 10000), memory_reserved=lambda device: 2000,
                                 memory_allocated=lambda device: used[0])
    fake = types.SimpleNamespace(empty=empty, uint8=torch.uint8, device=torch.device, cuda=cuda)
    monkeypatch.setitem(carry_module.sys.modules, "torch", fake)
    memory, careful = CarryMemory(1), CarryMemory(1, spare=0.1)
    monkeypatch.undo()
    alloc, free = (C.cast(p, t) for p, t in zip(memory.pointers, (T.CarryAlloc, T.CarryFree)))
    places = [alloc(None, 1000) for _ in range(3)]
    assert all(p and p % 256 == 0 for p in places) and len(memory) == 3
    assert alloc(None, 1000) is None and len(memory) == 3           # NULL, and nothing is printed
    free(None, places[1], 1000)
    assert len(memory) == 2 and made[1].streams == ["stream of cuda:1"] and made[0].streams == []
    free(None, None, 0)
    free(None, places[0], 1000)
    free(None, places[2], 1000)
    assert len(memory) == 0
    # 3000 + 1500 are free, of which 1000 stay so; but the first three pieces come in any case
    room[0], alloc = 99, C.cast(careful.pointers[0], T.CarryAlloc)
    assert all(alloc(None, 5000) for _ in range(3)) and alloc(None, 3501) is None and alloc(None, 3500)
    used[0] = 600
    assert alloc(None, 3500) is None and len(careful) == 4 and careful.bytes == careful.most == 18500
    free = C.cast(careful.pointers[1], T.CarryFree)
    free(None, next(iter(careful._kept)), 5000)
    assert (careful.bytes, careful.most) == (13500, 18500)
    careful.begin()
    assert careful.most == 13500


def test_freed_after_a_call_that_comes_back(seed):
    """Python's garbage collection may run while the library asks for memory: what it frees waits for the call's end."""
    context = Context()
    q, k, _ = (x.numpy() for x in qkv(seed))
    with context.lock:
        views = [X.view(x) for x in (q, k)]
        ptr, params = C.c_void_p(), esa.core.session.select_params(ONE, Layout())
        context.run(context.lib.c.esa_select, context.ptr, C.byref(ptr), *map(C.byref, views), C.byref(params))
        mask = esa.Mask(context, ptr)
    density = []

    def call():
        mask.__del__()
        info = T.MaskInfo(struct_size=C.sizeof(T.MaskInfo))
        status = context.lib.c.esa_mask_get_info(ptr, C.byref(info))        # it is there
        density.append(info.density)
        return status
    context.run(call)
    assert density[0] == pytest.approx(0.4, abs=0.05) and not ptr and not context.owned
    with pytest.raises(ZeroDivisionError):
        context.run(lambda: 1 // 0)
    assert context._calls == 0
