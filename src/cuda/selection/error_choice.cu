// error_choice.cu - which blocks are exact, which are on the fine level: the rule of
// rules/levels.h, as src/select/error_choice.c has it.
// SPDX-License-Identifier: Apache-2.0
//
// One budget per batch entry. One warp per row finds the blocks that are exact in any case. Three
// rounds sum the weights of all steps per digit of their gain and find the digit in which the
// budget runs out. Then the weights of the steps with exactly this gain are added up in the order
// of the rows, and every row is written. All sums are of integers, so the result does not depend on
// the order of the threads.
#include "cuda/runtime/lanes.cuh"
#include "cuda/selection/error.cuh"
#include "cuda/selection/pick.cuh"

namespace
{

enum { WARPS = PICK_WARPS, THREADS = WARPS * 32, SCAN_THREADS = 1024 };
static_assert((int)ERROR_BINS == (int)ESA_CUT_BINS && ERROR_BINS == 2 * SCAN_THREADS,
              "two bins per thread");

struct choice_job {
    error_choice w;
    select_rules rules;
    esa_level_costs costs;
    const float *errors;        // [levels][B][Hq][nq][nk]
    int64_t level_stride, rows; // rows: Hq * nq of a batch entry
    double budget;
    int32_t B, Hq, nq, nk, round;
};

// One row of a batch entry, by one warp.
struct choice_row {
    const choice_job &x;
    const float *e;
    const uint8_t *column;
    int visible, diagonal, dense, best;

