/* test_kernels.c - every slot of every kernel table this machine can run, against plain double
 * arithmetic.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Sizes are awkward on purpose, outputs stand between guard bytes. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/tests.h"
#include "base/half.h"
#include "base/rng.h"
#include "cpu/cpu.h"
#include "common/bf16_emulated.h"
#include "common/naive.h"
#include "common/tiles_emulated.h"

static const esa_cpu_kernels *set[12];
static int sets;

static int find_sets(void **state)
{
    (void)state;
    for (int32_t level = ESA_CPU_REF; level < ESA_CPU_LEVELS; level++) {
        const esa_cpu_kernels *k = esa_cpu_kernels_get(level);
        if (!k) continue;
        set[sets++] = k;
        if (k->bf16) set[sets++] = k->bf16;
    }
    if (bf16_emulated()) set[sets++] = bf16_emulated()->bf16;
    for (int i = 0; tiles_emulated(i); i++) set[sets++] = tiles_emulated(i)->bf16;
    for (int i = 0; i < sets; i++)
        if (set[i]->begin) set[i]->begin(); /* for all tests: they are one thread */
    printf("kernel sets:");
    for (int i = 0; i < sets; i++) printf(" %s/%d", set[i]->name, (int)set[i]->packed_bytes * 8);
    printf(", seed %llu\n", (unsigned long long)test_seed());
    return sets ? 0 : -1;
}

static double round_packed(const esa_cpu_kernels *k, double x)
{
    return k->packed_bytes == 2 ? (double)esa_round_to((float)x, ESA_DTYPE_BF16) : x;
}

/* Element (row, d) of the values of a 16-bit set. */
static uint16_t value_at(const esa_cpu_kernels *k, const void *values, int64_t D, int64_t row,
                         int64_t d)
{
    const int64_t U = k->keys_unit, dims = esa_ceil_div(D, k->dims_unit) * k->dims_unit,
                  i = row % U, place = U == 32 ? i % 16 * 2 + i / 16 : i;
    return ((const uint16_t *)values)[(row / U * dims + d) * U + place];
}

/* Element (row, d) of panels of W rows; the bf16 sets keep pairs or fours along d. */
static double panel_at(const esa_cpu_kernels *k, const void *pack, int64_t W, int64_t D,
                       int64_t row, int64_t d)
{
    const int64_t depth = esa_pad_depth(k, D), panel = row / W, w = row % W;
    if (k->packed_bytes == 4) return (double)((const float *)pack)[(panel * depth + d) * W + w];
    const int64_t n = k->keys_unit == 4 ? 4 : 2; /* BFMMLA takes fours, the others pairs */
    return (double)esa_bf16_to_f32(
        ((const uint16_t *)pack)[panel * depth * W + (d / n * W + w) * n + d % n]);
}

/* Relative error of the tile set's exp2: its polynomial (cpu/exp2_poly.h) in two evaluations, p and
 * the reference. Sets with the long polynomial: within the ulps that tests allow. */
static double weight_error(const esa_cpu_kernels *k) { return k->begin ? 2 * 2.9e-6 : 0.0; }

