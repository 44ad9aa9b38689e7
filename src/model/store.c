/* store.c - holds the weights of a part in host memory as esa_weights_load does, or all of them in
 * the memory of a device.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/store.h"

#include <string.h>
#include "model/weights_internal.h"

#define ALIGNMENT 256

struct esa_store {
    esa_nn *nn;
    int64_t groups;
    void *base; /* on the device; NULL with host memory */
    int64_t bytes;
};

static int32_t dtype_of(const esa_wanted *e)
{
    return e->flags & ESA_WANT_F32 ? ESA_DTYPE_F32 : ESA_DTYPE_BF16;
}

/* Copies a loaded tensor to the device, and moves its view there. */
static esa_status upload(esa_nn *nn, const esa_wanted *e, char *to)
{
    const esa_allocator *mem = &nn->ctx->mem;
    const int64_t count = esa_weight_count(e->view);
    const esa_view view = esa_view_of(to, dtype_of(e), nn->be->device, 1, count);
    float *wide = esa_mem_alloc(mem, esa_size_mul(count, 4));
    if (!wide) return esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for %s", e->name);
    esa_weight_to_f32(wide, e->view, 0, count);
    const esa_status status = esa_nn_write(nn, &view, wide);
    esa_mem_free(mem, wide, count * 4);
    e->view->data = to;
    e->view->dtype = view.dtype;
    return status;
}

/* Uploads every tensor, or only counts the bytes if there is no memory yet. */
static esa_status place(esa_store *s, const esa_weights *w)
{
    int64_t at = 0;
    for (int64_t i = 0; i < w->count; i++) {
        const esa_wanted *e = &w->want[i];
        if (!e->view || !e->view->data) continue;
        if (!(e->flags & ESA_WANT_JOIN)) at = esa_ceil_div(at, ALIGNMENT) * ALIGNMENT;
        if (s->base) ESA_TRY(upload(s->nn, e, (char *)s->base + at));
        at += esa_weight_count(e->view) * esa_view_element(dtype_of(e));
        s->groups = esa_max64(s->groups, e->group);
    }
    s->bytes = at;
    return ESA_OK;
}

static esa_status fill(esa_store *s, esa_weights *w, const esa_store_settings *settings)
{
    esa_nn *nn = s->nn;
    if (settings->linear == ESA_DTYPE_F8)
        return esa_fail(nn->ctx, ESA_ERR_UNSUPPORTED, "weights in F8 are not supported");
    ESA_TRY(esa_weights_load(w, ESA_HOLD_FILE));
    ESA_TRY(place(s, w));
    ESA_TRY(esa_store_fit(s, settings->limit));
    ESA_TRY(esa_nn_alloc(nn, &s->base, s->bytes, "the weights"));
    return place(s, w);
}

esa_status esa_store_open(esa_nn *nn, esa_store **store, esa_weights *w,
                          const esa_store_settings *settings)
{
    *store = NULL;
    esa_store *s = esa_mem_zalloc(&nn->ctx->mem, (int64_t)sizeof *s);
    if (!s) return esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for the weights");
    s->nn = nn;
    const esa_status status = nn->be->host_memory ? esa_weights_load(w, settings->hold)
                                                  : fill(s, w, settings);
    if (status)
        esa_store_free(s);
    else
        *store = s;
    return status;
}

void esa_store_free(esa_store *store)
{
    if (!store) return;
    const esa_allocator mem = store->nn->ctx->mem;
    esa_nn_free(store->nn, store->base, store->bytes);
    esa_mem_free(&mem, store, (int64_t)sizeof *store);
}

esa_status esa_store_fit(esa_store *store, int64_t bytes)
{
    if (!bytes || bytes >= store->bytes) return ESA_OK;
    return esa_fail(store->nn->ctx, ESA_ERR_MEMORY,
                    "the weights need %lld bytes of device memory, but may use %lld",
                    (long long)store->bytes, (long long)bytes);
}

void esa_store_get_plan(const esa_store *store, esa_store_plan *plan)
{
    *plan = (esa_store_plan){ 0 };
    if (!store->base) return;
    plan->groups = plan->resident = store->groups;
    plan->resident_bytes = store->bytes;
}

esa_status esa_store_begin(esa_store *store, int32_t group)
{
    (void)store;
    (void)group;
    return ESA_OK;
}

esa_status esa_store_end(esa_store *store, int32_t group)
{
    (void)store;
    (void)group;
    return ESA_OK;
}
