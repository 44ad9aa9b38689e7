/* attention_case.c - see attention_case.h.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* setenv */
#include "common/tests.h"
#include "common/attention_prepare.h"
#include "base/half.h"
#include "ctx/ctx.h"
#include "common/bf16_emulated.h"
#include "common/on_gpu.h"
#include "common/tiles_emulated.h"
#include "cpu/cpu.h"
#include "rules/carry.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int find_test_levels(int32_t *level, int *native)
{
    int n = 0;
    if (on_gpu()) {
        level[n++] = GPU_BEST;
        if (!getenv("ESA_CUDA") && !on_stand_in()) level[n++] = GPU_SM80;
        return *native = n;
    }
    for (int32_t l = ESA_CPU_REF; l < ESA_CPU_LEVELS; l++)
        if (esa_cpu_kernels_get(l)) level[n++] = l;
    *native = n;
    if (bf16_emulated()) level[n++] = CPU_BF16_EMULATED;
    /* An emulation inside an emulated processor takes minutes; test_kernels has its slots. */
    if (tiles_emulated(0) && !getenv("ESA_TEST_EMULATED")) level[n++] = CPU_TILES_EMULATED;
    return n;
}

esa_ctx *level_ctx(int32_t level, int32_t threads)
{
    esa_ctx *ctx = NULL;
    esa_ctx_params cp = esa_ctx_params_default();
    cp.threads = threads;
    if (level < CPU_BF16_EMULATED) cp.cpu_level = level;
    if (level == CPU_BF16_EMULATED) cp.cpu_level = ESA_CPU_AVX512;
    assert_int_equal(esa_ctx_create(&ctx, &cp), ESA_OK);
    if (level == CPU_BF16_EMULATED) ctx->kern = bf16_emulated();
    if (level == CPU_TILES_EMULATED) ctx->kern = tiles_emulated(0);
    if (level == CPU_SM80 || level == CPU_SM89) {
        static esa_cpu_kernels tables[2];
        esa_cpu_kernels *table = &tables[level - CPU_SM80];
        *table = *ctx->kern;
        table->eight_f16 = level == CPU_SM80;
        table->eight_steps = 1;
        ctx->kern = table;
    }
    if (level == GPU_SM80) { /* read when the GPU is opened, which is at its first use: now */
        int32_t count;
        esa_device_info info = { .struct_size = sizeof info };
        setenv("ESA_CUDA", "sm80", 1);
        assert_int_equal(esa_device_count(ctx, &count), ESA_OK);
        assert_int_equal(esa_device_get_info(ctx, &info), ESA_OK);
        assert_string_equal(info.kernels, "sm80");
        unsetenv("ESA_CUDA");
    }
    return ctx;
}

/* What the textbook says of a case; the same for every level. */
typedef struct expected {
    double *out, *lse, *same;
    int64_t rows, n;
} expected;

/* Where the first wrong element lies, and how many rows hold one: the shape of the damage says
 * which part of a kernel is wrong. */
static void first_mismatch(const double *got, const expected *e, const attention_case *c,
                           double bound)
{
    int64_t rows = 0, first = -1, column = 0;
    for (int64_t i = 0; i < e->rows; i++)
        for (int64_t d = 0; d < c->D; d++)
            if (!(fabs(got[i * c->D + d] - e->out[i * c->D + d]) <= bound)) {
                if (first < 0) {
                    first = i;
                    column = d;
                }
                rows++;
                break;
            }
    if (first >= 0)
        printf("    %lld of %lld rows wrong, the first: b %lld h %lld n %lld d %lld is %.6g, "
               "expected %.6g\n",
               (long long)rows, (long long)e->rows, (long long)(first / c->Nq / c->Hq),
               (long long)(first / c->Nq % c->Hq), (long long)(first % c->Nq), (long long)column,
               got[first * c->D + column], e->out[first * c->D + column]);
}

/* Begins the line that says how a run went. */
static void verdict(int right, int32_t level)
{
    printf("    level %d %s: ", level, right ? "right" : "WRONG");
}

/* Largest difference of the LSE and the largest LSE; an empty row on one side only, or one with an
 * output where none is expected (exact rows give it one), counts as infinite. */
