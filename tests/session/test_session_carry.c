/* test_session_carry.c - sessions that carry: where the anchors are, what calls add, when a
 * difference is dropped, its memory, its work, and what sessions refuse.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/mini_model.h"
#include "common/tests.h"

#include <math.h>
#include "common/on_gpu.h"
#include "common/one_ctx.h"

/* The error selector as recommended, in blocks of 16 x 16, with anchors at these steps. */
static esa_session_params carry_params(const mini *m, const int32_t *anchors, int32_t count)
{
    const esa_session_params plain = mini_sparse_params(m);
    esa_session_params p = esa_session_params_recommended(ESA_SESSION_ONLINE, ESA_SELECT_ERROR, 0);
    p.layers = m->layers;
    p.steps = m->steps;
    p.branches = m->branches;
    memcpy(p.select.layout.grid_q, plain.select.layout.grid_q, sizeof p.select.layout.grid_q);
    p.select.layout.text_front_q = m->text;
    p.select.block_q = p.select.block_k = 16;
    p.select.budget = 0.3;
    p.anchors = anchors;
    p.anchor_count = count;
    return p;
}

static esa_session *session_of(const esa_session_params *p)
{
    esa_session *s;
    ok(ctx, esa_session_create(ctx, &s, p));
    ok(ctx, esa_session_begin(s));
    return s;
}

static void attend(const mini *m, esa_session *s, int32_t layer, int32_t step, int32_t branch)
{
    const mini_views t = mini_view(m);
    ok(ctx, esa_session_step(s, step, branch));
    ok(ctx, esa_session_attention(s, layer, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, NULL));
}

/* 1 if the output of the mini model is the dense one. */
static int is_dense(const mini *m)
{
    const size_t bytes = (size_t)mini_size(m) * 4;
    const mini_views t = mini_view(m);
    float *o = malloc(bytes);
    memcpy(o, m->o, bytes);
    ok(ctx, esa_attention(ctx, &t.q, &t.k, &t.v, &t.o, NULL, NULL));
    const int same = memcmp(o, m->o, bytes) == 0;
    memcpy(m->o, o, bytes);
    free(o);
    return same;
}

/* ---------------------------------------------------------------- anchors */

