#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What only a caller with CUDA of its own can show: torch's tensors and streams, CUDA graphs, errors beside torch's own
attention, and that the plan tier allocates nothing. check_torch.py [path of libesa.so]; prints a line per check and
"N passed, N failed"."""
import math
import pathlib
import sys
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "bench"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "bench"))
sys.dont_write_bytecode = True

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import esa_ctypes as esa  # noqa: E402

SELECTORS = {"full": esa.FULL, "entropy": esa.ENTROPY, "rf_v2": esa.RF_V2, "ada_bsa": esa.ADA_BSA, "random": esa.RANDOM}
GRID = (5, 14, 18)
N = 5 * 14 * 18 + 20


class Checks:
    def __init__(self, path):
        self.lib = esa.Library(path)
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        self.ctx = {
            "": esa.Ctx(self.lib, self.stream.cuda_stream), "sm80": esa.Ctx(self.lib, self.stream.cuda_stream,
                                                                            level="sm80")
        }
        self.gen = torch.Generator("cuda").manual_seed(20261115)

    def randn(self, B, H, n, D, dtype, layout="bnsd", gain=1.0):
        if layout == "bsnd":
            return (torch.randn(B, n, H, D, device="cuda", generator=self.gen) * gain).to(dtype).permute(0, 2, 1, 3)
        if layout == "padded":
            return (torch.randn(B, H, n, D + 8, device="cuda", generator=self.gen) * gain).to(dtype)[..., :D]
        return (torch.randn(B, H, n, D, device="cuda", generator=self.gen) * gain).to(dtype)

    def params(self, selector, applied=0, block=128):
        p = self.lib.c.esa_select_params_default(selector)
        p.budget, p.block_q, p.block_k = 0.3, block, block
        p.layout.grid_q[:] = GRID
        p.layout.text_back_q = 20
        p.layout.order, p.layout.order_applied = esa.HILBERT, applied
        return p

    # ---- CUDA graphs: select and attention in one capture, replayed on new data ----

    def check_graph(self, name, level, tail, applied, D, exact):
        ctx = self.ctx[level]
        q, k, v = (self.randn(1, 4, N, D, torch.bfloat16) for _ in range(3))
        o = torch.empty_like(q)
        lse = torch.empty(1, 4, N, 1, device="cuda")
        plan = esa.Plan(ctx, q, k, self.params(SELECTORS[name], applied), tail=tail, exact_rows=exact)
        mask, ws = plan.mask(), torch.empty(plan.workspace, dtype=torch.uint8, device="cuda")
        choose, attend = plan.select(mask, q, k, ws), plan.attention(mask, q, k, v, o, ws, lse)
        choose()
        attend()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            choose()
            attend()
        for _ in range(2):
            for t in (q, k, v):
                t.copy_(self.randn(1, 4, N, D, torch.bfloat16))
            ws.fill_(255)                   # nothing may be left over from the call before
            o.fill_(math.nan)
            graph.replay()
            torch.cuda.synchronize()
            got, got_lse, bits = o.clone(), lse.clone(), mask.bits()
            o.fill_(math.nan)
            ws.fill_(1)
            choose()
            attend()
            torch.cuda.synchronize()
            assert torch.equal(got.view(torch.int16), o.view(torch.int16)), "a replay gives other bits than the calls"
            assert torch.equal(got_lse, lse), "a replay gives another LSE"
            assert (bits == mask.bits()).all(), "a replay gives another mask"
            assert not torch.isnan(got.float()).any(), "not every output was written"
        plan.free()
        mask.free()

    # ---- errors beside torch's own attention in the same precision ----

    def check_error(self, level, shape, layout, dtype, density, gain):
        B, H, Nq, Nk, D, bq, bk = shape
        ctx = self.ctx[level]
        q = self.randn(B, H, Nq, D, dtype, layout, gain)
        k, v = self.randn(B, H, Nk, D, dtype, layout), self.randn(B, H, Nk, D, dtype, layout)
        o, lse = torch.full_like(q, math.nan), torch.full((B, H, Nq, 1), math.nan, device="cuda")
        nq, nk, mask = -(-Nq // bq), -(-Nk // bk), None
        allowed = torch.ones(B, H, Nq, Nk, dtype=torch.bool, device="cuda")
        if density is not None:
            import numpy
            share = torch.rand(B, H, nq, 1, device="cuda",
                               generator=self.gen) * 1.4 - 0.2 if density == "ragged" else density
            kept = torch.rand(B, H, nq, nk, device="cuda", generator=self.gen) < share
            allowed = kept.repeat_interleave(bq, 2)[:, :, :Nq].repeat_interleave(bk, 3)[..., :Nk]
            bits = numpy.ascontiguousarray(numpy.packbits(kept.cpu().numpy(), axis=-1, bitorder="little"))
            mask = ctx.mask_from_bits(bits, B, H, Nq, Nk, bq, bk)
        plan = esa.Plan(ctx, q, k)
        ws = torch.empty(max(64, plan.workspace), dtype=torch.uint8, device="cuda")
        kernel = plan.kernel(mask, q, k, v, o)
        wanted = "sm80" if level or (mask and bq < 128) or torch.cuda.get_device_capability()[0] != 9 else "sm90a"
        assert kernel == wanted, f"kernel {kernel} instead of {wanted}"
        plan.attention(mask, q, k, v, o, ws, lse)()
        torch.cuda.synchronize()
        s = (q.float() @ k.float().transpose(-1, -2)) / math.sqrt(D)
        s = s.masked_fill(~allowed, -math.inf)
        ref_lse = torch.logsumexp(s, -1)
        live = allowed.any(-1)
        ref = torch.where(live[..., None], torch.softmax(s, -1), 0.0) @ v.float()
        own = torch.where(live[..., None], F.scaled_dot_product_attention(q, k, v, attn_mask=allowed), 0)
        error, base = ((x.float() - ref).abs().max().item() for x in (o, own))
        assert error <= 2 * base + 1e-5, f"error {error:.2e}, torch's own {base:.2e}"
        assert torch.equal(torch.isinf(lse[..., 0]), ~live), "LSE of empty rows"
        off = (lse[..., 0][live] - ref_lse[live]).abs().max().item() if live.any() else 0.0
        assert off <= 1e-3 * max(1.0,
                                 ref_lse[live].abs().max().item() if live.any() else 1.0), f"LSE is off by {off:.2e}"
        plan.free()
        if mask:
            mask.free()
        return f"{kernel}, error {error:.1e}, torch's {base:.1e}, LSE off by {off:.1e}"

    # ---- sizes beyond 32 bits and beyond one ranking run, by sampled rows ----

    def check_large(self, H, n, D, block, budget, heads):
        """A random mask made on the GPU, attention over it, and 64 rows of some heads against fp32."""
        import numpy
        need = 4.2 * H * n * D * 2
        if torch.cuda.mem_get_info()[0] < need:
            return f"not run: {need / 1e9:.0f} GB of GPU memory are not free"
        q, k, v = (torch.empty(1, H, n, D, dtype=torch.bfloat16, device="cuda").normal_(generator=self.gen)
                   for _ in range(3))
        o = torch.full_like(q, math.nan)
        p = self.lib.c.esa_select_params_default(esa.RANDOM)
        p.budget, p.block_q, p.block_k = budget, block, 128
        plan = esa.Plan(self.ctx[""], q, k, p)
        mask, ws = plan.mask(), torch.empty(plan.workspace, dtype=torch.uint8, device="cuda")
        plan.select(mask, q, k, ws)()
        plan.attention(mask, q, k, v, o, ws)()
        torch.cuda.synchronize()
        bits, worst = mask.bits(), 0.0
        for h in heads:
            rows = torch.cat([torch.arange(4, device="cuda"), n - 1 - torch.arange(4, device="cuda"),
                              torch.randint(0, n, (56,), device="cuda", generator=self.gen)])
            listed = numpy.unpackbits(bits[0, h][(rows // block).cpu().numpy()], axis=-1,
                                      bitorder="little")[:, :-(-n // 128)]
            allowed = torch.from_numpy(listed).cuda().bool().repeat_interleave(128, 1)[:, :n]
            s = (q[0, h, rows].float() @ k[0, h].float().T) / math.sqrt(D)
            ref = torch.softmax(s.masked_fill(~allowed, -math.inf), -1) @ v[0, h].float()
            error = (o[0, h, rows].float() - ref).abs().max().item()
            assert error < 0.02, f"head {h}: error {error:.2e}"
            worst = max(worst, error)
        assert not torch.isnan(o.sum(-1, dtype=torch.float32)).any(), "not every output was written"
        kernel = plan.kernel(mask, q, k, v, o)
        plan.free()
        mask.free()
        return f"{kernel}, {q.numel() / 2 ** 31:.2f} x 2^31 elements, {bits.shape[2]} rows a head, error {worst:.1e}"

    # ---- streams and memory ----

    def check_two_streams(self):
        """Two contexts on two streams at once, each with its own scratch: neither disturbs the other."""
        jobs = []
        for i in range(2):
            stream = torch.cuda.Stream()
            q, k, v = (self.randn(1, 6, 3000 + 100 * i, 128, torch.bfloat16) for _ in range(3))
            o = torch.empty_like(q)
            ctx = esa.Ctx(self.lib, stream.cuda_stream)
            p = self.lib.c.esa_select_params_default(esa.ENTROPY)
            p.budget = 0.3
            plan = esa.Plan(ctx, q, k, p, tail=esa.POOLED)
            mask, ws = plan.mask(), torch.empty(plan.workspace, dtype=torch.uint8, device="cuda")
            jobs.append((ctx, plan, mask, o, plan.select(mask, q, k, ws), plan.attention(mask, q, k, v, o, ws)))
        torch.cuda.synchronize()
        want = []
        for _, _, _, o, choose, attend in jobs:
            choose()
            attend()
            torch.cuda.synchronize()
            want.append(o.clone())
            o.fill_(math.nan)
        torch.cuda.synchronize()
        for _ in range(30):
            for job in jobs:
                job[4]()
                job[5]()
        torch.cuda.synchronize()
        for job, expected in zip(jobs, want):
            assert torch.equal(job[3].view(torch.int16), expected.view(
                torch.int16)), "two streams at once give other bits than one after the other"
            job[2].free()
            job[1].free()
            job[0].free()

    def check_stream_order(self):
        """Our call sees work queued before it on the same stream, and work queued behind it waits, without a
        synchronisation."""
        q, k, v = (self.randn(1, 8, 4000, 128, torch.bfloat16) for _ in range(3))
        o = torch.empty_like(q)
        plan = esa.Plan(self.ctx[""], q, k)
        ws = torch.empty(max(64, plan.workspace), dtype=torch.uint8, device="cuda")
        call = plan.attention(None, q, k, v, o, ws)
        call()
        torch.cuda.synchronize()
        want, source = o.clone(), q.clone()
        big = torch.randn(8192, 8192, device="cuda")
        for _ in range(5):
            q.zero_()
            o.zero_()
            big @ big                       # keeps the GPU busy while the host runs ahead
            q.copy_(source)
            call()
            got = o.clone()
            o.zero_()
            torch.cuda.synchronize()
            assert torch.equal(got, want), "the order of a stream was not kept"
        plan.free()

    def check_no_allocation(self):
        q, k, v = (self.randn(1, 4, N, 128, torch.bfloat16) for _ in range(3))
        o = torch.empty_like(q)
        plan = esa.Plan(self.ctx[""], q, k, self.params(esa.ENTROPY), tail=esa.POOLED)
        mask, ws = plan.mask(), torch.empty(plan.workspace, dtype=torch.uint8, device="cuda")
        choose, attend = plan.select(mask, q, k, ws), plan.attention(mask, q, k, v, o, ws)
        choose()
        attend()
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        for _ in range(20):
            choose()
            attend()
        torch.cuda.synchronize()
        after = torch.cuda.mem_get_info()[0]
        assert before == after, f"{before - after} bytes of GPU memory were taken"
        plan.free()
        mask.free()

    def check_no_error_left(self):
        """A refused call leaves no CUDA error behind for the next one of torch."""
        q = self.randn(1, 2, 256, 64, torch.bfloat16)
        plan = esa.Plan(self.ctx[""], q, q)
        ws = torch.empty(max(64, plan.workspace), dtype=torch.uint8, device="cuda")
        try:
            plan.attention(None, q, q, q, q, ws)()
            raise AssertionError("o over q was taken")
        except esa.EsaError as error:
            assert "overlaps" in str(error), str(error)
        pointer = esa.C.c_void_p()
        status = self.lib.c.esa_device_alloc(self.ctx[""].ptr, esa.C.byref(pointer), esa.C.c_int64(1 << 50))
        assert status == -5, f"a huge allocation gave {status}"
        torch.ones(4, device="cuda").sum().item()
        plan.free()


def cases(c):
    for level in ("", "sm80"):
        for name in SELECTORS:
            for tail, applied, D, exact in ((esa.NONE, 1, 128, 0), (esa.POOLED, 0, 128, 4), (esa.CENTROID, 0, 64, 0)):
                text = f"{name} tail {esa.TAILS[tail]} applied {applied} D {D} exact rows {exact}"
                yield f"graph {level or 'best'} {text}", c.check_graph, (name, level, tail, applied, D, exact)
        for shape in ((1, 2, 128, 128, 128, 128, 128), (2, 3, 1023, 1025, 64, 128, 128),
                      (1, 4, 3000, 3001, 128, 128, 128), (1, 4, 3000, 2999, 64, 256, 128),
                      (1, 4, 2000, 3001, 128, 128, 64), (1, 2, 700, 900, 64, 64, 64), (1, 12, 4000, 4000, 128, 256,
                                                                                       128)):
            for layout, dtype, density, gain in (("bnsd", torch.bfloat16, None, 1), ("bsnd", torch.bfloat16, "ragged",
                                                                                     1),
                                                 ("padded", torch.float16, 0.4, 1), ("bsnd", torch.bfloat16, 0.2, 4)):
                yield (f"error {level or 'best'} {shape} {layout} {dtype} density {density} gain {gain}", c.check_error,
                       (level, shape, layout, dtype, density, gain))
    yield "more than 4096 rows a head, 128x128", c.check_large, (1, 128 * 4200 + 5, 64, 128, 0.01, (0,))
    yield "more than 4096 rows a head, 64x128", c.check_large, (2, 64 * 4200 + 5, 64, 64, 0.01, (0, 1))
    yield "offsets beyond 2^31 elements", c.check_large, (230, 75600, 128, 128, 0.01, (0, 115, 229))
    yield "two streams", c.check_two_streams, ()
    yield "stream order", c.check_stream_order, ()
    yield "no allocation in the plan tier", c.check_no_allocation, ()
    yield "no CUDA error left behind", c.check_no_error_left, ()


def main():
    if not torch.cuda.is_available():
        sys.exit("check_torch.py: torch sees no GPU on this machine")
    c = Checks(sys.argv[1] if len(sys.argv) > 1 else None)
    passed = failed = 0
    for name, check, args in cases(c):
        try:
            said = check(*args)
            passed += 1
            print(f"ok     {name}{': ' + said if said else ''}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
            if not isinstance(error, (AssertionError, esa.EsaError)):
                traceback.print_exc()
            if "CUDA error" in str(error):
                print("the CUDA context is lost: the rest was not tried", flush=True)
                break
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
