/* test_eight_bit.c - attention in 8 bits against the textbook in double, and its rules for NaN,
 * exact rows and calls that run in 16 bits instead.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Bounds: a number that is rounded to E4M3 has a relative error of 2.65 % in the mean square (3
 * bits of mantissa: 1/16 / sqrt(3), times 0.74 for the spread of mantissas). P and v are rounded.
 * If values vary around 0, the output is a sum of terms P v of random sign, and so is its error: it
 * has sqrt(2) 2.65 % = 3.7 % at most. Keys and queries in int8 add less than 1 %. Every case must
 * stay below BOUND. On a GPU without an 8-bit kernel for a case, the case runs in 16 bits, which is
 * better. */
#include "common/tests.h"
#include "common/attention_loop.h"

#define BOUND     0.05
/* The sum of P carries the errors of its terms: 2.65 % if one term is nearly all of it. */
#define LSE_BOUND 0.04

/* Levels take turns: they differ in the order of f32 sums alone. A case that is named runs on
 * all. */
static int check(const attention_case *c)
{
    static int turn;
    const int all = getenv("ESA_TEST_CASE") != NULL, from = all ? 0 : turn++ % native;
    int wrong = 0;
    for (int i = from; i < (all ? native : from + 1); i++) {
        double lse;
        const double error = attention_error(c, level_of[i], 2, &lse);
        const int right = error <= BOUND && lse <= LSE_BOUND;
        if (!right)
            printf("    level %d WRONG: relative error %.4f (bound %g), lse %.4f (bound %g)\n",
                   level_of[i], error, BOUND, lse, LSE_BOUND);
        wrong += !right;
    }
    return wrong;
}

/* Emulated ($ESA_TEST_EMULATED), every fifth case has to do. */
static void cases(void **state)
{
    (void)state;
    run_cases("eight/", getenv("ESA_TEST_EMULATED") ? 5 : 1, 0, check);
}

/* Keys and values far from 0: their centre costs nothing. */
static void centres(void **state)
{
    (void)state;
    for (int kind = 0; kind < 3; kind++) {
        attention_case c = case_of("eight/outliers/none");
        c.outliers = 0;
        if (kind == 1) c.density = -1.0;
        if (kind == 2) c.tail = ESA_TAIL_POOLED;
        double lse, plain = attention_error(&c, level_of[0], 2, &lse);
        c.offset = 20.0;
        const double shifted = attention_error(&c, level_of[0], 2, &lse);
        /* The output is 20 times as large and its error is the same, or it would be near BOUND. On
         * a GPU 16-bit kernels stand in for f32: their error grows with the output. */
        if (!on_gpu()) assert_true(shifted < 0.1 * plain);
        assert_true(shifted < BOUND && lse < LSE_BOUND);
    }
}

/* The error does not grow with the length. Up to 8 % more are chance: 64 x 64 outputs. GPUs compute
 * f32 in f32, whose errors are far below 1e-4 and do grow. */
static void no_growth(void **state)
{
    (void)state;
    double first = 0.0;
    const int64_t most = getenv("ESA_TEST_EMULATED") ? 4096 : 16384;
    for (int64_t n = 1024; n <= most; n *= 4) {
        const attention_case c = { .B = 1,
                                   .Hq = 1,
                                   .Hkv = 1,
                                   .Nq = 64,
                                   .Nk = n,
                                   .D = 64,
                                   .dtype = ESA_DTYPE_F32,
                                   .density = -1.0,
                                   .precision = 8 };
        double lse;
        const double error = attention_error(&c, level_of[0], 2, &lse);
        printf("%lld keys: relative error %.4f, lse %.5f\n", (long long)n, error, lse);
        if (n == 1024) first = error;
        assert_true(error <= (on_gpu() && !on_stand_in() ? 1e-4 : 1.08 * first + 1e-6));
    }
}

/* ---------------------------------------------------------------- small calls by hand */

/* What the 8-bit kernels of GPUs take, too. */
enum { H = 2, N = 500, D = 128, BLOCK = 128, BLOCKS = (N + BLOCK - 1) / BLOCK };
enum {
    NOT_A_NUMBER = 0x7fc0,
    INFINITE = 0x7f80,
    MINUS_INFINITE = 0xff80,
    LARGE = 0x4700
}; /* bf16 */

typedef struct small {
    uint16_t q[H * N * D], k[H * N * D], v[H * N * D], o[H * N * D];
    float lse[H * N];
    double out[H * N * D];
    esa_ctx *ctx;
} small;

static esa_tensor bf16(uint16_t *data) { return esa_tensor_bnsd(data, ESA_DTYPE_BF16, 1, H, N, D); }

