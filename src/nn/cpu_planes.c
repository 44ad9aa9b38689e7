/* cpu_planes.c - the operations of planes.h in host memory: f32, through the functions of nn.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "nn/planes.h"

#include <math.h>
#include <string.h>

static esa_status cpu_conv(esa_nn *nn, const esa_conv *conv, const esa_plane_conv_args *a)
{
    const float *const x[3] = { a->x[0], a->x[1], a->x[2] };
    return esa_nn_conv(nn, conv, a->y, a->y_row, x, a->x_row, a->height, a->width, a->residual,
                       a->residual_row);
}

static esa_status cpu_pixel_norm(esa_nn *nn, const esa_plane_norm_args *a)
{
    esa_nn_pixel_norm(nn, a->y, a->y_row, a->x, a->x_row, a->height, a->width, a->channels,
                      a->gamma, a->act);
    return ESA_OK;
}

static esa_status cpu_group_norm(esa_nn *nn, const esa_plane_group_args *a)
{
    return esa_nn_group_norm(nn, a);
}

static void border_rows(void *arg, int64_t first, int64_t count, int32_t worker)
{
    (void)worker;
    const esa_plane_border_args *a = arg;
    const int64_t c = a->channels;
    const size_t pixel = (size_t)c * 4, line = (size_t)((a->width + 2) * c) * 4;
    for (int64_t f = first; f < first + count; f++) {
        float *x = (float *)a->x + f * a->frame;
        for (int64_t y = 0; y < a->height; y++) {
            float *row = x + y * a->row;
            memcpy(row - c, row, pixel);
            memcpy(row + a->width * c, row + (a->width - 1) * c, pixel);
        }
        memcpy(x - a->row - c, x - c, line);
        memcpy(x + a->height * a->row - c, x + (a->height - 1) * a->row - c, line);
    }
}

static esa_status cpu_border(esa_nn *nn, const esa_plane_border_args *args)
{
    esa_plane_border_args a = *args;
    const double start = esa_nn_now();
    esa_nn_parallel(nn, border_rows, &a, a.frames, 1);
    nn->seconds[ESA_NN_OTHER] += esa_nn_now() - start;
    return ESA_OK;
}

static esa_status cpu_from_latents(esa_nn *nn, const esa_plane_latent_args *a)
{
    (void)nn;
    for (int64_t c = 0; c < a->channels; c++) {
        const float scale = a->scale[c], shift = a->shift[c];
        for (int64_t y = 0; y < a->height; y++) {
            const float *from = a->latents + c * a->channel + y * a->row;
            float *to = (float *)a->y + y * a->y_row + c;
            for (int64_t x = 0; x < a->width; x++) to[x * a->channels] = from[x] * scale + shift;
        }
    }
    return ESA_OK;
}

int32_t esa_nn_pixel_bytes(uint8_t *bytes, const float *pixels, int64_t count)
{
    int32_t wrong = 0;
    for (int64_t i = 0; i < count; i++) {
        const float x = pixels[i] * 0.5f + 0.5f;
        wrong |= isnan(x);
        bytes[i] = (uint8_t)lrintf((x > 0 ? (x < 1 ? x : 1.0f) : 0.0f) * 255.0f);
    }
    return wrong != 0;
}

static esa_status cpu_to_bytes(esa_nn *nn, const esa_plane_bytes_args *a)
{
    (void)nn;
    if (esa_nn_pixel_bytes(a->bytes, a->x, a->count)) *a->wrong = 1;
    return ESA_OK;
}

static esa_status cpu_zero(esa_nn *nn, void *ptr, int64_t bytes)
{
    (void)nn;
    memset(ptr, 0, (size_t)bytes);
    return ESA_OK;
}

const esa_nn_planes esa_nn_cpu_planes = { esa_nn_conv_pack, cpu_conv,   cpu_pixel_norm,
                                          cpu_group_norm,   cpu_border, cpu_from_latents,
                                          cpu_to_bytes,     cpu_zero };
