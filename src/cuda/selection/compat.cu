// compat.cu - the original choice of blocks on the GPU: the row functions of the CPU, one thread
// per row.
// SPDX-License-Identifier: Apache-2.0
//
// These modes exist for checks against the originals, so the rule is not written again for speed.
#include "rules/compat_rows.h"
#include "cuda/selection/select.cuh"

namespace
{

enum { THREADS = 32, MOST_SLOTS = 4096 };
enum : int64_t { SCRATCH_BYTES = 64 << 20 };

struct compat_args {
    compat_scratch scratch;
    int32_t *count;
    uint16_t *index;
    unsigned long long *kept;
    int64_t row0, rows, cap;
};

// Writes row `row` from keep[n] and the forced blocks.
__device__ void write_row(const compat_args &x, int64_t row, const uint8_t *keep,
                          const uint8_t *column, bool dense, int32_t n)
{
    int32_t count = 0;
    for (int32_t j = 0; j < n; j++)
        if (dense || (column && column[j]) || keep[j]) x.index[row * x.cap + count++] = (uint16_t)j;
    x.count[row] = count;
    atomicAdd(x.kept, (unsigned long long)count);
}

// Row is a functor (slot's keep, slot's key, row within the window, row, b, i). It fills keep and
// returns whether the row is dense.
template <class Row>
__device__ void each_row(const esa_select_args &a, const select_rules &rules, const compat_args &x,
                         bool forces, Row choose)
{
    const int64_t slot = (int64_t)blockIdx.x * THREADS + threadIdx.x,
                  padded = esa_ceil_div(a.nk, 32) * 32;
    if (slot >= x.scratch.slots) return;
    uint8_t *keep = x.scratch.keep + slot * a.nk;
    uint64_t *key = x.scratch.key + slot * padded;
    for (int64_t at = slot; at < x.rows; at += x.scratch.slots) {
        const int64_t row = x.row0 + at, b = row / (a.Hq * a.nq), i = row % a.nq,
                      rule = b * a.nq + i;
        const bool dense = forces && rules.dense[rule];
        if (!dense) choose(keep, key, at, rules.visible[rule]);
        write_row(x, row, keep, forces ? rules.column + b * a.nk : nullptr, dense,
                  rules.visible[rule]);
    }
}

__global__ void __launch_bounds__(THREADS)
    rf_rows(const __grid_constant__ esa_select_args a, select_rules rules,
            const __grid_constant__ compat_args x, float *value)
{
    each_row(a, rules, x, true, [&](uint8_t *keep, uint64_t *key, int64_t at, int32_t v) {
        esa_rf_pick_compat(keep, value + at * a.nk, v, &a.params, esa_rows_round(&a), key);
    });
}

__global__ void __launch_bounds__(THREADS)
    ada_rows(const __grid_constant__ esa_select_args a, select_rules rules,
             const __grid_constant__ compat_args x, const double *score)
{
    each_row(a, rules, x, false, [&](uint8_t *keep, uint64_t *key, int64_t at, int32_t v) {
        esa_ada_pick_compat(keep, score + at * a.nk, v, &a.params,
                            a.params.mode == ESA_MODE_COMPAT_ROUND, key);
    });
}

compat_args args_of(const compat_scratch &scratch, int64_t row0, int64_t rows,
                    const esa_cuda_mask *mask)
{
    return { scratch, mask->count, mask->index, (unsigned long long *)mask->facts + 1,
             row0,    rows,        mask->cap };
}

unsigned grid_of(const compat_scratch &scratch)
{
    return (unsigned)ceil_div<int64_t>(scratch.slots, THREADS);
}

} // namespace

compat_scratch compat_carve(carve &c, const esa_select_args *a)
{
    compat_scratch s;
    const int64_t padded = ceil_div<int64_t>(a->nk, 32) * 32;
    s.slots = esa_max64(
        1, esa_min64(esa_min64(MOST_SLOTS, a->B * a->Hq * a->nq), SCRATCH_BYTES / (9 * padded)));
    s.keep = c.take<uint8_t>(s.slots * a->nk);
    s.key = c.take<uint64_t>(s.slots * padded);
    return s;
}

esa_status rf_compat_launch(esa_cuda_device *dev, const esa_select_args *a,
                            const select_rules &rules, float *value, int64_t row0, int64_t rows,
                            const compat_scratch &scratch, const esa_cuda_mask *mask,
                            cudaStream_t stream)
{
    rf_rows<<<grid_of(scratch), THREADS, 0, stream>>>(*a, rules, args_of(scratch, row0, rows, mask),
                                                      value);
    return launch_check(dev, "picking blocks as rf_v2's original does");
}

esa_status ada_compat_launch(esa_cuda_device *dev, const esa_select_args *a,
                             const select_rules &rules, const double *score, int64_t row0,
                             int64_t rows, const compat_scratch &scratch, const esa_cuda_mask *mask,
                             cudaStream_t stream)
{
    ada_rows<<<grid_of(scratch), THREADS, 0, stream>>>(*a, rules,
                                                       args_of(scratch, row0, rows, mask), score);
    return launch_check(dev, "picking blocks as ada_bsa's original does");
}
