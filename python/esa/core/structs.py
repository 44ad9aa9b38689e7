# SPDX-License-Identifier: Apache-2.0
"""The structs and constants of include/esa/*.h, field for field.

library.py compares the sizes with the library's own table when it opens the library, so a header that changed without
this file is an error at import and not a crash later. Names of enum values are the words of the command line."""
from __future__ import annotations

import ctypes as C
import numbers
import re
from collections.abc import Iterable
from typing import Any

# ---- constants of esa.h
F32, F16, BF16 = range(3)
CPU, CUDA = range(2)
DTYPES = {"float32": F32, "float16": F16, "bfloat16": BF16}
SELECTORS = {"full": 0, "entropy": 1, "rf_v2": 2, "ada_bsa": 3, "random": 4, "error": 5}
TRAITS = {"reads_v": 1, "blind": 2, "weighs_tail": 4, "adaptive": 8, "centroid": 16, "causal": 32, "compat": 64,
          "spends": 128}
MODES = {"fixed": 0, "compat": 1, "compat-round": 2}
ORDERS = {"raster": 0, "tile": 1, "tile3d": 2, "hilbert": 3, "adaptive": 4}
ORDER_DEFAULT = -1
RELEASES = {"3.0": 30, "3.1": 31}       # of MindIE-SD, esa_select_params.release
MAX_SPANS = 8
TAILS = {"none": 0, "pooled": 1, "centroid": 2, "levels": 3}
# ---- constants of esa_carry.h
CARRY_FORMATS = {"e4m3": 0, "bf16": 1}
CARRY_ADD, CARRY_MAKE = range(2)
# ---- constants of esa_session.h
SESSION_MODES = {"dense": 0, "online": 1, "cached": 2, "record": 3, "probe": 4}
MAX_EXACT_ROWS = 16
GROUP_SIZES = (1, 2, 4, 8, 16)
REFRESH_EARLY = -1
PRESETS = {"faithful": 0, "balanced": 1, "fast": 2}
CALL_KINDS = {"self": 0, "cross": 1}
STEP_MAPS = {"exact": 0, "nearest": 1}
CARRY_OFF, CARRY_AUTO = 0, -1
IMPORTANCES = {"none": 0, "u8": 1, "f16": 2}

_Reserved = C.c_int64 * 4
_Grid = C.c_int32 * 3


class CtxParams(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("threads", C.c_int32), ("alloc", C.c_void_p), ("dealloc", C.c_void_p),
                ("alloc_user", C.c_void_p), ("log", C.c_void_p), ("log_user", C.c_void_p), ("cuda_stream", C.c_void_p),
                ("cuda_device", C.c_int32), ("cpu_level", C.c_int32), ("reserved", _Reserved)]


class Tensor(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("dtype", C.c_int32), ("device", C.c_int32), ("device_index", C.c_int32),
                ("data", C.c_void_p), ("dim", C.c_int64 * 4), ("stride", C.c_int64 * 4)]


class Span(C.Structure):
    _fields_ = [("start", C.c_int32), ("grid", _Grid)]


class Layout(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("order", C.c_int32), ("order_applied", C.c_int32),
                ("protect_first_frame", C.c_int32), ("window", _Grid), ("grid_q", _Grid), ("text_front_q", C.c_int32),
                ("text_back_q", C.c_int32), ("grid_k", _Grid), ("text_front_k", C.c_int32), ("text_back_k", C.c_int32),
                ("span_count", C.c_int32), ("span_align", C.c_int32), ("span", Span * MAX_SPANS),
                ("reserved", C.c_int32 * 6)]


class SelectParams(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("selector", C.c_int32), ("mode", C.c_int32), ("block_q", C.c_int32),
                ("block_k", C.c_int32), ("samples", C.c_int32), ("budget", C.c_double), ("cdf_threshold", C.c_double),
                ("scale", C.c_double), ("keep_sink", C.c_int32), ("keep_recent", C.c_int32), ("causal", C.c_int32),
                ("branch", C.c_int32), ("seed", C.c_uint64), ("kv_len", C.c_void_p), ("layout", Layout),
                ("group_q", C.c_int32), ("group_k", C.c_int32), ("tail", C.c_int32), ("fine", C.c_int32),
                ("release", C.c_int32), ("reserved0", C.c_int32), ("reserved", C.c_int64 * 1)]


class AttentionParams(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("tail", C.c_int32), ("causal", C.c_int32), ("exact_rows", C.c_int32),
                ("scale", C.c_double), ("kv_len", C.c_void_p), ("lse", C.c_void_p), ("precision", C.c_int32),
                ("reserved0", C.c_int32), ("reserved", C.c_int64 * 3)]


