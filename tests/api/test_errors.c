/* test_errors.c - bad input: the right status, a message that names what was given, and nothing
 * written.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* setenv */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ESA_EXPERIMENTAL
#include "common/tests.h"
#include "esa/esa.h"

enum { N = 40, D = 8, H = 2 };
static float q_data[H * N * D], k_data[H * N * D], v_data[H * N * D], o_data[H * N * D];

static esa_tensor view(float *data) { return esa_tensor_bnsd(data, ESA_DTYPE_F32, 1, H, N, D); }

typedef struct fixture {
    esa_ctx *ctx;
    esa_tensor q, k, v, o;
} fixture;

static fixture fresh(void)
{
    fixture f = { NULL, view(q_data), view(k_data), view(v_data), view(o_data) };
    assert_int_equal(esa_ctx_create(&f.ctx, NULL), ESA_OK);
    for (int i = 0; i < H * N * D; i++) o_data[i] = 123.0f;
    return f;
}

/* The call failed with this status, said these words, and left o alone. */
static void expect(fixture *f, esa_status got, esa_status want, const char *word)
{
    assert_int_equal(got, want);
    if (!strstr(esa_ctx_error(f->ctx), word))
        fail_msg("\"%s\" does not mention \"%s\"", esa_ctx_error(f->ctx), word);
    for (int i = 0; i < H * N * D; i++) assert_true(o_data[i] == 123.0f);
}

#define ATTEND(f, mask, params) esa_attention((f).ctx, &(f).q, &(f).k, &(f).v, &(f).o, mask, params)
#define EXPECT_ATTEND(change, status, word)                                                        \
    do {                                                                                           \
        fixture f = fresh();                                                                       \
        change;                                                                                    \
        expect(&f, ATTEND(f, NULL, NULL), status, word);                                           \
        esa_ctx_free(f.ctx);                                                                       \
    } while (0)

static void test_views(void **state)
{
    (void)state;
    EXPECT_ATTEND(f.q.struct_size = 8, ESA_ERR_VERSION, "struct_size 8");
    EXPECT_ATTEND(f.k.dtype = 9, ESA_ERR_DTYPE, "dtype 9");
    EXPECT_ATTEND(f.v.data = NULL, ESA_ERR_ARGUMENT, "v has no data");
    EXPECT_ATTEND(f.q.device = ESA_DEVICE_CUDA, ESA_ERR_DEVICE, "CUDA");
    EXPECT_ATTEND(f.q.device = 7, ESA_ERR_DEVICE, "device 7");
    EXPECT_ATTEND(f.q.dim[2] = 0, ESA_ERR_SHAPE, "at least 1");
    EXPECT_ATTEND(f.q.dim[2] = -5, ESA_ERR_SHAPE, "-5");
    EXPECT_ATTEND(f.q.stride[3] = 2, ESA_ERR_SHAPE, "stride of 2");
    EXPECT_ATTEND(f.q.dim[3] = 257, ESA_ERR_UNSUPPORTED, "257");
    EXPECT_ATTEND(f.q.stride[0] = INT64_MAX; f.q.dim[0] = 3, ESA_ERR_SHAPE, "address space");
    EXPECT_ATTEND(f.q.dim[2] = INT64_C(1) << 33; f.q.stride[2] = 0, ESA_ERR_SHAPE, "2^31");
    EXPECT_ATTEND(f.k.dim[3] = 4, ESA_ERR_SHAPE, "differ in head dim: 8 and 4");
    EXPECT_ATTEND(f.v.dim[2] = 20, ESA_ERR_SHAPE, "k and v differ in tokens: 40 and 20");
    EXPECT_ATTEND(f.o.dim[2] = 20, ESA_ERR_SHAPE, "q and o");
    EXPECT_ATTEND(f.q.dim[1] = f.o.dim[1] = 1, ESA_ERR_SHAPE, "multiple");
    EXPECT_ATTEND(f.o.dtype = ESA_DTYPE_BF16, ESA_ERR_DTYPE, "different dtypes");
    EXPECT_ATTEND(f.o.stride[2] = 0, ESA_ERR_SHAPE, "share an address");
    EXPECT_ATTEND(f.o.stride[1] = D, ESA_ERR_SHAPE, "share an address");
    EXPECT_ATTEND(f.q.data = o_data, ESA_ERR_ARGUMENT, "overlaps");
    EXPECT_ATTEND(f.v.data = o_data + 3, ESA_ERR_ARGUMENT, "overlaps");

    fixture f = fresh();
    expect(&f, esa_attention(f.ctx, NULL, &f.k, &f.v, &f.o, NULL, NULL), ESA_ERR_ARGUMENT,
           "q is NULL");
    expect(&f, esa_attention(f.ctx, &f.q, &f.k, &f.v, NULL, NULL, NULL), ESA_ERR_ARGUMENT,
           "o is NULL");
    assert_int_equal(esa_attention(NULL, &f.q, &f.k, &f.v, &f.o, NULL, NULL), ESA_ERR_ARGUMENT);
    esa_ctx_free(f.ctx);
}

