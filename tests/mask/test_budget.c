/* test_budget.c - block budgets of heads and rows, and the top-k they are spent with.
 * SPDX-License-Identifier: Apache-2.0 */
#include "select/kit.h"
#include "mask/mask.h"

static void entropy_sums_exact(void **state)
{
    esa_rng r = { kit_seed("entropy_sums_exact") };
    (void)state;
    for (int round = 0; round < 3000; round++) {
        const int64_t H = 1 + esa_rng_below(&r, 48), nk = 1 + esa_rng_below(&r, 300);
        const double budget = esa_rng_below(&r, 8) ? (double)esa_rng_unit(&r)
                                                   : (double)esa_rng_below(&r, 2);
        double e[48], scratch[48];
        int32_t k[48];
        for (int64_t h = 0; h < H; h++)
            e[h] = esa_rng_below(&r, 6) ? (double)esa_rng_unit(&r) : (double)esa_rng_below(&r, 2);
        esa_budget_entropy(k, e, H, nk, budget, scratch);
        int64_t sum = 0, want = (int64_t)floor(budget * (double)nk * (double)H + 0.5);
        if (want < H) want = H;
        for (int64_t h = 0; h < H; h++) {
            assert_in_range(k[h], 1, nk);
            sum += k[h];
        }
        assert_int_equal(sum, want);
        for (int64_t a = 0; a < H; a++) /* monotone: more entropy, never fewer blocks */
            for (int64_t b = 0; b < H; b++) {
                if (e[a] > e[b]) assert_true(k[a] >= k[b]);
                if (e[a] == e[b] && a < b) assert_true(k[a] >= k[b] && k[a] <= k[b] + 1);
            }
    }
}

static void entropy_cases(void **state)
{
    double scratch[8];
    int32_t k[8];
    (void)state;
    const double same[4] = { 0.3, 0.3, 0.3, 0.3 }, zero[4] = { 0, 0, 0, 0 };
    esa_budget_entropy(k, same, 4, 16, 0.5, scratch);
    for (int h = 0; h < 4; h++) assert_int_equal(k[h], 8);
    esa_budget_entropy(k, zero, 4, 16, 0.5, scratch);
    for (int h = 0; h < 4; h++) assert_int_equal(k[h], 8);
    /* 21 blocks: one head gets the odd one, the lowest */
    esa_budget_entropy(k, same, 4, 10, 0.525, scratch);
    assert_int_equal(k[0], 6);
    for (int h = 1; h < 4; h++) assert_int_equal(k[h], 5);
    /* b = s E, mean 0.5: s = 2 * 0.5 / (0.2 + 0.6) = 1.25 -> 0.25, 0.75 */
    const double two[2] = { 0.2, 0.6 };
    esa_budget_entropy(k, two, 2, 100, 0.5, scratch);
    assert_int_equal(k[0], 25);
    assert_int_equal(k[1], 75);
    /* the larger one is full: 0.9 * 2 - 1 = 0.8 is left for the other */
    esa_budget_entropy(k, two, 2, 100, 0.9, scratch);
    assert_int_equal(k[0], 80);
    assert_int_equal(k[1], 100);
    /* a head without entropy gets its one block, the others share the rest */
    const double mixed[3] = { 0.0, 0.4, 0.4 };
    esa_budget_entropy(k, mixed, 3, 10, 0.5, scratch);
    assert_int_equal(k[0], 1);
    assert_int_equal(k[1], 7);
    assert_int_equal(k[2], 7);
    /* ... until the others are full */
    esa_budget_entropy(k, mixed, 3, 10, 0.9, scratch);
    assert_int_equal(k[0], 7);
    assert_int_equal(k[1], 10);
    assert_int_equal(k[2], 10);
    /* a head that looks at almost nothing else than one block does not upset the search: s = 1.99
     * / 1.6 for the others */
    const double spike[4] = { 0.8, 0.5, 0.3, 1e-60 };
    esa_budget_entropy(k, spike, 4, 100, 0.5, scratch);
    const int32_t want[4] = { 100, 62, 37, 1 };
    for (int h = 0; h < 4; h++) assert_int_equal(k[h], want[h]);
    const double odd[3] = { NAN, -1.0, 7.0 }; /* from a broken file: clamped, never out of range */
    esa_budget_entropy(k, odd, 3, 10, 0.5, scratch);
    assert_int_equal(k[0] + k[1] + k[2], 15);
    assert_int_equal(k[1], 1);
    esa_budget_entropy(k, mixed, 3, 1, 0.0, scratch);
    for (int h = 0; h < 3; h++) assert_int_equal(k[h], 1);
    esa_budget_entropy(k, mixed, 3, 50, 1.0, scratch);
    for (int h = 0; h < 3; h++) assert_int_equal(k[h], 50);
}

