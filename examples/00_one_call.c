/* 00_one_call.c - chooses the key blocks that matter, computes only those, and measures the error
 * against dense attention.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Next: 01_plan.c makes its decisions once per shape and then allocates nothing. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <esa/esa.h>

/* A small video: 4 frames of 16 x 16 tokens. */
enum { H = 2, T = 4, Y = 16, X = 16, N = T * Y * X, D = 64 };

/* q and k of a token encode its place (frame, row, column) as angles, like rotary embeddings. Near
 * places score high, so attention is local. v is a smooth picture. */
static void fill(float *q, float *k, float *v)
{
    for (int h = 0; h < H; h++)
        for (int n = 0; n < N; n++)
            for (int d = 0; d < D; d++) {
                const int place[3] = { n / (X * Y), n / X % Y, n % X }, i = (h * N + n) * D + d,
                          pair = d / 2;
                const double angle = place[pair % 3] * (pair % 3 == 0 ? 1.0 : 0.5) / (1 + pair / 8);
                q[i] = k[i] = (float)(1.8 * (d % 2 ? sin(angle) : cos(angle)));
                v[i] = (float)(1 + sin(0.3 * place[2] + 0.2 * place[1] + place[0] + d));
            }
}

int main(void)
{
    const size_t count = (size_t)H * N * D;
    float *q = malloc(count * sizeof *q), *k = malloc(count * sizeof *k),
          *v = malloc(count * sizeof *v);
    float *o = malloc(count * sizeof *o), *dense = malloc(count * sizeof *dense);
    if (!q || !k || !v || !o || !dense) return 1;
    fill(q, k, v);

    /* Views never own memory; the arrays stay ours. Memory order: batch, head, token, channel. */
    esa_tensor tq = esa_tensor_bnsd(q, ESA_DTYPE_F32, 1, H, N, D),
               tk = esa_tensor_bnsd(k, ESA_DTYPE_F32, 1, H, N, D);
    esa_tensor tv = esa_tensor_bnsd(v, ESA_DTYPE_F32, 1, H, N, D),
               to = esa_tensor_bnsd(o, ESA_DTYPE_F32, 1, H, N, D);
    esa_tensor td = esa_tensor_bnsd(dense, ESA_DTYPE_F32, 1, H, N, D);

    esa_ctx *ctx;
    esa_mask *mask = NULL;
    if (esa_ctx_create(&ctx, NULL)) return 1;

    /* Keep half of the key blocks. The pooled tail replaces each skipped block by its mean
     * key and value. */
    esa_select_params select = esa_select_params_default(ESA_SELECT_ENTROPY);
    select.budget = 0.5;
    esa_attention_params attention = esa_attention_params_default();
    attention.tail = ESA_TAIL_POOLED;

    esa_status status = esa_select(ctx, &mask, &tq, &tk, &select);
    if (!status) status = esa_attention(ctx, &tq, &tk, &tv, &to, mask, &attention);
    if (!status) status = esa_attention(ctx, &tq, &tk, &tv, &td, NULL, NULL);
    if (status) {
        fprintf(stderr, "%s: %s\n", esa_status_name(status), esa_ctx_error(ctx));
        return 1;
    }
    esa_mask_info info;
    info.struct_size = sizeof info;
    esa_mask_get_info(mask, &info);
    double top = 0, bottom = 0;
    for (size_t i = 0; i < count; i++) {
        top += (double)(o[i] - dense[i]) * (o[i] - dense[i]);
        bottom += (double)dense[i] * dense[i];
    }
    const double error = sqrt(top / bottom);
    printf("kernels %s; density asked %.2f, realised %.3f; error against dense %.2f %%\n",
           esa_ctx_cpu(ctx), info.density_asked, info.density, 100 * error);
    esa_mask_free(mask);
    esa_ctx_free(ctx);
    free(q);
    free(k);
    free(v);
    free(o);
    free(dense);
    /* Attention is local, so half of the blocks hold nearly all of it. */
    return error < 0.1 && info.density <= 0.5 ? 0 : 1;
}