static small *fresh(void)
{
    small *s = calloc(1, sizeof *s);
    s->ctx = level_ctx(level_of[0], 2);
    uint16_t *const part[] = { s->q, s->k, s->v };
    for (int i = 0; i < 3; i++) {
        const esa_tensor t = bf16(part[i]);
        tensor_fill(&t, test_seed() + 40 + (uint64_t)i, 1.0);
    }
    return s;
}

static esa_mask *diagonal(const small *s) /* query block i keeps key block i only */
{
    esa_mask_info info = mask_info_of(BLOCK, BLOCK, H, N, N);
    int32_t count[H * BLOCKS], index[H * BLOCKS];
    for (int i = 0; i < H * BLOCKS; i++) {
        count[i] = 1;
        index[i] = i % BLOCKS;
    }
    esa_mask *mask;
    assert_int_equal(esa_mask_from_lists(s->ctx, &mask, &info, count, index, 1), ESA_OK);
    return mask;
}

static void attend(small *s, const esa_mask *mask, const esa_attention_params *given)
{
    const esa_tensor q = bf16(s->q), k = bf16(s->k), v = bf16(s->v), o = bf16(s->o),
                     lse = esa_tensor_bnsd(s->lse, ESA_DTYPE_F32, 1, H, N, 1);
    esa_attention_params p = *given;
    p.lse = &lse;
    if (esa_attention(s->ctx, &q, &k, &v, &o, mask, &p)) fail_msg("%s", esa_ctx_error(s->ctx));
    tensor_to_double(s->out, &o);
}

static void done(small *s, esa_mask *mask)
{
    esa_mask_free(mask);
    esa_ctx_free(s->ctx);
    free(s);
}

/* 1 if 8 bits are computed here: a GPU may have no kernel for them, and then NaN follows the rules
 * of 16 bits, which tests/api/test_attention.c holds. test_gpu_eight_bit names the kernels. */
static int has_eight(small *s, const esa_mask *mask)
{
    esa_attention_params p = esa_attention_params_default();
    attend(s, mask, &p);
    uint16_t *sixteen = malloc(sizeof s->o);
    memcpy(sixteen, s->o, sizeof s->o);
    p.precision = 8;
    attend(s, mask, &p);
    const int same = memcmp(sixteen, s->o, sizeof s->o) == 0;
    free(sixteen);
    if (!on_gpu() || on_stand_in()) assert_false(same);
    if (same) printf("this GPU computes the call in 16 bits\n");
    return !same;
}

static int row_is_nan(const small *s, int64_t h, int64_t n)
{
    int64_t count = 0;
    for (int64_t d = 0; d < D; d++) count += isnan(s->out[(h * N + n) * D + d]) != 0;
    assert_true(count == 0 || count == D);
    return count == D;
}

/* Every row of q has its own scale: NaN or infinity makes its row NaN, and a large number costs its
 * row accuracy, and no other row changes. */
static void odd_queries(void **state)
{
    (void)state;
    small *s = fresh();
    esa_attention_params p = esa_attention_params_default();
    p.precision = 8;
    esa_mask *mask = diagonal(s);
    if (has_eight(s, mask)) {
        attend(s, mask, &p);
        double *before = malloc(sizeof s->out);
        memcpy(before, s->out, sizeof s->out);
        static const uint16_t given[] = { INFINITE, NOT_A_NUMBER, LARGE };
        for (int i = 0; i < 3; i++) {
            s->q[(N + 130) * D + 7] = given[i];
            attend(s, mask, &p);
            for (int64_t h = 0; h < H; h++)
                for (int64_t n = 0; n < N; n++) {
                    const int odd = h == 1 && n == 130, nan = odd && given[i] != LARGE;
                    const int64_t at = (h * N + n) * D;
                    assert_int_equal(row_is_nan(s, h, n), nan);
                    assert_int_equal(isnan(s->lse[h * N + n]) != 0, nan);
                    if (!odd) assert_memory_equal(s->out + at, before + at, D * sizeof *before);
                }
        }
        free(before);
    }
    done(s, mask);
}

/* NaN in k reaches the rows that compute its block, or that use its mean. */
static void odd_keys(void **state)
{
    (void)state;
    small *s = fresh();
    esa_attention_params p = esa_attention_params_default();
    p.precision = 8;
    esa_mask *mask = diagonal(s);
    if (has_eight(s, mask)) {
        s->k[(N + 2 * BLOCK + 3) * D + 11] = NOT_A_NUMBER;
        for (int32_t tail = ESA_TAIL_NONE; tail <= ESA_TAIL_POOLED; tail++) {
            p.tail = tail;
            attend(s, mask, &p);
            for (int64_t h = 0; h < H; h++)
                for (int64_t n = 0; n < N; n++)
                    assert_int_equal(row_is_nan(s, h, n), h == 1 && (tail || n / BLOCK == 2));
        }
    }
    done(s, mask);
}

