/* work_plan_solve.c - maps a work plan to a run and solves for the density of each cell.
 * SPDX-License-Identifier: Apache-2.0 */
#include "workplan/work_plan.h"

#include <math.h>
#include <string.h>
#include "base/status.h"
#include "rules/anchors.h"
#include "rules/work_plan.h"
#include "rules/schedule.h"

esa_work_costs esa_work_costs_default(void)
{
    const esa_work_costs c = {
        .struct_size = (uint32_t)sizeof c, .branches = 1, .refresh_every = 1, .order_every = 1
    };
    return c;
}

/* A run to solve for: everything but the result. */
typedef struct run {
    int32_t layers, steps, points;
    const esa_work_costs *costs;
    int32_t *anchors, anchor_count;                   /* 0: no carry */
    double *sigma, *density, *error, *weight, *fixed; /* as in esa_plan_curves */
} run;

/* ---------------------------------------------------------------- curves of the run */

/* Noise level that the plan has after the share `part` of its steps. */
static double level_at(const esa_work_plan *p, double part)
{
    const double at = part * p->info.steps;
    const int32_t i = (int32_t)at, last = p->info.steps - 1;
    const double here = p->sigma[i < last ? i : last], next = i < last ? p->sigma[i + 1] : 0;
    return i > last ? 0 : here + (at - i) * (next - here);
}

static void noise_levels(run *r, const esa_work_plan *p, const double *sigma)
{
    for (int32_t t = 0; t < r->steps; t++) {
        const double part = (double)t / r->steps;
        r->sigma[t] = sigma ? sigma[t] : p ? level_at(p, part) : 1 - part;
    }
}

/* The length of a step in noise levels; the last one ends at 0. */
static double length_of(const double *sigma, int32_t steps, int32_t t)
{
    return sigma[t] - (t + 1 < steps ? sigma[t + 1] : 0);
}

/* Position of a noise level among the steps of the plan: between step i and i + 1. */
static int32_t place(const esa_work_plan *p, double sigma, double *part)
{
    const int32_t last = p->info.steps - 1;
    int32_t i = 0;
    *part = 0;
    if (sigma >= p->sigma[0]) return 0;
    while (i < last && p->sigma[i + 1] >= sigma) i++;
    if (i < last) *part = (p->sigma[i] - sigma) / (p->sigma[i] - p->sigma[i + 1]);
    return i;
}

/* The curves of a plan at the noise levels of the run; density and error may be NULL. An error in
 * one step moves the result in proportion to the step's length, so weights go with its square. */
static void curves_from_plan(run *r, const esa_work_plan *p)
{
    const int32_t T = p->info.steps, K = p->info.points;
    if (r->density) memcpy(r->density, p->density, (size_t)K * sizeof *r->density);
    for (int32_t t = 0; t < r->steps; t++) {
        double part;
        const int32_t i = place(p, r->sigma[t], &part), j = i + 1 < T ? i + 1 : i;
        const double run_length = length_of(r->sigma, r->steps, t);
        const double li = run_length / length_of(p->sigma, T, i),
                     lj = run_length / length_of(p->sigma, T, j);
        for (int32_t l = 0; l < r->layers; l++) {
            const int64_t cell = (int64_t)l * r->steps + t, a = (int64_t)l * T + i,
                          b = (int64_t)l * T + j;
            r->weight[cell] = (1 - part) * p->weight[a] * li * li + part * p->weight[b] * lj * lj;
            for (int32_t k = 0; r->error && k < K; k++)
                r->error[cell * K + k] = (1 - part) * p->error[a * K + k] +
                                         part * p->error[b * K + k];
        }
    }
}

static void curves_from_shape(run *r)
{
    for (int32_t k = 0; k < r->points; k++) r->density[k] = esa_shape_density(k);
    for (int64_t cell = 0; cell < (int64_t)r->layers * r->steps; cell++) {
        r->weight[cell] = 1;
        for (int32_t k = 0; k < r->points; k++)
            r->error[cell * r->points + k] = esa_shape_error(r->density[k]);
    }
}

/* Lets the curves begin at a density: points below it go, and the last of them moves up to it, with
 * the error between its neighbours. The dense end has error 0. */
static void begin_at(run *r, double floor)
{
    const int32_t K = r->points;
    int32_t first = 0; /* the first point that is not below */
    while (first < K && r->density[first] < floor) first++;
    if (!first) return;
    const double low = r->density[first - 1], high = first < K ? r->density[first] : 1,
                 part = (floor - low) / (high - low);
    r->points = K - first + 1;
    for (int64_t cell = 0; cell < (int64_t)r->layers * r->steps; cell++) {
        double *to = r->error + cell * r->points;
        const double *from = r->error + cell * K + first - 1;
        const double next = first < K ? from[1] : 0;
        to[0] = from[0] + part * (next - from[0]);
        memmove(to + 1, from + 1, (size_t)(K - first) * sizeof *to);
    }
    r->density[0] = floor;
    memmove(r->density + 1, r->density + first, (size_t)(K - first) * sizeof *r->density);
}

