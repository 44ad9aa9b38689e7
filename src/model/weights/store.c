/* store.c - opens, fits and frees a store of weights.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/weights/store_internal.h"

#include <string.h>

/* Left free: the library of products, and what other programs ask for. */
#define MARGIN (INT64_C(256) << 20)
/* What the driver takes for a process: its context, the code of kernels. */
#define DRIVER (INT64_C(640) << 20)

/* *bytes = device memory that the weights could have: what they hold, and what is free but for a
 * margin. */
static esa_status free_for(const esa_store *s, int64_t *bytes)
{
    int64_t room;
    ESA_TRY(s->nn->be->transfer->room(s->nn->ctx, &room));
    *bytes = room + esa_store_held(s) - esa_min64(MARGIN, room / 8);
    return ESA_OK;
}

/* *bytes = the same beside bytes that are allocated next and a scratch of the ctx that may grow,
 * within the limit of the settings. May be negative. */
static esa_status allowed(const esa_store *s, int64_t *bytes, int64_t next, int64_t scratch)
{
    const int64_t now = esa_nn_reserved(s->nn);
    const int64_t more = esa_size_add(next, esa_max64(0, scratch - now));
    ESA_TRY(free_for(s, bytes));
    if (s->limit) {
        const int64_t others = s->nn->held - esa_store_held(s) + now;
        *bytes = esa_min64(*bytes, s->limit - esa_min64(DRIVER, s->limit / 16) - others);
    }
    *bytes = more < 0 ? -1 : *bytes - more; /* negative: beyond 64 bits */
    return ESA_OK;
}

/* The same; asks for more if these are fewer than `want`. */
static esa_status ask_for(const esa_store *s, int64_t *bytes, int64_t want, int64_t next,
                          int64_t scratch)
{
    ESA_TRY(allowed(s, bytes, next, scratch));
    if (*bytes >= want || !s->ask) return ESA_OK;
    ESA_TRY(s->ask(s->ask_user, want - *bytes));
    return allowed(s, bytes, next, scratch);
}

static esa_status check_settings(esa_nn *nn, const esa_weights *w,
                                 const esa_store_settings *settings)
{
    const esa_product_args f8 = { .x = { .dtype = ESA_DTYPE_F8 }, .w = { .dtype = ESA_DTYPE_F8 } };
    if (!w->checked)
        return esa_fail(nn->ctx, ESA_ERR_STATE, "%s: weights can only be loaded after a check",
                        w->part);
    if (settings->limit < 0)
        return esa_fail(nn->ctx, ESA_ERR_ARGUMENT, "limit is %lld, expected 0 or more bytes",
                        (long long)settings->limit);
    /* A product of no rows says whether the device has products of F8. */
    return settings->linear == ESA_DTYPE_F8 ? nn->be->products->prepare(nn->ctx, &f8) : ESA_OK;
}

/* Tensors that are wanted in host memory. */
static esa_status load_host(esa_store *s, int32_t hold)
{
    for (int64_t i = 0; i < s->w->count; i++) {
        esa_wanted *e = &s->w->want[i];
        if (e->view && e->present && (e->flags & ESA_WANT_HOST))
            ESA_TRY(esa_weights_load_one(s->w, e, esa_weights_held(s->w, e, hold)));
    }
    return ESA_OK;
}

static esa_status fill(esa_store *s, const esa_store_settings *settings)
{
    int64_t limit;
    if (s->nn->be->host_memory) return esa_weights_load(s->w, settings->hold, s->nn->bf16);
    ESA_TRY(check_settings(s->nn, s->w, settings));
    ESA_TRY(esa_store_layout(s, settings));
    ESA_TRY(ask_for(s, &limit, esa_store_all(s), esa_store_loading(s), 0));
    ESA_TRY(esa_store_choose(s, limit));
    esa_store_look(s);
    ESA_TRY(esa_store_lanes(s));
    ESA_TRY(esa_store_load(s));
    ESA_TRY(load_host(s, settings->hold));
    esa_weights_close_files(s->w);
    return esa_store_start(s);
}

esa_status esa_store_open(esa_nn *nn, esa_store **out, esa_weights *w,
                          const esa_store_settings *settings)
{
    *out = NULL;
    esa_store *s = esa_mem_zalloc(&nn->ctx->mem, (int64_t)sizeof *s);
    if (!s)
        return esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for the weights of the %s",
                        w->part);
    s->nn = nn;
    s->w = w;
    s->limit = settings->limit;
    s->ask = settings->ask;
    s->ask_user = settings->ask_user;
    const esa_status status = fill(s, settings);
    if (status)
        esa_store_free(s);
    else
        *out = s;
    return status;
}

void esa_store_free(esa_store *s)
{
    if (!s) return;
    const esa_allocator mem = s->nn->ctx->mem;
    char error[sizeof s->nn->ctx->error]; /* freeing must not replace the message of a failure */
    memcpy(error, s->nn->ctx->error, sizeof error);
    esa_store_lanes_free(s);
    for (int32_t g = 0; g < s->groups && s->group; g++) {
        esa_nn_free(s->nn, s->group[g].device, s->group[g].bytes);
        if (s->group[g].host) esa_store_host_free(s, &s->group[g]);
    }
    memcpy(s->nn->ctx->error, error, sizeof error);
    esa_mem_free(&mem, s->group, s->groups * (int64_t)sizeof *s->group);
    esa_mem_free(&mem, s->queue, s->groups * (int64_t)sizeof *s->queue);
    esa_mem_free(&mem, s->tensor, s->tensors * (int64_t)sizeof *s->tensor);
    esa_mem_free(&mem, s, (int64_t)sizeof *s);
}

