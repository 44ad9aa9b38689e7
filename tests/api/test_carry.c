/* test_carry.c - attention with a carried difference: adding one and making one, against the
 * textbook in double and against rules/carry.h; what single calls do (nothing left out, made and
 * added again, NaN, sizes, LSE, plans); and arguments.
 * SPDX-License-Identifier: Apache-2.0 */
#include "common/tests.h"
#include "common/attention_loop.h"
#include "common/attention_prepare.h"

/* In 8 bits the relative error is at most 0.05 (test_eight_bit.c), and d has none. A made d has the
 * bits that follow from the output of the plain call. */
static int check_eight(const attention_case *c)
{
    int wrong = 0;
    attention_case make = *c;
    make.carry = CASE_MAKE;
    for (int i = 0; i < native; i++) {
        double lse;
        const double error = attention_error(c, level_of[i], 2, &lse);
        const int bits = made_bits_right(&make, level_of[i], 2),
                  right = error <= 0.05 && lse <= 0.04 && bits;
        if (!right)
            printf("    level %d WRONG: relative error %.4f, lse %.4f, bits of a made d %s\n",
                   level_of[i], error, lse, bits ? "right" : "other than those of rules/carry.h");
        wrong += !right;
    }
    return wrong;
}

static int check(const attention_case *c)
{
    return c->precision == 8 ? check_eight(c) : check_attention(c, level_of, levels, 2);
}

/* Where the machine is slow every fifth case has to do. */
static void cases(void **state)
{
    (void)state;
    run_cases("carry/", few(5), few(5), check);
}

enum { B = 2, H = 2, N = 150, D = 24, BLOCK = 32, COUNT = B * H * N * D };

typedef struct call {
    esa_ctx *ctx;
    esa_mask *mask;
    esa_tensor t[4]; /* q, k, v, o */
    void *data[4];
    esa_carry d;
    void *memory; /* of d */
    int64_t bytes;
} call;

static call *call_open(int32_t level, int32_t dtype, int32_t format, double density)
{
    call *c = calloc(1, sizeof *c);
    c->ctx = level_ctx(level, 2);
    for (int i = 0; i < 4; i++) {
        c->data[i] = malloc(COUNT * 4);
        c->t[i] = esa_tensor_bnsd(c->data[i], dtype, B, H, N, D);
        tensor_fill(&c->t[i], test_seed() + (uint64_t)i, 1.5);
    }
    c->bytes = esa_carry_bytes(format, B, H, N, D);
    /* room for the wrong sizes of test_bad_arguments too, which on_gpu copies before they are
     * refused */
    const size_t room = (size_t)(2 * c->bytes + ESA_WORKSPACE_ALIGN - 1) / ESA_WORKSPACE_ALIGN *
                        ESA_WORKSPACE_ALIGN;
    c->memory = aligned_alloc(ESA_WORKSPACE_ALIGN, room);
    memset(c->memory, 0x5a, room);
    c->d = esa_carry_view(c->memory, format, B, H, N, D);
    const int64_t blocks = (N + BLOCK - 1) / BLOCK, cells = B * H * blocks * blocks;
    uint8_t *keep = malloc((size_t)cells);
    for (int64_t i = 0; i < cells; i++) /* 0: kept, 2: not */
        keep[i] = (double)((uint32_t)(i + 1) * 2654435761u >> 8) * 0x1p-24 < density ? 0 : 2;
    esa_mask_info info = mask_info_of(BLOCK, BLOCK, H, N, N);
    info.B = B;
    assert_int_equal(esa_mask_from_levels(c->ctx, &c->mask, &info, keep), ESA_OK);
    free(keep);
    return c;
}

static void call_close(call *c)
{
    for (int i = 0; i < 4; i++) free(c->data[i]);
    free(c->memory);
    esa_mask_free(c->mask);
    esa_ctx_free(c->ctx);
    free(c);
}

