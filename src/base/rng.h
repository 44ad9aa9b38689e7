/* rng.h - a small random generator (splitmix64) for random masks and synthetic data. It gives the
 * same numbers everywhere.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_BASE_RNG_H
#define ESA_BASE_RNG_H

#include "base/inline.h"

typedef struct esa_rng {
    uint64_t state;
} esa_rng;

ESA_INLINE uint64_t esa_rng_next(esa_rng *r)
{
    uint64_t z = (r->state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Uniform in [0, n), n >= 1. The bias of the multiply-shift is below 2^-32 for n < 2^32. */
ESA_INLINE uint32_t esa_rng_below(esa_rng *r, uint32_t n)
{
    return (uint32_t)(((esa_rng_next(r) >> 32) * n) >> 32);
}

/* Uniform in [0, 1) with 24 bits. */
ESA_INLINE float esa_rng_unit(esa_rng *r) { return (float)(esa_rng_next(r) >> 40) * 0x1p-24f; }

/* Number i of a bell curve with deviation 1: the sum of four uniform numbers. Its largest magnitude
 * is 3.46. All devices give the same bits. */
ESA_INLINE float esa_rng_bell(uint64_t seed, uint64_t i)
{
    esa_rng r = { seed + 0x9e3779b97f4a7c15u * i };
    const uint64_t z = esa_rng_next(&r);
    const int32_t sum = (int32_t)(z & 0xffff) + (int32_t)(z >> 16 & 0xffff) +
                        (int32_t)(z >> 32 & 0xffff) + (int32_t)(z >> 48);
    return (float)(sum - 131070) * (1.0f / 37837.0f);
}

/* The generator of one row of a random mask. */
ESA_INLINE esa_rng esa_rng_of_row(uint64_t seed, int32_t branch, int64_t row)
{
    esa_rng r = { seed };
    r.state = esa_rng_next(&r) ^ (uint64_t)(uint32_t)branch;
    r.state = esa_rng_next(&r) ^ (uint64_t)row;
    r.state = esa_rng_next(&r);
    return r;
}

/* The same generator after n more numbers. Its state is a counter. */
ESA_INLINE esa_rng esa_rng_ahead(esa_rng r, uint64_t n)
{
    r.state += 0x9e3779b97f4a7c15u * n;
    return r;
}

#endif
