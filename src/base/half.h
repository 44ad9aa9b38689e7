/* half.h - converts bf16, f16 and E4M3 to and from f32 in plain C.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Rounds to nearest even, keeps NaN quiet, and is exact for subnormals. */
#ifndef ESA_BASE_HALF_H
#define ESA_BASE_HALF_H

#include <stdint.h>
#include <string.h>
#include "base/inline.h"
#include "esa/esa.h"

ESA_INLINE float esa_f32_from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}
ESA_INLINE uint32_t esa_bits_from_f32(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

ESA_INLINE float esa_bf16_to_f32(uint16_t h) { return esa_f32_from_bits((uint32_t)h << 16); }

ESA_INLINE uint16_t esa_f32_to_bf16(float f)
{
    uint32_t u = esa_bits_from_f32(f);
    /* NaN stays quiet and never rounds to infinity. */
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

ESA_INLINE float esa_f16_to_f32(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, em = h & 0x7fffu;
    if (em >= 0x7c00u) return esa_f32_from_bits(sign | 0x7f800000u | ((em & 0x3ffu) << 13));
    if (em >= 0x0400u) return esa_f32_from_bits(sign | ((em << 13) + 0x38000000u));
    const float f = (float)em * 5.9604644775390625e-8f; /* subnormal: em * 2^-24, exact */
    return esa_f32_from_bits(sign | esa_bits_from_f32(f));
}

ESA_INLINE uint16_t esa_f32_to_f16(float f)
{
    const uint32_t u = esa_bits_from_f32(f), a = u & 0x7fffffffu;
    const uint16_t sign = (uint16_t)((u >> 16) & 0x8000u);
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* >= 65520 rounds to infinity */
    if (a < 0x38800000u) {                                   /* below 2^-14: subnormal result */
        const float m = esa_f32_from_bits(a) + 0.5f; /* 0.5 puts 2^-24 at the last mantissa bit */
        return (uint16_t)(sign | (esa_bits_from_f32(m) - 0x3f000000u));
    }
    const uint32_t r = a + 0xfffu + ((a >> 13) & 1u);
    return (uint16_t)(sign | ((r - 0x38000000u) >> 13));
}

/* E4M3: 4 bits of exponent with bias 7, 3 bits of mantissa, no infinity; 0x7f is NaN. Without
 * branches, so that loops vectorise. */
ESA_INLINE float esa_f8_to_f32(uint8_t code)
{
    const uint32_t sign = (uint32_t)(code & 0x80u) << 24, em = code & 0x7fu;
    const uint32_t small = esa_bits_from_f32((float)(int32_t)em * 0x1p-9f); /* exact */
    const uint32_t size = em >= 8u ? (em << 20) + 0x3c000000u : small;
    return esa_f32_from_bits(sign | (em == 0x7fu ? 0x7fc00000u : size));
}

/* Magnitudes above 448 become 448. */
ESA_INLINE uint8_t esa_f32_to_f8(float f)
{
    const uint32_t u = esa_bits_from_f32(f), a = u & 0x7fffffffu;
    const uint8_t sign = (uint8_t)((u >> 24) & 0x80u);
    if (a > 0x7f800000u) return (uint8_t)(sign | 0x7fu);
    if (a >= 0x43e00000u) return (uint8_t)(sign | 0x7eu);
    if (a < 0x3c800000u) {                               /* below 2^-6: subnormal result */
        const float m = esa_f32_from_bits(a) + 16384.0f; /* puts 2^-9 at the last mantissa bit */
        return (uint8_t)(sign | (esa_bits_from_f32(m) - 0x46800000u));
    }
    const uint32_t r = a + 0x7ffffu + ((a >> 20) & 1u);
    return (uint8_t)(sign | ((r - 0x3c000000u) >> 20));
}

/* f rounded to E4M3: esa_f8_to_f32(esa_f32_to_f8(f)) without branches, so that loops vectorise. */
ESA_INLINE float esa_round_f8(float f)
{
    const uint32_t u = esa_bits_from_f32(f), sign = u & 0x80000000u, a = u & 0x7fffffffu;
    const float size = esa_f32_from_bits(a);
    const float large = esa_f32_from_bits((a + 0x7ffffu + ((a >> 20) & 1u)) & 0xfff00000u),
                small = (size + 16384.0f) - 16384.0f;
    const float rounded = a < 0x3c800000u ? small : large;
    const float inside = size > 448.0f ? 448.0f : rounded;
    return a > 0x7f800000u ? f : esa_f32_from_bits(sign | esa_bits_from_f32(inside));
}

ESA_INLINE int64_t esa_dtype_size(int32_t dtype) { return dtype == ESA_DTYPE_F32 ? 4 : 2; }

ESA_INLINE float esa_load_f32(const void *src, int64_t i, int32_t dtype)
{
    if (dtype == ESA_DTYPE_F32) {
        float f;
        memcpy(&f, (const char *)src + 4 * i, 4);
        return f;
    }
    uint16_t h;
    memcpy(&h, (const char *)src + 2 * i, 2);
    return dtype == ESA_DTYPE_F16 ? esa_f16_to_f32(h) : esa_bf16_to_f32(h);
}

ESA_INLINE void esa_store_f32(void *dst, int64_t i, int32_t dtype, float f)
{
    if (dtype == ESA_DTYPE_F32) {
        memcpy((char *)dst + 4 * i, &f, 4);
        return;
    }
    const uint16_t h = dtype == ESA_DTYPE_F16 ? esa_f32_to_f16(f) : esa_f32_to_bf16(f);
    memcpy((char *)dst + 2 * i, &h, 2);
}

/* f rounded to the precision of dtype, for compat-round. f32 stays as it is. */
ESA_INLINE float esa_round_to(float f, int32_t dtype)
{
    if (dtype == ESA_DTYPE_F16) return esa_f16_to_f32(esa_f32_to_f16(f));
    if (dtype == ESA_DTYPE_BF16) return esa_bf16_to_f32(esa_f32_to_bf16(f));
    return f;
}

#endif
