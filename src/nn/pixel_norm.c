/* pixel_norm.c - the norm of Wan's VAE over the channels of every pixel, followed by an activation.
 * SPDX-License-Identifier: Apache-2.0 */
#include "nn/leaf.h"
#include "nn/nn.h"

typedef struct pixel_job {
    const esa_nn_leaf *leaf;
    float *y;
    const float *x, *gamma;
    int64_t y_row, x_row, width, channels;
    int32_t act;
} pixel_job;

/* x / |x| * sqrt(channels) is x over its root mean square. The definition has 1e-12 for pixels that
 * are all zeros. This eps serves the same purpose; it is far below the square of any value that
 * matters, so it changes no other pixel. */
#define ZERO_PIXEL 1e-30f

static void pixel_rows(void *arg, int64_t first, int64_t count, int32_t worker)
{
    (void)worker;
    const pixel_job *j = arg;
    for (int64_t r = first; r < first + count; r++) {
        float *y = j->y + r * j->y_row;
        const float *x = j->x + r * j->x_row;
        for (int64_t p = 0; p < j->width; p++)
            j->leaf->rms_norm(y + p * j->channels, x + p * j->channels, j->channels, ZERO_PIXEL,
                              j->gamma);
        if (j->act == ESA_ACT_SILU) j->leaf->silu(y, y, j->width * j->channels);
    }
}

void esa_nn_pixel_norm(esa_nn *nn, float *y, int64_t y_row, const float *x, int64_t x_row,
                       int64_t height, int64_t width, int64_t channels, const float *gamma,
                       int32_t act)
{
    pixel_job j = {
        esa_nn_leaf_get(nn->ctx->kern->level), y, x, gamma, y_row, x_row, width, channels, act
    };
    const double start = esa_nn_now();
    esa_nn_parallel(nn, pixel_rows, &j, height, 1);
    nn->seconds[ESA_NN_OTHER] += esa_nn_now() - start;
}
