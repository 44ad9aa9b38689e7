/* leaf.inc.h - the functions of leaf.h, written so that compilers vectorise the loops. leaf_<set>.c
 * includes it and names the table.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>
#include "base/half.h"
#include "nn/leaf.h"
#include "nn/nn.h"

#define L     ESA_NN_LANES
#define PIECE 64 /* columns that finish takes at a time */

/* e^x to 2 ulp for all finite x: x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial in r, then n goes
 * into the exponent in two halves, so that results below and above the normal range are right. NaN
 * stays NaN, because the comparisons of the clamp are false for it. */
static inline float exp_near(float x)
{
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    /* 1.5 * 2^23: the sum is rounded to an integer */
    const float shifted = x * 1.44269504088896341f + 12582912.0f;
    const float n = shifted - 12582912.0f;
    const float r = (x - n * 0.693145751953125f) - n * 1.42860682030941723e-6f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t k;
    memcpy(&k, &shifted, 4);
    k -= 0x4b400000; /* n as an integer: the low bits of shifted */
    const int32_t half = k >> 1, rest = k - half;
    return p * esa_f32_from_bits((uint32_t)(half + 127) << 23) *
           esa_f32_from_bits((uint32_t)(rest + 127) << 23);
}

static inline float silu_of(float x) { return x / (1.0f + exp_near(-x)); }
/* 0.5 x (1 + tanh u) = x / (1 + e^(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3): no cancellation on the
 * negative side. */
static inline float gelu_of(float x)
{
    return x / (1.0f + exp_near(-1.5957691216057308f * (x + 0.044715f * (x * x * x))));
}

static inline float fold(const float *a)
{
    float b[8], c[4];
    for (int i = 0; i < 8; i++) b[i] = a[i] + a[i + 8];
    for (int i = 0; i < 4; i++) c[i] = b[i] + b[i + 4];
    return (c[0] + c[2]) + (c[1] + c[3]);
}

static void layer_norm(float *y, const float *x, int64_t n, float eps, const float *weight,
                       const float *bias, const float *scale, const float *shift)
{
    float a[L] = { 0 };
    int64_t i = 0;
    for (; i + L <= n; i += L)
        for (int j = 0; j < L; j++) a[j] += x[i + j];
    for (int j = 0; i + j < n; j++) a[j] += x[i + j];
    const float mean = fold(a) / (float)n;
    float s[L] = { 0 };
    for (i = 0; i + L <= n; i += L)
        for (int j = 0; j < L; j++) {
            const float d = x[i + j] - mean;
            s[j] += d * d;
        }
    for (int j = 0; i + j < n; j++) {
        const float d = x[i + j] - mean;
        s[j] += d * d;
    }
    const float f = 1.0f / sqrtf(fold(s) / (float)n + eps);
    for (i = 0; i < n; i++) y[i] = (x[i] - mean) * f;
    if (weight)
        for (i = 0; i < n; i++) y[i] *= weight[i];
    if (bias)
        for (i = 0; i < n; i++) y[i] += bias[i];
    if (scale)
        for (i = 0; i < n; i++) y[i] *= 1.0f + scale[i];
    if (shift)
        for (i = 0; i < n; i++) y[i] += shift[i];
}

static void rms_norm(float *y, const float *x, int64_t n, float eps, const float *weight)
{
    float s[L] = { 0 };
    int64_t i = 0;
    for (; i + L <= n; i += L)
        for (int j = 0; j < L; j++) s[j] += x[i + j] * x[i + j];
    for (int j = 0; i + j < n; j++) s[j] += x[i + j] * x[i + j];
    const float f = 1.0f / sqrtf(fold(s) / (float)n + eps);
    if (weight)
        for (i = 0; i < n; i++) y[i] = x[i] * f * weight[i];
    else
        for (i = 0; i < n; i++) y[i] = x[i] * f;
}

