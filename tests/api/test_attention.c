/* test_attention.c - esa_attention on every ISA level against the textbook in double.
 * SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/attention_case.h"
#include "common/naive.h"
#include "common/on_gpu.h"

static int32_t level_of[8];
static int levels, native; /* native: levels a ctx can be made for; the last one may be emulated */

static int find_levels(void **state)
{
    (void)state;
    levels = find_test_levels(level_of, &native);
    printf("%d levels, seed %llu\n", levels, (unsigned long long)test_seed());
    return levels ? 0 : -1;
}

static void on_all_levels(const attention_case *c) { check_attention(c, level_of, levels, 2); }

/* One of many cases. Where the processor is slow ($ESA_TEST_SMALL) every fifth has to do: the
 * counter runs through all dtypes and tails. */
static void one_of_many(const attention_case *c)
{
    static int number;
    const int few = getenv("ESA_TEST_SMALL") && !on_gpu();
    if (!few || number++ % 5 == 0) on_all_levels(c);
}

#define CASES(test) cmocka_unit_test_teardown(test, no_wrong_case)

/* Awkward lengths, all dtypes, dense and sparse. */
static void test_sizes(void **state)
{
    (void)state;
    static const int64_t size[][2] = { { 1, 1 },     { 113, 203 }, { 799, 3 },   { 3, 799 },
                                       { 127, 128 }, { 129, 257 }, { 255, 127 }, { 1, 300 } };
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
        for (int32_t dtype = 0; dtype < 3; dtype++)
            for (int dense = 0; dense < 2; dense++) {
                const attention_case c = { .B = 1,
                                           .Hq = 2,
                                           .Hkv = 2,
                                           .Nq = size[i][0],
                                           .Nk = size[i][1],
                                           .D = i % 2 ? 64 : 40,
                                           .dtype = dtype,
                                           .density = dense ? -1.0 : 0.5 };
                one_of_many(&c);
            }
}

static void test_long_odd(void **state)
{
    (void)state;
    const attention_case c = {
        .B = 1, .Hq = 1, .Hkv = 1, .Nq = 1023, .Nk = 1025, .D = 40, .density = 0.4
    };
    on_all_levels(&c);
}

static void test_head_dims(void **state)
{
    (void)state;
    static const int64_t D[] = { 1, 3, 8, 17, 33, 64, 72, 80, 96, 128, 160, 255, 256 };
    for (size_t i = 0; i < sizeof D / sizeof D[0]; i++)
        for (int32_t dtype = 0; dtype < 3; dtype++) {
            const attention_case c = { .B = 1,
                                       .Hq = 1,
                                       .Hkv = 1,
                                       .Nq = 70,
                                       .Nk = 150,
                                       .D = D[i],
                                       .dtype = dtype,
                                       .density = 0.6 };
            one_of_many(&c);
        }
}

static void test_blocks_and_densities(void **state)
{
    (void)state;
    static const int32_t block[][2] = { { 16, 16 },   { 48, 80 },   { 64, 64 },  { 128, 64 },
                                        { 256, 128 }, { 256, 256 }, { 112, 240 } };
    static const double density[] = { 0.0, 0.1, 0.5, 1.0 };
    for (size_t i = 0; i < sizeof block / sizeof block[0]; i++)
        for (size_t j = 0; j < 4; j++)
            for (int32_t tail = 0; tail < 3; tail++) {
                const attention_case c = { .B = 1,
                                           .Hq = 2,
                                           .Hkv = 2,
                                           .Nq = 260,
                                           .Nk = 309,
                                           .D = 16,
                                           .block_q = block[i][0],
                                           .block_k = block[i][1],
                                           .density = density[j],
                                           .tail = tail };
                one_of_many(&c);
            }
}

static void test_layouts(void **state)
{
    (void)state;
    static const int32_t kv_len[] = { 0, 77, 200 };
    for (int32_t bsnd = 0; bsnd < 2; bsnd++)
        for (int32_t dtype = 0; dtype < 3; dtype++)
            for (int32_t misalign = 0; misalign < 2; misalign++) {
                const attention_case c = { .B = 3,
                                           .Hq = 6,
                                           .Hkv = 2,
                                           .Nq = 130,
                                           .Nk = 200,
                                           .D = 16,
                                           .dtype = dtype,
                                           .block_q = 64,
                                           .block_k = 32,
                                           .bsnd = bsnd,
                                           .misalign = misalign,
                                           .kv_len = misalign ? kv_len : NULL,
                                           .density = 0.5,
                                           .tail = bsnd };
                one_of_many(&c);
            }
}

