/* test_recorded_masks.c - mask files built from recordings of errors for total works, and sessions
 * that use these files.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/recorded_errors.h"
#include <math.h>

/* Masks are whole blocks, so a work of a few small cells is met within this. The largest step of a
 * cell here is one block of 3 x 8 x 15, and cells round both ways. */
static const double near = 0.002;

/* ---------------------------------------------------------------- mask files */

/* The masks of a file cost what was asked for, exact rows included, counted from the masks, and
 * sessions find the same. Awkward shapes: ragged last blocks, text, a protected frame, groups of
 * unequal length, blocks that are shorter than the number of exact rows. */
static void works_are_met(void **state)
{
    (void)state;
    static const struct {
        int32_t tail, groups, text, protect, per_branch, steps, exact_rows;
    } cases[] = {
        { ESA_TAIL_LEVELS, 0, 0, 0, 0, 0, 0 },  { ESA_TAIL_LEVELS, 0, 0, 0, 0, 0, 2 },
        { ESA_TAIL_LEVELS, 2, 0, 0, 1, 0, -1 }, { ESA_TAIL_LEVELS, 0, 10, 0, 0, 7, 5 },
        { ESA_TAIL_LEVELS, 0, 0, 1, 0, 0, 1 },  { ESA_TAIL_POOLED, 0, 10, 0, 0, 0, -1 },
        { ESA_TAIL_NONE, 3, 0, 0, 0, 0, 2 },    { ESA_TAIL_POOLED, 0, 0, 0, 0, 0, 9 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        /* A protected frame is a third of the tokens, which alone takes 0.65. */
        const int32_t rows = cases[i].exact_rows < 0 ? 2 : cases[i].exact_rows;
        const double more = cases[i].protect ? 0.22 : 0,
                     works[] = { 0.47 + more, 0.57 + more, 0.75 + more, 1 };
        scratch s = scratch_make(), t = s;
        mini m = mini_make(4, 5, 2, 2);
        m.B = 1;
        m.text = cases[i].text;
        m.N += m.text;
        esa_session_params p = error_params(&m, cases[i].tail);
        p.record_groups = cases[i].groups;
        p.record_per_branch = cases[i].per_branch;
        p.select.layout.protect_first_frame = cases[i].protect;
        mini_record(ctx, &m, &p, 1, 2, scratch_path(&s, "rec"));
        const char *rec = scratch_path(&s, "rec");
        esa_mask_build b = esa_mask_build_default();
        b.budgets = works;
        b.budget_count = 4;
        b.steps = cases[i].steps;
        if (cases[i].exact_rows >= 0) b.exact_rows = cases[i].exact_rows;
        ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "masks"), &rec, 1, &b));
        esa_mask_file *f = open_file(scratch_path(&t, "masks"));
        const esa_mask_file_info info = info_of(f);
        assert_int_equal(info.format_version, 2);
        assert_int_equal(info.selector, ESA_SELECT_ERROR);
        assert_int_equal(info.tail, cases[i].tail);
        assert_int_equal(info.fine, cases[i].tail == ESA_TAIL_LEVELS ? 4 : 0);
        assert_int_equal(info.importance, ESA_IMPORTANCE_NONE);
        assert_int_equal(info.exact_rows, rows);
        assert_int_equal(info.stored_layers, 4); /* no dense layer by rule */
        assert_float_equal(info.warmup_frac, 0, 0);
        if (cases[i].steps) m.steps = cases[i].steps;
        double last = 0;
        for (int w = 0; w < 4; w++) {
            double counted, lowest = 1, highest = 0;
            ok(ctx, esa_mask_file_work(f, &counted, works[w]));
            assert_float_equal(counted, works[w], near);
            for (int32_t l = 0; l < 4; l++)
                for (int32_t step = 0; step < m.steps; step++) {
                    const double d = density_of(f, l, step, works[w]);
                    lowest = d < lowest ? d : lowest;
                    highest = d > highest ? d : highest;
                }
            if (w == 0) assert_true(lowest < highest); /* the cells differ */
            for (int named = 0; named < 2; named++) {
                esa_session_params c = cached_params(&m, f, named ? 0.5 : works[w]);
                c.select.layout.protect_first_frame = cases[i].protect;
                c.attention.tail = cases[i].tail;
                if (named) c.work = works[w]; /* as a work and as a budget */
                if (named) c.attention.exact_rows = rows;
                const esa_session_stats stats = run_cached(&m, &c, NULL);
                /* A GPU counts every block as one of average size. */
                assert_float_equal(stats.work, counted, on_gpu() ? 0.02 : 1e-9);
                assert_float_equal(stats.work_asked, works[w], 1e-9);
                assert_int_equal(stats.fallback_calls, 0);
                assert_int_equal(stats.masks_made, 0);
                if (works[w] == 1) assert_int_equal(stats.sparse_calls, 0);
                assert_true(isnan(stats.mass));
            }
            assert_true(counted > last);
            last = counted;
        }
        esa_mask_file_free(f);
        mini_free(&m);
        scratch_remove(&s);
    }
}

