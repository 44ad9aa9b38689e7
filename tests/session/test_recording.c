/* test_recording.c - sums are integers: order, resume, shards and batches cannot change a bit.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/mini_model.h"
#include <signal.h>
#include <sys/resource.h>
#include "common/on_gpu.h"
#include "common/one_ctx.h"
#include "esa/esa_tensors.h"

static void test_order_and_shards(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s, u = s;
    static const struct {
        int32_t groups, per_branch;
    } cases[] = { { 0, 0 }, { 2, 0 }, { 0, 1 } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mini m = mini_make(3, 5, 2, 1);
        esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
        p.record_groups = cases[i].groups;
        p.record_per_branch = cases[i].per_branch;
        mini_record(ctx, &m, &p, 10, 3, scratch_path(&s, "one"));

        /* Other order. */
        esa_session *x;
        ok(ctx, esa_session_create(ctx, &x, &p));
        for (uint64_t prompt = 13; prompt-- > 10;) {
            m.prompt = prompt;
            ok(ctx, mini_run(&m, x, NULL));
        }
        ok(ctx, esa_session_save_recording(x, scratch_path(&t, "two")));
        esa_session_free(x);
        assert_true(scratch_same(scratch_path(&s, "one"), scratch_path(&t, "two")));

        /* Resume: one prompt, a file, a new session, the others. */
        mini_record(ctx, &m, &p, 11, 1, scratch_path(&t, "part"));
        ok(ctx, esa_session_create(ctx, &x, &p));
        ok(ctx, esa_session_load_recording(x, scratch_path(&t, "part")));
        for (uint64_t prompt = 10; prompt < 13; prompt += 2) {
            m.prompt = prompt;
            ok(ctx, mini_run(&m, x, NULL));
        }
        ok(ctx, esa_session_save_recording(x, scratch_path(&t, "three")));
        /* Loading after the first prompt works as well. */
        esa_session_free(x);
        assert_true(scratch_same(scratch_path(&s, "one"), scratch_path(&t, "three")));
        ok(ctx, esa_session_create(ctx, &x, &p));
        m.prompt = 10;
        ok(ctx, mini_run(&m, x, NULL));
        ok(ctx, esa_session_load_recording(x, scratch_path(&t, "part")));
        m.prompt = 12;
        ok(ctx, mini_run(&m, x, NULL));
        ok(ctx, esa_session_save_recording(x, scratch_path(&t, "three")));
        esa_session_free(x);
        assert_true(scratch_same(scratch_path(&s, "one"), scratch_path(&t, "three")));

        /* Shards, merged in both orders; and mask files built from shards or from the whole. */
        mini_record(ctx, &m, &p, 10, 2, scratch_path(&t, "a"));
        mini_record(ctx, &m, &p, 12, 1, scratch_path(&t, "b"));
        char a[640], b[640];
        strcpy(a, scratch_path(&t, "a"));
        strcpy(b, scratch_path(&t, "b"));
        const char *ab[] = { a, b }, *ba[] = { b, a }, *one[] = { scratch_path(&s, "one") };
        ok(ctx, esa_recording_merge(ctx, scratch_path(&t, "ab"), ab, 2));
        ok(ctx, esa_recording_merge(ctx, scratch_path(&u, "ba"), ba, 2));
        assert_true(scratch_same(scratch_path(&s, "one"), scratch_path(&t, "ab")));
        assert_true(scratch_same(scratch_path(&s, "one"), scratch_path(&u, "ba")));
        esa_mask_build build = esa_mask_build_default();
        const double budgets[] = { 0.5, 0.3 };
        build.budgets = budgets;
        build.budget_count = 2;
        one[0] = scratch_path(&s, "one");
        ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "m1"), one, 1, &build));
        ok(ctx, esa_mask_file_build(ctx, scratch_path(&u, "m2"), ba, 2, &build));
        assert_true(scratch_same(scratch_path(&t, "m1"), scratch_path(&u, "m2")));
        mini_free(&m);
    }
    scratch_remove(&s);
}

/* A recording of 4 steps in a file for 10: step i has the masks of recorded step floor(i * 4 / 10),
 * and a session of 10 steps runs from it. */
