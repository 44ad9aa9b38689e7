# SPDX-License-Identifier: Apache-2.0
"""What the GPU benchmark and its checks need beyond the package's binding (python/esa, which stands beside this folder
in the tree and in the bundle): a context with a stream and a kernel level of its own, and plans whose calls are
prepared ahead, so that timing sees nothing else."""
import ctypes as C
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))

try:
    from esa.core.library import EsaError, find_library  # noqa: F401
    from esa.core.library import Library as PackageLibrary
except ImportError as error:
    raise SystemExit(str(error)) from None
from esa.core.plan import shapes_of  # noqa: E402
from esa.core.structs import CPU, CUDA, ORDERS, SELECTORS, DeviceInfo, MaskInfo  # noqa: E402, F401
from esa.core.tensor import view  # noqa: E402

OK = 0
FULL, ENTROPY, RF_V2, ADA_BSA, RANDOM = (SELECTORS[s] for s in ("full", "entropy", "rf_v2", "ada_bsa", "random"))
RASTER, TILE, TILE3D, HILBERT = (ORDERS[o] for o in ("raster", "tile", "tile3d", "hilbert"))
NONE, POOLED, CENTROID, LEVELS = range(4)
TAILS = ("none", "pooled", "centroid")
ADD, MAKE = range(2)


class Library(PackageLibrary):
    """A library by its path, or the one the package finds ($ESA_LIB first)."""

    def __init__(self, path=None):
        super().__init__(pathlib.Path(path) if path else find_library())


class Ctx:
    """A context on one GPU and one stream (an integer handle). level lowers the kernels as $ESA_CUDA does."""

    def __init__(self, library, stream=0, device=0, level=None):
        self.lib, self.ptr, self.device = library, C.c_void_p(), device
        params = library.c.esa_ctx_params_default()
        params.cuda_stream, params.cuda_device = stream or None, device
        status = library.c.esa_ctx_create(C.byref(self.ptr), C.byref(params))
        if status:
            raise library.error(status, "")
        if level:
            os.environ["ESA_CUDA"] = level      # read when the GPU is opened: now
            try:
                self.info()
            finally:
                del os.environ["ESA_CUDA"]

    def check(self, status):
        if status:
            raise self.lib.error(status, self.lib.c.esa_ctx_error(self.ptr).decode())

    def info(self):
        info = DeviceInfo(struct_size=C.sizeof(DeviceInfo))
        self.check(self.lib.c.esa_device_get_info(self.ptr, C.byref(info)))
        return info

    def mask_from_bits(self, bits, B, H, Nq, Nk, block_q, block_k, layout=None):
        """bits: contiguous uint8 numpy array [B,H,nq,ceil(nk/8)]. Returns a mask on the GPU."""
        info = MaskInfo(block_q=block_q, block_k=block_k, B=B, H=H, Nq=Nq, Nk=Nk)
        return self.mask_given(self.lib.c.esa_mask_from_bits, bits, info, layout)

    def mask_from_levels(self, levels, fine, Nq, Nk, block_q, block_k, order=None):
        """levels: contiguous uint8 numpy array [B,H,nq,nk] of 0 (exact), 1 (fine), 2 (neither). order: None, or a
        contiguous int32 array [B*H,N], the order of the tokens of every head. A mask on the GPU."""
        info = MaskInfo(block_q=block_q, block_k=block_k, B=levels.shape[0], H=levels.shape[1], Nq=Nq, Nk=Nk, fine=fine)
        layout = self.lib.c.esa_layout_default()
        layout.order = RASTER if order is None else ORDERS["adaptive"]
        return self.mask_given(self.lib.c.esa_mask_from_levels, levels, info, layout, order)

    def mask_given(self, call, array, info, layout=None, order=None):
        info.struct_size = C.sizeof(MaskInfo)
        info.layout = layout or self.lib.c.esa_layout_default()
        host, gpu = C.c_void_p(), C.c_void_p()
        self.check(call(self.ptr, C.byref(host), C.byref(info), array.ctypes.data))
        try:
            if order is not None:
                self.check(self.lib.c.esa_mask_set_orders(self.ptr, host, order.ctypes.data, order.ctypes.data, info.H))
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


class Carry(C.Structure):
    """esa_carry over tensors: codes in E4M3 with a scale for every row, or values in bf16. o: what it belongs to."""
    _fields_ = [("struct_size", C.c_uint32), ("format", C.c_int32), ("device", C.c_int32), ("device_index", C.c_int32),
                ("B", C.c_int64), ("H", C.c_int64), ("N", C.c_int64), ("D", C.c_int64), ("value", C.c_void_p),
                ("scale", C.c_void_p), ("reserved", C.c_int64 * 2)]

    def __init__(self, o, value, scale=None):
        like = view(o)
        super().__init__(C.sizeof(Carry), int(scale is None), like.device, like.device_index, *o.shape,
                         value.data_ptr(), None if scale is None else scale.data_ptr())
        self.keep = value, scale


class Plan:
    """One shape; q like [B,Hq,Nq,D], k like [B,Hkv,Nk,D]. select: SelectParams or None."""

    def __init__(self, ctx, q, k, select=None, tail=NONE, causal=0, exact_rows=0, precision=16):
        c = ctx.lib.c
        self.ctx, self.ptr = ctx, C.c_void_p()
        shapes, attention = shapes_of(ctx.lib, view(q), view(k)), c.esa_attention_params_default()
        attention.tail, attention.causal, attention.exact_rows = tail, causal, exact_rows
        attention.precision = precision
        ctx.check(
            c.esa_plan_create(ctx.ptr, C.byref(self.ptr), C.byref(shapes),
                              C.byref(select) if select is not None else None, C.byref(attention)))
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
        pointers = (self.ptr, mask.ptr if mask else None, *(C.byref(a) for a in args), C.byref(last) if last else None,
                    ws.data_ptr())
        return lambda keep=(args, q, k, v, o, ws, lse, last, mask): check(call(*pointers))

    def attention_carry(self, mask, q, k, v, o, ws, carry, use):
        call, check, args = self.ctx.lib.c.esa_plan_attention_carry, self.ctx.check, [view(t) for t in (q, k, v, o)]
        pointers = (self.ptr, mask.ptr, *(C.byref(a) for a in args), None, C.byref(carry), C.c_int32(use),
                    C.c_void_p(ws.data_ptr()))
        return lambda keep=(args, q, k, v, o, ws, carry, mask): check(call(*pointers))

    def kernel(self, mask, q, k, v, o):
        args = [view(t) for t in (q, k, v, o)]
        return self.ctx.lib.c.esa_plan_kernel(self.ptr, mask.ptr if mask else None,
                                              *(C.byref(a) for a in args)).decode()

    def free(self):
        self.ctx.lib.c.esa_plan_free(self.ptr)
