/* carry.h - how a carried difference is stored (esa_carry.h), and where its anchors are.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A row is the D values of one token and head. In E4M3 a row has one scale: its largest finite
 * magnitude over ESA_F8_MAX, so that value is exact. An element is code * scale.
 *
 * Pure functions for the CPU and the GPU. */
#ifndef ESA_RULES_CARRY_H
#define ESA_RULES_CARRY_H

#include "base/half.h"
#include "base/view.h"

/* Rows whose largest magnitude is below this are 0: the inverse of their scale could overflow. */
#define ESA_CARRY_LEAST 0x1p-100f

/* The scale of a row, from its largest finite magnitude; 0: all of the row is 0. */
ESA_INLINE float esa_carry_scale(float largest)
{
    return largest < ESA_CARRY_LEAST ? 0.0f : largest / ESA_F8_MAX;
}

/* What the elements of a row are multiplied by before they are rounded to E4M3. */
ESA_INLINE float esa_carry_inverse(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

/* An element of d, from the dense output and the sparse one, both rounded to the type of o. */
ESA_INLINE float esa_carry_difference(float dense, float sparse)
{
    const float d = dense - sparse;
    return d - d == 0.0f ? d : 0.0f; /* NaN and infinity do not stay */
}

/* Number of anchors that suits a run of so many steps; 0: it is too short to gain from carry. */
ESA_INLINE int32_t esa_carry_suits(int32_t steps)
{
    return steps < 4 ? 0 : steps < 6 ? 2 : steps < 12 ? 3 : steps < 20 ? 4 : steps < 30 ? 5 : 6;
}

/* Step of anchor i of n. As shares of the run they lie on a curve with the points 0, 0.1, 0.2,
 * 0.35, 0.55, 0.75 and 1 at i / n = 0, 1/6 .. 1. Equal steps, which only many anchors have, count
 * once. */
ESA_INLINE int32_t esa_carry_anchor(int32_t i, int32_t n, int32_t steps)
{
    static const double share[] = { 0, 0.1, 0.2, 0.35, 0.55, 0.75, 1, 1 };
    const double at = 6.0 * i / n;
    const int32_t j = (int32_t)at;
    const double x = share[j] + (at - j) * (share[j + 1] - share[j]);
    return (int32_t)(x * steps + 0.5);
}

#endif
