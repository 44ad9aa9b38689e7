/* cuda_backend.c - the table of the GPU: calls the plugin, and copies its messages into the ctx.
 * SPDX-License-Identifier: Apache-2.0 */
#include "backend/backend.h"

#include <string.h>
#include "backend/cuda_engine.h"
#include "backend/plugin.h"
#include "base/half.h"
#include "base/pool.h"
#include "select/select.h"

static esa_status cuda_reach(esa_ctx *ctx, const esa_tensor *t, const char *name)
{
    const esa_status status = esa_cuda_open(ctx);
    if (status) {
        char why[sizeof ctx->error];
        memcpy(why, ctx->error, sizeof why);
        return esa_fail(ctx, status, "%s is on a CUDA device, but %.460s", name, why);
    }
    if (t->device_index != ctx->cuda_device)
        return esa_fail(ctx, ESA_ERR_DEVICE,
                        "%s is on GPU %d, but this ctx uses GPU %d (esa_ctx_params.cuda_device)",
                        name, (int)t->device_index, (int)ctx->cuda_device);
    if ((uintptr_t)t->data % (uintptr_t)esa_dtype_size(t->dtype))
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "%s starts at an address that is not a multiple of its element size (%d "
                        "bytes), which a GPU cannot read",
                        name, (int)esa_dtype_size(t->dtype));
    return ESA_OK;
}

static int32_t cuda_ordinal(const esa_ctx *ctx) { return ctx->cuda_device; }

/* ---------------------------------------------------------------- memory and marks */

static esa_status cuda_alloc(esa_ctx *ctx, void **ptr, int64_t bytes)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->alloc(c->dev, ptr, bytes));
}

/* CUDA does not work in a child process of fork(): its copy of what it holds there is not freed. */
static void cuda_release(esa_ctx *ctx, void *ptr, int64_t bytes)
{
    (void)bytes;
    if (ptr && !esa_pool_forked(ctx->pool)) ctx->cuda->table->release(ctx->cuda_device, ptr);
}

static esa_status cuda_upload(esa_ctx *ctx, void *dst, const void *src, int64_t bytes)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->upload(c->dev, dst, src, bytes, ctx->cuda_stream));
}

static esa_status cuda_download(esa_ctx *ctx, void *dst, const void *src, int64_t bytes)
{
    const esa_status status = ctx->cuda->table->download(ctx->cuda_device, dst, src, bytes,
                                                         ctx->cuda_stream);
    if (status)
        return esa_fail(ctx, status, "copying %lld bytes from GPU %d failed", (long long)bytes,
                        (int)ctx->cuda_device);
    return ESA_OK;
}

static esa_status cuda_copy(esa_ctx *ctx, void *dst, const void *src, int64_t bytes)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->copy(c->dev, dst, src, bytes, ctx->cuda_stream));
}

static esa_status cuda_mark_record(esa_ctx *ctx, esa_mark *mark)
{
    const esa_cuda *c = ctx->cuda;
    if (!mark->handle) ESA_TRY(esa_cuda_status(ctx, c->table->mark_create(c->dev, &mark->handle)));
    return esa_cuda_status(ctx, c->table->mark_record(c->dev, mark->handle, ctx->cuda_stream));
}

static esa_status cuda_mark_elapsed(esa_ctx *ctx, double *seconds, const esa_mark *from,
                                    const esa_mark *to)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->mark_elapsed(c->dev, seconds, from->handle, to->handle));
}

static void cuda_mark_release(esa_ctx *ctx, esa_mark *mark)
{
    if (mark->handle && !esa_pool_forked(ctx->pool))
        ctx->cuda->table->mark_release(ctx->cuda_device, mark->handle);
    mark->handle = NULL;
}

/* ---------------------------------------------------------------- attention */

static int64_t cuda_attention_workspace(esa_ctx *ctx, const esa_attn_args *args)
{
    return ctx->cuda->table->attention_workspace(ctx->cuda->dev, args);
}

