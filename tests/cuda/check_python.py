#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package on a GPU: check_python.py [path of libesa.so [cpu]]. Results beside torch's own attention under
the same mask, torch's current stream, no waiting and no allocation in the steady state, torch.compile, autocast. Prints
a line per check and "N passed, N failed". With "cpu" those checks that need no GPU run on tensors of the CPU, to see
that the script itself is in order."""
import os
import pathlib
import sys
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "python"))
sys.dont_write_bytecode = True
if len(sys.argv) > 1:
    os.environ["ESA_LIB"] = sys.argv[1]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import esa  # noqa: E402

DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cuda"
GRID = (5, 14, 18)
TEXT = 20
N = 5 * 14 * 18 + TEXT
WORDS = {"sparsity": 0.6, "cdf_threshold": 0.9, "txt_len": TEXT, "latent_shape_q": GRID}
TYPES = ("rf_v2", "ada_bsa", "entropy")
# Seconds that the stream is kept busy with while the host enqueues behind it; enqueuing takes milliseconds.
BUSY = 1.0


def qkv(dtype=torch.bfloat16, seed=0, heads=4):
    g = torch.Generator(DEVICE).manual_seed(seed)
    return tuple(torch.randn(2, heads, N, 64, device=DEVICE, generator=g).to(dtype) for _ in range(3))


def near(out, q, k, v, mask, what):
    """Against float64 over the same values: 2 x what torch's own attention in the same dtype is off, plus one
    rounding of an output."""
    tokens = torch.from_numpy(mask.tokens()).to(DEVICE)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=tokens)
    torchs = (F.scaled_dot_product_attention(q, k, v, attn_mask=tokens).double() - exact).abs().max()
    ours = (out.double() - exact).abs().max()
    assert ours <= 2 * torchs + torch.finfo(
        q.dtype).eps * exact.abs().max(), f"{what}: off by {ours:.2e}, torch by {torchs:.2e}"


def check_results():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        q, k, v = qkv(dtype)
        for sparse_type in TYPES:
            out, mask = esa.sparse_attention(q, k, v, sparse_type=sparse_type, return_mask=True, **WORDS)
            assert 0 < mask.density < 1 and out.device == q.device
            near(out, q, k, v, mask, f"{sparse_type} {dtype}")
            assert torch.equal(out, esa.sparse_attention(q, k, v, sparse_type=sparse_type, **WORDS))
            assert torch.equal(out, esa.sparse_attention(q, k, v, sparse_type=sparse_type, cached_mask=mask, **WORDS))
            turned = esa.sparse_attention(*(x.transpose(1, 2) for x in (q, k, v)), input_layout="BSND",
                                          sparse_type=sparse_type, **WORDS)
            assert torch.equal(out, turned.transpose(1, 2))


def session(**words):
    return esa.Session(esa.EsaConfig(warmup_frac=0, dense_first_layer=False, tail="none", **words), layers=2, steps=3,
                       device=DEVICE, layout=esa.Layout(grid=GRID, text_front=TEXT))


def check_sessions():
    for selector in TYPES:
        s = session(selector=selector, sparsity=0.6)
        s.begin()
        for step in range(3):
            s.step(step)
            for layer in range(2):
                q, k, v = qkv(seed=10 * step + layer)
                out = s.attention(layer, q, k, v)
                mask = esa.select(q, k, s.config, layout=s.layout)
                assert torch.equal(out, esa.attention(q, k, v, mask)), selector
        stats = s.stats()
        assert stats.sparse_calls == 6 and stats.dense_calls == 0 and 0 < stats.density < 1, stats
        assert DEVICE == "cpu" or stats.kernel.startswith(("sm", "simt")), stats.kernel


LAYERS, STEPS, ANCHORS = 6, 5, (0, 3)


def carrying(**words):
    config = esa.EsaConfig(selector="entropy", budget=0.4, warmup_frac=0, dense_first_layer=False, share_branches=True,
                           carry=ANCHORS, **words)
    return esa.Session(config, layers=LAYERS, steps=STEPS, branches=2, device=DEVICE,
                       layout=esa.Layout(grid=GRID, text_front=TEXT))


def moment(layer, step, branch):
    """q, k and v that change a little from step to step."""
    return [a + 0.1 * step * b for a, b in zip(qkv(seed=layer), qkv(seed=100 + layer + 10 * branch))]


def video(s, calls=STEPS * 2 * LAYERS):
    """The outputs of a video, on the host, or those of its first calls."""
    s.begin()
    found = []
    for call in range(calls):
        step, branch, layer = call // LAYERS // 2, call // LAYERS % 2, call % LAYERS
        s.step(step, branch)
        found.append(s.attention(layer, *moment(layer, step, branch)).cpu())
    return found


def check_carry():
    """Call by call: dense at anchors, then the sparse output and the difference of the first branch."""
    for kind in ("e4m3", "bf16"):
        s, kept = carrying(carry_format=kind), {}
        got = iter(video(s))
        for step in range(STEPS):
            for branch in range(2):
                for layer in range(LAYERS):
                    q, k, v = moment(layer, step, branch)
                    if step in ANCHORS and branch == 0:
                        want, mask = esa.attention(q, k, v), esa.select(q, k, s.config, layout=s.layout)
                        carry = esa.Carry(q, k, v, want, mask, tail=s.config.tail, format=kind)
                        kept[layer] = {"mask": mask, "tail": s.config.tail, "carry": carry}
                    else:
                        want = esa.attention(q, k, v, **kept[layer])
                    assert torch.equal(next(got), want.cpu()), (kind, step, branch, layer)
        stats = s.stats()
        anchors = len(ANCHORS) * LAYERS
        assert (stats.anchor_calls, stats.carried_calls) == (anchors, 2 * STEPS * LAYERS - anchors), stats
        assert stats.carry_bytes > 0 == stats.carry_host_bytes, stats


def held():
    """Bytes that torch's allocator has given out."""
    import gc
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def check_carry_memory():
    """Differences lie in torch's allocator and go back to it; what does not fit is streamed, with the same bits;
    without any room a strict session says so, and another one runs without carry."""
    from esa.core.carry import CarryMemory
    moment(0, 0, 0)
    before = held()
    s = carrying()
    s.begin()
    s.step(0)
    s.attention(0, *moment(0, 0, 0))
    grown, resident = held() - before, s.stats()
    assert 0 <= grown - resident.carry_bytes <= 4096 * LAYERS, (grown, resident.carry_bytes)
    want = video(s)
    assert held() == before                     # after the last call of a video
    resident = s.stats()
    assert resident.carry_bytes > 0 == resident.carry_host_bytes
    s.close()
    assert held() == before
    piece, left = resident.carry_bytes // LAYERS, CarryMemory._left
    for words in ({"carry_memory": 0}, {"carry_memory": 4 * piece}, {}):
        CarryMemory._left = left if words else lambda self: -1.0                # a GPU without room
        try:
            s = carrying(**words)
            for _ in range(2):
                assert all(torch.equal(a, b) for a, b in zip(video(s), want)), words
        finally:
            CarryMemory._left = left
        stats = s.stats()
        assert stats.carry_host_bytes > 0 and stats.carried_calls == resident.carried_calls, stats
        assert stats.carry_bytes >= held() - before > 0             # what streaming needs
        s.close()
        assert held() == before, words
    without = video(esa.Session(carrying().config.replace(carry="off", refresh_every=0), layers=LAYERS, steps=STEPS,
                                branches=2, device=DEVICE, layout=s.layout))
    alloc = CarryMemory._alloc
    CarryMemory._alloc = lambda self, user, size: None                          # nor for what it takes to stream
    try:
        try:
            video(carrying())
            raise AssertionError("a strict session ran without memory")
        except esa.EsaMemoryError as error:
            assert "carry needs" in str(error), error
        s = carrying(strict=False)
        # masks are made at other steps without carry, but those of the first step are the same
        assert all(torch.equal(a, b) for a, b in zip(video(s)[:2 * LAYERS], without))
        assert s.stats().carried_calls == s.stats().carry_bytes == 0
    finally:
        CarryMemory._alloc = alloc
    assert held() == before


