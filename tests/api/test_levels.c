/* test_levels.c - attention with a fine level and with an order per head, against attention as the
 * textbook writes it, and against itself.
 * SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/attention_case.h"
#include "common/naive.h"
#include "common/on_gpu.h"

static int32_t level_of[8];
static int levels;

static int find_levels(void **state)
{
    (void)state;
    int native;
    print_message("seed %llu\n", (unsigned long long)test_seed());
    levels = find_test_levels(level_of, &native);
    return levels ? 0 : -1;
}

/* Where the machine is slow ($ESA_TEST_SMALL) every fifth case has to do: the counter runs through
 * all dtypes and tails. */
static void on_all_levels(const attention_case *c)
{
    static int number;
    if (!getenv("ESA_TEST_SMALL") || number++ % 5 == 0) check_attention(c, level_of, levels, 2);
}

#define CASES(test) cmocka_unit_test_teardown(test, no_wrong_case)

/* Awkward lengths and head dims, all dtypes, every number of fine means. */
static void test_sizes(void **state)
{
    (void)state;
    static const int64_t size[][2] = { { 1, 1 },     { 113, 203 }, { 3, 799 },
                                       { 127, 128 }, { 129, 257 }, { 255, 127 } };
    static const int64_t D[] = { 40, 64, 72, 128 };
    int32_t turn = 0;
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
        for (int32_t dtype = 0; dtype < 3; dtype++)
            for (int32_t fine = 2; fine <= 16; fine *= 2, turn++) {
                const attention_case c = { .B = 1,
                                           .Hq = 2,
                                           .Hkv = 1,
                                           .Nq = size[i][0],
                                           .Nk = size[i][1],
                                           .D = D[turn % 4],
                                           .dtype = dtype,
                                           .block_q = 64,
                                           .block_k = turn % 3 ? 64 : 48,
                                           .density = 0.3,
                                           .tail = ESA_TAIL_LEVELS,
                                           .fine = fine,
                                           .refined = 0.5 };
                on_all_levels(&c);
            }
}

/* Rows with more fine means than a kernel takes at once. */
static void test_many_fine_blocks(void **state)
{
    (void)state;
    for (int32_t dtype = 0; dtype < 3; dtype++) {
        const attention_case c = { .B = 1,
                                   .Hq = 1,
                                   .Hkv = 1,
                                   .Nq = 70,
                                   .Nk = 1303,
                                   .D = 40,
                                   .dtype = dtype,
                                   .block_q = 32,
                                   .block_k = 32,
                                   .density = 0.1,
                                   .tail = ESA_TAIL_LEVELS,
                                   .fine = 8,
                                   .refined = 0.9 };
        on_all_levels(&c);
    }
}

/* Causality and lengths cut fine blocks; batch entries share a mask or not. */
static void test_causal_lengths_and_batches(void **state)
{
    (void)state;
    static const int32_t kv_len[] = { 150, 39 };
    for (int32_t dtype = 0; dtype < 3; dtype++)
        for (int32_t causal = 0; causal < 2; causal++)
            for (int32_t broadcast = 0; broadcast < 2; broadcast++) {
                const attention_case c = { .B = 2,
                                           .Hq = 4,
                                           .Hkv = 2,
                                           .Nq = 100,
                                           .Nk = 150,
                                           .D = 72,
                                           .dtype = dtype,
                                           .block_q = 48,
                                           .block_k = 32,
                                           .density = 0.3,
                                           .causal = causal,
                                           .tail = ESA_TAIL_LEVELS,
                                           .fine = 4,
                                           .refined = 0.6,
                                           .broadcast = broadcast,
                                           .kv_len = causal == broadcast ? kv_len : NULL,
                                           .bsnd = 1,
                                           .pad = 3 };
                on_all_levels(&c);
            }
}

