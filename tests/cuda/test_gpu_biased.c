/* test_gpu_biased.c - attention with biases (base/nn_args.h) against double precision.
 * SPDX-License-Identifier: Apache-2.0
 *
 * ESA_TEST_TIMES=1 prints the times at the sizes of Wan and of UMT5 too. */
#include <math.h>
#include <stdio.h>

#include "common/case_run.h"
#include "common/naive.h"
#include "gpu_engine.h"
#include "gpu_fenced.h"

/* NONE_LEFT: the bias removes all keys; NORM: queries are normed first */
enum { KEY = 1, DISTANCE = 2, NONE_LEFT = 4, NORM = 8 };

typedef struct biased_case {
    int64_t Nq, Nk, heads, D;
    int bias;
    int64_t pad, shift; /* elements between rows and before the first */
    int64_t every;      /* compares every n-th query; 0: all */
} biased_case;

typedef struct setup {
    fenced o, q, k, v, key, distance, weight, room;
    esa_biased_args args;
} setup;

static esa_view matrix(fenced *g, int64_t rows, int64_t cols, const biased_case *c)
{
    const int64_t ld = cols + c->pad;
    uint16_t *x = random_bf16(&rng, rows * ld, 2);
    *g = fenced_new(ctx, be, x, 2 * rows * ld, 2 * c->shift);
    free(x);
    esa_view v = esa_view_of(g->data, ESA_DTYPE_BF16, ESA_DEVICE_CUDA, rows, cols);
    v.ld = ld;
    return v;
}

/* Keys that count several times, and some that are removed. */
static fenced key_bias(const biased_case *c)
{
    float *x = malloc((size_t)(c->Nk + 1) * 4);
    for (int64_t i = 0; i < c->Nk; i++)
        x[i] = c->bias & NONE_LEFT ? -INFINITY
               : i % 5 == 3        ? -INFINITY
                                   : logf(1 + (float)esa_rng_below(&rng, 500));
    fenced g = fenced_new(ctx, be, x, 4 * c->Nk, 0);
    free(x);
    return g;
}

static setup setup_of(const biased_case *c)
{
    const int64_t cols = c->heads * c->D, span = c->Nq + c->Nk;
    setup s;
    s.args = (esa_biased_args){ .heads = c->heads, .D = c->D };
    s.args.scale = 1.0f / sqrtf((float)c->D);
    s.args.o = matrix(&s.o, c->Nq, cols, c);
    s.args.q = matrix(&s.q, c->Nq, cols, c);
    s.args.k = matrix(&s.k, c->Nk, cols, c);
    s.args.v = matrix(&s.v, c->Nk, cols, c);
    s.key = key_bias(c);
    float *x = malloc((size_t)(c->heads * span) * 4);
    for (int64_t i = 0; i < c->heads * span; i++) x[i] = 6 * esa_rng_unit(&rng) - 3;
    s.distance = fenced_new(ctx, be, x, 4 * c->heads * span, 0);
    free(x);
    x = malloc((size_t)(cols + c->Nq) * 4);
    for (int64_t i = 0; i < cols + c->Nq; i++) x[i] = 2 * esa_rng_unit(&rng) - 0.5f;
    s.weight = fenced_new(ctx, be, x, 4 * cols, 0);
    s.room = fenced_new(ctx, be, x, 4 * c->Nq, 0);
    free(x);
    if (c->bias & KEY) s.args.key = s.key.data;
    if (c->bias & NORM) {
        s.args.q_weight = s.weight.data;
        s.args.eps = 1e-2f;
        s.args.room = s.room.data;
    }
    if (c->bias & DISTANCE) {
        s.args.distance = s.distance.data;
        s.args.distance_ld = span;
        s.args.center = c->Nq - 1;
    }
    return s;
}

static void setup_free(setup *s)
{
    fenced *all[] = { &s->o, &s->q, &s->k, &s->v, &s->key, &s->distance, &s->weight, &s->room };
    for (int i = 0; i < 8; i++) fenced_free(ctx, be, all[i]);
}

static double at(const fenced *g, int64_t i)
{
    return esa_bf16_to_f32(((const uint16_t *)g->host)[i]);
}

