/* session.h - what a session holds, and the rooms behind its public calls.
 * SPDX-License-Identifier: Apache-2.0
 *
 *   session.c           makes a session, sets step and branch
 *   session_defaults.c  the recommended settings
 *   session_call.c      runs one attention call
 *   session_masks.c     makes and reuses masks and orders
 *   session_spend.c     the budget of each layer and step
 *   session_plans.c     plans per shape
 *   session_kept.c      mask bits and orders kept between calls
 *   session_carry.c     differences kept between calls, and their anchors
 *   session_lanes.c     differences in host memory, copied beside the work
 *   session_check.c     checks the first difference on a device
 *   session_figures.c   times and densities of single calls
 *   session_stats.c     statistics: their sums
 *   session_cache.c     which steps may use the output of an earlier one
 *   session_probe.c     measures the error at several densities
 *   session_record.c    saves and resumes recordings */
#ifndef ESA_SESSION_SESSION_INTERNAL_H
#define ESA_SESSION_SESSION_INTERNAL_H

#include "base/engine.h"
#include "attn/attn.h"
#include "maskfile/mask_file.h"
#include "maskfile/recording.h"
#include "rules/step_cache.h"
#include "session/session_figures.h"
#include "session/session_kept.h"

#define ESA_SESSION_PLANS 8 /* plans kept; a new one replaces the least recently used */

/* A plan for one shape. Dense calls and cross-attention have plans without a selector. */
typedef struct esa_session_plan {
    esa_plan *plan; /* NULL: free place */
    esa_mask *mask; /* ONLINE: [B,...]; CACHED: [1,...]; NULL for dense plans */
    /* f32[levels][B][H][nq][nk] for RECORD, and f32[B][H][nq][nk] for ONLINE entropy where the host
     * can read it (for the kept mass); else NULL */
    float *importance;
    int64_t importance_bytes;
    int32_t kind; /* ESA_CALL_*: cross-attention is never causal and has no tail */
    int32_t sparse;
    const int32_t *kv_len;
    uint64_t used; /* tick of the last use */
} esa_session_plan;

/* Sums of one (layer, step) over branches and calls. Density and times are added later
 * (session_figures.h). */
typedef struct esa_session_cell {
    int64_t calls, dense, sparse, fallback, eight, made, loaded, with_mass, by_head;
    int64_t anchors, carried, age; /* age: sum over the carried calls */
    /* Sums over sparse calls. with_mass counts those that have a mass, by_head those that
     * esa_session.head includes. */
    double asked, density, mass;
    double select_seconds, attention_seconds;
    /* Self-attention calls: multiply-adds of dense attention in units of 2, and the work in it. */
    double dense_work, work;
    const char *kernel; /* kernel set of the last call, static storage; NULL: no call yet */
    int64_t when;       /* number of that call, ascending over the session */
} esa_session_cell;

struct esa_session {
    esa_ctx *ctx;
    /* As given, but only the pointers masks and plan are kept. dense_layer, density, sigma, model
     * and config_hash below are copies, and so are the layers. */
    esa_session_params params;
    char model[128], config_hash[80];
    int32_t warmup;       /* dense steps at the beginning */
    uint8_t *dense_layer; /* [L] flags */
    uint8_t *layer16;     /* [L] flags: runs in 16 bits whatever the precision */
    double *density;      /* [L][T] budgets; NULL: params.select.budget everywhere */
    double *sigma;        /* [T] or NULL */
    int32_t given;        /* 1: density was given; else it is solved */
    int32_t solved;       /* 1: density is solved, for these shapes */
    esa_shapes solved_for;
    double means;         /* part of the solved densities that pays for means, per skipped block */
    int32_t step, branch; /* -1: not set yet */
    int32_t begun;        /* 1: esa_session_begin was called */
    const int32_t *kv_len;
    const esa_budget_masks *masks; /* CACHED: masks of the budget, owned by the mask file */
    int32_t permille;              /* CACHED: the budget */
    esa_session_plan plan[ESA_SESSION_PLANS];
    uint64_t tick;
    esa_session_kept *kept; /* [branches][L]; ONLINE, if masks or orders are used again */
    esa_session_cell *cell; /* [L][T] */
    /* [L][T][heads]: sums of the densities of sparse calls whose counts the host can read; NULL:
     * none yet */
    double *head;
    int64_t heads;         /* heads of the first such call */
    esa_recorder recorder; /* RECORD */
    struct {               /* PROBE */
        int32_t points;
        double density[ESA_WORK_MAX_POINTS];
        double *sum; /* [L][T][points + 1]: errors, and the number of calls */
        int64_t bytes;
        esa_session_kept *kept; /* carry: [branches][L][points]; else NULL */
        int64_t kept_count;
        /* in host memory: sums of heads, and what is compared there; on a device without host
         * memory: a second output */
        void *o, *device;
        int64_t o_bytes, device_bytes;
        const esa_backend *backend; /* of device */
    } probe;
    esa_step_cache cache;      /* steps 0: esa_session_cache_begin was not called */
    esa_session_chunks chunks; /* CACHED: bits on the device */
    esa_session_carry carry;
    esa_session_figures figures;
};

