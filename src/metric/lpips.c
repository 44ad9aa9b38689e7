/* lpips.c - runs both pictures through the network side by side, and compares their feature maps at
 * each tap.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Planes are channels-last with a border of zeros, so that a convolution writes directly into what
 * the next one reads. Two planes per picture are in use: input and output. */
#include "metric/lpips.h"

#include <math.h>
#include <string.h>

#define PIECE 1 /* rows of a plane per task */

/* A plane of [height][width][channels] with a border of zeros around it. */
typedef struct plane {
    float *base;
    int64_t height, width, channels, border;
} plane;

static int64_t row_of(const plane *p) { return (p->width + 2 * p->border) * p->channels; }
static float *pixel_of(const plane *p, int64_t y, int64_t x)
{
    return p->base + (y + p->border) * row_of(p) + (x + p->border) * p->channels;
}
static int64_t floats_of(const plane *p) { return (p->height + 2 * p->border) * row_of(p); }

static void clear_border(const plane *p)
{
    const int64_t row = row_of(p), side = p->border * p->channels;
    const size_t bytes = (size_t)(p->border * row) * sizeof(float);
    if (!p->border) return;
    memset(p->base, 0, bytes);
    memset(p->base + (p->height + p->border) * row, 0, bytes);
    for (int64_t y = 0; y < p->height; y++) {
        float *at = p->base + (y + p->border) * row;
        memset(at, 0, (size_t)side * sizeof(float));
        memset(at + row - side, 0, (size_t)side * sizeof(float));
    }
}

/* ---------------------------------------------------------------- pictures into planes */

typedef struct input {
    const plane *to;
    const uint8_t *rgb;
    int64_t height, width;
    int32_t cells;
} input;

/* lpips' scaling layer on x / 127.5 - 1, in its order of f32 roundings. */
static float scaled(uint8_t value, int channel)
{
    static const float shift[3] = { -.030f, -.088f, -.188f }, scale[3] = { .458f, .448f, .450f };
    return ((float)value / 127.5f - 1.0f - shift[channel]) / scale[channel];
}

/* Fills rows of pixels, or of cells of 4 x 4 pixels. The first cell begins two pixels outside the
 * picture: the border of the convolution. */
static void put_rows(void *arg, int64_t first, int64_t count, int32_t worker)
{
    const input *in = arg;
    (void)worker;
    for (int64_t y = first; y < first + count; y++) {
        float *to = pixel_of(in->to, y, 0);
        for (int64_t x = 0; x < in->to->width; x++)
            for (int64_t i = 0; i < in->to->channels; i++) {
                const int64_t r = in->cells ? 4 * y - 2 + i / 12 : y,
                              q = in->cells ? 4 * x - 2 + i / 3 % 4 : x;
                const int inside = r >= 0 && r < in->height && q >= 0 && q < in->width;
                *to++ = inside ? scaled(in->rgb[(r * in->width + q) * 3 + i % 3], (int)(i % 3)) : 0;
            }
    }
}

/* ---------------------------------------------------------------- between the convolutions */

static void relu_rows(void *arg, int64_t first, int64_t count, int32_t worker)
{
    const plane *p = arg;
    (void)worker;
    for (int64_t y = first; y < first + count; y++) {
        float *x = pixel_of(p, y, 0);
        for (int64_t i = 0; i < p->width * p->channels; i++) x[i] = x[i] > 0 ? x[i] : 0;
    }
}

typedef struct pooling {
    const plane *to, *from;
    int64_t window;
} pooling;

static void pool_rows(void *arg, int64_t first, int64_t count, int32_t worker)
{
    const pooling *p = arg;
    const int64_t channels = p->to->channels;
    (void)worker;
    for (int64_t y = first; y < first + count; y++)
        for (int64_t x = 0; x < p->to->width; x++) {
            float *to = pixel_of(p->to, y, x);
            memcpy(to, pixel_of(p->from, 2 * y, 2 * x), (size_t)channels * sizeof *to);
            for (int64_t k = 1; k < p->window * p->window; k++) {
                const float *from = pixel_of(p->from, 2 * y + k / p->window, 2 * x + k % p->window);
                for (int64_t c = 0; c < channels; c++) to[c] = from[c] > to[c] ? from[c] : to[c];
            }
        }
}

/* ---------------------------------------------------------------- distances */

typedef struct distance {
    const plane *a, *b;
    const float *lin;
    double *row;
} distance;

static float unit(const float *f, int64_t channels)
{
    double sum = 0;
    for (int64_t c = 0; c < channels; c++) sum += (double)f[c] * f[c];
    return 1.0f / ((float)sqrt(sum) + 1e-10f);
}

static void distance_rows(void *arg, int64_t first, int64_t count, int32_t worker)
{
    const distance *d = arg;
    const int64_t channels = d->a->channels;
    (void)worker;
    for (int64_t y = first; y < first + count; y++) {
        double sum = 0;
        for (int64_t x = 0; x < d->a->width; x++) {
            const float *f = pixel_of(d->a, y, x), *g = pixel_of(d->b, y, x);
            const float p = unit(f, channels), q = unit(g, channels);
            for (int64_t c = 0; c < channels; c++) {
                const float e = f[c] * p - g[c] * q;
                sum += (double)(d->lin[c] * (e * e));
            }
        }
        d->row[y] = sum;
    }
}

