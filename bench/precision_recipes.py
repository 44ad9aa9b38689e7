# SPDX-License-Identifier: Apache-2.0
"""8-bit attention in torch: esa's arithmetic (docs/precision.md), and the recipe that SageAttention 2 publishes.
Tensors are float32 [heads, tokens, D]; keys and values have as many heads as queries.

Both walk over tiles of keys with a running maximum, round P of a tile to E4M3, and add the product of a tile to the
output in float32. They differ in what is rounded how:

            esa                                        SageAttention 2, 8 bits
    q       int8, a scale per query                    int8, a scale per thread: the rows of one residue modulo 8 of 32
    k       minus its mean; int8, per block of 128     minus its mean; int8, per thread: pairs of one residue of 64
    v       minus its mean; E4M3, a scale per channel  E4M3, a scale per channel
    result  gets that mean, and the mean error of v    as it is
    sum     of the rounded P                           of P as it is
    tiles   128 keys, last to first                    64 keys, first to last

Smoothing of q, which its paper adds for 4 bits, takes the mean of 128 queries away and adds their products with the
keys to the logits."""
import math

import torch

ROWS, TOP = 128, 448.0


def exact(q, k, v, scale=None):
    """float64."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = (q.double() @ k.double().transpose(1, 2)) * scale
    return torch.softmax(s, -1) @ v.double()


def e4m3(x):
    return x.clamp(-TOP, TOP).to(torch.float8_e4m3fn).float()


def int8(x, scale):
    return torch.round(x * (1.0 / scale)).clamp(-127, 127)


def groups_of(tokens, size, pick):
    """Number of the group that shares a scale with each token: pick(position in a run of `size`) of its run."""
    n = torch.arange(tokens)
    inner = pick(n % size)
    return n // size * (int(inner.max()) + 1) + inner


def group_scales(x, groups):
    """The scale of each token's group: largest magnitude / 127. [heads, tokens, 1]."""
    largest = torch.zeros(x.shape[0], int(groups.max()) + 1)
    index = groups.expand(x.shape[0], -1)
    largest = largest.scatter_reduce(1, index, x.abs().amax(-1), "amax")
    return (torch.where(largest > 0, largest, torch.ones(())) / 127.0).gather(1, index)[..., None]


def online(logits, values, tiles, rounded_sum):
    """logits(slice) in log2 units, values rounded to E4M3 already. Returns sum of P v / sum of P, and log2 of the sum
    of exp2(logits)."""
    m = weight = o = None
    for keys in tiles:
        x = logits(keys)
        top = x.amax(-1, keepdim=True)
        new = top if m is None else torch.maximum(m, top)
        p = TOP * torch.exp2(x - new)
        p8 = e4m3(p)
        total = (p8 if rounded_sum else p).sum(-1, keepdim=True)
        product = p8 @ values[:, keys]
        if m is None:
            weight, o = total, product
        else:
            alpha = torch.exp2(m - new)
            weight, o = weight * alpha + total, o * alpha + product
        m = new
    return o / weight, m + torch.log2(weight / TOP)


def ours(q, k, v, scale=None, lse=False):
    """esa's arithmetic for a dense call. With lse also the log-sum-exp."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tokens = k.shape[1]
    ck, cv = (x.double().mean(1, keepdim=True).float() for x in (k, v))
    s_q = group_scales(q, torch.arange(q.shape[1]))
    s_k = group_scales(k - ck, groups_of(tokens, ROWS, torch.zeros_like))
    q8, k8 = int8(q, s_q), int8(k - ck, s_k)
    largest = (v - cv).abs().amax(1, keepdim=True)
    s_v = torch.where(largest > 0, largest / TOP, torch.ones(()))
    v8 = e4m3((v - cv) * (1.0 / s_v))
    added = cv + ((v - cv) - v8 * s_v).double().mean(1, keepdim=True).float()
    factor = s_q * (scale * math.log2(math.e))
    tiles = [slice(at, min(tokens, at + ROWS)) for at in reversed(range(0, tokens, ROWS))]
    out, log = online(lambda t: (q8 @ k8[:, t].transpose(1, 2)) * (factor * s_k[:, t].transpose(1, 2)), v8, tiles, True)
    out = out * s_v + added
    if not lse:
        return out
    return out, math.log(2) * log[..., 0] + scale * (q * ck).sum(-1)


def sage2(q, k, v, scale=None, smooth_q=False, warp_q=32, tile=64):
    """SageAttention 2 with int8 q and k. On Hopper warp_q is 16 and tile is 128."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tokens, to_log2 = k.shape[1], scale * math.log2(math.e)
    k = k - k.mean(1, keepdim=True)
    extra = None
    if smooth_q:
        run = torch.arange(q.shape[1]) // ROWS
        means = torch.stack([q[:, run == i].mean(1) for i in range(int(run.max()) + 1)], 1)
        q, extra = q - means[:, run], (means @ k.transpose(1, 2) * to_log2)[:, run]
    s_q = group_scales(q, groups_of(q.shape[1], warp_q, lambda n: n % 8))
    s_k = group_scales(k, groups_of(tokens, tile, lambda n: n % 8 // 2))
    q8, k8 = int8(q, s_q), int8(k, s_k)
    largest = v.abs().amax(1, keepdim=True)
    s_v = torch.where(largest > 0, largest / TOP, torch.ones(()))

    def logits(t):
        x = (q8 @ k8[:, t].transpose(1, 2)) * (s_q * to_log2 * s_k[:, t].transpose(1, 2))
        return x if extra is None else x + extra[:, :, t]
    tiles = [slice(at, min(tokens, at + tile)) for at in range(0, tokens, tile)]
    return online(logits, e4m3(v * (1.0 / s_v)), tiles, False)[0] * s_v


def bf16(q, k, v, scale=None):
    """Operands and P in bf16, sums in float32: what 16 bits cost, for comparison."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.bfloat16().float() for x in (q, k, v))
    s = q @ k.transpose(1, 2) * scale
    p = torch.exp(s - s.amax(-1, keepdim=True))
    return (p.bfloat16().float() @ v) / p.sum(-1, keepdim=True)
