#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks and times every version of the ladder against torch's attention, in one process.

    python3 bench.py check                       correctness on awkward sizes and masks
    python3 bench.py time --json out.json        speedup x realised density over torch's cuDNN attention, interleaved
    python3 bench.py ragged                      heads of different density against uniform rows of the same mean
    python3 bench.py steady                      each version alone for a second: rate, clock, power, tensor-core use
"""
import argparse
import ctypes as C
import functools
import json
import math
import pathlib
import random
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
import shapes  # noqa: E402

NAMES = ("wan-1.3b-720p", "wan-1.3b-480p", "cogvideox-5b", "hunyuan-544p")
SHAPES = {name: shapes.SHAPES[name][:3] for name in NAMES}     # heads, tokens, head dim
DENSITIES = (1.0, 0.5, 0.2, 0.1)


class Args(C.Structure):
    """struct ladder_args of ladder.h"""
    _fields_ = (
        [(n, C.c_void_p) for n in ("q", "k", "v", "o", "lse", "count", "index", "work")]
        + [(n, C.c_int64 * 3) for n in ("q_stride", "k_stride", "v_stride", "o_stride")]
        + [(n, C.c_int32) for n in ("B", "H", "Nq", "Nk", "D", "Bq", "Bk", "cap", "dtype")]
        + [("scale", C.c_float)]
    )


class Mask:
    """count int32 [B,H,nq], index uint16 [B,H,nq,cap] ascending; kept bool [B,H,nq,nk] is the same thing."""

    def __init__(self, kept, Bq, Bk):
        nk = kept.shape[-1]
        self.kept, self.Bq, self.Bk, self.cap = kept, Bq, Bk, nk
        self.count = kept.sum(-1).to(torch.int32).contiguous()
        # a stable sort of "not kept" brings the kept columns to the front, ascending
        order = torch.sort((~kept).to(torch.uint8), dim=-1, stable=True).indices
        self.index = order.to(torch.int16).contiguous()  # the bits of uint16; nk stays small here
        self.density = kept.float().mean().item()


def random_mask(B, H, nq, nk, density, Bq, Bk, gen):
    """Each row keeps its own uniformly random set; density is a number, or a tensor that broadcasts to [B,H,nq,1]."""
    if torch.is_tensor(density):
        keep = (density * nk).round().clamp(1, nk)
    else:
        keep = max(1 if density > 0 else 0, min(nk, round(density * nk)))
    rank = torch.rand(B, H, nq, nk, device="cuda", generator=gen).argsort(-1).argsort(-1)
    return Mask(rank < keep, Bq, Bk)


class Ladder:
    def __init__(self, paths, names):
        libs = [C.CDLL(p) for p in paths.split(",")]
        self.fn = {n: next(getattr(lib, "ladder_" + n) for lib in libs if hasattr(lib, "ladder_" + n)) for n in names}
        self.work = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")

    def args(self, q, k, v, o, lse=None, mask=None, Bq=128, Bk=128):
        B, H, Nq, D = q.shape
        a = Args()
        a.q, a.k, a.v, a.o = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr()
        a.lse = lse.data_ptr() if lse is not None else None
        if mask is not None:
            Bq, Bk = mask.Bq, mask.Bk
            a.count, a.index, a.cap = mask.count.data_ptr(), mask.index.data_ptr(), mask.cap
        a.work = self.work.data_ptr()
        for name, t in (("q_stride", q), ("k_stride", k), ("v_stride", v), ("o_stride", o)):
            setattr(a, name, (C.c_int64 * 3)(*t.stride()[:3]))
        a.B, a.H, a.Nq, a.Nk, a.D, a.Bq, a.Bk = B, H, Nq, k.shape[2], D, Bq, Bk
        a.dtype = 0 if q.dtype == torch.bfloat16 else 1
        a.scale = 1.0 / math.sqrt(D)
        return a

    def call(self, name, a):
        status = self.fn[name](C.byref(a), C.c_void_p(torch.cuda.current_stream().cuda_stream))
        if status:
            raise RuntimeError(f"{name}: status {status}")


# ---- correctness ----

def tensor(B, H, N, D, dtype, layout, gen, gain=1.0):
    if layout == "bsnd":
        x = torch.randn(B, N, H, D, device="cuda", generator=gen) * gain
        return x.to(dtype).permute(0, 2, 1, 3)
    return (torch.randn(B, H, N, D, device="cuda", generator=gen) * gain).to(dtype)


def reference(q, k, v, allowed):
    """fp32 attention and LSE; an empty row is 0 and -inf."""
    s = (q.float() @ k.float().transpose(-1, -2)) / math.sqrt(q.shape[-1])
    s = s.masked_fill(~allowed, float("-inf"))
    lse = torch.logsumexp(s, -1)
    p = torch.where(torch.isinf(lse)[..., None], 0.0, torch.exp(s - lse[..., None]))
    return p @ v.float(), lse


CASES = [  # B, H, Nq, Nk, D, Bq, Bk, density (None: dense call), dtype, layout, gain
    (1, 1, 128, 128, 128, 128, 128, None, "bf16", "bnsd", 1),
    (1, 1, 128, 128, 64, 128, 128, None, "bf16", "bnsd", 1),
    (1, 2, 256, 512, 128, 128, 128, 1.0, "bf16", "bnsd", 1),
    (1, 1, 1, 1, 128, 128, 128, None, "bf16", "bnsd", 1),
    (2, 3, 113, 203, 64, 128, 128, 0.5, "bf16", "bsnd", 1),
    (1, 2, 799, 3, 128, 128, 128, None, "bf16", "bnsd", 1),
    (2, 3, 1023, 1025, 128, 128, 128, 0.4, "bf16", "bsnd", 1),
    (2, 3, 1023, 1025, 64, 128, 128, 0.4, "bf16", "bnsd", 1),
    (1, 2, 1000, 1111, 128, 128, 128, 0.0, "bf16", "bnsd", 1),
    (1, 4, 3000, 3001, 128, 128, 128, "ragged", "bf16", "bnsd", 4),
    (1, 4, 3000, 3001, 64, 128, 128, "ragged", "bf16", "bsnd", 4),
    (1, 4, 3000, 3001, 128, 256, 128, "ragged", "bf16", "bsnd", 1),
    (1, 4, 3000, 3001, 64, 256, 128, "ragged", "bf16", "bnsd", 1),
    (1, 4, 3000, 3001, 128, 128, 64, "ragged", "bf16", "bnsd", 1),
    (1, 4, 3000, 2999, 64, 128, 64, "ragged", "bf16", "bsnd", 1),
    (1, 4, 3000, 3001, 128, 128, 128, "ragged", "f16", "bnsd", 1),
    (1, 4, 3000, 3001, 64, 128, 64, "ragged", "f16", "bsnd", 4),
    (1, 12, 6000, 6000, 128, 128, 128, 0.3, "bf16", "bsnd", 1),
    (1, 16, 6000, 6000, 64, 128, 128, None, "bf16", "bsnd", 1),
]


def check_case(ladder, names, case, gen):
    B, H, Nq, Nk, D, Bq, Bk, density, dtype, layout, gain = case
    dt = torch.bfloat16 if dtype == "bf16" else torch.float16
    q = tensor(B, H, Nq, D, dt, layout, gen, gain)
    k, v = (tensor(B, H, Nk, D, dt, layout, gen) for _ in range(2))
    nq, nk = -(-Nq // Bq), -(-Nk // Bk)
    mask = None
    allowed = torch.ones(B, H, Nq, Nk, dtype=torch.bool, device="cuda")
    if density is not None:
        if density == "ragged":  # every row its own density, some rows empty, some full
            p = torch.rand(B, H, nq, 1, device="cuda", generator=gen) * 1.4 - 0.2
            mask = Mask(torch.rand(B, H, nq, nk, device="cuda", generator=gen) < p, Bq, Bk)
        else:
            mask = random_mask(B, H, nq, nk, density, Bq, Bk, gen)
        allowed = mask.kept.repeat_interleave(Bq, 2)[:, :, :Nq].repeat_interleave(Bk, 3)[..., :Nk]
    ref, ref_lse = reference(q, k, v, allowed)
    own = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    live = allowed.any(-1)
    own = torch.where(live[..., None], own, 0)
    base = (own.float() - ref).abs().max().item()
    bad, ratios = [], {}
    for name in names:
        outs = []
        for _ in range(2):
            o = torch.empty_like(q).fill_(float("nan"))
            lse = torch.full((B, H, Nq), float("nan"), device="cuda")
            ladder.call(name, ladder.args(q, k, v, o, lse, mask, Bq, Bk))
            torch.cuda.synchronize()
            outs.append((o, lse))
        (o, lse), (o2, lse2) = outs
        err = (o.float() - ref).abs().max().item()
        lse_ok = torch.equal(torch.isinf(lse), ~live) and torch.allclose(lse[live], ref_lse[live], atol=2e-3, rtol=1e-4)
        same = torch.equal(o.view(torch.int16), o2.view(torch.int16)) and torch.equal(lse, lse2)
        ok = err <= 2 * base + 1e-5 and lse_ok and same
        if not ok:
            bad.append(f"{name}: err {err:.2e} torch {base:.2e} lse {lse_ok} same bits {same}")
        ratios[name] = err / max(base, 1e-12)
    return base, bad, ratios


def check(ladder, names, cases):
    gen = torch.Generator("cuda").manual_seed(int(time.time()))
    failed = set()
    for case in cases:
        base, bad, ratios = check_case(ladder, names, case, gen)
        print("ok  " if not bad else "FAIL", *case, f"torch {base:.1e}, ours/torch",
              *(f"{n} {r:.2f}" for n, r in ratios.items()), *bad, flush=True)
        failed |= {b.split(":")[0] for b in bad}
    return failed


# ---- speed ----

def timed(fn, reps):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(reps):
        fn()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) / reps


def sdpa(backend, q, k, v):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v)


def make_jobs(ladder, names, shape, densities, flash, Bq, Bk):
    """{(version, density): callable}, masks by density."""
    H, N, D = SHAPES[shape]
    gen = torch.Generator("cuda").manual_seed(7)
    q, k, v = (tensor(1, H, N, D, torch.bfloat16, "bnsd", gen) for _ in range(3))
    o = torch.empty_like(q)
    nq, nk = -(-N // Bq), -(-N // Bk)
    masks = {d: None if d == 1.0 else random_mask(1, H, nq, nk, d, Bq, Bk, gen) for d in densities}
    jobs = {("cudnn", 1.0): lambda: sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v)}
    if flash:
        jobs[("flash", 1.0)] = lambda: sdpa(SDPBackend.FLASH_ATTENTION, q, k, v)
    for d in densities:
        for name in names:
            a = ladder.args(q, k, v, o, None, masks[d], Bq, Bk)
            jobs[(name, d)] = lambda name=name, a=a: ladder.call(name, a)
    return jobs, masks


def time_shape(ladder, names, shape, densities, rounds, flash, Bq, Bk, rest):
    H, N, D = SHAPES[shape]
    jobs, masks = make_jobs(ladder, names, shape, densities, flash, Bq, Bk)
    reps = {j: max(1, math.ceil(8.0 / (fn(), timed(fn, 1))[1])) for j, fn in jobs.items()}
    ms = {j: [] for j in jobs}
    order = list(jobs)
    for _ in range(rounds):
        random.shuffle(order)  # a kernel that follows a cool one finds a higher clock
        for j in order:
            time.sleep(rest)
            ms[j].append(timed(jobs[j], reps[j]))
    rows = []
    base = statistics.median(ms[("cudnn", 1.0)])
    for (name, d), t in ms.items():
        med = statistics.median(t)
        real = 1.0 if d == 1.0 else masks[d].density
        rows.append(dict(shape=shape, version=name, asked=d, density=real, ms=med, ms_min=min(t), ms_max=max(t),
                         tflops=4 * H * N * N * D * real / med / 1e9, ratio=base / med * real))
    return rows


def steady(ladder, names, shape, densities, Bq, Bk):
    """Rate, clock and power after most of a second of nothing but this kernel; use = rate over the tensor cores' at
    that clock."""
    H, N, D = SHAPES[shape]
    jobs, masks = make_jobs(ladder, names, shape, densities, False, Bq, Bk)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for (name, d), fn in jobs.items():
        fn()
        one = timed(fn, 1)
        timed(fn, max(1, int(400 / one)))
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        reps = max(1, int(400 / one))
        a.record()
        for _ in range(reps):
            fn()
        b.record()
        time.sleep(0.1)
        smi = subprocess.run(
            ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader,nounits"],
            capture_output=True, text=True).stdout.strip()
        b.synchronize()
        ms = a.elapsed_time(b) / reps
        real = 1.0 if d == 1.0 else masks[d].density
        rate = 4 * H * N * N * D * real / ms / 1e9
        clock = float(smi.split(",")[0])
        print(f"{shape} {d} {name:8s} {ms:8.3f} ms {rate:6.0f} TF/s  clock,W,C {smi}  "
              f"use {rate * 1e6 / (4096 * sms * clock):.3f}", flush=True)


def ragged(ladder, names, shape, rounds):
    """Heads between density 0.1 and 0.9, rows +-30% around their head, against uniform rows of the same mean."""
    H, N, D = SHAPES[shape]
    gen = torch.Generator("cuda").manual_seed(7)
    q, k, v = (tensor(1, H, N, D, torch.bfloat16, "bnsd", gen) for _ in range(3))
    o = torch.empty_like(q)
    n = -(-N // 128)
    heads = torch.linspace(0.1, 0.9, H, device="cuda")[torch.randperm(H, device="cuda", generator=gen)].view(1, H, 1, 1)
    uneven = random_mask(1, H, n, n, heads * (0.7 + 0.6 * torch.rand(1, H, n, 1, device="cuda", generator=gen)), 128,
                         128, gen)
    even = random_mask(1, H, n, n, uneven.density, 128, 128, gen)
    for name in names:
        a, b = (ladder.args(q, k, v, o, None, m) for m in (uneven, even))
        t = {0: [], 1: []}
        for _ in range(rounds + 1):
            for i, x in enumerate((a, b)):
                t[i].append(timed(functools.partial(ladder.call, name, x), 2))
        ta, tb = (statistics.median(t[i][1:]) for i in (0, 1))
        print(f"{shape} {name}: ragged {ta:.3f} ms at {uneven.density:.4f}, uniform {tb:.3f} ms at {even.density:.4f}, "
              f"loss {100 * (ta / uneven.density / (tb / even.density) - 1):.1f} %", flush=True)


def table(rows, shapes, densities):
    names = list(dict.fromkeys(r["version"] for r in rows))
    print("speedup over cuDNN x realised density (TF/s)")
    print("version".ljust(10) + "".join(f"{s} {d}".rjust(16) for s in shapes for d in densities))
    cell = {(r["shape"], r["version"], r["asked"]): r for r in rows}
    for n in names:
        line = n.ljust(10)
        for s in shapes:
            for d in densities:
                r = cell.get((s, n, d))
                line += (f"{r['ratio']:.3f} ({r['tflops']:.0f})" if r else "-").rjust(16)
        print(line, flush=True)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("what", choices=["check", "time", "steady", "ragged"])
    ap.add_argument("--lib", default="build/libladder.so",
                    help="shared libraries to look for the versions in, comma-separated")
    ap.add_argument("--versions", default="v1,v2,v3,v4,v5,v6,v7")
    ap.add_argument("--shapes", default="480p,cog,720p,hunyuan")
    ap.add_argument("--densities", default=",".join(map(str, DENSITIES)))
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--block", default="128x128")
    ap.add_argument("--flash", action="store_true", help="also time torch's flash backend")
    ap.add_argument("--rest", type=float, default=0.0, help="seconds of idling before each timing")
    ap.add_argument("--first", type=int, default=len(CASES), help="check only the first cases")
    ap.add_argument("--dim", type=int, help="check only this head dim")
    ap.add_argument("--json")
    a = ap.parse_args()
    names = a.versions.split(",")
    ladder = Ladder(a.lib, names)
    if a.what == "check":
        failed = check(ladder, names, [c for c in CASES[: a.first] if a.dim in (None, c[4])])
        print("failed:", sorted(failed) if failed else "none")
        sys.exit(1 if failed else 0)
    Bq, Bk = map(int, a.block.split("x"))
    shapes, densities = a.shapes.split(","), [float(d) for d in a.densities.split(",")]
    if a.what == "steady":
        for s in shapes:
            steady(ladder, names, s, densities, Bq, Bk)
        return
    if a.what == "ragged":
        for s in shapes:
            ragged(ladder, names, s, a.rounds)
        return
    rows = []
    for s in shapes:
        rows += time_shape(ladder, names, s, densities, a.rounds, a.flash, Bq, Bk, a.rest)
        torch.cuda.empty_cache()
        table([r for r in rows if r["shape"] == s], [s], densities)
    if a.json:
        driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                                capture_output=True, text=True)
        head = dict(gpu=torch.cuda.get_device_name(), driver=driver.stdout.strip(), torch=torch.__version__,
                    cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version(), block=a.block,
                    command=" ".join(sys.argv))
        with open(a.json, "w") as f:
            json.dump(dict(head=head, rows=rows), f, indent=1)


if __name__ == "__main__":
    main()
