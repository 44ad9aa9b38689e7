/* test_plan_order.c - plans with the error selector, levels and an adaptive order: the same bits as
 * one call, no allocation while executing, memory failing at every point, bad input.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ESA_EXPERIMENTAL
#include "common/tests.h"
#include "esa/esa.h"
#include "common/counting.h"
#include "common/naive.h"
#include "common/on_gpu.h"

/* 3 x 8 x 9 video tokens and 11 of text; 7 query blocks of 32, 15 key blocks of 16. */
enum { B = 2, H = 4, HKV = 2, N = 227, D = 40, NQ = 8, NK = 15, OUT = B * H * N * D * 4 };

static esa_ctx *counting_ctx(counting *count)
{
    const esa_ctx_params cp = counting_params(count, 2);
    esa_ctx *ctx = NULL;
    return esa_ctx_create(&ctx, &cp) ? NULL : ctx;
}

typedef struct data {
    float x[B * H * N * D * 4];
    esa_tensor q, k, v, o;
} data;

static data *make_data(void)
{
    data *d = malloc(sizeof *d);
    const int64_t n = B * H * N * D;
    d->q = esa_tensor_bnsd(d->x, ESA_DTYPE_F32, B, H, N, D);
    d->k = esa_tensor_bnsd(d->x + n, ESA_DTYPE_F32, B, HKV, N, D);
    d->v = esa_tensor_bnsd(d->x + 2 * n, ESA_DTYPE_F32, B, HKV, N, D);
    d->o = esa_tensor_bnsd(d->x + 3 * n, ESA_DTYPE_F32, B, H, N, D);
    tensor_fill(&d->q, test_seed(), 3.0);
    tensor_fill(&d->k, test_seed() + 1, 3.0);
    tensor_fill(&d->v, test_seed() + 2, 1.0);
    memset(d->o.data, 0xff, OUT);
    return d;
}

static esa_select_params select_params(int32_t tail, int32_t order)
{
    esa_select_params p = esa_select_params_default(ESA_SELECT_ERROR);
    p.block_q = 32;
    p.block_k = 16;
    p.budget = 0.4;
    p.tail = tail;
    p.layout.order = order;
    p.layout.grid_q[0] = 3;
    p.layout.grid_q[1] = 8;
    p.layout.grid_q[2] = 9;
    p.layout.text_front_q = 4;
    p.layout.text_back_q = 7;
    p.layout.protect_first_frame = 1;
    return p;
}

static esa_shapes shapes(void)
{
    esa_shapes s = esa_shapes_default();
    s.B = B;
    s.Hq = H;
    s.Hkv = HKV;
    s.Nq = s.Nk = N;
    s.D = D;
    return s;
}

static void expect_ok(esa_ctx *ctx, esa_status status)
{
    if (status) fail_msg("%s: %s", esa_status_name(status), esa_ctx_error(ctx));
}

static void expect_same_masks(const esa_mask *a, const esa_mask *b, int32_t adaptive)
{
    static uint8_t level[2][B * H * NQ * NK];
    assert_int_equal(esa_mask_to_levels(a, level[0]), ESA_OK);
    assert_int_equal(esa_mask_to_levels(b, level[1]), ESA_OK);
    assert_memory_equal(level[0], level[1], sizeof level[0]);
    static int32_t q[2][B * H * N], k[2][B * HKV * N];
    int64_t heads = 0;
    if (!adaptive) {
        assert_int_equal(esa_mask_get_orders(a, q[0], k[0], &heads), ESA_ERR_STATE);
        return;
    }
    assert_int_equal(esa_mask_get_orders(a, q[0], k[0], &heads), ESA_OK);
    assert_int_equal(heads, HKV);
    assert_int_equal(esa_mask_get_orders(b, q[1], k[1], NULL), ESA_OK);
    assert_memory_equal(q[0], q[1], sizeof q[0]);
    assert_memory_equal(k[0], k[1], sizeof k[0]);
    /* an order made from q and k, not the one it starts from; heads differ */
    assert_memory_not_equal(q[0], q[0] + N, N * 4);
    assert_memory_not_equal(k[0], k[0] + N, N * 4);
}

