/* session_masks.c - masks and adaptive orders of ONLINE calls: made now, kept from an earlier step,
 * or taken from another branch.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include "session/session.h"

#include "rules/schedule.h"

static int32_t is_adaptive(const esa_plan *p)
{
    return p->select.layout.order == ESA_ORDER_ADAPTIVE && !p->select.layout.order_applied;
}

/* 1 if a mask or an order is used again after the call that makes it. */
static int32_t keeps(const esa_session_params *q, const esa_plan *p)
{
    return q->carry != ESA_CARRY_OFF || q->refresh_every != 1 ||
           (q->share_branches && q->branches > 1) || (is_adaptive(p) && q->order_every != 1);
}

/* Facts and the gaps between the parts of a kept mask. */
#define KEPT_MORE 2048

int64_t esa_session_kept_bytes(const esa_session_params *q, const esa_plan *p)
{
    const esa_shapes *s = &p->shapes;
    const int64_t rows = s->B * s->Hq * p->nq, levels = p->fine ? 2 : 1;
    const int64_t orders = is_adaptive(p) ? 4 * s->B * (s->Hq * s->Nq + s->Hkv * s->Nk) : 0;
    const int64_t lists = levels * rows * (4 + 2 * p->nk),
                  bits = levels * rows * esa_ceil_div(p->nk, 8);
    if (q->mode == ESA_SESSION_CACHED) { /* one mask of a batch entry, and the bits of the file */
        const esa_mask_file *f = q->masks;
        const int64_t one = (f->info.fine ? 2 : 1) * s->Hq * p->nq * (4 + 2 * p->nk);
        return one + orders + f->cells * f->cell_bytes * (f->info.fine ? 2 : 1);
    }
    if (q->mode == ESA_SESSION_PROBE) /* keeps no mask, but a second output */
        return lists + orders + s->B * s->Hq * s->Nq * s->D * esa_dtype_size(s->dtype);
    const int64_t kept_count = keeps(q, p) ? (int64_t)q->layers * q->branches : 0;
    return lists + orders + kept_count * (bits + orders + KEPT_MORE);
}

/* Share of the importance that the mask keeps. */
static double kept_mass(const esa_session_plan *e)
{
    const esa_mask *m = e->mask;
    const int64_t rows = m->B * m->H * m->nq;
    double kept = 0, all = 0;
    for (int64_t r = 0; r < rows; r++) {
        const float *p = e->importance + r * m->nk;
        const uint16_t *index = m->index + r * m->cap;
        double k = 0, a = 0;
        for (int64_t j = 0; j < m->nk; j++) a += p[j];
        for (int32_t i = 0; i < m->count[r]; i++) k += p[index[i]];
        kept += k;
        all += a;
    }
    return all > 0 ? kept / all : 1;
}

/* Selects into e->mask, which has its order already. */
static esa_status choose(const esa_session_call *c, const esa_session_plan *e,
                         const esa_session_turn *turn, esa_session_sparse *f)
{
    f->asked = esa_session_budget(c->s, c->layer, turn);
    ESA_TRY(esa_plan_choose(e->plan, e->mask, c->t->q, c->t->k, c->t->v, f->asked, e->importance,
                            NULL));
    f->made = 1;
    f->facts = e->mask->facts;
    f->mass = e->importance ? kept_mass(e) : (double)NAN;
    return ESA_OK;
}

static esa_status reorder(const esa_session_call *c, const esa_session_plan *e,
                          esa_session_sparse *f)
{
    f->ordered = 1;
    return esa_plan_reorder(e->plan, e->mask, c->t->q, c->t->k, NULL);
}

/* ---------------------------------------------------------------- kept masks */

esa_session_diff *esa_session_next_diff(const esa_session *s, int32_t layer,
                                        const esa_session_diff *diff)
{
    const int32_t L = s->params.layers;
    int32_t branch = 0; /* whose difference it is */
    while (&s->kept[(int64_t)branch * L + layer].diff != diff) branch++;
    for (int32_t n = 1; n < L; n++) {
        esa_session_diff *next = &s->kept[(int64_t)branch * L + (layer + n) % L].diff;
        if (next->made) return next;
    }
    return NULL;
}

/* The turn of this call. Every n-th step counts the steps that really run; EARLY goes by the step
 * of the run. Both count the same when no step is left out. */
static esa_session_turn turn_of(const esa_session_call *c, const esa_session_plan *e,
                                const esa_session_kept *kept)
{
    const esa_session *s = c->s;
    const int32_t ran = kept->sparse_steps - 1,
                  planned = esa_session_sparse_before(s, c->layer, s->step);
    const esa_session_turn turn = {
        .steps = esa_session_sparse_before(s, c->layer, s->params.steps),
        .mask = s->params.refresh_every == ESA_REFRESH_EARLY ? planned : ran,
        .order = s->params.order_every == ESA_REFRESH_EARLY ? planned : ran,
        .order_at = kept->order_at,
        .adaptive = is_adaptive(e->plan),
    };
    return turn;
}

static esa_session_kept *kept_of(const esa_session *s, int32_t layer)
{
    return &s->kept[(int64_t)s->branch * s->params.layers + layer];
}

