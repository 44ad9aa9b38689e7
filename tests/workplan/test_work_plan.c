/* test_work_plan.c - work plans: the solver against a search, mapping by noise level, quality
 * curves, files.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/scratch.h"

#include <math.h>
#include "base/rng.h"
#include "common/one_ctx.h"
#include "esa/esa_work.h"
#include "rules/work_plan.h"

enum { L = 3, T = 4, K = 5, CELLS = L * T };
static const double sigmas[T] = { 1.0, 0.75, 0.5, 0.25 };
static const double grid[K] = { 0.1, 0.2, 0.4, 0.6, 0.8 };

typedef struct numbers {
    double error[CELLS * K], weight[CELLS];
} numbers;

static void ok(esa_status status)
{
    if (status) fail_msg("%s: %s", esa_status_name(status), esa_ctx_error(ctx));
}

/* Falling errors, different in every cell. */
static numbers random_numbers(uint64_t seed)
{
    numbers n;
    esa_rng r = { seed };
    for (int c = 0; c < CELLS; c++) {
        const double decay = 4 + 8 * (double)esa_rng_unit(&r);
        n.weight[c] = exp(4 * (double)esa_rng_unit(&r));
        for (int k = 0; k < K; k++) n.error[c * K + k] = exp(-decay * grid[k]);
    }
    return n;
}

static esa_work_plan_info info_of(void)
{
    esa_work_plan_info info = { .struct_size = sizeof info,
                                .layers = L,
                                .steps = T,
                                .points = K,
                                .prompts = 2,
                                .selector = ESA_SELECT_ENTROPY,
                                .order = ESA_ORDER_HILBERT,
                                .tail = ESA_TAIL_POOLED,
                                .block_q = 64,
                                .block_k = 32,
                                .anchors = 6,
                                .model = "mini",
                                .config_hash = "00ff" };
    return info;
}

static esa_work_plan *make(const numbers *n)
{
    esa_work_plan *plan;
    const esa_work_plan_info info = info_of();
    ok(esa_work_plan_create(ctx, &plan, &info, sigmas, grid, n->error, n->weight));
    return plan;
}

static double mean(const double *v, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) sum += v[i];
    return sum / n;
}

static double loss_of(const esa_plan_curves *c, const double *density)
{
    double sum = 0;
    for (int64_t i = 0; i < c->cells; i++) sum += c->weight[i] * esa_plan_error(c, i, density[i]);
    return sum;
}

/* ---------------------------------------------------------------- the rule */

/* The work is spent exactly, and no exchange between two cells lowers the loss. */
static void test_solver_is_optimal(void **state)
{
    (void)state;
    const double works[] = { 0.12, 0.2, 0.37, 0.57, 0.8, 0.95 };
    for (uint64_t seed = 1; seed <= 20; seed++)
        for (size_t w = 0; w < sizeof works / sizeof works[0]; w++) {
            const numbers n = random_numbers(seed);
            const double fixed[CELLS] = { 0 };
            const esa_plan_curves c = { CELLS, K, grid, n.error, n.weight, fixed, NULL };
            double out[CELLS];
            /* 1e-12: rounding of a sum of 12 numbers below 1 */
            assert_true(fabs(esa_plan_solve(out, &c, works[w]) - works[w]) < 1e-12);
            assert_true(fabs(mean(out, CELLS) - works[w]) < 1e-12);
            const double best = loss_of(&c, out);
            for (int a = 0; a < CELLS; a++)
                for (int b = 0; b < CELLS; b++) {
                    const double move = 0.01;
                    if (a == b || out[a] - move < grid[0] || out[b] + move > 1) continue;
                    double other[CELLS];
                    memcpy(other, out, sizeof other);
                    other[a] -= move;
                    other[b] += move;
                    if (loss_of(&c, other) < best * (1 - 1e-9))
                        fail_msg("seed %d, work %g: moving %g from cell %d to %d gives %g, not %g",
                                 (int)seed, works[w], move, a, b, loss_of(&c, other), best);
                }
        }
}

