/* test_gpu_attention.c - attention at the sizes of the GPU's tiles, on each set of kernels, against
 * the textbook in double.
 * SPDX-License-Identifier: Apache-2.0
 *
 * tests/api/test_attention.c runs on the GPU, too; its small odd shapes land on the general
 * kernels. Here every case fits the fast ones: head dims 64 and 128, f16 and bf16, blocks of 64,
 * 128 and 256. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/attention_case.h"
#include "common/naive.h"
#include "common/on_gpu.h"

static int32_t level_of[8];
static int levels;

static int find_levels(void **state)
{
    int native;
    (void)state;
    levels = find_test_levels(level_of, &native);
    printf("%d levels, seed %llu\n", levels, (unsigned long long)test_seed());
    return levels ? 0 : -1;
}

/* Under a sanitizer ($ESA_TEST_SMALL) every fifth case has to do: the counter runs through all
 * tests, so each gets some. */
static void check(const attention_case *c)
{
    static int number;
    if (!getenv("ESA_TEST_SMALL") || number++ % 5 == 0) check_attention(c, level_of, levels, 2);
}

static void both_dims(attention_case c)
{
    for (c.D = 64; c.D <= 128; c.D += 64) check(&c);
}

/* Lengths around the edges of tiles, dense and with a mask, both short types. */
static void lengths(void **state)
{
    static const int64_t size[][2] = { { 1, 1 },     { 1, 129 },  { 127, 127 }, { 128, 128 },
                                       { 129, 255 }, { 257, 64 }, { 383, 385 }, { 513, 130 } };
    (void)state;
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
        for (int dense = 0; dense < 2; dense++)
            both_dims((attention_case){ .B = 1,
                                        .Hq = 2,
                                        .Hkv = 2,
                                        .Nq = size[i][0],
                                        .Nk = size[i][1],
                                        .dtype = i % 2 ? ESA_DTYPE_BF16 : ESA_DTYPE_F16,
                                        .block_q = 128,
                                        .block_k = 128,
                                        .density = dense ? -1.0 : 0.6 });
}

/* Every block size the fast kernels know, from no block at all to all of them, each tail. */
static void blocks(void **state)
{
    static const int32_t block[][2] = { { 64, 64 },   { 64, 128 }, { 128, 64 },
                                        { 128, 128 }, { 256, 64 }, { 256, 128 } };
    static const double density[] = { 0.0, 0.15, 0.6, 1.0 };
    (void)state;
    for (size_t i = 0; i < sizeof block / sizeof block[0]; i++)
        for (size_t j = 0; j < 4; j++)
            for (int32_t tail = 0; tail < 3; tail++)
                both_dims((attention_case){ .B = 1,
                                            .Hq = 2,
                                            .Hkv = 2,
                                            .Nq = 390,
                                            .Nk = 470,
                                            .dtype = (i + j) % 2 ? ESA_DTYPE_BF16 : ESA_DTYPE_F16,
                                            .block_q = block[i][0],
                                            .block_k = block[i][1],
                                            .density = density[j],
                                            .tail = tail });
}

static void strides(void **state)
{
    (void)state;
    for (int32_t bsnd = 0; bsnd < 3; bsnd++)
        for (int32_t pad = 0; pad <= 8;
             pad += 4) /* 4 elements of 2 bytes: a multiple of 8 bytes, not of 16 */
            for (int32_t misalign = 0; misalign <= 2; misalign += 2)
                both_dims((attention_case){ .B = 2,
                                            .Hq = 4,
                                            .Hkv = 2,
                                            .Nq = 200,
                                            .Nk = 260,
                                            .dtype = ESA_DTYPE_BF16,
                                            .block_q = 128,
                                            .block_k = 128,
                                            .bsnd = bsnd,
                                            .pad = pad,
                                            .misalign = misalign,
                                            .density = 0.7,
                                            .tail = pad ? ESA_TAIL_POOLED : ESA_TAIL_NONE });
}

