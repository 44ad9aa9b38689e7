/* session_figures.c - times and densities of calls; see session_figures.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/session_figures.h"

#include "session/session.h"

enum { FACTS_BYTES = ESA_FACTS * 8 };

void esa_session_figures_free(esa_session_figures *f)
{
    if (!f->backend) return;
    f->backend->release(f->ctx, f->facts, ESA_SESSION_PENDING * FACTS_BYTES);
    f->facts = NULL;
    for (int32_t i = 0; i < ESA_SESSION_PENDING; i++)
        for (int32_t m = 0; m < 3; m++) f->backend->mark_release(f->ctx, &f->mark[i][m]);
    f->backend = NULL;
    f->used = 0;
}

void esa_session_figures_forget(esa_session_figures *f) { f->used = 0; }

/* Books what is pending on the old device, then prepares for calls on another one. */
static esa_status change_backend(esa_session_figures *f, const esa_backend *backend)
{
    ESA_TRY(esa_session_figures_settle(f));
    esa_session_figures_free(f);
    void *facts;
    ESA_TRY(backend->alloc(f->ctx, &facts, ESA_SESSION_PENDING * FACTS_BYTES));
    f->facts = facts;
    f->backend = backend;
    return ESA_OK;
}

esa_status esa_session_figures_begin(esa_session_figures *f, const esa_backend *backend)
{
    if (f->backend != backend) ESA_TRY(change_backend(f, backend));
    if (f->used == ESA_SESSION_PENDING) ESA_TRY(esa_session_figures_settle(f));
    f->selected = 0;
    return backend->mark_record(f->ctx, &f->mark[f->used][0]);
}

esa_status esa_session_figures_selected(esa_session_figures *f)
{
    f->selected = 1;
    return f->backend->mark_record(f->ctx, &f->mark[f->used][1]);
}

esa_status esa_session_figures_end(esa_session_figures *f, esa_session_cell *cell,
                                   const int64_t *facts, const esa_session_price *price)
{
    ESA_TRY(f->backend->mark_record(f->ctx, &f->mark[f->used][2]));
    if (facts)
        ESA_TRY(f->backend->copy(f->ctx, f->facts + ESA_FACTS * f->used, facts, FACTS_BYTES));
    f->pending[f->used++] = (esa_session_pending){ cell, facts != NULL, f->selected, *price };
    return ESA_OK;
}

static esa_status settle_one(esa_session_figures *f, int32_t i, const int64_t *facts)
{
    const esa_session_pending *p = &f->pending[i];
    const esa_mark *mark = f->mark[i];
    double select = 0, attention = 0;
    ESA_TRY(f->backend->mark_elapsed(f->ctx, &attention, &mark[p->selected ? 1 : 0], &mark[2]));
    if (p->selected) ESA_TRY(f->backend->mark_elapsed(f->ctx, &select, &mark[0], &mark[1]));
    p->cell->attention_seconds += attention;
    p->cell->select_seconds += select;
    const int64_t *fact = facts + ESA_FACTS * i;
    double work = 1;
    if (p->sparse) {
        p->cell->density += fact[0] > 0 ? (double)fact[1] / (double)fact[0] : 1.0;
        work = esa_session_price_work(&p->price, fact);
    }
    p->cell->dense_work += p->price.dense;
    p->cell->work += work * p->price.dense;
    return ESA_OK;
}

esa_status esa_session_figures_settle(esa_session_figures *f)
{
    int64_t facts[ESA_FACTS * ESA_SESSION_PENDING];
    const int32_t used = f->used;
    f->used = 0;
    if (used) ESA_TRY(f->backend->download(f->ctx, facts, f->facts, used * FACTS_BYTES));
    for (int32_t i = 0; i < used; i++) ESA_TRY(settle_one(f, i, facts));
    return ESA_OK;
}
