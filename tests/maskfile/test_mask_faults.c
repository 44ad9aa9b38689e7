/* test_mask_faults.c - mask files that do not fit, are damaged, or cannot be written: a sentence,
 * and nothing lost or left behind.
 * SPDX-License-Identifier: Apache-2.0 */
#include "maskfile/mask_file_test.h"
#include <signal.h>
#include <sys/resource.h>

static void test_mismatches(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(3, 6, 2, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    p.record_per_branch = 1;
    record(&m, &p, scratch_path(&s, "rec"));
    const char *rec[] = { scratch_path(&s, "rec") };
    esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 1);
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "m"), rec, 1, &b));
    esa_mask_file *f = open_file(scratch_path(&t, "m"));
    esa_session *x;
#define REFUSED(change, ...)                                                                       \
    do {                                                                                           \
        p = mini_params(&m, ESA_SESSION_CACHED);                                                   \
        p.masks = f;                                                                               \
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
    /* Names that one side does not give are not compared. */
    p = mini_params(&m, ESA_SESSION_CACHED);
    p.masks = f;
    p.model = p.config_hash = NULL;
    memset(p.select.layout.grid_q, 0, sizeof p.select.layout.grid_q);
    ok(ctx, esa_session_create(ctx, &x, &p));
    m.N = 224;
    assert_refused(ctx, mini_run(&m, x, NULL), ESA_ERR_MISMATCH, "N=240 (grid 3x8x10)", "N=224",
                   "3 heads", NULL);
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
    assert_refused(ctx, esa_mask_file_get(f, &mask, 0, 4, 0, 0.5), ESA_ERR_STATE, "layer 0",
                   "dense layer", NULL);
    assert_refused(ctx, esa_mask_file_get(f, &mask, 1, 1, 0, 0.5), ESA_ERR_STATE, "step 1",
                   "warm-up", NULL);
    assert_refused(ctx, esa_mask_file_get(f, &mask, 3, 4, 0, 0.5), ESA_ERR_ARGUMENT, "layer 3",
                   "3 layers", NULL);
    assert_refused(ctx, esa_mask_file_get(f, &mask, 1, 6, 0, 0.5), ESA_ERR_ARGUMENT, "step 6",
                   NULL);
    assert_refused(ctx, esa_mask_file_get(f, &mask, 1, 4, 2, 0.5), ESA_ERR_ARGUMENT, "branch 2",
                   NULL);
    assert_null(mask);
    assert_refused(ctx, esa_mask_file_importance(f, NULL, 1, 4, 0), ESA_ERR_ARGUMENT, "NULL", NULL);
    assert_int_equal(esa_mask_file_stored(f, 1, 4), 1);
    assert_int_equal(esa_mask_file_stored(f, 0, 4), 0);
    assert_int_equal(esa_mask_file_stored(f, 1, -1), 0);
    assert_int_equal(esa_mask_file_stored(NULL, 1, 1), 0);

    /* Files of another kind. */
    esa_mask_file *g;
    assert_refused(ctx, esa_mask_file_open(ctx, &g, rec[0]), ESA_ERR_FORMAT, "is a recording",
                   "expected a mask file", NULL);
    assert_refused(ctx,
                   esa_recording_merge(ctx, "x", (const char *const[]){ scratch_path(&t, "m") }, 1),
                   ESA_ERR_FORMAT, "is a mask file", "recording", NULL);
    esa_tensors_writer *w;
    ok(ctx, esa_tensors_writer_create(ctx, &w, scratch_path(&t, "plain")));
    ok(ctx, esa_tensors_writer_finish(w));
    esa_tensors_writer_free(w);
    assert_refused(ctx, esa_mask_file_open(ctx, &g, scratch_path(&t, "plain")), ESA_ERR_FORMAT,
                   "not a mask file", NULL);
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
    assert_refused(ctx, esa_mask_file_build(ctx, scratch_path(&t, "m"), rec, 1, &b), ESA_ERR_STATE,
                   "layer 1, step group 2", "never recorded", NULL);
    assert_int_equal(scratch_count(&s), 1);
    mini_free(&m);
    scratch_remove(&s);
}

/* Every byte of the header of a real file changed: refused or harmless; the sentence is never
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
    const char *rec[] = { in };
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
    static const char *const names[] = { "build",          "open+require+get",
                                         "derive",         "derive f16",
                                         "export",         "import",
                                         "cached session", "save" };
    for (int what = 0; what < 8; what++) {
        int64_t points = 0;
        for (;; points++) {
            esa_mask_file *f = NULL;
            esa_mask *mask = NULL;
            esa_session *x = NULL;
            const char *out = scratch_path(&t, "out");
            if (what == 2 || what == 3 || what == 4 || what == 6)
                ok(small, esa_mask_file_open(small, &f, what == 3 ? f16 : ready));
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
            case 2:
            case 3: status = esa_mask_file_derive(small, out, f, &b); break;
            case 4: status = esa_mask_file_export_fa4(small, out, f, 0.6); break;
            case 5: status = esa_mask_file_import_fa4(small, out, fa4, NULL, "mini"); break;
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
            } else
                ok(small, status);
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
    const rlim_t limits[] = { 0, 100, n / 2, n - 1500, n - 700, n - 100, n - 1 };
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

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_mismatches),
                                        cmocka_unit_test(test_build_refusals),
                                        cmocka_unit_test(test_corruption),
                                        cmocka_unit_test(test_failures) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
