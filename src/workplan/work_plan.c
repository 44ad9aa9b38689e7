/* work_plan.c - makes a work plan, checks its values, and reads its quality curve.
 * SPDX-License-Identifier: Apache-2.0 */
#include "workplan/work_plan.h"

#include <math.h>
#include <string.h>
#include "base/status.h"

static esa_status check_info(esa_ctx *ctx, const char *name, const esa_work_plan_info *info)
{
    if (info->struct_size != sizeof *info)
        return esa_fail(ctx, ESA_ERR_VERSION,
                        "esa_work_plan_info has struct_size %u, this library expects %u",
                        (unsigned)info->struct_size, (unsigned)sizeof *info);
    const struct {
        const char *name;
        int32_t value, high;
    } range[] = { { "layers", info->layers, ESA_WORK_MAX_AXIS },
                  { "steps", info->steps, ESA_WORK_MAX_AXIS },
                  { "points", info->points, ESA_WORK_MAX_POINTS } };
    for (size_t i = 0; i < sizeof range / sizeof range[0]; i++)
        if (range[i].value < 1 || range[i].value > range[i].high)
            return esa_fail(ctx, ESA_ERR_ARGUMENT, "%s: %s is %d, expected 1 to %d", name,
                            range[i].name, range[i].value, range[i].high);
    if (info->anchors < 0 || info->anchors > ESA_WORK_MAX_AXIS)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "%s: anchors is %d, expected 0 to %d", name,
                        info->anchors, ESA_WORK_MAX_AXIS);
    if (!memchr(info->model, 0, sizeof info->model) ||
        !memchr(info->config_hash, 0, sizeof info->config_hash))
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "%s: model or config_hash does not end", name);
    return ESA_OK;
}

/* n numbers >= 0 and finite. */
static esa_status check_positive(esa_ctx *ctx, const char *name, const char *what, const double *v,
                                 int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (!(v[i] >= 0) || isinf(v[i]))
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "%s: %s number %lld is %g, expected a number of at least 0", name, what,
                            (long long)i, v[i]);
    return ESA_OK;
}

static esa_status check_sigma(esa_ctx *ctx, const char *name, const double *sigma, int32_t steps)
{
    for (int32_t i = 0; i < steps; i++)
        if (!(sigma[i] > 0 && sigma[i] <= 1 && (i == 0 || sigma[i] < sigma[i - 1])))
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "%s: the noise level of step %d is %g, expected falling numbers above "
                            "0 and up to 1",
                            name, i, sigma[i]);
    return ESA_OK;
}

static esa_status check_values(const esa_work_plan *p, const char *name)
{
    const int64_t cells = (int64_t)p->info.layers * p->info.steps;
    ESA_TRY(check_sigma(p->ctx, name, p->sigma, p->info.steps));
    for (int32_t i = 0; i < p->info.points; i++)
        if (!(p->density[i] > 0 && p->density[i] < 1 &&
              (i == 0 || p->density[i] > p->density[i - 1])))
            return esa_fail(p->ctx, ESA_ERR_ARGUMENT,
                            "%s: density number %d is %g, expected ascending numbers between 0 "
                            "and 1",
                            name, i, p->density[i]);
    ESA_TRY(check_positive(p->ctx, name, "error", p->error, cells * p->info.points));
    return check_positive(p->ctx, name, "weight", p->weight, cells);
}

static void copy(double *to, const double *from, int64_t n)
{
    memcpy(to, from, (size_t)n * sizeof *to);
}

