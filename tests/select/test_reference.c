/* test_reference.c - every selector against a naive reference in double, on random problems of
 * awkward size.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The reference computes scores; the rows of the mask must then hold the forced blocks, the right
 * number of blocks, and no block while a better one was dropped (better by more than the tolerance:
 * ties may fall either way). */
#include "select/scores.h"
#include "common/tiles_emulated.h"
#include "mask/mask.h"

enum { MAX_BLOCKS = 64 };

static const esa_cpu_kernels *kernels; /* for the next test; NULL: the best of the machine */

static esa_ctx *reference_ctx(void)
{
    esa_ctx *ctx = kit_ctx(2);
    if (kernels) ctx->kern = kernels;
    return ctx;
}

typedef struct row_view {
    const uint8_t *keep, *seen, *forced; /* [nk] */
    const double *score;                 /* [nk] */
    int64_t nk, kept, visible, held;     /* counts of keep, seen, forced */
} row_view;

static row_view view_row(const world *w, const uint8_t *mask, const double *score, int64_t b,
                         int64_t h, int64_t I)
{
    row_view r = { mask + ((b * w->Hq + h) * w->nq + I) * w->nk,
                   w->seen + (b * w->nq + I) * w->nk,
                   w->forced + (b * w->nq + I) * w->nk,
                   score,
                   w->nk,
                   0,
                   0,
                   0 };
    for (int64_t j = 0; j < w->nk; j++) {
        r.kept += r.keep[j];
        r.visible += r.seen[j];
        r.held += r.forced[j];
    }
    return r;
}

/* Nothing invisible, everything forced, no dropped block clearly better than a kept free one, the
 * best block always. */
static void check_row(const world *w, const row_view *r, double tolerance)
{
    double worst = INFINITY, best_out = -INFINITY, best = -INFINITY, best_in = -INFINITY;
    for (int64_t j = 0; j < r->nk; j++) {
        if (r->keep[j] && !r->seen[j]) fail_msg("invisible block %d kept: %s", (int)j, w->name);
        if (r->forced[j] && !r->keep[j]) fail_msg("forced block %d dropped: %s", (int)j, w->name);
        if (!r->seen[j]) continue;
        if (r->score[j] > best) best = r->score[j];
        if (r->keep[j] && r->score[j] > best_in) best_in = r->score[j];
        if (r->keep[j] && !r->forced[j] && r->score[j] < worst) worst = r->score[j];
        if (!r->keep[j] && r->score[j] > best_out) best_out = r->score[j];
    }
    if (worst < best_out - tolerance) fail_msg("kept %g, dropped %g: %s", worst, best_out, w->name);
    if (r->visible && best_in < best - tolerance)
        fail_msg("lost the best block %g, has %g: %s", best, best_in, w->name);
    if (!r->visible && r->kept)
        fail_msg("a row that sees nothing keeps %d: %s", (int)r->kept, w->name);
}

/* Row counts of one head against the head's total. */
static void check_counts(const world *w, const uint8_t *mask, const double *scores, int64_t b,
                         int64_t h, int64_t total, double tolerance)
{
    int32_t quota[512];
    int64_t sum = 0, least = 0, rows = 0, columns = 0, visible = 0;
    for (int64_t I = 0; I < w->nq; I++) {
        const row_view r = view_row(w, mask, scores + I * w->nk, b, h, I);
        sum += r.kept;
        least += r.held > 0 ? r.held : r.visible > 0;
        rows += r.visible > 0;
        if (!w->dense[I] && r.held > columns) columns = r.held;
        visible = r.visible > visible ? r.visible : visible;
    }
    const int64_t want = total > least ? total : least;
    if (sum < want || sum > want + rows)
        fail_msg("head keeps %d blocks, expected %d: %s", (int)sum, (int)want, w->name);
    if (w->p.causal || visible == 0) return;
    kit_rows(quota, w->nq, visible, w->dense, columns, total);
    for (int64_t I = 0; I < w->nq; I++) {
        const row_view r = view_row(w, mask, scores + I * w->nk, b, h, I);
        if (r.kept == quota[I]) continue;
        /* one more only where forced blocks used the quota up and the best block is not among
         * them */
        double best_forced = -INFINITY, best = -INFINITY;
        for (int64_t j = 0; j < r.nk; j++) {
            if (r.seen[j] && r.score[j] > best) best = r.score[j];
            if (r.forced[j] && r.score[j] > best_forced) best_forced = r.score[j];
        }
        if (!(r.kept == quota[I] + 1 && quota[I] == r.held && best_forced <= best + tolerance))
            fail_msg("row %d keeps %d, quota %d, forced %d: %s", (int)I, (int)r.kept, (int)quota[I],
                     (int)r.held, w->name);
    }
}

