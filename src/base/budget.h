/* budget.h - how many blocks each head may keep: pure functions of the heads' entropies, for the CPU and the GPU.
 * SPDX-License-Identifier: Apache-2.0
 *
 * b_h = clamp(s E_h, b_min, 1), one scale s for all, such that mean_h b_h = budget; then whole blocks by largest remainder, so
 * that sum_h k_h = max(H, round(budget nk H)) exactly. Everything is deterministic; ties go to the lower head. */
#ifndef ESA_BASE_BUDGET_H
#define ESA_BASE_BUDGET_H

#include <math.h>
#include "base/inline.h"

/* What is known about the scale while it is being found. */
typedef struct esa_heads {
    const double *entropy;          /* [H] */
    int64_t H;
    double low;                     /* b_min */
} esa_heads;

/* Entropies come from outside (files, callers): out of range is clamped, NaN counts as fully dispersed. */
ESA_INLINE double esa_head_entropy(const esa_heads *x, int64_t h)
{
    const double e = x->entropy[h];
    return !(e <= 1.0) ? 1.0 : e < 0.0 ? 0.0 : e;
}

ESA_INLINE double esa_head_clamp(double b, double low) { return b < low ? low : b > 1.0 ? 1.0 : b; }

ESA_INLINE double esa_heads_sum(const esa_heads *x, double s)
{
    double sum = 0.0;
    for (int64_t h = 0; h < x->H; h++) sum += esa_head_clamp(esa_mul(s, esa_head_entropy(x, h)), x->low);
    return sum;
}

/* The scale at which the budgets sum to `want`, low*H <= want <= what the heads with E > 0 can take. Bisection finds which
 * heads are clamped; for the free ones the scale is then one division, exact to rounding. */
ESA_INLINE double esa_heads_scale(const esa_heads *x, double want, double e_min)
{
    double lo = 0.0, hi = 1.0 / e_min;
    for (int32_t it = 0; it < 128 && lo < hi; it++) {
        const double mid = lo + (hi - lo) / 2;
        if (mid <= lo || mid >= hi) break;
        if (esa_heads_sum(x, mid) < want) lo = mid;
        else hi = mid;
    }
    double rest = want, free_sum = 0.0;
    for (int64_t h = 0; h < x->H; h++) {
        const double e = esa_head_entropy(x, h), b = hi * e;
        if (b <= x->low) rest -= x->low;
        else if (b >= 1.0) rest -= 1.0;
        else free_sum += e;
    }
    return free_sum > 0.0 && rest > 0.0 ? rest / free_sum : hi;
}

/* Sift down in a min-heap of n doubles. */
ESA_INLINE void esa_sift_down(double *a, int64_t i, int64_t n)
{
    for (int64_t c = 2 * i + 1; c < n; i = c, c = 2 * i + 1) {
        if (c + 1 < n && a[c + 1] < a[c]) c++;
        if (a[i] <= a[c]) return;
        const double t = a[i];  a[i] = a[c];  a[c] = t;
    }
}

/* Descending order in place: heapsort, because the C library's qsort may allocate. */
ESA_INLINE void esa_sort_down(double *a, int64_t n)
{
    for (int64_t i = n / 2; i-- > 0;) esa_sift_down(a, i, n);
    for (int64_t end = n - 1; end > 0; end--) {
        const double t = a[0];  a[0] = a[end];  a[end] = t;
        esa_sift_down(a, 0, end);
    }
}

typedef struct esa_shares {
    esa_heads x;
    double s, zero_share;           /* scale; share of heads with E = 0 where the others are full, else -1 */
    double equal;                   /* >= 0: every head gets this */
    int64_t nk;
} esa_shares;

ESA_INLINE double esa_head_target(const esa_shares *g, int64_t h)
{
    if (g->equal >= 0.0) return esa_mul(g->equal, (double)g->nk);
    const double e = esa_head_entropy(&g->x, h);
    const double b = g->zero_share >= 0.0 ? (e > 0.0 ? 1.0 : g->zero_share) : esa_head_clamp(esa_mul(g->s, e), g->x.low);
    return esa_mul(b, (double)g->nk);
}

/* Whole part within 1..nk, and what is left over; a head that is full wants nothing more. */
ESA_INLINE int64_t esa_head_whole(const esa_shares *g, int64_t h, double *left)
{
    const double t = esa_head_target(g, h);
    int64_t w = (int64_t)floor(t);
    *left = t - (double)w;
    if (w < 1) { w = 1; *left = 0.0; }
    if (w >= g->nk) { w = g->nk; *left = -1.0; }
    return w;
}

/* k[H] of nk blocks each, sum exact. scratch: H doubles. */
ESA_INLINE void esa_budget_heads(int32_t *k, const double *entropy, int64_t H, int64_t nk, double budget, double *scratch)
{
    if (!(budget > 0.0)) budget = 0.0;
    if (budget > 1.0) budget = 1.0;
    int64_t total = (int64_t)floor(esa_mul(esa_mul(budget, (double)nk), (double)H) + 0.5);
    total = esa_min64(esa_max64(total, H), H * nk);

    esa_shares g = { { entropy, H, budget < 1.0 / (double)nk ? budget : 1.0 / (double)nk }, 0.0, -1.0, -1.0, nk };
    double e_min = 2.0, e_max = 0.0;
    int64_t positive = 0;
    for (int64_t h = 0; h < H; h++) {
        const double e = esa_head_entropy(&g.x, h);
        if (e > e_max) e_max = e;
        if (e > 0.0) { positive++;  if (e < e_min) e_min = e; }
    }
    const double want = esa_mul(budget, (double)H), zeros = (double)(H - positive);
    if (positive == 0 || (positive == H && e_min == e_max) || g.x.low >= budget) g.equal = budget;
    else if (want >= (double)positive + esa_mul(zeros, g.x.low) && positive < H) g.zero_share = (want - (double)positive) / zeros;
    else g.s = esa_heads_scale(&g.x, want, e_min);

    int64_t sum = 0;
    for (int64_t h = 0; h < H; h++) {
        k[h] = (int32_t)esa_head_whole(&g, h, &scratch[h]);
        sum += k[h];
    }
    if (sum < total) {
        esa_sort_down(scratch, H);
        const int64_t missing = esa_min64(total - sum, H);
        const double bar = scratch[missing - 1];        /* the missing-th largest remainder */
        int64_t above = 0, at_bar = 0;
        for (int64_t h = 0; h < H; h++) above += scratch[h] > bar;
        for (int64_t h = 0; h < H; h++) {
            double left;
            esa_head_whole(&g, h, &left);
            if (left < bar || k[h] >= nk || (left == bar && at_bar >= missing - above)) continue;
            at_bar += left == bar;
            k[h]++;
            sum++;
        }
    }
    while (sum < total)                                 /* rounding at the clamps only: one more each, lower heads first */
        for (int64_t h = 0; h < H && sum < total; h++)
            if (k[h] < nk) { k[h]++;  sum++; }
    for (int64_t h = H; sum > total && h-- > 0;)        /* rounding only: take back from the last head that can give */
        if (k[h] > 1) { k[h]--;  sum--; }
}

#endif