static esa_status carry(call *c, const esa_attention_params *p, int32_t use)
{
    return esa_attention_carry(c->ctx, &c->t[0], &c->t[1], &c->t[2], &c->t[3], c->mask, p, &c->d,
                               use);
}

static void must(const call *c, esa_status status)
{
    if (status) fail_msg("%s: %s", esa_status_name(status), esa_ctx_error(c->ctx));
}

static double made(const call *c, int64_t i) { return case_carried(&c->d, i / D, i % D); }

/* Where dense and sparse output are equal, d is 0: no scale, no code but 0. A mask that keeps all
 * blocks leaves nothing out either, but the dense call cuts its blocks otherwise: in f32 the sums
 * of N keys and D products are rounded in another order, and 16 bits may fall on two neighbours. */
static void test_nothing_left_out(void **state)
{
    static const double unit[] = { (N + D) * 0x1p-24, 0x1p-10, 0x1p-7 };
    (void)state;
    for (int i = 0; i < levels; i++)
        for (int32_t dtype = 0; dtype < 3; dtype++)
            for (int32_t format = 0; format < 2; format++)
                for (int32_t dense = 0; dense < 2; dense++) {
                    call *c = call_open(level_of[i], dtype, format, dense ? 1.0 : 0.5);
                    esa_attention_params p = esa_attention_params_default();
                    p.tail = ESA_TAIL_POOLED;
                    must(c, esa_attention(c->ctx, &c->t[0], &c->t[1], &c->t[2], &c->t[3],
                                          dense ? NULL : c->mask, &p));
                    must(c, carry(c, &p, ESA_CARRY_MAKE));
                    for (int64_t j = 0; j < COUNT; j++) {
                        const int32_t bits = format ? ((uint16_t *)c->d.value)[j]
                                                    : ((uint8_t *)c->d.value)[j],
                                      zero = !bits && (format || c->d.scale[j / D] == 0.0f);
                        if (!zero && !(dense && fabs(made(c, j)) <= 1.5 * unit[dtype]))
                            fail_msg("level %d dtype %d format %d dense %d: d is %g, expected 0",
                                     level_of[i], dtype, format, dense, made(c, j));
                    }
                    call_close(c);
                }
}

/* Adding the d that was made from the same q, k and v gives the dense output again, but for three
 * roundings: of the sparse output, where d was made (half a unit u of its type: u/2 |o|); of d
 * (half its last place, see made_error in attention_case.c; more by 1 / (1 - 2^-4) as a share of
 * what it was rounded to); of the sum (u/2 |o|). Both outputs are below 1.5, the largest value. */
static void test_make_then_add(void **state)
{
    static const double unit[] = { 0x1p-23, 0x1p-10, 0x1p-7 };
    (void)state;
    for (int i = 0; i < levels; i++)
        for (int32_t dtype = 0; dtype < 3; dtype++)
            for (int32_t format = 0; format < 2; format++) {
                call *c = call_open(level_of[i], dtype, format, 0.5);
                esa_attention_params p = esa_attention_params_default();
                double want[COUNT], got[COUNT];
                must(c, esa_attention(c->ctx, &c->t[0], &c->t[1], &c->t[2], &c->t[3], NULL, &p));
                tensor_to_double(want, &c->t[3]);
                must(c, carry(c, &p, ESA_CARRY_MAKE));
                tensor_to_double(got, &c->t[3]);
                assert_memory_equal(got, want, sizeof want);
                must(c, carry(c, &p, ESA_CARRY_ADD));
                tensor_to_double(got, &c->t[3]);
                double most = 0.0;
                for (int64_t j = 0; j < COUNT; j++) {
                    const double d = made(c, j),
                                 of_d = format ? 1.01 * 0x1p-8 * fabs(d)
                                               : 1.07 * 0x1p-4 * fabs(d) +
                                                     0x1p-10 * (double)c->d.scale[j / D],
                                 bound = of_d + 1.5 * unit[dtype];
                    most = fmax(most, fabs(d));
                    if (!(fabs(got[j] - want[j]) <= bound))
                        fail_msg("level %d dtype %d format %d: %g instead of %g, bound %g",
                                 level_of[i], dtype, format, got[j], want[j], bound);
                }
                assert_true(most > 0.01); /* the mask left something out */
                call_close(c);
            }
}

