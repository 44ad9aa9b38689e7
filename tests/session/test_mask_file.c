/* test_mask_file.c - mask files: derived equals prebuilt, a cached run equals the same masks given by hand, conversions, refusals.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/mini_model.h"
#include <math.h>
#include <signal.h>
#include <sys/resource.h>
#include "esa/esa_media.h"

static esa_ctx *ctx;
static const double budgets[] = {0.5, 0.25, 0.7};

static esa_mask_build build_of(int32_t importance, int32_t count)
{
    esa_mask_build b = esa_mask_build_default();
    b.importance = importance;
    b.budgets = budgets;
    b.budget_count = count;
    return b;
}

static esa_mask_file *open_file(const char *path)
{
    esa_mask_file *f;
    ok(ctx, esa_mask_file_open(ctx, &f, path));
    return f;
}

static esa_mask_file_info info_of(const esa_mask_file *f)
{
    esa_mask_file_info i = {.struct_size = sizeof i};
    assert_int_equal(esa_mask_file_get_info(f, &i), ESA_OK);
    return i;
}

/* Bits of one cell; the caller frees. */
static uint8_t *bits_of(esa_mask_file *f, int32_t layer, int32_t step, int32_t branch, double budget, int64_t *bytes)
{
    esa_mask *m;
    ok(ctx, esa_mask_file_get(f, &m, layer, step, branch, budget));
    const esa_mask_file_info i = info_of(f);
    *bytes = i.H * i.nq * ((i.nk + 7) / 8);
    uint8_t *bits = malloc((size_t)*bytes);
    assert_int_equal(esa_mask_to_bits(m, bits), ESA_OK);
    esa_mask_free(m);
    return bits;
}

