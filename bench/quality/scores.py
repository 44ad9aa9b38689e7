# SPDX-License-Identifier: Apache-2.0
"""Scores of pairs of blocks. q, k, v are [B, H, N, D] in the order of the blocks, q times the scale; a query block has
bq tokens, a key block bk; nq x nk blocks a head."""
from dataclasses import replace

import torch

MOST = 2 ** 30      # numbers in the largest array of estimate() at once: 4 GB in f32


def means(x, n):
    B, H, N, D = x.shape
    return x.reshape(B, H, N // n, n, D).mean(3)


def positions(bq, s):
    """Where s rows of a block are sampled."""
    s = min(s, bq)
    return [(2 * i + 1) * bq // (2 * s) for i in range(s)]


def queries(q, bq, s, mean):
    """[B, H, nq*s, D]: s rows of each block, or means of bq/s tokens."""
    B, H, N, D = q.shape
    if mean:
        return means(q, bq // min(s, bq))
    return q.reshape(B, H, N // bq, bq, D)[:, :, :, positions(bq, s)].reshape(B, H, -1, D)


class Tail:
    """Means of `size` keys that stand in for key blocks, r a block: k, v [B, H, nk*r, D]. last: what each token of the
    last key block counts for."""

    def __init__(self, k, v, bk, size, last=1.0):
        self.r, self.size, self.last = bk // size, size, last
        self.k, self.v = means(k, size), means(v, size)

    def weights(self, q, m):
        """exp(logit - m) times tokens, [B, H, rows, nk*r]."""
        return of_last((q @ self.k.transpose(-1, -2) - m).clamp_max(60).exp_().mul_(self.size), self.r, self.last)


def of_last(w, columns, last):
    """Weights [.., columns of all blocks], those of the last block times `last`."""
    if last != 1.0:
        w[..., -columns:] *= last
    return w


def per_block(e, v, nk):
    """Sum over the keys of each block of e v: e [B, H, R, nk*r], v [B, H, nk*r, D] -> [B, H, nk, R, D]."""
    B, H, R, C = e.shape
    r = C // nk
    return e.reshape(B, H, R, nk, r).transpose(2, 3) @ v.reshape(B, H, nk, r, -1)


def coarse_output(Q, k, v, g, m, bk, end):
    """Output and normaliser (in units of exp(m)) of the rows Q from means of g keys."""
    t = Tail(k, v, bk, g, end)
    w = t.weights(Q, m)
    Z = w.sum(-1, keepdim=True)
    return (w @ t.v) / Z, Z


def estimate(spec, q, k, v, last=None, end=1.0):
    """Scores of one chunk: a list of [B, H, nq, nk], one for each size of the tail, and the mass [B, H, nq, nk].

    mass  softmax mass of the key block, mean over the queries (mass4 is the project's importance)
    err   squared first-order error of the output if the tail stands in for the block, mean over the queries:
          |(a_j - t_j) - (w_j - tw_j) o|^2 / Z^2
    last  [B, H, N, D]: the last step's output in the order of q, for osrc=prev (None: block means instead)
    end   what each token of the last key block counts for"""
    kind, mean, s, M = spec.score()
    B, H, N, D = k.shape
    nq, nk = q.shape[2] // spec.bq, N // spec.bk
    Q = queries(q, spec.bq, s, mean)

    def rows(x):                                # [B, H, R, nk]: mean over the queries of a block
        return x.reshape(B, H, nq, -1, nk).mean(3)
    kM = k if M == 1 else means(k, M)
    L = Q @ kM.transpose(-1, -2)
    m = L.amax(-1, keepdim=True)
    E = L.sub_(m).exp_()
    if M > 1:
        E.mul_(M)
    of_last(E, spec.bk // M, end)
    w = E.reshape(B, H, -1, nk, spec.bk // M).sum(-1)                   # [B, H, R, nk]
    Z = w.sum(-1, keepdim=True)
    p = rows(w / Z)
    if kind == "mass":
        return [p], p
    a = per_block(E, v if M == 1 else means(v, M), nk)                  # [B, H, nk, R, D]
    del E
    if spec.osrc == "self":
        o = a.sum(2) / Z
    elif spec.osrc == "prev" and last is not None:
        o = queries(last, spec.bq, s, mean)
    else:
        g = int(spec.osrc[4:]) if spec.osrc.startswith("fine") else spec.bk
        o, coarse = coarse_output(Q, k, v, g, m, spec.bk, end)
        if spec.zsrc == "same":
            Z = coarse
    out = []
    for size in spec.sizes():
        if size == 0:
            x = a - w.transpose(2, 3).unsqueeze(-1) * o.unsqueeze(2)
        else:
            tail = Tail(k, v, spec.bk, size, end)
            t = tail.weights(Q, m)
            tw = t.reshape(B, H, -1, nk, tail.r).sum(-1)
            x = a - per_block(t, tail.v, nk)
            x -= (w - tw).transpose(2, 3).unsqueeze(-1) * o.unsqueeze(2)
            del t, tw
        if spec.cent:
            x /= Z.unsqueeze(2)
            x = x.view(B, H, nk, nq, -1, D)
            middle = x.mean(4).square().sum(-1).transpose(2, 3)             # [B, H, nq, nk]
            found = x.square_().sum(-1).mean(-1).transpose(2, 3) - spec.cent * middle
            out.append(found.clamp_min(0))
        else:
            out.append(rows(x.square_().sum(-1).transpose(2, 3) / (Z * Z)))
        del x
    return out, p


def work(spec, first=False):
    """Multiply-adds of estimate() as a share of dense attention. Logits of coarser means are means of the finer ones'
    logits, so they cost nothing; every level pays its values and two products of D a pair of row and block."""
    kind, _, s, M = spec.score()
    rows = min(s, spec.bq) / spec.bq
    total = 0.5 * rows / M
    if kind == "mass":
        return total
    total += 0.5 * rows / M
    if spec.twice and spec.osrc == "self":
        total *= 2
    elif spec.osrc != "self" and not (spec.osrc == "prev" and not first):
        total += rows / (int(spec.osrc[4:]) if spec.osrc.startswith("fine") else spec.bk)
    for size in spec.sizes():
        total += rows / spec.bk + (0.5 * rows / size if size else 0.0)
        total += 0.5 / (spec.bq * spec.bk) if spec.cent else 0.0
    return total


def beside_dense(spec, sel):
    """Work of scores of this kind where a dense call makes the products of all queries and keys."""
    kind, _, s, _ = replace(spec, sel=sel).score()
    rows = min(s, spec.bq) / spec.bq
    return 0.0 if kind == "mass" else sum(rows / spec.bk + (0.5 * rows / size if size else 0.0)
                                          for size in spec.sizes())


def of_batch(spec, q, k, v, chunk, last=None, end=1.0):
    """estimate() over a batch: `chunk` entries at a time, and fewer heads where there are many tokens."""
    parts, mass = [], []
    _, _, s, M = spec.score()
    B, H, N, D = q.shape
    each = N // spec.bq * min(s, spec.bq) * max(k.shape[2] // M, k.shape[2] // spec.bk * D) * min(chunk, B)
    heads = max(1, min(H, MOST // each))
    for i in range(0, B, chunk):
        found = []
        for h in range(0, H, heads):
            one = (slice(i, i + chunk), slice(h, h + heads))
            found.append(estimate(spec, q[one], k[one], v[one], None if last is None else last[one], end))
        parts.append([torch.cat(x, 1) for x in zip(*(f[0] for f in found))])
        mass.append(torch.cat([f[1] for f in found], 1))
    return [torch.cat(x) for x in zip(*parts)], torch.cat(mass)
