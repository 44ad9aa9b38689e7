/* bf16_emulated_avx512.c - see bf16_emulated.h. The only test code that includes a source of the
 * library: what is replaced are instructions, and there is no other seam at that depth.
 * SPDX-License-Identifier: Apache-2.0 */
#include "common/bf16_emulated.h"

#include <immintrin.h>

/* Pairs of bf16: the even one in the low half of each 32-bit word. Two rounded adds, as the
 * instruction does (it flushes denormals besides, which no test relies on). */
static inline __m512 emulated_dp(__m512 c, __m512i a, __m512i b)
{
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    c = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                        _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), c);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)),
                           _mm512_castsi512_ps(_mm512_and_si512(b, high)), c);
}

static inline __m256i emulated_round(__m512 x)
{
    const __m512i u = _mm512_castps_si512(x),
                  odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i even = _mm512_srli_epi32(
        _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(
        _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), even, quiet));
}

static inline __m512i emulated_round2(__m512 upper, __m512 lower)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(emulated_round(lower)), emulated_round(upper),
                              1);
}

#ifndef __AVX512BF16__
#define __AVX512BF16__                                                                             \
    1 /* the source refuses to build without it; its instructions are replaced below */
#endif
#define __m512bh               __m512i
#define _mm512_dpbf16_ps       emulated_dp
#define _mm512_cvtneps_pbh     emulated_round
#define _mm512_cvtne2ps_pbh    emulated_round2
#define esa_kernels_avx512bf16 esa_kernels_bf16_emulated
#include "cpu/kernels_avx512bf16.c"
