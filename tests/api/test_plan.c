/* test_plan.c - the plan tier: same bits as one call, no allocation while executing; memory failing
 * at every point.
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ESA_EXPERIMENTAL
#include "common/tests.h"
#include "esa/esa.h"
#include "common/counting.h"
#include "common/naive.h"
#include "common/on_gpu.h"

/* 2 x 10 x 10 video tokens and 10 of text */
enum { B = 2, H = 3, N = 210, D = 32, T = 2, GH = 10, GW = 10 };

typedef struct data {
    float *q, *k, *v, *o;
    esa_tensor tq, tk, tv, to;
} data;

static data make_data(void)
{
    const size_t n = (size_t)(B * H * N * D);
    data d = { malloc(n * 4), malloc(n * 4), malloc(n * 4), malloc(n * 4),
               { 0 },         { 0 },         { 0 },         { 0 } };
    d.tq = esa_tensor_bnsd(d.q, ESA_DTYPE_F32, B, H, N, D);
    d.tk = esa_tensor_bnsd(d.k, ESA_DTYPE_F32, B, H, N, D);
    d.tv = esa_tensor_bnsd(d.v, ESA_DTYPE_F32, B, H, N, D);
    d.to = esa_tensor_bnsd(d.o, ESA_DTYPE_F32, B, H, N, D);
    tensor_fill(&d.tq, 1, 2.0);
    tensor_fill(&d.tk, 2, 2.0);
    tensor_fill(&d.tv, 3, 1.0);
    return d;
}

static void free_data(data *d)
{
    free(d->q);
    free(d->k);
    free(d->v);
    free(d->o);
}

static esa_select_params select_params(int32_t selector)
{
    esa_select_params p = esa_select_params_default(selector);
    p.block_q = p.block_k = 16;
    p.budget = 0.4;
    p.layout.order = ESA_ORDER_TILE3D;
    p.layout.window[0] = 1;
    p.layout.window[1] = p.layout.window[2] = 4;
    p.layout.grid_q[0] = T;
    p.layout.grid_q[1] = GH;
    p.layout.grid_q[2] = GW;
    p.layout.text_back_q = N - T * GH * GW;
    return p;
}

static esa_shapes shapes(void)
{
    esa_shapes s = shapes_of(ESA_DTYPE_F32, B, H, N, D);
    return s;
}

