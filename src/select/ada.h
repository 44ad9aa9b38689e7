/* ada.h - the row rules of ada_bsa. Private to src/select.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_SELECT_ADA_H
#define ESA_SELECT_ADA_H

#include "rules/compat_rows.h"
#include "select/rules.h"

/* Fixed mode: forced blocks first, then the best until cdf_threshold of the row's mass or the quota
 * is reached. */
void esa_ada_pick_fixed(esa_picker *picker, const esa_rules *rules, const float *score, int64_t i,
                        int64_t quota, double threshold, int64_t nk);

#endif
