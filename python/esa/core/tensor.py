# SPDX-License-Identifier: Apache-2.0
"""torch tensors and numpy arrays as the library's strided views. Nothing is copied, and torch is not imported here.

The library takes four dimensions B, H, N, D with stride 1 in D. A layout says which dimension of the caller's array is
which: "BNSD" [B, heads, tokens, D] or "BSND" [B, tokens, heads, D]."""
from __future__ import annotations

import ctypes as C
import sys
from typing import Any, NamedTuple

from . import structs as T

LAYOUTS = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3)}


class Device(NamedTuple):
    """Where an array lies: kind "cpu" or "cuda", the ordinal, and for CUDA the handle of torch's current stream
    there."""
    kind: str
    ordinal: int
    stream: int


CPU_DEVICE = Device("cpu", -1, 0)


def is_torch(array: Any) -> bool:
    """True for a torch tensor (and then torch is imported already)."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def is_numpy(array: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(array, numpy.ndarray)


def dtype_name(array: Any) -> str:
    """"float32", "bfloat16", ... of a tensor or an array."""
    return str(array.dtype).removeprefix("torch.")


def device_of(array: Any) -> Device:
    """Where an array lies, with torch's current stream."""
    if not is_torch(array) or array.device.type == "cpu":
        return CPU_DEVICE
    if array.device.type != "cuda":
        raise ValueError(f"tensors on device {array.device} cannot be used: only CPU and CUDA are supported")
    torch = sys.modules["torch"]
    index = array.device.index
    return Device("cuda", index, int(torch.cuda.current_stream(index).cuda_stream))