static esa_status cuda_attention(esa_ctx *ctx, const esa_attn_args *args, void *ws)
{
    const esa_cuda *c = ctx->cuda;
    if (!ws) ESA_TRY(esa_cuda_scratch(ctx, &ws, c->table->attention_workspace(c->dev, args)));
    return esa_cuda_status(ctx, c->table->attention(c->dev, args, ws, ctx->cuda_stream));
}

static esa_attn_kernel cuda_attention_kernel(esa_ctx *ctx, const esa_attn_args *args)
{
    return ctx->cuda->table->attention_kernel(ctx->cuda->dev, args);
}

static esa_status cuda_attention_both(esa_ctx *ctx, const esa_attn_args *first, void *first_ws,
                                      const esa_attn_args *second, void *second_ws)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->attention_both(c->dev, first, first_ws, second, second_ws,
                                                         ctx->cuda_stream));
}

static esa_status cuda_exact_take(esa_ctx *ctx, const esa_attn_args *args, void *rows)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->exact_take(c->dev, args, rows, ctx->cuda_stream));
}

static esa_status cuda_exact_mend(esa_ctx *ctx, const esa_attn_args *args, const void *o,
                                  const float *lse)
{
    const esa_cuda *c = ctx->cuda;
    return esa_cuda_status(ctx, c->table->exact_mend(c->dev, args, o, lse, ctx->cuda_stream));
}

/* ---------------------------------------------------------------- selection */

static int64_t cuda_select_workspace(esa_ctx *ctx, const esa_select_args *args)
{
    return ctx->cuda->table->select_workspace(ctx->cuda->dev, args);
}

static esa_cuda_mask mask_view(const esa_mask *m)
{
    return (esa_cuda_mask){ m->count, m->index, m->fine_count, m->fine_index, m->facts,
                            m->B,     m->H,     m->nq,         m->nk,         m->cap };
}

static esa_status cuda_select(esa_ctx *ctx, const esa_select_args *args, esa_mask *mask,
                              float *importance, void *ws)
{
    const esa_cuda *c = ctx->cuda;
    const esa_cuda_mask view = mask_view(mask);
    if (importance)
        return esa_fail(ctx, ESA_ERR_INTERNAL,
                        "a GPU cannot return importance together with a mask");
    if (!ws) ESA_TRY(esa_cuda_scratch(ctx, &ws, c->table->select_workspace(c->dev, args)));
    mask->filled = 0; /* a selection that fails from here on leaves an empty mask */
    ESA_TRY(esa_cuda_status(ctx, c->table->select(c->dev, args, &view, ws, ctx->cuda_stream)));
    esa_select_sign(args, mask, 0); /* the number of blocks that exist is in mask->facts */
    return ESA_OK;
}

/* Workspace of the functions below: scores [cells] on the device, then the selector's. */
static float *errors_carve(esa_ctx *ctx, esa_carve *carve, const esa_select_args *args,
                           int64_t *cells, void **rest)
{
    const int64_t rows = esa_size_mul(args->B * args->Hq, args->nq),
                  levels = args->params.tail == ESA_TAIL_LEVELS ? 2 : 1;
    *cells = esa_size_mul(esa_size_mul(rows, args->nk), levels);
    float *out = esa_carve_take(carve, esa_size_mul(*cells, 4));
    *rest = esa_carve_take(carve, cuda_select_workspace(ctx, args));
    return out;
}

static int64_t cuda_errors_workspace(esa_ctx *ctx, const esa_select_args *args)
{
    esa_carve carve = { NULL, 0 };
    int64_t cells;
    void *rest;
    errors_carve(ctx, &carve, args, &cells, &rest);
    return carve.used;
}

