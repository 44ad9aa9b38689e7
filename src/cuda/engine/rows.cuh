// rows.cuh - what the kernels on rows share: a row in registers, sums over it, rounding it to any
// type, and the choice of how many threads hold it.
// SPDX-License-Identifier: Apache-2.0
//
// A team of LANES threads holds one row. Lane l has the pieces l, l + LANES, ... of W elements
// each, PIECES of them at most, as f32. All loads of a row are issued before the first is used, so
// one row of a team keeps LANES * PIECES * 16 bytes in flight. W is 8 if rows start at multiples of
// 16 bytes and their length is a multiple of 8; else it is 1 or 2.
//
// A team is a warp, and then a thread block has TEAMS of them, or it is the whole thread block.
// Sums run along a fixed tree.
#pragma once

#include <cuda_fp8.h>
#include <string.h>
#include "base/nn_args.h"
#include "cuda/runtime/lanes.cuh"
#include "cuda/runtime/views.cuh"

namespace rows
{

enum { TEAMS = 8, MAX_COLS = 16384 };

// ---- pieces ----

// W elements of T as loaded, before they become f32.
template <class T, int W> struct piece {
    T element[W];
};
template <> struct piece<__nv_bfloat16, 8> {
    uint4 words;
};
template <> struct piece<float, 8> {
    float4 half[2];
};

template <class T, int W>
static __device__ __forceinline__ piece<T, W> load_piece(const T *at, piece<T, W> *)
{
    piece<T, W> p;
#pragma unroll
    for (int i = 0; i < W; ++i) p.element[i] = at[i];
    return p;
}
// Rows are read once, so they are the first to leave the cache.
static __device__ __forceinline__ piece<__nv_bfloat16, 8> load_piece(const __nv_bfloat16 *at,
                                                                     piece<__nv_bfloat16, 8> *)
{
    return { __ldcs((const uint4 *)at) };
}
static __device__ __forceinline__ piece<float, 8> load_piece(const float *at, piece<float, 8> *)
{
    return { { __ldcs((const float4 *)at), __ldcs((const float4 *)at + 1) } };
}

template <class T, int W>
static __device__ __forceinline__ void unpack(float (&x)[W], const piece<T, W> &p)
{
#pragma unroll
    for (int i = 0; i < W; ++i) x[i] = to_float(p.element[i]);
}
static __device__ __forceinline__ void unpack(float (&x)[8], const piece<__nv_bfloat16, 8> &p)
{
    packed<__nv_bfloat16>{ p.words }.unpack(x);
}
static __device__ __forceinline__ void unpack(float (&x)[8], const piece<float, 8> &p)
{
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        x[4 * i] = p.half[i].x, x[4 * i + 1] = p.half[i].y;
        x[4 * i + 2] = p.half[i].z, x[4 * i + 3] = p.half[i].w;
    }
}

// Writes W elements, rounded to T.
template <class T, int W>
static __device__ __forceinline__ void store_piece(T *at, const float (&x)[W])
{
    if constexpr (W == 8) {
        constexpr int bytes = W * (int)sizeof(T);
        alignas(16) T rounded[W];
#pragma unroll
        for (int i = 0; i < W; ++i) round_to(&rounded[i], x[i]);
#pragma unroll
        for (int i = 0; i < bytes / 16; ++i) ((uint4 *)at)[i] = ((const uint4 *)rounded)[i];
    } else {
#pragma unroll
        for (int i = 0; i < W; ++i) round_to(&at[i], x[i]);
    }
}
template <int W>
static __device__ __forceinline__ void store_f8(__nv_fp8_storage_t *at, const float (&x)[W],
                                                float factor)
{
    if constexpr (W == 8) {
        alignas(8) __nv_fp8x2_storage_t pairs[W / 2];
#pragma unroll
        for (int i = 0; i < W / 2; ++i)
            pairs[i] = __nv_cvt_float2_to_fp8x2(
                make_float2(x[2 * i] * factor, x[2 * i + 1] * factor), __NV_SATFINITE, __NV_E4M3);
        *(uint2 *)at = *(const uint2 *)pairs;
    } else {
#pragma unroll
        for (int i = 0; i < W; ++i)
            at[i] = __nv_cvt_float_to_fp8(x[i] * factor, __NV_SATFINITE, __NV_E4M3);
    }
}

// Reads W values of a vector over columns; they are the same for every row and stay in the cache.
// 16-byte loads: vectors over columns come from allocations or start at multiples of 8 elements.
template <int W> static __device__ __forceinline__ void read_vector(float (&x)[W], const float *at)
{
    if constexpr (W == 8) {
        const float4 a = __ldg((const float4 *)at), b = __ldg((const float4 *)at + 1);
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < W; ++i) x[i] = __ldg(at + i);
    }
}

// ---- a row in the registers of a team ----

template <class T, int LANES, int PIECES, int W> struct row {
    float x[PIECES][W];

    // First column of piece p of this lane.
    static __device__ __forceinline__ int column(int p)
    {
        return (p * LANES + (int)(threadIdx.x % LANES)) * W;
    }
    static __device__ __forceinline__ void fetch(piece<T, W> (&raw)[PIECES], const T *from,
                                                 int cols)
    {
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            if (column(p) < cols) raw[p] = load_piece(from + column(p), (piece<T, W> *)nullptr);
    }
    // Elements past the last column become 0.
    __device__ __forceinline__ void set(const piece<T, W> (&raw)[PIECES], int cols)
    {
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            if (column(p) < cols)
                unpack(x[p], raw[p]);
            else
#pragma unroll
                for (int i = 0; i < W; ++i) x[p][i] = 0.0f;
    }
    __device__ __forceinline__ void load(const T *from, int cols)
    {
        piece<T, W> raw[PIECES];
        fetch(raw, from, cols);
        set(raw, cols);
    }
    template <class To> __device__ __forceinline__ void store(To *to, int cols) const
    {
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            if (column(p) < cols) store_piece(to + column(p), x[p]);
    }
    // f(x, column) for each piece that exists.
    template <class F> __device__ __forceinline__ void each(int cols, F f)
    {
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            if (column(p) < cols) f(x[p], column(p));
    }
};

