/* store_stream.c - groups that are copied to the device for each use: two lanes, of which one is
 * read while the other is filled.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The copies follow a queue of groups that starts again at its end, so guidance branches and steps
 * need no pause between them. A forward that is broken off and begun again finds other groups in
 * the lanes than it needs; then the right ones are fetched anew. */
#include <string.h>

#include "base/host_limits.h"
#include "model/weights/store_internal.h"

/* ---------------------------------------------------------------- host memory */

/* Pinned memory is lost to everything else, so some stays free. */
void esa_store_look(esa_store *s) { s->pin_room = esa_host_available("") / 10 * 6; }

esa_status esa_store_host(esa_store *s, esa_store_group *g)
{
    esa_ctx *ctx = s->nn->ctx;
    if (g->bytes <= s->pin_room) {
        g->pinned = !s->nn->be->transfer->pin(ctx, &g->host, g->bytes);
        if (g->pinned) {
            s->pin_room -= g->bytes;
            return ESA_OK;
        }
        ctx->error[0] = 0; /* no failure: it need not be pinned */
    }
    g->host = esa_mem_alloc(&ctx->mem, g->bytes);
    if (g->host) return ESA_OK;
    return esa_fail(ctx, ESA_ERR_MEMORY,
                    "out of host memory for weights of the %s that do not fit on the device: "
                    "%.2f GiB",
                    s->w->part, (double)g->bytes / 1073741824.0);
}

void esa_store_host_free(esa_store *s, esa_store_group *g)
{
    if (g->pinned)
        s->nn->be->transfer->unpin(s->nn->ctx, g->host);
    else
        esa_mem_free(&s->nn->ctx->mem, g->host, g->bytes);
    g->host = NULL;
    g->pinned = 0;
}

/* ---------------------------------------------------------------- lanes */

esa_status esa_store_lanes(esa_store *s)
{
    for (int32_t l = 0; l < s->lanes; l++) {
        s->holds[l] = -1;
        ESA_TRY(esa_nn_alloc(s->nn, &s->lane[l], s->lane_bytes, "the weights"));
    }
    return ESA_OK;
}

void esa_store_lanes_free(esa_store *s)
{
    const esa_backend *be = s->nn->be;
    for (int32_t l = 0; l < ESA_STORE_LANES; l++) {
        if (!s->lane[l]) continue;
        be->transfer->landed(s->nn->ctx, l); /* sources are freed next; failures free all alike */
        be->transfer->unpin(s->nn->ctx, s->stage[l]);
        esa_nn_free(s->nn, s->lane[l], s->lane_bytes);
        s->lane[l] = s->stage[l] = NULL;
    }
}

typedef struct copy_job {
    char *dst;
    const char *src;
    int64_t bytes;
} copy_job;

#define SLICE (INT64_C(4) << 20)

static void copy_slice(void *arg, int64_t item, int32_t worker)
{
    (void)worker;
    const copy_job *j = arg;
    const int64_t first = item * SLICE;
    memcpy(j->dst + first, j->src + first, (size_t)esa_min64(SLICE, j->bytes - first));
}

/* A group whose own memory is not pinned goes through a stage. Without one the device's stream
 * waits for the copy, which is slow, but needs nothing. */
static esa_status fetch_pageable(esa_store *s, int32_t lane, const esa_store_group *g)
{
    esa_ctx *ctx = s->nn->ctx;
    const esa_engine_transfer *tr = s->nn->be->transfer;
    if (!s->stage[lane] && !s->no_stage && tr->pin(ctx, &s->stage[lane], s->lane_bytes)) {
        s->no_stage = 1;
        ctx->error[0] = 0; /* no failure */
    }
    if (!s->stage[lane]) {
        ESA_TRY(tr->arrive(ctx, lane)); /* after what may still be on its way into the lane */
        ESA_TRY(s->nn->be->upload(ctx, s->lane[lane], g->host, g->bytes));
        return tr->used(ctx, lane); /* a copy beside the stream must not overtake this one */
    }
    ESA_TRY(tr->landed(ctx, lane)); /* the last copy from the stage is done */
    copy_job job = { s->stage[lane], g->host, g->bytes };
    esa_pool_run(ctx->pool, copy_slice, &job, esa_ceil_div(g->bytes, SLICE));
    return tr->fetch(ctx, lane, s->lane[lane], s->stage[lane], g->bytes);
}

/* Starts the copy of what is at this place of the queue. */
static esa_status fetch(esa_store *s, int32_t lane, int32_t place)
{
    const esa_store_group *g = &s->group[s->queue[place]];
    s->holds[lane] = -1;
    ESA_TRY(g->pinned
                ? s->nn->be->transfer->fetch(s->nn->ctx, lane, s->lane[lane], g->host, g->bytes)
                : fetch_pageable(s, lane, g));
    s->holds[lane] = place;
    return ESA_OK;
}

