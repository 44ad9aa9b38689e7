/* budget.c - how many blocks each head and each row keeps.
 * SPDX-License-Identifier: Apache-2.0
 *
 * rules/budget.h splits the budget between heads. This file spreads the total of a head over its
 * rows: dense rows keep every block they see, the others get the same share, and each row keeps at
 * least its forced blocks. Ties go to the lower row. */
#include "rules/budget.h"
#include "mask/mask.h"

void esa_budget_entropy(int32_t *k, const double *entropy, int64_t H, int64_t nk, double budget,
                        double *scratch)
{
    esa_budget_heads(k, entropy, H, nk, budget, scratch);
}

static int64_t spread_sum(const int32_t *visible, const int32_t *least, int64_t nq, double f)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < nq; i++)
        sum += esa_spread_quota(least[i], esa_spread_whole(visible[i], f));
    return sum;
}

void esa_budget_spread(int32_t *quota, const int32_t *visible, const int32_t *least, int64_t nq,
                       int64_t total)
{
    double lo = 0.0, hi = 1.0;
    if (spread_sum(visible, least, nq, hi) <= total) lo = hi;
    /* Finds the largest share f whose whole blocks fit into total. */
    for (int32_t it = 0; it < ESA_SPREAD_STEPS && lo < hi; it++) {
        const double mid = lo + (hi - lo) / 2;
        if (mid <= lo || mid >= hi) break;
        if (spread_sum(visible, least, nq, mid) <= total)
            lo = mid;
        else
            hi = mid;
    }
    int64_t left = total - spread_sum(visible, least, nq, lo);
    for (int64_t i = 0; i < nq; i++)
        quota[i] = (int32_t)esa_spread_quota(least[i], esa_spread_whole(visible[i], lo));
    /* Blocks that rounding left go to the first rows, one each. A row that holds more than its
     * share waits for the second turn. */
    for (int32_t turn = 0; turn < 2; turn++)
        for (int64_t i = 0; i < nq && left > 0; i++) {
            if (!esa_spread_takes(quota[i], visible[i], least[i], esa_spread_whole(visible[i], lo),
                                  turn))
                continue;
            quota[i]++;
            left--;
        }
}
