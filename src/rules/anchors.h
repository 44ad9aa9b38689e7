/* anchors.h - at which steps of a run differences are made that later steps carry.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The anchors of a run are a list of steps, ascending. A layer makes its mask, its order and its
 * difference at its first sparse step, and at the first sparse step that reaches or passes an
 * anchor. So an anchor that is left out or runs dense moves to the next sparse step.
 *
 * Sessions, and the solver that predicts what they spend, use the same functions. */
#ifndef ESA_RULES_ANCHORS_H
#define ESA_RULES_ANCHORS_H

#include "base/inline.h"

/* Number of anchors that suits a run of so many steps; 0: it is too short to gain from carry.
 * branches: those of a step that share a difference, 0 if unknown. At an anchor one of them runs
 * dense. A single branch pays for the whole step, so its anchors must be few in many steps. */
ESA_INLINE int32_t esa_anchors_suit(int32_t steps, int32_t branches)
{
    if (steps < (branches == 1 ? 20 : 6)) return 0;
    return steps < 12 ? 3 : steps < 20 ? 4 : steps < 30 ? 5 : 6;
}

/* Step of anchor i of n. As shares of the run, the anchors lie on a curve with the points 0, 0.1,
 * 0.2, 0.35, 0.55, 0.75 and 1 at i / n = 0, 1/6, 2/6 .. 1. */
ESA_INLINE int32_t esa_anchor_step(int32_t i, int32_t n, int32_t steps)
{
    static const double share[] = { 0, 0.1, 0.2, 0.35, 0.55, 0.75, 1, 1 };
    const double at = 6.0 * i / n;
    const int32_t j = (int32_t)at;
    return (int32_t)((share[j] + (at - j) * (share[j + 1] - share[j])) * steps + 0.5);
}

/* Writes n anchors, n <= steps. Where the curve gives a step twice, the next free one is taken. */
ESA_INLINE void esa_anchors_place(int32_t *anchors, int32_t n, int32_t steps)
{
    for (int32_t i = 0; i < n; i++) {
        const int32_t step = esa_anchor_step(i, n, steps), most = steps - n + i,
                      least = i ? anchors[i - 1] + 1 : 0;
        anchors[i] = step < least ? least : step > most ? most : step;
    }
}

/* The last anchor up to a step; -1: none. */
ESA_INLINE int32_t esa_anchors_last(const int32_t *anchors, int32_t n, int32_t step)
{
    int32_t last = -1;
    for (int32_t i = 0; i < n && anchors[i] <= step; i++) last = anchors[i];
    return last;
}

/* 1 if what was made at step `at` (-1: nothing yet) must be made anew at a step. */
ESA_INLINE int32_t esa_anchors_due(const int32_t *anchors, int32_t n, int32_t step, int32_t at)
{
    return at < 0 || esa_anchors_last(anchors, n, step) > at;
}

#endif
