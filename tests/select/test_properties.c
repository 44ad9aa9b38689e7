/* test_properties.c - what must hold for every selector: threads, memory order, batch, kv_len,
 * heads, orders, odd input.
 * SPDX-License-Identifier: Apache-2.0 */
#include "select/world.h"
#include "attn/attn.h"
#include "common/on_gpu.h"

static const int32_t selectors[] = { ESA_SELECT_FULL, ESA_SELECT_ENTROPY, ESA_SELECT_RF_V2,
                                     ESA_SELECT_ADA_BSA, ESA_SELECT_RANDOM };

static int32_t some_selector(esa_rng *r) { return world_pick(r, selectors, 5); }

/* compat rf_v2 has needs of its own: a grid, Nq = Nk, no causal. */
static void suit(world *w, esa_ctx *ctx)
{
    if (w->p.mode != ESA_MODE_FIXED && w->p.selector == ESA_SELECT_RF_V2) {
        w->p.causal = 0;
        if (w->p.layout.grid_q[0] == 0 || w->Nq != w->Nk) w->p.mode = ESA_MODE_FIXED;
    }
    if (w->p.mode != ESA_MODE_FIXED && w->p.selector == ESA_SELECT_ADA_BSA && w->Nq != w->Nk)
        w->p.causal = 0;
    if (w->p.selector == ESA_SELECT_ADA_BSA) w->p.cdf_threshold = 0.8;
    /* the CPU's alone */
    if (on_gpu() && w->p.selector == ESA_SELECT_ENTROPY && w->p.mode == ESA_MODE_COMPAT_ROUND)
        w->p.mode = ESA_MODE_COMPAT;
    world_order(w, ctx);
}

static void same_bits_any_threads(void **state)
{
    esa_rng r = { kit_seed("same_bits_any_threads") };
    esa_ctx *one = kit_ctx(1), *three = kit_ctx(3);
    (void)state;
    for (int round = 0; round < 60; round++) {
        world w;
        world_make(&w, &r, one, some_selector(&r), (int32_t)esa_rng_below(&r, 3));
        suit(&w, one);
        esa_mask *a = kit_select(one, &w.q.view, &w.k.view, &w.p),
                 *b = kit_select(three, &w.q.view, &w.k.view, &w.p);
        const esa_mask_info f = kit_info(a);
        uint8_t *x = kit_bytes(a), *y = kit_bytes(b);
        assert_memory_equal(x, y, (size_t)(f.B * f.H * f.nq * f.nk));
        if (w.p.selector == ESA_SELECT_ENTROPY) {
            const size_t n = (size_t)(f.B * f.H * f.nq * f.nk);
            float *p = malloc(n * 4), *q = malloc(n * 4);
            double e[2][16];
            assert_int_equal(esa_importance(one, p, e[0], &w.q.view, &w.k.view, &w.p), ESA_OK);
            assert_int_equal(esa_importance(three, q, e[1], &w.q.view, &w.k.view, &w.p), ESA_OK);
            assert_memory_equal(p, q, n * 4);
            assert_memory_equal(e[0], e[1], (size_t)(f.B * f.H) * sizeof(double));
            free(p);
            free(q);
        }
        free(x);
        free(y);
        esa_mask_free(a);
        esa_mask_free(b);
        world_free(&w);
    }
    esa_ctx_free(one);
    esa_ctx_free(three);
}

/* A copy of t, head h of the result being head h/repeat of t, in the given memory order, tokens
 * gathered by order (or NULL). */
static kit_tensor copy_tensor(const esa_tensor *t, int32_t bsnd, int64_t repeat,
                              const int32_t *order, int64_t b0, int64_t B)
{
    kit_tensor c;
    const int64_t H = t->dim[1] * repeat, N = t->dim[2], D = t->dim[3];
    c.data = malloc((size_t)(B * H * N * D * esa_dtype_size(t->dtype)));
    c.view = bsnd ? esa_tensor_bsnd(c.data, t->dtype, B, H, N, D)
                  : esa_tensor_bnsd(c.data, t->dtype, B, H, N, D);
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < H; h++)
            for (int64_t n = 0; n < N; n++)
                for (int64_t d = 0; d < D; d++)
                    esa_store_f32(c.data,
                                  b * c.view.stride[0] + h * c.view.stride[1] +
                                      n * c.view.stride[2] + d,
                                  t->dtype, kit_at(t, b0 + b, h / repeat, order ? order[n] : n, d));
    return c;
}

