// select.cuh - selection on the GPU: rules, quotas and the row picker that all selectors share, and
// what each file provides.
// SPDX-License-Identifier: Apache-2.0
//
// A selection is a few launches on one stream. The host knows all sizes except kv_len, which is on
// the device:
//
//   rules   rules.cu                         what each row sees, must keep, and how many it may
//                                            keep; facts[0], and facts[1] = 0
//   values  rf_v2.cu, ada_bsa.cu, entropy.cu one float per (row, key block): larger is better
//           (error.cu has scores and a choice of its own)
//   pick    pick.cu                          forced blocks, then the best by value up to the quota;
//                                            ascending lists, counts, facts[1]
//
// The pure rules come from src/rules (rows.h, rank.h), as on the CPU.
#pragma once

#include "rules/rows.h"
#include "cuda/runtime/device.cuh"

// The rules of every batch entry in device memory. All heads of an entry share them. Like esa_rules
// of src/select.
struct select_rules {
    int32_t *kv_len;   // [B] existing keys
    int32_t *existing; // [B] existing key blocks
    int64_t *seen;     // [B] sum of visible
    // [B][nq] key blocks 0 .. visible-1 hold a key that a query of the block sees
    int32_t *visible;
    // [B][nq] blocks diagonal .. visible-1 are on the causal diagonal and forced
    int32_t *diagonal;
    // [B][nq] forced blocks of the row, at least 1 if anything is visible
    int32_t *least;
    uint8_t *dense;  // [B][nq] 1: the row keeps every block it sees
    uint8_t *column; // [B][nk] 1: every row keeps this column
    int32_t *before; // [B][nk+1] forced columns before j
};

select_rules rules_carve(carve &c, const esa_select_args *a);
// Fills the rules of all batch entries. quota (or null): [B][nq], the row quotas of rf_v2, ada_bsa
// and random in fixed mode. facts (or null): mask->facts, set to { existing blocks, 0 }.
esa_status rules_launch(esa_cuda_device *dev, const esa_select_args *a, const select_rules &rules,
                        int32_t *quota, int64_t *facts, cudaStream_t stream);

// Picks rows row0 .. row0+rows-1 of [B][Hq][nq]. value[rows][nk] starts with row0; entries beyond
// the visible blocks of a row are not read. quota: [B][nq], or [B][Hq][nq] with quota_per_head. cdf
// below 1: a row also stops at that share of its mass (ada_bsa). Adds to facts[1].
struct pick_job {
    const float *value;
    const int32_t *quota;
    int64_t row0, rows;
    bool quota_per_head;
    double cdf = 1.0;
};
esa_status pick_launch(esa_cuda_device *dev, const esa_select_args *a, const select_rules &rules,
                       const pick_job &job, const esa_cuda_mask *mask, cudaStream_t stream);

// A run of rows of [B][Hq][nq] that is processed at once, so that scratch stays limited: whole
// heads, or part of one head.
struct row_window {
    int64_t head0, heads;  // heads of B * Hq
    int64_t first, blocks; // query blocks of each head; all nq if heads > 1
    int64_t row0(int64_t nq) const { return head0 * nq + first; }
    int64_t rows() const { return heads * blocks; }
};
// The first window, if a row needs bytes_per_row and a window may take `limit` bytes. next moves
// on; false: no more. A window holds at least `unit` rows of a head, and a multiple of it if a head
// is cut.
static inline row_window window_first(const esa_select_args *a, int64_t bytes_per_row,
                                      int64_t limit, int64_t unit)
{
    const int64_t rows = limit / bytes_per_row, heads = rows / a->nq, all = a->B * a->Hq;
    if (heads < 1) return { 0, 1, 0, esa_min64(a->nq, esa_max64(unit, rows / unit * unit)) };
    // Windows of about the same size. 65535: limit of a grid axis.
    return { 0, esa_min64(65535, ceil_div(all, ceil_div(all, heads))), 0, a->nq };
}
static inline bool window_next(row_window &w, const row_window &whole, const esa_select_args *a)
{
    w.first += w.blocks;
    if (w.first >= a->nq) {
        w.first = 0;
        w.head0 += w.heads;
    }
    w.heads = esa_min64(whole.heads, a->B * a->Hq - w.head0);
    w.blocks = esa_min64(whole.blocks, a->nq - w.first);
    return w.heads > 0;
}