def axes_of(layout: str) -> tuple[int, int, int, int]:
    """Positions of B, H, N, D in arrays of a layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"input_layout must be 'BNSD' or 'BSND', not {layout!r}")
    return LAYOUTS[layout]


def shape_of(array: Any, layout: str) -> tuple[int, int, int, int]:
    """B, H, N, D."""
    a = axes_of(layout)
    return (int(array.shape[a[0]]), int(array.shape[a[1]]), int(array.shape[a[2]]), int(array.shape[a[3]]))


def check_array(array: Any, name: str) -> None:
    """ValueError if an array cannot be a view because of its kind, dtype or number of dimensions."""
    if not (is_torch(array) or is_numpy(array)):
        raise ValueError(f"{name} must be a torch tensor or a numpy array, not {type(array).__name__}")
    if array.ndim != 4:
        raise ValueError(
            f"{name} must have four dimensions (batch, heads and tokens as the layout says, head dimension), it has "
            f"{array.ndim}")
    if dtype_name(array) not in T.DTYPES:
        raise ValueError(f"{name} has dtype {dtype_name(array)}; float32, float16 and bfloat16 are supported")


def _strides(array: Any) -> tuple[int, ...] | None:
    """In elements, or None where a stride is no whole number of elements or negative."""
    if is_torch(array):
        return tuple(array.stride())
    size = array.itemsize
    if any(s % size or s < 0 for s in array.strides):
        return None
    return tuple(s // size for s in array.strides)


def viewable(array: Any) -> bool:
    """True if `view` takes it as it lies: D dense, strides in whole elements."""
    strides = _strides(array)
    return strides is not None and (strides[3] == 1 or array.shape[3] == 1)


def dense(array: Any) -> Any:
    """The array itself if it can be a view, else a contiguous copy."""
    if viewable(array):
        return array
    return array.contiguous() if is_torch(array) else sys.modules["numpy"].ascontiguousarray(array)


def address(array: Any) -> int:
    return int(array.data_ptr()) if is_torch(array) else int(array.ctypes.data)


def view(array: Any, layout: str = "BNSD", name: str = "tensor") -> T.Tensor:
    """A view of a tensor or an array where it lies. The caller keeps it alive."""
    check_array(array, name)
    if not viewable(array):
        raise ValueError(
            f"{name} needs its last dimension dense (stride 1) to be used without a copy: call .contiguous() first")
    a = axes_of(layout)
    strides = _strides(array)
    assert strides is not None
    device = device_of(array)
    out = T.Tensor(C.sizeof(T.Tensor), T.DTYPES[dtype_name(array)], T.CUDA if device.kind == "cuda" else T.CPU,
                   max(device.ordinal, 0), address(array))
    out.dim[:] = shape_of(array, layout)
    out.stride[:] = (strides[a[0]], strides[a[1]], strides[a[2]], 1)
    return out


def view_written(array: Any, layout: str = "BNSD", name: str = "out") -> T.Tensor:
    """A view of an array that a call writes into. torch has no read-only tensors."""
    out = view(array, layout, name)
    if is_numpy(array) and not array.flags.writeable:
        raise ValueError(f"{name} is read-only, expected an array that can be written (array.flags.writeable)")
    return out


def empty_like(array: Any) -> Any:
    """A contiguous array of the same shape, dtype and device."""
    if is_torch(array):
        return sys.modules["torch"].empty(array.shape, dtype=array.dtype, device=array.device)
    return sys.modules["numpy"].empty(array.shape, array.dtype)


def empty_float32(like: Any, shape: tuple[int, ...]) -> Any:
    """A contiguous float32 array beside another one."""
    if is_torch(like):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=torch.float32, device=like.device)
    numpy = sys.modules["numpy"]
    return numpy.empty(shape, numpy.float32)


def lse_view(array: Any) -> T.Tensor:
    """A view [B, H, N, 1] of a float32 array [B, H, N], which a call writes. Any strides will do."""
    if not (is_torch(array) or is_numpy(array)) or array.ndim != 3:
        given = f"{array.ndim} dimensions" if is_torch(array) or is_numpy(array) else type(array).__name__
        raise ValueError(f"lse must be a torch tensor or a numpy array [B, heads, tokens], not {given}")
    return view_written(array[..., None], "BNSD", "lse")


def lengths(kv_len: Any, like: Any, batch: int) -> Any:
    """Key lengths as contiguous int32[B] on the device of `like`; None stays None. A sequence of ints is taken too."""
    if kv_len is None:
        return None
    if is_torch(like):
        torch = sys.modules["torch"]
        kv_len = torch.as_tensor(kv_len, dtype=torch.int32, device=like.device).contiguous()
    else:
        numpy = sys.modules["numpy"]
        kv_len = numpy.ascontiguousarray(kv_len, numpy.int32)
    if tuple(kv_len.shape) != (batch,):
        raise ValueError(f"kv_len must hold one length per batch entry ({batch}), its shape is {tuple(kv_len.shape)}")
    return kv_len


def check_same(q: Any, k: Any, v: Any, **more: Any) -> None:
    """q, k and v, and more by name, of one library, one dtype, one device, one batch and one head dimension."""
    others = {"k": k, "v": v, **more}
    for name, x in {"q": q, **others}.items():
        if not (is_torch(x) or is_numpy(x)):
            raise ValueError(f"{name} must be a torch tensor or a numpy array, not {type(x).__name__}")
    for name, x in others.items():
        if is_torch(x) != is_torch(q):
            raise ValueError(f"q and {name} must both be torch tensors or both numpy arrays")
        if x.dtype != q.dtype:
            raise ValueError(f"q has dtype {dtype_name(q)} and {name} {dtype_name(x)}: they must agree")
        for i, word in ((0, "batch"), (3, "head dim")):     # the same places in both layouts
            if x.ndim == q.ndim == 4 and x.shape[i] != q.shape[i]:
                raise ValueError(f"q and {name} differ in {word}: {q.shape[i]} and {x.shape[i]}")
        if is_torch(q) and x.device != q.device:
            raise ValueError(f"q is on {q.device} and {name} on {x.device}: they must be on one device")