static double lse_difference(const expected *e, const double *got, const double *got_lse, int64_t D,
                             double *top)
{
    double worst = 0.0;
    *top = 1.0;
    for (int64_t i = 0; i < e->rows; i++) {
        double difference = fabs(e->lse[i] - got_lse[i]);
        if (e->lse[i] == -INFINITY || got_lse[i] == -INFINITY) {
            difference = e->lse[i] == got_lse[i] ? 0.0 : INFINITY;
            for (int64_t d = 0; d < D; d++)
                if (e->out[i * D + d] == 0.0 && got[i * D + d] != 0.0) difference = INFINITY;
        } else {
            *top = fmax(*top, fabs(e->lse[i]));
        }
        if (!(difference <= worst)) worst = isnan(difference) ? INFINITY : difference;
    }
    return worst;
}

static int guards_whole(const prepared *p)
{
    int whole = 1;
    for (int i = 0; i < PARTS; i++) whole &= !p->memory[i].block || guard_check(&p->memory[i]);
    return whole;
}

/* How far the output may be from the textbook: twice the naive same-precision error, plus two ulp
 * of the largest output: where the naive one happens to be exact (one key, equal values) a
 * correctly rounded result may still differ by an ulp. */
static double output_bound(const attention_case *c, const expected *e)
{
    const double unit = c->dtype == ESA_DTYPE_F32   ? 0x1p-23
                        : c->dtype == ESA_DTYPE_F16 ? 0x1p-10
                                                    : 0x1p-7;
    return 2.0 * max_error(e->same, e->out, e->n) + 2.0 * unit * max_magnitude(e->out, e->n);
}

/* The bits of d for the output `sparse` of the call without a carry, by rules/carry.h. */
static int has_bits_of_rules(const prepared *p, const attention_case *c, const prepared *sparse)
{
    const esa_tensor *o = &p->t[3], *s = &sparse->t[3];
    for (int64_t row = 0; row < c->B * c->Hq * c->Nq; row++) {
        const int64_t b = row / c->Nq / c->Hq, h = row / c->Nq % c->Hq, n = row % c->Nq,
                      at_o = b * o->stride[0] + h * o->stride[1] + n * o->stride[2],
                      at_s = b * s->stride[0] + h * s->stride[1] + n * s->stride[2];
        float x[ESA_MAX_HEAD_DIM], largest = 0.0f;
        for (int64_t d = 0; d < c->D; d++) {
            x[d] = esa_carry_difference(esa_load_f32(o->data, at_o + d, c->dtype),
                                        esa_load_f32(s->data, at_s + d, c->dtype));
            largest = fmaxf(largest, fabsf(x[d]));
        }
        const float scale = esa_carry_scale(largest), inverse = esa_carry_inverse(scale);
        if (p->carry.scale && p->carry.scale[row] != scale) return 0;
        for (int64_t d = 0; d < c->D; d++)
            if (p->carry.scale
                    ? ((uint8_t *)p->carry.value)[row * c->D + d] != esa_f32_to_f8(x[d] * inverse)
                    : ((uint16_t *)p->carry.value)[row * c->D + d] != esa_f32_to_bf16(x[d]))
                return 0;
    }
    return 1;
}

static int made_right(const prepared *p, const attention_case *c, int32_t level, int32_t threads)
{
    prepared sparse;
    attention_case plain = *c;
    plain.carry = plain.exact_rows = 0;
    case_prepare(&sparse, &plain, level, threads);
    const esa_status status = case_run(&sparse, &plain, NULL);
    if (status) fail_msg("%s: %s", esa_status_name(status), esa_ctx_error(sparse.ctx));
    const int right = has_bits_of_rules(p, c, &sparse);
    case_release(&sparse);
    return right;
}

int made_bits_right(const attention_case *c, int32_t level, int32_t threads)
{
    prepared p;
    case_prepare(&p, c, level, threads);
    const esa_status status = case_run(&p, c, &p.t[4]);
    if (status) fail_msg("%s: %s", esa_status_name(status), esa_ctx_error(p.ctx));
    const int right = made_right(&p, c, level, threads);
    case_release(&p);
    return right;
}

/* The largest error of a made d, as a share of what is allowed: the bound of the output, and half a
 * unit of the last place of d (E4M3: 2^-4 of the value, or 2^-10 of the scale where values are
 * subnormal; bf16: 2^-8). 0.001 for the rounding of the scale and of the products with it. */
static double made_error(const prepared *p, const attention_case *c, const expected *e)
{
    const double bound = output_bound(c, e);
    double *dense = malloc((size_t)e->n * 8), worst = 0.0;
    tensor_to_double(dense, &p->t[3]);
    for (int64_t i = 0; i < e->n; i++) {
        const int64_t row = i / c->D;
        const double want = dense[i] - e->out[i], got = case_carried(&p->carry, row, i % c->D),
                     half = p->carry.scale ? 0x1p-4 * (fabs(want) + bound) +
                                                 0x1p-10 * (double)p->carry.scale[row]
                                           : 0x1p-8 * (fabs(want) + bound),
                     error = fabs(got - want) / (bound + 1.001 * half);
        if (!(error <= worst)) worst = isnan(error) ? INFINITY : error;
    }
    free(dense);
    return worst;
}