/* Rows with room behind them, and q, k, v, o each in its own memory order. */
static void test_strides(void **state)
{
    (void)state;
    for (int32_t dtype = 0; dtype < 3; dtype++)
        for (int32_t pad = 0; pad <= 24; pad += 8)
            for (int32_t bsnd = 0; bsnd < 3; bsnd++) {
                const attention_case c = { .B = 2,
                                           .Hq = 4,
                                           .Hkv = 2,
                                           .Nq = 70,
                                           .Nk = 90,
                                           .D = 64,
                                           .dtype = dtype,
                                           .block_q = 64,
                                           .block_k = 64,
                                           .bsnd = bsnd,
                                           .pad = pad == 24 ? 3 : pad,
                                           .density = 0.6 };
                one_of_many(&c);
            }
}

/* More than 2 MB of output: rows are written past the cache where they are aligned, and as usual
 * where they are not. Few keys: it is the rows that count. */
static void test_large_outputs(void **state)
{
    (void)state;
    for (int32_t misalign = 0; misalign <= 4; misalign += 4)
        for (int32_t dtype = 0; dtype < 3; dtype++) {
            const attention_case c = { .B = 1,
                                       .Hq = 4,
                                       .Hkv = 4,
                                       .Nq = dtype ? 4111 : 2063,
                                       .Nk = 24,
                                       .D = 64,
                                       .dtype = dtype,
                                       .misalign = misalign,
                                       .density = 0.6 };
            one_of_many(&c);
        }
}

static void test_causal(void **state)
{
    (void)state;
    static const int64_t size[][2] = { { 200, 200 }, { 65, 190 }, { 190, 65 }, { 1, 100 } };
    for (size_t i = 0; i < 4; i++)
        for (int dense = 0; dense < 2; dense++)
            for (int32_t tail = 0; tail < 3; tail++) {
                const attention_case c = { .B = 1,
                                           .Hq = 2,
                                           .Hkv = 1,
                                           .Nq = size[i][0],
                                           .Nk = size[i][1],
                                           .D = 64,
                                           .block_q = 64,
                                           .block_k = 32,
                                           .density = dense ? -1.0 : 0.6,
                                           .causal = 1,
                                           .tail = dense ? 0 : tail };
                one_of_many(&c);
            }
}

static void test_causal_lengths_and_types(void **state)
{
    (void)state;
    static const int32_t kv_len[] = { 150, 40 };
    for (int32_t dtype = 0; dtype < 3; dtype++)
        for (int32_t tail = 0; tail < 3; tail++) {
            const attention_case c = { .B = 2,
                                       .Hq = 4,
                                       .Hkv = 2,
                                       .Nq = 100,
                                       .Nk = 150,
                                       .D = 24,
                                       .dtype = dtype,
                                       .block_q = 48,
                                       .block_k = 32,
                                       .density = 0.5,
                                       .causal = 1,
                                       .tail = tail,
                                       .kv_len = kv_len,
                                       .bsnd = 1 };
            one_of_many(&c);
        }
}

static void test_orders(void **state)
{
    (void)state;
    for (int32_t order = ESA_ORDER_TILE; order <= ESA_ORDER_HILBERT; order++)
        for (int32_t tail = 0; tail < 3; tail++) {
            const attention_case c = { .B = 1,
                                       .Hq = 2,
                                       .Hkv = 2,
                                       .Nq = 5 * 9 * 11 + 7,
                                       .Nk = 5 * 9 * 11 + 7,
                                       .D = 16,
                                       .block_q = 64,
                                       .block_k = 64,
                                       .density = 0.3,
                                       .tail = tail,
                                       .order = order,
                                       .grid = { 5, 9, 11 },
                                       .text_front = 4,
                                       .text_back = 3 };
            one_of_many(&c);
        }
}

/* If all keys inside each block are equal, the pooled tail is exact: a sparse result equals the
 * dense one. */
static void test_equal_keys(void **state)
{
    (void)state;
    attention_case c = { .B = 1,
                         .Hq = 2,
                         .Hkv = 2,
                         .Nq = 100,
                         .Nk = 300,
                         .D = 64,
                         .block_q = 32,
                         .block_k = 64,
                         .density = 0.3,
                         .tail = ESA_TAIL_POOLED,
                         .equal_keys = 1 };
    for (int i = 0; i < levels; i++) {
        int64_t n;
        float *sparse = attention_bits(&c, level_of[i], 1, &n);
        c.density = -1.0;
        float *dense = attention_bits(&c, level_of[i], 1, &n);
        c.density = 0.3;
        /* a mean of 64 equal f32 carries up to 64 roundings, in scores and in values */
        for (int64_t j = 0; j < n / 4; j++)
            assert_true(fabs((double)sparse[j] - (double)dense[j]) <=
                        512 * 0x1p-23 * fmax(1.0, fabs((double)dense[j])));
        free(sparse);
        free(dense);
    }
}

