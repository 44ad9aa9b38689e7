/* test_wan_bf16.c - the transformer on the CPU in bf16 against f32, block by block.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/dit_bf16.h"

static void blocks(void **state)
{
    (void)state;
    if (!host_has_bf16()) skip();
    for (size_t i = 0; i < sizeof dit_cases / sizeof *dit_cases; i++)
        compare(&dit_cases[i], ESA_ORDER_RASTER, ON_HOST_BF16);
}

static void orders(void **state)
{
    (void)state;
    if (!host_has_bf16()) skip();
    compare(&dit_cases[1], ESA_ORDER_HILBERT, ON_HOST_BF16);
    compare(&dit_cases[4], ESA_ORDER_TILE3D, ON_HOST_BF16);
}

/* Weights of linear layers take two bytes, and the bits do not depend on the number of threads nor
 * on how the weights are held. */
static void holds(void **state)
{
    (void)state;
    if (!host_has_bf16()) skip();
    static const int32_t hold[] = { ESA_HOLD_AUTO, ESA_HOLD_BF16, ESA_HOLD_FILE };
    const dit_case *c = &dit_cases[1];
    float *first = NULL;
    for (int32_t i = 0; i < 3; i++) {
        dit_bench b;
        esa_session_params p = dense(ESA_ORDER_RASTER);
        dit_open_on(&b, c, hold[i], 1 + 2 * (i % 2), ON_HOST_BF16);
        esa_session_free(dit_run(&b, &p));
        const size_t bytes = (size_t)b.out_count * 4;
        int64_t parameters, held, mapped;
        esa_dit_memory(b.dit, &parameters, &held, &mapped);
        assert_true(held < parameters * 3); /* the rest is f32 */
        if (!first) {
            first = malloc(bytes);
            assert_non_null(first);
            memcpy(first, b.v, bytes);
        }
        assert_memory_equal(first, b.v, bytes);
        dit_close(&b);
    }
    free(first);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(blocks), cmocka_unit_test(orders),
                                        cmocka_unit_test(holds) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
