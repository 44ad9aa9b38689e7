/* plan.c - the plan tier: everything is decided once per shape; executing allocates nothing.
 * SPDX-License-Identifier: Apache-2.0 */
#include "attn/attn.h"

#include <math.h>
#include <string.h>

/* Workspace of attention for one block size; a plan without a selector takes masks of every block
 * size. */
static int64_t attention_bytes(const esa_plan *plan, int32_t block_q, int32_t block_k,
                               int32_t with_mask)
{
    esa_attn_args a;
    esa_bind_attention(&a, plan->ctx, &plan->shapes, &plan->attention, NULL, NULL);
    if (with_mask) {
        a.block_q = block_q;
        a.block_k = block_k;
        a.nq = esa_ceil_div(plan->shapes.Nq, block_q);
        a.nk = esa_ceil_div(plan->shapes.Nk, block_k);
        a.tail = plan->attention.tail;
    }
    return esa_attn_cpu_workspace(&a);
}

static int64_t plan_bytes(const esa_plan *plan)
{
    if (plan->shapes.device == ESA_DEVICE_CUDA) return esa_cuda_plan_bytes(plan);
    int64_t bytes = attention_bytes(plan, 0, 0, 0);
    if (plan->has_select) {
        esa_select_args a;
        esa_bind_select(&a, plan->ctx, &plan->shapes, &plan->select, NULL, NULL);
        bytes = esa_max64(bytes, esa_select_workspace(&a));
        bytes = esa_max64(bytes,
                          attention_bytes(plan, plan->select.block_q, plan->select.block_k, 1));
    } else {
        for (int32_t bq = 16; bq <= 256; bq += 16)
            for (int32_t bk = 16; bk <= 256; bk += 16)
                bytes = esa_max64(bytes, attention_bytes(plan, bq, bk, 1));
        /* permutations of any mask's order */
        bytes = esa_size_add(bytes,
                             2 * ESA_WORKSPACE_ALIGN + 4 * (plan->shapes.Nq + plan->shapes.Nk));
    }
    return bytes;
}

static esa_status create_inside(esa_ctx *ctx, esa_plan *plan, const esa_shapes *shapes,
                                const esa_select_params *select,
                                const esa_attention_params *attention)
{
    esa_status status;
    if ((status = esa_check_shapes(ctx, shapes))) return status;
    plan->ctx = ctx;
    plan->shapes = *shapes;
    if ((status = esa_check_attention(ctx, &plan->attention, attention, shapes->D))) return status;
    plan->attention.lse = NULL; /* comes with each call */
    plan->has_select = select != NULL;
    if (select) {
        if ((status = esa_check_select(ctx, &plan->select, select, shapes->Nq, shapes->Nk,
                                       shapes->D)))
            return status;
        if (plan->select.kv_len && plan->attention.kv_len &&
            plan->select.kv_len != plan->attention.kv_len)
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "select and attention params of a plan name different kv_len arrays");
        if (!plan->select.kv_len) plan->select.kv_len = plan->attention.kv_len;
        plan->attention.kv_len = plan->select.kv_len;
        esa_select_blocks(&plan->select, shapes->Nq, shapes->Nk, &plan->nq, &plan->nk,
                          &plan->runnable);
        const esa_layout *l = &plan->select.layout;
        if (plan->attention.causal && !l->order_applied &&
            (!esa_order_is_identity(l, 0, plan->select.mode) ||
             !esa_order_is_identity(l, 1, plan->select.mode)))
            return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                            "causal attention needs raster order, or tensors that already stand in "
                            "their order (order_applied)");
        const int32_t moves_q = !l->order_applied &&
                                !esa_order_is_identity(l, 0, plan->select.mode);
        const int32_t moves_k = !l->order_applied &&
                                !esa_order_is_identity(l, 1, plan->select.mode);
        if (moves_q && !(plan->perm_q = esa_mem_alloc(&ctx->mem, shapes->Nq * 4)))
            return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for an order");
        if (moves_k && !(plan->perm_k = esa_mem_alloc(&ctx->mem, shapes->Nk * 4)))
            return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for an order");
        if (moves_q) esa_order_build(plan->perm_q, shapes->Nq, l, 0, plan->select.mode);
        if (moves_k) esa_order_build(plan->perm_k, shapes->Nk, l, 1, plan->select.mode);
    }
    const int64_t bytes = plan_bytes(plan);
    if (bytes < 0 || bytes > INT64_MAX - ESA_WORKSPACE_ALIGN)
        return esa_fail(
            ctx, ESA_ERR_MEMORY,
            "out of memory: the workspace for these shapes would leave the address space");
    plan->workspace = esa_ceil_div(bytes, ESA_WORKSPACE_ALIGN) * ESA_WORKSPACE_ALIGN;
    return ESA_OK;
}

