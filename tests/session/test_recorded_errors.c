/* test_recorded_errors.c - recordings of errors, mask files built from them for total works, and
 * sessions that use these files.
 * SPDX-License-Identifier: Apache-2.0 */
#define ESA_EXPERIMENTAL
#include "session/mini_model.h"
#include <math.h>
#include "common/on_gpu.h"
#include "common/one_ctx.h"
#include "esa/esa_tensors.h"

/* Masks are whole blocks, so a work of a few small cells is met within this. The largest step of a
 * cell here is one block of 3 x 8 x 15, and cells round both ways. */
static const double near = 0.002;

static esa_session_params error_params(const mini *m, int32_t tail)
{
    esa_session_params p = mini_params(m, ESA_SESSION_RECORD);
    p.select.selector = ESA_SELECT_ERROR;
    p.select.tail = tail;
    return p;
}

/* Builds a file for `count` works from one recording. */
static void build(const char *output, const char *recording, const double *works, int32_t count)
{
    esa_mask_build b = esa_mask_build_default();
    b.budgets = works;
    b.budget_count = count;
    ok(ctx, esa_mask_file_build(ctx, output, &recording, 1, &b));
}

static esa_mask_file *open_file(const char *path)
{
    esa_mask_file *f;
    ok(ctx, esa_mask_file_open(ctx, &f, path));
    return f;
}

static esa_mask_file_info info_of(const esa_mask_file *f)
{
    esa_mask_file_info i = { .struct_size = sizeof i };
    assert_int_equal(esa_mask_file_get_info(f, &i), ESA_OK);
    return i;
}

static double density_of(esa_mask_file *f, int32_t layer, int32_t step, double work)
{
    double d = -1;
    ok(ctx, esa_mask_file_density(f, &d, layer, step, 0, work));
    return d;
}

/* Session params that run from a file. */
static esa_session_params cached_params(const mini *m, esa_mask_file *f, double budget)
{
    esa_session_params p = mini_params(m, ESA_SESSION_CACHED);
    p.masks = f;
    p.select.budget = budget;
    p.attention.tail = ESA_TAIL_LEVELS;
    return p;
}

static esa_session_stats run_cached(mini *m, const esa_session_params *p, uint64_t *hash)
{
    esa_session *x;
    esa_session_stats stats = { .struct_size = sizeof stats };
    ok(ctx, esa_session_create(ctx, &x, p));
    ok(ctx, mini_run(m, x, hash));
    ok(ctx, esa_session_get_stats(x, &stats, -1, -1));
    esa_session_free(x);
    return stats;
}

/* ---------------------------------------------------------------- recordings */

/* The sums are what the selector scores, as integers. */
static void sums_are_the_scores(void **state)
{
    (void)state;
    static const int32_t tails[] = { ESA_TAIL_LEVELS, ESA_TAIL_POOLED, ESA_TAIL_NONE };
    for (int t = 0; t < 3; t++) {
        scratch s = scratch_make();
        mini m = mini_make(1, 1, 1, 2);
        const esa_session_params p = error_params(&m, tails[t]);
        const int64_t nq = (m.N + 31) / 32, nk = (m.N + 15) / 16, blocks = m.H * nq * nk,
                      levels = tails[t] == ESA_TAIL_LEVELS ? 2 : 1;
        mini_record(ctx, &m, &p, 1, 1, scratch_path(&s, "rec"));
        float *e = malloc((size_t)(levels * m.B * blocks) * sizeof *e);
        const mini_views v = mini_view(&m);
        mini_fill(&m, 0, 0, 0);
        ok(ctx, esa_errors(ctx, e, &v.q, &v.k, &v.v, &p.select));
        esa_tensors *f;
        esa_tensor_info i = { .struct_size = sizeof i };
        ok(ctx, esa_tensors_open(ctx, &f, scratch_path(&s, "rec")));
        assert_string_equal(esa_tensors_metadata(f, "format_version"), "2");
        assert_string_equal(esa_tensors_metadata(f, "selector"), "error");
        ok(ctx, esa_tensors_find(f, "sums", &i));
        assert_int_equal(i.dtype, ESA_FILE_U64);
        assert_int_equal(i.rank, 5);
        assert_int_equal(i.dim[1], levels);
        int64_t some = 0;
        for (int64_t l = 0; l < levels; l++)
            for (int64_t j = 0; j < blocks; j++) {
                uint64_t sum, want = 0;
                memcpy(&sum, (const uint8_t *)i.data + 8 * (l * blocks + j), 8);
                for (int64_t b = 0; b < m.B; b++)
                    want += (uint64_t)((double)e[(l * m.B + b) * blocks + j] * 0x1p40 + 0.5);
                assert_true(sum == want);
                some += sum > 0;
            }
        assert_true(some > blocks / 2);
        esa_tensors_free(f);
        free(e);
        mini_free(&m);
        scratch_remove(&s);
    }
}