static void same_mask(esa_ctx *ctx, const uint8_t *want, size_t bytes, const esa_tensor *q,
                      const esa_tensor *k, const esa_select_params *p, const char *what,
                      const world *w)
{
    uint8_t *got = kit_select_bytes(ctx, q, k, p);
    if (memcmp(got, want, bytes)) fail_msg("%s changed the mask: %s", what, w->name);
    free(got);
}

static void views_do_not_matter(void **state)
{
    esa_rng r = { kit_seed("views_do_not_matter") };
    esa_ctx *ctx = kit_ctx(2);
    (void)state;
    for (int round = 0; round < 60; round++) {
        world w;
        world_make(&w, &r, ctx, some_selector(&r), (int32_t)esa_rng_below(&r, 3));
        suit(&w, ctx);
        esa_mask *m = kit_select(ctx, &w.q.view, &w.k.view, &w.p);
        const esa_mask_info f = kit_info(m);
        const size_t per_batch = (size_t)(f.H * f.nq * f.nk), all = per_batch * (size_t)f.B;
        uint8_t *want = kit_bytes(m);
        esa_mask_free(m);

        kit_tensor q = copy_tensor(&w.q.view, 0, 1, NULL, 0, w.B),
                   k = copy_tensor(&w.k.view, 0, 1, NULL, 0, w.B);
        same_mask(ctx, want, all, &q.view, &k.view, &w.p, "BNSD", &w);
        free(q.data);
        free(k.data);
        q = copy_tensor(&w.q.view, 1, 1, NULL, 0, w.B);
        /* keys repeated per query head */
        k = copy_tensor(&w.k.view, 1, w.Hq / w.Hkv, NULL, 0, w.B);
        same_mask(ctx, want, all, &q.view, &k.view, &w.p, "BSND with repeated key heads", &w);
        free(q.data);
        free(k.data);

        /* Batch entries stand alone. RANDOM counts rows from the start of the batch on purpose. */
        if (w.p.selector != ESA_SELECT_RANDOM)
            for (int64_t b = 0; b < w.B; b++) {
                esa_select_params p = w.p;
                if (p.kv_len) p.kv_len = w.kv_len + b;
                q = copy_tensor(&w.q.view, 0, 1, NULL, b, 1);
                k = copy_tensor(&w.k.view, 0, 1, NULL, b, 1);
                same_mask(ctx, want + (size_t)b * per_batch, per_batch, &q.view, &k.view, &p,
                          "another batch entry", &w);
                free(q.data);
                free(k.data);
            }

        /* Tensors put in order by hand, and order_applied. world.h has the order as one permutation
         * per side. */
        if (!w.p.layout.order_applied && w.p.mode == ESA_MODE_FIXED) {
            esa_select_params p = w.p;
            p.layout.order_applied = 1;
            q = copy_tensor(&w.q.view, 0, 1, w.order_q, 0, w.B);
            k = copy_tensor(&w.k.view, 0, 1, w.order_k, 0, w.B);
            same_mask(ctx, want, all, &q.view, &k.view, &p, "order_applied", &w);
            free(q.data);
            free(k.data);
        }
        free(want);
        world_free(&w);
    }
    esa_ctx_free(ctx);
}

static void kv_len_is_truncation(void **state)
{
    esa_rng r = { kit_seed("kv_len_is_truncation") };
    esa_ctx *ctx = kit_ctx(2);
    (void)state;
    for (int round = 0; round < 60; round++) {
        world w;
        world_make(&w, &r, ctx, some_selector(&r),
                   esa_rng_below(&r, 2) ? ESA_MODE_FIXED : ESA_MODE_COMPAT);
        suit(&w, ctx);
        if (w.p.selector == ESA_SELECT_RF_V2) w.p.mode = ESA_MODE_FIXED;
        w.p.causal = 0;
        w.p.layout = esa_layout_default(); /* text and grids would have to shrink too */
        const int32_t len = 1 + (int32_t)esa_rng_below(&r, (uint32_t)w.Nk);
        int32_t lens[2] = { len, len };
        w.p.kv_len = lens;
        uint8_t *a = kit_select_bytes(ctx, &w.q.view, &w.k.view, &w.p);
        esa_tensor k = w.k.view;
        k.dim[2] = len;
        w.p.kv_len = NULL;
        uint8_t *b = kit_select_bytes(ctx, &w.q.view, &k, &w.p);
        const int64_t nk = (len + w.p.block_k - 1) / w.p.block_k;
        for (int64_t row = 0; row < w.B * w.Hq * w.nq; row++)
            for (int64_t j = 0; j < w.nk; j++)
                if (a[row * w.nk + j] != (j < nk ? b[row * nk + j] : 0))
                    fail_msg("kv_len %d is not a truncation: %s", (int)len, w.name);
        free(a);
        free(b);
        world_free(&w);
    }
    esa_ctx_free(ctx);
}