static void test_rule(void **state)
{
    (void)state;
    static const struct {
        int32_t carry, steps, branches, count, step[8];
    } rule[] = {
        { ESA_CARRY_AUTO, 50, 2, 6, { 0, 5, 10, 18, 28, 38 } },
        { ESA_CARRY_AUTO, 8, 2, 3, { 0, 2, 4 } },
        { ESA_CARRY_AUTO, 25, 2, 5, { 0, 3, 7, 12, 18 } },
        { ESA_CARRY_AUTO, 6, 2, 3, { 0, 1, 3 } },
        { ESA_CARRY_AUTO, 5, 2, 0, { 0 } },
        { ESA_CARRY_AUTO, 1, 2, 0, { 0 } },
        { ESA_CARRY_AUTO, 8, 0, 3, { 0, 2, 4 } }, /* not known: as with guidance */
        { ESA_CARRY_AUTO, 8, 1, 0, { 0 } },       /* one branch pays for the whole step */
        { ESA_CARRY_AUTO, 19, 1, 0, { 0 } },
        { ESA_CARRY_AUTO, 20, 1, 5, { 0, 2, 5, 9, 14 } },
        { ESA_CARRY_AUTO, 50, 1, 6, { 0, 5, 10, 18, 28, 38 } },
        { 3, 8, 1, 3, { 0, 2, 4 } },
        { ESA_CARRY_OFF, 50, 2, 0, { 0 } },
        { 1, 50, 2, 1, { 0 } },
        { 1, 1, 2, 1, { 0 } },
        { 4, 4, 2, 4, { 0, 1, 2, 3 } },
        { 5, 4, 2, 0, { 0 } },
        { -2, 4, 2, 0, { 0 } },
    };
    for (size_t i = 0; i < sizeof rule / sizeof rule[0]; i++) {
        int32_t anchors[64];
        assert_int_equal(esa_carry_anchors(NULL, rule[i].carry, rule[i].steps, rule[i].branches),
                         rule[i].count);
        assert_int_equal(esa_carry_anchors(anchors, rule[i].carry, rule[i].steps, rule[i].branches),
                         rule[i].count);
        for (int32_t k = 0; k < rule[i].count; k++) assert_int_equal(anchors[k], rule[i].step[k]);
    }
    static const struct { /* the first step of a second transformer is an anchor too */
        int32_t count, first, want, step[5];
    } change[] = { { 3, 4, 4, { 0, 3, 4, 7 } }, { 3, 3, 3, { 0, 3, 7 } },
                   { 3, 9, 4, { 0, 3, 7, 9 } }, { 3, 10, 3, { 0, 3, 7 } },
                   { 3, -1, 3, { 0, 3, 7 } },   { 3, 0, 3, { 0, 3, 7 } },
                   { 0, 4, 0, { 0 } } };
    for (size_t i = 0; i < sizeof change / sizeof change[0]; i++) {
        int32_t anchors[10] = { 0, 3, 7 };
        assert_int_equal(esa_carry_switch(anchors, change[i].count, 10, change[i].first),
                         change[i].want);
        for (int32_t k = 0; k < change[i].want; k++)
            assert_int_equal(anchors[k], change[i].step[k]);
    }
    int32_t all[2] = { 0, 1 }; /* every step is one: there is no room for more */
    assert_int_equal(esa_carry_switch(all, 2, 2, 1), 2);
    for (int32_t steps = 1; steps <= 64; steps++) /* ascending and inside, whatever is asked for */
        for (int32_t n = 1; n <= steps; n++) {
            int32_t anchors[64];
            assert_int_equal(esa_carry_anchors(anchors, n, steps, 2), n);
            assert_int_equal(anchors[0], 0);
            for (int32_t k = 1; k < n; k++) assert_true(anchors[k] > anchors[k - 1]);
            assert_true(anchors[n - 1] < steps);
        }
}

static void refused(esa_session_params p, esa_status expected, const char *words)
{
    esa_session *s;
    assert_int_equal(esa_session_create(ctx, &s, &p), expected);
    assert_null(s);
    if (!strstr(esa_ctx_error(ctx), words))
        fail_msg("expected '%s' in: %s", words, esa_ctx_error(ctx));
}

static void *no_memory(void *user, int64_t bytes)
{
    (void)user;
    (void)bytes;
    return NULL;
}

static void test_refusals(void **state)
{
    (void)state;
    mini m = mini_make(1, 6, 2, 1);
    static const int32_t falling[] = { 0, 3, 2 }, twice[] = { 1, 1 }, late[] = { 6 },
                         early[] = { -1 }, good[] = { 0, 3 };
    const esa_session_params p = carry_params(&m, NULL, 0);
    esa_session_params q = p;
    q.carry = 7;
    refused(q, ESA_ERR_ARGUMENT, "carry is 7");
    q.carry = -2;
    refused(q, ESA_ERR_ARGUMENT, "carry is -2");
    refused(carry_params(&m, falling, 3), ESA_ERR_ARGUMENT, "anchor 2 is step 2");
    refused(carry_params(&m, twice, 2), ESA_ERR_ARGUMENT, "anchor 1 is step 1");
    refused(carry_params(&m, late, 1), ESA_ERR_ARGUMENT, "anchor 0 is step 6");
    refused(carry_params(&m, early, 1), ESA_ERR_ARGUMENT, "anchor 0 is step -1");
    refused(carry_params(&m, NULL, 2), ESA_ERR_ARGUMENT, "anchors is NULL");
    refused(carry_params(&m, good, -1), ESA_ERR_ARGUMENT, "anchor_count is -1");
    q = carry_params(&m, good, 2);
    q.carry = ESA_CARRY_OFF;
    refused(q, ESA_ERR_ARGUMENT, "carry is ESA_CARRY_OFF");
    q = p;
    q.carry_format = 2;
    refused(q, ESA_ERR_ARGUMENT, "carry_format is 2");
    q = p;
    q.carry_room = -2;
    refused(q, ESA_ERR_ARGUMENT, "carry_room is -2");
    q = p;
    q.carry_alloc = no_memory;
    refused(q, ESA_ERR_ARGUMENT, "carry_free is NULL");
    q = mini_sparse_params(&m);
    q.select.layout = esa_layout_default();
    q.carry = 2;
    q.select.causal = q.attention.causal = 1;
    refused(q, ESA_ERR_UNSUPPORTED, "causal attention does not carry");
    q = p;
    q.attention.exact_rows = -2;
    refused(q, ESA_ERR_ARGUMENT, "exact_rows is -2");
    mini_free(&m);
}