static void test_plan_equals_one_call(void **state)
{
    (void)state;
    static const int32_t tails[] = { ESA_TAIL_NONE, ESA_TAIL_POOLED, ESA_TAIL_LEVELS };
    const int32_t kv_len[B] = { N, N - 5 };
    data *d = make_data();
    float *first = malloc(OUT);
    for (int i = 0; i < 6; i++) {
        const int32_t tail = tails[i % 3], adaptive = i < 3;
        counting count = { .left = -1 };
        esa_ctx *ctx = counting_ctx(&count);
        esa_select_params sp = select_params(tail,
                                             adaptive ? ESA_ORDER_ADAPTIVE : ESA_ORDER_HILBERT);
        esa_attention_params ap = esa_attention_params_default();
        ap.tail = tail;
        sp.kv_len = ap.kv_len = kv_len;
        esa_mask *mask, *planned, *copy;
        expect_ok(ctx, esa_select_qkv(ctx, &mask, &d->q, &d->k, &d->v, &sp));
        expect_ok(ctx, esa_attention(ctx, &d->q, &d->k, &d->v, &d->o, mask, &ap));
        memcpy(first, d->o.data, OUT);
        memset(d->o.data, 0xff, OUT);

        esa_shapes s = shapes();
        esa_plan *plan;
        int64_t bytes;
        expect_ok(ctx, esa_plan_create(ctx, &plan, &s, &sp, &ap));
        assert_int_equal(esa_plan_workspace(plan, &bytes), ESA_OK);
        expect_ok(ctx, esa_mask_create(plan, &planned));
        guarded ws = guard_alloc(bytes, 0);
        const int64_t calls = count.total;
        if (adaptive) expect_ok(ctx, esa_plan_order(plan, planned, &d->q, &d->k, ws.data));
        expect_ok(ctx, esa_plan_select_qkv(plan, planned, &d->q, &d->k, &d->v, ws.data));
        expect_ok(ctx,
                  esa_plan_attention(plan, planned, &d->q, &d->k, &d->v, &d->o, NULL, ws.data));
        assert_true(guard_check(&ws));
        assert_int_equal(count.total, calls); /* executing allocates nothing */
        assert_memory_equal(first, d->o.data, OUT);
        expect_same_masks(mask, planned, adaptive);
        if (!on_gpu()) /* there the views of this call would have to be the GPU's */
            assert_string_not_equal(esa_plan_kernel(plan, planned, &d->q, &d->k, &d->v, &d->o), "");

        /* A copy on the CPU has the lists, the levels and the orders. */
        expect_ok(ctx, esa_mask_to_device(ctx, &copy, planned, ESA_DEVICE_CPU));
        expect_same_masks(mask, copy, adaptive);
        memset(d->o.data, 0xff, OUT);
        expect_ok(ctx, esa_attention(ctx, &d->q, &d->k, &d->v, &d->o, copy, &ap));
        assert_memory_equal(first, d->o.data, OUT);

        guard_free(&ws);
        esa_mask_free(mask);
        esa_mask_free(planned);
        esa_mask_free(copy);
        esa_plan_free(plan);
        esa_ctx_free(ctx);
        assert_int_equal(count.live, 0);
    }
    free(first);
    free(d);
}

