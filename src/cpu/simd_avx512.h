/* simd_avx512.h - the vector operations of kernels.inc.h in AVX-512 (F, DQ, BW, VL).
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CPU_SIMD_H
#define ESA_CPU_SIMD_H

#if !defined(__AVX512F__) || !defined(__AVX512DQ__) || !defined(__AVX512BW__) ||                   \
    !defined(__AVX512VL__)
#error "simd_avx512.h needs -mavx512f -mavx512dq -mavx512bw -mavx512vl"
#endif

#include <immintrin.h>
#include <math.h>
#include "base/half.h"
#include "cpu/exp2_poly.h"

#define VL 16
typedef __m512 vf;

static inline vf v_zero(void) { return _mm512_setzero_ps(); }
static inline vf v_set1(float x) { return _mm512_set1_ps(x); }
static inline vf v_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
static inline vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
/* The larger of the two; b if either is NaN. */
static inline vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline int v_any_gt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
/* x where a > b, else y. */
static inline vf v_if_gt(vf a, vf b, vf x, vf y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x);
}
/* Lanes 0 .. n-1 of x, then fill; n <= VL. */
static inline vf v_first(vf x, int64_t n, vf fill)
{
    return _mm512_mask_blend_ps((__mmask16)(n >= VL ? 0xffffu : (1u << (n < 0 ? 0 : n)) - 1u), fill,
                                x);
}
/* x, or -inf where bias is -inf. Adding bias would let NaN or +inf through. */
static inline vf v_drop(vf x, vf bias)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(bias, v_set1(-INFINITY), _CMP_EQ_OQ), x,
                                v_set1(-INFINITY));
}
static inline void v_store_first(float *p, vf x, int64_t n)
{
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), x);
}

static inline float v_reduce_max(vf x)
{
    const __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

static inline float v_reduce_add(vf x)
{
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

/* 2^x for x <= 127: round, a polynomial of degree 5 on [-1/2, 1/2], scale. -inf gives 0;
 * NaN stays NaN. */
static inline vf v_exp2(vf x)
{
    x = v_max(v_set1(-151.0f), x); /* 2^-151 rounds to 0; keeps x - round(x) finite */
    const vf n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vf f = v_sub(x, n);
    vf p = v_set1(EXP2_C5);
    p = v_fma(p, f, v_set1(EXP2_C4));
    p = v_fma(p, f, v_set1(EXP2_C3));
    p = v_fma(p, f, v_set1(EXP2_C2));
    p = v_fma(p, f, v_set1(EXP2_C1));
    p = v_fma(p, f, v_set1(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* Loads VL values of a dtype as f32. */
static inline vf v_load_as(const void *p, int32_t dtype)
{
    if (dtype == ESA_DTYPE_F32) return _mm512_loadu_ps(p);
    const __m256i h = _mm256_loadu_si256(p);
    if (dtype == ESA_DTYPE_F16) return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

/* Stores a vector past the cache if p is aligned to a cache line. A vector is a whole line, so the
 * line is not read before it is overwritten. */
#define V_STREAMS 1
static inline void v_stream(void *p, vf x) { _mm512_stream_ps(p, x); }
static inline void v_stream_end(void) { _mm_sfence(); }

static inline void v_store_as(void *p, vf x, int32_t dtype)
{
    if (dtype == ESA_DTYPE_F32) {
        _mm512_storeu_ps(p, x);
        return;
    }
    if (dtype == ESA_DTYPE_F16) {
        _mm256_storeu_si256(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        return;
    }
    const __m512i u = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i even = _mm512_srli_epi32(
        _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    _mm256_storeu_si256(p, _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, even, quiet)));
}

/* Transposes: r[i] lane j <-> r[j] lane i. */
static inline void v_transpose(vf r[VL])
{
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_castpd_ps(
            _mm512_unpacklo_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
        r[i + 1] = _mm512_castpd_ps(
            _mm512_unpackhi_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
        r[i + 2] = _mm512_castpd_ps(
            _mm512_unpacklo_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
        r[i + 3] = _mm512_castpd_ps(
            _mm512_unpackhi_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

#endif