/* ---------------------------------------------------------------- what calls do */

/* A session does what a caller would do by hand, to the bit: at anchors the first branch is dense
 * and the second adds its difference; later steps use mask, order and difference of the anchor. */
static void test_by_hand(void **state)
{
    (void)state;
    if (on_gpu())
        skip(); /* masks made by hand are on the CPU there; tests/cuda has calls by hand */
    mini m = mini_make(2, 7, 2, 2);
    const mini_views t = mini_view(&m);
    static const int32_t anchors[] = { 0, 2, 5 };
    const int32_t formats[] = { ESA_CARRY_E4M3, ESA_CARRY_BF16 };
    for (int32_t f = 0; f < 2; f++) {
        esa_session_params p = carry_params(&m, anchors, 3);
        p.carry_format = formats[f];
        esa_attention_params sparse = p.attention;
        sparse.exact_rows = 0;
        esa_session *s = session_of(&p);
        const int64_t bytes = esa_carry_bytes(formats[f], m.B, m.H, m.N, m.D);
        float *o = malloc((size_t)mini_size(&m) * 4);
        esa_mask *mask[2] = { NULL, NULL };
        void *memory[2];
        esa_carry d[2];
        for (int32_t l = 0; l < 2; l++) {
            memory[l] = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
            d[l] = esa_carry_view(memory[l], formats[f], m.B, m.H, m.N, m.D);
        }
        for (int32_t step = 0; step < 7; step++)
            for (int32_t branch = 0; branch < 2; branch++)
                for (int32_t l = 0; l < 2; l++) {
                    const int anchor = branch == 0 && (step == 0 || step == 2 || step == 5);
                    mini_fill(&m, l, step, branch);
                    attend(&m, s, l, step, branch);
                    memcpy(o, m.o, (size_t)mini_size(&m) * 4);
                    if (anchor) {
                        esa_mask_free(mask[l]);
                        ok(ctx, esa_select_qkv(ctx, &mask[l], &t.q, &t.k, &t.v, &p.select));
                        ok(ctx, esa_attention(ctx, &t.q, &t.k, &t.v, &t.o, NULL, NULL));
                    }
                    ok(ctx, esa_attention_carry(ctx, &t.q, &t.k, &t.v, &t.o, mask[l], &sparse,
                                                &d[l], anchor ? ESA_CARRY_MAKE : ESA_CARRY_ADD));
                    if (memcmp(o, m.o, (size_t)mini_size(&m) * 4))
                        fail_msg("format %d, step %d, branch %d, layer %d: other bits", f, step,
                                 branch, l);
                    if (anchor) assert_true(is_dense(&m));
                }
        const esa_session_stats all = mini_stats(s, -1, -1), later = mini_stats(s, 1, 4);
        assert_int_equal(all.masks_made, 6);
        assert_int_equal(all.anchor_calls, 6);
        assert_int_equal(all.carried_calls, 28 - 6);
        assert_int_equal(all.sparse_calls, 28);
        assert_int_equal(later.carried_calls, 2);
        assert_true(later.carry_age == 2);
        assert_int_equal(all.carry_bytes + all.carry_host_bytes, 2 * bytes);
        for (int32_t l = 0; l < 2; l++) {
            esa_mask_free(mask[l]);
            free(memory[l]);
        }
        free(o);
        esa_session_free(s);
    }
    mini_free(&m);
}

