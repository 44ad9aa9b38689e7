/* test_session_reuse.c - masks that are kept for several steps or shared by branches, densities per
 * layer and step, and the work of a video.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/mini_model.h"
#include "common/tests.h"

#include <math.h>
#include "common/on_gpu.h"
#include "common/one_ctx.h"

static void attend(const mini *m, esa_session *s, int32_t layer, int32_t step, int32_t branch)
{
    const mini_views t = mini_view(m);
    ok(ctx, esa_session_step(s, step, branch));
    ok(ctx, esa_session_attention(s, layer, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, NULL));
}

/* The error selector with adaptive orders and two levels of tail. */
static void use_error(esa_session_params *p)
{
    const esa_select_params old = p->select;
    p->select = esa_select_params_default(ESA_SELECT_ERROR);
    p->select.block_q = old.block_q;
    p->select.block_k = old.block_k;
    p->select.budget = old.budget;
    p->select.layout = old.layout;
    p->select.layout.order = ESA_ORDER_ADAPTIVE;
    p->select.tail = p->attention.tail = ESA_TAIL_LEVELS;
}

/* The same inputs at every call: however rarely masks are made, the results have the same bits. */
static void test_nothing_changed(void **state)
{
    (void)state;
    mini m = mini_make(2, 4, 2, 2);
    const int32_t early = ESA_REFRESH_EARLY; /* of four steps: 0, 1 and 2 */
    const int32_t every[][3] = { { 1, 1, 0 }, { 1, 1, 1 }, { 2, 1, 0 },     { 3, 2, 1 },
                                 { 0, 0, 0 }, { 0, 0, 1 }, { early, 0, 0 }, { early, early, 1 } };
    float *expected = malloc((size_t)mini_size(&m) * 4);
    mini_fill(&m, 0, 0, 0);
    const size_t count = sizeof every / sizeof every[0];
    for (size_t n = 0; n < 2 * count; n++) {
        const size_t i = n % count;
        esa_session_params p = mini_sparse_params(&m);
        if (n >= count) use_error(&p);
        p.refresh_every = every[i][0];
        p.order_every = every[i][1];
        p.share_branches = every[i][2];
        esa_session *s;
        ok(ctx, esa_session_create(ctx, &s, &p));
        ok(ctx, esa_session_begin(s));
        for (int32_t step = 0; step < 4; step++)
            for (int32_t branch = 0; branch < 2; branch++) {
                attend(&m, s, 1, step, branch);
                if (i == 0 && step == 0 && branch == 0)
                    memcpy(expected, m.o, (size_t)mini_size(&m) * 4);
                assert_memory_equal(expected, m.o, mini_size(&m) * 4);
            }
        int32_t steps = 0; /* with masks; a new order needs a new mask */
        for (int32_t t = 0; t < 4; t++) {
            int32_t makes = 0; /* orders are made with the error selector only */
            for (int k = 0; k < (n >= count ? 2 : 1); k++)
                makes |= every[i][k] == early ? t < 3 : every[i][k] ? t % every[i][k] == 0 : t == 0;
            steps += makes;
        }
        assert_int_equal(mini_stats(s, -1, -1).masks_made, steps * (every[i][2] ? 1 : 2));
        esa_session_free(s);
    }
    free(expected);
    mini_free(&m);
}

/* Branch 1 computes with the mask of branch 0, and with its own where branch 0 did not run. */
static void test_shared_branches(void **state)
{
    (void)state;
    mini m = mini_make(1, 6, 2, 1);
    const mini_views t = mini_view(&m);
    esa_session_params p = mini_sparse_params(&m);
    p.share_branches = 1;
    p.refresh_every = 2;
    esa_session *s;
    ok(ctx, esa_session_create(ctx, &s, &p));
    /* which branches run; the step whose inputs, and the branch, make the mask that branch 1 uses
     */
    const struct {
        int32_t first, step, branch;
    } plan[6] = { { 1, 0, 0 }, { 1, 0, 0 }, { 0, 2, 1 }, { 1, 3, 0 }, { 0, 4, 1 }, { 1, 3, 0 } };
    float *expected = malloc((size_t)mini_size(&m) * 4);
    for (int video = 0; video < 2; video++) {
        ok(ctx, esa_session_begin(s));
        for (int32_t step = 0; step < 6; step++) {
            esa_mask *mask;
            mini_fill(&m, 0, step, 0);
            if (plan[step].first) attend(&m, s, 0, step, 0);
            mini_fill(&m, 0, plan[step].step, plan[step].branch);
            ok(ctx, esa_select(ctx, &mask, &t.q, &t.k, &p.select));
            mini_fill(&m, 0, step, 1);
            ok(ctx, esa_attention(ctx, &t.q, &t.k, &t.v, &t.o, mask, &p.attention));
            memcpy(expected, m.o, (size_t)mini_size(&m) * 4);
            attend(&m, s, 0, step, 1);
            if (memcmp(expected, m.o, (size_t)mini_size(&m) * 4))
                fail_msg("step %d: branch 1 used another mask", step);
            esa_mask_free(mask);
        }
        /* branch 0 at its sparse steps 0 and 2, branch 1 at steps 2 and 4 */
        assert_int_equal(mini_stats(s, -1, -1).masks_made, 4);
    }
    free(expected);
    esa_session_free(s);
    mini_free(&m);
}

