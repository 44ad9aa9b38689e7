/* stand_in_planes.c - planes of decoders on the stand-in GPU in plain C.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Packed weights are f32 [phase][frame][tap][cin][cout] with values of BF16, as the GPU has them.
 */
#include "stand_in.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "base/half.h"

static float get(const void *data, int64_t at, int32_t dtype)
{
    return dtype == ESA_DTYPE_F32 ? ((const float *)data)[at]
                                  : esa_bf16_to_f32(((const uint16_t *)data)[at]);
}

static void put(void *data, int64_t at, int32_t dtype, float x)
{
    if (dtype == ESA_DTYPE_F32)
        ((float *)data)[at] = x;
    else
        ((uint16_t *)data)[at] = esa_f32_to_bf16(x);
}

/* ---------------------------------------------------------------- convolutions */

static int32_t side(const esa_plane_conv_args *a) { return a->up2 ? 2 : a->kh; }
static int32_t phases(const esa_plane_conv_args *a) { return a->up2 ? 4 : 1; }

static int64_t conv_bytes(const esa_cuda_device *dev, const esa_plane_conv_args *a)
{
    (void)dev;
    return (int64_t)4 * phases(a) * a->kt * side(a) * side(a) * a->cin * a->cout;
}

/* The tap of the source plane that tap k of three reads in a phase of a doubled plane. */
static int32_t source_tap(int32_t phase, int32_t k) { return (phase + k + 1) / 2 - phase; }

static void pack(float *packed, const esa_plane_conv_args *a, const float *weight)
{
    const int32_t taps = a->kh * a->kw, own = side(a) * side(a);
    memset(packed, 0, (size_t)conv_bytes(NULL, a));
    for (int32_t phase = 0; phase < phases(a); phase++)
        for (int32_t f = 0; f < a->kt; f++)
            for (int32_t k = 0; k < taps; k++) {
                const int32_t to = a->up2 ? source_tap(phase >> 1, k / 3) * 2 +
                                                source_tap(phase & 1, k % 3)
                                          : k;
                float *at = packed + ((int64_t)(phase * a->kt + f) * own + to) * a->cin * a->cout;
                for (int32_t ci = 0; ci < a->cin; ci++)
                    for (int32_t co = 0; co < a->cout; co++)
                        at[ci * a->cout + co] +=
                            weight[(((int64_t)co * a->cin + ci) * a->kt + f) * taps + k];
            }
    const int64_t count = conv_bytes(NULL, a) / 4;
    for (int64_t i = 0; i < count; i++) packed[i] = esa_bf16_to_f32(esa_f32_to_bf16(packed[i]));
}

/* sum[cout] += the window of frame f whose first pixel is (y, x). */
static void add_window(const esa_plane_conv_args *a, float *sum, int32_t phase, int32_t f,
                       int64_t y, int64_t x)
{
    const int32_t s = side(a);
    const float *w = (const float *)a->packed +
                     (int64_t)(phase * a->kt + f) * s * s * a->cin * a->cout;
    for (int32_t tap = 0; tap < s * s; tap++) {
        const int64_t from = (y + tap / s) * a->x_row + (x + tap % s) * a->cin;
        for (int32_t ci = 0; ci < a->cin; ci++, w += a->cout) {
            const float v = get(a->x[f], from + ci, a->dtype);
            for (int32_t co = 0; co < a->cout; co++) sum[co] += v * w[co];
        }
    }
}

static void convolve(const esa_plane_conv_args *a, float *sum)
{
    const int64_t border = side(a) > 1, up = a->up2 ? 2 : 1;
    for (int32_t phase = 0; phase < phases(a); phase++)
        for (int64_t i = 0; i < a->height * a->width; i++) {
            const int64_t y = i / a->width, x = i % a->width, dy = phase >> 1, dx = phase & 1;
            memcpy(sum, a->bias, (size_t)a->cout * 4);
            for (int32_t f = 0; f < a->kt; f++)
                if (a->x[f]) add_window(a, sum, phase, f, y - border + dy, x - border + dx);
            const int64_t pixel = (up * x + dx) * a->cout, line = up * y + dy;
            for (int32_t co = 0; co < a->cout; co++) {
                if (a->residual)
                    sum[co] += get(a->residual, line * a->residual_row + pixel + co, a->y_dtype);
                put(a->y, line * a->y_row + pixel + co, a->y_dtype, sum[co]);
            }
        }
}

static esa_status conv_pack(esa_cuda_device *dev, void *packed, const esa_plane_conv_args *args,
                            const float *weight, void *stream)
{
    (void)stream;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    pack(packed, args, weight);
    stand_in_leave();
    return ESA_OK;
}

static esa_status conv(esa_cuda_device *dev, const esa_plane_conv_args *args, void *stream)
{
    (void)stream;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    if (args->kt > 3 || args->kh != args->kw || (args->kh != 1 && args->kh != 3))
        return stand_in_say(dev, ESA_ERR_UNSUPPORTED, "the stand-in takes 1 x 1 or 3 x 3 taps");
    float *sum = malloc((size_t)args->cout * 4);
    if (!sum) return stand_in_say(dev, ESA_ERR_MEMORY, "out of memory for a pixel");
    stand_in_enter();
    convolve(args, sum);
    stand_in_leave();
    free(sum);
    return ESA_OK;
}