// The original choice of blocks, one thread per row (compat.cu): for checks, not for speed.
struct compat_scratch {
    int64_t slots; // rows in flight
    uint8_t *keep; // [slots][nk]
    uint64_t *key; // [slots][roundup(nk, 32)]
};
compat_scratch compat_carve(carve &c, const esa_select_args *a);
// value[rows][nk]: scores of rf_v2; overwritten.
esa_status rf_compat_launch(esa_cuda_device *dev, const esa_select_args *a,
                            const select_rules &rules, float *value, int64_t row0, int64_t rows,
                            const compat_scratch &scratch, const esa_cuda_mask *mask,
                            cudaStream_t stream);
// score[rows][nk]: masses of ada_bsa.
esa_status ada_compat_launch(esa_cuda_device *dev, const esa_select_args *a,
                             const select_rules &rules, const double *score, int64_t row0,
                             int64_t rows, const compat_scratch &scratch, const esa_cuda_mask *mask,
                             cudaStream_t stream);

// The entropy selector (entropy.cu and its neighbours). entropy_carve takes the importance and
// scratch for both functions below. They get the carve as it was after the importance, by value:
// both lay out their parts from the same place, so the second may use what the first left there.
// out f32[B][Hq][nq][nk]: importance, 0 from `existing` on. The rules were filled before on the
// same stream.
esa_status entropy_importance(esa_cuda_device *dev, const esa_select_args *a,
                              const select_rules &rules, float *out, carve c, cudaStream_t stream);
// From importance alone (entropy_importance need not have run): entropy f64[B][Hq] or null, quota
// [B][Hq][nq] or null. k_h is that of esa_budget_entropy for `existing` blocks. spread_rows spreads
// the total of a head, (2 k_h seen + existing) / (2 existing).
esa_status entropy_budgets(esa_cuda_device *dev, const esa_select_args *a,
                           const select_rules &rules, const float *importance, double *entropy,
                           int32_t *quota, carve c, cudaStream_t stream);

// Two functions per row of rules/selectors.h: the first takes scratch, the second fills mask. The
// rules were filled before, and quota where a selector spreads its budget over rows.
#define SELECTOR(ID, id, ...)                                                                      \
    void id##_carve(carve &c, const esa_cuda_device *dev, const esa_select_args *a);               \
    esa_status id##_run(esa_cuda_device *dev, const esa_select_args *a, const select_rules &rules, \
                        int32_t *quota, const esa_cuda_mask *mask, carve c, cudaStream_t stream);
ESA_SELECTORS(SELECTOR)
#undef SELECTOR

// The scores alone of the error selector, out f32[levels][B][Hq][nq][nk] with 0 from `existing` on;
// null: into the scratch, for error_run.
esa_status error_scores_run(esa_cuda_device *dev, const esa_select_args *a,
                            const select_rules &rules, float *out, carve c, cudaStream_t stream);

#ifdef __CUDACC__
// Sum of v over the threads of a thread block, returned to all of them. shared: 32 words for this
// call only. Whole warps only.
static __device__ __forceinline__ uint32_t block_sum(uint32_t v, uint32_t *shared)
{
    const uint32_t part = __reduce_add_sync(0xffffffffu, v), warps = blockDim.x / 32;
    __syncthreads(); // the last sum has been read
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = part;
    __syncthreads();
    return __reduce_add_sync(0xffffffffu, threadIdx.x % 32 < warps ? shared[threadIdx.x % 32] : 0);
}