/* A mask that keeps everything gives the dense result, whatever the tail: nothing is left to stand
 * in for. */
static void test_full_mask_is_dense(void **state)
{
    (void)state;
    attention_case c = { .B = 1,
                         .Hq = 2,
                         .Hkv = 2,
                         .Nq = 250,
                         .Nk = 300,
                         .D = 64,
                         .block_q = 128,
                         .block_k = 128,
                         .density = -1.0 };
    for (int i = 0; i < levels; i++) {
        int64_t n;
        c.density = -1.0;
        c.tail = 0;
        char *dense = attention_bits(&c, level_of[i], 1, &n);
        c.density = 1.0;
        for (c.tail = 0; c.tail < 3; c.tail++) {
            char *full = attention_bits(&c, level_of[i], 1, &n);
            assert_memory_equal(full, dense, (size_t)n);
            free(full);
        }
        free(dense);
    }
}

static void test_same_bits_for_any_threads(void **state)
{
    (void)state;
    for (int32_t dtype = 0; dtype < 3; dtype++) {
        const attention_case c = { .B = 2,
                                   .Hq = 3,
                                   .Hkv = 3,
                                   .Nq = 300,
                                   .Nk = 330,
                                   .D = 64,
                                   .dtype = dtype,
                                   .block_q = 64,
                                   .block_k = 64,
                                   .density = 0.4,
                                   .tail = ESA_TAIL_POOLED };
        for (int i = 0; i < levels; i++) {
            int64_t n;
            char *one = attention_bits(&c, level_of[i], 1, &n);
            for (int32_t threads = 2; threads <= 5; threads += 3) {
                char *many = attention_bits(&c, level_of[i], threads, &n);
                assert_memory_equal(one, many, (size_t)n);
                free(many);
            }
            free(one);
        }
    }
}

/* Scores of size 10^4 in base 2: exp must neither overflow nor lose the small ones. */
static void test_huge_scores(void **state)
{
    (void)state;
    const attention_case c = {
        .B = 1, .Hq = 1, .Hkv = 1, .Nq = 90, .Nk = 210, .D = 64, .density = 0.7, .range = 60.0
    };
    on_all_levels(&c);
}

/* NaN and infinities: documented in esa.h. */
static void test_not_finite(void **state)
{
    (void)state;
    enum { N = 70, D = 16 };
    for (int i = 0; i < native; i++) {
        float q[N * D], k[N * D], v[N * D], o[N * D], lse[N];
        esa_tensor tq = esa_tensor_bnsd(q, ESA_DTYPE_F32, 1, 1, N, D), tk = tq, tv = tq, to = tq,
                   tl = esa_tensor_bnsd(lse, ESA_DTYPE_F32, 1, 1, N, 1);
        tk.data = k;
        tv.data = v;
        to.data = o;
        tensor_fill(&tq, 1, 1.0);
        tensor_fill(&tk, 2, 1.0);
        tensor_fill(&tv, 3, 1.0);
        esa_ctx *ctx = level_ctx(level_of[i], 0);
        esa_attention_params ap = esa_attention_params_default();
        ap.lse = &tl;
        q[3 * D + 5] = NAN; /* one query: only its row */
        assert_int_equal(esa_attention(ctx, &tq, &tk, &tv, &to, NULL, &ap), ESA_OK);
        for (int n = 0; n < N; n++)
            for (int d = 0; d < D; d++) assert_true(isnan((double)o[n * D + d]) == (n == 3));
        assert_true(isnan((double)lse[3]) && isfinite((double)lse[4]));
        tensor_fill(&tq, 1, 1.0);
        for (int n = 0; n < N; n++) q[n * D] = n % 2 ? 1.0f : -1.0f;
        /* scores +inf for odd rows (NaN out), -inf for even ones (an absent key) */
        k[7 * D] = INFINITY;
        assert_int_equal(esa_attention(ctx, &tq, &tk, &tv, &to, NULL, &ap), ESA_OK);
        for (int n = 0; n < N; n++) assert_true(isnan((double)o[n * D]) == (n % 2));
        for (int n = 0; n < N; n++) k[n * D] = INFINITY;
        assert_int_equal(esa_attention(ctx, &tq, &tk, &tv, &to, NULL, &ap), ESA_OK);
        /* every key absent: an empty row */
        for (int n = 0; n < N; n += 2) assert_true(o[n * D] == 0.0f && lse[n] == -INFINITY);
        esa_ctx_free(ctx);
    }
}

