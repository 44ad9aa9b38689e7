/* test_attention.c - esa_attention on every ISA level against the textbook in double.
 * SPDX-License-Identifier: Apache-2.0 */
#include "common/tests.h"
#include "common/attention_loop.h"

/* Where the processor is slow every fifth small case has to do. */
static void cases(void **state)
{
    (void)state;
    run_cases("attention/", on_gpu() ? 1 : few(5), few(5), NULL);
}

/* If all keys inside each block are equal, the pooled tail is exact: a sparse result equals the
 * dense one. */
static void test_equal_keys(void **state)
{
    (void)state;
    attention_case c = case_of("attention/bits/f32");
    c.block_q = 32;
    c.equal_keys = 1;
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
    attention_case c = case_of("attention/bits/f32");
    c.block_q = c.block_k = 128;
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

/* NaN and infinity in f16 and bf16: one bad query spoils its row alone; a key of infinite score
 * spoils the rows it is large for. Without the LSE there may be another kernel. */
static void not_finite_one(int32_t level, int32_t dtype, int D, int with_lse)
{
    enum { N = 200 };
    static uint16_t q[N * 128], k[N * 128], v[N * 128], o[N * 128];
    static float lse[N];
    static double got[N * 128];
    const uint16_t infinity = dtype == ESA_DTYPE_F16 ? 0x7c00 : 0x7f80,
                   nan = (uint16_t)(infinity | 1), one = dtype == ESA_DTYPE_F16 ? 0x3c00 : 0x3f80;
    esa_tensor tq = esa_tensor_bnsd(q, dtype, 1, 1, N, D), tk = tq, tv = tq, to = tq,
               tl = esa_tensor_bnsd(lse, ESA_DTYPE_F32, 1, 1, N, 1);
    tk.data = k;
    tv.data = v;
    to.data = o;
    esa_ctx *ctx = level_ctx(level, 0);
    esa_attention_params ap = esa_attention_params_default();
    ap.lse = with_lse ? &tl : NULL;
    tensor_fill(&tq, 1, 1.0);
    tensor_fill(&tk, 2, 1.0);
    tensor_fill(&tv, 3, 1.0);
    q[3 * D + 5] = nan;
    assert_int_equal(esa_attention(ctx, &tq, &tk, &tv, &to, NULL, &ap), ESA_OK);
    tensor_to_double(got, &to);
    for (int n = 0; n < N; n++)
        for (int d = 0; d < D; d++) assert_true(isnan(got[n * D + d]) == (n == 3));
    assert_true(!with_lse || (isnan((double)lse[3]) && isfinite((double)lse[4])));
    tensor_fill(&tq, 1, 1.0);
    for (int n = 0; n < N; n++) q[n * D] = (uint16_t)(n % 2 ? one : one | 0x8000u);
    /* +inf for odd rows, an absent key for even ones; in the first stage that is visited, and in
     * the second */
    for (int key = 150; key > 0; key -= 100) {
        tensor_fill(&tk, 2, 1.0);
        k[key * D] = infinity;
        assert_int_equal(esa_attention(ctx, &tq, &tk, &tv, &to, NULL, &ap), ESA_OK);
        tensor_to_double(got, &to);
        for (int n = 0; n < N; n++) assert_true(isnan(got[n * D + 9]) == (n % 2));
    }
    for (int n = 0; n < N; n++) k[n * D] = infinity;
    assert_int_equal(esa_attention(ctx, &tq, &tk, &tv, &to, NULL, &ap), ESA_OK);
    tensor_to_double(got, &to);
    /* every key absent */
    for (int n = 0; n < N; n += 2)
        assert_true(got[n * D + 9] == 0.0 && (!with_lse || lse[n] == -INFINITY));
    esa_ctx_free(ctx);
}

static void test_not_finite_short(void **state)
{
    (void)state;
    for (int i = 0; i < native; i++)
        for (int32_t dtype = ESA_DTYPE_F16; dtype <= ESA_DTYPE_BF16; dtype++)
            for (int D = 64; D <= 128; D += 64)
                for (int with_lse = 0; with_lse < 2; with_lse++)
                    not_finite_one(level_of[i], dtype, D, with_lse);
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
                esa_mask_info info = mask_info_of(BLOCK, BLOCK, 1, N, N);
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
        esa_mask_info info = mask_info_of(BLOCK, BLOCK, H, N, N);
        info.B = batch;
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
    static const struct CMUnitTest tests[] = {
        CASES(cases),
        cmocka_unit_test(test_equal_keys),
        cmocka_unit_test(test_full_mask_is_dense),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_not_finite_short),
        cmocka_unit_test(test_not_finite_with_tail),
        cmocka_unit_test(test_mask_broadcast),
    };
    return RUN(tests);
}
