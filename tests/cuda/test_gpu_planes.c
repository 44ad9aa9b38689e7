/* test_gpu_planes.c - the operations on planes (base/nn_args.h) against double precision:
 * convolutions, norms of pixels, latents as planes, pixels as bytes.
 * SPDX-License-Identifier: Apache-2.0
 *
 * ESA_TEST_TIMES=1 prints the times of the layers of Wan's decoder too, and what they sum to over a
 * decode of 81 frames. */
#include <math.h>
#include <stdio.h>

#include "common/case_run.h"
#include "common/naive.h"
#include "gpu_engine.h"
#include "gpu_fenced.h"

enum { F32 = ESA_DTYPE_F32, BF16 = ESA_DTYPE_BF16 };

static float random_value(float size) { return size * (2 * esa_rng_unit(&rng) - 1); }

static double value(const void *data, int64_t at, int32_t dtype)
{
    return dtype == F32 ? ((const float *)data)[at] : esa_bf16_to_f32(((const uint16_t *)data)[at]);
}

static fenced random_floats(int64_t count, float size)
{
    float *x = malloc((size_t)count * 4);
    for (int64_t i = 0; i < count; i++) x[i] = random_value(size);
    fenced g = fenced_new(ctx, be, x, 4 * count, 0);
    free(x);
    return g;
}

/* ---------------------------------------------------------------- convolutions */

typedef struct conv_case {
    int32_t kt, k, up2, cin, cout;
    int64_t height, width;
    int32_t residual; /* 1: another plane, 2: y itself */
    int32_t y_dtype;
    int32_t missing;    /* bits of the frames that do not exist */
    int64_t pad, shift; /* elements between rows and before the first */
} conv_case;

typedef struct conv_setup {
    fenced x[3], weight, bias, packed, y, residual;
    esa_plane_conv_args args;
} conv_setup;

/* A plane with its border of zeros. */
static fenced plane_new(const conv_case *c, int64_t row)
{
    const int64_t border = c->k / 2;
    uint16_t *x = calloc((size_t)((c->height + 2 * border) * row), 2);
    for (int64_t y = 0; y < c->height; y++) {
        uint16_t *line = random_bf16(&rng, c->width * c->cin, 1);
        memcpy(x + (y + border) * row + border * c->cin, line, (size_t)(c->width * c->cin) * 2);
        free(line);
    }
    fenced g = fenced_new(ctx, be, x, 2 * (c->height + 2 * border) * row, 2 * c->shift);
    free(x);
    return g;
}

/* A plane of outputs, filled with random numbers. */
static fenced outputs_new(const conv_case *c, int64_t row)
{
    const int64_t count = c->height * (c->up2 ? 2 : 1) * row;
    if (c->y_dtype == F32) return random_floats(count, 1);
    uint16_t *x = random_bf16(&rng, count, 1);
    fenced g = fenced_new(ctx, be, x, 2 * count, 0);
    free(x);
    return g;
}

/* Weights of a doubled convolution are sums of up to four; multiples of 2^-9 up to 1/8 make these
 * sums BF16 numbers, as the other weights are. */
static fenced weights_new(const conv_case *c)
{
    const int64_t count = (int64_t)c->cout * c->cin * c->kt * c->k * c->k;
    float *x = malloc((size_t)count * 4);
    for (int64_t i = 0; i < count; i++)
        x[i] = c->up2 ? (float)((int)esa_rng_below(&rng, 65) - 32) * 0x1p-9f
                      : esa_bf16_to_f32(esa_f32_to_bf16(random_value(0.1f)));
    fenced g = fenced_new(ctx, be, x, 4 * count, 0);
    free(x);
    return g;
}