static esa_status cuda_errors(esa_ctx *ctx, const esa_select_args *args, float *out, void *ws)
{
    const esa_cuda *c = ctx->cuda;
    if (!ws) ESA_TRY(esa_cuda_scratch(ctx, &ws, cuda_errors_workspace(ctx, args)));
    esa_carve carve = { ws, 0 };
    int64_t cells;
    void *rest;
    float *scores = errors_carve(ctx, &carve, args, &cells, &rest);
    ESA_TRY(esa_cuda_status(ctx, c->table->errors(c->dev, args, scores, rest, ctx->cuda_stream)));
    return cuda_download(ctx, out, scores, cells * 4);
}

static int64_t cuda_order_workspace(esa_ctx *ctx, const esa_select_args *args)
{
    return ctx->cuda->table->order_workspace(ctx->cuda->dev, args);
}

static esa_status cuda_order(esa_ctx *ctx, const esa_select_args *args, int32_t *perm_q,
                             int32_t *perm_k, void *ws)
{
    const esa_cuda *c = ctx->cuda;
    if (!ws) ESA_TRY(esa_cuda_scratch(ctx, &ws, c->table->order_workspace(c->dev, args)));
    return esa_cuda_status(ctx,
                           c->table->order(c->dev, args, perm_q, perm_k, ws, ctx->cuda_stream));
}

typedef struct importance_parts {
    int64_t cells;
    float *value;    /* [cells] */
    double *entropy; /* [heads] */
    void *rest;      /* the selector's workspace */
} importance_parts;

static importance_parts importance_carve(esa_ctx *ctx, esa_carve *carve,
                                         const esa_select_args *args)
{
    const int64_t heads = args->B * args->Hq;
    importance_parts p;
    p.cells = esa_size_mul(esa_size_mul(heads, args->nq), args->nk);
    p.value = esa_carve_take(carve, esa_size_mul(p.cells, 4));
    p.entropy = esa_carve_take(carve, heads * 8);
    p.rest = esa_carve_take(carve, cuda_select_workspace(ctx, args));
    return p;
}

static int64_t cuda_importance_workspace(esa_ctx *ctx, const esa_select_args *args)
{
    esa_carve carve = { NULL, 0 };
    importance_carve(ctx, &carve, args);
    return carve.used;
}

static esa_status cuda_importance(esa_ctx *ctx, const esa_select_args *args, float *out,
                                  double *entropy, void *ws)
{
    const esa_cuda *c = ctx->cuda;
    if (!ws) ESA_TRY(esa_cuda_scratch(ctx, &ws, cuda_importance_workspace(ctx, args)));
    esa_carve carve = { ws, 0 };
    const importance_parts p = importance_carve(ctx, &carve, args);
    ESA_TRY(esa_cuda_status(
        ctx, c->table->importance(c->dev, args, p.value, p.entropy, p.rest, ctx->cuda_stream)));
    ESA_TRY(cuda_download(ctx, out, p.value, p.cells * 4));
    return entropy ? cuda_download(ctx, entropy, p.entropy, args->B * args->Hq * 8) : ESA_OK;
}

/* ---------------------------------------------------------------- masks */

/* Allocates counts, lists and facts, and makes the permutations if the layout moves tokens.
 * Adaptive orders get room only. */
static esa_status furnish(esa_ctx *ctx, esa_mask *m)
{
    const int64_t rows = esa_size_mul(esa_size_mul(m->B, m->H), m->nq),
                  indices = esa_size_mul(esa_size_mul(rows, m->cap), 2);
    ESA_TRY(cuda_alloc(ctx, (void **)&m->count, esa_size_mul(rows, 4)));
    ESA_TRY(cuda_alloc(ctx, (void **)&m->index, indices));
    ESA_TRY(cuda_alloc(ctx, (void **)&m->facts, ESA_FACTS * 8));
    if (m->fine) {
        ESA_TRY(cuda_alloc(ctx, (void **)&m->fine_count, esa_size_mul(rows, 4)));
        ESA_TRY(cuda_alloc(ctx, (void **)&m->fine_index, indices));
    }
    int32_t **const perm[2] = { &m->perm_q, &m->perm_k };
    for (int32_t side = 0; side < 2; side++)
        if (m->layout.order == ESA_ORDER_ADAPTIVE) {
            if (m->Hkv)
                ESA_TRY(cuda_alloc(ctx, (void **)perm[side], esa_mask_order_bytes(m, side)));
        } else if (esa_layout_moves(&m->layout, side, m->mode))
            ESA_TRY(esa_backend_order(ctx, &esa_backend_cuda, perm[side], &m->layout, side, m->mode,
                                      side ? m->Nk : m->Nq));
    return ESA_OK;
}