static void silu(float *y, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] = silu_of(x[i]);
}
static void gelu_tanh(float *y, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] = gelu_of(x[i]);
}
static void quick_gelu(float *y, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] = x[i] / (1.0f + exp_near(-1.702f * x[i]));
}
static void gelu(float *y, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
}
static void geglu(float *y, const float *gate, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] = gelu_of(gate[i]) * x[i];
}
static void sum_of(float *y, const float *a, const float *b, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] = a[i] + b[i];
}
static void add(float *y, const float *x, int64_t n) { sum_of(y, y, x, n); }

/* The combinations that models use have a loop each; the others go step by step. */
static void finish_row(float *y, float *x, const float *bias, int32_t act, const float *gate,
                       const float *residual, int64_t n)
{
    if (bias && act == ESA_ACT_GELU_TANH && !gate && !residual) {
        for (int64_t i = 0; i < n; i++) y[i] = gelu_of(x[i] + bias[i]);
        return;
    }
    if (bias && act == ESA_ACT_NONE && gate && residual) {
        for (int64_t i = 0; i < n; i++) y[i] = residual[i] + (x[i] + bias[i]) * gate[i];
        return;
    }
    if (bias && act == ESA_ACT_NONE && residual) {
        for (int64_t i = 0; i < n; i++) y[i] = residual[i] + (x[i] + bias[i]);
        return;
    }
    if (bias) sum_of(x, x, bias, n);
    if (act == ESA_ACT_SILU) silu(x, x, n);
    if (act == ESA_ACT_GELU_TANH) gelu_tanh(x, x, n);
    if (act == ESA_ACT_QUICK_GELU) quick_gelu(x, x, n);
    if (act == ESA_ACT_GELU) gelu(x, x, n);
    if (gate && residual)
        for (int64_t i = 0; i < n; i++) y[i] = residual[i] + x[i] * gate[i];
    else if (gate)
        for (int64_t i = 0; i < n; i++) y[i] = x[i] * gate[i];
    else if (residual)
        sum_of(y, x, residual, n);
    else if (y != x)
        memcpy(y, x, (size_t)n * 4);
}

static void to_bf16(uint16_t *y, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] = esa_f32_to_bf16(x[i]);
}

/* Rows for one combination of what finish can do: the ifs disappear. Pieces of a row go through t,
 * which overlaps nothing, so that the loops need no checks. They end at a variable, because gcc
 * unrolls loops with a constant number of turns and does not vectorise what is left. */
static inline __attribute__((always_inline)) void finish_as(const esa_finish_args *a,
                                                            const int bias, const int gelu,
                                                            const int gate, const int residual,
                                                            const int half)
{
    for (int64_t r = 0; r < a->rows; r++)
        for (int64_t i = 0; i < a->n; i += PIECE) {
            const int64_t n = a->n - i < PIECE ? a->n - i : PIECE, at = r * a->ldy + i;
            const float *x = a->x + r * a->ldx + i,
                        *more = residual ? a->residual + r * a->residual_ld + i : x;
            float t[PIECE];
            uint16_t t16[PIECE];
            for (int64_t k = 0; k < n; k++) {
                float v = x[k];
                if (bias) v += a->bias[i + k];
                if (gelu) v = gelu_of(v);
                if (gate) v *= a->gate[i + k];
                if (residual) v = more[k] + v;
                if (half)
                    t16[k] = esa_f32_to_bf16(v);
                else
                    t[k] = v;
            }
            if (half)
                memcpy((uint16_t *)a->y + at, t16, (size_t)n * 2);
            else
                memcpy((float *)a->y + at, t, (size_t)n * 4);
        }
}

/* Every combination. */
static void finish_any(const esa_finish_args *a)
{
    for (int64_t r = 0; r < a->rows; r++) {
        float *x = a->x + r * a->ldx;
        const float *residual = a->residual ? a->residual + r * a->residual_ld : NULL;
        const int64_t at = r * a->ldy;
        if (a->dtype == ESA_DTYPE_BF16) {
            finish_row(x, x, a->bias, a->act, a->gate, residual, a->n);
            to_bf16((uint16_t *)a->y + at, x, a->n);
        } else {
            finish_row((float *)a->y + at, x, a->bias, a->act, a->gate, residual, a->n);
        }
    }
}

