# SPDX-License-Identifier: Apache-2.0
"""Numbers that Python and C make alike: element i of tensor `name` is a hash of both, so goldens need not hold weights
or inputs.

tests/model/fill.h is the same in C. u(name, i) is a multiple of 2^-23 in [-1, 1), exact in f32."""
import numpy as np
import torch

MASK = (1 << 64) - 1


def fnv1a(name):
    h = 14695981039346656037
    for b in name.encode():
        h = ((h ^ b) * 1099511628211) & MASK
    return h


def unit(name, count):
    """u(name, 0 .. count-1), f32."""
    with np.errstate(over="ignore"):
        z = np.uint64(fnv1a(name)) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(40)).astype(np.int64) - (1 << 23)).astype(np.float32) / np.float32(1 << 23)


def tensor(name, shape, scale=1.0, offset=0.0):
    """offset + scale * u in f32, as a torch tensor."""
    value = unit(name, int(np.prod(shape))) * np.float32(scale) + np.float32(offset)
    return torch.from_numpy(value.reshape(shape))


def weight(name, shape, gain=1.0):
    """A weight by its name: norms around 1.5 (so that attention has something to prefer), tables and biases small,
    matrices with unit variance of their products."""
    if name.split(".")[-2:-1] and "norm" in name.split(".")[-2] and name.endswith(".weight"):
        return tensor(name, shape, 0.5, 1.5)
    if name.endswith("scale_shift_table"):
        return tensor(name, shape, 0.5)
    if len(shape) == 1:
        return tensor(name, shape, 0.25)
    fan_in = int(np.prod(shape[1:]))
    return tensor(name, shape, np.float32(gain * np.sqrt(3.0 / fan_in)))


def fill_module(module, gain=1.0):
    """Overwrites every parameter of a torch module."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weight(name, tuple(parameter.shape), gain))
