/* random.h - the normal numbers of torch's CPU generator, so that a seed gives the same noise here
 * and in diffusers.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     torch.randn(count, generator=torch.Generator("cpu").manual_seed(seed))
 *
 * A Mersenne twister (MT19937, Matsumoto and Nishimura 1998), seeded with the low 32 bits of the
 * seed. For 16 or more elements torch draws one 24-bit uniform per element and turns each 16 of
 * them into 16 normal numbers by Box-Muller; the first eight are u1, the others u2. If count is not
 * a multiple of 16, the last 16 elements are drawn again. For fewer than 16 elements it makes pairs
 * in f64 from 53-bit uniforms.
 *
 * The f32 logarithm, sine and cosine are polynomials, evaluated in the order of torch's x86 kernels
 * (AVX2 and AVX-512). The result has the same bits on every machine. (torch without AVX2 differs by
 * about 1e-6.) */
#ifndef ESA_MODEL_RANDOM_H
#define ESA_MODEL_RANDOM_H

#include <stdint.h>

typedef struct esa_torch_rng {
    uint32_t state[624];
    int32_t next;      /* 624: all are used */
    int32_t has_spare; /* 1: spare holds the second of a pair in f64 */
    double spare;
} esa_torch_rng;

void esa_torch_seed(esa_torch_rng *rng, uint64_t seed);
uint32_t esa_torch_next(esa_torch_rng *rng);
/* Fills out[count] as one call of torch.randn does; later calls continue the sequence. */
void esa_torch_randn(esa_torch_rng *rng, float *out, int64_t count);

/* The same in three steps, for count of 16 or more: begin draws the uniforms, normals turns groups
 * of 16 of them into normal numbers (groups first .. first + groups - 1 of count / 16; in any order
 * and in any thread), and end draws the last 16 again where count asks for it. */
void esa_torch_begin(esa_torch_rng *rng, float *out, int64_t count);
void esa_torch_normals(float *out, int64_t first, int64_t groups);
void esa_torch_end(esa_torch_rng *rng, float *out, int64_t count);

#endif
