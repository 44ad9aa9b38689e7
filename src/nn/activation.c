/* activation.c - element by element: SiLU, GELU(tanh), its gated form, sums.
 * SPDX-License-Identifier: Apache-2.0 */
#include "nn/leaf.h"
#include "nn/nn.h"

#define PIECE 16384                 /* elements: some microseconds of work */

enum { SILU, GELU, GEGLU, ADD };
typedef struct act_job {
    const esa_nn_leaf *leaf;
    float *y;
    const float *a, *b;
    int32_t kind;
} act_job;

static void act_piece(void *arg, int64_t first, int64_t count, int32_t worker)
{
    (void)worker;
    const act_job *j = arg;
    float *y = j->y + first;
    const float *a = j->a + first;
    switch (j->kind) {
    case SILU:  j->leaf->silu(y, a, count); break;
    case GELU:  j->leaf->gelu_tanh(y, a, count); break;
    case GEGLU: j->leaf->geglu(y, a, j->b + first, count); break;
    default:    j->leaf->add(y, a, j->b + first, count); break;
    }
}

static void run(esa_nn *nn, int32_t kind, float *y, const float *a, const float *b, int64_t count)
{
    act_job j = {esa_nn_leaf_get(nn->ctx->kern->level), y, a, b, kind};
    const double start = esa_nn_now();
    esa_nn_parallel(nn, act_piece, &j, count, PIECE);
    nn->seconds[ESA_NN_OTHER] += esa_nn_now() - start;
}

void esa_nn_silu(esa_nn *nn, float *y, const float *x, int64_t count) { run(nn, SILU, y, x, NULL, count); }
void esa_nn_gelu_tanh(esa_nn *nn, float *y, const float *x, int64_t count) { run(nn, GELU, y, x, NULL, count); }
void esa_nn_geglu(esa_nn *nn, float *y, const float *gate, const float *x, int64_t count) { run(nn, GEGLU, y, gate, x, count); }
void esa_nn_add(esa_nn *nn, float *y, const float *a, const float *b, int64_t count) { run(nn, ADD, y, a, b, count); }
