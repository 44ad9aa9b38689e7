# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/metrics.safetensors: PSNR and SSIM of scikit-image on small pictures (pip install
scikit-image==0.26.0 safetensors).

    python tools/golden/metrics.py tests/golden/metrics.safetensors

N.a and N.b are videos U8 [frames, height, width, 3]; N.psnr, N.ssim F64 [frames] their frames' values, N.total the
PSNR over all frames."""
import sys

import numpy as np
import skimage
from safetensors.numpy import save_file
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

rng = np.random.default_rng(1)
tensors = {}


def clip(x):
    return np.clip(np.rint(x), 0, 255).astype(np.uint8)


def smooth(frames, height, width):
    t, y, x, c = np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    return 127 + 100 * np.sin(0.3 * x + 0.2 * t + c) * np.cos(0.17 * y - c)


def add(name, a, b):
    a, b = clip(a), clip(b)
    tensors[f"{name}.a"], tensors[f"{name}.b"] = a, b
    tensors[f"{name}.psnr"] = np.array([peak_signal_noise_ratio(p, q, data_range=255) for p, q in zip(a, b)])
    tensors[f"{name}.ssim"] = np.array([
        structural_similarity(p, q, channel_axis=-1, data_range=255, gaussian_weights=True, sigma=1.5,
                              use_sample_covariance=False) for p, q in zip(a, b)
    ])
    tensors[f"{name}.total"] = np.array([peak_signal_noise_ratio(a, b, data_range=255)])


base = smooth(3, 24, 40)
add("noise", base, base + rng.normal(0, 1, base.shape) * np.array([2, 10, 60])[:, None, None, None])
add("shift", smooth(2, 31, 17), np.roll(smooth(2, 31, 17), 2, axis=2))
add("smallest", rng.uniform(0, 255, (1, 11, 11, 3)), rng.uniform(0, 255, (1, 11, 11, 3)))
add("darker", smooth(1, 16, 16), 0.8 * smooth(1, 16, 16) + 5)
add("opposite", np.zeros((1, 12, 13, 3)), np.full((1, 12, 13, 3), 255))
save_file(tensors, sys.argv[1], {"scikit-image": skimage.__version__, "numpy": np.__version__})
