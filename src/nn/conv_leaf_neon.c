/* conv_leaf_neon.c - the convolution's inner loop in NEON: 24 of the 32 registers are accumulators.
 * SPDX-License-Identifier: Apache-2.0 */
#include <arm_neon.h>

typedef float32x4_t vec;
#define LANES        4
#define PIXELS       8
#define LOAD(p)      vld1q_f32(p)
#define STORE(p, v)  vst1q_f32(p, v)
#define BROADCAST(f) vdupq_n_f32(f)
#define FMA(a, b, c) vfmaq_f32(c, a, b)
#include "nn/conv_leaf.inc.h"

const esa_conv_leaf esa_conv_leaf_neon = { "neon", LANES, PIXELS, tile };