// Number of threads before this one that have flag set; *all: how many there are. shared: 32 words,
// as above.
static __device__ __forceinline__ uint32_t block_rank(bool flag, uint32_t *all, uint32_t *shared)
{
    const uint32_t ballot = __ballot_sync(0xffffffffu, flag), lane = threadIdx.x % 32,
                   warp = threadIdx.x / 32, warps = blockDim.x / 32;
    __syncthreads();
    if (lane == 0) shared[warp] = __popc(ballot);
    __syncthreads();
    const uint32_t n = lane < warps ? shared[lane] : 0;
    *all = __reduce_add_sync(0xffffffffu, n);
    return __reduce_add_sync(0xffffffffu, lane < warp ? n : 0) +
           __popc(ballot & ((1u << lane) - 1));
}

// esa_budget_spread by one thread block of whole warps: the same quotas. Sums stay below 2^32
// because nq, nk <= 65535. shared: 32 words.
static __device__ inline void spread_rows(int32_t *quota, const int32_t *visible,
                                          const int32_t *least, int64_t nq, int64_t total,
                                          uint32_t *shared)
{
    // The first row of a thread stays in registers; usually there is no other.
    const bool has = threadIdx.x < nq;
    const int32_t own_visible = has ? visible[threadIdx.x] : 0,
                  own_least = has ? least[threadIdx.x] : 0;
    auto sum = [&](auto whole_of) {
        uint32_t n = has ? (uint32_t)esa_spread_quota(own_least, whole_of(own_visible)) : 0;
        for (int64_t i = threadIdx.x + blockDim.x; i < nq; i += blockDim.x)
            n += (uint32_t)esa_spread_quota(least[i], whole_of(visible[i]));
        return (int64_t)block_sum(n, shared);
    };
    auto hand_out = [&](auto whole_of) {
        int64_t left = total - sum(whole_of);
        for (int64_t i = threadIdx.x; i < nq; i += blockDim.x)
            quota[i] = (int32_t)esa_spread_quota(least[i], whole_of(visible[i]));
        for (int turn = 0; turn < 2; turn++)
            for (int64_t first = 0; first < nq && left > 0; first += blockDim.x) {
                const int64_t i = first + threadIdx.x;
                uint32_t all;
                const bool takes = i < nq && esa_spread_takes(quota[i], visible[i], least[i],
                                                              whole_of(visible[i]), turn);
                const uint32_t rank = block_rank(takes, &all, shared);
                if (takes && rank < left) quota[i]++;
                left -= all;
            }
    };
    const int32_t same = visible[0];
    uint32_t others = has && own_visible != same;
    for (int64_t i = threadIdx.x + blockDim.x; i < nq; i += blockDim.x)
        others += visible[i] != same;
    // If all rows see the same number of blocks, the share in whole blocks is one number, found in
    // fewer steps.
    if (block_sum(others, shared) == 0) {
        int64_t lo = 0, hi = same;
        if (sum([&](int32_t) { return hi; }) <= total) lo = hi;
        while (hi - lo > 1) {
            const int64_t mid = (lo + hi) / 2;
            if (sum([&](int32_t) { return mid; }) <= total)
                lo = mid;
            else
                hi = mid;
        }
        hand_out([&](int32_t) { return lo; });
        return;
    }
    double lo = 0.0, hi = 1.0;
    if (sum([&](int32_t v) { return esa_spread_whole(v, hi); }) <= total) lo = hi;
    for (int it = 0; it < ESA_SPREAD_STEPS && lo < hi; it++) {
        const double mid = lo + (hi - lo) / 2;
        if (mid <= lo || mid >= hi) break;
        if (sum([&](int32_t v) { return esa_spread_whole(v, mid); }) <= total)
            lo = mid;
        else
            hi = mid;
    }
    hand_out([&](int32_t v) { return esa_spread_whole(v, lo); });
}
#endif
