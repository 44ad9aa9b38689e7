/* test_session_plans.c - the plans of a session's dense calls.
 * SPDX-License-Identifier: Apache-2.0 */

#include "common/tests.h"
#include "attn/attn.h"

/* The dense plans of a session take no masks: their workspace has no room for any, and a mask is
 * refused. Without a selector, a plan of the public call has room for masks of all block sizes. */
static void test_dense_plan_takes_no_masks(void **state)
{
    (void)state;
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    esa_shapes s = shapes_of(ESA_DTYPE_F32, 2, 3, 210, 32);
    const esa_select_params sp = esa_select_params_default(ESA_SELECT_RANDOM);
    esa_attention_params ap = esa_attention_params_default();
    ap.tail = ESA_TAIL_POOLED;
    esa_plan *any, *dense, *chooses;
    esa_mask *mask;
    assert_int_equal(esa_plan_create(ctx, &any, &s, NULL, &ap), ESA_OK);
    assert_int_equal(esa_plan_create(ctx, &chooses, &s, &sp, &ap), ESA_OK);
    assert_int_equal(esa_ctx_enter(ctx), ESA_OK);
    assert_int_equal(esa_plan_make_dense(ctx, &dense, &s, &ap), ESA_OK);
    assert_int_equal(esa_plan_mask(chooses, &mask, s.B, -1), ESA_OK);
    assert_true(dense->workspace < any->workspace);
    const esa_qkvo none = { 0 };
    assert_int_equal(esa_plan_attend(dense, mask, &none, NULL, 0, NULL), ESA_ERR_STATE);
    esa_ctx_leave(ctx);
    esa_mask_free(mask);
    esa_plan_free(dense);
    esa_plan_free(chooses);
    esa_plan_free(any);
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_dense_plan_takes_no_masks) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
