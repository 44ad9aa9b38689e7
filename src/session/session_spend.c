/* session_spend.c - the budget of each cell, and the work of calls.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include "session/session.h"

#include "rules/schedule.h"
#include "rules/work.h"
#include "workplan/work_plan.h"

/* 1 if the rules of the params make the cell dense. */
static int32_t is_dense(const esa_session *s, int32_t layer, int32_t step)
{
    return s->dense_layer[layer] || step < s->warmup;
}

/* 1 if the cell shall run sparse. */
static int32_t is_sparse(const esa_session *s, int32_t layer, int32_t step)
{
    const int64_t cell = (int64_t)layer * s->params.steps + step;
    return !is_dense(s, layer, step) && !(s->density && s->density[cell] >= 1);
}

int32_t esa_session_sparse_before(const esa_session *s, int32_t layer, int32_t step)
{
    int32_t n = 0;
    for (int32_t t = 0; t < step; t++) n += is_sparse(s, layer, t);
    return n;
}

/* 1 if a mask that is made now does not serve step t, the n-th sparse step after this one. */
static int32_t is_over(const esa_session *s, const esa_session_turn *turn, int32_t t, int32_t n)
{
    const esa_session_params *p = &s->params;
    if (s->carry.anchor_count) return esa_session_anchor_due(s, t, s->step);
    return esa_schedule_due(p->refresh_every, turn->mask + n, turn->steps, turn->mask) ||
           (turn->adaptive &&
            esa_schedule_due(p->order_every, turn->order + n, turn->steps, turn->order_at));
}

double esa_session_budget(const esa_session *s, int32_t layer, const esa_session_turn *turn)
{
    if (!s->density) return s->params.select.budget;
    const double *density = s->density + (int64_t)layer * s->params.steps;
    double sum = 0;
    int32_t n = 0;
    for (int32_t t = s->step; t < s->params.steps; t++) {
        if (!is_sparse(s, layer, t)) continue;
        if (n && is_over(s, turn, t, n)) break;
        sum += density[t];
        n++;
    }
    if (!n) return s->params.select.budget;
    const double mean = (sum / n - s->means) / (1 - s->means);
    return mean > 0 ? mean : 0;
}

int32_t esa_session_runs_dense(const esa_session *s, int32_t layer)
{
    return s->density && s->density[(int64_t)layer * s->params.steps + s->step] >= 1;
}

/* ---------------------------------------------------------------- costs */

double esa_session_order_work(const esa_plan *p)
{
    const esa_shapes *h = &p->shapes;
    return esa_work_order(&p->select, h->Hq, h->Hkv, h->Nq, h->Nk, h->D);
}

double esa_session_select_work(const esa_plan *p)
{
    return esa_work_select(&p->select, p->shapes.Nq, p->shapes.Nk, p->shapes.Nk);
}

/* Exact rows of one sparse call. */
static double exact_work(const esa_plan *p)
{
    const esa_attn_args a = { .block_q = p->select.block_q,
                              .Nq = p->shapes.Nq,
                              .nq = p->nq,
                              .exact_rows = p->attention.exact_rows };
    return (double)esa_work_exact_rows(&a) / (double)a.Nq;
}

esa_session_price esa_session_price_of(const esa_session_call *c, const esa_session_plan *e,
                                       const esa_session_sparse *f)
{
    const esa_shapes *h = &e->plan->shapes;
    esa_session_price p = { .sparse = (double)NAN };
    if (c->kind != ESA_CALL_SELF) return p;
    p.dense = (double)h->B * (double)h->Hq * (double)h->Nq * (double)h->Nk * (double)h->D;
    if (!f) return p;
    p.args.tail = e->plan->attention.tail;
    p.args.block_q = e->mask->block_q;
    p.args.block_k = e->mask->block_k;
    p.args.exact_rows = e->plan->attention.exact_rows;
    p.args.Nq = e->mask->Nq;
    p.args.nq = e->mask->nq;
    p.args.Nk = e->mask->Nk;
    p.args.fine = e->mask->fine;
    p.rows = e->mask->B * e->mask->H * e->mask->nq;
    p.extra = (f->made ? esa_session_select_work(e->plan) : 0) +
              (f->ordered ? esa_session_order_work(e->plan) : 0) + f->anchor;
    if (f->anchor) p.args.exact_rows = 0;
    if (e->plan->backend->host_memory) { /* the lists are at hand */
        esa_attn_args args;
        esa_bind_attention(&args, h, &e->plan->attention, e->mask, NULL);
        args.exact_rows = p.args.exact_rows;
        p.sparse = esa_work_attention(&args);
    }
    return p;
}