/* NaN in one key and one value of the last block, causal, diagonal lists: the tail must not carry
 * it to rows before. */
static void test_not_finite_with_tail(void **state)
{
    (void)state;
    enum { N = 256, D = 32, BLOCK = 64, BAD = 200 };
    for (int i = 0; i < native; i++)
        for (int32_t tail = 0; tail < 3; tail++)
            for (int in_v = 0; in_v < 2; in_v++) {
                static float q[N * D], k[N * D], v[N * D], o[N * D];
                esa_tensor tq = esa_tensor_bnsd(q, ESA_DTYPE_F32, 1, 1, N, D), tk = tq, tv = tq,
                           to = tq;
                tk.data = k;
                tv.data = v;
                to.data = o;
                tensor_fill(&tq, 1, 1.0);
                tensor_fill(&tk, 2, 1.0);
                tensor_fill(&tv, 3, 1.0);
                (in_v ? v : k)[BAD * D + 7] = NAN;
                esa_ctx *ctx = level_ctx(level_of[i], 0);
                esa_mask_info info = { .struct_size = sizeof info,
                                       .block_q = BLOCK,
                                       .block_k = BLOCK,
                                       .B = 1,
                                       .H = 1,
                                       .Nq = N,
                                       .Nk = N };
                info.layout = esa_layout_default();
                const int32_t count[4] = { 1, 1, 1, 1 }, index[4] = { 0, 1, 2, 3 };
                esa_mask *mask;
                assert_int_equal(esa_mask_from_lists(ctx, &mask, &info, count, index, 1), ESA_OK);
                esa_attention_params ap = esa_attention_params_default();
                ap.causal = 1;
                ap.tail = tail;
                assert_int_equal(esa_attention(ctx, &tq, &tk, &tv, &to, mask, &ap), ESA_OK);
                for (int n = 0; n < 3 * BLOCK; n++)
                    for (int d = 0; d < D; d++) assert_true(isfinite((double)o[n * D + d]));
                assert_true(isnan((double)o[(N - 1) * D + 7]));
                esa_mask_free(mask);
                esa_ctx_free(ctx);
            }
}

/* One mask entry for the whole batch gives what the same entry repeated gives. */
static void test_mask_broadcast(void **state)
{
    (void)state;
    enum { B = 3, H = 2, N = 100, D = 16, BLOCK = 32, NB = 4 };
    static float q[B * H * N * D], k[B * H * N * D], v[B * H * N * D], one[B * H * N * D],
        each[B * H * N * D];
    esa_tensor tq = esa_tensor_bnsd(q, ESA_DTYPE_F32, B, H, N, D), tk = tq, tv = tq, to = tq;
    tk.data = k;
    tv.data = v;
    tensor_fill(&tq, 1, 1.0);
    tensor_fill(&tk, 2, 1.0);
    tensor_fill(&tv, 3, 1.0);
    uint8_t bits[B * H * NB];
    for (int i = 0; i < B * H * NB; i++) bits[i] = (uint8_t)(1 + (i % (H * NB)) * 5 % 15);
    esa_ctx *ctx;
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    for (int64_t batch = 1; batch <= B; batch += B - 1) {
        esa_mask_info info = { .struct_size = sizeof info,
                               .block_q = BLOCK,
                               .block_k = BLOCK,
                               .B = batch,
                               .H = H,
                               .Nq = N,
                               .Nk = N };
        info.layout = esa_layout_default();
        esa_mask *mask;
        assert_int_equal(esa_mask_from_bits(ctx, &mask, &info, bits), ESA_OK);
        to.data = batch == 1 ? one : each;
        assert_int_equal(esa_attention(ctx, &tq, &tk, &tv, &to, mask, NULL), ESA_OK);
        esa_mask_free(mask);
    }
    assert_memory_equal(one, each, sizeof one);
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASES(test_sizes),
        CASES(test_long_odd),
        CASES(test_head_dims),
        CASES(test_blocks_and_densities),
        CASES(test_layouts),
        CASES(test_strides),
        CASES(test_large_outputs),
        CASES(test_causal),
        CASES(test_causal_lengths_and_types),
        CASES(test_orders),
        cmocka_unit_test(test_equal_keys),
        cmocka_unit_test(test_full_mask_is_dense),
        cmocka_unit_test(test_same_bits_for_any_threads),
        CASES(test_huge_scores),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_not_finite_with_tail),
        cmocka_unit_test(test_mask_broadcast),
    };
    return cmocka_run_group_tests(tests, find_levels, NULL);
}