/* With fixed costs the dense end is a jump: no cell is both sparse and dearer than dense. */
static void test_solver_pays_fixed_costs(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        const numbers n = random_numbers(seed);
        double fixed[CELLS], out[CELLS];
        for (int i = 0; i < CELLS; i++) fixed[i] = 0.05 + 0.01 * i;
        const esa_plan_curves c = { CELLS, K, grid, n.error, n.weight, fixed, NULL };
        for (double work = 0.25; work < 1; work += 0.05) {
            assert_true(fabs(esa_plan_solve(out, &c, work) - work) < 1e-12);
            double paid = 0;
            for (int i = 0; i < CELLS; i++) {
                assert_true(out[i] >= grid[0] - 1e-12 && out[i] <= 1);
                assert_true(out[i] == 1 || out[i] + fixed[i] < 1);
                paid += out[i] < 1 ? out[i] + fixed[i] : 1;
            }
            assert_true(fabs(paid / CELLS - work) < 1e-12);
        }
    }
}

static void test_solver_limits(void **state)
{
    (void)state;
    numbers n = random_numbers(7);
    const double fixed[CELLS] = { 0 };
    double out[CELLS];
    esa_plan_curves c = { CELLS, K, grid, n.error, n.weight, fixed, NULL };
    assert_true(fabs(esa_plan_solve(out, &c, 0.01) - 0.1) < 1e-12); /* the cheapest costs 0.1 */
    assert_true(esa_plan_solve(out, &c, 1) == 1);
    for (int i = 0; i < CELLS; i++) assert_true(out[i] == 1);
    /* cells that do not matter stay cheap; equal cells get equal densities */
    for (int i = 0; i < CELLS; i++) {
        n.weight[i] = i % 2;
        for (int k = 0; k < K; k++) n.error[i * K + k] = 1 - grid[k] * (2 - grid[k]);
    }
    assert_true(fabs(esa_plan_solve(out, &c, 0.3) - 0.3) < 1e-12);
    for (int i = 0; i < CELLS; i++) assert_true(fabs(out[i] - (i % 2 ? 0.5 : 0.1)) < 1e-12);
    /* a curve that rises somewhere is cut to its hull */
    const double bumpy[CELLS * K] = { 0.5, 0.9, 0.1, 0.3, 0.05 };
    esa_plan_hull h;
    c.error = bumpy;
    n.weight[0] = 1;
    esa_plan_hull_of(&h, &c, 0);
    assert_int_equal(h.points, 3); /* 0.1, 0.4 and dense: 0.8 lies above the last segment */
    for (int i = 0; i + 2 < h.points; i++)
        assert_true(esa_plan_gain(&h, i, i + 1) > esa_plan_gain(&h, i + 1, i + 2));
}

/* ---------------------------------------------------------------- runs */

/* Without a plan all cells get the same density, whatever their noise level and layer. */
static void test_uniform_rule(void **state)
{
    (void)state;
    static const double noise[T] = { 0.9, 0.3, 0.2, 0.05 };
    double out[CELLS], other[CELLS], realised;
    ok(esa_work_plan_solve(ctx, NULL, out, L, T, NULL, NULL, 0.44, NULL, &realised));
    assert_true(fabs(realised - 0.44) < 1e-9);
    for (int i = 0; i < CELLS; i++) {
        assert_true(out[i] > 0 && out[i] <= 1);
        assert_true(out[i] == out[0]);
    }
    ok(esa_work_plan_solve(ctx, NULL, other, L, T, noise, NULL, 0.44, NULL, NULL));
    assert_memory_equal(out, other, sizeof out);
}

/* A run with the plan's own noise levels uses its numbers; one with twice the steps has about the
 * same density at the same noise. */
static void test_mapping_by_noise(void **state)
{
    (void)state;
    numbers n = random_numbers(3);
    for (int l = 0; l < L; l++)
        for (int t = 0; t < T; t++) {
            n.weight[l * T + t] = exp(3 * sigmas[t]); /* noisy steps matter more */
            for (int k = 0; k < K; k++) n.error[(l * T + t) * K + k] = exp(-6 * grid[k]);
        }
    esa_work_plan *plan = make(&n);
    double own[CELLS], spaced[CELLS], twice[L * 2 * T], levels[2 * T];
    for (int t = 0; t < 2 * T; t++) levels[t] = 1 - t / (2.0 * T);
    ok(esa_work_plan_solve(ctx, plan, own, L, T, sigmas, NULL, 0.5, NULL, NULL));
    ok(esa_work_plan_solve(ctx, plan, spaced, L, T, NULL, NULL, 0.5, NULL, NULL));
    ok(esa_work_plan_solve(ctx, plan, twice, L, 2 * T, levels, NULL, 0.5, NULL, NULL));
    assert_memory_equal(own, spaced, sizeof own);
    assert_true(fabs(mean(twice, L * 2 * T) - 0.5) < 1e-9);
    assert_true(own[0] > own[T - 1]);
    /* at the same noise, densities differ by less than one step of the grid */
    for (int t = 0; t < T; t++) assert_true(fabs(twice[2 * t] - own[t]) < 0.2);
    for (int t = 1; t < 2 * T; t++) assert_true(twice[t] <= twice[t - 1] + 1e-12);
    esa_work_plan_free(plan);
}