static void test_other_steps(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s, u = s;
    mini m = mini_make(2, 4, 1, 1), ten = mini_make(2, 10, 1, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    mini_record(ctx, &m, &p, 20, 1, scratch_path(&s, "rec"));
    const char *rec[] = { scratch_path(&s, "rec") };
    const double budgets[] = { 0.5 };
    esa_mask_build build = esa_mask_build_default();
    build.budgets = budgets;
    build.budget_count = 1;
    build.store_dense = 1;
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "four"), rec, 1, &build));
    for (int32_t steps = 4; steps <= 13; steps += 3) {
        build.steps = steps;
        ok(ctx, esa_mask_file_build(ctx, scratch_path(&u, "more"), rec, 1, &build));
        esa_mask_file *four, *more;
        ok(ctx, esa_mask_file_open(ctx, &four, scratch_path(&t, "four")));
        ok(ctx, esa_mask_file_open(ctx, &more, scratch_path(&u, "more")));
        esa_mask_file_info info = { .struct_size = sizeof info };
        ok(ctx, esa_mask_file_get_info(more, &info));
        assert_int_equal(info.steps, steps);
        assert_int_equal(info.groups, 4);
        for (int32_t i = 0; i < steps; i++) {
            double a[3], b[3];
            ok(ctx, esa_mask_file_heads(four, NULL, a, NULL, 1, i * 4 / steps, 0, 0.5));
            ok(ctx, esa_mask_file_heads(more, NULL, b, NULL, 1, i, 0, 0.5));
            assert_memory_equal(a, b, sizeof a);
        }
        esa_mask_file_free(four);
        esa_mask_file_free(more);
    }
    /* Warm-up is counted in steps of the file: of 10 the first 2, which are all that uses recorded
     * step 0 but step 2 does as well. */
    build = esa_mask_build_default();
    build.budgets = budgets;
    build.budget_count = 1;
    build.steps = 10;
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&u, "more"), rec, 1, &build));
    esa_mask_file *more;
    ok(ctx, esa_mask_file_open(ctx, &more, scratch_path(&u, "more")));
    for (int32_t i = 0; i < 10; i++) assert_int_equal(esa_mask_file_stored(more, 1, i), 1);
    esa_session_params c = mini_params(&ten, ESA_SESSION_CACHED);
    c.masks = more;
    c.select.budget = 0.5;
    esa_session *x;
    ok(ctx, esa_session_create(ctx, &x, &c));
    ok(ctx, mini_run(&ten, x, NULL));
    esa_session_stats stats = { .struct_size = sizeof stats };
    ok(ctx, esa_session_get_stats(x, &stats, -1, -1));
    assert_int_equal(stats.masks_loaded, 8);
    esa_session_free(x);
    esa_mask_file_free(more);
    const int32_t wrong[] = { 3, -1, 65536 };
    for (int i = 0; i < 3; i++) {
        build.steps = wrong[i];
        assert_refused(ctx, esa_mask_file_build(ctx, scratch_path(&u, "x"), rec, 1, &build),
                       ESA_ERR_ARGUMENT, "steps", "4", NULL);
    }
    mini_free(&m);
    mini_free(&ten);
    scratch_remove(&s);
}