/* Where nothing changes after an anchor, every output is the dense one, but for the rounding of the
 * difference: E4M3 has 4 bits of mantissa, so an element is off by at most 1/16 of itself or by
 * half a step of the smallest numbers, 2^-10, of the row's scale. Both are at most 1/16 of the
 * row's largest difference. */
static void test_static(void **state)
{
    (void)state;
    mini m = mini_make(1, 4, 2, 1);
    const mini_views t = mini_view(&m);
    const size_t bytes = (size_t)mini_size(&m) * 4;
    float *dense = malloc(bytes), *sparse = malloc(bytes);
    esa_session_params p = carry_params(&m, NULL, 0), off = p;
    off.carry = ESA_CARRY_OFF;
    off.attention.exact_rows = 0;
    p.carry = 1;
    mini_fill(&m, 0, 0, 0);
    ok(ctx, esa_attention(ctx, &t.q, &t.k, &t.v, &t.o, NULL, NULL));
    memcpy(dense, m.o, bytes);
    esa_session *s = session_of(&off);
    attend(&m, s, 0, 0, 0);
    memcpy(sparse, m.o, bytes);
    esa_session_free(s);
    s = session_of(&p);
    for (int32_t step = 0; step < 4; step++)
        for (int32_t branch = 0; branch < 2; branch++) {
            attend(&m, s, 0, step, branch);
            for (int64_t row = 0; row < m.B * m.H * m.N; row++) {
                float most = 0;
                for (int64_t i = row * m.D; i < (row + 1) * m.D; i++)
                    most = fmaxf(most, fabsf(dense[i] - sparse[i]));
                for (int64_t i = row * m.D; i < (row + 1) * m.D; i++)
                    assert_true(fabsf(m.o[i] - dense[i]) <= most / 16 + 1e-6f); /* f32 sums */
            }
        }
    assert_int_equal(mini_stats(s, -1, -1).anchor_calls, 1);
    esa_session_free(s);
    free(dense);
    free(sparse);
    mini_free(&m);
}

/* Every selector and tail carries when asked, in any layout, and the bits do not depend on
 * threads. */
static void test_selectors(void **state)
{
    (void)state;
    static const int32_t selector[] = { ESA_SELECT_ENTROPY, ESA_SELECT_RF_V2, ESA_SELECT_ADA_BSA,
                                        ESA_SELECT_RANDOM, ESA_SELECT_ERROR };
    for (size_t i = 0; i < sizeof selector / sizeof selector[0]; i++)
        for (int32_t tail = ESA_TAIL_NONE; tail <= ESA_TAIL_LEVELS; tail++) {
            uint64_t hash[2];
            mini m = mini_make(1, 5, 2, 1);
            m.text = i % 2 ? 7 : 0;
            m.grid[0] -= m.text ? 1 : 0;
            m.N = (int64_t)m.grid[0] * m.grid[1] * m.grid[2] + m.text;
            esa_ctx *mine = ctx;
            for (int32_t k = 0; k < 2; k++) {
                esa_ctx_params threads = esa_ctx_params_default();
                threads.threads = k ? 3 : 1;
                esa_session *s;
                assert_int_equal(esa_ctx_create(&ctx, &threads), ESA_OK);
                esa_session_params p = mini_sparse_params(&m);
                const esa_layout layout = p.select.layout;
                p.select = esa_select_params_default(selector[i]);
                p.select.layout = layout;
                p.select.block_q = p.select.block_k = 16;
                p.select.tail = tail == ESA_TAIL_CENTROID ? ESA_TAIL_POOLED : tail;
                p.attention.tail = tail;
                p.share_branches = 1;
                p.carry = 2;
                ok(ctx, esa_session_create(ctx, &s, &p));
                ok(ctx, mini_run(&m, s, &hash[k]));
                assert_int_equal(mini_stats(s, -1, -1).anchor_calls, 2);
                assert_int_equal(mini_stats(s, -1, -1).carried_calls, 8);
                esa_session_free(s);
                esa_ctx_free(ctx);
            }
            ctx = mine;
            if (hash[0] != hash[1]) fail_msg("selector %zu, tail %d: other bits", i, tail);
            mini_free(&m);
        }
}