/* Weights of one query, normalised; all 0 if it has no keys. */
static void reference(const setup *s, const biased_case *c, int64_t h, int64_t q, double *weight)
{
    const int64_t ld = s->args.q.ld, cols = c->heads * c->D;
    const float *w = (const float *)s->weight.host;
    double top = -INFINITY, sum = 0, factor = 1;
    if (c->bias & NORM) {
        double squares = 0;
        for (int64_t d = 0; d < cols; d++) squares += at(&s->q, q * ld + d) * at(&s->q, q * ld + d);
        factor = 1 / sqrt(squares / (double)cols + (double)s->args.eps);
    }
    for (int64_t k = 0; k < c->Nk; k++) {
        double x = 0;
        for (int64_t d = 0; d < c->D; d++)
            x += at(&s->q, q * ld + h * c->D + d) * at(&s->k, k * ld + h * c->D + d) *
                 (c->bias & NORM ? (double)w[h * c->D + d] : 1);
        x *= (double)s->args.scale * factor;
        if (c->bias & KEY) x += (double)((const float *)s->key.host)[k];
        if (c->bias & DISTANCE)
            x += (double)((const float *)
                              s->distance.host)[h * s->args.distance_ld + k - q + s->args.center];
        weight[k] = x;
        top = fmax(top, x);
    }
    for (int64_t k = 0; k < c->Nk; k++)
        sum += weight[k] = top == -INFINITY ? 0 : exp(weight[k] - top);
    for (int64_t k = 0; k < c->Nk; k++) weight[k] = sum == 0 ? 0 : weight[k] / sum;
}

static void compare(const setup *s, const biased_case *c, const char *what)
{
    const int64_t ld = s->args.o.ld, cols = c->heads * c->D;
    uint16_t *got = fenced_read(ctx, be, &s->o, what);
    double *weight = malloc((size_t)(c->Nk + 1) * 8);
    for (int64_t q = 0; q < c->Nq; q++) {
        if (memcmp(got + q * ld + cols, (uint16_t *)s->o.host + q * ld + cols, (size_t)c->pad * 2))
            fail_msg("%s: elements after row %lld changed", what, (long long)q);
        for (int64_t h = 0; h < c->heads && q % (c->every ? c->every : 1) == 0; h++) {
            reference(s, c, h, q, weight);
            for (int64_t d = 0; d < c->D; d++) {
                double want = 0, size = 0;
                for (int64_t k = 0; k < c->Nk; k++) {
                    const double x = weight[k] * at(&s->v, k * s->args.v.ld + h * c->D + d);
                    want += x;
                    size += fabs(x);
                }
                /* Weights and outputs are rounded to BF16, 2^-8 of the value each; the scores are
                 * f32, and their errors of up to 1e-4 become relative errors of the weights. With a
                 * norm, q or k is rounded to BF16 once more, which changes a score by less than
                 * 2^-9 of the sum of its products' sizes; scores here are sums of random signs, and
                 * that is at most 0.02. */
                const double norm = c->bias & NORM ? 0.04 : 2e-4,
                             allowed = 0x1.04p-8 * (size + fabs(want)) + norm * size;
                const double x = esa_bf16_to_f32(got[q * ld + h * c->D + d]);
                if (!(fabs(x - want) <= allowed))
                    fail_msg("%s: query %lld, head %lld, column %lld is %.6g, expected %.6g", what,
                             (long long)q, (long long)h, (long long)d, x, want);
            }
        }
    }
    free(weight);
    free(got);
}

static void check(const biased_case *c)
{
    char what[128];
    snprintf(what, sizeof what, "%lld queries, %lld keys, %lld x %lld, bias %d, pad %lld",
             (long long)c->Nq, (long long)c->Nk, (long long)c->heads, (long long)c->D, c->bias,
             (long long)c->pad);
    setup s = setup_of(c);
    must(ctx, be->biased->attention(ctx, &s.args));
    compare(&s, c, what);
    setup_free(&s);
}

/* Every width of a chunk, one and several chunks, ragged tiles of queries and keys, heads that do
 * not begin at multiples of 16 bytes. */
