/* v_sched.c - timesteps and coefficients of CogVideoX's schedulers, DDIM and DPM (2M, with noise).
 * base/nn_args.h has the step itself (ESA_STEP_MIX).
 * SPDX-License-Identifier: Apache-2.0
 *
 * Training has T steps with signal a_t = prod (1 - beta), beta a squared linear rise; then
 *   a' = a / (s + (1 - s) a)                    s = snr_shift
 *   sqrt(a'') = the same, moved and stretched so that it ends at 0 (zero_snr)
 * The model gives v, and m = sqrt(a) x - sqrt(1 - a) v is the clean sample. From step t to p = t -
 * T / n (whole numbers; below 0 the sample is clean), with signals a and b:
 *   DDIM  k = sqrt((1 - b) / (1 - a)),  x = k x + (sqrt(b) - k sqrt(a)) m
 *   DPM   l = ln sqrt(a / (1 - a)), h = l_p - l_t, r = (l_t - l_before) / h,
 *         x = k e^-h x - sqrt(b) expm1(-2h) d + sqrt(1 - b) sqrt(1 - e^-2h) noise,
 *         d = m in the first and in the last step, else (1 + 1/2r) m - 1/2r m_before
 * All of it in double, rounded to f32 at the end, as in diffusers. Where a is 0 or b is 1, h is
 * infinite; the coefficients stay finite. */
#include "model/sched/sched_internal.h"

#include <math.h>

int64_t esa_v_step_of(const esa_sched_config *c, int32_t steps, int32_t i)
{
    const int64_t T = c->train_steps;
    if (c->spacing == ESA_SPACING_LEADING) return (steps - 1 - i) * (T / steps) + c->offset;
    if (c->spacing == ESA_SPACING_LINSPACE)
        return steps == 1 ? 0
                          : (int64_t)rint((double)(steps - 1 - i) *
                                          ((double)(T - 1) / (double)(steps - 1)));
    return (int64_t)rint((double)T - i * ((double)T / steps)) - 1;
}

/* signal[T], from the settings. */
static void fill_signal(const esa_sched_config *c, double *signal)
{
    const int32_t T = c->train_steps;
    const double from = sqrt(c->beta_first), to = sqrt(c->beta_last), s = c->snr_shift;
    const double step = T > 1 ? (to - from) / (T - 1) : 0;
    double product = 1;
    for (int32_t t = 0; t < T; t++) {
        const double root = t < T / 2 ? from + step * t : to - step * (T - 1 - t);
        product *= 1 - root * root;
        signal[t] = product / (s + (1 - s) * product);
    }
    if (!c->zero_snr) return;
    const double first = sqrt(signal[0]), last = sqrt(signal[T - 1]);
    for (int32_t t = 0; t < T; t++) {
        const double root = (sqrt(signal[t]) - last) * (first / (first - last));
        signal[t] = root * root;
    }
}

static void fill_steps(esa_sched *s, const double *signal)
{
    const esa_sched_config *c = &s->config;
    for (int32_t i = 0; i < s->steps; i++) {
        const int64_t t = esa_v_step_of(c, s->steps, i), next = t - c->train_steps / s->steps;
        const double a = signal[t];
        s->timestep[i] = (double)t;
        s->signal[i] = a;
        s->next_signal[i] = next >= 0 ? signal[next] : c->last_is_clean ? 1 : signal[0];
        s->clean[i] = next < 0;
        /* As the share of noise in a flow, for plans. */
        s->sigma[i] = (float)(sqrt(1 - a) / (sqrt(a) + sqrt(1 - a)));
    }
}

esa_status esa_sched_v_fill(esa_sched *s)
{
    esa_ctx *ctx = s->nn->ctx;
    const esa_sched_config *c = &s->config;
    const int64_t bytes = c->train_steps * (int64_t)sizeof(double);
    if (s->steps > c->train_steps || esa_v_step_of(c, s->steps, 0) >= c->train_steps)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "the scheduler has %d steps of training, which are too few for %d steps",
                        c->train_steps, s->steps);
    double *signal = esa_mem_alloc(&ctx->mem, bytes);
    if (!signal) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the scheduler");
    fill_signal(c, signal);
    fill_steps(s, signal);
    esa_mem_free(&ctx->mem, signal, bytes);
    return ESA_OK;
}

static double half_log_snr(double signal) { return log(sqrt(signal / (1 - signal))); }

static void set_ddim(const esa_sched *s, int32_t i, esa_step_args *args)
{
    const double a = s->signal[i], b = s->next_signal[i], k = sqrt((1 - b) / (1 - a));
    args->keep[1] = (float)k;
    args->pull[1] = (float)-(sqrt(b) - sqrt(a) * k);
}

static void set_dpm(const esa_sched *s, int32_t i, esa_step_args *args)
{
    const double a = s->signal[i], b = s->next_signal[i], l = half_log_snr(a),
                 h = half_log_snr(b) - l;
    args->keep[1] = (float)(sqrt((1 - b) / (1 - a)) * exp(-h));
    args->pull[1] = (float)(expm1(-2 * h) * sqrt(b));
    args->sigma = (float)(sqrt(1 - b) * sqrt(1 - exp(-2 * h)));
    if (i == 0 || s->clean[i]) return;
    const double r = (l - half_log_snr(s->signal[i - 1])) / h;
    args->order[1] = 2;
    args->rho1 = (float)(1 + 1 / (2 * r));
    args->rho2 = (float)(1 / (2 * r));
}

void esa_sched_v(const esa_sched *s, int32_t i, esa_step_args *args)
{
    args->kind = ESA_STEP_MIX;
    args->order[1] = 1;
    args->keep[0] = (float)sqrt(s->signal[i]);
    args->pull[0] = (float)sqrt(1 - s->signal[i]);
    if (s->config.kind == ESA_SCHED_DDIM)
        set_ddim(s, i, args);
    else
        set_dpm(s, i, args);
}

int32_t esa_sched_draws(const esa_sched *s, int32_t i)
{
    if (s->config.kind != ESA_SCHED_DPM) return 0;
    return i == 0 || s->clean[i] ? 1 : 2;
}
