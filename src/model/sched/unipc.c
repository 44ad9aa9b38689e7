/* unipc.c - the coefficients of UniPC of order 1 and 2 (bh2, prediction of x0) for flow models, in
 * f32. base/nn_args.h has the step itself (esa_step_args).
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

void esa_sched_unipc(esa_sched *s, int32_t i, esa_step_args *a)
{
    a->sigma = s->sigma[i];
    if (i > 0) { /* corrects x with the velocity of this step */
        const leap l = leap_of(s, i - 1, s->order);
        a->correct = 1;
        a->order[0] = s->order;
        a->keep[0] = l.keep;
        a->pull[0] = l.pull;
        a->r[0] = l.r;
        a->rho1 = l.rho1;
        a->rho2 = l.rho2;
    }
    int32_t order = s->config.order;
    if (order > s->steps - i) order = s->steps - i;
    if (order > i + 1) order = i + 1;
    s->order = order;
    const leap l = leap_of(s, i, order);
    a->order[1] = order;
    a->keep[1] = l.keep;
    a->pull[1] = l.pull;
    a->r[1] = l.r;
}
