/* test_error.c - the error selector through the public calls: its scores predict what attention
 * loses, its masks hold what they promise, and bad requests are refused in plain words.
 * SPDX-License-Identifier: Apache-2.0 */
#include "select/world.h"

static esa_mask *select_qkv(esa_ctx *ctx, const esa_tensor *q, const esa_tensor *k,
                            const esa_tensor *v, const esa_select_params *p)
{
    esa_mask *mask = NULL;
    const esa_status status = esa_select_qkv(ctx, &mask, q, k, v, p);
    if (status) fail_msg("esa_select_qkv: %s: %s", esa_status_name(status), esa_ctx_error(ctx));
    return mask;
}

static uint8_t *levels_of(const esa_mask *mask)
{
    const esa_mask_info f = kit_info(mask);
    uint8_t *level = malloc((size_t)(f.B * f.H * f.nq * f.nk));
    assert_non_null(level);
    assert_int_equal(esa_mask_to_levels(mask, level), ESA_OK);
    return level;
}

static esa_select_params params_of(int32_t block_q, int32_t block_k, int32_t tail, double budget)
{
    esa_select_params p = esa_select_params_default(ESA_SELECT_ERROR);
    p.block_q = block_q;
    p.block_k = block_k;
    p.tail = tail;
    p.budget = budget;
    return p;
}

/* Output [N][D] and log-sum-exp [N] of one head. */
static void attend(esa_ctx *ctx, float *o, float *lse, kit_tensor t[3], const esa_mask *mask,
                   int32_t tail)
{
    const int64_t N = t[0].view.dim[2], D = t[0].view.dim[3];
    esa_tensor out = esa_tensor_bnsd(o, ESA_DTYPE_F32, 1, 1, N, D),
               sums = esa_tensor_bnsd(lse, ESA_DTYPE_F32, 1, 1, N, 1);
    esa_attention_params p = esa_attention_params_default();
    p.tail = tail;
    p.lse = &sums;
    const esa_status status = esa_attention(ctx, &t[0].view, &t[1].view, &t[2].view, &out, mask,
                                            &p);
    if (status) fail_msg("esa_attention: %s", esa_ctx_error(ctx));
}

/* With groups of one token the score is exact. If the tail stands in for block j alone, the output
 * of a query moves by |x| / (Z - w + t), and its score says |x| / Z. The two log-sum-exps give the
 * ratio, so attention itself tells what each score must be. level 0: one mean; 1: fine means. */
static void scores_predict_attention(void **state)
{
    esa_rng r = { kit_seed("scores_predict_attention") };
    esa_ctx *ctx = kit_ctx(2);
    static const int32_t tails[] = { ESA_TAIL_NONE, ESA_TAIL_POOLED, ESA_TAIL_POOLED };
    enum { NQ = 75, NK = 150, D = 24, BQ = 32, BK = 48, nq = 3, nk = 4 };
    (void)state;
    for (int round = 0; round < 6; round++) {
        const int32_t tail = tails[round % 3], levels = tail == ESA_TAIL_LEVELS ? 2 : 1;
        kit_tensor t[] = { kit_random(&r, ESA_DTYPE_F32, 1, 1, NQ, D, 0, 1.5f),
                           kit_random(&r, ESA_DTYPE_F32, 1, 1, NK, D, 0, 1.5f),
                           kit_random(&r, ESA_DTYPE_F32, 1, 1, NK, D, 0, 1.0f) };
        esa_select_params p = params_of(BQ, BK, tail, 0.5);
        p.group_q = p.group_k = 1;
        float e[2 * nq * nk], dense[NQ * D], moved[NQ * D], lse[NQ], moved_lse[NQ];
        const esa_status status = esa_errors(ctx, e, &t[0].view, &t[1].view, &t[2].view, &p);
        if (status) fail_msg("esa_errors: %s", esa_ctx_error(ctx));
        attend(ctx, dense, lse, t, NULL, ESA_TAIL_NONE);
        for (int32_t l = 0; l < levels; l++)
            for (int64_t j = 0; j < nk; j++) {
                uint8_t level[nq * nk];
                for (int64_t c = 0; c < nq * nk; c++) level[c] = c % nk != j ? 0 : l == 1 ? 1 : 2;
                esa_mask_info info = mask_info_of(BQ, BK, 1, NQ, NK);
                info.fine = levels == 2 ? p.fine : 0;
                esa_mask *mask = NULL;
                const esa_status made = esa_mask_from_levels(ctx, &mask, &info, level);
                if (made) fail_msg("esa_mask_from_levels: %s", esa_ctx_error(ctx));
                attend(ctx, moved, moved_lse, t, mask, tail);
                esa_mask_free(mask);
                for (int64_t i = 0; i < nq; i++) {
                    double want = 0.0;
                    const int64_t n = NQ - i * BQ < BQ ? NQ - i * BQ : BQ;
                    for (int64_t q = i * BQ; q < i * BQ + n; q++) {
                        const double ratio = exp((double)moved_lse[q] - (double)lse[q]);
                        for (int64_t d = 0; d < D; d++) {
                            const double x = ratio *
                                             ((double)moved[q * D + d] - (double)dense[q * D + d]);
                            want += x * x / (double)n;
                        }
                    }
                    const double got = (double)e[(l * nq + i) * nk + j];
                    /* f32 outputs of size 1 are good to 1e-6, and scores are their squares */
                    if (fabs(got - want) > 1e-4 * want + 1e-10)
                        fail_msg("tail %d level %d block %d,%d: score %g, attention loses %g", tail,
                                 l, (int)i, (int)j, got, want);
                }
            }
        for (int i = 0; i < 3; i++) free(t[i].data);
    }
    esa_ctx_free(ctx);
}

