/* linear.c - matrix products on CBLAS, split over the pool in fixed tiles.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A tile is ROWS rows by COLS columns of the result: one single-threaded sgemm, then bias,
 * activation, gate and residual while the tile is in cache. 16-bit weights are converted to f32 in
 * blocks of BLOCK_BYTES that all tiles of a column range share. Tiles do not depend on the number
 * of threads, so neither do the bits (with one BLAS on one machine). docs/engine.md has the
 * measurements behind the sizes. */
#include "nn/nn.h"

#include <cblas.h>
#include <string.h>
#include "nn/leaf.h"

/* rows of x per tile for long sequences; approximate. Every tile packs the weights again */
#define ROWS        512
#define COLS        2048 /* columns of y per tile, if there are many rows */
/* many rows are cut into a multiple of this: equal shares for 2, 4, 8 and 16 threads */
#define SPLIT       16
#define FEW_ROWS    1024 /* with fewer rows, columns are split too */
#define FEW_COLS    128
#define BLOCK_BYTES (INT64_C(16) << 20) /* f32 weights converted at a time */

void esa_nn_gemm_one(float *c, int64_t ldc, const float *a, int64_t lda, const float *b,
                     int64_t ldb, int64_t m, int64_t n, int64_t k, int32_t trans_b, float alpha,
                     float beta)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, trans_b ? CblasTrans : CblasNoTrans, (int)m, (int)n,
                (int)k, alpha, a, (int)lda, b, (int)ldb, beta, c, (int)ldc);
}

typedef struct gemm_job {
    float *c;
    const float *a, *b;
    int64_t ldc, lda, ldb, m, n, k;
    int64_t rows, cols, across; /* size of a tile, tiles side by side */
    int32_t trans_b;
    float alpha, beta;
    const esa_nn_leaf *leaf;
    const float *bias; /* [n] */
    const esa_epilogue *epilogue;
    int64_t first; /* the column of y that is column 0 of c, for gate and residual */
    float *tile;   /* [threads][tile_size]; NULL: products are written directly to c */
    int64_t tile_size;
} gemm_job;

static void gemm_tile(void *arg, int64_t item, int32_t worker)
{
    const gemm_job *j = arg;
    const int64_t r = item / j->across * j->rows, q = item % j->across * j->cols;
    const int64_t m = esa_min64(j->rows, j->m - r), n = esa_min64(j->cols, j->n - q);
    float *c = j->c + r * j->ldc + q, *t = j->tile ? j->tile + worker * j->tile_size : c;
    const int64_t ldt = j->tile ? j->cols : j->ldc;
    esa_nn_gemm_one(t, ldt, j->a + r * j->lda, j->lda, j->b + (j->trans_b ? q * j->ldb : q), j->ldb,
                    m, n, j->k, j->trans_b, j->alpha, j->beta);
    const esa_epilogue *e = j->epilogue;
    if (!j->bias && !e) return;
    for (int64_t i = 0; i < m; i++)
        j->leaf->finish(
            c + i * j->ldc, t + i * ldt, j->bias ? j->bias + q : NULL, e ? e->act : ESA_ACT_NONE,
            e && e->gate ? e->gate + j->first + q : NULL,
            e && e->residual ? e->residual + (r + i) * e->residual_ld + j->first + q : NULL, n);
}

static void choose_tiles(gemm_job *j)
{
    if (j->m < FEW_ROWS) {
        j->rows = ROWS;
        j->cols = FEW_COLS;
    } else {
        const int64_t shares = SPLIT * esa_max64(1, (j->m + SPLIT * ROWS / 2) / (SPLIT * ROWS));
        j->rows = esa_ceil_div(j->m, shares);
        j->cols = COLS;
    }
    j->cols = esa_min64(j->cols, j->n);
    j->rows = esa_min64(j->rows, j->m);
}

static void run_tiles(esa_nn *nn, gemm_job *j)
{
    j->across = esa_ceil_div(j->n, j->cols);
    const double start = esa_nn_now();
    esa_nn_enter(nn);
    esa_pool_run(nn->ctx->pool, gemm_tile, j, esa_ceil_div(j->m, j->rows) * j->across);
    esa_nn_leave(nn);
    nn->seconds[ESA_NN_GEMM] += esa_nn_now() - start;
}

void esa_nn_gemm(esa_nn *nn, float *c, int64_t ldc, const float *a, int64_t lda, const float *b,
                 int64_t ldb, int64_t m, int64_t n, int64_t k, int32_t trans_b, float alpha,
                 float beta)
{
    gemm_job j = { .c = c,
                   .a = a,
                   .b = b,
                   .ldc = ldc,
                   .lda = lda,
                   .ldb = ldb,
                   .m = m,
                   .n = n,
                   .k = k,
                   .trans_b = trans_b,
                   .alpha = alpha,
                   .beta = beta };
    if (m < 1 || n < 1) return;
    choose_tiles(&j);
    run_tiles(nn, &j);
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

esa_status esa_nn_linear(esa_nn *nn, float *y, int64_t ldy, const float *x, int64_t ldx,
                         int64_t rows, const esa_weight *w, const esa_weight *bias,
                         const esa_epilogue *epilogue)
{
    const int64_t out = w->dim[0], in = out > 0 ? esa_weight_count(w) / out : 0;
    const int32_t ready = w->dtype == ESA_DTYPE_F32 && ((uintptr_t)w->data & 3) == 0;
    const int32_t has_bias = bias && bias->data, aside = epilogue && epilogue->residual;
    const int64_t block = ready ? out
                                : esa_max64(1, esa_min64(out, BLOCK_BYTES / 4 / esa_max64(1, in)));
    if (rows < 1 || out < 1) return ESA_OK;
    gemm_job j = { .a = x,
                   .lda = ldx,
                   .ldc = ldy,
                   .ldb = in,
                   .m = rows,
                   .n = block,
                   .k = in,
                   .trans_b = 1,
                   .alpha = 1,
                   .leaf = esa_nn_leaf_get(nn->ctx->kern->level),
                   .epilogue = epilogue };
    choose_tiles(&j);
    j.tile_size = j.rows * j.cols;
    void *scratch = NULL;
    float *f = NULL, *b = NULL;
    for (int32_t pass = 0; pass < 2; pass++) {
        esa_carve carve = { .base = scratch };
        f = ready ? NULL : esa_carve_take(&carve, block * in * 4);
        b = has_bias ? esa_carve_take(&carve, out * 4) : NULL;
        /* The residual may be y itself, so the product goes to a buffer of its own. */
        j.tile = aside ? esa_carve_take(&carve, esa_pool_threads(nn->ctx->pool) * j.tile_size * 4)
                       : NULL;
        if (pass == 0) ESA_TRY(esa_nn_scratch(nn, &scratch, carve.used));
    }
    if (has_bias) esa_weight_to_f32(b, bias, 0, out);
    for (int64_t q = 0; q < out; q += block) {
        j.n = esa_min64(block, out - q);
        if (!ready) {
            widen_job wide = { f, w, q * in };
            esa_nn_parallel(nn, widen, &wide, j.n * in, 1 << 16);
        }
        j.b = ready ? w->data : f;
        j.c = y + q;
        j.bias = b ? b + q : NULL;
        j.first = q;
        run_tiles(nn, &j);
    }
    return ESA_OK;
}
