/* test_gpu_rows.c - the operations of networks on rows (base/nn_args.h) against double precision:
 * norms with gate, residual and modulation, RMS norm with rotation, activations, and F8.
 * SPDX-License-Identifier: Apache-2.0
 *
 * ESA_TEST_TIMES=1 prints the time and the bandwidth at the sizes of Wan instead. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/tests.h"
#include "backend/backend.h"
#include "base/half.h"
#include "base/rng.h"
#include "common/naive.h"
#include "gpu_engine.h"

enum { F32 = ESA_DTYPE_F32, BF16 = ESA_DTYPE_BF16, F8 = ESA_DTYPE_F8 };

/* ---------------------------------------------------------------- a matrix on both sides */

/* A view on the GPU with guard elements around it, and its values on the host. */
typedef struct matrix {
    esa_view view;
    void *block;          /* on the GPU */
    uint8_t *host;        /* what was uploaded */
    int64_t bytes, start; /* of the block; where the view begins */
    double *value;        /* [rows][cols] as the GPU reads them */
} matrix;

enum { GUARD = 64 }; /* elements */

static float random_value(void) { return 4 * esa_rng_unit(&rng) - 2; }

static double element_at(const matrix *m, const uint8_t *bytes, int64_t r, int64_t c)
{
    const uint8_t *at = bytes + m->start + (r * m->view.ld + c) * esa_view_element(m->view.dtype);
    float wide;
    uint16_t half;
    if (m->view.dtype == F32) {
        memcpy(&wide, at, 4);
        return wide;
    }
    if (m->view.dtype == BF16) {
        memcpy(&half, at, 2);
        return esa_bf16_to_f32(half);
    }
    const int sign = *at & 0x80 ? -1 : 1, exponent = (*at >> 3) & 15, mantissa = *at & 7;
    if (exponent == 15 && mantissa == 7) return NAN;
    return sign * (exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp((double)mantissa, -9));
}

/* shift: elements by which the view is off the alignment of its block. */
static matrix matrix_new(int32_t dtype, int64_t rows, int64_t cols, int64_t pad, int64_t shift)
{
    matrix m = { 0 };
    const int64_t element = esa_view_element(dtype), ld = cols + pad;
    m.view = esa_view_of(NULL, dtype, ESA_DEVICE_CUDA, rows, cols);
    m.view.ld = ld;
    m.start = (GUARD + shift) * element;
    m.bytes = m.start + (rows * ld + GUARD) * element;
    m.host = calloc(1, (size_t)m.bytes);
    m.value = calloc((size_t)(rows * cols), 8);
    for (int64_t i = 0; i < m.bytes / element; i++) {
        const float x = random_value();
        const uint16_t half = esa_f32_to_bf16(x);
        if (dtype == F32) memcpy(m.host + 4 * i, &x, 4);
        if (dtype == BF16) memcpy(m.host + 2 * i, &half, 2);
        if (dtype == F8) m.host[i] = (uint8_t)esa_rng_below(&rng, 126);
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) m.value[r * cols + c] = element_at(&m, m.host, r, c);
    must(ctx, be->alloc(ctx, &m.block, m.bytes));
    must(ctx, be->upload(ctx, m.block, m.host, m.bytes));
    m.view.data = (char *)m.block + m.start;
    if (dtype == F8) must(ctx, be->alloc(ctx, (void **)&m.view.scale, rows * 4));
    return m;
}

static void matrix_free(matrix *m)
{
    be->release(ctx, m->block, m->bytes);
    if (m->view.scale) be->release(ctx, m->view.scale, m->view.rows * 4);
    free(m->host);
    free(m->value);
}

/* Half the distance to the next number of the type, relative to the number, and the smallest
 * distance. The factor leaves room for f32 arithmetic before the rounding. */
static double allowed(int32_t dtype, double want, double scale)
{
    const double relative = dtype == F32 ? 4e-6 : dtype == BF16 ? 0x1p-8 * 1.02 : 0x1p-4 * 1.02;
    return relative * fabs(want) + (dtype == F8 ? scale * 0x1p-10 * 1.02 : 0) + 1e-5;
}

