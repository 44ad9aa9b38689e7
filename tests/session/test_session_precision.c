/* test_session_precision.c - which calls of a session run in 8 bits, and that masks do not change.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/mini_model.h"
#include "session/session.h"
#include "common/on_gpu.h"
#include "common/one_ctx.h"

enum { LAYERS = 4, STEPS = 6 };

/* 8 bits are for steps 2 to 4 of the layers 0, 1 and 3, whether they run dense or sparse. */
static void test_schedule(void **state)
{
    (void)state;
    mini m = mini_make(LAYERS, STEPS, 2, 1);
    static const int32_t two[] = { 2, 2 };
    static const int32_t modes[] = { ESA_SESSION_DENSE, ESA_SESSION_ONLINE, ESA_SESSION_RECORD };
    for (int i = 0; i < 3; i++)
        for (int32_t bits = 0; bits <= 16; bits += 8) {
            esa_session_params p = mini_params(&m, modes[i]);
            p.attention.precision = bits;
            p.steps16_first = 2;
            p.steps16_last = 1;
            p.layers16 = two;
            p.layers16_count = 2;
            esa_session *s;
            ok(ctx, esa_session_create(ctx, &s, &p));
            ok(ctx, mini_run(&m, s, NULL));
            int64_t all = 0;
            for (int32_t l = 0; l < LAYERS; l++)
                for (int32_t t = 0; t < STEPS; t++) {
                    const esa_session_stats c = mini_stats(s, l, t);
                    const int eight = bits == 8 && modes[i] != ESA_SESSION_RECORD && l != 2 &&
                                      t >= 2 && t < STEPS - 1;
                    /* a real GPU may not have 8 bits for f32 */
                    if (!on_gpu() || on_stand_in()) {
                        assert_int_equal(c.eight_calls, eight ? c.calls : 0);
                        assert_int_equal(strstr(c.kernel, "8bit") != NULL, eight);
                    }
                    assert_int_equal(c.calls, 2);
                    all += c.eight_calls;
                }
            assert_int_equal(mini_stats(s, -1, -1).eight_calls, all);
            esa_session_free(s);
        }
    mini_free(&m);
}

static const esa_backend *real; /* of the plans */

static esa_attn_kernel renamed(esa_ctx *c, const esa_attn_args *args)
{
    esa_attn_kernel kernel = real->attention_kernel(c, args);
    kernel.name = kernel.bits == 8 ? "first" : "not-8bit";
    return kernel;
}

/* 8-bit calls are counted by what their kernel is, not by its name. */
static void test_names_mean_nothing(void **state)
{
    (void)state;
    mini m = mini_make(LAYERS, STEPS, 2, 1);
    static esa_backend other;
    esa_session_params p = mini_params(&m, ESA_SESSION_ONLINE);
    p.attention.precision = 8;
    p.steps16_first = 2;
    esa_session *s;
    ok(ctx, esa_session_create(ctx, &s, &p));
    ok(ctx, mini_run(&m, s, NULL));
    const esa_session_stats before = mini_stats(s, -1, -1);
    for (int i = 0; i < ESA_SESSION_PLANS; i++) {
        if (!s->plan[i].plan) continue;
        real = s->plan[i].plan->backend;
        other = *real;
        other.attention_kernel = renamed;
        s->plan[i].plan->backend = &other;
    }
    ok(ctx, mini_run(&m, s, NULL));
    const esa_session_stats after = mini_stats(s, -1, -1);
    assert_string_equal(after.kernel, before.eight_calls ? "first" : "not-8bit");
    assert_int_equal(after.calls, before.calls);
    assert_int_equal(after.eight_calls, before.eight_calls);
    if (!on_gpu() || on_stand_in()) assert_true(after.eight_calls > 0);
    for (int i = 0; i < ESA_SESSION_PLANS; i++)
        if (s->plan[i].plan) s->plan[i].plan->backend = real;
    esa_session_free(s);
    mini_free(&m);
}

/* The masks are the same in both precisions: selection does not change. */
static void test_same_masks(void **state)
{
    (void)state;
    mini m = mini_make(LAYERS, STEPS, 2, 1);
    double density[2] = { 0, 0 };
    for (int i = 0; i < 2; i++) {
        esa_session_params p = mini_params(&m, ESA_SESSION_ONLINE);
        p.attention.precision = i ? 8 : 16;
        esa_session *s;
        ok(ctx, esa_session_create(ctx, &s, &p));
        ok(ctx, mini_run(&m, s, NULL));
        const esa_session_stats all = mini_stats(s, -1, -1);
        density[i] = all.density;
        assert_true(all.sparse_calls > 0);
        esa_session_free(s);
    }
    assert_true(density[0] == density[1]);
    mini_free(&m);
}

static void refused(const esa_session_params *p, const char *says)
{
    esa_session *s;
    assert_int_equal(esa_session_create(ctx, &s, p), ESA_ERR_ARGUMENT);
    assert_null(s);
    if (!strstr(esa_ctx_error(ctx), says))
        fail_msg("'%s' does not say '%s'", esa_ctx_error(ctx), says);
}

static void test_bad_schedules(void **state)
{
    (void)state;
    static const int32_t far[] = { 1, LAYERS };
    mini m = mini_make(LAYERS, STEPS, 2, 1);
    const esa_session_params good = mini_params(&m, ESA_SESSION_ONLINE);
    esa_session_params p = good;
    p.attention.precision = 12;
    refused(&p, "precision is 12, expected 8 or 16 bits");
    p = good;
    p.steps16_first = STEPS + 1;
    refused(&p, "steps16_first is 7, expected 0 to 6");
    p = good;
    p.steps16_last = -1;
    refused(&p, "steps16_last is -1");
    p = good;
    p.layers16 = far;
    p.layers16_count = 2;
    refused(&p, "layers16 names layer 4, but the model has layers 0 to 3");
    p = good;
    p.layers16_count = 1;
    refused(&p, "layers16_count is 1, but layers16 is NULL");
    mini_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_schedule),
                                        cmocka_unit_test(test_names_mean_nothing),
                                        cmocka_unit_test(test_same_masks),
                                        cmocka_unit_test(test_bad_schedules) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