static void plan_release(esa_plan *plan)
{
    const esa_allocator *mem = &plan->ctx->mem;
    esa_mem_free(mem, plan->perm_q, plan->shapes.Nq * 4);
    esa_mem_free(mem, plan->perm_k, plan->shapes.Nk * 4);
    esa_mem_free(mem, plan, sizeof *plan);
}

esa_status esa_plan_create(esa_ctx *ctx, esa_plan **out, const esa_shapes *shapes,
                           const esa_select_params *select, const esa_attention_params *attention)
{
    if (out) *out = NULL;
    esa_status status = esa_ctx_enter(ctx);
    if (status) return status;
    esa_plan *plan = NULL;
    if (!out)
        status = esa_fail(ctx, ESA_ERR_ARGUMENT,
                          "plan is NULL, a pointer that receives the plan is expected");
    else if (!(plan = esa_mem_zalloc(&ctx->mem, sizeof *plan)))
        status = esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for a plan");
    if (plan) {
        plan->ctx = ctx;
        status = create_inside(ctx, plan, shapes, select, attention);
        if (status)
            plan_release(plan);
        else
            *out = plan;
    }
    esa_ctx_leave(ctx);
    return status;
}

void esa_plan_free(esa_plan *plan)
{
    if (plan) plan_release(plan);
}

/* An output that was not given. */
static esa_status refuse_null(const esa_plan *plan, const char *name)
{
    const esa_status status = esa_ctx_enter(plan->ctx);
    if (status) return status;
    esa_fail(plan->ctx, ESA_ERR_ARGUMENT, "%s is NULL", name);
    esa_ctx_leave(plan->ctx);
    return ESA_ERR_ARGUMENT;
}

esa_status esa_plan_workspace(const esa_plan *plan, int64_t *bytes)
{
    if (!plan) return ESA_ERR_ARGUMENT;
    if (!bytes) return refuse_null(plan, "bytes");
    *bytes = plan->workspace;
    return ESA_OK;
}

esa_status esa_plan_mask(const esa_plan *plan, esa_mask **mask, int64_t B)
{
    const esa_shapes *s = &plan->shapes;
    if (s->device == ESA_DEVICE_CUDA) {
        esa_mask like = { .B = B,
                          .H = s->Hq,
                          .Nq = s->Nq,
                          .Nk = s->Nk,
                          .nq = plan->nq,
                          .nk = plan->nk,
                          .block_q = plan->select.block_q,
                          .block_k = plan->select.block_k,
                          .runnable = plan->runnable,
                          .selector = -1,
                          .mode = plan->select.mode,
                          .asked = (double)NAN,
                          .existing = esa_size_mul(esa_size_mul(B * s->Hq, plan->nq), plan->nk),
                          .layout = plan->select.layout };
        return esa_cuda_mask_like(plan->ctx, mask, &like);
    }
    *mask = esa_mask_new(&plan->ctx->mem, B, s->Hq, s->Nq, s->Nk, plan->nq, plan->nk,
                         plan->select.block_q, plan->select.block_k);
    if (!*mask)
        return esa_fail(plan->ctx, ESA_ERR_MEMORY, "out of memory for a mask of %lld x %lld blocks",
                        (long long)plan->nq, (long long)plan->nk);
    (*mask)->runnable = plan->runnable;
    return ESA_OK;
}

esa_status esa_mask_create(const esa_plan *plan, esa_mask **mask)
{
    if (mask) *mask = NULL;
    if (!plan) return ESA_ERR_ARGUMENT;
    if (!mask) return refuse_null(plan, "mask");
    esa_status status = esa_ctx_enter(plan->ctx);
    if (status) return status;
    if (!plan->has_select) {
        status = esa_fail(
            plan->ctx, ESA_ERR_STATE,
            "this plan has no selector: make masks with esa_mask_from_lists, _bits or _fa4");
    } else {
        status = esa_plan_mask(plan, mask, plan->shapes.B);
    }
    esa_ctx_leave(plan->ctx);
    return status;
}

