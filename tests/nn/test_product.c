/* test_product.c - linear layers on every set of kernels of this machine against sums in double:
 * any sizes and pitches, weights of every type, packed and as they lie in files, between guard
 * bytes.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "common/naive.h"
#include "model/fill.h"
#include "nn/any_set.h"
#include "nn/product.h"

/* Rounding in f32: a sum of n products is off by about sqrt(n) 2^-24 of the sum of magnitudes. All
 * values are below 1 and n <= 1300, so 1e-6 of that sum (plus 1 for the bias) is generous, and a
 * wrong index is far above it. Products of two bf16 are exact in f32, so it holds for them too. */
#define TOLERANCE      1e-6
/* bf16 keeps 8 bits: an output is off by half of the last one. */
#define HALF_TOLERANCE (1.0 / 256)

static double gelu(double x)
{
    return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1.0)) * (x + 0.044715 * x * x * x)));
}

typedef struct product_case {
    int64_t rows, in, out;
    int32_t w_type, x_type, y_type; /* ESA_DTYPE_* */
    int32_t packed, bf16;           /* bf16: nn computes in bf16 */
    int32_t act, bias, gate, residual;
    int32_t odd; /* 1: the weight lies at an odd address */
} product_case;

/* The inputs, in guarded memory, and what the kernels make of them, in f32. */
typedef struct product_data {
    guarded x, w, y, panels;
    float *exact_x, *exact_w, *start, *bias, *gate, *scale;
    int64_t ldx, ldy;
} product_data;

static float *filled(const char *name, int64_t count)
{
    float *p = malloc((size_t)count * 4);
    assert_non_null(p);
    fill_tensor(p, count, name, 1, 0);
    return p;
}

/* Stores count values in a type and replaces them with what the type keeps. */
static void store(void *dst, int32_t dtype, float *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        if (dtype == ESA_DTYPE_F8) {
            ((uint8_t *)dst)[i] = esa_f32_to_f8(values[i]);
            values[i] = esa_f8_to_f32(((uint8_t *)dst)[i]);
            continue;
        }
        esa_store_f32(dst, i, dtype, values[i]);
        values[i] = esa_load_f32(dst, i, dtype);
    }
}

static void round_all(float *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) values[i] = esa_bf16_to_f32(esa_f32_to_bf16(values[i]));
}

static product_data make(const product_case *t)
{
    product_data d = { .ldx = t->in + 3, .ldy = t->out + 5 };
    /* The last row ends where its elements end. */
    const int64_t nx = (t->rows - 1) * d.ldx + t->in, nw = t->out * t->in,
                  ny = (t->rows - 1) * d.ldy + t->out;
    d.exact_x = filled("x", nx);
    d.exact_w = filled("w", nw);
    d.start = filled("y", ny);
    d.bias = filled("b", t->out);
    d.gate = filled("g", t->out);
    d.scale = filled("s", t->out);
    d.x = guard_alloc(nx * esa_view_element(t->x_type), 0);
    d.w = guard_alloc(nw * esa_view_element(t->w_type), t->odd);
    d.y = guard_alloc(ny * esa_view_element(t->y_type), 0);
    store(d.x.data, t->x_type, d.exact_x, nx);
    store(d.w.data, t->w_type, d.exact_w, nw);
    if (t->w_type == ESA_DTYPE_F8)
        for (int64_t i = 0; i < nw; i++) d.exact_w[i] *= d.scale[i / t->in];
    if (t->bf16) {
        round_all(d.exact_x, nx);
        round_all(d.exact_w, nw);
    }
    return d;
}

static void drop(product_data *d, int32_t packed)
{
    const guarded all[] = { d->x, d->w, d->y, d->panels };
    for (int i = 0; i < 3 + packed; i++) {
        assert_true(guard_check(&all[i]));
        guard_free((guarded *)&all[i]);
    }
    float *const plain[] = { d->exact_x, d->exact_w, d->start, d->bias, d->gate, d->scale };
    for (size_t i = 0; i < sizeof plain / sizeof plain[0]; i++) free(plain[i]);
}

