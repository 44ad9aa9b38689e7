/* ada_pick.c - how ada_bsa chooses the blocks of one row in fixed mode. rules/compat_rows.h has the
 * choice of the original.
 * SPDX-License-Identifier: Apache-2.0 */
#include "select/ada.h"

void esa_ada_pick_fixed(esa_picker *p, const esa_rules *rules, const float *score, int64_t i,
                        int64_t quota, double threshold, int64_t nk)
{
    const int64_t v = rules->visible[i];
    if (threshold < 1.0 && !rules->dense[i]) {
        const int64_t forced = esa_rules_forced(p->keep, rules, i, nk);
        double total = 0.0, mass = 0.0;
        int64_t n = 0, taken = 0;
        for (int64_t j = 0; j < v; j++) {
            total += (double)score[j];
            if (p->keep[j])
                mass += (double)score[j];
            else
                p->key[n++] = esa_rank_key(score[j], j);
        }
        esa_sort_keys(p->key, n);
        while (taken < n && !(mass >= threshold * total))
            mass += (double)score[esa_rank_index(p->key[taken++])];
        quota = esa_min64(quota, forced + taken);
    }
    esa_rules_pick(p, rules, score, i, quota, nk);
}