// The sum (or maximum) over the team, in every lane. room: [32] of the thread block if the team is
// larger than a warp; the call synchronises the thread block then.
template <int LANES, bool MAX>
static __device__ __forceinline__ float team_fold(float x, float *room)
{
    x = MAX ? lanes_max<32>(x) : lanes_sum<32>(x);
    if constexpr (LANES > 32) {
        constexpr int warps = LANES / 32;
        __syncthreads(); // the last fold has been read
        if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
        __syncthreads();
        x = room[0];
#pragma unroll
        for (int w = 1; w < warps; ++w) x = MAX ? fmaxf(x, room[w]) : x + room[w];
    }
    return x;
}

// Stores a finished row as y's type says; an F8 row is scaled by its largest magnitude.
template <class T, int LANES, int PIECES, int W>
static __device__ __forceinline__ void store_row(const esa_view &y, int64_t r,
                                                 const row<T, LANES, PIECES, W> &v, float *room)
{
    const int cols = (int)y.cols;
    if (y.dtype == ESA_DTYPE_BF16) {
        v.store((__nv_bfloat16 *)y.data + r * y.ld, cols);
    } else if (y.dtype == ESA_DTYPE_F32) {
        v.store((float *)y.data + r * y.ld, cols);
    } else {
        float top = 0.0f;
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
#pragma unroll
            for (int i = 0; i < W; ++i) top = fmaxf(top, fabsf(v.x[p][i]));
        top = team_fold<LANES, true>(top, room);
        const float scale = top > ESA_F8_ZERO ? top / ESA_F8_MAX : 1.0f, factor = 1.0f / scale;
        __nv_fp8_storage_t *to = (__nv_fp8_storage_t *)y.data + r * y.ld;
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            const int c = row<T, LANES, PIECES, W>::column(p);
            if (c < cols) store_f8(to + c, v.x[p], factor);
        }
        if (threadIdx.x % LANES == 0) y.scale[r] = scale;
    }
}

// Threads of a thread block.
template <int LANES> static constexpr __host__ __device__ int team_threads()
{
    return LANES == 32 ? 32 * TEAMS : LANES;
}

// The row of this thread's team; may be past the last row.
template <int LANES> static __device__ __forceinline__ int64_t team_row()
{
    return LANES == 32 ? (int64_t)blockIdx.x * TEAMS + threadIdx.x / 32 : (int64_t)blockIdx.x;
}

// ---- launching ----

// True if rows of v can be read and written in pieces of 8.
static inline bool wide(const esa_view &v)
{
    if (!v.data) return true;
    const int64_t bytes = esa_view_element(v.dtype) * 8;
    return (uintptr_t)v.data % (bytes < 16 ? bytes : 16) == 0 && v.cols % 8 == 0 && v.ld % 8 == 0;
}
static inline bool wide(const float *vector) { return (uintptr_t)vector % 16 == 0; }

// Calls launch.run<T, LANES, PIECES, W>(thread blocks) with a team that holds the row. NARROW:
// elements of a piece if rows are not wide. The launch says which team takes rows of up to 5120
// columns (WIDE_LANES, WIDE_PIECES).
//
// The teams were measured on an H200. A norm with residual of 1536 columns, BF16, takes 124 us with
// teams of 32 threads, 107 with 64 or 96 and 106 to 121 with 192.
template <int NARROW, class T, class Launch>
static void choose_team(int64_t cols, int64_t count, bool in_eights, const Launch &launch)
{
    const unsigned single = (unsigned)count, shared = (unsigned)ceil_div(count, (int64_t)TEAMS);
    if (in_eights) {
        if (cols <= 32 * 4 * 8)
            launch.template run<T, 32, 4, 8>(shared);
        else if (cols <= 64 * 3 * 8)
            launch.template run<T, 64, 3, 8>(single);
        else if (cols <= 128 * 3 * 8)
            launch.template run<T, 128, 3, 8>(single);
        else if (cols <= Launch::WIDE_LANES * Launch::WIDE_PIECES * 8)
            launch.template run<T, Launch::WIDE_LANES, Launch::WIDE_PIECES, 8>(single);
        else if (cols <= 384 * 3 * 8)
            launch.template run<T, 384, 3, 8>(single);
        else if (cols <= 352 * 5 * 8)
            launch.template run<T, 352, 5, 8>(single);
        else
            launch.template run<T, 512, 4, 8>(single);
    } else if (cols <= 32 * 4 * NARROW) {
        launch.template run<T, 32, 4, NARROW>(shared);
    } else if (cols <= 256 * 8 * NARROW) {
        launch.template run<T, 256, 8, NARROW>(single);
    } else {
        launch.template run<T, 1024, 16, NARROW>(single);
    }
}

// Refuses what the kernels cannot hold.
static inline esa_status check_rows(esa_cuda_device *dev, const esa_view &v, const char *what)
{
    if (v.cols <= MAX_COLS && v.rows <= 0x7fffffff) return ESA_OK;
    return device_fail(dev, ESA_ERR_UNSUPPORTED,
                       "%s of %lld rows with %lld columns, the GPU takes up to %d columns", what,
                       (long long)v.rows, (long long)v.cols, (int)MAX_COLS);
}

} // namespace rows
