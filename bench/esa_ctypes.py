# SPDX-License-Identifier: Apache-2.0
"""libesa's C interface (include/esa/esa.h) through ctypes, as far as the GPU benchmark and checks need it. Views are made from torch
tensors [B,H,N,D]; nothing is copied. Struct sizes are compared with the library's when it is loaded."""
import ctypes as C
import os
import pathlib

OK = 0
F32, F16, BF16 = range(3)
CPU, CUDA = range(2)
FULL, ENTROPY, RF_V2, ADA_BSA, RANDOM = range(5)
RASTER, TILE, TILE3D, HILBERT = range(4)
NONE, POOLED, CENTROID = range(3)
TAILS = ("none", "pooled", "centroid")


def _struct(name, fields):
    return type(name, (C.Structure,), {"_fields_": fields})


def _ints(*names):
    return [(n, C.c_int32) for n in names]


def _longs(*names):
    return [(n, C.c_int64) for n in names]


_size = [("struct_size", C.c_uint32)]
_reserved = [("reserved", C.c_int64 * 4)]

CtxParams = _struct("CtxParams", _size + _ints("threads") + [(n, C.c_void_p) for n in (
    "alloc", "dealloc", "alloc_user", "log", "log_user", "cuda_stream")] + _ints("cuda_device", "cpu_level") + _reserved)
Tensor = _struct("Tensor", _size + _ints("dtype", "device", "device_index") + [
    ("data", C.c_void_p), ("dim", C.c_int64 * 4), ("stride", C.c_int64 * 4)])
Layout = _struct("Layout", _size + _ints("order", "order_applied", "protect_first_frame") + [
    ("window", C.c_int32 * 3), ("grid_q", C.c_int32 * 3)] + _ints("text_front_q", "text_back_q") + [
    ("grid_k", C.c_int32 * 3)] + _ints("text_front_k", "text_back_k") + [("reserved", C.c_int32 * 8)])
SelectParams = _struct("SelectParams", _size + _ints("selector", "mode", "block_q", "block_k", "samples") + [
    ("budget", C.c_double), ("cdf_threshold", C.c_double), ("scale", C.c_double)] + _ints(
    "keep_sink", "keep_recent", "causal", "branch") + [("seed", C.c_uint64), ("kv_len", C.c_void_p), ("layout", Layout)] + _reserved)
AttentionParams = _struct("AttentionParams", _size + _ints("tail", "causal", "reserved0") + [
    ("scale", C.c_double), ("kv_len", C.c_void_p), ("lse", C.c_void_p)] + _reserved)
Shapes = _struct("Shapes", _size + _ints("dtype", "device", "device_index") + _longs("B", "Hq", "Hkv", "Nq", "Nk", "D") + _reserved)
MaskInfo = _struct("MaskInfo", _size + _ints("block_q", "block_k", "device") + _longs("B", "H", "Nq", "Nk", "nq", "nk") + [
    ("density_asked", C.c_double), ("density", C.c_double), ("kept", C.c_int64)] + _ints("selector", "mode", "runnable", "reserved0") + [
    ("layout", Layout)] + _reserved)
DeviceInfo = _struct("DeviceInfo", _size + _ints("ordinal", "major", "minor", "multiprocessors", "driver", "runtime", "reserved0") + _longs(
    "memory", "free_memory") + [("name", C.c_char * 64), ("kernels", C.c_char * 16), ("plugin", C.c_char * 16)] + _reserved)

# Position in esa_abi() -> struct.
_ABI = {0: CtxParams, 1: Tensor, 2: Layout, 3: SelectParams, 4: AttentionParams, 5: Shapes, 6: MaskInfo, 11: DeviceInfo}


class EsaError(RuntimeError):
    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


def find_library():
    """$ESA_LIB, else the build folders of the tree, else beside the bundle's bench/ folder."""
    root = pathlib.Path(__file__).resolve().parent.parent
    places = [os.environ.get("ESA_LIB"), root / "build-cuda/libesa.so", root / "build/libesa.so", root / "libesa.so"]
    for place in places:
        if place and os.path.exists(place):
            return str(place)
    raise SystemExit("libesa.so was not found: build it (make cuda), or set ESA_LIB")


