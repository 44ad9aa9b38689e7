/* test_session_cache.c - esa_session_cache_begin and esa_session_cache_next: the rule of the step
 * cache with a session's steps and warm-up, masks after steps that were left out, and what is
 * refused. tests/model/test_step_cache.c tests the rule itself.
 * SPDX-License-Identifier: Apache-2.0 */
#define ESA_EXPERIMENTAL
#include <math.h>
#include "session/mini_model.h"
#include "common/one_ctx.h"
#include "rules/schedule.h"

static esa_session *open_session(int32_t mode, int32_t steps, double warmup_frac)
{
    const mini m = { .layers = 2, .steps = steps, .branches = 2, .grid = { 3, 8, 10 } };
    esa_session_params p = mini_params(&m, mode);
    p.warmup_frac = warmup_frac;
    esa_session *s;
    ok(ctx, esa_session_create(ctx, &s, &p));
    return s;
}

static esa_step_change change_of(int32_t step, int32_t computed, double since)
{
    return (esa_step_change){ .struct_size = sizeof(esa_step_change),
                              .step = step,
                              .computed = computed,
                              .x_change = 1,
                              .v_size = { 10, 5 },
                              .v_change = { 0.2 * since, 0.05 * since } };
}

/* Steps of a velocity that turns evenly, by 0.02 of its size a step. Marks computed steps with C,
 * others with a dot. */
static void pattern(char *out, esa_session *s, int32_t steps)
{
    int32_t skip = 0, since = 0;
    for (int32_t i = 0; i < steps; i++) {
        const esa_step_change c = change_of(i, !skip, since);
        out[i] = skip ? '.' : 'C';
        since = skip ? since + 1 : 1;
        ok(ctx, esa_session_cache_next(s, &c, &skip));
    }
    out[steps] = 0;
}

