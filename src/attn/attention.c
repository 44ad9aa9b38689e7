/* attention.c - the calls that need no plan: each checks, binds, takes scratch from the ctx, runs.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each public call takes the guard and calls the function above it, which does the rest. */
#define ESA_EXPERIMENTAL
#include "attn/attn.h"
#include "rules/levels.h"

/* ---------------------------------------------------------------- attention */

/* Runs attention with the permutations of the mask's layout. A mask in device memory may hold them;
 * otherwise they are made in the ctx's scratch, before the workspace. */
static esa_status run_ordered(esa_ctx *ctx, const esa_backend *be, esa_attn_args *args,
                              const esa_mask *mask)
{
    static const int32_t some = 0; /* stands for a permutation while bytes are counted */
    if (!mask || mask->perm_q || mask->perm_k) {
        if (mask) esa_bind_attention_order(args, mask);
        return esa_attention_run(ctx, be, args, NULL);
    }
    if (esa_layout_moves(&mask->layout, 0, mask->mode)) args->perm_q = &some;
    if (esa_layout_moves(&mask->layout, 1, mask->mode)) args->perm_k = &some;
    void *ws;
    ESA_TRY(esa_backend_orders(ctx, be, &args->perm_q, &args->perm_k, &ws, &mask->layout,
                               mask->mode, args->Nq, args->Nk,
                               esa_attention_workspace(ctx, be, args)));
    return esa_attention_run(ctx, be, args, ws);
}

esa_status esa_attention_inside(esa_ctx *ctx, const esa_qkvo *t, const esa_mask *mask,
                                const esa_attention_params *params)
{
    esa_attention_params p;
    ESA_TRY(esa_check_qkvo(ctx, t));
    if (t->carry) ESA_TRY(esa_check_carry(ctx, t, mask));
    const esa_shapes s = esa_shapes_of(t->q, t->k);
    const esa_backend *be = esa_backend_of(s.device);
    ESA_TRY(esa_check_attention(ctx, &p, params, s.D));
    ESA_TRY(esa_check_kv_len(ctx, p.kv_len, s.device, s.B, s.Nk, mask ? &mask->layout : NULL,
                             mask ? mask->mode : 0));
    if (mask) ESA_TRY(esa_check_mask(ctx, mask, &s, p.causal));

    esa_mask *copy = NULL; /* a mask on another device is copied for this call */
    if (mask && mask->device != s.device) {
        ESA_TRY(esa_backend_mask_copy(ctx, be, &copy, mask));
        mask = copy;
    }
    esa_attn_args args;
    esa_bind_attention(&args, &s, &p, mask, t);
    const esa_status status = run_ordered(ctx, be, &args, mask);
    esa_mask_free(copy); /* waits for the kernels that read it */
    return status;
}

esa_status esa_attention(esa_ctx *ctx, const esa_tensor *q, const esa_tensor *k,
                         const esa_tensor *v, const esa_tensor *o, const esa_mask *mask,
                         const esa_attention_params *params)
{
    ESA_TRY(esa_ctx_enter(ctx));
    /* Params of an unknown size are refused below, so lse must not be read from them. */
    const int32_t known = params && params->struct_size == sizeof *params;
    const esa_qkvo t = { q, k, v, o, known ? params->lse : NULL, NULL, 0 };
    const esa_status status = esa_attention_inside(ctx, &t, mask, params);
    esa_ctx_leave(ctx);
    return status;
}

/* ---------------------------------------------------------------- selection */

/* Checks and binds for a selector; no permutations yet. */
static esa_status select_bind(esa_ctx *ctx, esa_select_args *args, const esa_tensor *q,
                              const esa_tensor *k, const esa_tensor *v,
                              const esa_select_params *params)
{
    esa_select_params p;
    ESA_TRY(esa_check_qk(ctx, q, k));
    const esa_shapes s = esa_shapes_of(q, k);
    ESA_TRY(esa_check_select(ctx, &p, params, s.Nq, s.Nk, s.D));
    ESA_TRY(esa_check_kv_len(ctx, p.kv_len, s.device, s.B, s.Nk, &p.layout, p.mode));
    if (v || esa_selector_has(p.selector, ESA_TRAIT_READS_V)) ESA_TRY(esa_check_v(ctx, k, v));
    esa_bind_select(args, &s, &p, q, k, v);
    return ESA_OK;
}