/* Masks and orders that are made rarely and shared leave more for attention. */
static void test_costs(void **state)
{
    (void)state;
    const numbers n = random_numbers(5);
    esa_work_plan *plan = make(&n);
    esa_work_costs dear = esa_work_costs_default(), cheap;
    dear.select = 0.04;
    dear.order = 0.12;
    dear.branches = 2;
    cheap = dear;
    cheap.refresh_every = 2;
    cheap.order_every = 0;
    cheap.share_branches = 1;
    double a[CELLS], b[CELLS], got_a, got_b;
    ok(esa_work_plan_solve(ctx, plan, a, L, T, NULL, NULL, 0.5, &dear, &got_a));
    ok(esa_work_plan_solve(ctx, plan, b, L, T, NULL, NULL, 0.5, &cheap, &got_b));
    /* the correction for dense steps converges; a cell that becomes dense in it moves the sum */
    assert_true(fabs(got_a - 0.5) < 0.01 && fabs(got_b - 0.5) < 0.01);
    /* all sparse: 0.16 a call against (0.04 * 2 + 0.12) / 4 steps / 2 branches = 0.025 */
    assert_true(mean(b, CELLS) > mean(a, CELLS) + 0.05);
    /* exact rows are paid by every call, shared or not: they cost the densities what they take */
    esa_work_costs rows = cheap;
    rows.exact = 0.0625;
    ok(esa_work_plan_solve(ctx, plan, a, L, T, NULL, NULL, 0.5, &rows, &got_a));
    assert_true(fabs(got_a - 0.5) < 0.01);
    assert_true(mean(b, CELLS) > mean(a, CELLS) + 0.05);
    rows.exact = -1.0;
    assert_refused(ctx, esa_work_plan_solve(ctx, plan, a, L, T, NULL, NULL, 0.5, &rows, NULL),
                   ESA_ERR_ARGUMENT, "exact -1", NULL);
    esa_work_plan_free(plan);
}

/* A floor below all points changes nothing. Elsewhere the curves begin at it: no density is below,
 * and the least work is the floor and what a cell pays beside it. */
static void test_floor(void **state)
{
    (void)state;
    const double floors[] = { 0.05, 0.1, 0.17, 0.4, 0.75, 0.93 };
    for (uint64_t seed = 1; seed <= 10; seed++) {
        const numbers n = random_numbers(seed);
        esa_work_plan *plan = make(&n);
        for (size_t f = 0; f < sizeof floors / sizeof floors[0]; f++) {
            const double floor = floors[f], low = floor > grid[0] ? floor : grid[0];
            esa_work_costs costs = esa_work_costs_default();
            double free_out[CELLS], out[CELLS], got, least = 0;
            costs.exact = 0.02;
            ok(esa_work_plan_solve(ctx, plan, free_out, L, T, NULL, NULL, low + 0.03, &costs,
                                   &got));
            costs.floor = floor;
            ok(esa_work_plan_solve(ctx, plan, out, L, T, NULL, NULL, low + 0.03, &costs, &got));
            assert_true(fabs(got - (low + 0.03)) < 0.01);
            for (int i = 0; i < CELLS; i++) assert_true(out[i] >= low - 1e-12 && out[i] <= 1);
            if (floor <= grid[0]) assert_memory_equal(out, free_out, sizeof out);
            assert_refused(
                ctx,
                esa_work_plan_solve(ctx, plan, out, L, T, NULL, NULL, low + 0.01, &costs, &least),
                ESA_ERR_ARGUMENT, "at the lowest density", NULL);
            assert_true(fabs(least - (low + 0.02)) < 1e-9);
        }
        esa_work_costs costs = esa_work_costs_default();
        double out[CELLS];
        costs.floor = 1; /* one block a row: everything is dense */
        ok(esa_work_plan_solve(ctx, plan, out, L, T, NULL, NULL, 1, &costs, NULL));
        assert_true(mean(out, CELLS) == 1);
        costs.floor = 1.5;
        assert_refused(ctx, esa_work_plan_solve(ctx, plan, out, L, T, NULL, NULL, 1, &costs, NULL),
                       ESA_ERR_ARGUMENT, "floor 1.5", NULL);
        esa_work_plan_free(plan);
    }
}