/* A world without causality, and values for it. */
static void error_world(world *w, kit_tensor *v, esa_rng *r, esa_ctx *ctx)
{
    world_make(w, r, ctx, ESA_SELECT_ERROR, ESA_MODE_FIXED);
    while (w->p.causal) {
        world_free(w);
        world_make(w, r, ctx, ESA_SELECT_ERROR, ESA_MODE_FIXED);
    }
    w->p.tail = (int32_t[]){ ESA_TAIL_NONE, ESA_TAIL_POOLED, ESA_TAIL_LEVELS }[esa_rng_below(r, 3)];
    *v = kit_random(r, w->k.view.dtype, w->B, w->Hkv, w->Nk, w->D, (int32_t)esa_rng_below(r, 2),
                    1.0f);
}

/* Same mask for any number of threads, for tensors that were put in order before, and for longer
 * tensors that kv_len cuts. */
static void masks_do_not_depend_on_the_way(void **state)
{
    esa_rng r = { kit_seed("masks_do_not_depend_on_the_way") };
    esa_ctx *one = kit_ctx(1), *three = kit_ctx(3);
    (void)state;
    for (int round = 0; round < 60; round++) {
        world w;
        kit_tensor v;
        error_world(&w, &v, &r, one);
        esa_mask *mask = select_qkv(one, &w.q.view, &w.k.view, &v.view, &w.p);
        const size_t cells = (size_t)(w.B * w.Hq * w.nq * w.nk);
        uint8_t *want = levels_of(mask);
        esa_mask_free(mask);

        mask = select_qkv(three, &w.q.view, &w.k.view, &v.view, &w.p);
        uint8_t *got = levels_of(mask);
        if (memcmp(got, want, cells)) fail_msg("three threads changed the mask: %s", w.name);
        free(got);
        esa_mask_free(mask);

        /* Every text block and dense row is exact, blocks that do not exist are in no list, and a
         * row that sees keys has an exact block. */
        for (int64_t b = 0; b < w.B; b++)
            for (int64_t row = 0; row < w.Hq * w.nq; row++) {
                const uint8_t *level = want + (b * w.Hq * w.nq + row) * w.nk,
                              *seen = w.seen + (b * w.nq + row % w.nq) * w.nk,
                              *forced = w.forced + (b * w.nq + row % w.nq) * w.nk;
                int64_t exact = 0, visible = 0;
                for (int64_t j = 0; j < w.nk; j++) {
                    exact += level[j] == 0;
                    visible += seen[j];
                    if (!seen[j] && level[j] != 2) fail_msg("invisible block kept: %s", w.name);
                    if (forced[j] && level[j] != 0) fail_msg("forced block dropped: %s", w.name);
                    if (w.p.budget == 1.0 && seen[j] && level[j] != 0)
                        fail_msg("budget 1 drops a block: %s", w.name);
                }
                if (visible && !exact) fail_msg("a row has no exact block: %s", w.name);
            }

        /* The tensors in order, and the order called applied. */
        kit_tensor q2 = kit_random(&r, w.q.view.dtype, w.B, w.Hq, w.Nq, w.D, 0, 1.0f),
                   k2 = kit_random(&r, w.q.view.dtype, w.B, w.Hkv, w.Nk, w.D, 0, 1.0f),
                   v2 = kit_random(&r, w.q.view.dtype, w.B, w.Hkv, w.Nk, w.D, 0, 1.0f);
        kit_tensor *to[] = { &q2, &k2, &v2 };
        const esa_tensor *from[] = { &w.q.view, &w.k.view, &v.view };
        for (int s = 0; s < 3; s++)
            for (int64_t i = 0; i < w.B * from[s]->dim[1] * from[s]->dim[2] * w.D; i++) {
                const int64_t d = i % w.D, n = i / w.D % from[s]->dim[2],
                              h = i / w.D / from[s]->dim[2] % from[s]->dim[1],
                              b = i / w.D / from[s]->dim[2] / from[s]->dim[1];
                esa_store_f32(to[s]->data, i, from[s]->dtype,
                              kit_at(from[s], b, h, s ? w.order_k[n] : w.order_q[n], d));
            }
        w.p.layout.order_applied = 1;
        mask = select_qkv(one, &q2.view, &k2.view, &v2.view, &w.p);
        got = levels_of(mask);
        if (memcmp(got, want, cells)) fail_msg("order_applied changed the mask: %s", w.name);
        free(got);
        esa_mask_free(mask);
        free(q2.data);
        free(k2.data);
        free(v2.data);
        free(want);
        free(v.data);
        world_free(&w);
    }
    esa_ctx_free(one);
    esa_ctx_free(three);
}

