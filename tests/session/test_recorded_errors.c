/* test_recorded_errors.c - recordings of errors, and what builds and files of them refuse.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/recorded_errors.h"
#include <math.h>
#include "esa/esa_tensors.h"

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

/* Without block sizes the selector's own are recorded, and a recording with them can be resumed. */
static void own_blocks(void **state)
{
    (void)state;
    scratch s = scratch_make();
    mini m = mini_make(1, 1, 1, 1);
    char own[640], given[640], masks[640];
    strcpy(own, scratch_path(&s, "own"));
    strcpy(given, scratch_path(&s, "given"));
    strcpy(masks, scratch_path(&s, "masks"));
    esa_session_params p = error_params(&m, ESA_TAIL_LEVELS), small = p;
    p.select.block_q = p.select.block_k = 0;
    mini_record(ctx, &m, &p, 1, 1, own);
    p.select.block_q = p.select.block_k = ESA_SHORT_BLOCK;
    mini_record(ctx, &m, &p, 1, 1, given);
    assert_true(scratch_same(own, given));
    const double works[] = { 0.9 };
    build(masks, own, works, 1);
    esa_mask_file *f = open_file(masks);
    const esa_mask_file_info i = info_of(f);
    assert_int_equal(i.block_q, ESA_SHORT_BLOCK);
    assert_int_equal(i.block_k, ESA_SHORT_BLOCK);
    assert_int_equal(i.fine, 8);
    esa_mask_file_free(f);
    esa_session *x;
    p.select.block_q = p.select.block_k = 0;
    ok(ctx, esa_session_create(ctx, &x, &p));
    ok(ctx, esa_session_load_recording(x, own));
    ok(ctx, mini_run(&m, x, NULL));
    ok(ctx, esa_session_save_recording(x, given));
    esa_session_free(x);
    build(masks, given, works, 1);
    ok(ctx, esa_session_create(ctx, &x, &small));
    assert_refused(ctx, esa_session_load_recording(x, own), ESA_ERR_MISMATCH, "tokens", NULL);
    esa_session_free(x);
    mini_free(&m);
    scratch_remove(&s);
}

/* Where no groups are given, a recording has about 32 mean queries a block, and as many mean keys
 * or single keys. */
static void own_groups(void **state)
{
    (void)state;
    static const struct {
        int32_t block_q, block_k, group_q, group_k;
    } cases[] = {
        { 32, 16, 1, 1 }, { 64, 64, 2, 1 }, { 96, 80, 2, 2 }, { 128, 128, 4, 4 }, { 256, 128, 8, 4 }
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        scratch s = scratch_make();
        mini m = mini_make(1, 1, 1, 1);
        char own[640], given[640], masks[640];
        strcpy(own, scratch_path(&s, "own"));
        strcpy(given, scratch_path(&s, "given"));
        strcpy(masks, scratch_path(&s, "masks"));
        esa_session_params p = error_params(&m, ESA_TAIL_LEVELS);
        p.select.block_q = cases[i].block_q;
        p.select.block_k = cases[i].block_k;
        p.select.group_q = p.select.group_k = 0;
        mini_record(ctx, &m, &p, 1, 1, own);
        const double works[] = { 0.9 };
        build(masks, own, works, 1);
        esa_mask_file *f = open_file(masks);
        const esa_mask_file_info info = info_of(f);
        assert_int_equal(info.group_q, cases[i].group_q);
        assert_int_equal(info.group_k, cases[i].group_k);
        esa_mask_file_free(f);
        p.select.group_q = cases[i].group_q;
        p.select.group_k = cases[i].group_k;
        p.select.fine = info.fine;
        mini_record(ctx, &m, &p, 1, 1, given);
        assert_true(scratch_same(own, given));
        mini_free(&m);
        scratch_remove(&s);
    }
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

        const double works[] = { 0.6, 0.4 };
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
                   "work is 0.010", "one block per row", "2 exact rows per query block", NULL);
    /* 16 exact rows of 32 take half of the work, and a third does not pay for them. */
    const double third[] = { 0.33 };
    b.budgets = third;
    b.exact_rows = 16;
    assert_refused(ctx, esa_mask_file_build(ctx, out, &rec, 1, &b), ESA_ERR_ARGUMENT,
                   "work is 0.330", "16 exact rows per query block", NULL);
    for (int32_t bad = -2; bad <= 17; bad += 19) {
        b.exact_rows = bad;
        assert_refused(ctx, esa_mask_file_build(ctx, out, &rec, 1, &b), ESA_ERR_ARGUMENT,
                       bad < 0 ? "exact_rows is -2" : "exact_rows is 17", "0 to 16", NULL);
    }
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
        assert_refused(ctx, esa_mask_file_work(f, &work, 0.5), ESA_ERR_FORMAT,
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
    /* Exact rows that no session can have, and metadata without them. */
    static const char *const wrong_rows[] = { "\"exact_rows\":\"9\"", "\"exact_rows\":\"x\"",
                                              "\"exact_lows\":\"2\"" };
    static const char right_rows[] = "\"exact_rows\":\"2\"";
    for (int w = 0; w < 3; w++) {
        bytes = scratch_read(scratch_path(&t, "masks"), &n);
        char *place = NULL;
        for (size_t k = 0; k + sizeof right_rows <= n && !place; k++)
            if (memcmp(bytes + k, right_rows, sizeof right_rows - 1) == 0)
                place = (char *)bytes + k;
        assert_non_null(place);
        memcpy(place, wrong_rows[w], sizeof right_rows - 1);
        if (w == 0) { /* 9 rows are fine, if the masks are not causal */
            ok(ctx, esa_mask_file_open_memory(ctx, &f, bytes, (int64_t)n));
            assert_int_equal(info_of(f).exact_rows, 9);
            esa_mask_file_free(f);
            char *causal = NULL;
            for (size_t k = 0; k + 12 <= n && !causal; k++)
                if (memcmp(bytes + k, "\"causal\":\"0\"", 12) == 0) causal = (char *)bytes + k;
            assert_non_null(causal);
            causal[10] = '1';
        }
        assert_refused(ctx, esa_mask_file_open_memory(ctx, &f, bytes, (int64_t)n), ESA_ERR_FORMAT,
                       w == 0   ? "causal masks and 9 exact rows"
                       : w == 1 ? "'exact_rows' is 'x'"
                                : "'exact_rows' is missing",
                       NULL);
        free(bytes);
    }
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
                                        cmocka_unit_test(own_blocks),
                                        cmocka_unit_test(own_groups),
                                        cmocka_unit_test(order_and_shards),
                                        cmocka_unit_test(kinds_stay_apart),
                                        cmocka_unit_test(bad_builds),
                                        cmocka_unit_test(rewritten_files),
                                        cmocka_unit_test(adaptive_masks_are_not_stored),
                                        cmocka_unit_test(broken_files) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
