/* test_mask_file.c - mask files in use: derived equals prebuilt, a cached run equals the same masks
 * given by hand, other step counts, a file that is cut in use.
 * SPDX-License-Identifier: Apache-2.0 */
#include "maskfile/mask_file_test.h"

static void assert_same_cells(esa_mask_file *a, esa_mask_file *b, double budget)
{
    const esa_mask_file_info i = info_of(a);
    int cells = 0;
    for (int32_t l = 0; l < i.layers; l++)
        for (int32_t t = 0; t < i.steps; t++) {
            assert_int_equal(esa_mask_file_stored(a, l, t), esa_mask_file_stored(b, l, t));
            for (int32_t br = 0; br < i.branches && esa_mask_file_stored(a, l, t); br++, cells++) {
                int64_t n, n2;
                uint8_t *x = bits_of(a, l, t, br, budget, &n),
                        *y = bits_of(b, l, t, br, budget, &n2);
                assert_int_equal(n, n2);
                assert_memory_equal(x, y, n);
                free(x);
                free(y);
                double m1[64], m2[64], d1[64], d2[64];
                ok(ctx, esa_mask_file_heads(a, NULL, m1, d1, l, t, br, budget));
                ok(ctx, esa_mask_file_heads(b, NULL, m2, d2, l, t, br, budget));
                assert_memory_equal(m1, m2, i.H * 8);
                assert_memory_equal(d1, d2, i.H * 8);
            }
        }
    assert_true(cells > 0);
}

typedef struct build_case {
    int32_t per_branch, record_groups, groups, stored_groups;
    int32_t text, order, importance;
} build_case;

/* One recording as three files: budgets and importance, importance alone, budgets alone. */
typedef struct built {
    scratch dir;
    mini m;
    esa_mask_file *all, *bare, *masks;
} built;

static built build_files(const build_case *c)
{
    built f = { .dir = scratch_make(), .m = mini_make(3, 6, 2, 1) };
    f.m.text = c->text;
    /* 3*7*10 + 30 = 240: text fills a block and a part of the next */
    if (f.m.text) f.m.grid[1] = 7;
    esa_session_params p = mini_params(&f.m, ESA_SESSION_RECORD);
    p.record_per_branch = c->per_branch;
    p.record_groups = c->record_groups;
    p.select.layout.order = c->order;
    scratch s = f.dir, t = f.dir;
    const char *rec[] = { scratch_path(&s, "rec") };
    record(&f.m, &p, rec[0]);
    esa_mask_build b = build_of(c->importance, 3);
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "all"), rec, 1, &b));
    f.all = open_file(scratch_path(&t, "all"));
    b = build_of(c->importance, 0);
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "bare"), rec, 1, &b));
    f.bare = open_file(scratch_path(&t, "bare"));
    b = build_of(ESA_IMPORTANCE_NONE, 3);
    if (c->importance == ESA_IMPORTANCE_U8)
        ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "masks"), rec, 1, &b));
    else
        ok(ctx, esa_mask_file_derive(ctx, scratch_path(&t, "masks"), f.all, &b));
    f.masks = open_file(scratch_path(&t, "masks"));
    return f;
}

static void built_free(built *f)
{
    esa_mask_file_free(f->all);
    esa_mask_file_free(f->bare);
    esa_mask_file_free(f->masks);
    mini_free(&f->m);
    scratch_remove(&f->dir);
}

static void check_description(const built *f, const build_case *c)
{
    const esa_mask_file_info i = info_of(f->all);
    assert_int_equal(i.budget_count, 3);
    assert_int_equal(i.budget_permille[0], 250);
    assert_int_equal(i.budget_permille[2], 700);
    assert_int_equal(info_of(f->bare).budget_count, 0);
    assert_int_equal(i.groups, c->groups);
    assert_int_equal(i.branches, c->per_branch ? 2 : 1);
    assert_int_equal(i.stored_layers, 2);
    assert_int_equal(i.stored_groups, c->stored_groups);
    assert_int_equal(i.prompts, 2);
    assert_string_equal(i.model, "mini");
    assert_string_equal(i.config_hash, "00ff");
    assert_int_equal(i.selector, ESA_SELECT_ENTROPY);
    assert_int_equal(i.block_q, 32);
    assert_int_equal(i.Nk, 240);
    assert_int_equal(i.nk, 15);
    assert_int_equal(i.layout.grid_q[1], f->m.grid[1]);
    assert_int_equal(i.layout.text_front_q, f->m.text);
    assert_int_equal(i.layout.order, c->order);
    assert_float_equal(i.warmup_frac, 0.2, 0);
    assert_int_equal(i.samples, 4);
}