    // row: of B * Hq * nq
    __device__ __forceinline__ choice_row(const choice_job &job, int64_t row)
        : x(job), e(job.errors + row * job.nk)
    {
        const int64_t b = row / x.rows, rule = b * x.nq + row % x.nq;
        column = x.rules.column + b * x.nk;
        visible = x.rules.visible[rule], diagonal = x.rules.diagonal[rule],
        dense = x.rules.dense[rule];
        best = -1;
    }
    __device__ __forceinline__ bool exact(int j) const // in any case
    {
        return dense || j >= diagonal || j == best || column[j];
    }
    // Steps of a visible block that is not exact in any case.
    __device__ __forceinline__ esa_level_steps steps(int j) const
    {
        return esa_level_steps_of(&x.costs, e[j],
                                  x.costs.levels > 1 ? e[x.level_stride + j] : 0.0f);
    }
    // Weight of the step at the cut. At most one of the two has this gain.
    __device__ __forceinline__ int tied(const esa_level_steps &s, uint32_t key) const
    {
        if (s.key[0] == key) return s.weight[0];
        return s.via_fine && s.key[1] == key ? s.weight[1] : 0;
    }
};

__device__ __forceinline__ int64_t warp_row()
{
    return (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
}

__global__ void __launch_bounds__(THREADS) best_kernel(const __grid_constant__ choice_job x)
{
    const int64_t at = warp_row();
    if (at >= x.B * x.rows) return;
    choice_row row(x, at);
    const int lane = threadIdx.x % 32;
    uint64_t best = 0; // the larger error first, then the lower block
    for (int j = lane; j < row.visible; j += 32)
        best = max(best, (uint64_t)esa_gain_key(row.e[j]) << 32 | (0xffffffffu - (uint32_t)j));
    best = lanes_max<32>(best);
    row.best = row.visible > 0 ? (int)(0xffffffffu - (uint32_t)best) : -1;
    int n = 0;
    for (int j = lane; j < row.visible; j += 32) n += row.exact(j);
    n = __reduce_add_sync(ALL_LANES, n);
    if (lane) return;
    x.w.best[at] = row.best;
    atomicAdd((unsigned long long *)&x.w.state[at / x.rows].paid, (unsigned long long)n);
}

// grid (thread blocks, batch entries). Adds the weights of a round to its bins.
__global__ void __launch_bounds__(THREADS) bins_kernel(const __grid_constant__ choice_job x)
{
    __shared__ uint32_t bins[ERROR_BINS]; // below 2^32: a thread block sees fewer than 2^24 blocks
    const int64_t b = blockIdx.y;
    const error_state state = x.w.state[b];
    if (x.round && state.all) return;
    for (int i = threadIdx.x; i < ERROR_BINS; i += THREADS) bins[i] = 0;
    __syncthreads();
    for (int64_t r = warp_row(); r < x.rows; r += (int64_t)gridDim.x * WARPS) {
        choice_row row(x, b * x.rows + r);
        row.best = x.w.best[b * x.rows + r];
        for (int j = threadIdx.x % 32; j < row.visible; j += 32) {
            if (row.exact(j)) continue;
            const esa_level_steps s = row.steps(j);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (i && !s.via_fine) continue;
                const int digit = esa_cut_digit(s.key[i], state.key, x.round);
                if (digit >= 0) atomicAdd(&bins[digit], (uint32_t)s.weight[i]);
            }
        }
    }
    __syncthreads();
    unsigned long long *const all = x.w.bins + (x.round * x.B + b) * (int64_t)ERROR_BINS;
    for (int i = threadIdx.x; i < ERROR_BINS; i += THREADS)
        if (bins[i]) atomicAdd(&all[i], (unsigned long long)bins[i]);
}

// Sum of v over the threads before this one; *all: over all of them. shared: 32 values.
__device__ int64_t scan_before(int64_t v, int64_t *all, int64_t *shared)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t sum = v;
    for (int step = 1; step < 32; step *= 2) {
        const int64_t other = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads(); // the last sums have been read
    if (lane == 31) shared[warp] = sum;
    __syncthreads();
    int64_t before = 0;
    *all = 0;
    for (int w = 0; w < SCAN_THREADS / 32; ++w) {
        if (w < warp) before += shared[w];
        *all += shared[w];
    }
    return before + sum - v;
}

// One thread block per batch entry: the digit of a round in which the columns run out.
__global__ void __launch_bounds__(SCAN_THREADS, 1)
    digit_kernel(const __grid_constant__ choice_job x)
{
    __shared__ int64_t shared[32];
    const int64_t b = blockIdx.x;
    error_state *const state = x.w.state + b;
    const uint32_t found = state->key;
    int64_t left = state->left;
    if (x.round == 0) {
        const int64_t existing = x.Hq * x.rules.seen[b];
        left = esa_max64(0, esa_level_budget(&x.costs, x.budget, existing) -
                                existing * x.costs.mean -
                                state->paid * (x.costs.exact - x.costs.mean));
    } else if (state->all) {
        return;
    }
    // From the highest digit down: thread t has digits 2047 - 2t and 2046 - 2t.
    const unsigned long long *const bins = x.w.bins + (x.round * x.B + b) * (int64_t)ERROR_BINS;
    const int high = ERROR_BINS - 1 - 2 * (int)threadIdx.x;
    const int64_t first = (int64_t)bins[high], second = (int64_t)bins[high - 1];
    int64_t all;
    const int64_t before = scan_before(first + second, &all, shared);
    // The barriers of scan_before lie between all reads of the state and this.
    if (before <= left && before + first + second > left) {
        const bool at_first = before + first > left;
        state->key = found | (uint32_t)(at_first ? high : high - 1) << esa_cut_shift(x.round);
        state->left = left - before - (at_first ? 0 : first);
    }
    if (threadIdx.x == 0 && x.round == 0 && all <= left) {
        // Everything fits: no step lies below the cut, and those at it fit too.
        state->all = 1;
        state->left = INT64_MAX;
    }
}

__global__ void __launch_bounds__(THREADS) ties_kernel(const __grid_constant__ choice_job x)
{
    const int64_t at = warp_row();
    if (at >= x.B * x.rows) return;
    const error_state &state = x.w.state[at / x.rows];
    choice_row row(x, at);
    row.best = x.w.best[at];
    int sum = 0;
    if (!state.all)
        for (int j = threadIdx.x % 32; j < row.visible; j += 32)
            if (!row.exact(j)) sum += row.tied(row.steps(j), state.key);
    sum = __reduce_add_sync(ALL_LANES, sum);
    if (threadIdx.x % 32 == 0) x.w.ties[at] = sum;
}

// One thread block per batch entry: ties become sums over the rows before.
__global__ void __launch_bounds__(SCAN_THREADS, 1)
    order_kernel(const __grid_constant__ choice_job x)
{
    __shared__ int64_t shared[32];
    int64_t *const ties = x.w.ties + blockIdx.x * x.rows;
    int64_t sum = 0;
    for (int64_t first = 0; first < x.rows; first += SCAN_THREADS) {
        const int64_t r = first + threadIdx.x;
        int64_t all;
        const int64_t before = scan_before(r < x.rows ? ties[r] : 0, &all, shared);
        if (r < x.rows) ties[r] = sum + before;
        sum += all;
    }
}

__global__ void __launch_bounds__(THREADS)
    lists_kernel(const __grid_constant__ choice_job x, const __grid_constant__ esa_cuda_mask mask)
{
    __shared__ int kept[WARPS], means[WARPS];
    const int64_t at = warp_row();
    const int lane = threadIdx.x % 32;
    row_writer exact = { mask.index + at * mask.cap },
               fine = { mask.fine_index ? mask.fine_index + at * mask.cap : nullptr };
    if (at < x.B * x.rows) {
        const error_state state = x.w.state[at / x.rows];
        choice_row row(x, at);
        row.best = x.w.best[at];
        int64_t tied = x.w.ties[at]; // weight at the cut before these blocks
        for (int first = 0; first < row.visible; first += 32) {
            const int j = first + lane;
            const bool sees = j < row.visible, forced = sees && row.exact(j);
            esa_level_steps s = {};
            if (sees && !forced) s = row.steps(j);
            int sum = sees && !forced && !state.all ? row.tied(s, state.key) : 0;
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(ALL_LANES, sum, step);
                if (lane >= step) sum += other;
            }
            // A step at the cut is taken if it and all before it fit.
            const esa_level_cut cut = { state.key, tied + sum <= state.left ? INT64_MAX : 0 };
            int level = ESA_LEVEL_MEAN;
            if (forced)
                level = ESA_LEVEL_EXACT;
            else if (sees)
                level = esa_level_of(&s, &cut, 0);
            exact.put(j, level == ESA_LEVEL_EXACT);
            if (fine.index) fine.put(j, level == ESA_LEVEL_FINE);
            tied += __shfl_sync(ALL_LANES, sum, 31);
        }
        if (lane == 0) {
            mask.count[at] = exact.n;
            if (mask.fine_count) mask.fine_count[at] = fine.n;
        }
    }
    if (lane == 0) kept[threadIdx.x / 32] = exact.n, means[threadIdx.x / 32] = fine.n;
    __syncthreads();
    if (threadIdx.x >= 2) return;
    int sum = 0;
    for (int w = 0; w < WARPS; ++w) sum += threadIdx.x ? means[w] : kept[w];
    atomicAdd((unsigned long long *)mask.facts + 1 + threadIdx.x, (unsigned long long)sum);
}

} // namespace

