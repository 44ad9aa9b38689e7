// sm90_8bit_ptx.cuh - wrappers for Hopper's 8-bit warpgroup products.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/runtime/sm89_ptx.cuh"
#include "cuda/runtime/sm90_ptx.cuh"

template <int N> DEV void wgmma_pin(int (&r)[N])
{
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

#define R4(c, d, i)  c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define R16(c, d, i) R4(c, d, i), R4(c, d, i + 4), R4(c, d, i + 8), R4(c, d, i + 12)
#define R64(c, d)    R16(c, d, 0), R16(c, d, 16), R16(c, d, 32), R16(c, d, 48)
#define L64                                                                                        \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"          \
    "%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"         \
    "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define L68                                                                                        \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"          \
    "%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"         \
    "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,"         \
    "%65,%66,%67}"

// S (64 x 128) = (ACC ? S : 0) + A (64 x 32) * B (128 x 32)^T, both INT8, shared, K-major
template <bool ACC> DEV void wgmma_s8(int (&d)[64], uint64_t a, uint64_t b)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 " L64 ", %64, %65, p;}"
                 : R64("+r", d)
                 : "l"(a), "l"(b), "n"(ACC));
}

// O (64 x 136) += A (64 x 32, registers, E4M3) * B (136 x 32, shared, K-major)^T
DEV void wgmma_e4m3(float (&d)[68], const uint32_t *a, uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 " L68
                 ", {%68,%69,%70,%71}, %72, 1, 1, 1;"
                 : R64("+f", d), R4("+f", d, 64)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef R4
#undef R16
#undef R64
#undef L64
#undef L68