class Shapes(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("dtype", C.c_int32), ("device", C.c_int32), ("device_index", C.c_int32),
                ("B", C.c_int64), ("Hq", C.c_int64), ("Hkv", C.c_int64), ("Nq", C.c_int64), ("Nk", C.c_int64),
                ("D", C.c_int64), ("reserved", _Reserved)]


class MaskInfo(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("block_q", C.c_int32), ("block_k", C.c_int32), ("device", C.c_int32),
                ("B", C.c_int64), ("H", C.c_int64), ("Nq", C.c_int64), ("Nk", C.c_int64), ("nq", C.c_int64),
                ("nk", C.c_int64), ("density_asked", C.c_double), ("density", C.c_double), ("kept", C.c_int64),
                ("selector", C.c_int32), ("mode", C.c_int32), ("runnable", C.c_int32), ("fine", C.c_int32),
                ("layout", Layout), ("fine_blocks", C.c_int64), ("reserved", C.c_int64 * 3)]


class SessionParams(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("mode", C.c_int32), ("layers", C.c_int32), ("steps", C.c_int32),
                ("branches", C.c_int32), ("strict", C.c_int32), ("dense_first_layer", C.c_int32),
                ("refresh_every", C.c_int32), ("warmup_frac", C.c_double), ("min_tokens", C.c_int64),
                ("dense_layers", C.POINTER(C.c_int32)), ("dense_layer_count", C.c_int32), ("step_map", C.c_int32),
                ("model", C.c_char_p), ("config_hash", C.c_char_p), ("masks", C.c_void_p), ("record_groups", C.c_int32),
                ("record_per_branch", C.c_int32), ("select", SelectParams), ("attention", AttentionParams),
                ("first_head", C.c_int32), ("total_heads", C.c_int32), ("order_every", C.c_int32),
                ("share_branches", C.c_int32), ("density", C.POINTER(C.c_double)), ("work", C.c_double),
                ("plan", C.c_void_p), ("sigma", C.POINTER(C.c_double)), ("probe", C.POINTER(C.c_double)),
                ("probe_count", C.c_int32), ("work_or_least", C.c_int32), ("steps16_first", C.c_int32),
                ("steps16_last", C.c_int32), ("layers16_count", C.c_int32), ("step_branches", C.c_int32),
                ("layers16", C.POINTER(C.c_int32)), ("carry", C.c_int32), ("anchor_count", C.c_int32),
                ("anchors", C.POINTER(C.c_int32)), ("carry_format", C.c_int32), ("reserved0", C.c_int32),
                ("carry_room", C.c_int64), ("carry_alloc", C.c_void_p), ("carry_free", C.c_void_p),
                ("carry_user", C.c_void_p), ("reserved", C.c_int64 * 2)]


# Functions of esa_session_params.carry_alloc and carry_free.
CarryAlloc = C.CFUNCTYPE(C.c_void_p, C.c_void_p, C.c_int64)
CarryFree = C.CFUNCTYPE(None, C.c_void_p, C.c_void_p, C.c_int64)


class SessionStats(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("reserved0", C.c_int32), ("calls", C.c_int64), ("dense_calls", C.c_int64),
                ("sparse_calls", C.c_int64), ("fallback_calls", C.c_int64), ("masks_made", C.c_int64),
                ("masks_loaded", C.c_int64), ("density_asked", C.c_double), ("density", C.c_double),
                ("mass", C.c_double), ("select_seconds", C.c_double), ("attention_seconds", C.c_double),
                ("device_bytes", C.c_int64), ("kernel", C.c_char * 32), ("work", C.c_double),
                ("work_asked", C.c_double), ("eight_calls", C.c_int64), ("anchor_calls", C.c_int64),
                ("carried_calls", C.c_int64), ("carry_age", C.c_double), ("carry_bytes", C.c_int64),
                ("carry_host_bytes", C.c_int64), ("reserved", C.c_int64 * 1)]