/* Weights that are a product are found again from the sums over layers and over steps. */
static void test_fit(void **state)
{
    (void)state;
    const double a[2] = { 3, 0.2 }, b[2] = { 0.5, 7 };
    double error[CELLS], weight[CELLS], by_layer[2] = { 0 }, by_step[2] = { 0 };
    esa_rng r = { 9 };
    for (int i = 0; i < CELLS; i++) {
        const int g = i / T * 2 / L, h = i % T * 2 / T;
        error[i] = 0.1 + (double)esa_rng_unit(&r);
        by_layer[g] += a[g] * b[h] * error[i];
        by_step[h] += a[g] * b[h] * error[i];
    }
    ok(esa_work_fit(ctx, weight, L, T, error, 2, by_layer, 2, by_step));
    for (int i = 0; i < CELLS; i++) {
        const double expected = a[i / T * 2 / L] * b[i % T * 2 / T];
        assert_true(fabs(weight[i] - expected) < 1e-6 * expected);
    }
    by_step[0] = -1;
    assert_refused(ctx, esa_work_fit(ctx, weight, L, T, error, 2, by_layer, 2, by_step),
                   ESA_ERR_ARGUMENT, "by_step number 0 is -1", NULL);
    assert_refused(ctx, esa_work_fit(ctx, weight, L, T, error, L + 1, by_layer, 2, by_layer),
                   ESA_ERR_ARGUMENT, "3 layers in 4 groups", NULL);
}

/* or_least: the least that can be, and it says what that costs; a work within reach is met. */
static void test_least(void **state)
{
    (void)state;
    const numbers n = random_numbers(6);
    esa_work_plan *plan = make(&n);
    double out[CELLS], least = 0, met = 0;
    esa_work_costs costs = esa_work_costs_default();
    costs.or_least = 1;
    costs.exact = 0.02;
    ok(esa_work_plan_solve(ctx, plan, out, L, T, NULL, NULL, 0.05, &costs, &least));
    for (int i = 0; i < CELLS; i++) assert_true(out[i] == 0.1);
    assert_true(fabs(least - 0.12) < 1e-12); /* sums of a few doubles */
    ok(esa_work_plan_solve(ctx, plan, out, L, T, NULL, NULL, 0.5, &costs, &met));
    assert_true(fabs(met - 0.5) < 1e-6);
    esa_work_plan_free(plan);
}

static void test_bad_runs(void **state)
{
    (void)state;
    const numbers n = random_numbers(5);
    esa_work_plan *plan = make(&n);
    double out[2 * CELLS];
    const double rising[T] = { 0.1, 0.2, 0.3, 0.4 };
    esa_work_costs costs = esa_work_costs_default();
    costs.branches = 0;
    assert_refused(ctx, esa_work_plan_solve(ctx, plan, out, L + 1, T, NULL, NULL, 0.5, NULL, NULL),
                   ESA_ERR_ARGUMENT, "made for 3 layers, but the run has 4", NULL);
    assert_refused(ctx, esa_work_plan_solve(ctx, plan, out, L, T, rising, NULL, 0.5, NULL, NULL),
                   ESA_ERR_ARGUMENT, "noise level of step 1 is 0.2", NULL);
    assert_refused(ctx, esa_work_plan_solve(ctx, plan, out, L, T, NULL, NULL, 0.05, NULL, NULL),
                   ESA_ERR_ARGUMENT, "work is 0.05, but at the lowest density (0.1)", NULL);
    assert_refused(ctx, esa_work_plan_solve(ctx, plan, out, L, T, NULL, NULL, 1.5, NULL, NULL),
                   ESA_ERR_ARGUMENT, "work is 1.5", NULL);
    assert_refused(ctx, esa_work_plan_solve(ctx, plan, out, L, T, NULL, NULL, 0.5, &costs, NULL),
                   ESA_ERR_ARGUMENT, "branches is 0", NULL);
    assert_refused(ctx, esa_work_plan_solve(ctx, plan, NULL, L, T, NULL, NULL, 0.5, NULL, NULL),
                   ESA_ERR_ARGUMENT, "density is NULL", NULL);
    esa_work_plan_free(plan);
}