static void check_derived(built *f, const build_case *c)
{
    for (int k = 0; k < 3; k++) {
        ok(ctx, esa_mask_file_require(f->bare, budgets[k]));
        assert_same_cells(f->all, f->bare, budgets[k]);
        assert_same_cells(f->all, f->masks, budgets[k]);
    }
    /* A budget that was not prebuilt, and derive into a new file, agree too. */
    ok(ctx, esa_mask_file_require(f->all, 0.333));
    assert_same_cells(f->all, f->bare, 0.333);
    const double third = 0.3334; /* rounded to 0.333 */
    esa_mask_build b = build_of(c->importance, 1);
    b.budgets = &third;
    ok(ctx, esa_mask_file_derive(ctx, scratch_path(&f->dir, "third"), f->bare, &b));
    esa_mask_file *derived = open_file(scratch_path(&f->dir, "third"));
    assert_int_equal(info_of(derived).budget_permille[0], 333);
    assert_same_cells(f->all, derived, 0.333);
    assert_refused(ctx, esa_mask_file_require(f->masks, 0.4), ESA_ERR_MISMATCH,
                   "0.250, 0.500, 0.700", "0.400", NULL);
    assert_refused(ctx, esa_mask_file_require(f->all, 1.5), ESA_ERR_ARGUMENT, "1.5", NULL);
    esa_mask_file_free(derived);
}

/* The mean over heads is the budget; columns and rows with text are whole. */
static void check_budgets(const built *f)
{
    double entropy[3], mass[3], density[3], mean = 0;
    ok(ctx, esa_mask_file_heads(f->all, entropy, mass, density, 2, 5, 0, 0.5));
    for (int h = 0; h < 3; h++) {
        assert_true(entropy[h] > 0 && entropy[h] <= 1 && mass[h] > density[h] * 0.99 &&
                    mass[h] <= 1.000001);
        mean += density[h] / 3;
    }
    assert_float_equal(mean, 0.5, 0.02);
    if (f->m.text) {
        int64_t bytes;
        uint8_t *bits = bits_of(f->all, 2, 5, 0, 0.25, &bytes);
        for (int64_t r = 0; r < 3 * 8; r++) {
            assert_true((bits[r * 2] & 3) == 3);
            if (r % 8 == 0) assert_true(bits[r * 2] == 0xff && bits[r * 2 + 1] == 0x7f);
        }
        free(bits);
    }
}

static void check_case(const build_case *c)
{
    built f = build_files(c);
    check_description(&f, c);
    check_derived(&f, c);
    check_budgets(&f);
    built_free(&f);
}

/* Warm-up is steps 0 and 1: of 6 groups 4 are stored; of 4 groups only the first is all warm-up. */
static void derived_branches_averaged(void **state)
{
    (void)state;
    check_case(&(build_case){ 0, 0, 6, 4, 0, ESA_ORDER_RASTER, ESA_IMPORTANCE_U8 });
}

static void derived_branches_apart(void **state)
{
    (void)state;
    check_case(&(build_case){ 1, 0, 6, 4, 0, ESA_ORDER_RASTER, ESA_IMPORTANCE_U8 });
}

static void derived_step_groups(void **state)
{
    (void)state;
    check_case(&(build_case){ 0, 4, 4, 3, 0, ESA_ORDER_RASTER, ESA_IMPORTANCE_U8 });
}

static void derived_text_and_hilbert(void **state)
{
    (void)state;
    check_case(&(build_case){ 0, 0, 6, 4, 30, ESA_ORDER_HILBERT, ESA_IMPORTANCE_U8 });
}

static void derived_from_f16(void **state)
{
    (void)state;
    check_case(&(build_case){ 0, 0, 6, 4, 0, ESA_ORDER_RASTER, ESA_IMPORTANCE_F16 });
}

