/* simd_avx2.h - the vector operations of kernels.inc.h in AVX2 + FMA + F16C.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CPU_SIMD_H
#define ESA_CPU_SIMD_H

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "simd_avx2.h needs -mavx2 -mfma -mf16c"
#endif

#include <immintrin.h>
#include <math.h>
#include "base/half.h"
#include "cpu/exp2_poly.h"

#define VL 8
typedef __m256 vf;

static inline vf v_zero(void) { return _mm256_setzero_ps(); }
static inline vf v_set1(float x) { return _mm256_set1_ps(x); }
static inline vf v_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
static inline vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
/* The larger of the two; b if either is NaN. */
static inline vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline int v_any_gt(vf a, vf b)
{
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
}
/* x where a > b, else y. */
static inline vf v_if_gt(vf a, vf b, vf x, vf y)
{
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GT_OQ));
}

static inline __m256i v_first_mask(int64_t n)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(n > VL ? VL : n)), lane);
}
/* Lanes 0 .. n-1 of x, then fill; n <= VL. */
static inline vf v_first(vf x, int64_t n, vf fill)
{
    return _mm256_blendv_ps(fill, x, _mm256_castsi256_ps(v_first_mask(n)));
}
/* x, or -inf where bias is -inf. Adding bias would let NaN or +inf through. */
static inline vf v_drop(vf x, vf bias)
{
    return _mm256_blendv_ps(x, v_set1(-INFINITY),
                            _mm256_cmp_ps(bias, v_set1(-INFINITY), _CMP_EQ_OQ));
}
static inline void v_store_first(float *p, vf x, int64_t n)
{
    _mm256_maskstore_ps(p, v_first_mask(n), x);
}

static inline float v_reduce_max(vf x)
{
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

static inline float v_reduce_add(vf x)
{
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

/* 2^x for x <= 127. Adding 1.5 * 2^23 + 127 leaves round(x) + 127 in the low mantissa bits; shifted
 * left they are the float 2^round(x). x is clamped to -127, where that float is 0, so -inf and
 * anything below -126.5 give exactly 0. NaN stays NaN through the polynomial and the product. */
static inline vf v_exp2(vf x)
{
    const vf magic = v_set1(12583039.0f);
    x = v_max(v_set1(-127.0f), x);
    const vf t = v_add(x, magic);
    const vf f = v_sub(x, v_sub(t, magic));
    vf p = v_set1(EXP2_C5);
    p = v_fma(p, f, v_set1(EXP2_C4));
    p = v_fma(p, f, v_set1(EXP2_C3));
    p = v_fma(p, f, v_set1(EXP2_C2));
    p = v_fma(p, f, v_set1(EXP2_C1));
    p = v_fma(p, f, v_set1(1.0f));
    return v_mul(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}

/* Loads VL values of a dtype as f32. */
static inline vf v_load_as(const void *p, int32_t dtype)
{
    if (dtype == ESA_DTYPE_F32) return _mm256_loadu_ps(p);
    const __m128i h = _mm_loadu_si128(p);
    if (dtype == ESA_DTYPE_F16) return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

static inline void v_store_as(void *p, vf x, int32_t dtype)
{
    if (dtype == ESA_DTYPE_F32) {
        _mm256_storeu_ps(p, x);
        return;
    }
    if (dtype == ESA_DTYPE_F16) {
        _mm_storeu_si128(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        return;
    }
    const __m256i u = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i even = _mm256_srli_epi32(
        _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i r = _mm256_blendv_epi8(even, quiet, nan);
    _mm_storeu_si128(p,
                     _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1)));
}

/* Transposes: r[i] lane j <-> r[j] lane i. */
static inline void v_transpose(vf r[VL])
{
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}

#endif