/* ---------------------------------------------------------------- the rest */

static esa_status pixel_norm(esa_cuda_device *dev, const esa_plane_norm_args *a, void *stream)
{
    (void)stream;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    for (int64_t i = 0; i < a->height * a->width; i++) {
        const int64_t row = i / a->width, from = row * a->x_row + i % a->width * a->channels,
                      to = row * a->y_row + i % a->width * a->channels;
        double squares = 0;
        for (int64_t c = 0; c < a->channels; c++) {
            const double x = get(a->x, from + c, a->dtype);
            squares += x * x;
        }
        const double factor = sqrt((double)a->channels) / fmax(sqrt(squares), 1e-12);
        for (int64_t c = 0; c < a->channels; c++) {
            const double x = get(a->x, from + c, a->dtype) * factor * (double)a->gamma[c];
            put(a->y, to + c, a->dtype, (float)(a->act == ESA_ACT_SILU ? x / (1 + exp(-x)) : x));
        }
    }
    stand_in_leave();
    return ESA_OK;
}

static void group(const esa_plane_group_args *a, int64_t g)
{
    const int64_t width = a->channels / a->groups, pixels = a->height * a->width;
    double sum = 0, squares = 0, n = (double)(a->frames * pixels * width);
    for (int32_t pass = 0; pass < 2; pass++)
        for (int64_t i = 0; i < a->frames * pixels * width; i++) {
            const int64_t c = g * width + i % width, p = i / width % pixels, f = i / width / pixels,
                          column = p % a->width * a->channels + c,
                          from = f * a->x_frame + p / a->width * a->x_row + column;
            const double x = get(a->x, from, a->dtype);
            if (pass == 0) {
                sum += x;
                squares += x * x;
                continue;
            }
            const double mean = sum / n, factor = 1 / sqrt(squares / n - mean * mean + a->eps);
            double y = (x - mean) * factor * a->weight[c] + a->bias[c];
            if (a->guide.times) {
                const int64_t at = esa_guide_offset(a, f, p / a->width, p % a->width) + c;
                y = y * a->guide.times[at] + a->guide.plus[at];
            }
            put(a->y, f * a->y_frame + p / a->width * a->y_row + column, a->dtype,
                (float)(a->act == ESA_ACT_SILU ? y / (1 + exp(-y)) : y));
        }
}

static esa_status group_norm(esa_cuda_device *dev, const esa_plane_group_args *a, void *stream)
{
    (void)stream;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    memset(a->room, 0xff, (size_t)ESA_GROUP_BYTES(a->channels, a->groups));
    for (int64_t g = 0; g < a->groups; g++) group(a, g);
    stand_in_leave();
    return ESA_OK;
}

static esa_status border(esa_cuda_device *dev, const esa_plane_border_args *a, void *stream)
{
    (void)stream;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    const int64_t high = a->height + 2, wide = a->width + 2;
    stand_in_enter();
    for (int64_t i = 0; i < a->frames * high * wide; i++) {
        const int64_t f = i / (high * wide), y = i / wide % high - 1, x = i % wide - 1;
        const int64_t from_y = y < 0           ? 0
                               : y < a->height ? y
                                               : a->height - 1,
                      from_x = x < 0          ? 0
                               : x < a->width ? x
                                              : a->width - 1;
        for (int64_t c = 0; c < a->channels; c++)
            put(a->x, f * a->frame + y * a->row + x * a->channels + c, a->dtype,
                get(a->x, f * a->frame + from_y * a->row + from_x * a->channels + c, a->dtype));
    }
    stand_in_leave();
    return ESA_OK;
}

static esa_status from_latents(esa_cuda_device *dev, const esa_plane_latent_args *a, void *stream)
{
    (void)stream;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    for (int64_t y = 0; y < a->height; y++)
        for (int64_t x = 0; x < a->width; x++)
            for (int64_t c = 0; c < a->channels; c++) {
                const float scaled = a->latents[c * a->channel + y * a->row + x] * a->scale[c];
                put(a->y, y * a->y_row + x * a->channels + c, a->dtype, scaled + a->shift[c]);
            }
    stand_in_leave();
    return ESA_OK;
}

static esa_status to_bytes(esa_cuda_device *dev, const esa_plane_bytes_args *a, void *stream)
{
    (void)stream;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    for (int64_t i = 0; i < a->count; i++) {
        const float x = a->x[i] * 0.5f + 0.5f;
        if (isnan(x)) *a->wrong = 1;
        a->bytes[i] = (uint8_t)lrintf((x > 0 ? (x < 1 ? x : 1.0f) : 0.0f) * 255.0f);
    }
    stand_in_leave();
    return ESA_OK;
}

static esa_status zero(esa_cuda_device *dev, void *ptr, int64_t bytes, void *stream)
{
    (void)stream;
    const esa_status status = stand_in_luck(dev);
    if (status) return status;
    stand_in_enter();
    memset(ptr, 0, (size_t)bytes);
    stand_in_leave();
    return ESA_OK;
}

const esa_cuda_planes stand_in_planes = { conv_bytes,   conv_pack,  conv,
                                          pixel_norm,   group_norm, border,
                                          from_latents, to_bytes,   zero };
