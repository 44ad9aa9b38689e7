"""Weights in 8 bits: matrices become codes with a scale for each row.

tests/quality/assemble_model.py widens them again. A code is wrong by at most half a scale, 0.4 % of the largest weight
of its row: enough for a model that is compared with itself.
"""
import torch
from safetensors.torch import load_file, save_file


def pack(path):
    """Replaces the file by a packed one."""
    packed = {}
    for name, value in load_file(path).items():
        if value.ndim < 2:
            packed[name] = value
            continue
        rows = value.float().flatten(1)
        scale = (rows.abs().amax(1) / 127).clamp(min=2.0 ** -24).half()
        packed[name] = (rows / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8).view(value.shape)
        packed[name + ".scale"] = scale
    save_file(packed, path)
