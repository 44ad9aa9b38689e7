// ada.cuh - ada_bsa on the GPU: what its kernels share.
// SPDX-License-Identifier: Apache-2.0
//
// Tokens form groups of 8: x_ij = scale/8 * sum_{u=0..7} q[8i+7-u] . k[8j+u], p = softmax over the
// columns of a row, score[I][J] = sum of p over the groups of query block I and key block J. This
// is a product of depth 8D over N/8 x N/8. Only the logarithm of the sum per (row, key block)
// leaves the kernel: lse_iJ = log2 sum_{j in J} 2^x_ij. ada_rows.cu turns it into scores once whole
// rows are known.
#pragma once

#include "base/half.h"
#include "cuda/selection/select.cuh"
#include "cuda/runtime/views.cuh"

struct ada_job {
    esa_select_args a;
    const int32_t *kv_len; // [B], within 0 .. Nk
    float *lse;            // [heads][rows][nk]: the blocks that the row looks at
    int64_t head0, heads;  // heads of B * Hq
    int64_t row0, rows;    // groups of queries
    float factor;          // scale/8 in log2 units (compat-round: natural)
    int32_t fixed;
    int32_t beyond; // 1: sums include keys beyond kv_len; 0: those count as zeros
};

// True if tensor cores can compute the product: 16-bit rows in whole 16-byte pieces, key blocks of
// whole fragments. ada_mma.cu
bool ada_mma_takes(const esa_select_args *a);
esa_status ada_mma_launch(esa_cuda_device *dev, const ada_job &job, cudaStream_t stream);
// The same with Hopper's own instructions, if bulk copies can also bring the operands. sm90_ada.cu
bool sm90_ada_takes(const esa_cuda_device *dev, const esa_select_args *a);
esa_status sm90_ada_launch(esa_cuda_device *dev, ada_job job, cudaStream_t stream);
// Everything else: f32 multiply-adds, with sums in memory. sums [heads][rows][columns
// of Nk]. ada_plain.cu
esa_status ada_plain_sums(esa_cuda_device *dev, const ada_job &job, float *sums,
                          cudaStream_t stream);
esa_status ada_plain_lse(esa_cuda_device *dev, const ada_job &job, const float *sums,
                         cudaStream_t stream);
// compat-round: scores directly from the sums. half: scratch [window rows of
// blocks][block_q / 8][nk].
esa_status ada_plain_rounded(esa_cuda_device *dev, const ada_job &job, const row_window &w,
                             float *sums, float *half, double *score, cudaStream_t stream);
// value f32[rows][nk] (fixed) or score f64[rows][nk] (compat) of the block rows of the window, from
// lse. ada_rows.cu
esa_status ada_rows_launch(esa_cuda_device *dev, const ada_job &job, const row_window &w,
                           const int32_t *existing, float *value, double *score,
                           cudaStream_t stream);

#ifdef __CUDACC__
// Position of a head of the job.
struct ada_head {
    int64_t q_at, k_at; // elements
    int len, columns;   // existing keys; groups of them that are scored
    __device__ __forceinline__ ada_head(const ada_job &x, int64_t head)
    {
        const int64_t b = head / x.a.Hq, h = head % x.a.Hq;
        q_at = b * x.a.q_stride[0] + h * x.a.q_stride[1];
        k_at = b * x.a.k_stride[0] + h / (x.a.Hq / x.a.Hkv) * x.a.k_stride[1];
        len = x.kv_len[b];
        columns = (int)esa_ada_columns(&x.a, len);
    }
};

// Sum of q.k over the pairs first .. end-1 of groups (i, j), if some existing pairs
// are not visible.
static __device__ __noinline__ float ada_pairs(const ada_job &x, const ada_head &head, int i, int j,
                                               int first, int end)
{
    double sum = 0.0;
    for (int u = first; u < end; u++) {
        const int qi = 8 * i + 7 - u, kj = 8 * j + u;
        const int64_t q = head.q_at + (x.a.perm_q ? x.a.perm_q[qi] : qi) * x.a.q_stride[2],
                      k = head.k_at + (x.a.perm_k ? x.a.perm_k[kj] : kj) * x.a.k_stride[2];
        for (int64_t d = 0; d < x.a.D; d++)
            sum += (double)esa_load_f32(x.a.q, q + d, x.a.dtype) *
                   (double)esa_load_f32(x.a.k, k + d, x.a.dtype);
    }
    return (float)sum;
}

