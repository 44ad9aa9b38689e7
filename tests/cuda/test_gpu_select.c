/* test_gpu_select.c - every selector on the GPU and on the CPU, same data: where the masks differ
 * it must be a tie, and ties are counted.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A tie: the blocks that one side keeps and the other does not differ by at most 2^-12 of the row's
 * largest reference score; or the budgets of two heads whose remainders differ by under 1e-4 moved
 * by one block; or a CDF threshold that lies within 2^-12 of the row's mass. full and random must
 * agree in every bit. Modes that round to 16 bits (compat-round) put scores on a coarse grid, where
 * one rounding moves a block: there the share of differences is bounded instead. */
#include "select/scores.h"
#include "common/case_run.h"
#include "common/on_gpu.h"

#define TIE 0x1p-12

typedef struct tally {
    int64_t rows, blocks, swapped, moved, wrong;
} tally;

static esa_ctx *ctx;

/* Random problems per test; under a sanitizer ($ESA_TEST_SMALL) few. */
static int rounds(void) { return getenv("ESA_TEST_SMALL") ? 5 : 40; }

static int open_ctx(void **state)
{
    (void)state;
    ctx = kit_ctx(0);
    return 0;
}

static int close_ctx(void **state)
{
    (void)state;
    esa_ctx_free(ctx);
    return 0;
}

/* Reference scores of one head; entropy: the CPU's own importance. */
static void reference(const world *w, const float *importance, double *score, int64_t b, int64_t h)
{
    if (w->p.selector == ESA_SELECT_RF_V2)
        naive_means(w, score, b, h);
    else if (w->p.selector == ESA_SELECT_ADA_BSA)
        naive_ada(w, score, b, h);
    else
        for (int64_t i = 0; i < w->nq * w->nk; i++)
            score[i] = (double)importance[(b * w->Hq + h) * w->nq * w->nk + i];
}

static int descending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Largest score that only `a` has minus the smallest that only `b` has, the `spare` smallest of b's
 * left out: by how much b chose worse. */
static double loss(const uint8_t *a, const uint8_t *b, const double *score, int64_t nk,
                   int64_t spare, double *room)
{
    double best = -INFINITY;
    int64_t n = 0;
    for (int64_t j = 0; j < nk; j++) {
        if (a[j] && !b[j] && score[j] > best) best = score[j];
        if (b[j] && !a[j]) room[n++] = score[j];
    }
    if (best == -INFINITY || n <= spare) return 0.0;
    qsort(room, (size_t)n, sizeof *room, descending);
    return best - room[n - 1 - spare];
}

/* How far the row's CDF decision is from its threshold, as a share of the row's mass, for either
 * mask. */
static double cdf_slack(const world *w, const uint8_t *keep, const double *score)
{
    double mass = 0.0, total = 0.0, least = INFINITY;
    for (int64_t j = 0; j < w->nk; j++) {
        total += score[j];
        if (keep[j]) {
            mass += score[j];
            if (score[j] < least) least = score[j];
        }
    }
    if (!(total > 0.0)) return 0.0;
    const double with = fabs(mass / total - w->p.cdf_threshold),
                 without = fabs((mass - least) / total - w->p.cdf_threshold);
    return with < without ? with : without;
}

/* Target block counts of the entropy budgets before rounding, by bisection. */
static void budget_targets(double *target, const double *entropy, int64_t H, int64_t nk,
                           double budget)
{
    const double low = budget < 1.0 / (double)nk ? budget : 1.0 / (double)nk;
    double s = 0.0, lo = 0.0, hi = 1e12;
    for (int it = 0; it < 200; it++) {
        double sum = 0.0;
        s = 0.5 * (lo + hi);
        for (int64_t h = 0; h < H; h++) {
            const double b = s * entropy[h];
            sum += b < low ? low : b > 1.0 ? 1.0 : b;
        }
        if (sum < budget * (double)H)
            lo = s;
        else
            hi = s;
    }
    for (int64_t h = 0; h < H; h++) {
        const double b = s * entropy[h];
        target[h] = (b < low ? low : b > 1.0 ? 1.0 : b) * (double)nk;
    }
}

/* May head h of batch entry b have moved by a block? Its remainder must be within 1e-4 of that of
 * another head (or of nothing). */
static int32_t remainder_tie(const world *w, const double *entropy, int64_t b, int64_t h)
{
    double target[64];
    const int64_t existing = (w->kv_len[b] + w->p.block_k - 1) / w->p.block_k;
    if (existing < 1 || w->Hq > 64) return 0;
    budget_targets(target, entropy + b * w->Hq, w->Hq, existing, w->p.budget);
    const double mine = target[h] - floor(target[h]);
    if (mine < 1e-4 || mine > 1.0 - 1e-4) return 1;
    for (int64_t o = 0; o < w->Hq; o++)
        if (o != h && fabs(target[o] - floor(target[o]) - mine) < 1e-4) return 1;
    return 0;
}