/* A d that was made holds no NaN and no infinity, and the other elements of such a row are right:
 * the scale is that of the largest finite one. NaN in q makes a row of o, NaN in v a column. */
static void test_not_finite(void **state)
{
    (void)state;
    for (int i = 0; i < levels; i++)
        for (int32_t format = 0; format < 2; format++) {
            call *c = call_open(level_of[i], ESA_DTYPE_F32, format, 0.5);
            float *const o = c->data[3], *const q = c->data[0];
            esa_attention_params p = esa_attention_params_default();
            must(c, esa_attention(c->ctx, &c->t[0], &c->t[1], &c->t[2], &c->t[3], c->mask, &p));
            const float sparse = o[5 * D];
            o[5 * D] = sparse + 0.5f, o[5 * D + 1] = INFINITY, o[5 * D + 2] = NAN;
            q[7 * D] = NAN; /* the sparse output of row 7 is NaN */
            must(c, carry(c, &p, ESA_CARRY_MAKE));
            for (int64_t j = 0; j < COUNT; j++) {
                const double d = made(c, j), want = j == 5 * D ? (double)(o[5 * D] - sparse) : 0.0;
                if (!(fabs(d - want) <= 1e-6))
                    fail_msg("level %d format %d: element %lld is %g, expected %g", level_of[i],
                             format, (long long)j, d, want);
            }
            /* A code that is NaN, or a value that is, reaches its own element alone. */
            q[7 * D] = 0.0f;
            if (format)
                ((uint16_t *)c->d.value)[9] = 0x7fc0;
            else
                ((uint8_t *)c->d.value)[9] = 0x7f, c->d.scale[0] = 1.0f;
            must(c, carry(c, &p, ESA_CARRY_ADD));
            for (int64_t j = 0; j < COUNT; j++) assert_int_equal(isnan(o[j]) != 0, j == 9);
            call_close(c);
        }
}

/* Differences so small that the inverse of their scale would overflow count as 0; others keep their
 * largest element, whatever their size. */
static void test_size_of_differences(void **state)
{
    static const float size[] = { 0x1p-120f, 0x1p-99f, 1e-20f, 1e-3f, 3e4f, 0x1p120f };
    (void)state;
    for (int i = 0; i < levels; i++)
        for (int s = 0; s < 6; s++) {
            call *c = call_open(level_of[i], ESA_DTYPE_F32, ESA_CARRY_E4M3, 0.5);
            float *const o = c->data[3], *const v = c->data[2];
            esa_attention_params p = esa_attention_params_default();
            for (int64_t j = 0; j < COUNT; j++) v[j] = 0.0f, o[j] = j % D == 3 ? size[s] : 0.0f;
            must(c, carry(c, &p, ESA_CARRY_MAKE));
            for (int64_t j = 0; j < COUNT; j++) {
                const double want = j % D == 3 && s > 0 ? (double)size[s] : 0.0;
                if (!(fabs(made(c, j) - want) <= 0x1p-22 * want))
                    fail_msg("level %d: a difference of %g became %g", level_of[i], (double)size[s],
                             made(c, j));
            }
            call_close(c);
        }
}

