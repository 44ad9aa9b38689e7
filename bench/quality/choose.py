# SPDX-License-Identifier: Apache-2.0
"""From scores to masks: budgets of heads and rows, thresholds, and levels by least error at a given cost."""
import math

import torch


def head_blocks(entropy, nk, budget):
    """Whole blocks a row for each head: the project's rule (src/base/budget.h). entropy: floats of one batch entry."""
    H = len(entropy)
    e = [min(1.0, max(0.0, x)) for x in entropy]
    total = min(max(math.floor(budget * nk * H + 0.5), H), H * nk)
    low = min(budget, 1.0 / nk)
    want = budget * H
    positive = [x for x in e if x > 0]
    zeros = H - len(positive)
    if not positive or (zeros == 0 and min(positive) == max(positive)) or low >= budget:
        b = [budget] * H
    elif zeros and want >= len(positive) + zeros * low:
        b = [1.0 if x > 0 else (want - len(positive)) / zeros for x in e]
    else:
        lo, hi = 0.0, 1.0 / min(positive)
        for _ in range(80):
            mid = (lo + hi) / 2
            if sum(min(1.0, max(low, mid * x)) for x in e) < want:
                lo = mid
            else:
                hi = mid
        b = [min(1.0, max(low, hi * x)) for x in e]
    k, left = [], []
    for x in b:
        t = x * nk
        n = math.floor(t + 1e-9)
        rest = t - n
        if n < 1:
            n, rest = 1, 0.0
        if n >= nk:
            n, rest = nk, -1.0
        k.append(n)
        left.append(rest)
    missing = total - sum(k)
    for h in sorted(range(H), key=lambda i: (-left[i], i))[:max(0, missing)]:
        if left[h] >= 0:
            k[h] += 1
    while sum(k) < total:
        for h in range(H):
            if k[h] < nk and sum(k) < total:
                k[h] += 1
    for h in reversed(range(H)):
        if sum(k) > total and k[h] > 1:
            k[h] -= 1
    return k


def entropies(p):
    """[B][H]: mean over the rows of the normalised entropy of the mass."""
    e = -torch.where(p > 0, p * p.clamp_min(1e-38).log(), torch.zeros_like(p)).double().sum(-1) / math.log(p.shape[-1])
    return e.mean(-1).clamp_max(1).cpu().tolist()


def ranks(x):
    """Rank along the last axis, 0 the largest, equal values lower index first."""
    order = x.sort(dim=-1, descending=True, stable=True).indices
    return torch.empty_like(order).scatter_(-1, order, torch.arange(x.shape[-1], device=x.device).expand_as(order))


def best_of_rows(score):
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, score.argmax(-1, keepdim=True), True)


def mask(score, p, bud, d):
    """Mask [B, H, nq, nk] of density d.
    entropy  blocks a row by the entropy of each head;  uniform  equally many in every row
    layer    one threshold for all heads and rows of a call, at least one block a row
    topp     smallest sets of a row that reach a share of its score, one share a call such that the density is d"""
    B, H, nq, nk = score.shape
    if bud in ("entropy", "uniform"):
        e = entropies(p) if bud == "entropy" else [[1.0] * H] * B
        k = torch.tensor([head_blocks(x, nk, d) for x in e], device=score.device)
        return ranks(score) < k[:, :, None, None]
    if bud == "layer":
        n = max(H * nq, round(d * H * nq * nk))
        first = score.masked_fill(best_of_rows(score), math.inf)
        return (ranks(first.reshape(B, -1)) < n).reshape(B, H, nq, nk)
    if bud == "topp":
        sorted_, order = score.sort(dim=-1, descending=True, stable=True)
        before = (sorted_.cumsum(-1) - sorted_) / sorted_.sum(-1, keepdim=True).clamp_min(1e-30)
        flat = before.reshape(B, -1).sort(-1).values                    # threshold with the wanted number below it
        at = min(flat.shape[1] - 1, max(0, round(d * flat.shape[1]) - 1))
        keep = before <= flat[:, at].clamp_min(0)[:, None, None, None]
        return torch.zeros_like(keep).scatter_(-1, order, keep)
    raise ValueError(f"no such budget: {bud}")


def at_price(errors, cost, price, least):
    """Level of every block at a price of one exact block; errors: levels of the tail, cost: with level 0 in front."""
    level = torch.stack([torch.zeros_like(errors[0]) + price * cost[0]]
                        + [e + price * c for e, c in zip(errors, cost[1:])]).argmin(0)
    return level.masked_fill(best_of_rows(errors[0]), 0) if least else level


def level_costs(sizes, device):
    return torch.tensor([1.0] + [1 / s if s else 0.0 for s in sizes], device=device)


def levels(errors, sizes, total, bud, least=1):
    """Level of every block, 0 exact, i the i-th of sizes: least squared error at mean cost `total` (exact 1, a mean of
    n tokens 1/n); one price a batch entry (layer) or a row (uniform)."""
    cost = level_costs(sizes, errors[0].device)
    shape = errors[0].shape
    dims = (1, 2, 3) if bud == "layer" else (3,)
    lo = torch.full((shape[0], 1, 1, 1) if bud == "layer" else (*shape[:3], 1), -40.0, device=cost.device)
    hi = torch.full_like(lo, 20.0)              # log of the price; low: everything exact
    for _ in range(40):
        mid = (lo + hi) / 2
        spent = cost[at_price(errors, cost, mid.exp(), least)].mean(dims, keepdim=True)
        lo, hi = torch.where(spent > total, mid, lo), torch.where(spent > total, hi, mid)
    return at_price(errors, cost, hi.exp(), least)


def joint_levels(errors, sizes, total, least=1):
    """levels() over all cells at once: errors {cell: list of [B, H, nq, nk]}, one price; mean cost `total`."""
    cost = level_costs(sizes, next(iter(errors.values()))[0].device)
    lo, hi = -60.0, 20.0
    for _ in range(50):
        mid = (lo + hi) / 2
        spent = [cost[at_price(e, cost, math.exp(mid), least)].mean() for e in errors.values()]
        if float(sum(spent)) / len(spent) > total:
            lo = mid
        else:
            hi = mid
    return {c: at_price(e, cost, math.exp(hi), least) for c, e in errors.items()}
