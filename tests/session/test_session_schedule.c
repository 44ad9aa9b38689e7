/* test_session_schedule.c - at which steps masks and orders are made: the rule, sessions that
 * follow it with a warm-up and with steps left out, and the work that the solver expects of them.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/mini_model.h"

#include <math.h>
#include "common/one_ctx.h"
#include "rules/schedule.h"

enum { EARLY = ESA_REFRESH_EARLY, MOST = 60 };

/* The error selector in blocks of 16 x 16, with masks and adaptive orders made early and shared,
 * and two exact rows. */
static esa_session_params error_params(const mini *m)
{
    const esa_session_params plain = mini_sparse_params(m);
    esa_session_params p = esa_session_params_recommended(ESA_SESSION_ONLINE, ESA_SELECT_ERROR, 0);
    p.layers = m->layers;
    p.steps = m->steps;
    p.branches = m->branches;
    memcpy(p.select.layout.grid_q, plain.select.layout.grid_q, sizeof p.select.layout.grid_q);
    p.select.block_q = p.select.block_k = 16;
    p.refresh_every = p.order_every = EARLY;
    p.share_branches = 1;
    p.carry = ESA_CARRY_OFF; /* anchors would take the place of schedules */
    p.attention.exact_rows = 2;
    return p;
}

static void attend(const mini *m, esa_session *s, int32_t step)
{
    const mini_views t = mini_view(m);
    for (int32_t branch = 0; branch < m->branches; branch++) {
        ok(ctx, esa_session_step(s, step, branch));
        for (int32_t layer = 0; layer < m->layers; layer++)
            ok(ctx, esa_session_attention(s, layer, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, NULL));
    }
}

/* The rule in other words: 1 if step n of S is the first one, or an eighth, a quarter or half of S,
 * rounded down. */
static int32_t is_early(int32_t n, int32_t S)
{
    return n == 0 || n == (int32_t)floor(0.125 * S) || n == (int32_t)floor(0.25 * S) ||
           n == (int32_t)floor(0.5 * S);
}

static void test_rule(void **state)
{
    (void)state;
    static const int32_t known[][5] = { { 8, 0, 1, 2, 4 },
                                        { 25, 0, 3, 6, 12 },
                                        { 50, 0, 6, 12, 25 },
                                        { 4, 0, 1, 2, 2 },
                                        { 1, 0, 0, 0, 0 } };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        for (int32_t n = 0; n < known[i][0]; n++) {
            int32_t listed = 0;
            for (int k = 1; k < 5; k++) listed |= n == known[i][k];
            assert_int_equal(esa_schedule_makes(EARLY, n, known[i][0]), listed);
        }
    for (int32_t S = 1; S <= MOST; S++)
        for (int32_t n = 0; n < S; n++) {
            assert_int_equal(esa_schedule_makes(EARLY, n, S), is_early(n, S));
            assert_int_equal(esa_schedule_makes(0, n, S), n == 0);
            for (int32_t every = 1; every <= 7; every++)
                assert_int_equal(esa_schedule_makes(every, n, S), n % every == 0);
        }
    assert_true(esa_schedule_valid(EARLY) && esa_schedule_valid(0) && !esa_schedule_valid(-2));
}

/* Whatever steps are left out: a step is due if the rule names one since the last that was made. */
static void test_rule_with_gaps(void **state)
{
    (void)state;
    const uint64_t seed = 20261116;
    print_message("seed %llu\n", (unsigned long long)seed);
    esa_rng r = { seed };
    for (int turn = 0; turn < 2000; turn++) {
        const int32_t S = 1 + (int32_t)esa_rng_below(&r, MOST),
                      every = (int32_t)esa_rng_below(&r, 6) - 1;
        int32_t at = -1;
        for (int32_t n = 0; n < S; n++) {
            if (esa_rng_below(&r, 3) == 0) continue; /* left out */
            int32_t named = at < 0;
            for (int32_t i = at + 1; i <= n; i++)
                named |= every < 0 ? is_early(i, S) : every ? i % every == 0 : i == 0;
            assert_int_equal(esa_schedule_due(every, n, S, at), named);
            if (named) at = n;
        }
    }
}