/* A call that makes d. It gets an LSE to write, and must not. */
static int check_making(const attention_case *c, const expected *e, int32_t level, int32_t threads)
{
    prepared p;
    case_prepare(&p, c, level, threads);
    const int64_t bytes = p.memory[3].bytes;
    unsigned char *before = malloc((size_t)bytes), *lse = p.memory[4].data;
    memcpy(before, p.memory[3].data, (size_t)bytes);
    const esa_status status = case_run(&p, c, &p.t[4]);
    int untouched = !memcmp(before, p.memory[3].data, (size_t)bytes);
    for (int64_t i = 0; i < p.memory[4].bytes; i++) untouched &= lse[i] == lse[0];
    const double error = status ? 0.0 : made_error(&p, c, e);
    const int bits = !status && made_right(&p, c, level, threads), whole = guards_whole(&p),
              right = !status && untouched && whole && bits && error <= 1.0;
    if (!right || getenv("ESA_TEST_VERBOSE")) {
        verdict(right, level);
        printf("%serror %.3g of the bound, bits %s, o and lse %s, guards %s\n",
               status ? esa_ctx_error(p.ctx) : "", error, bits ? "right" : "wrong",
               untouched ? "as before" : "changed", whole ? "whole" : "broken");
    }
    free(before);
    case_release(&p);
    return !right;
}

/* with_lse: 0 asks for the output alone, for which GPUs may have other kernels. */
static int check_run(const attention_case *c, const expected *e, int32_t level, int32_t threads,
                     int with_lse)
{
    prepared p;
    case_prepare(&p, c, level, threads);
    const esa_status status = case_run(&p, c, with_lse ? &p.t[4] : NULL);
    if (status) {
        verdict(0, level);
        printf("%s: %s\n", esa_status_name(status), esa_ctx_error(p.ctx));
        case_release(&p);
        return 1;
    }
    assert_true(guards_whole(&p));
    double *got = malloc((size_t)e->n * 8), *got_lse = malloc((size_t)e->rows * 8), lse_top;
    tensor_to_double(got, &p.t[3]);
    tensor_to_double(got_lse, &p.t[4]);
    const double bound = output_bound(c, e), error = max_error(got, e->out, e->n);
    const double lse_error = with_lse ? lse_difference(e, got, got_lse, c->D, &lse_top) : 0.0;
    /* The LSE is a f32 of size lse_top whose score carries D roundings; the bf16 set rounds pooled
     * means to 2^-9. */
    const double lse_bound = with_lse ? (double)(c->D + 16) * 0x1p-23 * lse_top +
                                            (c->dtype != ESA_DTYPE_F32 && c->tail ? 0x1p-7 : 0.0)
                                      : 0.0;
    const int right = error <= bound && lse_error <= lse_bound;
    if (!right || getenv("ESA_TEST_VERBOSE")) {
        verdict(right, level);
        printf("error %.3g bound %.3g, lse %.3g bound %.3g\n", error, bound, lse_error, lse_bound);
    }
    if (!right) first_mismatch(got, e, c, bound);
    free(got);
    free(got_lse);
    case_release(&p);
    return !right;
}

static int check_level(const attention_case *c, const expected *e, int32_t level, int32_t threads)
{
    if (c->carry == CASE_MAKE) return check_making(c, e, level, threads);
    const int wrong = check_run(c, e, level, threads, 1);
    return wrong + (on_gpu() && !on_stand_in() ? check_run(c, e, level, threads, 0) : 0);
}

int check_attention(const attention_case *c, const int32_t *level, int levels, int32_t threads)
{
    expected e;
    e.rows = c->B * c->Hq * c->Nq;
    e.n = e.rows * c->D;
    e.out = malloc((size_t)e.n * 8);
    e.same = malloc((size_t)e.n * 8);
    e.lse = malloc((size_t)e.rows * 8);
    prepared p;
    case_prepare(&p, c, level[0], 1);
    if (c->carry == CASE_MAKE) p.naive.exact_rows = 0; /* they take no part */
    naive_attention(e.out, e.lse, &p.naive);
    naive_attention_same(e.same, &p.naive);
    case_release(&p);
    int wrong = 0;
    for (int i = 0; i < levels; i++) wrong += check_level(c, &e, level[i], threads);
    free(e.out);
    free(e.same);
    free(e.lse);
    return wrong;
}

