# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/lpips.safetensors: distances of the package lpips with weights and pictures by formula (fill.py),
which the test in C makes again, so that the file holds results only (pip install torch torchvision lpips==0.1.4
safetensors).

    python tools/golden/lpips_golden.py tests/golden/lpips.safetensors

NET.HxW is F64 [1 + 5]: the distance and those of the five layers."""
import sys
import warnings

import lpips
import numpy as np
import torch
from safetensors.numpy import save_file

import fill

SIZES = {"alex": ((31, 31), (40, 53), (64, 47)), "vgg": ((16, 16), (33, 40))}


def picture(name, height, width):
    return np.floor(
        (fill.unit(name, height * width * 3).astype(np.float64) + 1) * 128).astype(np.uint8).reshape(height, width, 3)


def pair(height, width):
    """A picture and one that differs from it by up to 40 levels."""
    a = picture("a", height, width)
    d = np.floor(fill.unit("d", height * width * 3).astype(np.float64) * 41).reshape(height, width, 3)
    return a, np.clip(a + d, 0, 255).astype(np.uint8)


def network(net):
    warnings.simplefilter("ignore")
    model = lpips.LPIPS(net=net, version="0.1", lpips=True, pnet_rand=True, pretrained=False, verbose=False).eval()
    convs = [m for s in range(1, 6) for m in getattr(model.net, f"slice{s}") if isinstance(m, torch.nn.Conv2d)]
    with torch.no_grad():
        for i, conv in enumerate(convs):
            # Twice the variance of fill.weight: ReLU halves it, and the last layers are to have something to say.
            scale = np.sqrt(6.0 / conv.weight[0].numel())
            conv.weight.copy_(fill.tensor(f"{net}.conv.{i}.weight", tuple(conv.weight.shape), scale))
            conv.bias.copy_(fill.weight(f"{net}.conv.{i}.bias", tuple(conv.bias.shape)))
        for j in range(5):
            head = model.lins[j].model[1]
            head.weight.copy_(fill.tensor(f"{net}.lin.{j}.weight", tuple(head.weight.shape), 0.5, 0.5))
    return model


def tensor(rgb):
    return torch.from_numpy(rgb).permute(2, 0, 1)[None].float() / 127.5 - 1


def main():
    results = {}
    torch.set_num_threads(1)
    with torch.no_grad():
        for net, sizes in SIZES.items():
            model = network(net)
            for height, width in sizes:
                a, b = pair(height, width)
                total, layers = model(tensor(a), tensor(b), retPerLayer=True)
                results[f"{net}.{height}x{width}"] = np.array([float(total)] + [float(x) for x in layers])
    save_file(results, sys.argv[1], {"lpips": "0.1.4", "torch": torch.__version__})


if __name__ == "__main__":
    main()
