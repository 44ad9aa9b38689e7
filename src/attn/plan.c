/* plan.c - plans: they decide everything once per shape, so that their calls allocate nothing.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The first half holds the rooms (attn.h), which expect a held guard and checked arguments. The
 * second half holds the doors: public calls that take the guard, check and call a room. */
#include "attn/attn.h"
#include "rules/levels.h"

#include <math.h>
#include <string.h>

/* ---------------------------------------------------------------- workspace */

/* Workspace of one kind of call. Sessions run some calls of an 8-bit plan in 16 bits. */
static int64_t call_bytes(const esa_plan *plan, const esa_attn_args *args)
{
    esa_attn_args a = *args;
    const int64_t bytes = esa_attention_workspace(plan->ctx, plan->backend, &a);
    a.precision = 16;
    if (args->precision == 16) return bytes;
    return esa_max64(bytes, esa_attention_workspace(plan->ctx, plan->backend, &a));
}

/* Workspace of attention with masks of one block size, or dense (block_q 0). */
static int64_t attention_bytes(const esa_plan *plan, int32_t block_q, int32_t block_k)
{
    /* They stand for lists and permutations: the backend only looks whether a pointer is NULL. */
    static const int32_t some = 0;
    static const uint16_t listed = 0;
    esa_attn_args a;
    esa_bind_attention(&a, &plan->shapes, &plan->attention, NULL, NULL);
    if (block_q) {
        const int64_t own = plan->select.layout.order == ESA_ORDER_ADAPTIVE;
        a.block_q = block_q;
        a.block_k = block_k;
        a.nq = esa_ceil_div(plan->shapes.Nq, block_q);
        a.nk = esa_ceil_div(plan->shapes.Nk, block_k);
        a.cap = a.nk;
        a.tail = plan->attention.tail;
        a.exact_rows = plan->attention.exact_rows;
        a.count = &some;
        a.index = &listed;
        a.perm_q = plan->perm_q ? &some : NULL;
        a.perm_k = plan->perm_k ? &some : NULL;
        a.perm_q_stride[1] = own * plan->shapes.Nq;
        a.perm_q_stride[0] = plan->shapes.Hq * a.perm_q_stride[1];
        a.perm_k_stride[1] = own * plan->shapes.Nk;
        a.perm_k_stride[0] = plan->shapes.Hkv * a.perm_k_stride[1];
    }
    if (a.tail != ESA_TAIL_LEVELS) return call_bytes(plan, &a);
    a.tail = ESA_TAIL_POOLED; /* masks without a fine level */
    const int64_t pooled = call_bytes(plan, &a);
    a.tail = ESA_TAIL_LEVELS;
    a.fine = plan->fine;
    a.fine_count = &some;
    a.fine_index = &listed;
    return esa_max64(pooled, call_bytes(plan, &a));
}

/* A plan without a selector takes masks of every block size. On devices without order_room it also
 * takes every order: then the workspace holds the permutations. */
static int64_t bytes_for_any_mask(const esa_plan *plan)
{
    const esa_shapes *s = &plan->shapes;
    int64_t bytes = 0;
    for (int32_t bq = 16; bq <= 256; bq += 16)
        for (int32_t bk = 16; bk <= 256; bk += 16)
            bytes = esa_max64(bytes, attention_bytes(plan, bq, bk));
    if (plan->backend->order_room) return bytes;
    return esa_size_add(bytes, 2 * ESA_WORKSPACE_ALIGN + 4 * (s->Nq + s->Nk));
}

static int64_t plan_bytes(const esa_plan *plan)
{
    const int64_t dense = attention_bytes(plan, 0, 0);
    if (plan->dense) return dense;
    if (!plan->has_select) return esa_max64(dense, bytes_for_any_mask(plan));
    esa_select_args a;
    esa_bind_select(&a, &plan->shapes, &plan->select, NULL, NULL, NULL);
    a.perm_q = plan->perm_q;
    a.perm_k = plan->perm_k;
    const int64_t sparse = attention_bytes(plan, plan->select.block_q, plan->select.block_k);
    int64_t bytes = esa_max64(esa_max64(dense, sparse),
                              plan->backend->select_workspace(plan->ctx, &a));
    if (plan->select.layout.order == ESA_ORDER_ADAPTIVE)
        bytes = esa_max64(bytes, plan->backend->order_workspace(plan->ctx, &a));
    return bytes;
}