/* ---------------------------------------------------------------- rooms
 * These do the work of the public calls (esa_session.h). The caller holds the ctx guard. The engine
 * uses them. */

ESA_ENGINE esa_status esa_session_make(esa_ctx *ctx, esa_session **session,
                                       const esa_session_params *params);
ESA_ENGINE esa_status esa_session_start(esa_session *s);
/* Bytes of device memory that calls of self-attention with these shapes need; upper bounds. */
typedef struct esa_session_bytes {
    int64_t scratch;
    int64_t kept;  /* masks, orders, and a second output */
    int64_t carry; /* all differences together; 0: the session does not carry */
    /* The least device memory for differences: with less in carry_room, they still take so much. */
    int64_t carry_least;
} esa_session_bytes;
/* Also reports settings of the selection that cannot run, before the first call that would. */
ESA_ENGINE esa_status esa_session_room(const esa_session *s, const esa_shapes *shapes,
                                       esa_session_bytes *bytes);
/* Sets params.carry_room, before the first call that carries. */
ESA_ENGINE void esa_session_limit_carry(esa_session *s, int64_t room);
ESA_ENGINE esa_status esa_session_place(esa_session *s, int32_t step, int32_t branch);
ESA_ENGINE esa_status esa_session_attend(esa_session *s, int32_t layer, int32_t kind,
                                         const esa_qkvo *t);
ESA_ENGINE esa_status esa_session_sum(const esa_session *s, esa_session_stats *stats, int32_t layer,
                                      int32_t step);
ESA_ENGINE esa_status esa_session_save(esa_session *s, const char *path);
ESA_ENGINE esa_status esa_session_resume(esa_session *s, const char *path);

/* esa_session_set_kv_len for a caller that holds the guard. */
ESA_INLINE void esa_session_keys(esa_session *s, const int32_t *kv_len) { s->kv_len = kv_len; }

/* The step cache of a run: warm-up steps are computed, but a dense session has none. */
ESA_INLINE esa_step_cache esa_session_new_cache(const esa_session *s, double threshold)
{
    return esa_step_cache_begin(threshold, s->params.steps,
                                s->params.mode == ESA_SESSION_DENSE ? 0 : s->warmup);
}

/* ---------------------------------------------------------------- between the files here */

typedef struct esa_session_call {
    esa_session *s;
    int32_t layer, kind;
    const esa_qkvo *t;
} esa_session_call;

/* Figures of a sparse call. They are booked only when the call has succeeded. */
typedef struct esa_session_sparse {
    double asked, mass;
    const int64_t *facts; /* [ESA_FACTS] on the device */
    int32_t made, loaded, ordered;
    /* Carry. diff NULL: the call has none. anchor: the call runs dense too and makes it. */
    esa_session_diff *diff;
    int32_t anchor, age;
} esa_session_sparse;

/* Where a step stands in the schedules of its layer (rules/schedule.h). With carry the anchors take
 * their place, and only adaptive is read. */
