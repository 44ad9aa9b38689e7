/* test_gpu_carry.c - carried differences at the sizes of the GPU's tiles, on each set of kernels.
 * SPDX-License-Identifier: Apache-2.0
 *
 * tests/api/test_carry.c has the small cases and the rules. Here every case fits the fast kernels:
 * head dims 64 and 128, f16 and bf16, blocks of 64, 128 and 256, 8 bits. */
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
static void check(attention_case c)
{
    static int number;
    for (c.carry = CASE_ADD; c.carry <= CASE_MAKE; c.carry++)
        for (c.carry_format = 0; c.carry_format < 2; c.carry_format++)
            if (!getenv("ESA_TEST_SMALL") || number++ % 5 == 0)
                check_attention(&c, level_of, levels, 2);
}

static void both_dims(attention_case c)
{
    for (c.D = 64; c.D <= 128; c.D += 64) check(c);
}

/* Every block size the fast kernels know, from no block at all to all of them, each tail. */
static void blocks(void **state)
{
    static const int32_t block[][2] = { { 64, 64 },   { 64, 128 }, { 128, 64 },
                                        { 128, 128 }, { 256, 64 }, { 256, 128 } };
    static const double density[] = { 0.0, 0.15, 0.6, 1.0 };
    (void)state;
    for (size_t i = 0; i < sizeof block / sizeof block[0]; i++)
        for (int32_t tail = 0; tail < 4; tail++)
            both_dims((attention_case){ .B = 1,
                                        .Hq = 2,
                                        .Hkv = 2,
                                        .Nq = 390,
                                        .Nk = 470,
                                        .dtype = i % 2 ? ESA_DTYPE_BF16 : ESA_DTYPE_F16,
                                        .block_q = block[i][0],
                                        .block_k = block[i][1],
                                        .density = density[(i + (size_t)tail) % 4],
                                        .tail = tail,
                                        .fine = 8,
                                        .refined = 0.5 });
}

/* Lengths around the edges of tiles. */
static void lengths(void **state)
{
    static const int64_t size[][2] = { { 1, 1 },     { 1, 129 },  { 127, 127 }, { 128, 128 },
                                       { 129, 255 }, { 257, 64 }, { 383, 385 }, { 513, 130 } };
    (void)state;
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
        both_dims((attention_case){ .B = 1,
                                    .Hq = 2,
                                    .Hkv = 2,
                                    .Nq = size[i][0],
                                    .Nk = size[i][1],
                                    .dtype = i % 2 ? ESA_DTYPE_BF16 : ESA_DTYPE_F16,
                                    .block_q = 128,
                                    .block_k = 128,
                                    .density = 0.6 });
}