static void test_pack(void **state)
{
    (void)state;
    static const int64_t rows_of[] = { 1, 5, 12, 31, 33, 128 },
                         D_of[] = { 1, 3, 16, 40, 64, 72, 128, 255 };
    for (int s = 0; s < sets; s++)
        for (size_t a = 0; a < 6; a++)
            for (size_t b = 0; b < 8; b++)
                for (int32_t dtype = 0; dtype < 3; dtype++) {
                    const esa_cpu_kernels *k = set[s];
                    const int64_t rows = rows_of[a], D = D_of[b], stride = D + 3,
                                  depth = esa_pad_depth(k, D),
                                  dims = esa_ceil_div(D, k->dims_unit) * k->dims_unit;
                    char *src = malloc((size_t)(2 * rows * stride * 4 + 1));
                    /* misaligned by one byte */
                    esa_tensor t = esa_tensor_bnsd(src + 1, dtype, 1, 1, 2 * rows, D);
                    t.stride[2] = stride;
                    tensor_fill(&t, test_seed() + a * 100 + b, 2.0);
                    int32_t *gather = malloc((size_t)rows * 4);
                    for (int64_t i = 0; i < rows; i++)
                        gather[i] = (int32_t)((i * 7 + 3) % (2 * rows));
                    guarded panel = guard_alloc(esa_k_pack_bytes(k, rows, D), 0);
                    guarded rk = guard_alloc(esa_rows_k_bytes(k, rows, D), 0),
                            rv = guard_alloc(esa_rows_v_bytes(k, rows, D), 0);
                    k->panel_q(panel.data, t.data, dtype, stride, gather, rows, D, 0.5f);
                    k->rows_k(rk.data, t.data, dtype, stride, NULL, rows, D);
                    k->rows_v(rv.data, t.data, dtype, stride, gather, rows, D);
                    assert_true(guard_check(&panel) && guard_check(&rk) && guard_check(&rv));
                    /* the bf16 set scales in kq */
                    const double factor = k->packed_bytes == 2 ? 1.0 : 0.5;
                    for (int64_t i = 0; i < esa_ceil_div(rows, k->nr) * k->nr; i++)
                        for (int64_t d = 0; d < D; d++) {
                            const double moved = i < rows
                                                     ? (double)esa_load_f32(
                                                           t.data, gather[i] * stride + d, dtype)
                                                     : 0.0;
                            assert_true(panel_at(k, panel.data, k->nr, D, i, d) ==
                                        round_packed(k, moved * factor));
                            if (i >= rows) continue;
                            const double plain = (double)esa_load_f32(t.data, i * stride + d,
                                                                      dtype);
                            const double key = k->packed_bytes == 4
                                                   ? (double)((float *)rk.data)[i * D + d]
                                                   : (double)esa_bf16_to_f32(
                                                         ((uint16_t *)rk.data)[i * depth + d]);
                            const double value = k->packed_bytes == 4
                                                     ? (double)((float *)rv.data)[i * D + d]
                                                     : (double)esa_bf16_to_f32(
                                                           value_at(k, rv.data, D, i, d));
                            assert_true(key == round_packed(k, plain) &&
                                        value == round_packed(k, moved));
                        }
                    if (k->packed_bytes == 2) { /* what is rounded up is 0 */
                        for (int64_t i = 0; i < rows; i++)
                            for (int64_t d = D; d < depth; d++)
                                assert_int_equal(((uint16_t *)rk.data)[i * depth + d], 0);
                        for (int64_t i = 0; i < esa_pad_keys(k, rows); i++)
                            for (int64_t d = i < rows ? D : 0; d < dims; d++)
                                assert_int_equal(value_at(k, rv.data, D, i, d), 0);
                    }
                    guard_free(&panel);
                    guard_free(&rk);
                    guard_free(&rv);
                    if (k->pack_q) { /* what selectors use */
                        guarded q = guard_alloc(esa_q_pack_bytes(k, rows, D), 0),
                                kk = guard_alloc(esa_k_pack_bytes(k, rows, D), 0);
                        k->pack_q(q.data, t.data, dtype, stride, gather, rows, D, 0.5f);
                        k->pack_k(kk.data, t.data, dtype, stride, NULL, rows, D);
                        assert_true(guard_check(&q) && guard_check(&kk));
                        for (int64_t i = 0; i < esa_ceil_div(rows, k->nr) * k->nr; i++)
                            for (int64_t d = 0; d < D; d++) {
                                const double plain = i < rows ? (double)esa_load_f32(
                                                                    t.data, i * stride + d, dtype)
                                                              : 0.0;
                                assert_true(panel_at(k, kk.data, k->nr, D, i, d) ==
                                            round_packed(k, plain));
                                if (i >= esa_ceil_div(rows, k->mr) * k->mr) continue;
                                const double moved = i < rows ? (double)esa_load_f32(
                                                                    t.data, gather[i] * stride + d,
                                                                    dtype)
                                                              : 0.0;
                                /* the tile set keeps rows, and scales in qk */
                                const double got = k->begin
                                                       ? (double)esa_bf16_to_f32(
                                                             ((uint16_t *)q.data)[i * depth + d])
                                                       : panel_at(k, q.data, k->mr, D, i, d);
                                assert_true(got ==
                                            (k->begin ? round_packed(k, moved) : moved * 0.5));
                            }
                        guard_free(&q);
                        guard_free(&kk);
                    }
                    free(src);
                    free(gather);
                }
}

