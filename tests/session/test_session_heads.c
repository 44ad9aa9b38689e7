/* test_session_heads.c - sequence parallelism: sessions that see some of the heads use their part
 * of a mask file.
 * SPDX-License-Identifier: Apache-2.0 */
#include "maskfile/mask_file_test.h"

/* One video as two workers would run it: heads [0, split) and [split, H), each with a session of
 * its own. The views are the same memory, so the hash over all outputs must be that of one session
 * with all heads. */
static uint64_t run_split(const mini *m, esa_session *const part[2], int64_t split)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    const mini_views t = mini_view(m);
    for (int i = 0; i < 2; i++) ok(ctx, esa_session_begin(part[i]));
    for (int32_t step = 0; step < m->steps; step++)
        for (int32_t branch = 0; branch < m->branches; branch++) {
            for (int i = 0; i < 2; i++) ok(ctx, esa_session_step(part[i], step, branch));
            for (int32_t layer = 0; layer < m->layers; layer++) {
                mini_fill(m, layer, step, branch);
                for (int i = 0; i < 2; i++) {
                    mini_views p = t;
                    esa_tensor *const view[] = { &p.q, &p.k, &p.v, &p.o };
                    for (int j = 0; j < 4; j++) {
                        view[j]->dim[1] = i ? m->H - split : split;
                        if (i) view[j]->data = (float *)view[j]->data + split * view[j]->stride[1];
                    }
                    ok(ctx, esa_session_attention(part[i], layer, ESA_CALL_SELF, &p.q, &p.k, &p.v,
                                                  &p.o, NULL));
                }
                h = mini_hash(h, m->o, mini_size(m) * 4);
            }
        }
    return h;
}

static esa_session_stats stats_of(const esa_session *s)
{
    esa_session_stats t = { .struct_size = sizeof t };
    assert_int_equal(esa_session_get_stats(s, &t, -1, -1), ESA_OK);
    return t;
}

static void test_cached_parts(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(3, 4, 2, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    record(&m, &p, scratch_path(&s, "rec"));
    const char *rec[] = { scratch_path(&s, "rec") };
    const esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 1);
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "masks"), rec, 1, &b));
    esa_mask_file *f = open_file(scratch_path(&t, "masks"));
    m.prompt = 77;
    p = mini_params(&m, ESA_SESSION_CACHED);
    p.masks = f;
    p.select.budget = 0.5;
    esa_session *whole, *part[2];
    ok(ctx, esa_session_create(ctx, &whole, &p));
    uint64_t expected;
    ok(ctx, mini_run(&m, whole, &expected));
    for (int64_t split = 1; split < m.H; split++) {
        p.total_heads = (int32_t)m.H;
        for (int i = 0; i < 2; i++) {
            p.first_head = i ? (int32_t)split : 0;
            ok(ctx, esa_session_create(ctx, &part[i], &p));
        }
        assert_true(run_split(&m, part, split) == expected);
        const esa_session_stats all = stats_of(whole), one = stats_of(part[0]),
                                two = stats_of(part[1]);
        assert_int_equal(one.sparse_calls, all.sparse_calls);
        assert_int_equal(two.masks_loaded, all.masks_loaded);
        const double first = (double)split / (double)m.H;
        /* heads weigh alike */
        assert_float_equal(one.density * first + two.density * (1 - first), all.density, 1e-12);
        /* masses are stored in f32 */
        assert_float_equal(one.mass * first + two.mass * (1 - first), all.mass, 1e-6);
        assert_true(one.density != two.density); /* heads differ in entropy */
        for (int i = 0; i < 2; i++) esa_session_free(part[i]);
    }
    esa_session_free(whole);
    esa_mask_file_free(f);
    mini_free(&m);
    scratch_remove(&s);
}

static void refuse(const esa_session_params *p, esa_status status, const char *word)
{
    esa_session *s;
    assert_int_equal(esa_session_create(ctx, &s, p), status);
    assert_null(s);
    if (!strstr(esa_ctx_error(ctx), word))
        fail_msg("'%s' does not say '%s'", esa_ctx_error(ctx), word);
}

static void test_refusals(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(2, 2, 1, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    p.total_heads = 3;
    refuse(&p, ESA_ERR_UNSUPPORTED, "all heads");
    p.mode = ESA_SESSION_ONLINE;
    p.first_head = 3;
    refuse(&p, ESA_ERR_ARGUMENT, "first_head is 3 and total_heads is 3");
    p.first_head = -1;
    refuse(&p, ESA_ERR_ARGUMENT, "first_head is -1");
    p.first_head = 1;
    p.total_heads = 0;
    refuse(&p, ESA_ERR_ARGUMENT, "first_head is 1 and total_heads is 0");
    p = mini_params(&m, ESA_SESSION_RECORD);
    record(&m, &p, scratch_path(&s, "rec"));
    const char *rec[] = { scratch_path(&s, "rec") };
    const esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 1);
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "masks"), rec, 1, &b));
    esa_mask_file *f = open_file(scratch_path(&t, "masks"));
    p = mini_params(&m, ESA_SESSION_CACHED);
    p.masks = f;
    p.total_heads = 4;
    refuse(&p, ESA_ERR_MISMATCH, "made for 3 heads, but the session has 4");
    /* More heads in the call than are left behind first_head. */
    p.total_heads = 3;
    p.first_head = 1;
    esa_session *x;
    ok(ctx, esa_session_create(ctx, &x, &p));
    assert_int_equal(mini_run(&m, x, NULL), ESA_ERR_MISMATCH);
    esa_session_free(x);
    esa_mask_file_free(f);
    mini_free(&m);
    scratch_remove(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_cached_parts),
                                        cmocka_unit_test(test_refusals) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
