/* test_gpu_products.c - matrix products on the GPU (base/nn_args.h) against double precision: every
 * combination of types, bias and activation, awkward sizes, true layers, and the same bits with and
 * without preparing.
 * SPDX-License-Identifier: Apache-2.0
 *
 * ESA_TEST_TIMES=1 also prints the speed of the layers of Wan. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/case_run.h"
#include "backend/backend.h"
#include "base/half.h"
#include "base/rng.h"
#include "common/naive.h"
#include "gpu_engine.h"

enum { F32 = ESA_DTYPE_F32, BF16 = ESA_DTYPE_BF16, F8 = ESA_DTYPE_F8 };

static void *ws;

/* 1: on the stand-in and under sanitizers. */
static int is_small(void) { return on_stand_in() || getenv("ESA_TEST_SMALL"); }

static int begin(void **state)
{
    if (engine_begin(state)) return -1;
    return be->alloc(ctx, &ws, be->products->workspace(ctx)) ? -1 : 0;
}

static int end(void **state)
{
    be->release(ctx, ws, be->products->workspace(ctx));
    return engine_end(state);
}

/* ---------------------------------------------------------------- a matrix on both sides */

/* The rows repeat: row r of the GPU's matrix is row r % period of the host's. So large matrices
 * need little memory and time here. Elements between the rows and around the matrix are guards. */
typedef struct matrix {
    esa_view view;
    void *block; /* on the GPU */
    int64_t bytes, start, period;
    uint8_t *host; /* [period][ld], as on the GPU */
    float *scale;  /* F8: [period] */
} matrix;

enum { GUARD = 64, PERIOD = 509 }; /* elements; rows */

static double stored(const matrix *m, const uint8_t *at)
{
    float wide;
    uint16_t half;
    if (m->view.dtype == F8) return esa_f8_to_f32(*at);
    if (m->view.dtype == BF16) {
        memcpy(&half, at, 2);
        return esa_bf16_to_f32(half);
    }
    memcpy(&wide, at, 4);
    return wide;
}

/* The value as products see it. */
static double value(const matrix *m, int64_t r, int64_t c)
{
    const int64_t row = r % m->period;
    const double x = stored(m, m->host + (row * m->view.ld + c) * esa_view_element(m->view.dtype));
    return m->scale ? x * (double)m->scale[row] : x;
}

static void random_element(uint8_t *at, int32_t dtype)
{
    const float x = 4 * esa_rng_unit(&rng) - 2;
    const uint16_t half = esa_f32_to_bf16(x);
    if (dtype == F32) memcpy(at, &x, 4);
    if (dtype == BF16) memcpy(at, &half, 2);
    if (dtype == F8) *at = (uint8_t)(esa_rng_below(&rng, 0x7f) | esa_rng_below(&rng, 2) << 7);
}

/* Writes the host's rows to the GPU again. */
static void matrix_send(const matrix *m)
{
    const int64_t row = m->view.ld * esa_view_element(m->view.dtype);
    for (int64_t r = 0; r < m->view.rows; r += m->period) {
        const int64_t n = esa_min64(m->period, m->view.rows - r);
        must(ctx, be->upload(ctx, (char *)m->view.data + r * row, m->host, n * row));
        if (m->scale) must(ctx, be->upload(ctx, m->view.scale + r, m->scale, n * 4));
    }
}

/* shift: elements by which the matrix is off the alignment of its block. */
static matrix matrix_new(int32_t dtype, int64_t rows, int64_t cols, int64_t pad, int64_t shift)
{
    matrix m = { .period = esa_min64(rows, PERIOD) };
    const int64_t element = esa_view_element(dtype), ld = cols + pad;
    m.view = esa_view_of(NULL, dtype, ESA_DEVICE_CUDA, rows, cols);
    m.view.ld = ld;
    m.start = (GUARD + shift) * element;
    m.bytes = m.start + (rows * ld + GUARD) * element;
    m.host = malloc((size_t)(m.period * ld * element));
    for (int64_t i = 0; i < m.period * ld; i++) random_element(m.host + i * element, dtype);
    must(ctx, be->alloc(ctx, &m.block, m.bytes));
    m.view.data = (char *)m.block + m.start;
    if (dtype == F8) {
        m.scale = malloc((size_t)m.period * 4);
        for (int64_t i = 0; i < m.period; i++) m.scale[i] = 0.001f + 0.01f * esa_rng_unit(&rng);
        must(ctx, be->alloc(ctx, (void **)&m.view.scale, rows * 4));
    }
    matrix_send(&m);
    return m;
}