class MaskFileInfo(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("format_version", C.c_int32), ("selector", C.c_int32),
                ("block_q", C.c_int32), ("block_k", C.c_int32), ("layers", C.c_int32), ("steps", C.c_int32),
                ("groups", C.c_int32), ("branches", C.c_int32), ("importance", C.c_int32), ("prompts", C.c_int32),
                ("budget_count", C.c_int32), ("budget_permille", C.c_int32 * 16), ("dense_first_layer", C.c_int32),
                ("mode", C.c_int32), ("samples", C.c_int32), ("stored_layers", C.c_int32), ("stored_groups", C.c_int32),
                ("causal", C.c_int32), ("warmup_frac", C.c_double), ("H", C.c_int64), ("Nq", C.c_int64),
                ("Nk", C.c_int64), ("nq", C.c_int64), ("nk", C.c_int64), ("file_bytes", C.c_int64), ("layout", Layout),
                ("model", C.c_char * 128), ("config_hash", C.c_char * 80), ("scale", C.c_double),
                ("tail", C.c_int32), ("fine", C.c_int32), ("group_q", C.c_int32), ("group_k", C.c_int32),
                ("exact_rows", C.c_int32), ("reserved0", C.c_int32)]


class MaskBuild(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("importance", C.c_int32), ("budgets", C.POINTER(C.c_double)),
                ("budget_count", C.c_int32), ("store_dense", C.c_int32), ("dense_first_layer", C.c_int32),
                ("steps", C.c_int32), ("warmup_frac", C.c_double), ("plan", C.c_void_p), ("exact_rows", C.c_int32),
                ("reserved0", C.c_int32), ("reserved", C.c_int64 * 2)]


class TensorInfo(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("dtype", C.c_int32), ("rank", C.c_int32), ("reserved0", C.c_int32),
                ("dim", C.c_int64 * 8), ("bytes", C.c_int64), ("name", C.c_char_p), ("data", C.c_void_p),
                ("reserved", C.c_int64 * 2)]


class DeviceInfo(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("ordinal", C.c_int32), ("major", C.c_int32), ("minor", C.c_int32),
                ("multiprocessors", C.c_int32), ("driver", C.c_int32), ("runtime", C.c_int32), ("reserved0", C.c_int32),
                ("memory", C.c_int64), ("free_memory", C.c_int64), ("name", C.c_char * 64), ("kernels", C.c_char * 16),
                ("plugin", C.c_char * 16), ("reserved", _Reserved)]


class WorkPlanInfo(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("format_version", C.c_int32), ("layers", C.c_int32), ("steps", C.c_int32),
                ("points", C.c_int32), ("levels", C.c_int32), ("prompts", C.c_int32), ("selector", C.c_int32),
                ("order", C.c_int32), ("tail", C.c_int32), ("block_q", C.c_int32), ("block_k", C.c_int32),
                ("model", C.c_char * 128), ("config_hash", C.c_char * 80), ("anchors", C.c_int32),
                ("reserved0", C.c_int32), ("reserved", C.c_int64 * 3)]


class WorkCosts(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("branches", C.c_int32), ("share_branches", C.c_int32),
                ("refresh_every", C.c_int32), ("order_every", C.c_int32), ("or_least", C.c_int32),
                ("select", C.c_double), ("order", C.c_double), ("exact", C.c_double), ("floor", C.c_double),
                ("carry", C.c_int32), ("anchor_count", C.c_int32), ("anchors", C.POINTER(C.c_int32)),
                ("reserved", C.c_int64 * 2)]


class Carry(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("format", C.c_int32), ("device", C.c_int32), ("device_index", C.c_int32),
                ("B", C.c_int64), ("H", C.c_int64), ("N", C.c_int64), ("D", C.c_int64), ("value", C.c_void_p),
                ("scale", C.c_void_p), ("reserved", C.c_int64 * 2)]


class StepChange(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("step", C.c_int32), ("computed", C.c_int32), ("reserved0", C.c_int32),
                ("x_change", C.c_double), ("v_size", C.c_double * 2), ("v_change", C.c_double * 2)]


# In the order of ESA_ABI_*.
ABI: tuple[type[C.Structure], ...] = (CtxParams, Tensor, Layout, SelectParams, AttentionParams, Shapes, MaskInfo,
                                      SessionParams, SessionStats, MaskFileInfo, TensorInfo, DeviceInfo,
                                      WorkPlanInfo, WorkCosts, StepChange, Carry)


# ---- esa_video.h, as far as the package uses it
class FramesInfo(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("frames", C.c_int32), ("height", C.c_int32), ("width", C.c_int32),
                ("fps", C.c_double), ("rgb", C.c_void_p), ("codec", C.c_char * 20), ("plays_in_browsers", C.c_int32),
                ("reserved", C.c_int64 * 1)]


class SaveParams(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("quality", C.c_int32), ("fps", C.c_double), ("codec", C.c_int32),
                ("pixels", C.c_int32), ("reserved", C.c_int64 * 3)]


class LoadParams(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("reserved0", C.c_int32), ("fps", C.c_double), ("reserved", _Reserved)]


