/* weights_load.c - turns checked files into views: mapped if the type fits, else converted piece by
 * piece.
 * SPDX-License-Identifier: Apache-2.0
 *
 * While a tensor is converted, the pages of the file are given back as soon as they were read.
 * Loading a 57 GB folder therefore needs the memory of the result and of one piece of the file. */
#define _DEFAULT_SOURCE /* madvise */
#include "model/weights/weights_internal.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "base/blocks.h"
#include "base/rng.h"
#include "nn/leaf.h"
#include "nn/product.h"

/* ESA_HOLD_AUTO keeps a part in f32 if it is smaller than this in f32 */
#define SMALL_BYTES (INT64_C(1) << 30)
/* elements converted before their pages are given back: 4 MB of an f32 file for each worker */
#define PIECE       (INT64_C(1) << 20)
/* elements given back a second time, because the kernel maps some pages around the one it reads */
#define BEHIND      (INT64_C(1) << 19)

int32_t esa_weights_file_dtype(const esa_wanted *e)
{
    if (!e->entry) return ESA_DTYPE_F32; /* random */
    if (e->entry->dtype == ESA_FILE_F8_E4M3) return ESA_DTYPE_F8;
    return e->entry->dtype; /* ESA_FILE_F32, F16, BF16 equal ESA_DTYPE_*, and blocks are the same */
}

int64_t esa_weights_rows(const esa_wanted *e)
{
    return e->rank > 1 ? e->dim[0] : esa_max64(1, e->share.runs);
}

int64_t esa_weights_size(int32_t dtype, int64_t elements)
{
    const int64_t block = esa_blocks_elements(dtype);
    return block ? elements / block * esa_blocks_bytes(dtype) : elements * esa_view_element(dtype);
}

const uint8_t *esa_weights_data(const esa_weights *w, const esa_wanted *e, int64_t i)
{
    const int64_t at = esa_share_element(&e->share, e, i, NULL);
    return esa_st_data(w->shard[e->shard], e->entry) +
           esa_weights_size(esa_weights_file_dtype(e), at);
}

int32_t esa_weights_held(const esa_weights *w, const esa_wanted *e, int32_t hold)
{
    const int32_t small = esa_weights_parameters(w) < SMALL_BYTES / 4;
    int32_t in_file = esa_weights_file_dtype(e);
    if ((e->flags & ESA_WANT_F32) || e->rank <= 1) return ESA_DTYPE_F32;
    if (in_file == ESA_DTYPE_F8) in_file = ESA_DTYPE_BF16; /* the CPU has no products of E4M3 */
    if (hold == ESA_HOLD_AUTO)
        hold = small ? ESA_HOLD_F32 : (in_file == ESA_DTYPE_F32 ? ESA_HOLD_BF16 : ESA_HOLD_FILE);
    if (hold != ESA_HOLD_FILE) return hold == ESA_HOLD_F32 ? ESA_DTYPE_F32 : ESA_DTYPE_BF16;
    /* Tensors that LoRAs change are made anew: those with blocks as the simplest of them. */
    return e->delta && esa_blocks_elements(in_file) ? ESA_BLOCKS_Q8_0 : in_file;
}

typedef struct convert_job {
    esa_weight from; /* data NULL: random numbers */
    float mean, deviation;
    uint64_t seed;
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
    const uintptr_t at = (uintptr_t)j->from.data;
    const uintptr_t a = (at + (uintptr_t)esa_weights_size(j->from.dtype, first) + j->page - 1) /
                        j->page * j->page;
    const uintptr_t b = (at + (uintptr_t)esa_weights_size(j->from.dtype, end)) / j->page * j->page;
    if (b > a) madvise((void *)a, b - a, MADV_DONTNEED);
}

void esa_weights_give_back(const esa_weights *w, const esa_wanted *e, int64_t first, int64_t end)
{
    const convert_job job = { .from = { .data = esa_weights_data(w, e, first),
                                        .dtype = esa_weights_file_dtype(e) },
                              .page = (uintptr_t)sysconf(_SC_PAGESIZE) };
    if (w->shard[e->shard]->mapped) give_back(&job, 0, end - first);
}