static void batches_and_lengths(void **state)
{
    static const int32_t kv_len[] = { 300, 0, 129, 1 };
    (void)state;
    for (int32_t causal = 0; causal < 2; causal++)
        for (int dense = 0; dense < 2; dense++)
            for (int32_t tail = 0; tail < (dense ? 1 : 3); tail++)
                both_dims((attention_case){ .B = 4,
                                            .Hq = 6,
                                            .Hkv = 2,
                                            .Nq = 150,
                                            .Nk = 300,
                                            .dtype = ESA_DTYPE_BF16,
                                            .block_q = 128,
                                            .block_k = 64,
                                            .bsnd = 1,
                                            .density = dense ? -1.0 : 0.6,
                                            .causal = causal,
                                            .tail = tail,
                                            .kv_len = kv_len });
}

static void causal(void **state)
{
    static const int64_t size[][2] = {
        { 300, 300 }, { 65, 390 }, { 390, 65 }, { 1, 200 }, { 256, 256 }
    };
    (void)state;
    for (size_t i = 0; i < 5; i++)
        for (int dense = 0; dense < 2; dense++)
            for (int32_t tail = 0; tail < (dense ? 1 : 3); tail++)
                both_dims((attention_case){ .B = 1,
                                            .Hq = 2,
                                            .Hkv = 1,
                                            .Nq = size[i][0],
                                            .Nk = size[i][1],
                                            .dtype = i % 2 ? ESA_DTYPE_F16 : ESA_DTYPE_BF16,
                                            .block_q = i % 2 ? 256 : 128,
                                            .block_k = 128,
                                            .density = dense ? -1.0 : 0.6,
                                            .causal = 1,
                                            .tail = tail });
}

static void orders(void **state)
{
    (void)state;
    for (int32_t order = ESA_ORDER_TILE; order <= ESA_ORDER_HILBERT; order++)
        for (int32_t tail = 0; tail < 3; tail++)
            both_dims((attention_case){ .B = 1,
                                        .Hq = 2,
                                        .Hkv = 2,
                                        .Nq = 5 * 9 * 11 + 7,
                                        .Nk = 5 * 9 * 11 + 7,
                                        .dtype = ESA_DTYPE_BF16,
                                        .block_q = 128,
                                        .block_k = 128,
                                        .density = 0.4,
                                        .tail = tail,
                                        .order = order,
                                        .grid = { 5, 9, 11 },
                                        .text_front = 4,
                                        .text_back = 3,
                                        .bsnd = order == ESA_ORDER_TILE3D });
}

static void large_scores(void **state)
{
    (void)state;
    for (int32_t dtype = ESA_DTYPE_F16; dtype <= ESA_DTYPE_BF16; dtype++)
        both_dims((attention_case){ .B = 1,
                                    .Hq = 1,
                                    .Hkv = 1,
                                    .Nq = 190,
                                    .Nk = 330,
                                    .dtype = dtype,
                                    .block_q = 128,
                                    .block_k = 128,
                                    .density = 0.7,
                                    .range = 30.0 });
}

/* Long lists in which the largest scores may come late. After 64 stages of 128 keys, and at D 64
 * without LSE from the second half stage on, the Hopper kernel computes P before it looks at the
 * maxima. With the ranges here scores have standard deviations of about 1, 12, 75 and 300, so late
 * maxima are hardly larger, larger by powers of two, or so much larger that P overflows and the
 * scores are computed again. The stand-in has no such kernel: a few blocks will do. */
static void late_maxima(void **state)
{
    static const double range[] = { 0.0, 6.0, 15.0, 30.0 };
    (void)state;
    for (size_t i = 0; i < sizeof range / sizeof range[0]; i++)
        for (int32_t dtype = ESA_DTYPE_F16; dtype <= ESA_DTYPE_BF16; dtype++)
            for (int kind = 0; kind < 3; kind++) /* dense, masked, masked with a tail */
                both_dims((attention_case){ .B = 1,
                                            .Hq = 1,
                                            .Hkv = 1,
                                            .Nq = 140,
                                            .Nk = on_stand_in() ? 1300 : 10100,
                                            .dtype = dtype,
                                            .block_q = 128,
                                            .block_k = 128,
                                            .density = kind ? 0.95 : -1.0,
                                            .tail = kind == 2 ? ESA_TAIL_POOLED : ESA_TAIL_NONE,
                                            .range = range[i] });
}

/* Dense calls with so many rows at D 64 that the Hopper kernel takes tiles of 192: lengths around
 * the edges of these tiles, and absent keys. */