static conv_setup conv_new(const conv_case *c)
{
    const int64_t border = c->k / 2, x_row = (c->width + 2 * border) * c->cin + c->pad,
                  y_row = c->width * (c->up2 ? 2 : 1) * c->cout + c->pad;
    conv_setup s = { .weight = weights_new(c),
                     .bias = random_floats(c->cout, 1),
                     .y = outputs_new(c, y_row),
                     .residual = outputs_new(c, y_row) };
    esa_plane_conv_args a = { .kt = c->kt,
                              .kh = c->k,
                              .kw = c->k,
                              .cin = c->cin,
                              .cout = c->cout,
                              .up2 = c->up2,
                              .bias = s.bias.data,
                              .y = s.y.data,
                              .y_row = y_row,
                              .x_row = x_row,
                              .height = c->height,
                              .width = c->width,
                              .residual_row = y_row,
                              .dtype = BF16,
                              .y_dtype = c->y_dtype };
    a.residual = c->residual == 1 ? s.residual.data : c->residual == 2 ? s.y.data : NULL;
    for (int32_t f = 0; f < c->kt; f++) {
        s.x[f] = plane_new(c, x_row);
        if (!(c->missing >> f & 1))
            a.x[f] = (uint16_t *)s.x[f].data + border * x_row + border * c->cin;
    }
    const int64_t bytes = be->planes->conv_bytes(ctx, &a);
    void *nothing = calloc(1, (size_t)bytes);
    s.packed = fenced_new(ctx, be, nothing, bytes, 0);
    free(nothing);
    must(ctx, be->planes->conv_pack(ctx, s.packed.data, &a, s.weight.data));
    a.packed = s.packed.data;
    s.args = a;
    return s;
}

static void conv_free(conv_setup *s)
{
    fenced *all[] = { &s->weight, &s->bias, &s->packed, &s->y, &s->residual };
    for (int i = 0; i < 5; i++) fenced_free(ctx, be, all[i]);
    for (int32_t f = 0; f < s->args.kt; f++) fenced_free(ctx, be, &s->x[f]);
}

/* One output, and the sum of the magnitudes of its terms. */
static double conv_reference(const conv_setup *s, const conv_case *c, int64_t y, int64_t x,
                             int64_t o, double *size)
{
    const int64_t up = c->up2 ? 2 : 1, border = c->k / 2;
    double sum = value(s->bias.host, o, F32);
    *size = fabs(sum);
    for (int32_t f = 0; f < c->kt; f++)
        for (int32_t tap = 0; tap < c->k * c->k && !(c->missing >> f & 1); tap++) {
            const int64_t sy = y + tap / c->k - border, sx = x + tap % c->k - border;
            if (sy < 0 || sx < 0 || sy >= up * c->height || sx >= up * c->width) continue;
            const int64_t at = (sy / up + border) * s->args.x_row + (sx / up + border) * c->cin;
            for (int64_t i = 0; i < c->cin; i++) {
                const double term = value(s->x[f].host, at + i, BF16) *
                                    value(s->weight.host,
                                          ((o * c->cin + i) * c->kt + f) * c->k * c->k + tap, F32);
                sum += term;
                *size += fabs(term);
            }
        }
    return sum;
}

/* Compares rows first, first + every, ... of the output; what lies around it must be unchanged. */
static void conv_compare(const conv_setup *s, const conv_case *c, int64_t every, const char *what)
{
    const int64_t up = c->up2 ? 2 : 1, row = s->args.y_row, line = up * c->width * c->cout,
                  element = esa_view_element(c->y_dtype);
    uint8_t *got = fenced_read(ctx, be, &s->y, what);
    const uint8_t *rest = c->residual == 1 ? s->residual.host : s->y.host;
    for (int64_t y = 0; y < up * c->height; y++) {
        if (memcmp(got + (y * row + line) * element, s->y.host + (y * row + line) * element,
                   (size_t)((row - line) * element)))
            fail_msg("%s: elements after row %lld changed", what, (long long)y);
        for (int64_t i = 0; i < line && y % every == 0; i++) {
            if (every > 1 && i / c->cout % every) continue;
            double size, want = conv_reference(s, c, y, i / c->cout, i % c->cout, &size);
            if (c->residual) want += value(rest, y * row + i, c->y_dtype);
            /* Rounding to BF16, 2^-8 of the value; f32 sums of up to ten thousand terms. */
            const double allowed = (c->y_dtype == BF16 ? 0x1.02p-8 * fabs(want) : 0) + 1e-5 * size +
                                   1e-6,
                         x = value(got, y * row + i, c->y_dtype);
            if (!(fabs(x - want) <= allowed))
                fail_msg("%s: row %lld, pixel %lld, channel %lld is %.7g, expected %.7g", what,
                         (long long)y, (long long)(i / c->cout), (long long)(i % c->cout), x, want);
        }
    }
    free(got);
    for (int32_t f = 0; f < c->kt; f++) {
        void *x = fenced_read(ctx, be, &s->x[f], what);
        assert_memory_equal(x, s->x[f].host, (size_t)s->x[f].bytes);
        free(x);
    }
    free(fenced_read(ctx, be, &s->packed, what));
}