/* ---------------------------------------------------------------- rooms */

static int64_t mask_Hkv(const esa_plan *plan)
{
    return plan->select.layout.order == ESA_ORDER_ADAPTIVE ? plan->shapes.Hkv : 0;
}

static esa_status resolve_select(esa_plan *plan, const esa_select_params *select)
{
    esa_ctx *ctx = plan->ctx;
    const esa_shapes *s = &plan->shapes;
    ESA_TRY(esa_check_select(ctx, &plan->select, select, s->Nq, s->Nk, s->D));
    if (plan->select.kv_len && plan->attention.kv_len &&
        plan->select.kv_len != plan->attention.kv_len)
        return esa_fail(
            ctx, ESA_ERR_ARGUMENT,
            "select and attention of a plan have different kv_len pointers, expected the same");
    if (!plan->select.kv_len) plan->select.kv_len = plan->attention.kv_len;
    plan->attention.kv_len = plan->select.kv_len;
    esa_select_blocks(&plan->select, s->Nq, s->Nk, &plan->nq, &plan->nk, &plan->runnable);
    if (esa_select_fine(&plan->select)) plan->fine = esa_select_fine(&plan->select);
    const esa_layout *l = &plan->select.layout;
    const int32_t mode = plan->select.mode;
    const int32_t moves_q = esa_layout_moves(l, 0, mode), moves_k = esa_layout_moves(l, 1, mode);
    if (plan->attention.causal && (moves_q || moves_k))
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "causal attention needs raster order, or tensors that are already in "
                        "their order (order_applied)");
    if (moves_q) ESA_TRY(esa_backend_order(ctx, plan->backend, &plan->perm_q, l, 0, mode, s->Nq));
    if (moves_k) ESA_TRY(esa_backend_order(ctx, plan->backend, &plan->perm_k, l, 1, mode, s->Nk));
    return ESA_OK;
}

static esa_status resolve(esa_plan *plan, const esa_shapes *shapes, const esa_select_params *select,
                          const esa_attention_params *attention)
{
    esa_ctx *ctx = plan->ctx;
    ESA_TRY(esa_check_shapes(ctx, shapes));
    plan->shapes = *shapes;
    plan->backend = esa_backend_of(shapes->device);
    ESA_TRY(esa_check_attention(ctx, &plan->attention, attention, shapes->D));
    plan->attention.lse = NULL; /* each call brings its own */
    plan->has_select = select != NULL;
    plan->fine = ESA_MAX_FINE;
    if (select) ESA_TRY(resolve_select(plan, select));
    const int64_t bytes = plan_bytes(plan);
    if (bytes < 0 || bytes > INT64_MAX - ESA_WORKSPACE_ALIGN)
        return esa_fail(
            ctx, ESA_ERR_MEMORY,
            "out of memory: the workspace for these shapes is larger than the address space");
    plan->workspace = esa_ceil_div(bytes, ESA_WORKSPACE_ALIGN) * ESA_WORKSPACE_ALIGN;
    return ESA_OK;
}

void esa_plan_free(esa_plan *plan)
{
    if (!plan) return;
    esa_ctx *ctx = plan->ctx;
    if (plan->perm_q) plan->backend->release(ctx, plan->perm_q, plan->shapes.Nq * 4);
    if (plan->perm_k) plan->backend->release(ctx, plan->perm_k, plan->shapes.Nk * 4);
    esa_mem_free(&ctx->mem, plan, sizeof *plan);
}

static esa_status make(esa_ctx *ctx, esa_plan **out, const esa_shapes *shapes,
                       const esa_select_params *select, const esa_attention_params *attention,
                       int32_t dense)
{
    *out = NULL;
    esa_plan *plan = esa_mem_zalloc(&ctx->mem, sizeof *plan);
    if (!plan) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for a plan");
    plan->ctx = ctx;
    plan->dense = dense;
    const esa_status status = resolve(plan, shapes, select, attention);
    if (status)
        esa_plan_free(plan);
    else
        *out = plan;
    return status;
}

