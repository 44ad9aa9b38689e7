# SPDX-License-Identifier: Apache-2.0
"""Sparse attention with a tail, simulated with dense f32 arithmetic, and the ragged clusters of two other projects."""
import torch

import fast
from scores import Tail, means, positions
from spec import Spec


PIECE = 2 ** 29     # weights that exist at once: 2 GB in f32
FAST = {}           # configuration of the Triton kernel for (dim, bq, bk); empty: torch does everything


def exact(q, k):
    """Weights exp(logit - m) [B, H, N, N] and the row maxima m."""
    E = q @ k.transpose(-1, -2)
    m = E.amax(-1, keepdim=True)
    return E.sub_(m).exp_(), m


def pieces(rows, each):
    """Slices of `rows` things, of which each needs so many weights."""
    n = max(1, PIECE // each)
    return [slice(i, i + n) for i in range(0, rows, n)]


def dense(q, k, v, bk=16, last=1.0):
    """Dense attention of q (scaled). last: what each of the last bk keys counts for."""
    config, N = FAST.get(("dense", q.shape[3])), q.shape[2]
    if config and k.shape[2] % bk == 0:
        q = torch.nn.functional.pad(q, (0, 0, 0, -N % 128))
        return fast.attention(q, k, v, None, 128, bk, [], last, config)[:, :, :N]
    if last == 1.0:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)
    out = []
    for rows in pieces(N, k.shape[2] * q.shape[0] * q.shape[1]):
        E, _ = exact(q[:, :, rows], k)
        E[..., -bk:] *= last
        out.append(E @ v / E.sum(-1, keepdim=True))
    return torch.cat(out, 2)


