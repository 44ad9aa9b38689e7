# SPDX-License-Identifier: Apache-2.0
"""Carried differences: what a dense call has beyond the sparse one beside it, kept and added in later steps."""
import torch

LARGEST = 448.0     # of E4M3


def stored(d, bits):
    """d [.., D] as it comes back from memory: 8 bits are E4M3 with a scale per token and head, as in the library."""
    if bits == 8:
        scale = d.abs().amax(-1, keepdim=True).clamp_min(1e-20) / LARGEST
        return (d / scale).to(torch.float8_e4m3fn).to(d.dtype) * scale
    return d.to(torch.bfloat16).to(d.dtype) if bits == 16 else d


class Carry:
    """The differences of all layers. branches: guidance branches in a batch, the guided entries first."""

    def __init__(self, spec, branches):
        self.spec, self.branches = spec, branches
        self.kept = {}

    def dense_part(self, x):
        """The entries that run dense at an anchor."""
        return x if self.spec.cown else x[:x.shape[0] // self.branches]

    def make(self, layer, o, dense):
        """Output of an anchor: o of all entries, dense of dense_part."""
        n = dense.shape[0]
        d = stored(dense - o[:n], self.spec.cbits)
        self.kept[layer] = d
        return torch.cat([dense, o[n:] + d.repeat(o.shape[0] // n - 1, 1, 1, 1)]) if n < o.shape[0] else dense

    def add(self, layer, o):
        """Output of a later step; in front of the first anchor, o itself."""
        d = self.kept.get(layer)
        return o if d is None else o + d.repeat(o.shape[0] // d.shape[0], 1, 1, 1)
