# SPDX-License-Identifier: Apache-2.0
"""What every self-attention call of the model does in a run: dense, sparse, or dense while something is recorded."""
import time
from dataclasses import replace

import torch

import attend
import choose
import orders
import scores
from carry import Carry
from plans import anchor_work
from schedule import Schedule


class Late(Exception):
    """The clock ran out in the middle of a run or a calibration."""


class Hub:
    """grid: tokens along time, height, width; chunk: batch entries whose weights exist at once; branches: guidance
    branches in a batch, the guided entries first. deadline: a time after which every call raises Late; None: never."""

    def __init__(self, grid, chunk, branches=2):
        self.grid, self.chunk, self.branches = grid, chunk, branches
        self.perm = {}
        self.step = 0
        self.deadline = None
        self.begin()

    def begin(self, mode="dense", spec=None, **more):
        """mode: dense | run (more: density {cell: d}, shape, masks {cell: level} or recorded {cell: scores}, weights,
        schedule) | record (scores of dense calls) | curve (errors at more densities of dense calls) | one (one cell
        sparse) | drift (features of dense calls)."""
        self.mode, self.spec = mode, spec
        self.density = self.shape = self.recorded = self.weights = self.fixed = self.cell = self.grid_d = None
        self.schedule = self.carry = self.carries = None
        self.__dict__.update(more)
        if spec:
            self.schedule = self.schedule or Schedule(spec)
            self.carry = Carry(spec, self.branches)
        self.orders, self.masks, self.kept, self.last, self.starts = {}, {}, {}, {}, {}
        self.found, self.spent = {}, {"exact": 0.0, "tail": 0.0, "order": 0.0, "scores": 0.0, "rows": 0.0, "dense": 0.0}
        self.calls = 0

    def attend(self, layer, q, k, v):
        cell = (self.step, layer)
        if self.deadline and time.time() > self.deadline:
            raise Late
        if self.mode == "dense":
            return self.dense(q, k, v)
        self.calls += 1
        if self.mode == "drift":
            return self.drift(cell, q, k, v)
        if self.mode == "record":
            return self.record(cell, q, k, v)
        if self.mode == "curve":
            return self.curve(cell, q, k, v)
        if self.mode == "one" and cell != self.cell or self.spec.is_dense(*cell):
            self.spent["dense"] += 1
            if self.spec.src == "warm" and self.step == self.spec.warm - 1 and layer >= self.spec.l0:
                return self.last_dense(layer, q, k, v)
            return self.dense(q, k, v)
        return self.sparse(cell, q, k, v)

    def dense(self, q, k, v):
        return attend.dense(q * q.shape[-1] ** -0.5, k, v)

    def last_dense(self, layer, q, k, v):
        """The call whose masks, and whose difference with carry=warm, are kept for the clip."""
        q1, k1, v1, back = self.ordered(layer, q, k, v)
        self.masks[layer] = self.choose(self.score(layer, q1, k1, v1), self.density[self.spec.warm, layer])
        o = self.dense(q, k, v)
        if self.spec.carry == "warm":
            self.count_level(self.masks[layer])
            o = self.carry.make(layer, back(self.run_sparse(q1, k1, v1, self.masks[layer])), o)
        return o

    # ------------------------------------------------------------ parts of a call

    def pay(self, **shares):
        for name, x in shares.items():
            self.spent[name] = self.spent[name] + x

    def curve_order(self, q):
        """Permutation of the Hilbert curve and its inverse."""
        if "hilbert" not in self.perm:
            p = orders.hilbert(*self.grid).to(q.device)
            self.perm["hilbert"] = (p, p.argsort())
        return self.perm["hilbert"]

    def ordered(self, layer, q, k, v):
        """q (scaled), k, v in the order of the blocks and in whole blocks, and what puts an output back."""
        spec, N = self.spec, q.shape[2]
        q = q * q.shape[-1] ** -0.5
        if spec.order == "raster":
            return self.padded(q, False), self.padded(k), self.padded(v), lambda o: o[:, :, :N]
        p, back = self.curve_order(q)
        q, k, v = (x.index_select(2, p) for x in (q, k, v))
        if not spec.adaptive():
            return self.padded(q, False), self.padded(k), self.padded(v), lambda o: o.index_select(2, back)
        if layer not in self.orders or self.schedule.order(self.step, layer):
            n = self.sharing(q)
            pq, pk = orders.make(spec, q[:n], k[:n])
            self.orders[layer] = tuple(None if x is None else x.repeat(q.shape[0] // n, 1, 1) for x in (pq, pk))
            self.pay(order=n / q.shape[0] * orders.work(spec, k.shape[2], k.shape[3]))
        pq, pk = self.orders[layer]
        q = q if pq is None else orders.take(q, pq)
        return (self.padded(q, False), self.padded(orders.take(k, pk)), self.padded(orders.take(v, pk)),
                lambda o: (o if pq is None else orders.put(o[:, :, :N], pq)).index_select(2, back))

    def sharing(self, q):
        """Entries that masks and orders are made of; the other branches use the same ones."""
        return q.shape[0] // self.branches if self.spec.share else q.shape[0]

    def padded(self, x, keys=True):
        """x [B, H, N, D] in whole blocks of keys or of queries: the tokens of a last part are repeated. Means of groups
        that divide that part stay what they are."""
        N, block = x.shape[2], self.spec.bk if keys else self.spec.bq
        part = N % block
        if not part:
            return x.contiguous()
        if block % part:
            raise ValueError(f"of {N} tokens, {part} are left beside blocks of {block}; a divisor of {block} could be")
        return torch.cat([x, x[:, :, N - part:].repeat(1, 1, block // part - 1, 1)], 2)

    def last_share(self):
        """What each token of the last block of keys counts for, because they were repeated."""
        N, block = self.grid[0] * self.grid[1] * self.grid[2], self.spec.bk
        return (N % block or block) / block

    def same_order(self, layer, x):
        """x in raster order -> order of the queries of this layer."""
        x = x.index_select(2, self.curve_order(x)[0])
        pq = self.orders[layer][0] if self.spec.adaptive() else None
        return x if pq is None else orders.take(x, pq)

    def score(self, layer, q, k, v):
        """Scores of the call and its mass, counted; head weights are applied."""
        spec, n = self.spec, self.sharing(q)
        last = self.last.get(layer)
        beside = spec.csel and self.schedule.anchor(self.step, layer)
        if spec.src != "warm":                  # those of a dense call cost nothing more
            cost = scores.beside_dense(spec, spec.csel) if beside else scores.work(spec, last is None)
            self.pay(scores=n / q.shape[0] * cost)
        last = None if last is None else self.padded(self.same_order(layer, last)[:n], False)
        one = replace(spec, sel=spec.csel, osrc="self") if beside else spec
        found, p = scores.of_batch(one, q[:n], k[:n], v[:n], 1 if beside else self.chunk, last, self.last_share())
        if n < q.shape[0]:
            found, p = [x.repeat(q.shape[0] // n, 1, 1, 1) for x in found], p.repeat(q.shape[0] // n, 1, 1, 1)
        if spec.wt == "head":
            w = self.weights[self.step, layer]
            found = [x * w[None, :, None, None] for x in found]
        return found, p

    def choose(self, found, d):
        spec = self.spec
        errors, p = found
        if spec.lev:
            return choose.levels(errors, spec.sizes(), d, spec.bud, spec.least)
        return 1 - choose.mask(errors[0], p, spec.bud, d).long()

    def level(self, layer, q, k, v):
        """Level of every block of the call [B, H, nq, nk]: kept from before, recorded, or chosen now."""
        spec, cell = self.spec, (self.step, layer)
        if self.fixed is not None:              # bud=joint
            return self.of_branches(self.fixed[cell], q.shape[0])
        if spec.src == "cached":
            errors, p = self.recorded[cell]
            return self.of_branches(self.choose((errors, p), self.density[cell]), q.shape[0])
        if layer in self.masks and (spec.src == "warm" or not self.schedule.mask(self.step, layer)):
            return self.masks[layer]
        self.masks[layer] = self.choose(self.score(layer, q, k, v), self.density[cell])
        return self.masks[layer]

    def of_branches(self, x, B):
        """Masks of the guidance branches [branches, ..] for a batch of B, guided entries first."""
        return x.repeat_interleave(B // self.branches, 0)

    def run_sparse(self, q, k, v, level):
        last = self.last_share()
        return torch.cat([attend.sparse(self.spec, q[i:i + self.chunk], k[i:i + self.chunk], v[i:i + self.chunk],
                                        level[i:i + self.chunk], last) for i in range(0, q.shape[0], self.chunk)])

    def count_level(self, level):
        cost = [1 / s if s else 0.0 for s in self.spec.sizes()]
        tail = sum((level == i + 1).float().mean() * c for i, c in enumerate(cost))
        self.pay(exact=(level == 0).float().mean(), tail=tail, rows=self.spec.resid / self.spec.bq)

    def sparse(self, cell, q, k, v):
        spec, layer = self.spec, cell[1]
        if spec.order == "kmeans":
            return self.clusters(layer, q, k, v)
        q1, k1, v1, back = self.ordered(layer, q, k, v)
        level = self.level(layer, q1, k1, v1)
        self.count_level(level)
        o = back(self.run_sparse(q1, k1, v1, level))
        if self.mode == "one":
            self.found = (o - self.dense(q, k, v)).square().mean((0, 2, 3))     # [H]
        if self.schedule.anchor(*cell):
            self.pay(dense=anchor_work(spec, self.branches))
            o = self.carry.make(layer, o, self.dense(*(self.carry.dense_part(x) for x in (q, k, v))))
        elif spec.carry:
            o = self.carry.add(layer, o)
        if spec.osrc == "prev":
            self.last[layer] = o
        return o

    def clusters(self, layer, q, k, v):
        spec, outs, starts = self.spec, [], []
        q = q * q.shape[-1] ** -0.5
        p, back = self.curve_order(q)
        q, k, v = (x.index_select(2, p) for x in (q, k, v))
        old = self.starts.get(layer)
        chunks = range(0, q.shape[0], self.chunk)
        for n, i in enumerate(chunks):
            part = slice(i, i + self.chunk)
            o, kept, tail, start = attend.clusters(spec, q[part], k[part], v[part], self.density[self.step, layer],
                                                   old[n] if old and spec.again else None)
            outs.append(o)
            starts.append(start)
            share = o.shape[0] / q.shape[0]
            self.pay(exact=kept * share, tail=tail * share)
        self.pay(order=attend.cluster_work(spec, q.shape[2], spec.again if old and spec.again else spec.rounds))
        self.starts[layer] = starts
        return torch.cat(outs).index_select(2, back)

    # ------------------------------------------------------------ recordings on dense calls

    def record(self, cell, q, k, v):
        """found[cell] = (scores per size of the tail, mass), mean over the clips, [2, ..]: guided, unguided branch."""
        q1, k1, v1, _ = self.ordered(cell[1], q, k, v)
        errors, p = scores.of_batch(self.spec, q1, k1, v1, self.chunk, end=self.last_share())

        def mean(x):
            return torch.stack([y.mean(0) for y in x.chunk(self.branches)])
        self.found[cell] = ([mean(x) for x in errors], mean(p))
        return self.dense(q, k, v)

    def curve(self, cell, q, k, v):
        """found[cell] = [[squared error of each head] for each density of grid_d], with orders, scores and carried
        differences as old as they are in a run."""
        layer = cell[1]
        if not self.carries:
            self.carries = [Carry(self.spec, self.branches) for _ in self.grid_d]
        q1, k1, v1, back = self.ordered(layer, q, k, v)
        if layer not in self.kept or self.schedule.mask(self.step, layer):
            self.kept[layer] = self.score(layer, q1, k1, v1)
        found, ref = [], self.dense(q, k, v)
        for i, d in enumerate(self.grid_d):
            level = self.choose(self.kept[layer], d)
            if self.deadline and time.time() > self.deadline:
                raise Late
            o, carry = back(self.run_sparse(q1, k1, v1, level)), self.carries[i]
            if self.schedule.anchor(*cell):
                o = carry.make(layer, o, carry.dense_part(ref))
            elif self.spec.carry:
                o = carry.add(layer, o)
            found.append((o - ref).square().mean((0, 2, 3)))
        self.found[cell] = torch.stack(found)
        if self.spec.osrc == "prev":
            self.last[layer] = ref
        return ref

    def drift(self, cell, q, k, v):
        """found[kind, layer][step]: means of 64 tokens of q and k, or of the output, of the guided entries."""
        o, n = self.dense(q, k, v), q.shape[0] // self.branches
        p, _ = self.curve_order(q)
        whole = p[:p.shape[0] // 64 * 64]

        def parts(x):
            return scores.means(x[:n].index_select(2, whole), 64).flatten(1)
        self.found.setdefault(("qk", cell[1]), []).append(torch.cat([parts(q), parts(k)], 1))
        self.found.setdefault(("out", cell[1]), []).append(parts(o))
        return o