/* Rows of o that cannot be moved in pieces, and that lie between those of other heads. */
static void strides(void **state)
{
    (void)state;
    for (int32_t bsnd = 0; bsnd < 3; bsnd++)
        for (int32_t pad = 0; pad <= 8; pad += 4)
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

/* Key lengths, one of them 0; groups of heads; causal calls. */
static void batches(void **state)
{
    static const int32_t kv_len[] = { 300, 0, 129, 1 };
    (void)state;
    for (int32_t causal = 0; causal < 2; causal++)
        for (int32_t tail = 0; tail < 3; tail++)
            both_dims((attention_case){ .B = 4,
                                        .Hq = 6,
                                        .Hkv = 2,
                                        .Nq = 150,
                                        .Nk = 300,
                                        .dtype = ESA_DTYPE_BF16,
                                        .block_q = 128,
                                        .block_k = 64,
                                        .bsnd = 1,
                                        .density = 0.6,
                                        .causal = causal,
                                        .tail = tail,
                                        .kv_len = kv_len });
}

/* One d for all batch entries, one mask for all. */
static void shared(void **state)
{
    (void)state;
    for (int64_t D = 64; D <= 128; D += 64)
        for (int32_t format = 0; format < 2; format++) {
            const attention_case c = { .B = 3,
                                       .Hq = 4,
                                       .Hkv = 2,
                                       .Nq = 300,
                                       .Nk = 300,
                                       .D = D,
                                       .dtype = ESA_DTYPE_BF16,
                                       .block_q = 128,
                                       .block_k = 128,
                                       .density = 0.5,
                                       .tail = ESA_TAIL_POOLED,
                                       .broadcast = 1,
                                       .carry = CASE_ADD,
                                       .carry_format = format,
                                       .carry_shared = 1 };
            check_attention(&c, level_of, levels, 2);
        }
}

/* Stores through an order, of all heads or of each, with text; exact rows beside it. */
static void orders(void **state)
{
    static const int32_t order[] = { ESA_ORDER_HILBERT, ESA_ORDER_ADAPTIVE };
    (void)state;
    for (int i = 0; i < 2; i++)
        for (int32_t rows = 0; rows <= 2; rows += 2)
            both_dims((attention_case){ .B = 2,
                                        .Hq = 4,
                                        .Hkv = 2,
                                        .Nq = 5 * 9 * 11 + 7,
                                        .Nk = 5 * 9 * 11 + 7,
                                        .dtype = i ? ESA_DTYPE_BF16 : ESA_DTYPE_F16,
                                        .block_q = 128,
                                        .block_k = 128,
                                        .density = 0.4,
                                        .tail = ESA_TAIL_LEVELS,
                                        .fine = 8,
                                        .refined = 0.5,
                                        .order = order[i],
                                        .grid = { 5, 9, 11 },
                                        .text_front = 4,
                                        .text_back = 3,
                                        .bsnd = 1,
                                        .exact_rows = rows });
}

/* More tiles than the teams of all multiprocessors begin with. The stand-in has no teams: a few
 * heads will do. */
static void many_tiles(void **state)
{
    (void)state;
    for (int64_t D = 64; D <= 128; D += 64)
        for (int32_t use = CASE_ADD; use <= CASE_MAKE; use++) {
            const attention_case c = { .B = 2,
                                       .Hq = on_stand_in() ? 2 : 90,
                                       .Hkv = on_stand_in() ? 1 : 45,
                                       .Nq = 301,
                                       .Nk = 601,
                                       .D = D,
                                       .dtype = ESA_DTYPE_BF16,
                                       .block_q = 128,
                                       .block_k = 128,
                                       .density = 0.5,
                                       .tail = ESA_TAIL_POOLED,
                                       .carry = use };
            check_attention(&c, level_of, levels, 2);
        }
}

/* Head dims beside the fast ones, f32, and block sizes that the general kernel takes. */
static void others(void **state)
{
    static const int64_t D[] = { 8, 40, 72, 100, 160, 192, 256 };
    (void)state;
    for (size_t i = 0; i < sizeof D / sizeof D[0]; i++)
        for (int32_t dtype = 0; dtype < 3; dtype++)
            check((attention_case){ .B = 1,
                                    .Hq = 2,
                                    .Hkv = 1,
                                    .Nq = 150,
                                    .Nk = 280,
                                    .D = D[i],
                                    .dtype = dtype,
                                    .block_q = i % 2 ? 48 : 128,
                                    .block_k = i % 2 ? 80 : 128,
                                    .density = 0.6,
                                    .tail = (int32_t)(i % 3) });
}

/* 8 bits: the relative error stays below that of test_gpu_eight_bit.c, and a made d has the bits
 * that follow from the plain call. */
static void eight_bit(void **state)
{
    static int number;
    (void)state;
    for (int i = 0; i < levels; i++)
        for (int32_t tail = 0; tail < 4; tail++)
            for (int32_t format = 0; format < 2; format++) {
                if (tail == ESA_TAIL_CENTROID) continue; /* runs in 16 bits */
                if (getenv("ESA_TEST_SMALL") && number++ % 3) continue;
                attention_case c = { .B = 2,
                                     .Hq = 4,
                                     .Hkv = 2,
                                     .Nq = 700,
                                     .Nk = 700,
                                     .D = tail == ESA_TAIL_POOLED && level_of[i] != GPU_BEST ? 64
                                                                                             : 128,
                                     .dtype = format ? ESA_DTYPE_BF16 : ESA_DTYPE_F16,
                                     .block_q = 128,
                                     .block_k = 128,
                                     .density = 0.4,
                                     .tail = tail,
                                     .fine = 8,
                                     .refined = 0.5,
                                     .order = ESA_ORDER_ADAPTIVE,
                                     .precision = 8,
                                     .bsnd = 1,
                                     .carry = CASE_ADD,
                                     .carry_format = format };
                double lse;
                const double error = attention_error(&c, level_of[i], 2, &lse);
                if (!(error <= 0.05) || !(lse <= 0.04))
                    fail_msg("level %d tail %d format %d: relative error %.4f, lse %.4f",
                             level_of[i], tail, format, error, lse);
                c.carry = CASE_MAKE;
                if (!made_bits_right(&c, level_of[i], 2))
                    fail_msg("level %d tail %d format %d: other bits than those of rules/carry.h",
                             level_of[i], tail, format);
            }
}

/* The same bits in every run; and a d of 0 changes no bit of o and the LSE. */
static void same_bits(void **state)
{
    (void)state;
    for (int i = 0; i < levels; i++)
        for (int64_t D = 64; D <= 128; D += 64)
            for (int32_t precision = 8; precision <= 16; precision += 8) {
                attention_case c = { .B = 1,
                                     .Hq = 4,
                                     .Hkv = 4,
                                     .Nq = 1111,
                                     .Nk = 1300,
                                     .D = D,
                                     .dtype = ESA_DTYPE_BF16,
                                     .block_q = 128,
                                     .block_k = 128,
                                     .density = 0.3,
                                     .tail = ESA_TAIL_POOLED,
                                     .precision = precision };
                const int64_t o_and_lse = c.Hq * c.Nq * (D * 2 + 4);
                int64_t bytes;
                char *plain = attention_bits(&c, level_of[i], 1, &bytes);
                assert_int_equal(bytes, o_and_lse);
                for (c.carry = CASE_ADD; c.carry <= CASE_MAKE; c.carry++) {
                    int64_t n[2];
                    char *first = attention_bits(&c, level_of[i], 1, &n[0]),
                         *second = attention_bits(&c, level_of[i], 1, &n[1]);
                    assert_int_equal(n[0], n[1]);
                    assert_memory_equal(first, second, (size_t)n[0]);
                    free(first);
                    free(second);
                }
                c.carry = CASE_ADD, c.carry_shared = 2;
                char *zero = attention_bits(&c, level_of[i], 1, &bytes);
                assert_memory_equal(plain, zero, (size_t)o_and_lse);
                free(plain);
                free(zero);
            }
}

#define TEST(function) cmocka_unit_test_teardown(function, no_wrong_case)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(blocks), TEST(lengths),    TEST(strides), TEST(batches),   TEST(shared),
        TEST(orders), TEST(many_tiles), TEST(others),  TEST(eight_bit), TEST(same_bits),
    };
    return cmocka_run_group_tests(tests, find_levels, NULL);
}
