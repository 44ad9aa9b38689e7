/* attention.c - the one-call tier: check, bind, scratch from the ctx, run.
 * SPDX-License-Identifier: Apache-2.0 */
#define ESA_EXPERIMENTAL
#include "attn/attn.h"

static esa_status attention_inside(esa_ctx *ctx, const esa_qkvo *t, const esa_mask *mask,
                                   const esa_attention_params *params)
{
    esa_status status;
    esa_attention_params p;
    if ((status = esa_check_qkvo(ctx, t))) return status;
    const esa_shapes s = esa_shapes_of(t->q, t->k);
    if ((status = esa_check_attention(ctx, &p, params, s.D))) return status;
    if ((status = esa_check_kv_len(ctx, p.kv_len, s.device, s.B, s.Nk, mask ? &mask->layout : NULL,
                                   mask ? mask->mode : 0)))
        return status;
    if (mask && (status = esa_check_mask(ctx, mask, &s, p.causal))) return status;

    esa_attn_args args;
    esa_bind_attention(&args, ctx, &s, &p, mask, t);
    if (s.device == ESA_DEVICE_CUDA) return esa_cuda_attention_once(ctx, &args, mask);
    /* The same carving twice: first counting, then placing. */
    int32_t *perm_q = NULL, *perm_k = NULL;
    esa_carve carve = { NULL, 0 };
    if (mask) esa_carve_orders(&carve, &perm_q, &perm_k, &mask->layout, mask->mode, s.Nq, s.Nk);
    esa_carve_take(&carve, esa_attn_cpu_workspace(&args));
    void *ws;
    if ((status = esa_ctx_scratch(ctx, &ws, carve.used))) return status;
    carve = (esa_carve){ ws, 0 };
    if (mask) esa_carve_orders(&carve, &perm_q, &perm_k, &mask->layout, mask->mode, s.Nq, s.Nk);
    args.perm_q = perm_q;
    args.perm_k = perm_k;
    esa_attn_cpu(&args, carve.base + carve.used);
    return ESA_OK;
}

esa_status esa_attention(esa_ctx *ctx, const esa_tensor *q, const esa_tensor *k,
                         const esa_tensor *v, const esa_tensor *o, const esa_mask *mask,
                         const esa_attention_params *params)
{
    esa_status status = esa_ctx_enter(ctx);
    if (status) return status;
    const int32_t known = params && params->struct_size == sizeof *params; /* else refused inside */
    const esa_qkvo t = { q, k, v, o, known ? params->lse : NULL };
    status = attention_inside(ctx, &t, mask, params);
    esa_ctx_leave(ctx);
    return status;
}

/* Checks and binds for a selector; no permutations yet. */
static esa_status select_bind(esa_ctx *ctx, esa_select_args *args, const esa_tensor *q,
                              const esa_tensor *k, const esa_select_params *params)
{
    esa_status status;
    esa_select_params p;
    if ((status = esa_check_qk(ctx, q, k))) return status;
    const esa_shapes s = esa_shapes_of(q, k);
    if ((status = esa_check_select(ctx, &p, params, s.Nq, s.Nk, s.D))) return status;
    if ((status = esa_check_kv_len(ctx, p.kv_len, s.device, s.B, s.Nk, &p.layout, p.mode)))
        return status;
    esa_bind_select(args, ctx, &s, &p, q, k);
    return ESA_OK;
}

/* Carves for a selector on the CPU; *ws is the selector's own scratch behind the permutations. */
static esa_status select_prepare(esa_ctx *ctx, esa_select_args *args, void **ws)
{
    const esa_layout *layout = &args->params.layout;
    int32_t *perm_q, *perm_k;
    esa_carve carve = { NULL, 0 };
    esa_carve_orders(&carve, &perm_q, &perm_k, layout, args->params.mode, args->Nq, args->Nk);
    esa_carve_take(&carve, esa_select_workspace(args));
    void *block;
    const esa_status status = esa_ctx_scratch(ctx, &block, carve.used);
    if (status) return status;
    carve = (esa_carve){ block, 0 };
    esa_carve_orders(&carve, &perm_q, &perm_k, layout, args->params.mode, args->Nq, args->Nk);
    args->perm_q = perm_q;
    args->perm_k = perm_k;
    *ws = carve.base + carve.used;
    return ESA_OK;
}

static esa_status no_mask(esa_ctx *ctx, const esa_select_args *a)
{
    return esa_fail(ctx, ESA_ERR_MEMORY,
                    "out of memory for a mask of %lld x %lld blocks and %lld heads",
                    (long long)a->nq, (long long)a->nk, (long long)(a->B * a->Hq));
}

static esa_status select_cpu(esa_ctx *ctx, esa_mask **mask, esa_select_args *a)
{
    void *ws;
    const esa_status status = select_prepare(ctx, a, &ws);
    if (status) return status;
    *mask = esa_mask_new(&ctx->mem, a->B, a->Hq, a->Nq, a->Nk, a->nq, a->nk, a->params.block_q,
                         a->params.block_k);
    if (!*mask) return no_mask(ctx, a);
    esa_select_run(a, *mask, ws);
    return ESA_OK;
}

