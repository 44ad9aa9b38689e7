/* rope.c - rotary positions of video tokens, and the timestep sinusoid.
 * SPDX-License-Identifier: Apache-2.0
 *
 * As in diffusers, angles are computed in double and stored as f32, and the timestep sinusoid is
 * f32 throughout. */
#include "nn/nn.h"

#include <math.h>
#include "nn/leaf.h"

void esa_rope_table(float *cos_out, float *sin_out, const int32_t grid[3], const int32_t *perm,
                    int64_t D, double theta)
{
    const int32_t side = 2 * (int32_t)(D / 6), axis[3] = { (int32_t)D - 2 * side, side, side };
    esa_rope_axes(cos_out, sin_out, grid, perm, axis, theta);
}

void esa_rope_axes(float *cos_out, float *sin_out, const int32_t grid[3], const int32_t *perm,
                   const int32_t axis_dim[3], double theta)
{
    const int64_t half = ((int64_t)axis_dim[0] + axis_dim[1] + axis_dim[2]) / 2;
    const int64_t tokens = (int64_t)grid[0] * grid[1] * grid[2];
    for (int64_t p = 0; p < tokens; p++) {
        const int64_t n = perm ? perm[p] : p;
        const int64_t at[3] = { n / ((int64_t)grid[1] * grid[2]), n / grid[2] % grid[1],
                                n % grid[2] };
        int64_t c = 0;
        for (int32_t axis = 0; axis < 3; axis++)
            for (int64_t i = 0; i < axis_dim[axis] / 2; i++, c++) {
                const double angle = (double)at[axis] *
                                     (1.0 / pow(theta, (double)(2 * i) / (double)axis_dim[axis]));
                cos_out[p * half + c] = (float)cos(angle);
                sin_out[p * half + c] = (float)sin(angle);
            }
    }
}

typedef struct rope_job {
    const esa_nn_leaf *leaf;
    float *x;
    const float *cos, *sin;
    int64_t ld, heads, D;
} rope_job;

static void rope_rows(void *arg, int64_t first, int64_t count, int32_t worker)
{
    (void)worker;
    const rope_job *j = arg;
    for (int64_t i = first; i < first + count; i++)
        j->leaf->rope(j->x + i * j->ld, j->heads, j->D, j->cos + i * (j->D / 2),
                      j->sin + i * (j->D / 2));
}

void esa_nn_rope(esa_nn *nn, float *x, int64_t ld, int64_t rows, int64_t heads, int64_t D,
                 const float *cos, const float *sin)
{
    rope_job j = { esa_nn_leaf_get(nn->ctx->kern->level), x, cos, sin, ld, heads, D };
    const double start = esa_nn_now();
    esa_nn_parallel(nn, rope_rows, &j, rows, esa_max64(1, 16384 / (heads * D)));
    nn->seconds[ESA_NN_OTHER] += esa_nn_now() - start;
}

/* ---------------------------------------------------------------- norms of heads */

typedef struct heads_job {
    const esa_nn_leaf *leaf;
    const esa_qk_args *a;
} heads_job;

static void heads_row(const heads_job *j, const esa_view *v, const float *weight, const float *bias,
                      int64_t r)
{
    const esa_qk_args *a = j->a;
    const int64_t D = a->D, heads = v->cols / D;
    float *x = (float *)v->data + r * v->ld;
    for (int64_t h = 0; h < heads && a->norm == ESA_QK_HEAD_RMS; h++)
        j->leaf->rms_norm(x + h * D, x + h * D, D, a->eps, weight);
    for (int64_t h = 0; h < heads && a->norm == ESA_QK_HEAD_LAYER; h++)
        j->leaf->layer_norm(x + h * D, x + h * D, D, a->eps, weight, bias, NULL, NULL);
    if (a->cos)
        (a->halves ? j->leaf->rope_halves : j->leaf->rope)(x, heads, D, a->cos + r * (D / 2),
                                                           a->sin + r * (D / 2));
}

static void heads_rows(void *arg, int64_t first, int64_t count, int32_t worker)
{
    (void)worker;
    const heads_job *j = arg;
    const esa_qk_args *a = j->a;
    for (int64_t r = first; r < first + count; r++) {
        if (a->q.data && r < a->q.rows) heads_row(j, &a->q, a->q_weight, a->q_bias, r);
        if (a->k.data && r < a->k.rows) heads_row(j, &a->k, a->k_weight, a->k_bias, r);
    }
}

esa_status esa_nn_qk_heads(esa_nn *nn, const esa_qk_args *a)
{
    heads_job j = { esa_nn_leaf_get(nn->ctx->kern->level), a };
    const double start = esa_nn_now();
    esa_nn_parallel(nn, heads_rows, &j, a->k.data ? esa_max64(a->q.rows, a->k.rows) : a->q.rows,
                    esa_max64(1, 16384 / a->q.cols));
    nn->seconds[ESA_NN_OTHER] += esa_nn_now() - start;
    return ESA_OK;
}

void esa_timestep_sinusoid(float *out, int64_t dim, double t)
{
    const int64_t half = dim / 2;
    for (int64_t j = 0; j < half; j++) {
        const float exponent = (float)-log(10000.0) * (float)j / (float)half;
        const float angle = (float)t * expf(exponent);
        out[j] = cosf(angle);
        out[half + j] = sinf(angle);
    }
    if (dim % 2) out[dim - 1] = 0;
}
