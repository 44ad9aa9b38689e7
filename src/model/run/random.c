/* random.c - see random.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The f32 polynomials are those of Moshier's Cephes library (logf, sinf, cosf) in the form that
 * vector code uses: sine and cosine are both evaluated, and the octant decides between them. Every
 * fmaf below is a fused multiply-add in torch's binaries; the build contracts nothing else
 * (-ffp-contract=off). */
#include "model/run/random.h"

#include <math.h>
#include <string.h>

#define TWO_PI 6.283185307179586476925286766559

void esa_torch_seed(esa_torch_rng *rng, uint64_t seed)
{
    memset(rng, 0, sizeof *rng);
    rng->state[0] = (uint32_t)seed;
    for (uint32_t i = 1; i < 624; i++)
        rng->state[i] = 1812433253u * (rng->state[i - 1] ^ rng->state[i - 1] >> 30) + i;
    rng->next = 624;
}

static void refill(esa_torch_rng *rng)
{
    uint32_t *s = rng->state;
    for (int i = 0; i < 624; i++) {
        const uint32_t y = (s[i] & 0x80000000u) | (s[(i + 1) % 624] & 0x7fffffffu);
        s[i] = s[(i + 397) % 624] ^ y >> 1 ^ ((y & 1) ? 0x9908b0dfu : 0);
    }
    rng->next = 0;
}

uint32_t esa_torch_next(esa_torch_rng *rng)
{
    if (rng->next == 624) refill(rng);
    uint32_t y = rng->state[rng->next++];
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680u;
    y ^= y << 15 & 0xefc60000u;
    return y ^ y >> 18;
}

static float unit_f32(esa_torch_rng *rng)
{
    return (float)(esa_torch_next(rng) & 0xffffffu) * 0x1p-24f;
}

static double unit_f64(esa_torch_rng *rng)
{
    const uint64_t high = esa_torch_next(rng);
    return (double)((high << 32 | esa_torch_next(rng)) & ((UINT64_C(1) << 53) - 1)) * 0x1p-53;
}

/* ln x for 2^-24 <= x <= 1. */
static float log_f32(float x)
{
    static const float p[9] = { 7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f,
                                -1.2420140846e-1f, 1.4249322787e-1f,  -1.6668057665e-1f,
                                2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f };
    int exponent;
    x = frexpf(x, &exponent); /* 0.5 <= x < 1 */
    float e = (float)exponent;
    if (x < 0.707106781186547524f) {
        e -= 1.0f;
        x = x - 1.0f + x;
    } else
        x -= 1.0f;
    const float z = x * x;
    float y = p[0];
    for (int i = 1; i < 9; i++) y = fmaf(y, x, p[i]);
    y = fmaf(y * x, z, e * -2.12194440e-4f);
    y = fmaf(z, -0.5f, y);
    return fmaf(e, 0.693359375f, x + y);
}

/* For 0 <= x <= 2 pi. */
static void sincos_f32(float *sine, float *cosine, float x)
{
    const int octant = ((int)(x * 1.27323954473516f) + 1) & ~1;
    const float y = (float)octant;
    x = fmaf(y, -0.78515625f, x); /* pi/4 in three parts */
    x = fmaf(y, -2.4187564849853515625e-4f, x);
    x = fmaf(y, -3.77489497744594108e-8f, x);
    const float z = x * x;
    float c = fmaf(2.443315711809948e-5f, z, -1.388731625493765e-3f);
    c = fmaf(c, z, 4.166664568298827e-2f) * z;
    c = fmaf(c, z, -0.5f * z) + 1.0f;
    float s = fmaf(-1.9515295891e-4f, z, 8.3321608736e-3f);
    s = fmaf(s, z, -1.6666654611e-1f) * z;
    s = fmaf(s, x, x);
    const int swap = octant & 2;
    *sine = swap ? c : s;
    *cosine = swap ? s : c;
    if (octant & 4) *sine = -*sine;
    if ((octant - 2) & 4) return; /* octants 0 and 6 keep the sign of the cosine */
    *cosine = -*cosine;
}

static void box_muller_16(float *x)
{
    for (int i = 0; i < 8; i++) {
        const float radius = sqrtf(-2.0f * log_f32(1.0f - x[i]));
        float sine, cosine;
        sincos_f32(&sine, &cosine, (float)TWO_PI * x[i + 8]);
        x[i] = radius * cosine + 0.0f; /* torch adds the mean here: -0 becomes 0 */
        x[i + 8] = radius * sine + 0.0f;
    }
}

static double normal_f64(esa_torch_rng *rng)
{
    if (rng->has_spare) {
        rng->has_spare = 0;
        return rng->spare;
    }
    const double u1 = unit_f64(rng), u2 = unit_f64(rng);
    const double radius = sqrt(-2.0 * log1p(-u2)), theta = TWO_PI * u1;
    rng->spare = radius * sin(theta);
    rng->has_spare = 1;
    return radius * cos(theta);
}

void esa_torch_begin(esa_torch_rng *rng, float *out, int64_t count)
{
    for (int64_t i = 0; i < count; i++) out[i] = unit_f32(rng);
}

void esa_torch_normals(float *out, int64_t first, int64_t groups)
{
    for (int64_t i = first; i < first + groups; i++) box_muller_16(out + 16 * i);
}

void esa_torch_end(esa_torch_rng *rng, float *out, int64_t count)
{
    if (count % 16 == 0) return;
    float *last = out + count - 16;
    esa_torch_begin(rng, last, 16);
    box_muller_16(last);
}

void esa_torch_randn(esa_torch_rng *rng, float *out, int64_t count)
{
    if (count < 16) {
        for (int64_t i = 0; i < count; i++) out[i] = (float)normal_f64(rng);
        return;
    }
    esa_torch_begin(rng, out, count);
    esa_torch_normals(out, 0, count / 16);
    esa_torch_end(rng, out, count);
}
