/* test_session_defaults.c - the recommended settings: one table of rules, and sessions accept them.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include <esa/esa_session.h>

static void test_rules(void **state)
{
    (void)state;
    static const struct {
        int32_t mode, selector;
        int64_t tokens;
        int32_t order, block, tail, becomes;
    } rule[] = {
        { ESA_SESSION_ONLINE, ESA_SELECT_ENTROPY, 0, ESA_ORDER_HILBERT, 0, ESA_TAIL_POOLED,
          ESA_SELECT_ENTROPY },
        { ESA_SESSION_ONLINE, ESA_SELECT_ENTROPY, 1, ESA_ORDER_HILBERT, 64, ESA_TAIL_POOLED,
          ESA_SELECT_ENTROPY },
        { ESA_SESSION_ONLINE, ESA_SELECT_ADA_BSA, ESA_SHORT_TOKENS, ESA_ORDER_HILBERT, 64,
          ESA_TAIL_POOLED, ESA_SELECT_ADA_BSA },
        { ESA_SESSION_ONLINE, ESA_SELECT_RF_V2, ESA_SHORT_TOKENS + 1, ESA_ORDER_TILE, 0,
          ESA_TAIL_POOLED, ESA_SELECT_RF_V2 },
        { ESA_SESSION_CACHED, ESA_SELECT_RF_V2, 100, ESA_ORDER_DEFAULT, 64, ESA_TAIL_LEVELS,
          ESA_SELECT_ENTROPY },
        { ESA_SESSION_RECORD, ESA_SELECT_RF_V2, 100, ESA_ORDER_HILBERT, 64, ESA_TAIL_NONE,
          ESA_SELECT_ENTROPY },
        { ESA_SESSION_DENSE, ESA_SELECT_ENTROPY, 100, ESA_ORDER_HILBERT, 64, ESA_TAIL_NONE,
          ESA_SELECT_ENTROPY },
    };
    for (size_t i = 0; i < sizeof rule / sizeof rule[0]; i++) {
        const esa_session_params p = esa_session_params_recommended(rule[i].mode, rule[i].selector,
                                                                    rule[i].tokens);
        assert_int_equal(p.mode, rule[i].mode);
        assert_int_equal(p.select.selector, rule[i].becomes);
        assert_int_equal(p.select.layout.order, rule[i].order);
        assert_int_equal(p.select.block_q, rule[i].block);
        assert_int_equal(p.select.block_k, rule[i].block);
        assert_int_equal(p.attention.tail, rule[i].tail);
    }
}

/* Apart from the rules above the plain defaults hold, to the bit. */
static void test_rest_is_plain(void **state)
{
    (void)state;
    const esa_session_params plain = esa_session_params_default();
    esa_session_params p = esa_session_params_recommended(ESA_SESSION_ONLINE, ESA_SELECT_ENTROPY,
                                                          1000);
    assert_true(p.warmup_frac == 0.2 && p.dense_first_layer == 1 && p.select.budget == 0.5);
    p.select.layout.order = plain.select.layout.order;
    p.select.block_q = p.select.block_k = 0;
    p.attention.tail = plain.attention.tail;
    assert_memory_equal(&p, &plain, sizeof p);
}

/* The rules of the error selector. */
static void test_error(void **state)
{
    (void)state;
    for (int32_t probes = 0; probes < 2; probes++) {
        const esa_session_params p = esa_session_params_recommended(
            probes ? ESA_SESSION_PROBE : ESA_SESSION_ONLINE, ESA_SELECT_ERROR, 1000);
        assert_int_equal(p.select.layout.order, ESA_ORDER_ADAPTIVE);
        assert_int_equal(p.select.tail, ESA_TAIL_LEVELS);
        assert_int_equal(p.attention.tail, ESA_TAIL_LEVELS);
        assert_int_equal(p.attention.exact_rows, -1); /* 2 without carry: test_session_carry */
        assert_int_equal(p.carry, ESA_CARRY_AUTO);
        assert_int_equal(p.refresh_every, ESA_REFRESH_EARLY);
        assert_int_equal(p.order_every, ESA_REFRESH_EARLY);
        assert_int_equal(p.share_branches, 1);
        assert_int_equal(p.select.fine, 0); /* 8 at these blocks */
        assert_true(p.warmup_frac == 0 && p.dense_first_layer == 0);
    }
}