/* Decoded importance against the mean of what the calls measured. */
static void test_importance_values(void **state)
{
    (void)state;
    scratch s = scratch_make();
    mini m = mini_make(1, 1, 1, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    esa_session *x;
    ok(ctx, esa_session_create(ctx, &x, &p));
    ok(ctx, mini_run(&m, x, NULL));
    ok(ctx, esa_session_save_recording(x, scratch_path(&s, "rec")));
    esa_session_free(x);
    esa_tensors *raw;
    esa_tensor_info sums = { .struct_size = sizeof sums };
    ok(ctx, esa_tensors_open(ctx, &raw, scratch_path(&s, "rec")));
    ok(ctx, esa_tensors_find(raw, "sums", &sums));
    for (int kind = ESA_IMPORTANCE_U8; kind <= ESA_IMPORTANCE_F16; kind++) {
        char rec[640];
        strcpy(rec, scratch_path(&s, "rec"));
        const char *recs[] = { rec };
        esa_mask_build b = build_of(kind, 0);
        b.store_dense = 1;
        ok(ctx, esa_mask_file_build(ctx, scratch_path(&s, "m"), recs, 1, &b));
        esa_mask_file *f = open_file(scratch_path(&s, "m"));
        float p_out[3 * 8 * 15];
        ok(ctx, esa_mask_file_importance(f, p_out, 0, 0, 0));
        for (int i = 0; i < 3 * 8 * 15; i++) {
            uint32_t v;
            memcpy(&v, (const uint8_t *)sums.data + 4 * i, 4);
            const double expected = v / 16777216.0;
            assert_true(fabs(p_out[i] - expected) <=
                        expected * (kind == ESA_IMPORTANCE_U8 ? 0.0073 : 0.0006) + 1e-7);
        }
        esa_mask_file_free(f);
    }
    esa_tensors_free(raw);
    mini_free(&m);
    scratch_remove(&s);
}

/* A cached run is the same as giving the file's masks to esa_attention. */
static void test_cached_run(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    static const struct {
        int32_t batch, per_branch, order, tail;
        double budget;
    } cases[] = {
        { 1, 0, ESA_ORDER_RASTER, ESA_TAIL_NONE, 0.5 },  /* prebuilt */
        { 1, 1, ESA_ORDER_RASTER, ESA_TAIL_NONE, 0.35 }, /* derived */
        { 2, 0, ESA_ORDER_TILE, ESA_TAIL_POOLED, 0.5 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mini m = mini_make(3, 6, 2, cases[i].batch);
        esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
        p.record_per_branch = cases[i].per_branch;
        p.select.layout.order = cases[i].order;
        record(&m, &p, scratch_path(&s, "rec"));
        const char *rec[] = { scratch_path(&s, "rec") };
        esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 1);
        ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "m"), rec, 1, &b));
        esa_mask_file *f = open_file(scratch_path(&t, "m"));
        p = mini_params(&m, ESA_SESSION_CACHED);
        p.masks = f;
        p.select.budget = cases[i].budget;
        p.attention.tail = cases[i].tail;
        esa_session *x;
        ok(ctx, esa_session_create(ctx, &x, &p));
        const mini_views v = mini_view(&m);
        float *expected = malloc((size_t)mini_size(&m) * 4);
        ok(ctx, esa_session_begin(x));
        for (int32_t step = 0; step < 6; step++)
            for (int32_t branch = 0; branch < 2; branch++) {
                ok(ctx, esa_session_step(x, step, branch));
                for (int32_t layer = 0; layer < 3; layer++) {
                    m.prompt = 99;
                    mini_fill(&m, layer, step, branch);
                    esa_mask *mask = NULL;
                    if (layer > 0 && step >= 2)
                        ok(ctx, esa_mask_file_get(f, &mask, layer, step, branch, p.select.budget));
                    ok(ctx, esa_attention(ctx, &v.q, &v.k, &v.v, &v.o, mask, &p.attention));
                    memcpy(expected, m.o, (size_t)mini_size(&m) * 4);
                    ok(ctx, esa_session_attention(x, layer, 0, &v.q, &v.k, &v.v, &v.o, NULL));
                    assert_memory_equal(expected, m.o, mini_size(&m) * 4);
                    esa_mask_free(mask);
                }
            }
        esa_session_stats st = { .struct_size = sizeof st };
        assert_int_equal(esa_session_get_stats(x, &st, -1, -1), ESA_OK);
        assert_int_equal(st.masks_loaded, 2 * 4 * 2);
        assert_int_equal(st.masks_made, 0);
        assert_float_equal(st.density_asked, p.select.budget, 1e-9);
        assert_float_equal(st.density, p.select.budget, 0.03);
        assert_true(st.mass > st.density);
        esa_session_free(x);
        esa_mask_file_free(f);
        free(expected);
        mini_free(&m);
    }
    scratch_remove(&s);
}