/* The LSE of ADD is that of the plain call. MAKE writes none. */
static void test_lse(void **state)
{
    (void)state;
    for (int i = 0; i < levels; i++)
        for (int32_t rows = 0; rows < 3; rows += 2) {
            call *c = call_open(level_of[i], ESA_DTYPE_BF16, ESA_CARRY_E4M3, 0.5);
            float lse[2][B * H * N];
            memset(lse, 0, sizeof lse);
            esa_tensor view[2];
            for (int k = 0; k < 2; k++)
                view[k] = esa_tensor_bnsd(lse[k], ESA_DTYPE_F32, B, H, N, 1);
            esa_attention_params p = esa_attention_params_default();
            p.exact_rows = rows;
            p.lse = &view[0];
            must(c, esa_attention(c->ctx, &c->t[0], &c->t[1], &c->t[2], &c->t[3], c->mask, &p));
            p.lse = &view[1];
            must(c, carry(c, &p, ESA_CARRY_MAKE));
            for (int64_t j = 0; j < B * H * N; j++) assert_true(lse[1][j] == 0.0f);
            must(c, carry(c, &p, ESA_CARRY_ADD));
            assert_memory_equal(lse[0], lse[1], sizeof lse[0]);
            call_close(c);
        }
}

/* A plan gives the bits of the single call, and stays inside its workspace. */
static void test_plans(void **state)
{
    (void)state;
    for (int i = 0; i < levels; i++)
        for (int32_t use = 0; use < 2; use++) {
            call *c = call_open(level_of[i], ESA_DTYPE_F32, ESA_CARRY_E4M3, 0.5);
            esa_attention_params p = esa_attention_params_default();
            p.exact_rows = 2;
            p.tail = ESA_TAIL_POOLED;
            for (int64_t j = 0; j < c->bytes; j++) ((uint8_t *)c->memory)[j] = j % 5 ? 0x21 : 0x8f;
            for (int64_t j = 0; j < B * H * N; j++) c->d.scale[j] = 1e-3f;
            char before[COUNT * 4], *again = malloc((size_t)c->bytes);
            memcpy(before, c->data[3], sizeof before);
            memcpy(again, c->memory, (size_t)c->bytes);
            must(c, carry(c, &p, use));
            char *want = malloc((size_t)c->bytes), want_o[COUNT * 4];
            memcpy(want, c->memory, (size_t)c->bytes);
            memcpy(want_o, c->data[3], sizeof want_o);
            memcpy(c->data[3], before, sizeof before);
            memcpy(c->memory, again, (size_t)c->bytes);

            esa_shapes s = shapes_of(ESA_DTYPE_F32, B, H, N, D);
            esa_plan *plan = NULL;
            must(c, esa_plan_create(c->ctx, &plan, &s, NULL, &p));
            int64_t bytes;
            must(c, esa_plan_workspace(plan, &bytes));
            esa_mask *mask = NULL;
            must(c, esa_mask_to_device(c->ctx, &mask, c->mask,
                                       on_gpu() ? ESA_DEVICE_CUDA : ESA_DEVICE_CPU));
            char *block = malloc((size_t)bytes + 2 * ESA_WORKSPACE_ALIGN),
                 *end = block + bytes + 2 * ESA_WORKSPACE_ALIGN,
                 *ws = block + (ESA_WORKSPACE_ALIGN - (uintptr_t)block % ESA_WORKSPACE_ALIGN);
            memset(block, 0x7f, (size_t)(end - block));
            must(c, esa_plan_attention_carry(plan, mask, &c->t[0], &c->t[1], &c->t[2], &c->t[3],
                                             NULL, &c->d, use, ws));
            assert_memory_equal(want, c->memory, (size_t)c->bytes);
            assert_memory_equal(want_o, c->data[3], sizeof want_o);
            for (const char *x = ws + bytes; x < end; x++) assert_int_equal(*x, 0x7f);
            assert_int_equal(esa_plan_attention_carry(plan, mask, &c->t[0], &c->t[1], &c->t[2],
                                                      &c->t[3], NULL, NULL, use, ws),
                             ESA_ERR_ARGUMENT);
            assert_string_equal(esa_ctx_error(c->ctx), "carry is NULL");
            assert_int_equal(esa_plan_attention_carry(NULL, mask, &c->t[0], &c->t[1], &c->t[2],
                                                      &c->t[3], NULL, &c->d, use, ws),
                             ESA_ERR_ARGUMENT);
            free(block);
            free(want);
            free(again);
            esa_mask_free(mask);
            esa_plan_free(plan);
            call_close(c);
        }
}

