/* test_exact_rule.c - which rows of a block are exact, and how much of their mean error counts
 * (rules/exact_rows.h).
 * SPDX-License-Identifier: Apache-2.0 */
#include "select/kit.h"
#include "rules/exact_rows.h"

/* Exact rows are distinct and ascending, and every row knows its number. */
static void rows_are_found_both_ways(void **state)
{
    (void)state;
    for (int32_t R = 1; R <= ESA_MAX_EXACT_ROWS; R++)
        for (int64_t rows = 1; rows <= 256; rows++) {
            int64_t last = -1, found = 0;
            for (int32_t i = 0; i < R; i++) {
                const int64_t r = esa_exact_row_at(rows, R, i);
                assert_in_range(r, 0, rows - 1);
                if (i >= rows) {
                    assert_int_equal(r, rows - 1);
                    continue;
                }
                assert_true(r > last);
                assert_int_equal(esa_exact_row_number(rows, R, r), i);
                last = r;
            }
            for (int64_t r = 0; r < rows; r++) found += esa_exact_row_number(rows, R, r) >= 0;
            assert_int_equal(found, esa_exact_rows_of(rows, R));
        }
    assert_int_equal(esa_exact_row_at(128, 4, 0), 16);
    assert_int_equal(esa_exact_row_at(128, 4, 3), 112);
}

static void share_of_the_mean(void **state)
{
    (void)state;
    assert_true(esa_exact_share(0.0f, 2.0f, 4) == 1.0f); /* the samples agree */
    assert_true(esa_exact_share(12.0f, 2.0f, 4) == 0.5f);
    assert_true(esa_exact_share(24.0f, 2.0f, 4) == 0.0f); /* nothing but noise */
    assert_true(esa_exact_share(99.0f, 2.0f, 4) == 0.0f);
    assert_true(esa_exact_share(0.0f, 0.0f, 4) == 0.0f);
    assert_true(esa_exact_share(0.0f, 2.0f, 1) == 1.0f);
    assert_true(esa_exact_share(NAN, 2.0f, 4) == 0.0f);
    assert_true(esa_exact_share(1.0f, NAN, 4) == 0.0f);
    assert_true(esa_exact_share(1.0f, INFINITY, 1) == 0.0f);
}

/* The list of a row may hold blocks that do not exist; these do not make it complete. */
static void complete_rows(void **state)
{
    static const uint16_t all[] = { 0, 1, 2 }, gap[] = { 0, 2, 3 };
    (void)state;
    assert_true(esa_exact_already(3, 3, all));
    assert_true(esa_exact_already(2, 3, all));
    assert_true(esa_exact_already(0, 0, all));
    assert_false(esa_exact_already(3, 2, all));
    assert_false(esa_exact_already(3, 3, gap));
    assert_false(esa_exact_already(2, 3, gap));
    assert_true(esa_exact_already(1, 3, gap));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_found_both_ways),
        cmocka_unit_test(share_of_the_mean),
        cmocka_unit_test(complete_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
