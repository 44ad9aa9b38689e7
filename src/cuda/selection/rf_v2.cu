// rf_v2.cu - RainFusion 2.0 on the GPU: scores block means against block means and keeps the best
// of each row.
// SPDX-License-Identifier: Apache-2.0
//
//   score[i][j] = scale * mean(q of block i) . mean(k of block j)
//
// Reading q and k once takes nearly all of the time. The means and their products stay in f32, as
// on the CPU.
#include "cuda/selection/f32_tile.cuh"
#include "cuda/attention/means.cuh"
#include "cuda/selection/select.cuh"

namespace
{

enum : int64_t { VALUE_BYTES = 256 << 20 };

struct rf_parts {
    float *q_mean, *k_mean; // [B][Hq][nq][pitch], [B][Hkv][nk][pitch]
    int64_t pitch;          // D rounded up to F32_DEPTH; the extra columns are 0
    row_window whole;       // the first window; `value` has its size
    float *value;           // [rows of a window][nk]
    compat_scratch compat;
};

rf_parts lay_out(carve &c, const esa_select_args *a)
{
    rf_parts p = {};
    p.pitch = ceil_div<int64_t>(a->D, F32_DEPTH) * F32_DEPTH;
    p.q_mean = c.take<float>(a->B * a->Hq * a->nq * p.pitch);
    p.k_mean = c.take<float>(a->B * a->Hkv * a->nk * p.pitch);
    p.whole = window_first(a, a->nk * (int64_t)sizeof(float), VALUE_BYTES, F32_TILE);
    p.value = c.take<float>(p.whole.rows() * a->nk);
    if (a->params.mode != ESA_MODE_FIXED) p.compat = compat_carve(c, a);
    return p;
}

struct score_args {
    const float *q_mean, *k_mean;
    float *value;
    int64_t pitch, nq, nk, Hq, Hkv, head0, first, blocks;
    float scale;
};

__global__ void __launch_bounds__(F32_THREADS) score_kernel(const __grid_constant__ score_args x)
{
    __shared__ f32_tile_shared shared;
    const int64_t head = x.head0 + blockIdx.z, b = head / x.Hq, g = head % x.Hq / (x.Hq / x.Hkv);
    const int row0 = blockIdx.y * F32_TILE, column0 = blockIdx.x * F32_TILE,
              rows = (int)x.blocks - row0, columns = (int)x.nk - column0;
    const float *q = x.q_mean + (head * x.nq + x.first + row0) * x.pitch,
                *k = x.k_mean + ((b * x.Hkv + g) * x.nk + column0) * x.pitch;
    const float4 zero = { 0.0f, 0.0f, 0.0f, 0.0f };
    float acc[F32_ROWS][F32_COLUMNS];
    f32_tile(
        acc, shared, (int)x.pitch,
        [&](int r, int d) { return r < rows ? *(const float4 *)(q + r * x.pitch + d) : zero; },
        [&](int r, int d) { return r < columns ? *(const float4 *)(k + r * x.pitch + d) : zero; });
    float *out = x.value + (blockIdx.z * x.blocks + row0) * x.nk + column0;
#pragma unroll
    for (int r = 0; r < F32_ROWS; ++r)
#pragma unroll
        for (int c = 0; c < F32_COLUMNS; ++c)
            if (f32_row() + r < rows && f32_column() + c < columns)
                out[(f32_row() + r) * x.nk + f32_column() + c] = x.scale * acc[r][c];
}

esa_status means(esa_cuda_device *dev, const esa_select_args *a, const select_rules &rules,
                 const rf_parts &p, cudaStream_t stream)
{
    const esa_layout &l = a->params.layout;
    const bool apart = esa_pools_apart(&a->params);
    const int64_t text_q = (int64_t)l.text_front_q + l.text_back_q,
                  text_k = (int64_t)l.text_front_k + l.text_back_k;
    const int32_t f32 = ESA_DTYPE_F32, round = esa_rows_round(a);
    mean_plan plan = {};
    plan.parts = 2;
    plan.D = (int32_t)a->D;
    plan.pitch = (int32_t)p.pitch;
    plan.part[0] = { a->q,
                     p.q_mean,
                     nullptr,
                     a->perm_q,
                     { a->q_stride[0], a->q_stride[1], a->q_stride[2] },
                     0,
                     (int32_t)a->Hq,
                     (int32_t)a->Nq,
                     a->params.block_q,
                     (int32_t)a->nq,
                     (int32_t)a->nq,
                     apart ? (int32_t)(a->Nq - text_q) : 0,
                     f32,
                     round };
    plan.part[1] = { a->k,
                     p.k_mean,
                     rules.kv_len,
                     a->perm_k,
                     { a->k_stride[0], a->k_stride[1], a->k_stride[2] },
                     0,
                     (int32_t)a->Hkv,
                     (int32_t)a->Nk,
                     a->params.block_k,
                     (int32_t)a->nk,
                     (int32_t)a->nk,
                     apart ? (int32_t)(a->Nk - text_k) : 0,
                     f32,
                     round };
    const int64_t size = element_bytes(a->dtype);
    return means_launch(
        dev, plan, a->dtype, a->B,
        rows_in_pieces({ a->q, a->q_stride, { a->B, a->Hq, a->Nq } }, a->D, size, 16) &&
            rows_in_pieces({ a->k, a->k_stride, { a->B, a->Hkv, a->Nk } }, a->D, size, 16),
        stream);
}

} // namespace

void rf_v2_carve(carve &c, const esa_cuda_device *, const esa_select_args *a) { lay_out(c, a); }

esa_status rf_v2_run(esa_cuda_device *dev, const esa_select_args *a, const select_rules &rules,
                     int32_t *quota, const esa_cuda_mask *mask, carve c, cudaStream_t stream)
{
    const rf_parts p = lay_out(c, a);
    // compat-round scales the rounded product.
    const float scale = esa_rows_round(a) == ESA_DTYPE_F32 ? (float)a->params.scale : 1.0f;
    esa_status status = means(dev, a, rules, p, stream);
    row_window w = p.whole;
    while (!status) {
        const dim3 grid((unsigned)ceil_div<int64_t>(a->nk, F32_TILE),
                        (unsigned)ceil_div<int64_t>(w.blocks, F32_TILE), (unsigned)w.heads);
        score_kernel<<<grid, F32_THREADS, 0, stream>>>({ p.q_mean, p.k_mean, p.value, p.pitch,
                                                         a->nq, a->nk, a->Hq, a->Hkv, w.head0,
                                                         w.first, w.blocks, scale });
        status = launch_check(dev, "scoring block means");
        if (status) break;
        if (a->params.mode == ESA_MODE_FIXED)
            status = pick_launch(dev, a, rules, { p.value, quota, w.row0(a->nq), w.rows(), false },
                                 mask, stream);
        else
            status = rf_compat_launch(dev, a, rules, p.value, w.row0(a->nq), w.rows(), p.compat,
                                      mask, stream);
        if (!window_next(w, p.whole, a)) break;
    }
    return status;
}