/* Values that bf16 holds exactly. */
static float *random_rows(esa_rng *r, int64_t n)
{
    float *x = malloc((size_t)n * 4);
    for (int64_t i = 0; i < n; i++)
        x[i] = esa_round_to(2.0f * esa_rng_unit(r) - 1.0f, ESA_DTYPE_BF16);
    return x;
}

static void *aligned_bytes(int64_t bytes)
{
    return aligned_alloc(64, (size_t)esa_ceil_div(bytes, 64) * 64);
}

/* want[i][j] = factor * q_i k_j. */
static double *dots(const float *q, const float *k, int64_t rows, int64_t keys, int64_t stride,
                    int64_t D, float factor)
{
    double *want = calloc((size_t)(rows * keys), 8);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < keys; j++) {
            for (int64_t d = 0; d < D; d++)
                want[i * keys + j] += (double)q[i * D + d] * (double)k[j * stride + d];
            want[i * keys + j] *= (double)factor;
        }
    return want;
}

/* The selectors' product, plain and accumulated. */
static void test_qk(void **state)
{
    (void)state;
    static const int64_t keys_of[] = { 1, 7, 16, 31, 100, 256 }, D_of[] = { 1, 5, 64, 80, 256 };
    for (int s = 0; s < sets; s++)
        for (size_t a = 0; a < 6; a++)
            for (size_t b = 0; b < 5; b++)
                for (int64_t rows = 1; rows <= set[s]->mr && set[s]->qk; rows++) {
                    const esa_cpu_kernels *k = set[s];
                    const int64_t keys = keys_of[a], D = D_of[b], ld = 256;
                    const float factor = 0.7f;
                    esa_rng r = { test_seed() + a + 10 * b + 100 * (uint64_t)rows };
                    float *q = random_rows(&r, rows * D), *kk = random_rows(&r, keys * D);
                    void *qp = aligned_bytes(esa_q_pack_bytes(k, rows, D)),
                         *kp = aligned_bytes(esa_k_pack_bytes(k, keys, D));
                    double *want = dots(q, kk, rows, keys, D, D, factor);
                    guarded sg = guard_alloc(k->mr * ld * 4, 0);
                    const float *sc = sg.data;
                    k->pack_q(qp, q, ESA_DTYPE_F32, D, NULL, rows, D, factor);
                    k->pack_k(kp, kk, ESA_DTYPE_F32, D, NULL, keys, D);
                    for (int32_t times = 1; times <= 2; times++) {
                        k->qk(sg.data, ld, qp, kp, rows, keys, D, factor, times - 1);
                        assert_true(guard_check(&sg));
                        for (int64_t i = 0; i < rows; i++)
                            for (int64_t j = 0; j < keys;
                                 j++) /* D products of size <= 1, each rounded once to 2^-24, and
                                         the factor once */
                                assert_true(
                                    fabs((double)sc[i * ld + j] - times * want[i * keys + j]) <=
                                    times * times * (double)(D + 2) * 0x1p-23);
                    }
                    free(want);
                    free(q);
                    free(kk);
                    free(qp);
                    free(kp);
                    guard_free(&sg);
                }
}