/* ---------------------------------------------------------------- entropy */

static void naive_importance(const world *w, double *out, int64_t b, int64_t h)
{
    double *s = malloc((size_t)w->Nk * sizeof(double));
    memset(out, 0, (size_t)(w->nq * w->nk) * sizeof *out);
    for (int64_t I = 0; I < w->nq; I++) {
        const int64_t n = w->Nq - I * w->p.block_q < w->p.block_q ? w->Nq - I * w->p.block_q
                                                                  : w->p.block_q;
        const int64_t count = n < w->p.samples ? n : w->p.samples;
        int64_t seeing = 0;
        for (int64_t pass = 0; pass < 2; pass++) /* first count the samples that see anything */
            for (int64_t c = 0; c < count; c++) {
                const int64_t i = I * w->p.block_q +
                                  (n < w->p.samples ? c : (2 * c + 1) * n / (2 * w->p.samples));
                double top = -INFINITY, total = 0.0;
                for (int64_t j = 0; j < w->Nk; j++) {
                    s[j] = world_sees(w, b, i, j) ? world_dot(w, b, h, i, j) * w->p.scale
                                                  : -INFINITY;
                    if (s[j] > top) top = s[j];
                }
                if (top == -INFINITY) continue;
                if (pass == 0) {
                    seeing++;
                    continue;
                }
                for (int64_t j = 0; j < w->Nk; j++) total += exp(s[j] - top);
                for (int64_t j = 0; j < w->Nk; j++)
                    out[I * w->nk + j / w->p.block_k] += exp(s[j] - top) / total / (double)seeing;
            }
    }
    free(s);
}

static void entropy_reference(void **state)
{
    esa_rng r = { kit_seed("entropy_reference") };
    esa_ctx *ctx = reference_ctx();
    (void)state;
    for (int round = 0; round < 60; round++) {
        world w;
        world_make(&w, &r, ctx, ESA_SELECT_ENTROPY,
                   round % 3 == 2 ? ESA_MODE_COMPAT : ESA_MODE_FIXED);
        w.p.scale = 1.0 / sqrt((double)w.D);
        if (w.p.mode != ESA_MODE_FIXED) { /* the plain rules: nothing is forced */
            memset(w.forced, 0, (size_t)(w.B * w.nq * w.nk));
            memset(w.dense, 0, (size_t)w.nq);
        }
        const int64_t cells = w.nq * w.nk, all = w.B * w.Hq * cells;
        float *imp = malloc((size_t)all * sizeof *imp);
        double *entropy = malloc((size_t)(w.B * w.Hq) * sizeof *entropy),
               *want = malloc((size_t)cells * sizeof *want);
        const esa_status status = esa_importance(ctx, imp, entropy, &w.q.view, &w.k.view, &w.p);
        if (status) fail_msg("%s: %s", esa_ctx_error(ctx), w.name);
        uint8_t *mask = kit_select_bytes(ctx, &w.q.view, &w.k.view, &w.p);
        for (int64_t b = 0; b < w.B; b++) {
            int32_t k[8];
            const int64_t existing = (w.kv_len[b] + w.p.block_k - 1) / w.p.block_k;
            if (existing > 0)
                assert_int_equal(
                    esa_entropy_budgets(ctx, k, entropy + b * w.Hq, w.Hq, existing, w.p.budget),
                    ESA_OK);
            for (int64_t h = 0; h < w.Hq; h++) {
                const float *got = imp + (b * w.Hq + h) * cells;
                double e = 0.0, seen = 0.0;
                int64_t rows = 0;
                naive_importance(&w, want, b, h);
                for (int64_t I = 0; I < w.nq; I++) {
                    double sum = 0.0, row = 0.0;
                    int64_t v = 0;
                    for (int64_t j = 0; j < w.nk; j++) {
                        const double x = want[I * w.nk + j];
                        if (fabs(x - (double)got[I * w.nk + j]) > 1e-5)
                            fail_msg("importance %g, expected %g: %s", (double)got[I * w.nk + j], x,
                                     w.name);
                        sum += (double)got[I * w.nk + j];
                        v += w.seen[(b * w.nq + I) * w.nk + j];
                        if (x > 0.0) row -= x * log(x);
                    }
                    /* 0: no sample of the block sees a key */
                    if (v)
                        assert_true(fabs(sum - 1.0) < 1e-5 || sum == 0.0);
                    else
                        assert_true(sum == 0.0);
                    if (v > 1) {
                        e += row / log((double)v);
                        rows++;
                    }
                    seen += (double)v;
                }
                assert_true(fabs(entropy[b * w.Hq + h] - (rows ? e / (double)rows : 1.0)) < 1e-5);
                /* budget >= 1 in fixed mode is the full mask */
                const int64_t total = existing ? (int64_t)floor(
                                                     (double)k[h] * seen / (double)existing + 0.5)
                                               : 0;
                for (int64_t I = 0; I < w.nq; I++) {
                    const row_view v = view_row(&w, mask, want + I * w.nk, b, h, I);
                    check_row(&w, &v, 1e-5);
                }
                check_counts(&w, mask, want, b, h, total, 1e-5);
            }
        }
        free(imp);
        free(entropy);
        free(want);
        free(mask);
        world_free(&w);
    }
    esa_ctx_free(ctx);
}