/* NaN and infinity count as the largest error, 255 times without an overflow. */
static void broken_blocks_saturate(void **state)
{
    (void)state;
    scratch s = scratch_make();
    mini m = mini_make(1, 1, 1, 1);
    esa_session_params p = error_params(&m, ESA_TAIL_LEVELS);
    esa_session *x;
    ok(ctx, esa_session_create(ctx, &x, &p));
    const mini_views v = mini_view(&m);
    mini_fill(&m, 0, 0, 0);
    for (int64_t i = 0; i < m.N * m.D; i++) m.v[i] = i % 2 ? 3e30f : NAN; /* head 0 */
    ok(ctx, esa_session_begin(x));
    ok(ctx, esa_session_step(x, 0, 0));
    for (int i = 0; i < 255; i++)
        ok(ctx, esa_session_attention(x, 0, 0, &v.q, &v.k, &v.v, &v.o, NULL));
    assert_refused(ctx, esa_session_attention(x, 0, 0, &v.q, &v.k, &v.v, &v.o, NULL), ESA_ERR_STATE,
                   "255 contributions", NULL);
    ok(ctx, esa_session_save_recording(x, scratch_path(&s, "rec")));
    esa_session_free(x);
    esa_tensors *f;
    esa_tensor_info i = { .struct_size = sizeof i };
    ok(ctx, esa_tensors_open(ctx, &f, scratch_path(&s, "rec")));
    ok(ctx, esa_tensors_find(f, "sums", &i));
    uint64_t first;
    memcpy(&first, i.data, 8);
    assert_true(first == UINT64_C(255) << 56);
    esa_tensors_free(f);
    /* Masks from it, and from it twice (where the sums no longer fit 64 bits), are the same. */
    char rec[640], a[640], b[640];
    strcpy(rec, scratch_path(&s, "rec"));
    strcpy(a, scratch_path(&s, "a"));
    strcpy(b, scratch_path(&s, "b"));
    const double works[] = { 0.5 };
    const char *twice[] = { rec, rec };
    esa_mask_build two = esa_mask_build_default();
    two.budgets = works;
    two.budget_count = 1;
    build(a, rec, works, 1);
    ok(ctx, esa_mask_file_build(ctx, b, twice, 2, &two));
    esa_mask_file *fa = open_file(a), *fb = open_file(b);
    esa_mask *ma, *mb;
    uint8_t la[3 * 8 * 15], lb[3 * 8 * 15];
    ok(ctx, esa_mask_file_get(fa, &ma, 0, 0, 0, 0.5));
    ok(ctx, esa_mask_file_get(fb, &mb, 0, 0, 0, 0.5));
    ok(ctx, esa_mask_to_levels(ma, la));
    ok(ctx, esa_mask_to_levels(mb, lb));
    for (int64_t j = 0; j < 2 * 8 * 15; j++) /* the sound heads */
        assert_int_equal(la[8 * 15 + j], lb[8 * 15 + j]);
    esa_mask_free(ma);
    esa_mask_free(mb);
    esa_mask_file_free(fa);
    esa_mask_file_free(fb);
    mini_free(&m);
    scratch_remove(&s);
}