static void conv_check(const conv_case *c, int64_t every)
{
    char what[160];
    snprintf(what, sizeof what, "%d x %d x %d%s, %d to %d channels, %lld x %lld", (int)c->kt,
             (int)c->k, (int)c->k, c->up2 ? " doubled" : "", (int)c->cin, (int)c->cout,
             (long long)c->height, (long long)c->width);
    conv_setup s = conv_new(c);
    must(ctx, be->planes->conv(ctx, &s.args));
    conv_compare(&s, c, every, what);
    conv_free(&s);
}

static const struct {
    const char *name;
    conv_case c;
} conv_cases[] = {
#define PLANE_CASE(name, ...) { name, { __VA_ARGS__ } },
#include "cases/engine.def"
};

/* The cases that are large, or those that are not. every: compares every n-th element. */
static void check_convs(int large, int64_t every)
{
    for (size_t i = 0; i < sizeof conv_cases / sizeof *conv_cases; i++) {
        const char *name = conv_cases[i].name;
        const int is_large = strncmp(name, "plane/large/", 12) == 0;
        if (is_large != large || !case_begin(name, 1)) continue;
        rng = (esa_rng){ test_seed() + i };
        conv_check(&conv_cases[i].c, every);
        case_end(0);
    }
    cases_done("plane/");
}

static void convolutions(void **state)
{
    (void)state;
    check_convs(0, 1);
}

static void large_planes(void **state)
{
    (void)state;
    if (on_stand_in() || getenv("ESA_TEST_SMALL")) return; /* too slow there */
    check_convs(1, 23);
}

static void refused_kernels(void **state)
{
    (void)state;
    const conv_case c = { 1, 3, 0, 16, 16, 4, 4, 0, BF16, 0, 0, 0 };
    conv_setup s = conv_new(&c);
    s.args.kw = 5;
    refused(ctx, be->planes->conv(ctx, &s.args), ESA_ERR_UNSUPPORTED, "3 x 3 taps");
    conv_free(&s);
}

/* ---------------------------------------------------------------- norms, latents, bytes */

static void check_norm(int64_t height, int64_t width, int64_t channels, int32_t act, int32_t dtype,
                       int64_t pad)
{
    const int64_t x_row = width * channels + pad, y_row = (width + 2) * channels;
    fenced x, y, gamma = random_floats(channels, 2);
    if (dtype == F32) {
        x = random_floats(height * x_row, 2);
        y = random_floats(height * y_row, 2);
    } else {
        uint16_t *from = random_bf16(&rng, height * x_row, 2),
                 *to = random_bf16(&rng, height * y_row, 2);
        memset(from, 0, (size_t)channels * 2); /* a pixel of zeros stays one */
        x = fenced_new(ctx, be, from, 2 * height * x_row, 0);
        y = fenced_new(ctx, be, to, 2 * height * y_row, 0);
        free(from);
        free(to);
    }
    const esa_plane_norm_args args = { y.data, y_row,    x.data,     x_row, height,
                                       width,  channels, gamma.data, act,   dtype };
    must(ctx, be->planes->pixel_norm(ctx, &args));
    void *got = fenced_read(ctx, be, &y, "norm of pixels");
    for (int64_t i = 0; i < height * y_row; i++) {
        const int64_t row = i / y_row, p = i % y_row / channels, c = i % y_row % channels,
                      at = row * x_row + p * channels;
        double want = value(y.host, i, dtype), squares = 0;
        if (p < width) {
            for (int64_t k = 0; k < channels; k++)
                squares += value(x.host, at + k, dtype) * value(x.host, at + k, dtype);
            want = value(x.host, at + c, dtype) / fmax(sqrt(squares), 1e-12) *
                   sqrt((double)channels) * value(gamma.host, c, F32);
            if (act == ESA_ACT_SILU) want /= 1 + exp(-want);
        }
        /* half the distance of BF16 numbers; f32 sums and the fast exponential */
        const double allowed = (dtype == BF16 ? 0x1.02p-8 : 4e-6) * fabs(want) + 1e-6;
        if (!(fabs(value(got, i, dtype) - want) <= allowed))
            fail_msg("norm of %lld channels: row %lld, pixel %lld, channel %lld is %.7g, "
                     "expected %.7g",
                     (long long)channels, (long long)row, (long long)p, (long long)c,
                     value(got, i, dtype), want);
    }
    free(got);
    fenced_free(ctx, be, &x);
    fenced_free(ctx, be, &y);
    fenced_free(ctx, be, &gamma);
}