/* The caller's workspace, or the ctx's own. */
static esa_status plan_scratch(const esa_plan *plan, void **ws)
{
    if (!*ws && plan->shapes.device == ESA_DEVICE_CUDA)
        return esa_cuda_scratch(plan->ctx, ws, plan->workspace);
    if (!*ws) return esa_ctx_scratch(plan->ctx, ws, plan->workspace);
    if ((uintptr_t)*ws % ESA_WORKSPACE_ALIGN)
        return esa_fail(plan->ctx, ESA_ERR_ARGUMENT,
                        "the workspace pointer must be a multiple of %d", ESA_WORKSPACE_ALIGN);
    return ESA_OK;
}

/* On a GPU the permutations come with the mask: they must be there where the plan moves tokens, and
 * be the same. */
static int32_t orders_fit(const esa_plan *plan, const esa_mask *mask)
{
    return !plan->perm_q == !mask->perm_q && !plan->perm_k == !mask->perm_k &&
           mask->mode == plan->select.mode && esa_layout_same(&mask->layout, &plan->select.layout);
}

static esa_status select_inside(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                                const esa_tensor *k, void *ws)
{
    esa_status status;
    esa_ctx *ctx = plan->ctx;
    const esa_shapes *s = &plan->shapes;
    if (!plan->has_select) return esa_fail(ctx, ESA_ERR_STATE, "this plan has no selector");
    if (!mask) return esa_fail(ctx, ESA_ERR_ARGUMENT, "mask is NULL");
    if ((status = esa_check_against_shapes(ctx, q, s, "q", s->Hq, s->Nq)) ||
        (status = esa_check_against_shapes(ctx, k, s, "k", s->Hkv, s->Nk)) ||
        (status = esa_check_kv_len(ctx, plan->select.kv_len, s->device, s->B, s->Nk,
                                   &plan->select.layout, plan->select.mode)))
        return status;
    if (mask->B != s->B || mask->H != s->Hq || mask->nq != plan->nq || mask->nk != plan->nk ||
        mask->cap < plan->nk || mask->Nq != s->Nq || mask->Nk != s->Nk ||
        mask->block_q != plan->select.block_q || mask->block_k != plan->select.block_k)
        return esa_fail(ctx, ESA_ERR_SHAPE,
                        "the mask has room for %lld x %lld heads, %lld x %lld tokens in blocks of "
                        "%dx%d, the plan makes %lld x %lld, %lld x %lld, %dx%d",
                        (long long)mask->B, (long long)mask->H, (long long)mask->Nq,
                        (long long)mask->Nk, (int)mask->block_q, (int)mask->block_k,
                        (long long)s->B, (long long)s->Hq, (long long)s->Nq, (long long)s->Nk,
                        (int)plan->select.block_q, (int)plan->select.block_k);
    if (mask->device != s->device ||
        (mask->device == ESA_DEVICE_CUDA &&
         (mask->heap.ordinal != ctx->cuda_device || !orders_fit(plan, mask))))
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "the mask was made for another device or order than the plan: make it with "
                        "esa_mask_create of this plan");
    if ((status = plan_scratch(plan, &ws))) return status;
    esa_select_args args;
    esa_bind_select(&args, ctx, s, &plan->select, q, k);
    if (s->device == ESA_DEVICE_CUDA) return esa_cuda_select(ctx, &args, mask, ws);
    args.perm_q = plan->perm_q;
    args.perm_k = plan->perm_k;
    esa_select_run(&args, mask, ws);
    return ESA_OK;
}

esa_status esa_plan_select(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                           const esa_tensor *k, void *ws)
{
    if (!plan) return ESA_ERR_ARGUMENT;
    esa_status status = esa_ctx_enter(plan->ctx);
    if (status) return status;
    status = select_inside(plan, mask, q, k, ws);
    esa_ctx_leave(plan->ctx);
    return status;
}