/* Compares the matrix on the GPU with want [rows][cols]; what lies around it must be unchanged. */
static void compare(const matrix *m, const double *want, const char *what)
{
    const esa_view *v = &m->view;
    const int64_t element = esa_view_element(v->dtype);
    uint8_t *got = malloc((size_t)m->bytes);
    float *scale = calloc((size_t)v->rows, 4);
    must(ctx, be->download(ctx, got, m->block, m->bytes));
    if (v->scale) must(ctx, be->download(ctx, scale, v->scale, v->rows * 4));
    for (int64_t i = 0; i < m->bytes / element; i++) {
        const int64_t at = i - m->start / element, r = at < 0 ? -1 : at / v->ld,
                      c = at < 0 ? 0 : at % v->ld;
        if (r < 0 || r >= v->rows || c >= v->cols) {
            if (memcmp(got + i * element, m->host + i * element, (size_t)element))
                fail_msg("%s: element %lld outside the view changed", what, (long long)i);
            continue;
        }
        const double s = v->scale ? (double)scale[r] : 1, x = s * element_at(m, got, r, c),
                     w = want[r * v->cols + c];
        if (!(fabs(x - w) <= allowed(v->dtype, w, s)))
            fail_msg("%s: (%lld, %lld) is %.9g, expected %.9g (scale %g)", what, (long long)r,
                     (long long)c, x, w, s);
    }
    free(got);
    free(scale);
}

/* A vector over columns, on both sides; shift as in matrix_new. */
static matrix vector_new(int64_t cols, int64_t shift) { return matrix_new(F32, 1, cols, 0, shift); }
static const float *vector_at(const matrix *m) { return m->view.data; }

/* ---------------------------------------------------------------- norms */

typedef struct norm_case {
    int64_t rows, cols, pad, shift;
    int32_t norm, x, y, add, gate, affine, modulated;
} norm_case;

/* x += gate * add, not rounded. */
static void sum_reference(double *x, const norm_case *c, const matrix *add, const matrix *gate)
{
    for (int64_t i = 0; i < c->rows * c->cols && c->add; i++)
        x[i] += add->value[i] * (c->gate ? gate->value[i % c->cols] : 1);
}

/* vec: weight, bias, scale, shift. */
static void norm_reference(double *y, const double *x, const norm_case *c, const matrix vec[4],
                           double eps)
{
    for (int64_t r = 0; r < c->rows; r++) {
        const double *row = x + r * c->cols;
        double *out = y + r * c->cols, mean = 0, squares = 0;
        for (int64_t i = 0; i < c->cols; i++) mean += row[i];
        mean = c->norm == ESA_NORM_LAYER ? mean / (double)c->cols : 0;
        for (int64_t i = 0; i < c->cols; i++) squares += (row[i] - mean) * (row[i] - mean);
        const double factor = 1 / sqrt(squares / (double)c->cols + eps);
        for (int64_t i = 0; i < c->cols; i++) {
            out[i] = (row[i] - mean) * factor;
            if (c->affine) out[i] = out[i] * vec[0].value[i] + vec[1].value[i];
            if (c->modulated) out[i] = out[i] * (1 + vec[2].value[i]) + vec[3].value[i];
        }
    }
}

/* The values on the GPU now. */
static void read_values(double *value, const matrix *m)
{
    uint8_t *got = malloc((size_t)m->bytes);
    must(ctx, be->download(ctx, got, m->block, m->bytes));
    for (int64_t i = 0; i < m->view.rows * m->view.cols; i++)
        value[i] = element_at(m, got, i / m->view.cols, i % m->view.cols);
    free(got);
}