static esa_status whole_story(counting *count, data *d)
{
    static float errors[2 * B * H * NQ * NK];
    static uint8_t level[B * H * NQ * NK];
    static int32_t perm_q[B * H * N], perm_k[B * HKV * N];
    double mass[B * H];
    esa_mask *mask = NULL, *planned = NULL, *copy = NULL, *again = NULL;
    esa_plan *plan = NULL;
    esa_ctx *ctx = counting_ctx(count);
    if (!ctx) return ESA_ERR_MEMORY;
    const esa_select_params sp = select_params(ESA_TAIL_LEVELS, ESA_ORDER_ADAPTIVE);
    const esa_shapes s = shapes();
    esa_attention_params ap = esa_attention_params_default();
    ap.tail = ESA_TAIL_LEVELS;
    esa_status status = esa_select_qkv(ctx, &mask, &d->q, &d->k, &d->v, &sp);
    if (!status) status = esa_attention(ctx, &d->q, &d->k, &d->v, &d->o, mask, &ap);
    if (!status) status = esa_errors(ctx, errors, &d->q, &d->k, &d->v, &sp);
    if (!status) status = esa_mask_mass(ctx, mass, mask, &d->q, &d->k, NULL, 3);
    if (!status) status = esa_plan_create(ctx, &plan, &s, &sp, &ap);
    if (!status) status = esa_mask_create(plan, &planned);
    if (!status) status = esa_plan_order(plan, planned, &d->q, &d->k, NULL);
    if (!status) status = esa_plan_select_qkv(plan, planned, &d->q, &d->k, &d->v, NULL);
    if (!status) status = esa_plan_attention(plan, planned, &d->q, &d->k, &d->v, &d->o, NULL, NULL);
    if (!status) status = esa_mask_to_device(ctx, &copy, planned, ESA_DEVICE_CPU);
    if (!status) status = esa_mask_to_levels(copy, level);
    if (!status) status = esa_mask_get_orders(copy, perm_q, perm_k, NULL);
    if (!status) {
        esa_mask_info info;
        info.struct_size = sizeof info;
        esa_mask_get_info(copy, &info);
        status = esa_mask_from_levels(ctx, &again, &info, level);
    }
    if (!status) status = esa_mask_set_orders(ctx, again, perm_q, perm_k, HKV);
    if (!status) status = esa_attention(ctx, &d->q, &d->k, &d->v, &d->o, again, &ap);
    if (status && !on_gpu()) assert_non_null(strstr(esa_ctx_error(ctx), "memory"));
    esa_mask_free(mask);
    esa_mask_free(planned);
    esa_mask_free(copy);
    esa_mask_free(again);
    esa_plan_free(plan);
    esa_ctx_free(ctx);
    return status;
}

static void test_every_allocation_may_fail(void **state)
{
    (void)state;
    data *d = make_data();
    counting count = { .left = -1 };
    assert_int_equal(whole_story(&count, d), ESA_OK);
    assert_int_equal(count.live, 0);
    printf("%lld allocations\n", (long long)count.total);
    assert_true(count.total >= 8);
    /* What follows a failure does not depend on the processor: emulated, some of them have to do.
     */
    const int64_t step = getenv("ESA_TEST_EMULATED") ? 7 : 1;
    for (int64_t n = 1; n <= count.total; n += step) {
        counting failing = { .left = n - 1 };
        assert_int_equal(whole_story(&failing, d), ESA_ERR_MEMORY);
        assert_int_equal(failing.live, 0);
    }
    free(d);
}

static void expect(esa_ctx *ctx, esa_status got, esa_status want, const char *word)
{
    assert_int_equal(got, want);
    if (!strstr(esa_ctx_error(ctx), word))
        fail_msg("\"%s\" does not mention \"%s\"", esa_ctx_error(ctx), word);
}