static esa_status cuda_mask_create(esa_ctx *ctx, esa_mask **mask, const esa_mask *like)
{
    const esa_cuda *c = ctx->cuda;
    *mask = NULL;
    esa_mask *m = esa_mem_alloc(&ctx->mem, (int64_t)sizeof *m);
    if (!m) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for a mask");
    *m = *like;
    m->mem = ctx->mem;
    m->device = ESA_DEVICE_CUDA;
    m->heap = (esa_device_heap){ ctx->cuda_device, c->table->release, c->table->download };
    m->cap = m->nk;
    m->filled = 0;
    m->count = NULL;
    m->index = NULL;
    m->fine_count = NULL;
    m->fine_index = NULL;
    m->facts = NULL;
    m->perm_q = m->perm_k = NULL;
    m->ordered = 0;
    const esa_status status = furnish(ctx, m);
    if (status)
        esa_mask_free(m);
    else
        *mask = m;
    return status;
}

static esa_status cuda_mask_set_bits(esa_ctx *ctx, esa_mask *mask, const uint8_t *bits,
                                     const uint8_t *fine)
{
    const esa_cuda *c = ctx->cuda;
    const esa_cuda_mask view = mask_view(mask);
    ESA_TRY(
        esa_cuda_status(ctx, c->table->bits_to_lists(c->dev, &view, bits, fine, ctx->cuda_stream)));
    mask->filled = 1;
    return ESA_OK;
}

static esa_status cuda_mask_get_bits(esa_ctx *ctx, const esa_mask *mask, uint8_t *bits,
                                     uint8_t *fine)
{
    const esa_cuda *c = ctx->cuda;
    const esa_cuda_mask view = mask_view(mask);
    return esa_cuda_status(ctx,
                           c->table->lists_to_bits(c->dev, &view, bits, fine, ctx->cuda_stream));
}

const esa_backend esa_backend_cuda = {
    .name = "GPU",
    .device = ESA_DEVICE_CUDA,
    .host_memory = 0,
    .order_room = 1,
    .open = esa_cuda_open,
    .ordinal = cuda_ordinal,
    .reach = cuda_reach,
    .alloc = cuda_alloc,
    .release = cuda_release,
    .scratch = esa_cuda_scratch,
    .upload = cuda_upload,
    .download = cuda_download,
    .copy = cuda_copy,
    .mark_record = cuda_mark_record,
    .mark_elapsed = cuda_mark_elapsed,
    .mark_release = cuda_mark_release,
    .attention_workspace = cuda_attention_workspace,
    .attention = cuda_attention,
    .attention_kernel = cuda_attention_kernel,
    .attention_both = cuda_attention_both,
    .exact_take = cuda_exact_take,
    .exact_mend = cuda_exact_mend,
    .select_workspace = cuda_select_workspace,
    .select = cuda_select,
    .importance_workspace = cuda_importance_workspace,
    .importance = cuda_importance,
    .errors_workspace = cuda_errors_workspace,
    .errors = cuda_errors,
    .order_workspace = cuda_order_workspace,
    .order = cuda_order,
    .mask_create = cuda_mask_create,
    .mask_set_bits = cuda_mask_set_bits,
    .mask_get_bits = cuda_mask_get_bits,
    .rows = &esa_cuda_engine_rows,
    .products = &esa_cuda_engine_products,
    .latents = &esa_cuda_engine_latents,
    .biased = &esa_cuda_engine_biased,
    .planes = &esa_cuda_engine_planes,
    .transfer = &esa_cuda_engine_transfer,
};