/* Views that share bytes in ways a range test alone does not see, and disjoint ones that it would
 * refuse. */
static void test_overlaps(void **state)
{
    (void)state;
    static float big[2 * 4 * H * N * D];
    fixture f = fresh();
    esa_tensor t[4];
    for (int i = 0; i < 4; i++) { /* [B][4][H][N][D]: whole batch entries apart */
        t[i] = esa_tensor_bnsd(big + i * H * N * D, ESA_DTYPE_F32, 2, H, N, D);
        t[i].stride[0] = 4 * H * N * D;
    }
    assert_int_equal(esa_attention(f.ctx, &t[0], &t[1], &t[2], &t[3], NULL, NULL), ESA_OK);
    esa_tensor q = esa_tensor_bsnd(big, ESA_DTYPE_F32, 1, H, N, D),
               o = esa_tensor_bsnd(big + D, ESA_DTYPE_F32, 1, H, N, D);
    /* o's head 0 is q's head 1 */
    assert_int_equal(esa_attention(f.ctx, &q, &f.k, &f.v, &o, NULL, NULL), ESA_ERR_ARGUMENT);
    q = o = esa_tensor_bnsd(big, ESA_DTYPE_F32, 1, H, N, D);
    q.data = big + (N - 1) * D; /* the same rows, walked backwards */
    q.stride[2] = -D;
    o.data = big + D;
    assert_int_equal(esa_attention(f.ctx, &q, &f.k, &f.v, &o, NULL, NULL), ESA_ERR_ARGUMENT);
    o = view(o_data);
    esa_attention_params p = esa_attention_params_default();
    esa_tensor lse = esa_tensor_bnsd(o_data + 4, ESA_DTYPE_F32, 1, H, N, 1);
    p.lse = &lse;
    expect(&f, ATTEND(f, NULL, &p), ESA_ERR_ARGUMENT, "lse overlaps");
    lse.device = ESA_DEVICE_CUDA;
    expect(&f, ATTEND(f, NULL, &p), ESA_ERR_DEVICE, "lse");
    esa_ctx_free(f.ctx);
}

/* A struct of an older, shorter version: its size is read before anything behind it (asan
 * watches). */