/* kq, softmax and pv in a row, as attention calls them, over two blocks of keys, against double. */
static void test_products(void **state)
{
    (void)state;
    static const int64_t keys_of[] = { 1, 2, 7, 11, 16, 31, 100, 128, 257 },
                         D_of[] = { 1, 5, 23, 64, 80, 128, 256 };
    for (int s = 0; s < sets; s++)
        for (size_t a = 0; a < 9; a++)
            for (size_t b = 0; b < 7; b++) {
                const esa_cpu_kernels *k = set[s];
                const int64_t keys = keys_of[a], D = D_of[b], nr = k->nr,
                              depth = esa_pad_depth(k, D), first = (keys + 1) / 2;
                const int64_t in_place = k->packed_bytes == 4, stride = in_place ? D + 3 : D;
                esa_rng r = { test_seed() + a + 10 * b };
                float *q = random_rows(&r, nr * D), *kk = random_rows(&r, keys * stride),
                      *v = random_rows(&r, keys * stride);
                void *qp = aligned_bytes(esa_k_pack_bytes(k, nr, D));
                const float factor = 0.7f;
                /* the tile set leaves the factor to softmax */
                const double left = k->begin ? (double)factor : 1.0;
                double *want = dots(q, kk, nr, keys, stride, D, factor);
                guarded sg = guard_alloc(esa_pad_keys(k, keys) * nr * 4, 0),
                        pg = guard_alloc(esa_pad_keys(k, keys) * nr * k->packed_bytes, 0),
                        og = guard_alloc(D * nr * 4, 0);
                float *o = og.data, m[ESA_CPU_MAX_NR], l[ESA_CPU_MAX_NR] = { 0 },
                      alpha[ESA_CPU_MAX_NR];
                k->panel_q(qp, q, ESA_DTYPE_F32, D, NULL, nr, D, factor);
                for (int64_t i = 0; i < nr; i++) m[i] = -INFINITY;
                for (int64_t from = 0; from < keys; from += first) {
                    const int64_t n = esa_min64(first, keys - from);
                    const void *rows_k = kk + from * stride, *rows_v = v + from * stride;
                    void *copy_k = aligned_bytes(esa_rows_k_bytes(k, n, D)),
                         *copy_v = aligned_bytes(esa_rows_v_bytes(k, n, D));
                    if (!in_place) {
                        k->rows_k(copy_k, rows_k, ESA_DTYPE_F32, stride, NULL, n, D);
                        k->rows_v(copy_v, rows_v, ESA_DTYPE_F32, stride, NULL, n, D);
                        rows_k = copy_k;
                        rows_v = copy_v;
                    }
                    k->kq(sg.data, qp, rows_k, in_place ? stride : depth, n, depth, factor);
                    for (int64_t i = 0; i < nr; i++)
                        for (int64_t j = 0; j < n; j++) /* D products of size <= 1, each rounded
                                                           once to 2^-24, and the factor once */
                            assert_true(fabs((double)((float *)sg.data)[j * nr + i] * left -
                                             want[i * keys + from + j]) <=
                                        (double)(D + 2) * 0x1p-23);
                    const int32_t moved = k->softmax(in_place ? sg.data : pg.data, sg.data, n,
                                                     factor, NULL, NULL, m, l, alpha);
                    assert_true(moved == 1 || from);
                    k->pv(o, in_place ? sg.data : pg.data, rows_v, stride, n, D,
                          from ? alpha : NULL, from > 0);
                    assert_true(guard_check(&sg) && guard_check(&pg) && guard_check(&og));
                    free(copy_k);
                    free(copy_v);
                }
                for (int64_t i = 0; i < nr; i++) {
                    double sum = 0.0;
                    const double ref_m = (double)m[i];
                    for (int64_t j = 0; j < keys; j++) sum += exp2(want[i * keys + j] - ref_m);
                    /* score error (D+2) 2^-23 in log2 units times ln 2, plus 4 ulp of the
                     * polynomial (twice: alpha), plus the adds */
                    const double rel = (double)(D + 2) * 0x1p-22 +
                                       (double)(12 + keys / 2) * 0x1p-23 + weight_error(k);
                    assert_true(fabs((double)l[i] - sum) <= rel * sum);
                    for (int64_t d = 0; d < D; d++) {
                        double ref = 0.0;
                        for (int64_t j = 0; j < keys; j++)
                            ref += exp2(want[i * keys + j] - ref_m) * (double)v[j * stride + d];
                        const double p_round = in_place ? 0.0 : 0x1p-8; /* the bf16 set rounds p */
                        assert_true(fabs((double)o[d * nr + i] - ref) <=
                                    (rel + p_round + (double)keys * 0x1p-24) * sum);
                    }
                }
                free(want);
                free(q);
                free(kk);
                free(v);
                free(qp);
                guard_free(&sg);
                guard_free(&pg);
                guard_free(&og);
            }
}

/* A block is added up before it meets the sums of earlier blocks. If these are 2^24 and every term
 * is 1, adding one term at a time would stay at 2^24. */