/* Every head has its own order, with every tail. Only text at the end may be cut. */
static void test_own_orders(void **state)
{
    (void)state;
    static const int32_t kv_len[] = { 200, 193 };
    for (int32_t tail = ESA_TAIL_NONE; tail <= ESA_TAIL_LEVELS; tail++)
        for (int32_t dtype = 0; dtype < 3; dtype++)
            for (int32_t broadcast = 0; broadcast < 2; broadcast++) {
                const attention_case c = { .B = 2,
                                           .Hq = 4,
                                           .Hkv = 2,
                                           .Nq = 200,
                                           .Nk = 200,
                                           .D = broadcast ? 64 : 40,
                                           .dtype = dtype,
                                           .block_q = 64,
                                           .block_k = 32,
                                           .density = 0.3,
                                           .tail = tail,
                                           .fine = 4,
                                           .refined = 0.5,
                                           .order = ESA_ORDER_ADAPTIVE,
                                           .broadcast = broadcast,
                                           .kv_len = broadcast ? NULL : kv_len,
                                           .text_front = 5,
                                           .text_back = 9,
                                           .bsnd = broadcast };
                on_all_levels(&c);
            }
}

static void expect_same_bits(const attention_case *a, const attention_case *b)
{
    for (int i = 0; i < levels; i++) {
        int64_t n, m;
        char *x = attention_bits(a, level_of[i], 1, &n), *y = attention_bits(b, level_of[i], 2, &m);
        assert_int_equal(n, m);
        assert_memory_equal(x, y, (size_t)n);
        free(x);
        free(y);
    }
}

static attention_case usual(int32_t dtype)
{
    return (attention_case){ .B = 1,
                             .Hq = 2,
                             .Hkv = 2,
                             .Nq = 170,
                             .Nk = 300,
                             .D = 64,
                             .dtype = dtype,
                             .block_q = 64,
                             .block_k = 64,
                             .density = 0.3,
                             .tail = ESA_TAIL_LEVELS,
                             .fine = 4,
                             .refined = 0.5 };
}

/* Without blocks on the fine level LEVELS is POOLED. */
static void test_without_fine_blocks(void **state)
{
    (void)state;
    for (int32_t dtype = 0; dtype < 3; dtype++) {
        attention_case pooled = usual(dtype), other = usual(dtype);
        pooled.tail = ESA_TAIL_POOLED;
        pooled.fine = 0;
        other.fine = 0; /* LEVELS, the mask has no fine level */
        expect_same_bits(&pooled, &other);
        other = usual(dtype);
        other.refined = 0; /* it has one, with no block on it */
        expect_same_bits(&pooled, &other);
    }
}

/* The other tails do not look at a mask's fine level: its blocks count as skipped. */
static void test_other_tails_skip_fine_blocks(void **state)
{
    (void)state;
    for (int32_t tail = ESA_TAIL_NONE; tail < ESA_TAIL_LEVELS; tail++)
        for (int32_t dtype = 0; dtype < 3; dtype++)
            for (int32_t rows = 0; rows <= 2; rows += 2) {
                attention_case without = usual(dtype), with = usual(dtype);
                without.tail = with.tail = tail;
                without.exact_rows = with.exact_rows = rows;
                without.fine = 0;
                expect_same_bits(&without, &with);
            }
}

/* A mask that keeps everything is dense attention. */
static void test_all_exact_is_dense(void **state)
{
    (void)state;
    for (int32_t dtype = 0; dtype < 3; dtype++) {
        attention_case dense = usual(dtype), all = usual(dtype);
        dense.block_q = dense.block_k = all.block_q = all.block_k = 128;
        dense.density = -1.0;
        dense.tail = ESA_TAIL_NONE;
        all.density = 1.0;
        expect_same_bits(&dense, &all);
    }
}