static void check_norm(const norm_case *c)
{
    const float eps = 1e-6f;
    matrix x = matrix_new(c->x, c->rows, c->cols, c->pad, c->shift),
           y = matrix_new(c->y, c->rows, c->cols, c->pad, c->shift),
           add = matrix_new(c->x, c->rows, c->cols, 0, 0), vec[5];
    for (int i = 0; i < 5; i++) vec[i] = vector_new(c->cols, c->shift);
    const esa_norm_args args = { .y = c->norm ? y.view : (esa_view){ 0 },
                                 .x = x.view,
                                 .add = c->add ? add.view : (esa_view){ 0 },
                                 .gate = c->gate ? vector_at(&vec[0]) : NULL,
                                 .norm = c->norm,
                                 .eps = eps,
                                 .weight = c->affine ? vector_at(&vec[1]) : NULL,
                                 .bias = c->affine ? vector_at(&vec[2]) : NULL,
                                 .scale = c->modulated ? vector_at(&vec[3]) : NULL,
                                 .shift = c->modulated ? vector_at(&vec[4]) : NULL };
    must(ctx, be->rows->norm(ctx, &args));
    const size_t bytes = (size_t)(c->rows * c->cols) * 8;
    double *want = malloc(bytes), *stored = malloc(bytes);
    char what[160];
    snprintf(what, sizeof what, "norm %d of %lld x %lld, pad %lld, shift %lld, types %d %d",
             c->norm, (long long)c->rows, (long long)c->cols, (long long)c->pad,
             (long long)c->shift, c->x, c->y);
    memcpy(want, x.value, bytes);
    sum_reference(want, c, &add, &vec[0]);
    compare(&x, want, what);
    read_values(stored, &x); /* the norm sees x as it is stored */
    norm_reference(want, stored, c, vec + 1, eps);
    if (c->norm) compare(&y, want, what);
    free(want);
    free(stored);
    matrix_free(&x);
    matrix_free(&y);
    matrix_free(&add);
    for (int i = 0; i < 5; i++) matrix_free(&vec[i]);
}

/* Every team of threads, whole and ragged, aligned and not, with every combination of parts. */
static void norms(void **state)
{
    static const int64_t cols[] = { 8,    40,   129,  240,  1024,  1536,
                                    1544, 2049, 5120, 8960, 14088, 16384 };
    static const int32_t type[][2] = { { F32, F32 }, { BF16, BF16 }, { BF16, F8 }, { F32, BF16 } };
    (void)state;
    for (int i = 0; i < 10; i++)
        for (int t = 0; t < 4; t++)
            for (int part = 0; part < 5; part++) {
                const norm_case c = { .rows = 1 + (i + 3 * part) % 11,
                                      .cols = cols[i],
                                      .pad = part % 2 ? 8 : i % 3,
                                      .shift = (i + t + part) % 4 == 3 ? 3 : 0,
                                      .norm = part == 4 ? ESA_NORM_NONE : 1 + (i + part) % 2,
                                      .x = type[t][0],
                                      .y = type[t][1],
                                      .add = part >= 2,
                                      .gate = part >= 3,
                                      .affine = part % 2,
                                      .modulated = part == 0 || part == 3 };
                check_norm(&c);
            }
}

/* ---------------------------------------------------------------- q and k */

static void check_qk(int64_t rows, int64_t heads, int64_t D, int32_t dtype, int64_t pad, int turned,
                     int both)
{
    const int64_t cols = heads * D, half = D / 2;
    const float eps = 1e-6f;
    matrix x[2], w[2], cs[2];
    for (int i = 0; i < 2; i++) {
        x[i] = matrix_new(dtype, rows, cols, pad, pad % 8 ? 1 : 0);
        w[i] = vector_new(cols, 0);
        cs[i] = matrix_new(F32, rows, half, 0, 0);
    }
    const esa_qk_args args = { .q = x[0].view,
                               .k = both ? x[1].view : (esa_view){ 0 },
                               .q_weight = vector_at(&w[0]),
                               .k_weight = both ? vector_at(&w[1]) : NULL,
                               .cos = turned ? vector_at(&cs[0]) : NULL,
                               .sin = turned ? vector_at(&cs[1]) : NULL,
                               .D = D,
                               .eps = eps };
    must(ctx, be->rows->qk(ctx, &args));
    double *want = malloc((size_t)(rows * cols) * 8);
    for (int i = 0; i < 2; i++) {
        memcpy(want, x[i].value, (size_t)(rows * cols) * 8);
        for (int64_t r = 0; r < rows && (i == 0 || both); r++) {
            double *row = want + r * cols, squares = 0;
            for (int64_t c = 0; c < cols; c++) squares += row[c] * row[c];
            const double factor = 1 / sqrt(squares / (double)cols + eps);
            for (int64_t c = 0; c < cols; c++) row[c] *= factor * w[i].value[c];
            for (int64_t c = 0; c < cols && turned; c += 2) {
                const double co = cs[0].value[r * half + c % D / 2],
                             si = cs[1].value[r * half + c % D / 2], even = row[c],
                             odd = row[c + 1];
                row[c] = even * co - odd * si;
                row[c + 1] = even * si + odd * co;
            }
        }
        compare(&x[i], want, turned ? "norm and rotation of q and k" : "norm of q and k");
    }
    free(want);
    for (int i = 0; i < 2; i++) {
        matrix_free(&x[i]);
        matrix_free(&w[i]);
        matrix_free(&cs[i]);
    }
}