static void complain(const world *w, int64_t b, int64_t h, int64_t I, const uint8_t *cpu,
                     const uint8_t *gpu, const double *score, double top, double by)
{
    printf("WRONG row b %lld h %lld i %lld: off by %.3g of the largest score %.3g: %s\n   ",
           (long long)b, (long long)h, (long long)I, by / top, top, w->name);
    for (int64_t j = 0; j < w->nk && j < 64; j++)
        if (cpu[j] != gpu[j])
            printf(" %s has %lld (%.6g)", cpu[j] ? "cpu" : "gpu", (long long)j, score[j]);
    printf("\n");
}

static void compare_head(const world *w, tally *t, const uint8_t *cpu, const uint8_t *gpu,
                         const double *score, const double *entropy, int64_t b, int64_t h)
{
    double *room = malloc((size_t)(w->nk + 1) * sizeof *room);
    assert_non_null(room);
    for (int64_t I = 0; I < w->nq; I++) {
        const int64_t at = ((b * w->Hq + h) * w->nq + I) * w->nk;
        int64_t different = 0, kept[2] = { 0, 0 };
        double top = 0.0;
        for (int64_t j = 0; j < w->nk; j++) {
            different += cpu[at + j] != gpu[at + j];
            kept[0] += cpu[at + j];
            kept[1] += gpu[at + j];
            if (fabs(score[I * w->nk + j]) > top) top = fabs(score[I * w->nk + j]);
        }
        t->rows++;
        t->blocks += w->nk;
        if (!different) continue;
        const uint8_t *a = cpu + at, *g = gpu + at;
        const double *s = score + I * w->nk;
        const int64_t more = kept[1] - kept[0];
        /* whichever side keeps more may have its last ones for free; beyond that the two sides must
         * have chosen equally well */
        double by = loss(a, g, s, w->nk, more > 0 ? more : 0, room);
        const double back = loss(g, a, s, w->nk, more < 0 ? -more : 0, room);
        if (back > by) by = back;
        int32_t fine = by <= TIE * top;
        if (more) {
            t->moved++;
            if (w->p.selector == ESA_SELECT_ENTROPY)
                fine = fine && remainder_tie(w, entropy, b, h);
            else if (w->p.selector == ESA_SELECT_ADA_BSA && w->p.cdf_threshold < 1.0)
                fine = fine && (cdf_slack(w, a, s) <= TIE || cdf_slack(w, g, s) <= TIE);
            /* rf_v2 in compat mode keeps every block as good as the last one; fixed rows keep the
             * best block beside forced ones */
        }
        t->swapped += different;
        if (!fine) {
            t->wrong++;
            if (t->wrong <= 5) complain(w, b, h, I, a, g, s, top, by);
        }
    }
    free(room);
}