static void norms(void **state)
{
    static const int64_t channels[] = { 1, 8, 24, 96, 100, 192, 200, 384, 776 };
    (void)state;
    for (int i = 0; i < 9; i++)
        for (int n = 0; n < 4; n++)
            check_norm(3 + 2 * n, 7 + i, channels[i], n % 2 ? ESA_ACT_SILU : ESA_ACT_NONE,
                       n == 3 ? F32 : BF16, n == 2 ? 3 : 8 * (n % 2));
}

static void check_latents(int32_t dtype)
{
    const int64_t channels = 16, height = 5, width = 9, row = 11, channel = 70,
                  y_row = (width + 2) * channels;
    fenced latents = random_floats(channels * channel, 3), scale = random_floats(channels, 2),
           shift = random_floats(channels, 1), y = random_floats(height * y_row, 1);
    const esa_plane_latent_args args = { y.data, y_row,    latents.data, channel,    row,  height,
                                         width,  channels, scale.data,   shift.data, dtype };
    must(ctx, be->planes->from_latents(ctx, &args));
    void *got = fenced_read(ctx, be, &y, "latents as a plane");
    for (int64_t i = 0; i < height * y_row; i++) {
        const int64_t at = i / y_row, p = i % y_row / channels, c = i % channels;
        if (p >= width) { /* untouched, bit for bit: random bits may be no number */
            const int64_t bytes = esa_view_element(dtype);
            assert_memory_equal((char *)got + i * bytes, (char *)y.host + i * bytes, bytes);
            continue;
        }
        /* two operations, each rounded to f32, as the CPU does them */
        const float *s = (const float *)scale.host, *b = (const float *)shift.host;
        volatile float scaled = ((const float *)latents.host)[c * channel + at * row + p] * s[c];
        volatile float want = scaled + b[c];
        if (dtype == BF16) want = esa_bf16_to_f32(esa_f32_to_bf16(want));
        if (value(got, i, dtype) != (double)want)
            fail_msg("latents: row %lld, pixel %lld, channel %lld is %.9g, expected %.9g",
                     (long long)at, (long long)p, (long long)c, value(got, i, dtype), (double)want);
    }
    free(got);
    fenced *all[] = { &latents, &scale, &shift, &y };
    for (int i = 0; i < 4; i++) fenced_free(ctx, be, all[i]);
}

static void latents(void **state)
{
    (void)state;
    check_latents(F32);
    check_latents(BF16);
}

