// error.cu - the error selector: sizes, workspace and the order of the steps.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/selection/error.cuh"
#include "cuda/runtime/views.cuh"

#include <math.h>

namespace
{

constexpr int64_t MOST_TOKENS = (1 << 30) - 1024; // positions are 32-bit in the kernels

struct error_parts {
    error_job job;
    error_choice choice;
    float *errors; // [levels][B][Hq][nq][nk]
    char *attention;
};

error_job shape_of(const esa_select_args *a)
{
    const esa_select_params *p = &a->params;
    error_job x = {};
    x.dtype = a->dtype;
    x.D = (int32_t)a->D;
    const int32_t piece = (int32_t)(16 / element_bytes(a->dtype));
    x.pitch = ceil_div(x.D, piece) * piece;
    // The widths of the kernel with tensor cores.
    if (a->dtype != ESA_DTYPE_F32 && x.D <= 128) x.pitch = x.D <= 64 ? 64 : 128;
    x.B = (int32_t)a->B, x.Hq = (int32_t)a->Hq, x.Hkv = (int32_t)a->Hkv;
    x.nq = (int32_t)a->nq, x.nk = (int32_t)a->nk, x.Nq = (int32_t)a->Nq;
    x.block_q = p->block_q, x.block_k = p->block_k;
    x.group_q = esa_error_queries(p), x.group_k = esa_error_keys(p);
    x.per_q = x.block_q / x.group_q, x.per_k = x.block_k / x.group_k;
    x.rows = x.nq * x.per_q;
    x.fine = p->tail == ESA_TAIL_LEVELS ? p->fine : 0;
    x.tail = p->tail != ESA_TAIL_NONE;
    x.tail_rows = ceil_div(x.fine + 1, 8) * 8;
    x.level_stride = a->B * a->Hq * a->nq * a->nk;
    x.scale = (float)(fabs(p->scale) * 1.4426950408889634);
    return x;
}

void view_means(int64_t (&stride)[3], int64_t H, int64_t rows, int64_t pitch)
{
    stride[0] = H * rows * pitch, stride[1] = rows * pitch, stride[2] = pitch;
}

// Dense attention of the mean queries over the mean keys.
esa_attn_args attention_of(const esa_select_args *a, const error_job &x)
{
    esa_attn_args m = {};
    m.dtype = a->dtype;
    m.tail = ESA_TAIL_NONE;
    m.block_q = m.block_k = 128;
    m.B = a->B, m.Hq = a->Hq, m.Hkv = a->Hkv, m.D = a->D;
    m.Nq = ceil_div<int64_t>(a->Nq, x.group_q), m.Nk = ceil_div<int64_t>(a->Nk, x.group_k);
    m.nq = ceil_div<int64_t>(m.Nq, 128), m.nk = ceil_div<int64_t>(m.Nk, 128);
    m.scale = fabs(a->params.scale);
    m.q = x.q, m.k = x.k, m.v = x.v, m.o = x.o;
    view_means(m.q_stride, a->Hq, x.rows, x.pitch);
    view_means(m.k_stride, a->Hkv, a->nk * x.per_k, x.pitch);
    view_means(m.v_stride, a->Hkv, a->nk * x.per_k, x.pitch);
    view_means(m.o_stride, a->Hq, x.rows, x.pitch);
    view_means(m.lse_stride, a->Hq, x.rows, 1);
    m.lse = x.lse;
    m.kv_len = x.groups;
    return m;
}

error_parts lay_out(carve &c, const esa_cuda_device *dev, const esa_select_args *a)
{
    error_parts p = {};
    error_job &x = p.job;
    x = shape_of(a);
    const int64_t row = x.pitch * element_bytes(a->dtype), keys = a->B * a->Hkv * a->nk,
                  queries = a->B * a->Hq * x.rows;
    x.q = c.take<char>(queries * row);
    x.k = c.take<char>(keys * x.per_k * row);
    x.v = c.take<char>(keys * x.per_k * row);
    x.kt = c.take<char>(keys * x.tail_rows * row);
    x.vt = c.take<char>(keys * x.tail_rows * row);
    x.o = c.take<char>(queries * row);
    x.lse = c.take<float>(queries);
    x.groups = c.take<int32_t>(a->B);
    p.choice = error_choice_carve(c, a);
    p.errors = c.take<float>((x.fine ? 2 : 1) * x.level_stride);
    const esa_attn_args m = attention_of(a, x);
    p.attention = c.take<char>(attention_workspace(dev, &m));
    return p;
}

esa_status check(esa_cuda_device *dev, const esa_select_args *a)
{
    if (a->params.mode != ESA_MODE_FIXED)
        return device_fail(dev, ESA_ERR_ARGUMENT,
                           "the error selector has no compat mode: use mode fixed");
    if (a->params.causal)
        return device_fail(dev, ESA_ERR_UNSUPPORTED,
                           "the error selector does not support causal attention");
    if (!a->v)
        return device_fail(dev, ESA_ERR_ARGUMENT,
                           "v is NULL, expected the values: the error selector reads them");
    if (a->Nq > MOST_TOKENS || a->Nk > MOST_TOKENS)
        return device_fail(dev, ESA_ERR_UNSUPPORTED,
                           "sequences on the GPU may have at most %lld tokens",
                           (long long)MOST_TOKENS);
    return ESA_OK;
}

} // namespace

void error_carve(carve &c, const esa_cuda_device *dev, const esa_select_args *a)
{
    lay_out(c, dev, a);
}

esa_status error_scores_run(esa_cuda_device *dev, const esa_select_args *a,
                            const select_rules &rules, float *out, carve c, cudaStream_t stream)
{
    esa_status status = check(dev, a);
    if (status) return status;
    error_parts p = lay_out(c, dev, a);
    p.job.kv_len = rules.kv_len;
    p.job.out = out ? out : p.errors;
    if (out) // blocks that do not exist
        status = device_check(
            dev,
            cudaMemsetAsync(
                out, 0, (size_t)((p.job.fine ? 2 : 1) * p.job.level_stride) * sizeof *out, stream),
            "clearing scores");
    if (!status) status = error_means_launch(dev, a, p.job, stream);
    const esa_attn_args m = attention_of(a, p.job);
    if (!status) status = attention_run(dev, &m, p.attention, stream);
    if (!status) status = error_mend_launch(dev, p.job, stream);
    if (status) return status;
    return error_scores_takes(dev, p.job) ? error_scores_launch(dev, p.job, stream)
                                          : error_plain_launch(dev, p.job, stream);
}

esa_status error_run(esa_cuda_device *dev, const esa_select_args *a, const select_rules &rules,
                     int32_t *, const esa_cuda_mask *mask, carve c, cudaStream_t stream)
{
    const esa_status status = error_scores_run(dev, a, rules, nullptr, c, stream);
    if (status) return status;
    const error_parts p = lay_out(c, dev, a);
    return error_choice_launch(dev, a, rules, p.errors, p.choice, mask, stream);
}
