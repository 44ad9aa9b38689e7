/* work_plan_fit.c - weights of cells from runs in which only some layers or some steps were sparse.
 * SPDX-License-Identifier: Apache-2.0 */
#include "workplan/work_plan.h"

#include <math.h>
#include "base/status.h"

enum { ROUNDS = 100 };

/* The problem, and the factors a [layer_groups] and b [step_groups]. */
typedef struct fit {
    int32_t layers, steps, layer_groups, step_groups;
    const double *error;
    double *a, *b;
    double *sum; /* [layer_groups][step_groups] errors of the cells of both groups */
} fit;

static int32_t group_of(int32_t i, int32_t count, int32_t groups)
{
    return (int32_t)((int64_t)i * groups / count);
}

static void add_errors(const fit *f)
{
    for (int64_t i = 0; i < (int64_t)f->layer_groups * f->step_groups; i++) f->sum[i] = 0;
    for (int32_t l = 0; l < f->layers; l++)
        for (int32_t t = 0; t < f->steps; t++)
            f->sum[(int64_t)group_of(l, f->layers, f->layer_groups) * f->step_groups +
                   group_of(t, f->steps, f->step_groups)] += f->error[(int64_t)l * f->steps + t];
}

/* Each factor in turn, so that its runs come out as measured. The measurements of layers and of
 * steps need not agree in total: the last round sets the total to the mean of both. */
static void solve(const fit *f, const double *by_layer, const double *by_step)
{
    const int32_t G = f->layer_groups, H = f->step_groups;
    double layers = 0, steps = 0;
    for (int32_t h = 0; h < H; h++) f->b[h] = 1;
    for (int round = 0; round < ROUNDS; round++) {
        for (int32_t g = 0; g < G; g++) {
            double sum = 0;
            for (int32_t h = 0; h < H; h++) sum += f->b[h] * f->sum[(int64_t)g * H + h];
            f->a[g] = sum > 0 ? by_layer[g] / sum : 0;
        }
        for (int32_t h = 0; h < H; h++) {
            double sum = 0;
            for (int32_t g = 0; g < G; g++) sum += f->a[g] * f->sum[(int64_t)g * H + h];
            f->b[h] = sum > 0 ? by_step[h] / sum : 0;
        }
    }
    for (int32_t g = 0; g < G; g++) layers += by_layer[g];
    for (int32_t h = 0; h < H; h++) steps += by_step[h];
    for (int32_t h = 0; h < H && steps > 0; h++) f->b[h] *= (layers + steps) / (2 * steps);
}

static esa_status check(esa_ctx *ctx, const char *name, const double *v, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (!(v[i] >= 0) || isinf(v[i]))
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "%s number %lld is %g, expected a number of at least 0", name,
                            (long long)i, v[i]);
    return ESA_OK;
}

static esa_status fit_weights(esa_ctx *ctx, double *weight, fit *f, const double *by_layer,
                              const double *by_step)
{
    if (f->layers < 1 || f->steps < 1 || f->layers > ESA_WORK_MAX_AXIS ||
        f->steps > ESA_WORK_MAX_AXIS || f->layer_groups < 1 || f->layer_groups > f->layers ||
        f->step_groups < 1 || f->step_groups > f->steps)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "%d layers in %d groups and %d steps in %d groups, expected at least one "
                        "layer or step in each group",
                        f->layers, f->layer_groups, f->steps, f->step_groups);
    ESA_TRY(check(ctx, "error", f->error, (int64_t)f->layers * f->steps));
    ESA_TRY(check(ctx, "by_layer", by_layer, f->layer_groups));
    ESA_TRY(check(ctx, "by_step", by_step, f->step_groups));
    const int64_t G = f->layer_groups, H = f->step_groups, bytes = 8 * (G + H + G * H);
    double *memory = esa_mem_alloc(&ctx->mem, bytes);
    if (!memory) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the weights of a plan");
    f->a = memory;
    f->b = f->a + G;
    f->sum = f->b + H;
    add_errors(f);
    solve(f, by_layer, by_step);
    for (int32_t l = 0; l < f->layers; l++)
        for (int32_t t = 0; t < f->steps; t++)
            weight[(int64_t)l * f->steps + t] = f->a[group_of(l, f->layers, f->layer_groups)] *
                                                f->b[group_of(t, f->steps, f->step_groups)];
    esa_mem_free(&ctx->mem, memory, bytes);
    return ESA_OK;
}

esa_status esa_work_fit(esa_ctx *ctx, double *weight, int32_t layers, int32_t steps,
                        const double *error, int32_t layer_groups, const double *by_layer,
                        int32_t step_groups, const double *by_step)
{
    fit f = { layers, steps, layer_groups, step_groups, error, NULL, NULL, NULL };
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = weight && error && by_layer && by_step
                                  ? fit_weights(ctx, weight, &f, by_layer, by_step)
                                  : esa_fail(ctx, ESA_ERR_ARGUMENT,
                                             "weight, error, by_layer or by_step is NULL");
    esa_ctx_leave(ctx);
    return status;
}
