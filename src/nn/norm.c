/* norm.c - layer norm with modulation, and RMS norm, over rows.
 * SPDX-License-Identifier: Apache-2.0 */
#include "nn/leaf.h"
#include "nn/nn.h"

/* elements per task: a few microseconds, and half of a first-level cache */
#define PIECE_ELEMENTS 16384

typedef struct norm_job {
    const esa_nn_leaf *leaf;
    float *y;
    const float *x, *weight, *bias, *scale, *shift;
    int64_t ldy, ldx, cols;
    float eps;
} norm_job;

static int64_t piece_of(int64_t cols) { return esa_max64(1, PIECE_ELEMENTS / esa_max64(1, cols)); }

static void layer_rows(void *arg, int64_t first, int64_t count, int32_t worker)
{
    (void)worker;
    const norm_job *j = arg;
    for (int64_t i = first; i < first + count; i++)
        j->leaf->layer_norm(j->y + i * j->ldy, j->x + i * j->ldx, j->cols, j->eps, j->weight,
                            j->bias, j->scale, j->shift);
}

static void rms_rows(void *arg, int64_t first, int64_t count, int32_t worker)
{
    (void)worker;
    const norm_job *j = arg;
    for (int64_t i = first; i < first + count; i++)
        j->leaf->rms_norm(j->y + i * j->ldy, j->x + i * j->ldx, j->cols, j->eps, j->weight);
}

void esa_nn_layer_norm(esa_nn *nn, float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                       int64_t cols, float eps, const float *weight, const float *bias,
                       const float *scale, const float *shift)
{
    norm_job j = {
        esa_nn_leaf_get(nn->ctx->kern->level), y, x, weight, bias, scale, shift, ldy, ldx, cols, eps
    };
    const double start = esa_nn_now();
    esa_nn_parallel(nn, layer_rows, &j, rows, piece_of(cols));
    nn->seconds[ESA_NN_OTHER] += esa_nn_now() - start;
}

void esa_nn_rms_norm(esa_nn *nn, float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                     int64_t cols, float eps, const float *weight)
{
    norm_job j = {
        esa_nn_leaf_get(nn->ctx->kern->level), y, x, weight, NULL, NULL, NULL, ldy, ldx, cols, eps
    };
    const double start = esa_nn_now();
    esa_nn_parallel(nn, rms_rows, &j, rows, piece_of(cols));
    nn->seconds[ESA_NN_OTHER] += esa_nn_now() - start;
}
