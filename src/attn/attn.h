/* attn.h - attention below the public call: checked, bound arguments and the device switch.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_ATTN_ATTN_H
#define ESA_ATTN_ATTN_H

#include "attn/device.h"
#include "cpu/attn_cpu.h"
#include "mask/mask.h"
#include "select/select.h"

struct esa_plan {
    esa_ctx *ctx;
    esa_shapes shapes;
    int32_t has_select;
    esa_select_params select;       /* resolved */
    esa_attention_params attention; /* resolved: scale set */
    int64_t nq, nk;                 /* of the selected mask */
    int32_t runnable;
    int32_t *perm_q, *perm_k; /* owned; NULL: identity or order_applied */
    int64_t workspace;        /* bytes */
};

/* An empty mask of B batch entries on the plan's device. */
esa_status esa_plan_mask(const esa_plan *plan, esa_mask **mask, int64_t B);

/* The views of one attention call; lse may be NULL. */
typedef struct esa_qkvo {
    const esa_tensor *q, *k, *v, *o, *lse;
} esa_qkvo;

/* Every user error is born in these (check.c): one sentence in ctx and a status. */
esa_status esa_check_view(esa_ctx *ctx, const esa_tensor *t, const char *name);
esa_status esa_check_qk(esa_ctx *ctx, const esa_tensor *q, const esa_tensor *k);
esa_status esa_check_qkvo(esa_ctx *ctx, const esa_qkvo *t);
esa_status esa_check_shapes(esa_ctx *ctx, const esa_shapes *shapes);
esa_status esa_check_against_shapes(esa_ctx *ctx, const esa_tensor *t, const esa_shapes *shapes,
                                    const char *name, int64_t H, int64_t N);
/* layout NULL: no order is involved (dense). Lengths on a GPU are not looked at. */
esa_status esa_check_kv_len(esa_ctx *ctx, const int32_t *kv_len, int32_t device, int64_t B,
                            int64_t Nk, const esa_layout *layout, int32_t mode);
/* Checks and resolves params: block sizes, scale, layout. in NULL: the defaults. */
esa_status esa_check_select(esa_ctx *ctx, esa_select_params *out, const esa_select_params *in,
                            int64_t Nq, int64_t Nk, int64_t D);
esa_status esa_check_attention(esa_ctx *ctx, esa_attention_params *out,
                               const esa_attention_params *in, int64_t D);
/* Does this mask fit an attention of this shape, and can the tensors' device reach it (a CPU mask
 * counts as reachable from a GPU)? */
esa_status esa_check_mask(esa_ctx *ctx, const esa_mask *mask, const esa_shapes *shapes,
                          int32_t causal);

/* bind.c: views and params become args for the leaf of their device, pointers from tensors (t NULL:
 * sizes only). */
void esa_bind_attention(esa_attn_args *args, const esa_ctx *ctx, const esa_shapes *shapes,
                        const esa_attention_params *params, const esa_mask *mask,
                        const esa_qkvo *t);
void esa_bind_select(esa_select_args *args, const esa_ctx *ctx, const esa_shapes *shapes,
                     const esa_select_params *params, const esa_tensor *q, const esa_tensor *k);
esa_shapes esa_shapes_of(const esa_tensor *q, const esa_tensor *k);
/* Carves the two permutations of a layout (NULL where nothing moves) and, unless counting, fills
 * them. */
void esa_carve_orders(esa_carve *carve, int32_t **perm_q, int32_t **perm_k,
                      const esa_layout *layout, int32_t mode, int64_t Nq, int64_t Nk);

/* cuda_calls.c: the CUDA side of the device switch. Args are bound and checked, ctx->cuda is open,
 * masks lie on the GPU. */
esa_status esa_cuda_attention(esa_ctx *ctx, const esa_attn_args *args, void *ws);
esa_status esa_cuda_select(esa_ctx *ctx, const esa_select_args *args, esa_mask *mask, void *ws);
/* One-call attention; a CPU mask is copied for the call. args without permutations. */
esa_status esa_cuda_attention_once(esa_ctx *ctx, esa_attn_args *args, const esa_mask *mask);
/* Importance and entropies (NULL: not wanted) into host memory; waits. args without
 * permutations. */
esa_status esa_cuda_importance(esa_ctx *ctx, const esa_select_args *args, float *out,
                               double *entropy);
/* A plan's workspace on the GPU. */
int64_t esa_cuda_plan_bytes(const esa_plan *plan);

#endif
