// entropy_budget.cu - from importance to row quotas: entropies of the rows, of the heads, blocks per head, blocks per row.
// SPDX-License-Identifier: Apache-2.0
//
// All in double. Sums over key blocks and over rows run along the lanes of one warp and down a fixed tree, so they are the same every time;
// the sharing of the budget is base/budget.h, the CPU's own text, run by one thread.
#include "base/budget.h"
#include "cuda/entropy_steps.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int SHARED_HEADS = 512;       // up to here the one thread works in shared memory

__device__ __forceinline__ double over_lanes(double x) {
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// Normalised entropy of every row [B][Hq][nq], one warp each. A row that sees one block or none says nothing about its head: -1.
__global__ void __launch_bounds__(THREADS) row_entropy_kernel(double *entropy, const float *importance, const int32_t *visible, int64_t rows, int Hq, int nq, int nk) {
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= rows) return;
    const int v = visible[row / ((int64_t)Hq * nq) * nq + row % nq];
    const float *const p = importance + row * nk;
    double e = 0.0;
    for (int j = threadIdx.x % 32; j < v; j += 32) {
        const float share = p[j];
        if (share > 0.0f) e -= (double)share * log((double)share);
    }
    e = over_lanes(e);
    if (threadIdx.x % 32 == 0) entropy[row] = v > 1 ? e / log((double)v) : -1.0;
}

// One thread block per batch entry: the heads' entropies, then their blocks.
__global__ void __launch_bounds__(THREADS) head_budget_kernel(double *entropy, int32_t *kept, double *spare, const double *row_entropy, const int32_t *existing,
                                                               int Hq, int nq, double budget) {
    __shared__ double shared_entropy[SHARED_HEADS], shared_spare[SHARED_HEADS];
    __shared__ int32_t shared_kept[SHARED_HEADS];
    const int b = blockIdx.x, n = existing[b], lane = threadIdx.x % 32;
    entropy += (int64_t)b * Hq, kept += (int64_t)b * Hq, spare += (int64_t)b * Hq, row_entropy += (int64_t)b * Hq * nq;
    for (int h = threadIdx.x / 32; h < Hq; h += WARPS) {
        double sum = 0.0, rows = 0.0;
        for (int i = lane; i < nq; i += 32) {
            const double e = row_entropy[(int64_t)h * nq + i];
            if (e >= 0.0) sum += e, rows += 1.0;
        }
        sum = over_lanes(sum), rows = over_lanes(rows);
        const double mean = rows > 0.0 && sum < rows ? sum / rows : 1.0;    // rounded shares can pass 1 by a hair
        if (lane == 0) {
            entropy[h] = mean;
            if (h < SHARED_HEADS) shared_entropy[h] = mean;
        }
    }
    __syncthreads();
    if (threadIdx.x || n == 0) return;
    if (Hq > SHARED_HEADS) {
        esa_budget_heads(kept, entropy, Hq, n, budget, spare);
        return;
    }
    esa_budget_heads(shared_kept, shared_entropy, Hq, n, budget, shared_spare);
    for (int h = 0; h < Hq; h++) kept[h] = shared_kept[h];
}

// One thread block per head: its blocks spread over its rows. Where rows see less (causal) the same share of what they see.
__global__ void __launch_bounds__(THREADS) quota_kernel(int32_t *quota, const int32_t *kept, const int32_t *existing, const int64_t *seen, const int32_t *visible,
                                                         const int32_t *least, int Hq, int nq) {
    __shared__ uint32_t shared[32];
    const int64_t head = blockIdx.x, b = head / Hq, n = existing[b];
    const int64_t total = n > 0 ? (2 * kept[head] * seen[b] + n) / (2 * n) : 0;
    spread_rows(quota + head * nq, visible + b * nq, least + b * nq, nq, total, shared);
}

} // namespace

esa_status budget_launch(esa_cuda_device *dev, const esa_select_args *a, const select_rules &rules, const float *importance, const entropy_work &w,
                         double *entropy, int32_t *quota, cudaStream_t stream) {
    const int64_t rows = a->B * a->Hq * a->nq;
    if (!entropy) entropy = w.entropy;
    row_entropy_kernel<<<(unsigned)ceil_div<int64_t>(rows, WARPS), THREADS, 0, stream>>>(w.row_entropy, importance, rules.visible, rows, (int)a->Hq, (int)a->nq, (int)a->nk);
    head_budget_kernel<<<(unsigned)a->B, THREADS, 0, stream>>>(entropy, w.kept, w.spare, w.row_entropy, rules.existing, (int)a->Hq, (int)a->nq, a->params.budget);
    if (quota)
        quota_kernel<<<(unsigned)(a->B * a->Hq), THREADS, 0, stream>>>(quota, w.kept, rules.existing, rules.seen, rules.visible, rules.least, (int)a->Hq, (int)a->nq);
    return launch_check(dev, "launching the budget kernels");
}