/* ---------------------------------------------------------------- quality */

static void test_quality(void **state)
{
    (void)state;
    const numbers n = random_numbers(5);
    esa_work_plan *plan = make(&n);
    double psnr, spread, work;
    assert_refused(ctx, esa_work_plan_reach(plan, 30, &work), ESA_ERR_STATE, "no quality curve",
                   NULL);
    const double works[] = { 0.3, 0.4, 0.5 }, db[] = { 30, 29.5, 40 }, spreads[] = { 1, 2, 3 },
                 falling[] = { 0.5, 0.4 };
    ok(esa_work_plan_set_quality(plan, 3, works, db, spreads));
    ok(esa_work_plan_expect(plan, 0.45, &psnr, &spread));
    assert_true(fabs(psnr - 35) < 1e-12 && fabs(spread - 2.5) < 1e-12); /* the dip is lifted */
    ok(esa_work_plan_reach(plan, 35, &work));
    assert_true(fabs(work - 0.45) < 1e-12);
    ok(esa_work_plan_reach(plan, 20, &work));
    assert_true(work == 0.3);
    assert_refused(ctx, esa_work_plan_reach(plan, 41, &work), ESA_ERR_ARGUMENT,
                   "at most 40.0 dB, at work 0.5", NULL);
    assert_refused(ctx, esa_work_plan_expect(plan, 0.2, &psnr, NULL), ESA_ERR_ARGUMENT,
                   "from 0.3 to 0.5", NULL);
    assert_refused(ctx, esa_work_plan_set_quality(plan, 2, falling, db, spreads), ESA_ERR_ARGUMENT,
                   "work number 1 is 0.4", NULL);
    esa_work_plan_free(plan);
}

/* ---------------------------------------------------------------- files */

static void test_file(void **state)
{
    (void)state;
    scratch s = scratch_make();
    const numbers n = random_numbers(11);
    esa_work_plan *plan = make(&n), *again;
    const double works[] = { 0.3, 0.5 }, db[] = { 30, 40 }, spreads[] = { 1, 2 };
    const char *path = scratch_path(&s, "a.plan");
    for (int32_t levels = 0; levels <= 2; levels += 2) {
        ok(esa_work_plan_set_quality(plan, levels, works, db, spreads));
        ok(esa_work_plan_save(plan, path));
        ok(esa_work_plan_open(ctx, &again, path));
        esa_work_plan_info a = { .struct_size = sizeof a }, b = a;
        ok(esa_work_plan_get_info(plan, &a));
        ok(esa_work_plan_get_info(again, &b));
        assert_memory_equal(&a, &b, sizeof a);
        assert_int_equal(b.levels, levels);
        assert_int_equal(b.anchors, 6);
        double sigma[T], density[K];
        numbers m;
        ok(esa_work_plan_get(again, sigma, density, m.error, m.weight));
        assert_memory_equal(sigma, sigmas, sizeof sigma);
        assert_memory_equal(density, grid, sizeof density);
        assert_memory_equal(&m, &n, sizeof n);
        esa_work_plan_free(again);
    }
    esa_work_plan_free(plan);
    scratch_remove(&s);
}

/* Older files know nothing of anchors: there were none. */
static void test_older_file(void **state)
{
    (void)state;
    static const char key[] = "\"anchors\"";
    scratch s = scratch_make();
    const numbers n = random_numbers(11);
    esa_work_plan *plan = make(&n);
    esa_work_plan_info info = { .struct_size = sizeof info };
    const char *path = scratch_path(&s, "c.plan");
    size_t size;
    ok(esa_work_plan_save(plan, path));
    esa_work_plan_free(plan);
    char *bytes = (char *)scratch_read(path, &size), *at = NULL;
    for (size_t i = 0; i + sizeof key < size && !at; i++)
        if (memcmp(bytes + i, key, sizeof key - 1) == 0) at = bytes + i;
    assert_non_null(at);
    at[1] = 'x'; /* another key, which is not read */
    ok(esa_work_plan_open_memory(ctx, &plan, bytes, (int64_t)size));
    ok(esa_work_plan_get_info(plan, &info));
    assert_int_equal(info.anchors, 0);
    esa_work_plan_free(plan);
    free(bytes);
    scratch_remove(&s);
}

