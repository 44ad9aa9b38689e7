/* mask_spend.c - spreads a total work over the cells of a recording of errors, and writes their
 * masks.
 * SPDX-License-Identifier: Apache-2.0
 *
 * 1. Every cell is tried at a few budgets. That gives its curve: what each budget costs, and which
 *    error it leaves.
 * 2. For each work, the rule of rules/work_plan.h finds the costs of all cells with the least
 *    weighted sum of errors, and the curves turn costs into budgets.
 * 3. All masks are made once to count what they cost. The difference to the work, which comes from
 *    whole blocks and from between the points of the curves, is added to what is asked for. After a
 *    few rounds the best one is written.
 *
 * The recording is read from the file in each pass; memory holds one cell and the curves. */
#include "maskfile/mask_build.h"

#include <math.h>
#include <string.h>
#include "base/status.h"
#include "rules/work_plan.h"
#include "workplan/work_plan.h"

enum { POINTS = 24, ROUNDS = 4 };

static const double budgets[POINTS] = { 0.02, 0.03, 0.04, 0.055, 0.07, 0.085, 0.10, 0.12,
                                        0.14, 0.17, 0.20, 0.235, 0.27, 0.31,  0.35, 0.40,
                                        0.45, 0.51, 0.57, 0.635, 0.70, 0.775, 0.85, 0.925 };

/* Nearer than this, the work is met. */
static const double close_enough = 2e-4;

typedef struct spending {
    esa_ctx *ctx;
    esa_mask_output *out;
    const esa_recording *rec;
    int32_t count;
    const esa_mask_axes *axes;
    esa_error_cell cell;
    int64_t cells;      /* stored cells */
    int64_t runs;       /* calls of a run that use them: one per branch, stored layer and step */
    int64_t dense_runs; /* its other calls */
    double exact;       /* work of the exact rows of one call */
    int32_t *steps;     /* [Gs] steps of each stored group that use its masks */
    /* [cells]; cost and error: [cells][POINTS] */
    double *weight, *cost, *error, *budget, *best;
    /* the same per run */
    double *run_weight, *run_cost, *run_error, *run_out;
    double *memory; /* owned: all arrays of numbers */
    int64_t bytes;
} spending;

/* Number of the recorded cell of a stored cell. */
static int64_t recorded_cell(const spending *s, int64_t i)
{
    const esa_mask_file_info *f = &s->out->info;
    const int64_t g = i % f->stored_groups, l = i / f->stored_groups % f->stored_layers,
                  b = i / f->stored_groups / f->stored_layers;
    return (b * f->layers + s->axes->stored_layer[l]) * f->groups + s->axes->stored_group[g];
}

static int32_t steps_of(const spending *s, int64_t i)
{
    return s->steps[i % s->out->info.stored_groups];
}

/* ---------------------------------------------------------------- curves */

static void measure(spending *s)
{
    for (int64_t i = 0; i < s->cells; i++) {
        esa_error_cell_load(&s->cell, s->rec, s->count, recorded_cell(s, i));
        for (int32_t k = 0; k < POINTS; k++) {
            esa_error_cell_choose(&s->cell, budgets[k]);
            s->cost[i * POINTS + k] = esa_error_cell_work(&s->cell);
            s->error[i * POINTS + k] = esa_error_cell_error(&s->cell);
        }
    }
}

/* Mean weight of the steps that use a cell. */
static esa_status weigh(spending *s, const esa_work_plan *plan)
{
    const esa_mask_file_info *f = &s->out->info;
    for (int64_t i = 0; i < s->cells; i++) s->weight[i] = plan ? 0 : 1;
    if (!plan) return ESA_OK;
    const int64_t bytes = 8 * (int64_t)f->layers * f->steps;
    double *weight = esa_mem_alloc(&s->ctx->mem, bytes);
    if (!weight) return esa_fail(s->ctx, ESA_ERR_MEMORY, "out of memory for the weights of a plan");
    const esa_status status = esa_work_plan_weights(s->ctx, plan, weight, f->layers, f->steps);
    const int32_t warmup = esa_warmup_steps(f->warmup_frac, f->steps);
    for (int64_t i = 0; !status && i < s->cells; i++) {
        const int32_t l = s->axes->stored_layer[i / f->stored_groups % f->stored_layers],
                      g = s->axes->stored_group[i % f->stored_groups];
        for (int32_t t = warmup; t < f->steps; t++)
            if (s->axes->step_group[t] == g)
                s->weight[i] += weight[(int64_t)l * f->steps + t] / steps_of(s, i);
    }
    esa_mem_free(&s->ctx->mem, weight, bytes);
    return status;
}