/* One prompt recorded in f32-exact conditions: a cached run with masks of the online selector gives
 * the online run's bits. */
static void test_cached_equals_online(void **state)
{
    (void)state;
    scratch s = scratch_make();
    mini m = mini_make(1, 1, 1, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_ONLINE);
    p.warmup_frac = 0;
    p.dense_first_layer = 0;
    p.select.layout.order = ESA_ORDER_HILBERT;
    uint64_t online, cached;
    esa_session *x;
    ok(ctx, esa_session_create(ctx, &x, &p));
    ok(ctx, mini_run(&m, x, &online));
    esa_session_free(x);
    const mini_views v = mini_view(&m);
    esa_mask *mask;
    ok(ctx, esa_select(ctx, &mask, &v.q, &v.k, &p.select));
    ok(ctx, esa_mask_file_save(ctx, scratch_path(&s, "saved.pt"), mask));
    esa_mask_free(mask);
    esa_mask_file *f = open_file(scratch_path(&s, "saved.pt"));
    assert_int_equal(info_of(f).budget_permille[0], 400);
    p.mode = ESA_SESSION_CACHED;
    p.masks = f;
    ok(ctx, esa_session_create(ctx, &x, &p));
    ok(ctx, mini_run(&m, x, &cached));
    assert_true(online == cached);
    esa_session_stats st = { .struct_size = sizeof st };
    assert_int_equal(esa_session_get_stats(x, &st, 0, 0), ESA_OK);
    assert_true(isnan(st.mass));
    esa_session_free(x);
    esa_mask_file_free(f);
    mini_free(&m);
    scratch_remove(&s);
}

/* Tokens that already stand in the file's order, and tokens the library gathers: the same
 * numbers. */
static void test_order_applied(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(2, 2, 1, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    p.select.layout.order = ESA_ORDER_HILBERT;
    record(&m, &p, scratch_path(&s, "rec"));
    const char *rec[] = { scratch_path(&s, "rec") };
    esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 1);
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "m"), rec, 1, &b));
    esa_mask_file *f = open_file(scratch_path(&t, "m"));
    int32_t perm[240];
    ok(ctx, esa_order(ctx, perm, 240, &p.select.layout, 0, ESA_MODE_FIXED));
    const mini_views v = mini_view(&m);
    const int64_t n = mini_size(&m);
    float *given = malloc((size_t)(3 * n) * 4), *expected = malloc((size_t)n * 4);
    for (int applied = 0; applied < 2; applied++) {
        p = mini_params(&m, ESA_SESSION_CACHED);
        p.masks = f;
        p.select.budget = 0.5;
        p.select.layout.order_applied = applied;
        esa_session *x;
        ok(ctx, esa_session_create(ctx, &x, &p));
        ok(ctx, esa_session_begin(x));
        ok(ctx, esa_session_step(x, 1, 0));
        mini_fill(&m, 1, 1, 0);
        float *part[3] = { m.q, m.k, m.v };
        for (int k = 0; applied && k < 3; k++) {
            memcpy(given, part[k], (size_t)n * 4);
            for (int64_t h = 0; h < m.H; h++)
                for (int64_t i = 0; i < m.N; i++)
                    memcpy(part[k] + (h * m.N + i) * m.D, given + (h * m.N + perm[i]) * m.D,
                           (size_t)m.D * 4);
        }
        ok(ctx, esa_session_attention(x, 1, ESA_CALL_SELF, &v.q, &v.k, &v.v, &v.o, NULL));
        if (!applied) memcpy(expected, m.o, (size_t)n * 4);
        for (int64_t h = 0; applied && h < m.H; h++)
            for (int64_t i = 0; i < m.N; i++)
                assert_memory_equal(expected + (h * m.N + perm[i]) * m.D, m.o + (h * m.N + i) * m.D,
                                    m.D * 4);
        esa_session_free(x);
    }
    free(given);
    free(expected);
    esa_mask_file_free(f);
    mini_free(&m);
    scratch_remove(&s);
}

