# SPDX-License-Identifier: Apache-2.0
"""attend.sparse as one Triton kernel that skips what is not kept. Products are sums of three TF32 products, which is as
exact as f32 here; `ready` measures that before the kernel is used."""
import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

CONFIGS = ((64, 64, 4, 2), (64, 32, 4, 1), (64, 64, 8, 1))      # rows, columns, warps, stages
TOLERANCE = 1e-4        # of outputs of size 1: a fortieth of what rounding to bf16 costs


if triton:
    @triton.jit
    def one_level(q, k, v, level, bh, nk, last, m, den, num, WANT: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr,
                  TK: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
        """Adds the columns of the blocks with this level: R columns a block, each for SIZE tokens. WANT -1: all."""
        total = nk * R
        d = tl.arange(0, D)
        for first in range(0, total, TK):
            cols = first + tl.arange(0, TK)
            inside = cols < total
            if WANT < 0:
                keep = inside
                any_ = first < total
            elif R % TK == 0:
                any_ = tl.load(level + first // R) == WANT
                keep = inside & any_
            else:
                keep = tl.load(level + cols // R, mask=inside, other=-1) == WANT
                any_ = tl.max(keep.to(tl.int32), 0) > 0
            if any_:
                at = (bh * total + cols)[:, None] * D + d[None, :]
                kt = tl.load(k + at, mask=inside[:, None], other=0.0)
                vt = tl.load(v + at, mask=inside[:, None], other=0.0)
                s = tl.dot(q, tl.trans(kt), input_precision=PRECISION)
                s = tl.where(keep[None, :], s, float("-inf"))
                new = tl.maximum(m, tl.max(s, 1))
                p = tl.exp(s - new[:, None]) * tl.where(cols >= (nk - 1) * R, SIZE * last, SIZE * 1.0)[None, :]
                alpha = tl.exp(m - new)
                num = num * alpha[:, None] + tl.dot(p, vt, input_precision=PRECISION)
                den = den * alpha + tl.sum(p, 1)
                m = new
        return m, den, num

    @triton.jit
    def kernel(q, k0, v0, k1, v1, k2, v2, levels, o, N, nq, nk, last, BQ: tl.constexpr, BK: tl.constexpr,
               R1: tl.constexpr, R2: tl.constexpr, DENSE: tl.constexpr, TQ: tl.constexpr, TK: tl.constexpr,
               D: tl.constexpr, PRECISION: tl.constexpr):
        """One tile of TQ rows: q, o [BH, N, D], k0, v0 [BH, nk*BK, D], k1.. [BH, nk*R1, D], levels i8 [BH, nq, nk]."""
        bh = tl.program_id(1).to(tl.int64)
        row = tl.program_id(0) * TQ
        at = (bh * N + row + tl.arange(0, TQ))[:, None] * D + tl.arange(0, D)[None, :]
        qt = tl.load(q + at)
        level = levels + (bh * nq + row // BQ) * nk
        m = tl.full([TQ], float("-inf"), tl.float32)
        den = tl.zeros([TQ], tl.float32)
        num = tl.zeros([TQ, D], tl.float32)
        if DENSE:
            m, den, num = one_level(qt, k0, v0, level, bh, nk, last, m, den, num, -1, BK, 1, TK, D, PRECISION)
        else:
            m, den, num = one_level(qt, k0, v0, level, bh, nk, last, m, den, num, 0, BK, 1, TK, D, PRECISION)
            if R1 > 0:
                m, den, num = one_level(qt, k1, v1, level, bh, nk, last, m, den, num, 1, R1, BK // R1, TK, D,
                                        PRECISION)
            if R2 > 0:
                m, den, num = one_level(qt, k2, v2, level, bh, nk, last, m, den, num, 2, R2, BK // R2, TK, D,
                                        PRECISION)
        tl.store(o + at, num / den[:, None])


def attention(q, k, v, level, bq, bk, tails, last, config, precision="tf32x3"):
    """q [B, H, N, D] (scaled), level [B, H, nq, nk] or None (dense), tails: [(means of k, means of v, columns a block)]
    of levels 1, 2; last: what the tokens of the last key block count for."""
    B, H, N, D = q.shape
    tq, tk, warps, stages = config
    nq, nk = N // bq, k.shape[2] // bk
    pairs = [(k, v)] + [t[:2] for t in tails] + [(k, v)] * (2 - len(tails))
    flat = [x.contiguous() for pair in pairs for x in pair]
    levels = q if level is None else level.to(torch.int8).contiguous()
    r = [t[2] for t in tails] + [0] * (2 - len(tails))
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    tq = min(tq, bq)
    kernel[(N // tq, B * H)](q.contiguous(), *flat, levels, o, N, nq, nk, float(last), BQ=bq, BK=bk, R1=r[0],
                             R2=r[1], DENSE=level is None, TQ=tq, TK=tk, D=D, PRECISION=precision, num_warps=warps,
                             num_stages=stages)
    return o


def ready(plain, dim, bq, bk, device, configs=CONFIGS):
    """(configuration, what was found, as text): the fastest of those that agree with `plain`, torch's way in f64; None
    if there is none. plain(q, k, v, level, sizes, last) -> o."""
    if triton is None or device.type != "cuda":
        return None, "no Triton on a GPU: masks are simulated with torch"
    g = torch.Generator(device).manual_seed(1)
    nk = 4096 // bk
    q, k, v = (torch.randn(2, 4, 4096, dim, device=device, generator=g) for _ in range(3))
    q = q * (4 * dim ** -0.5)
    level = torch.randint(0, 9, (2, 4, 4096 // bq, nk), device=device, generator=g).clamp_max(2)
    level[..., 0] = 0
    sizes, last = [bk, bk // 8], 0.25
    want = plain(*(x.double() for x in (q, k, v)), level, sizes, last)
    floor = float((plain(q, k, v, level, sizes, last) - want).abs().max())
    from scores import means
    tails = [(means(k, s), means(v, s), bk // s) for s in sizes]
    best, told = None, []
    for config in configs:
        try:
            def call(level=level, config=config):
                return attention(q, k, v, level, bq, bk, tails, last, config)
            error = float((call() - want).abs().max())
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                call()
            end.record()
            torch.cuda.synchronize()
            ms = start.elapsed_time(end) / 10
        except Exception as e:                  # a GPU that cannot hold this tile, or another Triton
            told.append(f"{config} {type(e).__name__} {str(e)[:80]}")
            continue
        told.append(f"{config} {ms:.3f} ms, error {error:.1e}")
        if error <= TOLERANCE and (best is None or ms < best[0]):
            best = (ms, config)
    return best and best[1], f"Triton: {'; '.join(told)}; torch's f32 error {floor:.1e}"