/* A batch of two is two contributions. */
static void test_batch(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini two = mini_make(1, 1, 1, 2), one = mini_make(1, 1, 1, 1);
    esa_session_params p = mini_params(&two, ESA_SESSION_RECORD);
    esa_session *x;
    ok(ctx, esa_session_create(ctx, &x, &p));
    ok(ctx, esa_session_begin(x));
    ok(ctx, esa_session_step(x, 0, 0));
    mini_fill(&two, 0, 0, 0);
    const mini_views v = mini_view(&two), w = mini_view(&one);
    ok(ctx, esa_session_attention(x, 0, 0, &v.q, &v.k, &v.v, &v.o, NULL));
    ok(ctx, esa_session_save_recording(x, scratch_path(&s, "batch")));
    esa_session_free(x);
    ok(ctx, esa_session_create(ctx, &x, &p));
    ok(ctx, esa_session_begin(x));
    ok(ctx, esa_session_step(x, 0, 0));
    for (int b = 1; b >= 0; b--) {
        const int64_t n = mini_size(&one);
        memcpy(one.q, two.q + b * n, (size_t)n * 4);
        memcpy(one.k, two.k + b * n, (size_t)n * 4);
        memcpy(one.v, two.v + b * n, (size_t)n * 4);
        ok(ctx, esa_session_attention(x, 0, 0, &w.q, &w.k, &w.v, &w.o, NULL));
        /* Recording runs dense and does not disturb the output. */
        assert_memory_equal(one.o, two.o + b * n, n * 4);
    }
    ok(ctx, esa_session_save_recording(x, scratch_path(&t, "singles")));
    esa_session_free(x);
    assert_true(scratch_same(scratch_path(&s, "batch"), scratch_path(&t, "singles")));
    mini_free(&one);
    mini_free(&two);
    scratch_remove(&s);
}

static void test_limit(void **state)
{
    (void)state;
    scratch s = scratch_make();
    mini m = mini_make(1, 2, 1, 3);
    m.H = 1;
    esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    p.record_groups = 1;
    esa_session *x;
    ok(ctx, esa_session_create(ctx, &x, &p));
    const mini_views v = mini_view(&m);
    mini_fill(&m, 0, 0, 0);
    ok(ctx, esa_session_begin(x));
    ok(ctx, esa_session_step(x, 1, 0));
    for (int i = 0; i < 85; i++)
        ok(ctx, esa_session_attention(x, 0, 0, &v.q, &v.k, &v.v, &v.o, NULL));
    ok(ctx, esa_session_save_recording(x, scratch_path(&s, "full")));
    assert_refused(ctx, esa_session_attention(x, 0, 0, &v.q, &v.k, &v.v, &v.o, NULL), ESA_ERR_STATE,
                   "255 contributions", "at most 255", NULL);
    assert_refused(ctx, esa_session_load_recording(x, scratch_path(&s, "full")), ESA_ERR_STATE,
                   "255", NULL);
    esa_session_free(x);
    char full[640];
    strcpy(full, scratch_path(&s, "full"));
    const char *twice[] = { full, full };
    assert_refused(ctx, esa_recording_merge(ctx, scratch_path(&s, "m"), twice, 2), ESA_ERR_STATE,
                   "510", NULL);
    /* A mask file takes them all: it sums in 64 bits. */
    esa_mask_build b = esa_mask_build_default();
    b.dense_first_layer = 0;
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&s, "m"), twice, 2, &b));
    mini_free(&m);
    scratch_remove(&s);
}

static const int32_t layer_1 = 1;

static void other_model(esa_session_params *p) { p->model = "other"; }

static void other_hash(esa_session_params *p) { p->config_hash = "abc"; }

static void one_group(esa_session_params *p) { p->record_groups = 1; }

static void branches_apart(esa_session_params *p) { p->record_per_branch = 1; }

static void three_samples(esa_session_params *p) { p->select.samples = 3; }

static void wider_blocks(esa_session_params *p) { p->select.block_k = 32; }

static void other_scale(esa_session_params *p) { p->select.scale = 0.1; }

static void a_dense_layer(esa_session_params *p)
{
    p->dense_layers = &layer_1;
    p->dense_layer_count = 1;
}

/* A recording made with other settings is refused when it is loaded and when it is merged, and the
 * message names the difference. */
