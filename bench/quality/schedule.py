# SPDX-License-Identifier: Apache-2.0
"""When a layer makes masks, orders and carried differences."""
from spec import DRIFT, due


class Schedule:
    """spec: resolved for the steps of the run. anchors: {layer: steps}, for anchors that follow a drift."""

    def __init__(self, spec, anchors=None):
        self.spec, self.anchors = spec, anchors
        self.by_drift = bool(DRIFT.match(spec.carry))
        if self.by_drift and anchors is None:
            raise ValueError(f"carry={spec.carry} needs measured drifts")
        self.turns = {}

    def anchor(self, step, layer):
        """Does the layer run dense beside its sparse call, and keep the difference?"""
        spec = self.spec
        if not spec.carry or spec.is_dense(step, layer):
            return False
        if self.by_drift:
            return step in self.anchors[layer]
        if spec.carry == "warm":
            return False
        if not spec.cstag:
            return due(spec.carry, step - spec.warm)
        turn = layer % spec.cstag
        if turn not in self.turns:
            self.turns[turn] = staggered(spec.carry, turn / spec.cstag)
        return step - spec.warm in self.turns[turn]

    def order(self, step, layer):
        return self.spec.adaptive() and self.due(self.spec.oref, step, layer)

    def mask(self, step, layer):
        """Masks are made anew by their schedule and with every new order."""
        return self.due(self.spec.refresh, step, layer) or self.order(step, layer)

    def due(self, text, step, layer):
        return self.anchor(step, layer) if text == "anchor" else due(text, step - self.spec.warm)


def staggered(text, share):
    """Anchors of a layer that comes this share of the way before the others: the first one stays."""
    at = [int(x) for x in text.split("/")]
    return {at[0]} | {b - int(share * (b - a)) for a, b in zip(at, at[1:])}


def by_drift(drift, wanted):
    """{layer: steps} such that there are `wanted` anchors a layer on average: an anchor is made when the drift since
    the last one exceeds a bound, one bound for all layers. drift:
    [layers][steps][steps], change from step a to step t."""
    layers, steps = len(drift), len(drift[0])

    def at(bound):
        out = {}
        for layer, d in enumerate(drift):
            out[layer] = [0]
            for t in range(1, steps):
                if d[out[layer][-1]][t] > bound:
                    out[layer].append(t)
        return out
    bounds = sorted({x for d in drift for row in d for x in row})
    lo, hi = 0, len(bounds) - 1                 # the least bound with at most so many anchors
    while lo < hi:
        mid = (lo + hi) // 2
        if sum(map(len, at(bounds[mid]).values())) > wanted * layers:
            lo = mid + 1
        else:
            hi = mid
    return {layer: set(x) for layer, x in at(bounds[lo]).items()}