static void assert_same_cells(esa_mask_file *a, esa_mask_file *b, double budget)
{
    const esa_mask_file_info i = info_of(a);
    int cells = 0;
    for (int32_t l = 0; l < i.layers; l++)
        for (int32_t t = 0; t < i.steps; t++) {
            assert_int_equal(esa_mask_file_stored(a, l, t), esa_mask_file_stored(b, l, t));
            for (int32_t br = 0; br < i.branches && esa_mask_file_stored(a, l, t); br++, cells++) {
                int64_t n, n2;
                uint8_t *x = bits_of(a, l, t, br, budget, &n), *y = bits_of(b, l, t, br, budget, &n2);
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

/* A recording of a few prompts; text tokens in front if asked (the grid then has one row less). */
static void record(mini *m, esa_session_params *p, const char *path)
{
    mini_record(ctx, m, p, 5, 2, path);
}

static void test_derived_equals_prebuilt(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    for (int variant = 0; variant < 5; variant++) {
        mini m = mini_make(3, 6, 2, 1);
        if (variant == 3) { m.grid[1] = 7; m.text = 30; }   /* 3*7*10 + 30 = 240: text fills a block and a part of the next */
        esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
        p.record_per_branch = variant == 1;
        p.record_groups = variant == 2 ? 4 : 0;
        if (variant == 3) p.select.layout.order = ESA_ORDER_HILBERT;
        record(&m, &p, scratch_path(&s, "rec"));
        const char *rec[] = {scratch_path(&s, "rec")};
        const int32_t importance = variant == 4 ? ESA_IMPORTANCE_F16 : ESA_IMPORTANCE_U8;
        esa_mask_build b = build_of(importance, 3);
        ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "all"), rec, 1, &b));
        esa_mask_file *all = open_file(scratch_path(&t, "all"));
        b = build_of(importance, 0);
        ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "bare"), rec, 1, &b));
        esa_mask_file *bare = open_file(scratch_path(&t, "bare"));
        b = build_of(ESA_IMPORTANCE_NONE, 3);
        if (importance == ESA_IMPORTANCE_U8) {
            ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "masks"), rec, 1, &b));
        } else {
            ok(ctx, esa_mask_file_derive(ctx, scratch_path(&t, "masks"), all, &b));
        }
        esa_mask_file *masks = open_file(scratch_path(&t, "masks"));

        const esa_mask_file_info i = info_of(all);
        assert_int_equal(i.budget_count, 3);
        assert_int_equal(i.budget_permille[0], 250);
        assert_int_equal(i.budget_permille[2], 700);
        assert_int_equal(info_of(bare).budget_count, 0);
        assert_int_equal(i.groups, variant == 2 ? 4 : 6);
        assert_int_equal(i.branches, variant == 1 ? 2 : 1);
        assert_int_equal(i.stored_layers, 2);
        assert_int_equal(i.stored_groups, variant == 2 ? 3 : 4);    /* warm-up: steps 0 and 1; of 4 groups only the first is all warm-up */
        assert_int_equal(i.prompts, 2);
        assert_string_equal(i.model, "mini");
        assert_string_equal(i.config_hash, "00ff");
        assert_int_equal(i.selector, ESA_SELECT_ENTROPY);
        assert_int_equal(i.block_q, 32);
        assert_int_equal(i.Nk, 240);
        assert_int_equal(i.nk, 15);
        assert_int_equal(i.layout.grid_q[1], m.grid[1]);
        assert_int_equal(i.layout.text_front_q, m.text);
        assert_int_equal(i.layout.order, variant == 3 ? ESA_ORDER_HILBERT : ESA_ORDER_RASTER);
        assert_float_equal(i.warmup_frac, 0.2, 0);
        assert_int_equal(i.samples, 4);
        for (int k = 0; k < 3; k++) {
            ok(ctx, esa_mask_file_require(bare, budgets[k]));
            assert_same_cells(all, bare, budgets[k]);
            assert_same_cells(all, masks, budgets[k]);
        }
        /* A budget nobody built, and derive into a new file, agree too. */
        ok(ctx, esa_mask_file_require(all, 0.333));
        assert_same_cells(all, bare, 0.333);
        const double third = 0.3334;                        /* rounded to 0.333 */
        b = build_of(importance, 1);
        b.budgets = &third;
        ok(ctx, esa_mask_file_derive(ctx, scratch_path(&t, "third"), bare, &b));
        esa_mask_file *derived = open_file(scratch_path(&t, "third"));
        assert_int_equal(info_of(derived).budget_permille[0], 333);
        assert_same_cells(all, derived, 0.333);
        assert_refused(ctx, esa_mask_file_require(masks, 0.4), ESA_ERR_MISMATCH, "0.250, 0.500, 0.700", "0.400", NULL);
        assert_refused(ctx, esa_mask_file_require(all, 1.5), ESA_ERR_ARGUMENT, "1.5", NULL);

        /* What is asked for is kept: mean over heads, text columns and rows whole. */
        double entropy[3], mass[3], density[3], mean = 0;
        ok(ctx, esa_mask_file_heads(all, entropy, mass, density, 2, 5, 0, 0.5));
        for (int h = 0; h < 3; h++) {
            assert_true(entropy[h] > 0 && entropy[h] <= 1 && mass[h] > density[h] * 0.99 && mass[h] <= 1.000001);
            mean += density[h] / 3;
        }
        assert_float_equal(mean, 0.5, 0.02);
        if (variant == 3) {
            int64_t n;
            uint8_t *bits = bits_of(all, 2, 5, 0, 0.25, &n);
            for (int64_t r = 0; r < 3 * 8; r++) {
                assert_true((bits[r * 2] & 3) == 3);
                if (r % 8 == 0) assert_true(bits[r * 2] == 0xff && bits[r * 2 + 1] == 0x7f);
            }
            free(bits);
        }
        esa_mask_file_free(all);
        esa_mask_file_free(bare);
        esa_mask_file_free(masks);
        esa_mask_file_free(derived);
        mini_free(&m);
    }
    scratch_remove(&s);
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
    esa_tensor_info sums = {.struct_size = sizeof sums};
    ok(ctx, esa_tensors_open(ctx, &raw, scratch_path(&s, "rec")));
    ok(ctx, esa_tensors_find(raw, "sums", &sums));
    for (int kind = ESA_IMPORTANCE_U8; kind <= ESA_IMPORTANCE_F16; kind++) {
        char rec[640];
        strcpy(rec, scratch_path(&s, "rec"));
        const char *recs[] = {rec};
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
            assert_true(fabs(p_out[i] - expected) <= expected * (kind == ESA_IMPORTANCE_U8 ? 0.0073 : 0.0006) + 1e-7);
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
    for (int variant = 0; variant < 3; variant++) {
        mini m = mini_make(3, 6, 2, variant == 2 ? 2 : 1);
        esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
        p.record_per_branch = variant == 1;
        if (variant == 2) p.select.layout.order = ESA_ORDER_TILE;
        record(&m, &p, scratch_path(&s, "rec"));
        const char *rec[] = {scratch_path(&s, "rec")};
        esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 1);
        ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "m"), rec, 1, &b));
        esa_mask_file *f = open_file(scratch_path(&t, "m"));
        p = mini_params(&m, ESA_SESSION_CACHED);
        p.masks = f;
        p.select.budget = variant == 1 ? 0.35 : 0.5;        /* derived, or prebuilt */
        p.attention.tail = variant == 2 ? ESA_TAIL_POOLED : ESA_TAIL_NONE;
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
                    if (layer > 0 && step >= 2) ok(ctx, esa_mask_file_get(f, &mask, layer, step, branch, p.select.budget));
                    ok(ctx, esa_attention(ctx, &v.q, &v.k, &v.v, &v.o, mask, &p.attention));
                    memcpy(expected, m.o, (size_t)mini_size(&m) * 4);
                    ok(ctx, esa_session_attention(x, layer, 0, &v.q, &v.k, &v.v, &v.o, NULL));
                    assert_memory_equal(expected, m.o, mini_size(&m) * 4);
                    esa_mask_free(mask);
                }
            }
        esa_session_stats st = {.struct_size = sizeof st};
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