static void other_settings(void **state)
{
    (void)state;
    static const struct {
        int32_t layers, steps;
        void (*change)(esa_session_params *p);
        const char *word, *merge_word;
    } cases[] = {
        { 3, 3, NULL, "2 layers", "2 layers" },
        { 2, 4, NULL, "4 steps", "4 steps" },
        { 2, 3, other_model, "'mini'", "'mini'" },
        { 2, 3, other_hash, "'00ff'", "'00ff'" },
        { 2, 3, one_group, "3 step groups", "3 step groups" },
        { 2, 3, branches_apart, "1 branches", "1 branches" },
        { 2, 3, three_samples, "4 samples", "4 samples" },
        { 2, 3, wider_blocks, "32x16", "32x16" },
        { 2, 3, other_scale, "scale 0", "scale 0" },
        { 2, 3, a_dense_layer, "dense", "" },
    };
    scratch s = scratch_make();
    char rec[640], other[640];
    strcpy(rec, scratch_path(&s, "rec"));
    strcpy(other, scratch_path(&s, "other"));
    mini m = mini_make(2, 3, 2, 1);
    const esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    mini_record(ctx, &m, &p, 1, 1, rec);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mini n = mini_make(cases[i].layers, cases[i].steps, 2, 1);
        esa_session_params q = mini_params(&n, ESA_SESSION_RECORD);
        if (cases[i].change) cases[i].change(&q);
        esa_session *x;
        ok(ctx, esa_session_create(ctx, &x, &q));
        assert_refused(ctx, esa_session_load_recording(x, rec), ESA_ERR_MISMATCH, cases[i].word,
                       "the session", NULL);
        ok(ctx, mini_run(&n, x, NULL));
        ok(ctx, esa_session_save_recording(x, other));
        const char *both[] = { rec, other };
        assert_refused(ctx, esa_recording_merge(ctx, scratch_path(&s, "m"), both, 2),
                       ESA_ERR_MISMATCH, cases[i].merge_word, "rec", "other", NULL);
        assert_int_equal(scratch_count(&s), 2);
        esa_session_free(x);
        mini_free(&n);
    }
    mini_free(&m);
    scratch_remove(&s);
}

/* Another token count names both sides; an empty recording is not saved. */
static void other_tokens(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(2, 3, 2, 1);
    const esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    mini_record(ctx, &m, &p, 1, 1, scratch_path(&s, "rec"));
    esa_session *x;
    ok(ctx, esa_session_create(ctx, &x, &p));
    ok(ctx, esa_session_load_recording(x, scratch_path(&s, "rec")));
    esa_session_free(x);
    esa_session_params q = p;
    memset(q.select.layout.grid_q, 0, sizeof q.select.layout.grid_q);
    ok(ctx, esa_session_create(ctx, &x, &q));
    m.prompt = 1;
    ok(ctx, mini_run(&m, x, NULL));
    m.N -= 16;
    assert_refused(ctx, mini_run(&m, x, NULL), ESA_ERR_MISMATCH, "N=240", "N=224", NULL);
    m.N += 16;
    assert_refused(ctx, esa_session_load_recording(x, scratch_path(&s, "rec")), ESA_ERR_MISMATCH,
                   "3x8x10", NULL);
    esa_session_free(x);

    ok(ctx, esa_session_create(ctx, &x, &p));
    assert_refused(ctx, esa_session_save_recording(x, scratch_path(&t, "none")), ESA_ERR_STATE,
                   "nothing", NULL);
    esa_session_free(x);
    mini_free(&m);
    scratch_remove(&s);
}

static void protects_frame_0(esa_layout *y) { y->protect_first_frame = 1; }

static void text_behind(esa_layout *y)
{
    y->text_front_q = 0;
    y->text_back_q = 10;
}

static void other_order(esa_layout *y) { y->order = ESA_ORDER_TILE; }

static void no_grid(esa_layout *y) { memset(y->grid_q, 0, sizeof y->grid_q); }

/* Sums of other layouts do not go together, also where the layouts move no token differently:
 * neither by merging, nor by resuming before the first call, nor after it. */