static esa_status select_cuda(esa_ctx *ctx, esa_mask **mask, esa_select_args *a)
{
    esa_mask like = { .B = a->B,
                      .H = a->Hq,
                      .Nq = a->Nq,
                      .Nk = a->Nk,
                      .nq = a->nq,
                      .nk = a->nk,
                      .block_q = a->params.block_q,
                      .block_k = a->params.block_k,
                      .mode = a->params.mode,
                      .layout = a->params.layout };
    esa_mask *made;
    esa_status status = esa_cuda_mask_like(ctx, &made, &like);
    if (status) return status;
    status = esa_cuda_select(ctx, a, made, NULL);
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
    esa_status status = esa_ctx_enter(ctx);
    if (status) return status;
    esa_select_args args;
    if (!mask)
        status = esa_fail(ctx, ESA_ERR_ARGUMENT,
                          "mask is NULL, a pointer that receives the mask is expected");
    if (!status) status = select_bind(ctx, &args, q, k, params);
    if (!status)
        status = q->device == ESA_DEVICE_CUDA ? select_cuda(ctx, mask, &args)
                                              : select_cpu(ctx, mask, &args);
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_importance(esa_ctx *ctx, float *out, double *entropy, const esa_tensor *q,
                          const esa_tensor *k, const esa_select_params *params)
{
    esa_status status = esa_ctx_enter(ctx);
    if (status) return status;
    esa_select_args args;
    void *ws;
    const int32_t known = !params || params->struct_size == sizeof *params;
    esa_select_params p = params && known ? *params : esa_select_params_default(ESA_SELECT_ENTROPY);
    p.selector = ESA_SELECT_ENTROPY;
    if (!known)
        status = esa_fail(ctx, ESA_ERR_VERSION,
                          "esa_select_params has struct_size %u, this library expects %u",
                          params->struct_size, (unsigned)sizeof p);
    else if (!out)
        status = esa_fail(ctx, ESA_ERR_ARGUMENT,
                          "out is NULL, an array f32[B,H,nq,nk] is expected");
    if (!status) status = select_bind(ctx, &args, q, k, &p);
    if (!status && q->device == ESA_DEVICE_CUDA) {
        status = esa_cuda_importance(ctx, &args, out, entropy);
    } else if (!status && !(status = select_prepare(ctx, &args, &ws))) {
        esa_select_importance(&args, out, entropy, ws);
    }
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_mask_mass(esa_ctx *ctx, double *mass, const esa_mask *mask, const esa_tensor *q,
                         const esa_tensor *k, const esa_attention_params *params, int32_t row_step)
{
    esa_status status = esa_ctx_enter(ctx);
    if (status) return status;
    esa_attention_params p;
    if (!mass || !mask)
        status = esa_fail(ctx, ESA_ERR_ARGUMENT, "%s is NULL", mass ? "mask" : "mass");
    else if (row_step < 1)
        status = esa_fail(ctx, ESA_ERR_ARGUMENT, "row_step is %d, expected at least 1",
                          (int)row_step);
    if (!status) status = esa_check_qk(ctx, q, k);
    if (!status) status = esa_check_attention(ctx, &p, params, q->dim[3]);
    if (!status && (q->device != ESA_DEVICE_CPU || mask->device != ESA_DEVICE_CPU))
        status = esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                          "the kept mass is measured on the CPU: give it q, k and mask there");
    if (!status)
        status = esa_check_kv_len(ctx, p.kv_len, q->device, q->dim[0], k->dim[2], &mask->layout,
                                  mask->mode);
    if (!status) {
        const esa_shapes s = esa_shapes_of(q, k);
        status = esa_check_mask(ctx, mask, &s, p.causal);
    }
    if (!status) {
        const esa_shapes s = esa_shapes_of(q, k);
        esa_select_params sel = esa_select_params_default(ESA_SELECT_FULL);
        sel.block_q = mask->block_q;
        sel.block_k = mask->block_k;
        sel.layout = mask->layout;
        sel.mode = mask->mode;
        sel.scale = p.scale;
        sel.causal = p.causal;
        sel.kv_len = p.kv_len;
        esa_select_args args;
        esa_bind_select(&args, ctx, &s, &sel, q, k);
        int32_t *perm_q, *perm_k;
        esa_carve carve = { NULL, 0 };
        esa_carve_orders(&carve, &perm_q, &perm_k, &sel.layout, sel.mode, s.Nq, s.Nk);
        esa_carve_take(&carve, esa_select_mass_workspace(&args, mask));
        void *block;
        if (!(status = esa_ctx_scratch(ctx, &block, carve.used))) {
            carve = (esa_carve){ block, 0 };
            esa_carve_orders(&carve, &perm_q, &perm_k, &sel.layout, sel.mode, s.Nq, s.Nk);
            args.perm_q = perm_q;
            args.perm_k = perm_k;
            esa_select_mass(&args, mask, mass, row_step, carve.base + carve.used);
        }
    }
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_entropy_budgets(esa_ctx *ctx, int32_t *count, const double *entropy, int64_t H,
                               int64_t nk, double budget)
{
    esa_status status = esa_ctx_enter(ctx);
    if (status) return status;
    void *scratch = NULL;
    if (!count || !entropy)
        status = esa_fail(ctx, ESA_ERR_ARGUMENT, "%s is NULL", count ? "entropy" : "count");
    else if (H < 1 || nk < 1 || nk > ESA_MAX_BLOCKS || !(budget >= 0.0 && budget <= 1.0))
        status = esa_fail(ctx, ESA_ERR_ARGUMENT,
                          "budgets need at least one head, 1 .. %d blocks and a budget in 0 .. 1; "
                          "got %lld, %lld, %g",
                          ESA_MAX_BLOCKS, (long long)H, (long long)nk, budget);
    for (int64_t h = 0; !status && h < H; h++)
        if (!(entropy[h] >= 0.0 && entropy[h] <= 1.0 + 1e-9))
            status = esa_fail(ctx, ESA_ERR_ARGUMENT,
                              "entropy[%lld] is %g, expected 0 .. 1 (normalised)", (long long)h,
                              entropy[h]);
    if (!status) status = esa_ctx_scratch(ctx, &scratch, esa_size_mul(H, 8));
    if (!status) esa_budget_entropy(count, entropy, H, nk, budget, scratch);
    esa_ctx_leave(ctx);
    return status;
}
