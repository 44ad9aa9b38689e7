# SPDX-License-Identifier: Apache-2.0
"""Sparse attention with a tail, simulated with dense f32 arithmetic, and the ragged clusters of two other projects."""
import torch

from scores import Tail, means, positions


def exact(q, k):
    """Weights exp(logit - m) [B, H, N, N] and the row maxima m."""
    E = q @ k.transpose(-1, -2)
    m = E.amax(-1, keepdim=True)
    return E.sub_(m).exp_(), m


def sparse(spec, q, k, v, level, want_dense=False):
    """Output of attention with level 0 blocks exact and the others replaced by means; and the dense one, if wanted."""
    B, H, N, D = q.shape
    nq, nk = level.shape[2:]
    E, m = exact(q, k)
    dense = (E @ v) / E.sum(-1, keepdim=True) if want_dense or spec.resid else None
    E.view(B, H, nq, spec.bq, nk, spec.bk).mul_((level == 0).to(E.dtype)[:, :, :, None, :, None])
    num, den = E @ v, E.sum(-1, keepdim=True)
    del E
    for i, size in enumerate(spec.sizes()):
        if size == 0:
            continue
        tail = Tail(k, v, spec.bk, size)
        t = tail.weights(q, m).view(B, H, nq, spec.bq, nk, tail.r)
        t *= (level == i + 1).to(t.dtype)[:, :, :, None, :, None]
        t = t.view(B, H, N, nk * tail.r)
        num, den = num + t @ tail.v, den + t.sum(-1, keepdim=True)
    o = num / den
    return (with_exact_rows(o, dense, nq, spec.resid, spec.near) if spec.resid else o), dense


def with_exact_rows(o, dense, nq, rows, near=0.0):
    """A few rows of each block exact; the mean of their errors, shrunk by its own noise, added to the others. near: so
    much of what the error of the nearest exact row differs from that mean is added too."""
    B, H, N, D = o.shape
    bq = N // nq
    pos = positions(bq, rows)
    o, dense = o.view(B, H, nq, bq, D), dense.view(B, H, nq, bq, D)
    x = (dense - o)[:, :, :, pos]
    mean = x.mean(3, keepdim=True)
    extra = near * (x - mean).repeat_interleave(bq // len(pos), 3) if near else 0.0
    if len(pos) > 1:
        noise = (x - mean).square().sum((3, 4), keepdim=True) / (len(pos) - 1) / len(pos)
        mean = mean * (1 - noise / mean.square().sum(-1, keepdim=True).clamp_min(1e-30)).clamp_min(0)
    o = o + mean + extra
    o[:, :, :, pos] = dense[:, :, :, pos]
    return o.view(B, H, N, D)


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
    first_q, first_k = starts or (means(q, spec.bq), means(k, spec.bk))
    rounds = spec.carry if starts else spec.rounds
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
    E, m = exact(q, k)
    E.mul_(oq @ keep @ ok.transpose(-1, -2))
    num, den = E @ v, E.sum(-1, keepdim=True)
    tail = torch.zeros_like(kept)
    if spec.field == "ear":
        t = (q @ ck.transpose(-1, -2) - m).clamp_max(60).exp() * nk.unsqueeze(2) * (1 - oq @ keep)
        num, den = num + t @ cv, den + t.sum(-1, keepdim=True)
        tail = (1 - kept) * keep.shape[-1] / N
    return num / den, kept, tail, (cq0, ck0)
