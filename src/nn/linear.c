/* linear.c - linear layers: matrix products in fixed tiles over the pool.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A tile is some rows by some columns of the result. It is computed panel by panel (product.h): the
 * sums of a panel, then bias, activation, gate and residual while they are in the first-level
 * cache. Long sums are cut into slices, which are added up: so the slice of a panel stays in cache,
 * and short sums round less. Weights that are not packed are packed in blocks of BLOCK_BYTES that
 * all tiles of a range of columns share. Tiles do not depend on the number of threads, so neither
 * do the bits. docs/lab/speed.md has the measurements behind the sizes. */
#include "nn/product.h"

#include <string.h>
#include "base/blocks.h"
#include "nn/leaf.h"

#define ROWS        128 /* rows of x per tile; approximate for long sequences */
#define ROWS_LARGE  256 /* the same for weights of more than LARGE bytes, which are read per tile */
#define LARGE       (INT64_C(1) << 20)
/* many rows are cut into a multiple of this: equal shares for 2, 4, 8 and 16 threads */
#define SPLIT       16
#define FEW_ROWS    1024                /* with fewer rows, columns are split too */
#define FEW_PANELS  4                   /* panels of such a tile */
#define BLOCK_BYTES (INT64_C(16) << 20) /* weights packed at a time */

typedef struct product_job {
    const esa_cpu_kernels *kern;
    const esa_nn_leaf *leaf;
    esa_view y, x;
    const char *panels;                 /* of the columns from first on */
    int64_t first, cols, depth, padded; /* padded: depth as the kernels want it */
    int64_t slice;
    int64_t rows, panels_across, across; /* size of a tile, tiles side by side */
    int32_t dtype;                       /* of the panels */
    int32_t copies; /* 1: rows of x are copied into the form of the kernels first */
    const float *bias;
    const esa_epilogue *e;
    char *room; /* of the workers */
    int64_t room_bytes;
} product_job;

/* Floats of the sums of a panel. */
static int64_t sums_of(const product_job *j)
{
    return esa_ceil_div(j->rows, ESA_PANEL_ROWS) * ESA_PANEL_ROWS * j->kern->nr;
}

static const char *at(const esa_view *v, int64_t row)
{
    return (const char *)v->data + row * v->ld * esa_view_element(v->dtype);
}

/* The sums of one panel: s [m][nr]; more: room for as many. */
static void panel_sums(const product_job *j, float *s, float *more, const char *panel,
                       const char *x, int64_t x_stride, int64_t m)
{
    const int64_t nr = j->kern->nr, size = j->kern->packed_bytes;
    for (int64_t k = 0; k < j->padded; k += j->slice) {
        j->kern->kq(k ? more : s, panel + k * nr * size, x + k * size, x_stride, m,
                    esa_min64(j->slice, j->padded - k), 1.0f);
        if (k) j->leaf->add(s, more, m * nr);
    }
}

static void product_tile(void *arg, int64_t item, int32_t worker)
{
    const product_job *j = arg;
    const esa_cpu_kernels *kern = j->kern;
    const int64_t nr = kern->nr, r = item / j->across * j->rows,
                  q = item % j->across * j->panels_across * nr,
                  m = esa_min64(j->rows, j->x.rows - r),
                  end = esa_min64(q + j->panels_across * nr, j->cols);
    float *s = (float *)(j->room + worker * j->room_bytes), *more = s + sums_of(j);
    const char *x = at(&j->x, r);
    int64_t x_stride = j->x.ld;
    if (j->copies) {
        void *copy = more + sums_of(j);
        kern->rows_k(copy, x, j->x.dtype, x_stride, NULL, m, j->depth);
        x = copy;
        x_stride = j->padded;
    }
    const esa_epilogue *e = j->e;
    esa_kernels_begin(kern);
    for (int64_t c = q; c < end; c += nr) {
        panel_sums(j, s, more, j->panels + c * j->padded * kern->packed_bytes, x, x_stride, m);
        const int64_t n = esa_min64(nr, end - c), column = j->first + c;
        const esa_finish_args f = {
            .y = (char *)j->y.data + (r * j->y.ld + column) * esa_view_element(j->y.dtype),
            .dtype = j->y.dtype,
            .act = e ? e->act : ESA_ACT_NONE,
            .ldy = j->y.ld,
            .x = s,
            .ldx = nr,
            .rows = m,
            .n = n,
            .bias = j->bias ? j->bias + column : NULL,
            .gate = e && e->gate ? e->gate + column : NULL,
            .residual = e && e->residual ? e->residual + r * e->residual_ld + column : NULL,
            .residual_ld = e ? e->residual_ld : 0
        };
        j->leaf->finish(&f);
    }
    esa_kernels_end(kern);
}

static void choose_tiles(product_job *j, int64_t weight_bytes)
{
    const int64_t panels = esa_ceil_div(j->cols, j->kern->nr), m = j->x.rows,
                  rows = weight_bytes > LARGE ? ROWS_LARGE : ROWS;
    if (m < FEW_ROWS) {
        j->rows = esa_min64(m, ROWS_LARGE);
        j->panels_across = esa_min64(FEW_PANELS, panels);
    } else {
        const int64_t shares = SPLIT * esa_max64(1, (m + SPLIT * rows / 2) / (SPLIT * rows));
        j->rows = esa_ceil_div(m, shares);
        j->panels_across = panels;
    }
    j->across = esa_ceil_div(panels, j->panels_across);
}