static void test_plan_equals_one_call(void **state)
{
    (void)state;
    data d = make_data();
    const int32_t kv_len[B] = { N, N - 7 };
    for (int32_t selector = ESA_SELECT_FULL; selector <= ESA_SELECT_RANDOM; selector++)
        for (int32_t tail = 0; tail < 3; tail++) {
            counting count = { .left = -1 };
            const esa_ctx_params cp = counting_params(&count, 0);
            esa_ctx *ctx;
            assert_int_equal(esa_ctx_create(&ctx, &cp), ESA_OK);
            esa_select_params sp = select_params(selector);
            esa_attention_params ap = esa_attention_params_default();
            ap.tail = tail;
            sp.kv_len = ap.kv_len = kv_len;
            esa_mask *mask, *planned;
            assert_int_equal(esa_select(ctx, &mask, &d.tq, &d.tk, &sp), ESA_OK);
            assert_int_equal(esa_attention(ctx, &d.tq, &d.tk, &d.tv, &d.to, mask, &ap), ESA_OK);
            float *first = malloc((size_t)(B * H * N * D) * 4);
            memcpy(first, d.o, (size_t)(B * H * N * D) * 4);
            memset(d.o, 0xff, (size_t)(B * H * N * D) * 4);

            esa_shapes s = shapes();
            esa_plan *plan;
            int64_t bytes;
            assert_int_equal(esa_plan_create(ctx, &plan, &s, &sp, &ap), ESA_OK);
            assert_int_equal(esa_plan_workspace(plan, &bytes), ESA_OK);
            assert_int_equal(esa_mask_create(plan, &planned), ESA_OK);
            /* exactly the announced bytes, nothing around them touched */
            guarded ws = guard_alloc(bytes, 0);
            const int64_t calls = count.total;
            assert_int_equal(esa_plan_select(plan, planned, &d.tq, &d.tk, ws.data), ESA_OK);
            assert_int_equal(
                esa_plan_attention(plan, planned, &d.tq, &d.tk, &d.tv, &d.to, NULL, ws.data),
                ESA_OK);
            assert_true(guard_check(&ws));
            assert_int_equal(count.total, calls); /* executing allocates nothing */
            assert_memory_equal(first, d.o, (size_t)(B * H * N * D) * 4);
            esa_mask_info a, b;
            a.struct_size = b.struct_size = sizeof a;
            assert_int_equal(esa_mask_get_info(mask, &a), ESA_OK);
            assert_int_equal(esa_mask_get_info(planned, &b), ESA_OK);
            assert_int_equal(a.kept, b.kept);

            /* A plan without a selector takes the same mask. */
            esa_plan *bare;
            assert_int_equal(esa_plan_create(ctx, &bare, &s, NULL, &ap), ESA_OK);
            assert_int_equal(esa_plan_workspace(bare, &bytes), ESA_OK);
            guarded ws2 = guard_alloc(bytes, 0);
            memset(d.o, 0xff, (size_t)(B * H * N * D) * 4);
            const esa_status taken = esa_plan_attention(bare, mask, &d.tq, &d.tk, &d.tv, &d.to,
                                                        NULL, ws2.data);
            assert_true(guard_check(&ws2));
            /* no room there to gather */
            if (on_gpu())
                assert_int_equal(taken, ESA_ERR_UNSUPPORTED);
            else
                assert_int_equal(taken, ESA_OK);
            if (!taken) assert_memory_equal(first, d.o, (size_t)(B * H * N * D) * 4);

            guard_free(&ws);
            guard_free(&ws2);
            free(first);
            esa_plan_free(plan);
            esa_plan_free(bare);
            esa_mask_free(mask);
            esa_mask_free(planned);
            esa_ctx_free(ctx);
            assert_int_equal(count.live, 0);
        }
    free_data(&d);
}

/* Everything a user does once, with the n-th allocation failing: a status, no leak, the ctx still
 * usable. */
static esa_status whole_story(counting *count, data *d)
{
    const esa_ctx_params cp = counting_params(count, 2);
    esa_ctx *ctx;
    esa_mask *mask = NULL, *planned = NULL, *again = NULL;
    esa_plan *plan = NULL;
    esa_status status = esa_ctx_create(&ctx, &cp);
    if (status) return status;
    const esa_select_params sp = select_params(ESA_SELECT_ENTROPY);
    const esa_shapes s = shapes();
    const int64_t nb = (N + 15) / 16;
    float *importance = malloc((size_t)(B * H * nb * nb) * 4);
    double mass[B * H];
    int32_t *count_list = malloc((size_t)(B * H * nb) * 4),
            *index_list = malloc((size_t)(B * H * nb * nb) * 4), perm[N];
    status = esa_order(ctx, perm, N, &sp.layout, 0, ESA_MODE_FIXED);
    if (!status) status = esa_select(ctx, &mask, &d->tq, &d->tk, &sp);
    if (!status) status = esa_attention(ctx, &d->tq, &d->tk, &d->tv, &d->to, mask, NULL);
    if (!status) status = esa_importance(ctx, importance, NULL, &d->tq, &d->tk, &sp);
    if (!status) status = esa_mask_mass(ctx, mass, mask, &d->tq, &d->tk, NULL, 3);
    if (!status) status = esa_plan_create(ctx, &plan, &s, &sp, NULL);
    if (!status) status = esa_mask_create(plan, &planned);
    if (!status) status = esa_plan_select(plan, planned, &d->tq, &d->tk, NULL);
    if (!status)
        status = esa_plan_attention(plan, planned, &d->tq, &d->tk, &d->tv, &d->to, NULL, NULL);
    if (!status) status = esa_mask_to_lists(mask, count_list, index_list, nb);
    if (!status) {
        esa_mask_info info;
        info.struct_size = sizeof info;
        esa_mask_get_info(mask, &info);
        status = esa_mask_from_lists(ctx, &again, &info, count_list, index_list, nb);
    }
    if (status && !on_gpu())
        assert_non_null(
            strstr(esa_ctx_error(ctx),
                   "memory")); /* there reading a mask allocates, and has no ctx to say so */
    esa_mask_free(mask);
    esa_mask_free(planned);
    esa_mask_free(again);
    esa_plan_free(plan);
    esa_ctx_trim(ctx);
    esa_ctx_free(ctx);
    free(importance);
    free(count_list);
    free(index_list);
    return status;
}

