/* test_levels.c - attention with a fine level and with an order per head, against attention as the
 * textbook writes it, and against itself.
 * SPDX-License-Identifier: Apache-2.0 */
#include "common/tests.h"
#include "common/attention_loop.h"

/* Where the machine is slow few cases have to do. */
static void cases(void **state)
{
    (void)state;
    run_cases("levels/", few(5), few(7), NULL);
}

static attention_case usual(int32_t dtype)
{
    attention_case c = case_of("levels/bits/f32");
    c.dtype = dtype;
    c.order = ESA_ORDER_RASTER;
    return c;
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
        expect_same_bits(&pooled, &other, level_of, levels);
        other = usual(dtype);
        other.refined = 0; /* it has one, with no block on it */
        expect_same_bits(&pooled, &other, level_of, levels);
    }
}

/* The same at the sizes of the GPU's tiles. */
static void test_pooled_tiles(void **state)
{
    (void)state;
    for (int32_t dtype = 0; dtype < 3; dtype++)
        for (int64_t head_dim = 64; head_dim <= 128; head_dim += 64) {
            attention_case fine = case_of("levels/tiles/bits/d64/f32");
            fine.D = head_dim;
            fine.dtype = dtype;
            fine.refined = 0.0;
            attention_case other = fine;
            other.tail = ESA_TAIL_POOLED;
            expect_same_bits(&fine, &other, level_of, levels);
            other.tail = ESA_TAIL_LEVELS;
            other.fine = 0;
            expect_same_bits(&fine, &other, level_of, levels);
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
                expect_same_bits(&without, &with, level_of, levels);
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
        expect_same_bits(&dense, &all, level_of, levels);
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

enum { H = 2, N = 160, D = 40, BLOCK = 32 };

static esa_mask *levels_mask(esa_ctx *ctx, const uint8_t *level, int32_t order)
{
    esa_mask_info info = mask_info_of(BLOCK, BLOCK, H, N, N);
    info.fine = 4;
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

/* Values that do not count must not be seen: NaN behind kv_len, and NaN that causality hides. One
 * in a block of the fine level reaches every row that uses the block. */
static void test_not_finite_tiles(void **state)
{
    enum { N = 700, D = 128, BK = 64, NK = (N + BK - 1) / BK, NQ = (N + 127) / 128 };
    static uint16_t q[N * D], k[N * D], v[N * D], o[N * D];
    static double got[N * D];
    static uint8_t level[NQ * NK];
    (void)state;
    for (int i = 0; i < levels; i++)
        for (int where = 0; where < 3; where++) {
            esa_tensor tq = esa_tensor_bnsd(q, ESA_DTYPE_BF16, 1, 1, N, D), tk = tq, tv = tq,
                       to = tq;
            tk.data = k;
            tv.data = v;
            to.data = o;
            tensor_fill(&tq, 1, 1.0);
            tensor_fill(&tk, 2, 1.0);
            tensor_fill(&tv, 3, 1.0);
            /* 0: behind kv_len; 1: in the last key, which causality hides; 2: in block 4 */
            const int32_t kv_len[] = { where == 0 ? 500 : N };
            const int from = where == 0   ? 500
                             : where == 1 ? N - 1
                                          : 4 * BK + 5,
                      to_key = where == 2 ? from + 1 : N;
            for (int n = from; n < to_key; n++)
                for (int d = 0; d < D; d++) {
                    v[n * D + d] = 0x7fc0;
                    if (where != 2) k[n * D + d] = 0x7fc0;
                }
            for (int c = 0; c < NQ * NK; c++) level[c] = (uint8_t)(c % NK % 3 == 1 ? 1 : c % 2 * 2);
            esa_ctx *ctx = level_ctx(level_of[i], 0);
            esa_mask *mask = NULL;
            esa_mask_info info = mask_info_of(128, BK, 1, N, N);
            info.fine = 4;
            assert_int_equal(esa_mask_from_levels(ctx, &mask, &info, level), ESA_OK);
            esa_attention_params ap = esa_attention_params_default();
            ap.tail = ESA_TAIL_LEVELS;
            ap.causal = where == 1;
            ap.kv_len = kv_len;
            assert_int_equal(esa_attention(ctx, &tq, &tk, &tv, &to, mask, &ap), ESA_OK);
            tensor_to_double(got, &to);
            for (int n = 0; n < N; n++)
                for (int d = 0; d < D; d++) {
                    /* A query block may compute the whole last key block, so its rows may see v. */
                    if (where == 1 && n >= (N - 1) / 128 * 128) continue;
                    if (isnan(got[n * D + d]) != (where == 2))
                        fail_msg("level %d, case %d: row %d, column %d is %g", level_of[i], where,
                                 n, d, got[n * D + d]);
                }
            esa_mask_free(mask);
            esa_ctx_free(ctx);
        }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        CASES(cases),
        cmocka_unit_test(test_without_fine_blocks),
        cmocka_unit_test(test_pooled_tiles),
        cmocka_unit_test(test_other_tails_skip_fine_blocks),
        cmocka_unit_test(test_all_exact_is_dense),
        cmocka_unit_test(test_means_of_one_token),
        cmocka_unit_test(test_equal_orders_are_one_order),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_not_finite_tiles),
    };
    return RUN(tests);
}