static void compare_world(world *w, tally *t)
{
    const int64_t cells = w->nq * w->nk, heads = w->B * w->Hq;
    if (w->p.scale == 0.0) w->p.scale = 1.0 / sqrt((double)w->D);
    on_gpu_set(0);
    esa_mask *mask = kit_select(ctx, &w->q.view, &w->k.view, &w->p);
    const esa_mask_info f = kit_info(mask);
    const size_t bytes = (size_t)(f.B * f.H * f.nq * f.nk);
    uint8_t *cpu = kit_bytes(mask);
    esa_mask_free(mask);
    float *importance = malloc((size_t)(heads * cells) * sizeof *importance);
    double *entropy = malloc((size_t)heads * sizeof *entropy),
           *score = malloc((size_t)cells * sizeof *score);
    assert_true(importance && entropy && score);
    if (w->p.selector == ESA_SELECT_ENTROPY)
        assert_int_equal(esa_importance(ctx, importance, entropy, &w->q.view, &w->k.view, &w->p),
                         ESA_OK);
    on_gpu_set(1);
    mask = kit_select(ctx, &w->q.view, &w->k.view, &w->p);
    const esa_mask_info g = kit_info(mask);
    uint8_t *gpu = kit_bytes(mask), *again = kit_select_bytes(ctx, &w->q.view, &w->k.view, &w->p);
    on_gpu_set(-1);
    assert_int_equal(f.nq, g.nq);
    assert_int_equal(f.nk, g.nk);
    int64_t counted = 0;
    for (size_t i = 0; i < bytes; i++) counted += gpu[i];
    if (g.kept != counted)
        fail_msg("the mask says %d kept, its lists hold %d: %s", (int)g.kept, (int)counted,
                 w->name);
    /* existing blocks follow from kept and density on both sides */
    if (f.kept && g.kept && fabs((double)f.kept / f.density - (double)g.kept / g.density) > 0.5)
        fail_msg("existing blocks differ: CPU %d at density %g, GPU %d at %g: %s", (int)f.kept,
                 f.density, (int)g.kept, g.density, w->name);
    if (memcmp(gpu, again, bytes)) fail_msg("two runs on the GPU differ: %s", w->name);
    const int32_t plain = w->p.selector == ESA_SELECT_FULL || w->p.selector == ESA_SELECT_RANDOM;
    if (plain && memcmp(cpu, gpu, bytes)) fail_msg("masks differ: %s", w->name);
    if (f.nq == w->nq && f.nk == w->nk && !plain && w->p.mode != ESA_MODE_COMPAT_ROUND) {
        for (int64_t b = 0; b < w->B; b++)
            for (int64_t h = 0; h < w->Hq; h++) {
                reference(w, importance, score, b, h);
                compare_head(w, t, cpu, gpu, score, entropy, b, h);
            }
    } else {
        t->rows += f.B * f.H * f.nq;
        t->blocks += (int64_t)bytes;
        for (size_t i = 0; i < bytes; i++) t->swapped += cpu[i] != gpu[i];
    }
    esa_mask_free(mask);
    free(cpu);
    free(gpu);
    free(again);
    free(importance);
    free(entropy);
    free(score);
}

static void report(const tally *t, const char *what)
{
    printf("%-22s %8lld rows %9lld blocks: %lld blocks differ, %lld rows of another length, %lld "
           "rows that are no tie\n",
           what, (long long)t->rows, (long long)t->blocks, (long long)t->swapped,
           (long long)t->moved, (long long)t->wrong);
}

/* compat rf_v2 and compat ada_bsa have needs of their own, and compat-round entropy is the CPU's
 * alone. */
static int32_t suits(const world *w)
{
    if (w->p.mode == ESA_MODE_FIXED) return 1;
    if (w->p.selector == ESA_SELECT_ENTROPY) return w->p.mode == ESA_MODE_COMPAT;
    if (w->p.selector == ESA_SELECT_RF_V2)
        return !w->p.causal && w->p.layout.grid_q[0] && w->Nq == w->Nk;
    return !(w->p.selector == ESA_SELECT_ADA_BSA && w->p.causal && w->Nq != w->Nk);
}

static void small_problems(void **state)
{
    static const char *const name[] = { "full", "entropy", "rf_v2", "ada_bsa", "random" };
    static const char *const mode[] = { "", " compat", " compat-round" };
    esa_rng r = { kit_seed("small_problems") };
    int64_t wrong = 0;
    (void)state;
    for (int32_t selector = ESA_SELECT_FULL; selector <= ESA_SELECT_RANDOM; selector++)
        for (int32_t m = ESA_MODE_FIXED; m <= ESA_MODE_COMPAT_ROUND; m++) {
            char what[64];
            tally t = { 0, 0, 0, 0, 0 };
            for (int round = 0; round < rounds(); round++) {
                world w;
                world_make(&w, &r, ctx, selector, m);
                if (selector == ESA_SELECT_ADA_BSA && esa_rng_below(&r, 2)) w.p.cdf_threshold = 0.9;
                if (suits(&w)) compare_world(&w, &t);
                world_free(&w);
            }
            snprintf(what, sizeof what, "%s%s", name[selector], mode[m]);
            report(&t, what);
            wrong += t.wrong;
            if (m == ESA_MODE_COMPAT_ROUND)
                assert_true((double)t.swapped <= 0.01 * (double)t.blocks + 4);
        }
    assert_int_equal(wrong, 0);
}

static const struct {
    const char *name;
    int64_t Hq, Hkv, D;
    int32_t grid[3], front, back, order, block_q, block_k;
    double budget;
} table[] = {
#define SELECT_CASE(...) { __VA_ARGS__ },
#include "cases/selection.def"
};

