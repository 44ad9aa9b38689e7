/* dit_begin.c - prepares one video: its layout, the order of tokens, memory for activations,
 * positions.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/dit/dit_kind.h"

#include <string.h>
#include "session/session.h"

#define MAX_TOKENS (INT64_C(1) << 26) /* 67 million: sizes computed from them fit in 64 bits */
#define MAX_SIDE   (1 << 20)
#define MAX_TEXT   65536

void esa_dit_set_room(esa_dit *dit, const esa_dit_room *room)
{
    dit->room_known = room != NULL;
    dit->given = room ? *room : (esa_dit_room){ 0 };
}

int64_t esa_dit_bytes(const esa_dit *dit) { return dit->room_bytes; }

void esa_dit_end(esa_dit *dit)
{
    if (dit->kind->end) dit->kind->end(dit);
    dit->branches = 0;
    dit->texts = 0;
    esa_nn_free(dit->nn, dit->room, dit->room_bytes);
    dit->room = NULL;
    dit->room_bytes = 0;
    dit->tokens = dit->text_rows = dit->rows = 0;
}

/* ---------------------------------------------------------------- layout */

static esa_status check_size(const esa_dit *dit, const int32_t latent[3], int64_t *tokens)
{
    static const char *const side[3] = { "frames", "height", "width" };
    esa_ctx *ctx = dit->nn->ctx;
    *tokens = 1;
    for (int32_t i = 0; i < 3; i++) {
        const int32_t patch = dit->patch[i];
        if (latent[i] < patch || latent[i] % patch)
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "the latents have %d %s, expected a multiple of %d (the patch)",
                            latent[i], side[i], patch);
        if (latent[i] > MAX_SIDE)
            return esa_fail(ctx, ESA_ERR_ARGUMENT, "the latents have %d %s, expected at most %d",
                            latent[i], side[i], MAX_SIDE);
        *tokens *= latent[i] / patch; /* at most 2^60 */
    }
    if (*tokens > MAX_TOKENS)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "the video has %lld tokens, expected at most %lld",
                        (long long)*tokens, (long long)MAX_TOKENS);
    return ESA_OK;
}

/* Leaves the text only where the kind has it. */
static esa_status set_text(const esa_dit *dit, esa_layout *layout)
{
    const int32_t place = dit->kind->text_place,
                  rows = place == ESA_TEXT_FRONT ? layout->text_front_q : layout->text_back_q;
    layout->text_front_q = layout->text_back_q = 0;
    if (place == ESA_TEXT_FRONT) layout->text_front_q = rows;
    if (place == ESA_TEXT_BACK) layout->text_back_q = rows;
    layout->text_front_k = layout->text_front_q;
    layout->text_back_k = layout->text_back_q;
    if (place == ESA_TEXT_APART || (rows >= 1 && rows <= MAX_TEXT)) return ESA_OK;
    return esa_fail(dit->nn->ctx, ESA_ERR_ARGUMENT,
                    "the layout has %d rows of text, expected 1 .. %d", rows, MAX_TEXT);
}

esa_status esa_dit_layout(const esa_dit *dit, const int32_t latent[3], esa_layout *layout,
                          int32_t selector, int32_t mode)
{
    int64_t rows;
    ESA_TRY(check_size(dit, latent, &rows));
    if (dit->kind->check) ESA_TRY(dit->kind->check(dit, latent));
    for (int32_t i = 0; i < 3; i++)
        layout->grid_q[i] = layout->grid_k[i] = latent[i] / dit->patch[i];
    ESA_TRY(set_text(dit, layout));
    rows += layout->text_front_q + layout->text_back_q;
    ESA_TRY(esa_layout_resolve(dit->nn->ctx, layout, layout, rows, rows, selector, mode, 0));
    /* Adaptive orders differ between heads and layers, and the tiles of the compat modes put text
     * in front behind the video: the calls apply these. */
    const int32_t text_moves = dit->kind->text_place == ESA_TEXT_FRONT &&
                               layout->order == ESA_ORDER_TILE && mode != ESA_MODE_FIXED;
    layout->order_applied = layout->order != ESA_ORDER_ADAPTIVE && !text_moves;
    return ESA_OK;
}

/* ---------------------------------------------------------------- memory */

/* What a caller that said nothing will need: attention and selection take less than three
 * activations, adaptive orders three more. */
static int64_t guess_scratch(const esa_dit *dit, int32_t adaptive)
{
    const esa_backend *be = dit->nn->be;
    return (adaptive ? 6 : 3) * dit->rows * dit->d * esa_view_element(dit->nn->ops->dtype) +
           (be->products ? be->products->workspace(dit->nn->ctx) : 0);
}