/* y of one run, copied; the caller frees it. */
static void *run(const product_case *t, product_data *d, esa_ctx *ctx)
{
    esa_nn nn;
    esa_nn_init(&nn, ctx);
    assert_int_equal(esa_nn_use_dtype(&nn, t->bf16 ? ESA_DTYPE_BF16 : ESA_DTYPE_F32), ESA_OK);
    esa_weight w = { .data = d->w.data,
                     .dtype = t->w_type,
                     .rank = 2,
                     .dim = { t->out, t->in },
                     .scale = t->w_type == ESA_DTYPE_F8 ? d->scale : NULL };
    const esa_weight bias = {
        .data = t->bias ? d->bias : NULL, .dtype = ESA_DTYPE_F32, .rank = 1, .dim = { t->out }
    };
    if (t->packed) {
        const int32_t dtype = t->bf16 ? ESA_DTYPE_BF16 : ESA_DTYPE_F32;
        const int64_t bytes = esa_panels_bytes(ctx, dtype, t->out, t->in);
        if (!d->panels.data) d->panels = guard_alloc(bytes, 0);
        esa_panels_fill(ctx, dtype, d->panels.data, &w, 0, t->out);
        esa_panels_view(ctx, &w, dtype, d->panels.data);
        float one;
        for (int64_t i = 0; i < t->out * t->in; i += 1 + t->in / 3) {
            esa_weight_to_f32(&one, &w, i, 1);
            assert_true(one == d->exact_w[i]);
        }
    }
    const esa_view x = { d->x.data, t->x_type, ESA_DEVICE_CPU, t->rows, t->in, d->ldx, NULL };
    const esa_view y = { d->y.data, t->y_type, ESA_DEVICE_CPU, t->rows, t->out, d->ldy, NULL };
    const int64_t ny = (t->rows - 1) * d->ldy + t->out;
    for (int64_t i = 0; i < ny; i++) esa_store_f32(d->y.data, i, t->y_type, d->start[i]);
    const esa_epilogue e = { .act = t->act,
                             .gate = t->gate ? d->gate : NULL,
                             .residual = t->residual == 2 ? (float *)d->y.data
                                         : t->residual    ? d->start
                                                          : NULL,
                             .residual_ld = d->ldy };
    assert_int_equal(esa_nn_linear(&nn, &y, &x, &w, &bias, &e), ESA_OK);
    assert_int_equal(nn.held, nn.scratch_bytes);
    esa_nn_close(&nn);
    const size_t bytes = (size_t)(ny * esa_view_element(t->y_type));
    void *copy = malloc(bytes);
    assert_non_null(copy);
    memcpy(copy, d->y.data, bytes);
    return copy;
}

static void compare(const product_case *t, const product_data *d, const void *y, int32_t level)
{
    for (int64_t r = 0; r < t->rows; r++)
        for (int64_t c = 0; c < (r + 1 < t->rows ? d->ldy : t->out); c++) {
            const float got = esa_load_f32(y, r * d->ldy + c, t->y_type),
                        before = d->start[r * d->ldy + c];
            if (c >= t->out) { /* between the rows */
                assert_true(got == (t->y_type == ESA_DTYPE_BF16
                                        ? esa_bf16_to_f32(esa_f32_to_bf16(before))
                                        : before));
                continue;
            }
            double sum = t->bias ? (double)d->bias[c] : 0, size = 1;
            for (int64_t k = 0; k < t->in; k++) {
                const double term = (double)d->exact_x[r * d->ldx + k] *
                                    (double)d->exact_w[c * t->in + k];
                sum += term;
                size += fabs(term);
            }
            if (t->act == ESA_ACT_GELU_TANH) sum = gelu(sum);
            if (t->act == ESA_ACT_SILU) sum = sum / (1 + exp(-sum));
            if (t->gate) sum *= (double)d->gate[c];
            if (t->residual) sum += (double)before;
            const double most = TOLERANCE * size +
                                (t->y_type == ESA_DTYPE_BF16 ? HALF_TOLERANCE * fabs(sum) : 0);
            if (fabs((double)got - sum) > most)
                fail_msg("level %d, %lld x %lld x %lld, w %d x %d y %d, row %lld column %lld: %g, "
                         "expected %g",
                         level, (long long)t->rows, (long long)t->in, (long long)t->out, t->w_type,
                         t->x_type, t->y_type, (long long)r, (long long)c, (double)got, sum);
        }
}

