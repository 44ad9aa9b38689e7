/* test_mask_faults.c - mask files that do not fit, are damaged, or cannot be written: a message,
 * and nothing lost or left behind.
 * SPDX-License-Identifier: Apache-2.0 */
#include "maskfile/mask_file_test.h"
#include <signal.h>
#include <sys/resource.h>

/* A mask file of a mini model with two branches. */
typedef struct filed {
    scratch dir;
    char rec[640], file[640];
    mini m;
    esa_mask_file *f;
} filed;

static filed filed_make(void)
{
    filed w = { .dir = scratch_make(), .m = mini_make(3, 6, 2, 1) };
    strcpy(w.rec, scratch_path(&w.dir, "rec"));
    strcpy(w.file, scratch_path(&w.dir, "m"));
    esa_session_params p = mini_params(&w.m, ESA_SESSION_RECORD);
    p.record_per_branch = 1;
    record(&w.m, &p, w.rec);
    const char *rec[] = { w.rec };
    const esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 1);
    ok(ctx, esa_mask_file_build(ctx, w.file, rec, 1, &b));
    w.f = open_file(w.file);
    return w;
}

static void filed_free(filed *w)
{
    esa_mask_file_free(w->f);
    mini_free(&w->m);
    scratch_remove(&w->dir);
}

/* A session that is not the file's: the message names both sides. */
static void other_sessions(void **state)
{
    (void)state;
    filed w = filed_make();
    esa_session_params p;
    esa_session *x;
#define REFUSED(change, ...)                                                                       \
    do {                                                                                           \
        p = mini_params(&w.m, ESA_SESSION_CACHED);                                                 \
        p.masks = w.f;                                                                             \
        p.select.budget = 0.5;                                                                     \
        change;                                                                                    \
        assert_refused(ctx, esa_session_create(ctx, &x, &p), ESA_ERR_MISMATCH, __VA_ARGS__, NULL); \
        assert_null(x);                                                                            \
    } while (0)
    REFUSED(p.model = "other", "'mini'", "'other'");
    REFUSED(p.config_hash = "1234", "'00ff'", "'1234'");
    REFUSED(p.layers = 30, "N=240", "3x8x10", "3 layers", "30 layers");
    REFUSED(p.steps = 50, "6 steps", "50");
    REFUSED(p.branches = 3, "2 branches", "3");
    REFUSED(p.select.layout.grid_q[2] = 13, "N=240 (grid 3x8x10)", "3x8x13");
#undef REFUSED
    filed_free(&w);
}

/* Names that one side does not give are not compared, but its calls are. */
static void other_calls(void **state)
{
    (void)state;
    filed w = filed_make();
    esa_session *x;
    esa_session_params p = mini_params(&w.m, ESA_SESSION_CACHED);
    p.masks = w.f;
    p.model = p.config_hash = NULL;
    memset(p.select.layout.grid_q, 0, sizeof p.select.layout.grid_q);
    ok(ctx, esa_session_create(ctx, &x, &p));
    w.m.N = 224;
    assert_refused(ctx, mini_run(&w.m, x, NULL), ESA_ERR_MISMATCH, "N=240 (grid 3x8x10)", "N=224",
                   "3 heads", NULL);
    w.m.N = 240;
    w.m.H = 2;
    assert_refused(ctx, mini_run(&w.m, x, NULL), ESA_ERR_MISMATCH, "3 heads", "2 heads", NULL);
    w.m.H = 3;
    ok(ctx, mini_run(&w.m, x, NULL));
    esa_session_free(x);

    esa_ctx *other;
    ok(ctx, esa_ctx_create(&other, NULL));
    assert_refused(other, esa_session_create(other, &x, &p), ESA_ERR_ARGUMENT, "another ctx", NULL);
    esa_ctx_free(other);
    filed_free(&w);
}