/* One prompt recorded in f32-exact conditions: a cached run with masks of the online selector gives the online run's bits. */
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
    esa_session_stats st = {.struct_size = sizeof st};
    assert_int_equal(esa_session_get_stats(x, &st, 0, 0), ESA_OK);
    assert_true(isnan(st.mass));
    esa_session_free(x);
    esa_mask_file_free(f);
    mini_free(&m);
    scratch_remove(&s);
}

/* Tokens that already stand in the file's order, and tokens the library gathers: the same numbers. */
static void test_order_applied(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(2, 2, 1, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    p.select.layout.order = ESA_ORDER_HILBERT;
    record(&m, &p, scratch_path(&s, "rec"));
    const char *rec[] = {scratch_path(&s, "rec")};
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
        float *part[3] = {m.q, m.k, m.v};
        for (int k = 0; applied && k < 3; k++) {
            memcpy(given, part[k], (size_t)n * 4);
            for (int64_t h = 0; h < m.H; h++)
                for (int64_t i = 0; i < m.N; i++) memcpy(part[k] + (h * m.N + i) * m.D, given + (h * m.N + perm[i]) * m.D, (size_t)m.D * 4);
        }
        ok(ctx, esa_session_attention(x, 1, ESA_CALL_SELF, &v.q, &v.k, &v.v, &v.o, NULL));
        if (!applied) memcpy(expected, m.o, (size_t)n * 4);
        for (int64_t h = 0; applied && h < m.H; h++)
            for (int64_t i = 0; i < m.N; i++) assert_memory_equal(expected + (h * m.N + perm[i]) * m.D, m.o + (h * m.N + i) * m.D, m.D * 4);
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
    const char *rec[] = {scratch_path(&s, "rec")};
    esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 1);
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "m"), rec, 1, &b));
    esa_mask_file *f = open_file(scratch_path(&t, "m"));
    esa_session *x;
    const int32_t counts[] = {1, 2, 3, 4, 5, 7, 9, 11, 13, 20, 50, 101};
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
            if (from < 2) from = 2;                         /* the file's first sparse step */
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
    /* A session without warm-up asks for what is not stored: strict says so, otherwise it is a fallback. */
    for (int strict = 1; strict >= 0; strict--) {
        p = mini_params(&m, ESA_SESSION_CACHED);
        p.masks = f;
        p.warmup_frac = 0;
        p.strict = strict;
        p.select.budget = 0.5;
        ok(ctx, esa_session_create(ctx, &x, &p));
        const esa_status status = mini_run(&m, x, NULL);
        if (strict) {
            assert_refused(ctx, status, ESA_ERR_POLICY, "layer 1, step 0", "not stored", "warm-up 0.2", NULL);
        } else {
            ok(ctx, status);
            esa_session_stats st = {.struct_size = sizeof st};
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

static void test_mismatches(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(3, 6, 2, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    p.record_per_branch = 1;
    record(&m, &p, scratch_path(&s, "rec"));
    const char *rec[] = {scratch_path(&s, "rec")};
    esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 1);
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "m"), rec, 1, &b));
    esa_mask_file *f = open_file(scratch_path(&t, "m"));
    esa_session *x;
