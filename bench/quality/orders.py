# SPDX-License-Identifier: Apache-2.0
"""Orders of tokens: the Hilbert curve, and orders per head by balanced cuts across principal directions. Each order
comes with the count of its multiply-adds per token and coordinate (times N D: multiply-adds; / 2N: share of dense)."""
import torch

from spec import KD


def hilbert(t, h, w):
    """perm[p] = token at position p: the project's generalised Hilbert curve (src/mask/hilbert.c), with axes
    (length, direction, coordinate)."""
    out = []

    def moved(p, a, n):
        p = list(p)
        p[a[2]] += a[1] * n
        return tuple(p)

    def part(a, n):
        return (n, a[1], a[2])

    def back(a, n):
        return (n, -a[1], a[2])

    def even_half(n):
        half = n // 2
        return half + 1 if half % 2 and n > 2 else half

    def piece(p, a, b, c):
        if b[0] == 1 and c[0] == 1:
            for i in range(a[0]):
                x = moved(p, a, i)
                out.append((x[0] * h + x[1]) * w + x[2])
            return
        if a[0] == 1:
            longer, shorter = (b, c) if b[0] >= c[0] else (c, b)
            piece(p, longer, shorter, a)
            return
        a1 = even_half(a[0])
        a2 = a[0] - a1
        if 2 * a[0] > 3 * b[0] and 2 * a[0] > 3 * c[0]:
            piece(p, part(a, a1), b, c)
            piece(moved(p, a, a1), part(a, a2), b, c)
            return
        if 3 * b[0] > 4 * c[0] or c[0] == 1:
            b1 = even_half(b[0])
            b2 = b[0] - b1
            piece(p, part(b, b1), c, part(a, a1))
            piece(moved(p, b, b1), a, part(b, b2), c)
            piece(moved(moved(p, a, a[0] - 1), b, b1 - 1), back(b, b1), c, back(a, a2))
            return
        if 3 * c[0] > 4 * b[0] or b[0] == 1:
            c1 = even_half(c[0])
            c2 = c[0] - c1
            piece(p, part(c, c1), part(a, a1), b)
            piece(moved(p, c, c1), a, b, part(c, c2))
            piece(moved(moved(p, a, a[0] - 1), c, c1 - 1), back(c, c1), back(a, a2), b)
            return
        b1, c1 = even_half(b[0]), even_half(c[0])
        b2, c2 = b[0] - b1, c[0] - c1
        piece(p, part(b, b1), part(c, c1), part(a, a1))
        piece(moved(p, b, b1), c, part(a, a1), part(b, b2))
        piece(moved(moved(p, b, b1 - 1), c, c[0] - 1), a, back(b, b1), back(c, c2))
        piece(moved(moved(moved(p, a, a[0] - 1), b, b1), c, c[0] - 1), back(c, c[0]), back(a, a2), part(b, b2))
        piece(moved(moved(p, a, a[0] - 1), b, b1 - 1), back(b, b1), part(c, c1), back(a, a2))

    T, H, W = (t, 1, 0), (h, 1, 1), (w, 1, 2)
    if w >= h and w >= t:
        piece((0, 0, 0), W, H, T)
    elif h >= t:
        piece((0, 0, 0), H, W, T)
    else:
        piece((0, 0, 0), T, W, H)
    assert sorted(out) == list(range(t * h * w))
    return torch.tensor(out)


def take(x, perm):
    return torch.gather(x, 2, perm.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))


def put(x, perm):
    return torch.empty_like(x).scatter_(2, perm.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]), x)


def cuts(N, block, leaf):
    """Levels of balanced cuts of N tokens: each a list of (size, first tokens of the nodes of that size). Nodes are cut
    between whole blocks until they are one block, then in halves until they have at most `leaf` tokens."""
    nodes = [(0, N)] if N > leaf else []
    while nodes:
        sizes = sorted({n for _, n in nodes})
        yield [(size, [f for f, n in nodes if n == size]) for size in sizes]
        below = []
        for first, n in nodes:
            half = n // block // 2 * block if n >= 2 * block else n // 2
            below += [(first, half), (first + half, n - half)]
        nodes = [(f, n) for f, n in below if n > leaf]


def sort_nodes(x, block, leaf, coordinate):
    """Order of x [B, H, N, D] by cuts: coordinate(part [B, H, nodes, size, D]) says where a token lies."""
    B, H, N, D = x.shape
    perm = torch.arange(N, device=x.device).expand(B, H, N).contiguous()
    for level in cuts(N, block, leaf):
        for size, first in level:
            at = (torch.tensor(first, device=x.device)[:, None] + torch.arange(size, device=x.device)).flatten()
            ids = perm[..., at]
            part = take(x, ids).reshape(B, H, len(first), size, D)
            by = coordinate(part).argsort(-1)
            perm[..., at] = torch.gather(ids.reshape(B, H, len(first), size), 3, by).reshape(B, H, -1)
    return perm


# ---------------------------------------------------------------- full: all tokens in every covariance, 12 iterations