typedef struct esa_session_turn {
    int32_t steps;       /* sparse steps of the layer in the run */
    int32_t mask, order; /* number of this step, from 0, as refresh_every and order_every count */
    int32_t order_at;    /* that of the step at which the order in use was made */
    int32_t adaptive;    /* 0: there are no orders to make */
} esa_session_turn;

/* Fills e->mask for an ONLINE call: makes mask and order, or reuses them. (session_masks.c) */
esa_status esa_session_online_mask(const esa_session_call *c, const esa_session_plan *e,
                                   esa_session_sparse *f);

/* CACHED with carry: *cell is the stored mask of this step; it becomes the one to use now, which is
 * that of the last anchor. (session_masks.c) */
esa_status esa_session_held_cell(const esa_session_call *c, const esa_session_plan *e,
                                 int64_t *cell, esa_session_sparse *f);

/* The difference that a call of the next layer will add if this one adds or makes diff; the layer
 * after the last is the first. NULL: none. (session_masks.c) */
esa_session_diff *esa_session_next_diff(const esa_session *s, int32_t layer,
                                        const esa_session_diff *diff);

/* Checks the difference d that this call has just made, if it is the first one of the session on
 * a device without host memory. Waits. ESA_ERR_INTERNAL if it is wrong. (session_check.c) */
esa_status esa_session_check_diff(const esa_session_call *c, const esa_session_plan *e,
                                  const esa_carry *d);

/* kept of esa_session_room for calls that are all like the plan, which is sparse. */
int64_t esa_session_kept_bytes(const esa_session_params *params, const esa_plan *plan);

/* (session_spend.c) With params.work: solves for the densities of all cells, once per shape. */
esa_status esa_session_solve(esa_session *s, const esa_plan *p);
/* Number of steps before `step` at which the layer shall run sparse. */
int32_t esa_session_sparse_before(const esa_session *s, int32_t layer, int32_t step);
/* The budget of a mask that is made now, and 1 if the cell of this layer and step runs dense. */
double esa_session_budget(const esa_session *s, int32_t layer, const esa_session_turn *turn);
int32_t esa_session_runs_dense(const esa_session *s, int32_t layer);
/* (session_probe.c) Measures a call whose dense result is in its o. */
esa_status esa_session_probe_make(esa_session *s, const esa_session_params *p);
esa_status esa_session_probe_call(const esa_session_call *c, const esa_session_plan *e);
void esa_session_probe_forget(esa_session *s);
void esa_session_probe_free(esa_session *s);
/* What a call costs; f NULL: it runs dense. Cross-attention is no part of the work. Then the work
 * itself, with the facts of the mask where they decide it. */
esa_session_price esa_session_price_of(const esa_session_call *c, const esa_session_plan *e,
                                       const esa_session_sparse *f);
double esa_session_price_work(const esa_session_price *p, const int64_t *facts);
/* Work of one selection and of one order. */
double esa_session_select_work(const esa_plan *p);
double esa_session_order_work(const esa_plan *p);

/* The sums of the current (layer, step). */
static inline esa_session_cell *esa_session_at(esa_session *s, int32_t layer)
{
    return &s->cell[(int64_t)layer * s->params.steps + s->step];
}
/* attention.exact_rows with -1 resolved. (session_defaults.c) */
int32_t esa_session_exact_rows(const esa_session_params *params);
/* Bits of a call of the current step: 8 or 16. */
int32_t esa_session_precision(const esa_session *s, int32_t layer, int32_t kind);
/* 1 if calls of these shapes can share a plan. */
int32_t esa_session_same_shapes(const esa_shapes *a, const esa_shapes *b);
/* *entry = the plan for these views, made if needed. It belongs to the session, and the next call
 * may free it. sparse 0: without a selector. */
esa_status esa_session_get_plan(esa_session *s, esa_session_plan **entry, const esa_tensor *q,
                                const esa_tensor *k, int32_t kind, int32_t sparse);
void esa_session_drop_plans(esa_session *s);

#endif