static void count_step(const esa_session *s, esa_session_kept *kept)
{
    if (kept->last_step == s->step) return;
    kept->last_step = s->step;
    kept->sparse_steps++;
}

/* The kept mask of the first branch that ran this layer at this step with a mask of its own, if
 * this branch shall use it; else NULL. */
static esa_session_kept *donor_of(const esa_session_call *c, const esa_session_plan *e,
                                  int32_t share)
{
    esa_session *s = c->s;
    for (int32_t b = 0; share && b < s->branch; b++) {
        esa_session_kept *other = &s->kept[(int64_t)b * s->params.layers + c->layer];
        if (other->own_step == s->step && esa_session_kept_fits(other, e->plan)) return other;
    }
    return NULL;
}

/* Carry: the call adds the difference of this mask, if there is one. */
static void add_diff(const esa_session_call *c, esa_session_kept *kept, esa_session_sparse *f)
{
    if (!kept->diff.made) return;
    f->diff = &kept->diff;
    f->age = c->s->step - kept->made_step;
}

static esa_status reuse(const esa_session_call *c, const esa_session_plan *e,
                        esa_session_kept *kept, esa_session_sparse *f)
{
    f->mass = kept->mass;
    f->asked = kept->asked;
    f->facts = kept->facts;
    add_diff(c, kept, f);
    return esa_session_kept_mask(&c->s->chunks, kept, e->mask);
}

/* Carry: 1 if the call must be an anchor. fits: 1 if the kept mask is for these shapes. A kept mask
 * whose difference was never finished makes it now. */
static int32_t is_anchor(const esa_session *s, const esa_session_kept *kept, int32_t fits)
{
    return !fits || esa_session_anchor_due(s, s->step, kept->made_step) ||
           (kept->diff.bytes && !kept->diff.made);
}

/* Carry: a mask was made, and so must be its difference, if it has memory. */
static void make_diff(const esa_session_call *c, esa_session_kept *kept, esa_session_sparse *f)
{
    kept->made_step = c->s->step;
    f->anchor = kept->diff.bytes > 0;
    f->diff = f->anchor ? &kept->diff : NULL;
}

static esa_status refresh(const esa_session_call *c, const esa_session_plan *e,
                          esa_session_sparse *f)
{
    esa_session *s = c->s;
    esa_session_kept *kept = kept_of(s, c->layer),
                     *donor = donor_of(c, e, s->params.share_branches);
    const int32_t carries = s->carry.anchor_count > 0;
    count_step(s, kept);
    if (donor) return reuse(c, e, donor, f);
    kept->own_step = s->step;
    esa_session_turn turn = turn_of(c, e, kept);
    const int32_t fits = esa_session_kept_fits(kept, e->plan),
                  anchor = carries && is_anchor(s, kept, fits),
                  new_order = turn.adaptive &&
                              (carries
                                   ? anchor
                                   : !fits || esa_schedule_due(s->params.order_every, turn.order,
                                                               turn.steps, kept->order_at)),
                  new_mask = carries ? anchor
                                     : !fits || new_order ||
                                           esa_schedule_due(s->params.refresh_every, turn.mask,
                                                            turn.steps, kept->mask_at);
    if (!new_mask) return reuse(c, e, kept, f);
    if (carries) ESA_TRY(esa_session_carry_reserve(s, c->layer, e->plan));
    if (new_order) {
        turn.order_at = turn.order;
        ESA_TRY(reorder(c, e, f));
    } else if (turn.adaptive)
        ESA_TRY(esa_session_kept_order(&s->chunks, kept, e->mask));
    ESA_TRY(choose(c, e, &turn, f));
    ESA_TRY(esa_session_kept_store(&s->chunks, kept, e->plan, e->mask));
    kept->mass = f->mass;
    kept->asked = f->asked;
    kept->mask_at = turn.mask;
    kept->order_at = turn.order_at;
    if (carries) make_diff(c, kept, f);
    return ESA_OK;
}

esa_status esa_session_held_cell(const esa_session_call *c, const esa_session_plan *e,
                                 int64_t *cell, esa_session_sparse *f)
{
    esa_session *s = c->s;
    esa_session_kept *kept = kept_of(s, c->layer),
                     *donor = donor_of(c, e, s->params.masks->info.branches == 1);
    count_step(s, kept);
    if (donor) {
        *cell = donor->cell;
        add_diff(c, donor, f);
        return ESA_OK;
    }
    kept->own_step = s->step;
    if (!is_anchor(s, kept, esa_session_kept_fits(kept, e->plan))) {
        *cell = kept->cell;
        add_diff(c, kept, f);
        return ESA_OK;
    }
    ESA_TRY(esa_session_carry_reserve(s, c->layer, e->plan));
    ESA_TRY(esa_session_kept_note(&s->chunks, kept, e->plan));
    kept->cell = *cell;
    make_diff(c, kept, f);
    return ESA_OK;
}

esa_status esa_session_online_mask(const esa_session_call *c, const esa_session_plan *e,
                                   esa_session_sparse *f)
{
    const esa_session_turn every = { .adaptive = is_adaptive(e->plan) };
    if (keeps(&c->s->params, e->plan)) return refresh(c, e, f);
    if (every.adaptive) ESA_TRY(reorder(c, e, f));
    return choose(c, e, &every, f);
}
