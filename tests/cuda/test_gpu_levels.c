/* test_gpu_levels.c - attention with two levels and with an order per head, on each set of kernels,
 * against the textbook in double.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Cases with head dims 64 and 128 in f16 or bf16 and blocks of 128 or 256 queries run on the sm90a
 * and the sm80 kernels, other 16-bit cases on sm80, f32 and other blocks on simt. */
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

/* Under a sanitizer ($ESA_TEST_SMALL) every seventh case has to do: the counter runs through all
 * tests, so each gets some. */
static void check(const attention_case *c)
{
    static int number;
    if (!getenv("ESA_TEST_SMALL") || number++ % 7 == 0) check_attention(c, level_of, levels, 2);
}

static void all_fine(attention_case c)
{
    for (c.fine = 2; c.fine <= 16; c.fine *= 2)
        if (c.block_k % c.fine == 0) check(&c);
}

/* Every block size of the fast kernels, short last blocks, all types: a bit of everything, fine
 * means alone, and everything but listed blocks. */
static void blocks(void **state)
{
    static const double share[][2] = { { 0.3, 0.4 }, { 0.0, 1.0 }, { 0.0, 0.3 } };
    (void)state;
    for (int i = 0; i < 6; i++)
        for (int j = 0; j < 3; j++)
            for (int32_t dtype = 0; dtype < 3; dtype++)
                for (int64_t D = 64; D <= 128; D += 64)
                    all_fine((attention_case){ .B = 1,
                                               .Hq = 1,
                                               .Hkv = 1,
                                               .Nq = 150,
                                               .Nk = 550 + 7 * i,
                                               .D = D,
                                               .dtype = dtype,
                                               .block_q = 64 << i / 2,
                                               .block_k = 64 << i % 2,
                                               .density = share[j][0],
                                               .refined = share[j][1],
                                               .tail = ESA_TAIL_LEVELS });
}

/* Blocks that only the simt kernel takes, and head dims beside the fast ones. */
static void others(void **state)
{
    static const int32_t block[][2] = { { 48, 80 }, { 16, 256 }, { 32, 16 }, { 64, 48 } };
    static const int64_t D[] = { 8, 40, 72, 100, 160, 256 };
    (void)state;
    for (int i = 0; i < 4; i++)
        all_fine((attention_case){ .B = 1,
                                   .Hq = 2,
                                   .Hkv = 1,
                                   .Nq = 70,
                                   .Nk = 290,
                                   .D = 72,
                                   .dtype = i % 3,
                                   .block_q = block[i][0],
                                   .block_k = block[i][1],
                                   .density = 0.3,
                                   .refined = 0.5,
                                   .tail = ESA_TAIL_LEVELS });
    for (size_t i = 0; i < sizeof D / sizeof D[0]; i++)
        all_fine((attention_case){ .B = 1,
                                   .Hq = 2,
                                   .Hkv = 1,
                                   .Nq = 150,
                                   .Nk = 600,
                                   .D = D[i],
                                   .dtype = ESA_DTYPE_F16 + (int32_t)i % 2,
                                   .block_q = 128,
                                   .block_k = 128,
                                   .density = 0.3,
                                   .refined = 0.5,
                                   .misalign = i % 3 == 2 ? 2 : 0,
                                   .tail = ESA_TAIL_LEVELS });
}

/* Lengths that cut a block inside a fine mean, between two of them, and before the first; causality
 * beside them; one mask for all batch entries. */
static void lengths(void **state)
{
    static const int32_t kv_len[][4] = { { 700, 517, 131, 0 }, { 640, 512, 5, 1 } };
    (void)state;
    for (int i = 0; i < 2; i++)
        for (int32_t causal = 0; causal < 2; causal++)
            for (int64_t D = 64; D <= 128; D += 64)
                for (int32_t block_k = 64; block_k <= 128; block_k += 64)
                    all_fine((attention_case){ .B = 4,
                                               .Hq = 2,
                                               .Hkv = 1,
                                               .Nq = 270,
                                               .Nk = 700,
                                               .D = D,
                                               .dtype = causal ? ESA_DTYPE_F16 : ESA_DTYPE_BF16,
                                               .block_q = block_k == 64 ? 128 : 256,
                                               .block_k = block_k,
                                               .bsnd = 1,
                                               .density = 0.3,
                                               .refined = 0.5,
                                               .causal = causal,
                                               .broadcast = block_k == 64,
                                               .kv_len = kv_len[i],
                                               .tail = ESA_TAIL_LEVELS });
}