static void test_every_allocation_may_fail(void **state)
{
    (void)state;
    data d = make_data();
    counting count = { .left = -1 };
    assert_int_equal(whole_story(&count, &d), ESA_OK);
    assert_int_equal(count.live, 0);
    const int64_t total = count.total;
    printf("%lld allocations\n", (long long)total);
    assert_true(total >= 8);
    for (int64_t n = 1; n <= total; n++) {
        counting failing = { .left = n - 1 };
        assert_int_equal(whole_story(&failing, &d), ESA_ERR_MEMORY);
        assert_int_equal(failing.live, 0);
    }
    free_data(&d);
}

static void test_memory_report(void **state)
{
    (void)state;
    data d = make_data();
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    int64_t held, peak;
    esa_ctx_memory(ctx, &held, &peak);
    assert_int_equal(held, 0);
    assert_int_equal(esa_attention(ctx, &d.tq, &d.tk, &d.tv, &d.to, NULL, NULL), ESA_OK);
    void (*memory)(const esa_ctx *, int64_t *, int64_t *) = on_gpu() ? esa_device_memory
                                                                     : esa_ctx_memory;
    memory(ctx, &held, &peak);
    assert_true(held > 0 && peak == held);
    esa_ctx_trim(ctx);
    memory(ctx, &held, &peak);
    assert_true(held == 0 && peak > 0);
    assert_int_equal(esa_attention(ctx, &d.tq, &d.tk, &d.tv, &d.to, NULL, NULL), ESA_OK);
    esa_ctx_free(ctx);
    free_data(&d);
}

typedef struct named_shape {
    const char *name;
    int32_t H, D, grid[3], front, back;
} named_shape;

static const named_shape model_shapes[] = {
#define SHAPE(name, H, D, t, h, w, front, back) { name, H, D, { t, h, w }, front, back },
#include "shapes.def"
#undef SHAPE
};

/* Extra memory stays bounded at every shape of the list: the plan says how much without running
 * anything. */
static void test_workspace_is_bounded(void **state)
{
    (void)state;
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    for (size_t i = 0; i < sizeof model_shapes / sizeof *model_shapes; i++)
        for (int32_t selector = ESA_SELECT_ENTROPY; selector <= ESA_SELECT_RANDOM; selector++) {
            const named_shape *one = &model_shapes[i];
            esa_shapes s = shapes_of(ESA_DTYPE_F32, 1, one->H,
                                     (int64_t)one->grid[0] * one->grid[1] * one->grid[2] +
                                         one->front + one->back,
                                     one->D);
            esa_select_params sp = esa_select_params_default(selector);
            esa_attention_params ap = esa_attention_params_default();
            ap.tail = ESA_TAIL_POOLED;
            memcpy(sp.layout.grid_q, one->grid, sizeof one->grid);
            sp.layout.text_front_q = one->front;
            sp.layout.text_back_q = one->back;
            esa_plan *plan;
            int64_t bytes;
            assert_int_equal(esa_plan_create(ctx, &plan, &s, &sp, &ap), ESA_OK);
            assert_int_equal(esa_plan_workspace(plan, &bytes), ESA_OK);
            printf("%s, selector %d: %.1f MB\n", one->name, (int)selector, (double)bytes / 1e6);
            /* A GPU gathers q, k and v where the order moves tokens. */
            const int64_t gathered = on_gpu() ? 3 * s.B * s.Hq * s.Nq * s.D * 4 : 0;
            assert_true(bytes < 300 * 1000 * 1000 + gathered);
            esa_plan_free(plan);
        }
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plan_equals_one_call),
        cmocka_unit_test(test_every_allocation_may_fail),
        cmocka_unit_test(test_memory_report),
        cmocka_unit_test(test_workspace_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
