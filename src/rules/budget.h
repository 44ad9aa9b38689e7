/* budget.h - how many blocks each head keeps, from the entropies of the heads.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The share of head h is b_h = clamp(s E_h, b_min, 1), with one scale s such that mean_h b_h =
 * budget. Shares become whole blocks by largest remainder, so sum_h k_h = max(H, round(budget nk
 * H)) exactly. Ties go to the lower head.
 *
 * Pure functions for the CPU and the GPU. The CPU calls esa_budget_heads; the GPU takes the same
 * steps with many threads. */
#ifndef ESA_RULES_BUDGET_H
#define ESA_RULES_BUDGET_H

#include <math.h>
#include "base/inline.h"

/* Inputs and intermediate values of the split. */
typedef struct esa_heads {
    const double *entropy; /* [H] */
    int64_t H, nk, total;  /* total: blocks of all heads */
    double low;            /* b_min */
    double want;           /* sum of the shares */
    double equal;          /* >= 0: every head gets this share */
    double zero_share;     /* >= 0: heads with E > 0 are full, the others get this share */
    /* > 0: neither of the two cases holds. Every head with E > 0 is full at this scale, so s is
     * below it. */
    double most;
    double s; /* the scale, once it is found */
} esa_heads;

/* Clamps an entropy to 0 .. 1. Entropies come from files and callers, so any value is possible; NaN
 * counts as 1 (fully dispersed). */
ESA_INLINE double esa_head_entropy(const esa_heads *x, int64_t h)
{
    const double e = x->entropy[h];
    return !(e <= 1.0) ? 1.0 : e < 0.0 ? 0.0 : e;
}

ESA_INLINE double esa_head_clamp(double b, double low) { return b < low ? low : b > 1.0 ? 1.0 : b; }

ESA_INLINE esa_heads esa_heads_open(const double *entropy, int64_t H, int64_t nk, double budget)
{
    esa_heads x = { entropy, H, nk, 0, 0.0, 0.0, -1.0, -1.0, 0.0, 0.0 };
    if (!(budget > 0.0)) budget = 0.0;
    if (budget > 1.0) budget = 1.0;
    x.total = (int64_t)floor(esa_mul(esa_mul(budget, (double)nk), (double)H) + 0.5);
    x.total = esa_min64(esa_max64(x.total, H), H * nk);
    x.low = budget < 1.0 / (double)nk ? budget : 1.0 / (double)nk;
    x.want = esa_mul(budget, (double)H);
    double e_min = 2.0, e_max = 0.0;
    int64_t positive = 0;
    for (int64_t h = 0; h < H; h++) {
        const double e = esa_head_entropy(&x, h);
        if (e > e_max) e_max = e;
        if (e > 0.0) {
            positive++;
            if (e < e_min) e_min = e;
        }
    }
    const double zeros = (double)(H - positive);
    if (positive == 0 || (positive == H && e_min == e_max) || x.low >= budget)
        x.equal = budget;
    else if (x.want >= (double)positive + esa_mul(zeros, x.low) && positive < H)
        x.zero_share = (x.want - (double)positive) / zeros;
    else
        x.most = 1.0 / e_min;
    return x;
}

/* Sum of the shares at scale s. It never falls as s grows, even with rounding. */
ESA_INLINE double esa_heads_sum(const esa_heads *x, double s)
{
    double sum = 0.0;
    for (int64_t h = 0; h < x->H; h++)
        sum += esa_head_clamp(esa_mul(s, esa_head_entropy(x, h)), x->low);
    return sum;
}

/* The smallest scale at which the shares sum to want. Call it if most > 0; then low*H < want <= the
 * most that heads with E > 0 can take. */
ESA_INLINE double esa_heads_search(const esa_heads *x)
{
    double lo = 0.0, hi = x->most;
    /* Ends when lo and hi are neighbours: about 60 steps, plus one for each factor 2 in hi. */
    for (;;) {
        const double mid = lo + (hi - lo) / 2;
        if (mid <= lo || mid >= hi) return hi;
        if (esa_heads_sum(x, mid) < x->want)
            lo = mid;
        else
            hi = mid;
    }
}

/* Computes the exact scale. The search has found which heads are clamped; one division gives the
 * scale of the others. */
ESA_INLINE void esa_heads_settle(esa_heads *x, double found)
{
    double rest = x->want, free_sum = 0.0;
    for (int64_t h = 0; h < x->H; h++) {
        const double e = esa_head_entropy(x, h), b = esa_mul(found, e);
        if (b <= x->low)
            rest -= x->low;
        else if (b >= 1.0)
            rest -= 1.0;
        else
            free_sum += e;
    }
    x->s = free_sum > 0.0 && rest > 0.0 ? rest / free_sum : found;
}

/* Whole blocks of head h, 1 .. nk, and the remainder in *left. A full head has remainder -1. */
ESA_INLINE int64_t esa_head_whole(const esa_heads *x, int64_t h, double *left)
{
    const double e = esa_head_entropy(x, h);
    const double b = x->equal >= 0.0       ? x->equal
                     : x->zero_share < 0.0 ? esa_head_clamp(esa_mul(x->s, e), x->low)
                     : e > 0.0             ? 1.0
                                           : x->zero_share;
    const double t = esa_mul(b, (double)x->nk);
    int64_t w = (int64_t)floor(t);
    *left = t - (double)w;
    if (w < 1) {
        w = 1;
        *left = 0.0;
    }
    if (w >= x->nk) {
        w = x->nk;
        *left = -1.0;
    }
    return w;
}

/* 1 if head h gets one more block: it is not full and is among the first `missing` heads by
 * remainder. left[H]. */
ESA_INLINE int32_t esa_head_wins(const double *left, int64_t H, int64_t h, int64_t missing)
{
    int64_t before = 0;
    for (int64_t i = 0; i < H; i++) before += left[i] > left[h] || (left[i] == left[h] && i < h);
    return before < missing && left[h] >= 0.0;
}

/* Corrects what rounding at the clamps left: adds blocks from the first head on, or takes them from
 * the last head on. sum: blocks the heads hold now. */
ESA_INLINE void esa_heads_even_out(const esa_heads *x, int32_t *k, int64_t sum)
{
    while (sum < x->total)
        for (int64_t h = 0; h < x->H && sum < x->total; h++)
            if (k[h] < x->nk) {
                k[h]++;
                sum++;
            }
    for (int64_t h = x->H; sum > x->total && h-- > 0;)
        if (k[h] > 1) {
            k[h]--;
            sum--;
        }
}

/* Fills k[H], blocks per head out of nk, with the exact sum. scratch: H doubles. */
ESA_INLINE void esa_budget_heads(int32_t *k, const double *entropy, int64_t H, int64_t nk,
                                 double budget, double *scratch)
{
    esa_heads x = esa_heads_open(entropy, H, nk, budget);
    if (x.most > 0.0) esa_heads_settle(&x, esa_heads_search(&x));
    int64_t sum = 0;
    for (int64_t h = 0; h < H; h++) {
        k[h] = (int32_t)esa_head_whole(&x, h, &scratch[h]);
        sum += k[h];
    }
    const int64_t missing = x.total - sum;
    for (int64_t h = 0; h < H && missing > 0; h++)
        if (esa_head_wins(scratch, H, h, missing)) {
            k[h]++;
            sum++;
        }
    esa_heads_even_out(&x, k, sum);
}

#endif
