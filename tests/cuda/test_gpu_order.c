/* test_gpu_order.c - the adaptive order on the GPU: permutations inside segments, the same bits in
 * every call, and blocks that are as alike as the CPU's.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The GPU rounds samples and the metric to bf16 (2^-9), so tokens near a cut change sides, and the
 * nodes below differ. Neither order is the better one: where clusters are cut, some heads gain and
 * some lose. What an order gains is the spread inside blocks that it removes from the start order.
 * Of the CPU's gain the GPU must reach 99 % over all heads and 90 % in each. */
#include "backend/backend.h"
#include "cuda/gpu_kit.h"
#include "select/order_kit.h"

static esa_ctx *ctx;
static const esa_backend *gpu;

static int open_ctx(void **state)
{
    (void)state;
    ctx = kit_ctx(0);
    gpu = esa_backend_of(ESA_DEVICE_CUDA);
    must(ctx, esa_ctx_enter(ctx));
    must(ctx, gpu->open(ctx));
    return 0;
}

static int close_ctx(void **state)
{
    (void)state;
    esa_ctx_leave(ctx);
    esa_ctx_free(ctx);
    return 0;
}

static void *on_device(const void *host, int64_t bytes)
{
    void *data = NULL;
    must(ctx, gpu->alloc(ctx, &data, bytes));
    if (host) must(ctx, gpu->upload(ctx, data, host, bytes));
    return data;
}

/* The arguments of w with everything on the GPU, `shift` elements into the allocation. */
typedef struct moved {
    esa_select_args a;
    void *q, *k, *start_q, *start_k, *kv_len;
    int64_t q_bytes, k_bytes;
} moved;

static moved move(const order_world *w, int64_t shift)
{
    const int64_t size = esa_dtype_size(w->c.dtype);
    moved m = { .a = w->args };
    m.q_bytes = w->c.B * w->c.Hq * w->c.Nq * w->c.D * size;
    m.k_bytes = w->c.B * w->c.Hkv * w->c.Nk * w->c.D * size;
    m.q = on_device(NULL, m.q_bytes + shift * size);
    m.k = on_device(NULL, m.k_bytes + shift * size);
    m.a.q = (char *)m.q + shift * size;
    m.a.k = (char *)m.k + shift * size;
    must(ctx, gpu->upload(ctx, (void *)m.a.q, w->q.data, m.q_bytes));
    must(ctx, gpu->upload(ctx, (void *)m.a.k, w->k.data, m.k_bytes));
    m.q_bytes += shift * size;
    m.k_bytes += shift * size;
    if (w->args.perm_q) {
        m.a.perm_q = m.start_q = on_device(w->start_q, w->c.Nq * 4);
        m.a.perm_k = m.start_k = on_device(w->start_k, w->c.Nk * 4);
    }
    if (w->args.params.kv_len) m.a.params.kv_len = m.kv_len = on_device(w->kv_len, w->c.B * 4);
    return m;
}

static void drop(moved *m, const order_world *w)
{
    gpu->release(ctx, m->q, m->q_bytes);
    gpu->release(ctx, m->k, m->k_bytes);
    gpu->release(ctx, m->start_q, w->c.Nq * 4);
    gpu->release(ctx, m->start_k, w->c.Nk * 4);
    gpu->release(ctx, m->kv_len, w->c.B * 4);
}

/* Orders of the GPU in host memory. The workspace has exactly the announced bytes, and what stands
 * behind it must stay. */
static void run(const moved *m, int32_t *q, int32_t *k)
{
    enum { GUARD = 512 };
    const int64_t q_bytes = m->a.B * m->a.Hq * m->a.Nq * 4,
                  k_bytes = m->a.B * m->a.Hkv * m->a.Nk * 4,
                  bytes = gpu->order_workspace(ctx, &m->a);
    uint8_t guard[GUARD];
    memset(guard, 0xa5, GUARD);
    char *ws = on_device(NULL, bytes + GUARD);
    void *perm_q = on_device(NULL, q_bytes), *perm_k = on_device(NULL, k_bytes);
    must(ctx, gpu->upload(ctx, ws + bytes, guard, GUARD));
    must(ctx, gpu->order(ctx, &m->a, perm_q, perm_k, ws));
    must(ctx, gpu->download(ctx, q, perm_q, q_bytes));
    must(ctx, gpu->download(ctx, k, perm_k, k_bytes));
    must(ctx, gpu->download(ctx, guard, ws + bytes, GUARD));
    for (int i = 0; i < GUARD; i++) assert_int_equal(guard[i], 0xa5);
    gpu->release(ctx, ws, bytes + GUARD);
    gpu->release(ctx, perm_q, q_bytes);
    gpu->release(ctx, perm_k, k_bytes);
}

static void run_cpu(const order_world *w, int32_t *q, int32_t *k)
{
    const esa_backend *cpu = esa_backend_of(ESA_DEVICE_CPU);
    must(ctx, cpu->open(ctx));
    must(ctx, cpu->order(ctx, &w->args, q, k, NULL));
}