/* A session computes what attention with the masks of the file computes: both levels are used, on
 * every device, and with a part of the heads. */
static void sessions_use_both_levels(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(3, 3, 1, 1);
    const esa_session_params p = error_params(&m, ESA_TAIL_LEVELS);
    const double works[] = { 0.4 };
    mini_record(ctx, &m, &p, 1, 1, scratch_path(&s, "rec"));
    build(scratch_path(&t, "masks"), scratch_path(&s, "rec"), works, 1);
    esa_mask_file *f = open_file(scratch_path(&t, "masks"));
    const esa_session_params c = cached_params(&m, f, 0.4);
    esa_session *x;
    ok(ctx, esa_session_create(ctx, &x, &c));
    ok(ctx, esa_session_begin(x));
    const mini_views v = mini_view(&m);
    const int64_t n = mini_size(&m);
    float *o = malloc((size_t)n * sizeof *o);
    int64_t fine = 0;
    for (int32_t step = 0; step < 3; step++) {
        ok(ctx, esa_session_step(x, step, 0));
        for (int32_t layer = 0; layer < 3; layer++) {
            esa_mask *mask;
            esa_mask_info mi = { .struct_size = sizeof mi };
            mini_fill(&m, layer, step, 0);
            ok(ctx, esa_session_attention(x, layer, 0, &v.q, &v.k, &v.v, &v.o, NULL));
            memcpy(o, m.o, (size_t)n * sizeof *o);
            ok(ctx, esa_mask_file_get(f, &mask, layer, step, 0, 0.4));
            ok(ctx, esa_mask_get_info(mask, &mi));
            assert_int_equal(mi.fine, 4);
            assert_int_equal(mi.selector, ESA_SELECT_ERROR);
            assert_float_equal(mi.density_asked, density_of(f, layer, step, 0.4), 1e-6);
            fine += mi.fine_blocks;
            esa_attention_params a = esa_attention_params_default();
            a.tail = ESA_TAIL_LEVELS;
            a.exact_rows = info_of(f).exact_rows;
            assert_int_equal(a.exact_rows, 2);
            ok(ctx, esa_attention(ctx, &v.q, &v.k, &v.v, &v.o, mask, &a));
            if (mi.density < 1) assert_memory_equal(o, m.o, (size_t)n * sizeof *o);
            esa_mask_free(mask);
        }
    }
    assert_true(fine > 0);
    esa_session_free(x);

    /* Two of the three heads: the bits of both levels start at head 1. */
    uint64_t hash;
    esa_session_params part = c;
    part.first_head = 1;
    part.total_heads = 3;
    mini two = m;
    two.H = 2;
    const esa_session_stats stats = run_cached(&two, &part, &hash);
    assert_int_equal(stats.fallback_calls, 0);
    free(o);
    esa_mask_file_free(f);
    mini_free(&m);
    scratch_remove(&s);
}