/* What kv_len cuts off need not be there. */
static void kv_len_is_truncation(void **state)
{
    esa_rng r = { kit_seed("kv_len_is_truncation") };
    esa_ctx *ctx = kit_ctx(2);
    (void)state;
    for (int round = 0; round < 40; round++) {
        world w;
        kit_tensor v;
        error_world(&w, &v, &r, ctx);
        w.p.layout = esa_layout_default();
        const int32_t len = 1 + (int32_t)esa_rng_below(&r, (uint32_t)w.Nk);
        int32_t lens[2] = { len, len };
        const int64_t nk = (len + w.p.block_k - 1) / w.p.block_k;
        w.p.kv_len = lens;
        esa_mask *a = select_qkv(ctx, &w.q.view, &w.k.view, &v.view, &w.p);
        esa_tensor k = w.k.view, cut = v.view;
        k.dim[2] = cut.dim[2] = len;
        w.p.kv_len = NULL;
        esa_mask *b = select_qkv(ctx, &w.q.view, &k, &cut, &w.p);
        uint8_t *x = levels_of(a), *y = levels_of(b);
        for (int64_t row = 0; row < w.B * w.Hq * w.nq; row++)
            for (int64_t j = 0; j < w.nk; j++)
                if (x[row * w.nk + j] != (j < nk ? y[row * nk + j] : 2))
                    fail_msg("kv_len %d is not a truncation: %s", (int)len, w.name);
        free(x);
        free(y);
        esa_mask_free(a);
        esa_mask_free(b);
        free(v.data);
        world_free(&w);
    }
    esa_ctx_free(ctx);
}

/* The realised cost is the asked one: to the block, or with levels to the step that no longer
 * fits. */
static void budgets_are_exact(void **state)
{
    esa_rng r = { kit_seed("budgets_are_exact") };
    esa_ctx *ctx = kit_ctx(2);
    (void)state;
    for (int round = 0; round < 30; round++) {
        const int64_t H = 1 + esa_rng_below(&r, 4), N = 200 + esa_rng_below(&r, 800);
        kit_tensor q = kit_random(&r, ESA_DTYPE_F32, 2, H, N, 16, 0, 1.0f),
                   k = kit_random(&r, ESA_DTYPE_F32, 2, H, N, 16, 0, 2.0f),
                   v = kit_random(&r, ESA_DTYPE_F32, 2, H, N, 16, 0, 1.0f);
        const int32_t tail = round % 2 ? ESA_TAIL_LEVELS : ESA_TAIL_POOLED;
        const esa_select_params p = params_of(64, 32, tail, (double)esa_rng_unit(&r));
        esa_mask *m = select_qkv(ctx, &q.view, &k.view, &v.view, &p);
        const esa_mask_info f = kit_info(m);
        const int64_t rows = H * f.nq, blocks = rows * f.nk; /* of one batch entry */
        assert_true(f.density_asked == p.budget);
        assert_int_equal(f.selector, ESA_SELECT_ERROR);
        if (tail == ESA_TAIL_POOLED) {
            const int64_t want = (int64_t)floor(p.budget * (double)blocks + 0.5);
            assert_int_equal(f.kept, 2 * (want < rows ? rows : want));
            assert_int_equal(f.fine, 0);
        } else {
            const int64_t spent = f.kept * 32 + f.fine_blocks * 4 +
                                  (2 * blocks - f.kept - f.fine_blocks),
                          least = 2 * (blocks + rows * 31);
            const double asked = 2.0 * p.budget * (double)(blocks * 32);
            assert_int_equal(f.fine, 4);
            if (asked >= (double)least) /* 31: the largest step, in both batch entries */
                assert_true((double)spent <= asked + 1.0 && (double)spent > asked - 2.0 * 31 - 1.0);
            else
                assert_true(spent >= least && (double)spent <= (double)least + 2.0 * 31);
        }
        esa_mask_free(m);
        free(q.data);
        free(k.data);
        free(v.data);
    }
    esa_ctx_free(ctx);
}