/* The bits of the CPU's conversion, ties included. */
static void bytes(void **state)
{
    (void)state;
    float x[1031];
    for (int i = 0; i < 1031; i++)
        x[i] = i < 511 ? (float)i / 255.0f - 1 : random_value(i < 900 ? 1 : 3);
    x[1000] = INFINITY, x[1001] = -INFINITY, x[1002] = 1, x[1003] = -1;
    uint8_t junk[1031];
    memset(junk, 0xee, sizeof junk);
    const int32_t zero = 0;
    for (int nan = 0; nan < 2; nan++) {
        if (nan) x[77] = NAN;
        fenced from = fenced_new(ctx, be, x, sizeof x, 0),
               to = fenced_new(ctx, be, junk, sizeof junk, nan),
               wrong = fenced_new(ctx, be, &zero, 4, 0);
        const esa_plane_bytes_args args = { to.data, from.data, 1031, wrong.data };
        must(ctx, be->planes->to_bytes(ctx, &args));
        uint8_t *got = fenced_read(ctx, be, &to, "pixels as bytes");
        int32_t *flag = fenced_read(ctx, be, &wrong, "pixels as bytes");
        assert_int_equal(*flag, nan);
        for (int i = 0; i < 1031; i++) {
            const float h = x[i] * 0.5f + 0.5f;
            assert_int_equal(got[i], lrintf((h > 0 ? (h < 1 ? h : 1.0f) : 0.0f) * 255.0f));
        }
        free(got);
        free(flag);
        fenced_free(ctx, be, &from);
        fenced_free(ctx, be, &to);
        fenced_free(ctx, be, &wrong);
    }
}

static void zeros(void **state)
{
    (void)state;
    uint8_t junk[777];
    memset(junk, 0xee, sizeof junk);
    fenced g = fenced_new(ctx, be, junk, sizeof junk, 3);
    must(ctx, be->planes->zero(ctx, g.data, 777));
    uint8_t *got = fenced_read(ctx, be, &g, "zeros");
    for (int i = 0; i < 777; i++) assert_int_equal(got[i], 0);
    free(got);
    fenced_free(ctx, be, &g);
}

/* ---------------------------------------------------------------- times */

/* The layers of Wan's decoder. level: the plane is 2^level times the latents in both directions;
 * count: how often in a frame of that level. */
typedef struct layer {
    const char *name;
    int32_t kt, k, up2, cin, cout, level, count;
} layer;
static const layer layers[] = {
    { "conv_in", 3, 3, 0, 16, 384, 0, 1 },
    { "level 0, middle block", 3, 3, 0, 384, 384, 0, 10 },
    { "q, k, v", 1, 1, 0, 384, 1152, 0, 1 },
    { "projection", 1, 1, 0, 384, 384, 0, 1 },
    { "level 0, time", 3, 1, 0, 384, 384, 0, 2 },
    { "level 0, doubling", 1, 3, 1, 384, 192, 0, 2 },
    { "level 1, first", 3, 3, 0, 192, 384, 1, 1 },
    { "level 1", 3, 3, 0, 384, 384, 1, 5 },
    { "level 1, shortcut", 1, 1, 0, 192, 384, 1, 1 },
    { "level 1, time", 3, 1, 0, 384, 384, 1, 2 },
    { "level 1, doubling", 1, 3, 1, 384, 192, 1, 2 },
    { "level 2", 3, 3, 0, 192, 192, 2, 6 },
    { "level 2, doubling", 1, 3, 1, 192, 96, 2, 1 },
    { "level 3", 3, 3, 0, 96, 96, 3, 6 },
    { "conv_out", 3, 3, 0, 96, 3, 3, 1 },
};
/* Norms of a level: channels, and how often in a frame. */
static const struct {
    int32_t channels, level, count;
} norm_layers[] = { { 384, 0, 11 }, { 384, 1, 5 }, { 192, 1, 1 }, { 192, 2, 6 }, { 96, 3, 7 } };
static const int32_t frames_of[4] = { 21, 41, 81, 81 };

static esa_status run_conv(esa_ctx *c, const void *args) { return be->planes->conv(c, args); }
static esa_status run_norm(esa_ctx *c, const void *args) { return be->planes->pixel_norm(c, args); }

/* Room on the GPU with plausible contents: zeros would need less power than numbers. */
static void *room(int64_t count)
{
    void *data;
    uint16_t *x = random_bf16(&rng, count, 1);
    must(ctx, be->alloc(ctx, &data, 2 * count));
    must(ctx, be->upload(ctx, data, x, 2 * count));
    free(x);
    return data;
}