/* ---------------------------------------------------------------- when it is dropped */

/* A second video has the bits of a first one: nothing of the video before survives. */
static void test_new_video(void **state)
{
    (void)state;
    mini m = mini_make(1, 4, 2, 1);
    uint64_t first, second, third;
    esa_session_params p = carry_params(&m, NULL, 0);
    p.carry = 2;
    esa_session *s = session_of(&p);
    m.prompt = 1;
    ok(ctx, mini_run(&m, s, &first));
    m.prompt = 2;
    ok(ctx, mini_run(&m, s, &second));
    m.prompt = 1;
    ok(ctx, mini_run(&m, s, &third));
    assert_true(first == third && first != second);
    esa_session_free(s);
    mini_free(&m);
}

/* Another size, and other key lengths, in the middle of a video begin with an anchor. */
static void test_new_size(void **state)
{
    (void)state;
    mini m = mini_make(1, 6, 1, 1);
    esa_session_params p = mini_sparse_params(&m);
    p.select.layout = esa_layout_default(); /* no grid, so any number of tokens */
    p.carry = 1;
    p.attention.tail = ESA_TAIL_POOLED;
    esa_session *s = session_of(&p);
    const int64_t N = m.N;
    static const int32_t part[] = { 150 }, other[] = { 151 };
    /* a GPU cannot read lengths, so it does not compare them */
    for (int32_t step = 0; step < (on_gpu() ? 4 : 6); step++) {
        m.N = step == 2 || step == 3 ? N - 40 : N;
        mini_fill(&m, 0, step, 0);
        ok(ctx, esa_session_set_kv_len(s, step == 4 ? part : step == 5 ? other : NULL));
        attend(&m, s, 0, step, 0);
        const int anchor = step != 1 && step != 3; /* two sizes, two lengths */
        assert_int_equal(mini_stats(s, 0, step).anchor_calls, anchor);
        if (step < 4) assert_int_equal(is_dense(&m), anchor);
    }
    esa_session_free(s);
    mini_free(&m);
}

/* A second transformer has branches of its own. The switch is an anchor, and it frees the
 * differences of the first. */
static void test_two_transformers(void **state)
{
    (void)state;
    mini m = mini_make(2, 6, 4, 1);
    esa_session_params p = carry_params(&m, NULL, 0);
    p.carry = 1;
    p.step_branches = 2;
    esa_session *s = session_of(&p);
    for (int32_t step = 0; step < 6; step++)
        for (int32_t branch = 0; branch < 2; branch++)
            for (int32_t layer = 0; layer < 2; layer++) {
                mini_fill(&m, layer, step, branch);
                attend(&m, s, layer, step, branch + (step < 3 ? 0 : 2));
                const int anchor = branch == 0 && (step == 0 || step == 3);
                assert_int_equal(is_dense(&m), anchor);
            }
    const esa_session_stats all = mini_stats(s, -1, -1);
    assert_int_equal(all.anchor_calls, 4);
    assert_int_equal(all.carry_bytes, 2 * esa_carry_bytes(ESA_CARRY_E4M3, m.B, m.H, m.N, m.D));
    esa_session_free(s);
    mini_free(&m);
}

