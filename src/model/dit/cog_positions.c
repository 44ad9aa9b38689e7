/* cog_positions.c - the positions of CogVideoX's video tokens: rotations (5B) and sums (2B).
 * SPDX-License-Identifier: Apache-2.0
 *
 * Numbers are rounded where diffusers rounds them: angles of rotations are f32 throughout, angles
 * of sums are double. */
#include "model/dit/cog_dit.h"

#include <math.h>

#define THETA 10000.0

/* torch.linspace(from, to, count)[i] in f32: the second half is counted from its end. */
static float linspace(float from, float to, int32_t count, int32_t i)
{
    if (count == 1) return from;
    const float step = (to - from) / (float)(count - 1);
    return i < count / 2 ? from + step * (float)i : to - step * (float)(count - 1 - i);
}

/* A side of the grid as part of the model's own grid. */
typedef struct span {
    double from, to;
} span;

/* Lays a grid of h x w over one of H x W: the largest size of the same shape, in the middle. Halves
 * are rounded to even, as in Python. */
static void lay(span out[2], double h, double w, double H, double W)
{
    double size[2] = { H, W };
    if (h / w > H / W)
        size[1] = rint(H / h * w);
    else
        size[0] = rint(W / w * h);
    const double first[2] = { rint((H - size[0]) / 2), rint((W - size[1]) / 2) };
    for (int32_t i = 0; i < 2; i++) out[i] = (span){ first[i], first[i] + size[i] };
}

static int64_t token_of(const int32_t *perm, int64_t i) { return perm ? perm[i] : i; }

void esa_cog_rotations(const esa_cog_config *c, float *cos, float *sin, const int32_t grid[3],
                       const int32_t *perm)
{
    const int64_t D = c->head_dim, half = D / 2, plane = (int64_t)grid[1] * grid[2],
                  tokens = grid[0] * plane, width[3] = { D / 4, D / 8 * 3, D / 8 * 3 };
    span side[3] = { { 0, grid[0] } };
    lay(side + 1, grid[1], grid[2], c->sample_h / c->patch, c->sample_w / c->patch);
    for (int64_t i = 0; i < tokens; i++) {
        const int64_t n = token_of(perm, i);
        const int32_t at[3] = { (int32_t)(n / plane), (int32_t)(n / grid[2] % grid[1]),
                                (int32_t)(n % grid[2]) };
        int64_t to = i * half;
        for (int32_t k = 0; k < 3; k++) {
            const float end = (float)(side[k].to * (grid[k] - 1) / grid[k]),
                        p = linspace((float)side[k].from, end, grid[k], at[k]);
            for (int64_t j = 0; j < width[k] / 2; j++, to++) {
                const float power = (float)(2 * j) / (float)width[k],
                            angle = p * (1.0f / powf((float)THETA, power));
                cos[to] = cosf(angle);
                sin[to] = sinf(angle);
            }
        }
    }
}

/* out[width] = sines, then cosines. */
static void wave(float *out, int64_t width, float position)
{
    const int64_t half = width / 2;
    for (int64_t j = 0; j < half; j++) {
        const double angle = (double)position * (1.0 / pow(THETA, (double)j / (double)half));
        out[j] = (float)sin(angle);
        out[half + j] = (float)cos(angle);
    }
}

void esa_cog_places(const esa_cog_config *c, float *out, const int32_t grid[3], const int32_t *perm)
{
    const int64_t d = (int64_t)c->heads * c->head_dim, plane = (int64_t)grid[1] * grid[2],
                  tokens = grid[0] * plane, part = 3 * d / 8;
    const float space = (float)c->spatial_scale, time = (float)c->temporal_scale;
    for (int64_t i = 0; i < tokens; i++) {
        const int64_t n = token_of(perm, i);
        float *row = out + i * d;
        wave(row, d / 4, (float)(n / plane) / time);
        wave(row + d / 4, part, (float)(n % grid[2]) / space);
        wave(row + d / 4 + part, part, (float)(n / grid[2] % grid[1]) / space);
    }
}