/* Elements first .. first+n-1 in f32. */
static void read_piece(float *dst, const convert_job *j, int64_t first, int64_t n)
{
    if (j->from.data) {
        esa_weight_to_f32(dst, &j->from, first, n);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        dst[i] = j->mean + j->deviation * esa_rng_bell(j->seed, (uint64_t)(first + i));
}

static void convert_piece(void *arg, int64_t item, int32_t worker)
{
    (void)worker;
    const convert_job *j = arg;
    const int64_t first = item * PIECE, n = esa_min64(PIECE, j->count - first);
    if (j->dtype == ESA_DTYPE_F32) {
        read_piece((float *)j->to + first, j, first, n);
    } else {
        float part[512];
        for (int64_t i = 0; i < n; i += 512) {
            const int64_t m = esa_min64(512, n - i);
            read_piece(part, j, first + i, m);
            esa_nn_leaf_plain.to_bf16((uint16_t *)j->to + first + i, part, m);
        }
    }
    if (j->mapped) give_back(j, esa_max64(0, first - BEHIND), first + n);
}

/* Converts the elements from `first` to the end of their run; returns their number. */
static int64_t convert_run(esa_weights *w, esa_wanted *e, const esa_weight *view, int32_t dtype,
                           int64_t first)
{
    int64_t count;
    esa_share_element(&e->share, e, first, &count);
    if (e->entry && dtype == view->dtype) { /* runs that are put in order */
        esa_weights_copy(w, e->shard, (char *)e->copy + esa_weights_size(dtype, first),
                         esa_weights_data(w, e, first), esa_weights_size(dtype, count));
        return count;
    }
    const int64_t row = e->rank > 1 ? first / (esa_weight_count(view) / e->dim[0]) : 0;
    convert_job job = { .from = *view,
                        .to = (char *)e->copy + esa_weights_size(dtype, first),
                        .dtype = dtype,
                        .count = count,
                        .mapped = e->entry && w->shard[e->shard]->mapped,
                        .page = (uintptr_t)sysconf(_SC_PAGESIZE),
                        .seed = esa_weights_seed(e) };
    if (e->entry) job.from.data = esa_weights_data(w, e, first);
    if (view->scale) job.from.scale = view->scale + row;
    esa_weights_bell(e, &job.mean, &job.deviation);
    esa_pool_run(w->ctx->pool, convert_piece, &job, esa_ceil_div(count, PIECE));
    if (job.mapped) give_back(&job, 0, count);
    return count;
}

/* Converts into memory of our own. view is that of the file; its data is NULL for random numbers.
 */
static esa_status convert(esa_weights *w, esa_wanted *e, esa_weight *view, int32_t dtype)
{
    const int64_t count = esa_weight_count(view), bytes = esa_weights_size(dtype, count),
                  rows = esa_weights_rows(e) * (int64_t)sizeof(float);
    float *scale = NULL;
    e->copy = esa_mem_alloc(&w->ctx->mem, bytes);
    if (!e->copy)
        return esa_fail(w->ctx, ESA_ERR_MEMORY, "out of memory for %s of the %s: %lld bytes",
                        e->name, w->part, (long long)bytes);
    e->copy_bytes = bytes;
    if (e->delta) {
        ESA_TRY(esa_weights_merge(w, e, e->copy, dtype, 0, esa_weights_rows(e)));
    } else {
        if (view->dtype == ESA_DTYPE_F8) ESA_TRY(esa_weights_scales(w, e, &scale));
        view->scale = scale;
        for (int64_t i = 0; i < count;) i += convert_run(w, e, view, dtype, i);
        if (scale) esa_mem_free(&w->ctx->mem, scale, rows);
        view->scale = NULL;
    }
    view->data = e->copy;
    view->dtype = dtype;
    return ESA_OK;
}

void esa_weights_expand(esa_weights *w, const esa_wanted *e, void *dst, int32_t dtype,
                        int64_t first, int64_t count)
{
    const esa_tensors *shard = w->shard[e->shard];
    const int32_t type = esa_weights_file_dtype(e);
    convert_job job = { .from = { .data = esa_weights_data(w, e, first),
                                  .dtype = type,
                                  .rank = 1,
                                  .dim = { count } },
                        .to = dst,
                        .dtype = dtype,
                        .count = count,
                        .mapped = shard->mapped,
                        .page = (uintptr_t)sysconf(_SC_PAGESIZE) };
    esa_pool_run(w->ctx->pool, convert_piece, &job, esa_ceil_div(count, PIECE));
}

esa_status esa_weights_load_one(esa_weights *w, esa_wanted *e, int32_t dtype)
{
    esa_weight view = { .dtype = esa_weights_file_dtype(e), .rank = e->rank };
    memcpy(view.dim, e->dim, sizeof view.dim);
    if (e->entry) view.data = esa_weights_data(w, e, 0);
    const int32_t aligned = ((uintptr_t)view.data & 3) == 0;
    e->mapped = e->entry && !e->delta && e->share.runs < 2 && dtype == view.dtype &&
                (dtype != ESA_DTYPE_F32 || aligned);
    if (!e->mapped) ESA_TRY(convert(w, e, &view, dtype));
    *e->view = view;
    return ESA_OK;
}

/* ---------------------------------------------------------------- bytes as they are */

/* Bytes that one thread copies at once. */
#define SLICE (INT64_C(4) << 20)

typedef struct copy_job {
    char *dst;
    const char *src;
    int64_t bytes;
    int32_t mapped;
    uintptr_t page;
} copy_job;

static void copy_slice(void *arg, int64_t item, int32_t worker)
{
    (void)worker;
    const copy_job *j = arg;
    const int64_t first = item * SLICE, n = esa_min64(SLICE, j->bytes - first);
    const uintptr_t at = (uintptr_t)j->src + (uintptr_t)first, below = at / j->page * j->page,
                    inside = (at + j->page - 1) / j->page * j->page,
                    end = (at + (uintptr_t)n) / j->page * j->page;
#ifdef MADV_POPULATE_READ
    /* One call instead of a fault for every few pages; an old kernel refuses it. */
    if (j->mapped) madvise((void *)below, at + (uintptr_t)n - below, MADV_POPULATE_READ);
#else
    (void)below;
#endif
    memcpy(j->dst + first, j->src + first, (size_t)n);
    if (j->mapped && end > inside) madvise((void *)inside, end - inside, MADV_DONTNEED);
}

void esa_weights_copy(esa_weights *w, int32_t shard, void *dst, const void *src, int64_t bytes)
{
    copy_job job = { dst, src, bytes, w->shard[shard]->mapped, (uintptr_t)sysconf(_SC_PAGESIZE) };
    esa_pool_run(w->ctx->pool, copy_slice, &job, esa_ceil_div(bytes, SLICE));
}

/* ---------------------------------------------------------------- all tensors */

void esa_weights_watch(esa_weights *w, int32_t (*tick)(void *user, int64_t done, int64_t total),
                       void *user)
{
    w->tick = tick;
    w->tick_user = user;
}

int64_t esa_weights_bytes(const esa_weights *w, const esa_wanted *e)
{
    if (!e->present || !e->view) return 0;
    return w->random ? esa_size_mul(esa_wanted_count(e), 2)
                     : esa_weights_size(esa_weights_file_dtype(e), esa_wanted_count(e));
}

void esa_weights_close_files(esa_weights *w)
{
    int32_t used[ESA_WEIGHTS_MAX_SHARDS] = { 0 };
    for (int64_t i = 0; i < w->count; i++) used[w->want[i].shard] |= w->want[i].mapped;
    for (int32_t s = 0; s < w->shard_count; s++)
        if (!used[s]) {
            esa_st_close(w->shard[s]);
            w->shard[s] = NULL;
        }
    esa_lora_close(w);
    w->checked = 0;
}

/* The type that a tensor is held in before it is packed. */
static int32_t held_for(const esa_weights *w, const esa_wanted *e, int32_t hold, int32_t bf16)
{
    const int32_t held = esa_weights_held(w, e, hold),
                  product = (e->flags & ESA_WANT_PRODUCT) && !(e->flags & ESA_WANT_F32);
    return bf16 && product && hold == ESA_HOLD_AUTO && held == ESA_DTYPE_F32 ? ESA_DTYPE_BF16
                                                                             : held;
}

/* 1 if a loaded tensor is packed for products. */
static int32_t is_packed(const esa_wanted *e, int32_t hold, int32_t bf16)
{
    const int32_t dtype = e->view->dtype, exact = (e->flags & ESA_WANT_F32) && bf16;
    if (!(e->flags & ESA_WANT_PRODUCT) || (e->mapped && hold == ESA_HOLD_FILE && !exact)) return 0;
    if (dtype == ESA_DTYPE_BF16) return bf16 && !(e->mapped && hold == ESA_HOLD_AUTO);
    return dtype == ESA_DTYPE_F32;
}

static esa_status pack(esa_weights *w, esa_wanted *e)
{
    esa_weight *view = e->view;
    const int64_t out = view->dim[0], depth = esa_weight_count(view) / out,
                  bytes = esa_panels_bytes(w->ctx, view->dtype, out, depth);
    void *packed = esa_mem_alloc(&w->ctx->mem, bytes);
    if (!packed)
        return esa_fail(w->ctx, ESA_ERR_MEMORY, "out of memory for %s of the %s: %lld bytes",
                        e->name, w->part, (long long)bytes);
    esa_panels_fill(w->ctx, view->dtype, packed, view, 0, out);
    if (e->mapped) esa_weights_give_back(w, e, 0, esa_weight_count(view));
    esa_mem_free(&w->ctx->mem, e->copy, e->copy_bytes);
    e->mapped = 0;
    e->copy = packed;
    e->copy_bytes = bytes;
    esa_panels_view(w->ctx, view, view->dtype, packed);
    return ESA_OK;
}

esa_status esa_weights_load(esa_weights *w, int32_t hold, int32_t bf16)
{
    if (!w->checked)
        return esa_fail(w->ctx, ESA_ERR_STATE, "%s: weights can only be loaded after a check",
                        w->part);
    if (hold < ESA_HOLD_AUTO || hold > ESA_HOLD_BF16)
        return esa_fail(w->ctx, ESA_ERR_ARGUMENT,
                        "hold is %d, expected ESA_HOLD_AUTO, FILE, F32 or BF16", hold);
    int64_t done = 0, total = 0;
    for (int64_t i = 0; i < w->count; i++) total += esa_weights_bytes(w, &w->want[i]);
    for (int64_t i = 0; i < w->count; i++) {
        esa_wanted *e = &w->want[i];
        if (!e->present || !e->view) continue;
        ESA_TRY(esa_weights_load_one(w, e, held_for(w, e, hold, bf16)));
        if (is_packed(e, hold, bf16)) ESA_TRY(pack(w, e));
        done += esa_weights_bytes(w, e);
        if (w->tick && w->tick(w->tick_user, done, total))
            return esa_fail(w->ctx, ESA_ERR_STATE, "cancelled");
    }
    esa_weights_close_files(w);
    return ESA_OK;
}

void esa_weights_memory(const esa_weights *w, int64_t *held, int64_t *mapped)
{
    *held = *mapped = 0;
    for (int64_t i = 0; i < w->count; i++) *held += w->want[i].copy_bytes;
    for (int32_t s = 0; s < w->shard_count; s++) *mapped += w->shard[s] ? w->shard[s]->size : 0;
}