/* Branches that do not share have differences of their own; one that runs alone makes its own. */
static void test_branches(void **state)
{
    (void)state;
    mini m = mini_make(1, 6, 2, 1);
    const int64_t bytes = esa_carry_bytes(ESA_CARRY_E4M3, m.B, m.H, m.N, m.D);
    esa_session_params p = carry_params(&m, NULL, 0);
    p.carry = 2; /* 0 and 2 */
    p.share_branches = 0;
    esa_session *s = session_of(&p);
    for (int32_t step = 0; step < 6; step++)
        for (int32_t branch = 0; branch < 2; branch++) {
            mini_fill(&m, 0, step, branch);
            attend(&m, s, 0, step, branch);
            assert_int_equal(is_dense(&m), step == 0 || step == 2);
        }
    assert_int_equal(mini_stats(s, -1, -1).anchor_calls, 4);
    assert_int_equal(mini_stats(s, -1, -1).carry_bytes, 2 * bytes);
    esa_session_free(s);
    p.share_branches = 1;
    s = session_of(&p);
    mini_fill(&m, 0, 0, 0);
    attend(&m, s, 0, 0, 0);
    attend(&m, s, 0, 0, 1);
    attend(&m, s, 0, 1, 1); /* alone */
    assert_true(is_dense(&m));
    attend(&m, s, 0, 2, 0);
    assert_true(is_dense(&m));
    attend(&m, s, 0, 2, 1);
    assert_false(is_dense(&m));
    esa_session_free(s);
    mini_free(&m);
}

/* Steps that are left out are never anchors, and age the difference. */
static void test_left_out(void **state)
{
    (void)state;
    mini m = mini_make(1, 12, 1, 1);
    static const int32_t anchors[] = { 0, 4, 6 }, runs[] = { 0, 3, 5, 7, 11 };
    const esa_session_params p = carry_params(&m, anchors, 3);
    esa_session *s = session_of(&p);
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        mini_fill(&m, 0, runs[i], 0);
        attend(&m, s, 0, runs[i], 0);
        const int anchor = runs[i] == 0 || runs[i] == 5 || runs[i] == 7;
        assert_int_equal(mini_stats(s, 0, runs[i]).anchor_calls, anchor);
        assert_int_equal(is_dense(&m), anchor);
    }
    assert_true(mini_stats(s, 0, 11).carry_age == 4);
    assert_true(mini_stats(s, 0, 3).carry_age == 3);
    assert_true(isnan(mini_stats(s, 0, 5).carry_age));
    esa_session_free(s);
    mini_free(&m);
}

/* ---------------------------------------------------------------- memory and work */

static void test_room(void **state)
{
    (void)state;
    mini m = mini_make(3, 4, 2, 1);
    const mini_views t = mini_view(&m);
    const int64_t bytes = esa_carry_bytes(ESA_CARRY_E4M3, m.B, m.H, m.N, m.D);
    esa_session_params p = carry_params(&m, NULL, 0);
    p.carry = 1;
    p.carry_room = 2 * bytes;
    esa_session *s = session_of(&p);
    mini_fill(&m, 0, 0, 0);
    if (!on_gpu()) { /* a GPU has host memory for the third */
        ok(ctx, esa_session_step(s, 0, 0));
        assert_int_equal(esa_session_attention(s, 0, ESA_CALL_SELF, &t.q, &t.k, &t.v, &t.o, NULL),
                         ESA_ERR_MEMORY);
        assert_non_null(strstr(esa_ctx_error(ctx), "raise carry_room, or turn carry off"));
        assert_non_null(strstr(esa_ctx_error(ctx), "from layer 2 on"));
    }
    esa_session_free(s);
    p.strict = 0;
    s = session_of(&p);
    for (int32_t step = 0; step < 4; step++)
        for (int32_t layer = 0; layer < 3; layer++) {
            mini_fill(&m, layer, step, 0);
            attend(&m, s, layer, step, 0);
        }
    const esa_session_stats all = mini_stats(s, -1, -1), last = mini_stats(s, 2, -1);
    /* on a GPU three lanes, through which all of them pass */
    assert_int_equal(all.carry_bytes, (on_gpu() ? 3 : 2) * bytes);
    if (!on_gpu()) {
        assert_int_equal(all.anchor_calls, 2);
        assert_int_equal(all.carried_calls, 6);
        assert_int_equal(last.anchor_calls + last.carried_calls, 0);
        assert_int_equal(last.sparse_calls, 4);
    }
    esa_session_free(s);
    mini_free(&m);
}

