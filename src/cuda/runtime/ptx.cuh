// ptx.cuh - thin wrappers for instructions that CUDA C++ has no name for, and their
// types. No policy.
// SPDX-License-Identifier: Apache-2.0
//
// This file has what every GPU since Ampere has. sm80_ptx.cuh adds what only the sm80 and sm89
// kernels use, sm89_ptx.cuh what GPUs have since Ada, sm90_ptx.cuh what only Hopper has.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#define DEV static __device__ __forceinline__

using bf16 = __nv_bfloat16;
using f16 = __half;

template <class T> constexpr bool is_bf16 = false;
template <> constexpr bool is_bf16<bf16> = true;

// ---- arithmetic ----

DEV float exp2_approx(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two floats rounded to T, the first in the low half, as in matrix fragments and in memory.
template <class T> DEV uint32_t pack2(float lo, float hi)
{
    uint32_t r;
    if constexpr (is_bf16<T>)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

// ---- global memory ----

// Brings the line of p to L2.
DEV void prefetch_l2(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

// ---- shared memory, by its own addresses ----

DEV uint32_t smem_addr(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

DEV void store_shared(uint32_t dst, uint4 x)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}
DEV void store_shared(uint32_t dst, uint32_t x)
{
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(dst), "r"(x) : "memory");
}
DEV void store_shared(uint32_t dst, uint16_t x)
{
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(dst), "h"(x) : "memory");
}
DEV void store_shared(uint32_t dst, float2 x)
{
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(dst), "f"(x.x), "f"(x.y) : "memory");
}
DEV uint4 load_shared(uint32_t src)
{
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(src)
                 : "memory");
    return x;
}

// Loads four 8x8 matrices of 16-bit elements. Lane i gives the address of row i % 8 of matrix i / 8
// and receives elements (i / 4, 2 (i % 4) + {0, 1}) of each.
DEV void load_matrices(uint32_t (&r)[4], uint32_t addr)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr));
}