static void finish(const esa_finish_args *a)
{
    const int half = a->dtype == ESA_DTYPE_BF16, none = a->act == ESA_ACT_NONE,
              gelu = a->act == ESA_ACT_GELU_TANH, plain = !a->gate && !a->residual;
    if (a->bias && none && plain && !half)
        finish_as(a, 1, 0, 0, 0, 0);
    else if (a->bias && none && plain)
        finish_as(a, 1, 0, 0, 0, 1);
    else if (a->bias && gelu && plain && half)
        finish_as(a, 1, 1, 0, 0, 1);
    else if (a->bias && gelu && plain)
        finish_as(a, 1, 1, 0, 0, 0);
    else if (a->bias && none && a->gate && a->residual && !half)
        finish_as(a, 1, 0, 1, 1, 0);
    else if (a->bias && none && !a->gate && a->residual && !half)
        finish_as(a, 1, 0, 0, 1, 0);
    else if (!a->bias && none && !a->gate && a->residual && !half)
        finish_as(a, 0, 0, 0, 1, 0);
    else if (!a->bias && none && plain && !half)
        finish_as(a, 0, 0, 0, 0, 0);
    else
        finish_any(a);
}

static void rope(float *x, int64_t heads, int64_t D, const float *cos, const float *sin)
{
    for (int64_t h = 0; h < heads; h++, x += D)
        for (int64_t i = 0; i < D / 2; i++) {
            const float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cos[i] - b * sin[i];
            x[2 * i + 1] = a * sin[i] + b * cos[i];
        }
}

static void rope_halves(float *x, int64_t heads, int64_t D, const float *cos, const float *sin)
{
    const int64_t half = D / 2;
    for (int64_t h = 0; h < heads; h++, x += D)
        for (int64_t i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half];
            x[i] = a * cos[i] - b * sin[i];
            x[i + half] = a * sin[i] + b * cos[i];
        }
}

static void softmax(float *s, int64_t n, float scale, const float *a, const float *b)
{
    float top[L], sum[L] = { 0 };
    for (int j = 0; j < L; j++) top[j] = -INFINITY;
    for (int64_t i = 0; i < n; i++) s[i] *= scale;
    if (a) sum_of(s, s, a, n);
    if (b) sum_of(s, s, b, n);
    int64_t i = 0;
    for (; i + L <= n; i += L)
        for (int j = 0; j < L; j++) top[j] = s[i + j] > top[j] ? s[i + j] : top[j];
    for (int j = 0; i + j < n; j++) top[j] = s[i + j] > top[j] ? s[i + j] : top[j];
    float m = top[0];
    for (int j = 1; j < L; j++) m = top[j] > m ? top[j] : m;
    if (m == -INFINITY) m = 0; /* no key: every term below is e^-inf = 0 */
    for (i = 0; i < n; i++) s[i] = exp_near(s[i] - m);
    for (i = 0; i + L <= n; i += L)
        for (int j = 0; j < L; j++) sum[j] += s[i + j];
    for (int j = 0; i + j < n; j++) sum[j] += s[i + j];
    const float all = fold(sum), f = all > 0 ? 1.0f / all : (all == 0 ? 0.0f : all); /* NaN stays */
    for (i = 0; i < n; i++) s[i] *= f;
}

static void from_bf16(float *y, const uint16_t *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] = esa_bf16_to_f32(x[i]);
}

/* Reads exponent and mantissa as a tiny float and multiplies by 2^112, which is exact for
 * subnormals too. Infinity and NaN get their exponent back. */
static void from_f16(float *y, const uint16_t *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        const uint32_t h = x[i], em = (h & 0x7fffu) << 13;
        const float f = esa_f32_from_bits(em) * 5192296858534827628530496329220096.0f;
        const uint32_t special = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0;
        y[i] = esa_f32_from_bits(esa_bits_from_f32(f) | special | (h & 0x8000u) << 16);
    }
}

#define ESA_NN_LEAF_TABLE(set)                                                                     \
    { set,    layer_norm, rms_norm, silu,        gelu_tanh, quick_gelu, gelu,     geglu,           \
      finish, add,        rope,     rope_halves, softmax,   from_bf16,  from_f16, to_bf16 }
