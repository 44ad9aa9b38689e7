/* test_mass.c - the recall measure against brute force, and masks rebuilt from importance.
 * SPDX-License-Identifier: Apache-2.0 */
#include "select/world.h"
#include "attn/attn.h"

static double naive_mass(const world *w, const uint8_t *mask, int64_t b, int64_t h, int64_t step)
{
    double *s = malloc((size_t)w->Nk * sizeof *s), sum = 0.0;
    int64_t rows = 0;
    for (int64_t i = 0; i < w->Nq; i += step) {
        double top = -INFINITY, total = 0.0, kept = 0.0;
        for (int64_t j = 0; j < w->Nk; j++) {
            s[j] = world_sees(w, b, i, j) ? world_dot(w, b, h, i, j) / sqrt((double)w->D)
                                          : -INFINITY;
            if (s[j] > top) top = s[j];
        }
        if (top == -INFINITY) continue;
        for (int64_t j = 0; j < w->Nk; j++) {
            total += exp(s[j] - top);
            if (mask[((b * w->Hq + h) * w->nq + i / w->p.block_q) * w->nk + j / w->p.block_k])
                kept += exp(s[j] - top);
        }
        sum += kept / total;
        rows++;
    }
    free(s);
    return rows ? sum / (double)rows : 1.0;
}

static void against_brute_force(void **state)
{
    esa_rng r = { kit_seed("against_brute_force") };
    esa_ctx *ctx = kit_ctx(2);
    (void)state;
    for (int round = 0; round < 40; round++) {
        world w;
        double got[16];
        world_make(&w, &r, ctx, ESA_SELECT_RANDOM, ESA_MODE_FIXED);
        const int32_t step = 1 + (int32_t)esa_rng_below(&r, 5);
        esa_mask *mask = kit_select(ctx, &w.q.view, &w.k.view, &w.p);
        uint8_t *bytes = kit_bytes(mask);
        esa_attention_params p = esa_attention_params_default();
        p.causal = w.p.causal;
        p.kv_len = w.p.kv_len;
        const esa_status status = esa_mask_mass(ctx, got, mask, &w.q.view, &w.k.view, &p, step);
        if (status) fail_msg("%s: %s", esa_ctx_error(ctx), w.name);
        for (int64_t b = 0; b < w.B; b++)
            for (int64_t h = 0; h < w.Hq; h++) {
                const double want = naive_mass(&w, bytes, b, h, step);
                if (!(fabs(got[b * w.Hq + h] - want) < 1e-5))
                    fail_msg("mass %g, expected %g: %s", got[b * w.Hq + h], want, w.name);
                if (w.p.budget >= 1.0) assert_true(fabs(want - 1.0) < 1e-9);
            }
        free(bytes);
        esa_mask_free(mask);
        world_free(&w);
    }
    esa_ctx_free(ctx);
}

/* A mask of one batch entry serves all of them. */
static void broadcast_mask(void **state)
{
    esa_rng r = { 5 };
    esa_ctx *ctx = kit_ctx(2);
    kit_tensor q = kit_random(&r, ESA_DTYPE_F32, 3, 2, 200, 16, 0, 1.0f),
               k = kit_random(&r, ESA_DTYPE_F32, 3, 2, 200, 16, 0, 1.0f);
    esa_mask_info info = { .struct_size = sizeof info,
                           .B = 1,
                           .H = 2,
                           .Nq = 200,
                           .Nk = 200,
                           .block_q = 64,
                           .block_k = 32 };
    uint8_t bits[2 * 4];
    double mass[6];
    (void)state;
    memset(bits, 0x7f, sizeof bits); /* all seven blocks */
    esa_mask *m = NULL;
    assert_int_equal(esa_mask_from_bits(ctx, &m, &info, bits), ESA_OK);
    assert_int_equal(esa_mask_mass(ctx, mass, m, &q.view, &k.view, NULL, 1), ESA_OK);
    for (int i = 0; i < 6; i++) assert_true(fabs(mass[i] - 1.0) < 1e-9);
    esa_mask_free(m);
    free(q.data);
    free(k.data);
    esa_ctx_free(ctx);
}

/* Selecting from stored importance gives the very mask that selecting from q and k gave. */
static void from_importance(void **state)
{
    esa_rng r = { kit_seed("from_importance") };
    esa_ctx *ctx = kit_ctx(2);
    (void)state;
    for (int round = 0; round < 30; round++) {
        world w;
        world_make(&w, &r, ctx, ESA_SELECT_ENTROPY, ESA_MODE_FIXED);
        if (w.p.budget >= 1.0) w.p.budget = 0.4;
        const size_t n = (size_t)(w.B * w.Hq * w.nq * w.nk);
        float *imp = malloc(n * 4);
        assert_int_equal(esa_importance(ctx, imp, NULL, &w.q.view, &w.k.view, &w.p), ESA_OK);
        esa_mask *want = kit_select(ctx, &w.q.view, &w.k.view, &w.p);
        esa_select_args a;
        memset(&a, 0, sizeof a);
        a.kern = ctx->kern;
        a.pool = ctx->pool;
        assert_int_equal(esa_check_select(ctx, &a.params, &w.p, w.Nq, w.Nk, w.D), ESA_OK);
        a.B = w.B;
        a.Hq = w.Hq;
        a.Hkv = w.Hkv;
        a.Nq = w.Nq;
        a.Nk = w.Nk;
        a.D = w.D;
        a.nq = w.nq;
        a.nk = w.nk;
        esa_mask *got = esa_mask_new(&ctx->mem, w.B, w.Hq, w.Nq, w.Nk, w.nq, w.nk, w.p.block_q,
                                     w.p.block_k);
        void *ws = aligned_alloc(64, (size_t)(esa_select_workspace(&a) + 63) / 64 * 64);
        assert_true(got && ws);
        esa_select_from_importance(&a, got, imp, ws);
        uint8_t *x = kit_bytes(want), *y = kit_bytes(got);
        assert_memory_equal(x, y, n);
        assert_true(kit_info(want).density == kit_info(got).density);
        free(x);
        free(y);
        free(ws);
        free(imp);
        esa_mask_free(want);
        esa_mask_free(got);
        world_free(&w);
    }
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(against_brute_force),
        cmocka_unit_test(broadcast_mask),
        cmocka_unit_test(from_importance),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