def check_carry_streams():
    """Videos on other streams than the one on which the memory was taken, and freed while they still run."""
    s = carrying()
    want, most = video(s), STEPS * 2 * LAYERS
    piece = s.stats().carry_bytes // LAYERS
    for finish in (lambda s: s.close(), lambda s: s.trim(), lambda s: None):
        stream, s = torch.cuda.Stream(), carrying()
        assert all(torch.equal(a, b) for a, b in zip(video(s, 7), want))        # takes its memory on this stream
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            assert all(torch.equal(a, b) for a, b in zip(video(s, most - 1), want))
            q, k, v = moment(LAYERS - 1, STEPS - 1, 1)
            torch.cuda._sleep(int(2e8))
            late = s.attention(LAYERS - 1, q, k, v)         # after this one the memory goes back by itself
            finish(s)                                       # and must not serve others before the call has run
        junk = [torch.full((piece,), 255, dtype=torch.uint8, device=DEVICE) for _ in range(4 * LAYERS)]
        torch.cuda.synchronize()
        assert torch.equal(late.cpu(), want[-1]) and len(junk) == 4 * LAYERS


def check_compile():
    def call(q, k, v):
        return esa.sparse_attention(q * 2, k, v, sparse_type="rf_v2", **WORDS) + 1
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            q, k, v = qkv(seed=seed)
            assert torch.equal(compiled(q, k, v), call(q, k, v))


