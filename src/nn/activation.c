/* activation.c - the gated GELU of T5's feed-forward. Other activations are part of linear layers
 * and norms (leaf.h: finish).
 * SPDX-License-Identifier: Apache-2.0 */
#include "nn/leaf.h"
#include "nn/nn.h"

#define PIECE 16384 /* elements per task: a few microseconds */

typedef struct geglu_job {
    const esa_nn_leaf *leaf;
    float *y;
    const float *gate, *x;
} geglu_job;

static void geglu_piece(void *arg, int64_t first, int64_t count, int32_t worker)
{
    (void)worker;
    const geglu_job *j = arg;
    j->leaf->geglu(j->y + first, j->gate + first, j->x + first, count);
}

void esa_nn_geglu(esa_nn *nn, float *y, const float *gate, const float *x, int64_t count)
{
    geglu_job j = { esa_nn_leaf_get(nn->ctx->kern->level), y, gate, x };
    const double start = esa_nn_now();
    esa_nn_parallel(nn, geglu_piece, &j, count, PIECE);
    nn->seconds[ESA_NN_OTHER] += esa_nn_now() - start;
}
