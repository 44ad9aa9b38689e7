/* test_session_policy.c - what a session runs dense, sparse or not at all, and that it computes
 * what the plain calls compute.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/mini_model.h"
#include <math.h>
#include "common/on_gpu.h"
#include "common/one_ctx.h"
#include "maskfile/run_info.h"

static void test_warmup(void **state)
{
    (void)state;
    const struct {
        double frac;
        int32_t steps, expected;
    } table[] = { { 0.2, 50, 10 },  { 0.2, 4, 1 },  { 0.2, 5, 1 },     { 0.2, 6, 2 },
                  { 0.2, 1, 1 },    { 0, 50, 0 },   { 1, 50, 50 },     { 0.1, 30, 3 },
                  { 0.3, 10, 3 },   { 0.7, 10, 7 }, { 1.0 / 3, 3, 1 }, { 2.0 / 3, 3, 2 },
                  { 0.21, 50, 11 }, { 0.2, 28, 6 }, { 1e-10, 50, 1 },  { 1e-12, 50, 0 } };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        assert_int_equal(esa_warmup_steps(table[i].frac, table[i].steps), table[i].expected);
}

static void test_policy_table(void **state)
{
    (void)state;
    mini m = mini_make(4, 6, 2, 1);
    static const int32_t two[] = { 2, 2 };
    /* warm: dense steps, ceil(warmup_frac * 6); everything: 1 if no call runs sparse */
    const struct {
        int32_t mode, first, warm;
        double warmup_frac;
        int32_t dense_layers;
        int64_t min_tokens;
        int32_t everything;
    } cases[] = {
        { ESA_SESSION_ONLINE, 1, 2, 0.2, 0, 0, 0 },       /* the defaults */
        { ESA_SESSION_ONLINE, 0, 2, 0.2, 0, 0, 0 },       /* layer 0 too */
        { ESA_SESSION_ONLINE, 1, 0, 0.0, 0, 0, 0 },       /* no warm-up */
        { ESA_SESSION_ONLINE, 1, 2, 0.2, 2, 0, 0 },       /* layer 2 dense, listed twice */
        { ESA_SESSION_ONLINE, 1, 2, 0.2, 0, m.N + 1, 1 }, /* too few tokens */
        { ESA_SESSION_DENSE, 1, 2, 0.2, 0, 0, 1 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        esa_session_params p = mini_params(&m, cases[i].mode);
        p.dense_first_layer = cases[i].first;
        p.warmup_frac = cases[i].warmup_frac;
        p.dense_layers = two;
        p.dense_layer_count = cases[i].dense_layers;
        p.min_tokens = cases[i].min_tokens;
        esa_session *s;
        ok(ctx, esa_session_create(ctx, &s, &p));
        ok(ctx, mini_run(&m, s, NULL));
        int64_t sparse = 0;
        for (int32_t l = 0; l < 4; l++)
            for (int32_t t = 0; t < 6; t++) {
                const esa_session_stats c = mini_stats(s, l, t);
                const int is_dense = t < cases[i].warm || (l == 0 && cases[i].first) ||
                                     (l == 2 && cases[i].dense_layers) || cases[i].everything;
                assert_int_equal(c.calls, 2);
                assert_int_equal(c.dense_calls, is_dense ? 2 : 0);
                assert_int_equal(c.sparse_calls, is_dense ? 0 : 2);
                assert_int_equal(c.masks_made, is_dense ? 0 : 2);
                assert_int_equal(c.fallback_calls + c.masks_loaded, 0);
                assert_true(is_dense ? isnan(c.density) && isnan(c.density_asked) && isnan(c.mass)
                                     : c.density > 0 && c.density < 1);
                if (!is_dense) {
                    assert_float_equal(c.density_asked, 0.4, 1e-12);
                    assert_float_equal(c.density, 0.4, 0.02);
                    /* a session on a GPU does not wait for the importance */
                    if (on_gpu())
                        assert_true(isnan(c.mass));
                    else
                        assert_true(c.mass > c.density && c.mass <= 1);
                }
                assert_true(c.attention_seconds > 0 && c.kernel[0]);
                sparse += c.sparse_calls;
            }
        const esa_session_stats all = mini_stats(s, -1, -1);
        assert_int_equal(all.calls, 48);
        assert_int_equal(all.sparse_calls, sparse);
        assert_int_equal(mini_stats(s, 1, -1).calls, 12);
        assert_int_equal(mini_stats(s, -1, 3).calls, 8);
        assert_int_equal(all.device_bytes, 0);
        /* A new video starts new figures. */
        ok(ctx, esa_session_begin(s));
        assert_int_equal(mini_stats(s, -1, -1).calls, 0);
        assert_string_equal(mini_stats(s, -1, -1).kernel, "");
        esa_session_stats bad = { .struct_size = 3 };
        assert_int_equal(esa_session_get_stats(s, &bad, 0, 0), ESA_ERR_VERSION);
        bad.struct_size = sizeof bad;
        assert_int_equal(esa_session_get_stats(s, &bad, 4, 0), ESA_ERR_ARGUMENT);
        assert_int_equal(esa_session_get_stats(s, &bad, 0, 6), ESA_ERR_ARGUMENT);
        assert_int_equal(esa_session_get_stats(s, &bad, -2, 0), ESA_ERR_ARGUMENT);
        esa_session_free(s);
    }
    mini_free(&m);
}

