/* anchors.c - the anchors of a run: checks a list, or places them by the rule.
 * SPDX-License-Identifier: Apache-2.0 */
#include "rules/anchors.h"

#include <string.h>
#include "base/status.h"
#include "esa/esa_session.h"
#include "workplan/work_plan.h"

esa_status esa_anchors_check(esa_ctx *ctx, int32_t carry, const int32_t *list, int32_t count,
                             int32_t steps)
{
    if (carry < ESA_CARRY_AUTO || carry > steps)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "carry is %d, expected a number of anchors up to the %d steps of the run, "
                        "ESA_CARRY_OFF (%d) or ESA_CARRY_AUTO (%d)",
                        (int)carry, (int)steps, ESA_CARRY_OFF, ESA_CARRY_AUTO);
    if (count < 0 || count > steps || (count && !list))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "anchor_count is %d and anchors is %sNULL, expected 0 to %d steps",
                        (int)count, list ? "not " : "", (int)steps);
    if (count && carry == ESA_CARRY_OFF)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "anchors are given, but carry is ESA_CARRY_OFF: set it to ESA_CARRY_AUTO");
    for (int32_t i = 0; i < count; i++)
        if (list[i] < 0 || list[i] >= steps || (i && list[i] <= list[i - 1]))
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "anchor %d is step %d, expected ascending steps within 0 .. %d", (int)i,
                            (int)list[i], (int)steps - 1);
    return ESA_OK;
}

int32_t esa_anchors_of(int32_t *anchors, int32_t carry, const int32_t *list, int32_t count,
                       int32_t steps, int32_t branches)
{
    if (carry == ESA_CARRY_OFF || !count) return esa_carry_anchors(anchors, carry, steps, branches);
    memcpy(anchors, list, (size_t)count * sizeof *list);
    return count;
}

int32_t esa_carry_anchors(int32_t *anchors, int32_t carry, int32_t steps, int32_t branches)
{
    const int32_t n = carry == ESA_CARRY_AUTO ? esa_anchors_suit(steps, branches) : carry;
    if (n < 1 || n > steps) return 0;
    if (anchors) esa_anchors_place(anchors, n, steps);
    return n;
}

int32_t esa_carry_switch(int32_t *anchors, int32_t count, int32_t steps, int32_t first)
{
    int32_t k = 0;
    if (count < 1 || count >= steps || first < 0 || first >= steps) return count;
    while (k < count && anchors[k] < first) k++;
    if (k < count && anchors[k] == first) return count;
    memmove(anchors + k + 1, anchors + k, sizeof *anchors * (size_t)(count - k));
    anchors[k] = first;
    return count + 1;
}
