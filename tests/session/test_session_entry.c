/* test_session_entry.c - a call takes the guard once and checks each view once, in every mode of a
 * session and in the other public calls. Also how the guard is lent, and sizes of scratch.
 * SPDX-License-Identifier: Apache-2.0 */
#include "attn/attn.h"
#include "maskfile/mask_file_test.h"

typedef struct entries {
    int64_t guard, views;
} entries;

static entries now(void) { return (entries){ ctx->entries, ctx->views_checked }; }

static void expect(const char *what, entries before, int64_t guard, int64_t views)
{
    const entries after = now();
    print_message("%s: guard %lld, views %lld\n", what, (long long)(after.guard - before.guard),
                  (long long)(after.views - before.views));
    assert_int_equal(after.guard - before.guard, guard);
    assert_int_equal(after.views - before.views, views);
}

/* Calls layer 1 twice: the first call makes the plan, the second is what a model does thousands of
 * times. */
static void one_call(const mini *m, esa_session *s, const char *what)
{
    const mini_views t = mini_view(m);
    ok(ctx, esa_session_begin(s));
    ok(ctx, esa_session_step(s, m->steps - 1, 0));
    mini_fill(m, 1, m->steps - 1, 0);
    ok(ctx, esa_session_attention(s, 1, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, NULL));
    const entries before = now();
    ok(ctx, esa_session_attention(s, 1, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, NULL));
    expect(what, before, 1, 4); /* q, k, v and o */
}

static void test_modes(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int32_t mode, selector, refresh;
    } modes[] = {
        { "dense", ESA_SESSION_DENSE, ESA_SELECT_ENTROPY, 1 },
        { "online entropy", ESA_SESSION_ONLINE, ESA_SELECT_ENTROPY, 1 },
        { "online rf_v2", ESA_SESSION_ONLINE, ESA_SELECT_RF_V2, 1 },
        { "online ada_bsa", ESA_SESSION_ONLINE, ESA_SELECT_ADA_BSA, 1 },
        { "online, refreshed every 2 steps", ESA_SESSION_ONLINE, ESA_SELECT_ENTROPY, 2 },
        { "record", ESA_SESSION_RECORD, ESA_SELECT_ENTROPY, 1 },
    };
    mini m = mini_make(3, 5, 1, 1);
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        esa_session_params p = mini_params(&m, modes[i].mode);
        p.select.selector = modes[i].selector;
        p.refresh_every = modes[i].refresh;
        esa_session *s;
        ok(ctx, esa_session_create(ctx, &s, &p));
        one_call(&m, s, modes[i].name);
        esa_session_free(s);
    }
    mini_free(&m);
}

static void test_cached(void **state)
{
    (void)state;
    scratch s = scratch_make(), t = s;
    mini m = mini_make(3, 5, 1, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_RECORD);
    record(&m, &p, scratch_path(&s, "rec"));
    const char *rec[] = { scratch_path(&s, "rec") };
    const esa_mask_build b = build_of(ESA_IMPORTANCE_U8, 1);
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&t, "masks"), rec, 1, &b));
    esa_mask_file *f = open_file(scratch_path(&t, "masks"));
    p = mini_params(&m, ESA_SESSION_CACHED);
    p.masks = f;
    esa_session *session;
    ok(ctx, esa_session_create(ctx, &session, &p));
    one_call(&m, session, "cached");
    esa_session_free(session);
    esa_mask_file_free(f);
    mini_free(&m);
    scratch_remove(&s);
}

/* The other doors, too. */
static void test_doors(void **state)
{
    (void)state;
    mini m = mini_make(3, 5, 1, 1);
    const mini_views t = mini_view(&m);
    mini_fill(&m, 0, 0, 0);
    const esa_select_params p = mini_params(&m, ESA_SESSION_ONLINE).select;
    esa_mask *mask;
    entries before = now();
    ok(ctx, esa_select(ctx, &mask, &t.q, &t.k, &p));
    expect("esa_select", before, 1, 2);
    before = now();
    ok(ctx, esa_attention(ctx, &t.q, &t.k, &t.v, &t.o, mask, NULL));
    expect("esa_attention", before, 1, 4);
    esa_mask_free(mask);
    mini_free(&m);
}

/* A call that the ctx was lent to may lend it again. Each take_back ends only its own loan. */
static void test_lending(void **state)
{
    (void)state;
    ok(ctx, esa_ctx_enter(ctx));
    assert_int_equal(esa_ctx_enter(ctx), ESA_ERR_STATE);
    esa_ctx_lend(ctx);
    ok(ctx, esa_ctx_enter(ctx)); /* a call of the outer callback */
    esa_ctx_lend(ctx);
    ok(ctx, esa_ctx_enter(ctx)); /* a call of the inner callback */
    assert_int_equal(esa_ctx_enter(ctx), ESA_ERR_STATE);
    esa_ctx_leave(ctx);
    esa_ctx_take_back(ctx);
    assert_int_equal(esa_ctx_enter(ctx), ESA_ERR_STATE);
    esa_ctx_leave(ctx);
    esa_ctx_take_back(ctx);
    assert_int_equal(esa_ctx_enter(ctx), ESA_ERR_STATE);
    esa_ctx_leave(ctx);
    ok(ctx, esa_ctx_enter(ctx));
    esa_ctx_leave(ctx);
}

/* A size that has overflowed is refused, also while the ctx holds some scratch. */
static void test_scratch_sizes(void **state)
{
    (void)state;
    void *memory;
    ok(ctx, esa_ctx_scratch(ctx, &memory, 100));
    assert_refused(ctx, esa_ctx_scratch(ctx, &memory, esa_size_mul(INT64_MAX, 8)), ESA_ERR_MEMORY,
                   "out of memory", NULL);
    assert_refused(ctx, esa_ctx_scratch(ctx, &memory, INT64_MAX), ESA_ERR_MEMORY, "out of memory",
                   NULL);
    ok(ctx, esa_ctx_scratch(ctx, &memory, 100));
    assert_non_null(memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_modes),         cmocka_unit_test(test_cached),
        cmocka_unit_test(test_doors),         cmocka_unit_test(test_lending),
        cmocka_unit_test(test_scratch_sizes),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
