# SPDX-License-Identifier: Apache-2.0
"""Videos as files and as tensors, through libesa_video: the readers, writers and metrics of the `esa` command.

A video is uint8 [frames, height, width, 3], RGB (what `esa.models.generate_video` returns): a torch tensor on the CPU
or a numpy array. Formats: .mp4 (read: also .mkv, .webm, .avi and others, through FFmpeg), .y4m, .safetensors and .npy
(lossless), a folder of PNG."""
from __future__ import annotations

import ctypes as C
import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

from . import structs as T
from .context import Context, shared_context, usable
from .library import load


class Frames:
    """An esa_frames: pictures of one size, with a speed in frames per second."""

    def __init__(self, context: Context, ptr: C.c_void_p) -> None:
        """Takes the pointer over."""
        self._context, self._ptr = context, ptr
        context.own(ptr, load().video.esa_frames_free)

    def __del__(self, usable: Callable[[int], bool] = usable) -> None:
        if getattr(self, "_ptr", None) and usable(self._context.process):
            self._context.release(self._ptr)

    @property
    def ptr(self) -> C.c_void_p:
        return self._ptr

    @property
    def info(self) -> T.FramesInfo:
        info = T.FramesInfo(struct_size=C.sizeof(T.FramesInfo))
        self._context.run(load().video.esa_frames_get_info, self._ptr, C.byref(info))
        return info

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(frames, height, width, 3)."""
        i = self.info
        return (i.frames, i.height, i.width, 3)

    @property
    def fps(self) -> float:
        return float(self.info.fps)

    @classmethod
    def of(cls, video: Any, fps: float = 16.0) -> Frames:
        """From a tensor or an array uint8 [frames, height, width, 3]; copied."""
        import numpy
        array = numpy.ascontiguousarray(video.detach().cpu().numpy() if hasattr(video, "detach") else video)
        if array.dtype != numpy.uint8 or array.ndim != 4 or array.shape[3] != 3 or 0 in array.shape:
            raise ValueError(f"a video is uint8 [frames, height, width, 3], this is {array.dtype} {list(array.shape)}")
        context, ptr = shared_context(), C.c_void_p()
        context.run(load().video.esa_frames_create, context.ptr, C.byref(ptr), array.ctypes.data, *array.shape[:3],
                    float(fps))
        return cls(context, ptr)

    @classmethod
    def read(cls, path: str | os.PathLike[str], fps: float = 0.0) -> Frames:
        """Reads a file or a folder of PNG, recognised by content. fps is used if the file has none."""
        context, ptr = shared_context(), C.c_void_p()
        params = load().video.esa_load_params_default()
        params.fps = fps
        context.run(load().video.esa_frames_load, context.ptr, C.byref(ptr), os.fsencode(path), C.byref(params))
        return cls(context, ptr)

    def array(self) -> Any:
        """A copy of the pictures as a numpy array."""
        import numpy
        info = self.info
        size = info.frames * info.height * info.width * 3
        return numpy.frombuffer((C.c_uint8 * size).from_address(info.rgb), numpy.uint8).reshape(self.shape).copy()

    def save(self, path: str | os.PathLike[str], *, fps: float = 0.0, quality: int = 0, codec: str = "auto") -> None:
        """Writes the format of the ending, to a temporary name that is then renamed."""
        params = load().video.esa_save_params_default()
        params.fps, params.quality, params.codec = fps, quality, T.number(T.CODECS, codec, "codec")
        self._context.run(load().video.esa_frames_save, self._context.ptr, self._ptr, os.fsencode(path),
                          C.byref(params))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How near a video is to its reference. psnr is infinite for equal videos, lpips NaN where it was not measured,
    flicker NaN for one frame; `each` has one dict of psnr, ssim, lpips, flicker per frame."""
    psnr: float
    ssim: float
    lpips: float
    flicker: float
    psnr_min: float
    ssim_min: float
    lpips_max: float
    each: tuple[dict[str, float], ...]

    @property
    def identical(self) -> bool:
        return math.isinf(self.psnr)


class Lpips:
    """Weights of LPIPS, from a file that tools/convert_lpips.py wrote."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._context, self.ptr = shared_context(), C.c_void_p()
        self._context.run(load().video.esa_lpips_open, self._context.ptr, C.byref(self.ptr), os.fsencode(path))
        self._context.own(self.ptr, load().video.esa_lpips_free)

    def __del__(self, usable: Callable[[int], bool] = usable) -> None:
        if getattr(self, "ptr", None) and usable(self._context.process):
            self._context.release(self.ptr)

    @property
    def net(self) -> str:
        """"alex" or "vgg"."""
        return str(load().video.esa_lpips_net(self.ptr).decode())


_METRICS = ("psnr", "ssim", "lpips", "flicker")


def compare(reference: Frames, frames: Frames, lpips: Lpips | None = None) -> Comparison:
    """PSNR, SSIM, flicker, and LPIPS with its weights, of each frame and of the whole."""
    context = shared_context()
    metrics = T.Metrics(struct_size=C.sizeof(T.Metrics))
    each = (C.c_double * (len(_METRICS) * reference.shape[0]))()
    context.run(load().video.esa_frames_measure, context.ptr, C.byref(metrics), C.cast(each, C.c_void_p), reference.ptr,
                frames.ptr, lpips.ptr if lpips is not None else None, None, None)
    rows = tuple(dict(zip(_METRICS, each[i:i + len(_METRICS)])) for i in range(0, len(each), len(_METRICS)))
    return Comparison(metrics.psnr, metrics.ssim, metrics.lpips, metrics.flicker, metrics.psnr_min, metrics.ssim_min,
                      metrics.lpips_max, rows)