/* Sessions of 1 to 60 steps make masks where the rule says, after the warm-up. */
static void test_all_lengths(void **state)
{
    (void)state;
    const double warmups[] = { 0, 0.2 };
    /* where the machine is slow, every third length */
    const int32_t step = getenv("ESA_TEST_SMALL") ? 3 : 1;
    for (int32_t steps = 1; steps <= MOST; steps += step) {
        mini m = mini_make(1, steps, 1, 1);
        mini_fill(&m, 0, 0, 0);
        esa_session_params p = mini_sparse_params(&m);
        p.refresh_every = EARLY;
        for (int w = 0; w < 2; w++) {
            const int32_t warm = (int32_t)ceil(warmups[w] * steps - 1e-9);
            esa_session *s;
            p.warmup_frac = warmups[w];
            ok(ctx, esa_session_create(ctx, &s, &p));
            for (int video = 0; video < 2; video++) {
                ok(ctx, esa_session_begin(s));
                for (int32_t t = 0; t < steps; t++) {
                    attend(&m, s, t);
                    const int32_t makes = t >= warm && is_early(t - warm, steps - warm);
                    if (mini_stats(s, 0, t).masks_made != makes)
                        fail_msg("%d steps, warm-up %g: step %d makes a mask: %d", steps,
                                 warmups[w], t, !makes);
                }
            }
            esa_session_free(s);
        }
        mini_free(&m);
    }
}

/* 16 sparse steps after a warm-up of 4: due at steps 4, 6, 8 and 12. The first step that reaches or
 * passes one of them makes the mask. A dense cell does not count. */
static void test_steps_left_out(void **state)
{
    (void)state;
    mini m = mini_make(2, 20, 1, 1);
    mini_fill(&m, 0, 0, 0);
    double density[40];
    for (int i = 0; i < 40; i++) density[i] = 0.5;
    density[20 + 4] = density[20 + 5] = 1; /* layer 1: 14 sparse steps, due at 6, 7, 9 and 13 */
    const struct {
        int32_t step, first, second; /* masks made by layer 0 and 1 */
    } runs[] = { { 1, 0, 0 },  { 5, 1, 0 },  { 7, 1, 1 },  { 9, 1, 1 },
                 { 10, 0, 0 }, { 11, 0, 0 }, { 15, 1, 1 }, { 19, 0, 0 } };
    esa_session_params p = mini_sparse_params(&m);
    p.density = density;
    p.warmup_frac = 0.2;
    for (int32_t error = 0; error < 2; error++) {
        if (error) {
            const esa_session_params best = error_params(&m);
            p.select = best.select;
            p.attention = best.attention;
            p.order_every = best.order_every;
        }
        p.refresh_every = error ? 0 : EARLY; /* then the orders ask for new masks */
        esa_session *s;
        ok(ctx, esa_session_create(ctx, &s, &p));
        ok(ctx, esa_session_begin(s));
        for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
            attend(&m, s, runs[i].step);
            assert_int_equal(mini_stats(s, 0, runs[i].step).masks_made, runs[i].first);
            assert_int_equal(mini_stats(s, 1, runs[i].step).masks_made, runs[i].second);
        }
        esa_session_free(s);
    }
    mini_free(&m);
}