static void missing_cells(void **state)
{
    (void)state;
    filed w = filed_make();
    esa_mask_file *f = w.f;
    esa_mask *mask;
    assert_refused(ctx, esa_mask_file_get(f, &mask, 0, 4, 0, 0.5), ESA_ERR_STATE, "layer 0",
                   "dense layer", NULL);
    assert_refused(ctx, esa_mask_file_get(f, &mask, 1, 1, 0, 0.5), ESA_ERR_STATE, "step 1",
                   "warm-up", NULL);
    assert_refused(ctx, esa_mask_file_get(f, &mask, 3, 4, 0, 0.5), ESA_ERR_ARGUMENT,
                   "layer is 3, step is 4 and branch is 0", "3 layers", NULL);
    assert_refused(ctx, esa_mask_file_get(f, &mask, 1, 6, 0, 0.5), ESA_ERR_ARGUMENT,
                   "layer is 1, step is 6 and branch is 0", NULL);
    assert_refused(ctx, esa_mask_file_get(f, &mask, 1, 4, 2, 0.5), ESA_ERR_ARGUMENT,
                   "layer is 1, step is 4 and branch is 2", NULL);
    assert_null(mask);
    assert_refused(ctx, esa_mask_file_importance(f, NULL, 1, 4, 0), ESA_ERR_ARGUMENT, "NULL", NULL);
    assert_int_equal(esa_mask_file_stored(f, 1, 4), 1);
    assert_int_equal(esa_mask_file_stored(f, 0, 4), 0);
    assert_int_equal(esa_mask_file_stored(f, 1, -1), 0);
    assert_int_equal(esa_mask_file_stored(NULL, 1, 1), 0);
    filed_free(&w);
}

static void files_of_another_kind(void **state)
{
    (void)state;
    filed w = filed_make();
    esa_mask_file *g;
    assert_refused(ctx, esa_mask_file_open(ctx, &g, w.rec), ESA_ERR_FORMAT, "is a recording",
                   "expected a mask file", NULL);
    const char *masks[] = { w.file };
    assert_refused(ctx, esa_recording_merge(ctx, "x", masks, 1), ESA_ERR_FORMAT, "is a mask file",
                   "recording", NULL);
    esa_tensors_writer *writer;
    ok(ctx, esa_tensors_writer_create(ctx, &writer, scratch_path(&w.dir, "plain")));
    ok(ctx, esa_tensors_writer_finish(writer));
    esa_tensors_writer_free(writer);
    assert_refused(ctx, esa_mask_file_open(ctx, &g, scratch_path(&w.dir, "plain")), ESA_ERR_FORMAT,
                   "not a mask file", NULL);
    assert_null(g);
    esa_mask_file_free(NULL);
    filed_free(&w);
}

static void test_build_refusals(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(2, 3, 1, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    record(&m, &p, scratch_path(&s, "rec"));
    const char *rec[] = { scratch_path(&s, "rec") };
#define REFUSED(change, status, word)                                                              \
    do {                                                                                           \
        esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 2);                                         \
        change;                                                                                    \
        assert_refused(ctx, esa_mask_file_build(ctx, scratch_path(&t, "m"), rec, 1, &b), status,   \
                       word, NULL);                                                                \
        assert_int_equal(scratch_count(&s), 1);                                                    \
    } while (0)
    const double twice[] = { 0.5, 0.5003 }, wrong[] = { 0.5, -0.1 };
    REFUSED(b.struct_size = 1, ESA_ERR_VERSION, "struct_size");
    REFUSED(b.importance = 3, ESA_ERR_ARGUMENT, "importance is 3");
    REFUSED(b.budget_count = 17, ESA_ERR_ARGUMENT, "budget_count is 17, expected 0 to 16");
    REFUSED((b.importance = 0, b.budget_count = 0), ESA_ERR_ARGUMENT, "would be empty");
    REFUSED(b.budgets = twice, ESA_ERR_ARGUMENT, "twice");
    REFUSED(b.budgets = wrong, ESA_ERR_ARGUMENT, "-0.1");
    REFUSED(b.budgets = NULL, ESA_ERR_ARGUMENT, "budget_count is 2, but budgets is NULL");
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
    assert_refused(ctx, esa_mask_file_build(ctx, scratch_path(&t, "m"), rec, 1, &b), ESA_ERR_STATE,
                   "layer 1, step group 2", "never recorded", NULL);
    assert_int_equal(scratch_count(&s), 1);
    mini_free(&m);
    scratch_remove(&s);
}

