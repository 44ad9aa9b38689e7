/* session_carry.c - memory of the differences that a session carries, and its anchors.
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>
#include "rules/anchors.h"
#include "session/session.h"
#include "workplan/work_plan.h"

#define LL(x) ((long long)(x))

/* ---------------------------------------------------------------- anchors */

esa_status esa_session_carry_make(esa_session *s, const esa_session_params *p)
{
    esa_session_carry *c = &s->carry;
    s->params.anchors = NULL;
    const int32_t uses = p->mode == ESA_SESSION_ONLINE || p->mode == ESA_SESSION_CACHED ||
                         p->mode == ESA_SESSION_PROBE;
    if (p->carry == ESA_CARRY_OFF || !uses) return ESA_OK;
    c->anchors = esa_mem_alloc(&s->ctx->mem, 4 * (int64_t)p->steps);
    if (!c->anchors)
        return esa_fail(s->ctx, ESA_ERR_MEMORY, "out of memory for the anchors of %d steps",
                        p->steps);
    c->anchor_count = esa_anchors_of(c->anchors, p->carry, p->anchors, p->anchor_count, p->steps);
    return ESA_OK;
}

int32_t esa_session_anchor_due(const esa_session *s, int32_t step, int32_t at)
{
    return esa_anchors_due(s->carry.anchors, s->carry.anchor_count, step, at);
}

/* ---------------------------------------------------------------- memory */

int64_t esa_session_diff_bytes(const esa_session_params *p, const esa_shapes *shapes)
{
    return esa_carry_bytes(p->carry_format, shapes->B, shapes->Hq, shapes->Nq, shapes->D);
}

esa_status esa_session_carry_take(esa_session *s, void **memory, int64_t bytes)
{
    const esa_session_params *p = &s->params;
    const esa_backend *be = s->carry.backend;
    esa_status status = ESA_ERR_MEMORY;
    *memory = NULL;
    if (!p->carry_alloc || be->host_memory) {
        status = be->alloc(s->ctx, memory, bytes);
    } else {
        *memory = p->carry_alloc(p->carry_user, bytes);
        if (*memory) status = ESA_OK;
    }
    if (!status) s->carry.bytes += bytes;
    return status;
}

void esa_session_carry_give(esa_session *s, void *memory, int64_t bytes)
{
    const esa_backend *be = s->carry.backend;
    if (!memory) return;
    if (s->params.carry_free && !be->host_memory)
        s->params.carry_free(s->params.carry_user, memory, bytes);
    else
        be->release(s->ctx, memory, bytes);
    s->carry.bytes -= bytes;
}

static void drop(esa_session *s, esa_session_diff *d)
{
    esa_session_carry *c = &s->carry;
    esa_session_carry_give(s, d->memory, d->bytes);
    if (d->host) {
        esa_session_lanes_leave(s, d);
        c->backend->transfer->unpin(s->ctx, d->host);
        c->host_bytes -= d->bytes;
    }
    *d = (esa_session_diff){ 0 };
}

/* Device memory within carry_room, or host memory. */
static esa_status find_room(esa_session *s, esa_session_diff *d, int64_t bytes)
{
    const int64_t room = s->params.carry_room;
    esa_status status = ESA_ERR_MEMORY;
    if (room < 0 || s->carry.bytes + bytes <= room)
        status = esa_session_carry_take(s, &d->memory, bytes);
    if (status == ESA_ERR_MEMORY && s->carry.backend->transfer)
        status = esa_session_stream(s, d, bytes);
    return status;
}

static esa_status reserve(esa_session *s, esa_session_diff *d, const esa_shapes *shapes,
                          int32_t layer)
{
    const int64_t bytes = esa_session_diff_bytes(&s->params, shapes);
    if (d->bytes == bytes) {
        d->made &= esa_session_same_shapes(&d->shapes, shapes);
        d->shapes = *shapes;
        return ESA_OK;
    }
    drop(s, d);
    const esa_status status = find_room(s, d, bytes);
    if (!status) {
        s->ctx->error[0] = 0; /* of device memory that host memory replaces */
        d->bytes = bytes;
        d->shapes = *shapes;
        return ESA_OK;
    }
    if (status != ESA_ERR_MEMORY) return status;
    if (s->params.strict)
        return esa_fail(s->ctx, ESA_ERR_MEMORY,
                        "carry needs %lld bytes for each of %d layers, but there is no room from "
                        "layer %d on (%lld bytes are in use): raise carry_room, or turn carry off",
                        LL(bytes), s->params.layers, layer,
                        LL(s->carry.bytes + s->carry.host_bytes));
    esa_log(s->ctx, ESA_LOG_WARNING, "layer %d runs without carry: no room for %lld bytes", layer,
            LL(bytes));
    s->ctx->error[0] = 0;
    return ESA_OK;
}

/* Frees the differences of branches that ran at an earlier step, but have not at this one: they
 * belong to a transformer that runs no more, or come back with a new difference. */
static void free_idle(esa_session *s)
{
    for (int32_t b = 0; b < s->params.branches; b++)
        for (int32_t l = 0; b != s->branch && l < s->params.layers; l++) {
            esa_session_kept *kept = &s->kept[(int64_t)b * s->params.layers + l];
            if (kept->last_step < s->step) drop(s, &kept->diff);
        }
}

/* Frees differences of other sizes that hold nothing: they are of an earlier video. Then the lanes,
 * if nothing passes through them any more. */
static void free_outgrown(esa_session *s, int64_t bytes)
{
    int32_t streams = 0;
    for (int64_t i = 0; i < (int64_t)s->params.layers * s->params.branches; i++) {
        esa_session_diff *diff = &s->kept[i].diff;
        if (!diff->made && diff->bytes != bytes) drop(s, diff);
        streams |= diff->host != NULL;
    }
    if (!streams) esa_session_lanes_free(s);
}

esa_status esa_session_carry_reserve(esa_session *s, int32_t layer, const esa_plan *plan)
{
    const int64_t bytes = esa_session_diff_bytes(&s->params, &plan->shapes);
    esa_session_carry *c = &s->carry;
    esa_session_kept *kept = &s->kept[(int64_t)s->branch * s->params.layers];
    if (c->backend != plan->backend) {
        esa_session_carry_free(s);
        c->backend = plan->backend;
    }
    if (!kept[layer].diff.bytes) free_idle(s);
    if (kept[layer].diff.bytes != bytes) free_outgrown(s, bytes);
    for (int32_t l = 0; l < s->params.layers; l++)
        if (l == layer || (!kept[l].diff.bytes && !s->dense_layer[l]))
            ESA_TRY(reserve(s, &kept[l].diff, &plan->shapes, l));
    return ESA_OK;
}

esa_carry esa_session_diff_view(const esa_session *s, const esa_session_diff *d)
{
    const esa_shapes *h = &d->shapes;
    esa_carry c = esa_carry_view(d->memory, s->params.carry_format, h->B, h->Hq, h->Nq, h->D);
    c.device = h->device;
    c.device_index = h->device_index;
    return c;
}

void esa_session_carry_trim(esa_session *s)
{
    for (int64_t i = 0; s->kept && i < (int64_t)s->params.layers * s->params.branches; i++)
        if (s->kept[i].diff.memory) drop(s, &s->kept[i].diff);
}

void esa_session_carry_free(esa_session *s)
{
    for (int64_t i = 0; s->kept && i < (int64_t)s->params.layers * s->params.branches; i++)
        drop(s, &s->kept[i].diff);
    esa_session_lanes_free(s);
    s->carry.backend = NULL;
}