/* Mask bytes of a problem through the internal call, with a given window. */
static uint8_t *select_in_window(esa_ctx *ctx, const world *w, int64_t window, float *importance)
{
    const esa_shapes shapes = esa_shapes_of(&w->q.view, &w->k.view);
    esa_select_params p;
    esa_select_args a;
    assert_int_equal(esa_check_select(ctx, &p, &w->p, w->Nq, w->Nk, w->D), ESA_OK);
    esa_bind_select(&a, &shapes, &p, &w->q.view, &w->k.view, NULL);
    a.kern = ctx->kern;
    a.pool = ctx->pool;
    const int32_t gathered = !p.layout.order_applied && p.layout.order != ESA_ORDER_RASTER;
    int32_t *order_q = malloc((size_t)w->Nq * 4), *order_k = malloc((size_t)w->Nk * 4);
    esa_order_build(order_q, w->Nq, &p.layout, 0, p.mode);
    esa_order_build(order_k, w->Nk, &p.layout, 1, p.mode);
    a.perm_q = gathered ? order_q : NULL;
    a.perm_k = gathered ? order_k : NULL;
    a.window = window;
    esa_mask *m = esa_mask_new(&ctx->mem, a.B, a.Hq, a.Nq, a.Nk, a.nq, a.nk, p.block_q, p.block_k);
    void *ws = aligned_alloc(64, (size_t)(esa_select_workspace(&a) + 63) / 64 * 64);
    assert_true(m && ws);
    esa_select_run(&a, m, ws);
    if (importance) esa_select_importance(&a, importance, NULL, ws);
    uint8_t *bytes = kit_bytes(m);
    free(ws);
    free(order_q);
    free(order_k);
    esa_mask_free(m);
    return bytes;
}

/* Long videos are worked on in windows of heads (and of query blocks); the smallest window gives
 * the same bits. */
static void windows_do_not_matter(void **state)
{
    (void)state;
    if (on_gpu()) skip(); /* windows are the CPU's */
    esa_rng r = { kit_seed("windows_do_not_matter") };
    esa_ctx *ctx = kit_ctx(2);
    for (int round = 0; round < 60; round++) {
        world w;
        world_make(&w, &r, ctx, some_selector(&r), (int32_t)esa_rng_below(&r, 3));
        suit(&w, ctx);
        const int32_t entropy = w.p.selector == ESA_SELECT_ENTROPY;
        const size_t n = (size_t)(w.B * w.Hq * w.nq * w.nk);
        float *p = malloc(n * 4), *q = malloc(n * 4);
        uint8_t *want = kit_select_bytes(ctx, &w.q.view, &w.k.view, &w.p);
        esa_mask *m = kit_select(ctx, &w.q.view, &w.k.view, &w.p);
        const esa_mask_info f = kit_info(m);
        uint8_t *a = select_in_window(ctx, &w, 0, entropy ? p : NULL),
                *b = select_in_window(ctx, &w, 1, entropy ? q : NULL);
        uint8_t *c = select_in_window(ctx, &w, 40000, NULL);
        assert_memory_equal(want, a, (size_t)(f.B * f.H * f.nq * f.nk));
        assert_memory_equal(want, b, (size_t)(f.B * f.H * f.nq * f.nk));
        assert_memory_equal(want, c, (size_t)(f.B * f.H * f.nq * f.nk));
        if (entropy) assert_memory_equal(p, q, n * 4);
        esa_mask_free(m);
        free(want);
        free(a);
        free(b);
        free(c);
        free(p);
        free(q);
        world_free(&w);
    }
    esa_ctx_free(ctx);
}

/* Without forced blocks the entropy selector keeps exactly what was asked, over the heads of every
 * batch entry. */