/* The same inputs at every step: results have the bits of a session that makes everything anew. */
static void test_nothing_changed(void **state)
{
    (void)state;
    mini m = mini_make(1, 9, 2, 2);
    mini_fill(&m, 0, 0, 0);
    float *expected = malloc((size_t)mini_size(&m) * 4);
    assert_non_null(expected);
    for (int32_t early = 0; early < 2; early++) {
        esa_session_params p = error_params(&m);
        esa_session *s;
        if (!early) p.refresh_every = p.order_every = 1;
        ok(ctx, esa_session_create(ctx, &s, &p));
        ok(ctx, esa_session_begin(s));
        for (int32_t t = 0; t < m.steps; t++) {
            attend(&m, s, t);
            if (!early && t == 0) memcpy(expected, m.o, (size_t)mini_size(&m) * 4);
            assert_memory_equal(expected, m.o, mini_size(&m) * 4);
        }
        assert_int_equal(mini_stats(s, -1, -1).masks_made, early ? 4 : 9);
        esa_session_free(s);
    }
    free(expected);
    mini_free(&m);
}

/* ---------------------------------------------------------------- densities and work */

/* A kept mask has the mean density of the steps it serves. Orders may cut that short. */
static void test_mean_density(void **state)
{
    (void)state;
    enum { STEPS = 25, WARM = 5 };
    const int32_t every[][2] = { { EARLY, 0 }, { EARLY, 3 }, { 4, EARLY }, { 0, EARLY }, { 3, 2 } };
    mini m = mini_make(1, STEPS, 1, 1);
    mini_fill(&m, 0, 0, 0);
    double density[STEPS];
    for (int t = 0; t < STEPS; t++) density[t] = t == 9 ? 1 : 0.3 + 0.01 * (t * 7 % 20);
    for (size_t i = 0; i < sizeof every / sizeof every[0]; i++) {
        const int32_t S = STEPS - WARM - 1; /* step 9 is dense */
        double mean[STEPS] = { 0 };
        int32_t step[STEPS], n = 0, makes[STEPS + 1];
        for (int32_t t = WARM; t < STEPS; t++)
            if (t != 9) step[n++] = t;
        assert_int_equal(n, S);
        for (int32_t k = 0; k < S; k++) {
            makes[k] = 0;
            for (int e = 0; e < 2; e++)
                makes[k] |= every[i][e] < 0   ? is_early(k, S)
                            : every[i][e] > 0 ? k % every[i][e] == 0
                                              : k == 0;
        }
        for (int32_t k = 0, end; k < S; k = end) {
            double sum = 0;
            for (end = k; end == k || (end < S && !makes[end]); end++) sum += density[step[end]];
            for (int32_t j = k; j < end; j++) mean[step[j]] = sum / (end - k);
        }
        esa_session_params p = error_params(&m);
        esa_session *s;
        p.density = density;
        p.warmup_frac = (double)WARM / STEPS;
        p.refresh_every = every[i][0];
        p.order_every = every[i][1];
        ok(ctx, esa_session_create(ctx, &s, &p));
        ok(ctx, esa_session_begin(s));
        for (int32_t t = 0; t < STEPS; t++) attend(&m, s, t);
        for (int32_t k = 0; k < S; k++) {
            const esa_session_stats c = mini_stats(s, 0, step[k]);
            assert_int_equal(c.masks_made, makes[k]);
            assert_true(fabs(c.density_asked - mean[step[k]]) < 1e-12);
        }
        esa_session_free(s);
    }
    mini_free(&m);
}