static void test_layouts(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini n = mini_make(1, 1, 1, 2); /* memory for more tokens: 240 of the grid and 10 of text */
    n.B = 1;
    n.N = 250;
    n.text = 10;
    const esa_session_params p = mini_params(&n, ESA_SESSION_RECORD);
    mini_record(ctx, &n, &p, 1, 1, scratch_path(&s, "rec"));
    static const struct {
        void (*change)(esa_layout *y);
        const char *word;
    } cases[] = {
        { protects_frame_0, "frame 0 protected" },
        { text_behind, "text 0 + 10" },
        { other_order, "order tile" },
        { no_grid, "3x8x10" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        esa_session_params q = p;
        const char *word = cases[i].word;
        cases[i].change(&q.select.layout);
        esa_session *x;
        ok(ctx, esa_session_create(ctx, &x, &q));
        for (int round = 0; round < 2; round++) { /* before the first call, and after it */
            assert_refused(ctx, esa_session_load_recording(x, scratch_path(&s, "rec")),
                           ESA_ERR_MISMATCH, word, "the session", NULL);
            if (!round) ok(ctx, mini_run(&n, x, NULL));
        }
        ok(ctx, esa_session_save_recording(x, scratch_path(&t, "other")));
        esa_session_free(x);
        char a[640], b[640];
        strcpy(a, scratch_path(&s, "rec"));
        strcpy(b, scratch_path(&t, "other"));
        const char *ab[] = { a, b };
        assert_refused(ctx, esa_recording_merge(ctx, scratch_path(&s, "m"), ab, 2),
                       ESA_ERR_MISMATCH, word, "rec", "other", NULL);
    }
    /* A layout that no file of these tokens can have. */
    esa_session_params q = p;
    q.select.layout.text_front_q = 11;
    esa_session *x;
    ok(ctx, esa_session_create(ctx, &x, &q));
    assert_refused(ctx, esa_session_load_recording(x, scratch_path(&s, "rec")), ESA_ERR_MISMATCH,
                   "text 10 + 0", "text 11 + 0", NULL);
    esa_session_free(x);
    mini_free(&n);
    scratch_remove(&s);
}

/* A call that fails leaves the recorder as it was: other shapes may follow, and there is nothing to
 * save. */
static void test_failed_first_call(void **state)
{
    (void)state;
    if (on_gpu()) skip(); /* it fails by its lengths, which a GPU does not check */
    scratch s = scratch_make();
    mini m = mini_make(1, 2, 1, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    memset(p.select.layout.grid_q, 0, sizeof p.select.layout.grid_q);
    esa_session *x;
    ok(ctx, esa_session_create(ctx, &x, &p));
    ok(ctx, esa_session_begin(x));
    ok(ctx, esa_session_step(x, 0, 0));
    mini_fill(&m, 0, 0, 0);
    const int32_t beyond = 100000;
    const mini_views v = mini_view(&m);
    ok(ctx, esa_session_set_kv_len(x, &beyond));
    assert_refused(ctx, esa_session_attention(x, 0, 0, &v.q, &v.k, &v.v, &v.o, NULL),
                   ESA_ERR_ARGUMENT, "kv_len", NULL);
    assert_refused(ctx, esa_session_save_recording(x, scratch_path(&s, "none")), ESA_ERR_STATE,
                   "nothing", NULL);
    ok(ctx, esa_session_set_kv_len(x, NULL));
    m.N -= 16;
    const mini_views w = mini_view(&m);
    ok(ctx, esa_session_attention(x, 0, 0, &w.q, &w.k, &w.v, &w.o, NULL));
    ok(ctx, esa_session_save_recording(x, scratch_path(&s, "some")));
    esa_session_free(x);
    mini_free(&m);
    scratch_remove(&s);
}

/* Numbers no session can have written are refused before anything is added. */
static void test_hostile_numbers(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(1, 2, 1, 1);
    const esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    mini_record(ctx, &m, &p, 1, 1, scratch_path(&s, "rec"));
    size_t n;
    uint8_t *bytes = scratch_read(scratch_path(&s, "rec"), &n);
    /* A sum of 2^24 + 1 in a cell of one contribution: the sums end the file. */
    const uint32_t more = (UINT32_C(1) << 24) + 1;
    uint8_t kept[4];
    memcpy(kept, bytes + n - 4, 4);
    memcpy(bytes + n - 4, &more, 4);
    scratch_write(scratch_path(&s, "sums"), bytes, n);
    memcpy(bytes + n - 4, kept, 4);
    /* 2147483647 prompts, in a longer header. */
    char *text = (char *)bytes + 8;
    uint64_t header;
    memcpy(&header, bytes, 8);
    const char *key = "\"prompts\":\"1\"", *claim = "\"prompts\":\"2147483647\"";
    size_t at = 0;
    while (at + strlen(key) < header && memcmp(text + at, key, strlen(key)) != 0) at++;
    assert_true(at + strlen(key) < header);
    uint8_t *long_file = malloc(n + 64);
    uint64_t long_header = header + 64; /* 9 more, the rest spaces at the end */
    memcpy(long_file, &long_header, 8);
    memcpy(long_file + 8, text, at);
    memcpy(long_file + 8 + at, claim, strlen(claim));
    memcpy(long_file + 8 + at + strlen(claim), text + at + strlen(key), header - at - strlen(key));
    memset(long_file + 8 + header + 9, ' ', 64 - 9);
    memcpy(long_file + 8 + long_header, text + header, n - 8 - header);
    scratch_write(scratch_path(&s, "prompts"), long_file, n + 64);
    free(long_file);
    free(bytes);

    esa_session *x;
    char a[640], b[640];
    strcpy(a, scratch_path(&s, "rec"));
    strcpy(b, scratch_path(&s, "sums"));
    const char *ab[] = { a, b };
    ok(ctx, esa_session_create(ctx, &x, &p));
    assert_refused(ctx, esa_session_load_recording(x, b), ESA_ERR_FORMAT, "a sum", NULL);
    assert_refused(ctx, esa_recording_merge(ctx, scratch_path(&t, "m"), ab, 2), ESA_ERR_FORMAT,
                   "a sum", "sums", NULL);
    ok(ctx, esa_session_load_recording(x, a));
    assert_refused(ctx, esa_session_load_recording(x, scratch_path(&s, "prompts")), ESA_ERR_FORMAT,
                   "2147483647 prompts", NULL);
    ok(ctx, esa_session_save_recording(x, scratch_path(&t, "same")));
    assert_true(scratch_same(a, scratch_path(&t, "same")));
    esa_session_free(x);
    ok(ctx, esa_session_create(ctx, &x, &p));
    ok(ctx, esa_session_load_recording(x, scratch_path(&s, "prompts")));
    assert_refused(ctx, esa_session_begin(x), ESA_ERR_STATE, "2147483647 prompts", NULL);
    esa_session_free(x);
    mini_free(&m);
    scratch_remove(&s);
}

static void test_left_out(void **state)
{
    (void)state;
    scratch s = scratch_make();
    mini m = mini_make(3, 2, 1, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    const int32_t dense[] = { 2, 2, 0 };
    p.dense_layers = dense;
    p.dense_layer_count = 3;
    mini_record(ctx, &m, &p, 1, 1, scratch_path(&s, "rec"));
    esa_tensors *f;
    esa_tensor_info i = { .struct_size = sizeof i };
    ok(ctx, esa_tensors_open(ctx, &f, scratch_path(&s, "rec")));
    ok(ctx, esa_tensors_find(f, "sums", &i));
    assert_int_equal(i.dim[0], 2); /* layer 1, two steps */
    ok(ctx, esa_tensors_find(f, "dense_layers", &i));
    assert_int_equal(i.dim[0], 2);
    assert_int_equal(((const int32_t *)i.data)[0], 0);
    assert_int_equal(((const int32_t *)i.data)[1], 2);
    esa_tensors_free(f);
    mini_free(&m);
    scratch_remove(&s);
}

/* Recordings of one prompt, of another, and of both. */
typedef struct recorded {
    scratch dir;
    char a[640], b[640], both[640], out[640];
    mini m;
    esa_session_params p;
} recorded;

static recorded recorded_make(void)
{
    recorded r = { .dir = scratch_make(), .m = mini_make(2, 3, 1, 1) };
    strcpy(r.a, scratch_path(&r.dir, "rec"));
    strcpy(r.b, scratch_path(&r.dir, "rec2"));
    strcpy(r.both, scratch_path(&r.dir, "both"));
    strcpy(r.out, scratch_path(&r.dir, "out"));
    r.p = mini_params(&r.m, ESA_SESSION_RECORD);
    mini_record(ctx, &r.m, &r.p, 1, 1, r.a);
    mini_record(ctx, &r.m, &r.p, 2, 1, r.b);
    mini_record(ctx, &r.m, &r.p, 1, 2, r.both);
    return r;
}

static void recorded_free(recorded *r)
{
    mini_free(&r->m);
    scratch_remove(&r->dir);
}

static esa_status load_and_save(const recorded *r, esa_ctx *with, esa_session *x)
{
    (void)with;
    esa_status status = esa_session_load_recording(x, r->a);
    if (status == ESA_OK) status = esa_session_load_recording(x, r->b);
    if (status == ESA_OK) status = esa_session_save_recording(x, r->out);
    return status;
}

static esa_status merge_both(const recorded *r, esa_ctx *with, esa_session *x)
{
    (void)x;
    const char *ab[] = { r->a, r->b };
    return esa_recording_merge(with, r->out, ab, 2);
}

/* Each allocation fails once: the message says so, nothing is leaked, no file is left. */
static void every_allocation_may_fail(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        esa_status (*run)(const recorded *r, esa_ctx *with, esa_session *x);
    } calls[] = { { "load and save", load_and_save }, { "merge", merge_both } };
    recorded r = recorded_make();
    counting c;
    esa_ctx *small = counting_ctx(&c, 2);
    const int64_t base = c.live;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        int64_t points = 0;
        for (int32_t done = 0; !done; points++) {
            esa_session *x;
            ok(small, esa_session_create(small, &x, &r.p));
            c.left = points;
            const esa_status status = calls[i].run(&r, small, x);
            done = c.left >= 0;
            c.left = -1;
            if (done)
                ok(small, status);
            else {
                assert_refused(small, status, ESA_ERR_MEMORY, "out of memory", NULL);
                assert_int_equal(scratch_count(&r.dir), 3);
            }
            esa_session_free(x);
            esa_ctx_trim(small);
            assert_int_equal(c.live, base);
        }
        assert_true(scratch_same(r.both, r.out));
        assert_int_equal(unlink(r.out), 0);
        print_message("%s: %lld allocations failed once each\n", calls[i].name,
                      (long long)points - 1);
    }
    esa_ctx_free(small);
    recorded_free(&r);
}

/* A full disk while saving: the old file stays. */
static void a_full_disk_keeps_the_old_file(void **state)
{
    (void)state;
    recorded r = recorded_make();
    const char *ab[] = { r.a, r.b };
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit old, limit;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    limit = old;
    limit.rlim_cur = 4000;
    esa_session *x;
    ok(ctx, esa_session_create(ctx, &x, &r.p));
    ok(ctx, esa_session_load_recording(x, r.a));
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    const esa_status full = esa_session_save_recording(x, r.b),
                     merged = esa_recording_merge(ctx, r.b, ab, 2);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(full, ESA_ERR_IO);
    assert_refused(ctx, merged, ESA_ERR_IO, "rec2", NULL);
    esa_session_free(x);
    assert_int_equal(scratch_count(&r.dir), 3);
    ok(ctx, esa_recording_merge(ctx, r.out, ab, 2));
    assert_true(scratch_same(r.both, r.out));
    recorded_free(&r);
}

static void nothing_to_merge(void **state)
{
    (void)state;
    const char *one[] = { "x" };
    assert_refused(ctx, esa_recording_merge(ctx, "x", NULL, 1), ESA_ERR_ARGUMENT, "no recordings",
                   NULL);
    assert_refused(ctx, esa_recording_merge(ctx, "x", one, 0), ESA_ERR_ARGUMENT, "no recordings",
                   NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_order_and_shards),
                                        cmocka_unit_test(test_other_steps),
                                        cmocka_unit_test(test_batch),
                                        cmocka_unit_test(test_limit),
                                        cmocka_unit_test(other_settings),
                                        cmocka_unit_test(other_tokens),
                                        cmocka_unit_test(test_left_out),
                                        cmocka_unit_test(every_allocation_may_fail),
                                        cmocka_unit_test(a_full_disk_keeps_the_old_file),
                                        cmocka_unit_test(nothing_to_merge),
                                        cmocka_unit_test(test_layouts),
                                        cmocka_unit_test(test_failed_first_call),
                                        cmocka_unit_test(test_hostile_numbers) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