esa_status esa_plan_make(esa_ctx *ctx, esa_plan **plan, const esa_shapes *shapes,
                         const esa_select_params *select, const esa_attention_params *attention)
{
    return make(ctx, plan, shapes, select, attention, 0);
}

esa_status esa_plan_make_dense(esa_ctx *ctx, esa_plan **plan, const esa_shapes *shapes,
                               const esa_attention_params *attention)
{
    return make(ctx, plan, shapes, NULL, attention, 1);
}

esa_status esa_plan_mask(const esa_plan *plan, esa_mask **mask, int64_t B, int32_t fine)
{
    const esa_shapes *s = &plan->shapes;
    const esa_mask like = {
        .B = B,
        .H = s->Hq,
        .Nq = s->Nq,
        .Nk = s->Nk,
        .nq = plan->nq,
        .nk = plan->nk,
        .block_q = plan->select.block_q,
        .block_k = plan->select.block_k,
        .fine = fine < 0 ? esa_select_fine(&plan->select) : fine,
        .Hkv = mask_Hkv(plan),
        .runnable = plan->runnable,
        .selector = -1,
        .mode = plan->select.mode,
        .asked = (double)NAN,
        .existing = esa_size_mul(esa_size_mul(B * s->Hq, plan->nq), plan->nk),
        .layout = plan->select.layout,
    };
    return plan->backend->mask_create(plan->ctx, mask, &like);
}

/* mask: holds the adaptive order, if the plan has one. */
static esa_select_args bind_select(const esa_plan *plan, const esa_mask *mask, const esa_tensor *q,
                                   const esa_tensor *k, const esa_tensor *v)
{
    esa_select_args args;
    esa_bind_select(&args, &plan->shapes, &plan->select, q, k, v);
    args.perm_q = plan->perm_q;
    args.perm_k = plan->perm_k;
    if (mask && mask_Hkv(plan)) esa_bind_select_order(&args, mask);
    return args;
}

esa_status esa_plan_choose(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                           const esa_tensor *k, const esa_tensor *v, double budget,
                           float *importance, void *ws)
{
    esa_select_args args = bind_select(plan, mask, q, k, v);
    if (!isnan(budget)) args.params.budget = budget;
    if (!ws) ESA_TRY(plan->backend->scratch(plan->ctx, &ws, plan->workspace));
    return plan->backend->select(plan->ctx, &args, mask, importance, ws);
}

esa_status esa_plan_importance(const esa_plan *plan, float *out, const esa_tensor *q,
                               const esa_tensor *k)
{
    const esa_select_args args = bind_select(plan, NULL, q, k, NULL);
    return plan->backend->importance(plan->ctx, &args, out, NULL, NULL);
}

esa_status esa_plan_reorder(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                            const esa_tensor *k, void *ws)
{
    const esa_select_args args = bind_select(plan, NULL, q, k, NULL);
    if (!ws) ESA_TRY(plan->backend->scratch(plan->ctx, &ws, plan->workspace));
    mask->filled = mask->ordered = 0;
    ESA_TRY(plan->backend->order(plan->ctx, &args, mask->perm_q, mask->perm_k, ws));
    mask->ordered = 1;
    return ESA_OK;
}

esa_status esa_plan_errors(const esa_plan *plan, float *out, const esa_mask *mask,
                           const esa_tensor *q, const esa_tensor *k, const esa_tensor *v)
{
    const esa_select_args args = bind_select(plan, mask, q, k, v);
    return plan->backend->errors(plan->ctx, &args, out, NULL);
}