/* Every byte of the header of a real file changed: refused or harmless; the message is never
 * empty. */
static void test_corruption(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(2, 3, 2, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    p.record_per_branch = 1;
    record(&m, &p, scratch_path(&s, "rec"));
    const char *rec[] = { scratch_path(&s, "rec") };
    esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 1);
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "m"), rec, 1, &b));
    size_t n;
    uint8_t *bytes = scratch_read(scratch_path(&t, "m"), &n);
    uint64_t length;
    memcpy(&length, bytes, 8);
    esa_rng r = { 1 };
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
                if (esa_mask_file_get(f, &mask, info.layers - 1, info.steps - 1, 0, 0.5) == ESA_OK)
                    esa_mask_free(mask);
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

/* What the calls below work on: files of a mini model, and objects they may make. */
typedef struct faulty {
    scratch dir;
    char rec[640], ready[640], f16[640], fa4[640], out[640];
    mini m;
    esa_mask_build build;
    esa_ctx *ctx; /* the one whose allocations fail */
    esa_mask_file *f;
    esa_mask *mask;
    esa_session *session;
} faulty;

static faulty faulty_make(void)
{
    faulty w = { .dir = scratch_make(), .m = mini_make(2, 3, 1, 1) };
    strcpy(w.rec, scratch_path(&w.dir, "rec"));
    strcpy(w.ready, scratch_path(&w.dir, "ready"));
    strcpy(w.f16, scratch_path(&w.dir, "f16"));
    strcpy(w.fa4, scratch_path(&w.dir, "fa4"));
    strcpy(w.out, scratch_path(&w.dir, "out"));
    esa_session_params p = mini_params(&w.m, ESA_SESSION_RECORD);
    record(&w.m, &p, w.rec);
    const char *rec[] = { w.rec };
    w.build = build_of(ESA_IMPORTANCE_F16, 2);
    ok(ctx, esa_mask_file_build(ctx, w.f16, rec, 1, &w.build));
    w.build.importance = ESA_IMPORTANCE_U8;
    ok(ctx, esa_mask_file_build(ctx, w.ready, rec, 1, &w.build));
    esa_mask_file *source = open_file(w.ready);
    ok(ctx, esa_mask_file_export_fa4(ctx, w.fa4, source, 0.5));
    esa_mask_file_free(source);
    return w;
}

static void faulty_free(faulty *w)
{
    mini_free(&w->m);
    scratch_remove(&w->dir);
}

static void open_ready(faulty *w) { ok(w->ctx, esa_mask_file_open(w->ctx, &w->f, w->ready)); }

static void open_f16(faulty *w) { ok(w->ctx, esa_mask_file_open(w->ctx, &w->f, w->f16)); }

static void get_mask(faulty *w)
{
    open_ready(w);
    ok(w->ctx, esa_mask_file_get(w->f, &w->mask, 1, 2, 0, 0.5));
}

static esa_status run_build(faulty *w)
{
    const char *rec[] = { w->rec };
    return esa_mask_file_build(w->ctx, w->out, rec, 1, &w->build);
}

static esa_status run_get(faulty *w)
{
    esa_status status = esa_mask_file_open(w->ctx, &w->f, w->ready);
    if (status == ESA_OK) status = esa_mask_file_require(w->f, 0.123);
    if (status == ESA_OK) status = esa_mask_file_get(w->f, &w->mask, 1, 2, 0, 0.123);
    return status;
}

static esa_status run_derive(faulty *w)
{
    return esa_mask_file_derive(w->ctx, w->out, w->f, &w->build);
}

