/* test_huge.c - shapes far beyond any memory: sizes of scratch memory are right or refused, never
 * wrapped. Sanitizer builds see every overflow.
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "common/tests.h"
#include "common/one_ctx.h"

static const int64_t heads[] = { 1, 256, 1 << 16, 1 << 20, INT64_C(1) << 30, INT32_MAX };
static const int64_t tokens[] = { 1, 256, 1048560, 8388480, 65535 * INT64_C(256), INT32_MAX };
enum { SIZES = 6 };

/* A plan is made with a workspace that can be right, or refused with a message. Returns 1 if it was
 * made. */
static int try_plan(const esa_shapes *shapes, const esa_select_params *select,
                    const esa_attention_params *attention)
{
    esa_plan *plan;
    int64_t bytes = -1;
    const esa_status status = esa_plan_create(ctx, &plan, shapes, select, attention);
    if (status) {
        assert_null(plan);
        assert_true(strlen(esa_ctx_error(ctx)) > 20);
        return 0;
    }
    assert_int_equal(esa_plan_workspace(plan, &bytes), ESA_OK);
    assert_true(bytes >= 0 && bytes < INT64_C(1) << 62);
    esa_plan_free(plan);
    return 1;
}

static void all_shapes(void **state)
{
    (void)state;
    int made = 0, refused = 0;
    for (int selector = -1; selector <= ESA_SELECT_ERROR; selector++)
        for (int i = 0; i < SIZES * SIZES * 4; i++) {
            esa_shapes s = esa_shapes_default();
            esa_select_params p = esa_select_params_default(selector < 0 ? 0 : selector);
            esa_attention_params a = esa_attention_params_default();
            s.B = 1;
            s.Hq = s.Hkv = heads[i % SIZES];
            s.Nq = s.Nk = tokens[i / SIZES % SIZES];
            s.D = i / SIZES / SIZES % 2 ? ESA_MAX_HEAD_DIM : 1;
            if (i / SIZES / SIZES / 2) s.Nq = 1; /* one query, many keys */
            p.block_q = p.block_k = s.Nk <= 65535 * 16 ? 16 : 256;
            a.tail = selector < 0 ? ESA_TAIL_NONE : ESA_TAIL_POOLED;
            if (selector != ESA_SELECT_ERROR && s.D == 1) a.exact_rows = ESA_MAX_EXACT_ROWS;
            if (try_plan(&s, selector < 0 ? NULL : &p, &a))
                made++;
            else
                refused++;
        }
    assert_true(made > 100 && refused > 100);
}

/* The largest product is taken, one more is not. Views with stride 0 can ask for it without the
 * memory, so direct calls are refused too. */
static void the_bound(void **state)
{
    (void)state;
    esa_shapes s = esa_shapes_default();
    float x = 0;
    s.B = 1;
    s.Hq = s.Hkv = 256;
    s.Nq = s.Nk = 1 << 24;
    s.D = 64;
    assert_int_equal(try_plan(&s, NULL, NULL), 1);
    s.Nq++;
    assert_int_equal(try_plan(&s, NULL, NULL), 0);
    assert_non_null(strstr(esa_ctx_error(ctx), "256 heads x 16777217 queries x 16777216 keys are "
                                               "too many"));
    esa_tensor q = esa_tensor_bnsd(&x, ESA_DTYPE_F32, 1, 1 << 20, 1 << 20, 1), k = q;
    esa_mask *mask;
    for (int i = 0; i < 3; i++) q.stride[i] = k.stride[i] = 0;
    assert_int_equal(esa_select(ctx, &mask, &q, &k, NULL), ESA_ERR_SHAPE);
    assert_null(mask);
    assert_non_null(strstr(esa_ctx_error(ctx), "are too many"));
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(all_shapes), cmocka_unit_test(the_bound) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
