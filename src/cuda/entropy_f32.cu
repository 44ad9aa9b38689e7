// entropy_f32.cu - the score pass for f32, without tensor cores: tf32 would lose what the caller asked for. Correct, not fast.
// SPDX-License-Identifier: Apache-2.0
//
// 256 threads take 64 rows against 64 keys, D in slices of 32: thread (y, x), y, x < 16, owns rows 4y .. 4y + 3 and keys x + 16 c, c < 4. A
// key block is one or more steps of 64 keys; maximum and sum run along with them.
#include "cuda/entropy.cuh"

namespace {

constexpr int ROWS = 64, KEYS = 64, SLICE = 32, PITCH = SLICE + 4, THREADS = 256;

// 64 rows of a slice; a thread moves 8 elements of one row. row: null where there is none.
__device__ __forceinline__ void load_slice(float (*dst)[PITCH], const float *row, int d0, int D, float factor) {
    const int r = threadIdx.x / 4, at = threadIdx.x % 4 * 8;
#pragma unroll
    for (int e = 0; e < 8; e++) dst[r][at + e] = row && d0 + at + e < D ? factor * row[d0 + at + e] : 0.0f;
}

__device__ __forceinline__ float over_keys(float x, bool maximum) {
#pragma unroll
    for (int step = 8; step; step /= 2) {
        const float other = __shfl_xor_sync(~0u, x, step);
        x = maximum ? fmaxf(x, other) : x + other;
    }
    return x;
}

__global__ void __launch_bounds__(THREADS) score_kernel(const __grid_constant__ score_job x) {
    __shared__ __align__(16) float qs[ROWS][PITCH], ks[KEYS][PITCH];
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16, loads = threadIdx.x / 4;
    const int per_block = ceil_div(x.block_k, KEYS);
    const float sign = x.flip ? -1.0f : 1.0f;
    score_walk w;
    while (w.next<ROWS>(x, x.block_k)) {
        const float *const head = (const float *)x.k + w.b * x.k_stride[0] + w.g * x.k_stride[1];
        const int row0 = w.tile * ROWS;
        const float *const query = row0 + loads < x.rows ? (const float *)x.q + row_offset(x, w.b, w.g, row0 + loads) : nullptr;
        score_stat *const line = x.stats + (((int64_t)w.b * x.Hkv + w.g) * x.rows + row0 + 4 * ty) * x.pitch;
        int limit[4];
#pragma unroll
        for (int r = 0; r < 4; r++) limit[r] = row_limit(x, row0 + 4 * ty + r, w.len);

        for (int j = w.step0; j < w.step1; j++) {
            const int end = (j + 1) * x.block_k;
            float top[4], sum[4];
#pragma unroll
            for (int r = 0; r < 4; r++) top[r] = -INFINITY, sum[r] = 0.0f;
            for (int sub = 0; sub < per_block; sub++) {
                const int key0 = j * x.block_k + sub * KEYS, key = key0 + loads;
                const float *const source = key < min(w.len, end) ? head + (x.perm_k ? x.perm_k[key] : key) * x.k_stride[2] : nullptr;
                float s[4][4] = {};
                for (int d0 = 0; d0 < x.D; d0 += SLICE) {
                    __syncthreads();
                    load_slice(qs, query, d0, x.D, sign);
                    load_slice(ks, source, d0, x.D, 1.0f);
                    __syncthreads();
#pragma unroll
                    for (int d = 0; d < SLICE; d += 4) {
                        float4 a[4], b[4];
#pragma unroll
                        for (int r = 0; r < 4; r++) a[r] = *(const float4 *)&qs[4 * ty + r][d], b[r] = *(const float4 *)&ks[tx + 16 * r][d];
#pragma unroll
                        for (int r = 0; r < 4; r++)
#pragma unroll
                            for (int c = 0; c < 4; c++)
                                s[r][c] = fmaf(a[r].w, b[c].w, fmaf(a[r].z, b[c].z, fmaf(a[r].y, b[c].y, fmaf(a[r].x, b[c].x, s[r][c]))));
                    }
                }
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    float high = top[r];
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        s[r][c] = key0 + tx + 16 * c < min(limit[r], end) ? s[r][c] * x.scale : -INFINITY;
                        high = fmaxf(high, s[r][c]);
                    }
                    high = over_keys(high, true);
                    const float base = high == -INFINITY ? 0.0f : high;     // nothing seen yet: exp2(-inf - 0) is 0
                    sum[r] *= exp2f(top[r] - base);
#pragma unroll
                    for (int c = 0; c < 4; c++) sum[r] += exp2f(s[r][c] - base);
                    top[r] = high;
                }
            }
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const float all = over_keys(sum[r], false);
                if (tx == 0 && limit[r] > 0) *(float2 *)(line + (int64_t)r * x.pitch + j) = make_float2(top[r], all);
            }
        }
    }
}

} // namespace

esa_status f32_score_launch(esa_cuda_device *dev, score_job x, cudaStream_t stream) {
    const int slots = 4 * dev->multiprocessors;
    score_cut(x, ROWS, x.nk, slots);
    score_kernel<<<(int)esa_min64(slots, (int64_t)x.tiles * x.ranges), THREADS, 0, stream>>>(x);
    return launch_check(dev, "launching the score kernel");
}