static void compare_spread(const order_world *w, const int32_t *const got[2],
                           const int32_t *const cpu[2])
{
    double mine[2] = { 0 }, theirs[2] = { 0 };
    for (int64_t i = 0; i < order_heads(w); i++) {
        const int32_t *perm, *other;
        const order_head x = order_head_at(w, i, got[0], got[1], &perm);
        order_head_at(w, i, cpu[0], cpu[1], &other);
        const esa_order_node root = order_root_of(&x);
        double *turned = order_turned(&x);
        const int64_t units[2] = { x.block, ESA_ORDER_LEAF };
        for (int u = 0; u < 2; u++) {
            const double start = order_spread(turned, x.start, root, units[u], w->c.D),
                         a = start - order_spread(turned, perm, root, units[u], w->c.D),
                         b = start - order_spread(turned, other, root, units[u], w->c.D);
            if (!(a >= 0.9 * b - 1e-9))
                fail_msg("%s: head %d removes %g of %g in %d tokens, the CPU %g", w->name, (int)i,
                         a, start, (int)units[u], b);
            mine[u] += a;
            theirs[u] += b;
        }
        free(turned);
    }
    for (int u = 0; u < 2; u++)
        if (!(mine[u] >= 0.99 * theirs[u] - 1e-9))
            fail_msg("%s: all heads remove %g, those of the CPU %g", w->name, mine[u], theirs[u]);
}

/* Runs a case twice on the GPU and once on the CPU. */
static void check(const order_case *c, uint64_t seed, int64_t shift)
{
    order_world w;
    order_make(&w, c, seed);
    const int64_t nq = c->B * c->Hq * c->Nq, nk = c->B * c->Hkv * c->Nk;
    int32_t *q[3], *k[3];
    for (int i = 0; i < 3; i++) {
        q[i] = malloc((size_t)nq * 4);
        k[i] = malloc((size_t)nk * 4);
        assert_true(q[i] && k[i]);
    }
    moved m = move(&w, shift);
    run(&m, q[0], k[0]);
    run(&m, q[1], k[1]);
    assert_memory_equal(q[0], q[1], (size_t)nq * 4);
    assert_memory_equal(k[0], k[1], (size_t)nk * 4);
    order_check_valid(&w, q[0], k[0]);
    run_cpu(&w, q[2], k[2]);
    const int32_t *const got[2] = { q[0], k[0] }, *const cpu[2] = { q[2], k[2] };
    compare_spread(&w, got, cpu);
    drop(&m, &w);
    for (int i = 0; i < 3; i++) {
        free(q[i]);
        free(k[i]);
    }
    order_free(&w);
}

static void check_cases(int from, int to, const char *what, int64_t shift)
{
    const uint64_t seed = kit_seed(what);
    for (int c = from; c < to; c++) {
        if (!case_begin(order_cases[c].name, 1)) continue;
        check(&order_cases[c].c, seed + (uint64_t)c, shift);
        case_end(0);
    }
    cases_done(what);
}

static void test_cases(void **state)
{
    (void)state;
    check_cases(0, ORDER_CASES, "adaptive order on the GPU", 0);
}

/* Rows that cannot be read in 16-byte pieces. */
static void test_unaligned(void **state)
{
    (void)state;
    check_cases(2, 7, "adaptive order on the GPU, unaligned", 1);
}

static void test_long(void **state)
{
    (void)state;
    check_cases(ORDER_CASES + (getenv("ESA_TEST_SMALL") != NULL), ORDER_CASES + 2,
                "adaptive order on the GPU, long", 0);
}

/* NaN, infinities and huge values give some permutation; equal tokens keep their order. */
static void test_odd_values(void **state)
{
    static const order_case one = {
        1, 2, 1, 600, 600, 64, 64, 64, ESA_DTYPE_F32, 0, { 6, 10, 10 }, { 6, 10, 10 }, 0, 0, 0, 0, 0
    };
    const uint64_t seed = kit_seed("adaptive order on the GPU, odd values");
    const float odd[] = { NAN, INFINITY, -INFINITY, 3e38f, 1e-40f, 0.0f };
    int32_t q[2 * 600], k[600];
    (void)state;
    for (int v = -1; v < 6; v++) {
        order_world w;
        esa_rng r = { seed };
        order_make(&w, &one, seed);
        float *dq = w.q.data, *dk = w.k.data;
        for (int64_t i = 0; i < 600 * 64; i++)
            if (v < 0)
                dq[i] = dq[600 * 64 + i] = dk[i] = 0.25f;
            else if (v > 2 || esa_rng_below(&r, 5000) == 0)
                dq[i] = dk[i] = (v > 2 ? kit_normal(&r) : 1.0f) * odd[v];
        moved m = move(&w, 0);
        run(&m, q, k);
        order_check_valid(&w, q, k);
        if (v < 0) {
            assert_memory_equal(q, w.start_q, sizeof k);
            assert_memory_equal(k, w.start_k, sizeof k);
        }
        drop(&m, &w);
        order_free(&w);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        CASES(test_cases),
        CASES(test_unaligned),
        CASES(test_long),
        cmocka_unit_test(test_odd_values),
    };
    return RUN_CASES(tests, open_ctx, close_ctx);
}
