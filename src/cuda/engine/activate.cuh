// activate.cuh - activations of one element.
// SPDX-License-Identifier: Apache-2.0
//
// exp and the quotient are the fast ones of the hardware: 2 ulp for arguments of this size, far
// below the rounding to BF16.
#pragma once

#include "base/nn_args.h"
#include "cuda/runtime/ptx.cuh"

// x / (1 + e^-u). For large -u the sum overflows to infinity and the quotient is 0, as it should
// be.
static __device__ __forceinline__ float times_sigmoid(float x, float u)
{
    return __fdividef(x, 1.0f + __expf(-u));
}

// GELU with tanh is x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3). The factor -2 sqrt(2/pi)
// log2(e) is part of the polynomial, because the hardware has powers of 2.
static __device__ __forceinline__ float activate(float x, int act)
{
    if (act == ESA_ACT_SILU) return times_sigmoid(x, x);
    if (act == ESA_ACT_GELU_TANH) {
        constexpr float c1 = -2.3022082f, c3 = c1 * 0.044715f;
        return __fdividef(x, 1.0f + exp2_approx(x * fmaf(c3, x * x, c1)));
    }
    if (act == ESA_ACT_QUICK_GELU) return times_sigmoid(x, 1.702f * x);
    if (act == ESA_ACT_GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    return x;
}
