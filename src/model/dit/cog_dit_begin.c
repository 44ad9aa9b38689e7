/* cog_dit_begin.c - prepares one video: the order of tokens, positions, memory for activations, and
 * the text of each branch.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/dit/cog_dit_internal.h"

#include <string.h>
#include "session/session.h"

/* bytes of the feed-forward's hidden layer; longer sequences run in pieces of this size */
#define HIDDEN_BYTES (INT64_C(64) << 20)
#define MIN_FF_ROWS  512

void esa_cog_dit_end(esa_cog_dit *dit)
{
    const esa_allocator *mem = &dit->nn->ctx->mem;
    if (dit->text) esa_mem_free(mem, dit->text, dit->branches * (int64_t)sizeof *dit->text);
    if (dit->has_text) esa_mem_free(mem, dit->has_text, dit->branches * (int64_t)sizeof(int32_t));
    dit->text = NULL;
    dit->has_text = NULL;
    dit->branches = 0;
    esa_nn_free(dit->nn, dit->room, dit->room_bytes);
    dit->room = NULL;
    dit->room_bytes = 0;
    dit->tokens = dit->text_rows = dit->rows = 0;
    dit->prepared = 0;
}

/* ---------------------------------------------------------------- memory */

/* q, k, v, the output of attention and the hidden layer. */
static void place_layers(esa_cog_dit *dit, esa_carve *carve)
{
    const esa_nn_ops *op = dit->nn->ops;
    const int32_t type = op->dtype;
    const int64_t S = dit->rows, d = dit->d, ffn = dit->ffn;
    if (!op->joined) {
        const int64_t rows = esa_min64(S, esa_max64(MIN_FF_ROWS, HIDDEN_BYTES / 4 / ffn));
        for (int32_t i = 0; i < 3; i++) dit->qkv[i] = esa_nn_take(dit->nn, carve, type, S, d);
        dit->flat = dit->qkv[0];
        dit->o = dit->a;
        dit->hidden = esa_nn_take(dit->nn, carve, type, rows, ffn);
        return;
    }
    /* The hidden layer takes the place of q, k and v. */
    const esa_view wide = esa_nn_take(dit->nn, carve, type, S, esa_max64(3 * d, ffn));
    const esa_view all = esa_view_of(wide.data, type, wide.device, S, 3 * d);
    for (int32_t i = 0; i < 3; i++) dit->qkv[i] = esa_view_cols(all, i * d, d);
    dit->flat = esa_view_of(wide.data, type, wide.device, S, d);
    dit->hidden = esa_view_of(wide.data, type, wide.device, S, ffn);
    dit->o = esa_nn_take(dit->nn, carve, type, S, d);
    dit->a.scale = esa_carve_take(carve, S * 4);
    dit->hidden.scale = esa_carve_take(carve, S * 4);
}

/* Places all buffers; only counts their size if carve->base is NULL. */
static void place(esa_cog_dit *dit, esa_carve *carve, int32_t moved)
{
    const esa_cog_config *c = &dit->config;
    const int32_t type = dit->nn->ops->dtype, wide = ESA_DTYPE_F32;
    const int64_t N = dit->tokens, S = dit->rows, d = dit->d, half = c->head_dim / 2;
    const int64_t area = (int64_t)c->patch * c->patch;
    dit->x = esa_nn_take(dit->nn, carve, type, S, d);
    dit->a = esa_nn_take(dit->nn, carve, type, S, d);
    place_layers(dit, carve);
    const esa_view patches = esa_nn_take(dit->nn, carve, wide, N,
                                         area * esa_max64(c->in_channels, c->out_channels));
    dit->patch_in = esa_view_of(patches.data, type, dit->x.device, N, area * c->in_channels);
    dit->patch_out = esa_view_of(patches.data, wide, dit->x.device, N, area * c->out_channels);
    dit->temb = esa_nn_take(dit->nn, carve, wide, 1, c->time_dim);
    dit->silu = esa_nn_take(dit->nn, carve, wide, 1, c->time_dim);
    dit->sinusoid = esa_nn_take(dit->nn, carve, wide, 1, d);
    for (int32_t i = 0; i < 2; i++) dit->e[i] = esa_nn_take(dit->nn, carve, wide, 1, 6 * d);
    dit->cos = c->rotary ? esa_carve_take(carve, S * half * 4) : NULL;
    dit->sin = c->rotary ? esa_carve_take(carve, S * half * 4) : NULL;
    dit->places = (esa_view){ 0 };
    if (!c->rotary) dit->places = esa_nn_take(dit->nn, carve, type, N, d);
    for (int32_t b = 0; b < dit->branches; b++)
        dit->text[b] = esa_nn_take(dit->nn, carve, type, dit->text_rows, d);
    dit->perm = moved ? esa_carve_take(carve, N * 4) : NULL;
}

