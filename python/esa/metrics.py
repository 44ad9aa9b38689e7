# SPDX-License-Identifier: Apache-2.0
"""ESA's own module name; the code is in esa/compat/metrics.py."""
from .compat.metrics import Comparison, compare, find_lpips, lpips, psnr, ssim

__all__ = ["Comparison", "compare", "find_lpips", "lpips", "psnr", "ssim"]