static void exact_mean_budget(void **state)
{
    esa_rng r = { kit_seed("exact_mean_budget") };
    esa_ctx *ctx = kit_ctx(2);
    (void)state;
    for (int round = 0; round < 30; round++) {
        const int64_t H = 1 + esa_rng_below(&r, 8), N = 200 + esa_rng_below(&r, 800);
        kit_tensor q = kit_random(&r, ESA_DTYPE_F32, 2, H, N, 16, 0, 1.0f),
                   k = kit_random(&r, ESA_DTYPE_F32, 2, H, N, 16, 0, 2.0f);
        esa_select_params p = esa_select_params_default(ESA_SELECT_ENTROPY);
        p.block_q = 64;
        p.block_k = 32;
        p.budget = (double)esa_rng_unit(&r);
        esa_mask *m = kit_select(ctx, &q.view, &k.view, &p);
        const esa_mask_info f = kit_info(m);
        int64_t want = (int64_t)floor(p.budget * (double)f.nk * (double)H + 0.5);
        if (want < H) want = H;
        assert_int_equal(f.kept, 2 * f.nq * want);
        assert_true(f.density_asked == p.budget);
        assert_int_equal(f.selector, ESA_SELECT_ENTROPY);
        assert_true(fabs(f.density - (double)f.kept / (double)(2 * H * f.nq * f.nk)) < 1e-12);
        esa_mask_free(m);
        free(q.data);
        free(k.data);
    }
    esa_ctx_free(ctx);
}

/* The flags of ada_bsa mean what they say in fixed mode: a worthless first or last block can be
 * dropped. */
static void ada_flags(void **state)
{
    enum { N = 640, D = 8 };
    static float q[N * D], k[N * D];
    esa_ctx *ctx = kit_ctx(1);
    (void)state;
    for (int i = 0; i < N; i++) {
        q[i * D] = 4.0f;
        k[i * D] = i / 128 == 0 || i / 128 == 4 ? -4.0f : 4.0f;
    }
    const esa_tensor tq = esa_tensor_bnsd(q, ESA_DTYPE_F32, 1, 1, N, D),
                     tk = esa_tensor_bnsd(k, ESA_DTYPE_F32, 1, 1, N, D);
    for (int32_t sink = 0; sink < 2; sink++)
        for (int32_t recent = 0; recent < 2; recent++) {
            esa_select_params p = esa_select_params_default(ESA_SELECT_ADA_BSA);
            p.budget = 0.6; /* 3 of 5 blocks */
            p.keep_sink = sink;
            p.keep_recent = recent;
            uint8_t *m = kit_select_bytes(ctx, &tq, &tk, &p);
            for (int i = 0; i < 5; i++) {
                int n = 0;
                for (int j = 0; j < 5; j++) n += m[i * 5 + j];
                assert_int_equal(n, 3); /* forced blocks count inside the cap */
                assert_int_equal(m[i * 5], sink);
                assert_int_equal(m[i * 5 + 4], recent);
            }
            free(m);
            p.mode = ESA_MODE_COMPAT; /* the original forces both whatever the flags say */
            m = kit_select_bytes(ctx, &tq, &tk, &p);
            for (int i = 0; i < 5; i++) assert_true(m[i * 5] && m[i * 5 + 4]);
            free(m);
        }
    esa_ctx_free(ctx);
}

static void random_is_uniform(void **state)
{
    enum { N = 2048, nk = 16 };
    static float x[N * 4];
    esa_ctx *ctx = kit_ctx(2);
    const esa_tensor t = esa_tensor_bnsd(x, ESA_DTYPE_F32, 1, 1, N, 4);
    esa_select_params p = esa_select_params_default(ESA_SELECT_RANDOM);
    int hits[nk] = { 0 };
    (void)state;
    p.budget = 0.25;
    uint8_t *first = kit_select_bytes(ctx, &t, &t, &p), *again = kit_select_bytes(ctx, &t, &t, &p);
    assert_memory_equal(first, again, nk * nk);
    p.branch = 1;
    uint8_t *branch = kit_select_bytes(ctx, &t, &t, &p);
    assert_true(memcmp(first, branch, nk * nk) != 0);
    free(first);
    free(again);
    free(branch);
    for (uint64_t seed = 0; seed < 200; seed++) {
        p.seed = seed;
        uint8_t *m = kit_select_bytes(ctx, &t, &t, &p);
        for (int i = 0; i < nk; i++) {
            int n = 0;
            for (int j = 0; j < nk; j++) {
                n += m[i * nk + j];
                hits[j] += m[i * nk + j];
            }
            assert_int_equal(n, 4);
        }
        free(m);
    }
    for (int j = 0; j < nk; j++) assert_in_range(hits[j], 680, 920); /* 800 expected, sigma 24 */
    esa_ctx_free(ctx);
}

