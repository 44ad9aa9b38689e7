/* test_kernels.c - every slot of every kernel table this machine can run, against plain double arithmetic.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Sizes are awkward on purpose, outputs stand between guard bytes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "base/rng.h"
#include "cpu/cpu.h"
#include "common/bf16_emulated.h"
#include "common/naive.h"

static const esa_cpu_kernels *set[8];
static int sets;

static int find_sets(void **state)
{
    (void)state;
    for (int32_t level = ESA_CPU_REF; level <= ESA_CPU_NEON; level++) {
        const esa_cpu_kernels *k = esa_cpu_kernels_get(level);
        if (!k) continue;
        set[sets++] = k;
        if (k->bf16) set[sets++] = k->bf16;
    }
    if (bf16_emulated()) set[sets++] = bf16_emulated()->bf16;
    printf("kernel sets:");
    for (int i = 0; i < sets; i++) printf(" %s/%d", set[i]->name, (int)set[i]->packed_bytes * 8);
    printf(", seed %llu\n", (unsigned long long)test_seed());
    return sets ? 0 : -1;
}

static double round_packed(const esa_cpu_kernels *k, double x)
{
    return k->packed_bytes == 2 ? (double)esa_round_to((float)x, ESA_DTYPE_BF16) : x;
}

/* Element (panel row w, column d) of a Q or K pack; the bf16 set keeps pairs along d. */
static double packed_at(const esa_cpu_kernels *k, const void *pack, int64_t W, int64_t D, int64_t row, int64_t d)
{
    const int64_t depth = esa_pad_depth(k, D), panel = row / W, w = row % W;
    if (k->packed_bytes == 4) return (double)((const float *)pack)[(panel * depth + d) * W + w];
    return (double)esa_bf16_to_f32(((const uint16_t *)pack)[panel * depth * W + (d / 2 * W + w) * 2 + d % 2]);
}

static void test_pack(void **state)
{
    (void)state;
    static const int64_t rows_of[] = { 1, 5, 12, 31, 33, 128 }, D_of[] = { 1, 3, 16, 40, 64, 72, 128, 255 };
    for (int s = 0; s < sets; s++)
        for (size_t a = 0; a < 6; a++)
            for (size_t b = 0; b < 8; b++)
                for (int32_t dtype = 0; dtype < 3; dtype++) {
                    const esa_cpu_kernels *k = set[s];
                    const int64_t rows = rows_of[a], D = D_of[b], stride = D + 3, v_rows = (rows + 3) / 2 * 2;
                    char *src = malloc((size_t)(2 * rows * stride * 4 + 1));
                    esa_tensor t = esa_tensor_bnsd(src + 1, dtype, 1, 1, 2 * rows, D);     /* misaligned by one byte */
                    t.stride[2] = stride;
                    tensor_fill(&t, test_seed() + a * 100 + b, 2.0);
                    int32_t *gather = malloc((size_t)rows * 4);
                    for (int64_t i = 0; i < rows; i++) gather[i] = (int32_t)((i * 7 + 3) % (2 * rows));
                    guarded q = guard_alloc(esa_q_pack_bytes(k, rows, D), 0), kk = guard_alloc(esa_k_pack_bytes(k, rows, D), 0);
                    guarded v = guard_alloc(esa_v_pack_bytes(k, v_rows, D), 0);
                    k->pack_q(q.data, t.data, dtype, stride, gather, rows, D, 0.5f);
                    k->pack_k(kk.data, t.data, dtype, stride, NULL, rows, D);
                    k->pack_v(v.data, t.data, dtype, stride, gather, rows, v_rows, D);
                    assert_true(guard_check(&q) && guard_check(&kk) && guard_check(&v));
                    const int64_t all = esa_ceil_div(rows, k->nr) * k->nr;
                    for (int64_t i = 0; i < all; i++)
                        for (int64_t d = 0; d < D; d++) {
                            const double plain = i < rows ? (double)esa_load_f32(t.data, i * stride + d, dtype) : 0.0;
                            assert_true(packed_at(k, kk.data, k->nr, D, i, d) == round_packed(k, plain));
                            if (i >= esa_ceil_div(rows, k->mr) * k->mr) continue;
                            const double moved = i < rows ? (double)esa_load_f32(t.data, gather[i] * stride + d, dtype) : 0.0;
                            const double factor = k->packed_bytes == 2 ? 1.0 : 0.5;       /* the bf16 set scales in qk */
                            assert_true(packed_at(k, q.data, k->mr, D, i, d) == round_packed(k, moved * factor));
                        }
                    for (int64_t i = 0; i < v_rows; i++)
                        for (int64_t d = 0; d < esa_ceil_div(D, k->dr) * k->dr; d++) {
                            const double want = i < rows && d < D ? (double)esa_load_f32(t.data, gather[i] * stride + d, dtype) : 0.0;
                            const int64_t panel = d / k->dr * v_rows * k->dr, c = d % k->dr;
                            const double got = k->packed_bytes == 4 ? (double)((float *)v.data)[panel + i * k->dr + c]
                                : (double)esa_bf16_to_f32(((uint16_t *)v.data)[panel + (i / 2 * k->dr + c) * 2 + i % 2]);
                            assert_true(got == round_packed(k, want));
                        }
                    guard_free(&q); guard_free(&kk); guard_free(&v);
                    free(src); free(gather);
                }
}