#define REFUSED(change, ...) do { p = mini_params(&m, ESA_SESSION_CACHED); p.masks = f; p.select.budget = 0.5; change; \
        assert_refused(ctx, esa_session_create(ctx, &x, &p), ESA_ERR_MISMATCH, __VA_ARGS__, NULL); assert_null(x); } while (0)
    REFUSED(p.model = "other", "'mini'", "'other'");
    REFUSED(p.config_hash = "1234", "'00ff'", "'1234'");
    REFUSED(p.layers = 30, "N=240", "3x8x10", "3 layers", "30 layers");
    REFUSED(p.steps = 50, "6 steps", "50");
    REFUSED(p.branches = 3, "2 branches", "3");
    REFUSED(p.select.layout.grid_q[2] = 13, "N=240 (grid 3x8x10)", "3x8x13");
#undef REFUSED
    /* Names that one side does not give are not compared. */
    p = mini_params(&m, ESA_SESSION_CACHED);
    p.masks = f;
    p.model = p.config_hash = NULL;
    memset(p.select.layout.grid_q, 0, sizeof p.select.layout.grid_q);
    ok(ctx, esa_session_create(ctx, &x, &p));
    m.N = 224;
    assert_refused(ctx, mini_run(&m, x, NULL), ESA_ERR_MISMATCH, "N=240 (grid 3x8x10)", "N=224", "3 heads", NULL);
    m.N = 240;
    m.H = 2;
    assert_refused(ctx, mini_run(&m, x, NULL), ESA_ERR_MISMATCH, "3 heads", "2 heads", NULL);
    m.H = 3;
    ok(ctx, mini_run(&m, x, NULL));
    esa_session_free(x);

    esa_ctx *other;
    ok(ctx, esa_ctx_create(&other, NULL));
    assert_refused(other, esa_session_create(other, &x, &p), ESA_ERR_ARGUMENT, "another ctx", NULL);
    esa_ctx_free(other);

    /* Cells. */
    esa_mask *mask;
    assert_refused(ctx, esa_mask_file_get(f, &mask, 0, 4, 0, 0.5), ESA_ERR_STATE, "layer 0", "dense layer", NULL);
    assert_refused(ctx, esa_mask_file_get(f, &mask, 1, 1, 0, 0.5), ESA_ERR_STATE, "step 1", "warm-up", NULL);
    assert_refused(ctx, esa_mask_file_get(f, &mask, 3, 4, 0, 0.5), ESA_ERR_ARGUMENT, "layer 3", "3 layers", NULL);
    assert_refused(ctx, esa_mask_file_get(f, &mask, 1, 6, 0, 0.5), ESA_ERR_ARGUMENT, "step 6", NULL);
    assert_refused(ctx, esa_mask_file_get(f, &mask, 1, 4, 2, 0.5), ESA_ERR_ARGUMENT, "branch 2", NULL);
    assert_null(mask);
    assert_refused(ctx, esa_mask_file_importance(f, NULL, 1, 4, 0), ESA_ERR_ARGUMENT, "NULL", NULL);
    assert_int_equal(esa_mask_file_stored(f, 1, 4), 1);
    assert_int_equal(esa_mask_file_stored(f, 0, 4), 0);
    assert_int_equal(esa_mask_file_stored(f, 1, -1), 0);
    assert_int_equal(esa_mask_file_stored(NULL, 1, 1), 0);

    /* Files of another kind. */
    esa_mask_file *g;
    assert_refused(ctx, esa_mask_file_open(ctx, &g, rec[0]), ESA_ERR_FORMAT, "is a recording", "a mask file was expected", NULL);
    assert_refused(ctx, esa_recording_merge(ctx, "x", (const char *const[]){scratch_path(&t, "m")}, 1), ESA_ERR_FORMAT, "is a mask file", "recording", NULL);
    esa_tensors_writer *w;
    ok(ctx, esa_tensors_writer_create(ctx, &w, scratch_path(&t, "plain")));
    ok(ctx, esa_tensors_writer_finish(w));
    esa_tensors_writer_free(w);
    assert_refused(ctx, esa_mask_file_open(ctx, &g, scratch_path(&t, "plain")), ESA_ERR_FORMAT, "not a mask file", NULL);
    assert_null(g);
    esa_mask_file_free(f);
    esa_mask_file_free(NULL);
    mini_free(&m);
    scratch_remove(&s);
}