/* The work that the solver expects is the work that a session spends. */
static void test_work(void **state)
{
    (void)state;
    const struct {
        int32_t steps, branches, refresh, order, share, exact;
        double warmup, work;
    } cases[] = {
        { 1, 1, EARLY, EARLY, 1, 2, 0, 0.8 },    { 2, 2, EARLY, EARLY, 1, 2, 0, 0.7 },
        { 4, 2, EARLY, EARLY, 1, 2, 0, 0.6 },    { 8, 1, EARLY, EARLY, 1, 2, 0, 0.75 },
        { 8, 2, EARLY, EARLY, 1, 2, 0, 0.5 },    { 8, 2, EARLY, EARLY, 0, 0, 0, 0.6 },
        { 10, 2, EARLY, EARLY, 1, 2, 0.2, 0.6 }, { 13, 2, EARLY, 0, 1, 1, 0, 0.5 },
        { 25, 1, EARLY, EARLY, 1, 2, 0, 0.45 },  { 25, 1, 3, EARLY, 1, 2, 0.1, 0.6 },
        { 50, 1, EARLY, EARLY, 1, 2, 0, 0.4 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        mini m = mini_make(2, cases[i].steps, cases[i].branches, 1);
        esa_session_params p = error_params(&m);
        esa_session *s;
        p.refresh_every = cases[i].refresh;
        p.order_every = cases[i].order;
        p.share_branches = cases[i].share;
        p.attention.exact_rows = cases[i].exact;
        p.warmup_frac = cases[i].warmup;
        p.work = cases[i].work;
        /* so few tokens: one order costs as much as a dense call */
        if (cases[i].steps == 1) p.select.layout.order = ESA_ORDER_HILBERT;
        ok(ctx, esa_session_create(ctx, &s, &p));
        ok(ctx, mini_run(&m, s, NULL));
        const esa_session_stats c = mini_stats(s, -1, -1);
        /* A selector stops before the first block that does not fit: at most 1 of 3 * 15 * 15. */
        if (!(fabs(c.work - cases[i].work) < 0.002))
            fail_msg("case %d: work %.5f, asked %.5f", (int)i, c.work, cases[i].work);
        esa_session_free(s);
        mini_free(&m);
    }
}

/* The least work that the costs of a session allow can be spent, with every tail, and less is
 * refused. Rows with text and the protected frame keep more than one block. */
static void test_least_work(void **state)
{
    (void)state;
    const struct {
        int32_t selector, tail, text, protect;
        double more; /* entropy gives heads unlike budgets, and raises those below the least */
    } cases[] = {
        { ESA_SELECT_ERROR, ESA_TAIL_LEVELS, 0, 0, 0 },
        { ESA_SELECT_ERROR, ESA_TAIL_POOLED, 0, 0, 0 },
        { ESA_SELECT_ERROR, ESA_TAIL_NONE, 0, 0, 0 },
        { ESA_SELECT_ENTROPY, ESA_TAIL_POOLED, 0, 0, 0 },
        { ESA_SELECT_ERROR, ESA_TAIL_LEVELS, 0, 1, 0 },
        { ESA_SELECT_ERROR, ESA_TAIL_POOLED, 30, 1, 0 },
        { ESA_SELECT_ENTROPY, ESA_TAIL_NONE, 30, 1, 0.04 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        mini m = mini_make(2, 6, 1, 1);
        esa_session_params p = error_params(&m);
        esa_session *s;
        esa_work_costs costs = { .struct_size = sizeof costs };
        esa_shapes shapes = esa_shapes_default();
        double density[12], least = 0;
        p.refresh_every = p.order_every = 0;
        p.select.selector = cases[i].selector;
        p.select.layout.order = ESA_ORDER_HILBERT;
        p.select.layout.protect_first_frame = cases[i].protect;
        p.select.tail = p.attention.tail = cases[i].tail;
        p.select.layout.text_front_q = m.text = cases[i].text;
        if (m.text) p.select.layout.grid_q[1] = m.grid[1] = 7; /* 3 * 7 * 10 + 30 = 240 tokens */
        m.N = (int64_t)m.grid[0] * m.grid[1] * m.grid[2] + m.text;
        shapes.B = 1;
        shapes.Hq = shapes.Hkv = m.H;
        shapes.Nq = shapes.Nk = m.N;
        shapes.D = m.D;
        /* of the branches that are announced, some run at a step */
        static const int32_t announced[][3] = {
            { 4, 0, 2 }, { 4, 1, 1 }, { 4, 3, 3 }, { 1, 0, 1 }
        };
        for (int k = 0; k < 4; k++) {
            p.branches = announced[k][0];
            p.step_branches = announced[k][1];
            ok(ctx, esa_session_costs(ctx, &costs, &p, &shapes));
            assert_int_equal(costs.branches, announced[k][2]);
        }
        assert_true(costs.floor >= 1.0 / 15 && costs.exact > 0 && costs.select > 0);
        assert_int_equal(
            esa_work_plan_solve(ctx, NULL, density, 2, 6, NULL, NULL, 0, &costs, &least),
            ESA_ERR_ARGUMENT);
        p.work = least + 1e-6;
        ok(ctx, esa_session_create(ctx, &s, &p));
        ok(ctx, mini_run(&m, s, NULL));
        const double work = mini_stats(s, -1, -1).work;
        print_message("case %d: floor %.4f, least work %.4f, spent %.4f\n", (int)i, costs.floor,
                      least, work);
        /* a mask is made once, for all steps: its best blocks may be forced more or less often */
        assert_true(work > least - 0.01 && work < least + 0.01 + cases[i].more);
        esa_session_free(s);
        p.work = least - 0.01;
        ok(ctx, esa_session_create(ctx, &s, &p));
        assert_refused(ctx, mini_run(&m, s, NULL), ESA_ERR_ARGUMENT, "lowest density", NULL);
        esa_session_free(s);
        p.mode = ESA_SESSION_DENSE;
        assert_refused(ctx, esa_session_costs(ctx, &costs, &p, &shapes), ESA_ERR_ARGUMENT,
                       "expected ESA_SESSION_ONLINE", NULL);
        mini_free(&m);
    }
}

/* What the solver leaves for attention, recomputed: the work less masks, orders and exact rows. */
static void test_solver(void **state)
{
    (void)state;
    enum { LAYERS = 2 };
    double density[LAYERS * MOST], got;
    uint8_t dense[LAYERS * MOST];
    for (int32_t steps = 1; steps <= MOST; steps++) {
        const int32_t warm = steps / 5, S = steps - warm;
        esa_work_costs costs = esa_work_costs_default();
        costs.branches = 2;
        costs.share_branches = 1;
        costs.refresh_every = costs.order_every = EARLY;
        costs.select = 0.03;
        costs.order = 0.05;
        costs.exact = 0.02;
        int32_t makes = 0;
        for (int32_t t = 0; t < S; t++) makes += is_early(t, S);
        for (int32_t t = 0; t < LAYERS * steps; t++) dense[t] = t % steps < warm;
        ok(ctx,
           esa_work_plan_solve(ctx, NULL, density, LAYERS, steps, NULL, dense, 0.6, &costs, &got));
        assert_true(fabs(got - 0.6) < 1e-9);
        double sum = 0;
        for (int32_t i = 0; i < LAYERS * steps; i++) sum += density[i];
        const double left = 0.6 * steps - 0.02 * S - makes * (0.03 + 0.05) / 2;
        assert_true(fabs(sum / LAYERS - left) < 1e-7);
    }
}

static void test_refusals(void **state)
{
    (void)state;
    mini m = mini_make(1, 4, 1, 1);
    esa_session *s;
    double density[4];
    esa_session_params p = mini_sparse_params(&m);
    p.order_every = -2;
    assert_refused(ctx, esa_session_create(ctx, &s, &p), ESA_ERR_ARGUMENT, "order_every is -2",
                   "ESA_REFRESH_EARLY (-1)", NULL);
    esa_work_costs costs = esa_work_costs_default();
    costs.refresh_every = -2;
    assert_refused(ctx,
                   esa_work_plan_solve(ctx, NULL, density, 1, 4, NULL, NULL, 0.5, &costs, NULL),
                   ESA_ERR_ARGUMENT, "refresh_every is -2", "ESA_REFRESH_EARLY (-1)", NULL);
    mini_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rule),
        cmocka_unit_test(test_rule_with_gaps),
        cmocka_unit_test(test_all_lengths),
        cmocka_unit_test(test_steps_left_out),
        cmocka_unit_test(test_nothing_changed),
        cmocka_unit_test(test_mean_density),
        cmocka_unit_test(test_work),
        cmocka_unit_test(test_least_work),
        cmocka_unit_test(test_solver),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