/* ---------------------------------------------------------------- rf_v2 */

static void rf_v2_reference(void **state)
{
    esa_rng r = { kit_seed("rf_v2_reference") };
    esa_ctx *ctx = reference_ctx();
    (void)state;
    for (int round = 0; round < 80; round++) {
        world w;
        world_make(&w, &r, ctx, ESA_SELECT_RF_V2, ESA_MODE_FIXED);
        double *score = malloc((size_t)(w.nq * w.nk) * sizeof *score);
        uint8_t *mask = kit_select_bytes(ctx, &w.q.view, &w.k.view, &w.p);
        for (int64_t b = 0; b < w.B; b++)
            for (int64_t h = 0; h < w.Hq; h++) {
                int64_t total = 0;
                naive_means(&w, score, b, h);
                for (int64_t I = 0; I < w.nq; I++) {
                    const row_view v = view_row(&w, mask, score + I * w.nk, b, h, I);
                    check_row(&w, &v, 1e-5);
                    const int64_t keep = (int64_t)ceil((double)v.visible * w.p.budget);
                    total += v.visible ? (keep > 1 ? keep : 1) : 0;
                }
                check_counts(&w, mask, score, b, h, total, 1e-5);
            }
        free(score);
        free(mask);
        world_free(&w);
    }
    esa_ctx_free(ctx);
}

static void random_reference(void **state)
{
    esa_rng r = { kit_seed("random_reference") };
    esa_ctx *ctx = reference_ctx();
    (void)state;
    for (int round = 0; round < 80; round++) {
        world w;
        world_make(&w, &r, ctx, ESA_SELECT_RANDOM, ESA_MODE_FIXED);
        /* all equal: only counts and forced blocks are checked */
        double *score = calloc((size_t)(w.nq * w.nk), sizeof *score);
        uint8_t *mask = kit_select_bytes(ctx, &w.q.view, &w.k.view, &w.p);
        for (int64_t b = 0; b < w.B; b++)
            for (int64_t h = 0; h < w.Hq; h++) {
                int64_t total = 0;
                for (int64_t I = 0; I < w.nq; I++) {
                    const row_view v = view_row(&w, mask, score + I * w.nk, b, h, I);
                    check_row(&w, &v, 1e-5);
                    const int64_t keep = (int64_t)floor((double)v.visible * w.p.budget + 0.5);
                    total += v.visible ? (keep > 1 ? keep : 1) : 0;
                }
                check_counts(&w, mask, score, b, h, total, 1e-5);
            }
        free(score);
        free(mask);
        world_free(&w);
    }
    esa_ctx_free(ctx);
}

