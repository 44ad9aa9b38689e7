/* test_adaptive.c - the adaptive order on the CPU: permutations inside segments, the same as a
 * plain reference in double, the same bits for any number of threads, blocks of like tokens.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The library computes in f32. Where two tokens near a cut have coordinates that differ by less
 * than rounding, they may change places, and then the nodes below differ a little. So the reference
 * is compared in two ways: nearly all tokens must be in the same block, and the order must remove
 * at least 99 % of the spread inside blocks that the reference removes from the start order. */
#include "base/pool.h"
#include "select/order_kit.h"
#include "select/select.h"

static void *mem_alloc(void *user, uint64_t bytes)
{
    (void)user;
    return aligned_alloc(64, (size_t)((bytes + 63) / 64 * 64));
}
static void mem_free(void *user, void *ptr, uint64_t bytes)
{
    (void)user;
    (void)bytes;
    free(ptr);
}
static const esa_allocator mem = { mem_alloc, mem_free, NULL };

typedef struct orders {
    int32_t *q, *k;
} orders;

/* Runs the library; bytes around the workspace must stay. */
static orders run(const order_world *w, int32_t threads, int32_t level)
{
    enum { GUARD = 64 };
    esa_select_args a = w->args;
    esa_pool *pool = NULL;
    const orders o = { malloc((size_t)(a.B * a.Hq * a.Nq) * 4),
                       malloc((size_t)(a.B * a.Hkv * a.Nk) * 4) };
    assert_int_equal(esa_pool_create(&pool, threads, &mem), ESA_OK);
    a.pool = pool;
    a.kern = esa_cpu_kernels_get(level);
    assert_non_null(a.kern);
    const int64_t bytes = esa_adaptive_workspace(&a);
    uint8_t *ws = mem_alloc(NULL, (uint64_t)(bytes + 2 * GUARD));
    assert_true(o.q && o.k && ws);
    memset(ws, 0xa5, (size_t)(bytes + 2 * GUARD));
    esa_adaptive_order(&a, o.q, o.k, ws + GUARD);
    for (int i = 0; i < GUARD; i++) assert_true(ws[i] == 0xa5 && ws[GUARD + bytes + i] == 0xa5);
    free(ws);
    esa_pool_free(pool);
    return o;
}

static void drop(orders o)
{
    free(o.q);
    free(o.k);
}

static void test_reference(void **state)
{
    const uint64_t seed = kit_seed("adaptive order");
    (void)state;
    for (int c = 0; c < ORDER_CASES; c++) {
        order_world w;
        if (!case_begin(order_cases[c].name, few(3))) continue;
        order_make(&w, &order_cases[c].c, seed + (uint64_t)c);
        const orders o = run(&w, 2, ESA_CPU_BEST);
        order_check_valid(&w, o.q, o.k);
        int64_t same = 0, all = 0;
        for (int64_t i = 0; i < order_heads(&w); i++) {
            const int32_t *perm;
            const order_head x = order_head_at(&w, i, o.q, o.k, &perm);
            const esa_order_node root = order_root_of(&x);
            double *turned = order_turned(&x);
            int32_t *want = malloc((size_t)x.N * 4), *place = malloc((size_t)x.N * 4);
            assert_true(want && place);
            memcpy(want, x.start, (size_t)x.N * 4);
            order_cut_node(turned, want, root, x.block, w.c.D);
            for (int64_t p = 0; p < x.N; p++) place[want[p]] = (int32_t)(p / x.block);
            for (int64_t p = 0; p < x.N; p++) same += place[perm[p]] == p / x.block;
            all += x.N;
            const int64_t units[2] = { x.block, ESA_ORDER_LEAF };
            for (int u = 0; u < 2; u++) {
                const double start = order_spread(turned, x.start, root, units[u], w.c.D),
                             got = start - order_spread(turned, perm, root, units[u], w.c.D),
                             ref = start - order_spread(turned, want, root, units[u], w.c.D);
                if (!(got >= 0.99 * ref - 1e-9))
                    fail_msg("%s: head %d removes %g of %g in %d tokens, the reference %g", w.name,
                             (int)i, got, start, (int)units[u], ref);
            }
            free(turned);
            free(want);
            free(place);
        }
        if ((double)same < 0.97 * (double)all)
            fail_msg("%s: %lld of %lld tokens are in the reference's block", w.name,
                     (long long)same, (long long)all);
        drop(o);
        order_free(&w);
        case_end(0);
    }
    cases_done("order/");
}

/* Threads and repeated calls give the same bits; every kernel set gives a valid order. */
static void test_deterministic(void **state)
{
    const uint64_t seed = kit_seed("adaptive order, threads");
    (void)state;
    for (int c = 0; c < ORDER_CASES; c++) {
        order_world w;
        if (!case_begin(order_cases[c].name, few(3))) continue;
        order_make(&w, &order_cases[c].c, seed + (uint64_t)c);
        const orders one = run(&w, 1, ESA_CPU_BEST);
        for (int32_t threads = 1; threads <= 7; threads += 3) {
            const orders o = run(&w, threads, ESA_CPU_BEST);
            assert_memory_equal(o.q, one.q, (size_t)(w.c.B * w.c.Hq * w.c.Nq) * 4);
            assert_memory_equal(o.k, one.k, (size_t)(w.c.B * w.c.Hkv * w.c.Nk) * 4);
            drop(o);
        }
        for (int32_t level = 0; level < 8; level++) {
            const esa_cpu_kernels *kern = level == ESA_CPU_BEST ? NULL : esa_cpu_kernels_get(level);
            if (!kern || !kern->pack_k) continue;
            const orders o = run(&w, 2, level);
            order_check_valid(&w, o.q, o.k);
            drop(o);
        }
        drop(one);
        order_free(&w);
        case_end(0);
    }
    cases_done("order/");
}