static void test_short_structs(void **state)
{
    (void)state;
    fixture f = fresh();
    uint32_t *shorter = malloc(8);
    shorter[0] = 8;
    shorter[1] = 0;
    esa_mask *mask;
    float out;
    int32_t perm[N];
    esa_ctx *ctx;
    esa_plan *plan;
    expect(&f, ATTEND(f, NULL, (esa_attention_params *)(void *)shorter), ESA_ERR_VERSION,
           "struct_size 8");
    expect(&f, esa_select(f.ctx, &mask, &f.q, &f.k, (esa_select_params *)(void *)shorter),
           ESA_ERR_VERSION, "struct_size 8");
    expect(&f, esa_importance(f.ctx, &out, NULL, &f.q, &f.k, (esa_select_params *)(void *)shorter),
           ESA_ERR_VERSION, "struct_size 8");
    expect(&f, esa_order(f.ctx, perm, N, (esa_layout *)(void *)shorter, 0, 0), ESA_ERR_VERSION,
           "struct_size 8");
    expect(&f, esa_plan_create(f.ctx, &plan, (esa_shapes *)(void *)shorter, NULL, NULL),
           ESA_ERR_VERSION, "struct_size 8");
    assert_int_equal(esa_ctx_create(&ctx, (esa_ctx_params *)(void *)shorter), ESA_ERR_VERSION);
    free(shorter);
    esa_attention_params p = esa_attention_params_default();
    p.reserved[2] = 1;
    expect(&f, ATTEND(f, NULL, &p), ESA_ERR_ARGUMENT, "reserved");
    p.reserved[2] = 0;
    p.reserved0 = 1;
    expect(&f, ATTEND(f, NULL, &p), ESA_ERR_ARGUMENT, "reserved");
    p.reserved0 = 0;
    p.precision = 4;
    expect(&f, ATTEND(f, NULL, &p), ESA_ERR_ARGUMENT, "precision is 4, expected 8 or 16 bits");
    esa_shapes s = esa_shapes_default();
    s.B = 1;
    s.Hq = s.Hkv = s.Nq = s.Nk = INT64_C(1) << 40;
    s.D = 8;
    expect(&f, esa_plan_create(f.ctx, &plan, &s, NULL, NULL), ESA_ERR_SHAPE, "2^31");
    esa_ctx_free(f.ctx);
}

/* A mask made by one plan does not fit another plan of the same block counts; lengths and causality
 * are checked where tokens stand. */
static void test_plans_and_foreign_masks(void **state)
{
    (void)state;
    fixture f = fresh();
    esa_shapes s = shapes_of(ESA_DTYPE_F32, 1, H, N, D);
    esa_select_params p = esa_select_params_default(ESA_SELECT_FULL);
    p.block_q = p.block_k = 32;
    esa_plan *a, *b;
    esa_mask *mask;
    assert_int_equal(esa_plan_create(f.ctx, &a, &s, &p, NULL), ESA_OK);
    p.block_q = p.block_k = 48 - 16 * (N > 48);
    s.Nq = s.Nk = N - 3;
    assert_int_equal(esa_plan_create(f.ctx, &b, &s, &p, NULL), ESA_OK);
    assert_int_equal(esa_mask_create(a, &mask), ESA_OK);
    f.q.dim[2] = f.k.dim[2] = N - 3;
    expect(&f, esa_plan_select(b, mask, &f.q, &f.k, NULL), ESA_ERR_SHAPE, "but the plan makes");
    esa_mask_free(mask);
    esa_plan_free(a);
    esa_plan_free(b);
    s.Nq = s.Nk = N;
    p = esa_select_params_default(ESA_SELECT_FULL);
    p.layout.order = ESA_ORDER_HILBERT;
    p.layout.grid_q[0] = 2;
    p.layout.grid_q[1] = 4;
    p.layout.grid_q[2] = 5;
    esa_attention_params ap = esa_attention_params_default();
    ap.causal = 1;
    expect(&f, esa_plan_create(f.ctx, &a, &s, &p, &ap), ESA_ERR_UNSUPPORTED, "raster");
    esa_ctx_free(f.ctx);
}

/* q, k, v, o side by side in one buffer: ranges interleave, nothing is shared, and it works. */
static void test_interleaved_buffer_is_fine(void **state)
{
    (void)state;
    fixture f = fresh();
    static float all[N * 4 * H * D];
    for (int i = 0; i < N * 4 * H * D; i++) all[i] = (float)(i % 17) * 0.1f;
    esa_tensor t[4];
    for (int i = 0; i < 4; i++) {
        t[i] = esa_tensor_bsnd(all + i * H * D, ESA_DTYPE_F32, 1, H, N, D);
        t[i].stride[2] = 4 * H * D;
    }
    assert_int_equal(esa_attention(f.ctx, &t[0], &t[1], &t[2], &t[3], NULL, NULL), ESA_OK);
    esa_ctx_free(f.ctx);
}