static void odd_values_end(void **state)
{
    esa_rng r = { kit_seed("odd_values_end") };
    esa_ctx *ctx = kit_ctx(2);
    (void)state;
    for (int round = 0; round < 30; round++) {
        world w;
        kit_tensor v;
        error_world(&w, &v, &r, ctx);
        const esa_tensor *t[] = { &w.q.view, &w.k.view, &v.view };
        for (int i = 0; i < 8; i++) {
            const esa_tensor *x = t[esa_rng_below(&r, 3)];
            const float odd[] = { NAN, INFINITY, -INFINITY, 3e38f };
            esa_store_f32(x->data,
                          esa_rng_below(&r, (uint32_t)(x->dim[0] * x->dim[1] * x->dim[2] * w.D)),
                          x->dtype, odd[esa_rng_below(&r, 4)]);
        }
        esa_mask *m = select_qkv(ctx, &w.q.view, &w.k.view, &v.view, &w.p);
        uint8_t *level = levels_of(m);
        for (int64_t row = 0; row < w.B * w.Hq * w.nq; row++) {
            int64_t exact = 0;
            for (int64_t j = 0; j < w.nk; j++) exact += level[row * w.nk + j] == 0;
            assert_true(exact >= (w.kv_len[row / (w.Hq * w.nq)] > 0));
        }
        free(level);
        esa_mask_free(m);
        free(v.data);
        world_free(&w);
    }
    esa_ctx_free(ctx);
}

static void refuses(esa_ctx *ctx, kit_tensor t[3], const esa_select_params *p, esa_status want,
                    const char *words)
{
    esa_mask *mask = NULL;
    const esa_status status = esa_select_qkv(ctx, &mask, &t[0].view, &t[1].view, &t[2].view, p);
    if (status != want || mask || !strstr(esa_ctx_error(ctx), words))
        fail_msg("%s \"%s\", expected %s with \"%s\"", esa_status_name(status), esa_ctx_error(ctx),
                 esa_status_name(want), words);
}

static void bad_requests_are_refused(void **state)
{
    esa_rng r = { kit_seed("bad_requests_are_refused") };
    esa_ctx *ctx = kit_ctx(1);
    (void)state;
    kit_tensor t[3];
    for (int i = 0; i < 3; i++) t[i] = kit_random(&r, ESA_DTYPE_F32, 1, 1, 100, 8, 0, 1.0f);
    const esa_select_params good = params_of(64, 64, ESA_TAIL_LEVELS, 0.5);
    esa_select_params p = good;
    esa_mask_free(select_qkv(ctx, &t[0].view, &t[1].view, &t[2].view, &p));
    p.causal = 1;
    refuses(ctx, t, &p, ESA_ERR_UNSUPPORTED, "causal");
    p = good;
    p.mode = ESA_MODE_COMPAT;
    refuses(ctx, t, &p, ESA_ERR_ARGUMENT, "compat");
    p = good;
    p.tail = ESA_TAIL_CENTROID;
    refuses(ctx, t, &p, ESA_ERR_ARGUMENT, "tail");
    p = good;
    p.fine = 3;
    refuses(ctx, t, &p, ESA_ERR_ARGUMENT, "fine");
    p = good;
    p.group_q = 3;
    refuses(ctx, t, &p, ESA_ERR_ARGUMENT, "group_q");
    p = good;
    p.group_k = 16; /* 64 / 4 tokens: no finer than a fine mean */
    refuses(ctx, t, &p, ESA_ERR_ARGUMENT, "group_k");
    p = good;
    p.block_k = 80;
    p.fine = 16;
    p.group_k = 2; /* a fine mean of 5 tokens */
    refuses(ctx, t, &p, ESA_ERR_ARGUMENT, "divide");
    p.group_k = 0; /* chosen to fit */
    esa_mask_free(select_qkv(ctx, &t[0].view, &t[1].view, &t[2].view, &p));
    p.block_k = 16;
    refuses(ctx, t, &p, ESA_ERR_ARGUMENT, "2 tokens");
    esa_mask *mask = NULL;
    assert_int_equal(esa_select(ctx, &mask, &t[0].view, &t[1].view, &good), ESA_ERR_ARGUMENT);
    assert_non_null(strstr(esa_ctx_error(ctx), "esa_select_qkv"));
    for (int i = 0; i < 3; i++) free(t[i].data);
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_predict_attention),
        cmocka_unit_test(masks_do_not_depend_on_the_way),
        cmocka_unit_test(kv_len_is_truncation),
        cmocka_unit_test(budgets_are_exact),
        cmocka_unit_test(odd_values_end),
        cmocka_unit_test(bad_requests_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