/* Tokens in random clusters: the blocks of the adaptive order are nearly pure, those of the start
 * order hold a bit of everything. Also for D = 128 in 16 bits. */
static void test_blocks_are_alike(void **state)
{
    static const order_case cases[] = {
        { 1,
          2,
          2,
          2048,
          2048,
          64,
          64,
          64,
          ESA_DTYPE_F32,
          0,
          { 8, 16, 16 },
          { 8, 16, 16 },
          0,
          0,
          0,
          0,
          24 },
        { 1,
          1,
          1,
          4096,
          4096,
          128,
          128,
          128,
          ESA_DTYPE_BF16,
          1,
          { 16, 16, 16 },
          { 16, 16, 16 },
          0,
          0,
          0,
          0,
          16 },
    };
    const uint64_t seed = kit_seed("adaptive order, clusters");
    (void)state;
    for (int c = 0; c < 2; c++) {
        order_world w;
        order_make(&w, &cases[c], seed + (uint64_t)c);
        const orders o = run(&w, 2, ESA_CPU_BEST);
        for (int64_t i = 0; i < order_heads(&w); i++) {
            const int32_t *perm;
            const order_head x = order_head_at(&w, i, o.q, o.k, &perm);
            double *turned = order_turned(&x);
            const double got = order_spread(turned, perm, order_root_of(&x), x.block, w.c.D),
                         hilbert = order_spread(turned, x.start, order_root_of(&x), x.block, w.c.D);
            free(turned);
            /* All centres: 1.5^2 + 0.25^2 a dimension; one centre: 0.25^2, which is 3 %. Balanced
             * cuts leave some blocks with two clusters. */
            if (!(got < 0.35 * hilbert))
                fail_msg("%s: head %d: spread %g, Hilbert %g", w.name, (int)i, got, hilbert);
        }
        drop(o);
        order_free(&w);
    }
}

/* Equal tokens keep the start order. NaN and infinity anywhere give some permutation. */
static void test_odd_values(void **state)
{
    static const order_case one = {
        1, 2, 1, 600, 600, 64, 64, 64, ESA_DTYPE_F32, 0, { 6, 10, 10 }, { 6, 10, 10 }, 0, 0, 0, 0, 0
    };
    const uint64_t seed = kit_seed("adaptive order, odd values");
    const float odd[] = { NAN, INFINITY, -INFINITY, 3e38f, 1e-40f, 0.0f };
    (void)state;
    for (int v = -1; v < 6; v++) {
        order_world w;
        esa_rng r = { seed };
        order_make(&w, &one, seed);
        float *q = w.q.data, *k = w.k.data;
        for (int64_t i = 0; i < 600 * 64; i++)
            if (v < 0)
                q[i] = q[600 * 64 + i] = k[i] = 0.3f;
            else if (v > 2 || esa_rng_below(&r, 5000) == 0)
                q[i] = k[i] = (v > 2 ? kit_normal(&r) : 1.0f) * odd[v];
        const orders o = run(&w, 2, ESA_CPU_BEST);
        order_check_valid(&w, o.q, o.k);
        if (v < 0) {
            assert_memory_equal(o.q, w.start_q, 600 * 4);
            assert_memory_equal(o.k, w.start_k, 600 * 4);
        }
        drop(o);
        order_free(&w);
    }
}

/* Cuts are inside the node, on their grid and nearest to the middle; the levels hold every token
 * once; small nodes are small. */
static void test_cuts(void **state)
{
    (void)state;
    for (uint32_t block = 16; block <= 256; block += 16)
        for (uint32_t first = 0; first < 300; first += 37)
            for (uint32_t n = 0; n < 3000; n += n < 300 ? 1 : 41) {
                const esa_order_node node = { first, n };
                const uint32_t cut = esa_order_cut(node, block);
                if (n <= ESA_ORDER_LEAF) {
                    assert_int_equal(cut, 0);
                    continue;
                }
                assert_true(cut > first && cut < first + n);
                const uint32_t unit = first / block == (first + n - 1) / block ? ESA_ORDER_LEAF
                                                                               : block;
                assert_int_equal(cut % unit, 0);
                for (uint32_t other = 0; other < first + n; other += unit) {
                    const int64_t mine = llabs(2 * (int64_t)cut - (2 * first + n)),
                                  theirs = llabs(2 * (int64_t)other - (2 * first + n));
                    if (other > first && other != cut)
                        assert_true(mine < theirs || (mine == theirs && cut < other));
                }
            }
    for (uint32_t n = 1; n < 20000; n = n * 5 / 3 + 1)
        for (uint32_t block = 16; block <= 256; block *= 2) {
            const esa_order_node root = { 90, n };
            const uint32_t small = esa_order_small(block);
            const int32_t levels = esa_order_levels(root, block, small);
            uint32_t at = root.first;
            for (uint32_t i = 0; i < 1u << levels; i++) {
                const esa_order_node node = esa_order_find(root, block, small, levels, i);
                assert_true(node.n <= small);
                if (!node.n) continue;
                assert_int_equal(node.first, at);
                at += node.n;
            }
            assert_int_equal(at, root.first + n);
        }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cuts),       CASES(test_reference),
        CASES(test_deterministic),         cmocka_unit_test(test_blocks_are_alike),
        cmocka_unit_test(test_odd_values),
    };
    return RUN_CASES(tests, NULL, NULL);
}
