// ada_rows.cu - block scores of ada_bsa: shares of whole rows, added up over the rows of
// a query block.
// SPDX-License-Identifier: Apache-2.0
//
//   score[I][J] = sum over the groups i of block I of weight_i 2^lse_iJ / sum_J 2^lse_iJ
//
// weight: fixed counts a short last group of queries by its number of queries; compat counts it as
// a whole group.
#include "cuda/selection/ada.cuh"
#include "cuda/runtime/lanes.cuh"

namespace
{

enum { THREADS = 256, WARPS = THREADS / 32, MOST_ROWS = 32 };

// 0 for -inf; NaN stays NaN.
__device__ __forceinline__ float mass(float lse, float top)
{
    return lse == -INFINITY ? 0.0f : exp2f(lse - top);
}

__global__ void __launch_bounds__(THREADS)
    rows_kernel(const __grid_constant__ ada_job x, int64_t blocks, const int32_t *existing,
                float *value, double *score)
{
    __shared__ float top[MOST_ROWS];
    __shared__ double share[MOST_ROWS]; // weight / total; 0: the group sees nothing
    __shared__ int until[MOST_ROWS];    // key blocks that the row looks at
    const int64_t head_at = blockIdx.x / blocks,
                  first = blockIdx.x % blocks * (x.a.params.block_q / 8);
    const int64_t n = esa_min64(x.a.params.block_q / 8, x.rows - first),
                  Rk = x.a.params.block_k / 8;
    const ada_head head(x, x.head0 + head_at);
    const float *lse = x.lse + (head_at * x.rows + first) * x.a.nk;
    for (int r = threadIdx.x / 32; r < n; r += WARPS) {
        const int64_t i = x.row0 + first + r;
        const int end = (int)ceil_div<int64_t>(esa_ada_limit(&x.a, head.columns, i), Rk);
        float high = -INFINITY;
        double total = 0.0;
        for (int J = threadIdx.x % 32; J < end; J += 32) high = fmaxf(high, lse[r * x.a.nk + J]);
        high = lanes_max<32>(high);
        for (int J = threadIdx.x % 32; J < end; J += 32)
            total += (double)mass(lse[r * x.a.nk + J], high);
        total = lanes_sum<32>(total);
        const double weight = x.fixed ? (double)esa_min64(8, x.a.Nq - 8 * i) / 8.0 : 1.0;
        if (threadIdx.x % 32 == 0)
            top[r] = high, share[r] = total == 0.0 ? 0.0 : weight / total, until[r] = end;
    }
    __syncthreads();
    const int64_t out = (int64_t)blockIdx.x * x.a.nk;
    const int there = existing[(x.head0 + head_at) / x.a.Hq];
    for (int J = threadIdx.x; J < there; J += THREADS) {
        double sum = 0.0;
        for (int r = 0; r < n; r++)
            if (J < until[r] && share[r] != 0.0)
                sum += share[r] * (double)mass(lse[r * x.a.nk + J], top[r]);
            // NaN in the row reaches all of its blocks.
            else if (share[r] != share[r])
                sum = share[r];
        if (value)
            value[out + J] = (float)sum;
        else
            score[out + J] = sum;
    }
}

} // namespace

esa_status ada_rows_launch(esa_cuda_device *dev, const ada_job &job, const row_window &w,
                           const int32_t *existing, float *value, double *score,
                           cudaStream_t stream)
{
    rows_kernel<<<(unsigned)w.rows(), THREADS, 0, stream>>>(job, w.blocks, existing, value, score);
    return launch_check(dev, "adding up rows of groups");
}