def direction(x):
    """Coordinate of x [..., n, D] along its principal direction."""
    x = x - x.mean(-2, keepdim=True)
    n, D = x.shape[-2:]
    c = x.transpose(-1, -2) @ x if n >= 2 * D else None
    u = (c.sum(-1, keepdim=True) if c is not None else x.transpose(-1, -2) @ x.sum(-1, keepdim=True)) + 1e-6
    for _ in range(12):
        u = c @ u if c is not None else x.transpose(-1, -2) @ (x @ u)
        u = u / u.norm(dim=-2, keepdim=True).clamp_min(1e-20)
    return (x @ u).squeeze(-1)


def direction_count(n, D):
    return D + 1 + 12 * D / n if n >= 2 * D else 27


def metric(q, k):
    """k in coordinates in which squared distance is the mean squared difference of logits over the head's queries."""
    c = q.transpose(-1, -2) @ q / q.shape[2]
    ridge = 1e-4 * c.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return k @ torch.linalg.cholesky(c + ridge * torch.eye(c.shape[-1], device=c.device, dtype=c.dtype))


def full(x, block, leaf, run):
    """run: tokens stay inside runs of so many of the curve; 0: they go anywhere."""
    B, H, N, D = x.shape
    if not run or run >= N:
        return sort_nodes(x, block, leaf, direction)
    inner = sort_nodes(x.reshape(B, H * (N // run), run, D), block, leaf, direction).reshape(B, H, N // run, run)
    return (inner + run * torch.arange(N // run, device=x.device)[:, None]).reshape(B, H, N)


# ---------------------------------------------------------------- sampled: directions from a few tokens of each node


def second_moment(x, n, centred):
    """[B, H, D, D] of n evenly spaced tokens."""
    N = x.shape[2]
    n = min(n, N)
    y = x[:, :, (torch.arange(n, device=x.device) * N + N // 2) // n]
    if centred:
        y = y - y.mean(2, keepdim=True)
    return y.transpose(-1, -2) @ y / n


def sampled(x, c, block, leaf, samples, iters):
    """As full, but each node's direction comes from evenly spaced tokens of the node. With C = L L^T the second moment
    of the other side, the principal direction u of the tokens L^T x is wanted, and x.(L u) is the coordinate. The power
    iteration u <- L^T X^T X L u is w <- C X^T X w for w = L u, so L is never made. It starts at the token that is
    farthest from the mean."""
    def coordinate(part):
        n = part.shape[-2]
        s = min(samples, n)
        xs = part[..., (torch.arange(s, device=x.device) * n + n // 2) // s, :]
        xs = xs - xs.mean(-2, keepdim=True)
        far = xs.square().sum(-1).argmax(-1)
        w = torch.gather(xs, -2, far[..., None, None].expand(*far.shape, 1, xs.shape[-1])).transpose(-1, -2)
        for _ in range(iters):
            w = xs.transpose(-1, -2) @ (xs @ w)
            if c is not None:
                w = c.unsqueeze(2) @ w
            w = w / w.norm(dim=-2, keepdim=True).clamp_min(1e-20)
        return (part @ w).squeeze(-1)
    return sort_nodes(x, block, leaf, coordinate)


# ---------------------------------------------------------------- one entrance


def make(spec, q, k):
    """perm of q (None: it stays) and of k, both [B, H, N]. kd: full; kdk: keys only; kdm, kdkm: in the metric of the
    other side; a number behind: inside runs of so many tokens. ad: sampled, both sides; adk: keys only."""
    leafq, leafk = spec.leaves()
    kd = KD.match(spec.order)
    if kd:
        run = int(kd[3] or 0)
        pk = full(metric(q, k) if kd[2] else k, spec.bk, leafk, run)
        return None if kd[1] else full(metric(k, q) if kd[2] else q, spec.bq, leafq, run), pk
    if spec.order not in ("ad", "adk"):
        raise ValueError(f"no such order: {spec.order}")
    cq = second_moment(q, spec.amet, False) if spec.amet else None
    pk = sampled(k, cq, spec.bk, leafk, spec.asamp, spec.aiter)
    if spec.order == "adk":
        return None, pk
    ck = second_moment(k, spec.amet, bool(spec.acen)) if spec.amet else None
    return sampled(q, ck, spec.bq, leafq, spec.asamp, spec.aiter), pk


def work(spec, N, D):
    """Multiply-adds of make() as a share of dense attention of the head, 2 N^2 D."""
    leafq, leafk = spec.leaves()
    kd = KD.match(spec.order)
    total = 0.0
    if kd:
        run = min(int(kd[3] or 0) or N, N)
        for leaf, block in ((leafk, spec.bk),) + (() if kd[1] else ((leafq, spec.bq),)):
            total += sum(N // run * size * len(first) * D * direction_count(size, D)
                         for level in cuts(run, block, leaf) for size, first in level)
            total += 2 * N * D * D if kd[2] else 0
    elif spec.order in ("ad", "adk"):
        for leaf, block in ((leafk, spec.bk),) + (((leafq, spec.bq),) if spec.order == "ad" else ()):
            total += min(spec.amet, N) * D * D
            for level in cuts(N, block, leaf):
                for size, first in level:
                    s = min(spec.asamp, size)
                    metric_part = D * D if spec.amet else 0
                    total += len(first) * (s * D + spec.aiter * (2 * s * D + metric_part) + size * D)
    return total / (2 * N * N * D)