double attention_error(const attention_case *c, int32_t level, int32_t threads, double *lse)
{
    expected e = { .rows = c->B * c->Hq * c->Nq };
    e.n = e.rows * c->D;
    e.out = malloc((size_t)e.n * 8);
    e.lse = malloc((size_t)e.rows * 8);
    double *got = malloc((size_t)e.n * 8), *got_lse = malloc((size_t)e.rows * 8), top;
    prepared p;
    case_prepare(&p, c, level, threads);
    naive_attention(e.out, e.lse, &p.naive);
    const esa_status status = case_run(&p, c, &p.t[4]);
    if (status) fail_msg("%s: %s", esa_status_name(status), esa_ctx_error(p.ctx));
    assert_true(guards_whole(&p));
    tensor_to_double(got, &p.t[3]);
    tensor_to_double(got_lse, &p.t[4]);
    double wrong = 0.0, all = 0.0;
    for (int64_t i = 0; i < e.n; i++) {
        wrong += (got[i] - e.out[i]) * (got[i] - e.out[i]);
        all += e.out[i] * e.out[i];
    }
    *lse = lse_difference(&e, got, got_lse, c->D, &top);
    if (getenv("ESA_TEST_VERBOSE")) {
        printf("    level %d: relative error %.4f, lse %.4f\n", level,
               all > 0.0 ? sqrt(wrong / all) : 0.0, *lse);
    }
    case_release(&p);
    free(got);
    free(got_lse);
    free(e.out);
    free(e.lse);
    return all > 0.0 ? sqrt(wrong / all) : wrong > 0.0 ? (double)INFINITY : 0.0;
}

void *attention_bits(const attention_case *c, int32_t level, int32_t threads, int64_t *bytes)
{
    prepared p;
    case_prepare(&p, c, level, threads);
    assert_int_equal(case_run(&p, c, &p.t[4]), ESA_OK);
    *bytes = 0;
    for (int i = 3; i < PARTS; i++) *bytes += p.memory[i].bytes;
    char *copy = malloc((size_t)*bytes), *to = copy;
    for (int i = 3; i < PARTS; i++)
        if (p.memory[i].block) {
            memcpy(to, p.memory[i].data, (size_t)p.memory[i].bytes);
            to += p.memory[i].bytes;
        }
    case_release(&p);
    return copy;
}

/* Compares the run with bits of another one: the first `bytes` bytes. 1 if they differ, after a
 * line that says so. */
static int differs(const attention_case *c, int32_t threads, int32_t level, const char *bits,
                   int64_t bytes, const char *what)
{
    int64_t all;
    char *again = attention_bits(c, level, threads, &all);
    const int wrong = all < bytes || memcmp(bits, again, (size_t)bytes) != 0;
    free(again);
    if (wrong) {
        verdict(0, level);
        printf("other bits with %d threads than %s\n", threads, what);
    }
    return wrong;
}

int check_bits(const attention_case *c, const int32_t *level, int levels)
{
    attention_case between = *c, zero = *c;
    const int32_t most = getenv("ESA_TEST_TIGHT") ? 2 : 5; /* one more run for a sanitizer */
    if (c->density >= 0.0)
        between.tail = c->tail == ESA_TAIL_CENTROID ? ESA_TAIL_POOLED : ESA_TAIL_CENTROID;
    zero.carry_shared = 2;
    int wrong = 0;
    for (int i = 0; i < levels; i++) {
        int64_t bytes, other;
        char *one = attention_bits(c, level[i], 1, &bytes);
        for (int32_t threads = 2; threads <= most; threads += 3) {
            if (on_gpu()) free(attention_bits(&between, level[i], 1, &other));
            wrong += differs(c, threads, level[i], one, bytes, "with one");
        }
        free(one);
        if (c->carry != CASE_ADD) continue;
        attention_case plain = *c;
        plain.carry = 0;
        one = attention_bits(&plain, level[i], 1, &bytes);
        wrong += differs(&zero, 1, level[i], one, bytes, "without the carry, which is 0");
        free(one);
    }
    return wrong;
}

void expect_same_bits(const attention_case *a, const attention_case *b, const int32_t *level,
                      int levels)
{
    for (int i = 0; i < levels; i++) {
        int64_t bytes, other;
        char *one = attention_bits(a, level[i], 1, &bytes);
        char *two = attention_bits(b, level[i], 2, &other);
        assert_int_equal(bytes, other);
        assert_memory_equal(one, two, (size_t)bytes);
        free(one);
        free(two);
    }
}