/* Do these views and this mask fit the plan? */
static esa_status check_attention(const esa_plan *plan, const esa_mask *mask, const esa_qkvo *t)
{
    esa_status status;
    esa_ctx *ctx = plan->ctx;
    const esa_shapes *s = &plan->shapes;
    /* A plan with a selector has its own permutations; otherwise the mask says where tokens
     * stand. */
    const esa_layout *layout = plan->has_select ? &plan->select.layout
                               : mask           ? &mask->layout
                                                : NULL;
    if ((status = esa_check_against_shapes(ctx, t->q, s, "q", s->Hq, s->Nq)) ||
        (status = esa_check_against_shapes(ctx, t->k, s, "k", s->Hkv, s->Nk)) ||
        (status = esa_check_qkvo(ctx, t)) ||
        (status = esa_check_kv_len(ctx, plan->attention.kv_len, s->device, s->B, s->Nk,
                                   mask ? layout : NULL, mask ? mask->mode : 0)))
        return status;
    if (mask && (status = esa_check_mask(ctx, mask, s, plan->attention.causal))) return status;
    if (mask && plan->has_select &&
        (mask->block_q != plan->select.block_q || mask->block_k != plan->select.block_k ||
         mask->mode != plan->select.mode || !esa_layout_same(&mask->layout, &plan->select.layout)))
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "the mask has %d x %d blocks in order %d, the plan was made for %d x %d in "
                        "order %d (grid and text must agree too)",
                        (int)mask->block_q, (int)mask->block_k, (int)mask->layout.order,
                        (int)plan->select.block_q, (int)plan->select.block_k,
                        (int)plan->select.layout.order);
    if (mask && s->device == ESA_DEVICE_CUDA && mask->device != ESA_DEVICE_CUDA)
        return esa_fail(ctx, ESA_ERR_DEVICE,
                        "the mask lies on the CPU and the plan works on a GPU: copy it with "
                        "esa_mask_to_device");
    if (s->device == ESA_DEVICE_CUDA && mask && plan->has_select && !orders_fit(plan, mask))
        return esa_fail(
            ctx, ESA_ERR_MISMATCH,
            "the mask was made for tokens that %s, the plan for tokens that %s (order_applied)",
            mask->perm_q || mask->perm_k ? "are to be ordered" : "stand in order",
            plan->perm_q || plan->perm_k ? "are to be ordered" : "stand in order");
    if (s->device == ESA_DEVICE_CUDA && !plan->has_select && mask && (mask->perm_q || mask->perm_k))
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "this plan has no room to gather tokens into the mask's order: give it "
                        "select params with that layout, or tensors that "
                        "already stand in it (order_applied)");
    return ESA_OK;
}

static esa_status attention_inside(const esa_plan *plan, const esa_mask *mask, const esa_qkvo *t,
                                   void *ws)
{
    esa_ctx *ctx = plan->ctx;
    const esa_shapes *s = &plan->shapes;
    esa_status status = check_attention(plan, mask, t);
    if (!status) status = plan_scratch(plan, &ws);
    if (status) return status;
    esa_attn_args args;
    esa_bind_attention(&args, ctx, s, &plan->attention, mask, t);
    if (s->device == ESA_DEVICE_CUDA) {
        if (mask) {
            args.perm_q = mask->perm_q;
            args.perm_k = mask->perm_k;
        }
        return esa_cuda_attention(ctx, &args, ws);
    }
    esa_carve carve = { ws, 0 };
    int32_t *perm_q = plan->perm_q, *perm_k = plan->perm_k;
    if (!mask)
        perm_q = perm_k = NULL; /* dense attention does not care for order */
    else if (!plan->has_select)
        esa_carve_orders(&carve, &perm_q, &perm_k, &mask->layout, mask->mode, s->Nq, s->Nk);
    args.perm_q = perm_q;
    args.perm_k = perm_k;
    esa_attn_cpu(&args, carve.base + carve.used);
    return ESA_OK;
}

esa_status esa_plan_attention(const esa_plan *plan, const esa_mask *mask, const esa_tensor *q,
                              const esa_tensor *k, const esa_tensor *v, const esa_tensor *o,
                              const esa_tensor *lse, void *ws)
{
    if (!plan) return ESA_ERR_ARGUMENT;
    esa_status status = esa_ctx_enter(plan->ctx);
    if (status) return status;
    const esa_qkvo t = { q, k, v, o, lse };
    status = attention_inside(plan, mask, &t, ws);
    esa_ctx_leave(plan->ctx);
    return status;
}

const char *esa_plan_kernel(const esa_plan *plan, const esa_mask *mask, const esa_tensor *q,
                            const esa_tensor *k, const esa_tensor *v, const esa_tensor *o)
{
    if (!plan || esa_ctx_enter(plan->ctx)) return "";
    const char *name = "";
    const esa_qkvo t = { q, k, v, o, NULL };
    if (!check_attention(plan, mask, &t)) {
        esa_attn_args args;
        esa_bind_attention(&args, plan->ctx, &plan->shapes, &plan->attention, mask, &t);
        if (mask) {
            args.perm_q = mask->perm_q;
            args.perm_k = mask->perm_k;
        }
        name = args.kern ? args.kern->name
                         : plan->ctx->cuda->table->attention_kernel(plan->ctx->cuda->dev, &args);
    }
    esa_ctx_leave(plan->ctx);
    return name;
}
