/* esa_carry.h - carried differences: what sparse attention left out at one step, added at later
 * steps.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A sparse call follows what changes between two steps of a video. What it leaves out changes
 * slowly. So at a few steps, the anchors, a layer runs dense and sparse on the same q, k and v, and
 * keeps the difference
 *
 *     d = dense output - sparse output
 *
 * Until the next anchor, calls with the same mask and order add d to their output:
 *
 *     esa_attention(ctx, &q, &k, &v, &o, NULL, NULL);                          // an anchor: dense
 *     esa_attention_carry(ctx, &q, &k, &v, &o, mask, &p, &d, ESA_CARRY_MAKE);  // makes d; o stays
 *
 *     esa_attention_carry(ctx, &q, &k, &v, &o, mask, &p, &d, ESA_CARRY_ADD);   // a later step
 *
 * d belongs to a mask, its order and its tail: with another mask it corrects the wrong error. The
 * other guidance branches of a step may use the d of the first. Sessions (esa_session.h) do all of
 * this: they choose the anchors, own d and drop it when it no longer fits.
 *
 * The rules of esa.h hold here too. */
#ifndef ESA_CARRY_H
#define ESA_CARRY_H

#include "esa.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How the elements of d are stored. The numbers are part of the ABI. */
enum {
    ESA_CARRY_E4M3 = 0, /* one byte; each row (token and head) has a scale of its own */
    ESA_CARRY_BF16 = 1  /* two bytes */
};

/* What a call does with d. */
enum {
    ESA_CARRY_ADD = 0, /* o = sparse output + d */
    ESA_CARRY_MAKE = 1 /* d = o - sparse output; o holds the dense output and stays as it is */
};

/* A view of one d. It never owns memory: the caller keeps value and scale alive as it keeps o. */
typedef struct esa_carry {
    uint32_t struct_size;
    int32_t format;               /* ESA_CARRY_E4M3 or ESA_CARRY_BF16 */
    int32_t device, device_index; /* as in esa_tensor; the same as those of o */
    int64_t B, H, N, D;           /* those of o. ADD: B may be 1, for all batch entries alike */
    void *value;                  /* [B][H][N][D], tokens in the order of o, not of the mask */
    float *scale;                 /* E4M3: [B][H][N], what the values of a row are multiplied by;
                                   * BF16: NULL */
    int64_t reserved[2];
} esa_carry;

/* Bytes of value and scale together; -1 for a format or sizes that there cannot be. */
ESA_API int64_t esa_carry_bytes(int32_t format, int64_t B, int64_t H, int64_t N, int64_t D);

/* The view of memory that has esa_carry_bytes bytes and is aligned to ESA_WORKSPACE_ALIGN. It is on
 * the CPU; for a GPU, set device and device_index afterwards. */
ESA_API esa_carry esa_carry_view(void *memory, int32_t format, int64_t B, int64_t H, int64_t N,
                                 int64_t D);

/* esa_attention with a carried difference. use: ESA_CARRY_ADD or ESA_CARRY_MAKE. The mask must not
 * be NULL: dense attention leaves nothing out.
 *
 * ADD adds d before the output is rounded. Exact rows see the sum: they correct what d leaves. The
 * log-sum-exp stays that of the sparse call.
 *
 * MAKE rounds the sparse output to the type of o before it subtracts, so where the outputs are
 * equal, d is 0. Exact rows take no part in it, and params->lse is not written. Elements that are
 * not finite become 0, so NaN at one step does not stay. */
ESA_API esa_status esa_attention_carry(esa_ctx *ctx, const esa_tensor *q, const esa_tensor *k,
                                       const esa_tensor *v, const esa_tensor *o,
                                       const esa_mask *mask, const esa_attention_params *params,
                                       const esa_carry *carry, int32_t use);

/* The same with a plan; see esa_plan_attention. MAKE does not write lse. */
ESA_API esa_status esa_plan_attention_carry(const esa_plan *plan, const esa_mask *mask,
                                            const esa_tensor *q, const esa_tensor *k,
                                            const esa_tensor *v, const esa_tensor *o,
                                            const esa_tensor *lse, const esa_carry *carry,
                                            int32_t use, void *ws);

#ifdef __cplusplus
}
#endif
#endif
