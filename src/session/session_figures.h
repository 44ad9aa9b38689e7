/* session_figures.h - times and densities of calls that a device may still be running.
 * SPDX-License-Identifier: Apache-2.0
 *
 * On a device that only enqueues work, the density and the times of a call are not known when the
 * call returns. A list holds these pending figures. They are booked into their cells when the list
 * is full or the caller reads statistics; both wait for the device. */
#ifndef ESA_SESSION_SESSION_FIGURES_H
#define ESA_SESSION_SESSION_FIGURES_H

#include "backend/backend.h"

struct esa_session_cell;

#define ESA_SESSION_PENDING 256

/* What the work of a call follows from (rules/work.h). */
typedef struct esa_session_price {
    double dense;  /* multiply-adds of dense attention, in units of 2; 0: not counted */
    double extra;  /* work of selection and orders, as a share of dense */
    double sparse; /* work of sparse attention; NaN: it follows from args, rows and the facts */
    esa_attn_args args; /* only tail, blocks, fine and Nk are set */
    int64_t rows;       /* of the mask */
} esa_session_price;

typedef struct esa_session_pending {
    struct esa_session_cell *cell;
    int32_t sparse;   /* 1: density comes from the facts */
    int32_t selected; /* 1: the time up to the second mark is selection */
    esa_session_price price;
} esa_session_pending;

typedef struct esa_session_figures {
    esa_ctx *ctx;
    const esa_backend *backend; /* device of the pending calls; NULL: no call yet */
    int64_t *facts;             /* [ESA_SESSION_PENDING][ESA_FACTS] on the device, or NULL */
    /* marks of each call: before selection, after selection, after attention */
    esa_mark mark[ESA_SESSION_PENDING][3];
    esa_session_pending pending[ESA_SESSION_PENDING];
    int32_t used;
    int32_t selected; /* 1: the current call has passed its second mark */
} esa_session_figures;

/* The order for one call: begin before any work; selected after the selection (not in dense calls);
 * end after attention. facts: those of the mask, on the device; NULL: dense. price is copied. A
 * call that fails in between needs no end: the next begin starts over. On failure ctx holds a
 * message. */
esa_status esa_session_figures_begin(esa_session_figures *f, const esa_backend *backend);
esa_status esa_session_figures_selected(esa_session_figures *f);
esa_status esa_session_figures_end(esa_session_figures *f, struct esa_session_cell *cell,
                                   const int64_t *facts, const esa_session_price *price);
/* Books everything pending; waits for the device. */
esa_status esa_session_figures_settle(esa_session_figures *f);
/* Drops everything pending without booking it. */
void esa_session_figures_forget(esa_session_figures *f);
void esa_session_figures_free(esa_session_figures *f);

#endif
