/* test_mask_code.c - the importance code is the formula of docs/mask-files.md, and its decoder
 * undoes it.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"
#include <math.h>
#include "base/rng.h"
#include "maskfile/mask_code.h"

static void test_formula(void **state)
{
    (void)state;
    esa_code_table table;
    esa_code_table_init(&table);
    print_message("seed 42\n");
    esa_rng r = { 42 };
    double worst = 0;
    for (int i = 0; i < 400000; i++) {
        /* The top, and something up to 26 octaves below it, at both ends of a row so that all four
         * places of a byte are used. */
        const double octaves = 26 * (double)esa_rng_unit(&r);
        uint64_t sum[7];
        uint8_t code[7], fine[2] = { 0xff, 0xff };
        float out[7];
        const int at = i % 7;
        for (int j = 0; j < 7; j++) sum[j] = 0;
        sum[at] = (uint64_t)(ldexp(1, 40) * exp2(-octaves));
        sum[(at + 3) % 7] = UINT64_C(1) << 40;
        assert_true(esa_code_from_sums(code, fine, sum, 7) == UINT64_C(1) << 40);
        esa_code_decode(out, code, fine, 0.5f, 7, &table);
        const double x = log2(ldexp(1, 40) / (double)sum[at]);
        assert_int_equal(code[at], fmin(255, floor(12 * x + 0.5)));
        assert_int_equal(code[(at + 3) % 7], 0);
        for (int j = 0; j < 7; j++)
            if (!sum[j]) assert_true(code[j] == 255 && out[j] == 0);
        if (code[at] < 255) {
            const double f = floor(48 * x + 2);
            assert_int_equal(4 * code[at] + (fine[at / 4] >> 2 * (at % 4) & 3), f);
            const double off = fabs(log2((double)out[at] / 0.5) + x);
            if (off > worst) worst = off;
        } else
            assert_true(out[at] > 0 && (double)out[at] <= 0.5 * exp2(-21.2));
        /* Floats give the same codes. */
        float p[7];
        uint8_t code2[7], fine2[2];
        for (int j = 0; j < 7; j++) p[j] = (float)((double)sum[j] * 0x1p-40);
        if ((double)p[at] == (double)sum[at] * 0x1p-40) {
            assert_true(esa_code_from_f32(code2, fine2, p, 7) == 1.0f);
            assert_memory_equal(code, code2, 7);
            assert_memory_equal(fine, fine2, 2);
        }
    }
    assert_true(worst <= 1.0 / 96 + 1e-6);
}

static void test_order(void **state)
{
    (void)state;
    esa_code_table table;
    esa_code_table_init(&table);
    for (int f = 3; f < 1024; f++) assert_true(table.weight[f] < table.weight[f - 1]);
    assert_true(table.weight[2] <= 1 && table.weight[1023] == 0);
    /* A larger sum never decodes smaller. */
    esa_rng r = { 43 };
    print_message("seed 43\n");
    for (int row = 0; row < 300; row++) {
        uint64_t sum[64];
        uint8_t code[64], fine[16];
        float out[64];
        for (int j = 0; j < 64; j++) sum[j] = esa_rng_next(&r) >> (30 + esa_rng_below(&r, 34));
        esa_code_from_sums(code, fine, sum, 64);
        esa_code_decode(out, code, fine, 1, 64, &table);
        for (int a = 0; a < 64; a++)
            for (int b = 0; b < 64; b++)
                if (sum[a] > sum[b]) assert_true(out[a] >= out[b]);
    }
}

static void test_edges(void **state)
{
    (void)state;
    uint8_t code[5], fine[2];
    const uint64_t zeros[5] = { 0 };
    assert_true(esa_code_from_sums(code, fine, zeros, 5) == 0);
    for (int j = 0; j < 5; j++) assert_int_equal(code[j], 255);
    assert_int_equal(fine[0], 0xff);
    assert_int_equal(fine[1], 3);
    const float odd[5] = { NAN, -1, 0.25f, 0, 1e-30f };
    assert_true(esa_code_from_f32(code, fine, odd, 5) == 0.25f);
    assert_int_equal(code[2], 0);
    assert_true(code[0] == 255 && code[1] == 255 && code[3] == 255 && code[4] == 255);
    assert_int_equal(fine[1] & 3, 2); /* far below, but not zero */
    const float flat[4] = { 0.25f, 0.25f, 0.25f, 0.25f }, one[4] = { 1, 0, 0, 0 };
    assert_float_equal(esa_row_entropy(flat, 4), 1, 1e-12);
    assert_float_equal(esa_row_entropy(one, 4), 0, 0);
    assert_float_equal(esa_row_entropy(one, 1), 1, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_formula),
                                        cmocka_unit_test(test_order),
                                        cmocka_unit_test(test_edges) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