static void matrix_free(matrix *m)
{
    be->release(ctx, m->block, m->bytes);
    if (m->view.scale) be->release(ctx, m->view.scale, m->view.rows * 4);
    free(m->host);
    free(m->scale);
}

/* ---------------------------------------------------------------- one product */

typedef struct product_case {
    int64_t rows, in, out;
    int32_t x, w, y; /* types */
    int32_t bias, act, fast;
    int64_t pad, y_pad; /* elements between rows of x and y */
    int64_t shift;      /* of all three */
    int32_t add;
} product_case;

typedef struct operands {
    matrix x, w, y, bias;
    esa_product_args args;
} operands;

static operands operands_new(const product_case *c)
{
    operands o;
    o.x = matrix_new(c->x, c->rows, c->in, c->pad, c->shift);
    o.w = matrix_new(c->w, c->out, c->in, 0, c->shift);
    o.y = matrix_new(c->y, c->rows, c->out, c->y_pad, c->shift);
    o.bias = matrix_new(c->w == F32 ? F32 : BF16, 1, c->out, 0, 0);
    o.args = (esa_product_args){ .y = o.y.view,
                                 .x = o.x.view,
                                 .w = o.w.view,
                                 .bias = c->bias ? o.bias.view.data : NULL,
                                 .act = c->act,
                                 .fast = c->fast,
                                 .add = c->add };
    return o;
}

static void operands_free(operands *o)
{
    matrix_free(&o->x);
    matrix_free(&o->w);
    matrix_free(&o->y);
    matrix_free(&o->bias);
}

static double activated(double x, int32_t act)
{
    if (act == ESA_ACT_SILU) return x / (1 + exp(-x));
    if (act == ESA_ACT_GELU_TANH)
        return 0.5 * x * (1 + tanh(0.79788456080286536 * (x + 0.044715 * x * x * x)));
    return x;
}

/* Sums: in f32, in an order we do not know: errors of 2^-24 of the partial sums add up like a
 * random walk over in steps. Tensor cores of Hopper add products of F8 with 14 bits before they
 * round to f32, so F8 gets 2^-13 of all magnitudes; if `fast` allows it the partial sums stay at 14
 * bits, and that grows with their number. BF16 has 8 significant bits, so rounding to it changes a
 * result by at most 2^-8 of it; where the library adds no bias, the sum is rounded before the bias
 * is added, which is the same for the sum. Its GELU uses the tanh of the hardware, which is right
 * to 2^-11. */
static double allowed(const product_case *c, double y, double before, double bias, double size)
{
    const double steps = c->w != F8 ? 4e-7 * sqrt((double)c->in)
                         : c->fast  ? 0x1p-13 * sqrt((double)c->in / 32 + 1)
                                    : 0x1p-13;
    const double rounded = c->y == BF16 ? 0x1p-8 * 1.02 * (fabs(y) + fabs(before) + fabs(bias))
                                        : 1e-6 * (fabs(y) + fabs(before));
    const double act = c->act == ESA_ACT_NONE ? 0 : 0x1p-10 * fabs(before);
    return 1.2 * steps * size + rounded + act + 1e-6;
}

static void describe(char *text, size_t bytes, const product_case *c)
{
    snprintf(text, bytes,
             "%lld rows, %lld to %lld, types %d %d %d, bias %d, act %d, fast %d, add %d, pad %lld, "
             "shift %lld",
             (long long)c->rows, (long long)c->in, (long long)c->out, c->x, c->w, c->y, c->bias,
             c->act, c->fast, c->add, (long long)c->pad, (long long)c->shift);
}