/* Orders every second step, masks at every step: as with a plan and a mask of one's own. */
static void test_orders_between_masks(void **state)
{
    (void)state;
    if (on_gpu()) skip(); /* plans there take views of the GPU; tests/cuda has its own */
    mini m = mini_make(1, 5, 1, 2);
    const mini_views t = mini_view(&m);
    esa_session_params p = mini_sparse_params(&m);
    use_error(&p);
    p.order_every = 2;
    esa_session *s;
    esa_plan *plan;
    esa_mask *mask;
    esa_shapes shapes = shapes_of(ESA_DTYPE_F32, m.B, m.H, m.N, m.D);
    ok(ctx, esa_session_create(ctx, &s, &p));
    ok(ctx, esa_plan_create(ctx, &plan, &shapes, &p.select, &p.attention));
    ok(ctx, esa_mask_create(plan, &mask));
    ok(ctx, esa_session_begin(s));
    float *expected = malloc((size_t)mini_size(&m) * 4);
    for (int32_t step = 0; step < 5; step++) {
        mini_fill(&m, 0, step, 0);
        if (step % 2 == 0) ok(ctx, esa_plan_order(plan, mask, &t.q, &t.k, NULL));
        ok(ctx, esa_plan_select_qkv(plan, mask, &t.q, &t.k, &t.v, NULL));
        ok(ctx, esa_plan_attention(plan, mask, &t.q, &t.k, &t.v, &t.o, NULL, NULL));
        memcpy(expected, m.o, (size_t)mini_size(&m) * 4);
        attend(&m, s, 0, step, 0);
        assert_memory_equal(expected, m.o, mini_size(&m) * 4);
    }
    /* three orders for five selections */
    const double with = mini_stats(s, 0, 0).work, without = mini_stats(s, 0, 1).work;
    assert_true(with > without + 0.001);
    assert_int_equal(mini_stats(s, -1, -1).masks_made, 5);
    free(expected);
    esa_mask_free(mask);
    esa_plan_free(plan);
    esa_session_free(s);
    mini_free(&m);
}

/* Steps that are left out do not count. */
static void test_skipped_steps(void **state)
{
    (void)state;
    mini m = mini_make(1, 12, 1, 1);
    esa_session_params p = mini_sparse_params(&m);
    p.refresh_every = 2;
    esa_session *s;
    ok(ctx, esa_session_create(ctx, &s, &p));
    ok(ctx, esa_session_begin(s));
    const int32_t runs[] = { 0, 3, 4, 7, 11 };
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        mini_fill(&m, 0, runs[i], 0);
        attend(&m, s, 0, runs[i], 0);
        assert_int_equal(mini_stats(s, 0, runs[i]).masks_made, i % 2 == 0);
    }
    esa_session_free(s);
    mini_free(&m);
}

/* ---------------------------------------------------------------- densities and work */

static void test_density_table(void **state)
{
    (void)state;
    mini m = mini_make(3, 4, 1, 1);
    double density[12];
    for (int i = 0; i < 12; i++) density[i] = i % 4 == 3 ? 1 : 0.2 + 0.05 * i;
    esa_session_params p = mini_sparse_params(&m);
    p.density = density;
    for (int32_t refresh = 1; refresh <= 2; refresh++) {
        p.refresh_every = refresh;
        esa_session *s;
        ok(ctx, esa_session_create(ctx, &s, &p));
        ok(ctx, mini_run(&m, s, NULL));
        for (int32_t l = 0; l < 3; l++)
            for (int32_t t = 0; t < 4; t++) {
                const esa_session_stats c = mini_stats(s, l, t);
                assert_int_equal(c.dense_calls, t == 3);
                if (t == 3) continue;
                /* a mask for two steps has their mean density; step 2 is followed by a dense one */
                const double d = density[4 * l + t],
                             mean = refresh == 1 || t == 2
                                        ? d
                                        : (density[4 * l] + density[4 * l + 1]) / 2;
                assert_true(fabs(c.density_asked - mean) < 1e-12);
                /* the entropy selector rounds to whole blocks: 3 heads of 15 blocks a row */
                assert_true(fabs(c.density - mean) < 1.0 / 45 + 1e-9);
            }
        esa_session_free(s);
    }
    mini_free(&m);
}

