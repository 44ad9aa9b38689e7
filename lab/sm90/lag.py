#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What late references cost: the kernel's softmax with P in bf16, computed in torch on the CPU, for several rules.

    lab/sm90/lag.py            a table; needs torch, takes two minutes

A warp of 16 rows raises its references if a P of one of them would reach 2. Then the largest P of every row that grew
becomes 2^-HEAD, so a reference may lag by up to HEAD + 1 in units of log2. The rule "every" follows every maximum. With
ones, the sum of a row adds up the rounded P. Each cell has the error in root mean square and the largest error, as
multiples of those of the first rule (mean and largest of the seeds), and the share of stages in which references are
raised."""
import math

import torch

ROWS, WARP, STAGE = 64, 16, 128
EVERY = None
RULES = {"every": (EVERY, False), "HEAD 1": (1, False), "HEAD 2": (2, False), "HEAD 7": (7, False),
         "ones, every": (EVERY, True), "ones, HEAD 40": (40, True)}


def attend(q, k, v, head, ones):
    logits = q @ k.T * (math.log2(math.e) / math.sqrt(q.shape[1]))  # units of log2
    ref, total = torch.full((ROWS, 1), -1e30).double(), torch.zeros(ROWS, 1).double()
    o, raised, stages = torch.zeros(ROWS, v.shape[1]).double(), 0, 0
    for j in range(0, k.shape[0], STAGE):
        x = logits[:, j:j + STAGE]
        top = x.amax(1, keepdim=True)
        grew = (top > ref if head is EVERY else top - ref >= 1).view(-1, WARP).any(1)
        new = torch.where(grew.repeat_interleave(WARP)[:, None], torch.maximum(top + (head or 0), ref), ref)
        alpha, ref = torch.exp2(ref - new), new
        p = torch.exp2(x - ref)
        rounded = p.bfloat16().double()
        total = total * alpha + (rounded if ones else p).sum(1, keepdim=True)
        o = o * alpha + rounded @ v[j:j + STAGE]
        raised, stages = raised + int(grew.sum()), stages + len(grew)
    exact = torch.softmax(logits * math.log(2), 1) @ v
    error = (o / total).bfloat16().double() - exact
    return error.pow(2).mean().sqrt().item(), error.abs().max().item(), raised / stages


def main():
    print("data".ljust(26), *(name.rjust(22) for name in RULES))
    for keys, seeds in ((2048, 12), (16384, 4)):
        for D in (64, 128):
            for factor in (1, 2, 4):  # of q: rows get more and more peaked
                runs = []
                for seed in range(seeds):
                    draw = torch.Generator().manual_seed(seed)
                    q, k, v = (torch.randn(n, D, generator=draw) for n in (ROWS, keys, keys))
                    q, k, v = ((x * f).bfloat16().double() for x, f in ((q, factor), (k, 1), (v, 1)))
                    runs.append([attend(q, k, v, *rule) for rule in RULES.values()])
                cells = []
                for i in range(len(RULES)):
                    rms = sum(r[i][0] / r[0][0] for r in runs) / seeds
                    worst = max(r[i][1] / r[0][1] for r in runs)
                    share = sum(r[i][2] for r in runs) / seeds
                    cells.append(f"{rms:.3f}, {worst:.2f}; {100 * share:.1f} %".rjust(22))
                print(f"{keys} keys, D {D}, q x {factor}".ljust(26), *cells, flush=True)


if __name__ == "__main__":
    main()