static void queries_and_keys(void **state)
{
    static const int64_t head[][2] = { { 1, 12 },   { 12, 20 },  { 2, 64 },
                                       { 12, 128 }, { 40, 128 }, { 3, 72 } };
    (void)state;
    for (int i = 0; i < 6; i++)
        for (int n = 0; n < 8; n++)
            check_qk(1 + 5 * (n % 3), head[i][0], head[i][1], n % 2 ? BF16 : F32,
                     n < 4   ? 0
                     : n < 6 ? 8
                             : 3,
                     n != 3, n != 2);
}

/* ---------------------------------------------------------------- activations */

static double act_reference(double x, int32_t act)
{
    if (act == ESA_ACT_SILU) return x / (1 + exp(-x));
    if (act == ESA_ACT_GELU_TANH)
        return 0.5 * x * (1 + tanh(0.79788456080286536 * (x + 0.044715 * x * x * x)));
    return x;
}

static void check_act(int64_t rows, int64_t cols, int32_t x_type, int32_t y_type, int32_t act,
                      int gated, int64_t pad)
{
    matrix x = matrix_new(x_type, rows, cols, pad, pad % 8 ? 1 : 0),
           gate = matrix_new(x_type, rows, cols, 0, 0), y = matrix_new(y_type, rows, cols, pad, 0);
    const esa_act_args args = {
        .y = y.view, .x = x.view, .gate = gated ? gate.view : (esa_view){ 0 }, .act = act
    };
    must(ctx, be->rows->act(ctx, &args));
    double *want = malloc((size_t)(rows * cols) * 8);
    for (int64_t i = 0; i < rows * cols; i++)
        want[i] = gated ? act_reference(gate.value[i], act) * x.value[i]
                        : act_reference(x.value[i], act);
    compare(&y, want, "activation");
    free(want);
    matrix_free(&x);
    matrix_free(&gate);
    matrix_free(&y);
}

static void activations(void **state)
{
    static const int64_t cols[] = { 7, 64, 256, 1544, 8960, 13824, 16384 };
    (void)state;
    for (int i = 0; i < 6; i++)
        for (int32_t act = ESA_ACT_NONE; act <= ESA_ACT_GELU_TANH; act++)
            for (int n = 0; n < 6; n++)
                check_act(1 + n, cols[i], n % 2 ? BF16 : F32,
                          n < 2   ? F8
                          : n < 4 ? BF16
                                  : F32,
                          act, (i + n) % 3 == 0, n == 5 ? 3 : 8 * (n % 2));
}

/* Rows of zeros and of tiny numbers have the scale 1 and no NaN. */
static void zeros(void **state)
{
    (void)state;
    matrix x = matrix_new(F32, 2, 64, 0, 0), y = matrix_new(F8, 2, 64, 0, 0);
    float row[128];
    double want[128] = { 0 };
    for (int i = 0; i < 128; i++) row[i] = i < 64 ? 0.0f : 1e-31f;
    must(ctx, be->upload(ctx, x.view.data, row, sizeof row));
    const esa_act_args args = { .y = y.view, .x = x.view };
    must(ctx, be->rows->act(ctx, &args));
    compare(&y, want, "rows of zeros");
    float scale[2] = { 0 };
    must(ctx, be->download(ctx, scale, y.view.scale, 8));
    assert_true(scale[0] == 1 && scale[1] == 1);
    matrix_free(&x);
    matrix_free(&y);
}

/* A row that no team of threads can hold is refused with a message; the stand-in has no limit. */
static void too_wide(void **state)
{
    (void)state;
    if (on_stand_in()) return;
    matrix x = matrix_new(F32, 1, 20000, 0, 0);
    const esa_act_args args = { .y = x.view, .x = x.view };
    refused(ctx, be->rows->act(ctx, &args), ESA_ERR_UNSUPPORTED, "20000 columns");
    matrix_free(&x);
}