static void check_element(const product_case *c, const operands *o, int64_t r, int64_t col,
                          double got)
{
    double sum = 0, size = 0;
    for (int64_t k = 0; k < c->in; k++) {
        const double p = value(&o->x, r, k) * value(&o->w, col, k);
        sum += p;
        size += fabs(p);
    }
    const double bias = c->bias ? value(&o->bias, 0, col) : 0, before = sum + bias,
                 y = activated(before, c->act) + (c->add ? value(&o->y, r, col) : 0);
    if (fabs(got - y) <= allowed(c, y, before, bias, size)) return;
    char text[200];
    describe(text, sizeof text, c);
    fail_msg("%s: (%lld, %lld) is %.9g, expected %.9g +- %.3g", text, (long long)r, (long long)col,
             got, y, allowed(c, y, before, bias, size));
}

static uint8_t *download_y(const operands *o)
{
    uint8_t *got = malloc((size_t)o->y.bytes);
    must(ctx, be->download(ctx, got, o->y.block, o->y.bytes));
    return got;
}

/* Every element, and what lies around them. */
static void check_all(const product_case *c)
{
    operands o = operands_new(c);
    const esa_view *y = &o.y.view;
    const int64_t element = esa_view_element(y->dtype), first = o.y.start / element;
    uint8_t *before = download_y(&o);
    must(ctx, be->products->product(ctx, &o.args, ws));
    uint8_t *got = download_y(&o);
    for (int64_t i = 0; i < o.y.bytes / element; i++) {
        const int64_t at = i - first, r = at < 0 ? -1 : at / y->ld, col = at < 0 ? 0 : at % y->ld;
        if (r >= 0 && r < y->rows && col < y->cols)
            check_element(c, &o, r, col, stored(&o.y, got + i * element));
        else if (memcmp(got + i * element, before + i * element, (size_t)element)) {
            char text[200];
            describe(text, sizeof text, c);
            fail_msg("%s: element %lld outside y changed", text, (long long)at);
        }
    }
    free(before);
    free(got);
    operands_free(&o);
}

/* Rows taken at random, and the last one; some columns of each. */
static void check_some(const product_case *c)
{
    operands o = operands_new(c);
    const esa_view *y = &o.y.view;
    const int64_t element = esa_view_element(y->dtype);
    uint8_t *row = malloc((size_t)(y->cols * element));
    must(ctx, be->products->prepare(ctx, &o.args));
    matrix_send(&o.x); /* preparing loses it */
    matrix_send(&o.y);
    must(ctx, be->products->product(ctx, &o.args, ws));
    for (int i = 0; i < 40; i++) {
        const int64_t r = i ? esa_rng_below(&rng, (uint32_t)c->rows) : c->rows - 1;
        must(ctx, be->download(ctx, row, (char *)y->data + r * y->ld * element, y->cols * element));
        for (int n = 0; n < 16; n++) {
            const int64_t col = n ? esa_rng_below(&rng, (uint32_t)c->out) : c->out - 1;
            check_element(c, &o, r, col, stored(&o.y, row + col * element));
        }
    }
    free(row);
    operands_free(&o);
}

/* ---------------------------------------------------------------- cases */

/* The types that products take, and sizes down to 1 that no vector divides. */
static void small_products(void **state)
{
    static const int64_t rows[] = { 1, 2, 3, 21, 64, 130 },
                         in[] = { 8, 12, 16, 24, 33, 64, 240, 1000 },
                         out[] = { 1, 6, 17, 24, 64, 96 };
    static const int32_t type[][3] = { { BF16, BF16, BF16 },
                                       { BF16, BF16, F32 },
                                       { F32, F32, F32 },
                                       { F8, F8, BF16 },
                                       { F8, F8, F32 } };
    (void)state;
    int n = 0;
    for (int t = 0; t < 5; t++)
        for (int i = 0; i < 8; i++)
            for (int r = 0; r < 6; r++, n++) {
                const product_case c = { .rows = rows[r],
                                         .in = in[i],
                                         .out = out[(i + r + t) % 6],
                                         .x = type[t][0],
                                         .w = type[t][1],
                                         .y = type[t][2],
                                         .bias = (n + t) % 3 > 0,
                                         .act = (n / 2 + i) % 3,
                                         .fast = n % 2,
                                         .pad = n % 4 == 0   ? 0
                                                : n % 4 == 3 ? 3
                                                             : 8,
                                         .y_pad = n % 3 ? 5 * (n % 3) : 0,
                                         .shift = n % 5 == 4 };
                check_all(&c);
            }
}

