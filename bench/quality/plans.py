# SPDX-License-Identifier: Apache-2.0
"""Density of each layer and step ("cell") such that the whole clip costs the work that was asked for."""
import math

import attend
import orders
import scores
from schedule import Schedule

LEAST = 0.02        # density of a cell at least, unless one block a row is more
SHAPE = "9/0/0"     # the uniform rule of src/rules/work_plan.h, see shape_curves


class Shape:
    """Sizes that costs follow from. branches: guidance branches of a step, 1 without guidance."""

    def __init__(self, steps, layers, tokens, dim, sigmas, branches=2):
        self.steps, self.layers, self.tokens, self.dim, self.sigmas = steps, layers, tokens, dim, sigmas
        self.branches = branches


def extra_work(spec, shape, step, layer, schedule):
    """Work of one call beside its exact blocks and means, by what the schedule says is made in it: (order, scores,
    exact rows and dense calls of anchors). Sharing guidance branches divides the first two by their number."""
    i = step - spec.warm
    N, D = shape.tokens, shape.dim
    if spec.is_dense(step, layer) or spec.skips(step):
        return 0.0, 0.0, 0.0        # a dense call has the products of src=warm already
    if spec.order == "kmeans":
        return attend.cluster_work(spec, N, spec.again if i and spec.again else spec.rounds), 0.0, 0.0
    anchor = schedule.anchor(step, layer)
    rows = spec.resid / spec.bq + (anchor_work(spec, shape.branches) if anchor else 0.0)
    part = 1 / shape.branches if spec.share else 1.0
    order = part * orders.work(spec, N, D) if schedule.order(step, layer) else 0.0
    mask = 0.0
    if spec.src == "online" and schedule.mask(step, layer):
        mask = part * (scores.beside_dense(spec, spec.csel) if anchor and spec.csel else scores.work(spec, i == 0))
    return order, mask, rows


def anchor_work(spec, branches):
    """Dense calls of an anchor: of every branch, or of the guided one alone."""
    return 1.0 if spec.cown else 1 / branches


def tail_share(spec):
    """Cost of a call's tail if every block were skipped; with levels it is part of the density."""
    if spec.lev or spec.sizes() == [0] or spec.field == "svg2":
        return 0.0
    return 1 / spec.sizes()[0]