static double tap(esa_lpips *l, const plane *a, const plane *b, const float *lin, double *row)
{
    distance d = { a, b, lin, row };
    double sum = 0;
    esa_nn_parallel(&l->nn, distance_rows, &d, a->height, PIECE);
    /* in the order of the rows: the same bits on any number of threads */
    for (int64_t y = 0; y < a->height; y++) sum += row[y];
    return sum / (double)(a->height * a->width);
}

/* ---------------------------------------------------------------- the network */

/* Sizes of every plane: the input of convolution i (pooled where it pools) and its output, whose
 * border is what its reader needs. */
typedef struct sizes {
    plane in[ESA_LPIPS_CONVS], out[ESA_LPIPS_CONVS];
    int64_t most;
} sizes;

static void measure(sizes *s, const esa_lpips_net_kind *kind, int64_t height, int64_t width)
{
    s->most = 0;
    for (int32_t i = 0; i < kind->convs; i++) {
        const esa_lpips_layer *layer = &kind->layer[i];
        plane in = { NULL, height, width, layer->in, layer->kernel / 2 }, out;
        /* cells; the outer ring of them is border only for the convolution over cells */
        if (i == 0 && kind->stride4) {
            height = (height + 4 - 11) / 4 + 1;
            width = (width + 4 - 11) / 4 + 1;
            in = (plane){ NULL, height + 2, width + 2, 48, 0 };
        } else if (layer->pool) {
            height = (height - layer->pool) / 2 + 1;
            width = (width - layer->pool) / 2 + 1;
            in = (plane){ NULL, height, width, layer->in, layer->kernel / 2 };
        }
        /* What is pooled next is read without a border. */
        const int last = i + 1 == kind->convs;
        out = (plane){ NULL, height, width, layer->out,
                       last || kind->layer[i + 1].pool ? 0 : kind->layer[i + 1].kernel / 2 };
        s->in[i] = in;
        s->out[i] = out;
        s->most = esa_max64(s->most, esa_max64(floats_of(&in), floats_of(&out)));
    }
}

static esa_status forward_one(esa_lpips *l, const plane *out, const plane *in, int32_t i)
{
    const int cells = i == 0 && l->kind->stride4;
    const float *x[1] = { cells ? pixel_of(in, 1, 1) : pixel_of(in, 0, 0) };
    ESA_TRY(esa_nn_conv(&l->nn, &l->conv[i], pixel_of(out, 0, 0), row_of(out), x, row_of(in),
                        out->height, out->width, NULL, 0));
    plane p = *out;
    esa_nn_parallel(&l->nn, relu_rows, &p, p.height, PIECE);
    clear_border(out);
    return ESA_OK;
}

esa_status esa_lpips_distance(esa_lpips *l, double *result, const uint8_t *a, const uint8_t *b,
                              int64_t height, int64_t width)
{
    sizes s;
    measure(&s, l->kind, height, width);
    const int64_t bytes = 4 * s.most * (int64_t)sizeof(float) + height * (int64_t)sizeof(double);
    if (bytes > l->plane_bytes) {
        esa_nn_free(&l->nn, l->plane, l->plane_bytes);
        l->plane_bytes = 0;
        ESA_TRY(esa_nn_alloc(&l->nn, (void **)&l->plane, bytes, "the feature maps of LPIPS"));
        l->plane_bytes = bytes;
    }
    double *row = (double *)(void *)l->plane;
    float *const base = (float *)(void *)(row + height);
    const uint8_t *const rgb[2] = { a, b };
    int32_t now = 0, taps = 0; /* which of a picture's two planes holds what was computed last */
    double sum = 0;
    for (int32_t i = 0; i < l->kind->convs; i++) {
        plane in = s.in[i], out[2] = { s.out[i], s.out[i] };
        for (int32_t side = 0; side < 2; side++) {
            float *const half[2] = { base + 2 * side * s.most, base + (2 * side + 1) * s.most };
            int32_t at = now;
            if (i == 0) {
                in.base = half[0];
                input job = { &in, rgb[side], height, width, l->kind->stride4 };
                esa_nn_parallel(&l->nn, put_rows, &job, in.height, PIECE);
                clear_border(&in);
                at = 0;
            } else if (l->kind->layer[i].pool) {
                plane from = s.out[i - 1];
                from.base = half[now];
                at = !now;
                in.base = half[at];
                pooling job = { &in, &from, l->kind->layer[i].pool };
                esa_nn_parallel(&l->nn, pool_rows, &job, in.height, PIECE);
                clear_border(&in);
            } else
                in.base = half[now];
            out[side].base = half[!at];
            ESA_TRY(forward_one(l, &out[side], &in, i));
            if (side == 1) now = !at;
        }
        if (l->kind->layer[i].tap) sum += tap(l, &out[0], &out[1], l->lin[taps++], row);
    }
    *result = sum;
    return ESA_OK;
}