/* compat rf_v2 with text: pooled apart (3.0) or as one sequence (3.1), forced, one mask per batch
 * entry, against double. */
static void rf_compat_with_text(void **state)
{
    esa_rng r = { kit_seed("rf_compat_with_text") };
    esa_ctx *ctx = kit_ctx(2);
    (void)state;
    for (int round = 0; round < 25; round++) {
        const int32_t t = 1 + (int32_t)esa_rng_below(&r, 4), h = 1 + (int32_t)esa_rng_below(&r, 20),
                      wd = 1 + (int32_t)esa_rng_below(&r, 20);
        const int32_t text = (int32_t)esa_rng_below(&r, 2) * (int32_t)esa_rng_below(&r, 70),
                      L = esa_rng_below(&r, 2) ? 16 : 32, D = 16, apart = round % 2;
        const int64_t img = (int64_t)t * h * wd, N = img + text,
                      ni = ((apart ? img : N) + L - 1) / L, tb = (text + L - 1) / L,
                      n = apart ? ni + tb : ni;
        const int64_t ff = ((int64_t)h * wd + L - 1) / L;
        kit_tensor q = kit_random(&r, ESA_DTYPE_F32, 2, 2, N, D, 1, 1.5f),
                   k = kit_random(&r, ESA_DTYPE_F32, 2, 2, N, D, 0, 1.5f);
        esa_select_params p = esa_select_params_default(ESA_SELECT_RF_V2);
        p.mode = ESA_MODE_COMPAT;
        p.block_q = p.block_k = L;
        p.budget = 0.05 + 0.9 * (double)esa_rng_unit(&r);
        p.release = apart ? ESA_RELEASE_30 : round % 4 ? ESA_RELEASE_31 : 0;
        p.layout.grid_q[0] = t;
        p.layout.grid_q[1] = h;
        p.layout.grid_q[2] = wd;
        p.layout.text_front_q = text;
        p.layout.protect_first_frame = (int32_t)esa_rng_below(&r, 2);
        int32_t *order = malloc((size_t)N * 4);
        esa_layout l = p.layout;
        l.order = ESA_ORDER_TILE;
        assert_int_equal(esa_order(ctx, order, N, &l, 0, ESA_MODE_COMPAT), ESA_OK);
        uint8_t *m = kit_select_bytes(ctx, &q.view, &k.view, &p);
        double *mq = malloc((size_t)(n * D) * 8), *mk = malloc((size_t)(n * D) * 8),
               *s = malloc((size_t)n * 8), *sorted = malloc((size_t)n * 8);
        const int64_t keep = (int64_t)ceil((double)n * p.budget);
        for (int64_t bh = 0; bh < 4; bh++) {
            for (int64_t i = 0; i < n; i++) {
                const int64_t first = i < ni ? i * L : img + (i - ni) * L,
                              limit = i < ni && apart ? img : N,
                              end = first + L < limit ? first + L : limit;
                for (int64_t d = 0; d < D; d++) {
                    double a = 0.0, b = 0.0;
                    for (int64_t x = first; x < end; x++) {
                        a += (double)kit_at(&q.view, bh / 2, bh % 2, order[x], d);
                        b += (double)kit_at(&k.view, bh / 2, bh % 2, order[x], d);
                    }
                    mq[i * D + d] = a / (double)(end - first);
                    mk[i * D + d] = b / (double)(end - first);
                }
            }
            for (int64_t i = 0; i < n; i++) {
                for (int64_t j = 0; j < n; j++) {
                    s[j] = 0.0;
                    for (int64_t d = 0; d < D; d++) s[j] += mq[i * D + d] * mk[j * D + d] * 0.25;
                    int64_t at = j;
                    while (at > 0 && sorted[at - 1] < s[j]) {
                        sorted[at] = sorted[at - 1];
                        at--;
                    }
                    sorted[at] = s[j];
                }
                const double bar = sorted[keep - 1];
                for (int64_t j = 0; j < n; j++) {
                    const int32_t forced = i >= n - tb || j >= n - tb ||
                                           (p.layout.protect_first_frame && (i < ff || j < ff));
                    const int32_t got = m[(bh * n + i) * n + j];
                    if (forced)
                        assert_int_equal(got, 1);
                    else if (s[j] > bar + 1e-5)
                        assert_int_equal(got, 1);
                    else if (s[j] < bar - 1e-5)
                        assert_int_equal(got, 0);
                }
            }
        }
        free(order);
        free(m);
        free(mq);
        free(mk);
        free(s);
        free(sorted);
        free(q.data);
        free(k.data);
    }
    esa_ctx_free(ctx);
}