/* Densities of single heads are those of the mask the plain call makes; a GPU does not
 * count them. */
static void check_heads(const esa_session *s, const esa_mask *mask, const mini *m, int32_t layer,
                        int32_t step)
{
    double density[3] = { 0, 0, 0 }, mean = 0;
    assert_int_equal(esa_session_get_heads(s, density, 2, layer, step),
                     mask && !on_gpu() ? ESA_ERR_ARGUMENT : ESA_OK);
    ok(ctx, esa_session_get_heads(s, density, m->H, layer, step));
    if (!mask || on_gpu()) {
        for (int64_t h = 0; h < m->H; h++) assert_true(isnan(density[h]));
        return;
    }
    esa_mask_info info = { .struct_size = sizeof info };
    ok(ctx, esa_mask_get_info(mask, &info));
    const int64_t rows = info.B * info.H * info.nq;
    int32_t *count = malloc((size_t)rows * 4), *index = malloc((size_t)(rows * info.nk) * 4);
    ok(ctx, esa_mask_to_lists(mask, count, index, info.nk));
    for (int64_t h = 0; h < m->H; h++) {
        int64_t kept = 0;
        for (int64_t r = 0; r < rows; r++)
            if (r / info.nq % info.H == h) kept += count[r];
        /* sums of a few doubles */
        assert_float_equal(density[h], (double)kept / (double)(info.B * info.nq * info.nk), 1e-12);
        mean += density[h] / (double)m->H;
    }
    assert_float_equal(mean, mini_stats(s, layer, step).density, 1e-12);
    free(count);
    free(index);
}

/* The same bits as esa_select and esa_attention. */
static void test_same_as_plain(void **state)
{
    (void)state;
    mini m = mini_make(3, 4, 1, 2);
    float *expected = malloc((size_t)mini_size(&m) * 4);
    const int32_t selectors[] = { ESA_SELECT_ENTROPY, ESA_SELECT_RF_V2, ESA_SELECT_ADA_BSA,
                                  ESA_SELECT_RANDOM };
    for (int i = 0; i < 8; i++) {
        esa_session_params p = mini_params(&m, ESA_SESSION_ONLINE);
        p.select.selector = selectors[i % 4];
        p.select.layout.order = i % 4 == 0 ? ESA_ORDER_HILBERT : ESA_ORDER_DEFAULT;
        p.attention.tail = i / 4 ? ESA_TAIL_POOLED : ESA_TAIL_NONE;
        esa_session *s;
        ok(ctx, esa_session_create(ctx, &s, &p));
        const mini_views t = mini_view(&m);
        ok(ctx, esa_session_begin(s));
        for (int32_t step = 0; step < 3; step++) {
            ok(ctx, esa_session_step(s, step, 0));
            for (int32_t layer = 0; layer < 2; layer++) {
                mini_fill(&m, layer, step, 0);
                esa_mask *mask = NULL;
                if (step >= 1 && layer >= 1) ok(ctx, esa_select(ctx, &mask, &t.q, &t.k, &p.select));
                ok(ctx, esa_attention(ctx, &t.q, &t.k, &t.v, &t.o, mask, &p.attention));
                memcpy(expected, m.o, (size_t)mini_size(&m) * 4);
                memset(m.o, 0, (size_t)mini_size(&m) * 4);
                ok(ctx,
                   esa_session_attention(s, layer, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, NULL));
                assert_memory_equal(expected, m.o, mini_size(&m) * 4);
                if (layer == 1) check_heads(s, mask, &m, layer, step);
                esa_mask_free(mask);
            }
        }
        double heads[3];
        assert_int_equal(esa_session_get_heads(s, heads, 3, 3, 0), ESA_ERR_ARGUMENT);
        assert_int_equal(esa_session_get_heads(s, NULL, 3, 0, 0), ESA_ERR_ARGUMENT);
        if (selectors[i % 4] != ESA_SELECT_ENTROPY) assert_true(isnan(mini_stats(s, 1, 2).mass));
        esa_session_free(s);
    }
    free(expected);
    mini_free(&m);
}

