/* inline.h - ESA_INLINE marks pure functions in headers. C and CUDA compile the same source.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_BASE_INLINE_H
#define ESA_BASE_INLINE_H

#include <stdint.h>

#ifdef __CUDACC__
#define ESA_INLINE static __host__ __device__ inline
#else
#define ESA_INLINE static inline
#endif

ESA_INLINE int64_t esa_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
ESA_INLINE int64_t esa_min64(int64_t a, int64_t b) { return a < b ? a : b; }
ESA_INLINE int64_t esa_max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* A product that is rounded before a sum uses it. Otherwise the GPU compiler fuses the two
 * operations, and a count can change by one. */
ESA_INLINE double esa_mul(double a, double b)
{
#ifdef __CUDA_ARCH__
    return __dmul_rn(a, b);
#else
    return a * b;
#endif
}

#endif