error_choice error_choice_carve(carve &c, const esa_select_args *a)
{
    error_choice w;
    w.state = c.take<error_state>(a->B);
    w.bins = c.take<unsigned long long>(ESA_CUT_ROUNDS * a->B * ERROR_BINS);
    w.best = c.take<int32_t>(a->B * a->Hq * a->nq);
    w.ties = c.take<int64_t>(a->B * a->Hq * a->nq);
    return w;
}

esa_status error_choice_launch(esa_cuda_device *dev, const esa_select_args *a,
                               const select_rules &rules, const float *errors,
                               const error_choice &w, const esa_cuda_mask *mask,
                               cudaStream_t stream)
{
    choice_job x = { w,
                     rules,
                     esa_level_costs_of(&a->params),
                     errors,
                     a->B * a->Hq * a->nq * a->nk,
                     a->Hq * a->nq,
                     a->params.budget,
                     (int32_t)a->B,
                     (int32_t)a->Hq,
                     (int32_t)a->nq,
                     (int32_t)a->nk,
                     0 };
    const unsigned grid = (unsigned)ceil_div<int64_t>(a->B * x.rows, WARPS),
                   some = (unsigned)esa_min64(ceil_div<int64_t>(x.rows, WARPS),
                                              8 * (int64_t)dev->multiprocessors);
    // State and bins lie side by side.
    const size_t bytes = (size_t)((char *)(w.bins + ESA_CUT_ROUNDS * a->B * ERROR_BINS) -
                                  (char *)w.state);
    esa_status status = device_check(dev, cudaMemsetAsync(w.state, 0, bytes, stream),
                                     "clearing the choice");
    if (status) return status;
    best_kernel<<<grid, THREADS, 0, stream>>>(x);
    for (int32_t r = 0; r < ESA_CUT_ROUNDS; r++) {
        x.round = r;
        bins_kernel<<<dim3(some, (unsigned)a->B), THREADS, 0, stream>>>(x);
        digit_kernel<<<(unsigned)a->B, SCAN_THREADS, 0, stream>>>(x);
    }
    ties_kernel<<<grid, THREADS, 0, stream>>>(x);
    order_kernel<<<(unsigned)a->B, SCAN_THREADS, 0, stream>>>(x);
    lists_kernel<<<grid, THREADS, 0, stream>>>(x, *mask);
    return launch_check(dev, "choosing levels");
}
