/* conv_leaf_avx2.c - the convolution's inner loop in AVX2. Its 16 registers hold 12 accumulators, 3
 * weights and 1 broadcast.
 * SPDX-License-Identifier: Apache-2.0 */
#include <immintrin.h>

typedef __m256 vec;
#define LANES        8
#define PIXELS       4
#define LOAD(p)      _mm256_load_ps(p)
#define STORE(p, v)  _mm256_store_ps(p, v)
#define BROADCAST(f) _mm256_set1_ps(f)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#include "nn/conv_leaf.inc.h"

const esa_conv_leaf esa_conv_leaf_avx2 = { "avx2", LANES, PIXELS, tile };