/* work picks the largest stored work that is not above it. */
static void a_work_picks_masks(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(3, 3, 1, 1);
    const esa_session_params p = error_params(&m, ESA_TAIL_LEVELS);
    const double works[] = { 0.4, 0.5, 0.6 };
    mini_record(ctx, &m, &p, 1, 1, scratch_path(&s, "rec"));
    build(scratch_path(&t, "masks"), scratch_path(&s, "rec"), works, 3);
    esa_mask_file *f = open_file(scratch_path(&t, "masks"));
    static const struct {
        double work, picked; /* 0: refused */
    } cases[] = {
        { 0.6, 0.6 }, { 0.599, 0.5 }, { 1, 0.6 }, { 0.5, 0.5 }, { 0.4, 0.4 }, { 0.39, 0 }
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        esa_session_params c = cached_params(&m, f, 0.1);
        c.work = cases[i].work;
        esa_session *x;
        if (cases[i].picked == 0) {
            assert_refused(ctx, esa_session_create(ctx, &x, &c), ESA_ERR_MISMATCH, "work is 0.390",
                           "masks", "0.400, 0.500, 0.600", NULL);
            continue;
        }
        double counted;
        ok(ctx, esa_mask_file_work(f, &counted, cases[i].picked));
        const esa_session_stats stats = run_cached(&m, &c, NULL);
        assert_float_equal(stats.work, counted, on_gpu() ? 0.02 : 1e-9);
        assert_float_equal(stats.work_asked, cases[i].work, 1e-9);
        assert_true(counted <= cases[i].work + near);
    }
    esa_session *x;
    esa_session_params c = cached_params(&m, f, 0.45);
    assert_refused(ctx, esa_session_create(ctx, &x, &c), ESA_ERR_MISMATCH, "total works",
                   "0.400, 0.500, 0.600", "0.450", NULL);
    esa_mask_file_free(f);

    /* Masks for budgets know no total work. */
    const esa_session_params q = mini_params(&m, ESA_SESSION_RECORD);
    mini_record(ctx, &m, &q, 1, 1, scratch_path(&s, "rec"));
    build(scratch_path(&t, "masks"), scratch_path(&s, "rec"), works, 3);
    f = open_file(scratch_path(&t, "masks"));
    c = cached_params(&m, f, 0.5);
    c.work = 0.5;
    assert_refused(ctx, esa_session_create(ctx, &x, &c), ESA_ERR_ARGUMENT, "total works", NULL);
    esa_mask_file_free(f);
    mini_free(&m);
    scratch_remove(&s);
}

/* Exact rows come from a file with works. A session may name the same number, but no other. */
static void the_file_brings_exact_rows(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(2, 3, 1, 1);
    const esa_session_params p = error_params(&m, ESA_TAIL_LEVELS);
    const double works[] = { 0.5 };
    mini_record(ctx, &m, &p, 1, 1, scratch_path(&s, "rec"));
    const char *rec = scratch_path(&s, "rec");
    esa_mask_build b = esa_mask_build_default();
    b.budgets = works;
    b.budget_count = 1;
    double kept[3];
    for (int i = 0; i < 3; i++) {
        const int32_t rows = i == 0 ? 0 : i == 1 ? 2 : 4;
        b.exact_rows = rows;
        ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "masks"), &rec, 1, &b));
        esa_mask_file *f = open_file(scratch_path(&t, "masks"));
        esa_session_params c = cached_params(&m, f, 0.5);
        uint64_t hash, same;
        kept[i] = run_cached(&m, &c, &hash).density;
        c.attention.exact_rows = rows;
        run_cached(&m, &c, &same);
        assert_true(hash == same);
        esa_session *x;
        c.attention.exact_rows = 3;
        char text[64];
        snprintf(text, sizeof text, "include %d exact rows", rows);
        assert_refused(ctx, esa_session_create(ctx, &x, &c), ESA_ERR_MISMATCH, "exact_rows is 3",
                       text, NULL);
        /* A rewritten file keeps them, whatever build says. */
        esa_mask_build one = b;
        one.importance = ESA_IMPORTANCE_NONE;
        one.exact_rows = 7;
        ok(ctx, esa_mask_file_derive(ctx, scratch_path(&s, "copy"), f, &one));
        esa_mask_file_free(f);
        f = open_file(scratch_path(&s, "copy"));
        assert_int_equal(info_of(f).exact_rows, rows);
        esa_mask_file_free(f);
        rec = scratch_path(&s, "rec");
    }
    /* The same work buys fewer blocks. */
    assert_true(kept[0] > kept[1] && kept[1] > kept[2]);

    /* Masks for budgets leave the number to the session. */
    const esa_session_params q = mini_params(&m, ESA_SESSION_RECORD);
    mini_record(ctx, &m, &q, 1, 1, scratch_path(&s, "rec"));
    build(scratch_path(&t, "masks"), scratch_path(&s, "rec"), works, 1);
    esa_mask_file *f = open_file(scratch_path(&t, "masks"));
    assert_int_equal(info_of(f).exact_rows, 0);
    assert_int_equal(info_of(f).format_version, 1);
    esa_session_params c = cached_params(&m, f, 0.5);
    c.attention.tail = ESA_TAIL_POOLED;
    const double without = run_cached(&m, &c, NULL).work;
    c.attention.exact_rows = 4;
    assert_true(run_cached(&m, &c, NULL).work > without + 0.02);
    esa_mask_file_free(f);
    b.exact_rows = 2;
    assert_refused(ctx, esa_mask_file_build(ctx, scratch_path(&t, "masks"), &rec, 1, &b),
                   ESA_ERR_ARGUMENT, "exact_rows is 2", "importance", NULL);
    mini_free(&m);
    scratch_remove(&s);
}