static esa_status move_to_host(esa_store *s, esa_store_group *g)
{
    ESA_TRY(esa_store_host(s, g));
    const esa_status status = s->nn->be->download(s->nn->ctx, g->host, g->device, g->bytes);
    if (status) {
        esa_store_host_free(s, g);
        return status;
    }
    esa_nn_free(s->nn, g->device, g->bytes);
    g->device = NULL;
    return ESA_OK;
}

static esa_status move_to_device(esa_store *s, esa_store_group *g)
{
    const esa_backend *be = s->nn->be;
    ESA_TRY(esa_nn_alloc(s->nn, &g->device, g->bytes, "the weights"));
    const esa_status status = be->upload(s->nn->ctx, g->device, g->host, g->bytes);
    if (status) {
        esa_nn_free(s->nn, g->device, g->bytes);
        g->device = NULL;
        return status;
    }
    esa_store_host_free(s, g);
    return ESA_OK;
}

/* Groups that leave go first: they make room for those that come. */
static esa_status move_groups(esa_store *s)
{
    esa_store_look(s);
    for (int32_t g = 1; g < s->groups; g++)
        if (!s->group[g].stays && s->group[g].device) ESA_TRY(move_to_host(s, &s->group[g]));
    for (int32_t g = 1; g < s->groups; g++)
        if (s->group[g].stays && s->group[g].host) ESA_TRY(move_to_device(s, &s->group[g]));
    return ESA_OK;
}

/* 1 if the groups are where the plan wants them. */
static int32_t in_place(const esa_store *s)
{
    for (int32_t g = 1; g < s->groups; g++)
        if (s->group[g].stays != (s->group[g].device != NULL)) return 0;
    return 1;
}

static esa_status fit_to(esa_store *s, int64_t limit)
{
    const int64_t old_bytes = s->lane_bytes;
    const int32_t old_lanes = s->lanes;
    esa_status status = esa_store_choose(s, limit);
    const int64_t new_bytes = s->lane_bytes;
    const int32_t new_lanes = s->lanes;
    s->lane_bytes = old_bytes; /* of the lanes that are there */
    s->lanes = old_lanes;
    if (status || (in_place(s) && new_lanes == old_lanes && new_bytes == old_bytes)) return status;
    esa_store_lanes_free(s);
    status = move_groups(s);
    s->lane_bytes = new_bytes;
    s->lanes = status ? 0 : new_lanes;
    if (!status) status = esa_store_lanes(s);
    if (status) s->lanes = 0; /* groups that are copied cannot be begun */
    const esa_status started = esa_store_start(s);
    return status ? status : started;
}

esa_status esa_store_fit(esa_store *s, int64_t bytes)
{
    const int64_t given = bytes ? bytes : s->limit;
    int64_t limit;
    if (!s->group) return ESA_OK;
    ESA_TRY(free_for(s, &limit));
    return fit_to(s, given ? esa_min64(given, limit) : limit);
}

esa_status esa_store_leave(esa_store *s, int64_t bytes, int64_t scratch)
{
    int64_t limit;
    if (!s->group) return ESA_OK;
    ESA_TRY(ask_for(s, &limit, esa_store_all(s), bytes, scratch));
    return fit_to(s, limit);
}

esa_status esa_store_clear(esa_store *s, int64_t bytes, int64_t scratch)
{
    int64_t limit;
    if (!s->group) return ESA_OK;
    ESA_TRY(ask_for(s, &limit, esa_store_held(s), bytes, scratch));
    return limit < esa_store_held(s) ? fit_to(s, limit) : ESA_OK;
}

esa_status esa_store_spare(const esa_store *s, int64_t *bytes, int64_t scratch)
{
    *bytes = INT64_MAX;
    if (!s->group) return ESA_OK;
    ESA_TRY(allowed(s, bytes, 0, scratch));
    *bytes -= esa_store_least(s);
    return ESA_OK;
}

esa_status esa_store_left(const esa_store *s, int64_t *bytes, int64_t want, int64_t next,
                          int64_t scratch)
{
    const int64_t held = s->group ? esa_store_held(s) : 0;
    *bytes = INT64_MAX;
    if (!s->group) return ESA_OK;
    ESA_TRY(ask_for(s, bytes, held + want, next, scratch));
    *bytes -= held;
    return ESA_OK;
}

esa_status esa_store_give(esa_store *s, int64_t bytes)
{
    if (!s->group) return ESA_OK;
    return fit_to(s, esa_max64(esa_store_held(s) - bytes, esa_store_least(s)));
}

int32_t esa_store_measures(const esa_store *s, const esa_linear *l)
{
    return !s->f8 || l->weight.dtype == ESA_DTYPE_F8;
}

void esa_store_get_plan(const esa_store *s, esa_store_plan *plan)
{
    *plan = (esa_store_plan){ 0 };
    if (!s->group) return;
    plan->groups = s->groups - 1;
    plan->resident_bytes = s->group[0].bytes;
    plan->pinned = 1;
    for (int32_t g = 1; g < s->groups; g++) {
        const esa_store_group *one = &s->group[g];
        plan->resident += one->device != NULL;
        *(one->device ? &plan->resident_bytes : &plan->streamed_bytes) += one->bytes;
        if (!one->device) plan->pinned &= one->pinned;
    }
    plan->lanes = s->lanes;
    plan->lane_bytes = s->lanes * s->lane_bytes;
    plan->f8 = s->f8;
    plan->rate = s->rate;
}
