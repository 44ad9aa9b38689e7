/* test_exact_rows.c - attention with exact rows: against the textbook, and against dense and sparse
 * attention.
 * SPDX-License-Identifier: Apache-2.0 */
#include "common/tests.h"
#include "common/attention_loop.h"

/* Tests that repeat a call for every dtype take only the last one there. */
static int32_t first_dtype(void) { return getenv("ESA_TEST_SMALL") ? ESA_DTYPE_BF16 : 0; }

/* Where the machine is slow every fifth case has to do. */
static void cases(void **state)
{
    (void)state;
    run_cases("exact/", few(5), few(5), NULL);
}

/* ---------------------------------------------------------------- against other calls */

static attention_case usual(int32_t dtype)
{
    attention_case c = case_of("exact/bits/f32");
    c.dtype = dtype;
    c.order = ESA_ORDER_RASTER;
    return c;
}

/* A mask that keeps everything needs no correction; a dense call ignores the setting. */
static void test_nothing_to_mend(void **state)
{
    (void)state;
    for (int32_t dtype = first_dtype(); dtype < 3; dtype++) {
        attention_case with = usual(dtype), without = usual(dtype);
        without.exact_rows = 0;
        with.density = without.density = 1.0;
        expect_same_bits(&with, &without, level_of, levels);
        with.density = without.density = -1.0;
        with.tail = without.tail = ESA_TAIL_NONE;
        expect_same_bits(&with, &without, level_of, levels);
    }
}

/* Blocks of no more than R rows are dense attention, whatever the mask says. */
static void test_all_rows_exact(void **state)
{
    (void)state;
    for (int32_t dtype = first_dtype(); dtype < 3; dtype++) {
        attention_case all = usual(dtype);
        all.block_q = all.exact_rows = 16;
        all.density = 0.0;
        all.tail = ESA_TAIL_NONE;
        attention_case dense = all;
        dense.density = 1.0;
        dense.exact_rows = 0;
        for (int i = 0; i < levels; i++) {
            int64_t n, m;
            char *x = attention_bits(&all, level_of[i], 1, &n),
                 *y = attention_bits(&dense, level_of[i], 1, &m);
            assert_int_equal(n, m);
            /* Both sum the same 300 terms in another order. Outputs are below 1.5: two ulp. */
            const int64_t rows = all.B * all.Hq * all.Nq, count = rows * all.D;
            esa_tensor tx = esa_tensor_bnsd(x, dtype, 1, 1, count, 1),
                       ty = esa_tensor_bnsd(y, dtype, 1, 1, count, 1);
            double *dx = malloc((size_t)count * 8), *dy = malloc((size_t)count * 8);
            tensor_to_double(dx, &tx);
            tensor_to_double(dy, &ty);
            const double bound = dtype == ESA_DTYPE_F32   ? 300 * 0x1p-23
                                 : dtype == ESA_DTYPE_F16 ? 0x1p-9
                                                          : 0x1p-6;
            assert_true(max_error(dx, dy, count) <= bound);
            free(dx);
            free(dy);
            free(x);
            free(y);
        }
    }
}

/* ---------------------------------------------------------------- single calls */

enum { H = 2, N = 160, D = 40, BLOCK = 32, NB = N / BLOCK };

typedef struct single {
    esa_ctx *ctx;
    esa_tensor t[4];
    esa_mask *mask;
    float x[4][H * N * D];
} single;

static single *single_open(int32_t level)
{
    single *s = calloc(1, sizeof *s);
    assert_non_null(s);
    s->ctx = level_ctx(level, 2);
    for (int i = 0; i < 4; i++) {
        s->t[i] = esa_tensor_bnsd(s->x[i], ESA_DTYPE_F32, 1, H, N, D);
        if (i < 3) tensor_fill(&s->t[i], test_seed() + (uint64_t)i, 1.5);
    }
    uint8_t bits[H * NB];
    for (int i = 0; i < H * NB; i++) bits[i] = (uint8_t)(1u << i % NB);
    esa_mask_info info = mask_info_of(BLOCK, BLOCK, H, N, N);
    assert_int_equal(esa_mask_from_bits(s->ctx, &s->mask, &info, bits), ESA_OK);
    return s;
}

static void single_close(single *s)
{
    esa_mask_free(s->mask);
    esa_ctx_free(s->ctx);
    free(s);
}

static esa_status single_run(single *s, const esa_attention_params *p)
{
    return esa_attention(s->ctx, &s->t[0], &s->t[1], &s->t[2], &s->t[3], s->mask, p);
}

/* NaN in one query stays in its own row, exact or not; NaN in a value reaches the exact rows and
 * those that see it, and no correction carries it further. */