/* Masks and calls in the wrong state, or made for another plan. */
static void test_wrong_states(void **state)
{
    (void)state;
    data *d = make_data();
    counting count = { .left = -1 };
    esa_ctx *ctx = counting_ctx(&count);
    const esa_select_params adaptive = select_params(ESA_TAIL_LEVELS, ESA_ORDER_ADAPTIVE),
                            hilbert = select_params(ESA_TAIL_LEVELS, ESA_ORDER_HILBERT),
                            pooled = select_params(ESA_TAIL_POOLED, ESA_ORDER_HILBERT);
    const esa_shapes s = shapes();
    esa_attention_params ap = esa_attention_params_default();
    ap.tail = ESA_TAIL_LEVELS;
    esa_plan *plan, *other, *third, *bare;
    esa_mask *mask, *flat;
    expect_ok(ctx, esa_plan_create(ctx, &plan, &s, &adaptive, &ap));
    expect_ok(ctx, esa_plan_create(ctx, &other, &s, &hilbert, &ap));
    expect_ok(ctx, esa_plan_create(ctx, &third, &s, &pooled, &ap));
    expect_ok(ctx, esa_plan_create(ctx, &bare, &s, NULL, &ap));
    expect_ok(ctx, esa_mask_create(plan, &mask));
    expect_ok(ctx, esa_mask_create(other, &flat));

    expect(ctx, esa_plan_select_qkv(plan, mask, &d->q, &d->k, &d->v, NULL), ESA_ERR_STATE,
           "no adaptive order yet");
    expect(ctx, esa_plan_order(other, flat, &d->q, &d->k, NULL), ESA_ERR_STATE, "ADAPTIVE");
    expect(ctx, esa_plan_order(bare, flat, &d->q, &d->k, NULL), ESA_ERR_STATE, "no selector");
    expect(ctx, esa_plan_order(plan, NULL, &d->q, &d->k, NULL), ESA_ERR_ARGUMENT, "mask is NULL");
    expect(ctx, esa_plan_order(plan, flat, &d->q, &d->k, NULL), ESA_ERR_MISMATCH, "order");
    expect(ctx, esa_plan_select_qkv(other, mask, &d->q, &d->k, &d->v, NULL), ESA_ERR_MISMATCH,
           "order");
    expect(ctx, esa_plan_select_qkv(third, flat, &d->q, &d->k, &d->v, NULL), ESA_ERR_MISMATCH,
           "4 fine means");
    expect(ctx, esa_plan_select(other, flat, &d->q, &d->k, NULL), ESA_ERR_ARGUMENT, "reads v");
    expect(ctx, esa_plan_select_qkv(other, flat, &d->q, &d->k, NULL, NULL), ESA_ERR_ARGUMENT,
           "reads v");
    esa_tensor v = d->v;
    v.dim[2] = N - 1;
    expect(ctx, esa_plan_select_qkv(other, flat, &d->q, &d->k, &v, NULL), ESA_ERR_SHAPE,
           "k and v differ in tokens");
    assert_int_equal(esa_plan_order(NULL, mask, &d->q, &d->k, NULL), ESA_ERR_ARGUMENT);

    /* A new order empties the mask. */
    expect_ok(ctx, esa_plan_order(plan, mask, &d->q, &d->k, NULL));
    expect(ctx, esa_plan_attention(plan, mask, &d->q, &d->k, &d->v, &d->o, NULL, NULL),
           ESA_ERR_STATE, "empty");
    expect_ok(ctx, esa_plan_select_qkv(plan, mask, &d->q, &d->k, &d->v, NULL));
    expect_ok(ctx, esa_plan_attention(plan, mask, &d->q, &d->k, &d->v, &d->o, NULL, NULL));
    expect_ok(ctx, esa_plan_order(plan, mask, &d->q, &d->k, NULL));
    expect(ctx, esa_plan_attention(plan, mask, &d->q, &d->k, &d->v, &d->o, NULL, NULL),
           ESA_ERR_STATE, "empty");
    expect_ok(ctx, esa_plan_select_qkv(plan, mask, &d->q, &d->k, &d->v, NULL));
    expect(ctx, esa_plan_attention(other, mask, &d->q, &d->k, &d->v, &d->o, NULL, NULL),
           ESA_ERR_MISMATCH, "order");
    const esa_status taken = esa_plan_attention(bare, mask, &d->q, &d->k, &d->v, &d->o, NULL, NULL);
    if (on_gpu())
        expect(ctx, taken, ESA_ERR_UNSUPPORTED, "no room to gather");
    else
        expect_ok(ctx, taken);

    esa_mask_free(mask);
    esa_mask_free(flat);
    esa_plan_free(plan);
    esa_plan_free(other);
    esa_plan_free(third);
    esa_plan_free(bare);
    esa_ctx_free(ctx);
    assert_int_equal(count.live, 0);
    free(d);
}

