/* conv_leaf_plain.c - the convolution's inner loop for any processor: the reference.
 * SPDX-License-Identifier: Apache-2.0 */
#include "cpu/cpu.h"

/* Four floats side by side, so that the compiler can use the vectors that every processor of the
 * architecture has. */
typedef struct vec {
    float f[4];
} vec;
#define LANES  4
#define PIXELS 4
static inline vec load4(const float *p) { return (vec){ { p[0], p[1], p[2], p[3] } }; }
static inline void store4(float *p, vec v)
{
    for (int i = 0; i < 4; i++) p[i] = v.f[i];
}
static inline vec fma4(vec a, vec b, vec c)
{
    for (int i = 0; i < 4; i++) c.f[i] += a.f[i] * b.f[i];
    return c;
}
static inline vec splat4(float s) { return (vec){ { s, s, s, s } }; }
#define LOAD(p)      load4(p)
#define STORE(p, v)  store4(p, v)
#define BROADCAST(s) splat4(s)
#define FMA(a, b, c) fma4(a, b, c)
#include "nn/conv_leaf.inc.h"

const esa_conv_leaf esa_conv_leaf_plain = { "plain", LANES, PIXELS, tile };

const esa_conv_leaf *esa_conv_leaf_get(int32_t level)
{
#if defined(__x86_64__)
    if (esa_cpu_vectors(level) == ESA_CPU_AVX512) return &esa_conv_leaf_avx512;
    if (level == ESA_CPU_AVX2) return &esa_conv_leaf_avx2;
#elif defined(__aarch64__)
    if (esa_cpu_vectors(level) == ESA_CPU_NEON) return &esa_conv_leaf_neon;
#endif
    (void)level;
    return &esa_conv_leaf_plain;
}
