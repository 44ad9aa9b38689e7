/* schedule.h - at which sparse steps of a layer a new mask, or a new order, is made.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The sparse steps of a layer are counted from 0. A schedule (refresh_every, order_every) names
 * some of them:
 *
 *     N > 0              0, N, 2N ..
 *     0                  0
 *     ESA_REFRESH_EARLY  0 and floor(steps / 8), floor(steps / 4), floor(steps / 2), where steps is
 *                        the number of sparse steps of the layer in the whole run
 *
 * Something is made at the first step that reaches or passes one of them. So a step that is left
 * out delays what it should have made to the next step that runs.
 *
 * Sessions, and the solver that predicts what they spend, use the same functions. */
#ifndef ESA_RULES_SCHEDULE_H
#define ESA_RULES_SCHEDULE_H

#include "base/inline.h"
#include "esa/esa_work.h"

/* 1 if every is a schedule. */
ESA_INLINE int32_t esa_schedule_valid(int32_t every)
{
    return every >= 0 || every == ESA_REFRESH_EARLY;
}

/* The last step, up to n, that the schedule names. steps: as above; only EARLY reads it. */
ESA_INLINE int32_t esa_schedule_last(int32_t every, int32_t n, int32_t steps)
{
    if (every > 0) return n - n % every;
    int32_t last = 0;
    for (int32_t part = 8; every == ESA_REFRESH_EARLY && part > 1; part /= 2)
        if (steps / part <= n) last = steps / part;
    return last;
}

/* 1 if something made at step `at` must be made anew at step n. at -1: nothing is made yet. */
ESA_INLINE int32_t esa_schedule_due(int32_t every, int32_t n, int32_t steps, int32_t at)
{
    return esa_schedule_last(every, n, steps) > at;
}

/* 1 if step n makes something when no step is left out. */
ESA_INLINE int32_t esa_schedule_makes(int32_t every, int32_t n, int32_t steps)
{
    return esa_schedule_due(every, n, steps, n - 1);
}

#endif