static void rows_spread(void **state)
{
    esa_rng r = { kit_seed("rows_spread") };
    (void)state;
    for (int round = 0; round < 3000; round++) {
        const int64_t nq = 1 + esa_rng_below(&r, 40), nk = 1 + esa_rng_below(&r, 60),
                      forced = esa_rng_below(&r, (uint32_t)nk + 1);
        const int64_t total = esa_rng_below(&r, (uint32_t)(nq * nk + 10));
        uint8_t dense[40];
        int32_t a[40], b[40], visible[40], least[40];
        int64_t others = 0, sum = 0, lowest = nk, highest = 0;
        for (int64_t i = 0; i < nq; i++) {
            dense[i] = esa_rng_below(&r, 4) == 0;
            visible[i] = (int32_t)nk;
            least[i] = (int32_t)(dense[i] ? nk : forced > 1 ? forced : 1);
            others += !dense[i];
        }
        kit_rows(a, nq, nk, dense, forced, total);
        esa_budget_spread(b, visible, least, nq, total);
        for (int64_t i = 0; i < nq; i++) {
            assert_int_equal(a[i], b[i]); /* the general rule agrees with the plain one */
            assert_in_range(a[i], least[i], nk);
            sum += a[i];
            if (dense[i]) continue;
            if (a[i] < lowest) lowest = a[i];
            if (a[i] > highest) highest = a[i];
        }
        if (others) assert_true(highest - lowest <= 1);
        const int64_t floor_sum = (nq - others) * nk + others * (forced > 1 ? forced : 1);
        const int64_t want = total < floor_sum ? floor_sum : total > nq * nk ? nq * nk : total;
        assert_int_equal(sum, want);
    }
    /* Causal: rows that see more keep more, and the total is exact. */
    for (int64_t total = 20; total <= 210; total++) {
        int32_t quota[20], visible[20], least[20];
        int64_t sum = 0;
        for (int32_t i = 0; i < 20; i++) {
            visible[i] = i + 1;
            least[i] = 1;
        }
        esa_budget_spread(quota, visible, least, 20, total);
        for (int32_t i = 0; i < 20; i++) {
            assert_in_range(quota[i], 1, visible[i]);
            assert_true(abs(quota[i] * 210 - visible[i] * (int32_t)total) <= 3 * 210);
            sum += quota[i];
        }
        assert_int_equal(sum, total);
    }
    int32_t none[2], blind[2] = { 0, 3 }, least0[2] = { 0, 1 };
    esa_budget_spread(none, blind, least0, 2, 5); /* a row that sees nothing keeps nothing */
    assert_int_equal(none[0], 0);
    assert_int_equal(none[1], 3);
}

/* The k best by sorting, as a check. */
static void naive_top(uint8_t *keep, const float *v, const uint8_t *allow, int64_t n, int64_t k)
{
    for (; k > 0; k--) {
        int64_t best = -1;
        for (int64_t j = 0; j < n; j++) {
            if (keep[j] || (allow && !allow[j])) continue;
            if (best < 0 || v[j] > v[best] || (isnan(v[best]) && !isnan(v[j]))) best = j;
        }
        if (best < 0) return;
        keep[best] = 1;
    }
}

static void top_k(void **state)
{
    esa_rng r = { kit_seed("top_k") };
    (void)state;
    for (int round = 0; round < 2000; round++) {
        const int64_t n = 1 + esa_rng_below(&r, 200);
        float v[200];
        uint8_t keep[200] = { 0 }, want[200] = { 0 }, allow[200];
        uint64_t scratch[200];
        const uint32_t kind = esa_rng_below(&r, 4);
        for (int64_t j = 0; j < n; j++) {
            allow[j] = esa_rng_below(&r, 3) > 0;
            v[j] = kind == 0   ? kit_normal(&r)
                   : kind == 1 ? (float)esa_rng_below(&r, 4)
                   : kind == 2 ? expf(20.0f * kit_normal(&r))
                               : 0.0f;
            const uint32_t odd = esa_rng_below(&r, 40);
            if (odd == 0) v[j] = NAN;
            if (odd == 1) v[j] = -INFINITY;
            if (odd == 2) v[j] = INFINITY;
            if (odd == 3) v[j] = -0.0f;
        }
        const int64_t k = esa_rng_below(&r, (uint32_t)n + 3);
        const uint8_t *use = esa_rng_below(&r, 2) ? allow : NULL;
        esa_top_k(keep, v, use, n, k, scratch);
        naive_top(want, v, use, n, k);
        assert_memory_equal(keep, want, (size_t)n);
    }
    uint64_t key[100];
    for (int j = 0; j < 100; j++) key[j] = esa_rng_next(&r);
    esa_sort_keys(key, 100);
    for (int j = 1; j < 100; j++) assert_true(key[j - 1] >= key[j]);
    assert_int_equal(esa_rank_index(esa_rank_key(3.0f, 65534)), 65534);
}

static void public_budgets(void **state)
{
    esa_ctx *ctx = kit_ctx(1);
    const double e[2] = { 0.2, 0.6 };
    int32_t k[2];
    (void)state;
    assert_int_equal(esa_entropy_budgets(ctx, k, e, 2, 100, 0.5), ESA_OK);
    assert_int_equal(k[0], 25);
    assert_int_equal(k[1], 75);
    assert_true(esa_entropy_budgets(ctx, k, e, 0, 100, 0.5) < 0);
    assert_true(esa_entropy_budgets(ctx, NULL, e, 2, 100, 0.5) < 0);
    esa_ctx_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(entropy_sums_exact), cmocka_unit_test(entropy_cases),
        cmocka_unit_test(rows_spread),        cmocka_unit_test(top_k),
        cmocka_unit_test(public_budgets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