esa_status esa_work_plan_make(esa_ctx *ctx, esa_work_plan **plan, const char *name,
                              const esa_work_plan_info *info, const double *sigma,
                              const double *density, const double *error, const double *weight)
{
    *plan = NULL;
    ESA_TRY(check_info(ctx, name, info));
    const int64_t cells = (int64_t)info->layers * info->steps, points = info->points;
    const int64_t numbers = info->steps + points + cells * (points + 1);
    esa_work_plan *p = esa_mem_zalloc(&ctx->mem, (int64_t)sizeof *p);
    double *values = esa_mem_alloc(&ctx->mem, esa_size_mul(numbers, 8));
    if (!p || !values) {
        esa_mem_free(&ctx->mem, p, (int64_t)sizeof *p);
        esa_mem_free(&ctx->mem, values, numbers * 8);
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for a work plan of %d x %d cells",
                        info->layers, info->steps);
    }
    p->ctx = ctx;
    p->mem = ctx->mem;
    p->info = *info;
    p->info.format_version = ESA_WORK_FORMAT_VERSION;
    p->info.levels = 0;
    memset(p->info.reserved, 0, sizeof p->info.reserved);
    p->bytes = numbers * 8;
    p->sigma = values;
    p->density = p->sigma + info->steps;
    p->error = p->density + points;
    p->weight = p->error + cells * points;
    copy(p->sigma, sigma, info->steps);
    copy(p->density, density, points);
    copy(p->error, error, cells * points);
    copy(p->weight, weight, cells);
    const esa_status status = check_values(p, name);
    if (status)
        esa_work_plan_free(p);
    else
        *plan = p;
    return status;
}

void esa_work_plan_free(esa_work_plan *p)
{
    if (!p) return;
    const esa_allocator mem = p->mem;
    esa_mem_free(&mem, p->sigma, p->bytes);
    esa_mem_free(&mem, p, (int64_t)sizeof *p);
}

/* ---------------------------------------------------------------- quality */

esa_status esa_work_plan_rate(esa_work_plan *p, const char *name, int32_t count, const double *work,
                              const double *psnr, const double *spread)
{
    if (count < 0 || count > ESA_WORK_MAX_LEVELS)
        return esa_fail(p->ctx, ESA_ERR_ARGUMENT,
                        "%s: the quality curve has %d points, expected 0 to %d", name, count,
                        ESA_WORK_MAX_LEVELS);
    if (count && (!work || !psnr || !spread))
        return esa_fail(p->ctx, ESA_ERR_ARGUMENT, "%s: work, psnr or spread is NULL", name);
    for (int32_t i = 0; i < count; i++) {
        if (!(work[i] >= 0 && work[i] <= 1 && (i == 0 || work[i] > work[i - 1])))
            return esa_fail(p->ctx, ESA_ERR_ARGUMENT,
                            "%s: work number %d is %g, expected ascending numbers within 0 .. 1",
                            name, i, work[i]);
        if (!isfinite(psnr[i]) || !(spread[i] >= 0) || isinf(spread[i]))
            return esa_fail(p->ctx, ESA_ERR_ARGUMENT,
                            "%s: quality number %d is %g +- %g dB, expected finite numbers", name,
                            i, psnr[i], spread[i]);
    }
    p->info.levels = count;
    if (!count) return ESA_OK;
    copy(p->work, work, count);
    copy(p->psnr, psnr, count);
    copy(p->spread, spread, count);
    return ESA_OK;
}

static esa_status check_levels(esa_ctx *ctx, const esa_work_plan *p)
{
    if (p->info.levels) return ESA_OK;
    return esa_fail(ctx, ESA_ERR_STATE,
                    "the work plan has no quality curve: `esa calibrate --plan` measures one");
}

/* Measured means may dip by chance. The curve that callers see never falls. */
static double rising(const esa_work_plan *p, int32_t i)
{
    double best = p->psnr[0];
    for (int32_t k = 1; k <= i; k++) best = p->psnr[k] > best ? p->psnr[k] : best;
    return best;
}