/* Products that are added to y. Where the library does not take the types together, the sum without
 * the bias is rounded too, which `allowed` counts. */
static void sums(void **state)
{
    static const int32_t type[][3] = {
        { BF16, BF16, BF16 }, { BF16, BF16, F32 }, { F32, F32, F32 }, { F8, F8, BF16 }
    };
    (void)state;
    for (int t = 0; t < 4; t++)
        for (int n = 0; n < 8; n++) {
            const product_case c = { .rows = n % 2 ? 130 : 2 + n,
                                     .in = n % 3 ? 64 : 33,
                                     .out = n % 4 ? 96 : 17,
                                     .x = type[t][0],
                                     .w = type[t][1],
                                     .y = type[t][2],
                                     .bias = n / 2 % 2,
                                     .pad = n % 4 == 3 ? 3 : 0,
                                     .y_pad = n % 3 ? 5 : 0,
                                     .add = 1 };
            check_all(&c);
        }
    const int64_t rows = is_small() ? 130 : 32760, width = is_small() ? 64 : 1536;
    const product_case layer = { .rows = rows,
                                 .in = width,
                                 .out = width,
                                 .x = BF16,
                                 .w = BF16,
                                 .y = BF16,
                                 .bias = 1,
                                 .add = 1 };
    check_some(&layer);
}

/* What cannot be added is refused. */
static void no_sums(void **state)
{
    (void)state;
    for (int n = 0; n < 2; n++) {
        const product_case c = { .rows = n ? 4 : 1,
                                 .in = 16,
                                 .out = 16,
                                 .x = BF16,
                                 .w = BF16,
                                 .y = BF16,
                                 .act = n ? ESA_ACT_SILU : ESA_ACT_NONE,
                                 .add = 1 };
        operands o = operands_new(&c);
        refused(ctx, be->products->product(ctx, &o.args, ws), ESA_ERR_UNSUPPORTED,
                "cannot be added");
        operands_free(&o);
    }
}

/* One row of f32 with weights in BF16, as the embedding of the timestep has it. */
static void one_row(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) {
        const product_case c = { .rows = 1,
                                 .in = i % 2 ? 256 : 77,
                                 .out = i < 3 ? 1536 : 5,
                                 .x = F32,
                                 .w = i < 4 ? BF16 : F32,
                                 .y = i == 2 ? BF16 : F32,
                                 .bias = 1,
                                 .act = i % 3 };
        check_all(&c);
    }
}

static const struct {
    const char *name;
    int64_t rows, in, out;
    int32_t y, act;
} layer[] = {
#define PRODUCT_CASE(...) { __VA_ARGS__ },
#include "cases/engine.def"
};

/* Slow machines get narrower layers. */
static void layers(void **state)
{
    (void)state;
    const int small = is_small();
    for (size_t i = 0; i < sizeof layer / sizeof layer[0]; i++) {
        if (!case_begin(layer[i].name, 1)) continue;
        rng = (esa_rng){ test_seed() + i };
        for (int n = 0; n < 3; n++) {
            const int32_t type = n ? F8 : BF16;
            /* offsets beyond 32 bits are a matter of the GPU */
            const int64_t rows = layer[i].rows;
            const product_case c = { .rows = on_stand_in() && rows > 512 ? rows / 32 + 3 : rows,
                                     .in = small ? layer[i].in / 256 * 4 + 16 : layer[i].in,
                                     .out = small ? layer[i].out / 512 + 5 : layer[i].out,
                                     .x = type,
                                     .w = type,
                                     .y = layer[i].y,
                                     .bias = 1,
                                     .act = layer[i].act,
                                     .fast = n == 2 };
            check_some(&c);
        }
        case_end(0);
    }
    cases_done("product/");
}