/* ---------------------------------------------------------------- costs */

/* What a sparse step of a layer pays for exact rows, and if it makes them, for its mask, its order
 * and its anchor. Branches may share what is made. A new order needs a new mask. */
static double price_of(const esa_work_costs *c, int32_t mask, int32_t order, int32_t anchor)
{
    const double made = mask * c->select + order * c->order + anchor;
    return c->exact + (c->share_branches ? made / c->branches : made);
}

/* The same for the n-th sparse step of a layer (from 0, of `steps`), by the schedules. */
static double price_by_schedule(const esa_work_costs *c, int32_t n, int32_t steps)
{
    const int32_t order = c->order > 0 && esa_schedule_makes(c->order_every, n, steps);
    const int32_t mask = order || esa_schedule_makes(c->refresh_every, n, steps);
    return price_of(c, mask, order, 0);
}

/* The sum over the sparse steps of a layer. d[steps]: 1 and more where it is dense. */
static double paid_by(const run *r, const double *d)
{
    double sum = 0;
    int32_t n = 0, sparse = 0, made = -1;
    for (int32_t t = 0; t < r->steps; t++) sparse += d[t] < 1;
    for (int32_t t = 0; t < r->steps; t++) {
        if (d[t] >= 1) continue;
        const int32_t due = r->anchor_count &&
                            esa_anchors_due(r->anchors, r->anchor_count, t, made);
        if (due) made = t;
        sum += r->anchor_count ? price_of(r->costs, due, due, due)
                               : price_by_schedule(r->costs, n++, sparse);
    }
    return sum;
}

/* What each cell pays beside its density: 1 where it must be dense, else the mean of its layer.
 * density is overwritten. */
static void set_fixed(const run *r, double *density, const uint8_t *dense)
{
    for (int32_t l = 0; l < r->layers; l++) {
        const int64_t first = (int64_t)l * r->steps;
        double *d = density + first;
        int32_t sparse = 0;
        for (int32_t t = 0; t < r->steps; t++) {
            d[t] = dense && dense[first + t] ? 1 : 0;
            sparse += d[t] < 1;
        }
        const double mean = sparse ? paid_by(r, d) / sparse : 0;
        for (int32_t t = 0; t < r->steps; t++) r->fixed[first + t] = d[t] < 1 ? mean : 1;
    }
}

/* The work of these densities. */
static double work_of(const run *r, const double *density)
{
    double sum = 0;
    for (int32_t l = 0; l < r->layers; l++) {
        const double *d = density + (int64_t)l * r->steps;
        for (int32_t t = 0; t < r->steps; t++) sum += d[t] < 1 ? d[t] : 1;
        sum += paid_by(r, d);
    }
    return sum / ((double)r->layers * r->steps);
}

/* Solves, and corrects for what the mean price of masks and orders leaves out: layers that the
 * solution gives dense steps pay theirs over fewer steps. */
static esa_status solve(esa_ctx *ctx, const run *r, double *density, const uint8_t *dense,
                        double work, double *realised)
{
    const esa_plan_curves curves = {
        (int64_t)r->layers * r->steps, r->points, r->density, r->error, r->weight, r->fixed, NULL
    };
    double asked = work, got = 0;
    set_fixed(r, density,
              dense); /* a cell whose mask costs as much as dense attention runs dense */
    for (int round = 0; round < 6; round++) {
        const double solved = esa_plan_solve(density, &curves, asked);
        got = work_of(r, density);
        const int32_t missed = round == 0 && solved > work + 1e-9;
        if (missed && r->costs->or_least) break;
        if (missed) {
            if (realised) *realised = solved;
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "work is %g, but at the lowest density (%g) masks, orders and "
                            "attention take %.3f",
                            work, r->density[0], solved);
        }
        if (fabs(got - work) < 1e-9) break;
        asked += work - got;
        asked = asked < 0 ? 0 : asked > 1 ? 1 : asked;
    }
    if (realised) *realised = got;
    return ESA_OK;
}

/* ---------------------------------------------------------------- the call */

static esa_status check_layers(esa_ctx *ctx, const esa_work_plan *p, int32_t layers)
{
    if (p->info.layers == layers) return ESA_OK;
    return esa_fail(ctx, ESA_ERR_ARGUMENT,
                    "the work plan was made for %d layers, but the run has %d", p->info.layers,
                    layers);
}