static int32_t lane_with(const esa_store *s, int32_t place)
{
    for (int32_t l = 0; l < s->lanes; l++)
        if (s->holds[l] == place) return l;
    return -1;
}

/* ---------------------------------------------------------------- views */

/* base NULL: the group is not on the device. */
static void point_views(esa_store *s, const esa_store_group *g, char *base)
{
    for (int64_t i = g->first; i < g->first + g->count; i++) {
        const esa_stored *t = &s->tensor[i];
        esa_weight *view = t->e->view;
        view->dtype = t->dtype;
        view->rank = t->e->rank;
        memcpy(view->dim, t->e->dim, sizeof view->dim);
        view->data = base ? base + t->offset : NULL;
        view->scale = base && t->scale >= 0 ? (const float *)(void *)(base + t->scale) : NULL;
    }
}

/* Measures the first copy. */
static esa_status fetch_first(esa_store *s)
{
    esa_ctx *ctx = s->nn->ctx;
    const esa_backend *be = s->nn->be;
    esa_mark from = { 0 }, to = { 0 };
    double seconds = 0;
    esa_status status = be->mark_record(ctx, &from);
    if (!status) status = be->transfer->used(ctx, 0); /* the copy starts after the mark */
    if (!status) status = fetch(s, 0, 0);
    if (!status) status = be->transfer->arrive(ctx, 0);
    if (!status) status = be->mark_record(ctx, &to);
    if (!status) status = be->mark_elapsed(ctx, &seconds, &from, &to);
    be->mark_release(ctx, &from);
    be->mark_release(ctx, &to);
    if (!status && seconds > 0) s->rate = (double)s->group[s->queue[0]].bytes / seconds;
    return status;
}

esa_status esa_store_start(esa_store *s)
{
    s->queued = 0;
    s->open = 0;
    s->rate = 0;
    for (int32_t n = 0; n < s->groups; n++) {
        esa_store_group *g = &s->group[n];
        if (!g->device) s->queue[s->queued++] = n;
        point_views(s, g, g->device);
    }
    for (int32_t l = 0; l < s->lanes && l < s->queued; l++)
        ESA_TRY(l == 0 ? fetch_first(s) : fetch(s, l, l));
    return ESA_OK;
}

/* ---------------------------------------------------------------- use */

/* Gives the lane of the group that is open back, and lets the next copy into it begin. */
static esa_status close_group(esa_store *s)
{
    const int32_t lane = s->open_lane, place = s->holds[lane];
    point_views(s, &s->group[s->open], NULL);
    s->open = 0;
    ESA_TRY(s->nn->be->transfer->used(s->nn->ctx, lane));
    const int32_t next = (place + s->lanes) % s->queued;
    return lane_with(s, next) >= 0 ? ESA_OK : fetch(s, lane, next);
}

esa_status esa_store_begin(esa_store *s, int32_t group)
{
    if (!s->group) return ESA_OK;
    if (group < 0 || group >= s->groups)
        return esa_fail(s->nn->ctx, ESA_ERR_INTERNAL, "group %d of the %s, expected 0 to %d",
                        (int)group, s->w->part, (int)s->groups - 1);
    if (s->open) ESA_TRY(close_group(s)); /* a forward was broken off */
    if (s->group[group].device) return ESA_OK;
    int32_t place = 0;
    while (place < s->queued && s->queue[place] != group) place++;
    if (place == s->queued || !s->lanes)
        return esa_fail(s->nn->ctx, ESA_ERR_STATE,
                        "the weights of the %s are not loaded: making them fit failed", s->w->part);
    int32_t lane = lane_with(s, place);
    if (lane < 0) { /* not the group that was expected */
        const int32_t next = (place + 1) % s->queued;
        lane = lane_with(s, next) == 0 ? s->lanes - 1 : 0;
        ESA_TRY(fetch(s, lane, place));
        if (s->lanes > 1 && lane_with(s, next) < 0) ESA_TRY(fetch(s, 1 - lane, next));
    }
    ESA_TRY(s->nn->be->transfer->arrive(s->nn->ctx, lane));
    point_views(s, &s->group[group], s->lane[lane]);
    s->open = group;
    s->open_lane = lane;
    return ESA_OK;
}

esa_status esa_store_end(esa_store *s, int32_t group)
{
    if (!s->group || s->open != group || !group) return ESA_OK;
    return close_group(s);
}