esa_status esa_plan_attend(const esa_plan *plan, const esa_mask *mask, const esa_qkvo *t, void *ws,
                           int32_t precision, esa_attn_kernel *kernel)
{
    esa_ctx *ctx = plan->ctx;
    const esa_shapes *s = &plan->shapes;
    if (plan->dense && mask)
        return esa_fail(ctx, ESA_ERR_STATE, "a plan of dense calls has no room for a mask");
    if (!ws) ESA_TRY(plan->backend->scratch(ctx, &ws, plan->workspace));
    esa_attn_args args;
    esa_bind_attention(&args, s, &plan->attention, mask, t);
    if (precision) args.precision = precision;
    esa_carve carve = { ws, 0 };
    if (mask && mask->Hkv) {
        esa_bind_attention_order(&args, mask);
    } else if (mask &&
               plan->has_select) { /* dense attention does not depend on the order of tokens */
        args.perm_q = plan->perm_q;
        args.perm_k = plan->perm_k;
    } else if (mask) { /* on devices with order_room the checks refuse masks that need an order */
        const int64_t N[2] = { s->Nq, s->Nk };
        const int32_t **const perm[2] = { &args.perm_q, &args.perm_k };
        for (int32_t side = 0; side < 2; side++) {
            if (!esa_layout_moves(&mask->layout, side, mask->mode)) continue;
            int32_t *made = esa_carve_take(&carve, N[side] * 4);
            esa_order_build(made, N[side], &mask->layout, side, mask->mode);
            *perm[side] = made;
        }
    }
    if (kernel) *kernel = plan->backend->attention_kernel(ctx, &args);
    return esa_attention_run(ctx, plan->backend, &args, carve.base + carve.used);
}

/* ---------------------------------------------------------------- checks of the doors */

/* The caller's workspace, if one is given, must be aligned. */
static esa_status check_workspace(const esa_plan *plan, const void *ws)
{
    if ((uintptr_t)ws % ESA_WORKSPACE_ALIGN == 0) return ESA_OK;
    return esa_fail(plan->ctx, ESA_ERR_ARGUMENT, "the workspace pointer must be a multiple of %d",
                    ESA_WORKSPACE_ALIGN);
}

/* v NULL: the call has none. */
static esa_status check_selection(const esa_plan *plan, const esa_mask *mask, const esa_tensor *q,
                                  const esa_tensor *k, const esa_tensor *v, const void *ws)
{
    esa_ctx *ctx = plan->ctx;
    const esa_shapes *s = &plan->shapes;
    if (!plan->has_select) return esa_fail(ctx, ESA_ERR_STATE, "this plan has no selector");
    if (!mask) return esa_fail(ctx, ESA_ERR_ARGUMENT, "mask is NULL");
    ESA_TRY(esa_check_against_shapes(ctx, q, s, "q", s->Hq, s->Nq));
    ESA_TRY(esa_check_against_shapes(ctx, k, s, "k", s->Hkv, s->Nk));
    ESA_TRY(esa_check_kv_len(ctx, plan->select.kv_len, s->device, s->B, s->Nk, &plan->select.layout,
                             plan->select.mode));
    if (mask->B != s->B || mask->H != s->Hq || mask->nq != plan->nq || mask->nk != plan->nk ||
        mask->cap < plan->nk || mask->Nq != s->Nq || mask->Nk != s->Nk ||
        mask->block_q != plan->select.block_q || mask->block_k != plan->select.block_k)
        return esa_fail(ctx, ESA_ERR_SHAPE,
                        "the mask has room for %lld x %lld heads, %lld x %lld tokens in blocks of "
                        "%dx%d, but the plan makes %lld x %lld, %lld x %lld, %dx%d",
                        (long long)mask->B, (long long)mask->H, (long long)mask->Nq,
                        (long long)mask->Nk, (int)mask->block_q, (int)mask->block_k,
                        (long long)s->B, (long long)s->Hq, (long long)s->Nq, (long long)s->Nk,
                        (int)plan->select.block_q, (int)plan->select.block_k);
    if (!esa_backend_mask_here(ctx, plan->backend, mask))
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "the mask was made for another device than the plan: make it with "
                        "esa_mask_create of this plan");
    /* A mask that holds permutations keeps them, so a selection cannot change its order. */
    const esa_select_params *p = &plan->select;
    if ((mask->perm_q || mask->perm_k) &&
        (mask->mode != p->mode || mask->layout.order_applied != p->layout.order_applied ||
         !esa_layout_same(&mask->layout, &p->layout)))
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "the mask was made for order %d, but the plan selects in order %d (grid, "
                        "text, mode and order_applied must agree too): make it with "
                        "esa_mask_create of this plan",
                        (int)mask->layout.order, (int)p->layout.order);
    if (mask->fine != esa_select_fine(&plan->select) || mask->Hkv != mask_Hkv(plan))
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "the mask has %d fine means per block and adaptive orders of %lld key "
                        "heads, but the plan makes %d and %lld: make it with esa_mask_create of "
                        "this plan",
                        (int)mask->fine, (long long)mask->Hkv, (int)esa_select_fine(&plan->select),
                        (long long)mask_Hkv(plan));
    if (v) ESA_TRY(esa_check_v(ctx, k, v));
    return check_workspace(plan, ws);
}