static void test_refresh(void **state)
{
    (void)state;
    mini m = mini_make(2, 9, 2, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_ONLINE);
    p.warmup_frac = 0.2; /* steps 0, 1 */
    p.refresh_every = 3;
    p.dense_first_layer = 1;
    esa_session *s;
    ok(ctx, esa_session_create(ctx, &s, &p));
    float *expected = malloc((size_t)mini_size(&m) * 4);
    const mini_views t = mini_view(&m);
    for (int video = 0; video < 2; video++) {
        esa_mask *kept[2] = { NULL, NULL };
        ok(ctx, esa_session_begin(s));
        for (int32_t step = 0; step < 9; step++)
            for (int32_t branch = 0; branch < 2; branch++) {
                ok(ctx, esa_session_step(s, step, branch));
                mini_fill(&m, 1, step, branch);
                if (step >= 2 && (step - 2) % 3 == 0) {
                    esa_mask_free(kept[branch]);
                    ok(ctx, esa_select(ctx, &kept[branch], &t.q, &t.k, &p.select));
                }
                ok(ctx, esa_attention(ctx, &t.q, &t.k, &t.v, &t.o, kept[branch], &p.attention));
                memcpy(expected, m.o, (size_t)mini_size(&m) * 4);
                ok(ctx, esa_session_attention(s, 1, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, NULL));
                assert_memory_equal(expected, m.o, mini_size(&m) * 4);
                const esa_session_stats c = mini_stats(s, 1, step);
                assert_int_equal(c.masks_made, step >= 2 && (step - 2) % 3 == 0 ? branch + 1 : 0);
                if (step >= 2) assert_true(c.density > 0.3 && (on_gpu() || c.mass > c.density));
            }
        assert_int_equal(mini_stats(s, -1, -1).masks_made, 2 * 3);
        assert_int_equal(mini_stats(s, -1, -1).sparse_calls, 2 * 7);
        esa_mask_free(kept[0]);
        esa_mask_free(kept[1]);
    }
    /* Another shape in between does not reuse the mask. */
    mini other = mini_make(2, 9, 2, 2);
    const mini_views u = mini_view(&other);
    ok(ctx, esa_session_begin(s));
    ok(ctx, esa_session_step(s, 3, 0));
    mini_fill(&m, 1, 3, 0);
    ok(ctx, esa_session_attention(s, 1, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, NULL));
    ok(ctx, esa_session_step(s, 4, 0));
    mini_fill(&other, 1, 4, 0);
    ok(ctx, esa_session_attention(s, 1, ESA_CALL_SELF, &u.q, &u.k, &u.v, &u.o, NULL));
    assert_int_equal(mini_stats(s, 1, 4).masks_made, 1);
    esa_session_free(s);
    mini_free(&other);
    free(expected);
    mini_free(&m);
}

/* More shapes than plans are kept: everything still works, and cross-attention is never causal or
 * sparse. */