/* Fine means of one token each are the tokens themselves. */
static void test_means_of_one_token(void **state)
{
    (void)state;
    for (int i = 0; i < levels; i++) {
        attention_case dense = usual(ESA_DTYPE_F32), fine = usual(ESA_DTYPE_F32);
        dense.block_q = dense.block_k = fine.block_q = fine.block_k = 16;
        dense.density = -1.0;
        dense.tail = ESA_TAIL_NONE;
        fine.fine = 16;
        fine.refined = 1.0;
        fine.density = 0.2;
        int64_t n, m;
        float *x = attention_bits(&dense, level_of[i], 1, &n),
              *y = attention_bits(&fine, level_of[i], 1, &m);
        assert_int_equal(n, m);
        /* The same terms in another order of blocks: roundings of a sum of 300 f32 terms, of
         * outputs below 1.5 and LSEs below 8. On a GPU the means are rounded to 2^-11 (tf32). */
        const double bound = on_gpu() ? 1.5 * 0x1p-8 : 300 * 0x1p-23;
        for (int64_t j = 0; j < n / 4; j++) assert_true(fabs((double)x[j] - (double)y[j]) <= bound);
        free(x);
        free(y);
    }
}

static void test_same_bits_for_any_threads(void **state)
{
    (void)state;
    for (int32_t dtype = 0; dtype < 3; dtype++)
        for (int i = 0; i < levels; i++) {
            attention_case c = usual(dtype);
            c.B = 2;
            c.Hq = 4;
            c.order = ESA_ORDER_ADAPTIVE;
            int64_t n;
            char *one = attention_bits(&c, level_of[i], 1, &n);
            for (int32_t threads = 2; threads <= 3; threads++) {
                char *more = attention_bits(&c, level_of[i], threads, &n);
                assert_memory_equal(one, more, (size_t)n);
                free(more);
            }
            free(one);
        }
}

enum { H = 2, N = 160, D = 40, BLOCK = 32 };

static esa_mask *levels_mask(esa_ctx *ctx, const uint8_t *level, int32_t order)
{
    esa_mask_info info = { .struct_size = sizeof info,
                           .block_q = BLOCK,
                           .block_k = BLOCK,
                           .B = 1,
                           .H = H,
                           .Nq = N,
                           .Nk = N,
                           .fine = 4 };
    info.layout = esa_layout_default();
    info.layout.order = order;
    info.layout.grid_q[0] = 4;
    info.layout.grid_q[1] = 5;
    info.layout.grid_q[2] = 8;
    esa_mask *mask = NULL;
    assert_int_equal(esa_mask_from_levels(ctx, &mask, &info, level), ESA_OK);
    return mask;
}

/* If the order of every head is Hilbert's, the bits are those of Hilbert order. */
static void test_equal_orders_are_one_order(void **state)
{
    (void)state;
    enum { ROWS = H * (N / BLOCK) };
    static float x[3][H * N * D], out[2][H * N * D];
    uint8_t level[ROWS * (N / BLOCK)];
    int32_t perm[H * N];
    for (size_t i = 0; i < sizeof level; i++) level[i] = (uint8_t)(i * 7 % 3);
    for (int i = 0; i < levels; i++) {
        esa_ctx *ctx = level_ctx(level_of[i], 2);
        esa_tensor t[3], o = esa_tensor_bnsd(out[0], ESA_DTYPE_F32, 1, H, N, D);
        for (int n = 0; n < 3; n++) {
            t[n] = esa_tensor_bnsd(x[n], ESA_DTYPE_F32, 1, H, N, D);
            tensor_fill(&t[n], test_seed() + (uint64_t)n, 1.5);
        }
        esa_mask *hilbert = levels_mask(ctx, level, ESA_ORDER_HILBERT),
                 *own = levels_mask(ctx, level, ESA_ORDER_ADAPTIVE);
        esa_layout layout = esa_layout_default();
        layout.order = ESA_ORDER_HILBERT;
        layout.grid_q[0] = 4;
        layout.grid_q[1] = 5;
        layout.grid_q[2] = 8;
        for (int h = 0; h < H; h++)
            assert_int_equal(esa_order(ctx, perm + h * N, N, &layout, 0, ESA_MODE_FIXED), ESA_OK);
        esa_attention_params p = esa_attention_params_default();
        p.tail = ESA_TAIL_LEVELS;
        /* an order is missing: refused, and said so */
        assert_int_equal(esa_attention(ctx, &t[0], &t[1], &t[2], &o, own, &p), ESA_ERR_STATE);
        assert_non_null(strstr(esa_ctx_error(ctx), "no adaptive order yet"));
        assert_int_equal(esa_mask_set_orders(ctx, own, perm, perm, 1), ESA_OK);
        assert_int_equal(esa_attention(ctx, &t[0], &t[1], &t[2], &o, own, &p), ESA_ERR_SHAPE);
        assert_non_null(strstr(esa_ctx_error(ctx), "1 key heads, but the call has 2"));
        assert_int_equal(esa_mask_set_orders(ctx, own, perm, perm, H), ESA_OK);
        assert_int_equal(esa_attention(ctx, &t[0], &t[1], &t[2], &o, own, &p), ESA_OK);
        o.data = out[1];
        assert_int_equal(esa_attention(ctx, &t[0], &t[1], &t[2], &o, hilbert, &p), ESA_OK);
        assert_memory_equal(out[0], out[1], sizeof out[0]);
        p.causal = 1;
        assert_int_equal(esa_attention(ctx, &t[0], &t[1], &t[2], &o, own, &p), ESA_ERR_UNSUPPORTED);
        esa_mask_free(hilbert);
        esa_mask_free(own);
        esa_ctx_free(ctx);
    }
}