/* NaN or infinity in v reaches one channel of the rows that meet it. */
static void odd_values(void **state)
{
    (void)state;
    small *s = fresh();
    esa_attention_params p = esa_attention_params_default();
    p.precision = 8;
    esa_mask *mask = diagonal(s);
    s->v[(BLOCK + 3) * D + 5] = MINUS_INFINITE;
    for (int32_t tail = ESA_TAIL_NONE; tail <= ESA_TAIL_POOLED; tail++) {
        p.tail = tail;
        attend(s, mask, &p);
        for (int64_t i = 0; i < H * N * D; i++) {
            const int64_t h = i / D / N, n = i / D % N, d = i % D;
            const int odd = h == 0 && d == 5 && (tail || n / BLOCK == 1);
            /* in 16 bits infinity stays infinite */
            assert_int_equal(!isfinite(s->out[i]), odd);
        }
        for (int64_t i = 0; i < H * N; i++) assert_true(isfinite(s->lse[i]));
    }
    done(s, mask);
}

/* Keys beyond kv_len are never read: whatever stands there, the bits are the same. */
static void beyond_the_length(void **state)
{
    static const int32_t kv_len[1] = { 300 };
    (void)state;
    small *s = fresh();
    esa_attention_params p = esa_attention_params_default();
    p.precision = 8;
    p.tail = ESA_TAIL_POOLED;
    p.kv_len = kv_len;
    esa_mask *mask = diagonal(s);
    attend(s, mask, &p);
    uint16_t *before = malloc(sizeof s->o);
    memcpy(before, s->o, sizeof s->o);
    for (int64_t h = 0; h < H; h++)
        for (int64_t i = kv_len[0] * D; i < N * D; i++)
            s->k[h * N * D + i] = s->v[h * N * D + i] = NOT_A_NUMBER;
    attend(s, mask, &p);
    assert_memory_equal(before, s->o, sizeof s->o);
    free(before);
    done(s, mask);
}

/* Rows of P sum to 1, so equal values come out as they went in, from blocks and from means. */
static void equal_values(void **state)
{
    (void)state;
    small *s = fresh();
    esa_attention_params p = esa_attention_params_default();
    p.precision = 8;
    p.tail = ESA_TAIL_POOLED;
    esa_mask *mask = diagonal(s);
    for (int64_t i = 0; i < H * N * D; i++) {
        const float value = (float)(i % 32) - 3.25f; /* exact in bf16: its upper half */
        uint32_t bits;
        memcpy(&bits, &value, 4);
        s->v[i] = (uint16_t)(bits >> 16);
    }
    attend(s, mask, &p);
    assert_memory_equal(s->o, s->v, sizeof s->o);
    done(s, mask);
}

/* Queries of 0 weigh all keys alike. Then the mean error of the values makes up for all their
 * errors, and the output is the mean of the values: to half of the last bit of bf16, and to 2e-4,
 * because GPUs sum the codes in f16. Without the mean error it would be wrong by up to 3e-3. */
static void even_rows(void **state)
{
    (void)state;
    small *s = fresh();
    esa_attention_params p = esa_attention_params_default();
    p.precision = 8;
    memset(s->q, 0, sizeof s->q);
    attend(s, NULL, &p);
    double *v = malloc(sizeof s->out);
    const esa_tensor t = bf16(s->v);
    tensor_to_double(v, &t);
    for (int64_t h = 0; h < H; h++)
        for (int64_t d = 0; d < D; d++) {
            double mean = 0.0;
            for (int64_t n = 0; n < N; n++) mean += v[(h * N + n) * D + d] / N;
            for (int64_t n = 0; n < N; n++)
                assert_true(fabs(s->out[(h * N + n) * D + d] - mean) <= 0x1p-8 * fabs(mean) + 2e-4);
        }
    free(v);
    done(s, NULL);
}

