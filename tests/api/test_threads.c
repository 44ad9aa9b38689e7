/* test_threads.c - one mask shared by several contexts in several threads, and two threads on one
 * context.
 * SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "common/tests.h"
#include "common/naive.h"
#include "esa/esa.h"

enum { H = 2, N = 200, D = 32, SIZE = H * N * D, THREADS = 3, ROUNDS = 6 };

static float q[SIZE], k[SIZE], v[SIZE];
static esa_tensor tq, tk, tv;

static int fill(void **state)
{
    (void)state;
    tq = esa_tensor_bnsd(q, ESA_DTYPE_F32, 1, H, N, D);
    tk = esa_tensor_bnsd(k, ESA_DTYPE_F32, 1, H, N, D);
    tv = esa_tensor_bnsd(v, ESA_DTYPE_F32, 1, H, N, D);
    tensor_fill(&tq, 1, 1.5);
    tensor_fill(&tk, 2, 1.5);
    tensor_fill(&tv, 3, 1.0);
    return 0;
}

static esa_mask *make_mask(void)
{
    esa_ctx *ctx;
    esa_mask *mask;
    esa_select_params p = esa_select_params_default(ESA_SELECT_ENTROPY);
    p.block_q = p.block_k = 32;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    assert_int_equal(esa_select(ctx, &mask, &tq, &tk, &p), ESA_OK);
    esa_ctx_free(ctx); /* a mask outlives the context that made it */
    return mask;
}

typedef struct job {
    const esa_mask *mask;
    esa_ctx *ctx;
    float o[SIZE];
    esa_status status;
    int32_t busy;
} job;

/* Own context, shared mask. */
static void *own_context(void *arg)
{
    job *j = arg;
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = 2;
    esa_tensor to = esa_tensor_bnsd(j->o, ESA_DTYPE_F32, 1, H, N, D);
    esa_ctx *ctx;
    j->status = esa_ctx_create(&ctx, &p);
    for (int i = 0; i < ROUNDS && !j->status; i++)
        j->status = esa_attention(ctx, &tq, &tk, &tv, &to, j->mask, NULL);
    if (!j->status) esa_ctx_free(ctx);
    return NULL;
}

static void test_shared_mask(void **state)
{
    (void)state;
    esa_mask *mask = make_mask();
    job *j = calloc(THREADS, sizeof *j);
    pthread_t thread[THREADS];
    for (int i = 0; i < THREADS; i++) {
        j[i].mask = mask;
        assert_int_equal(pthread_create(&thread[i], NULL, own_context, &j[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) pthread_join(thread[i], NULL);
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(j[i].status, ESA_OK);
        assert_memory_equal(j[i].o, j[0].o, sizeof j[0].o);
    }
    free(j);
    esa_mask_free(mask);
}

static atomic_int inside, refused;

/* Shared context: a call goes through or is refused with ESA_ERR_STATE, never anything else. */
static void *same_context(void *arg)
{
    job *j = arg;
    esa_tensor to = esa_tensor_bnsd(j->o, ESA_DTYPE_F32, 1, H, N, D);
    for (int i = 0; i < 50 * ROUNDS; i++) {
        const esa_status s = esa_attention(j->ctx, &tq, &tk, &tv, &to, j->mask, NULL);
        if (s == ESA_OK)
            atomic_fetch_add(&inside, 1);
        else if (s == ESA_ERR_STATE)
            atomic_fetch_add(&refused, 1);
        else
            j->status = s;
    }
    return NULL;
}

static void test_one_context_two_threads(void **state)
{
    (void)state;
    esa_mask *mask = make_mask();
    esa_ctx *ctx;
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = 1;
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_OK);
    job *j = calloc(2, sizeof *j);
    pthread_t thread[2];
    for (int i = 0; i < 2; i++) {
        j[i].mask = mask;
        j[i].ctx = ctx;
        assert_int_equal(pthread_create(&thread[i], NULL, same_context, &j[i]), 0);
    }
    for (int i = 0; i < 2; i++) pthread_join(thread[i], NULL);
    assert_int_equal(j[0].status, ESA_OK);
    assert_int_equal(j[1].status, ESA_OK);
    assert_int_equal(atomic_load(&inside) + atomic_load(&refused), 100 * ROUNDS);
    assert_true(atomic_load(&inside) > 0);
    free(j);
    esa_mask_free(mask);
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_shared_mask),
                                        cmocka_unit_test(test_one_context_two_threads) };
    return cmocka_run_group_tests(tests, fill, NULL);
}