static void short_sequences(void **state)
{
    static const int64_t size[][2] = { { 1, 1 }, { 3, 5 }, { 64, 64 }, { 127, 129 }, { 300, 65 } };
    (void)state;
    for (int i = 0; i < 5; i++)
        for (int32_t causal = 0; causal < 2; causal++)
            all_fine((attention_case){ .B = 1,
                                       .Hq = 2,
                                       .Hkv = 1,
                                       .Nq = size[i][0],
                                       .Nk = size[i][1],
                                       .D = i % 2 ? 64 : 128,
                                       .dtype = ESA_DTYPE_BF16,
                                       .block_q = 128,
                                       .block_k = i % 3 ? 128 : 64,
                                       .density = 0.2,
                                       .refined = 0.8,
                                       .causal = causal,
                                       .tail = ESA_TAIL_LEVELS });
}

/* Lists of several stages: up to 40 stages of fine means behind a list of 15 blocks. */
static void long_lists(void **state)
{
    (void)state;
    for (int64_t D = 64; D <= 128; D += 64)
        all_fine((attention_case){ .B = 1,
                                   .Hq = 1,
                                   .Hkv = 1,
                                   .Nq = 140,
                                   .Nk = 20011,
                                   .D = D,
                                   .dtype = ESA_DTYPE_BF16,
                                   .block_q = 128,
                                   .block_k = 64,
                                   .density = 0.05,
                                   .refined = 1.0,
                                   .tail = ESA_TAIL_LEVELS });
}

/* An order per head, with every tail and without one. */
static void orders(void **state)
{
    static const int32_t kv_len[] = { 411, 405 };
    (void)state;
    for (int32_t tail = ESA_TAIL_NONE; tail <= ESA_TAIL_LEVELS; tail++)
        for (int32_t dtype = 0; dtype < 3; dtype++)
            for (int64_t D = 64; D <= 128; D += 64) {
                const attention_case c = { .B = 2,
                                           .Hq = 4,
                                           .Hkv = 2,
                                           .Nq = 411,
                                           .Nk = 411,
                                           .D = D,
                                           .dtype = dtype,
                                           .block_q = 128,
                                           .block_k = 64,
                                           .bsnd = tail % 2,
                                           .density = 0.4,
                                           .tail = tail,
                                           .fine = 4,
                                           .refined = 0.5,
                                           .order = ESA_ORDER_ADAPTIVE,
                                           .broadcast = dtype == ESA_DTYPE_F16,
                                           .text_front = 5,
                                           .text_back = 6,
                                           .kv_len = tail > ESA_TAIL_POOLED ? kv_len : NULL };
                check(&c);
            }
}

/* The output bits of the two cases are the same. */
static void same_bits(const attention_case *a, const attention_case *b, int32_t level)
{
    int64_t bytes[2];
    char *first = attention_bits(a, level, 1, &bytes[0]),
         *second = attention_bits(b, level, 1, &bytes[1]);
    assert_int_equal(bytes[0], bytes[1]);
    assert_memory_equal(first, second, (size_t)bytes[0]);
    free(first);
    free(second);
}

/* Levels without a fine block and without a fine level are the pooled tail; the pooled tail ignores
 * the fine level. The same call gives the same bits again. */