static void tile_sizes(void **state)
{
    const uint64_t seed = kit_seed("tile_sizes");
    (void)state;
    for (int32_t selector = ESA_SELECT_ENTROPY; selector <= ESA_SELECT_ADA_BSA; selector++)
        for (int32_t dtype = ESA_DTYPE_F16; dtype <= ESA_DTYPE_BF16; dtype++) {
            tally t = { 0, 0, 0, 0, 0 };
            char what[64];
            for (size_t c = 0; c < sizeof table / sizeof table[0]; c++) {
                world w;
                if (!case_begin(table[c].name, few(2))) continue;
                esa_rng r = { seed + 8 * (uint64_t)c + (uint64_t)dtype };
                memset(&w, 0, sizeof w);
                w.B = 1;
                w.Hq = table[c].Hq;
                w.Hkv = table[c].Hkv;
                w.D = table[c].D;
                w.p = esa_select_params_default(selector);
                w.p.block_q = table[c].block_q;
                w.p.block_k = table[c].block_k;
                w.p.budget = table[c].budget;
                if (selector == ESA_SELECT_ADA_BSA && c % 2) w.p.cdf_threshold = 0.8;
                w.p.layout.order = table[c].order;
                w.p.layout.protect_first_frame = (int32_t)(c % 2);
                for (int i = 0; i < 3; i++) {
                    w.p.layout.grid_q[i] = w.p.layout.grid_k[i] = table[c].grid[i];
                    w.p.layout.window[i] = 4;
                }
                w.p.layout.text_front_q = w.p.layout.text_front_k = table[c].front;
                w.p.layout.text_back_q = w.p.layout.text_back_k = table[c].back;
                w.Nq = w.Nk = (int64_t)table[c].grid[0] * table[c].grid[1] * table[c].grid[2] +
                              table[c].front + table[c].back;
                w.nq = (w.Nq + w.p.block_q - 1) / w.p.block_q;
                w.nk = (w.Nk + w.p.block_k - 1) / w.p.block_k;
                w.kv_len[0] = (int32_t)w.Nk;
                w.q = kit_random(&r, dtype, 1, w.Hq, w.Nq, w.D, (int32_t)(c % 2), 1.0f);
                w.k = kit_random(&r, dtype, 1, w.Hkv, w.Nk, w.D, 0, 1.5f);
                w.order_q = malloc((size_t)w.Nq * 4);
                w.order_k = malloc((size_t)w.Nk * 4);
                world_order(&w, ctx);
                snprintf(w.name, sizeof w.name, "selector %d dtype %d %s", (int)selector,
                         (int)dtype, table[c].name);
                const int64_t before = t.wrong;
                compare_world(&w, &t);
                world_free(&w);
                case_end((int)(t.wrong - before));
            }
            snprintf(what, sizeof what, "selector %d %s", (int)selector,
                     dtype == ESA_DTYPE_F16 ? "f16" : "bf16");
            report(&t, what);
        }
    cases_done("select/tiles/");
}

/* Importance and entropies themselves. */
static void importance_agrees(void **state)
{
    esa_rng r = { kit_seed("importance_agrees") };
    double worst = 0.0, worst_entropy = 0.0;
    (void)state;
    for (int round = 0; round < rounds(); round++) {
        world w;
        world_make(&w, &r, ctx, ESA_SELECT_ENTROPY, (int32_t)esa_rng_below(&r, 2));
        const int64_t n = w.B * w.Hq * w.nq * w.nk;
        float *cpu = malloc((size_t)n * 4), *gpu = malloc((size_t)n * 4);
        double e[2][16];
        on_gpu_set(0);
        assert_int_equal(esa_importance(ctx, cpu, e[0], &w.q.view, &w.k.view, &w.p), ESA_OK);
        on_gpu_set(1);
        const esa_status status = esa_importance(ctx, gpu, e[1], &w.q.view, &w.k.view, &w.p);
        on_gpu_set(-1);
        if (status) fail_msg("%s: %s", esa_ctx_error(ctx), w.name);
        for (int64_t i = 0; i < n; i++) {
            const double d = fabs((double)cpu[i] - (double)gpu[i]);
            if (!(d <= 1e-5))
                fail_msg("importance %lld: CPU %g, GPU %g: %s", (long long)i, (double)cpu[i],
                         (double)gpu[i], w.name);
            worst = fmax(worst, d);
        }
        for (int64_t i = 0; i < w.B * w.Hq; i++) {
            if (!(fabs(e[0][i] - e[1][i]) <= 1e-5))
                fail_msg("entropy of head %lld: CPU %g, GPU %g: %s", (long long)i, e[0][i], e[1][i],
                         w.name);
            worst_entropy = fmax(worst_entropy, fabs(e[0][i] - e[1][i]));
        }
        free(cpu);
        free(gpu);
        world_free(&w);
    }
    printf("importance differs by at most %.2g, entropies by %.2g\n", worst, worst_entropy);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(importance_agrees),
        cmocka_unit_test(small_problems),
        CASES(tile_sizes),
    };
    return RUN_CASES(tests, open_ctx, close_ctx);
}