/* Sets the permutations of args, and *ws to a workspace. Both are in the ctx's scratch. */
static esa_status select_orders(esa_ctx *ctx, const esa_backend *be, esa_select_args *args,
                                void **ws,
                                int64_t (*workspace)(esa_ctx *ctx, const esa_select_args *args))
{
    static const int32_t some = 0; /* stands for a permutation while bytes are counted */
    const esa_layout *layout = &args->params.layout;
    const int32_t mode = args->params.mode;
    if (esa_layout_moves(layout, 0, mode)) args->perm_q = &some;
    if (esa_layout_moves(layout, 1, mode)) args->perm_k = &some;
    return esa_backend_orders(ctx, be, &args->perm_q, &args->perm_k, ws, layout, mode, args->Nq,
                              args->Nk, workspace(ctx, args));
}

static esa_status select_into(esa_ctx *ctx, const esa_backend *be, esa_select_args *a,
                              esa_mask *mask)
{
    void *ws = NULL;
    if (mask->Hkv) {
        ESA_TRY(select_orders(ctx, be, a, &ws, be->order_workspace));
        ESA_TRY(be->order(ctx, a, mask->perm_q, mask->perm_k, ws));
        mask->ordered = 1;
        ws = NULL;
    }
    if (mask->perm_q || mask->perm_k) {
        esa_bind_select_order(a, mask);
    } else {
        ESA_TRY(select_orders(ctx, be, a, &ws, be->select_workspace));
    }
    return be->select(ctx, a, mask, NULL, ws);
}

static esa_status select_inside(esa_ctx *ctx, esa_mask **mask, const esa_tensor *q,
                                const esa_tensor *k, const esa_tensor *v,
                                const esa_select_params *params)
{
    esa_select_args a;
    if (!mask)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "mask is NULL, expected a pointer that receives the mask");
    ESA_TRY(select_bind(ctx, &a, q, k, v, params));
    const esa_backend *be = esa_backend_of(q->device);
    const esa_mask like = { .B = a.B,
                            .H = a.Hq,
                            .Nq = a.Nq,
                            .Nk = a.Nk,
                            .nq = a.nq,
                            .nk = a.nk,
                            .block_q = a.params.block_q,
                            .block_k = a.params.block_k,
                            .fine = esa_select_fine(&a.params),
                            .Hkv = a.params.layout.order == ESA_ORDER_ADAPTIVE ? a.Hkv : 0,
                            .mode = a.params.mode,
                            .layout = a.params.layout };
    esa_mask *made;
    ESA_TRY(be->mask_create(ctx, &made, &like));
    const esa_status status = select_into(ctx, be, &a, made);
    if (status)
        esa_mask_free(made);
    else
        *mask = made;
    return status;
}

esa_status esa_select(esa_ctx *ctx, esa_mask **mask, const esa_tensor *q, const esa_tensor *k,
                      const esa_select_params *params)
{
    if (mask) *mask = NULL;
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = select_inside(ctx, mask, q, k, NULL, params);
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_select_qkv(esa_ctx *ctx, esa_mask **mask, const esa_tensor *q, const esa_tensor *k,
                          const esa_tensor *v, const esa_select_params *params)
{
    if (mask) *mask = NULL;
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = select_inside(ctx, mask, q, k, v, params);
    esa_ctx_leave(ctx);
    return status;
}

static esa_status importance_inside(esa_ctx *ctx, float *out, double *entropy, const esa_tensor *q,
                                    const esa_tensor *k, const esa_select_params *params)
{
    esa_select_params p = esa_select_params_default(ESA_SELECT_ENTROPY);
    if (params && params->struct_size != sizeof *params)
        return esa_fail(ctx, ESA_ERR_VERSION,
                        "esa_select_params has struct_size %u, this library expects %u",
                        params->struct_size, (unsigned)sizeof p);
    if (!out)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "out is NULL, expected an array f32[B,H,nq,nk]");
    if (params) p = *params;
    p.selector = ESA_SELECT_ENTROPY;
    esa_select_args args;
    void *ws;
    ESA_TRY(select_bind(ctx, &args, q, k, NULL, &p));
    const esa_backend *be = esa_backend_of(q->device);
    ESA_TRY(select_orders(ctx, be, &args, &ws, be->importance_workspace));
    return be->importance(ctx, &args, out, entropy, ws);
}

