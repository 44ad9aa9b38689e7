// f32_tile.cuh - one thread block computes a 64 x 64 tile of a product of f32 rows with plain
// multiply-adds. For small products that must be as exact as on the CPU, and for operands that are
// not 16-bit.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/runtime/device.cuh"

enum { F32_TILE = 64, F32_DEPTH = 16, F32_THREADS = 128, F32_ROWS = 8, F32_COLUMNS = 4 };

struct f32_tile_shared {
    // Transposed; padded so that the transposing stores spread over the banks.
    float a[F32_DEPTH][F32_TILE + 4], b[F32_DEPTH][F32_TILE + 4];
};

// acc[r][c] of a thread is row f32_row() + r, column f32_column() + c of the tile. load_a(row, k),
// load_b(column, k): four values from depth k on, 0 beyond the edges. depth is a multiple of
// F32_DEPTH. Sums run over k in order.
static __device__ __forceinline__ int f32_row() { return threadIdx.x / 16 * F32_ROWS; }
static __device__ __forceinline__ int f32_column() { return threadIdx.x % 16 * F32_COLUMNS; }

template <class LoadA, class LoadB>
static __device__ __forceinline__ void f32_tile(float (&acc)[F32_ROWS][F32_COLUMNS],
                                                f32_tile_shared &shared, int depth, LoadA load_a,
                                                LoadB load_b)
{
    // A thread loads rows row and row + 32.
    const int row = threadIdx.x / 4, k4 = threadIdx.x % 4 * 4;
    float4 a[2], b[2];
    auto fetch = [&](int k) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
            a[n] = load_a(row + 32 * n, k + k4), b[n] = load_b(row + 32 * n, k + k4);
    };
    auto store = [&](float(*dst)[F32_TILE + 4], int r, float4 x) {
        dst[k4][r] = x.x, dst[k4 + 1][r] = x.y, dst[k4 + 2][r] = x.z, dst[k4 + 3][r] = x.w;
    };
#pragma unroll
    for (int r = 0; r < F32_ROWS; ++r)
#pragma unroll
        for (int c = 0; c < F32_COLUMNS; ++c) acc[r][c] = 0.0f;
    fetch(0);
    for (int k = 0; k < depth; k += F32_DEPTH) {
        __syncthreads(); // the last step has been read
#pragma unroll
        for (int n = 0; n < 2; ++n)
            store(shared.a, row + 32 * n, a[n]), store(shared.b, row + 32 * n, b[n]);
        __syncthreads();
        if (k + F32_DEPTH < depth) fetch(k + F32_DEPTH);
#pragma unroll
        for (int d = 0; d < F32_DEPTH; ++d) {
            float x[F32_ROWS], y[F32_COLUMNS];
            *(float4 *)x = *(const float4 *)&shared.a[d][f32_row()];
            *(float4 *)(x + 4) = *(const float4 *)&shared.a[d][f32_row() + 4];
            *(float4 *)y = *(const float4 *)&shared.b[d][f32_column()];
#pragma unroll
            for (int r = 0; r < F32_ROWS; ++r)
#pragma unroll
                for (int c = 0; c < F32_COLUMNS; ++c) acc[r][c] = fmaf(x[r], y[c], acc[r][c]);
        }
    }
}