/* The same bits, wherever the differences are: all on the device, some of them, none; in memory of
 * the caller; and with two branches that do not share. */
static int64_t taken;

static void *take(void *user, int64_t bytes)
{
    void *ptr;
    if (esa_device_alloc(user, &ptr, bytes)) return NULL;
    taken += bytes;
    return ptr;
}

static void give(void *user, void *ptr, int64_t bytes)
{
    taken -= bytes;
    esa_device_free(user, ptr);
}

static void test_streamed(void **state)
{
    (void)state;
    mini m = mini_make(6, 3, 2, 1);
    const int64_t bytes = esa_carry_bytes(ESA_CARRY_E4M3, m.B, m.H, m.N, m.D);
    esa_ctx *other;
    assert_int_equal(esa_ctx_create(&other, NULL), ESA_OK);
    for (int32_t share = 0; share < 2; share++) {
        const int64_t rooms[] = { -1, 0, 5 * bytes };
        uint64_t expected = 0, hash;
        for (size_t i = 0; i < 2 * sizeof rooms / sizeof rooms[0]; i++) {
            esa_session_params p = carry_params(&m, NULL, 0);
            p.carry = 2;
            p.share_branches = share;
            p.carry_room = rooms[i / 2];
            if (i % 2) {
                p.carry_alloc = take;
                p.carry_free = give;
                p.carry_user = other;
            }
            esa_session *s = session_of(&p);
            for (int32_t video = 0; video < (i > 1 ? 2 : 1); video++) {
                ok(ctx, mini_run(&m, s, &hash));
                if (!expected) expected = hash;
                if (hash != expected) fail_msg("share %d, room %zu: other bits", share, i);
            }
            const esa_session_stats all = mini_stats(s, -1, -1);
            const int64_t diffs = share ? 6 : 12,
                          wanted = p.carry_room < 0 ? diffs : p.carry_room / bytes,
                          lanes = wanted >= diffs ? 0 : 3,
                          resident = lanes ? (wanted > 3 ? wanted - 3 : 0) : diffs;
            assert_int_equal(all.anchor_calls, 2 * diffs);
            assert_int_equal(all.carry_bytes, (resident + lanes) * bytes);
            assert_int_equal(all.carry_host_bytes, (diffs - resident) * bytes);
            assert_int_equal(taken, i % 2 ? all.carry_bytes : 0);
            esa_session_free(s);
            assert_int_equal(taken, 0);
        }
    }
    esa_ctx_free(other);
    mini_free(&m);
}

/* The work that the solver expects is the work that a run spends, within one block a row. */
static void test_work(void **state)
{
    (void)state;
    for (int32_t share = 0; share < 2; share++) {
        mini m = mini_make(2, 10, 2, 1);
        esa_session_params p = carry_params(&m, NULL, 0);
        p.share_branches = share;
        p.carry = 2;
        p.work = share ? 0.6 : 0.7;
        esa_session *s = session_of(&p);
        ok(ctx, mini_run(&m, s, NULL));
        const esa_session_stats all = mini_stats(s, -1, -1);
        assert_int_equal(all.anchor_calls, share ? 4 : 8);
        if (!(fabs(all.work - p.work) < 1.0 / 15)) /* 15 blocks a row */
            fail_msg("work %g, asked for %g", all.work, p.work);
        /* An anchor costs mask, order and one dense call more than a later call; a shared one costs
         * that for two calls. Masks of two anchors differ by less than a block a row. */
        esa_work_costs costs = { .struct_size = sizeof costs };
        esa_shapes shapes = shapes_of(ESA_DTYPE_F32, m.B, m.H, m.N, m.D);
        ok(ctx, esa_session_costs(ctx, &costs, &p, &shapes));
        const double more = mini_stats(s, 0, 0).work - mini_stats(s, 0, 9).work,
                     expected = (1 + costs.select + costs.order) / (share ? 2 : 1);
        assert_true(costs.exact == 0 && costs.carry == 2);
        if (!(fabs(more - expected) < 1.0 / 15))
            fail_msg("share %d: an anchor costs %g more, expected %g", share, more, expected);
        esa_session_free(s);
        mini_free(&m);
    }
}