/* Seconds in a decode of 81 frames. */
static double time_layer(const layer *l, int64_t height, int64_t width)
{
    const int64_t h = height << l->level, w = width << l->level, border = l->k / 2,
                  up = l->up2 ? 2 : 1, x_row = (w + 2 * border) * l->cin;
    void *x = room((h + 2 * border) * x_row), *y = room(up * up * h * w * l->cout * 2),
         *weight = room((int64_t)2 * l->cout * l->cin * l->kt * l->k * l->k),
         *bias = room(2 * l->cout), *packed;
    esa_plane_conv_args a = { .kt = l->kt,
                              .kh = l->k,
                              .kw = l->k,
                              .cin = l->cin,
                              .cout = l->cout,
                              .up2 = l->up2,
                              .bias = bias,
                              .y = y,
                              .y_row = up * w * l->cout,
                              .x_row = x_row,
                              .height = h,
                              .width = w,
                              .residual = l->cin == l->cout && l->k == 3 ? y : NULL,
                              .residual_row = up * w * l->cout,
                              .dtype = BF16,
                              .y_dtype = l->cout == 3 ? F32 : BF16 };
    for (int32_t f = 0; f < l->kt; f++) a.x[f] = (uint16_t *)x + border * x_row + border * l->cin;
    const int64_t bytes_packed = be->planes->conv_bytes(ctx, &a);
    must(ctx, be->alloc(ctx, &packed, bytes_packed));
    must(ctx, be->planes->conv_pack(ctx, packed, &a, weight));
    a.packed = packed;
    const double ms = best_ms(ctx, be, 10, run_conv, &a),
                 flop = 2.0 * (double)(up * up * h * w) * l->cin * l->cout * l->kt *
                        (l->up2 ? 4 : l->k * l->k),
                 seconds = 1e-3 * ms * l->count * frames_of[l->level];
    printf("  %-24s %8.4f ms  %6.1f TFLOP/s  %6.3f s of a decode\n", l->name, ms, 1e-9 * flop / ms,
           seconds);
    void *all[] = { x, y, weight, bias, packed };
    for (int i = 0; i < 5; i++) be->release(ctx, all[i], 0);
    return seconds;
}

static double time_norm(int32_t channels, int32_t level, int32_t count, int64_t height,
                        int64_t width)
{
    const int64_t h = height << level, w = width << level, row = (w + 2) * channels;
    void *x = room(h * w * channels), *y = room((h + 2) * row), *gamma = room(2 * channels);
    const esa_plane_norm_args a = { (uint16_t *)y + row + channels,
                                    row,
                                    x,
                                    w * channels,
                                    h,
                                    w,
                                    channels,
                                    gamma,
                                    ESA_ACT_SILU,
                                    BF16 };
    const double ms = best_ms(ctx, be, 10, run_norm, &a),
                 seconds = 1e-3 * ms * count * frames_of[level];
    printf("  norm of %3d, level %d       %8.4f ms  %6.2f TB/s      %6.3f s of a decode\n",
           (int)channels, (int)level, ms, 4e-9 * (double)(h * w * channels) / ms, seconds);
    void *all[] = { x, y, gamma };
    for (int i = 0; i < 3; i++) be->release(ctx, all[i], 0);
    return seconds;
}

static void times_at(const char *name, int64_t height, int64_t width)
{
    double convs = 0, rest = 0;
    printf("%s\n", name);
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++)
        convs += time_layer(&layers[i], height, width);
    for (size_t i = 0; i < sizeof norm_layers / sizeof *norm_layers; i++)
        rest += time_norm(norm_layers[i].channels, norm_layers[i].level, norm_layers[i].count,
                          height, width);
    printf("%s, 81 frames: convolutions %.3f s, norms %.3f s\n", name, convs, rest);
}

static void times(void **state)
{
    (void)state;
    if (!getenv("ESA_TEST_TIMES") || on_stand_in()) return;
    times_at("480p", 60, 104);
    times_at("720p", 90, 160);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        CASES(convolutions),     CASES(large_planes),       cmocka_unit_test(refused_kernels),
        cmocka_unit_test(norms), cmocka_unit_test(latents), cmocka_unit_test(bytes),
        cmocka_unit_test(zeros), cmocka_unit_test(times),
    };
    return RUN_CASES(tests, engine_begin, engine_end);
}