// x_ij from the sum over the existing pairs. fixed: the mean of the pairs that exist and are
// visible, weighted by their number. compat: missing queries count as zeros. Columns that the row
// does not look at are -inf.
static __device__ __forceinline__ float ada_logit(const ada_job &x, const ada_head &head, float sum,
                                                  int i, int j)
{
    if (j >= esa_ada_limit(&x.a, head.columns, i)) return -INFINITY;
    if (!x.fixed) return sum * x.factor;
    const int first = max(0, 8 * i + 8 - (int)x.a.Nq), there = min(8, head.len - 8 * j);
    int end = there;
    // Pair u is visible if 2u <= the value that is halved here.
    if (x.a.params.causal) end = min(end, (8 * (i - j) + 7 + (int)(x.a.Nk - x.a.Nq)) / 2 + 1);
    const int n = end - first;
    if (n == 8) return sum * x.factor;
    if (n <= 0) return -INFINITY;
    if (end < there || (x.beyond && there < 8)) sum = ada_pairs(x, head, i, j, first, end);
    return sum * x.factor * (8.0f / (float)n) + log2f((float)n / 8.0f);
}

// ---- 64 columns of two rows per lane ----
//
// Eight fragments of four: (row, 2q) (row, 2q + 1) (row + 8, 2q) (row + 8, 2q + 1), with q the
// place of the lane in its quad, as mma.sync and wgmma leave them. row: that of lane 0. The rows of
// a lane are row + lane / 4 and 8 more.

// True if some pair of the 16 rows and 64 columns is missing or not visible.
static __device__ __forceinline__ bool ada_edge(const ada_job &x, const ada_head &head, int row,
                                                int column)
{
    if (column + 64 > head.columns) return true;
    if (!x.fixed) return x.a.params.causal && column + 64 > esa_ada_limit(&x.a, head.columns, row);
    if (8 * (row + 16) > x.a.Nq || 8 * (column + 64) > head.len) return true;
    return x.a.params.causal && 8 * (row - column - 63) + 7 + (int)(x.a.Nk - x.a.Nq) < 14;
}

// Turns sums into logits at an edge. This is rare and kept out of line, because a copy per register
// would not fit into the instruction cache.
static __device__ __noinline__ void ada_mend(const ada_job &x, const ada_head &head, float *v,
                                             int row, int column)
{
    const int lane = threadIdx.x % 32;
    for (int e = 0; e < 32; ++e)
        v[e] = ada_logit(x, head, v[e], row + e / 2 % 2 * 8 + lane / 4,
                         column + e / 4 * 8 + lane % 4 * 2 + e % 2);
}

// lse of RK columns at a time, written to out ([rows][nk] from row x.row0 on). The fragments begin
// at v[AT].
template <int RK, int AT, int N, class Exp2>
static __device__ __forceinline__ void ada_reduce(const ada_job &x, const float (&v)[N], int row,
                                                  int column, float *out, Exp2 power)
{
    constexpr int PARTS = RK / 8, BLOCKS = 8 / PARTS; // fragments per key block; key blocks
    const int quad = threadIdx.x % 4, J0 = column / RK;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int64_t i = row + 8 * half + threadIdx.x % 32 / 4 - x.row0;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            float top = -INFINITY, sum = 0.0f;
#pragma unroll
            for (int e = 0; e < 2 * PARTS; ++e)
                top = fmaxf(top, v[AT + (block * PARTS + e / 2) * 4 + 2 * half + e % 2]);
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            // Nothing visible: the sum is 0 and its logarithm -inf. NaN stays NaN.
            if (top == -INFINITY) top = 0.0f;
#pragma unroll
            for (int e = 0; e < 2 * PARTS; ++e)
                sum += power(v[AT + (block * PARTS + e / 2) * 4 + 2 * half + e % 2] - top);
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (quad == block % 4 && i < x.rows && J0 + block < x.a.nk)
                out[i * x.a.nk + J0 + block] = top + __log2f(sum);
        }
    }
}

// All of it for one piece of sums.
template <int AT, int N, class Exp2>
static __device__ __forceinline__ void ada_finish(const ada_job &x, const ada_head &head,
                                                  float (&v)[N], int row, int column, float *out,
                                                  Exp2 power)
{
    if (ada_edge(x, head, row, column)) {
        float copy[32];
#pragma unroll
        for (int e = 0; e < 32; ++e) copy[e] = v[AT + e];
        ada_mend(x, head, copy, row, column);
#pragma unroll
        for (int e = 0; e < 32; ++e) v[AT + e] = copy[e];
    } else {
#pragma unroll
        for (int e = 0; e < 32; ++e) v[AT + e] *= x.factor;
    }
    const int Rk = x.a.params.block_k / 8;
    if (Rk == 8)
        ada_reduce<8, AT>(x, v, row, column, out, power);
    else if (Rk == 16)
        ada_reduce<16, AT>(x, v, row, column, out, power);
    else
        ada_reduce<32, AT>(x, v, row, column, out, power);
}
#endif
