/* group_norm.c - group norm over the frames of a decoder, followed by an activation.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The rows of all frames are split into parts whose number does not depend on the threads. Each
 * part has its sums of x and x^2 for every group, in double; they are added in their order. */
#include "nn/nn.h"

#include <math.h>
#include "nn/leaf.h"

typedef struct group_job {
    const esa_nn_leaf *leaf;
    const esa_plane_group_args *a;
    double *sums;         /* [parts][groups][2] */
    float *scale, *shift; /* [channels]: y = x * scale + shift */
    int64_t rows, parts;
} group_job;

static int64_t offset(int64_t row, int64_t height, int64_t pitch, int64_t frame)
{
    return row / height * frame + row % height * pitch;
}

static void sum_parts(void *arg, int64_t first, int64_t count, int32_t worker)
{
    (void)worker;
    const group_job *j = arg;
    const esa_plane_group_args *a = j->a;
    const int64_t width = a->channels / a->groups;
    for (int64_t part = first; part < first + count; part++) {
        double *sums = j->sums + part * a->groups * 2;
        for (int64_t g = 0; g < 2 * a->groups; g++) sums[g] = 0;
        for (int64_t r = part * j->rows / j->parts; r < (part + 1) * j->rows / j->parts; r++) {
            const float *x = (const float *)a->x + offset(r, a->height, a->x_row, a->x_frame);
            for (int64_t p = 0; p < a->width; p++)
                for (int64_t g = 0; g < a->groups; g++)
                    for (int64_t c = 0; c < width; c++, x++) {
                        sums[2 * g] += (double)*x;
                        sums[2 * g + 1] += (double)*x * (double)*x;
                    }
        }
    }
}

/* Turns the sums into a factor and a summand of each channel. */
static void finish_sums(const group_job *j)
{
    const esa_plane_group_args *a = j->a;
    const int64_t width = a->channels / a->groups;
    const double count = (double)j->rows * (double)a->width * (double)width;
    for (int64_t g = 0; g < a->groups; g++) {
        double sum = 0, squares = 0;
        for (int64_t part = 0; part < j->parts; part++) {
            sum += j->sums[(part * a->groups + g) * 2];
            squares += j->sums[(part * a->groups + g) * 2 + 1];
        }
        const double mean = sum / count, variance = fmax(0, squares / count - mean * mean),
                     factor = 1 / sqrt(variance + (double)a->eps);
        for (int64_t c = g * width; c < (g + 1) * width; c++) {
            j->scale[c] = (float)(factor * (double)a->weight[c]);
            j->shift[c] = (float)((double)a->bias[c] - mean * factor * (double)a->weight[c]);
        }
    }
}

static void guide_pixel(float *y, const esa_plane_group_args *a, int64_t frame, int64_t row,
                        int64_t column)
{
    const int64_t at = esa_guide_offset(a, frame, row, column);
    const float *times = a->guide.times + at, *plus = a->guide.plus + at;
    for (int64_t c = 0; c < a->channels; c++) y[c] = y[c] * times[c] + plus[c];
}

static void apply_rows(void *arg, int64_t first, int64_t count, int32_t worker)
{
    (void)worker;
    const group_job *j = arg;
    const esa_plane_group_args *a = j->a;
    for (int64_t r = first; r < first + count; r++) {
        const float *x = (const float *)a->x + offset(r, a->height, a->x_row, a->x_frame);
        float *y = (float *)a->y + offset(r, a->height, a->y_row, a->y_frame);
        for (int64_t p = 0; p < a->width; p++, x += a->channels) {
            float *to = y + p * a->channels;
            for (int64_t c = 0; c < a->channels; c++) to[c] = x[c] * j->scale[c] + j->shift[c];
            if (a->guide.times) guide_pixel(to, a, r / a->height, r % a->height, p);
        }
        if (a->act == ESA_ACT_SILU) j->leaf->silu(y, y, a->width * a->channels);
    }
}

esa_status esa_nn_group_norm(esa_nn *nn, const esa_plane_group_args *a)
{
    group_job j = { .leaf = esa_nn_leaf_get(nn->ctx->kern->level),
                    .a = a,
                    .sums = a->room,
                    .rows = a->frames * a->height };
    const double start = esa_nn_now();
    j.parts = esa_min64(ESA_GROUP_PARTS, j.rows);
    j.scale = (float *)(j.sums + (int64_t)ESA_GROUP_PARTS * a->groups * 2);
    j.shift = j.scale + a->channels;
    esa_nn_parallel(nn, sum_parts, &j, j.parts, 1);
    finish_sums(&j);
    esa_nn_parallel(nn, apply_rows, &j, j.rows, 1);
    nn->seconds[ESA_NN_OTHER] += esa_nn_now() - start;
    return ESA_OK;
}