/* Recordings of errors: one order for all prompts, no tail, groups that the library knows. */
static void test_recorded_errors(void **state)
{
    (void)state;
    const esa_session_params p = esa_session_params_recommended(ESA_SESSION_RECORD,
                                                                ESA_SELECT_ERROR, 1000),
                             online = esa_session_params_recommended(ESA_SESSION_ONLINE,
                                                                     ESA_SELECT_ERROR, 1000);
    assert_int_equal(p.select.selector, ESA_SELECT_ERROR);
    assert_int_equal(p.select.layout.order, ESA_ORDER_HILBERT);
    assert_int_equal(p.select.tail, ESA_TAIL_LEVELS);
    assert_int_equal(p.attention.tail, ESA_TAIL_NONE);
    /* The first call of a session chooses them by its blocks: test_recorded_errors. */
    assert_true(p.select.group_q == 0 && p.select.group_k == 0);
    assert_true(online.select.group_q == 0 && online.select.group_k == 0);
}

/* Selectors in the order of their numbers: alone, and with a frame that was given. */
static void test_first_frame(void **state)
{
    (void)state;
    static const struct {
        int32_t selector, alone, given;
    } rule[] = {
        { ESA_SELECT_FULL, 0, 1 },    { ESA_SELECT_ADA_BSA, 0, 1 }, { ESA_SELECT_RF_V2, 1, 1 },
        { ESA_SELECT_ENTROPY, 0, 1 }, { ESA_SELECT_RANDOM, 0, 1 },  { ESA_SELECT_ERROR, 0, 0 },
    };
    for (size_t i = 0; i < sizeof rule / sizeof rule[0]; i++) {
        assert_int_equal(esa_protects_first_frame(rule[i].selector, 0), rule[i].alone);
        assert_int_equal(esa_protects_first_frame(rule[i].selector, 1), rule[i].given);
    }
}

/* A fifth of the steps, rounded up, but not by a rounding error of the product; and no nonsense
 * from nonsense. */
static void test_warmup_steps(void **state)
{
    (void)state;
    static const int32_t fifth[] = { 0, 1, 1, 1, 1, 1, 2, 2, 2 };
    for (int32_t steps = 0; steps < (int32_t)(sizeof fifth / sizeof fifth[0]); steps++)
        assert_int_equal(esa_warmup_steps(0.2, steps), fifth[steps]);
    assert_int_equal(esa_warmup_steps(0.2, 50), 10);
    assert_int_equal(esa_warmup_steps(0.07, 100), 7); /* 7.000000000000001 */
    assert_int_equal(esa_warmup_steps(0, 4), 0);
    assert_int_equal(esa_warmup_steps(1, 4), 4);
    assert_int_equal(esa_warmup_steps(2, 4), 4);
    assert_int_equal(esa_warmup_steps(-1, 4), 0);
    assert_int_equal(esa_warmup_steps((double)NAN, 4), 0);
    assert_int_equal(esa_warmup_steps(0.2, -4), 0);
}

static void test_sessions_accept_them(void **state)
{
    (void)state;
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    for (int32_t mode = ESA_SESSION_DENSE; mode <= ESA_SESSION_RECORD; mode++) {
        if (mode == ESA_SESSION_CACHED) continue; /* needs a mask file */
        esa_session_params p = esa_session_params_recommended(mode, ESA_SELECT_ENTROPY, 256);
        esa_session *session;
        p.layers = p.steps = 2;
        p.select.layout.grid_q[0] = 4;
        p.select.layout.grid_q[1] = p.select.layout.grid_q[2] = 8;
        assert_int_equal(esa_session_create(ctx, &session, &p), ESA_OK);
        esa_session_free(session);
    }
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rules),
        cmocka_unit_test(test_rest_is_plain),
        cmocka_unit_test(test_error),
        cmocka_unit_test(test_recorded_errors),
        cmocka_unit_test(test_first_frame),
        cmocka_unit_test(test_warmup_steps),
        cmocka_unit_test(test_sessions_accept_them),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