def check_autocast():
    q, k, v = qkv(torch.float32)
    want = esa.sparse_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), sparse_type="rf_v2", **WORDS)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(want, esa.sparse_attention(q, k, v.bfloat16(), sparse_type="rf_v2", **WORDS))


def check_streams():
    """Work goes to torch's current stream: what a stream computes first is what the call behind it sees."""
    q, k, v = qkv()
    want = esa.sparse_attention(q, k, v, sparse_type="rf_v2", **WORDS)
    s = session(selector="rf_v2", sparsity=0.6)
    s.begin()
    s.step(0)
    expected = s.attention(0, q, k, v)
    torch.cuda.synchronize()
    for _ in range(3):
        stream = torch.cuda.Stream()
        late = torch.zeros_like(q)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(2e8))
            late.copy_(q)
            one = esa.sparse_attention(late, k, v, sparse_type="rf_v2", **WORDS)
            two = s.attention(0, late, k, v)
        torch.cuda.synchronize()
        assert torch.equal(one, want) and torch.equal(two, expected)


def check_no_waiting():
    """With the stream kept busy, calls return long before it is free."""
    q, k, v = qkv()
    s = session(selector="entropy", sparsity=0.6)
    s.begin()
    s.step(0)
    carried = carrying()
    carried.begin()
    carried.step(0)
    carried.attention(0, *moment(0, 0, 0))          # an anchor
    tensors = moment(0, 1, 0)
    carried.step(1)
    calls = [lambda t=t: esa.sparse_attention(q, k, v, sparse_type=t, **WORDS)
             for t in (None, *TYPES)] + [lambda: s.attention(0, q, k, v), lambda: carried.attention(0, *tensors)]
    for call in calls:
        call()                                  # the first of a shape allocates
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(int(1e8))
    end.record()
    end.synchronize()
    cycles = int(1e8 * BUSY * 1000 / start.elapsed_time(end))
    for i, call in enumerate(calls):
        torch.cuda._sleep(cycles)
        begin = time.perf_counter()
        call()
        took = time.perf_counter() - begin
        torch.cuda.synchronize()
        assert took < BUSY / 4, f"call {i} took {took:.3f} s behind a stream that was busy for {BUSY} s"


def check_no_allocation():
    q, k, v = qkv()
    for t in TYPES:
        esa.sparse_attention(q, k, v, sparse_type=t, **WORDS)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(20):
        for t in TYPES:
            esa.sparse_attention(q, k, v, sparse_type=t, **WORDS)
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == before


def main():
    print(
        f"esa {esa.__version__}, torch {torch.__version__}, "
        f"{torch.cuda.get_device_name() if DEVICE == 'cuda' else 'CPU'}"
    )
    checks = [check_results, check_sessions, check_carry, check_compile, check_autocast]
    if DEVICE == "cuda":
        checks += [check_carry_memory, check_carry_streams, check_streams, check_no_waiting, check_no_allocation]
    passed = failed = 0
    for check in checks:
        begin = time.perf_counter()
        try:
            with torch.no_grad():
                check()
            passed += 1
            print(f"ok      {check.__name__} ({time.perf_counter() - begin:.1f} s)", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {check.__name__}\n{traceback.format_exc()}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