static esa_status check_attention(const esa_plan *plan, const esa_mask *mask, const esa_qkvo *t,
                                  const void *ws)
{
    esa_ctx *ctx = plan->ctx;
    const esa_shapes *s = &plan->shapes;
    const esa_select_params *p = &plan->select;
    ESA_TRY(esa_check_against_shapes(ctx, t->q, s, "q", s->Hq, s->Nq));
    ESA_TRY(esa_check_against_shapes(ctx, t->k, s, "k", s->Hkv, s->Nk));
    ESA_TRY(esa_check_qkvo(ctx, t));
    if (t->carry) ESA_TRY(esa_check_carry(ctx, t, mask));
    /* A plan with a selector has its own order; otherwise the mask gives the order. */
    const esa_layout *layout = !mask ? NULL : plan->has_select ? &p->layout : &mask->layout;
    ESA_TRY(esa_check_kv_len(ctx, plan->attention.kv_len, s->device, s->B, s->Nk, layout,
                             mask ? mask->mode : 0));
    if (!mask) return check_workspace(plan, ws);
    ESA_TRY(esa_check_mask(ctx, mask, s, plan->attention.causal));
    if (plan->has_select && (mask->block_q != p->block_q || mask->block_k != p->block_k ||
                             mask->mode != p->mode || !esa_layout_same(&mask->layout, &p->layout)))
        return esa_fail(
            ctx, ESA_ERR_MISMATCH,
            "the mask has %d x %d blocks in order %d, but the plan was made for %d x %d in "
            "order %d (grid and text must agree too)",
            (int)mask->block_q, (int)mask->block_k, (int)mask->layout.order, (int)p->block_q,
            (int)p->block_k, (int)p->layout.order);
    if (plan->attention.tail == ESA_TAIL_LEVELS && mask->fine > plan->fine)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "the mask has %d fine means per block, but the plan was made for %d",
                        (int)mask->fine, (int)plan->fine);
    if (mask->device != s->device)
        return esa_fail(ctx, ESA_ERR_DEVICE,
                        "the mask is on the %s, but the plan works on the %s: copy the mask with "
                        "esa_mask_to_device",
                        esa_backend_of(mask->device)->name, plan->backend->name);
    if (plan->backend->order_room && !plan->has_select &&
        (esa_layout_moves(&mask->layout, 0, mask->mode) ||
         esa_layout_moves(&mask->layout, 1, mask->mode)))
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "this plan has no room to gather tokens into the mask's order: give it "
                        "select params with that layout, or tensors that are already in that order "
                        "(order_applied)");
    return check_workspace(plan, ws);
}

/* ---------------------------------------------------------------- doors */

esa_status esa_plan_create(esa_ctx *ctx, esa_plan **out, const esa_shapes *shapes,
                           const esa_select_params *select, const esa_attention_params *attention)
{
    if (out) *out = NULL;
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = out ? esa_plan_make(ctx, out, shapes, select, attention)
                                  : esa_fail(
                                        ctx, ESA_ERR_ARGUMENT,
                                        "plan is NULL, expected a pointer that receives the plan");
    esa_ctx_leave(ctx);
    return status;
}