/* Repeats the curves for every step: a group of more steps counts more often. */
static void expand(spending *s)
{
    int64_t n = 0;
    for (int64_t i = 0; i < s->cells; i++)
        for (int32_t k = 0; k < steps_of(s, i); k++, n++) {
            s->run_weight[n] = s->weight[i];
            memcpy(s->run_cost + n * POINTS, s->cost + i * POINTS, POINTS * sizeof(double));
            memcpy(s->run_error + n * POINTS, s->error + i * POINTS, POINTS * sizeof(double));
        }
}

/* The budget at which a cell costs so much, between the points of its curve. A sparse cell with
 * every block costs more than a dense one: it still has exact rows. */
static double budget_at(const spending *s, int64_t i, double cost)
{
    const double *c = s->cost + i * POINTS;
    if (cost >= 1) return 1;
    int32_t k = 0;
    while (k < POINTS && c[k] < cost) k++;
    if (k == 0) return budgets[0];
    const double c1 = k < POINTS ? c[k] : 1 + s->exact, b1 = k < POINTS ? budgets[k] : 1,
                 b0 = budgets[k - 1];
    return c1 > c[k - 1] ? b0 + (b1 - b0) * (cost - c[k - 1]) / (c1 - c[k - 1]) : b0;
}

/* ---------------------------------------------------------------- one work */

/* Sets budget[] for a mean cost per run; returns the mean cost that the solution has. */
static double solve(spending *s, double mean)
{
    const esa_plan_curves curves = { s->runs,       POINTS, budgets,    s->run_error,
                                     s->run_weight, NULL,   s->run_cost };
    const double solved = esa_plan_solve(s->run_out, &curves, mean);
    int64_t n = 0;
    for (int64_t i = 0; i < s->cells; n += steps_of(s, i++))
        s->budget[i] = budget_at(s, i, s->run_out[n]);
    return solved;
}

/* Makes the masks of budget[] and returns their mean cost per run. */
static double count_costs(spending *s)
{
    double sum = 0;
    for (int64_t i = 0; i < s->cells; i++) {
        double cost = 1;
        if (s->budget[i] < 1) {
            esa_error_cell_load(&s->cell, s->rec, s->count, recorded_cell(s, i));
            esa_error_cell_choose(&s->cell, s->budget[i]);
            cost = esa_error_cell_work(&s->cell);
        }
        sum += cost * steps_of(s, i);
    }
    return sum / (double)s->runs;
}

static esa_status write_cells(spending *s, int32_t b)
{
    esa_mask_output *out = s->out;
    const int64_t H = out->info.H;
    uint8_t *fine = out->bits + out->cell_bytes;
    for (int64_t i = 0; i < s->cells; i++) {
        const esa_mask *m = s->cell.mask;
        esa_error_cell_load(&s->cell, s->rec, s->count, recorded_cell(s, i));
        esa_error_cell_choose(&s->cell, s->best[i]);
        esa_mask_write_bits(out->bits, m, m->count, m->index);
        if (m->fine) esa_mask_write_bits(fine, m, m->fine_count, m->fine_index);
        for (int64_t h = 0; h < H; h++) {
            const double all = s->cell.left[H + h];
            out->heads[h] = all > 0 ? (float)(1 - s->cell.left[h] / all) : 1;
        }
        const esa_cell_masks masks = { out->bits, fine, out->heads, (float)s->best[i] };
        ESA_TRY(esa_mask_output_masks(out, i, b, &masks));
    }
    return ESA_OK;
}