static void test_many_shapes(void **state)
{
    (void)state;
    mini m = mini_make(2, 3, 1, 1);
    esa_session_params p = mini_params(&m, ESA_SESSION_ONLINE);
    memset(p.select.layout.grid_q, 0, sizeof p.select.layout.grid_q);
    p.warmup_frac = 0;
    p.select.causal = p.attention.causal = 1;
    esa_session *s;
    ok(ctx, esa_session_create(ctx, &s, &p));
    ok(ctx, esa_session_begin(s));
    ok(ctx, esa_session_step(s, 1, 0));
    mini_fill(&m, 0, 0, 0);
    float *expected = malloc((size_t)mini_size(&m) * 4);
    for (int round = 0; round < 3; round++)
        for (int64_t n = 40; n < 240; n += 13) {
            esa_tensor q = esa_tensor_bnsd(m.q, ESA_DTYPE_F32, 1, m.H, n, m.D),
                       k = esa_tensor_bnsd(m.k, ESA_DTYPE_F32, 1, m.H, n + 5, m.D);
            esa_tensor v = esa_tensor_bnsd(m.v, ESA_DTYPE_F32, 1, m.H, n + 5, m.D),
                       o = esa_tensor_bnsd(m.o, ESA_DTYPE_F32, 1, m.H, n, m.D);
            for (int32_t kind = 0; kind < 2; kind++) {
                esa_mask *mask = NULL;
                esa_attention_params a = p.attention;
                if (kind == ESA_CALL_SELF)
                    ok(ctx, esa_select(ctx, &mask, &q, &k, &p.select));
                else
                    a.causal = 0;
                ok(ctx, esa_attention(ctx, &q, &k, &v, &o, mask, &a));
                memcpy(expected, m.o, (size_t)(m.H * n * m.D) * 4);
                ok(ctx, esa_session_attention(s, 1, kind, &q, &k, &v, &o, NULL));
                assert_memory_equal(expected, m.o, m.H * n * m.D * 4);
                esa_mask_free(mask);
            }
        }
    assert_int_equal(mini_stats(s, 1, 1).dense_calls, mini_stats(s, 1, 1).sparse_calls);
    free(expected);
    esa_session_free(s);
    mini_free(&m);
}

static void test_fallback(void **state)
{
    (void)state;
    mini m = mini_make(2, 4, 1, 1);
    const mini_views t = mini_view(&m);
    esa_session_params p = mini_params(&m, ESA_SESSION_ONLINE);
    p.select.layout.grid_q[2] = 11; /* not the model's */
    esa_session *s;
    ok(ctx, esa_session_create(ctx, &s, &p));
    ok(ctx, esa_session_begin(s));
    ok(ctx, esa_session_step(s, 2, 0));
    mini_fill(&m, 1, 2, 0);
    memset(m.o, 77, (size_t)mini_size(&m) * 4);
    float *before = malloc((size_t)mini_size(&m) * 4);
    memcpy(before, m.o, (size_t)mini_size(&m) * 4);
    assert_refused(ctx, esa_session_attention(s, 1, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, NULL),
                   ESA_ERR_POLICY, "layer 1, step 2 would have run dense", "3x8x11", "240", NULL);
    assert_memory_equal(before, m.o, mini_size(&m) * 4);
    assert_int_equal(mini_stats(s, -1, -1).calls, 0);
    /* Dense by policy is no fallback. */
    ok(ctx, esa_session_attention(s, 0, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, NULL));
    ok(ctx, esa_session_attention(s, 1, ESA_CALL_CROSS, &t.q, &t.k, &t.v, &t.o, NULL));
    esa_session_free(s);

    p.strict = 0;
    ok(ctx, esa_session_create(ctx, &s, &p));
    ok(ctx, esa_session_begin(s));
    ok(ctx, esa_session_step(s, 2, 0));
    ok(ctx, esa_attention(ctx, &t.q, &t.k, &t.v, &t.o, NULL, NULL));
    memcpy(before, m.o, (size_t)mini_size(&m) * 4);
    ok(ctx, esa_session_attention(s, 1, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, NULL));
    assert_memory_equal(before, m.o, mini_size(&m) * 4);
    assert_int_equal(mini_stats(s, 1, 2).fallback_calls, 1);
    assert_int_equal(mini_stats(s, 1, 2).dense_calls, 1);
    /* Wrong views are wrong in any mode. */
    esa_tensor wrong = t.k;
    wrong.dim[3] = 8;
    assert_refused(ctx, esa_session_attention(s, 1, ESA_CALL_SELF, &t.q, &wrong, &t.v, &t.o, NULL),
                   ESA_ERR_SHAPE, "k", NULL);
    esa_session_free(s);
    free(before);
    mini_free(&m);
}