class Library:
    def __init__(self, path=None):
        self.path = path or find_library()
        self.c = c = C.CDLL(self.path)
        p = C.c_void_p
        for name, result in {"esa_ctx_params_default": CtxParams, "esa_layout_default": Layout, "esa_attention_params_default": AttentionParams,
                             "esa_shapes_default": Shapes}.items():
            getattr(c, name).restype = result
        c.esa_select_params_default.restype, c.esa_select_params_default.argtypes = SelectParams, [C.c_int32]
        for name in ("esa_version", "esa_status_name", "esa_ctx_error", "esa_plan_kernel"):
            getattr(c, name).restype = C.c_char_p
        c.esa_ctx_error.argtypes = [p]
        c.esa_abi.restype = C.POINTER(C.c_uint32)
        c.esa_plan_kernel.argtypes = [p] * 6
        c.esa_ctx_create.argtypes = [p, p]
        c.esa_plan_create.argtypes = [p] * 5
        c.esa_plan_workspace.argtypes = [p, p]
        c.esa_mask_create.argtypes = [p, p]
        c.esa_plan_select.argtypes = [p] * 5
        c.esa_plan_attention.argtypes = [p] * 8
        c.esa_attention.argtypes = [p] * 7
        c.esa_select.argtypes = [p] * 5
        c.esa_mask_from_bits.argtypes = [p] * 4
        c.esa_mask_to_bits.argtypes = [p, p]
        c.esa_mask_to_device.argtypes = [p, p, p, C.c_int32]
        c.esa_mask_get_info.argtypes = [p, p]
        c.esa_device_count.argtypes = [p, p]
        c.esa_device_get_info.argtypes = [p, p]
        for name in ("esa_ctx_free", "esa_plan_free", "esa_mask_free"):
            getattr(c, name).argtypes, getattr(c, name).restype = [p], None
        sizes = c.esa_abi()
        for i, struct in _ABI.items():
            if sizes[i] != C.sizeof(struct):
                raise SystemExit(f"{self.path}: {struct.__name__} has {sizes[i]} bytes there and {C.sizeof(struct)} here: not of one version")

    def version(self):
        return self.c.esa_version().decode()


class Ctx:
    """A context on one GPU and one stream (an integer handle). level lowers the kernels as $ESA_CUDA does."""

    def __init__(self, library, stream=0, device=0, level=None):
        self.lib, self.ptr, self.device = library, C.c_void_p(), device
        params = library.c.esa_ctx_params_default()
        params.cuda_stream, params.cuda_device = stream or None, device
        status = library.c.esa_ctx_create(C.byref(self.ptr), C.byref(params))
        if status:
            raise EsaError(status, library.c.esa_status_name(status).decode())
        if level:
            os.environ["ESA_CUDA"] = level      # read when the GPU is opened: now
            try:
                self.info()
            finally:
                del os.environ["ESA_CUDA"]

    def check(self, status):
        if status:
            raise EsaError(status, f"{self.lib.c.esa_status_name(status).decode()}: {self.lib.c.esa_ctx_error(self.ptr).decode()}")

    def info(self):
        info = DeviceInfo(struct_size=C.sizeof(DeviceInfo))
        self.check(self.lib.c.esa_device_get_info(self.ptr, C.byref(info)))
        return info

    def mask_from_bits(self, bits, B, H, Nq, Nk, block_q, block_k, layout=None):
        """bits: contiguous uint8 numpy array [B,H,nq,ceil(nk/8)]. Returns a mask on the GPU."""
        info = MaskInfo(struct_size=C.sizeof(MaskInfo), block_q=block_q, block_k=block_k, B=B, H=H, Nq=Nq, Nk=Nk)
        info.layout = layout or self.lib.c.esa_layout_default()
        host, gpu = C.c_void_p(), C.c_void_p()
        self.check(self.lib.c.esa_mask_from_bits(self.ptr, C.byref(host), C.byref(info), bits.ctypes.data))
        try:
            self.check(self.lib.c.esa_mask_to_device(self.ptr, C.byref(gpu), host, CUDA))
        finally:
            self.lib.c.esa_mask_free(host)
        return Mask(self, gpu)

    def free(self):
        self.lib.c.esa_ctx_free(self.ptr)
        self.ptr = C.c_void_p()


