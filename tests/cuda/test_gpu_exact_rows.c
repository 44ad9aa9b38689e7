/* test_gpu_exact_rows.c - exact rows with each set of attention kernels, in sizes that fill a GPU,
 * and their time.
 * SPDX-License-Identifier: Apache-2.0
 *
 * tests/api/test_exact_rows.c has the small cases. ESA_TEST_TIMES=1 prints times instead. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/attention_case.h"
#include "common/naive.h"
#include "common/on_gpu.h"

static int32_t level_of[8];
static int levels;

static int find_levels(void **state)
{
    int native;
    (void)state;
    levels = find_test_levels(level_of, &native);
    printf("%d levels, seed %llu\n", levels, (unsigned long long)test_seed());
    return levels ? 0 : -1;
}

/* Under a sanitizer ($ESA_TEST_SMALL) every fifth case has to do. */
static void check(const attention_case *c)
{
    static int number;
    if (!getenv("ESA_TEST_SMALL") || number++ % 5 == 0) check_attention(c, level_of, levels, 2);
}

/* Blocks of all kernels, whole and short; every tail. */
static void blocks(void **state)
{
    static const int32_t block[][2] = { { 64, 64 },   { 128, 64 }, { 128, 128 },
                                        { 256, 128 }, { 256, 64 }, { 48, 80 } };
    static const int32_t rows[] = { 1, 2, 4, 5, 8, 16 };
    (void)state;
    for (int i = 0; i < 6; i++)
        for (int32_t dtype = 0; dtype < 3; dtype++)
            for (int64_t D = 64; D <= 128; D += 64) {
                const attention_case c = { .B = 1,
                                           .Hq = 2,
                                           .Hkv = 1,
                                           .Nq = 700 + 7 * i,
                                           .Nk = 900 - 13 * i,
                                           .D = D,
                                           .dtype = dtype,
                                           .block_q = block[i][0],
                                           .block_k = block[i][1],
                                           .bsnd = dtype == ESA_DTYPE_BF16,
                                           .density = 0.3,
                                           .tail = (i + dtype) % 4,
                                           .fine = 4,
                                           .refined = 0.5,
                                           .exact_rows = rows[(i + dtype) % 6] };
                check(&c);
            }
}

/* An order per head with lengths, and last blocks shorter than the exact rows. */
static void orders(void **state)
{
    static const int32_t kv_len[] = { 520, 516 };
    (void)state;
    for (int32_t dtype = 0; dtype < 3; dtype++)
        for (int32_t rows = 4; rows <= 16; rows *= 2)
            for (int32_t broadcast = 0; broadcast < 2; broadcast++) {
                const attention_case c = { .B = 2,
                                           .Hq = 4,
                                           .Hkv = 2,
                                           .Nq = 520, /* 4 blocks of 128, and 8 rows */
                                           .Nk = 520,
                                           .D = rows == 8 ? 72 : 128,
                                           .dtype = dtype,
                                           .block_q = 128,
                                           .block_k = 64,
                                           .bsnd = broadcast,
                                           .density = 0.4,
                                           .tail = ESA_TAIL_LEVELS,
                                           .fine = 4,
                                           .refined = 0.5,
                                           .order = ESA_ORDER_ADAPTIVE,
                                           .broadcast = broadcast,
                                           .text_front = 5,
                                           .text_back = 6,
                                           .kv_len = kv_len,
                                           .exact_rows = rows };
                check(&c);
            }
}

/* The same call gives the same bits again. */
static void same_bits(void **state)
{
    (void)state;
    for (int i = 0; i < levels; i++)
        for (int32_t dtype = 0; dtype < 3; dtype++) {
            const attention_case c = { .B = 1,
                                       .Hq = 3,
                                       .Hkv = 3,
                                       .Nq = 1470,
                                       .Nk = 1470,
                                       .D = 128,
                                       .dtype = dtype,
                                       .block_q = 128,
                                       .block_k = 128,
                                       .density = 0.3,
                                       .tail = ESA_TAIL_POOLED,
                                       .exact_rows = 4 };
            int64_t bytes[2];
            char *first = attention_bits(&c, level_of[i], 1, &bytes[0]),
                 *second = attention_bits(&c, level_of[i], 1, &bytes[1]);
            assert_int_equal(bytes[0], bytes[1]);
            assert_memory_equal(first, second, (size_t)bytes[0]);
            free(first);
            free(second);
        }
}

#define TEST(function) cmocka_unit_test_teardown(function, no_wrong_case)

/* ---------------------------------------------------------------- times */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void stop_if(esa_ctx *ctx, esa_status status)
{
    if (!status) return;
    printf("%s: %s\n", esa_status_name(status), esa_ctx_error(ctx));
    exit(1);
}

