/* attn.h - plans, and the functions behind the public calls of attention and selection.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Doors and rooms: a public call (a door: esa_attention, esa_select, esa_plan_*) takes the ctx
 * guard once, checks its arguments once (check.c), and then calls a room. The rooms are the
 * functions of plan.c below; they expect a held guard and checked arguments. Sessions and the
 * engine call rooms directly. */
#ifndef ESA_ATTN_ATTN_H
#define ESA_ATTN_ATTN_H

#include "base/engine.h"
#include "backend/backend.h"
#include "base/status.h"
#include "select/select.h"

struct esa_plan {
    esa_ctx *ctx;
    const esa_backend *backend;
    esa_shapes shapes;
    int32_t has_select, dense;      /* dense: takes no masks at all */
    esa_select_params select;       /* resolved */
    esa_attention_params attention; /* resolved: scale and precision set */
    int64_t nq, nk;                 /* blocks of the selected mask */
    int32_t runnable;
    int32_t fine; /* tail LEVELS: the workspace has room for masks with so many fine means */
    /* On the device, owned; NULL: identity or order_applied. Adaptive: the order to start from;
     * masks hold the others. */
    int32_t *perm_q, *perm_k;
    int64_t workspace; /* bytes */
};

/* The views of one attention call; lse and carry may be NULL. */
typedef struct esa_qkvo {
    const esa_tensor *q, *k, *v, *o, *lse;
    const esa_carry *carry;
    int32_t use; /* of carry: ESA_CARRY_ADD or ESA_CARRY_MAKE; without carry 0 */
} esa_qkvo;

/* ---------------------------------------------------------------- plan.c: rooms
 * All of them leave a message in the plan's ctx on failure. */

/* Makes a plan; also checks shapes and params. On success the caller owns *plan and frees it with
 * esa_plan_free; on failure *plan is NULL. select NULL: a plan without a selector; it takes masks
 * of every block size. esa_plan_make_dense: one that takes none, so its workspace has no room for
 * them and is quickly found. */
esa_status esa_plan_make(esa_ctx *ctx, esa_plan **plan, const esa_shapes *shapes,
                         const esa_select_params *select, const esa_attention_params *attention);
esa_status esa_plan_make_dense(esa_ctx *ctx, esa_plan **plan, const esa_shapes *shapes,
                               const esa_attention_params *attention);
/* *mask = an empty mask of B batch entries on the plan's device. The caller owns it. fine: means
 * per block on its fine level; -1: as the plan's selector makes them. */
esa_status esa_plan_mask(const esa_plan *plan, esa_mask **mask, int64_t B, int32_t fine);
/* Selects: fills mask, which esa_plan_mask made, from q, k and v. v: only the error selector reads
 * it. budget NaN: the plan's. importance: as in esa_backend.select. With an adaptive order the mask
 * must have one (esa_plan_reorder). ws NULL: uses the ctx's scratch. */
esa_status esa_plan_choose(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                           const esa_tensor *k, const esa_tensor *v, double budget,
                           float *importance, void *ws);
/* Makes the adaptive order of mask from q and k, and empties the mask: its lists belonged to the
 * order it had. On failure the mask has no order. */
esa_status esa_plan_reorder(const esa_plan *plan, esa_mask *mask, const esa_tensor *q,
                            const esa_tensor *k, void *ws);
/* Writes the error scores f32[levels][B][Hq][nq][nk] to host memory; waits. mask: holds the
 * adaptive order; may be NULL for other orders. */
esa_status esa_plan_errors(const esa_plan *plan, float *out, const esa_mask *mask,
                           const esa_tensor *q, const esa_tensor *k, const esa_tensor *v);
/* Writes the importance f32[B][Hq][nq][nk] of q and k to host memory; waits. */
esa_status esa_plan_importance(const esa_plan *plan, float *out, const esa_tensor *q,
                               const esa_tensor *k);
/* Runs attention on views that fit the plan. mask NULL: dense. precision: 8 or 16; 8 only if the
 * plan has it; 0: the plan's. *kernel (may be NULL) receives the kernel that runs it. ws NULL: uses
 * the ctx's scratch. */
