/* test_carry.c - attention with a carried difference: adding one and making one, against the
 * textbook in double and against rules/carry.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * test_carry_calls.c has what single calls must do, and arguments. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "common/attention_case.h"
#include "common/naive.h"
#include "common/on_gpu.h"

static int32_t level_of[8];
static int levels, native; /* native: those without emulation */

static int find_levels(void **state)
{
    (void)state;
    print_message("seed %llu\n", (unsigned long long)test_seed());
    levels = find_test_levels(level_of, &native);
    return levels ? 0 : -1;
}

/* ---------------------------------------------------------------- against the textbook */

/* Where the machine is slow ($ESA_TEST_SMALL) every fifth case has to do: the counter runs through
 * all dtypes, tails, formats and uses. */
static void on_all_levels(attention_case c)
{
    static int number;
    for (c.carry = CASE_ADD; c.carry <= CASE_MAKE; c.carry++)
        for (c.carry_format = 0; c.carry_format < 2; c.carry_format++)
            if (!getenv("ESA_TEST_SMALL") || number++ % 5 == 0)
                check_attention(&c, level_of, levels, 2);
}

/* Rows and keys around the edges of blocks; every tail; no blocks, some and all. */
static void test_sizes(void **state)
{
    static const int64_t size[][2] = { { 1, 1 },   { 1, 70 },   { 31, 33 },
                                       { 64, 64 }, { 130, 90 }, { 97, 200 } };
    static const int64_t D[] = { 16, 64, 72, 128 };
    static const double density[] = { 0.4, 0.0, 1.0 };
    (void)state;
    int turn = 0;
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
        for (int32_t dtype = 0; dtype < 3; dtype++)
            for (int32_t tail = 0; tail < 4; tail++, turn++)
                on_all_levels((attention_case){ .B = 1,
                                                .Hq = 2,
                                                .Hkv = 2,
                                                .Nq = size[i][0],
                                                .Nk = size[i][1],
                                                .D = D[turn % 4],
                                                .dtype = dtype,
                                                .block_q = turn % 2 ? 64 : 48,
                                                .block_k = turn % 3 ? 64 : 48,
                                                .density = density[turn / 4 % 3],
                                                .tail = tail,
                                                .fine = 4,
                                                .refined = 0.5 });
}

/* Odd head dims, gaps between rows, views that no vector load can read. */
static void test_views(void **state)
{
    static const int64_t D[] = { 1, 8, 33, 100, 256 };
    (void)state;
    for (int i = 0; i < 5; i++)
        for (int32_t dtype = 0; dtype < 3; dtype++)
            on_all_levels((attention_case){ .B = 2,
                                            .Hq = 2,
                                            .Hkv = 2,
                                            .Nq = 90,
                                            .Nk = 150,
                                            .D = D[i],
                                            .dtype = dtype,
                                            .block_q = 32,
                                            .block_k = 32,
                                            .density = 0.4,
                                            .tail = ESA_TAIL_POOLED,
                                            .bsnd = i % 3,
                                            .pad = i % 2 ? 3 : 8,
                                            .misalign = i == 3 ? 1 : 0 });
}

/* Key lengths (one of them 0), groups of heads, one mask or one d for all batch entries, causal
 * calls. */
static void test_batches(void **state)
{
    static const int32_t kv_len[] = { 150, 39, 0 };
    (void)state;
    for (int32_t dtype = 0; dtype < 3; dtype++)
        for (int32_t how = 0; how < 4; how++)
            on_all_levels((attention_case){ .B = 3,
                                            .Hq = 4,
                                            .Hkv = 2,
                                            .Nq = 100,
                                            .Nk = 150,
                                            .D = 72,
                                            .dtype = dtype,
                                            .block_q = 48,
                                            .block_k = 32,
                                            .density = 0.4,
                                            .tail = how == 3 ? ESA_TAIL_POOLED : ESA_TAIL_LEVELS,
                                            .fine = 4,
                                            .refined = 0.6,
                                            .broadcast = how == 1,
                                            .causal = how == 3,
                                            .kv_len = how == 2 ? NULL : kv_len,
                                            .bsnd = 1 });
    for (int32_t dtype = 0; dtype < 3; dtype++)
        for (int32_t format = 0; format < 2; format++) {
            const attention_case c = { .B = 3,
                                       .Hq = 4,
                                       .Hkv = 2,
                                       .Nq = 100,
                                       .Nk = 150,
                                       .D = 64,
                                       .dtype = dtype,
                                       .block_q = 64,
                                       .block_k = 64,
                                       .density = 0.4,
                                       .tail = ESA_TAIL_POOLED,
                                       .carry = CASE_ADD,
                                       .carry_format = format,
                                       .carry_shared = 1 };
            check_attention(&c, level_of, levels, 2);
        }
}