static void test_not_finite(void **state)
{
    (void)state;
    /* Of 32 rows, 4, 12, 20 and 28 are exact. */
    const int64_t exact = BLOCK + 12;
    for (int i = 0; i < levels; i++)
        for (int where = 0; where < 3; where++) {
            single *s = single_open(level_of[i]);
            esa_attention_params p = esa_attention_params_default();
            p.exact_rows = 4;
            const int64_t row = where == 0 ? exact : exact + 1;
            if (where < 2)
                s->x[0][row * D + 3] = NAN;
            else
                s->x[2][5 * D + 3] = NAN; /* seen by block 0 of head 0, and by exact rows */
            assert_int_equal(single_run(s, &p), ESA_OK);
            for (int64_t n = 0; n < H * N; n++)
                for (int64_t d = 0; d < D; d++) {
                    const int32_t bad = isnan(s->x[3][n * D + d]),
                                  want = where < 2 ? n == row
                                                   : n < N && d == 3 && (n < BLOCK || n % 8 == 4);
                    if (bad != want)
                        fail_msg("level %d case %d: row %d column %d is %g", level_of[i], where,
                                 (int)n, (int)d, (double)s->x[3][n * D + d]);
                }
            single_close(s);
        }
}

static void test_bad_settings(void **state)
{
    (void)state;
    single *s = single_open(level_of[0]);
    esa_attention_params p = esa_attention_params_default();
    static const int32_t bad[] = { -1, 17, 1 << 30 };
    for (int i = 0; i < 3; i++) {
        p.exact_rows = bad[i];
        assert_int_equal(single_run(s, &p), ESA_ERR_ARGUMENT);
        assert_non_null(strstr(esa_ctx_error(s->ctx), "expected 0 .. 16"));
    }
    p.exact_rows = 4;
    p.causal = 1;
    assert_int_equal(single_run(s, &p), ESA_ERR_UNSUPPORTED);
    assert_non_null(strstr(esa_ctx_error(s->ctx), "exact_rows is 4 and causal is 1"));
    single_close(s);
}

/* A plan gives the bits of the single call, and stays inside the workspace it asked for. */
static void test_plans(void **state)
{
    (void)state;
    for (int i = 0; i < levels; i++)
        for (int how = 0; how < 2; how++) {
            single *s = single_open(level_of[i]);
            esa_attention_params p = esa_attention_params_default();
            p.exact_rows = 4;
            p.tail = ESA_TAIL_POOLED;
            assert_int_equal(single_run(s, &p), ESA_OK);
            float *want = malloc(sizeof s->x[3]);
            memcpy(want, s->x[3], sizeof s->x[3]);
            memset(s->x[3], 0, sizeof s->x[3]);

            esa_shapes shapes = shapes_of(ESA_DTYPE_F32, 1, H, N, D);
            esa_select_params select = esa_select_params_default(ESA_SELECT_RANDOM);
            select.block_q = select.block_k = BLOCK;
            esa_plan *plan = NULL, *plain = NULL;
            assert_int_equal(esa_plan_create(s->ctx, &plan, &shapes, how ? &select : NULL, &p),
                             ESA_OK);
            p.exact_rows = 0;
            assert_int_equal(esa_plan_create(s->ctx, &plain, &shapes, how ? &select : NULL, &p),
                             ESA_OK);
            int64_t bytes, less;
            assert_int_equal(esa_plan_workspace(plan, &bytes), ESA_OK);
            assert_int_equal(esa_plan_workspace(plain, &less), ESA_OK);
            assert_true(bytes > less);
            esa_mask *mask = NULL;
            assert_int_equal(esa_mask_to_device(s->ctx, &mask, s->mask,
                                                on_gpu() ? ESA_DEVICE_CUDA : ESA_DEVICE_CPU),
                             ESA_OK);
            char *block = malloc((size_t)bytes + 2 * ESA_WORKSPACE_ALIGN),
                 *end = block + bytes + 2 * ESA_WORKSPACE_ALIGN,
                 *ws = block + (ESA_WORKSPACE_ALIGN - (uintptr_t)block % ESA_WORKSPACE_ALIGN);
            memset(block, 0x7f, (size_t)(end - block));
            const esa_status status = esa_plan_attention(plan, mask, &s->t[0], &s->t[1], &s->t[2],
                                                         &s->t[3], NULL, ws);
            if (status) fail_msg("%s", esa_ctx_error(s->ctx));
            assert_memory_equal(want, s->x[3], sizeof s->x[3]);
            for (const char *c = ws + bytes; c < end; c++) assert_int_equal(*c, 0x7f);
            free(block);
            free(want);
            esa_plan_free(plan);
            esa_plan_free(plain);
            esa_mask_free(mask);
            single_close(s);
        }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        CASES(cases),
        cmocka_unit_test(test_nothing_to_mend),
        cmocka_unit_test(test_all_rows_exact),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_bad_settings),
        cmocka_unit_test(test_plans),
    };
    return RUN(tests);
}
