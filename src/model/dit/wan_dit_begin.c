/* wan_dit_begin.c - prepares one video: the order of tokens, rotations, memory for activations, and
 * the text of each branch.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/dit/wan_dit_internal.h"

#include <math.h>
#include <string.h>
#include "session/session.h"

#define MAX_TOKENS   (INT64_C(1) << 26) /* 67 million: sizes computed from it fit in 64 bits */
/* bytes of the feed-forward's hidden layer; longer sequences run in pieces of this size */
#define HIDDEN_BYTES (INT64_C(64) << 20)
#define MIN_FF_ROWS  512
#define THETA        10000.0

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

/* Places all buffers; only counts their size if carve->base is NULL. */
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
                            "the latents have %d %s, expected a multiple of %d (the patch)",
                            latent[i], side[i], p);
        if (latent[i] / p > dit->config.rope_max)
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "the latents have %d %s, but this model has positions for %lld",
                            latent[i], side[i], (long long)dit->config.rope_max * p);
        tokens *= latent[i] / p; /* at most 2^60: rope_max is at most 2^20 */
    }
    if (tokens > MAX_TOKENS)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "the video has %lld tokens, expected at most %lld",
                        (long long)tokens, (long long)MAX_TOKENS);
    return ESA_OK;
}

esa_status esa_wan_dit_begin(esa_wan_dit *dit, const int32_t latent[3], esa_layout *layout,
                             int32_t selector, int32_t mode, int32_t branches)
{
    esa_ctx *ctx = dit->nn->ctx;
    esa_wan_dit_end(dit);
    ESA_TRY(check_size(dit, latent));
    if (branches < 1 || branches > 16)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "branches is %d, expected 1 to 16", branches);
    dit->tokens = 1;
    for (int32_t i = 0; i < 3; i++) {
        dit->latent[i] = latent[i];
        dit->grid[i] = layout->grid_q[i] = layout->grid_k[i] = latent[i] / dit->config.patch[i];
        dit->tokens *= dit->grid[i];
    }
    layout->text_front_q = layout->text_back_q = layout->text_front_k = layout->text_back_k = 0;
    ESA_TRY(esa_layout_resolve(ctx, layout, layout, dit->tokens, dit->tokens, selector, mode, 0));
    /* Adaptive orders differ between heads and layers, so the calls apply them. */
    const int32_t adaptive = layout->order == ESA_ORDER_ADAPTIVE;
    const int32_t moved = !adaptive && !esa_order_is_identity(layout, 0, mode);
    layout->order_applied = !adaptive;
    esa_carve carve = { 0 };
    place(dit, &carve, moved);
    ESA_TRY(esa_nn_alloc(dit->nn, &dit->room, carve.used, "the transformer's activations"));
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

/* embeds[t->rows] becomes keys and values of every layer. room: scratch [2][t->rows][d]. */
static esa_status text_states(esa_wan_dit *dit, wan_text *t, const float *embeds, float *room)
{
    const esa_wan_config *c = &dit->config;
    const int64_t d = dit->d, R = t->rows, kv_row = R * d;
    const esa_epilogue gelu = { .act = ESA_ACT_GELU_TANH };
    float *h1 = room, *h2 = h1 + kv_row;
    ESA_TRY(esa_nn_linear(dit->nn, h1, d, embeds, c->text_dim, R, &dit->text1.weight,
                          &dit->text1.bias, &gelu));
    ESA_TRY(esa_nn_linear(dit->nn, h2, d, h1, d, R, &dit->text2.weight, &dit->text2.bias, NULL));
    for (int32_t i = 0; i < c->layers; i++) {
        const wan_attn *a = &dit->block[i].cross;
        float *k = t->kv + 2 * i * kv_row, *v = k + kv_row;
        ESA_TRY(esa_nn_linear(dit->nn, k, d, h2, d, R, &a->k.weight, &a->k.bias, NULL));
        ESA_TRY(esa_nn_linear(dit->nn, v, d, h2, d, R, &a->v.weight, &a->v.bias, NULL));
        esa_nn_rms_norm(dit->nn, k, d, k, d, R, d, (float)c->eps, a->norm_k.data);
    }
    return ESA_OK;
}

/* same: how many equal rows the last one stands for. */
static esa_status make_text(esa_wan_dit *dit, wan_text *t, const float *embeds, int64_t same)
{
    const int64_t R = t->rows, kv_row = R * dit->d, room_bytes = esa_size_mul(2 * kv_row, 4);
    void *room;
    t->kv_bytes = esa_size_mul(esa_size_mul(2 * dit->config.layers, kv_row), 4);
    t->bias_bytes = R * 4;
    ESA_TRY(esa_nn_alloc(dit->nn, (void **)&t->kv, t->kv_bytes, "the text's keys and values"));
    ESA_TRY(esa_nn_alloc(dit->nn, (void **)&t->bias, t->bias_bytes, "the text's weights"));
    memset(t->bias, 0, (size_t)R * 4);
    t->bias[R - 1] = (float)log((double)same);
    ESA_TRY(esa_nn_alloc(dit->nn, &room, room_bytes, "the text's states"));
    const esa_status status = text_states(dit, t, embeds, room);
    esa_nn_free(dit->nn, room, room_bytes);
    return status;
}

esa_status esa_wan_dit_text(esa_wan_dit *dit, int32_t branch, const float *embeds, int64_t rows)
{
    const int64_t width = dit->config.text_dim;
    if (branch < 0 || branch >= dit->branches || rows < 1 || rows > INT32_MAX)
        return esa_fail(dit->nn->ctx, ESA_ERR_ARGUMENT,
                        "text of %lld rows for branch %d, expected 1 .. %d rows and branch 0 .. %d",
                        (long long)rows, branch, INT32_MAX, dit->branches - 1);
    int64_t same = 1;
    while (same < rows && memcmp(embeds + (rows - 1 - same) * width, embeds + (rows - 1) * width,
                                 (size_t)width * 4) == 0)
        same++;
    wan_text *t = &dit->text[branch];
    drop_text(dit, t);
    t->rows = rows - same + 1;
    const esa_status status = make_text(dit, t, embeds, same);
    if (status) drop_text(dit, t);
    return status;
}