/* Order, resume and shards change no bit of the sums, nor of the masks. */
static void order_and_shards(void **state)
{
    (void)state;
    static const struct {
        int32_t tail, groups, per_branch, text;
    } cases[] = { { ESA_TAIL_LEVELS, 0, 0, 0 },
                  { ESA_TAIL_LEVELS, 2, 1, 10 },
                  { ESA_TAIL_POOLED, 0, 0, 10 },
                  { ESA_TAIL_NONE, 1, 0, 0 } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        scratch s = scratch_make();
        mini m = mini_make(2, 3, 2, 2);
        m.B = 1; /* memory for text as well */
        m.text = cases[i].text;
        m.N += m.text;
        esa_session_params p = error_params(&m, cases[i].tail);
        p.record_groups = cases[i].groups;
        p.record_per_branch = cases[i].per_branch;
        char one[640], two[640], a[640], b[640], ab[640], ba[640], m1[640], m2[640];
        strcpy(one, scratch_path(&s, "one"));
        strcpy(two, scratch_path(&s, "two"));
        strcpy(a, scratch_path(&s, "a"));
        strcpy(b, scratch_path(&s, "b"));
        strcpy(ab, scratch_path(&s, "ab"));
        strcpy(ba, scratch_path(&s, "ba"));
        strcpy(m1, scratch_path(&s, "m1"));
        strcpy(m2, scratch_path(&s, "m2"));
        mini_record(ctx, &m, &p, 10, 3, one);
        mini_record(ctx, &m, &p, 10, 2, a);
        mini_record(ctx, &m, &p, 12, 1, b);

        esa_session *x; /* resume, in another order */
        ok(ctx, esa_session_create(ctx, &x, &p));
        ok(ctx, esa_session_load_recording(x, b));
        for (uint64_t prompt = 12; prompt-- > 10;) {
            m.prompt = prompt;
            ok(ctx, mini_run(&m, x, NULL));
        }
        ok(ctx, esa_session_save_recording(x, two));
        esa_session_free(x);
        assert_true(scratch_same(one, two));

        const char *order_ab[] = { a, b }, *order_ba[] = { b, a };
        ok(ctx, esa_recording_merge(ctx, ab, order_ab, 2));
        ok(ctx, esa_recording_merge(ctx, ba, order_ba, 2));
        assert_true(scratch_same(one, ab));
        assert_true(scratch_same(one, ba));

        const double works[] = { 0.6, 0.35 };
        esa_mask_build build2 = esa_mask_build_default();
        build2.budgets = works;
        build2.budget_count = 2;
        build(m1, one, works, 2);
        ok(ctx, esa_mask_file_build(ctx, m2, order_ba, 2, &build2));
        assert_true(scratch_same(m1, m2));
        mini_free(&m);
        scratch_remove(&s);
    }
}

/* Importance and errors do not go together, and neither do errors of other settings. */
static void kinds_stay_apart(void **state)
{
    (void)state;
    scratch s = scratch_make();
    char rec[640], other[640];
    strcpy(rec, scratch_path(&s, "rec"));
    strcpy(other, scratch_path(&s, "other"));
    mini m = mini_make(2, 2, 1, 1);
    const esa_session_params p = error_params(&m, ESA_TAIL_LEVELS);
    mini_record(ctx, &m, &p, 1, 1, rec);
    const char *both[] = { rec, other };
    for (int i = 0; i < 5; i++) {
        esa_session_params q = p;
        const char *word = "two kinds";
        if (i == 0) q.select = mini_params(&m, ESA_SESSION_RECORD).select;
        if (i == 1) q.select.tail = ESA_TAIL_POOLED;
        if (i == 2) q.select.fine = 2;
        if (i == 3) q.select.group_q = 2;
        if (i == 4) q.select.group_k = 1;
        if (i > 0) word = i == 1 ? "tail levels" : i == 2 ? "2 and" : "scores of 8x2";
        if (i == 1) word = "tail levels";
        esa_session *x;
        ok(ctx, esa_session_create(ctx, &x, &q));
        assert_refused(ctx, esa_session_load_recording(x, rec), ESA_ERR_MISMATCH, word,
                       "the session", NULL);
        ok(ctx, mini_run(&m, x, NULL));
        ok(ctx, esa_session_save_recording(x, other));
        esa_session_free(x);
        assert_refused(ctx, esa_recording_merge(ctx, scratch_path(&s, "m"), both, 2),
                       ESA_ERR_MISMATCH, word, "rec", "other", NULL);
        assert_refused(ctx, esa_mask_file_build(ctx, scratch_path(&s, "m"), both, 2, NULL),
                       ESA_ERR_MISMATCH, word, NULL);
    }
    esa_session_params q = p;
    q.select.layout.order = ESA_ORDER_ADAPTIVE;
    esa_session *x;
    assert_refused(ctx, esa_session_create(ctx, &x, &q), ESA_ERR_UNSUPPORTED, "adaptive", NULL);
    q = p;
    q.select.selector = ESA_SELECT_RF_V2;
    assert_refused(ctx, esa_session_create(ctx, &x, &q), ESA_ERR_UNSUPPORTED, "ENTROPY or ERROR",
                   NULL);
    mini_free(&m);
    scratch_remove(&s);
}