/* ---------------------------------------------------------------- arguments */

/* How many bytes a d takes, and where its parts lie. */
static void test_bytes(void **state)
{
    static const int64_t bad[][4] = { { 0, 1, 1, 1 },           { 1, 0, 1, 1 },
                                      { 1, 1, 0, 1 },           { 1, 1, 1, 0 },
                                      { -1, 1, 1, 1 },          { 1, 1, 1, 257 },
                                      { 1, 1, INT64_MAX, 256 }, { 1 << 30, 1 << 30, 1 << 30, 8 } };
    (void)state;
    enum { ALIGN = ESA_WORKSPACE_ALIGN };
    for (int64_t n = 1; n < 200; n += 33)
        for (int64_t d = 1; d <= 256; d += 51) {
            const int64_t codes = (2 * 3 * n * d + ALIGN - 1) / ALIGN * ALIGN,
                          values = (2 * 3 * n * d * 2 + ALIGN - 1) / ALIGN * ALIGN;
            assert_int_equal(esa_carry_bytes(ESA_CARRY_E4M3, 2, 3, n, d), codes + 2 * 3 * n * 4);
            assert_int_equal(esa_carry_bytes(ESA_CARRY_BF16, 2, 3, n, d), values);
            char memory[1]; /* never read */
            const esa_carry e = esa_carry_view(memory, ESA_CARRY_E4M3, 2, 3, n, d),
                            b = esa_carry_view(memory, ESA_CARRY_BF16, 2, 3, n, d);
            assert_int_equal(e.struct_size, sizeof e);
            assert_int_equal(e.format, ESA_CARRY_E4M3);
            assert_int_equal(e.device, ESA_DEVICE_CPU);
            assert_true(e.B == 2 && e.H == 3 && e.N == n && e.D == d);
            assert_ptr_equal(e.value, memory);
            assert_int_equal((uintptr_t)e.scale - (uintptr_t)memory, codes);
            assert_ptr_equal(b.value, memory);
            assert_null(b.scale);
        }
    for (int i = 0; i < 8; i++)
        for (int32_t format = 0; format < 2; format++)
            assert_int_equal(esa_carry_bytes(format, bad[i][0], bad[i][1], bad[i][2], bad[i][3]),
                             -1);
    assert_int_equal(esa_carry_bytes(2, 1, 1, 1, 1), -1);
    assert_int_equal(esa_carry_bytes(-1, 1, 1, 1, 1), -1);
    const esa_carry none = esa_carry_view(NULL, ESA_CARRY_E4M3, 1, 1, 1, 1);
    assert_null(none.value);
    assert_null(none.scale);
}

static void refused(call *c, const esa_carry *d, int32_t use, esa_status want, const char *message)
{
    char before[2][COUNT * 4];
    memcpy(before[0], c->data[3], COUNT * 4);
    memcpy(before[1], c->memory, (size_t)c->bytes);
    const esa_status status = esa_attention_carry(c->ctx, &c->t[0], &c->t[1], &c->t[2], &c->t[3],
                                                  c->mask, NULL, d, use);
    if (status != want || !strstr(esa_ctx_error(c->ctx), message))
        fail_msg("%s: \"%s\", expected %s: \"%s\"", esa_status_name(status), esa_ctx_error(c->ctx),
                 esa_status_name(want), message);
    assert_memory_equal(before[0], c->data[3], COUNT * 4);
    assert_memory_equal(before[1], c->memory, (size_t)c->bytes);
}