/* Params of the error selector, each with its message. */
static void test_params(void **state)
{
    (void)state;
    data *d = make_data();
    counting count = { .left = -1 };
    esa_ctx *ctx = counting_ctx(&count);
    esa_mask *mask;
#define EXPECT_SELECT(change, status, word)                                                        \
    do {                                                                                           \
        esa_select_params p = select_params(ESA_TAIL_LEVELS, ESA_ORDER_ADAPTIVE);                  \
        change;                                                                                    \
        expect(ctx, esa_select_qkv(ctx, &mask, &d->q, &d->k, &d->v, &p), status, word);            \
        assert_null(mask);                                                                         \
    } while (0)
    EXPECT_SELECT(p.selector = 6, ESA_ERR_ARGUMENT, "selector is 6");
    EXPECT_SELECT(p.mode = ESA_MODE_COMPAT, ESA_ERR_ARGUMENT, "no compat mode");
    EXPECT_SELECT(p.causal = 1, ESA_ERR_UNSUPPORTED, "bidirectional");
    EXPECT_SELECT(p.tail = ESA_TAIL_CENTROID, ESA_ERR_ARGUMENT, "tail of the error selector is 2");
    EXPECT_SELECT(p.fine = 3, ESA_ERR_ARGUMENT, "fine is 3");
    EXPECT_SELECT(p.fine = -8, ESA_ERR_ARGUMENT, "fine is -8");
    EXPECT_SELECT(p.fine = 16, ESA_ERR_ARGUMENT, "2 tokens or more");
    EXPECT_SELECT(p.group_k = 4, ESA_ERR_ARGUMENT, "group_k is 4");
    EXPECT_SELECT(p.group_k = 3, ESA_ERR_ARGUMENT, "group_k is 3");
    EXPECT_SELECT(p.group_q = 32, ESA_ERR_ARGUMENT, "group_q is 32");
    EXPECT_SELECT(p.group_q = -1, ESA_ERR_ARGUMENT, "group_q is -1");
    EXPECT_SELECT(p.reserved[0] = 1, ESA_ERR_ARGUMENT, "reserved");
    EXPECT_SELECT(p.layout.order_applied = 1, ESA_ERR_ARGUMENT, "order_applied is 1");
    EXPECT_SELECT(p.selector = ESA_SELECT_ENTROPY, ESA_ERR_ARGUMENT, "needs the error selector");
#undef EXPECT_SELECT
    esa_select_params p = select_params(ESA_TAIL_LEVELS, ESA_ORDER_ADAPTIVE);
    expect(ctx, esa_select(ctx, &mask, &d->q, &d->k, &p), ESA_ERR_ARGUMENT, "esa_select_qkv");
    expect(ctx, esa_select_qkv(ctx, NULL, &d->q, &d->k, &d->v, &p), ESA_ERR_ARGUMENT,
           "mask is NULL");
    expect(ctx, esa_errors(ctx, NULL, &d->q, &d->k, &d->v, &p), ESA_ERR_ARGUMENT, "out is NULL");
    float out;
    p.struct_size = 8;
    expect(ctx, esa_errors(ctx, &out, &d->q, &d->k, &d->v, &p), ESA_ERR_VERSION, "struct_size 8");
    if (!on_gpu()) { /* a GPU cannot look at lengths */
        const int32_t cut[B] = { N, N - 8 };
        p = select_params(ESA_TAIL_LEVELS, ESA_ORDER_ADAPTIVE);
        p.kv_len = cut;
        expect(ctx, esa_select_qkv(ctx, &mask, &d->q, &d->k, &d->v, &p), ESA_ERR_UNSUPPORTED,
               "kv_len[1] is 219");
    }
    /* Other selectors take v and do not look at it; no grid is needed for an adaptive order. */
    p = select_params(ESA_TAIL_POOLED, ESA_ORDER_HILBERT);
    p.selector = ESA_SELECT_RF_V2;
    expect_ok(ctx, esa_select_qkv(ctx, &mask, &d->q, &d->k, &d->v, &p));
    esa_mask_free(mask);
    p = select_params(ESA_TAIL_LEVELS, ESA_ORDER_ADAPTIVE);
    for (int i = 0; i < 3; i++) p.layout.grid_q[i] = 0;
    p.layout.protect_first_frame = -1;
    p.group_k = 2;
    expect_ok(ctx, esa_select_qkv(ctx, &mask, &d->q, &d->k, &d->v, &p));
    esa_mask_info info;
    info.struct_size = sizeof info;
    assert_int_equal(esa_mask_get_info(mask, &info), ESA_OK);
    assert_int_equal(info.fine, 4);
    assert_int_equal(info.layout.order, ESA_ORDER_ADAPTIVE);
    esa_mask_free(mask);
    /* Without a number of fine means: 8 where they are longer than a group of keys and whole
     * groups, else 4. */
    const int32_t fine[][3] = { { 64, 0, 8 },  { 32, 0, 4 }, { 48, 0, 4 },  { 96, 0, 8 },
                                { 128, 0, 8 }, { 32, 2, 8 }, { 128, 16, 4 } };
    for (size_t i = 0; i < sizeof fine / sizeof fine[0]; i++) {
        p = select_params(ESA_TAIL_LEVELS, ESA_ORDER_ADAPTIVE);
        p.block_k = fine[i][0];
        p.group_k = fine[i][1];
        assert_int_equal(p.fine, 0);
        expect_ok(ctx, esa_select_qkv(ctx, &mask, &d->q, &d->k, &d->v, &p));
        assert_int_equal(esa_mask_get_info(mask, &info), ESA_OK);
        assert_int_equal(info.fine, fine[i][2]);
        esa_mask_free(mask);
    }
    esa_ctx_free(ctx);
    assert_int_equal(count.live, 0);
    free(d);
}