def sparse(spec, q, k, v, level, last=1.0):
    """Output of attention with level 0 blocks exact and the others replaced by means. last: what each token of the last
    key block counts for."""
    B, H, N, D = q.shape
    tails = [Tail(k, v, spec.bk, size, last) for size in spec.sizes() if size]
    config = FAST.get((D, spec.bq, spec.bk))
    if config and len(tails) < 3:
        o = fast.attention(q, k, v, level, spec.bq, spec.bk, [(t.k, t.v, t.r) for t in tails], last, config)
    else:
        out = []
        for blocks in pieces(N // spec.bq, B * H * spec.bq * k.shape[2]):
            rows = slice(blocks.start * spec.bq, blocks.stop * spec.bq)
            out.append(of_rows(spec, q[:, :, rows], k, v, level[:, :, blocks], tails, last))
        o = torch.cat(out, 2)
    return with_exact_rows(spec, o, q, k, v, last) if spec.resid else o


def of_rows(spec, q, k, v, level, tails, last):
    B, H, N, D = q.shape
    nq, nk = level.shape[2:]
    E, m = exact(q, k)
    if last != 1.0:
        E[..., -spec.bk:] *= last
    E.view(B, H, nq, spec.bq, nk, spec.bk).mul_((level == 0).to(E.dtype)[:, :, :, None, :, None])
    num, den = E @ v, E.sum(-1, keepdim=True)
    del E
    for i, tail in enumerate(tails):
        t = tail.weights(q, m).view(B, H, nq, spec.bq, nk, tail.r)
        t *= (level == i + 1).to(t.dtype)[:, :, :, None, :, None]
        t = t.view(B, H, N, nk * tail.r)
        num, den = num + t @ tail.v, den + t.sum(-1, keepdim=True)
    return num / den


def prepare(spec, dim, device):
    """Finds out whether the Triton kernel serves this setting; returns a line that says so the first time."""
    def plain(q, k, v, level, sizes, last):
        one = Spec(bq=spec.bq, bk=spec.bk, lev="/".join(map(str, sizes)))
        return of_rows(one, q, k, v, level, [Tail(k, v, spec.bk, s, last) for s in sizes], last)
    key, told = (dim, spec.bq, spec.bk), ""
    if spec.order != "kmeans" and key not in FAST:
        first = FAST.get(("dense", dim))
        FAST[key], told = fast.ready(plain, dim, spec.bq, spec.bk, device, [first] if first else fast.CONFIGS)
        FAST.setdefault(("dense", dim), FAST[key])
        told = f"D {dim}, blocks of {spec.bq} x {spec.bk}: {told}; taken: {FAST[key]}"
    return told


def with_exact_rows(spec, o, q, k, v, last=1.0):
    """A few rows of each block exact; the others corrected by their errors."""
    B, H, N, D = o.shape
    pos = positions(spec.bq, spec.resid)
    blocks = (B, H, N // spec.bq, spec.bq, D)
    found = dense(q.reshape(blocks)[:, :, :, pos].reshape(B, H, -1, D), k, v, spec.bk, last)
    return corrected(o.reshape(blocks), found.view(*blocks[:3], -1, D), pos, spec.near).view(B, H, N, D)


def corrected(o, exact_rows, pos, near=0.0):
    """o [B, H, nq, bq, D] with its rows at pos replaced by these [B, H, nq, rows, D]. The mean of their errors, shrunk
    by its own noise, is added to the others. near: so much of what the error of the nearest exact row differs from
    that mean is added too."""
    x = exact_rows - o[:, :, :, pos]
    mean = x.mean(3, keepdim=True)
    extra = near * (x - mean).repeat_interleave(o.shape[3] // len(pos), 3) if near else 0.0
    if len(pos) > 1:
        noise = (x - mean).square().sum((3, 4), keepdim=True) / (len(pos) - 1) / len(pos)
        mean = mean * (1 - noise / mean.square().sum(-1, keepdim=True).clamp_min(1e-30)).clamp_min(0)
    o = o + mean + extra
    o[:, :, :, pos] = exact_rows
    return o


# ---------------------------------------------------------------- clusters of any size


def kmeans(x, start, rounds):
    """One-hot cluster of every token [B, H, N, K], sizes [B, H, K] and centroids: x [B, H, N, D], start [B, H, K, D].
    rounds + 1 assignments."""
    c = start
    for i in range(rounds + 1):
        near = (x @ c.transpose(-1, -2) - 0.5 * c.square().sum(-1).unsqueeze(2)).argmax(-1)
        one = torch.nn.functional.one_hot(near, c.shape[2]).to(x.dtype)
        n = one.sum(2)
        if i < rounds:
            c = torch.where(n.unsqueeze(-1) > 0, one.transpose(-1, -2) @ x / n.clamp_min(1).unsqueeze(-1), c)
    return one, n, c


def cluster_work(spec, N, rounds):
    """Assignments of both sides, and the scores: centroids against centroids (svg2) or against all keys (ear)."""
    kq, kk = N // spec.bq, N // spec.bk
    total = (rounds + 1) * (kq + kk) / (2 * N)
    return total + (kq * kk / (2 * N * N) if spec.field == "svg2" else kq / (2 * N))


def clusters(spec, q, k, v, d, starts=None):
    """Attention over pairs of clusters of q and k, re-implemented from the papers' descriptions, no code read:

    svg2  Sparse VideoGen 2: k-means of queries and of keys; softmax of the centroids weighted by cluster size ranks the
          pairs; skipped pairs are dropped.
    ear   SVG-EAR: the same clusters; a pair is ranked by the estimated error of its replacement by the clusters' mean
          (centroid query against every key: sum over keys of |p v - pbar vbar|^2) per token; skipped pairs are
          replaced by the mean.

    Both get one price of area for all heads instead of a share per row, which is kinder to them. Returns the output,
    the kept share of pairs of tokens, the share of tail keys, and the centroids."""
    B, H, N, D = q.shape
    first_q, first_k = starts or (means(q[:, :, :N // spec.bq * spec.bq], spec.bq),
                                  means(k[:, :, :N // spec.bk * spec.bk], spec.bk))
    rounds = spec.again if starts else spec.rounds
    oq, nq, cq0 = kmeans(q, first_q, rounds)
    ok, nk, ck0 = kmeans(k, first_k, rounds)
    size = nk.clamp_min(1)
    ck = ok.transpose(-1, -2) @ k / size.unsqueeze(-1)
    cv = ok.transpose(-1, -2) @ v / size.unsqueeze(-1)
    cq = oq.transpose(-1, -2) @ q / nq.clamp_min(1).unsqueeze(-1)
    if spec.field == "svg2":
        gain = (cq @ ck.transpose(-1, -2) + nk.clamp_min(1e-9).log().unsqueeze(2)).softmax(-1) / size.unsqueeze(2)
    else:
        logit = cq @ k.transpose(-1, -2)
        m = logit.amax(-1, keepdim=True)
        p = (logit - m).exp()
        Z = p.sum(-1, keepdim=True)
        pbar = (cq @ ck.transpose(-1, -2) - m).clamp_max(60).exp() / Z                  # [B, H, Kq, Kk]
        p = p / Z
        own = ok @ cv                           # [B, H, N, D]: mean value of a token's cluster
        e = ((p * p) * v.square().sum(-1).unsqueeze(2)) @ ok - 2 * pbar * ((p * (v * own).sum(-1).unsqueeze(2)) @ ok)
        gain = (e + nk.unsqueeze(2) * pbar.square() * cv.square().sum(-1).unsqueeze(2)).clamp_min(0) / size.unsqueeze(2)
    gain = gain.masked_fill((nq == 0).unsqueeze(-1) | (nk == 0).unsqueeze(2), -1).reshape(B, -1)
    area = (nq.unsqueeze(-1) * nk.unsqueeze(2) / (H * N * N)).reshape(B, -1)
    order = gain.argsort(-1, descending=True)
    keep = torch.zeros_like(gain).scatter_(
        -1, order, (torch.gather(area, -1, order).cumsum(-1) <= d).to(gain.dtype)).reshape(B, H, N // spec.bq, -1)
    if spec.field == "svg2":                    # a row of tokens needs one cluster at least
        none = (keep * nk.unsqueeze(2)).sum(-1, keepdim=True) == 0
        best = gain.reshape(keep.shape).argmax(-1, keepdim=True)
        keep = torch.where(none, torch.zeros_like(keep).scatter_(-1, best, 1.0), keep)
    kept = (keep.reshape(B, -1) * area).sum(-1).mean()
    tail = (1 - kept) * keep.shape[-1] / N if spec.field == "ear" else torch.zeros_like(kept)
    out = []
    for rows in pieces(N, B * H * N):
        one = oq[:, :, rows] @ keep
        E, m = exact(q[:, :, rows], k)
        E.mul_(one @ ok.transpose(-1, -2))
        num, den = E @ v, E.sum(-1, keepdim=True)
        if spec.field == "ear":
            t = (q[:, :, rows] @ ck.transpose(-1, -2) - m).clamp_max(60).exp() * nk.unsqueeze(2) * (1 - one)
            num, den = num + t @ cv, den + t.sum(-1, keepdim=True)
        out.append(num / den)
    return torch.cat(out, 2), kept, tail, (cq0, ck0)