static void shapes(void **state)
{
    static const biased_case cases[] = {
        { 1, 1, 1, 16, 0, 0, 0, 0 },
        { 130, 21, 3, 128, KEY, 0, 0, 0 },
        { 129, 65, 3, 40, KEY | DISTANCE, 8, 0, 0 },
        { 200, 64, 2, 72, KEY, 0, 0, 0 },
        { 77, 77, 4, 64, DISTANCE, 0, 0, 0 },
        { 65, 130, 2, 12, KEY, 0, 0, 0 },
        { 33, 7, 4, 20, DISTANCE, 3, 1, 0 },
        { 40, 129, 2, 128, 0, 0, 1, 0 },
        { 127, 17, 2, 96, KEY, 5, 0, 0 },
        { 100, 90, 1, 384, 0, 0, 0, 0 },
        { 70, 130, 2, 200, DISTANCE, 0, 0, 0 },
        { 65, 200, 1, 130, KEY, 0, 0, 0 },
        { 20, 30, 1, 512, 0, 8, 0, 0 },
        { 257, 193, 1, 64, KEY | DISTANCE, 0, 0, 0 },
        /* few keys, which have a kernel of their own */
        { 1, 1, 2, 128, KEY, 0, 0, 0 },
        { 129, 16, 5, 64, 0, 8, 0, 0 },
        { 300, 17, 3, 64, KEY, 0, 0, 0 },
        { 515, 33, 2, 128, KEY, 16, 8, 0 },
        { 140, 48, 3, 64, 0, 0, 0, 0 },
        { 1000, 64, 2, 128, KEY, 0, 0, 7 },
        { 4100, 9, 7, 128, KEY, 0, 0, 61 },
        /* queries that are normed, by either kernel */
        { 300, 21, 3, 128, KEY | NORM, 0, 0, 0 },
        { 130, 64, 5, 64, NORM, 8, 0, 0 },
        { 77, 90, 2, 128, KEY | NORM, 0, 0, 0 },
        { 33, 7, 4, 20, NORM, 3, 1, 0 },
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check(&cases[i]);
}

/* A query without keys gives 0. */
static void no_keys(void **state)
{
    (void)state;
    const biased_case none = { 70, 0, 2, 64, 0, 0, 0, 0 },
                      removed = { 70, 130, 2, 128, KEY | NONE_LEFT, 0, 0, 0 },
                      few = { 200, 21, 2, 128, KEY | NONE_LEFT, 0, 0, 0 };
    check(&none);
    check(&removed);
    check(&few);
}

static void too_wide(void **state)
{
    (void)state;
    if (on_stand_in()) return; /* it has no limit */
    const biased_case c = { 2, 2, 1, 520, 0, 0, 0, 0 };
    setup s = setup_of(&c);
    refused(ctx, be->biased->attention(ctx, &s.args), ESA_ERR_UNSUPPORTED, "dimension 520");
    setup_free(&s);
}

static const struct {
    const char *name;
    biased_case c;
} truth[] = {
#define BIASED_CASE(name, ...) { name, { __VA_ARGS__ } },
#include "cases/engine.def"
};

static esa_status run(esa_ctx *c, const void *args) { return be->biased->attention(c, args); }

static void true_shapes(void **state)
{
    (void)state;
    if (on_stand_in() || getenv("ESA_TEST_SMALL")) return; /* too slow there */
    for (size_t i = 0; i < sizeof truth / sizeof *truth; i++) {
        const biased_case *c = &truth[i].c;
        if (!case_begin(truth[i].name, 1)) continue;
        rng = (esa_rng){ test_seed() + i };
        setup s = setup_of(c);
        must(ctx, be->biased->attention(ctx, &s.args));
        compare(&s, c, truth[i].name);
        if (getenv("ESA_TEST_TIMES")) {
            const double ms = best_ms(ctx, be, 10, run, &s.args), cols = (double)(c->heads * c->D),
                         flop = 4.0 * (double)c->Nq * (double)c->Nk * cols,
                         bytes = 4.0 * (double)(c->Nq + c->Nk) * cols;
            printf("%-24s %8.3f ms  %6.1f TFLOP/s  %.2f TB/s\n", truth[i].name, ms,
                   1e-9 * flop / ms, 1e-9 * bytes / ms);
        }
        setup_free(&s);
        case_end(0);
    }
    cases_done("biased/");
}

/* The same inputs give the same bits. */
static void same_bits(void **state)
{
    (void)state;
    const biased_case c = { 150, 140, 3, 128, KEY | DISTANCE, 0, 0, 0 };
    setup s = setup_of(&c);
    must(ctx, be->biased->attention(ctx, &s.args));
    void *first = fenced_read(ctx, be, &s.o, "first run");
    must(ctx, be->biased->attention(ctx, &s.args));
    void *second = fenced_read(ctx, be, &s.o, "second run");
    assert_memory_equal(first, second, (size_t)s.o.bytes);
    free(first);
    free(second);
    setup_free(&s);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes),    cmocka_unit_test(no_keys), cmocka_unit_test(too_wide),
        cmocka_unit_test(same_bits), CASES(true_shapes),
    };
    return RUN_CASES(tests, engine_begin, engine_end);
}
