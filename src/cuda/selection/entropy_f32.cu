// entropy_f32.cu - the score pass for f32, without tensor cores: tf32 would lose the precision of
// f32 inputs. Correct, but slow.
// SPDX-License-Identifier: Apache-2.0
//
// A thread block takes 64 rows against 64 keys at a time. A key block is one or more such steps;
// maximum and sum are updated step by step.
#include "cuda/selection/entropy.cuh"
#include "cuda/selection/f32_tile.cuh"
#include "cuda/runtime/lanes.cuh"

namespace
{

constexpr int KEYS = F32_TILE;
constexpr int SHARERS = F32_TILE / F32_COLUMNS; // threads that share rows of a tile
// Thread blocks per multiprocessor: as many as the registers allow.
constexpr int RESIDENT = 3;

// Four elements of a row from d on, at any alignment; 0 past D. row null: there is none.
__device__ __forceinline__ float4 four(const float *row, int d, int D, float factor)
{
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = row && d + e < D ? factor * row[d + e] : 0.0f;
    return make_float4(x[0], x[1], x[2], x[3]);
}

struct row_state {
    int limit[F32_ROWS]; // keys the rows see; 0: nothing to write
    // Of the key block so far: maximum, this thread's part of the sum.
    float top[F32_ROWS], sum[F32_ROWS];

    // One step: keys from `key` on. Those at or past `end` belong to the next block.
    __device__ __forceinline__ void take(float (&s)[F32_ROWS][F32_COLUMNS], float scale, int key,
                                         int end)
    {
#pragma unroll
        for (int r = 0; r < F32_ROWS; r++) {
            float high = top[r];
#pragma unroll
            for (int c = 0; c < F32_COLUMNS; c++) {
                s[r][c] = key + f32_column() + c < min(limit[r], end) ? s[r][c] * scale : -INFINITY;
                high = fmaxf(high, s[r][c]);
            }
            high = lanes_max<SHARERS>(high);
            // Nothing seen yet: exp2(-inf - 0) is 0.
            const float base = high == -INFINITY ? 0.0f : high;
            sum[r] *= exp2f(top[r] - base);
#pragma unroll
            for (int c = 0; c < F32_COLUMNS; c++) sum[r] += exp2f(s[r][c] - base);
            top[r] = high;
        }
    }
};

__global__ void __launch_bounds__(F32_THREADS, RESIDENT)
    score_kernel(const __grid_constant__ score_job x)
{
    __shared__ __align__(16) f32_tile_shared shared;
    __shared__ const float *queries[F32_TILE]; // null: no such row
    const int per_block = ceil_div(x.block_k, KEYS),
              depth = ceil_div(x.D, (int)F32_DEPTH) * F32_DEPTH;
    const float sign = x.flip ? -1.0f : 1.0f;
    row_state rows;
    score_walk w;
    while (w.next<F32_TILE>(x, x.block_k)) {
        const float *const head = (const float *)x.k + w.b * x.k_stride[0] + w.g * x.k_stride[1];
        const int row0 = w.tile * F32_TILE;
        score_stat *const line = x.stats +
                                 (((int64_t)w.b * x.Hkv + w.g) * x.rows + row0 + f32_row()) *
                                     x.pitch;
        __syncthreads(); // the queries of the last part have been read
        if (threadIdx.x < F32_TILE) {
            const int row = row0 + threadIdx.x;
            queries[threadIdx.x] = row < x.rows ? (const float *)x.q + row_offset(x, w.b, w.g, row)
                                                : nullptr;
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < F32_ROWS; r++)
            rows.limit[r] = row_limit(x, row0 + f32_row() + r, w.len);

        for (int j = w.step0; j < w.step1; j++) {
            const int end = (j + 1) * x.block_k;
#pragma unroll
            for (int r = 0; r < F32_ROWS; r++) rows.top[r] = -INFINITY, rows.sum[r] = 0.0f;
            for (int sub = 0; sub < per_block; sub++) {
                const int key0 = j * x.block_k + sub * KEYS;
                float s[F32_ROWS][F32_COLUMNS];
                f32_tile(
                    s, shared, depth, [&](int r, int d) { return four(queries[r], d, x.D, sign); },
                    [&](int c, int d) {
                        const int key = key0 + c;
                        return four(key < min(w.len, end)
                                        ? head + (x.perm_k ? x.perm_k[key] : key) * x.k_stride[2]
                                        : nullptr,
                                    d, x.D, 1.0f);
                    });
                rows.take(s, x.scale, key0, end);
            }
#pragma unroll
            for (int r = 0; r < F32_ROWS; r++) {
                const float all = lanes_sum<SHARERS>(rows.sum[r]);
                if (threadIdx.x % 16 == 0 && rows.limit[r] > 0)
                    *(float2 *)(line + (int64_t)r * x.pitch + j) = make_float2(rows.top[r], all);
            }
        }
    }
}

} // namespace

esa_status f32_score_launch(esa_cuda_device *dev, score_job x, cudaStream_t stream)
{
    const int slots = RESIDENT * dev->multiprocessors;
    score_cut(x, F32_TILE, x.nk, slots);
    score_kernel<<<(int)esa_min64(slots, (int64_t)x.tiles * x.ranges), F32_THREADS, 0, stream>>>(x);
    return launch_check(dev, "launching the score kernel");
}
