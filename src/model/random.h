/* random.h - the normal numbers that torch's CPU generator gives, so that a seed means the same
 * noise here and in diffusers.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     torch.randn(count, generator=torch.Generator("cpu").manual_seed(seed))
 *
 * A Mersenne twister (MT19937, Matsumoto and Nishimura 1998) seeded with the low 32 bits of the
 * seed. From 16 elements on torch draws one 24-bit uniform per element and turns each 16 of them
 * into 16 normal numbers by Box-Muller, u1 being the first eight; when count is no multiple of 16
 * the last 16 elements are drawn anew. Below 16 elements it makes pairs in f64 from 53-bit
 * uniforms.
 *
 * The f32 logarithm, sine and cosine are polynomials evaluated in the order torch's x86 kernels
 * (AVX2 and AVX-512) evaluate them, so the result is equal bit for bit, on every machine. (torch
 * without AVX2 differs by some 1e-6.) */
#ifndef ESA_MODEL_RANDOM_H
#define ESA_MODEL_RANDOM_H

#include <stdint.h>

typedef struct esa_torch_rng {
    uint32_t state[624];
    int32_t next;      /* 624: used up */
    int32_t has_spare; /* the second of a pair in f64 waits */
    double spare;
} esa_torch_rng;

void esa_torch_seed(esa_torch_rng *rng, uint64_t seed);
uint32_t esa_torch_next(esa_torch_rng *rng);
/* out[count], as one call of torch.randn; calls follow one another as they do there. */
void esa_torch_randn(esa_torch_rng *rng, float *out, int64_t count);

#endif
