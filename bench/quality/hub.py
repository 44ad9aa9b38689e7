# SPDX-License-Identifier: Apache-2.0
"""What every self-attention call of the model does in a run: dense, sparse, or dense while something is recorded."""
import time

import torch
import torch.nn.functional as F

import attend
import choose
import orders
import plans
import scores
from spec import due


class Late(Exception):
    """The clock ran out in the middle of a run or a calibration."""


class Hub:
    """grid: tokens along time, height, width; chunk: batch entries whose N x N weights exist at once. deadline: a time
    after which every call raises Late; None: never."""

    def __init__(self, grid, chunk):
        self.grid, self.chunk = grid, chunk
        self.perm = {}
        self.step = 0
        self.deadline = None
        self.begin()

    def begin(self, mode="dense", spec=None, **more):
        """mode: dense | run (more: density {cell: d}, shape, masks {cell: level} or recorded {cell: scores}, weights) |
        record (scores of dense calls) | curve (errors at more densities of dense calls) | one (one cell sparse)."""
        self.mode, self.spec = mode, spec
        self.density = self.shape = self.recorded = self.weights = self.fixed = self.cell = self.grid_d = None
        self.__dict__.update(more)
        self.orders, self.masks, self.kept, self.last, self.starts = {}, {}, {}, {}, {}
        self.found, self.spent = {}, {"exact": 0.0, "tail": 0.0, "order": 0.0, "scores": 0.0, "rows": 0.0, "dense": 0.0}
        self.calls = 0

    def attend(self, layer, q, k, v):
        cell = (self.step, layer)
        if self.deadline and time.time() > self.deadline:
            raise Late
        if self.mode == "dense":
            return F.scaled_dot_product_attention(q, k, v)
        self.calls += 1
        if self.mode == "record":
            return self.record(cell, q, k, v)
        if self.mode == "curve":
            return self.curve(cell, q, k, v)
        if self.mode == "one" and cell != self.cell or self.spec.is_dense(*cell):
            self.spent["dense"] += 1
            if self.spec.src == "warm" and self.step == self.spec.warm - 1 and layer >= self.spec.l0:
                q1, k1, v1, _ = self.ordered(layer, q, k, v)
                found = self.score(layer, q1, k1, v1)
                self.masks[layer] = self.choose(found, self.density[self.spec.warm, layer])
            return F.scaled_dot_product_attention(q, k, v)
        return self.sparse(cell, q, k, v)

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
        """q (scaled), k, v in the order of the blocks, and what puts an output back."""
        spec = self.spec
        q = q * q.shape[-1] ** -0.5
        if spec.order == "raster":
            return q.contiguous(), k.contiguous(), v.contiguous(), lambda o: o
        p, back = self.curve_order(q)
        q, k, v = (x.index_select(2, p) for x in (q, k, v))
        if not spec.adaptive():
            return q, k, v, lambda o: o.index_select(2, back)
        if layer not in self.orders or due(spec.oref, self.step - spec.warm):
            n = q.shape[0] // 2 if spec.share else q.shape[0]
            pq, pk = orders.make(spec, q[:n], k[:n])
            if spec.share:
                pq, pk = (None if x is None else torch.cat([x, x]) for x in (pq, pk))
            self.orders[layer] = (pq, pk)
            self.pay(order=(0.5 if spec.share else 1.0) * orders.work(spec, k.shape[2], k.shape[3]))
        pq, pk = self.orders[layer]
        q = q if pq is None else orders.take(q, pq)
        return (q, orders.take(k, pk), orders.take(v, pk),
                lambda o: (o if pq is None else orders.put(o, pq)).index_select(2, back))

    def same_order(self, layer, x):
        """x in raster order -> order of the queries of this layer."""
        x = x.index_select(2, self.curve_order(x)[0])
        pq = self.orders[layer][0] if self.spec.adaptive() else None
        return x if pq is None else orders.take(x, pq)

    def score(self, layer, q, k, v):
        """Scores of the call and its mass, counted; head weights are applied."""
        spec = self.spec
        last = self.last.get(layer)
        if spec.src != "warm":                  # those of a dense call cost nothing more
            self.pay(scores=(0.5 if spec.share else 1.0) * scores.work(spec, last is None))
        n = q.shape[0] // 2 if spec.share else q.shape[0]
        last = None if last is None else self.same_order(layer, last)[:n]
        found, p = scores.of_batch(spec, q[:n], k[:n], v[:n], self.chunk, last)
        if spec.share:
            found, p = [torch.cat([x, x]) for x in found], torch.cat([p, p])
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
            return self.branches(self.fixed[cell], q.shape[0])
        if spec.src == "cached":
            errors, p = self.recorded[cell]
            return self.branches(self.choose((errors, p), self.density[cell]), q.shape[0])
        if layer in self.masks and (spec.src == "warm" or not plans.mask_due(spec, self.step - spec.warm)):
            return self.masks[layer]
        self.masks[layer] = self.choose(self.score(layer, q, k, v), self.density[cell])
        return self.masks[layer]

    @staticmethod
    def branches(x, B):
        """Masks of the guided and the unguided branch [2, ..] for a batch of B, guided entries first."""
        return x.repeat_interleave(B // 2, 0)

    def run_sparse(self, q, k, v, level, want_dense=False):
        outs, refs = [], []
        for i in range(0, q.shape[0], self.chunk):
            part = slice(i, i + self.chunk)
            o, ref = attend.sparse(self.spec, q[part], k[part], v[part], level[part], want_dense)
            outs.append(o)
            refs.append(ref)
        return torch.cat(outs), torch.cat(refs) if want_dense else None

    def count_level(self, level):
        cost = [1 / s if s else 0.0 for s in self.spec.sizes()]
        tail = sum((level == i + 1).float().mean() * c for i, c in enumerate(cost))
        self.pay(exact=(level == 0).float().mean(), tail=tail, rows=self.spec.resid / self.spec.bq)

    def sparse(self, cell, q, k, v):
        spec, layer = self.spec, cell[1]
        if spec.order == "kmeans":
            return self.clusters(layer, q, k, v)
        q, k, v, back = self.ordered(layer, q, k, v)
        level = self.level(layer, q, k, v)
        self.count_level(level)
        o, ref = self.run_sparse(q, k, v, level, self.mode == "one")
        if self.mode == "one":
            self.found = (o - ref).square().mean((0, 2, 3))             # [H]
        o = back(o)
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
                                                   old[n] if old and spec.carry else None)
            outs.append(o)
            starts.append(start)
            share = o.shape[0] / q.shape[0]
            self.pay(exact=kept * share, tail=tail * share)
        self.pay(order=attend.cluster_work(spec, q.shape[2], spec.carry if old and spec.carry else spec.rounds))
        self.starts[layer] = starts
        return torch.cat(outs).index_select(2, back)

    # ------------------------------------------------------------ recordings on dense calls

    def record(self, cell, q, k, v):
        """found[cell] = (scores per size of the tail, mass), mean over the clips, [2, ..]: guided, unguided branch."""
        q1, k1, v1, _ = self.ordered(cell[1], q, k, v)
        errors, p = scores.of_batch(self.spec, q1, k1, v1, self.chunk)

        def mean(x):
            return torch.stack([y.mean(0) for y in x.chunk(2)])
        self.found[cell] = ([mean(x) for x in errors], mean(p))
        return F.scaled_dot_product_attention(q, k, v)

    def curve(self, cell, q, k, v):
        """found[cell] = [[squared error of each head] for each density of grid_d], with orders and scores as old as
        they are in a run."""
        layer = cell[1]
        q1, k1, v1, back = self.ordered(layer, q, k, v)
        if layer not in self.kept or plans.mask_due(self.spec, self.step):
            self.kept[layer] = self.score(layer, q1, k1, v1)
        found, ref = [], None
        for d in self.grid_d:
            level = self.choose(self.kept[layer], d)
            if self.deadline and time.time() > self.deadline:
                raise Late
            o, dense = self.run_sparse(q1, k1, v1, level, ref is None)
            ref = dense if ref is None else ref
            found.append((o - ref).square().mean((0, 2, 3)))
        self.found[cell] = torch.stack(found)
        ref = back(ref)
        if self.spec.osrc == "prev":
            self.last[layer] = ref
        return ref