/* 1 if panel_q reads this weight as it lies. */
static int32_t is_plain(const esa_weight *w)
{
    const int64_t size = esa_view_element(w->dtype);
    return !esa_blocks_elements(w->dtype) && size > 1 && (uintptr_t)w->data % (uintptr_t)size == 0;
}

typedef struct widen_job {
    float *out;
    const esa_weight *w;
    int64_t first;
} widen_job;

static void widen(void *arg, int64_t first, int64_t count, int32_t worker)
{
    (void)worker;
    const widen_job *j = arg;
    esa_weight_to_f32(j->out + first, j->w, j->first + first, count);
}

/* Packs columns first .. first+cols-1; wide: room for them in f32, NULL if w is plain. */
static void pack(esa_nn *nn, int32_t dtype, void *panels, float *wide, const esa_weight *w,
                 int64_t first, int64_t cols, int64_t depth)
{
    if (!wide) {
        esa_panels_fill(nn->ctx, dtype, panels, w, first, cols);
        return;
    }
    const esa_weight part = {
        .data = wide, .dtype = ESA_DTYPE_F32, .rank = 2, .dim = { cols, depth }
    };
    widen_job job = { wide, w, first * depth };
    esa_nn_parallel(nn, widen, &job, cols * depth, 1 << 16);
    esa_panels_fill(nn->ctx, dtype, panels, &part, 0, cols);
}

/* Bytes of one worker: sums of a panel twice, and the copy of x. */
static int64_t room_of(const product_job *j)
{
    const int64_t copy = j->copies ? esa_rows_k_bytes(j->kern, j->rows, j->depth) : 0;
    return esa_ceil_div(2 * sums_of(j) * 4 + copy, 64) * 64;
}

static esa_status run(esa_nn *nn, product_job *j, const esa_weight *w, const esa_weight *bias)
{
    const int64_t out = w->dim[0], nr = j->kern->nr,
                  panel = esa_panels_bytes(nn->ctx, j->dtype, nr, j->depth);
    const int64_t block = w->panel ? out
                                   : esa_min64(
                                         out, nr * esa_max64(1, BLOCK_BYTES / esa_max64(1, panel)));
    const int32_t has_bias = bias && bias->data,
                  ready = has_bias && bias->dtype == ESA_DTYPE_F32 && is_plain(bias);
    j->cols = block;
    choose_tiles(j, esa_panels_bytes(nn->ctx, j->dtype, out, j->depth));
    j->room_bytes = room_of(j);
    void *scratch = NULL, *panels = NULL;
    float *wide = NULL, *b = NULL;
    for (int32_t pass = 0; pass < 2; pass++) {
        esa_carve carve = { .base = scratch };
        j->room = esa_carve_take(&carve, esa_pool_threads(nn->ctx->pool) * j->room_bytes);
        b = has_bias && !ready ? esa_carve_take(&carve, out * 4) : NULL;
        panels = w->panel
                     ? NULL
                     : esa_carve_take(&carve, esa_panels_bytes(nn->ctx, j->dtype, block, j->depth));
        wide = w->panel || is_plain(w) ? NULL : esa_carve_take(&carve, block * j->depth * 4);
        if (pass == 0) ESA_TRY(esa_nn_scratch(nn, &scratch, carve.used));
    }
    if (b) esa_weight_to_f32(b, bias, 0, out);
    j->bias = ready ? bias->data : b;
    for (j->first = 0; j->first < out; j->first += block) {
        j->cols = esa_min64(block, out - j->first);
        if (!w->panel) pack(nn, j->dtype, panels, wide, w, j->first, j->cols, j->depth);
        j->panels = w->panel ? w->data : panels;
        esa_pool_run(nn->ctx->pool, product_tile, j, esa_ceil_div(j->x.rows, j->rows) * j->across);
    }
    return ESA_OK;
}

esa_status esa_nn_linear(esa_nn *nn, const esa_view *y, const esa_view *x, const esa_weight *w,
                         const esa_weight *bias, const esa_epilogue *epilogue)
{
    const int64_t out = w->dim[0], in = out > 0 ? esa_weight_count(w) / out : 0;
    if (x->rows < 1 || out < 1) return ESA_OK;
    product_job j = { .kern = esa_nn_product_set(nn, w),
                      .leaf = esa_nn_leaf_get(nn->ctx->kern->level),
                      .y = *y,
                      .x = *x,
                      .depth = in,
                      .e = epilogue };
    j.dtype = j.kern->packed_bytes == 2 ? ESA_DTYPE_BF16 : ESA_DTYPE_F32;
    j.padded = esa_pad_depth(j.kern, in);
    j.slice = esa_panel_slice(j.kern, j.padded);
    j.copies = j.padded != in || x->dtype != j.dtype;
    const double start = esa_nn_now();
    const esa_status status = run(nn, &j, w, bias);
    nn->seconds[ESA_NN_GEMM] += esa_nn_now() - start;
    return status;
}