static void test_build_refusals(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(2, 3, 1, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    record(&m, &p, scratch_path(&s, "rec"));
    const char *rec[] = {scratch_path(&s, "rec")};
#define REFUSED(change, status, word) do { esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 2); change; \
        assert_refused(ctx, esa_mask_file_build(ctx, scratch_path(&t, "m"), rec, 1, &b), status, word, NULL); assert_int_equal(scratch_count(&s), 1); } while (0)
    const double twice[] = {0.5, 0.5003}, wrong[] = {0.5, -0.1};
    REFUSED(b.struct_size = 1, ESA_ERR_VERSION, "struct_size");
    REFUSED(b.importance = 3, ESA_ERR_ARGUMENT, "importance is 3");
    REFUSED(b.budget_count = 17, ESA_ERR_ARGUMENT, "17 budgets");
    REFUSED((b.importance = 0, b.budget_count = 0), ESA_ERR_ARGUMENT, "would be empty");
    REFUSED(b.budgets = twice, ESA_ERR_ARGUMENT, "twice");
    REFUSED(b.budgets = wrong, ESA_ERR_ARGUMENT, "-0.1");
    REFUSED(b.budgets = NULL, ESA_ERR_ARGUMENT, "2 budgets");
    REFUSED(b.warmup_frac = 2, ESA_ERR_ARGUMENT, "warmup_frac is 2");
    REFUSED(b.warmup_frac = 1, ESA_ERR_ARGUMENT, "nothing would be stored");
#undef REFUSED
    /* A part that was never recorded. */
    esa_session *x;
    ok(ctx, esa_session_create(ctx, &x, &p));
    ok(ctx, esa_session_begin(x));
    const mini_views v = mini_view(&m);
    for (int32_t layer = 0; layer < 2; layer++) {
        ok(ctx, esa_session_step(x, 1, 0));
        mini_fill(&m, layer, 1, 0);
        ok(ctx, esa_session_attention(x, layer, 0, &v.q, &v.k, &v.v, &v.o, NULL));
    }
    ok(ctx, esa_session_save_recording(x, scratch_path(&s, "rec")));
    esa_session_free(x);
    esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 1);
    assert_refused(ctx, esa_mask_file_build(ctx, scratch_path(&t, "m"), rec, 1, &b), ESA_ERR_STATE, "layer 1, step group 2", "never recorded", NULL);
    assert_int_equal(scratch_count(&s), 1);
    mini_free(&m);
    scratch_remove(&s);
}