static void test_pattern(void **state)
{
    (void)state;
    static const struct {
        int32_t mode, steps;
        double warmup_frac, threshold;
        const char *expected;
    } cases[] = {
        { ESA_SESSION_ONLINE, 12, 0, 0.05, "CC..C..C..CC" },
        { ESA_SESSION_ONLINE, 8, 0, 0.03, "CC.C.C.C" },
        { ESA_SESSION_ONLINE, 8, 0, 0.02, "CCCCCCCC" }, /* not below the threshold */
        { ESA_SESSION_ONLINE, 12, 0.4, 100, "CCCCC......C" },
        { ESA_SESSION_DENSE, 12, 0.4, 100, "CC.........C" }, /* a dense session has no warm-up */
        { ESA_SESSION_ONLINE, 12, 1, 100, "CCCCCCCCCCCC" },
        { ESA_SESSION_ONLINE, 1, 0, 100, "C" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char got[64];
        esa_session *s = open_session(cases[i].mode, cases[i].steps, cases[i].warmup_frac);
        for (int video = 0; video < 2; video++) { /* the second one begins anew */
            ok(ctx, esa_session_begin(s));
            ok(ctx, esa_session_cache_begin(s, cases[i].threshold));
            pattern(got, s, cases[i].steps);
            assert_string_equal(got, cases[i].expected);
        }
        ok(ctx, esa_session_cache_begin(s, cases[i].threshold)); /* also within a video */
        pattern(got, s, cases[i].steps);
        assert_string_equal(got, cases[i].expected);
        esa_session_free(s);
    }
}

/* Steps that are left out do not shift the masks that others keep: "early" goes by the step of the
 * run, "every third" by the steps that ran. */
static void test_masks_kept(void **state)
{
    (void)state;
    static const int32_t every[] = { ESA_REFRESH_EARLY, 3 };
    mini m = mini_make(1, 20, 1, 1);
    const mini_views t = mini_view(&m);
    for (int e = 0; e < 2; e++) {
        esa_session_params p = mini_sparse_params(&m);
        p.refresh_every = every[e];
        esa_session *s;
        ok(ctx, esa_session_create(ctx, &s, &p));
        ok(ctx, esa_session_begin(s));
        ok(ctx, esa_session_cache_begin(s, 0.05));
        int32_t skip = 0, since = 0, made = -1, ran = 0, masks = 0;
        for (int32_t i = 0; i < m.steps; i++) {
            const esa_step_change c = change_of(i, !skip, since);
            since = skip ? since + 1 : 1;
            if (!skip) {
                const int32_t turn = every[e] == 3 ? ran : i;
                const int32_t fresh = esa_schedule_last(every[e], turn, m.steps) > made;
                ok(ctx, esa_session_step(s, i, 0));
                mini_fill(&m, 0, i, 0);
                ok(ctx, esa_session_attention(s, 0, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, NULL));
                assert_int_equal(mini_stats(s, 0, i).masks_made, fresh);
                if (fresh) made = turn;
                masks += fresh;
                ran++;
            } else
                assert_int_equal(mini_stats(s, 0, i).calls, 0);
            ok(ctx, esa_session_cache_next(s, &c, &skip));
        }
        assert_int_equal(mini_stats(s, -1, -1).calls, ran);
        assert_true(masks > 1 && masks < ran && ran < m.steps);
        esa_session_free(s);
    }
    mini_free(&m);
}

static void test_refused(void **state)
{
    (void)state;
    int32_t skip = 7;
    esa_session *s = open_session(ESA_SESSION_ONLINE, 6, 0);
    esa_step_change c = change_of(0, 1, 0);
    assert_int_equal(esa_session_cache_begin(NULL, 0.1), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_session_cache_next(NULL, &c, &skip), ESA_ERR_ARGUMENT);
    assert_refused(ctx, esa_session_cache_begin(s, 0.1), ESA_ERR_STATE, "before esa_session_begin",
                   NULL);
    ok(ctx, esa_session_begin(s));
    assert_refused(ctx, esa_session_cache_next(s, &c, &skip), ESA_ERR_STATE,
                   "before esa_session_cache_begin", NULL);
    static const double bad[] = { 0, -0.1, (double)NAN, (double)INFINITY };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_refused(ctx, esa_session_cache_begin(s, bad[i]), ESA_ERR_ARGUMENT,
                       "expected a finite number above 0", NULL);
    ok(ctx, esa_session_cache_begin(s, 0.1));
    assert_refused(ctx, esa_session_cache_next(s, NULL, &skip), ESA_ERR_ARGUMENT, "change is NULL",
                   NULL);
    assert_refused(ctx, esa_session_cache_next(s, &c, NULL), ESA_ERR_ARGUMENT, "skip is NULL",
                   NULL);
    c.struct_size--;
    assert_refused(ctx, esa_session_cache_next(s, &c, &skip), ESA_ERR_VERSION,
                   "struct_size of change", NULL);
    c = change_of(6, 1, 0);
    assert_refused(ctx, esa_session_cache_next(s, &c, &skip), ESA_ERR_ARGUMENT, "step is 6",
                   "6 steps", NULL);
    c = change_of(-1, 1, 0);
    assert_refused(ctx, esa_session_cache_next(s, &c, &skip), ESA_ERR_ARGUMENT, "step is -1", NULL);
    c = change_of(0, 2, 0);
    assert_refused(ctx, esa_session_cache_next(s, &c, &skip), ESA_ERR_ARGUMENT, "computed is 2",
                   NULL);
    assert_int_equal(skip, 7);     /* untouched by calls that fail */
    ok(ctx, esa_session_begin(s)); /* a new video has no cache until it is begun */
    c = change_of(0, 1, 0);
    assert_refused(ctx, esa_session_cache_next(s, &c, &skip), ESA_ERR_STATE,
                   "before esa_session_cache_begin", NULL);
    esa_session_free(s);

    s = open_session(ESA_SESSION_RECORD, 6, 0);
    ok(ctx, esa_session_begin(s));
    assert_refused(ctx, esa_session_cache_begin(s, 0.1), ESA_ERR_STATE, "needs every step", NULL);
    esa_session_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_pattern),
                                        cmocka_unit_test(test_masks_kept),
                                        cmocka_unit_test(test_refused) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