static void test_step_maps(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(2, 10, 1, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    record(&m, &p, scratch_path(&s, "rec"));
    const char *rec[] = { scratch_path(&s, "rec") };
    esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 1);
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "m"), rec, 1, &b));
    esa_mask_file *f = open_file(scratch_path(&t, "m"));
    esa_session *x;
    const int32_t counts[] = { 1, 2, 3, 4, 5, 7, 9, 11, 13, 20, 50, 101 };
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        mini n = m;
        n.steps = counts[i];
        p = mini_params(&n, ESA_SESSION_CACHED);
        p.masks = f;
        p.select.budget = 0.5;
        assert_refused(ctx, esa_session_create(ctx, &x, &p), ESA_ERR_MISMATCH, "10 steps", NULL);
        p.step_map = ESA_STEP_MAP_NEAREST;
        ok(ctx, esa_session_create(ctx, &x, &p));
        ok(ctx, esa_session_begin(x));
        const mini_views v = mini_view(&n);
        float *expected = malloc((size_t)mini_size(&n) * 4);
        for (int32_t step = 0; step < counts[i]; step += 1 + counts[i] / 12) {
            ok(ctx, esa_session_step(x, step, 0));
            mini_fill(&n, 1, step, 0);
            const int32_t warm = (int32_t)ceil(0.2 * counts[i] - 1e-9);
            int32_t from = (int32_t)((int64_t)step * 10 / counts[i]);
            if (from < 2) from = 2; /* the file's first sparse step */
            esa_mask *mask = NULL;
            if (step >= warm) ok(ctx, esa_mask_file_get(f, &mask, 1, from, 0, 0.5));
            ok(ctx, esa_attention(ctx, &v.q, &v.k, &v.v, &v.o, mask, NULL));
            memcpy(expected, n.o, (size_t)mini_size(&n) * 4);
            ok(ctx, esa_session_attention(x, 1, 0, &v.q, &v.k, &v.v, &v.o, NULL));
            assert_memory_equal(expected, n.o, mini_size(&n) * 4);
            esa_mask_free(mask);
        }
        free(expected);
        esa_session_free(x);
    }
    /* A session without warm-up asks for what is not stored: strict says so, otherwise it is a
     * fallback. */
    for (int strict = 1; strict >= 0; strict--) {
        p = mini_params(&m, ESA_SESSION_CACHED);
        p.masks = f;
        p.warmup_frac = 0;
        p.strict = strict;
        p.select.budget = 0.5;
        ok(ctx, esa_session_create(ctx, &x, &p));
        const esa_status status = mini_run(&m, x, NULL);
        if (strict) {
            assert_refused(ctx, status, ESA_ERR_POLICY, "layer 1, step 0", "not stored",
                           "warm-up 0.2", NULL);
        } else {
            ok(ctx, status);
            esa_session_stats st = { .struct_size = sizeof st };
            assert_int_equal(esa_session_get_stats(x, &st, -1, -1), ESA_OK);
            assert_int_equal(st.fallback_calls, 2);
            assert_int_equal(st.sparse_calls, 8);
        }
        esa_session_free(x);
    }
    esa_mask_file_free(f);
    mini_free(&m);
    scratch_remove(&s);
}

/* A mask file that another process cuts while it is open serves the same masks: it is small, so it
 * was copied. */
static void test_cut_in_use(void **state)
{
    (void)state;
    const build_case c = { .importance = ESA_IMPORTANCE_U8 };
    built f = build_files(&c);
    const int64_t cuts[] = { 600, 0 };
    for (int i = 0; i < 2; i++) {
        size_t n;
        uint8_t *bytes = scratch_read(scratch_path(&f.dir, "all"), &n);
        scratch_write(scratch_path(&f.dir, "used"), bytes, n);
        free(bytes);
        esa_mask_file *used = open_file(scratch_path(&f.dir, "used"));
        assert_int_equal(truncate(scratch_path(&f.dir, "used"), cuts[i]), 0);
        for (int k = 0; k < 3; k++) assert_same_cells(f.all, used, budgets[k]);
        ok(ctx, esa_mask_file_require(f.all, 0.333)); /* read from the importance */
        ok(ctx, esa_mask_file_require(used, 0.333));
        assert_same_cells(f.all, used, 0.333);
        esa_mask_file_free(used);
    }
    built_free(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(derived_branches_averaged),
                                        cmocka_unit_test(derived_branches_apart),
                                        cmocka_unit_test(derived_step_groups),
                                        cmocka_unit_test(derived_text_and_hilbert),
                                        cmocka_unit_test(derived_from_f16),
                                        cmocka_unit_test(test_importance_values),
                                        cmocka_unit_test(test_cached_run),
                                        cmocka_unit_test(test_cached_equals_online),
                                        cmocka_unit_test(test_order_applied),
                                        cmocka_unit_test(test_step_maps),
                                        cmocka_unit_test(test_cut_in_use) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