static void test_fa4(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    for (int branches = 1; branches <= 2; branches++) {
        mini m = mini_make(3, 5, branches, 1);
        esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
        p.record_per_branch = 1;
        p.record_groups = 3;
        record(&m, &p, scratch_path(&s, "rec"));
        const char *rec[] = {scratch_path(&s, "rec")};
        esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 1);
        ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "m"), rec, 1, &b));
        esa_mask_file *f = open_file(scratch_path(&t, "m"));
        ok(ctx, esa_mask_file_export_fa4(ctx, scratch_path(&t, "fa4"), f, 0.5));
        /* Round trip with our own metadata. */
        ok(ctx, esa_mask_file_import_fa4(ctx, scratch_path(&t, "back"), scratch_path(&s, "fa4"), NULL, NULL));
        esa_mask_file *g = open_file(scratch_path(&t, "back"));
        const esa_mask_file_info i = info_of(f), j = info_of(g);
        assert_int_equal(j.budget_permille[0], 500);
        assert_int_equal(j.importance, ESA_IMPORTANCE_NONE);
        assert_int_equal(i.stored_groups, j.stored_groups);
        for (int32_t l = 1; l < 3; l++)
            for (int32_t st = 2; st < 5; st++)
                for (int32_t br = 0; br < branches; br++) {
                    int64_t n;
                    uint8_t *x = bits_of(f, l, st, br, 0.5, &n), *y = bits_of(g, l, st, br, 0.5, &n);
                    assert_memory_equal(x, y, n);
                    free(x);
                    free(y);
                }
        /* The lists themselves are those of esa_mask_to_fa4. */
        esa_tensors *raw;
        esa_tensor_info cnt = {.struct_size = sizeof cnt}, idx = {.struct_size = sizeof idx};
        ok(ctx, esa_tensors_open(ctx, &raw, scratch_path(&t, "fa4")));
        ok(ctx, esa_tensors_find(raw, "full_block_cnt", &cnt));
        ok(ctx, esa_tensors_find(raw, "full_block_idx", &idx));
        assert_int_equal(cnt.rank, branches > 1 ? 5 : 4);
        esa_mask *mask;
        ok(ctx, esa_mask_file_get(f, &mask, 1, 4, 0, 0.5));
        int32_t c[24], x[24 * 15];
        assert_int_equal(esa_mask_to_fa4(mask, c, x), ESA_OK);
        esa_mask_free(mask);
        const int64_t cell = j.stored_groups - 1;           /* layer 1 is the first stored one, step 4 is in the last group */
        assert_memory_equal((const uint8_t *)cnt.data + cell * 24 * 4, c, sizeof c);
        assert_memory_equal((const uint8_t *)idx.data + cell * 24 * 15 * 4, x, sizeof x);

        /* A file from elsewhere has no metadata; order inside a row does not matter, duplicates do. */
        if (branches == 1) {
            int32_t *ci = malloc((size_t)cnt.bytes), *xi = malloc((size_t)idx.bytes);
            memcpy(ci, cnt.data, (size_t)cnt.bytes);
            memcpy(xi, idx.data, (size_t)idx.bytes);
            const int32_t first = xi[0];
            if (ci[0] > 1) { xi[0] = xi[1]; xi[1] = first; }
            for (int bad = 0; bad < 4; bad++) {
                if (bad == 1) xi[0] = xi[1];
                if (bad == 2) xi[0] = 15;
                if (bad == 3) ci[0] = 16;
                esa_tensors_writer *w;
                ok(ctx, esa_tensors_writer_create(ctx, &w, scratch_path(&t, "foreign")));
                ok(ctx, esa_tensors_writer_declare(w, "full_block_cnt", ESA_FILE_I32, cnt.rank, cnt.dim));
                ok(ctx, esa_tensors_writer_declare(w, "full_block_idx", ESA_FILE_I32, idx.rank, idx.dim));
                ok(ctx, esa_tensors_writer_data(w, ci, cnt.bytes));
                ok(ctx, esa_tensors_writer_data(w, xi, idx.bytes));
                ok(ctx, esa_tensors_writer_finish(w));
                esa_tensors_writer_free(w);
                esa_mask_info info;
                memset(&info, 0, sizeof info);
                info.struct_size = sizeof info;
                info.block_q = 32;
                info.block_k = 16;
                info.Nq = info.Nk = 240;
                char in[640];
                strcpy(in, scratch_path(&t, "foreign"));
                const esa_status status = esa_mask_file_import_fa4(ctx, scratch_path(&t, "back"), in, &info, "their model");
                if (bad) {
                    assert_refused(ctx, status, ESA_ERR_FORMAT, bad == 1 ? "twice" : bad == 2 ? "beyond" : "full_block_cnt", NULL);
                    continue;
                }
                ok(ctx, status);
                esa_mask_file *h = open_file(scratch_path(&t, "back"));
                const esa_mask_file_info k = info_of(h);
                assert_string_equal(k.model, "their model");
                assert_int_equal(k.layers, 2);
                assert_int_equal(k.steps, i.stored_groups);
                assert_int_equal(k.selector, -1);
                assert_float_equal(k.budget_permille[0], 500, 20);
                int64_t n;
                uint8_t *u = bits_of(f, 1, 1, 0, 0.5, &n), *o = bits_of(h, 0, 0, 0, k.budget_permille[0] / 1000.0, &n);
                assert_memory_equal(u, o, n);
                free(u);
                free(o);
                esa_mask_file_free(h);
                assert_refused(ctx, esa_mask_file_import_fa4(ctx, scratch_path(&t, "b2"), in, NULL, NULL), ESA_ERR_ARGUMENT, "info", NULL);
                info.Nk = 256;
                assert_refused(ctx, esa_mask_file_import_fa4(ctx, scratch_path(&t, "b2"), in, &info, NULL), ESA_ERR_MISMATCH, "8 x 15", "8 x 16", NULL);
            }
            free(ci);
            free(xi);
        }
        esa_tensors_free(raw);
        esa_mask_file_free(f);
        esa_mask_file_free(g);
        mini_free(&m);
    }
    scratch_remove(&s);
}

