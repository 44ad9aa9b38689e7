/* cuda_calls.c - the CUDA side of the device switch: bound args go to the plugin, its sentences
 * come back.
 * SPDX-License-Identifier: Apache-2.0 */
#include "attn/attn.h"

esa_status esa_cuda_attention(esa_ctx *ctx, const esa_attn_args *args, void *ws)
{
    const esa_cuda *c = ctx->cuda;
    if (!ws) {
        const esa_status status = esa_cuda_scratch(ctx, &ws,
                                                   c->table->attention_workspace(c->dev, args));
        if (status) return status;
    }
    return esa_cuda_status(ctx, c->table->attention(c->dev, args, ws, ctx->cuda_stream));
}

/* Points args at the arrays of a mask on the GPU. */
static void use_mask(esa_attn_args *args, const esa_mask *mask)
{
    args->count = mask->count;
    args->index = mask->index;
    args->cap = mask->cap;
    args->perm_q = mask->perm_q;
    args->perm_k = mask->perm_k;
}

esa_status esa_cuda_attention_once(esa_ctx *ctx, esa_attn_args *args, const esa_mask *mask)
{
    esa_mask *copy = NULL;
    esa_status status = ESA_OK;
    if (mask && mask->device == ESA_DEVICE_CPU) {
        status = esa_cuda_mask_copy(ctx, &copy, mask);
        mask = copy;
    }
    if (!status && mask) use_mask(args, mask);
    if (!status) status = esa_cuda_attention(ctx, args, NULL);
    esa_mask_free(copy); /* giving device memory back waits for the kernels that read it */
    return status;
}

esa_status esa_cuda_select(esa_ctx *ctx, const esa_select_args *args, esa_mask *mask, void *ws)
{
    const esa_cuda *c = ctx->cuda;
    const esa_cuda_mask view = esa_cuda_mask_view(mask);
    esa_select_args a = *args;
    a.perm_q = mask->perm_q;
    a.perm_k = mask->perm_k;
    esa_status status = ESA_OK;
    if (!ws && (status = esa_cuda_scratch(ctx, &ws, c->table->select_workspace(c->dev, &a))))
        return status;
    mask->filled = 0; /* a selection that fails half way leaves an empty mask, not an old one */
    status = esa_cuda_status(ctx, c->table->select(c->dev, &a, &view, ws, ctx->cuda_stream));
    if (!status) esa_select_sign(&a, mask, 0); /* what exists is in mask->facts */
    return status;
}

typedef struct importance_parts {
    float *value;
    double *entropy;
    void *rest;
} importance_parts;

static importance_parts importance_carve(esa_carve *carve, int64_t heads, int64_t cells,
                                         int64_t select_bytes)
{
    importance_parts p;
    p.value = esa_carve_take(carve, esa_size_mul(cells, 4));
    p.entropy = esa_carve_take(carve, heads * 8);
    p.rest = esa_carve_take(carve, select_bytes);
    return p;
}

/* With the permutations already in args. */
static esa_status importance_ordered(esa_ctx *ctx, const esa_select_args *args, float *out,
                                     double *entropy)
{
    const esa_cuda *c = ctx->cuda;
    const int64_t heads = args->B * args->Hq,
                  cells = esa_size_mul(esa_size_mul(heads, args->nq), args->nk);
    const int64_t select_bytes = c->table->select_workspace(c->dev, args);
    esa_carve carve = { NULL, 0 };
    void *ws;
    importance_carve(&carve, heads, cells, select_bytes);
    esa_status status = esa_cuda_scratch(ctx, &ws, carve.used);
    if (status) return status;
    carve = (esa_carve){ ws, 0 };
    const importance_parts p = importance_carve(&carve, heads, cells, select_bytes);
    if ((status = esa_cuda_status(ctx, c->table->importance(c->dev, args, p.value, p.entropy,
                                                            p.rest, ctx->cuda_stream))))
        return status;
    status = c->table->download(ctx->cuda_device, out, p.value, cells * 4, ctx->cuda_stream);
    if (!status && entropy)
        status = c->table->download(ctx->cuda_device, entropy, p.entropy, heads * 8,
                                    ctx->cuda_stream);
    return status ? esa_fail(ctx, status, "copying the importance from GPU %d failed",
                             (int)ctx->cuda_device)
                  : ESA_OK;
}

esa_status esa_cuda_importance(esa_ctx *ctx, const esa_select_args *args, float *out,
                               double *entropy)
{
    /* A mask of one block carries the permutations of the layout for the time of the call. */
    esa_mask like = { .B = 1,
                      .H = 1,
                      .Nq = args->Nq,
                      .Nk = args->Nk,
                      .nq = 1,
                      .nk = 1,
                      .mode = args->params.mode,
                      .layout = args->params.layout };
    esa_mask *orders;
    esa_status status = esa_cuda_mask_like(ctx, &orders, &like);
    if (status) return status;
    esa_select_args a = *args;
    a.perm_q = orders->perm_q;
    a.perm_k = orders->perm_k;
    status = importance_ordered(ctx, &a, out, entropy);
    esa_mask_free(orders);
    return status;
}

/* Of attention with one block size, or dense (block_q 0). orders: whether the mask's layout may
 * move tokens. */
static int64_t attention_bytes(const esa_plan *plan, int32_t block_q, int32_t block_k,
                               int32_t moves_q, int32_t moves_k)
{
    /* stands for a permutation, a list or lengths: only their being there counts */
    static const int32_t some = 0;
    static const uint16_t listed = 0;
    const esa_cuda *c = plan->ctx->cuda;
    esa_attn_args a;
    esa_bind_attention(&a, plan->ctx, &plan->shapes, &plan->attention, NULL, NULL);
    if (block_q) {
        a.block_q = block_q;
        a.block_k = block_k;
        a.nq = esa_ceil_div(plan->shapes.Nq, block_q);
        a.nk = esa_ceil_div(plan->shapes.Nk, block_k);
        a.cap = a.nk;
        a.tail = plan->attention.tail;
        a.count = &some;
        a.index = &listed;
        a.perm_q = moves_q ? &some : NULL;
        a.perm_k = moves_k ? &some : NULL;
    }
    return c->table->attention_workspace(c->dev, &a);
}

int64_t esa_cuda_plan_bytes(const esa_plan *plan)
{
    const esa_cuda *c = plan->ctx->cuda;
    int64_t bytes = attention_bytes(plan, 0, 0, 0, 0);
    if (plan->has_select) {
        esa_select_args a;
        esa_bind_select(&a, plan->ctx, &plan->shapes, &plan->select, NULL, NULL);
        a.perm_q = plan->perm_q;
        a.perm_k = plan->perm_k;
        bytes = esa_max64(bytes, c->table->select_workspace(c->dev, &a));
        return esa_max64(bytes, attention_bytes(plan, plan->select.block_q, plan->select.block_k,
                                                plan->perm_q != NULL, plan->perm_k != NULL));
    }
    for (int32_t bq = 16; bq <= 256; bq += 16)
        for (int32_t bk = 16; bk <= 256; bk += 16)
            bytes = esa_max64(bytes, attention_bytes(plan, bq, bk, 0, 0));
    return bytes;
}