static void pooled(void **state)
{
    (void)state;
    for (int i = 0; i < levels; i++)
        for (int32_t dtype = 0; dtype < 3; dtype++)
            for (int64_t D = 64; D <= 128; D += 64) {
                const attention_case levels_case = { .B = 1,
                                                     .Hq = 2,
                                                     .Hkv = 2,
                                                     .Nq = 390,
                                                     .Nk = 1470,
                                                     .D = D,
                                                     .dtype = dtype,
                                                     .block_q = 128,
                                                     .block_k = 128,
                                                     .density = 0.4,
                                                     .tail = ESA_TAIL_LEVELS,
                                                     .fine = 8,
                                                     .refined = 0.0 };
                attention_case other = levels_case;
                other.tail = ESA_TAIL_POOLED;
                same_bits(&levels_case, &other, level_of[i]);
                other.tail = ESA_TAIL_LEVELS;
                other.fine = 0;
                same_bits(&levels_case, &other, level_of[i]);
                other = levels_case;
                other.refined = 0.5;
                same_bits(&other, &other, level_of[i]);
            }
}

/* Values that do not count must not be seen: NaN behind kv_len, and NaN that causality hides. One
 * in a block of the fine level reaches every row that uses the block. */
static void not_finite(void **state)
{
    enum { N = 700, D = 128, BK = 64, NK = (N + BK - 1) / BK, NQ = (N + 127) / 128 };
    static uint16_t q[N * D], k[N * D], v[N * D], o[N * D];
    static double got[N * D];
    static uint8_t level[NQ * NK];
    (void)state;
    for (int i = 0; i < levels; i++)
        for (int where = 0; where < 3; where++) {
            esa_tensor tq = esa_tensor_bnsd(q, ESA_DTYPE_BF16, 1, 1, N, D), tk = tq, tv = tq,
                       to = tq;
            tk.data = k;
            tv.data = v;
            to.data = o;
            tensor_fill(&tq, 1, 1.0);
            tensor_fill(&tk, 2, 1.0);
            tensor_fill(&tv, 3, 1.0);
            /* 0: behind kv_len; 1: in the last key, which causality hides; 2: in block 4 */
            const int32_t kv_len[] = { where == 0 ? 500 : N };
            const int from = where == 0   ? 500
                             : where == 1 ? N - 1
                                          : 4 * BK + 5,
                      to_key = where == 2 ? from + 1 : N;
            for (int n = from; n < to_key; n++)
                for (int d = 0; d < D; d++) {
                    v[n * D + d] = 0x7fc0;
                    if (where != 2) k[n * D + d] = 0x7fc0;
                }
            for (int c = 0; c < NQ * NK; c++) level[c] = (uint8_t)(c % NK % 3 == 1 ? 1 : c % 2 * 2);
            esa_ctx *ctx = level_ctx(level_of[i], 0);
            esa_mask *mask = NULL;
            esa_mask_info info = { .struct_size = sizeof info,
                                   .block_q = 128,
                                   .block_k = BK,
                                   .B = 1,
                                   .H = 1,
                                   .Nq = N,
                                   .Nk = N,
                                   .fine = 4,
                                   .layout = esa_layout_default() };
            assert_int_equal(esa_mask_from_levels(ctx, &mask, &info, level), ESA_OK);
            esa_attention_params ap = esa_attention_params_default();
            ap.tail = ESA_TAIL_LEVELS;
            ap.causal = where == 1;
            ap.kv_len = kv_len;
            assert_int_equal(esa_attention(ctx, &tq, &tk, &tv, &to, mask, &ap), ESA_OK);
            tensor_to_double(got, &to);
            for (int n = 0; n < N; n++)
                for (int d = 0; d < D; d++) {
                    /* A query block may compute the whole last key block, so its rows may see v. */
                    if (where == 1 && n >= (N - 1) / 128 * 128) continue;
                    if (isnan(got[n * D + d]) != (where == 2))
                        fail_msg("level %d, case %d: row %d, column %d is %g", level_of[i], where,
                                 n, d, got[n * D + d]);
                }
            esa_mask_free(mask);
            esa_ctx_free(ctx);
        }
}

#define TEST(function) cmocka_unit_test_teardown(function, no_wrong_case)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(blocks), TEST(others),     TEST(lengths), TEST(short_sequences),
        TEST(orders), TEST(long_lists), TEST(pooled),  TEST(not_finite),
    };
    return cmocka_run_group_tests(tests, find_levels, NULL);
}