static esa_status spend(spending *s, int32_t b)
{
    const double work = s->out->info.budget_permille[b] / 1000.0,
                 all = (double)s->runs + (double)s->dense_runs,
                 mean = (work * all - (double)s->dense_runs) / (double)s->runs;
    double asked = mean, nearest = INFINITY;
    for (int32_t round = 0; round < ROUNDS && nearest > close_enough; round++) {
        const double solved = solve(s, asked);
        if (round == 0 && solved > mean + 1e-9)
            return esa_fail(
                s->ctx, ESA_ERR_ARGUMENT,
                "work is %.3f, but forced blocks, one block per row, means, %d exact rows per "
                "query block and dense calls take %.3f",
                work, s->out->info.exact_rows,
                (solved * (double)s->runs + (double)s->dense_runs) / all);
        const double off = mean - count_costs(s);
        if (fabs(off) < nearest) {
            nearest = fabs(off);
            memcpy(s->best, s->budget, (size_t)s->cells * sizeof *s->best);
        }
        asked += off;
        asked = asked < 0 ? 0 : asked > 1 ? 1 : asked;
    }
    return write_cells(s, b);
}

/* ---------------------------------------------------------------- all works */

/* Counts the steps that use each stored group, and the calls of a run. */
static void count_steps(spending *s)
{
    const esa_mask_file_info *f = &s->out->info;
    const int32_t warmup = esa_warmup_steps(f->warmup_frac, f->steps);
    int64_t steps = 0;
    for (int32_t g = 0; g < f->stored_groups; g++) {
        s->steps[g] = 0;
        for (int32_t t = warmup; t < f->steps; t++)
            s->steps[g] += s->axes->step_group[t] == s->axes->stored_group[g];
        steps += s->steps[g];
    }
    s->runs = steps * f->stored_layers * f->branches;
    s->dense_runs = (int64_t)f->layers * f->steps * f->branches - s->runs;
}

static esa_status reserve(spending *s)
{
    const int64_t numbers = s->cells * (3 + 2 * POINTS) + s->runs * (2 + 2 * POINTS);
    s->bytes = esa_size_mul(numbers, 8);
    s->memory = esa_mem_alloc(&s->ctx->mem, s->bytes);
    if (!s->memory)
        return esa_fail(s->ctx, ESA_ERR_MEMORY, "out of memory for the curves of %lld cells",
                        (long long)s->cells);
    s->weight = s->memory;
    s->budget = s->weight + s->cells;
    s->best = s->budget + s->cells;
    s->cost = s->best + s->cells;
    s->error = s->cost + s->cells * POINTS;
    s->run_weight = s->error + s->cells * POINTS;
    s->run_out = s->run_weight + s->runs;
    s->run_cost = s->run_out + s->runs;
    s->run_error = s->run_cost + s->runs * POINTS;
    return ESA_OK;
}

static esa_status build(spending *s, const esa_work_plan *plan)
{
    ESA_TRY(reserve(s));
    ESA_TRY(esa_error_cell_create(s->ctx, &s->cell, &s->out->info));
    ESA_TRY(weigh(s, plan));
    measure(s);
    expand(s);
    for (int32_t b = 0; b < s->out->info.budget_count; b++) ESA_TRY(spend(s, b));
    return ESA_OK;
}

esa_status esa_mask_build_errors(esa_mask_output *out, const esa_recording *rec, int32_t count,
                                 const esa_mask_axes *axes, const esa_work_plan *plan)
{
    spending s = {
        .ctx = out->ctx, .out = out, .rec = rec, .count = count, .axes = axes, .cells = out->cells
    };
    const int64_t steps_bytes = 4 * (int64_t)out->info.stored_groups;
    s.steps = esa_mem_alloc(&s.ctx->mem, steps_bytes);
    if (!s.steps) return esa_fail(s.ctx, ESA_ERR_MEMORY, "out of memory for the steps of a run");
    count_steps(&s);
    s.exact = esa_mask_file_exact_work(&out->info);
    const esa_status status = build(&s, plan);
    esa_error_cell_free(&s.cell);
    esa_mem_free(&s.ctx->mem, s.memory, s.bytes);
    esa_mem_free(&s.ctx->mem, s.steps, steps_bytes);
    return status;
}
