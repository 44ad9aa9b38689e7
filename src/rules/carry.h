/* carry.h - how a carried difference is stored (esa_carry.h).
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

#endif
