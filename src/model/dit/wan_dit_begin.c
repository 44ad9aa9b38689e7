/* wan_dit_begin.c - what is fixed for one video: the order of tokens, rotations, room for
 * activations, and the text of each branch.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/dit/wan_dit_internal.h"

#include <math.h>
#include <string.h>
#include "session/session.h"

#define MAX_TOKENS (INT64_C(1) << 26) /* 67 million: 64-bit sizes below stay far from their end */
#define HIDDEN_BYTES                                                                               \
    (INT64_C(64) << 20) /* of the feed-forward's inside; more rows run in pieces of this */
#define MIN_FF_ROWS 512
#define THETA       10000.0

static void drop_text(esa_wan_dit *dit, wan_text *t)
{
    esa_nn_free(dit->nn, t->kv, t->kv_bytes);
    esa_nn_free(dit->nn, t->bias, t->bias_bytes);
    *t = (wan_text){ 0 };
}

void esa_wan_dit_end(esa_wan_dit *dit)
{
    for (int32_t i = 0; i < dit->branches; i++) drop_text(dit, &dit->text[i]);
    if (dit->text)
        esa_mem_free(&dit->nn->ctx->mem, dit->text, dit->branches * (int64_t)sizeof *dit->text);
    dit->text = NULL;
    dit->branches = 0;
    esa_nn_free(dit->nn, dit->room, dit->room_bytes);
    dit->room = NULL;
    dit->room_bytes = 0;
    dit->tokens = 0;
}

/* Places everything; with carve->base NULL it only counts. */
static void place(esa_wan_dit *dit, esa_carve *carve, int32_t moved)
{
    const esa_wan_config *c = &dit->config;
    const int64_t N = dit->tokens, d = dit->d, row = N * d * 4, half = c->head_dim / 2;
    const int64_t volume = (int64_t)c->patch[0] * c->patch[1] * c->patch[2];
    dit->ff_rows = esa_min64(N, esa_max64(MIN_FF_ROWS, HIDDEN_BYTES / 4 / c->ffn));
    dit->x = esa_carve_take(carve, row);
    dit->a = esa_carve_take(carve, row);
    dit->q = esa_carve_take(carve, row);
    dit->k = esa_carve_take(carve, row);
    dit->v = esa_carve_take(carve, row);
    dit->patches = esa_carve_take(carve,
                                  N * volume * esa_max64(c->in_channels, c->out_channels) * 4);
    dit->hidden = esa_carve_take(carve, dit->ff_rows * c->ffn * 4);
    dit->temb = esa_carve_take(carve, (14 * d + c->freq_dim) * 4);
    dit->cos = esa_carve_take(carve, N * half * 4);
    dit->sin = esa_carve_take(carve, N * half * 4);
    dit->perm = moved ? esa_carve_take(carve, N * 4) : NULL;
}

static esa_status check_size(esa_wan_dit *dit, const int32_t latent[3])
{
    static const char *const side[3] = { "frames", "height", "width" };
    esa_ctx *ctx = dit->nn->ctx;
    int64_t tokens = 1;
    for (int32_t i = 0; i < 3; i++) {
        const int32_t p = dit->config.patch[i];
        if (latent[i] < p || latent[i] % p)
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "the latents have %d %s, a multiple of the patch's %d was expected",
                            latent[i], side[i], p);
        if (latent[i] / p > dit->config.rope_max)
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "the latents have %d %s, this model has positions for %lld", latent[i],
                            side[i], (long long)dit->config.rope_max * p);
        tokens *= latent[i] / p; /* at most 2^60: rope_max is at most 2^20 */
    }
    if (tokens > MAX_TOKENS)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "the video has %lld tokens, at most %lld are run",
                        (long long)tokens, (long long)MAX_TOKENS);
    return ESA_OK;
}