/* Exact rows have 16 bits: they are those of a dense call in 16 bits, bit for bit. */
static void exact_rows(void **state)
{
    (void)state;
    small *s = fresh();
    esa_attention_params p = esa_attention_params_default();
    esa_mask *mask = diagonal(s);
    p.precision = 8;
    p.tail = ESA_TAIL_POOLED;
    p.exact_rows = 2;
    attend(s, mask, &p);
    uint16_t *eight = malloc(sizeof s->o);
    memcpy(eight, s->o, sizeof s->o);
    p.precision = 16;
    attend(s, mask, &p);
    int64_t same = 0;
    for (int64_t n = 0; n < H * N; n++) same += memcmp(eight + n * D, s->o + n * D, D * 2) == 0;
    /* a GPU without 8 bits: all rows */
    assert_true(same == H * BLOCKS * 2 || (on_gpu() && !on_stand_in() && same == H * N));
    free(eight);
    done(s, mask);
}

/* Which calls run in 8 bits, by the name of the kernel; and 0 means 16. */
static void names(void **state)
{
    static const struct {
        int32_t precision, causal, tail, eight;
    } call[] = { { 8, 0, ESA_TAIL_NONE, 1 },     { 8, 0, ESA_TAIL_POOLED, 1 },
                 { 8, 0, ESA_TAIL_LEVELS, 1 },   { 8, 1, ESA_TAIL_NONE, 0 },
                 { 8, 0, ESA_TAIL_CENTROID, 0 }, { 16, 0, ESA_TAIL_NONE, 0 },
                 { 0, 0, ESA_TAIL_NONE, 0 } };
    (void)state;
    small *s = fresh();
    esa_shapes shapes = shapes_of(ESA_DTYPE_BF16, 1, H, N, D);
    esa_mask *mask = diagonal(s);
    const esa_tensor t = bf16(s->q), o = bf16(s->o);
    on_gpu_set(0);
    for (size_t i = 0; i < sizeof call / sizeof call[0]; i++) {
        esa_attention_params p = esa_attention_params_default();
        p.precision = call[i].precision;
        p.causal = call[i].causal;
        p.tail = call[i].tail;
        esa_plan *plan;
        assert_int_equal(esa_plan_create(s->ctx, &plan, &shapes, NULL, &p), ESA_OK);
        const char *name = esa_plan_kernel(plan, mask, &t, &t, &t, &o);
        assert_int_equal(strcmp(name, "cpu-8bit") == 0, call[i].eight);
        esa_plan_free(plan);
    }
    on_gpu_set(-1);
    done(s, mask);
}

/* A plan announces enough memory, for calls in 8 bits and for those in 16 bits instead. */
static void workspace(void **state)
{
    (void)state;
    small *s = fresh();
    esa_mask *mask = diagonal(s);
    esa_shapes shapes = shapes_of(ESA_DTYPE_BF16, 1, H, N, D);
    const esa_tensor q = bf16(s->q), k = bf16(s->k), v = bf16(s->v), o = bf16(s->o);
    if (on_gpu()) mask = (esa_mask_free(mask), NULL); /* masks of plans lie on the GPU */
    for (int32_t tail = ESA_TAIL_NONE; tail <= ESA_TAIL_LEVELS; tail++) {
        esa_attention_params p = esa_attention_params_default();
        p.precision = 8;
        p.tail = tail;
        esa_plan *plan;
        int64_t bytes;
        assert_int_equal(esa_plan_create(s->ctx, &plan, &shapes, NULL, &p), ESA_OK);
        assert_int_equal(esa_plan_workspace(plan, &bytes), ESA_OK);
        guarded ws = guard_alloc(bytes + ESA_WORKSPACE_ALIGN, 0);
        char *from = (char *)(((uintptr_t)ws.data + ESA_WORKSPACE_ALIGN - 1) / ESA_WORKSPACE_ALIGN *
                              ESA_WORKSPACE_ALIGN);
        char *const end = from + bytes;
        memset(end, 0x5a, (size_t)((char *)ws.data + ws.bytes - end));
        for (int dense = 0; dense < 2; dense++) {
            const esa_mask *m = dense ? NULL : mask;
            assert_int_equal(esa_plan_attention(plan, m, &q, &k, &v, &o, NULL, from), ESA_OK);
            for (char *c = end; c < (char *)ws.data + ws.bytes; c++) assert_int_equal(*c, 0x5a);
        }
        assert_true(guard_check(&ws));
        guard_free(&ws);
        esa_plan_free(plan);
    }
    done(s, mask);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        CASES(cases),
        cmocka_unit_test(centres),
        cmocka_unit_test(no_growth),
        cmocka_unit_test(odd_queries),
        cmocka_unit_test(odd_keys),
        cmocka_unit_test(odd_values),
        cmocka_unit_test(beyond_the_length),
        cmocka_unit_test(equal_values),
        cmocka_unit_test(even_rows),
        cmocka_unit_test(exact_rows),
        cmocka_unit_test(names),
        cmocka_unit_test(workspace),
    };
    return RUN(tests);
}
