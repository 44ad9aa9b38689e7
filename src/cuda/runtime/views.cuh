// views.cuh - how kernels read strided views [B][H][N][D]: in 16-byte pieces, through tensor maps,
// or element by element.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/runtime/device.cuh"

static inline int64_t element_bytes(int32_t dtype) { return dtype == ESA_DTYPE_F32 ? 4 : 2; }

// stride: in elements, for B, H, N like dim. The stride of an axis of length 1 is never used and
// may be anything.
struct view {
    const void *data;
    const int64_t *stride;
    int64_t dim[3];
};

// True if every row can be read in pieces of this many bytes.
static inline bool rows_in_pieces(const view &x, int64_t D, int64_t element, int64_t bytes)
{
    int64_t mixed = D;
    for (int i = 0; i < 3; ++i)
        if (x.dim[i] > 1) mixed |= x.stride[i];
    return (uintptr_t)x.data % bytes == 0 && mixed * element % bytes == 0;
}

// ---- tensor maps of 16-bit views, D a multiple of 64 ----

static inline bool fits_map(const view &x)
{
    for (int i = 0; i < 3; ++i)
        // Strides of a map are below 2^40 bytes.
        if (x.dim[i] > 1 && (x.stride[i] <= 0 || x.stride[i] >= (int64_t)1 << 39)) return false;
    return rows_in_pieces(x, 64, 2, 16);
}

// Views x as (64, N, D/64, H, B), so that one copy of (64, rows, chunks) arrives as
// [chunk][row][64], the layout wgmma reads with the 128-byte swizzle. Rows past N read as zero.
// Returns false if the driver refuses.
static inline bool make_map(CUtensorMap *map, const esa_cuda_device *dev, int32_t dtype,
                            const view &x, int64_t D, int rows, int chunks)
{
    auto bytes = [&](int axis) {
        return x.dim[axis] > 1 ? (cuuint64_t)x.stride[axis] * 2 : (cuuint64_t)16;
    };
    const cuuint64_t dims[5] = { 64, (cuuint64_t)x.dim[2], (cuuint64_t)D / 64, (cuuint64_t)x.dim[1],
                                 (cuuint64_t)x.dim[0] };
    const cuuint64_t strides[4] = { bytes(2), 128, bytes(1), bytes(0) };
    const cuuint32_t box[5] = { 64, (cuuint32_t)rows, (cuuint32_t)chunks, 1, 1 };
    const cuuint32_t ones[5] = { 1, 1, 1, 1, 1 };
    const CUtensorMapDataType type = dtype == ESA_DTYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    return dev->encode_tiled(map, type, 5, (void *)x.data, dims, strides, box, ones,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// ---- elements ----

#ifdef __CUDACC__
static __device__ __forceinline__ float to_float(float x) { return x; }
static __device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
static __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
static __device__ __forceinline__ void round_to(float *dst, float x) { *dst = x; }
static __device__ __forceinline__ void round_to(__half *dst, float x) { *dst = __float2half_rn(x); }
static __device__ __forceinline__ void round_to(__nv_bfloat16 *dst, float x)
{
    *dst = __float2bfloat16_rn(x);
}

// 16 bytes of a row, kept as words until they are used. The compiler would put each 16-bit element
// into a register of its own.
template <class T> struct packed {
    static constexpr int N = 16 / (int)sizeof(T);
    uint4 words;
    __device__ __forceinline__ void unpack(float (&x)[N]) const
    {
        const uint32_t w[4] = { words.x, words.y, words.z, words.w };
#pragma unroll
        for (int i = 0; i < 4; ++i) unpack_word(x + i * N / 4, w[i], (T *)nullptr);
    }
    static __device__ __forceinline__ void unpack_word(float *x, uint32_t w, float *)
    {
        x[0] = __uint_as_float(w);
    }
    static __device__ __forceinline__ void unpack_word(float *x, uint32_t w, __nv_bfloat16 *)
    {
        x[0] = __uint_as_float(w << 16), x[1] = __uint_as_float(w & 0xffff0000u);
    }
    static __device__ __forceinline__ void unpack_word(float *x, uint32_t w, __half *)
    {
        x[0] = __half2float(__ushort_as_half((unsigned short)w)),
        x[1] = __half2float(__ushort_as_half((unsigned short)(w >> 16)));
    }
};
template <class T> struct single {
    static constexpr int N = 1;
    T element;
    __device__ __forceinline__ void unpack(float (&x)[1]) const { x[0] = to_float(element); }
};

// Number of existing keys of batch entry b.
static __device__ __forceinline__ int key_length(const int32_t *kv_len, int64_t b, int Nk)
{
    return kv_len ? min(max(kv_len[b], 0), Nk) : Nk;
}
#endif