/* Every cut and changed bytes of a file: refused with a message, or a plan that can be asked. */
static void test_damaged_files(void **state)
{
    (void)state;
    scratch s = scratch_make();
    const numbers n = random_numbers(11);
    esa_work_plan *plan = make(&n);
    const char *path = scratch_path(&s, "b.plan");
    size_t size;
    ok(esa_work_plan_save(plan, path));
    esa_work_plan_free(plan);
    uint8_t *bytes = scratch_read(path, &size), *copy = malloc(size);
    assert_non_null(copy);
    esa_rng r = { 1 };
    int refused = 0;
    for (size_t i = 0; i < 4 * size; i++) {
        memcpy(copy, bytes, size);
        if (i >= size) copy[i % size] ^= (uint8_t)(1 + (int)(254 * esa_rng_unit(&r)));
        const esa_status status = esa_work_plan_open_memory(ctx, &plan, copy,
                                                            (int64_t)(i < size ? i : size));
        refused += status != ESA_OK;
        if (status) {
            assert_null(plan);
            assert_true(esa_ctx_error(ctx)[0]);
            assert_true(status == ESA_ERR_FORMAT || status == ESA_ERR_VERSION);
            continue;
        }
        double out[CELLS];
        const esa_status solved = esa_work_plan_solve(ctx, plan, out, L, T, NULL, NULL, 0.5, NULL,
                                                      NULL);
        assert_true(solved == ESA_OK || solved == ESA_ERR_ARGUMENT);
        esa_work_plan_free(plan);
    }
    assert_true(refused > (int)size);
    free(bytes);
    free(copy);
    scratch_remove(&s);
}

static void test_bad_plans(void **state)
{
    (void)state;
    esa_work_plan *plan;
    numbers n = random_numbers(1);
    esa_work_plan_info info = info_of();
    const double flat[T] = { 1, 0.5, 0.5, 0.1 }, wide[K] = { 0.1, 0.2, 0.3, 0.4, 1 };
    assert_refused(ctx, esa_work_plan_create(ctx, &plan, &info, flat, grid, n.error, n.weight),
                   ESA_ERR_ARGUMENT, "noise level of step 2 is 0.5", NULL);
    assert_refused(ctx, esa_work_plan_create(ctx, &plan, &info, sigmas, wide, n.error, n.weight),
                   ESA_ERR_ARGUMENT, "density number 4 is 1", NULL);
    n.error[7] = -1;
    assert_refused(ctx, esa_work_plan_create(ctx, &plan, &info, sigmas, grid, n.error, n.weight),
                   ESA_ERR_ARGUMENT, "error number 7 is -1", NULL);
    n.error[7] = (double)NAN;
    assert_refused(ctx, esa_work_plan_create(ctx, &plan, &info, sigmas, grid, n.error, n.weight),
                   ESA_ERR_ARGUMENT, "error number 7 is", NULL);
    info.anchors = -1;
    assert_refused(ctx, esa_work_plan_create(ctx, &plan, &info, sigmas, grid, n.error, n.weight),
                   ESA_ERR_ARGUMENT, "anchors is -1", NULL);
    info.points = 0;
    assert_refused(ctx, esa_work_plan_create(ctx, &plan, &info, sigmas, grid, n.error, n.weight),
                   ESA_ERR_ARGUMENT, "points is 0", NULL);
    assert_null(plan);
    assert_refused(ctx, esa_work_plan_open(ctx, &plan, "/no/such/plan"), ESA_ERR_IO, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_solver_is_optimal),
                                        cmocka_unit_test(test_solver_pays_fixed_costs),
                                        cmocka_unit_test(test_solver_limits),
                                        cmocka_unit_test(test_uniform_rule),
                                        cmocka_unit_test(test_mapping_by_noise),
                                        cmocka_unit_test(test_costs),
                                        cmocka_unit_test(test_floor),
                                        cmocka_unit_test(test_fit),
                                        cmocka_unit_test(test_least),
                                        cmocka_unit_test(test_bad_runs),
                                        cmocka_unit_test(test_quality),
                                        cmocka_unit_test(test_file),
                                        cmocka_unit_test(test_older_file),
                                        cmocka_unit_test(test_damaged_files),
                                        cmocka_unit_test(test_bad_plans) };
    return cmocka_run_group_tests(tests, setup, teardown);
}