/* One order for all heads, and an order for every head: d is in the order of the tokens. */
static void test_orders(void **state)
{
    static const int32_t order[] = { ESA_ORDER_HILBERT, ESA_ORDER_TILE3D, ESA_ORDER_ADAPTIVE };
    (void)state;
    for (int i = 0; i < 3; i++)
        for (int32_t dtype = 0; dtype < 3; dtype++)
            on_all_levels((attention_case){ .B = 2,
                                            .Hq = 4,
                                            .Hkv = 2,
                                            .Nq = 194,
                                            .Nk = 194,
                                            .D = 64,
                                            .dtype = dtype,
                                            .block_q = 64,
                                            .block_k = 32,
                                            .density = 0.4,
                                            .tail = ESA_TAIL_LEVELS,
                                            .fine = 4,
                                            .refined = 0.5,
                                            .order = order[i],
                                            .broadcast = i == 2,
                                            .grid = { 3, 7, 9 },
                                            .text_front = 2,
                                            .text_back = 3 });
}

/* Exact rows correct what d leaves. A call that makes d has none, though it asks for some. */
static void test_exact_rows(void **state)
{
    (void)state;
    for (int32_t rows = 1; rows <= 4; rows++)
        for (int32_t dtype = 0; dtype < 3; dtype++)
            on_all_levels((attention_case){ .B = 2,
                                            .Hq = 2,
                                            .Hkv = 1,
                                            .Nq = 150,
                                            .Nk = 170,
                                            .D = rows == 3 ? 128 : 40,
                                            .dtype = dtype,
                                            .block_q = 64,
                                            .block_k = 64,
                                            .density = 0.4,
                                            .tail = ESA_TAIL_POOLED,
                                            .exact_rows = rows });
}

/* The relative error of 8 bits is at most 0.05 (test_eight_bit.c), and d has none. A made d has the
 * bits that follow from the output of the plain call. */
static void test_eight_bit(void **state)
{
    (void)state;
    for (int i = 0; i < native; i++)
        for (int32_t dtype = 0; dtype < 3; dtype++)
            for (int32_t format = 0; format < 2; format++) {
                attention_case c = { .B = 2,
                                     .Hq = 4,
                                     .Hkv = 2,
                                     .Nq = 300,
                                     .Nk = 390,
                                     .D = dtype == 1 ? 64 : 128,
                                     .dtype = dtype,
                                     .block_q = 128,
                                     .block_k = 128,
                                     .density = 0.5,
                                     .tail = format ? ESA_TAIL_POOLED : ESA_TAIL_LEVELS,
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
                    fail_msg("level %d dtype %d format %d: relative error %.4f, lse %.4f",
                             level_of[i], dtype, format, error, lse);
                c.carry = CASE_MAKE;
                if (!made_bits_right(&c, level_of[i], 2))
                    fail_msg("level %d dtype %d format %d: other bits than those of rules/carry.h",
                             level_of[i], dtype, format);
            }
}

/* ---------------------------------------------------------------- bits */

static void same_bits(const attention_case *a, int32_t threads_a, const attention_case *b,
                      int32_t threads_b, int32_t level, int64_t bytes, const char *what)
{
    int64_t na, nb;
    char *x = attention_bits(a, level, threads_a, &na),
         *y = attention_bits(b, level, threads_b, &nb);
    if (!bytes) assert_int_equal(na, nb);
    if (memcmp(x, y, (size_t)(bytes ? bytes : na)))
        fail_msg("%s: other bits on level %d, dtype %d, precision %d", what, level, a->dtype,
                 a->precision);
    free(x);
    free(y);
}

/* The same bits for any number of threads; and a d of 0 changes no bit of o and the LSE. */
static void test_same_bits(void **state)
{
    (void)state;
    for (int i = 0; i < native; i++)
        for (int32_t dtype = 0; dtype < 3; dtype++)
            for (int32_t precision = 8; precision <= 16; precision += 8) {
                attention_case c = { .B = 2,
                                     .Hq = 3,
                                     .Hkv = 3,
                                     .Nq = 400,
                                     .Nk = 400,
                                     .D = 64,
                                     .dtype = dtype,
                                     .block_q = 64,
                                     .block_k = 64,
                                     .density = 0.3,
                                     .tail = ESA_TAIL_POOLED,
                                     .order = ESA_ORDER_ADAPTIVE,
                                     .precision = precision };
                const attention_case plain = c;
                const int64_t size = dtype == ESA_DTYPE_F32 ? 4 : 2,
                              o_and_lse = c.B * c.Hq * c.Nq * (c.D * size + 4);
                for (c.carry_format = 0; c.carry_format < 2; c.carry_format++) {
                    for (c.carry = CASE_ADD; c.carry <= CASE_MAKE; c.carry++)
                        same_bits(&c, 1, &c, 4, level_of[i], 0, "1 and 4 threads");
                    c.carry = CASE_ADD, c.carry_shared = 2;
                    same_bits(&plain, 1, &c, 1, level_of[i], o_and_lse, "a d of 0");
                    c.carry_shared = 0;
                }
            }
}

#define CASES(function) cmocka_unit_test_teardown(function, no_wrong_case)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASES(test_sizes),
        CASES(test_views),
        CASES(test_batches),
        CASES(test_orders),
        CASES(test_exact_rows),
        cmocka_unit_test(test_eight_bit),
        cmocka_unit_test(test_same_bits),
    };
    return cmocka_run_group_tests(tests, find_levels, NULL);
}
