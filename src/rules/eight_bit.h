/* eight_bit.h - how 8-bit attention rounds its operands. docs/precision.md has the whole
 * arithmetic.
 * SPDX-License-Identifier: Apache-2.0
 *
 *   q, k   int8: code = round(x / s), s = largest magnitude of a row of q, or a block of k, / 127
 *   P      E4M3 of 448 exp2(logit - m)
 *   v      E4M3 of (v - centre) / s, s = largest magnitude of a channel / 448
 *
 * GPUs without products of E4M3 round P and v to f16 instead, at the same scales. */
#ifndef ESA_RULES_EIGHT_BIT_H
#define ESA_RULES_EIGHT_BIT_H

#include <math.h>
#include "base/half.h"
#include "base/inline.h"

#define ESA_EIGHT_ROWS   128       /* keys of a dense block, and of a stage of means */
#define ESA_EIGHT_STEP   64        /* keys, or means, of a stage of the sm80 and sm89 kernels */
#define ESA_EIGHT_CODE   127.0f    /* largest code of q and k */
#define ESA_EIGHT_TOP    448.0f    /* largest E4M3 */
#define ESA_EIGHT_LITTLE 0x1p-100f /* magnitudes below count as 0 */

/* The scale of elements with this largest magnitude, whose largest code is `code`. The magnitude is
 * NaN if an element is not finite, and then so is the scale. */
ESA_INLINE float esa_eight_scale(float largest, float code)
{
    return largest < ESA_EIGHT_LITTLE ? 1.0f : largest / code;
}

/* What elements are multiplied by before they are rounded; 0 if the scale is NaN. */
ESA_INLINE float esa_eight_inverse(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

/* The larger magnitude; NaN if x is not finite, or if `largest` is NaN already. */
ESA_INLINE float esa_eight_larger(float largest, float x)
{
    const float size = fabsf(x);
    if (!(size < INFINITY)) return (float)NAN;
    return size > largest ? size : largest;
}

/* Code of an element of q or k, as a float. */
ESA_INLINE float esa_eight_code(float x, float inverse)
{
    if (inverse == 0.0f) return 0.0f; /* also where x is not finite */
    const float code = rintf(x * inverse);
    return code > ESA_EIGHT_CODE ? ESA_EIGHT_CODE : code < -ESA_EIGHT_CODE ? -ESA_EIGHT_CODE : code;
}

/* P rounded to E4M3, or to f16. */
ESA_INLINE float esa_eight_weight(float p, int32_t f16)
{
    return f16 ? esa_round_to(p, ESA_DTYPE_F16) : esa_round_f8(p);
}

/* A value of v rounded to E4M3, or to f16, in units of its channel's scale. */
ESA_INLINE float esa_eight_value(float x, float inverse, int32_t f16)
{
    if (!(fabsf(x) < INFINITY)) return (float)NAN;
    return esa_eight_weight(x * inverse, f16);
}

#endif