static void test_block_sums(void **state)
{
    enum { KEYS = 38, ROWS = 64, D = 23 }; /* even: one ulp above 2^24 is 2 */
    (void)state;
    for (int s = 0; s < sets; s++)
        for (int32_t rescale = 0; rescale < 2; rescale++) {
            const esa_cpu_kernels *k = set[s];
            const int64_t nr = k->nr;
            const float old = rescale ? 0x1p25f : 0x1p24f; /* alpha is 1/2 if they are rescaled */
            float sc[ROWS * ESA_CPU_MAX_NR], p[ROWS * ESA_CPU_MAX_NR], v[KEYS * D],
                o[D * ESA_CPU_MAX_NR], m[ESA_CPU_MAX_NR], l[ESA_CPU_MAX_NR], alpha[ESA_CPU_MAX_NR];
            float *probability = k->packed_bytes == 4 ? sc : p;
            void *values = aligned_bytes(esa_rows_v_bytes(k, KEYS, D));
            for (int64_t i = 0; i < KEYS * nr; i++) sc[i] = 3.0f;
            for (int64_t i = 0; i < KEYS * D; i++) v[i] = 1.0f;
            for (int64_t i = 0; i < D * nr; i++) o[i] = old;
            for (int64_t i = 0; i < nr; i++) {
                m[i] = 3.0f;
                l[i] = 0x1p24f;
            }
            k->rows_v(values, v, ESA_DTYPE_F32, D, NULL, KEYS, D);
            k->softmax(probability, sc, KEYS, 1.0f, NULL, NULL, m, l, alpha);
            for (int64_t i = 0; i < nr; i++) assert_true(l[i] == 0x1p24f + KEYS);
            for (int64_t i = 0; i < nr; i++) alpha[i] = 0.5f;
            k->pv(o, probability, values, D, KEYS, D, rescale ? alpha : NULL, 1);
            for (int64_t i = 0; i < D * nr; i++) assert_true(o[i] == 0x1p24f + KEYS);
            /* accumulate 0 reads neither o nor alpha */
            for (int64_t i = 0; i < D * nr; i++) o[i] = NAN;
            for (int64_t i = 0; i < nr; i++) alpha[i] = NAN;
            k->pv(o, probability, values, D, KEYS, D, rescale ? alpha : NULL, 0);
            for (int64_t i = 0; i < D * nr; i++) assert_true(o[i] == (float)KEYS);
            free(values);
        }
}

/* Weight of key c and query i as softmax wrote it: over the scores, or in the pairs of rows_v. */
static double weight_at(const esa_cpu_kernels *k, const void *p, int64_t c, int64_t i)
{
    const int64_t U = k->keys_unit, place = U == 32 ? c % 16 * 2 + c % 32 / 16 : c % U;
    if (k->packed_bytes == 4) return (double)((const float *)p)[c * k->nr + i];
    if (U == 4)
        return (double)esa_bf16_to_f32(((const uint16_t *)p)[(c / 4 * k->nr + i) * 4 + c % 4]);
    return (double)esa_bf16_to_f32(
        ((const uint16_t *)p)[(c / U * U + place / 2 * 2) * k->nr + 2 * i + place % 2]);
}

/* Limits, bias, -inf, the lazy maximum and NaN. sign: of the factor, which the tile set applies
 * here. */
