# SPDX-License-Identifier: Apache-2.0
"""PSNR, SSIM, worst frame and flicker of clips against the dense ones, as docs/evaluate.md defines them."""
import math

import torch

SIGMA = 1.5


def psnr_of(mse):
    return 10 * math.log10(255 ** 2 / mse) if mse > 0 else 100.0


def window(device):
    g = torch.arange(11, dtype=torch.float64, device=device) - 5
    g = torch.exp(-g * g / (2 * SIGMA ** 2))
    return g / g.sum()


def blur(x, g):
    h, w = x.shape[-2:]
    x = sum(c * x[..., i:h - 10 + i, :] for i, c in enumerate(g))
    return sum(c * x[..., i:w - 10 + i] for i, c in enumerate(g))


def compare(a, b):
    """Lists over the clips: psnr, ssim, psnr_min, flicker; a (reference), b: u8 [n, 3, T, H, W]. An identical clip
    counts as 100 dB."""
    out = {"psnr": [], "ssim": [], "psnr_min": [], "flicker": []}
    g = window(a.device).tolist()
    for x, y in zip(a, b):
        x, y = x.double(), y.double()
        mse = (x - y).square().mean((0, 2, 3))
        out["psnr"].append(psnr_of(float(mse.mean())))
        out["psnr_min"].append(psnr_of(float(mse.max())))
        ux, uy, xx, yy, xy = blur(x, g), blur(y, g), blur(x * x, g), blur(y * y, g), blur(x * y, g)
        c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
        s = (2 * ux * uy + c1) * (2 * (xy - ux * uy) + c2)
        out["ssim"].append(float((s / ((ux * ux + uy * uy + c1) * (xx - ux * ux + yy - uy * uy + c2))).mean()))
        change = (y[:, 1:] - y[:, :-1]) - (x[:, 1:] - x[:, :-1])
        out["flicker"].append(float(change.square().mean().sqrt()) if change.numel() else 0.0)
    return out
