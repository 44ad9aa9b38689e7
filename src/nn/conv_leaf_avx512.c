/* conv_leaf_avx512.c - the convolution's inner loop in AVX-512: 24 accumulators and 3 weights; the
 * fma instructions do the broadcasts.
 * SPDX-License-Identifier: Apache-2.0 */
#include <immintrin.h>

typedef __m512 vec;
#define LANES        16
#define PIXELS       8
#define LOAD(p)      _mm512_load_ps(p)
#define STORE(p, v)  _mm512_store_ps(p, v)
#define BROADCAST(f) _mm512_set1_ps(f)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#include "nn/conv_leaf.inc.h"

const esa_conv_leaf esa_conv_leaf_avx512 = { "avx512", LANES, PIXELS, tile };