/* Presets: never more work with carry than without, less in long runs. */
static void test_presets(void **state)
{
    (void)state;
    static const double off[] = { 0.57, 0.44, 0.30 };
    for (int32_t preset = 0; preset < 3; preset++) {
        double before = off[preset];
        assert_true(esa_preset_work(preset) == off[preset]);
        assert_true(esa_preset_work_for(preset, 50, ESA_CARRY_OFF, 2) == off[preset]);
        assert_true(esa_preset_work_for(preset, 5, ESA_CARRY_AUTO, 2) == off[preset]);
        for (int32_t steps = 6; steps < 200; steps++) {
            const double work = esa_preset_work_for(preset, steps, ESA_CARRY_AUTO, 2);
            assert_true(work > 0 && work <= before);
            if (preset)
                assert_true(work < esa_preset_work_for(preset - 1, steps, ESA_CARRY_AUTO, 2));
            before = work;
        }
        assert_true(before < off[preset]);
        /* Without guidance short runs do not carry, so they take the works of runs without. */
        assert_true(esa_preset_work_for(preset, 19, ESA_CARRY_AUTO, 1) == off[preset]);
        assert_true(esa_preset_work_for(preset, 50, ESA_CARRY_AUTO, 1) == before);
    }
    assert_true(isnan(esa_preset_work_for(3, 50, 0, 2)) &&
                isnan(esa_preset_work_for(-1, 50, 0, 2)));
    assert_true(isnan(esa_preset_work_for(0, 0, 0, 2)));
}

/* Exact rows by default: two without carry, none with it, and what was asked for in any case. */
static void test_exact_rows(void **state)
{
    (void)state;
    mini m = mini_make(1, 4, 1, 1);
    double work[3];
    for (int32_t i = 0; i < 3; i++) {
        esa_session_params p = carry_params(&m, NULL, 0);
        p.carry = i == 0 ? ESA_CARRY_OFF : 1;
        p.attention.exact_rows = i == 2 ? 2 : -1;
        esa_session *s = session_of(&p);
        ok(ctx, mini_run(&m, s, NULL));
        work[i] = mini_stats(s, 0, 3).work;
        esa_session_free(s);
    }
    /* two rows of sixteen */
    assert_true(fabs(work[0] - work[1] - 0.125) < 0.03 && fabs(work[2] - work[1] - 0.125) < 0.03);
    mini_free(&m);
}

int main(void)
{
    const struct CMUnitTest both[] = {
        cmocka_unit_test(test_rule),     cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_static),   cmocka_unit_test(test_new_video),
        cmocka_unit_test(test_new_size), cmocka_unit_test(test_two_transformers),
        cmocka_unit_test(test_branches), cmocka_unit_test(test_left_out),
        cmocka_unit_test(test_room),     cmocka_unit_test(test_work),
        cmocka_unit_test(test_presets),  cmocka_unit_test(test_exact_rows),
    };
    /* masks made by hand are on the CPU, and threads are a matter of the CPU */
    const struct CMUnitTest on_cpu[] = { cmocka_unit_test(test_by_hand),
                                         cmocka_unit_test(test_selectors) };
    /* a CPU has one kind of memory */
    const struct CMUnitTest on_a_gpu[] = { cmocka_unit_test(test_streamed) };
    const int failed = cmocka_run_group_tests(both, setup, teardown);
    return failed + (on_gpu() ? cmocka_run_group_tests(on_a_gpu, setup, teardown)
                              : cmocka_run_group_tests(on_cpu, setup, teardown));
}