/* The work that was asked for is spent, with and without dense layers, shared and kept masks. */
static void test_work(void **state)
{
    (void)state;
    mini m = mini_make(4, 6, 2, 1);
    const struct {
        double work, warmup;
        int32_t refresh, share, first, tail, exact;
    } cases[] = {
        { 0.5, 0, 1, 0, 0, ESA_TAIL_NONE, 0 },   { 0.5, 0, 1, 0, 0, ESA_TAIL_POOLED, 0 },
        { 0.7, 0.2, 1, 0, 1, ESA_TAIL_NONE, 0 }, { 0.35, 0, 2, 1, 0, ESA_TAIL_NONE, 0 },
        { 0.8, 0, 0, 1, 0, ESA_TAIL_NONE, 0 },   { 1, 0, 1, 0, 0, ESA_TAIL_NONE, 0 },
        { 0.5, 0, 2, 1, 0, ESA_TAIL_POOLED, 4 }, { 0.7, 0.2, 1, 0, 1, ESA_TAIL_NONE, 2 }
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        esa_session_params p = mini_sparse_params(&m);
        p.work = cases[i].work;
        p.warmup_frac = cases[i].warmup;
        p.refresh_every = cases[i].refresh;
        p.share_branches = cases[i].share;
        p.dense_first_layer = cases[i].first;
        p.attention.tail = cases[i].tail;
        p.attention.exact_rows = cases[i].exact;
        esa_session *s;
        ok(ctx, esa_session_create(ctx, &s, &p));
        ok(ctx, mini_run(&m, s, NULL));
        const esa_session_stats c = mini_stats(s, -1, -1);
        assert_true(c.work_asked == cases[i].work);
        /* the entropy selector rounds to whole blocks: 3 heads of 15 blocks a row */
        if (fabs(c.work - cases[i].work) > 1.0 / 45)
            fail_msg("case %d: work %g, asked %g", (int)i, c.work, cases[i].work);
        assert_int_equal(c.calls, 4 * 6 * 2);
        esa_session_free(s);
    }
    mini_free(&m);
}

/* Without a work the session counts it all the same: recomputed here from the settings. */
static void test_work_is_counted(void **state)
{
    (void)state;
    mini m = mini_make(2, 4, 2, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_ONLINE);
    p.warmup_frac = 0.25;
    p.dense_first_layer = 1;
    p.refresh_every = 2;
    esa_session *s;
    ok(ctx, esa_session_create(ctx, &s, &p));
    ok(ctx, mini_run(&m, s, NULL));
    const esa_session_stats c = mini_stats(s, -1, -1);
    /* layer 0 and step 0 dense; layer 1 sparse at 3 steps, masks at two of them; both branches */
    const double nq = (double)((m.N + 31) / 32),
                 select = p.select.samples * nq / (2.0 * (double)m.N);
    const double expected = (5 * 2 + 3 * 2 * c.density + 2 * 2 * select) / 16;
    assert_true(isnan(c.work_asked));
    assert_true(fabs(c.work - expected) < 1e-9);
    assert_true(mini_stats(s, 0, -1).work == 1);
    esa_session_free(s);

    /* four exact rows in each of the nq blocks (none has fewer), at every sparse call */
    p.attention.exact_rows = 4;
    ok(ctx, esa_session_create(ctx, &s, &p));
    ok(ctx, mini_run(&m, s, NULL));
    assert_true(m.N % 32 == 0 || m.N % 32 >= 4);
    assert_true(fabs(mini_stats(s, -1, -1).work - expected - 6 * 4 * nq / (double)m.N / 16) < 1e-9);
    esa_session_free(s);
    mini_free(&m);
}