/* compat-round importance: scores and probabilities rounded to fp16, block sums of those. */
static void entropy_rounding(void **state)
{
    if (on_gpu()) skip(); /* compat-round entropy is the CPU's alone */
    enum { N = 300, D = 16, BQ = 64, BK = 32, nq = 5, nk = 10 };
    esa_rng r = { kit_seed("entropy_rounding") };
    esa_ctx *ctx = kit_ctx(2);
    kit_tensor q = kit_random(&r, ESA_DTYPE_F16, 1, 1, N, D, 0, 1.0f),
               k = kit_random(&r, ESA_DTYPE_F16, 1, 1, N, D, 0, 1.0f);
    esa_select_params p = esa_select_params_default(ESA_SELECT_ENTROPY);
    float got[nq * nk], plain[nq * nk];
    int different = 0;
    (void)state;
    p.block_q = BQ;
    p.block_k = BK;
    p.mode = ESA_MODE_COMPAT_ROUND;
    assert_int_equal(esa_importance(ctx, got, NULL, &q.view, &k.view, &p), ESA_OK);
    p.mode = ESA_MODE_COMPAT;
    assert_int_equal(esa_importance(ctx, plain, NULL, &q.view, &k.view, &p), ESA_OK);
    for (int I = 0; I < nq; I++) {
        const int n = N - I * BQ < BQ ? N - I * BQ : BQ;
        double want[nk] = { 0 };
        for (int c = 0; c < 4; c++) {
            float s[N], top = -INFINITY;
            double total = 0.0;
            for (int j = 0; j < N; j++) {
                double dot = 0.0;
                for (int d = 0; d < D; d++)
                    dot += (double)kit_at(&q.view, 0, 0, I * BQ + (2 * c + 1) * n / 8, d) *
                           (double)kit_at(&k.view, 0, 0, j, d);
                s[j] = esa_round_to((float)dot * 0.25f, ESA_DTYPE_F16);
                if (s[j] > top) top = s[j];
            }
            for (int j = 0; j < N; j++) total += exp((double)s[j] - (double)top);
            for (int j = 0; j < N; j++)
                want[j / BK] += (double)esa_round_to(
                                    (float)(exp((double)s[j] - (double)top) / total),
                                    ESA_DTYPE_F16) /
                                4.0;
        }
        for (int j = 0; j < nk; j++) {
            assert_true(fabs(want[j] - (double)got[I * nk + j]) < 2e-5);
            different += got[I * nk + j] != plain[I * nk + j];
        }
    }
    assert_true(different > nq * nk / 2); /* it really rounds */
    free(q.data);
    free(k.data);
    esa_ctx_free(ctx);
}

/* NaN and infinities in the data: no crash, lists stay ascending and in range, other heads are
 * untouched. */
static void odd_values(void **state)
{
    esa_rng r = { kit_seed("odd_values") };
    esa_ctx *ctx = kit_ctx(2);
    (void)state;
    for (int round = 0; round < 60; round++) {
        world w;
        const float odd[] = { NAN, INFINITY, -INFINITY, 3e38f };
        world_make(&w, &r, ctx, some_selector(&r), (int32_t)esa_rng_below(&r, 3));
        suit(&w, ctx);
        for (int c = 0; c < 3; c++) {
            const kit_tensor *t = c ? &w.k : &w.q;
            const int64_t n = t->view.dim[0] * t->view.dim[1] * t->view.dim[2] * t->view.dim[3];
            esa_store_f32(t->data, esa_rng_below(&r, (uint32_t)n), t->view.dtype,
                          odd[esa_rng_below(&r, 4)]);
        }
        free(kit_select_bytes(ctx, &w.q.view, &w.k.view, &w.p)); /* checks range and order */
        world_free(&w);
    }
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bits_any_threads), cmocka_unit_test(views_do_not_matter),
        cmocka_unit_test(kv_len_is_truncation),  cmocka_unit_test(windows_do_not_matter),
        cmocka_unit_test(exact_mean_budget),     cmocka_unit_test(ada_flags),
        cmocka_unit_test(random_is_uniform),     cmocka_unit_test(rf_compat_with_text),
        cmocka_unit_test(entropy_rounding),      cmocka_unit_test(odd_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
