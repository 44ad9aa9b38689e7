// ada_plain.cu - the product of ada_bsa with f32 multiply-adds, for f32 views, unaligned views, odd
// block sizes, and compat-round, whose rounding points need the single sums. Correct, but slow.
// SPDX-License-Identifier: Apache-2.0
#include "rules/compat_rows.h"
#include "cuda/selection/ada.cuh"
#include "cuda/selection/f32_tile.cuh"

namespace
{

enum { THREADS = 256, ROUND_THREADS = 32 };

template <class T>
__global__ void __launch_bounds__(F32_THREADS)
    sums_kernel(const __grid_constant__ ada_job x, float *sums)
{
    __shared__ f32_tile_shared shared;
    const ada_head head(x, x.head0 + blockIdx.z);
    const int64_t columns = ceil_div<int64_t>(x.a.Nk, 8);
    const int row0 = (int)x.row0 + blockIdx.y * F32_TILE, column0 = blockIdx.x * F32_TILE,
              D = (int)x.a.D, deep = ceil_div(D, (int)F32_DEPTH) * F32_DEPTH;
    const T *q = (const T *)x.a.q + head.q_at, *k = (const T *)x.a.k + head.k_at;
    auto four = [&](const T *row, int d) {
        return float4{ d < D ? to_float(row[d]) : 0.0f, d + 1 < D ? to_float(row[d + 1]) : 0.0f,
                       d + 2 < D ? to_float(row[d + 2]) : 0.0f,
                       d + 3 < D ? to_float(row[d + 3]) : 0.0f };
    };
    const float4 zero = { 0.0f, 0.0f, 0.0f, 0.0f };
    float acc[F32_ROWS][F32_COLUMNS];
    f32_tile(
        acc, shared, 8 * deep,
        [&](int r, int depth) {
            const int position = 8 * (row0 + r) + 7 - depth / deep;
            return position < x.a.Nq
                       ? four(q + (x.a.perm_q ? x.a.perm_q[position] : position) * x.a.q_stride[2],
                              depth % deep)
                       : zero;
        },
        [&](int c, int depth) {
            const int position = 8 * (column0 + c) + depth / deep;
            return position < head.len
                       ? four(k + (x.a.perm_k ? x.a.perm_k[position] : position) * x.a.k_stride[2],
                              depth % deep)
                       : zero;
        });
#pragma unroll
    for (int r = 0; r < F32_ROWS; ++r)
#pragma unroll
        for (int c = 0; c < F32_COLUMNS; ++c) {
            const int64_t row = row0 - x.row0 + f32_row() + r, column = column0 + f32_column() + c;
            if (row < x.rows && column < columns)
                sums[(blockIdx.z * x.rows + row) * columns + column] = acc[r][c];
        }
}

// A thread per (row, key block).
__global__ void __launch_bounds__(THREADS)
    lse_kernel(const __grid_constant__ ada_job x, const float *sums)
{
    const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x, J = at % x.a.nk,
                  row = at / x.a.nk, columns = ceil_div<int64_t>(x.a.Nk, 8);
    if (row >= x.heads * x.rows) return;
    const ada_head head(x, x.head0 + row / x.rows);
    const int i = (int)(x.row0 + row % x.rows), Rk = x.a.params.block_k / 8, first = (int)J * Rk;
    const int end = (int)esa_min64(first + Rk, esa_ada_limit(&x.a, head.columns, i));
    float top = -INFINITY, sum = 0.0f;
    for (int j = first; j < end; j++) {
        const float v = ada_logit(x, head, sums[row * columns + j], i, j);
        if (v > top || v != v) top = v;
    }
    if (top != -INFINITY)
        for (int j = first; j < end; j++)
            sum += exp2f(ada_logit(x, head, sums[row * columns + j], i, j) - top);
    x.lse[row * x.a.nk + J] = top == -INFINITY ? -INFINITY : top + log2f(sum);
}

// A thread per block row.
__global__ void __launch_bounds__(ROUND_THREADS)
    rounded_kernel(const __grid_constant__ ada_job x, int64_t blocks, float *sums, float *half,
                   double *score)
{
    const int64_t at = (int64_t)blockIdx.x * ROUND_THREADS + threadIdx.x,
                  Rq = x.a.params.block_q / 8, Rk = x.a.params.block_k / 8;
    if (at >= x.heads * blocks) return;
    const int64_t first = at % blocks * Rq, n = esa_min64(Rq, x.rows - first),
                  columns = ceil_div<int64_t>(x.a.Nk, 8);
    const ada_head head(x, x.head0 + at / blocks);
    float *row = sums + (at / blocks * x.rows + first) * columns;
    int64_t limit[32];
    for (int64_t r = 0; r < n; r++) {
        limit[r] = esa_ada_limit(&x.a, head.columns, x.row0 + first + r);
        for (int64_t c = 0; c < limit[r]; c++) row[r * columns + c] *= x.factor;
    }
    esa_ada_scores_rounded(score + at * x.a.nk, row, columns, n, limit, x.a.nk, Rk,
                           esa_ada_tile(head.len) / Rk * Rk, half + at * Rq * x.a.nk);
}

} // namespace

esa_status ada_plain_sums(esa_cuda_device *dev, const ada_job &job, float *sums,
                          cudaStream_t stream)
{
    const dim3 grid((unsigned)ceil_div<int64_t>(ceil_div<int64_t>(job.a.Nk, 8), F32_TILE),
                    (unsigned)ceil_div<int64_t>(job.rows, F32_TILE), (unsigned)job.heads);
    if (job.a.dtype == ESA_DTYPE_F32)
        sums_kernel<float><<<grid, F32_THREADS, 0, stream>>>(job, sums);
    else if (job.a.dtype == ESA_DTYPE_F16)
        sums_kernel<__half><<<grid, F32_THREADS, 0, stream>>>(job, sums);
    else
        sums_kernel<__nv_bfloat16><<<grid, F32_THREADS, 0, stream>>>(job, sums);
    return launch_check(dev, "scoring groups of tokens");
}

esa_status ada_plain_lse(esa_cuda_device *dev, const ada_job &job, const float *sums,
                         cudaStream_t stream)
{
    lse_kernel<<<(unsigned)ceil_div<int64_t>(job.heads * job.rows * job.a.nk, THREADS), THREADS, 0,
                 stream>>>(job, sums);
    return launch_check(dev, "adding up groups of tokens");
}

esa_status ada_plain_rounded(esa_cuda_device *dev, const ada_job &job, const row_window &w,
                             float *sums, float *half, double *score, cudaStream_t stream)
{
    rounded_kernel<<<(unsigned)ceil_div<int64_t>(w.rows(), ROUND_THREADS), ROUND_THREADS, 0,
                     stream>>>(job, w.blocks, sums, half, score);
    return launch_check(dev, "adding up groups of tokens in half precision");
}
