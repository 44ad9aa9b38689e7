/* norm.c - layer norm with modulation, and RMS norm, over rows.
 * SPDX-License-Identifier: Apache-2.0 */
#include "nn/leaf.h"
#include "nn/nn.h"

/* elements per task: a few microseconds, and half of a first-level cache */
#define PIECE_ELEMENTS 16384

typedef struct norm_job {
    const esa_nn_leaf *leaf;
    void *y;
    const float *x, *weight, *bias, *scale, *shift;
    int64_t ldy, ldx, cols;
    float eps;
    int32_t rms;
    float *room; /* [threads][cols]: y is bf16 */
} norm_job;

static int64_t piece_of(int64_t cols) { return esa_max64(1, PIECE_ELEMENTS / esa_max64(1, cols)); }

static void norm_rows(void *arg, int64_t first, int64_t count, int32_t worker)
{
    const norm_job *j = arg;
    for (int64_t i = first; i < first + count; i++) {
        const float *x = j->x + i * j->ldx;
        float *y = j->room ? j->room + worker * j->cols : (float *)j->y + i * j->ldy;
        if (j->rms)
            j->leaf->rms_norm(y, x, j->cols, j->eps, j->weight);
        else
            j->leaf->layer_norm(y, x, j->cols, j->eps, j->weight, j->bias, j->scale, j->shift);
        if (j->room) j->leaf->to_bf16((uint16_t *)j->y + i * j->ldy, y, j->cols);
    }
}

static void run(esa_nn *nn, norm_job *j, int64_t rows)
{
    const double start = esa_nn_now();
    j->leaf = esa_nn_leaf_get(nn->ctx->kern->level);
    esa_nn_parallel(nn, norm_rows, j, rows, piece_of(j->cols));
    nn->seconds[ESA_NN_OTHER] += esa_nn_now() - start;
}

void esa_nn_layer_norm(esa_nn *nn, float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                       int64_t cols, float eps, const float *weight, const float *bias,
                       const float *scale, const float *shift)
{
    norm_job j = { NULL, y, x, weight, bias, scale, shift, ldy, ldx, cols, eps, 0, NULL };
    run(nn, &j, rows);
}

void esa_nn_rms_norm(esa_nn *nn, float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                     int64_t cols, float eps, const float *weight)
{
    norm_job j = { NULL, y, x, weight, NULL, NULL, NULL, ldy, ldx, cols, eps, 1, NULL };
    run(nn, &j, rows);
}

esa_status esa_nn_norm(esa_nn *nn, const esa_norm_args *n)
{
    norm_job j = { NULL,     n->y.data, n->x.data, n->weight, n->bias, n->scale,
                   n->shift, n->y.ld,   n->x.ld,   n->x.cols, n->eps,  n->norm == ESA_NORM_RMS,
                   NULL };
    void *room;
    if (n->norm == ESA_NORM_NONE) return ESA_OK;
    if (n->y.dtype == ESA_DTYPE_BF16) {
        ESA_TRY(esa_nn_scratch(nn, &room, 4 * j.cols * esa_pool_threads(nn->ctx->pool)));
        j.room = room;
    }
    run(nn, &j, n->x.rows);
    return ESA_OK;
}
