/* resize.c - see resize.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "media/resize.h"

#include <math.h>
#include <string.h>

#define BITS 22 /* of a weight */
#define PI   3.14159265358979323846

static double bicubic(double x)
{
    const double a = -0.5;
    x = fabs(x);
    if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

static double sinc(double x) { return x == 0 ? 1 : sin(x * PI) / (x * PI); }

static double lanczos(double x) { return fabs(x) < 3 ? sinc(x) * sinc(x / 3) : 0; }

/* Which input pixels make an output pixel, and their weights. */
typedef struct taps {
    int64_t size;   /* weights of one output pixel, at most */
    int64_t bytes;  /* of all below */
    double *sums;   /* [size] */
    int64_t *first; /* [out] */
    int64_t *count; /* [out] */
    int32_t *w;     /* [out][size] */
} taps;

static esa_status make_taps(esa_ctx *ctx, taps *t, int64_t in, int64_t out, int32_t filter)
{
    const double scale = (double)in / (double)out, wide = scale < 1 ? 1 : scale, narrow = 1 / wide,
                 support = (filter == ESA_RESIZE_LANCZOS ? 3.0 : 2.0) * wide;
    t->size = (int64_t)ceil(support) * 2 + 1;
    t->bytes = 8 * t->size + 16 * out + 4 * out * t->size;
    char *room = esa_mem_alloc(&ctx->mem, t->bytes);
    if (!room) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory to resize a picture");
    t->sums = (double *)(void *)room;
    t->first = (int64_t *)(void *)(room + 8 * t->size);
    t->count = t->first + out;
    t->w = (int32_t *)(void *)(t->count + out);
    for (int64_t i = 0; i < out; i++) {
        const double center = ((double)i + 0.5) * scale;
        const int64_t first = (int64_t)fmax(0, trunc(center - support + 0.5)),
                      end = (int64_t)fmin((double)in, trunc(center + support + 0.5));
        double sum = 0;
        t->first[i] = first;
        t->count[i] = end - first;
        for (int64_t k = 0; k < end - first; k++) {
            const double x = ((double)(k + first) - center + 0.5) * narrow;
            t->sums[k] = filter == ESA_RESIZE_LANCZOS ? lanczos(x) : bicubic(x);
            sum += t->sums[k];
        }
        for (int64_t k = 0; k < end - first; k++) {
            const double w = t->sums[k] / sum * (1 << BITS);
            t->w[i * t->size + k] = (int32_t)(w < 0 ? w - 0.5 : w + 0.5);
        }
    }
    return ESA_OK;
}

static uint8_t to_byte(int64_t sum)
{
    const int64_t x = sum >> BITS;
    return (uint8_t)(x < 0 ? 0 : x > 255 ? 255 : x);
}

/* One pass: the picture has `lines` lines of pixels that are `step` bytes apart. */
static void pass(uint8_t *to, const uint8_t *from, const taps *t, int64_t out, int64_t lines,
                 int64_t line, int64_t to_line, int64_t step)
{
    for (int64_t l = 0; l < lines; l++)
        for (int64_t i = 0; i < out; i++)
            for (int64_t c = 0; c < 3; c++) {
                int64_t sum = 1 << (BITS - 1);
                for (int64_t k = 0; k < t->count[i]; k++)
                    sum += (int64_t)t->w[i * t->size + k] *
                           from[l * line + (t->first[i] + k) * step + c];
                to[l * to_line + i * step + c] = to_byte(sum);
            }
}

esa_status esa_resize(esa_ctx *ctx, uint8_t *to, int64_t height, int64_t width, const uint8_t *from,
                      int64_t from_height, int64_t from_width, int32_t filter)
{
    taps columns = { 0 }, rows = { 0 };
    const int64_t bytes = from_height * width * 3;
    uint8_t *between = NULL;
    esa_status status = ESA_OK;
    if (from_width != width) {
        status = make_taps(ctx, &columns, from_width, width, filter);
        if (!status) between = esa_mem_alloc(&ctx->mem, bytes);
        if (!status && !between)
            status = esa_fail(ctx, ESA_ERR_MEMORY, "out of memory to resize a picture");
        if (!status)
            pass(between, from, &columns, width, from_height, 3 * from_width, 3 * width, 3);
    }
    const uint8_t *source = between ? between : from;
    if (!status && from_height != height) {
        status = make_taps(ctx, &rows, from_height, height, filter);
        /* a column is a line whose pixels are a row apart */
        if (!status) pass(to, source, &rows, height, width, 3, 3, 3 * width);
    } else if (!status) {
        memcpy(to, source, (size_t)(height * width * 3));
    }
    if (columns.sums) esa_mem_free(&ctx->mem, columns.sums, columns.bytes);
    if (rows.sums) esa_mem_free(&ctx->mem, rows.sums, rows.bytes);
    if (between) esa_mem_free(&ctx->mem, between, bytes);
    return status;
}