/* Reports an output pointer that is NULL. */
static esa_status refuse_null(const esa_plan *plan, const char *name)
{
    ESA_TRY(esa_ctx_enter(plan->ctx));
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

esa_status esa_mask_create(const esa_plan *plan, esa_mask **mask)
{
    if (mask) *mask = NULL;
    if (!plan) return ESA_ERR_ARGUMENT;
    if (!mask) return refuse_null(plan, "mask");
    ESA_TRY(esa_ctx_enter(plan->ctx));
    const esa_status status =
        plan->has_select
            ? esa_plan_mask(plan, mask, plan->shapes.B, -1)
            : esa_fail(plan->ctx, ESA_ERR_STATE,
                       "this plan has no selector: make masks with esa_mask_from_lists, _bits "
                       "or _fa4");
    esa_ctx_leave(plan->ctx);
    return status;
}

static esa_status select_inside(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                                const esa_tensor *k, const esa_tensor *v, void *ws)
{
    ESA_TRY(check_selection(plan, mask, q, k, v, ws));
    if (!v && esa_selector_has(plan->select.selector, ESA_TRAIT_READS_V))
        return esa_check_v(plan->ctx, k, v);
    ESA_TRY(esa_check_ordered(plan->ctx, mask, &plan->shapes));
    return esa_plan_choose(plan, mask, q, k, v, (double)NAN, NULL, ws);
}

esa_status esa_plan_select(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                           const esa_tensor *k, void *ws)
{
    if (!plan) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(plan->ctx));
    const esa_status status = select_inside(plan, mask, q, k, NULL, ws);
    esa_ctx_leave(plan->ctx);
    return status;
}

esa_status esa_plan_select_qkv(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                               const esa_tensor *k, const esa_tensor *v, void *ws)
{
    if (!plan) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(plan->ctx));
    const esa_status status = select_inside(plan, mask, q, k, v, ws);
    esa_ctx_leave(plan->ctx);
    return status;
}

static esa_status order_inside(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                               const esa_tensor *k, void *ws)
{
    if (plan->has_select && !mask_Hkv(plan))
        return esa_fail(plan->ctx, ESA_ERR_STATE,
                        "this plan has order %d: only a layout with ESA_ORDER_ADAPTIVE (%d) makes "
                        "an order from q and k",
                        (int)plan->select.layout.order, ESA_ORDER_ADAPTIVE);
    ESA_TRY(check_selection(plan, mask, q, k, NULL, ws));
    return esa_plan_reorder(plan, mask, q, k, ws);
}

esa_status esa_plan_order(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                          const esa_tensor *k, void *ws)
{
    if (!plan) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(plan->ctx));
    const esa_status status = order_inside(plan, mask, q, k, ws);
    esa_ctx_leave(plan->ctx);
    return status;
}

esa_status esa_plan_attention_inside(const esa_plan *plan, const esa_mask *mask, const esa_qkvo *t,
                                     void *ws)
{
    ESA_TRY(check_attention(plan, mask, t, ws));
    return esa_plan_attend(plan, mask, t, ws, 0, NULL);
}

esa_status esa_plan_attention(const esa_plan *plan, const esa_mask *mask, const esa_tensor *q,
                              const esa_tensor *k, const esa_tensor *v, const esa_tensor *o,
                              const esa_tensor *lse, void *ws)
{
    if (!plan) return ESA_ERR_ARGUMENT;
    ESA_TRY(esa_ctx_enter(plan->ctx));
    const esa_qkvo t = { q, k, v, o, lse, NULL, 0 };
    const esa_status status = esa_plan_attention_inside(plan, mask, &t, ws);
    esa_ctx_leave(plan->ctx);
    return status;
}

const char *esa_plan_kernel(const esa_plan *plan, const esa_mask *mask, const esa_tensor *q,
                            const esa_tensor *k, const esa_tensor *v, const esa_tensor *o)
{
    if (!plan || esa_ctx_enter(plan->ctx)) return "";
    const char *name = "";
    const esa_qkvo t = { q, k, v, o, NULL, NULL, 0 };
    if (!check_attention(plan, mask, &t, NULL)) {
        esa_attn_args args;
        esa_bind_attention(&args, &plan->shapes, &plan->attention, mask, &t);
        args.perm_q = mask ? plan->perm_q : NULL;
        args.perm_k = mask ? plan->perm_k : NULL;
        if (mask && mask->Hkv) esa_bind_attention_order(&args, mask);
        name = plan->backend->attention_kernel(plan->ctx, &args).name;
    }
    esa_ctx_leave(plan->ctx);
    return name;
}
