/* unipc.c - UniPC of order 1 and 2 (bh2, prediction of x0) for flow models, in f32.
 * SPDX-License-Identifier: Apache-2.0
 *
 * alpha = 1 - sigma, lambda = ln(alpha / sigma). From s to t, with h = lambda_t - lambda_s,
 * B = e^-h - 1, m = x - sigma v, r = (lambda_{s-1} - lambda_s) / h:
 *   predictor  x_t = sigma_t/sigma_s x_s - alpha_t B m_s [ - alpha_t B (m_{s-1} - m_s) / (2 r) ]
 *   corrector  x_t = sigma_t/sigma_s x_s - alpha_t B m_s
 *                    - alpha_t B (rho_1 (m_{s-1} - m_s) / r + rho_2 (m_t - m_s))
 * Order 1 has no bracket, and rho_2 = 1/2. Order 2 solves [[1,1],[r,1]] rho = b. In the last step
 * sigma_t = 0, h = inf, B = -1 and x = m. Scalars are f32 too, because the reference rounds them.
 */
#include "model/sched/sched_internal.h"

#include <math.h>
#include <string.h>

static float lambda_of(float sigma) { return logf(1.0f - sigma) - logf(sigma); }

typedef struct leap {
    float keep;          /* sigma_t / sigma_s */
    float pull;          /* alpha_t B */
    float r, rho1, rho2; /* order 2: r; the corrector's weights */
} leap;

/* The coefficients from sigma index `from` to from + 1. */
static leap leap_of(const esa_sched *s, int32_t from, int32_t order)
{
    const float sigma_t = s->sigma[from + 1], sigma_s = s->sigma[from];
    const float lambda_s = lambda_of(sigma_s), h = lambda_of(sigma_t) - lambda_s, hh = -h,
                B = expm1f(hh);
    leap l = { .keep = sigma_t / sigma_s, .pull = (1.0f - sigma_t) * B, .rho2 = 0.5f };
    if (order < 2) return l;
    l.r = (lambda_of(s->sigma[from - 1]) - lambda_s) / h;
    const float phi2 = B / hh - 1, b1 = phi2 / B, phi3 = phi2 / hh - 0.5f, b2 = phi3 * 2 / B;
    /* Gaussian elimination with the larger of 1 and |r| as pivot, as in LAPACK; the last digits of
     * rho depend on it. */
    if (fabsf(l.r) > 1) {
        const float f = 1 / l.r;
        l.rho2 = (b1 - f * b2) / (1 - f);
        l.rho1 = (b2 - l.rho2) / l.r;
    } else {
        l.rho2 = (b2 - l.r * b1) / (1 - l.r);
        l.rho1 = b1 - l.rho2;
    }
    return l;
}

void esa_sched_step_unipc(esa_sched *s, int32_t i, float *x, const float *v)
{
    const int64_t count = s->count;
    const float sigma = s->sigma[i];
    if (i == 0) {
        for (int64_t n = 0; n < count; n++) s->m0[n] = x[n] - sigma * v[n];
    } else {
        /* x becomes the corrected sample; m of this step comes from the uncorrected one. */
        const leap l = leap_of(s, i - 1, s->order);
        for (int64_t n = 0; n < count; n++) {
            const float m = x[n] - sigma * v[n], m0 = s->m0[n];
            const float old = s->order > 1 ? l.rho1 * ((s->m1[n] - m0) / l.r) : 0;
            x[n] = (l.keep * s->last[n] - l.pull * m0) - l.pull * (old + l.rho2 * (m - m0));
            s->m1[n] = m0;
            s->m0[n] = m;
        }
    }
    int32_t order = s->config.order;
    if (order > s->steps - i) order = s->steps - i;
    if (order > i + 1) order = i + 1;
    s->order = order;
    memcpy(s->last, x, (size_t)count * 4);
    const leap l = leap_of(s, i, order);
    for (int64_t n = 0; n < count; n++) {
        const float m0 = s->m0[n], ahead = order > 1 ? 0.5f * ((s->m1[n] - m0) / l.r) : 0;
        x[n] = (l.keep * x[n] - l.pull * m0) - l.pull * ahead;
    }
}
