// entropy_budget.cu - from importance to row quotas: entropies of rows and heads, blocks per head,
// blocks per row.
// SPDX-License-Identifier: Apache-2.0
//
// Everything is in double. Sums over key blocks and over rows run along the lanes of one warp
// and down a fixed tree, so they are the same every time. rules/budget.h splits the budget, as
// on the CPU.
#include "rules/budget.h"
#include "cuda/selection/entropy_steps.cuh"
#include "cuda/runtime/lanes.cuh"

namespace
{

// For quotas: one or two rows per thread.
constexpr int THREADS = 256, WARPS = THREADS / 32, QUOTA_THREADS = 512;
constexpr int SHARED_HEADS = 512; // up to here the heads of a batch entry fit into shared memory

// Normalised entropy of every row [B][Hq][nq], one warp each. -1 if the row sees at most one block
// and says nothing about its head.
__global__ void __launch_bounds__(THREADS)
    row_entropy_kernel(double *entropy, const float *importance, const int32_t *visible,
                       int64_t rows, int Hq, int nq, int nk)
{
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= rows) return;
    const int v = visible[row / ((int64_t)Hq * nq) * nq + row % nq];
    const float *const p = importance + row * nk;
    double e = 0.0;
    for (int j = threadIdx.x % 32; j < v; j += 32) {
        const float share = p[j];
        if (share > 0.0f) e -= (double)share * log((double)share);
    }
    e = lanes_sum<32>(e);
    if (threadIdx.x % 32 == 0) entropy[row] = v > 1 ? e / log((double)v) : -1.0;
}

// The smallest scale at which the shares reach the wanted sum, the same that esa_heads_search finds
// (the sum never falls, so there is only one). A warp tests 32 places at once.
__device__ double search(const esa_heads &x)
{
    const int lane = threadIdx.x % 32;
    double lo = 0.0, hi = x.most;
    for (;;) {
        const double mid = lo + (hi - lo) / 2, at = lo + (hi - lo) * ((lane + 1) / 33.0);
        if (mid <= lo || mid >= hi) return hi;
        const bool reached = at >= hi || (at > lo && esa_heads_sum(&x, at) >= x.want);
        const int first = __ffs(__ballot_sync(~0u, reached)) - 1; // -1: none
        const double below = __shfl_sync(~0u, at, first < 0 ? 31 : max(first - 1, 0)),
                     above = __shfl_sync(~0u, at, max(first, 0));
        if (first != 0) lo = fmax(lo, below);
        if (first >= 0) hi = fmin(hi, above);
    }
}

// Entropies of the heads of one batch entry: the mean over the rows that have one.
__device__ void head_entropies(double *out, const double *row_entropy, int Hq, int nq)
{
    const int lane = threadIdx.x % 32;
    for (int h = threadIdx.x / 32; h < Hq; h += WARPS) {
        double sum = 0.0, rows = 0.0;
        for (int i = lane; i < nq; i += 32) {
            const double e = row_entropy[(int64_t)h * nq + i];
            if (e >= 0.0) sum += e, rows += 1.0;
        }
        sum = lanes_sum<32>(sum), rows = lanes_sum<32>(rows);
        // Rounded shares can exceed 1 slightly.
        if (lane == 0) out[h] = rows > 0.0 && sum < rows ? sum / rows : 1.0;
    }
}

// One thread block per batch entry: the entropies of the heads, then their blocks. The steps of
// esa_budget_heads with the heads in parallel.
__global__ void __launch_bounds__(THREADS)
    head_budget_kernel(double *entropy, int32_t *kept, double *spare, const double *row_entropy,
                       const int32_t *existing, int Hq, int nq, double budget)
{
    __shared__ double shared_entropy[SHARED_HEADS], shared_left[SHARED_HEADS];
    __shared__ unsigned long long held;
    __shared__ esa_heads heads;
    const int64_t b = blockIdx.x;
    const bool few = Hq <= SHARED_HEADS;
    double *const all = few ? shared_entropy : entropy + b * Hq, *const left = few ? shared_left
                                                                                   : spare + b * Hq;
    int32_t *const k = kept + b * Hq;
    head_entropies(all, row_entropy + b * Hq * nq, Hq, nq);
    __syncthreads();
    if (few)
        for (int h = threadIdx.x; h < Hq; h += THREADS) entropy[b * Hq + h] = all[h];
    if (existing[b] == 0) return;
    if (threadIdx.x < 32) {
        esa_heads x = esa_heads_open(all, Hq, existing[b], budget);
        if (x.most > 0.0) esa_heads_settle(&x, search(x));
        if (threadIdx.x == 0) heads = x, held = 0;
    }
    __syncthreads();
    for (int h = threadIdx.x; h < Hq; h += THREADS) {
        k[h] = (int32_t)esa_head_whole(&heads, h, &left[h]);
        atomicAdd(&held, (unsigned long long)k[h]);
    }
    __syncthreads();
    const int64_t missing = heads.total - (int64_t)held;
    __syncthreads();
    for (int h = threadIdx.x; h < Hq && missing > 0; h += THREADS)
        if (esa_head_wins(left, Hq, h, missing)) {
            k[h]++;
            atomicAdd(&held, 1ull);
        }
    __syncthreads();
    if (threadIdx.x == 0) esa_heads_even_out(&heads, k, (int64_t)held);
}

// One thread block per head: spreads its blocks over its rows. Rows that see less (causal) get the
// same share of what they see.
__global__ void __launch_bounds__(QUOTA_THREADS)
    quota_kernel(int32_t *quota, const int32_t *kept, const int32_t *existing, const int64_t *seen,
                 const int32_t *visible, const int32_t *least, int Hq, int nq)
{
    __shared__ uint32_t shared[32];
    const int64_t head = blockIdx.x, b = head / Hq, n = existing[b];
    const int64_t total = n > 0 ? (2 * kept[head] * seen[b] + n) / (2 * n) : 0;
    spread_rows(quota + head * nq, visible + b * nq, least + b * nq, nq, total, shared);
}

} // namespace

esa_status budget_launch(esa_cuda_device *dev, const esa_select_args *a, const select_rules &rules,
                         const float *importance, const entropy_work &w, double *entropy,
                         int32_t *quota, cudaStream_t stream)
{
    const int64_t rows = a->B * a->Hq * a->nq;
    if (!entropy) entropy = w.entropy;
    row_entropy_kernel<<<(unsigned)ceil_div<int64_t>(rows, WARPS), THREADS, 0, stream>>>(
        w.row_entropy, importance, rules.visible, rows, (int)a->Hq, (int)a->nq, (int)a->nk);
    head_budget_kernel<<<(unsigned)a->B, THREADS, 0, stream>>>(
        entropy, w.kept, w.spare, w.row_entropy, rules.existing, (int)a->Hq, (int)a->nq,
        a->params.budget);
    if (quota)
        quota_kernel<<<(unsigned)(a->B * a->Hq), QUOTA_THREADS, 0, stream>>>(
            quota, w.kept, rules.existing, rules.seen, rules.visible, rules.least, (int)a->Hq,
            (int)a->nq);
    return launch_check(dev, "launching the budget kernels");
}
