/* 01_plan.c - a plan: decides once per shape, then runs many times in a workspace of our own, and
 * returns the log-sum-exp of each row.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Before: 00_one_call.c. Next: 02_masks.c makes and saves masks. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <esa/esa.h>

/* Grouped heads: two query heads share one key head. */
enum { B = 1, HQ = 4, HKV = 2, N = 700, D = 64, STEPS = 3 };

static void fill(float *x, int count, unsigned seed)
{
    for (int i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)((int)(seed >> 24) - 128) / 64.0f;
    }
}

int main(void)
{
    static float q[B * HQ * N * D], k[B * HKV * N * D], v[B * HKV * N * D], o[B * HQ * N * D],
        lse[B * HQ * N];
    /* Tokens before heads in memory (BSND), as in many models. Only the strides differ. */
    esa_tensor tq = esa_tensor_bsnd(q, ESA_DTYPE_F32, B, HQ, N, D),
               tk = esa_tensor_bsnd(k, ESA_DTYPE_F32, B, HKV, N, D);
    esa_tensor tv = esa_tensor_bsnd(v, ESA_DTYPE_F32, B, HKV, N, D),
               to = esa_tensor_bsnd(o, ESA_DTYPE_F32, B, HQ, N, D);
    esa_tensor tl = esa_tensor_bnsd(lse, ESA_DTYPE_F32, B, HQ, N, 1);

    esa_ctx *ctx;
    esa_ctx_params params = esa_ctx_params_default();
    params.threads = 2;
    if (esa_ctx_create(&ctx, &params)) return 1;

    esa_shapes shapes = esa_shapes_default();
    shapes.dtype = ESA_DTYPE_F32;
    shapes.B = B;
    shapes.Hq = HQ;
    shapes.Hkv = HKV;
    shapes.Nq = shapes.Nk = N;
    shapes.D = D;
    esa_select_params select = esa_select_params_default(ESA_SELECT_ADA_BSA);
    select.budget = 0.4;
    esa_attention_params attention = esa_attention_params_default();
    attention.tail = ESA_TAIL_POOLED;

    esa_plan *plan = NULL;
    esa_mask *mask = NULL;
    int64_t bytes = 0;
    esa_status status = esa_plan_create(ctx, &plan, &shapes, &select, &attention);
    if (!status) status = esa_plan_workspace(plan, &bytes);
    if (!status) status = esa_mask_create(plan, &mask);
    /* One workspace serves all calls. From here on the library allocates nothing. */
    bytes = (bytes + ESA_WORKSPACE_ALIGN - 1) / ESA_WORKSPACE_ALIGN * ESA_WORKSPACE_ALIGN;
    void *ws = status ? NULL : aligned_alloc(ESA_WORKSPACE_ALIGN, (size_t)bytes);
    for (unsigned step = 0; !status && ws && step < STEPS; step++) {
        fill(q, B * HQ * N * D, 1 + step);
        fill(k, B * HKV * N * D, 100 + step);
        fill(v, B * HKV * N * D, 200 + step);
        status = esa_plan_select(plan, mask, &tq, &tk, ws);
        if (!status) status = esa_plan_attention(plan, mask, &tq, &tk, &tv, &to, &tl, ws);
        if (!status)
            printf("step %u: o[0] = %.4f, lse[0] = %.4f\n", step, (double)o[0], (double)lse[0]);
    }
    const int good = !status && ws && isfinite(o[0]) && isfinite(lse[0]);
    if (status)
        fprintf(stderr, "%s: %s\n", esa_status_name(status), esa_ctx_error(ctx));
    else
        printf("workspace %lld bytes\n", (long long)bytes);
    free(ws);
    esa_mask_free(mask);
    esa_plan_free(plan);
    esa_ctx_free(ctx);
    return good ? 0 : 1;
}