double esa_session_price_work(const esa_session_price *p, const int64_t *facts)
{
    return p->extra + (isnan(p->sparse) ? esa_work_facts(&p->args, facts, p->rows) : p->sparse);
}

/* Share of dense attention that the mean of one skipped block takes. */
static double mean_of(const esa_plan *p)
{
    return p->attention.tail == ESA_TAIL_NONE ? 0 : 1.0 / p->select.block_k;
}

/* Share of dense attention that the means of a tail take for skipped blocks, where the budget of
 * the selector counts blocks only. Solved densities include it. */
static double means_of(const esa_plan *p) { return esa_select_fine(&p->select) ? 0 : mean_of(p); }

static double floor_work(const esa_plan *p)
{
    esa_select_args a;
    esa_bind_select(&a, &p->shapes, &p->select, NULL, NULL, NULL);
    return esa_work_floor(&a, p->shapes.Nk, mean_of(p));
}

static esa_work_costs costs_of(const esa_session_params *q, const esa_plan *p)
{
    const int32_t adaptive = p->select.layout.order == ESA_ORDER_ADAPTIVE &&
                             !p->select.layout.order_applied;
    esa_work_costs costs = esa_work_costs_default();
    costs.branches = q->step_branches  ? q->step_branches
                     : q->branches < 2 ? q->branches
                                       : 2; /* guidance has two */
    costs.share_branches = q->share_branches;
    costs.refresh_every = q->refresh_every;
    costs.order_every = q->order_every;
    costs.select = esa_session_select_work(p);
    costs.order = adaptive ? esa_session_order_work(p) : 0;
    costs.exact = exact_work(p);
    costs.floor = floor_work(p);
    costs.or_least = q->work_or_least;
    costs.carry = q->carry;
    costs.anchors = q->anchors;
    costs.anchor_count = q->anchor_count;
    return costs;
}

static esa_status costs_checked(esa_ctx *ctx, esa_work_costs *costs, const esa_session_params *q,
                                const esa_shapes *shapes)
{
    esa_plan *plan;
    if (!costs || !q || !shapes)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "%s is NULL",
                        !costs ? "costs"
                        : !q   ? "params"
                               : "shapes");
    if (costs->struct_size != sizeof *costs || q->struct_size != sizeof *q)
        return esa_fail(ctx, ESA_ERR_VERSION,
                        "esa_work_costs has struct_size %u and esa_session_params %u, this library "
                        "expects %u and %u",
                        (unsigned)costs->struct_size, (unsigned)q->struct_size,
                        (unsigned)sizeof *costs, (unsigned)sizeof *q);
    if (q->mode != ESA_SESSION_ONLINE)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "mode is %d, expected ESA_SESSION_ONLINE (%d)",
                        q->mode, ESA_SESSION_ONLINE);
    esa_attention_params attention = q->attention;
    attention.exact_rows = esa_session_exact_rows(q);
    ESA_TRY(esa_plan_make(ctx, &plan, shapes, &q->select, &attention));
    *costs = costs_of(q, plan);
    esa_plan_free(plan);
    return ESA_OK;
}

esa_status esa_session_costs(esa_ctx *ctx, esa_work_costs *costs, const esa_session_params *params,
                             const esa_shapes *shapes)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = costs_checked(ctx, costs, params, shapes);
    esa_ctx_leave(ctx);
    return status;
}

/* ---------------------------------------------------------------- solving */

esa_status esa_session_solve(esa_session *s, const esa_plan *p)
{
    if (!s->density || s->given) return ESA_OK;
    if (s->solved && esa_session_same_shapes(&s->solved_for, &p->shapes)) return ESA_OK;
    const esa_session_params *q = &s->params;
    esa_work_costs costs = costs_of(q, p);
    costs.anchors = s->carry.anchors;
    costs.anchor_count = s->carry.anchor_count;
    if (!costs.anchor_count) costs.carry = ESA_CARRY_OFF;
    const int64_t cells = (int64_t)q->layers * q->steps;
    uint8_t *dense = esa_mem_alloc(&s->ctx->mem, cells);
    if (!dense)
        return esa_fail(s->ctx, ESA_ERR_MEMORY, "out of memory for the densities of %lld cells",
                        (long long)cells);
    for (int32_t l = 0; l < q->layers; l++)
        for (int32_t t = 0; t < q->steps; t++)
            dense[(int64_t)l * q->steps + t] = (uint8_t)is_dense(s, l, t);
    const esa_status status = esa_work_plan_densities(
        s->ctx, q->plan, s->density, q->layers, q->steps, s->sigma, dense, q->work, &costs, NULL);
    esa_mem_free(&s->ctx->mem, dense, cells);
    if (status) return status;
    s->solved = 1;
    s->solved_for = p->shapes;
    s->means = means_of(p);
    return ESA_OK;
}
