/* exact_rows.c - attention with exact rows: a few queries of every block are computed exactly, and
 * their errors correct the others.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Four steps, the same on every device:
 *   1. take   the exact rows of q, into a compact tensor [B][Hq][nq*R][D]
 *   2. dense attention of these rows
 *   3. sparse attention of all rows, as without exact rows
 *   4. mend   o: exact rows get their exact output, the others the mean error of their block
 *
 * rules/exact_rows.h has the rule. Steps 2 and 3 run at the same time if the device can do that:
 * the exact rows alone are too few tiles for a GPU. Otherwise they share a workspace. */
#include "attn/attn.h"
#include "base/half.h"

typedef struct exact_parts {
    void *q, *o;          /* [B][Hq][nq*R][D] */
    float *lse;           /* [B][Hq][nq*R] */
    void *dense, *sparse; /* workspaces of the two attention calls */
} exact_parts;

/* Dense attention of the exact rows, in 16 bits. The order of the keys does not matter to it. */
static esa_attn_args dense_args(const esa_attn_args *args, const exact_parts *p)
{
    const int64_t n = args->nq * args->exact_rows;
    esa_attn_args a = { .dtype = args->dtype,
                        .tail = ESA_TAIL_NONE,
                        .precision = 16,
                        .block_q = 128,
                        .block_k = 128,
                        .B = args->B,
                        .Hq = args->Hq,
                        .Hkv = args->Hkv,
                        .Nq = n,
                        .Nk = args->Nk,
                        .D = args->D,
                        .nq = esa_ceil_div(n, 128),
                        .nk = esa_ceil_div(args->Nk, 128),
                        .scale = args->scale,
                        .q = p->q,
                        .k = args->k,
                        .v = args->v,
                        .o = p->o,
                        .q_stride = { args->Hq * n * args->D, n * args->D, args->D },
                        .o_stride = { args->Hq * n * args->D, n * args->D, args->D },
                        .lse = args->lse ? p->lse : NULL,
                        .lse_stride = { args->Hq * n, n, 1 },
                        .kv_len = args->kv_len };
    for (int32_t i = 0; i < 3; i++) {
        a.k_stride[i] = args->k_stride[i];
        a.v_stride[i] = args->v_stride[i];
    }
    return a;
}

static exact_parts carve_parts(esa_carve *carve, esa_ctx *ctx, const esa_backend *be,
                               const esa_attn_args *args)
{
    exact_parts p = { 0 };
    const int64_t rows = esa_size_mul(args->B * args->Hq, args->nq * args->exact_rows),
                  bytes = esa_size_mul(rows, args->D * esa_dtype_size(args->dtype));
    p.q = esa_carve_take(carve, bytes);
    p.o = esa_carve_take(carve, bytes);
    p.lse = esa_carve_take(carve, esa_size_mul(rows, 4));
    const esa_attn_args dense = dense_args(args, &p);
    const int64_t dense_bytes = be->attention_workspace(ctx, &dense),
                  sparse_bytes = be->attention_workspace(ctx, args);
    if (be->attention_both) {
        p.dense = esa_carve_take(carve, dense_bytes);
        p.sparse = esa_carve_take(carve, sparse_bytes);
    } else {
        p.dense = p.sparse = esa_carve_take(carve, esa_max64(dense_bytes, sparse_bytes));
    }
    return p;
}

int64_t esa_attention_workspace(esa_ctx *ctx, const esa_backend *be, const esa_attn_args *args)
{
    if (!args->exact_rows) return be->attention_workspace(ctx, args);
    esa_carve carve = { NULL, 0 };
    carve_parts(&carve, ctx, be, args);
    return carve.used;
}

esa_status esa_attention_run(esa_ctx *ctx, const esa_backend *be, const esa_attn_args *args,
                             void *ws)
{
    if (!args->exact_rows) return be->attention(ctx, args, ws);
    if (!ws) ESA_TRY(be->scratch(ctx, &ws, esa_attention_workspace(ctx, be, args)));
    esa_carve carve = { ws, 0 };
    const exact_parts p = carve_parts(&carve, ctx, be, args);
    const esa_attn_args dense = dense_args(args, &p);
    ESA_TRY(be->exact_take(ctx, args, p.q));
    if (be->attention_both) {
        ESA_TRY(be->attention_both(ctx, &dense, p.dense, args, p.sparse));
    } else {
        ESA_TRY(be->attention(ctx, &dense, p.dense));
        ESA_TRY(be->attention(ctx, args, p.sparse));
    }
    return be->exact_mend(ctx, args, p.o, p.lse);
}
