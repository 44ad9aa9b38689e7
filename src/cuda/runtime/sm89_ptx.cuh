// sm89_ptx.cuh - thin wrappers for the E4M3 instructions that Ada has and Ampere lacks: conversions
// and mma.sync. Hopper's kernels use the conversions, too.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/runtime/ptx.cuh"

// ---- conversions ----

// Four bytes, the first in the lowest.
DEV uint32_t pack_e4m3(float a, float b, float c, float d)
{
    uint32_t packed;
    asm("{.reg .b16 x, y;\n"
        "cvt.rn.satfinite.e4m3x2.f32 x, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 y, %4, %3;\n"
        "mov.b32 %0, {x, y};}"
        : "=r"(packed)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return packed;
}

// Two bytes as two f16.
DEV __half2 unpack_e4m3(uint16_t packed)
{
    uint32_t two;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"(packed));
    return *(const __half2 *)&two;
}

// ---- products ----

// d (16 x 8) += a (16 x 32) b (32 x 8). A lane holds the same elements as in multiply_add of
// sm80_ptx.cuh with int8_t: with g = lane / 4, and 4 columns from 4 (lane % 4) on of each half of
// the 32, of a (g, lo) (g + 8, lo) (g, hi) (g + 8, hi); of b (lo, g) (hi, g).
DEV void multiply_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