/* ---------------------------------------------------------------- positions */

/* The video's part of the order, counted from its first token. order: room for [S]. */
static void video_order(const esa_cog_dit *dit, int32_t *order, const esa_layout *layout,
                        int32_t mode)
{
    const int64_t R = dit->text_rows;
    esa_order_build(order, dit->rows, layout, 0, mode);
    for (int64_t i = 0; i < dit->tokens; i++) order[i] = order[R + i] - (int32_t)R;
}

/* Text is not rotated: its angles are 0. */
static esa_status write_rotations(esa_cog_dit *dit, float *host, const int32_t *perm)
{
    const int64_t half = dit->config.head_dim / 2, R = dit->text_rows * half,
                  count = dit->rows * half;
    float *cos = host, *sin = host + count;
    for (int64_t i = 0; i < R; i++) cos[i] = 1;
    memset(sin, 0, (size_t)R * 4);
    esa_cog_rotations(&dit->config, cos + R, sin + R, dit->grid, perm);
    ESA_TRY(esa_nn_upload(dit->nn, dit->cos, cos, count * 4));
    return esa_nn_upload(dit->nn, dit->sin, sin, count * 4);
}

static esa_status write_positions(esa_cog_dit *dit, float *host, int32_t *order,
                                  const esa_layout *layout, int32_t mode)
{
    const int32_t *perm = dit->perm ? order : NULL;
    if (perm) {
        video_order(dit, order, layout, mode);
        ESA_TRY(esa_nn_upload(dit->nn, dit->perm, perm, dit->tokens * 4));
    }
    if (dit->config.rotary) return write_rotations(dit, host, perm);
    esa_cog_places(&dit->config, host, dit->grid, perm);
    return esa_nn_write(dit->nn, &dit->places, host);
}

static esa_status make_positions(esa_cog_dit *dit, const esa_layout *layout, int32_t mode)
{
    const esa_allocator *mem = &dit->nn->ctx->mem;
    const int64_t floats = dit->config.rotary ? dit->rows * dit->config.head_dim
                                              : dit->tokens * dit->d,
                  bytes = 4 * (floats + dit->rows);
    float *host = esa_mem_alloc(mem, bytes);
    if (!host) return esa_fail(dit->nn->ctx, ESA_ERR_MEMORY, "out of memory for the positions");
    const esa_status status = write_positions(dit, host, (int32_t *)(host + floats), layout, mode);
    esa_mem_free(mem, host, bytes);
    return status;
}

/* ---------------------------------------------------------------- layout */

esa_status esa_cog_dit_layout(const esa_cog_dit *dit, const int32_t latent[3], esa_layout *layout,
                              int32_t selector, int32_t mode)
{
    const int32_t p = dit->config.patch, patch[3] = { 1, p, p },
                  grid[3] = { latent[0], latent[1] / p, latent[2] / p };
    int64_t tokens;
    ESA_TRY(esa_dit_check_size(dit->nn->ctx, latent, patch, &tokens));
    if (layout->text_front_q < 1)
        return esa_fail(dit->nn->ctx, ESA_ERR_ARGUMENT,
                        "the layout has %d rows of text, expected at least 1",
                        layout->text_front_q);
    memcpy(layout->grid_q, grid, sizeof grid);
    memcpy(layout->grid_k, grid, sizeof grid);
    layout->text_front_k = layout->text_front_q;
    layout->text_back_q = layout->text_back_k = 0;
    const int64_t S = layout->text_front_q + tokens;
    ESA_TRY(esa_layout_resolve(dit->nn->ctx, layout, layout, S, S, selector, mode, 0));
    /* Adaptive orders differ between heads and layers, and the tiles of the compat modes put the
     * text behind the video: the calls apply these. */
    layout->order_applied = layout->order != ESA_ORDER_ADAPTIVE &&
                            (layout->order != ESA_ORDER_TILE || mode == ESA_MODE_FIXED);
    return ESA_OK;
}