/* Makes the weights leave room for `during` bytes of activations and text, and for all that comes
 * beside and after them. */
static esa_status leave_room(esa_dit *dit, int64_t during, int32_t adaptive)
{
    const esa_dit_room *given = &dit->given;
    if (!dit->room_known)
        return esa_store_leave(dit->part.store, during, guess_scratch(dit, adaptive));
    return esa_store_leave(dit->part.store, esa_max64(during + given->beside, given->after),
                           given->scratch);
}

/* Places all buffers; only counts their size if carve->base is NULL. */
static void place(esa_dit *dit, esa_carve *carve, int32_t moved)
{
    esa_nn *nn = dit->nn;
    const int32_t type = nn->ops->dtype, f32 = ESA_DTYPE_F32;
    const int64_t N = dit->tokens, in = dit->in_channels, out = dit->out_channels,
                  volume = (int64_t)dit->patch[0] * dit->patch[1] * dit->patch[2];
    dit->x = esa_nn_take(nn, carve, type, dit->rows, dit->d);
    dit->a = esa_nn_take(nn, carve, type, dit->rows, dit->d);
    const esa_view patches = esa_nn_take(nn, carve, f32, N, volume * esa_max64(in, out));
    dit->patch_in = esa_view_of(patches.data, type, dit->x.device, N, volume * in);
    dit->patch_out = esa_view_of(patches.data, f32, dit->x.device, N, volume * out);
    dit->kind->place(dit, carve);
    dit->perm = moved ? esa_carve_take(carve, N * 4) : NULL;
}

/* ---------------------------------------------------------------- positions */

/* The video's part of the order, counted from its first token. order: room for [S]. */
static void video_order(const esa_dit *dit, int32_t *order, const esa_layout *layout, int32_t mode)
{
    const int32_t first = layout->text_front_q;
    esa_order_build(order, dit->rows, layout, 0, mode);
    for (int64_t i = 0; i < dit->tokens; i++) order[i] = order[first + i] - first;
}

static esa_status write_positions(esa_dit *dit, float *host, int32_t *order,
                                  const esa_layout *layout, int32_t mode)
{
    if (!dit->perm) return dit->kind->positions(dit, host, NULL);
    video_order(dit, order, layout, mode);
    ESA_TRY(esa_nn_upload(dit->nn, dit->perm, order, dit->tokens * 4));
    return dit->kind->positions(dit, host, order);
}

static esa_status make_positions(esa_dit *dit, const esa_layout *layout, int32_t mode)
{
    esa_ctx *ctx = dit->nn->ctx;
    const int64_t bytes = 4 * (dit->host_floats + dit->rows);
    float *host = esa_mem_alloc(&ctx->mem, bytes);
    if (!host) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the positions");
    const esa_status status = write_positions(dit, host, (int32_t *)(host + dit->host_floats),
                                              layout, mode);
    esa_mem_free(&ctx->mem, host, bytes);
    return status;
}

/* ---------------------------------------------------------------- one video */

static esa_status make_room(esa_dit *dit, const esa_layout *layout, int32_t mode, int32_t branches)
{
    const int32_t moved = layout->order_applied && !esa_order_is_identity(layout, 0, mode);
    esa_carve carve = { 0 };
    place(dit, &carve, moved);
    ESA_TRY(
        leave_room(dit, carve.used + dit->kind->text_bytes(dit, branches), !layout->order_applied));
    ESA_TRY(esa_nn_alloc(dit->nn, &dit->room, carve.used, "the transformer's activations"));
    dit->room_bytes = carve.used;
    carve = (esa_carve){ .base = dit->room };
    place(dit, &carve, moved);
    return make_positions(dit, layout, mode);
}

esa_status esa_dit_begin(esa_dit *dit, const int32_t latent[3], esa_layout *layout,
                         int32_t selector, int32_t mode, int32_t branches)
{
    esa_dit_end(dit);
    ESA_TRY(esa_dit_layout(dit, latent, layout, selector, mode));
    if (branches < 1 || branches > ESA_DIT_BRANCHES)
        return esa_fail(dit->nn->ctx, ESA_ERR_ARGUMENT, "branches is %d, expected 1 to %d",
                        branches, ESA_DIT_BRANCHES);
    dit->tokens = 1;
    for (int32_t i = 0; i < 3; i++) {
        dit->latent[i] = latent[i];
        dit->grid[i] = layout->grid_q[i];
        dit->tokens *= dit->grid[i];
    }
    dit->text_rows = layout->text_front_q + layout->text_back_q;
    dit->rows = dit->text_rows + dit->tokens;
    dit->branches = branches;
    const esa_status status = make_room(dit, layout, mode, branches);
    if (status) esa_dit_end(dit);
    return status;
}
