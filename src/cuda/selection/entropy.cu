// entropy.cu - the entropy selector: samples, score pass, importance, budgets. Chooses the scoring
// kernel and the windows.
// SPDX-License-Identifier: Apache-2.0
//
// The rules are those of src/select/importance.c and entropy.c, with one difference. The score pass
// keeps its statistics in global memory, 8 bytes per (sample, key block). If they exceed
// STATS_BYTES (many samples, many heads), the query blocks are processed in windows.
#include "cuda/selection/entropy.cuh"
#include "cuda/selection/entropy_steps.cuh"

#include <math.h>

namespace
{

constexpr int64_t STATS_BYTES = 256ll << 20;
constexpr int64_t MOST_TOKENS = INT32_MAX - 1024; // positions are 32-bit in the kernels

struct window {
    int64_t per_block; // samples of a full query block
    int64_t blocks;    // query blocks per window
    int64_t pitch;
};

window window_of(const esa_select_args *a)
{
    window w;
    w.per_block = esa_min64(a->params.samples, esa_min64(a->params.block_q, a->Nq));
    w.pitch = ceil_div<int64_t>(a->nk, 4) * 4;
    const int64_t block_bytes = a->B * a->Hq * w.per_block * w.pitch * (int64_t)sizeof(score_stat);
    w.blocks = esa_min64(a->nq, esa_max64(1, STATS_BYTES / esa_max64(1, block_bytes)));
    return w;
}

struct parts {
    score_stat *stats;
    entropy_work work;
};

parts place(carve &c, const esa_select_args *a)
{
    const window w = window_of(a);
    const int64_t heads = a->B * a->Hq;
    parts p;
    p.stats = c.take<score_stat>(heads * w.blocks * w.per_block * w.pitch);
    p.work.row_entropy = c.take<double>(heads * a->nq);
    p.work.entropy = c.take<double>(heads);
    p.work.spare = c.take<double>(heads);
    p.work.kept = c.take<int32_t>(heads);
    return p;
}

score_job job_of(const esa_select_args *a, const select_rules &rules, const window &w,
                 score_stat *stats, int64_t block0)
{
    score_job x = {};
    x.q = a->q, x.k = a->k;
    for (int i = 0; i < 3; i++) x.q_stride[i] = a->q_stride[i], x.k_stride[i] = a->k_stride[i];
    x.perm_q = a->perm_q, x.perm_k = a->perm_k;
    x.kv_len = rules.kv_len;
    x.stats = stats;
    x.dtype = a->dtype, x.causal = a->params.causal;
    x.B = (int32_t)a->B, x.Hkv = (int32_t)a->Hkv, x.ratio = (int32_t)(a->Hq / a->Hkv);
    x.Nq = (int32_t)a->Nq, x.Nk = (int32_t)a->Nk, x.D = (int32_t)a->D;
    x.block_q = a->params.block_q, x.block_k = a->params.block_k, x.nk = (int32_t)a->nk;
    x.pitch = (int32_t)w.pitch;
    x.per_block = (int32_t)w.per_block;
    x.block0 = (int32_t)block0;
    const int64_t blocks = esa_min64(w.blocks, a->nq - block0),
                  last = esa_min64(a->params.block_q,
                                   a->Nq - (block0 + blocks - 1) * a->params.block_q);
    x.samples = (int32_t)((blocks - 1) * w.per_block + esa_min64(last, w.per_block));
    x.rows = x.ratio * x.samples;
    x.scale = (float)(fabs(a->params.scale) * 1.4426950408889634);
    x.flip = a->params.scale < 0.0 ? 0x80008000u : 0;
    return x;
}

esa_status score_launch(esa_cuda_device *dev, const esa_select_args *a, const score_job &x,
                        cudaStream_t stream)
{
    if (a->dtype == ESA_DTYPE_F32) return f32_score_launch(dev, x, stream);
    return sm90_score_takes(dev, a) ? sm90_score_launch(dev, x, stream)
                                    : sm80_score_launch(dev, x, stream);
}

} // namespace

void entropy_carve(carve &c, const esa_cuda_device *, const esa_select_args *a)
{
    c.take<float>(a->B * a->Hq * a->nq * a->nk);
    place(c, a);
}

esa_status entropy_importance(esa_cuda_device *dev, const esa_select_args *a,
                              const select_rules &rules, float *out, carve c, cudaStream_t stream)
{
    if (a->params.mode == ESA_MODE_COMPAT_ROUND)
        return device_fail(dev, ESA_ERR_UNSUPPORTED,
                           "the entropy selector in mode compat-round rounds every score and runs "
                           "on the CPU only: use mode compat, or CPU tensors");
    if (a->Nq > MOST_TOKENS || a->Nk > MOST_TOKENS)
        return device_fail(dev, ESA_ERR_UNSUPPORTED,
                           "sequences on the GPU may have at most %lld tokens",
                           (long long)MOST_TOKENS);
    const window w = window_of(a);
    const parts p = place(c, a);
    for (int64_t block0 = 0; block0 < a->nq; block0 += w.blocks) {
        const score_job x = job_of(a, rules, w, p.stats, block0);
        esa_status status = score_launch(dev, a, x, stream);
        if (!status) status = importance_launch(dev, x, out, a->nq, stream);
        if (status) return status;
    }
    return ESA_OK;
}

esa_status entropy_budgets(esa_cuda_device *dev, const esa_select_args *a,
                           const select_rules &rules, const float *importance, double *entropy,
                           int32_t *quota, carve c, cudaStream_t stream)
{
    const parts p = place(c, a);
    return budget_launch(dev, a, rules, importance, p.work, entropy, quota, stream);
}