/* Every message of src/attn/carry.c; nothing is written. */
static void test_bad_arguments(void **state)
{
    (void)state;
    call *c = call_open(level_of[0], ESA_DTYPE_F32, ESA_CARRY_E4M3, 0.5);
    const esa_carry good = c->d;
    esa_carry d = good;
    refused(c, NULL, ESA_CARRY_ADD, ESA_ERR_ARGUMENT, "carry is NULL");
    d.struct_size = 8;
    refused(c, &d, ESA_CARRY_ADD, ESA_ERR_VERSION, "esa_carry has struct_size 8, this library");
    refused(c, &good, 2, ESA_ERR_ARGUMENT, "use is 2, expected ESA_CARRY_ADD (0) or ESA_CARRY_");
    refused(c, &good, -1, ESA_ERR_ARGUMENT, "use is -1, expected");
    d = good, d.format = 2;
    refused(c, &d, ESA_CARRY_ADD, ESA_ERR_ARGUMENT,
            "the carry has format 2, expected ESA_CARRY_E4");
    d = good, d.value = NULL;
    refused(c, &d, ESA_CARRY_ADD, ESA_ERR_ARGUMENT,
            "the carry needs value and scale in format E4M3: value is NULL and scale is not NULL");
    d = good, d.scale = NULL;
    refused(c, &d, ESA_CARRY_MAKE, ESA_ERR_ARGUMENT, "value is not NULL and scale is NULL");
    d = good, d.format = ESA_CARRY_BF16;
    refused(c, &d, ESA_CARRY_ADD, ESA_ERR_ARGUMENT,
            "the carry needs value alone in format BF16: value is not NULL and scale is not NULL");
    d = good, d.value = (char *)good.value + 8;
    refused(c, &d, ESA_CARRY_ADD, ESA_ERR_ARGUMENT,
            "the carry's value must be aligned to 16 bytes and its scale to 4");
    d = good, d.scale = (float *)((char *)good.scale + 2);
    refused(c, &d, ESA_CARRY_ADD, ESA_ERR_ARGUMENT, "must be aligned to 16 bytes");
    for (int i = 0; i < 2; i++) {
        d = good, d.reserved[i] = 1;
        refused(c, &d, ESA_CARRY_ADD, ESA_ERR_ARGUMENT, "non-zero reserved fields");
    }
    d = good, d.device = ESA_DEVICE_CUDA;
    if (!on_gpu())
        refused(c, &d, ESA_CARRY_ADD, ESA_ERR_DEVICE,
                "the carry is on device 1:0, but o is on 0:0");
    d = good, d.device_index = 1;
    if (!on_gpu())
        refused(c, &d, ESA_CARRY_ADD, ESA_ERR_DEVICE,
                "the carry is on device 0:1, but o is on 0:0");
    d = good, d.B = 1;
    refused(c, &d, ESA_CARRY_MAKE, ESA_ERR_SHAPE,
            "the carry has shape [1,2,150,24], but o has [2,2,150,24]");
    d = good, d.B = 3;
    refused(c, &d, ESA_CARRY_ADD, ESA_ERR_SHAPE, "the carry has shape [3,2,150,24]");
    d = good, d.H = 1;
    refused(c, &d, ESA_CARRY_ADD, ESA_ERR_SHAPE, "the carry has shape [2,1,150,24]");
    d = good, d.N = 149;
    refused(c, &d, ESA_CARRY_ADD, ESA_ERR_SHAPE, "the carry has shape [2,2,149,24]");
    d = good, d.D = 25;
    refused(c, &d, ESA_CARRY_ADD, ESA_ERR_SHAPE, "the carry has shape [2,2,150,25]");
    esa_mask *mask = c->mask;
    c->mask = NULL;
    refused(c, &good, ESA_CARRY_MAKE, ESA_ERR_ARGUMENT,
            "mask is NULL: dense attention leaves nothing out, so it has no carry");
    c->mask = mask;
    esa_attention_params p = esa_attention_params_default();
    p.struct_size = 4;
    assert_int_equal(carry(c, &p, ESA_CARRY_ADD), ESA_ERR_VERSION);
    call_close(c);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        CASES(cases),
        cmocka_unit_test(test_nothing_left_out),
        cmocka_unit_test(test_make_then_add),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_size_of_differences),
        cmocka_unit_test(test_lse),
        cmocka_unit_test(test_plans),
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_bad_arguments),
    };
    return RUN(tests);
}