static void check_softmax_rules(const esa_cpu_kernels *k, float sign)
{
    const int64_t nr = k->nr, keys = 37;
    const float factor = k->begin ? 0.5f * sign : 1.0f, score = 1.0f / factor;
    /* 4 ulp of the polynomial; 16-bit sets round to bf16 besides */
    const double unit = 4 * 0x1p-23 + (k->packed_bytes == 2 ? 0x1p-8 : 0.0) + weight_error(k),
                 exact = 4 * 0x1p-23 + weight_error(k);
    float sc[64 * ESA_CPU_MAX_NR], room[64 * ESA_CPU_MAX_NR], m[ESA_CPU_MAX_NR],
        l[ESA_CPU_MAX_NR] = { 0 }, alpha[ESA_CPU_MAX_NR], bias[64] = { 0 },
        limit[ESA_CPU_MAX_NR] = { 0 };
    void *p = k->packed_bytes == 4 ? sc : room;
    for (int64_t i = 0; i < nr; i++) {
        m[i] = -INFINITY;
        limit[i] = i == 0 ? 0.0f : (float)(i * 5 % 38);
        for (int64_t c = 0; c < keys; c++)
            sc[c * nr + i] = score * ((float)((i * 13 + c * 7) % 11) - 5.0f);
    }
    bias[3] = -INFINITY;
    bias[4] = 2.0f;
    k->softmax(p, sc, keys, factor, limit, bias, m, l, alpha);
    for (int64_t i = 0; i < nr; i++) {
        double top = -INFINITY;
        for (int64_t c = 0; c < (int64_t)limit[i]; c++)
            top = fmax(top, (double)((i * 13 + c * 7) % 11) - 5.0 + (double)bias[c]);
        assert_true((double)m[i] == top);
        for (int64_t c = 0; c < keys; c++) {
            const double x = c < (int64_t)limit[i]
                                 ? (double)((i * 13 + c * 7) % 11) - 5.0 + (double)bias[c]
                                 : -INFINITY;
            const double want = x == -INFINITY ? 0.0 : exp2(x - top);
            /* exact 0 where nothing is seen */
            assert_true(fabs(weight_at(k, p, c, i) - want) <= unit * want);
        }
        for (int64_t c = keys; c < esa_pad_keys(k, keys); c++)
            assert_true(weight_at(k, p, c, i) == 0.0);
    }
    /* an empty row has sum 0 and stays at -inf */
    assert_true(l[0] == 0.0f && m[0] == -INFINITY);
    /* A maximum that grows by 8 or less does not move; by more, it does; the neighbours do not
     * notice. */
    for (int64_t i = 0; i < nr; i++) {
        m[i] = i == 1 ? -7.5f : -7.0f;
        l[i] = 1.0f;
        for (int64_t c = 0; c < 16; c++) sc[c * nr + i] = score;
    }
    assert_int_equal(k->softmax(p, sc, 16, factor, NULL, NULL, m, l, alpha), 1);
    assert_true(m[0] == -7.0f && alpha[0] == 1.0f && weight_at(k, p, 0, 0) == 256.0 &&
                l[0] == 1.0f + 16 * 256.0f);
    assert_true(m[1] == 1.0f && fabs((double)alpha[1] - exp2(-8.5)) <= exact * exp2(-8.5) &&
                weight_at(k, p, 0, 1) == 1.0);
    /* 16 ones, and the old sum 1 times alpha; f32 rounds a sum of 16 at 2^-20 */
    assert_true(fabs((double)l[1] - 16.0 - exp2(-8.5)) <= 0x1p-20);
    /* NaN stays NaN, wherever it stands, whatever its payload; +inf becomes NaN; other queries
     * are untouched. */
    const uint32_t payload[] = { 0x7fc00000u, 0x7fc001ffu, 0xffd55555u };
    for (int t = 0; t < 4; t++) {
        for (int64_t c = 0; c < 20 * nr; c++) sc[c] = 0.5f * score;
        for (int64_t i = 0; i < nr; i++) {
            m[i] = -INFINITY;
            l[i] = 0.0f;
        }
        sc[11 * nr + 2] = t < 3 ? esa_f32_from_bits(payload[t]) : (float)INFINITY * score;
        k->softmax(p, sc, 20, factor, NULL, NULL, m, l, alpha);
        assert_true(isnan((double)l[2]) && isnan(weight_at(k, p, 11, 2)));
        for (int64_t i = 0; i < nr; i++) assert_true(i == 2 || l[i] == 20.0f);
    }
}

static void test_softmax_rules(void **state)
{
    (void)state;
    for (int s = 0; s < sets; s++) {
        check_softmax_rules(set[s], 1.0f);
        if (set[s]->begin) check_softmax_rules(set[s], -1.0f);
    }
}

