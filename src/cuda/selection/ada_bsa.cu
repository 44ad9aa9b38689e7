// ada_bsa.cu - ada_bsa on the GPU: chooses the kernels that make the sums, cuts windows that limit
// the scratch, and picks the blocks.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/selection/ada.cuh"

namespace
{

enum : int64_t { WINDOW_BYTES = 320 << 20 };

struct ada_parts {
    row_window whole; // the first window; the parts below have its size
    float *lse;       // [rows of groups][nk]
    float *sums;      // [rows of groups][columns], without tensor cores
    float *half;      // [rows of blocks][groups of a block][nk], compat-round
    float *value;     // [rows of blocks][nk], fixed
    double *score;    // the same for compat
    compat_scratch compat;
};

ada_parts lay_out(carve &c, const esa_select_args *a, bool plain)
{
    const int64_t Rq = a->params.block_q / ESA_ADA_GROUP,
                  columns = ceil_div<int64_t>(a->Nk, ESA_ADA_GROUP), f = sizeof(float);
    const bool fixed = a->params.mode == ESA_MODE_FIXED,
               rounded = a->params.mode == ESA_MODE_COMPAT_ROUND;
    ada_parts p = {};
    p.whole = window_first(
        a, Rq * f * (a->nk + (plain ? columns : 0)) + a->nk * (int64_t)sizeof(double), WINDOW_BYTES,
        1);
    const int64_t groups = p.whole.rows() * Rq;
    p.lse = c.take<float>(groups * a->nk);
    if (plain) p.sums = c.take<float>(groups * columns);
    if (rounded) p.half = c.take<float>(groups * a->nk);
    if (fixed)
        p.value = c.take<float>(p.whole.rows() * a->nk);
    else {
        p.score = c.take<double>(p.whole.rows() * a->nk);
        p.compat = compat_carve(c, a);
    }
    return p;
}

} // namespace

// Scratch is counted without pointers: the larger of both ways.
void ada_bsa_carve(carve &c, const esa_cuda_device *, const esa_select_args *a)
{
    carve mma = c, plain = c;
    lay_out(mma, a, false);
    lay_out(plain, a, true);
    c.used = esa_max64(mma.used, plain.used);
}

esa_status ada_bsa_run(esa_cuda_device *dev, const esa_select_args *a, const select_rules &rules,
                       int32_t *quota, const esa_cuda_mask *mask, carve c, cudaStream_t stream)
{
    const bool plain = !ada_mma_takes(a), fixed = a->params.mode == ESA_MODE_FIXED,
               rounded = a->params.mode == ESA_MODE_COMPAT_ROUND;
    const ada_parts p = lay_out(c, a, plain);
    const int64_t Rq = a->params.block_q / ESA_ADA_GROUP,
                  groups = ceil_div<int64_t>(a->Nq, ESA_ADA_GROUP);
    const double log2e = rounded ? 1.0 : 1.4426950408889634;
    esa_status status = ESA_OK;
    row_window w = p.whole;
    while (!status) {
        const int64_t row0 = w.first * Rq,
                      rows = esa_min64(groups, (w.first + w.blocks) * Rq) - row0;
        const ada_job job = { *a,      rules.kv_len,
                              p.lse,   w.head0,
                              w.heads, row0,
                              rows,    (float)(a->params.scale / ESA_ADA_GROUP * log2e),
                              fixed,   0 };
        if (!plain)
            status = sm90_ada_takes(dev, a) ? sm90_ada_launch(dev, job, stream)
                                            : ada_mma_launch(dev, job, stream);
        else {
            status = ada_plain_sums(dev, job, p.sums, stream);
            if (!status && !rounded) status = ada_plain_lse(dev, job, p.sums, stream);
        }
        if (!status)
            status = rounded
                         ? ada_plain_rounded(dev, job, w, p.sums, p.half, p.score, stream)
                         : ada_rows_launch(dev, job, w, rules.existing, p.value, p.score, stream);
        if (status) break;
        if (fixed) {
            pick_job pick = { p.value, quota, w.row0(a->nq), w.rows(), false };
            pick.cdf = a->params.cdf_threshold;
            status = pick_launch(dev, a, rules, pick, mask, stream);
        } else {
            status = ada_compat_launch(dev, a, rules, p.score, w.row0(a->nq), w.rows(), p.compat,
                                       mask, stream);
        }
        if (!window_next(w, p.whole, a)) break;
    }
    return status;
}
