/* sched.c - sigmas, timesteps and the order of calls. unipc.c has the coefficients of UniPC;
 * flow matching with Euler is x += (sigma_{i+1} - sigma_i) v.
 * v_sched.c has CogVideoX's schedulers.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Sigmas are computed in double and stored as f32, with the operations of diffusers in the same
 * order. */
#include "model/sched/sched_internal.h"
#include "nn/ops.h"

#include <math.h>

#define MAX_STEPS    100000
#define SIGNAL_BYTES ((int64_t)(2 * sizeof(double) + sizeof(int32_t))) /* of each step */

int32_t esa_sched_group(int32_t kind)
{
    return kind < ESA_SCHED_DDIM ? ESA_SCHED_GROUP_FLOW : ESA_SCHED_GROUP_V;
}

const char *esa_sched_name(int32_t kind)
{
    static const char *const names[] = { [ESA_SCHED_UNIPC] = "UniPC",
                                         [ESA_SCHED_UNIPC_036] = "UniPC (0.36)",
                                         [ESA_SCHED_EULER] = "Euler",
                                         [ESA_SCHED_DDIM] = "DDIM",
                                         [ESA_SCHED_DPM] = "DPM" };
    return names[kind];
}

/* numpy's linspace(a, b, n)[i]. */
static double linspace(double a, double b, int64_t n, int64_t i)
{
    if (n == 1) return a;
    return i == n - 1 ? b : (double)i * ((b - a) / (double)(n - 1)) + a;
}

static double shifted(double shift, double u) { return shift * u / (1 + (shift - 1) * u); }

static void unipc_sigmas(esa_sched *s)
{
    const int32_t n = s->steps;
    const double T = s->config.train_steps, shift = s->config.shift;
    for (int32_t i = 0; i < n; i++) {
        const double *list = s->config.list;
        double u = list                                ? list[i]
                   : s->config.kind == ESA_SCHED_UNIPC ? linspace(1, 1 / T, n + 1, i)
                                                       : 1 - linspace(1, 1 / T, n + 1, n - i);
        u = shifted(shift, u);
        /* so that log(1 - sigma) is finite */
        if ((list || s->config.kind == ESA_SCHED_UNIPC) && i == 0 && fabs(u - 1) < 1e-6) u -= 1e-6;
        s->sigma[i] = (float)u;
        s->timestep[i] = trunc(u * T);
    }
}

static void euler_sigmas(esa_sched *s)
{
    const int32_t n = s->steps;
    const float T = (float)s->config.train_steps, shift = (float)s->config.shift;
    /* The largest and smallest sigma of training are shifted, and the list between them is shifted
     * again, as in diffusers. */
    const float one = 1.0f / T, top = shift * 1.0f / (1 + (shift - 1) * 1.0f),
                bottom = shift * one / (1 + (shift - 1) * one);
    const int32_t given = s->config.to_zero || s->config.list;
    for (int32_t i = 0; i < n && given; i++) {
        /* numpy keeps f32 here */
        const float u = (float)(s->config.list ? s->config.list[i] : linspace(1, 0, n + 1, i));
        s->sigma[i] = shift * u / (1 + (shift - 1) * u);
        s->timestep[i] = (double)(s->sigma[i] * T);
    }
    for (int32_t i = 0; i < n && !given; i++) {
        const double t = linspace((double)top * s->config.train_steps,
                                  (double)bottom * s->config.train_steps, n, i);
        s->sigma[i] = (float)shifted(s->config.shift, t / s->config.train_steps);
        s->timestep[i] = (double)(s->sigma[i] * T);
    }
}

/* Memory that some kinds need beside the timesteps. */
static esa_status make_state(esa_sched *s)
{
    const int32_t kind = s->config.kind;
    esa_ctx *ctx = s->nn->ctx;
    float **const past[3] = { &s->m0, &s->m1, &s->last };
    const int32_t kept = kind <= ESA_SCHED_UNIPC_036 ? 3 : kind == ESA_SCHED_DPM ? 1 : 0;
    for (int32_t k = 0; k < kept; k++)
        ESA_TRY(esa_nn_alloc(s->nn, (void **)past[k], s->bytes, "the scheduler"));
    if (esa_sched_group(kind) == ESA_SCHED_GROUP_FLOW) return ESA_OK;
    s->signal = esa_mem_zalloc(&ctx->mem, s->steps * SIGNAL_BYTES);
    if (!s->signal) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the scheduler");
    s->next_signal = s->signal + s->steps;
    s->clean = (int32_t *)(s->next_signal + s->steps);
    return ESA_OK;
}

static esa_status fill(esa_sched *s)
{
    ESA_TRY(make_state(s));
    if (s->signal) return esa_sched_v_fill(s);
    if (s->config.kind == ESA_SCHED_EULER)
        euler_sigmas(s);
    else
        unipc_sigmas(s);
    return ESA_OK;
}