class Mask:
    def __init__(self, ctx, ptr):
        self.ctx, self.ptr = ctx, ptr

    def info(self):
        info = MaskInfo(struct_size=C.sizeof(MaskInfo))
        self.ctx.check(self.ctx.lib.c.esa_mask_get_info(self.ptr, C.byref(info)))
        return info

    def bits(self):
        import numpy
        i = self.info()
        out = numpy.zeros((i.B, i.H, i.nq, (i.nk + 7) // 8), numpy.uint8)
        self.ctx.check(self.ctx.lib.c.esa_mask_to_bits(self.ptr, out.ctypes.data))
        return out

    def free(self):
        self.ctx.lib.c.esa_mask_free(self.ptr)


def view(t):
    """A view of a torch tensor [B,H,N,D] (D dense) where it lies."""
    import torch
    assert t.dim() == 4 and (t.stride(3) == 1 or t.shape[3] == 1), "a view needs four dimensions, the last one dense"
    dtype = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}[t.dtype]
    device = CUDA if t.is_cuda else CPU
    return Tensor(C.sizeof(Tensor), dtype, device, t.device.index or 0, t.data_ptr(), (C.c_int64 * 4)(*t.shape),
                  (C.c_int64 * 4)(*t.stride()[:3], 1))


class Plan:
    """One shape; q like [B,Hq,Nq,D], k like [B,Hkv,Nk,D]. select: SelectParams or None."""

    def __init__(self, ctx, q, k, select=None, tail=NONE, causal=0):
        c = ctx.lib.c
        self.ctx, self.ptr = ctx, C.c_void_p()
        shapes, attention = c.esa_shapes_default(), c.esa_attention_params_default()
        v = view(q)
        shapes.dtype, shapes.device, shapes.device_index = v.dtype, v.device, v.device_index
        (shapes.B, shapes.Hq, shapes.Nq, shapes.D), shapes.Hkv, shapes.Nk = q.shape, k.shape[1], k.shape[2]
        attention.tail, attention.causal = tail, causal
        ctx.check(c.esa_plan_create(ctx.ptr, C.byref(self.ptr), C.byref(shapes), C.byref(select) if select is not None else None,
                                    C.byref(attention)))
        size = C.c_int64()
        ctx.check(c.esa_plan_workspace(self.ptr, C.byref(size)))
        self.workspace = size.value

    def mask(self):
        ptr = C.c_void_p()
        self.ctx.check(self.ctx.lib.c.esa_mask_create(self.ptr, C.byref(ptr)))
        return Mask(self.ctx, ptr)

    def select(self, mask, q, k, ws):
        """A callable that runs the selection; views are made now, so that calling costs little."""
        call, check, args = self.ctx.lib.c.esa_plan_select, self.ctx.check, [view(q), view(k)]
        pointers = (self.ptr, mask.ptr, C.byref(args[0]), C.byref(args[1]), ws.data_ptr())
        return lambda keep=(args, q, k, ws, mask): check(call(*pointers))

    def attention(self, mask, q, k, v, o, ws, lse=None):
        call, check, args = self.ctx.lib.c.esa_plan_attention, self.ctx.check, [view(t) for t in (q, k, v, o)]
        last = view(lse) if lse is not None else None
        pointers = (self.ptr, mask.ptr if mask else None, *(C.byref(a) for a in args), C.byref(last) if last else None, ws.data_ptr())
        return lambda keep=(args, q, k, v, o, ws, lse, last, mask): check(call(*pointers))

    def kernel(self, mask, q, k, v, o):
        args = [view(t) for t in (q, k, v, o)]
        return self.ctx.lib.c.esa_plan_kernel(self.ptr, mask.ptr if mask else None, *(C.byref(a) for a in args)).decode()

    def free(self):
        self.ctx.lib.c.esa_plan_free(self.ptr)