static void many_rows(void **state)
{
    static const int64_t size[][2] = { { 576, 130 }, { 577, 257 }, { 767, 64 }, { 600, 100 } };
    static const int32_t kv_len[] = { 99, 0 };
    (void)state;
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++) {
        const attention_case c = { .B = 2,
                                   .Hq = 90,
                                   .Hkv = 45,
                                   .Nq = size[i][0],
                                   .Nk = size[i][1],
                                   .D = 64,
                                   .dtype = i % 2 ? ESA_DTYPE_F16 : ESA_DTYPE_BF16,
                                   .block_q = 128,
                                   .block_k = 128,
                                   .bsnd = (int32_t)(i % 2),
                                   .density = -1.0,
                                   .kv_len = i == 3 ? kv_len : NULL };
        check_attention(&c, level_of, levels, 2);
    }
}

/* The same with masks or causal: more tiles than the two teams of all multiprocessors begin with,
 * so that teams take tiles from the counter, and one team of each stops before the last ones. The
 * stand-in has no teams: a few heads will do. */
static void many_tiles(void **state)
{
    static const int32_t tail[] = { ESA_TAIL_NONE, ESA_TAIL_POOLED, ESA_TAIL_CENTROID };
    (void)state;
    for (int kind = 0; kind < 4; kind++) { /* masked with each tail, then causal */
        const attention_case c = { .B = 2,
                                   .Hq = on_stand_in() ? 2 : 90,
                                   .Hkv = on_stand_in() ? 1 : 45,
                                   .Nq = 300 + kind,
                                   .Nk = 600 + kind,
                                   .D = 64,
                                   .dtype = kind == 1 ? ESA_DTYPE_F16 : ESA_DTYPE_BF16,
                                   .block_q = 128,
                                   .block_k = 128,
                                   .density = kind == 3 ? -1.0 : 0.5,
                                   .tail = kind == 3 ? ESA_TAIL_NONE : tail[kind],
                                   .causal = kind == 3 };
        check_attention(&c, level_of, levels, 2);
    }
}

/* Head dims and block sizes beside the fast ones, f32 at the fast ones. */
static void others(void **state)
{
    static const int64_t D[] = { 8, 40, 72, 96, 100, 160, 192, 256 };
    (void)state;
    for (size_t i = 0; i < sizeof D / sizeof D[0]; i++)
        for (int32_t dtype = 0; dtype < 3; dtype++) {
            const attention_case c = { .B = 1,
                                       .Hq = 2,
                                       .Hkv = 1,
                                       .Nq = 150,
                                       .Nk = 280,
                                       .D = D[i],
                                       .dtype = dtype,
                                       .block_q = 128,
                                       .block_k = 128,
                                       .density = 0.6,
                                       .tail = (int32_t)(i % 3) };
            check(&c);
        }
    static const struct {
        int32_t dtype, block_q, block_k;
    } odd[] = { { ESA_DTYPE_F32, 128, 128 },
                { ESA_DTYPE_BF16, 48, 80 },
                { ESA_DTYPE_BF16, 16, 256 } };
    for (int32_t tail = 0; tail < 3; tail++)
        for (int i = 0; i < 3; i++)
            both_dims((attention_case){ .B = 1,
                                        .Hq = 2,
                                        .Hkv = 1,
                                        .Nq = 150,
                                        .Nk = 280,
                                        .dtype = odd[i].dtype,
                                        .block_q = odd[i].block_q,
                                        .block_k = odd[i].block_k,
                                        .density = 0.6,
                                        .tail = tail });
}

/* The same bits in every run, whatever ran between. */
static void same_bits(void **state)
{
    (void)state;
    for (int64_t D = 64; D <= 128; D += 64)
        for (int i = 0; i < levels; i++) {
            const attention_case c = { .B = 1,
                                       .Hq = 4,
                                       .Hkv = 4,
                                       .Nq = 1111,
                                       .Nk = 1300,
                                       .D = D,
                                       .dtype = ESA_DTYPE_BF16,
                                       .block_q = 128,
                                       .block_k = 128,
                                       .density = 0.4,
                                       .tail = ESA_TAIL_POOLED };
            attention_case between = c;
            between.tail = ESA_TAIL_CENTROID;
            int64_t n;
            char *first = attention_bits(&c, level_of[i], 1, &n);
            for (int run = 0; run < 3; run++) {
                free(attention_bits(&between, level_of[i], 1, &n));
                char *again = attention_bits(&c, level_of[i], 1, &n);
                assert_memory_equal(first, again, (size_t)n);
                free(again);
            }
            free(first);
        }
}

