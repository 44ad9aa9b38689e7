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
    const int64_t side = 2 * (D / 6), axis_dim[3] = { D - 2 * side, side, side }, half = D / 2;
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

void esa_timestep_sinusoid(float *out, int64_t dim, double t)
{
    const int64_t half = dim / 2;
    for (int64_t j = 0; j < half; j++) {
        const float exponent = (float)(-log(10000.0) * (double)(float)j / (double)half);
        const float angle = (float)t * expf(exponent);
        out[j] = cosf(angle);
        out[half + j] = sinf(angle);
    }
    if (dim % 2) out[dim - 1] = 0;
}