/* ---------------------------------------------------------------- room */

void esa_cog_dit_set_room(esa_cog_dit *dit, const esa_dit_room *room)
{
    dit->room_known = room != NULL;
    dit->given = room ? *room : (esa_dit_room){ 0 };
}

int64_t esa_cog_dit_bytes(const esa_cog_dit *dit) { return dit->room_bytes; }
esa_store *esa_cog_dit_store(esa_cog_dit *dit) { return dit->store; }

/* Bytes that esa_cog_dit_text allocates for a while: the embeddings. */
static int64_t text_bytes(const esa_cog_dit *dit)
{
    return dit->text_rows * dit->config.text_dim * esa_view_element(dit->nn->ops->dtype);
}

/* ---------------------------------------------------------------- one video */

static esa_status make_room(esa_cog_dit *dit, const esa_layout *layout, int32_t mode)
{
    const int32_t moved = layout->order_applied && !esa_order_is_identity(layout, 0, mode);
    esa_carve carve = { 0 };
    place(dit, &carve, moved);
    ESA_TRY(esa_dit_leave_room(dit->nn, dit->store, dit->room_known ? &dit->given : NULL,
                               carve.used + text_bytes(dit), dit->rows * dit->d,
                               !layout->order_applied));
    ESA_TRY(esa_nn_alloc(dit->nn, &dit->room, carve.used, "the transformer's activations"));
    dit->room_bytes = carve.used;
    carve = (esa_carve){ .base = dit->room };
    place(dit, &carve, moved);
    return make_positions(dit, layout, mode);
}

esa_status esa_cog_dit_begin(esa_cog_dit *dit, const int32_t latent[3], esa_layout *layout,
                             int32_t selector, int32_t mode, int32_t branches)
{
    esa_ctx *ctx = dit->nn->ctx;
    esa_cog_dit_end(dit);
    ESA_TRY(esa_cog_dit_layout(dit, latent, layout, selector, mode));
    if (branches < 1 || branches > 16)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "branches is %d, expected 1 to 16", branches);
    dit->text = esa_mem_zalloc(&ctx->mem, branches * (int64_t)sizeof *dit->text);
    dit->has_text = esa_mem_zalloc(&ctx->mem, branches * (int64_t)sizeof *dit->has_text);
    dit->branches = branches;
    if (!dit->text || !dit->has_text) {
        esa_cog_dit_end(dit);
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the transformer's text");
    }
    dit->tokens = 1;
    for (int32_t i = 0; i < 3; i++) {
        dit->latent[i] = latent[i];
        dit->grid[i] = layout->grid_q[i];
        dit->tokens *= dit->grid[i];
    }
    dit->text_rows = layout->text_front_q;
    dit->rows = dit->text_rows + dit->tokens;
    const esa_status status = make_room(dit, layout, mode);
    if (status) esa_cog_dit_end(dit);
    return status;
}

esa_status esa_cog_dit_text(esa_cog_dit *dit, int32_t branch, const float *embeds, int64_t rows)
{
    esa_nn *nn = dit->nn;
    if (branch < 0 || branch >= dit->branches)
        return esa_fail(nn->ctx, ESA_ERR_ARGUMENT, "text for branch %d, expected 0 .. %d", branch,
                        dit->branches - 1);
    if (rows != dit->text_rows)
        return esa_fail(nn->ctx, ESA_ERR_MISMATCH,
                        "the text has %lld rows, but self-attention has places for %lld",
                        (long long)rows, (long long)dit->text_rows);
    esa_view state = esa_view_of(NULL, nn->ops->dtype, dit->x.device, rows, dit->config.text_dim);
    ESA_TRY(esa_nn_alloc(nn, &state.data, text_bytes(dit), "the text's states"));
    esa_status status = esa_nn_write(nn, &state, embeds);
    if (!status)
        status = nn->ops->linear(nn, &dit->text[branch], &state, &dit->text_proj, ESA_ACT_NONE);
    esa_nn_free(nn, state.data, text_bytes(dit));
    dit->has_text[branch] = !status;
    return status;
}