static esa_status run_export(faulty *w)
{
    return esa_mask_file_export_fa4(w->ctx, w->out, w->f, 0.6);
}

static esa_status run_import(faulty *w)
{
    return esa_mask_file_import_fa4(w->ctx, w->out, w->fa4, NULL, "mini");
}

static esa_status run_cached(faulty *w)
{
    esa_session_params p = mini_params(&w->m, ESA_SESSION_CACHED);
    p.masks = w->f;
    p.select.budget = 0.31;
    const esa_status status = esa_session_create(w->ctx, &w->session, &p);
    return status == ESA_OK ? mini_run(&w->m, w->session, NULL) : status;
}

static esa_status run_save(faulty *w) { return esa_mask_file_save(w->ctx, w->out, w->mask); }

/* Each call with its first allocation failing, then the second, until it succeeds: the message says
 * so, nothing is leaked, no file is left. */
static void every_allocation_may_fail(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        void (*prepare)(faulty *w); /* with all the memory there is; may be NULL */
        esa_status (*run)(faulty *w);
        int32_t writes; /* 1: a file */
    } calls[] = {
        { "build", NULL, run_build, 1 },
        { "open, require, get", NULL, run_get, 0 },
        { "derive", open_ready, run_derive, 1 },
        { "derive from f16", open_f16, run_derive, 1 },
        { "export", open_ready, run_export, 1 },
        { "import", NULL, run_import, 1 },
        { "cached session", open_ready, run_cached, 0 },
        { "save", get_mask, run_save, 1 },
    };
    faulty w = faulty_make();
    counting c;
    w.ctx = counting_ctx(&c, 2);
    const int64_t base = c.live;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        int64_t points = 0;
        for (int32_t done = 0; !done; points++) {
            w.f = NULL;
            w.mask = NULL;
            w.session = NULL;
            if (calls[i].prepare) calls[i].prepare(&w);
            c.left = points;
            const esa_status status = calls[i].run(&w);
            done = c.left >= 0;
            c.left = -1;
            if (done)
                ok(w.ctx, status);
            else {
                assert_refused(w.ctx, status, ESA_ERR_MEMORY, "out of memory", NULL);
                assert_int_equal(scratch_count(&w.dir), 4);
            }
            esa_session_free(w.session);
            esa_mask_free(w.mask);
            esa_mask_file_free(w.f);
            esa_ctx_trim(w.ctx);
            assert_int_equal(c.live, base);
        }
        if (calls[i].writes) assert_int_equal(unlink(w.out), 0);
        print_message("%s: %lld allocations failed once each\n", calls[i].name,
                      (long long)points - 1);
    }
    esa_ctx_free(w.ctx);
    assert_int_equal(c.live, 0);
    faulty_free(&w);
}

/* A full disk at several points of a build: the old file stays, nothing else. */
static void a_full_disk_keeps_the_old_file(void **state)
{
    (void)state;
    faulty w = faulty_make();
    w.ctx = ctx;
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit old, limit;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    scratch_write(w.out, "old", 3);
    size_t n;
    free(scratch_read(w.ready, &n));
    const rlim_t limits[] = { 0, 100, n / 2, n - 1500, n - 700, n - 100, n - 1 };
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        limit = old;
        limit.rlim_cur = limits[i];
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        const esa_status status = run_build(&w);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
        assert_refused(ctx, status, ESA_ERR_IO, "cannot be written", NULL);
        assert_int_equal(scratch_count(&w.dir), 5);
    }
    uint8_t *was = scratch_read(w.out, &n);
    assert_int_equal(n, 3);
    free(was);
    faulty_free(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(other_sessions),
                                        cmocka_unit_test(other_calls),
                                        cmocka_unit_test(missing_cells),
                                        cmocka_unit_test(files_of_another_kind),
                                        cmocka_unit_test(test_build_refusals),
                                        cmocka_unit_test(test_corruption),
                                        cmocka_unit_test(every_allocation_may_fail),
                                        cmocka_unit_test(a_full_disk_keeps_the_old_file) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