class Metrics(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("frames", C.c_int32), ("psnr", C.c_double), ("ssim", C.c_double),
                ("psnr_min", C.c_double), ("ssim_min", C.c_double), ("lpips", C.c_double), ("lpips_max", C.c_double),
                ("flicker", C.c_double), ("reserved", C.c_int64 * 1)]


CODECS = {"auto": 0, "h264": 1, "hevc": 2, "av1": 3, "mpeg4": 4, "lossless": 5}
# Position in ESA_VIDEO_ABI_* -> struct.
VIDEO_ABI: dict[int, type[C.Structure]] = {5: FramesInfo, 6: SaveParams, 7: Metrics, 8: LoadParams}


def word(table: dict[str, int], value: int) -> str:
    """The name of an enum value; the number itself where it has none."""
    return next((name for name, number in table.items() if number == value), str(value))


def number(table: dict[str, int], name: str, what: str) -> int:
    """The enum value of a name, or a ValueError that lists the names."""
    if not isinstance(name, str) or name not in table:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, table))}, not {name!r}")
    return table[name]


def whole(value: Any) -> bool:
    """True for an integer, numpy's included; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def precision(value: Any) -> int:
    """Bits of the products of attention."""
    if not whole(value) or value not in (8, 16):
        raise ValueError(f"precision must be 8 or 16, not {value!r}")
    return int(value)


def exact_rows(value: Any) -> int:
    """A number of exact rows per query block, or a ValueError."""
    if not whole(value) or not 0 <= value <= MAX_EXACT_ROWS:
        raise ValueError(f"exact_rows must be an integer of 0 to {MAX_EXACT_ROWS}, not {value!r}")
    return int(value)


def groups(value: Any) -> tuple[int, int]:
    """Groups of the error selector (queries, keys) as a tuple, or a ValueError."""
    message = "groups must be two of 1, 2, 4, 8, 16 (queries and keys of a mean)"
    found = wholes(value, message)
    if len(found) != 2 or any(g not in GROUP_SIZES for g in found):
        raise ValueError(f"{message}, not {value!r}")
    return (found[0], found[1])


def schedule(value: Any, name: str) -> int:
    """The library's number of a schedule ("early", or an integer of at least 0), or a ValueError."""
    if isinstance(value, str) and value == "early":
        return REFRESH_EARLY
    if not whole(value) or value < 0:
        raise ValueError(f"{name} must be 'early' or an integer of at least 0, not {value!r}")
    return int(value)


def schedule_word(value: int) -> int | str:
    """A schedule as users say it."""
    return "early" if value == REFRESH_EARLY else value


def carry(value: Any) -> str | int | tuple[int, ...]:
    """Carry as EsaConfig holds it: "auto", "off", a number of anchors or their steps; text as on the command line. Or a
    ValueError."""
    message = "carry must be 'auto', 'off', a number of anchors, or their steps, ascending"
    found = value
    if isinstance(value, str) and value not in ("auto", "off"):
        parts = value.split(",")
        if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
            raise ValueError(f"{message}, not {value!r}")
        found = [int(part) for part in parts] if len(parts) > 1 else int(parts[0])
    if isinstance(found, str):
        return found
    if whole(found) and found >= 1:
        return int(found)
    steps = wholes(found, message) if not whole(found) else ()
    if not steps or steps[0] < 0 or any(a >= b for a, b in zip(steps, steps[1:])):
        raise ValueError(f"{message}, not {value!r}")
    return steps


def carry_word(value: int) -> int | str:
    """esa_session_params.carry as users say it."""
    return {CARRY_OFF: "off", CARRY_AUTO: "auto"}.get(value, value)


def size(value: Any, name: str) -> int:
    """A number of bytes, or text such as "16G" or "800M", as an integer, or a ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)([KMGT]?)", value) if isinstance(value, str) else None
    if found is not None:
        bytes_ = float(found[1]) * 1024 ** " KMGT".index(found[2] or " ")
    else:
        bytes_ = value if whole(value) else -1
    if not 0 <= bytes_ <= 9e15:
        raise ValueError(f"{name} must be a number of bytes, or a size such as '16G' or '800M', not {value!r}")
    return int(bytes_)


def wholes(value: Any, message: str) -> tuple[int, ...]:
    """Several integers as a tuple, or a ValueError with the message and the value."""
    items = (None,) if isinstance(value, (str, bytes)) or not isinstance(value, Iterable) else tuple(value)
    if not all(whole(v) for v in items):
        raise ValueError(f"{message}, not {value!r}")
    return tuple(int(v) for v in items)
