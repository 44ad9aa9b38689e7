/* weights_load.c - turns checked files into views: mapped if the type fits, else converted piece by
 * piece.
 * SPDX-License-Identifier: Apache-2.0
 *
 * While a tensor is converted, the pages of the file are given back as soon as they were read.
 * Loading a 57 GB folder therefore needs the memory of the result and of one piece of the file. */
#define _DEFAULT_SOURCE /* madvise */
#include "model/weights_internal.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "nn/leaf.h"

/* ESA_HOLD_AUTO keeps a part in f32 if it is smaller than this in f32 */
#define SMALL_BYTES (INT64_C(1) << 30)
/* elements converted before their pages are given back: 4 MB of an f32 file for each worker */
#define PIECE       (INT64_C(1) << 20)
/* elements given back a second time, because the kernel maps some pages around the one it reads */
#define BEHIND      (INT64_C(1) << 19)

/* The type a tensor is held in. */
static int32_t held_dtype(const esa_wanted *e, int32_t hold, int32_t small)
{
    const int32_t in_file = e->entry->dtype; /* ESA_FILE_F32, F16, BF16 equal ESA_DTYPE_* */
    if ((e->flags & ESA_WANT_F32) || e->rank <= 1) return ESA_DTYPE_F32;
    if (hold == ESA_HOLD_AUTO)
        hold = small ? ESA_HOLD_F32 : (in_file == ESA_DTYPE_F32 ? ESA_HOLD_BF16 : ESA_HOLD_FILE);
    return hold == ESA_HOLD_F32 ? ESA_DTYPE_F32 : hold == ESA_HOLD_BF16 ? ESA_DTYPE_BF16 : in_file;
}

typedef struct convert_job {
    esa_weight from;
    void *to;
    int32_t dtype;
    int64_t count;
    int32_t mapped;
    uintptr_t page;
} convert_job;

/* Gives back the whole pages of elements first .. end-1. Pages that are still needed are read
 * again; a failure only costs memory. */
static void give_back(const convert_job *j, int64_t first, int64_t end)
{
    const int64_t size = esa_dtype_size(j->from.dtype);
    const uintptr_t a = ((uintptr_t)j->from.data + (uintptr_t)(first * size) + j->page - 1) /
                        j->page * j->page;
    const uintptr_t b = ((uintptr_t)j->from.data + (uintptr_t)(end * size)) / j->page * j->page;
    if (b > a) madvise((void *)a, b - a, MADV_DONTNEED);
}

static void convert_piece(void *arg, int64_t item, int32_t worker)
{
    (void)worker;
    const convert_job *j = arg;
    const int64_t first = item * PIECE, n = esa_min64(PIECE, j->count - first);
    if (j->dtype == ESA_DTYPE_F32) {
        esa_weight_to_f32((float *)j->to + first, &j->from, first, n);
    } else {
        float part[512];
        for (int64_t i = 0; i < n; i += 512) {
            const int64_t m = esa_min64(512, n - i);
            esa_weight_to_f32(part, &j->from, first + i, m);
            esa_nn_leaf_plain.to_bf16((uint16_t *)j->to + first + i, part, m);
        }
    }
    if (j->mapped) give_back(j, esa_max64(0, first - BEHIND), first + n);
}

static esa_status load_one(esa_weights *w, esa_wanted *e, int32_t dtype)
{
    const esa_tensors *file = w->shard[e->shard];
    const void *data = esa_st_data(file, e->entry);
    esa_weight view = { .data = data, .dtype = e->entry->dtype, .rank = e->rank };
    memcpy(view.dim, e->dim, sizeof view.dim);
    const int32_t aligned = ((uintptr_t)data & 3) == 0;
    if (dtype == view.dtype && (dtype != ESA_DTYPE_F32 || aligned)) {
        e->mapped = 1;
        *e->view = view;
        return ESA_OK;
    }
    const int64_t count = esa_weight_count(&view),
                  bytes = esa_size_mul(count, esa_dtype_size(dtype));
    e->copy = esa_mem_alloc(&w->ctx->mem, bytes);
    if (!e->copy)
        return esa_fail(w->ctx, ESA_ERR_MEMORY, "out of memory for %s of the %s: %lld bytes",
                        e->name, w->part, (long long)bytes);
    e->copy_bytes = bytes;
    convert_job job = {
        view, e->copy, dtype, count, file->mapped, (uintptr_t)sysconf(_SC_PAGESIZE)
    };
    esa_pool_run(w->ctx->pool, convert_piece, &job, esa_ceil_div(count, PIECE));
    if (job.mapped) give_back(&job, 0, count);
    view.data = e->copy;
    view.dtype = dtype;
    *e->view = view;
    return ESA_OK;
}

void esa_weights_watch(esa_weights *w, int32_t (*tick)(void *user, int64_t done, int64_t total),
                       void *user)
{
    w->tick = tick;
    w->tick_user = user;
}

static int64_t wanted_bytes(const esa_wanted *e)
{
    return e->entry && e->view ? e->entry->end - e->entry->begin : 0;
}

esa_status esa_weights_load(esa_weights *w, int32_t hold)
{
    if (!w->checked)
        return esa_fail(w->ctx, ESA_ERR_STATE, "%s: weights can only be loaded after a check",
                        w->part);
    if (hold < ESA_HOLD_AUTO || hold > ESA_HOLD_BF16)
        return esa_fail(w->ctx, ESA_ERR_ARGUMENT,
                        "hold is %d, expected ESA_HOLD_AUTO, FILE, F32 or BF16", hold);
    const int32_t small = esa_weights_parameters(w) < SMALL_BYTES / 4;
    int32_t used[ESA_WEIGHTS_MAX_SHARDS] = { 0 };
    int64_t done = 0, total = 0;
    for (int64_t i = 0; i < w->count; i++) total += wanted_bytes(&w->want[i]);
    for (int64_t i = 0; i < w->count; i++) {
        esa_wanted *e = &w->want[i];
        if (!e->entry || !e->view) continue;
        ESA_TRY(load_one(w, e, held_dtype(e, hold, small)));
        used[e->shard] |= e->mapped;
        done += wanted_bytes(e);
        if (w->tick && w->tick(w->tick_user, done, total))
            return esa_fail(w->ctx, ESA_ERR_STATE, "cancelled");
    }
    for (int32_t s = 0; s < w->shard_count; s++)
        if (!used[s]) {
            esa_st_close(w->shard[s]);
            w->shard[s] = NULL;
        }
    w->checked = 0; /* the entries of closed files are gone, so this object cannot load again */
    return ESA_OK;
}

void esa_weights_memory(const esa_weights *w, int64_t *held, int64_t *mapped)
{
    *held = *mapped = 0;
    for (int64_t i = 0; i < w->count; i++) *held += w->want[i].copy_bytes;
    for (int32_t s = 0; s < w->shard_count; s++) *mapped += w->shard[s] ? w->shard[s]->size : 0;
}