def solve(spec, shape, curves=None, held=True, schedule=None):
    """{cell: density} of the sparse cells (with levels: cost of blocks and means; otherwise kept blocks), and the work
    that this should cost. Raises ValueError if the work is too small for what must be paid anyway.
    curves: {cell: function of density -> expected error}, for plan=cell and plan=even. held: steps that share a mask
    get one density. spec: resolved for the steps of the run. schedule: what is made when (default: as spec says)."""
    if spec.warm < 0:
        raise ValueError("the setting must be resolved for a number of steps first")
    schedule = schedule or Schedule(spec)
    cells = [(s, layer) for s in range(shape.steps) for layer in range(shape.layers)]
    live = [c for c in cells if not spec.is_dense(*c) and not spec.skips(c[0])]
    fixed = sum(spec.is_dense(*c) for c in cells) + sum(sum(extra_work(spec, shape, *c, schedule)) for c in cells)
    t = tail_share(spec)
    least = max(LEAST, 1.0 / (shape.tokens // spec.bk)) + t
    spend = spec.work * len(cells) - fixed
    twice = len({c[1] for c in live}) if spec.carry == "warm" else 0    # sparse calls in the last dense step
    if not live:                                # dense, with steps left out
        return {}, fixed / len(cells)
    if spend < least * (len(live) + twice):
        raise ValueError(f"work {spec.work} is too small: {fixed / len(cells):.3f} goes to dense calls and choosing, "
                         f"{least * len(live) / len(cells):.3f} is the least for the blocks")
    if spec.plan == "flat":
        each = min(1.0, spend / (len(live) + twice))
        cost, fixed = dict.fromkeys(live, each), fixed + twice * each
    elif spec.plan in ("cell", "even"):
        cost = by_curves(live, curves, spend, least)
    elif spec.plan == "shape":
        cost = by_curves(live, shape_curves(spec.shape or SHAPE, shape, live), spend, least)
    else:
        raise ValueError(f"no such plan: {spec.plan}")
    if held and spec.src == "online" and spec.order != "kmeans":
        cost = hold(schedule, cost)
    total = (fixed + sum(cost.values())) / len(cells)
    return {c: (x - t) / (1 - t) for c, x in cost.items()}, total


def hold(schedule, cost):
    """Steps that use one mask have one density: the mean of what they would have."""
    out = dict(cost)
    for layer in {c[1] for c in cost}:
        group = []
        for step in sorted(c[0] for c in cost if c[1] == layer) + [None]:
            if group and (step is None or schedule.mask(step, layer)):
                mean = sum(cost[s, layer] for s in group) / len(group)
                out.update({(s, layer): mean for s in group})
                group = []
            group.append(step)
    return out


GRID = [0.02 * (50 ** (i / 60)) for i in range(61)]     # densities 0.02 .. 1


def by_curves(live, curves, spend, least):
    """Least sum of the curves' errors at this cost: one price of density for all cells."""
    grid = [x for x in GRID if x >= least] or [1.0]
    value = {c: [curves[c](x) if x < 1 else 0.0 for x in grid] for c in live}

    def at(price):
        return {c: min(zip(value[c], grid), key=lambda y: y[0] + price * y[1])[1] for c in live}
    lo, hi = -80.0, 40.0
    for _ in range(80):
        mid = (lo + hi) / 2
        if sum(at(math.exp(mid)).values()) > spend:
            lo = mid
        else:
            hi = mid
    return by_weight(at(math.exp(hi)), spend, least)    # the grid's remainder is spread


def by_weight(weight, spend, least):
    """Densities proportional to weights, inside [least, 1], that sum to `spend`."""
    lo, hi = -40.0, 40.0
    for _ in range(100):
        mid = (lo + hi) / 2
        if sum(min(1.0, max(least, w * math.exp(mid))) for w in weight.values()) < spend:
            lo = mid
        else:
            hi = mid
    return {c: min(1.0, max(least, w * math.exp(hi))) for c, w in weight.items()}


def shape_curves(text, shape, cells):
    """Curves by a rule of three numbers: exp(-decay density) for every cell (src/rules/work_plan.h), times
    exp(sigma s + depth l) for noise level s (1 .. 0) and relative depth l (0 .. 1). text: decay/sigma/depth."""
    decay, sigma, depth = (float(x) for x in text.split("/"))

    def of(step, layer):
        w = math.exp(sigma * shape.sigmas[step] + depth * layer / max(1, shape.layers - 1))
        return lambda d: w * (math.exp(-decay * d) - math.exp(-decay))
    return {c: of(*c) for c in cells}


def fit_shape(density, curves, shape):
    """Parameters of shape_curves whose densities come closest to those of a plan {cell: density} (before `hold`), as
    text; and standard deviations of the densities: theirs, what the shape leaves, and what a richer one would leave
    (squares of both, and the first layer). The optimal density of such a curve is linear in its log weight."""
    import torch
    free = [c for c in density if 0.03 < density[c] < 0.97]
    y = torch.tensor([density[c] for c in free], dtype=torch.float64)

    def left(columns):
        a = torch.tensor([columns(shape.sigmas[s], layer / max(1, shape.layers - 1)) + [1.0] for s, layer in free],
                         dtype=torch.float64)
        b = torch.linalg.lstsq(a, y.unsqueeze(1), driver="gelsd").solution.squeeze(1)
        return b, float((a @ b - y).square().mean().sqrt())
    points = [0.12, 0.25, 0.5]
    logs = [[math.log(max(curves[c](d), 1e-30)) for d in points] for c in free]
    mean = sum(points) / len(points)
    decay = -sum((d - mean) * x[i] for x in logs for i, d in enumerate(points))
    decay /= sum((d - mean) ** 2 for d in points) * len(free)
    b, rest = left(lambda s, x: [s, x])
    _, rich = left(lambda s, x: [s, s * s, x, x * x, float(x == 0)])
    return (f"{decay:.2f}/{decay * float(b[0]):.2f}/{decay * float(b[1]):.2f}",
            (float(y.std(unbiased=False)), rest, rich))