/* Error scores: as many levels as the tail has, none negative, and a budget of 1 keeps everything
 * exact. */
static void test_scores_and_full_budget(void **state)
{
    (void)state;
    data *d = make_data();
    esa_ctx *ctx;
    enum { CELLS = B * H * NQ * NK };
    static float errors[2 * CELLS + 1];
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    for (int32_t levels = 1; levels <= 2; levels++) {
        esa_select_params p = select_params(levels == 2 ? ESA_TAIL_LEVELS : ESA_TAIL_POOLED,
                                            ESA_ORDER_ADAPTIVE);
        for (int i = 0; i <= 2 * CELLS; i++) errors[i] = -1.0f;
        expect_ok(ctx, esa_errors(ctx, errors, &d->q, &d->k, &d->v, &p));
        for (int i = 0; i < levels * CELLS; i++) assert_true(errors[i] >= 0.0f);
        assert_true(errors[levels * CELLS] == -1.0f);
        p.budget = 1.0;
        esa_mask *mask;
        expect_ok(ctx, esa_select_qkv(ctx, &mask, &d->q, &d->k, &d->v, &p));
        static uint8_t level[CELLS];
        assert_int_equal(esa_mask_to_levels(mask, level), ESA_OK);
        for (int i = 0; i < CELLS; i++) assert_int_equal(level[i], 0);
        esa_mask_free(mask);
    }
    esa_ctx_free(ctx);
    free(d);
}

int main(void)
{
    printf("seed %llu\n", (unsigned long long)test_seed());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plan_equals_one_call),
        cmocka_unit_test(test_every_allocation_may_fail),
        cmocka_unit_test(test_wrong_states),
        cmocka_unit_test(test_params),
        cmocka_unit_test(test_scores_and_full_budget),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