esa_status esa_importance(esa_ctx *ctx, float *out, double *entropy, const esa_tensor *q,
                          const esa_tensor *k, const esa_select_params *params)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = importance_inside(ctx, out, entropy, q, k, params);
    esa_ctx_leave(ctx);
    return status;
}

/* Makes adaptive orders into perm, writes the scores and waits. */
static esa_status errors_ordered(esa_ctx *ctx, const esa_backend *be, esa_select_args *args,
                                 float *out, int32_t *const perm[2])
{
    const esa_mask order = { .B = args->B,
                             .H = args->Hq,
                             .Hkv = args->Hkv,
                             .Nq = args->Nq,
                             .Nk = args->Nk,
                             .perm_q = perm[0],
                             .perm_k = perm[1] };
    void *ws;
    ESA_TRY(select_orders(ctx, be, args, &ws, be->order_workspace));
    ESA_TRY(be->order(ctx, args, perm[0], perm[1], ws));
    esa_bind_select_order(args, &order);
    return be->errors(ctx, args, out, NULL);
}

static esa_status errors_adaptive(esa_ctx *ctx, const esa_backend *be, esa_select_args *args,
                                  float *out)
{
    const int64_t heads[2] = { args->B * args->Hq, args->B * args->Hkv },
                  N[2] = { args->Nq, args->Nk };
    void *perm[2] = { NULL, NULL };
    esa_status status = ESA_OK;
    for (int32_t side = 0; side < 2 && !status; side++)
        status = be->alloc(ctx, &perm[side], esa_size_mul(heads[side], 4 * N[side]));
    int32_t *const orders[2] = { perm[0], perm[1] };
    if (!status) status = errors_ordered(ctx, be, args, out, orders);
    for (int32_t side = 0; side < 2; side++)
        be->release(ctx, perm[side], esa_size_mul(heads[side], 4 * N[side]));
    return status;
}

static esa_status errors_inside(esa_ctx *ctx, float *out, const esa_tensor *q, const esa_tensor *k,
                                const esa_tensor *v, const esa_select_params *params)
{
    esa_select_params p = esa_select_params_default(ESA_SELECT_ERROR);
    if (params && params->struct_size != sizeof *params)
        return esa_fail(ctx, ESA_ERR_VERSION,
                        "esa_select_params has struct_size %u, this library expects %u",
                        params->struct_size, (unsigned)sizeof p);
    if (!out)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "out is NULL, expected an array f32[levels,B,H,nq,nk]");
    if (params) p = *params;
    p.selector = ESA_SELECT_ERROR;
    esa_select_args args;
    void *ws;
    ESA_TRY(select_bind(ctx, &args, q, k, v, &p));
    const esa_backend *be = esa_backend_of(q->device);
    if (args.params.layout.order == ESA_ORDER_ADAPTIVE) return errors_adaptive(ctx, be, &args, out);
    ESA_TRY(select_orders(ctx, be, &args, &ws, be->errors_workspace));
    return be->errors(ctx, &args, out, ws);
}

esa_status esa_errors(esa_ctx *ctx, float *out, const esa_tensor *q, const esa_tensor *k,
                      const esa_tensor *v, const esa_select_params *params)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = errors_inside(ctx, out, q, k, v, params);
    esa_ctx_leave(ctx);
    return status;
}