static void test_save(void **state)
{
    (void)state;
    scratch s = scratch_make();
    esa_mask_info i;
    memset(&i, 0, sizeof i);
    i.struct_size = sizeof i;
    i.block_q = 48;
    i.block_k = 16;
    i.B = 2;
    i.H = 3;
    i.Nq = 100;
    i.Nk = 170;
    const int64_t row = 2, bytes = 2 * 3 * 3 * row;         /* nq 3, nk 11 */
    uint8_t bits[36];
    esa_rng r = {7};
    for (int64_t n = 0; n < bytes; n++) bits[n] = (uint8_t)esa_rng_next(&r) & (n % 2 ? 7 : 255);
    esa_mask *m;
    ok(ctx, esa_mask_from_bits(ctx, &m, &i, bits));
    ok(ctx, esa_mask_file_save(ctx, scratch_path(&s, "m"), m));
    esa_mask_file *f = open_file(scratch_path(&s, "m"));
    const esa_mask_file_info k = info_of(f);
    assert_int_equal(k.branches, 2);
    assert_int_equal(k.selector, -1);
    assert_int_equal(k.prompts, 0);
    for (int32_t b = 0; b < 2; b++) {
        int64_t n;
        uint8_t *x = bits_of(f, 0, 0, b, k.budget_permille[0] / 1000.0, &n);
        assert_int_equal(n, 18);
        assert_memory_equal(x, bits + b * 18, 18);
        free(x);
    }
    double entropy[3], mass[3];
    ok(ctx, esa_mask_file_heads(f, entropy, mass, NULL, 0, 0, 0, k.budget_permille[0] / 1000.0));
    assert_true(isnan(entropy[0]) && isnan(mass[2]));
    assert_refused(ctx, esa_mask_file_save(ctx, scratch_path(&s, "m2"), NULL), ESA_ERR_ARGUMENT, "NULL", NULL);
    assert_refused(ctx, esa_mask_file_save(ctx, "/nonexistent/m", m), ESA_ERR_IO, "/nonexistent/m", NULL);
    esa_mask_free(m);
    esa_mask_file_free(f);
    scratch_remove(&s);
}

/* Every byte of the header of a real file changed: refused or harmless; the sentence is never empty. */
static void test_corruption(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(2, 3, 2, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    p.record_per_branch = 1;
    record(&m, &p, scratch_path(&s, "rec"));
    const char *rec[] = {scratch_path(&s, "rec")};
    esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 1);
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "m"), rec, 1, &b));
    size_t n;
    uint8_t *bytes = scratch_read(scratch_path(&t, "m"), &n);
    uint64_t length;
    memcpy(&length, bytes, 8);
    esa_rng r = {1};
    int opened = 0, refused = 0;
    for (size_t i = 0; i < 8 + (size_t)length + 200 && i < n; i++)
        for (int k = 0; k < 4; k++) {
            const uint8_t old = bytes[i];
            bytes[i] = (uint8_t)(k == 0 ? old ^ 1 : k == 1 ? '9' : k == 2 ? 0 : esa_rng_next(&r));
            esa_mask_file *f;
            const esa_status status = esa_mask_file_open_memory(ctx, &f, bytes, (int64_t)n);
            if (status == ESA_OK) {
                opened++;
                const esa_mask_file_info info = info_of(f);
                esa_mask *mask;
                if (esa_mask_file_get(f, &mask, info.layers - 1, info.steps - 1, 0, 0.5) == ESA_OK) esa_mask_free(mask);
                esa_mask_file_free(f);
            } else {
                refused++;
                assert_null(f);
                assert_true(esa_ctx_error(ctx)[0] != 0);
                assert_true(status == ESA_ERR_FORMAT || status == ESA_ERR_VERSION);
            }
            bytes[i] = old;
        }
    print_message("%d changed files opened, %d refused\n", opened, refused);
    assert_true(refused > opened);
    free(bytes);
    mini_free(&m);
    scratch_remove(&s);
}