/* NaN and infinity in f16 and bf16: one bad query spoils its row alone; a key of infinite score
 * spoils the rows it is large for. Without the LSE there may be another kernel. */
static void not_finite_one(int32_t level, int32_t dtype, int D, int with_lse)
{
    enum { N = 200 };
    static uint16_t q[N * 128], k[N * 128], v[N * 128], o[N * 128];
    static float lse[N];
    static double got[N * 128];
    const uint16_t infinity = dtype == ESA_DTYPE_F16 ? 0x7c00 : 0x7f80,
                   nan = (uint16_t)(infinity | 1), one = dtype == ESA_DTYPE_F16 ? 0x3c00 : 0x3f80;
    esa_tensor tq = esa_tensor_bnsd(q, dtype, 1, 1, N, D), tk = tq, tv = tq, to = tq,
               tl = esa_tensor_bnsd(lse, ESA_DTYPE_F32, 1, 1, N, 1);
    tk.data = k;
    tv.data = v;
    to.data = o;
    esa_ctx *ctx = level_ctx(level, 0);
    esa_attention_params ap = esa_attention_params_default();
    ap.lse = with_lse ? &tl : NULL;
    tensor_fill(&tq, 1, 1.0);
    tensor_fill(&tk, 2, 1.0);
    tensor_fill(&tv, 3, 1.0);
    q[3 * D + 5] = nan;
    assert_int_equal(esa_attention(ctx, &tq, &tk, &tv, &to, NULL, &ap), ESA_OK);
    tensor_to_double(got, &to);
    for (int n = 0; n < N; n++)
        for (int d = 0; d < D; d++) assert_true(isnan(got[n * D + d]) == (n == 3));
    assert_true(!with_lse || (isnan((double)lse[3]) && isfinite((double)lse[4])));
    tensor_fill(&tq, 1, 1.0);
    for (int n = 0; n < N; n++) q[n * D] = (uint16_t)(n % 2 ? one : one | 0x8000u);
    /* +inf for odd rows, an absent key for even ones; in the first stage that is visited, and in
     * the second */
    for (int key = 150; key > 0; key -= 100) {
        tensor_fill(&tk, 2, 1.0);
        k[key * D] = infinity;
        assert_int_equal(esa_attention(ctx, &tq, &tk, &tv, &to, NULL, &ap), ESA_OK);
        tensor_to_double(got, &to);
        for (int n = 0; n < N; n++) assert_true(isnan(got[n * D + 9]) == (n % 2));
    }
    for (int n = 0; n < N; n++) k[n * D] = infinity;
    assert_int_equal(esa_attention(ctx, &tq, &tk, &tv, &to, NULL, &ap), ESA_OK);
    tensor_to_double(got, &to);
    /* every key absent */
    for (int n = 0; n < N; n += 2)
        assert_true(got[n * D + 9] == 0.0 && (!with_lse || lse[n] == -INFINITY));
    esa_ctx_free(ctx);
}

static void not_finite(void **state)
{
    (void)state;
    for (int i = 0; i < levels; i++)
        for (int32_t dtype = ESA_DTYPE_F16; dtype <= ESA_DTYPE_BF16; dtype++)
            for (int D = 64; D <= 128; D += 64)
                for (int with_lse = 0; with_lse < 2; with_lse++)
                    not_finite_one(level_of[i], dtype, D, with_lse);
}

#define CASES(test) cmocka_unit_test_teardown(test, no_wrong_case)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASES(lengths),
        CASES(blocks),
        CASES(strides),
        CASES(batches_and_lengths),
        CASES(causal),
        CASES(orders),
        CASES(large_scores),
        CASES(late_maxima),
        CASES(many_rows),
        CASES(many_tiles),
        CASES(others),
        cmocka_unit_test(same_bits),
        cmocka_unit_test(not_finite),
    };
    return cmocka_run_group_tests(tests, find_levels, NULL);
}