/* ---------------------------------------------------------------- kept mass, budgets */

static esa_status mass_inside(esa_ctx *ctx, double *mass, const esa_mask *mask, const esa_tensor *q,
                              const esa_tensor *k, const esa_attention_params *params,
                              int32_t row_step)
{
    esa_attention_params p;
    if (!mass || !mask)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "%s is NULL", mass ? "mask" : "mass");
    if (row_step < 1)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "row_step is %d, expected at least 1",
                        (int)row_step);
    ESA_TRY(esa_check_qk(ctx, q, k));
    const esa_shapes s = esa_shapes_of(q, k);
    const esa_backend *be = esa_backend_of(s.device);
    ESA_TRY(esa_check_attention(ctx, &p, params, s.D));
    if (!be->host_memory || mask->device != s.device)
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                        "esa_mask_mass runs only on the CPU, but q, k or mask is on a GPU");
    ESA_TRY(esa_check_kv_len(ctx, p.kv_len, s.device, s.B, s.Nk, &mask->layout, mask->mode));
    ESA_TRY(esa_check_mask(ctx, mask, &s, p.causal));

    esa_select_params sel = esa_select_params_default(ESA_SELECT_FULL);
    sel.block_q = mask->block_q;
    sel.block_k = mask->block_k;
    sel.layout = mask->layout;
    sel.mode = mask->mode;
    sel.scale = p.scale;
    sel.causal = p.causal;
    sel.kv_len = p.kv_len;
    esa_select_args args;
    esa_bind_select(&args, &s, &sel, q, k, NULL);
    args.kern = ctx->kern;
    args.pool = ctx->pool;
    void *ws;
    if (mask->Hkv) {
        ESA_TRY(esa_ctx_scratch(ctx, &ws, esa_select_mass_workspace(&args, mask)));
        esa_bind_select_order(&args, mask);
        esa_select_mass(&args, mask, mass, row_step, ws);
        return ESA_OK;
    }
    ESA_TRY(esa_backend_orders(ctx, be, &args.perm_q, &args.perm_k, &ws, &sel.layout, sel.mode,
                               s.Nq, s.Nk, esa_select_mass_workspace(&args, mask)));
    esa_select_mass(&args, mask, mass, row_step, ws);
    return ESA_OK;
}

esa_status esa_mask_mass(esa_ctx *ctx, double *mass, const esa_mask *mask, const esa_tensor *q,
                         const esa_tensor *k, const esa_attention_params *params, int32_t row_step)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = mass_inside(ctx, mass, mask, q, k, params, row_step);
    esa_ctx_leave(ctx);
    return status;
}

static esa_status budgets_inside(esa_ctx *ctx, int32_t *count, const double *entropy, int64_t H,
                                 int64_t nk, double budget)
{
    if (!count || !entropy)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "%s is NULL", count ? "entropy" : "count");
    if (H < 1 || nk < 1 || nk > ESA_MAX_BLOCKS || !(budget >= 0.0 && budget <= 1.0))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "H is %lld, nk is %lld and budget is %g, expected H >= 1, nk in 1 .. %d "
                        "and budget in 0 .. 1",
                        (long long)H, (long long)nk, budget, ESA_MAX_BLOCKS);
    for (int64_t h = 0; h < H; h++)
        if (!(entropy[h] >= 0.0 && entropy[h] <= 1.0 + 1e-9))
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "entropy[%lld] is %g, expected 0 .. 1 (normalised)", (long long)h,
                            entropy[h]);
    void *scratch;
    ESA_TRY(esa_ctx_scratch(ctx, &scratch, esa_size_mul(H, 8)));
    esa_budget_entropy(count, entropy, H, nk, budget, scratch);
    return ESA_OK;
}

esa_status esa_entropy_budgets(esa_ctx *ctx, int32_t *count, const double *entropy, int64_t H,
                               int64_t nk, double budget)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = budgets_inside(ctx, count, entropy, H, nk, budget);
    esa_ctx_leave(ctx);
    return status;
}