/* On one level: right, and the same bits with 1 and 3 threads. 0: not a level of this machine. */
static int32_t run_case(const product_case *t, int32_t level)
{
    esa_ctx *ctx[2] = { any_set_ctx(1, level), any_set_ctx(3, level) };
    void *y[2] = { NULL, NULL };
    const int32_t runs = ctx[0] && ctx[1] && (!t->bf16 || ctx[0]->kern->bf16);
    if (runs) {
        product_data d = make(t);
        for (int32_t i = 0; i < 2; i++) y[i] = run(t, &d, ctx[i]);
        compare(t, &d, y[0], level);
        const int64_t ny = (t->rows - 1) * d.ldy + t->out;
        assert_memory_equal(y[0], y[1], (size_t)(ny * esa_view_element(t->y_type)));
        drop(&d, t->packed);
    }
    for (int32_t i = 0; i < 2; i++) {
        free(y[i]);
        esa_ctx_free(ctx[i]);
    }
    return runs;
}

static void every_level(const product_case *t)
{
    int32_t runs = 0;
    for (int32_t level = ESA_CPU_REF; level < ANY_SETS; level++) runs += run_case(t, level);
    if (!t->bf16) assert_true(runs > 0); /* at least ref */
}

static const int64_t sizes[][3] = { { 1, 1, 1 },      { 1, 256, 300 },   { 7, 33, 5 },
                                    { 130, 64, 129 }, { 1100, 17, 40 },  { 257, 20, 257 },
                                    { 3, 1300, 70 },  { 1030, 513, 31 }, { 2, 2, 33 } };

static void shapes(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int32_t kind = 0; kind < 4; kind++) {
            product_case t = { .rows = sizes[i][0],
                               .in = sizes[i][1],
                               .out = sizes[i][2],
                               .packed = kind % 2,
                               .bf16 = kind / 2,
                               .bias = 1 };
            every_level(&t); /* f32 inputs, plain */
            t.act = ESA_ACT_GELU_TANH;
            t.gate = 1;
            t.residual = 2;
            every_level(&t);
            t.x_type = t.w_type = ESA_DTYPE_BF16;
            every_level(&t);
            t.y_type = ESA_DTYPE_BF16;
            t.residual = 1;
            every_level(&t);
        }
}

/* Weights of every type of a file, also at odd addresses. */
static void types(void **state)
{
    (void)state;
    static const int32_t type[] = { ESA_DTYPE_F32, ESA_DTYPE_F16, ESA_DTYPE_BF16, ESA_DTYPE_F8 };
    for (int32_t i = 0; i < 4; i++)
        for (int32_t odd = 0; odd < 2; odd++)
            for (int32_t bf16 = 0; bf16 < 2; bf16++) {
                product_case t = {
                    .rows = 37, .in = 45, .out = 70, .w_type = type[i], .bf16 = bf16, .odd = odd
                };
                every_level(&t);
                t.act = ESA_ACT_SILU;
                t.x_type = ESA_DTYPE_BF16;
                every_level(&t);
            }
}

/* More than one block of weights that are packed for the product: 16 MB each. */
static void blocks(void **state)
{
    (void)state;
    for (int32_t bf16 = 0; bf16 < 2; bf16++) {
        const product_case t = { .rows = 3,
                                 .in = 700,
                                 .out = 13000,
                                 .w_type = ESA_DTYPE_BF16,
                                 .bf16 = bf16,
                                 .residual = 2 };
        run_case(&t, ESA_CPU_BEST);
    }
}

/* bf16 is refused where there are no kernels for it, and f32 stays. */
static void refused(void **state)
{
    (void)state;
    esa_ctx *ctx = any_set_ctx(1, ESA_CPU_REF);
    esa_nn nn;
    assert_non_null(ctx);
    esa_nn_init(&nn, ctx);
    assert_int_equal(esa_nn_use_dtype(&nn, ESA_DTYPE_BF16), ESA_ERR_UNSUPPORTED);
    assert_int_equal(nn.bf16, 0);
    assert_int_equal(esa_nn_bf16_pays(ctx), 0);
    esa_nn_close(&nn);
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(shapes), cmocka_unit_test(types),
                                        cmocka_unit_test(blocks), cmocka_unit_test(refused) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