static void test_kv_len_and_lse(void **state)
{
    (void)state;
    mini m = mini_make(2, 2, 1, 2);
    const mini_views t = mini_view(&m);
    esa_session_params p = mini_params(&m, ESA_SESSION_ONLINE);
    p.warmup_frac = 0;
    esa_session *s;
    ok(ctx, esa_session_create(ctx, &s, &p));
    ok(ctx, esa_session_begin(s));
    ok(ctx, esa_session_step(s, 0, 0));
    mini_fill(&m, 1, 0, 0);
    int32_t len[2] = { 200, 33 };
    float *expected = malloc((size_t)mini_size(&m) * 4),
          *sums = malloc((size_t)(2 * m.H * m.N) * 4), *sums2 = malloc((size_t)(2 * m.H * m.N) * 4);
    esa_tensor lse = esa_tensor_bnsd(sums, ESA_DTYPE_F32, 2, m.H, m.N, 1),
               lse2 = esa_tensor_bnsd(sums2, ESA_DTYPE_F32, 2, m.H, m.N, 1);
    for (int round = 0; round < 2; round++) {
        esa_select_params sel = p.select;
        esa_attention_params a = p.attention;
        sel.kv_len = a.kv_len = len;
        a.lse = &lse;
        esa_mask *mask;
        ok(ctx, esa_select(ctx, &mask, &t.q, &t.k, &sel));
        ok(ctx, esa_attention(ctx, &t.q, &t.k, &t.v, &t.o, mask, &a));
        memcpy(expected, m.o, (size_t)mini_size(&m) * 4);
        ok(ctx, esa_session_set_kv_len(s, len));
        ok(ctx, esa_session_attention(s, 1, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, &lse2));
        assert_memory_equal(expected, m.o, mini_size(&m) * 4);
        assert_memory_equal(sums, sums2, 2 * m.H * m.N * 4);
        esa_mask_free(mask);
        len[1] = 111; /* read at every call */
    }
    len[0] = 100000;
    if (!on_gpu()) /* a GPU does not check lengths */
        assert_refused(ctx,
                       esa_session_attention(s, 1, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, NULL),
                       ESA_ERR_ARGUMENT, "kv_len", NULL);
    free(expected);
    free(sums);
    free(sums2);
    esa_session_free(s);
    mini_free(&m);
}

/* Lengths that cut an ordered sequence cannot run sparse: an error in a strict session, else dense
 * and counted. */