/* qk, softmax and pv in a row, as attention calls them, against double. */
static void test_products(void **state)
{
    (void)state;
    static const int64_t keys_of[] = { 1, 7, 16, 31, 100, 128, 256 }, D_of[] = { 1, 5, 64, 80, 128, 256 };
    for (int s = 0; s < sets; s++)
        for (size_t a = 0; a < 7; a++)
            for (size_t b = 0; b < 6; b++)
                for (int64_t rows = 1; rows <= set[s]->mr; rows++) {
                    const esa_cpu_kernels *k = set[s];
                    const int64_t keys = keys_of[a], D = D_of[b], ld = 256, v_rows = (keys + 1) / 2 * 2, d_pad = esa_ceil_div(D, k->dr) * k->dr;
                    esa_rng r = { test_seed() + a + 10 * b + 100 * (uint64_t)rows };
                    float *q = malloc((size_t)(rows * D) * 4), *kk = malloc((size_t)(keys * D) * 4), *v = malloc((size_t)(keys * D) * 4);
                    for (int64_t i = 0; i < rows * D; i++) q[i] = esa_round_to(2.0f * esa_rng_unit(&r) - 1.0f, ESA_DTYPE_BF16);
                    for (int64_t i = 0; i < keys * D; i++) kk[i] = esa_round_to(2.0f * esa_rng_unit(&r) - 1.0f, ESA_DTYPE_BF16);
                    for (int64_t i = 0; i < keys * D; i++) v[i] = esa_round_to(2.0f * esa_rng_unit(&r) - 1.0f, ESA_DTYPE_BF16);
                    void *qp = aligned_alloc(64, (size_t)esa_ceil_div(esa_q_pack_bytes(k, rows, D), 64) * 64);
                    void *kp = aligned_alloc(64, (size_t)esa_ceil_div(esa_k_pack_bytes(k, keys, D), 64) * 64);
                    void *vp = aligned_alloc(64, (size_t)esa_ceil_div(esa_v_pack_bytes(k, v_rows, D), 64) * 64);
                    const float factor = 0.7f;
                    k->pack_q(qp, q, ESA_DTYPE_F32, D, NULL, rows, D, factor);
                    k->pack_k(kp, kk, ESA_DTYPE_F32, D, NULL, keys, D);
                    k->pack_v(vp, v, ESA_DTYPE_F32, D, NULL, keys, v_rows, D);
                    guarded sg = guard_alloc(k->mr * ld * 4, 0), pg = guard_alloc(k->mr * ld * 4, 0), og = guard_alloc(k->mr * d_pad * 4, 0);
                    float *sc = sg.data, *o = og.data, m[ESA_CPU_MAX_MR], l[ESA_CPU_MAX_MR * ESA_CPU_MAX_LANES], alpha[ESA_CPU_MAX_MR];
                    void *p = k->packed_bytes == 2 ? pg.data : sg.data;
                    k->qk(sc, ld, qp, kp, rows, keys, esa_pad_depth(k, D), factor, 0);
                    double *want = malloc((size_t)(rows * keys) * 8);
                    for (int64_t i = 0; i < rows; i++)
                        for (int64_t j = 0; j < keys; j++) {
                            double dot = 0.0;
                            for (int64_t d = 0; d < D; d++) dot += (double)q[i * D + d] * (double)kk[j * D + d];
                            want[i * keys + j] = dot * (double)factor;
                            /* D products of size <= 1, each rounded once to 2^-24, and the factor once */
                            assert_true(fabs((double)sc[i * ld + j] - want[i * keys + j]) <= (double)(D + 2) * 0x1p-23);
                        }
                    /* accumulate adds the same product once more */
                    k->qk(sc, ld, qp, kp, rows, keys, esa_pad_depth(k, D), factor, 1);
                    for (int64_t i = 0; i < rows; i++)
                        for (int64_t j = 0; j < keys; j++)
                            assert_true(fabs((double)sc[i * ld + j] - 2 * want[i * keys + j]) <= 2.0 * (double)(D + 2) * 0x1p-22);
                    k->qk(sc, ld, qp, kp, rows, keys, esa_pad_depth(k, D), factor, 0);
                    for (int64_t i = 0; i < rows; i++) {
                        m[i] = -INFINITY;
                        for (int64_t c = 0; c < k->lanes; c++) l[i * k->lanes + c] = 0.0f;
                        for (int64_t d = 0; d < d_pad; d++) o[i * d_pad + d] = 0.0f;
                    }
                    const int32_t moved = k->softmax(p, sc, ld, rows, keys, NULL, NULL, m, l, alpha);
                    assert_int_equal(moved, 1);
                    k->pv(o, d_pad, p, ld, vp, v_rows, rows, keys, D, alpha);
                    assert_true(guard_check(&sg) && guard_check(&pg) && guard_check(&og));
                    for (int64_t i = 0; i < rows; i++) {
                        double sum = 0.0, top = -INFINITY, got = 0.0;
                        for (int64_t c = 0; c < k->lanes; c++) got += (double)l[i * k->lanes + c];
                        for (int64_t j = 0; j < keys; j++) top = fmax(top, want[i * keys + j]);
                        for (int64_t j = 0; j < keys; j++) sum += exp2(want[i * keys + j] - top);
                        assert_true(fabs((double)m[i] - top) <= (double)(D + 2) * 0x1p-23);
                        /* score error (D+2) 2^-23 in log2 units times ln 2, plus 4 ulp of the polynomial, plus the adds */
                        const double rel = (double)(D + 2) * 0x1p-22 + 8 * 0x1p-23;
                        assert_true(fabs(got - sum) <= rel * sum);
                        for (int64_t d = 0; d < D; d++) {
                            double ref = 0.0;
                            for (int64_t j = 0; j < keys; j++) ref += exp2(want[i * keys + j] - top) * (double)v[j * D + d];
                            const double p_round = k->packed_bytes == 2 ? 0x1p-8 : 0.0;   /* the bf16 set rounds p */
                            assert_true(fabs((double)o[i * d_pad + d] - ref) <= (rel + p_round + (double)keys * 0x1p-24) * sum);
                        }
                    }
                    free(want); free(q); free(kk); free(v); free(qp); free(kp); free(vp);
                    guard_free(&sg); guard_free(&pg); guard_free(&og);
                }
}