static void test_small_slots(void **state)
{
    (void)state;
    for (int s = 0; s < sets; s++) {
        const esa_cpu_kernels *k = set[s];
        /* store and stream: the rounding of half.h, bit for bit; rows scattered, only those that
         * exist. stream is given aligned rows too, as only those go past the cache. */
        static const int64_t D_of[] = { 1, 15, 16, 33, 128, 255 };
        for (size_t a = 0; a < 6; a++)
            for (int32_t dtype = 0; dtype < 3; dtype++)
                for (int64_t rows = 1; rows <= k->nr; rows += 5)
                    for (int32_t past_cache = 0; past_cache < (k->stream ? 3 : 1); past_cache++) {
                        const int64_t D = D_of[a], size = esa_dtype_size(dtype);
                        float o[256 * ESA_CPU_MAX_NR], factor[ESA_CPU_MAX_NR];
                        int32_t scatter[ESA_CPU_MAX_NR];
                        esa_rng r = { test_seed() + a };
                        for (int64_t d = 0; d < D * k->nr; d++)
                            o[d] = esa_f32_from_bits((uint32_t)(esa_rng_next(&r) >> 32));
                        for (int64_t i = 0; i < k->nr; i++) {
                            factor[i] = i % 2 ? 1.0f : 0.5f;
                            scatter[i] = (int32_t)(rows - 1 - i);
                        }
                        o[0] = 2 * 65519.9f;
                        guarded g = guard_alloc(rows * D * size, past_cache != 2);
                        if (past_cache == 2) assert_true((uintptr_t)g.data % 64 == 0);
                        (past_cache ? k->stream : k->store)(
                            g.data, dtype, D, rows % 2 ? scatter : NULL, o, factor, rows, D);
                        assert_true(guard_check(&g));
                        for (int64_t i = 0; i < rows; i++)
                            for (int64_t d = 0; d < D; d++) {
                                const float x = o[d * k->nr + i] * factor[i];
                                char want[4], *got = (char *)g.data +
                                                     ((rows % 2 ? scatter[i] : i) * D + d) * size;
                                esa_store_f32(want, 0, dtype, x);
                                if (isnan((double)x))
                                    assert_true(isnan((double)esa_load_f32(got, 0, dtype)));
                                else
                                    assert_memory_equal(got, want, (size_t)size);
                            }
                        guard_free(&g);
                    }
        /* stats and mean */
        float sc[ESA_CPU_MAX_MR * 128], top[ESA_CPU_MAX_MR * 8], sum[ESA_CPU_MAX_MR * 8];
        esa_rng r = { test_seed() };
        for (int64_t i = 0; i < k->mr * 128; i++) sc[i] = 30.0f * esa_rng_unit(&r) - 15.0f;
        for (int64_t c = 16; c < 32; c++) sc[c] = -INFINITY;
        for (int64_t keys = 90; keys <= 128; keys += 19)
            for (int64_t group = 16; group <= 128; group *= 2) {
                if (!k->stats) continue;
                k->stats(top, sum, 8, sc, 128, k->mr, keys, group);
                for (int64_t i = 0; i < k->mr; i++)
                    for (int64_t g = 0; g * group < keys; g++) {
                        double t = -INFINITY, e = 0.0;
                        const int64_t end = esa_min64(keys, (g + 1) * group);
                        for (int64_t c = g * group; c < end; c++)
                            t = fmax(t, (double)sc[i * 128 + c]);
                        for (int64_t c = g * group; c < end && t > -INFINITY; c++)
                            e += exp2((double)sc[i * 128 + c] - t);
                        assert_true((double)top[i * 8 + g] == t);
                        /* polynomial and a short sum */
                        assert_true(fabs((double)sum[i * 8 + g] - e) <= 16 * 0x1p-23 * e);
                    }
            }
        for (int32_t dtype = 0; dtype < 3; dtype++)
            for (int64_t D = 1; D <= 256; D += 51) {
                float src[7 * 256], got[256];
                esa_tensor t = esa_tensor_bnsd(src, dtype, 1, 1, 7, D);
                tensor_fill(&t, 5, 1.0);
                const int32_t gather[4] = { 6, 0, 3, 1 };
                k->mean(got, src, dtype, D, gather, 4, D);
                for (int64_t d = 0; d < D; d++) {
                    double want = 0.0;
                    for (int i = 0; i < 4; i++)
                        want += (double)esa_load_f32(src, gather[i] * D + d, dtype) / 4;
                    assert_true(fabs((double)got[d] - want) <= 4 * 0x1p-23);
                }
            }
    }
}

