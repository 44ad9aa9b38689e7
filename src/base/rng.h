/* rng.h - a small counter-free generator (splitmix64) for random masks and synthetic data; the same numbers everywhere.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_BASE_RNG_H
#define ESA_BASE_RNG_H

#include <stdint.h>

typedef struct esa_rng { uint64_t state; } esa_rng;

static inline uint64_t esa_rng_next(esa_rng *r)
{
    uint64_t z = (r->state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Uniform in [0, n), n >= 1; the bias of the multiply-shift is below 2^-32 for n < 2^32. */
static inline uint32_t esa_rng_below(esa_rng *r, uint32_t n) { return (uint32_t)(((esa_rng_next(r) >> 32) * n) >> 32); }

/* Uniform in [0, 1) with 24 bits. */
static inline float esa_rng_unit(esa_rng *r) { return (float)(esa_rng_next(r) >> 40) * 0x1p-24f; }

#endif