/* q, k and v as columns of one matrix. */
static void columns(void **state)
{
    (void)state;
    const product_case c = { .rows = 130, .in = 96, .out = 96, .x = BF16, .w = BF16, .y = BF16 };
    operands o = operands_new(&c);
    matrix all = matrix_new(BF16, c.rows, 3 * c.out, 0, 0);
    const int64_t bytes = c.rows * 3 * c.out * 2;
    uint16_t *joined = malloc((size_t)bytes), *single = malloc((size_t)bytes / 3);
    must(ctx, be->products->product(ctx, &o.args, ws));
    must(ctx, be->download(ctx, single, o.y.view.data, bytes / 3));
    for (int i = 0; i < 3; i++) {
        o.args.y = esa_view_cols(all.view, i * c.out, c.out);
        must(ctx, be->products->product(ctx, &o.args, ws));
    }
    must(ctx, be->download(ctx, joined, all.view.data, bytes));
    for (int64_t r = 0; r < c.rows; r++)
        for (int i = 0; i < 3; i++)
            assert_memory_equal(joined + (3 * r + i) * c.out, single + r * c.out,
                                (size_t)c.out * 2);
    free(joined);
    free(single);
    matrix_free(&all);
    operands_free(&o);
}

/* ---------------------------------------------------------------- bits */

static uint8_t *run(const operands *o, const char *what, const uint8_t *expected)
{
    must(ctx, be->products->product(ctx, &o->args, ws));
    uint8_t *got = download_y(o);
    if (expected && memcmp(got, expected, (size_t)o->y.bytes)) fail_msg("%s: other bits", what);
    return got;
}

/* The same bits again, after preparing, and when the table of plans has forgotten the shape. */
static void same_bits(void **state)
{
    static const int32_t type[] = { BF16, F8, F32 };
    (void)state;
    const int small = is_small();
    for (int t = 0; t < 3; t++) {
        const product_case c = { .rows = small ? 65 : 8190,
                                 .in = small ? 48 : 1536,
                                 .out = small ? 40 : 1536,
                                 .x = type[t],
                                 .w = type[t],
                                 .y = type[t] == F32 ? F32 : BF16,
                                 .bias = 1,
                                 .act = type[t] == BF16 ? ESA_ACT_GELU_TANH : ESA_ACT_NONE };
        operands o = operands_new(&c);
        uint8_t *first = run(&o, "", NULL);
        free(run(&o, "again", first));
        must(ctx, be->products->prepare(ctx, &o.args));
        matrix_send(&o.x);
        free(run(&o, "after preparing", first));
        must(ctx, be->products->prepare(ctx, &o.args)); /* costs nothing, or spoils x again */
        matrix_send(&o.x);
        esa_product_args other = o.args;
        for (int64_t i = 0; i < 140; i++) {
            other.x = esa_view_rows(o.x.view, 0, 2 + i % 60);
            other.x.cols = other.w.cols = 16 + 16 * (i / 60);
            other.y.rows = other.x.rows;
            must(ctx, be->products->product(ctx, &other, ws));
        }
        free(run(&o, "after many others", first));
        free(first);
        operands_free(&o);
    }
}

/* Nothing to do is no failure, and a workspace is not needed from the caller. */
static void no_rows(void **state)
{
    (void)state;
    const product_case c = { .rows = 8, .in = 16, .out = 16, .x = BF16, .w = BF16, .y = BF16 };
    operands o = operands_new(&c);
    uint8_t *before = download_y(&o);
    esa_product_args none = o.args;
    none.x.rows = none.y.rows = 0;
    must(ctx, be->products->prepare(ctx, &none));
    must(ctx, be->products->product(ctx, &none, ws));
    uint8_t *after = download_y(&o);
    assert_memory_equal(before, after, (size_t)o.y.bytes);
    free(after);
    must(ctx, be->products->product(ctx, &o.args, NULL));
    after = download_y(&o);
    for (int64_t i = 0; i < 16; i++)
        check_element(&c, &o, 7, i, stored(&o.y, after + o.y.start + (7 * 16 + i) * 2));
    free(before);
    free(after);
    operands_free(&o);
}

