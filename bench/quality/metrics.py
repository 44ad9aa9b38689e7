# SPDX-License-Identifier: Apache-2.0
"""PSNR, SSIM, LPIPS, worst frame and flicker of clips against the dense ones, as docs/evaluate.md defines them."""
import json
import math
import struct
import sys

import torch
from torch.nn import functional

from model import read_safetensors

SIGMA = 1.5
FRAMES = 8                                          # of LPIPS at once: bounds memory, changes no result
# Convolutions of LPIPS' networks: (in, out, kernel, window of the pooling in front or 0, 1 if the output is compared).
NETS = {
    "alex": ((3, 64, 11, 0, 1), (64, 192, 5, 3, 1), (192, 384, 3, 3, 1), (384, 256, 3, 0, 1), (256, 256, 3, 0, 1)),
    "vgg": ((3, 64, 3, 0, 0), (64, 64, 3, 0, 1), (64, 128, 3, 2, 0), (128, 128, 3, 0, 1), (128, 256, 3, 2, 0),
            (256, 256, 3, 0, 0), (256, 256, 3, 0, 1), (256, 512, 3, 2, 0), (512, 512, 3, 0, 0), (512, 512, 3, 0, 1),
            (512, 512, 3, 2, 0), (512, 512, 3, 0, 0), (512, 512, 3, 0, 1)),
}
SHIFT, SCALE = (-.030, -.088, -.188), (.458, .448, .450)    # of pictures in [-1, 1]


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


def add_lpips(ap):
    """The option that says which weights Lpips takes."""
    ap.add_argument("--lpips", default="", metavar="FILE", help="measure LPIPS with these weights, which "
                    "tools/convert_lpips.py makes (default: LPIPS is not measured)")


class Lpips:
    """LPIPS 0.1 on the device of the clips, in f32. None in place of one means that LPIPS is not measured."""

    @staticmethod
    def open(path, device):
        """The weights of --lpips, or None without any. Ends the program if they cannot be read."""
        try:
            return Lpips(path, device) if path else None
        except OSError as e:
            sys.exit(f"--lpips: {path} cannot be read: {e.strerror}")
        except ValueError as e:
            sys.exit(f"--lpips: {e}")

    def __init__(self, path, device):
        try:
            with open(path, "rb") as f:
                head = json.loads(f.read(min(1 << 20, struct.unpack("<Q", f.read(8))[0])))
            about = head["__metadata__"]
            self.layers = NETS[about["net"]] if about["format"] == "esa-lpips-1" else None
            w = read_safetensors(path) if self.layers else {}
        # what json, UTF-8, struct and torch raise on files of other kinds
        except (KeyError, TypeError, ValueError, RuntimeError, struct.error):
            self.layers = None
        if self.layers is None:
            raise ValueError(f"{path} does not hold LPIPS weights (tools/convert_lpips.py makes them)")
        wanted = {}
        for i, (n, out, k, _, _) in enumerate(self.layers):
            wanted |= {f"conv.{i}.weight": (out, n, k, k), f"conv.{i}.bias": (out,)}
        taps = [out for _, out, _, _, tap in self.layers if tap]
        wanted |= {f"lin.{j}.weight": (out,) for j, out in enumerate(taps)}
        for name, shape in wanted.items():
            have = tuple(w[name].shape) if name in w else "missing"
            if have != shape:
                raise ValueError(f"{path}: {name} is {have}, expected {shape}")
        self.net, self.weights = about["net"], {name: w[name].to(device) for name in wanted}

    def features(self, x):
        """Unit vectors [n, C, h, w] of the layers that are compared; x: [n, 3, H, W] in [-1, 1]."""
        shift, scale = (torch.tensor(v, device=x.device).view(1, 3, 1, 1) for v in (SHIFT, SCALE))
        x = (x - shift) / scale
        for i, (_, _, k, pool, tap) in enumerate(self.layers):
            if pool:
                x = functional.max_pool2d(x, pool, 2)
            stride, border = (4, 2) if k == 11 else (1, k // 2)
            x = functional.conv2d(x, self.weights[f"conv.{i}.weight"], self.weights[f"conv.{i}.bias"], stride,
                                  border).relu()
            if tap:
                yield x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)

    def frames(self, a, b):
        """f64 [T]: distances of the frames of two clips u8 [3, T, H, W]."""
        cudnn, out = torch.backends.cudnn, []
        before, cudnn.allow_tf32 = cudnn.allow_tf32, False          # TF32 would cost three digits
        try:
            for x, y in zip(a.split(FRAMES, 1), b.split(FRAMES, 1)):
                x, y = (v.transpose(0, 1).float() / 127.5 - 1 for v in (x, y))
                total = 0
                for j, (f, g) in enumerate(zip(self.features(x), self.features(y))):
                    each = (f - g).square() * self.weights[f"lin.{j}.weight"].view(1, -1, 1, 1)
                    total = total + each.double().sum(1).mean((1, 2))
                out.append(total)
        finally:
            cudnn.allow_tf32 = before
        return torch.cat(out)


def compare(a, b, lpips=None):
    """Lists over the clips: psnr, ssim, lpips, psnr_min, flicker; a (reference), b: u8 [n, 3, T, H, W]. An identical
    clip counts as 100 dB. Without weights every lpips is None."""
    out = {"psnr": [], "ssim": [], "lpips": [], "psnr_min": [], "flicker": []}
    g = window(a.device).tolist()
    for x, y in zip(a, b):
        out["lpips"].append(float(lpips.frames(x, y).mean()) if lpips is not None else None)
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