static void test_attention_params(void **state)
{
    (void)state;
    fixture f = fresh();
    esa_attention_params p = esa_attention_params_default();
    p.struct_size = 0;
    expect(&f, ATTEND(f, NULL, &p), ESA_ERR_VERSION, "esa_attention_params");
    p = esa_attention_params_default();
    p.tail = 4;
    expect(&f, ATTEND(f, NULL, &p), ESA_ERR_ARGUMENT, "tail is 4");
    p = esa_attention_params_default();
    p.scale = NAN;
    expect(&f, ATTEND(f, NULL, &p), ESA_ERR_ARGUMENT, "scale");
    p = esa_attention_params_default();
    p.causal = 2;
    expect(&f, ATTEND(f, NULL, &p), ESA_ERR_ARGUMENT, "causal is 2");
    p = esa_attention_params_default();
    const int32_t long_len[1] = { 41 }, negative[1] = { -1 };
    p.kv_len = long_len;
    expect(&f, ATTEND(f, NULL, &p), ESA_ERR_ARGUMENT, "kv_len[0] is 41");
    p.kv_len = negative;
    expect(&f, ATTEND(f, NULL, &p), ESA_ERR_ARGUMENT, "kv_len[0] is -1");
    p = esa_attention_params_default();
    float lse[H * N];
    esa_tensor l = esa_tensor_bnsd(lse, ESA_DTYPE_F16, 1, H, N, 1);
    p.lse = &l;
    expect(&f, ATTEND(f, NULL, &p), ESA_ERR_DTYPE, "lse");
    l = esa_tensor_bnsd(lse, ESA_DTYPE_F32, 1, H, N - 1, 1);
    expect(&f, ATTEND(f, NULL, &p), ESA_ERR_SHAPE, "lse");
    l = esa_tensor_bnsd((char *)lse + 1, ESA_DTYPE_F32, 1, H, N, 1);
    expect(&f, ATTEND(f, NULL, &p), ESA_ERR_ARGUMENT, "aligned");
    esa_ctx_free(f.ctx);
}

static void test_select_params(void **state)
{
    (void)state;
    fixture f = fresh();
    esa_mask *mask = (esa_mask *)&f;
#define EXPECT_SELECT(change, status, word)                                                        \
    do {                                                                                           \
        esa_select_params p = esa_select_params_default(ESA_SELECT_ENTROPY);                       \
        change;                                                                                    \
        mask = (esa_mask *)&f;                                                                     \
        expect(&f, esa_select(f.ctx, &mask, &f.q, &f.k, &p), status, word);                        \
        assert_null(mask);                                                                         \
    } while (0)
    EXPECT_SELECT(p.struct_size = 1, ESA_ERR_VERSION, "esa_select_params");
    EXPECT_SELECT(p.selector = 9, ESA_ERR_ARGUMENT, "selector is 9");
    EXPECT_SELECT(p.mode = -1, ESA_ERR_ARGUMENT, "mode is -1");
    EXPECT_SELECT(p.block_q = 100, ESA_ERR_UNSUPPORTED, "block_q is 100");
    EXPECT_SELECT(p.block_k = 512, ESA_ERR_UNSUPPORTED, "block_k is 512");
    EXPECT_SELECT(p.samples = 0, ESA_ERR_ARGUMENT, "samples is 0");
    EXPECT_SELECT(p.budget = 1.5, ESA_ERR_ARGUMENT, "budget is 1.5");
    EXPECT_SELECT(p.budget = NAN, ESA_ERR_ARGUMENT, "budget");
    EXPECT_SELECT(p.cdf_threshold = NAN, ESA_ERR_ARGUMENT, "cdf_threshold");
    EXPECT_SELECT(p.scale = INFINITY, ESA_ERR_ARGUMENT, "scale");
    EXPECT_SELECT(p.keep_sink = 5, ESA_ERR_ARGUMENT, "keep_sink is 5");
    EXPECT_SELECT(p.layout.struct_size = 3, ESA_ERR_VERSION, "esa_layout");
    EXPECT_SELECT(p.layout.order = 17, ESA_ERR_ARGUMENT, "order");
    EXPECT_SELECT(p.layout.grid_q[0] = 2; p.layout.grid_q[1] = 3;
                  p.layout.grid_q[2] = 4, ESA_ERR_SHAPE, "2x3x4");
    EXPECT_SELECT(p.layout.order = ESA_ORDER_HILBERT, ESA_ERR_ARGUMENT, "grid");
    EXPECT_SELECT(p.selector = ESA_SELECT_RF_V2;
                  p.mode = ESA_MODE_COMPAT, ESA_ERR_ARGUMENT, "grid");
    /* A length that cuts into tokens which the order moves; cutting only the text behind them is
     * fine. */
    const int32_t cut[1] = { 31 }, text_only[1] = { 33 };
    EXPECT_SELECT(p.layout.order = ESA_ORDER_HILBERT; p.layout.grid_q[0] = 2;
                  p.layout.grid_q[1] = 4; p.layout.grid_q[2] = 4; p.layout.text_back_q = 8;
                  p.kv_len = cut, ESA_ERR_UNSUPPORTED, "kv_len[0] is 31");
    esa_select_params fine = esa_select_params_default(ESA_SELECT_ENTROPY);
    fine.layout.order = ESA_ORDER_HILBERT;
    fine.layout.grid_q[0] = 2;
    fine.layout.grid_q[1] = fine.layout.grid_q[2] = 4;
    fine.layout.text_back_q = 8;
    fine.kv_len = text_only;
    assert_int_equal(esa_select(f.ctx, &mask, &f.q, &f.k, &fine), ESA_OK);
    esa_mask_free(mask);
    expect(&f, esa_select(f.ctx, NULL, &f.q, &f.k, NULL), ESA_ERR_ARGUMENT, "mask is NULL");
    expect(&f, esa_importance(f.ctx, NULL, NULL, &f.q, &f.k, NULL), ESA_ERR_ARGUMENT,
           "out is NULL");
    double mass[H];
    expect(&f, esa_mask_mass(f.ctx, mass, NULL, &f.q, &f.k, NULL, 1), ESA_ERR_ARGUMENT,
           "mask is NULL");
    int32_t count[2];
    const double entropy[2] = { 0.5, 2.0 };
    expect(&f, esa_entropy_budgets(f.ctx, count, entropy, 2, 10, 0.5), ESA_ERR_ARGUMENT,
           "entropy[1] is 2");
    esa_ctx_free(f.ctx);
}