/* Seconds of one call of a plan; the best of five runs of n calls. */
static double time_plan(esa_ctx *ctx, const esa_plan *plan, const esa_mask *mask,
                        const esa_tensor t[4], int32_t n)
{
    double best = 1e9;
    for (int run = 0; run < 6; run++) { /* the first one warms up */
        stop_if(ctx, esa_device_sync(ctx));
        const double start = now();
        for (int32_t i = 0; i < n; i++)
            stop_if(ctx, esa_plan_attention(plan, mask, &t[0], &t[1], &t[2], &t[3], NULL, NULL));
        stop_if(ctx, esa_device_sync(ctx));
        const double seconds = (now() - start) / n;
        if (run && seconds < best) best = seconds;
    }
    return best;
}

/* Prints ms of dense attention, and of sparse attention with 0, 4 and 8 exact rows. */
static void time_shape(esa_ctx *ctx, int64_t H, int64_t N, int64_t D, int32_t block_q,
                       int32_t block_k, int32_t n)
{
    static const int32_t rows[] = { 0, 4, 8 };
    esa_tensor t[4];
    esa_shapes shapes = esa_shapes_default();
    shapes.dtype = ESA_DTYPE_BF16;
    shapes.device = ESA_DEVICE_CUDA;
    shapes.B = 1;
    shapes.Hq = shapes.Hkv = H;
    shapes.Nq = shapes.Nk = N;
    shapes.D = D;
    uint16_t *host = malloc((size_t)(H * N * D) * 2);
    for (int i = 0; i < 4; i++) {
        void *data;
        for (int64_t j = 0; j < H * N * D; j++) /* bf16 near +-1, cheap to make */
            host[j] = (uint16_t)(0x3f00u + (uint32_t)(j * 2654435761 >> 7) % 0x80u +
                                 ((uint32_t)(j * 40503 >> 5) & 1u) * 0x8000u);
        stop_if(ctx, esa_device_alloc(ctx, &data, H * N * D * 2));
        stop_if(ctx, esa_device_upload(ctx, data, host, H * N * D * 2));
        t[i] = esa_tensor_bsnd(data, ESA_DTYPE_BF16, 1, H, N, D);
        t[i].device = ESA_DEVICE_CUDA;
    }
    free(host);
    esa_select_params select = esa_select_params_default(ESA_SELECT_RANDOM);
    select.budget = 0.2;
    select.block_q = block_q;
    select.block_k = block_k;
    double ms[4] = { 0 };
    for (int i = 0; i < 4; i++) { /* 0: dense */
        esa_attention_params p = esa_attention_params_default();
        esa_plan *plan = NULL;
        esa_mask *mask = NULL;
        p.tail = ESA_TAIL_POOLED;
        p.exact_rows = i ? rows[i - 1] : 0;
        stop_if(ctx, esa_plan_create(ctx, &plan, &shapes, &select, &p));
        if (i) {
            stop_if(ctx, esa_mask_create(plan, &mask));
            stop_if(ctx, esa_plan_select(plan, mask, &t[0], &t[1], NULL));
        }
        ms[i] = 1e3 * time_plan(ctx, plan, mask, t, n);
        esa_mask_free(mask);
        esa_plan_free(plan);
    }
    printf("H %3lld N %6lld D %3lld block %3dx%-3d dense %9.3f ms, sparse 0.2 pooled %8.3f, with 4 "
           "exact rows %8.3f (%+.2f %% of dense; arithmetic %.2f %%), with 8 %8.3f (%+.2f %%)\n",
           (long long)H, (long long)N, (long long)D, block_q, block_k, ms[0], ms[1], ms[2],
           100 * (ms[2] - ms[1]) / ms[0], 400.0 / block_q, ms[3], 100 * (ms[3] - ms[1]) / ms[0]);
    for (int i = 0; i < 4; i++) esa_device_free(ctx, t[i].data);
}

static int times(void)
{
    esa_ctx *ctx = level_ctx(GPU_BEST, 1);
    time_shape(ctx, 12, 32760, 128, 128, 128, 5); /* Wan 1.3B, 480p */
    time_shape(ctx, 12, 32760, 128, 256, 128, 5);
    time_shape(ctx, 12, 75600, 128, 128, 128, 2); /* 720p */
    time_shape(ctx, 12, 75600, 128, 256, 128, 2);
    time_shape(ctx, 6, 4352, 64, 64, 64, 50); /* wan-tiny */
    esa_ctx_free(ctx);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = { TEST(blocks), TEST(orders), TEST(same_bits) };
    if (getenv("ESA_TEST_TIMES") && on_gpu()) return times();
    return cmocka_run_group_tests(tests, find_levels, NULL);
}