/* Errors fall with the density, and the output is the dense one. */
static void test_probe(void **state)
{
    (void)state;
    mini m = mini_make(2, 2, 2, 1);
    const double probe[] = { 0.1, 0.3, 0.6, 1 };
    uint64_t dense, probed;
    esa_session *s;
    esa_session_params p = mini_params(&m, ESA_SESSION_DENSE);
    ok(ctx, esa_session_create(ctx, &s, &p));
    ok(ctx, mini_run(&m, s, &dense));
    esa_session_free(s);
    p = mini_sparse_params(&m);
    p.mode = ESA_SESSION_PROBE;
    assert_refused(ctx, esa_session_create(ctx, &s, &p), ESA_ERR_ARGUMENT, "probe is NULL", NULL);
    p.probe = probe;
    p.probe_count = 4;
    ok(ctx, esa_session_create(ctx, &s, &p));
    ok(ctx, mini_run(&m, s, &probed));
    assert_true(dense == probed);
    for (int32_t l = 0; l < 2; l++)
        for (int32_t t = 0; t < 2; t++) {
            double e[4];
            ok(ctx, esa_session_get_probe(s, e, 4, l, t));
            assert_true(e[0] > e[1] && e[1] > e[2] && e[2] > e[3]);
            assert_true(e[3] < 1e-12); /* the order of sums differs: f32 rounding, squared */
        }
    double e[4];
    assert_refused(ctx, esa_session_get_probe(s, e, 3, 0, 0), ESA_ERR_ARGUMENT, "count is 3", NULL);
    esa_session_free(s);
    mini_free(&m);
}

static void test_refusals(void **state)
{
    (void)state;
    mini m = mini_make(2, 4, 2, 1);
    esa_session *s;
    double density[8] = { 0.5, 0.5, 0.5, 0.5, 0.5, 1.5, 0.5, 0.5 };
    esa_session_params p = mini_sparse_params(&m);
    p.work = 1.5;
    assert_refused(ctx, esa_session_create(ctx, &s, &p), ESA_ERR_ARGUMENT, "work is 1.5", NULL);
    p = mini_sparse_params(&m);
    p.density = density;
    assert_refused(ctx, esa_session_create(ctx, &s, &p), ESA_ERR_ARGUMENT, "layer 1, step 1 is 1.5",
                   NULL);
    p = mini_params(&m, ESA_SESSION_RECORD);
    p.work = 0.5;
    assert_refused(ctx, esa_session_create(ctx, &s, &p), ESA_ERR_ARGUMENT, "mode ONLINE", NULL);
    p = mini_sparse_params(&m);
    p.order_every = -2;
    assert_refused(ctx, esa_session_create(ctx, &s, &p), ESA_ERR_ARGUMENT, "order_every is -2",
                   NULL);
    p = mini_sparse_params(&m);
    p.share_branches = 2;
    assert_refused(ctx, esa_session_create(ctx, &s, &p), ESA_ERR_ARGUMENT, "share_branches is 2",
                   NULL);
    /* a plan of another model */
    esa_work_plan_info info = {
        .struct_size = sizeof info, .layers = 2, .steps = 1, .points = 1, .model = "other"
    };
    const double one[] = { 1 }, point[] = { 0.5 }, two[] = { 1, 1 };
    esa_work_plan *plan;
    ok(ctx, esa_work_plan_create(ctx, &plan, &info, one, point, two, two));
    p = mini_sparse_params(&m);
    p.work = 0.5;
    p.plan = plan;
    assert_refused(ctx, esa_session_create(ctx, &s, &p), ESA_ERR_MISMATCH, "model 'other'", NULL);
    p.model = NULL;
    p.layers = 3;
    assert_refused(ctx, esa_session_create(ctx, &s, &p), ESA_ERR_MISMATCH, "2 layers", NULL);
    /* a work that cannot be had is refused by the first call that would need it */
    p.layers = 2;
    p.work = 0.1;
    ok(ctx, esa_session_create(ctx, &s, &p));
    assert_refused(ctx, mini_run(&m, s, NULL), ESA_ERR_ARGUMENT, "work is 0.1", NULL);
    esa_session_free(s);
    esa_work_plan_free(plan);
    mini_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nothing_changed), cmocka_unit_test(test_shared_branches),
        cmocka_unit_test(test_skipped_steps),   cmocka_unit_test(test_orders_between_masks),
        cmocka_unit_test(test_density_table),   cmocka_unit_test(test_work),
        cmocka_unit_test(test_work_is_counted), cmocka_unit_test(test_probe),
        cmocka_unit_test(test_refusals)
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