/* Limits, bias, -inf, the lazy maximum and NaN. */
static void test_softmax_rules(void **state)
{
    (void)state;
    for (int s = 0; s < sets; s++) {
        const esa_cpu_kernels *k = set[s];
        if (k->packed_bytes == 2) continue;                     /* its softmax is the f32 one plus a rounding */
        const int64_t ld = 64, keys = 37;
        float sc[ESA_CPU_MAX_MR * 64], m[ESA_CPU_MAX_MR], l[ESA_CPU_MAX_MR * ESA_CPU_MAX_LANES] = { 0 }, alpha[ESA_CPU_MAX_MR], bias[64] = { 0 };
        int32_t limit[ESA_CPU_MAX_MR];
        for (int64_t i = 0; i < k->mr; i++) {
            m[i] = -INFINITY;
            limit[i] = i == 0 ? 0 : (int32_t)(i * 5 % 38);
            for (int64_t c = 0; c < ld; c++) sc[i * ld + c] = (float)((i * 13 + c * 7) % 11) - 5.0f;
        }
        bias[3] = -INFINITY;
        bias[4] = 2.0f;
        k->softmax(sc, sc, ld, k->mr, keys, limit, bias, m, l, alpha);
        for (int64_t i = 0; i < k->mr; i++) {
            double top = -INFINITY;
            for (int64_t c = 0; c < limit[i]; c++) top = fmax(top, (double)((i * 13 + c * 7) % 11) - 5.0 + (double)bias[c]);
            assert_true((double)m[i] == top);
            for (int64_t c = 0; c < keys; c++) {
                const double x = c < limit[i] ? (double)((i * 13 + c * 7) % 11) - 5.0 + (double)bias[c] : -INFINITY;
                const double want = x == -INFINITY ? 0.0 : exp2(x - top);
                assert_true(fabs((double)sc[i * ld + c] - want) <= 4 * 0x1p-23 * want);   /* exact 0 where nothing is seen */
            }
        }
        /* An empty row has sum 0 and stays at -inf. */
        double sum = 0.0;
        for (int64_t c = 0; c < k->lanes; c++) sum += (double)l[c];
        assert_true(sum == 0.0 && m[0] == -INFINITY);
        /* A maximum that grows by 8 or less does not move; by more, it does. */
        for (int64_t c = 0; c < 16; c++) { sc[c] = 1.0f; sc[ld + c] = 1.0f; }
        m[0] = -7.0f;
        m[1] = -7.5f;
        for (int64_t c = 0; c < 2 * k->lanes; c++) l[c] = 1.0f;
        assert_int_equal(k->softmax(sc, sc, ld, 2, 16, NULL, NULL, m, l, alpha), 1);
        assert_true(m[0] == -7.0f && alpha[0] == 1.0f && sc[0] == 256.0f);
        assert_true(m[1] == 1.0f && alpha[1] == exp2f(-8.5f) && sc[ld] == 1.0f);
        /* NaN stays NaN, wherever it stands, whatever its payload; +inf becomes NaN; other rows are untouched. */
        const uint32_t payload[] = { 0x7fc00000u, 0x7fc001ffu, 0xffd55555u };
        for (int t = 0; t < 4; t++) {
            for (int64_t c = 0; c < 32; c++) sc[c] = sc[ld + c] = 0.5f;
            sc[11] = t < 3 ? esa_f32_from_bits(payload[t]) : INFINITY;
            m[0] = m[1] = -INFINITY;
            for (int64_t c = 0; c < 2 * k->lanes; c++) l[c] = 0.0f;
            k->softmax(sc, sc, ld, 2, 20, NULL, NULL, m, l, alpha);
            double a = 0.0, b = 0.0;
            for (int64_t c = 0; c < k->lanes; c++) { a += (double)l[c]; b += (double)l[k->lanes + c]; }
            assert_true(isnan(a) && isnan((double)sc[11]));
            assert_true(b == 20.0);
        }
    }
}