/* ---------------------------------------------------------------- ada_bsa */

static void ada_fixed_reference(void **state)
{
    static const double thresholds[] = { 0.0, 0.5, 0.9, 0.999, 1.0, 1.5 };
    esa_rng r = { kit_seed("ada_fixed_reference") };
    esa_ctx *ctx = reference_ctx();
    (void)state;
    for (int round = 0; round < 80; round++) {
        world w;
        world_make(&w, &r, ctx, ESA_SELECT_ADA_BSA, ESA_MODE_FIXED);
        w.p.scale = 1.0 / sqrt((double)w.D);
        w.p.cdf_threshold = thresholds[esa_rng_below(&r, 6)];
        for (int64_t b = 0; b < w.B; b++) /* sink and last block are forced too */
            for (int64_t I = 0; I < w.nq; I++) {
                uint8_t *f = w.forced + (b * w.nq + I) * w.nk;
                const uint8_t *s = w.seen + (b * w.nq + I) * w.nk;
                if (w.p.keep_sink && s[0]) f[0] = 1;
                const int64_t last = (w.kv_len[b] + w.p.block_k - 1) / w.p.block_k - 1;
                if (w.p.keep_recent && !w.p.causal && last >= 0 && s[last]) f[last] = 1;
            }
        double *score = malloc((size_t)(w.nq * w.nk) * sizeof *score);
        uint8_t *mask = kit_select_bytes(ctx, &w.q.view, &w.k.view, &w.p);
        for (int64_t b = 0; b < w.B; b++)
            for (int64_t h = 0; h < w.Hq; h++) {
                int64_t seen = 0, kept = 0, least = 0;
                naive_ada(&w, score, b, h);
                for (int64_t I = 0; I < w.nq; I++) {
                    const row_view v = view_row(&w, mask, score + I * w.nk, b, h, I);
                    double mass = 0.0, total = 0.0, smallest = INFINITY;
                    check_row(&w, &v, 1e-5);
                    seen += v.visible;
                    kept += v.kept;
                    least += v.held;
                    for (int64_t j = 0; j < w.nk; j++) {
                        total += v.score[j];
                        if (v.keep[j]) mass += v.score[j];
                        if (v.keep[j] && !v.forced[j] && v.score[j] < smallest)
                            smallest = v.score[j];
                    }
                    if (w.p.cdf_threshold >= 1.0 || v.visible == 0 || v.kept <= v.held + 1)
                        continue;
                    /* without the last block the threshold was not reached; with it, it is - unless
                     * the cap cut */
                    if (mass - smallest >= w.p.cdf_threshold * total + 1e-5 * total)
                        fail_msg("one block too many: %s", w.name);
                    if (w.p.budget >= 1.0 && mass < w.p.cdf_threshold * total - 1e-5 * total)
                        fail_msg("threshold not reached: %s", w.name);
                }
                const int64_t total = (int64_t)floor(w.p.budget * (double)seen + 0.5);
                if (w.p.cdf_threshold >= 1.0) check_counts(&w, mask, score, b, h, total, 1e-5);
                /* a best block beside forced ones */
                else
                    assert_true(kept <= (total > least ? total : least) + w.nq);
            }
        free(score);
        free(mask);
        world_free(&w);
    }
    esa_ctx_free(ctx);
}

/* The original's rule written down once more, from sorted doubles. nudge shifts the CDF target, to
 * find fragile rows. */