/* NaN in the values of a block spoils exactly the rows that see the block: with causal attention
 * the rows behind it, whatever level it has. */
static void test_not_finite(void **state)
{
    (void)state;
    enum { NB = N / BLOCK, BAD = 2 };
    static float x[3][H * N * D], out[H * N * D];
    for (int how = 0; how < 3; how++)
        for (int i = 0; i < levels; i++) {
            uint8_t level[H * NB * NB];
            for (size_t c = 0; c < sizeof level; c++) level[c] = (uint8_t)(c % 3);
            for (int row = 0; row < H * NB; row++) level[row * NB + BAD] = (uint8_t)how;
            for (int h = 0; h < H; h++)
                for (int row = 0; row < NB; row++) level[(h * NB + row) * NB + row] = 0;
            esa_ctx *ctx = level_ctx(level_of[i], 2);
            esa_tensor t[3], o = esa_tensor_bnsd(out, ESA_DTYPE_F32, 1, H, N, D);
            for (int n = 0; n < 3; n++) {
                t[n] = esa_tensor_bnsd(x[n], ESA_DTYPE_F32, 1, H, N, D);
                tensor_fill(&t[n], test_seed() + (uint64_t)n, 1.5);
            }
            x[2][(N + BAD * BLOCK + 3) * D + 1] = NAN; /* head 1 */
            esa_mask *mask = levels_mask(ctx, level, ESA_ORDER_RASTER);
            esa_attention_params p = esa_attention_params_default();
            p.tail = ESA_TAIL_LEVELS;
            p.causal = 1;
            assert_int_equal(esa_attention(ctx, &t[0], &t[1], &t[2], &o, mask, &p), ESA_OK);
            for (int64_t n = 0; n < H * N; n++)
                for (int64_t d = 0; d < D; d++) {
                    const int64_t token = n % N;
                    if (n < N || d != 1 || token < BAD * BLOCK)
                        assert_true(isfinite(out[n * D + d]) || (n >= N && d != 1));
                    else if (token >= (BAD + 1) * BLOCK)
                        assert_true(isnan(out[n * D + d]));
                }
            esa_mask_free(mask);
            esa_ctx_free(ctx);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASES(test_sizes),
        CASES(test_many_fine_blocks),
        CASES(test_causal_lengths_and_batches),
        CASES(test_own_orders),
        cmocka_unit_test(test_without_fine_blocks),
        cmocka_unit_test(test_other_tails_skip_fine_blocks),
        cmocka_unit_test(test_all_exact_is_dense),
        cmocka_unit_test(test_means_of_one_token),
        cmocka_unit_test(test_same_bits_for_any_threads),
        cmocka_unit_test(test_equal_orders_are_one_order),
        cmocka_unit_test(test_not_finite),
    };
    return cmocka_run_group_tests(tests, find_levels, NULL);
}