static esa_status check(esa_ctx *ctx, const esa_work_plan *p, int32_t layers, int32_t steps,
                        const double *sigma, double work, const esa_work_costs *c)
{
    if (layers < 1 || steps < 1 || layers > ESA_WORK_MAX_AXIS || steps > ESA_WORK_MAX_AXIS)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "the run has %d layers and %d steps, expected 1 to %d of each", layers,
                        steps, ESA_WORK_MAX_AXIS);
    if (p) ESA_TRY(check_layers(ctx, p, layers));
    if (!(work >= 0 && work <= 1))
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "work is %g, expected 0 to 1", work);
    if (c->struct_size != sizeof *c)
        return esa_fail(ctx, ESA_ERR_VERSION,
                        "esa_work_costs has struct_size %u, this library expects %u",
                        (unsigned)c->struct_size, (unsigned)sizeof *c);
    if (!esa_schedule_valid(c->refresh_every) || !esa_schedule_valid(c->order_every))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "refresh_every is %d and order_every is %d, expected 0 or more, or "
                        "ESA_REFRESH_EARLY (%d)",
                        c->refresh_every, c->order_every, ESA_REFRESH_EARLY);
    if (c->branches < 1 || !(c->select >= 0) || !(c->order >= 0) || !(c->exact >= 0) ||
        !(c->floor >= 0 && c->floor <= 1))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "branches is %d, select %g, order %g, exact %g, floor %g: expected at "
                        "least 1, numbers of at least 0, and a floor up to 1",
                        c->branches, c->select, c->order, c->exact, c->floor);
    ESA_TRY(esa_anchors_check(ctx, c->carry, c->anchors, c->anchor_count, steps));
    for (int32_t i = 0; sigma && i < steps; i++)
        if (!(sigma[i] >= 0 && sigma[i] <= 1 && (i == 0 || sigma[i] < sigma[i - 1])))
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "the noise level of step %d is %g, expected falling numbers within "
                            "0 .. 1",
                            i, sigma[i]);
    return ESA_OK;
}

esa_status esa_work_plan_weights(esa_ctx *ctx, const esa_work_plan *p, double *weight,
                                 int32_t layers, int32_t steps)
{
    ESA_TRY(check_layers(ctx, p, layers));
    run r = { .layers = layers, .steps = steps, .points = p->info.points, .weight = weight };
    r.sigma = esa_mem_alloc(&ctx->mem, 8 * (int64_t)steps);
    if (!r.sigma) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the weights of a plan");
    noise_levels(&r, p, NULL);
    curves_from_plan(&r, p);
    esa_mem_free(&ctx->mem, r.sigma, 8 * (int64_t)steps);
    return ESA_OK;
}

esa_status esa_work_plan_densities(esa_ctx *ctx, const esa_work_plan *p, double *density,
                                   int32_t layers, int32_t steps, const double *sigma,
                                   const uint8_t *dense, double work, const esa_work_costs *costs,
                                   double *realised)
{
    const esa_work_costs fallback = esa_work_costs_default();
    if (!costs) costs = &fallback;
    ESA_TRY(check(ctx, p, layers, steps, sigma, work, costs));
    run r = { .layers = layers,
              .steps = steps,
              .points = p ? p->info.points : ESA_SHAPE_POINTS,
              .costs = costs };
    const int64_t cells = (int64_t)layers * steps;
    const int64_t bytes = 8 * (2 * steps + r.points + cells * (r.points + 2));
    double *memory = esa_mem_alloc(&ctx->mem, bytes);
    if (!memory)
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the densities of %d x %d cells",
                        layers, steps);
    r.sigma = memory;
    r.density = r.sigma + steps;
    r.error = r.density + r.points;
    r.weight = r.error + cells * r.points;
    r.fixed = r.weight + cells;
    r.anchors = (int32_t *)(r.fixed + cells);
    r.anchor_count = esa_anchors_of(r.anchors, costs->carry, costs->anchors, costs->anchor_count,
                                    steps);
    noise_levels(&r, p, sigma);
    if (p)
        curves_from_plan(&r, p);
    else
        curves_from_shape(&r);
    begin_at(&r, costs->floor);
    const esa_status status = solve(ctx, &r, density, dense, work, realised);
    esa_mem_free(&ctx->mem, memory, bytes);
    return status;
}

esa_status esa_work_plan_solve(esa_ctx *ctx, const esa_work_plan *plan, double *density,
                               int32_t layers, int32_t steps, const double *sigma,
                               const uint8_t *dense, double work, const esa_work_costs *costs,
                               double *realised)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = density ? esa_work_plan_densities(ctx, plan, density, layers, steps,
                                                                sigma, dense, work, costs, realised)
                                      : esa_fail(ctx, ESA_ERR_ARGUMENT, "density is NULL");
    esa_ctx_leave(ctx);
    return status;
}