static void test_masks_that_do_not_fit(void **state)
{
    (void)state;
    fixture f = fresh();
    esa_select_params p = esa_select_params_default(ESA_SELECT_RANDOM);
    p.block_q = p.block_k = 16;
    esa_mask *mask;
    assert_int_equal(esa_select(f.ctx, &mask, &f.q, &f.k, &p), ESA_OK);
    fixture g = f;
    g.q.dim[2] = g.o.dim[2] = 30;
    expect(&g, ATTEND(g, mask, NULL), ESA_ERR_SHAPE, "40 queries");
    g = f;
    g.q.dim[1] = g.k.dim[1] = g.v.dim[1] = g.o.dim[1] = 1;
    expect(&g, ATTEND(g, mask, NULL), ESA_ERR_SHAPE, "2 heads");
    esa_mask_free(mask);

    /* An empty mask of a plan, and a plan without a selector. */
    esa_shapes s = shapes_of(ESA_DTYPE_F32, 1, H, N, D);
    esa_plan *plan;
    assert_int_equal(esa_plan_create(f.ctx, &plan, &s, &p, NULL), ESA_OK);
    assert_int_equal(esa_mask_create(plan, &mask), ESA_OK);
    expect(&f, esa_plan_attention(plan, mask, &f.q, &f.k, &f.v, &f.o, NULL, NULL), ESA_ERR_STATE,
           "empty");
    esa_mask_free(mask);
    char unaligned[65];
    expect(&f,
           esa_plan_attention(plan, NULL, &f.q, &f.k, &f.v, &f.o, NULL,
                              unaligned + ((uintptr_t)unaligned % 64 == 0)),
           ESA_ERR_ARGUMENT, "multiple of 64");
    esa_plan_free(plan);
    assert_int_equal(esa_plan_create(f.ctx, &plan, &s, NULL, NULL), ESA_OK);
    expect(&f, esa_mask_create(plan, &mask), ESA_ERR_STATE, "no selector");
    assert_null(mask);
    esa_plan_free(plan);
    s.D = 300;
    expect(&f, esa_plan_create(f.ctx, &plan, &s, NULL, NULL), ESA_ERR_UNSUPPORTED, "300");
    assert_null(plan);
    s.struct_size = 2;
    expect(&f, esa_plan_create(f.ctx, &plan, &s, NULL, NULL), ESA_ERR_VERSION, "esa_shapes");
    esa_ctx_free(f.ctx);
}

