/* simd_neon.h - the vector operations of kernels.inc.h in AArch64 NEON.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CPU_SIMD_H
#define ESA_CPU_SIMD_H

#if !defined(__aarch64__)
#error "simd_neon.h needs an AArch64 compiler"
#endif

#include <arm_neon.h>
#include <string.h>
#include <math.h>
#include "base/half.h"
#include "cpu/exp2_poly.h"

#define VL 4
typedef float32x4_t vf;

static inline vf v_zero(void) { return vdupq_n_f32(0.0f); }
static inline vf v_set1(float x) { return vdupq_n_f32(x); }
static inline vf v_load(const float *p) { return vld1q_f32(p); }
static inline void v_store(float *p, vf x) { vst1q_f32(p, x); }
static inline vf v_add(vf a, vf b) { return vaddq_f32(a, b); }
static inline vf v_sub(vf a, vf b) { return vsubq_f32(a, b); }
static inline vf v_mul(vf a, vf b) { return vmulq_f32(a, b); }
static inline vf v_div(vf a, vf b) { return vdivq_f32(a, b); }
static inline vf v_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
/* The larger of the two; b if either is NaN. */
static inline vf v_max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline int v_any_gt(vf a, vf b) { return vmaxvq_u32(vcgtq_f32(a, b)) != 0; }
/* x where a > b, else y. */
static inline vf v_if_gt(vf a, vf b, vf x, vf y) { return vbslq_f32(vcgtq_f32(a, b), x, y); }

static inline uint32x4_t v_first_mask(int64_t n)
{
    static const int32_t lane[4] = { 0, 1, 2, 3 };
    return vcgtq_s32(vdupq_n_s32((int32_t)(n > VL ? VL : n)), vld1q_s32(lane));
}
/* Lanes 0 .. n-1 of x, then fill; n <= VL. */
static inline vf v_first(vf x, int64_t n, vf fill) { return vbslq_f32(v_first_mask(n), x, fill); }
/* x, or -inf where bias is -inf. Adding bias would let NaN or +inf through. */
static inline vf v_drop(vf x, vf bias)
{
    return vbslq_f32(vceqq_f32(bias, v_set1(-INFINITY)), v_set1(-INFINITY), x);
}
static inline void v_store_first(float *p, vf x, int64_t n)
{
    float t[VL];
    vst1q_f32(t, x);
    memcpy(p, t, (size_t)n * sizeof(float));
}

static inline float v_reduce_max(vf x) { return vmaxnmvq_f32(x); }
static inline float v_reduce_add(vf x)
{
    const float32x2_t a = vadd_f32(vget_low_f32(x), vget_high_f32(x));
    return vget_lane_f32(vpadd_f32(a, a), 0);
}

/* 2^x for x <= 127. x is clamped to -127, where the factor 2^round(x) is 0, so -inf gives exactly
 * 0. NaN stays NaN through the polynomial and the product. */
static inline vf v_exp2(vf x)
{
    x = v_max(v_set1(-127.0f), x);
    const vf n = vrndnq_f32(x), f = v_sub(x, n);
    vf p = v_set1(EXP2_C5);
    p = v_fma(p, f, v_set1(EXP2_C4));
    p = v_fma(p, f, v_set1(EXP2_C3));
    p = v_fma(p, f, v_set1(EXP2_C2));
    p = v_fma(p, f, v_set1(EXP2_C1));
    p = v_fma(p, f, v_set1(1.0f));
    const int32x4_t e = vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23);
    return v_mul(p, vreinterpretq_f32_s32(e));
}

/* Loads VL values of a dtype as f32. */
static inline vf v_load_as(const void *p, int32_t dtype)
{
    if (dtype == ESA_DTYPE_F32) {
        float t[VL];
        memcpy(t, p, sizeof t);
        return vld1q_f32(t);
    }
    uint16_t t[VL];
    memcpy(t, p, sizeof t);
    const uint16x4_t h = vld1_u16(t);
    if (dtype == ESA_DTYPE_F16) return vcvt_f32_f16(vreinterpret_f16_u16(h));
    return vreinterpretq_f32_u32(vshll_n_u16(h, 16));
}

static inline void v_store_as(void *p, vf x, int32_t dtype)
{
    if (dtype == ESA_DTYPE_F32) {
        float t[VL];
        vst1q_f32(t, x);
        memcpy(p, t, sizeof t);
        return;
    }
    uint16_t t[VL];
    if (dtype == ESA_DTYPE_F16) {
        vst1_u16(t, vreinterpret_u16_f16(vcvt_f16_f32(x)));
    } else {
        const uint32x4_t u = vreinterpretq_u32_f32(x);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
        const uint32x4_t even = vshrq_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
        const uint32x4_t quiet = vorrq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(0x40));
        vst1_u16(t, vmovn_u32(vbslq_u32(vceqq_f32(x, x), even, quiet)));
    }
    memcpy(p, t, sizeof t);
}

/* Transposes: r[i] lane j <-> r[j] lane i. */
static inline void v_transpose(vf r[VL])
{
    const float32x4x2_t a = vtrnq_f32(r[0], r[1]), b = vtrnq_f32(r[2], r[3]);
    r[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    r[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    r[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    r[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}

#endif