static void test_kv_len_cuts_order(void **state)
{
    (void)state;
    if (on_gpu()) skip(); /* lengths there are the caller's word */
    mini m = mini_make(2, 3, 1, 1);
    const mini_views t = mini_view(&m);
    scratch s = scratch_make(), u = s;
    esa_session_params r = mini_params(&m, ESA_SESSION_RECORD);
    r.select.layout.order = ESA_ORDER_HILBERT;
    mini_record(ctx, &m, &r, 1, 1, scratch_path(&s, "rec"));
    const char *one[] = { scratch_path(&s, "rec") };
    ok(ctx, esa_mask_file_build(ctx, scratch_path(&u, "masks"), one, 1, NULL));
    esa_mask_file *file;
    ok(ctx, esa_mask_file_open(ctx, &file, scratch_path(&u, "masks")));
    float *expected = malloc((size_t)mini_size(&m) * 4);
    const int32_t len = 200;
    const struct {
        int32_t mode, refresh_every, strict;
    } cases[] = {
        { ESA_SESSION_ONLINE, 1, 1 }, { ESA_SESSION_ONLINE, 1, 0 },
        { ESA_SESSION_ONLINE, 9, 1 }, { ESA_SESSION_ONLINE, 9, 0 }, /* a resting mask */
        { ESA_SESSION_CACHED, 1, 1 }, { ESA_SESSION_CACHED, 1, 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        esa_session_params p = mini_params(&m, cases[i].mode);
        p.select.layout.order = ESA_ORDER_HILBERT;
        p.masks = cases[i].mode == ESA_SESSION_CACHED ? file : NULL;
        p.refresh_every = cases[i].refresh_every;
        p.strict = cases[i].strict;
        esa_session *x;
        ok(ctx, esa_session_create(ctx, &x, &p));
        ok(ctx, esa_session_begin(x));
        ok(ctx, esa_session_step(x, 1, 0));
        mini_fill(&m, 1, 1, 0);
        ok(ctx, esa_session_attention(x, 1, 0, &t.q, &t.k, &t.v, &t.o, NULL));
        ok(ctx, esa_session_step(x, 2, 0));
        ok(ctx, esa_session_set_kv_len(x, &len));
        if (p.strict) {
            assert_refused(ctx, esa_session_attention(x, 1, 0, &t.q, &t.k, &t.v, &t.o, NULL),
                           ESA_ERR_POLICY, "layer 1, step 2 would have run dense", "kv_len", NULL);
        } else {
            esa_attention_params a = p.attention;
            a.kv_len = &len;
            ok(ctx, esa_attention(ctx, &t.q, &t.k, &t.v, &t.o, NULL, &a));
            memcpy(expected, m.o, (size_t)mini_size(&m) * 4);
            ok(ctx, esa_session_attention(x, 1, 0, &t.q, &t.k, &t.v, &t.o, NULL));
            assert_memory_equal(expected, m.o, mini_size(&m) * 4);
            assert_int_equal(mini_stats(x, 1, 2).fallback_calls, 1);
        }
        esa_session_free(x);
    }
    free(expected);
    esa_mask_file_free(file);
    scratch_remove(&s);
    mini_free(&m);
}

/* A resting mask belongs to the lengths it was made with, whatever array they stand in. */
static void test_refresh_and_kv_len(void **state)
{
    (void)state;
    if (on_gpu()) skip(); /* there lengths are told apart by their address */
    mini m = mini_make(2, 8, 1, 2);
    const mini_views t = mini_view(&m);
    esa_session_params p = mini_params(&m, ESA_SESSION_ONLINE);
    p.warmup_frac = 0;
    p.refresh_every = 8;
    esa_session *s;
    ok(ctx, esa_session_create(ctx, &s, &p));
    ok(ctx, esa_session_begin(s));
    int32_t a[2] = { 200, 100 }, b[2] = { 200, 100 };
    mini_fill(&m, 1, 0, 0);
    float *expected = malloc((size_t)mini_size(&m) * 4);
    const int made[8] = { 1, 0, 0, 1, 0, 1, 0, 1 };
    for (int32_t step = 0; step < 8; step++) {
        const int32_t *len = step == 0 || step == 1 || step == 3 || step == 4 ? a
                             : step == 2                                      ? b
                             : step == 7                                      ? b
                                                                              : NULL;
        if (step == 3) a[1] = 150; /* the same array says something else */
        ok(ctx, esa_session_step(s, step, 0));
        ok(ctx, esa_session_set_kv_len(s, len));
        esa_select_params sel = p.select;
        esa_attention_params at = p.attention;
        sel.kv_len = at.kv_len = len;
        esa_mask *mask; /* q and k do not change: a mask is right if its lengths are */
        ok(ctx, esa_select(ctx, &mask, &t.q, &t.k, &sel));
        ok(ctx, esa_attention(ctx, &t.q, &t.k, &t.v, &t.o, mask, &at));
        memcpy(expected, m.o, (size_t)mini_size(&m) * 4);
        esa_mask_free(mask);
        ok(ctx, esa_session_attention(s, 1, 0, &t.q, &t.k, &t.v, &t.o, NULL));
        assert_memory_equal(expected, m.o, mini_size(&m) * 4);
        assert_int_equal(mini_stats(s, 1, step).masks_made, made[step]);
    }
    free(expected);
    esa_session_free(s);
    mini_free(&m);
}

static void test_refusals(void **state)
{
    (void)state;
    mini m = mini_make(2, 4, 2, 1);
    const mini_views t = mini_view(&m);
    esa_session *s = (void *)1;
#define REFUSED(change, status, word)                                                              \
    do {                                                                                           \
        esa_session_params p = mini_params(&m, ESA_SESSION_ONLINE);                                \
        change;                                                                                    \
        assert_refused(ctx, esa_session_create(ctx, &s, &p), status, word, NULL);                  \
        assert_null(s);                                                                            \
    } while (0)
    REFUSED(p.struct_size = 4, ESA_ERR_VERSION, "struct_size");
    REFUSED(p.select.struct_size = 4, ESA_ERR_VERSION, "struct_size");
    REFUSED(p.mode = 9, ESA_ERR_ARGUMENT, "mode is 9");
    REFUSED(p.layers = 0, ESA_ERR_ARGUMENT, "layers is 0");
    REFUSED(p.steps = -3, ESA_ERR_ARGUMENT, "steps is -3");
    REFUSED(p.branches = 0, ESA_ERR_ARGUMENT, "branches is 0");
    REFUSED(p.step_branches = p.branches + 1, ESA_ERR_ARGUMENT, "step_branches is");
    REFUSED(p.step_branches = -1, ESA_ERR_ARGUMENT, "step_branches is -1");
    REFUSED(p.refresh_every = -2, ESA_ERR_ARGUMENT, "refresh_every is -2");
    REFUSED(p.warmup_frac = 1.5, ESA_ERR_ARGUMENT, "1.5");
    REFUSED(p.warmup_frac = NAN, ESA_ERR_ARGUMENT, "warmup_frac");
    REFUSED(p.min_tokens = -1, ESA_ERR_ARGUMENT, "min_tokens");
    REFUSED(p.select.budget = 2, ESA_ERR_ARGUMENT, "budget is 2");
    REFUSED(p.dense_layer_count = 1, ESA_ERR_ARGUMENT, "dense_layers is NULL");
    const int32_t beyond = 2;
    REFUSED((p.dense_layers = &beyond, p.dense_layer_count = 1), ESA_ERR_ARGUMENT,
            "dense_layers names layer 2, but the model has layers 0 to 1");
    REFUSED(p.select.causal = 1, ESA_ERR_ARGUMENT, "causal");
    REFUSED(p.select.selector = ESA_SELECT_FULL, ESA_ERR_POLICY, "DENSE");
    REFUSED((p.mode = ESA_SESSION_RECORD, p.select.selector = ESA_SELECT_RF_V2),
            ESA_ERR_UNSUPPORTED, "mode RECORD needs selector ENTROPY");
    REFUSED((p.mode = ESA_SESSION_RECORD, p.record_groups = 5), ESA_ERR_ARGUMENT,
            "record_groups is 5");
    REFUSED(p.mode = ESA_SESSION_CACHED, ESA_ERR_ARGUMENT, "masks is NULL");
    char name[300];
    memset(name, 'x', sizeof name);
    name[299] = 0;
    REFUSED(p.model = name, ESA_ERR_ARGUMENT, "longer");
    REFUSED(p.model = "\xff", ESA_ERR_ARGUMENT, "UTF-8");
#undef REFUSED
    assert_refused(ctx, esa_session_create(ctx, &s, NULL), ESA_ERR_ARGUMENT, "params", NULL);
    esa_session_params p = mini_params(&m, ESA_SESSION_ONLINE);
    assert_int_equal(esa_session_create(NULL, &s, &p), ESA_ERR_ARGUMENT);
    assert_refused(ctx, esa_session_create(ctx, NULL, &p), ESA_ERR_ARGUMENT, "session", NULL);
    ok(ctx, esa_session_create(ctx, &s, &p));
    mini_fill(&m, 0, 0, 0);
    assert_refused(ctx, esa_session_attention(s, 0, 0, &t.q, &t.k, &t.v, &t.o, NULL), ESA_ERR_STATE,
                   "esa_session_begin", NULL);
    assert_refused(ctx, esa_session_step(s, 0, 0), ESA_ERR_STATE, "esa_session_begin", NULL);
    ok(ctx, esa_session_begin(s));
    assert_refused(ctx, esa_session_step(s, 4, 0), ESA_ERR_ARGUMENT, "step is 4", NULL);
    assert_refused(ctx, esa_session_step(s, 0, 2), ESA_ERR_ARGUMENT, "branch is 2", NULL);
    ok(ctx, esa_session_step(s, 3, 1));
    assert_refused(ctx, esa_session_attention(s, 2, 0, &t.q, &t.k, &t.v, &t.o, NULL),
                   ESA_ERR_ARGUMENT, "layer is 2", NULL);
    assert_refused(ctx, esa_session_attention(s, 1, 7, &t.q, &t.k, &t.v, &t.o, NULL),
                   ESA_ERR_ARGUMENT, "kind is 7", NULL);
    assert_refused(ctx, esa_session_attention(s, 1, 0, NULL, &t.k, &t.v, &t.o, NULL),
                   ESA_ERR_ARGUMENT, "q", NULL);
    assert_refused(ctx, esa_session_attention(s, 1, 0, &t.q, &t.k, &t.v, &t.q, NULL),
                   ESA_ERR_ARGUMENT, "overlaps", NULL);
    assert_refused(ctx, esa_session_save_recording(s, "x"), ESA_ERR_STATE, "RECORD", NULL);
    assert_refused(ctx, esa_session_load_recording(s, "x"), ESA_ERR_STATE, "RECORD", NULL);
    assert_int_equal(esa_session_attention(NULL, 1, 0, &t.q, &t.k, &t.v, &t.o, NULL),
                     ESA_ERR_ARGUMENT);
    esa_session_free(s);
    esa_session_free(NULL);
    mini_free(&m);
}

static void test_memory_failure(void **state)
{
    (void)state;
    mini m = mini_make(2, 3, 1, 1);
    counting c;
    esa_ctx *small = counting_ctx(&c, 2);
    if (on_gpu()) { /* opened at first use, and kept */
        esa_device_info info = { .struct_size = sizeof info };
        ok(small, esa_device_get_info(small, &info));
    }
    const int64_t base = c.live;
    static const struct {
        const char *name;
        int32_t mode, selector, refresh_every;
        double work;
    } cases[] = {
        { "online", ESA_SESSION_ONLINE, ESA_SELECT_ENTROPY, 1, 0 },
        { "online, resting masks", ESA_SESSION_ONLINE, ESA_SELECT_ENTROPY, 2, 0 },
        { "online, rf_v2", ESA_SESSION_ONLINE, ESA_SELECT_RF_V2, 1, 0 },
        { "online, work", ESA_SESSION_ONLINE, ESA_SELECT_ENTROPY, 0, 0.9 },
        { "online, errors and kept orders", ESA_SESSION_ONLINE, ESA_SELECT_ERROR, 2, 0 },
        { "recording", ESA_SESSION_RECORD, ESA_SELECT_ENTROPY, 1, 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        esa_session_params p = mini_params(&m, cases[i].mode);
        p.refresh_every = cases[i].refresh_every;
        p.select.selector = cases[i].selector;
        p.work = cases[i].work;
        p.share_branches = cases[i].refresh_every == 0;
        if (cases[i].selector == ESA_SELECT_ERROR) p.select.layout.order = ESA_ORDER_ADAPTIVE;
        int64_t points = 0;
        for (;; points++) {
            esa_ctx_trim(small);
            c.left = points;
            esa_session *s = NULL;
            esa_status status = esa_session_create(small, &s, &p);
            const int32_t created = status == ESA_OK;
            if (created) status = mini_run(&m, s, NULL);
            const int32_t done = c.left >= 0;
            c.left = -1;
            if (status == ESA_ERR_MEMORY) {
                assert_refused(small, status, ESA_ERR_MEMORY, "out of memory", NULL);
                /* The session is still good. */
                if (created) ok(small, mini_run(&m, s, NULL));
            } else
                ok(small, status);
            esa_session_free(s);
            esa_ctx_trim(small);
            assert_int_equal(c.live, base);
            if (done) break;
        }
        assert_true(points > 6);
        print_message("%s: every one of %lld allocations failed once\n", cases[i].name,
                      (long long)points);
    }
    esa_ctx_free(small);
    assert_int_equal(c.live, 0);
    mini_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_warmup),
                                        cmocka_unit_test(test_policy_table),
                                        cmocka_unit_test(test_same_as_plain),
                                        cmocka_unit_test(test_refresh),
                                        cmocka_unit_test(test_many_shapes),
                                        cmocka_unit_test(test_fallback),
                                        cmocka_unit_test(test_kv_len_and_lse),
                                        cmocka_unit_test(test_refusals),
                                        cmocka_unit_test(test_memory_failure),
                                        cmocka_unit_test(test_kv_len_cuts_order),
                                        cmocka_unit_test(test_refresh_and_kv_len) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