static void test_failures(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(2, 3, 1, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    record(&m, &p, scratch_path(&s, "rec"));
    char in[640], ready[640], f16[640];
    strcpy(in, scratch_path(&s, "rec"));
    strcpy(ready, scratch_path(&s, "ready"));
    strcpy(f16, scratch_path(&s, "f16"));
    const char *rec[] = {in};
    esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 2);
    ok(ctx, esa_mask_file_build(ctx, ready, rec, 1, &b));
    b.importance = ESA_IMPORTANCE_F16;
    ok(ctx, esa_mask_file_build(ctx, f16, rec, 1, &b));
    b.importance = ESA_IMPORTANCE_U8;
    char fa4[640];
    strcpy(fa4, scratch_path(&s, "fa4"));
    esa_mask_file *source = open_file(ready);
    ok(ctx, esa_mask_file_export_fa4(ctx, fa4, source, 0.5));
    esa_mask_file_free(source);

    counting c;
    esa_ctx *small = counting_ctx(&c, 2);
    const int64_t base = c.live;
    static const char *const names[] = {"build", "open+require+get", "derive", "derive f16", "export", "import", "cached session", "save"};
    for (int what = 0; what < 8; what++) {
        int64_t points = 0;
        for (;; points++) {
            esa_mask_file *f = NULL;
            esa_mask *mask = NULL;
            esa_session *x = NULL;
            const char *out = scratch_path(&t, "out");
            if (what == 2 || what == 3 || what == 4 || what == 6) ok(small, esa_mask_file_open(small, &f, what == 3 ? f16 : ready));
            if (what == 7) {
                ok(small, esa_mask_file_open(small, &f, ready));
                ok(small, esa_mask_file_get(f, &mask, 1, 2, 0, 0.5));
            }
            c.left = points;
            esa_status status;
            switch (what) {
            case 0: status = esa_mask_file_build(small, out, rec, 1, &b); break;
            case 1:
                status = esa_mask_file_open(small, &f, ready);
                if (status == ESA_OK) status = esa_mask_file_require(f, 0.123);
                if (status == ESA_OK) status = esa_mask_file_get(f, &mask, 1, 2, 0, 0.123);
                break;
            case 2: case 3: status = esa_mask_file_derive(small, out, f, &b); break;
            case 4: status = esa_mask_file_export_fa4(small, out, f, 0.6); break;
            case 5: status = esa_mask_file_import_fa4(small, out, fa4, NULL, "m"); break;
            case 6: {
                esa_session_params q = mini_params(&m, ESA_SESSION_CACHED);
                q.masks = f;
                q.select.budget = 0.31;
                status = esa_session_create(small, &x, &q);
                if (status == ESA_OK) status = mini_run(&m, x, NULL);
                break;
            }
            default: status = esa_mask_file_save(small, out, mask); break;
            }
            const int32_t done = c.left >= 0;
            c.left = -1;
            if (!done) {
                assert_refused(small, status, ESA_ERR_MEMORY, "out of memory", NULL);
                assert_int_equal(scratch_count(&s), 4);
            } else ok(small, status);
            esa_session_free(x);
            esa_mask_free(mask);
            esa_mask_file_free(f);
            esa_ctx_trim(small);
            assert_int_equal(c.live, base);
            if (!done) continue;
            if (what != 1 && what != 6) assert_int_equal(unlink(scratch_path(&t, "out")), 0);
            break;
        }
        print_message("%s: %lld allocations failed once each\n", names[what], (long long)points);
    }
    esa_ctx_free(small);
    assert_int_equal(c.live, 0);

    /* A full disk at several points of a build: the old file stays, nothing else. */
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit old, limit;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    scratch_write(scratch_path(&t, "out"), "old", 3);
    size_t n;
    free(scratch_read(ready, &n));
    const rlim_t limits[] = {0, 100, n / 2, n - 1500, n - 700, n - 100, n - 1};
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        limit = old;
        limit.rlim_cur = limits[i];
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        const esa_status status = esa_mask_file_build(ctx, scratch_path(&t, "out"), rec, 1, &b);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
        assert_refused(ctx, status, ESA_ERR_IO, "cannot be written", NULL);
        assert_int_equal(scratch_count(&s), 5);
    }
    uint8_t *was = scratch_read(scratch_path(&t, "out"), &n);
    assert_int_equal(n, 3);
    free(was);
    mini_free(&m);
    scratch_remove(&s);
}

static int setup(void **state)
{
    (void)state;
    return esa_ctx_create(&ctx, NULL) != ESA_OK;
}

static int teardown(void **state)
{
    (void)state;
    esa_ctx_free(ctx);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_derived_equals_prebuilt), cmocka_unit_test(test_importance_values), cmocka_unit_test(test_cached_run),
        cmocka_unit_test(test_cached_equals_online), cmocka_unit_test(test_order_applied), cmocka_unit_test(test_step_maps), cmocka_unit_test(test_mismatches),
        cmocka_unit_test(test_build_refusals), cmocka_unit_test(test_fa4), cmocka_unit_test(test_save), cmocka_unit_test(test_corruption),
        cmocka_unit_test(test_failures)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