esa_status esa_plan_attend(const esa_plan *plan, const esa_mask *mask, const esa_qkvo *t, void *ws,
                           int32_t precision, esa_attn_kernel *kernel);
/* Checks the views and runs: what esa_plan_attention does, and what esa_attention does, inside the
 * guard. */
esa_status esa_plan_attention_inside(const esa_plan *plan, const esa_mask *mask, const esa_qkvo *t,
                                     void *ws);
esa_status esa_attention_inside(esa_ctx *ctx, const esa_qkvo *t, const esa_mask *mask,
                                const esa_attention_params *params);

/* ---------------------------------------------------------------- exact_rows.c
 * One attention call on any device, with exact rows if args->exact_rows says so. */

/* Bytes that esa_attention_run needs for any views of these sizes. */
int64_t esa_attention_workspace(esa_ctx *ctx, const esa_backend *be, const esa_attn_args *args);
/* ws NULL: uses the ctx's scratch. */
esa_status esa_attention_run(esa_ctx *ctx, const esa_backend *be, const esa_attn_args *args,
                             void *ws);

/* ---------------------------------------------------------------- check.c: argument errors
 * Each function leaves one message in ctx that says what was given and what was expected. */

esa_status esa_check_view(esa_ctx *ctx, const esa_tensor *t, const char *name);
esa_status esa_check_qk(esa_ctx *ctx, const esa_tensor *q, const esa_tensor *k);
esa_status esa_check_qkvo(esa_ctx *ctx, const esa_qkvo *t);
/* t->carry, which must not be NULL; o is checked. (carry.c) */
esa_status esa_check_carry(esa_ctx *ctx, const esa_qkvo *t, const esa_mask *mask);
/* v of a selection; k is checked. */
esa_status esa_check_v(esa_ctx *ctx, const esa_tensor *k, const esa_tensor *v);
esa_status esa_check_shapes(esa_ctx *ctx, const esa_shapes *shapes);
esa_status esa_check_against_shapes(esa_ctx *ctx, const esa_tensor *t, const esa_shapes *shapes,
                                    const char *name, int64_t H, int64_t N);
/* layout NULL: dense, so no order is involved. Does not check lengths that the host cannot read. */
esa_status esa_check_kv_len(esa_ctx *ctx, const int32_t *kv_len, int32_t device, int64_t B,
                            int64_t Nk, const esa_layout *layout, int32_t mode);
/* Checks and resolves params: block sizes, scale, layout. in NULL: the defaults. */
ESA_ENGINE esa_status esa_check_select(esa_ctx *ctx, esa_select_params *out,
                                       const esa_select_params *in, int64_t Nq, int64_t Nk,
                                       int64_t D);
esa_status esa_check_attention(esa_ctx *ctx, esa_attention_params *out,
                               const esa_attention_params *in, int64_t D);
/* Checks that a mask with an adaptive order holds it, for as many key heads as shapes has. */
esa_status esa_check_ordered(esa_ctx *ctx, const esa_mask *mask, const esa_shapes *shapes);
/* Checks that the mask fits attention of these shapes, and that it is on the CPU or on the device
 * of the tensors. */
esa_status esa_check_mask(esa_ctx *ctx, const esa_mask *mask, const esa_shapes *shapes,
                          int32_t causal);

/* ---------------------------------------------------------------- bind.c
 * These turn views and params into arguments of the backend. t or q NULL: sizes only. */

void esa_bind_attention(esa_attn_args *args, const esa_shapes *shapes,
                        const esa_attention_params *params, const esa_mask *mask,
                        const esa_qkvo *t);
void esa_bind_select(esa_select_args *args, const esa_shapes *shapes,
                     const esa_select_params *params, const esa_tensor *q, const esa_tensor *k,
                     const esa_tensor *v);
/* Set the permutations to those that the mask holds; without any, to NULL. */
void esa_bind_attention_order(esa_attn_args *args, const esa_mask *mask);
void esa_bind_select_order(esa_select_args *args, const esa_mask *mask);
esa_shapes esa_shapes_of(const esa_tensor *q, const esa_tensor *k);

#endif