/* ---------------------------------------------------------------- mask files */

/* The masks of a file cost what was asked for, counted from the masks, and sessions find the same.
 * Awkward shapes: ragged last blocks, text, a protected frame, groups of unequal length. */
static void works_are_met(void **state)
{
    (void)state;
    static const struct {
        int32_t tail, groups, text, protect, per_branch, steps;
    } cases[] = {
        { ESA_TAIL_LEVELS, 0, 0, 0, 0, 0 },  { ESA_TAIL_LEVELS, 2, 0, 0, 1, 0 },
        { ESA_TAIL_LEVELS, 0, 10, 0, 0, 7 }, { ESA_TAIL_LEVELS, 0, 0, 1, 0, 0 },
        { ESA_TAIL_POOLED, 0, 10, 0, 0, 0 }, { ESA_TAIL_NONE, 3, 0, 0, 0, 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        /* A protected frame is a third of the tokens, which alone takes 0.65. */
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
        ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "masks"), &rec, 1, &b));
        esa_mask_file *f = open_file(scratch_path(&t, "masks"));
        const esa_mask_file_info info = info_of(f);
        assert_int_equal(info.format_version, 2);
        assert_int_equal(info.selector, ESA_SELECT_ERROR);
        assert_int_equal(info.tail, cases[i].tail);
        assert_int_equal(info.fine, cases[i].tail == ESA_TAIL_LEVELS ? 4 : 0);
        assert_int_equal(info.importance, ESA_IMPORTANCE_NONE);
        assert_int_equal(info.stored_layers, 4); /* no dense layer by rule */
        assert_float_equal(info.warmup_frac, 0, 0);
        if (cases[i].steps) m.steps = cases[i].steps;
        double last = 0;
        for (int w = 0; w < 4; w++) {
            double counted, exact, lowest = 1, highest = 0;
            ok(ctx, esa_mask_file_work(f, &counted, works[w], 0));
            ok(ctx, esa_mask_file_work(f, &exact, works[w], 2));
            assert_float_equal(counted, works[w], near);
            for (int32_t l = 0; l < 4; l++)
                for (int32_t step = 0; step < m.steps; step++) {
                    const double d = density_of(f, l, step, works[w]);
                    lowest = d < lowest ? d : lowest;
                    highest = d > highest ? d : highest;
                }
            if (w == 0) assert_true(lowest < highest); /* the cells differ */
            assert_true(exact >= counted && (works[w] == 1 || exact > counted));
            for (int rows = 0; rows <= 2; rows += 2) {
                esa_session_params c = cached_params(&m, f, works[w]);
                c.select.layout.protect_first_frame = cases[i].protect;
                c.attention.tail = cases[i].tail;
                c.attention.exact_rows = rows;
                const esa_session_stats stats = run_cached(&m, &c, NULL);
                /* A GPU counts every block as one of average size. */
                assert_float_equal(stats.work, rows ? exact : counted, on_gpu() ? 0.02 : 1e-9);
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

/* --work picks the largest stored work that leaves room for exact rows. */
static void a_work_pays_for_exact_rows(void **state)
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
        double work;
        int32_t rows;
        double picked; /* 0: refused */
    } cases[] = { { 0.6, 0, 0.6 }, { 0.599, 0, 0.5 }, { 1, 0, 0.6 },    { 0.5, 2, 0.4 },
                  { 0.6, 2, 0.5 }, { 0.567, 2, 0.5 }, { 0.39, 0, 0.0 }, { 0.45, 2, 0.0 } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        esa_session_params c = cached_params(&m, f, 0.1);
        c.work = cases[i].work;
        c.attention.exact_rows = cases[i].rows;
        esa_session *x;
        if (cases[i].picked == 0) {
            assert_refused(ctx, esa_session_create(ctx, &x, &c), ESA_ERR_MISMATCH, "masks",
                           "exact rows", NULL);
            continue;
        }
        double counted;
        ok(ctx, esa_mask_file_work(f, &counted, cases[i].picked, cases[i].rows));
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
    ok(ctx, esa_mask_file_work(f, &counted, 0.7, 0));
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
    ok(ctx, esa_mask_file_work(weighed, &counted, 0.4, 0));
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

static void bad_builds(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(2, 2, 1, 1);
    const esa_session_params p = error_params(&m, ESA_TAIL_LEVELS);
    mini_record(ctx, &m, &p, 1, 1, scratch_path(&s, "rec"));
    const char *rec = scratch_path(&s, "rec"), *out = scratch_path(&t, "out");
    esa_mask_build b = esa_mask_build_default();
    assert_refused(ctx, esa_mask_file_build(ctx, out, &rec, 1, &b), ESA_ERR_ARGUMENT, "no work",
                   NULL);
    const double little[] = { 0.01 };
    b.budgets = little;
    b.budget_count = 1;
    assert_refused(ctx, esa_mask_file_build(ctx, out, &rec, 1, &b), ESA_ERR_ARGUMENT,
                   "work is 0.010", "one block per row", NULL);
    assert_int_equal(scratch_count(&s), 1); /* nothing is left behind */
    mini_free(&m);
    scratch_remove(&s);
}

/* Files rewritten with fewer works hold the same masks; single masks with levels are stored too. */
static void rewritten_files(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s, u = s;
    mini m = mini_make(2, 2, 1, 1);
    const esa_session_params p = error_params(&m, ESA_TAIL_LEVELS);
    const double works[] = { 0.4, 0.6 };
    mini_record(ctx, &m, &p, 1, 1, scratch_path(&s, "rec"));
    build(scratch_path(&t, "masks"), scratch_path(&s, "rec"), works, 2);
    esa_mask_file *f = open_file(scratch_path(&t, "masks"));
    esa_mask_build b = esa_mask_build_default();
    b.importance = ESA_IMPORTANCE_NONE;
    b.budgets = works + 1;
    b.budget_count = 1;
    ok(ctx, esa_mask_file_derive(ctx, scratch_path(&u, "one"), f, &b));
    esa_mask_file *g = open_file(scratch_path(&u, "one"));
    uint8_t a[3 * 8 * 15], c[3 * 8 * 15];
    double mass_a[3], mass_c[3];
    for (int32_t layer = 0; layer < 2; layer++) {
        esa_mask *x, *y;
        ok(ctx, esa_mask_file_get(f, &x, layer, 1, 0, 0.6));
        ok(ctx, esa_mask_file_get(g, &y, layer, 1, 0, 0.6));
        ok(ctx, esa_mask_to_levels(x, a));
        ok(ctx, esa_mask_to_levels(y, c));
        assert_memory_equal(a, c, sizeof a);
        ok(ctx, esa_mask_file_heads(f, NULL, mass_a, NULL, layer, 1, 0, 0.6));
        ok(ctx, esa_mask_file_heads(g, NULL, mass_c, NULL, layer, 1, 0, 0.6));
        assert_memory_equal(mass_a, mass_c, sizeof mass_a);
        for (int h = 0; h < 3; h++) assert_true(mass_a[h] > 0.1 && mass_a[h] <= 1);
        assert_float_equal(density_of(f, layer, 1, 0.6), density_of(g, layer, 1, 0.6), 0);
        esa_mask_free(y);
        ok(ctx, esa_mask_file_save(ctx, scratch_path(&u, "single"), x));
        esa_mask_free(x);
        esa_mask_file *single = open_file(scratch_path(&u, "single"));
        assert_int_equal(info_of(single).fine, 4);
        ok(ctx,
           esa_mask_file_get(single, &y, 0, 0, 0, info_of(single).budget_permille[0] / 1000.0));
        ok(ctx, esa_mask_to_levels(y, c));
        assert_memory_equal(a, c, sizeof a);
        esa_mask_free(y);
        esa_mask_file_free(single);
    }
    /* The exchange holds the exact blocks. */
    ok(ctx, esa_mask_file_export_fa4(ctx, scratch_path(&s, "fa4"), f, 0.6));
    ok(ctx, esa_mask_file_import_fa4(ctx, scratch_path(&u, "back"), scratch_path(&s, "fa4"), NULL,
                                     NULL));
    esa_mask_file_free(g);
    g = open_file(scratch_path(&u, "back"));
    assert_int_equal(info_of(g).fine, 0);
    assert_int_equal(info_of(g).format_version, 1);
    esa_mask_file_free(g);
    esa_mask_file_free(f);
    mini_free(&m);
    scratch_remove(&s);
}

/* A mask with an adaptive order belongs to its q and k. */
static void adaptive_masks_are_not_stored(void **state)
{
    (void)state;
    scratch s = scratch_make();
    mini m = mini_make(1, 1, 1, 1);
    esa_select_params p = error_params(&m, ESA_TAIL_LEVELS).select;
    p.layout.order = ESA_ORDER_ADAPTIVE;
    const mini_views v = mini_view(&m);
    mini_fill(&m, 0, 0, 0);
    esa_mask *mask;
    ok(ctx, esa_select_qkv(ctx, &mask, &v.q, &v.k, &v.v, &p));
    assert_refused(ctx, esa_mask_file_save(ctx, scratch_path(&s, "x"), mask), ESA_ERR_UNSUPPORTED,
                   "adaptive", NULL);
    esa_mask_free(mask);
    mini_free(&m);
    scratch_remove(&s);
}

/* Broken files are refused before their numbers are used. */
static void broken_files(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(1, 2, 1, 1);
    const esa_session_params p = error_params(&m, ESA_TAIL_LEVELS);
    const double works[] = { 0.5 };
    mini_record(ctx, &m, &p, 1, 1, scratch_path(&s, "rec"));
    build(scratch_path(&t, "masks"), scratch_path(&s, "rec"), works, 1);
    size_t n;
    uint8_t *bytes = scratch_read(scratch_path(&t, "masks"), &n);
    /* The file ends with the fine bits; the exact bits come before. */
    const size_t plane = 2 * 3 * 8 * 2;
    uint8_t *bits = bytes + n - 2 * plane, *fine = bytes + n - plane;
    esa_mask_file *f;
    esa_mask *mask;
    size_t at = 0;
    while (at < plane && !bits[at]) at++;
    assert_true(at < plane / 2); /* in the first cell */
    for (int i = 0; i < 2; i++) {
        uint8_t *const where = i ? fine + at
                                 : fine + 1; /* 15 blocks: the last bit of byte 1 is none */
        const uint8_t kept = *where;
        *where |= i ? bits[at] : 0x80;
        ok(ctx, esa_mask_file_open_memory(ctx, &f, bytes, (int64_t)n));
        assert_refused(ctx, esa_mask_file_get(f, &mask, 0, 0, 0, 0.5), ESA_ERR_FORMAT,
                       i ? "two levels" : "beyond", NULL);
        double work;
        assert_refused(ctx, esa_mask_file_work(f, &work, 0.5, 0), ESA_ERR_FORMAT,
                       i ? "two levels" : "beyond", NULL);
        esa_mask_file_free(f);
        *where = kept;
    }
    free(bytes);
    /* A density that is no share. */
    bytes = scratch_read(scratch_path(&t, "masks"), &n);
    esa_tensors *file;
    esa_tensor_info i = { .struct_size = sizeof i };
    ok(ctx, esa_tensors_open_memory(ctx, &file, bytes, (int64_t)n));
    ok(ctx, esa_tensors_find(file, "mask.0500.density", &i));
    const float wrong = 1.5f;
    memcpy(bytes + ((const uint8_t *)i.data - bytes), &wrong, 4);
    esa_tensors_free(file);
    assert_refused(ctx, esa_mask_file_open_memory(ctx, &f, bytes, (int64_t)n), ESA_ERR_FORMAT,
                   "density", "1.5", NULL);
    free(bytes);
    /* A sum that one contribution cannot give: the sums end the file. */
    bytes = scratch_read(scratch_path(&s, "rec"), &n);
    const uint64_t more = (UINT64_C(1) << 56) + 1;
    memcpy(bytes + n - 8, &more, 8);
    scratch_write(scratch_path(&s, "sums"), bytes, n);
    free(bytes);
    esa_session *x;
    ok(ctx, esa_session_create(ctx, &x, &p));
    assert_refused(ctx, esa_session_load_recording(x, scratch_path(&s, "sums")), ESA_ERR_FORMAT,
                   "larger", NULL);
    esa_session_free(x);
    mini_free(&m);
    scratch_remove(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(sums_are_the_scores),
                                        cmocka_unit_test(broken_blocks_saturate),
                                        cmocka_unit_test(order_and_shards),
                                        cmocka_unit_test(kinds_stay_apart),
                                        cmocka_unit_test(works_are_met),
                                        cmocka_unit_test(sessions_use_both_levels),
                                        cmocka_unit_test(a_work_pays_for_exact_rows),
                                        cmocka_unit_test(the_file_says_what_is_dense),
                                        cmocka_unit_test(plans_weigh),
                                        cmocka_unit_test(bad_builds),
                                        cmocka_unit_test(rewritten_files),
                                        cmocka_unit_test(adaptive_masks_are_not_stored),
                                        cmocka_unit_test(broken_files) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
