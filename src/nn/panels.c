/* panels.c - see product.h: packs weights for matrix products.
 * SPDX-License-Identifier: Apache-2.0 */
#include "nn/product.h"

#include <string.h>

static const esa_cpu_kernels *set_of(const esa_ctx *ctx, int32_t dtype)
{
    return dtype == ESA_DTYPE_BF16 ? ctx->kern->bf16 : ctx->kern;
}

void esa_panels_view(const esa_ctx *ctx, esa_weight *w, int32_t dtype, const void *packed)
{
    const esa_cpu_kernels *kern = set_of(ctx, dtype);
    w->data = packed;
    w->dtype = dtype;
    w->panel = kern->nr;
    w->padded = esa_pad_depth(kern, esa_weight_count(w) / esa_max64(1, w->dim[0]));
}

int64_t esa_panels_bytes(const esa_ctx *ctx, int32_t dtype, int64_t cols, int64_t depth)
{
    return esa_k_pack_bytes(set_of(ctx, dtype), cols, depth);
}

typedef struct fill_job {
    const esa_cpu_kernels *kern;
    char *dst;
    const esa_weight *w;
    int64_t first, cols, depth;
} fill_job;

static void fill_panel(void *arg, int64_t item, int32_t worker)
{
    (void)worker;
    const fill_job *j = arg;
    const int64_t nr = j->kern->nr, n = item * nr, size = esa_view_element(j->w->dtype);
    const char *from = (const char *)j->w->data + (j->first + n) * j->depth * size;
    j->kern->panel_q(j->dst + item * esa_k_pack_bytes(j->kern, nr, j->depth), from, j->w->dtype,
                     j->depth, NULL, esa_min64(nr, j->cols - n), j->depth, 1.0f);
}

void esa_panels_fill(esa_ctx *ctx, int32_t dtype, void *dst, const esa_weight *w, int64_t first,
                     int64_t cols)
{
    fill_job j = {
        set_of(ctx, dtype), dst, w, first, cols, esa_weight_count(w) / esa_max64(1, w->dim[0])
    };
    esa_pool_run(ctx->pool, fill_panel, &j, esa_ceil_div(cols, j.kern->nr));
}

void esa_panels_fill_rows(const esa_ctx *ctx, float *dst, const float *b, int64_t depth,
                          int64_t cols)
{
    const int64_t nr = ctx->kern->nr;
    for (int64_t n = 0; n < cols; n += nr) {
        const int64_t count = esa_min64(nr, cols - n);
        for (int64_t k = 0; k < depth; k++, dst += nr) {
            memcpy(dst, b + k * cols + n, (size_t)count * 4);
            memset(dst + count, 0, (size_t)(nr - count) * 4);
        }
    }
}

int64_t esa_panels_sums(const esa_ctx *ctx, int64_t rows)
{
    return esa_ceil_div(rows, ESA_PANEL_ROWS) * ESA_PANEL_ROWS * ctx->kern->nr;
}

void esa_panels_add(const esa_ctx *ctx, float *c, const float *a, const float *b, int64_t rows,
                    int64_t cols, int64_t depth, float factor, float *sums)
{
    const int64_t nr = ctx->kern->nr;
    for (int64_t first = 0; first < cols; first += nr) {
        const int64_t n = esa_min64(nr, cols - first);
        ctx->kern->kq(sums, b + first * depth, a, depth, rows, depth, 1.0f);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < n; i++) c[r * cols + first + i] += factor * sums[r * nr + i];
    }
}

float esa_panels_at(const esa_weight *w, int64_t column, int64_t k)
{
    const int64_t nr = w->panel, panel = column / nr, at = column % nr;
    if (w->dtype == ESA_DTYPE_F32)
        return esa_load_f32(w->data, (panel * w->padded + k) * nr + at, ESA_DTYPE_F32);
    return esa_load_f32(w->data, ((panel * w->padded + k) / 2 * nr + at) * 2 + k % 2, w->dtype);
}