/* The rules of the file hold, not those of the session; and a file may have rules. */
static void the_file_says_what_is_dense(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(3, 5, 1, 1);
    const esa_session_params p = error_params(&m, ESA_TAIL_LEVELS);
    const double works[] = { 0.7 };
    mini_record(ctx, &m, &p, 1, 1, scratch_path(&s, "rec"));
    const char *rec = scratch_path(&s, "rec");
    esa_mask_build b = esa_mask_build_default();
    b.budgets = works;
    b.budget_count = 1;
    b.dense_first_layer = 1;
    b.warmup_frac = 0.2;
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "masks"), &rec, 1, &b));
    esa_mask_file *f = open_file(scratch_path(&t, "masks"));
    double counted;
    ok(ctx, esa_mask_file_work(f, &counted, 0.7));
    assert_float_equal(counted, 0.7, near);
    esa_session_params c = cached_params(&m, f, 0.7);
    c.warmup_frac = 0.9;
    c.dense_first_layer = 0;
    const esa_session_stats stats = run_cached(&m, &c, NULL);
    assert_float_equal(stats.work, counted, on_gpu() ? 0.02 : 1e-9);
    assert_int_equal(stats.calls, 15);
    assert_true(stats.dense_calls >= 7); /* layer 0 and step 0 */
    assert_int_equal(stats.fallback_calls, 0);
    esa_mask_file_free(f);
    mini_free(&m);
    scratch_remove(&s);
}

/* Weights of a plan move the work to where it matters. */
static void plans_weigh(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s, u = s;
    mini m = mini_make(3, 4, 1, 1);
    const esa_session_params p = error_params(&m, ESA_TAIL_LEVELS);
    const double works[] = { 0.4 }, sigma[] = { 1, 0.75, 0.5, 0.25 }, density[] = { 0.5 };
    double error[12], weight[12];
    for (int i = 0; i < 12; i++) {
        error[i] = 1;
        weight[i] = i / 4 == 1 ? 100 : 1; /* layer 1 */
    }
    esa_work_plan_info info = { .struct_size = sizeof info, .layers = 3, .steps = 4, .points = 1 };
    esa_work_plan *plan;
    ok(ctx, esa_work_plan_create(ctx, &plan, &info, sigma, density, error, weight));
    mini_record(ctx, &m, &p, 1, 1, scratch_path(&s, "rec"));
    const char *rec = scratch_path(&s, "rec");
    esa_mask_build b = esa_mask_build_default();
    b.budgets = works;
    b.budget_count = 1;
    build(scratch_path(&t, "plain"), rec, works, 1);
    b.plan = plan;
    rec = scratch_path(&s, "rec");
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&u, "weighed"), &rec, 1, &b));
    esa_mask_file *plain = open_file(scratch_path(&t, "plain")),
                  *weighed = open_file(scratch_path(&u, "weighed"));
    double counted;
    ok(ctx, esa_mask_file_work(weighed, &counted, 0.4));
    assert_float_equal(counted, 0.4, near);
    for (int32_t step = 0; step < 4; step++) {
        assert_true(density_of(weighed, 1, step, 0.4) > density_of(plain, 1, step, 0.4));
        assert_true(density_of(weighed, 0, step, 0.4) < density_of(plain, 0, step, 0.4));
    }
    esa_mask_file_free(plain);
    esa_mask_file_free(weighed);
    esa_work_plan_free(plan);
    info.layers = 2;
    ok(ctx, esa_work_plan_create(ctx, &plan, &info, sigma, density, error, weight));
    b.plan = plan;
    assert_refused(ctx, esa_mask_file_build(ctx, scratch_path(&u, "x"), &rec, 1, &b),
                   ESA_ERR_ARGUMENT, "2 layers", "3", NULL);
    esa_work_plan_free(plan);
    mini_free(&m);
    scratch_remove(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(works_are_met),
                                        cmocka_unit_test(sessions_use_both_levels),
                                        cmocka_unit_test(a_work_picks_masks),
                                        cmocka_unit_test(the_file_brings_exact_rows),
                                        cmocka_unit_test(the_file_says_what_is_dense),
                                        cmocka_unit_test(plans_weigh) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