static void test_small_slots(void **state)
{
    (void)state;
    for (int s = 0; s < sets; s++) {
        const esa_cpu_kernels *k = set[s];
        /* store: the rounding of half.h, bit for bit */
        static const int64_t D_of[] = { 1, 15, 16, 33, 128, 255 };
        for (size_t a = 0; a < 6; a++)
            for (int32_t dtype = 0; dtype < 3; dtype++) {
                const int64_t D = D_of[a];
                float src[256];
                esa_rng r = { test_seed() + a };
                for (int64_t d = 0; d < D; d++) src[d] = esa_f32_from_bits((uint32_t)(esa_rng_next(&r) >> 32));
                src[0] = 65519.9f;
                guarded g = guard_alloc(D * esa_dtype_size(dtype), 1);
                k->store(g.data, dtype, src, 1.0f, D);
                assert_true(guard_check(&g));
                for (int64_t d = 0; d < D; d++) {
                    char want[4], *got = (char *)g.data + d * esa_dtype_size(dtype);
                    esa_store_f32(want, 0, dtype, src[d]);
                    if (isnan((double)src[d])) assert_true(isnan((double)esa_load_f32(got, 0, dtype)));
                    else assert_memory_equal(got, want, (size_t)esa_dtype_size(dtype));
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
                k->stats(top, sum, 8, sc, 128, k->mr, keys, group);
                for (int64_t i = 0; i < k->mr; i++)
                    for (int64_t g = 0; g * group < keys; g++) {
                        double t = -INFINITY, e = 0.0;
                        const int64_t end = esa_min64(keys, (g + 1) * group);
                        for (int64_t c = g * group; c < end; c++) t = fmax(t, (double)sc[i * 128 + c]);
                        for (int64_t c = g * group; c < end && t > -INFINITY; c++) e += exp2((double)sc[i * 128 + c] - t);
                        assert_true((double)top[i * 8 + g] == t);
                        assert_true(fabs((double)sum[i * 8 + g] - e) <= 16 * 0x1p-23 * e);   /* polynomial and a short sum */
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
                    for (int i = 0; i < 4; i++) want += (double)esa_load_f32(src, gather[i] * D + d, dtype) / 4;
                    assert_true(fabs((double)got[d] - want) <= 4 * 0x1p-23);
                }
            }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pack),
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_softmax_rules),
        cmocka_unit_test(test_small_slots),
    };
    return cmocka_run_group_tests(tests, find_sets, NULL);
}