esa_status esa_wan_dit_begin(esa_wan_dit *dit, const int32_t latent[3], esa_layout *layout,
                             int32_t selector, int32_t mode, int32_t branches)
{
    esa_ctx *ctx = dit->nn->ctx;
    esa_wan_dit_end(dit);
    esa_status status = check_size(dit, latent);
    if (status != ESA_OK) return status;
    if (branches < 1 || branches > 16)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "branches is %d, expected 1 to 16", branches);
    dit->tokens = 1;
    for (int32_t i = 0; i < 3; i++) {
        dit->latent[i] = latent[i];
        dit->grid[i] = layout->grid_q[i] = layout->grid_k[i] = latent[i] / dit->config.patch[i];
        dit->tokens *= dit->grid[i];
    }
    layout->text_front_q = layout->text_back_q = layout->text_front_k = layout->text_back_k = 0;
    status = esa_layout_resolve(ctx, layout, layout, dit->tokens, dit->tokens, selector, mode, 0);
    if (status != ESA_OK) return status;
    const int32_t moved = !esa_order_is_identity(layout, 0, mode);
    layout->order_applied = 1;
    esa_carve carve = { 0 };
    place(dit, &carve, moved);
    status = esa_nn_alloc(dit->nn, &dit->room, carve.used, "the transformer's activations");
    if (status != ESA_OK) return status;
    dit->room_bytes = carve.used;
    carve = (esa_carve){ .base = dit->room };
    place(dit, &carve, moved);
    if (moved) esa_order_build(dit->perm, dit->tokens, layout, 0, mode);
    esa_rope_table(dit->cos, dit->sin, dit->grid, dit->perm, dit->config.head_dim, THETA);
    dit->text = esa_mem_zalloc(&ctx->mem, branches * (int64_t)sizeof *dit->text);
    if (!dit->text)
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the transformer's text");
    dit->branches = branches;
    return ESA_OK;
}

esa_status esa_wan_dit_text(esa_wan_dit *dit, int32_t branch, const float *embeds, int64_t rows)
{
    esa_ctx *ctx = dit->nn->ctx;
    const esa_wan_config *c = &dit->config;
    const int64_t d = dit->d, width = c->text_dim;
    if (branch < 0 || branch >= dit->branches || rows < 1 || rows > INT32_MAX)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "text of %lld rows for branch %d of %d",
                        (long long)rows, branch, dit->branches);
    int64_t same = 1;
    while (same < rows && memcmp(embeds + (rows - 1 - same) * width, embeds + (rows - 1) * width,
                                 (size_t)width * 4) == 0)
        same++;
    const int64_t R = rows - same + 1, kv_row = R * d;
    wan_text *t = &dit->text[branch];
    drop_text(dit, t);
    t->rows = R;
    t->kv_bytes = esa_size_mul(esa_size_mul(2 * c->layers, kv_row), 4);
    t->bias_bytes = R * 4;
    void *kv = NULL, *made = NULL, *room = NULL;
    const int64_t room_bytes = esa_size_mul(2 * kv_row, 4);
    esa_status status = esa_nn_alloc(dit->nn, &kv, t->kv_bytes, "the text's keys and values");
    if (status == ESA_OK)
        status = esa_nn_alloc(dit->nn, &made, t->bias_bytes, "the text's weights");
    t->kv = kv;
    t->bias = made;
    if (status == ESA_OK) status = esa_nn_alloc(dit->nn, &room, room_bytes, "the text's states");
    if (status == ESA_OK) {
        float *h1 = room, *h2 = h1 + kv_row;
        memset(t->bias, 0, (size_t)R * 4);
        t->bias[R - 1] = (float)log((double)same);
        const esa_epilogue gelu = { .act = ESA_ACT_GELU_TANH };
        status = esa_nn_linear(dit->nn, h1, d, embeds, width, R, &dit->text1.weight,
                               &dit->text1.bias, &gelu);
        if (status == ESA_OK)
            status = esa_nn_linear(dit->nn, h2, d, h1, d, R, &dit->text2.weight, &dit->text2.bias,
                                   NULL);
        for (int32_t i = 0; i < c->layers && status == ESA_OK; i++) {
            const wan_attn *a = &dit->block[i].cross;
            float *k = t->kv + 2 * i * kv_row, *v = k + kv_row;
            status = esa_nn_linear(dit->nn, k, d, h2, d, R, &a->k.weight, &a->k.bias, NULL);
            if (status == ESA_OK)
                status = esa_nn_linear(dit->nn, v, d, h2, d, R, &a->v.weight, &a->v.bias, NULL);
            if (status == ESA_OK)
                esa_nn_rms_norm(dit->nn, k, d, k, d, R, d, (float)c->eps, a->norm_k.data);
        }
    }
    esa_nn_free(dit->nn, room, room_bytes);
    if (status != ESA_OK) drop_text(dit, t);
    return status;
}