static void naive_ada_rule(uint8_t *keep, const double *score, int64_t A,
                           const esa_select_params *p, double nudge)
{
    double v[MAX_BLOCKS + 32] = { 0 }, total = 0.0, cut = 0.0;
    const float th = (float)p->cdf_threshold, share = (float)p->budget;
    const int32_t drop_last = p->keep_recent || !p->causal;
    int64_t pos = A;
    const int64_t P = (A + 31) / 32 * 32;
    memset(keep, 0, MAX_BLOCKS);
    if (p->causal && A <= 2) {
        memset(keep, 1, (size_t)A);
        return;
    }
    for (int64_t j = 0; j < A; j++)
        if (!(j == 0 && p->keep_sink) && !(j == A - 1 && drop_last)) v[j] = score[j];
    for (int64_t a = 0; a < P; a++) {
        total += v[a];
        for (int64_t b = a + 1; b < P; b++)
            if (v[b] > v[a]) {
                const double t = v[a];
                total += v[b] - v[a];
                v[a] = v[b];
                v[b] = t;
            }
    }
    if ((double)th < 1.0) {
        const double target = (double)th * total * (1.0 + nudge);
        double acc = 0.0;
        int64_t first = 0;
        for (int64_t c = 0; c < P; c += 16) {
            double sum = 0.0;
            for (int64_t i = c; i < c + 16; i++) sum += v[i];
            if (acc + sum > target) {
                first = c;
                break;
            }
            acc += sum;
        }
        for (pos = first; pos < first + 15; pos++) {
            acc += v[pos];
            if (acc >= target) break;
        }
        cut = v[pos];
    }
    if (A >= 10 && (float)pos > (float)A * share) {
        int64_t top = (int64_t)((float)A * share);
        cut = v[(top > 1 ? top : 1) - 1];
    }
    for (int64_t j = 0; j < A; j++)
        if (!(j == 0 && p->keep_sink) && !(j == A - 1 && drop_last))
            keep[j] = score[j] > cut - 1e-5 + nudge;
    if (A > 0) keep[0] = 1;
    if (A > 0 && drop_last) keep[A - 1] = 1;
}

static void ada_compat_reference(void **state)
{
    static const double thresholds[] = { 0.0, 0.3, 0.8, 0.97, 1.0 };
    esa_rng r = { kit_seed("ada_compat_reference") };
    esa_ctx *ctx = reference_ctx();
    (void)state;
    for (int round = 0; round < 60; round++) {
        world w;
        world_make(&w, &r, ctx, ESA_SELECT_ADA_BSA, ESA_MODE_COMPAT);
        if (w.p.causal && w.Nq != w.Nk) {
            world_free(&w);
            continue;
        }
        w.p.scale = 1.0 / sqrt((double)w.D);
        w.p.cdf_threshold = thresholds[esa_rng_below(&r, 5)];
        double *score = malloc((size_t)(w.nq * w.nk) * sizeof *score);
        uint8_t *mask = kit_select_bytes(ctx, &w.q.view, &w.k.view, &w.p);
        for (int64_t b = 0; b < w.B; b++)
            for (int64_t h = 0; h < w.Hq; h++) {
                naive_ada(&w, score, b, h);
                for (int64_t I = 0; I < w.nq; I++) {
                    const row_view v = view_row(&w, mask, score + I * w.nk, b, h, I);
                    uint8_t want[3][MAX_BLOCKS];
                    assert_true(v.visible <= MAX_BLOCKS);
                    naive_ada_rule(want[0], v.score, v.visible, &w.p, 0.0);
                    naive_ada_rule(want[1], v.score, v.visible, &w.p, 1e-5);
                    naive_ada_rule(want[2], v.score, v.visible, &w.p, -1e-5);
                    for (int64_t j = 0; j < w.nk && j < MAX_BLOCKS; j++)
                        if (v.keep[j] != want[0][j] && v.keep[j] != want[1][j] &&
                            v.keep[j] != want[2][j])
                            fail_msg("row %d block %d is %d: %s", (int)I, (int)j, v.keep[j],
                                     w.name);
                }
            }
        free(score);
        free(mask);
        world_free(&w);
    }
    esa_ctx_free(ctx);
}

/* The selectors that score tokens, with bf16 products over AMX tiles in plain C. */
static void over_tiles(void **state)
{
    kernels = tiles_emulated(0);
    entropy_reference(state);
    ada_fixed_reference(state);
    ada_compat_reference(state);
    kernels = NULL;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(entropy_reference),    cmocka_unit_test(rf_v2_reference),
        cmocka_unit_test(random_reference),     cmocka_unit_test(ada_fixed_reference),
        cmocka_unit_test(ada_compat_reference), cmocka_unit_test(over_tiles),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