/* fold and residue, which only sets with selector slots have. */
static void test_error_slots(void **state)
{
    (void)state;
    static const int64_t D_of[] = { 1, 3, 4, 12, 40, 127 };
    enum { NR = ESA_CPU_MAX_NR, MEANS = 4, D_MAX = 127 };
    for (int s = 0; s < sets; s++) {
        const esa_cpu_kernels *k = set[s];
        const int64_t nr = k->nr;
        if (!k->fold) continue;
        float *src = malloc(9 * 5 * NR * sizeof *src), *a = malloc(D_MAX * NR * sizeof *a),
              *o = malloc(D_MAX * NR * sizeof *o);
        float w[NR], t[MEANS * NR], v[MEANS * (D_MAX + 2)], before[5 * NR];
        assert_true(src && a && o);
        esa_rng r = { test_seed() + (uint64_t)s };
        for (int i = 0; i < 9 * 5 * NR; i++) src[i] = 2.0f * esa_rng_unit(&r) - 1.0f;
        for (int i = 0; i < 5 * NR; i++) before[i] = esa_rng_unit(&r);
        for (int64_t rows = 0; rows <= 9; rows++)
            for (int64_t n = nr; n <= 5 * nr; n += 2 * nr)
                for (int32_t accumulate = 0; accumulate < 2; accumulate++) {
                    guarded g = guard_alloc(n * 4, 0);
                    float *got = g.data;
                    memcpy(got, before, (size_t)n * 4);
                    k->fold(got, src, rows, n, accumulate);
                    assert_true(guard_check(&g));
                    for (int64_t i = 0; i < n; i++) {
                        double want = accumulate ? (double)before[i] : 0.0;
                        for (int64_t j = 0; j < rows; j++) want += (double)src[j * n + i];
                        /* at most 10 sums of values below 10 */
                        assert_true(fabs((double)got[i] - want) <= 10 * 10 * 0x1p-24);
                    }
                    guard_free(&g);
                }
        for (int i = 0; i < D_MAX * NR; i++) {
            a[i] = 2.0f * esa_rng_unit(&r) - 1.0f;
            o[i] = 2.0f * esa_rng_unit(&r) - 1.0f;
        }
        for (int i = 0; i < NR; i++) w[i] = esa_rng_unit(&r);
        for (int i = 0; i < MEANS * NR; i++) t[i] = esa_rng_unit(&r);
        for (int i = 0; i < MEANS * (D_MAX + 2); i++) v[i] = 2.0f * esa_rng_unit(&r) - 1.0f;
        for (size_t c = 0; c < 6; c++)
            for (int64_t means = 0; means <= MEANS; means++) {
                const int64_t D = D_of[c], stride = D + 2;
                guarded g = guard_alloc(nr * 4, 0);
                float *e = g.data;
                for (int64_t i = 0; i < nr; i++) e[i] = 0.5f;
                k->residue(e, a, o, w, t, v, stride, means, D);
                assert_true(guard_check(&g));
                for (int64_t i = 0; i < nr; i++) {
                    double rest = (double)w[i], want = 0.5;
                    for (int64_t m = 0; m < means; m++) rest -= (double)t[m * nr + i];
                    for (int64_t d = 0; d < D; d++) {
                        double x = (double)a[d * nr + i] - rest * (double)o[d * nr + i];
                        for (int64_t m = 0; m < means; m++)
                            x -= (double)t[m * nr + i] * (double)v[m * stride + d];
                        want += x * x;
                    }
                    /* x is a sum of 6 numbers below 5; then D squares in one chain */
                    assert_true(fabs((double)e[i] - want) <= (40.0 + (double)D) * 0x1p-23 * want);
                }
                guard_free(&g);
            }
        free(src);
        free(a);
        free(o);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pack),          cmocka_unit_test(test_qk),
        cmocka_unit_test(test_products),      cmocka_unit_test(test_block_sums),
        cmocka_unit_test(test_softmax_rules), cmocka_unit_test(test_small_slots),
        cmocka_unit_test(test_error_slots),
    };
    return cmocka_run_group_tests(tests, find_sets, NULL);
}