/* ---------------------------------------------------------------- times */

/* Prints milliseconds and TB/s of one operation, best of 20. */
static void time_of(const char *name, double bytes, esa_status (*run)(const void *args),
                    const void *args)
{
    double best = 1e9, seconds;
    esa_mark from = { 0 }, to = { 0 };
    for (int i = 0; i < 20; i++) {
        must(ctx, be->mark_record(ctx, &from));
        must(ctx, run(args));
        must(ctx, be->mark_record(ctx, &to));
        must(ctx, be->mark_elapsed(ctx, &seconds, &from, &to));
        best = seconds < best ? seconds : best;
    }
    be->mark_release(ctx, &from);
    be->mark_release(ctx, &to);
    printf("%-34s %7.3f ms  %.2f TB/s\n", name, 1e3 * best, 1e-12 * bytes / best);
}

static esa_status run_norm(const void *args) { return be->rows->norm(ctx, args); }
static esa_status run_qk(const void *args) { return be->rows->qk(ctx, args); }
static esa_status run_act(const void *args) { return be->rows->act(ctx, args); }

static esa_view buffer(int32_t dtype, int64_t rows, int64_t cols)
{
    void *data;
    must(ctx, be->alloc(ctx, &data, rows * cols * esa_view_element(dtype)));
    esa_view v = esa_view_of(data, dtype, ESA_DEVICE_CUDA, rows, cols);
    if (dtype == F8) must(ctx, be->alloc(ctx, (void **)&v.scale, rows * 4));
    return v;
}

static void times_at(int64_t N, int64_t d, int64_t ffn)
{
    const double size = 2.0 * (double)N * (double)d, wide = (double)N * (double)ffn;
    const esa_view x = buffer(BF16, N, d), a = buffer(BF16, N, d), t = buffer(BF16, N, d),
                   f = buffer(F8, N, d), h = buffer(BF16, N, ffn), hf = buffer(F8, N, ffn),
                   e = buffer(F32, 3, d), turn = buffer(F32, N, 128);
    const float *vec = e.data;
    printf("N %lld, d %lld, ffn %lld\n", (long long)N, (long long)d, (long long)ffn);
    esa_norm_args n = {
        .y = a, .x = x, .norm = ESA_NORM_LAYER, .eps = 1e-6f, .scale = vec, .shift = vec + d
    };
    time_of("norm, modulation", 2 * size, run_norm, &n);
    n.add = t;
    n.gate = vec + 2 * d;
    time_of("gate, residual, norm, modulation", 4 * size, run_norm, &n);
    n.y = f;
    time_of("the same to F8", 3.5 * size, run_norm, &n);
    const esa_qk_args q = { .q = x,
                            .k = t,
                            .q_weight = vec,
                            .k_weight = vec,
                            .cos = turn.data,
                            .sin = (float *)turn.data + N * 64,
                            .D = 128,
                            .eps = 1e-6f };
    time_of("norm and rotation of q and k", 4 * size + (double)N * 1024, run_qk, &q);
    const esa_act_args g = { .y = hf, .x = h, .act = ESA_ACT_GELU_TANH };
    time_of("GELU to F8", 3 * wide, run_act, &g);
    const esa_view all[] = { x, a, t, f, h, hf, e, turn };
    for (int i = 0; i < 8; i++) {
        be->release(ctx, all[i].data, 0);
        if (all[i].scale) be->release(ctx, all[i].scale, 0);
    }
}

static void times(void **state)
{
    (void)state;
    if (!getenv("ESA_TEST_TIMES")) return;
    times_at(32760, 1536, 8960);
    times_at(75600, 1536, 8960);
    times_at(32760, 5120, 13824);
    times_at(75600, 5120, 13824);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norms), cmocka_unit_test(queries_and_keys), cmocka_unit_test(activations),
        cmocka_unit_test(zeros), cmocka_unit_test(too_wide),         cmocka_unit_test(times),
    };
    return cmocka_run_group_tests(tests, engine_begin, engine_end);
}