static esa_status expect(const esa_work_plan *p, double work, double *psnr, double *spread)
{
    ESA_TRY(check_levels(p->ctx, p));
    const int32_t n = p->info.levels;
    if (!(work >= p->work[0] && work <= p->work[n - 1]))
        return esa_fail(p->ctx, ESA_ERR_ARGUMENT,
                        "work is %g, but the quality curve of the plan goes from %g to %g", work,
                        p->work[0], p->work[n - 1]);
    int32_t i = n > 1 ? 1 : 0;
    while (i + 1 < n && p->work[i] < work) i++;
    const int32_t j = i ? i - 1 : 0;
    const double part = i > j ? (work - p->work[j]) / (p->work[i] - p->work[j]) : 0;
    if (psnr) *psnr = rising(p, j) + part * (rising(p, i) - rising(p, j));
    if (spread) *spread = p->spread[j] + part * (p->spread[i] - p->spread[j]);
    return ESA_OK;
}

esa_status esa_work_plan_find(esa_ctx *ctx, const esa_work_plan *p, double psnr, double *work)
{
    ESA_TRY(check_levels(ctx, p));
    const int32_t n = p->info.levels;
    if (!(psnr <= rising(p, n - 1)))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "quality is %g dB, but the plan expects at most %.1f dB, at work %g", psnr,
                        rising(p, n - 1), p->work[n - 1]);
    int32_t i = 0;
    while (rising(p, i) < psnr) i++;
    *work = p->work[i];
    if (i == 0) return ESA_OK;
    const double low = rising(p, i - 1), high = rising(p, i);
    *work = p->work[i - 1] + (p->work[i] - p->work[i - 1]) * (psnr - low) / (high - low);
    return ESA_OK;
}

/* ---------------------------------------------------------------- the public calls */

esa_status esa_work_plan_create(esa_ctx *ctx, esa_work_plan **plan, const esa_work_plan_info *info,
                                const double *sigma, const double *density, const double *error,
                                const double *weight)
{
    if (plan) *plan = NULL;
    ESA_TRY(esa_ctx_enter(ctx));
    const int32_t given = plan && info && sigma && density && error && weight;
    const esa_status status = given ? esa_work_plan_make(ctx, plan, "work plan", info, sigma,
                                                         density, error, weight)
                                    : esa_fail(ctx, ESA_ERR_ARGUMENT,
                                               "plan, info or an array of a work plan is NULL");
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_work_plan_set_quality(esa_work_plan *plan, int32_t count, const double *work,
                                     const double *psnr, const double *spread)
{
    if (!plan) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(plan->ctx));
    const esa_status status = esa_work_plan_rate(plan, "work plan", count, work, psnr, spread);
    esa_ctx_leave(plan->ctx);
    return status;
}

esa_status esa_work_plan_get_info(const esa_work_plan *plan, esa_work_plan_info *info)
{
    if (!plan || !info) return ESA_ERR_ARGUMENT;
    if (info->struct_size != sizeof *info) return ESA_ERR_VERSION;
    *info = plan->info;
    return ESA_OK;
}

esa_status esa_work_plan_get(const esa_work_plan *p, double *sigma, double *density, double *error,
                             double *weight)
{
    if (!p) return ESA_ERR_ARGUMENT;
    const int64_t cells = (int64_t)p->info.layers * p->info.steps;
    if (sigma) copy(sigma, p->sigma, p->info.steps);
    if (density) copy(density, p->density, p->info.points);
    if (error) copy(error, p->error, cells * p->info.points);
    if (weight) copy(weight, p->weight, cells);
    return ESA_OK;
}

esa_status esa_work_plan_expect(const esa_work_plan *plan, double work, double *psnr,
                                double *spread)
{
    if (!plan) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(plan->ctx));
    const esa_status status = expect(plan, work, psnr, spread);
    esa_ctx_leave(plan->ctx);
    return status;
}

esa_status esa_work_plan_reach(const esa_work_plan *plan, double psnr, double *work)
{
    if (!plan) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(plan->ctx));
    const esa_status status = work ? esa_work_plan_find(plan->ctx, plan, psnr, work)
                                   : esa_fail(plan->ctx, ESA_ERR_ARGUMENT, "work is NULL");
    esa_ctx_leave(plan->ctx);
    return status;
}
