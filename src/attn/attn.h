/* attn.h - attention below the public call: checked, bound arguments and the device switch.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_ATTN_ATTN_H
#define ESA_ATTN_ATTN_H

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
    int32_t *perm_q, *perm_k;       /* owned; NULL: identity or order_applied */
    int64_t workspace;              /* bytes */
};

/* View checks, one sentence each; name is "q", "k", ... */
esa_status esa_check_view(esa_ctx *ctx, const esa_tensor *t, const char *name);
/* Checks and resolves select params for lengths Nq, Nk. */
esa_status esa_check_select(esa_ctx *ctx, esa_select_params *out, const esa_select_params *in, int64_t Nq, int64_t Nk, int64_t D);

#endif