static void library(void **state)
{
    (void)state;
    const char *name = NULL;
    char text[1200];
    must(ctx, be->products->library(ctx, &name));
    assert_non_null(name);
    must(ctx, esa_device_library(ctx, text, (int32_t)sizeof text));
    assert_string_equal(text, name);
    printf("library %s\n", name);
    if (!on_stand_in()) return;
    setenv("ESA_STAND_IN_BLAS", "missing", 1);
    refused(ctx, be->products->library(ctx, &name), ESA_ERR_DEVICE, "pip install nvidia-cublas");
    assert_null(name);
    refused(ctx, esa_device_library(ctx, text, 1), ESA_ERR_DEVICE, "ESA_CUBLAS_LIB");
    assert_string_equal(text, "");
    unsetenv("ESA_STAND_IN_BLAS");
}

/* ---------------------------------------------------------------- times */

/* Prints the best of 10 runs, and what preparing took. kind 3: rows of F8 at the places of BF16, as
 * the engine has them. */
static void time_layer(const char *name, int64_t rows, int64_t in, int64_t out, int32_t type,
                       int32_t act, int32_t kind)
{
    static const char *const kinds[] = { "bf16", "fp8", "fp8 fast", "fp8 apart" };
    const product_case c = { .rows = rows,
                             .in = in,
                             .out = out,
                             .x = type,
                             .w = type,
                             .y = BF16,
                             .bias = 1,
                             .act = act,
                             .fast = kind == 2,
                             .pad = kind == 3 ? in : 0 };
    operands o = operands_new(&c);
    double best = 1e9, seconds, prepared;
    esa_mark from = { 0 }, to = { 0 };
    must(ctx, be->products->library(ctx, &(const char *){ NULL }));
    must(ctx, be->mark_record(ctx, &from));
    must(ctx, be->products->prepare(ctx, &o.args));
    must(ctx, be->mark_record(ctx, &to));
    must(ctx, be->mark_elapsed(ctx, &prepared, &from, &to));
    matrix_send(&o.x);
    for (int i = 0; i < 10; i++) {
        must(ctx, be->mark_record(ctx, &from));
        must(ctx, be->products->product(ctx, &o.args, ws));
        must(ctx, be->mark_record(ctx, &to));
        must(ctx, be->mark_elapsed(ctx, &seconds, &from, &to));
        best = seconds < best ? seconds : best;
    }
    be->mark_release(ctx, &from);
    be->mark_release(ctx, &to);
    printf("%-12s %6lld x %5lld x %5lld  %-10s %8.3f ms  %5.0f TFLOP/s  (prepared in %.0f ms)\n",
           name, (long long)rows, (long long)in, (long long)out, kinds[kind], 1e3 * best,
           2e-12 * (double)rows * (double)in * (double)out / best, 1e3 * prepared);
    operands_free(&o);
}

static void times(void **state)
{
    static const int64_t rows[] = { 32760, 75600 },
                         width[][2] = { { 1536, 8960 }, { 5120, 13824 } };
    (void)state;
    if (!getenv("ESA_TEST_TIMES")) return;
    for (int w = 0; w < 2; w++)
        for (int n = 0; n < 2; n++)
            for (int32_t kind = 0; kind < 4; kind++) {
                const int64_t N = rows[n], d = width[w][0], ffn = width[w][1];
                const int32_t type = kind ? F8 : BF16,
                              act = kind ? ESA_ACT_NONE : ESA_ACT_GELU_TANH;
                time_layer("q, k, v", N, d, 3 * d, type, ESA_ACT_NONE, kind);
                time_layer("out", N, d, d, type, ESA_ACT_NONE, kind);
                time_layer(kind ? "up" : "up, GELU", N, d, ffn, type, act, kind);
                time_layer("down", N, ffn, d, type, ESA_ACT_NONE, kind);
            }
    time_layer("text", 512, 4096, 10240, BF16, ESA_ACT_NONE, 0);
    time_layer("text", 512, 10240, 4096, BF16, ESA_ACT_NONE, 0);
    time_layer("time", 1, 5120, 30720, BF16, ESA_ACT_NONE, 0);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(library),
        cmocka_unit_test(small_products),
        cmocka_unit_test(one_row),
        cmocka_unit_test(sums),
        cmocka_unit_test(no_sums),
        cmocka_unit_test(columns),
        CASES(layers),
        cmocka_unit_test(same_bits),
        cmocka_unit_test(no_rows),
        cmocka_unit_test(times),
    };
    return RUN_CASES(tests, begin, end);
}