static esa_status check(esa_ctx *ctx, const esa_sched_config *c, int32_t steps)
{
    if (steps < 1 || steps > MAX_STEPS)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "steps is %d, expected 1 to %d", steps, MAX_STEPS);
    if (!(c->shift > 0) || c->train_steps < 1 || c->kind < ESA_SCHED_UNIPC ||
        c->kind > ESA_SCHED_DPM)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "shift is %g, expected more than 0", c->shift);
    if (c->list && esa_sched_group(c->kind) != ESA_SCHED_GROUP_FLOW)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "the scheduler %s takes no list of sigmas",
                        esa_sched_name(c->kind));
    for (int32_t i = 0; c->list && i < steps; i++)
        if (!(c->list[i] > 0 && c->list[i] <= (i ? c->list[i - 1] : 1)) ||
            (i && c->list[i] == c->list[i - 1]))
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "sigma %d is %g, expected less than the one before it, from 1 to 0", i,
                            c->list[i]);
    return ESA_OK;
}

esa_status esa_sched_create(esa_nn *nn, esa_sched **out, const esa_sched_config *config,
                            int32_t steps, int64_t count)
{
    esa_ctx *ctx = nn->ctx;
    *out = NULL;
    ESA_TRY(check(ctx, config, steps));
    esa_sched *s = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof *s);
    if (!s) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the scheduler");
    s->nn = nn;
    s->config = *config;
    s->steps = steps;
    s->count = count;
    s->bytes = esa_size_mul(count, 4);
    s->sigma = esa_mem_zalloc(&ctx->mem, (steps + 1) * (int64_t)sizeof *s->sigma);
    s->timestep = esa_mem_zalloc(&ctx->mem, steps * (int64_t)sizeof *s->timestep);
    const esa_status status = s->sigma && s->timestep ? fill(s)
                                                      : esa_fail(ctx, ESA_ERR_MEMORY,
                                                                 "out of memory for the scheduler");
    if (status)
        esa_sched_free(s);
    else
        *out = s;
    return status;
}

void esa_sched_free(esa_sched *s)
{
    if (!s) return;
    const esa_allocator mem = s->nn->ctx->mem;
    esa_mem_free(&mem, s->sigma, (s->steps + 1) * (int64_t)sizeof *s->sigma);
    esa_mem_free(&mem, s->timestep, s->steps * (int64_t)sizeof *s->timestep);
    if (s->signal) esa_mem_free(&mem, s->signal, s->steps * SIGNAL_BYTES);
    esa_nn_free(s->nn, s->m0, s->bytes);
    esa_nn_free(s->nn, s->m1, s->bytes);
    esa_nn_free(s->nn, s->last, s->bytes);
    esa_mem_free(&mem, s, (int64_t)sizeof *s);
}

double esa_sched_timestep(const esa_sched *s, int32_t i)
{
    return i >= 0 && i < s->steps ? s->timestep[i] : 0;
}
double esa_sched_sigma(const esa_sched *s, int32_t i)
{
    return i >= 0 && i <= s->steps ? (double)s->sigma[i] : 0;
}

esa_status esa_sched_step(esa_sched *s, int32_t i, float *x, const float *v, const float *noise)
{
    esa_step_args a = { .x = x, .v = v, .m0 = s->m0, .m1 = s->m1, .last = s->last };
    if (i != s->next || i >= s->steps)
        return esa_fail(s->nn->ctx, ESA_ERR_STATE,
                        "the scheduler got step %d, expected step %d of %d", i, s->next, s->steps);
    a.count = s->count;
    if (s->config.kind == ESA_SCHED_EULER) {
        a.kind = ESA_STEP_EULER;
        a.dt = s->sigma[i + 1] - s->sigma[i];
    } else if (s->signal) {
        if (esa_sched_draws(s, i)) a.noise = noise;
        esa_sched_v(s, i, &a);
    } else
        esa_sched_unipc(s, i, &a);
    ESA_TRY(s->nn->ops->step(s->nn, &a));
    s->next++;
    return ESA_OK;
}

/* Flows: x is (1 - s) clean + s noise, and v is noise - clean. With v-prediction, signals a before
 * and b behind the step: v = sqrt(a) noise - sqrt(1 - a) clean, x = sqrt(b) clean + sqrt(1 - b)
 * noise; the noise is eliminated. */
void esa_sched_clean(const esa_sched *s, int32_t i, float *of_x, float *of_v)
{
    *of_x = 1;
    *of_v = -s->sigma[i + 1];
    if (!s->signal) return;
    const double a = s->signal[i], b = s->next_signal[i],
                 whole = sqrt(a * b) + sqrt((1 - a) * (1 - b));
    *of_x = (float)(sqrt(a) / whole);
    *of_v = (float)(-sqrt(1 - b) / whole);
}