static void test_context(void **state)
{
    (void)state;
    esa_ctx *ctx = (esa_ctx *)&state;
    esa_ctx_params p = esa_ctx_params_default();
    p.threads = -1;
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_ERR_ARGUMENT);
    assert_null(ctx);
    p = esa_ctx_params_default();
    p.threads = ESA_MAX_THREADS + 1;
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_ERR_ARGUMENT);
    p = esa_ctx_params_default();
    p.struct_size = 4;
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_ERR_VERSION);
    p = esa_ctx_params_default();
    p.cpu_level = 99;
    assert_int_equal(esa_ctx_create(&ctx, &p), ESA_ERR_ARGUMENT);
    assert_int_equal(esa_ctx_create(NULL, NULL), ESA_ERR_ARGUMENT);
    setenv("ESA_CPU", "sse9", 1);
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_ERR_UNSUPPORTED);
    setenv("ESA_CPU", "ref", 1);
    assert_int_equal(esa_ctx_create(&ctx, NULL), ESA_OK);
    assert_string_equal(esa_ctx_cpu(ctx), "ref");
    unsetenv("ESA_CPU");
    esa_ctx_free(ctx);
    esa_ctx_free(NULL);
    esa_mask_free(NULL);
    esa_plan_free(NULL);
    assert_string_equal(esa_ctx_error(NULL), "");
    assert_string_equal(esa_status_name(ESA_ERR_POLICY), "ESA_ERR_POLICY");
    assert_non_null(strstr(esa_status_name(-99), "unknown"));
    assert_int_equal(esa_api_version(), ESA_API_VERSION);
    assert_int_equal(esa_abi()[ESA_ABI_TENSOR], sizeof(esa_tensor));
    for (int i = 0; i < ESA_ABI_COUNT; i++) assert_true(esa_abi()[i] > 0);
}

/* A call from inside a call (here from the logger) is refused and the outer one goes on. */
static esa_status inner = ESA_OK;
static void call_again(void *user, int32_t level, const char *text)
{
    (void)level;
    (void)text;
    fixture *f = user;
    if (f->ctx) inner = ATTEND(*f, NULL, NULL);
}

static void test_one_call_at_a_time(void **state)
{
    (void)state;
    fixture f = { NULL, view(q_data), view(k_data), view(v_data), view(o_data) };
    esa_ctx_params p = esa_ctx_params_default();
    p.log = call_again;
    p.log_user = &f;
    assert_int_equal(esa_ctx_create(&f.ctx, &p), ESA_OK);
    esa_tensor bad = f.q;
    bad.dtype = 77;
    assert_int_equal(esa_attention(f.ctx, &bad, &f.k, &f.v, &f.o, NULL, NULL), ESA_ERR_DTYPE);
    assert_int_equal(inner, ESA_ERR_STATE);
    assert_non_null(strstr(esa_ctx_error(f.ctx), "dtype 77"));
    assert_int_equal(ATTEND(f, NULL, NULL), ESA_OK);
    assert_string_equal(esa_ctx_error(f.ctx), "");
    esa_ctx_free(f.ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_views),
        cmocka_unit_test(test_interleaved_buffer_is_fine),
        cmocka_unit_test(test_overlaps),
        cmocka_unit_test(test_short_structs),
        cmocka_unit_test(test_plans_and_foreign_masks),
        cmocka_unit_test(test_attention_params),
        cmocka_unit_test(test_select_params),
        cmocka_unit_test(test_masks_that_do_not_fit),
        cmocka_unit_test(test_context),
        cmocka_unit_test(test_one_call_at_a_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
