# SPDX-License-Identifier: Apache-2.0
"""What is measured on other prompts than the judged ones: recorded scores, error curves and sensitivities of cells."""
import math
from dataclasses import replace

import torch

from spec import Spec

GRID = (0.03, 0.06, 0.12, 0.25, 0.5, 0.8)
PROBE = "sel=errq8m4 bud=layer lev=64/16 warm=0 l0=0"   # makes the error whose way into the result is measured


class Calib:
    """make(n): the first n calibration clips. Everything is made when it is first asked for. saved: a dict that can
    be written to JSON; what it holds is not made again. shorter: sensitivities of the same model in fewer steps, used
    by their shares of the run; [] or as many steps: they are measured."""

    def __init__(self, sim, make, saved, shorter=()):
        self.sim, self.make, self.saved, self.shorter = sim, make, saved, shorter
        self.recorded = {}

    def record(self, spec):
        """{cell: (scores per size, mass)}, mean over spec.P prompts."""
        key = (spec.sel, spec.sizes(), spec.bq, spec.bk, spec.order, spec.osrc, spec.zsrc, spec.P)
        key = str(key)
        if key not in self.recorded:
            clips = self.make(spec.P)
            self.sim.hub.begin("record", spec)
            self.sim.denoise(clips, 0)
            self.recorded[key] = self.sim.hub.found
        return self.recorded[key]

    def head_weights(self):
        """{cell: [H]}: mean squared gain of an error of a head's output on its way into the residual stream."""
        sim, clips = self.sim, self.make(4)
        H, times, out = sim.dit.config.num_attention_heads, clips.snaps[0][1].timesteps, {}
        for s in range(sim.steps):
            proj = sim.dit.condition_embedder(times[s].expand(1), clips.embeds[:1], None)[1]
            for layer, block in enumerate(sim.dit.blocks):
                gate = (block.scale_shift_table + proj.unflatten(1, (6, -1)))[0, 2]
                x = gate[:, None] * block.attn1.to_out[0].weight
                out[s, layer] = x.unflatten(1, (H, -1)).square().sum((0, 2)) / (x.shape[1] // H)
        return out

    def sensitivity(self, n=4):
        """[steps][layers]: log of how much of a squared error, made in one cell alone and seen in the residual stream,
        arrives in the last latents. Fitted by a sum over steps and layers, for single measurements are noisy."""
        n_short = len(self.shorter)
        if 0 < n_short < self.sim.steps:
            return [self.shorter[s * n_short // self.sim.steps] for s in range(self.sim.steps)]
        if "sensitivity" not in self.saved:
            sim, clips, w = self.sim, self.make(n), self.head_weights()
            raw = self.saved.setdefault("sensitivity_raw", [[None] * sim.layers for _ in range(sim.steps)])
            for s in range(sim.steps):
                for layer in range(sim.layers):
                    if raw[s][layer] is not None:       # from an earlier call that the clock cut off
                        continue
                    sim.hub.begin("one", Spec.parse(PROBE), cell=(s, layer), density={(s, layer): 0.15})
                    last = sim.denoise(clips, s)
                    seen = (sim.hub.found * w[s, layer]).sum()
                    raw[s][layer] = float(torch.log((last - clips.last).square().mean() / seen))
            logs = torch.tensor(raw)
            fit = logs.mean(1, keepdim=True) + logs.mean(0, keepdim=True) - logs.mean()
            self.saved["sensitivity"] = (fit - fit.mean()).tolist()
        return self.saved["sensitivity"]

    def errors(self, spec, n=4, schedule=None):
        """{"step,layer": [error of the residual stream at each density of GRID]} of this way to choose."""
        probe = replace(spec, plan="flat", shape="", warm=0, l0=0)
        key = f"curve of {n}: {probe.label()}"
        if key not in self.saved:
            clips, w = self.make(n), self.head_weights()
            self.sim.hub.begin("curve", probe, grid_d=GRID, weights=w, schedule=schedule)
            self.sim.denoise(clips, 0)
            self.saved[key] = {f"{s},{layer}": (x * w[s, layer]).sum(1).tolist()
                               for (s, layer), x in self.sim.hub.found.items()}
        return self.saved[key]

    def drifts(self, kind, n=2):
        """[layers][steps][steps]: change of what the layers take in (qk) or give (out) between two steps of the dense
        run, relative to the first of the two."""
        key = f"drift of {n}: {kind}"
        if key not in self.saved:
            clips = self.make(n)
            self.sim.hub.begin("drift", Spec.parse(PROBE))
            self.sim.denoise(clips, 0)
            for name in ("qk", "out"):
                found = [torch.stack(self.sim.hub.found[name, layer]) for layer in range(self.sim.layers)]  # [T, n, x]
                self.saved[f"drift of {n}: {name}"] = [relative(x) for x in found]
        return self.saved[key]

    def curves(self, spec, schedule=None):
        """{cell: function of density}: expected squared error, weighted by sensitivity for plan=cell."""
        errors = self.errors(spec, schedule=schedule)
        logs = self.sensitivity() if spec.plan == "cell" else None
        out = {}
        for name, values in errors.items():
            s, layer = map(int, name.split(","))
            out[s, layer] = curve(values, math.exp(logs[s][layer]) if logs else 1.0)
        return out


def relative(x):
    """|x_t - x_s| / |x_s| for s < t, mean over the clips: x [T, n, size]."""
    size = x.norm(dim=-1)
    far = torch.stack([(x - y).norm(dim=-1) / s.clamp_min(1e-20) for y, s in zip(x, size)]).mean(-1)
    return [[round(v, 5) for v in row] for row in far.triu().tolist()]


def curve(values, weight):
    """Linear in the logs of density and error between measured points, and beyond them; 0 at density 1."""
    x = [math.log(d) for d in GRID]
    y = [math.log(max(v, 1e-30) * weight) for v in values]

    def at(d):
        z = math.log(d)
        i = max(0, min(len(x) - 2, sum(a <= z for a in x) - 1))
        t = (z - x[i]) / (x[i + 1] - x[i])
        return math.exp(y[i] + t * (y[i + 1] - y[i])) * min(1.0, (1 - d) / 0.2)
    return at
