/* test_clips.c - sequences of several clips: the order keeps them apart, and selectors keep context
 * and first frames. tests/python/test_mindiesd_masks.py compares with the original.
 * SPDX-License-Identifier: Apache-2.0 */
#include "select/kit.h"
#include "mask/mask.h"

/* A sequence of several clips: no block holds tokens of two, and blocks with context or a protected
 * frame 0 are kept whole, unlike others. What is forced is counted here from the order. */
static void clips(void **state)
{
    static const int32_t selectors[] = { ESA_SELECT_RF_V2, ESA_SELECT_ENTROPY, ESA_SELECT_ADA_BSA };
    esa_rng r = { kit_seed("clips") };
    esa_ctx *ctx = kit_ctx(2);
    int64_t free_rows = 0,
            chosen = 0; /* query blocks that are not forced; those with a choice made */
    (void)state;
    for (int round = 0; round < 24; round++) {
        esa_select_params p = esa_select_params_default(selectors[round % 3]);
        esa_layout *l = &p.layout;
        p.mode = round % 3 == 0 && round % 2 ? ESA_MODE_COMPAT : ESA_MODE_FIXED;
        p.block_q = 16 << esa_rng_below(&r, 2);
        p.block_k = round % 2 ? p.block_q : 16 << esa_rng_below(&r, 2);
        p.budget = 0.2;
        p.keep_sink = p.keep_recent = 0;
        l->order = (int32_t)esa_rng_below(&r, 4);
        l->protect_first_frame = (int32_t)esa_rng_below(&r, 2);
        l->span_count = 1 + (int32_t)esa_rng_below(&r, 4);
        const int32_t align = p.block_q > p.block_k ? p.block_q : p.block_k;
        int64_t N = esa_rng_below(&r, 50), room = 0;
        for (int32_t c = 0; c < l->span_count; c++) {
            esa_span *s = &l->span[c];
            s->start = (int32_t)N;
            s->grid[0] = 2 + (int32_t)esa_rng_below(&r, 3);
            s->grid[1] = 3 + (int32_t)esa_rng_below(&r, 9);
            s->grid[2] = 3 + (int32_t)esa_rng_below(&r, 9);
            N += esa_span_tokens(s) + esa_rng_below(&r, 5);
            room += align;
        }
        N += room;
        kit_tensor q = kit_random(&r, ESA_DTYPE_F32, 1, 2, N, 16, 1, 1.5f),
                   k = kit_random(&r, ESA_DTYPE_F32, 1, 2, N, 16, 0, 1.5f);
        int32_t *order = malloc((size_t)N * 4);
        int8_t *kind = calloc((size_t)N, 1); /* 0: context, else clip + 1, negative in frame 0 */
        for (int32_t c = 0; c < l->span_count; c++) {
            const int64_t frame = (int64_t)l->span[c].grid[1] * l->span[c].grid[2];
            for (int64_t i = 0; i < esa_span_tokens(&l->span[c]); i++)
                kind[l->span[c].start + i] = (int8_t)(i < frame ? -(c + 1) : c + 1);
        }
        esa_layout given = *l;
        given.span_align = align;
        if (p.mode != ESA_MODE_FIXED) given.order = ESA_ORDER_TILE;
        assert_int_equal(esa_order(ctx, order, N, &given, 0, p.mode), ESA_OK);
        uint8_t *m = kit_select_bytes(ctx, &q.view, &k.view, &p);
        const int64_t nq = (N + p.block_q - 1) / p.block_q, nk = (N + p.block_k - 1) / p.block_k;
        for (int32_t side = 0; side < 2; side++) {
            const int64_t B = side ? p.block_k : p.block_q, n = side ? nk : nq;
            for (int64_t i = 0; i < n; i++) {
                int32_t forced = 0, clip = 0;
                for (int64_t x = i * B; x < N && x < (i + 1) * B; x++) {
                    const int32_t at = kind[order[x]], of = at < 0 ? -at : at;
                    if (of && clip) assert_int_equal(of, clip);
                    if (of) clip = of;
                    forced |= !of || (at < 0 && l->protect_first_frame);
                }
                int64_t kept = 0;
                for (int64_t h = 0; h < 2; h++)
                    for (int64_t j = 0; j < (side ? nq : nk); j++)
                        kept += m[(h * nq + (side ? j : i)) * nk + (side ? i : j)];
                if (forced) assert_int_equal(kept, 2 * (side ? nq : nk));
                free_rows += !side && !forced;
                chosen += !side && !forced && kept < 2 * nk;
            }
        }
        free(m);
        free(order);
        free(kind);
        free(q.data);
        free(k.data);
    }
    printf("%lld of %lld free query blocks drop something\n", (long long)chosen,
           (long long)free_rows);
    assert_true(chosen > free_rows / 2); /* the budget is 0.2 */
    esa_ctx_free(ctx);
}

static void refuse(esa_ctx *ctx, const kit_tensor *q, const esa_select_params *p, const char *why)
{
    esa_mask *mask;
    assert_true(esa_select_qkv(ctx, &mask, &q->view, &q->view, &q->view, p) < 0);
    assert_null(mask);
    if (!strstr(esa_ctx_error(ctx), why)) fail_msg("'%s' is not in '%s'", why, esa_ctx_error(ctx));
}

/* Settings that do not describe clips. The plain ones do: two clips of 150 tokens among 320. */
static void refused(void **state)
{
    esa_ctx *ctx = kit_ctx(1);
    esa_rng r = { 1 };
    kit_tensor q = kit_random(&r, ESA_DTYPE_F32, 1, 1, 320, 16, 1, 1.0f);
    esa_select_params plain = esa_select_params_default(ESA_SELECT_RF_V2), p;
    (void)state;
    plain.block_q = plain.block_k = 32;
    plain.layout.span_count = 2;
    plain.layout.span[0] = (esa_span){ 5, { 3, 5, 10 } };
    plain.layout.span[1] = (esa_span){ 165, { 3, 10, 5 } };
    esa_mask *mask = kit_select(ctx, &q.view, &q.view, &plain);
    assert_int_equal(kit_info(mask).nq, 10);
    esa_mask_free(mask);
    p = plain, p.layout.text_back_q = 3, refuse(ctx, &q, &p, "a grid or text too");
    p = plain, p.layout.span_count = 9, refuse(ctx, &q, &p, "span_count is 9");
    p = plain, p.layout.span[0].start = -1, refuse(ctx, &q, &p, "clip 0 starts at -1");
    p = plain, p.layout.span[1].start = 154, refuse(ctx, &q, &p, "a start of at least 155");
    p = plain, p.layout.span[1].start = 171, refuse(ctx, &q, &p, "an end of at most 320");
    p = plain, p.layout.span[1].grid[2] = 0, refuse(ctx, &q, &p, "clip 1 has the grid 3,10,0");
    p = plain, p.layout.span_align = 48, refuse(ctx, &q, &p, "expected a multiple of the blocks");
    p = plain, p.layout.span_align = 96, refuse(ctx, &q, &p, "need 42 tokens of context");
    p = plain, p.causal = 1, refuse(ctx, &q, &p, "nor causal attention");
    p = plain, p.mode = ESA_MODE_COMPAT, p.release = 29, refuse(ctx, &q, &p, "release is 29");
    p.release = ESA_RELEASE_30, refuse(ctx, &q, &p, "release 3.0 of rf_v2 knows one video");
    p = plain, p.selector = ESA_SELECT_ERROR, p.layout.order = ESA_ORDER_ADAPTIVE;
    refuse(ctx, &q, &p, "neither the adaptive order");
    free(q.data);
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(clips),
        cmocka_unit_test(refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
