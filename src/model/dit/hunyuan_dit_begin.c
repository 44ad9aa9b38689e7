/* hunyuan_dit_begin.c - prepares one video: the order of tokens, rotations, memory for activations,
 * and the text of each branch.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>
#include "model/dit/hunyuan_dit_internal.h"
#include "session/session.h"

#define MAX_TEXT 65536

static void drop_text(esa_hunyuan_dit *dit, hunyuan_text *t)
{
    esa_nn_free(dit->nn, t->room, t->room_bytes);
    *t = (hunyuan_text){ 0 };
}

void esa_hunyuan_dit_end(esa_hunyuan_dit *dit)
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
    memset(dit->prepared, 0, sizeof dit->prepared);
}

/* ---------------------------------------------------------------- layout */

esa_status esa_hunyuan_dit_layout(const esa_hunyuan_dit *dit, const int32_t latent[3],
                                  esa_layout *layout, int32_t selector, int32_t mode)
{
    int64_t tokens;
    ESA_TRY(esa_dit_check_size(dit->nn->ctx, latent, dit->config.patch, &tokens));
    for (int32_t i = 0; i < 3; i++)
        layout->grid_q[i] = layout->grid_k[i] = latent[i] / dit->config.patch[i];
    if (layout->text_back_q < 1 || layout->text_back_q > MAX_TEXT)
        return esa_fail(dit->nn->ctx, ESA_ERR_ARGUMENT, "the text has %lld rows, expected 1 .. %d",
                        (long long)layout->text_back_q, MAX_TEXT);
    tokens += layout->text_back_q;
    layout->text_front_q = layout->text_front_k = 0;
    layout->text_back_k = layout->text_back_q;
    ESA_TRY(esa_layout_resolve(dit->nn->ctx, layout, layout, tokens, tokens, selector, mode, 0));
    /* Adaptive orders differ between heads and layers, so the calls apply them. */
    layout->order_applied = layout->order != ESA_ORDER_ADAPTIVE;
    return ESA_OK;
}

/* ---------------------------------------------------------------- memory */

/* Places all buffers; only counts their size if carve->base is NULL. */
static void place(esa_hunyuan_dit *dit, esa_carve *carve, int32_t moved)
{
    const esa_hunyuan_config *c = &dit->config;
    const int32_t type = dit->nn->ops->dtype, f32 = ESA_DTYPE_F32;
    const int64_t N = dit->tokens, S = N + dit->text_rows, d = dit->d, half = c->head_dim / 2;
    const int64_t volume = (int64_t)c->patch[0] * c->patch[1] * c->patch[2];
    const int64_t widest = esa_max64(ESA_HUNYUAN_WIDE * d, c->ffn);
    dit->x = esa_nn_take(dit->nn, carve, type, S, d);
    dit->a = esa_nn_take(dit->nn, carve, type, S, d);
    dit->wide = esa_nn_take(dit->nn, carve, type, S, d + widest);
    if (dit->nn->ops->joined) {
        dit->a.scale = esa_carve_take(carve, S * 4);
        dit->wide.scale = esa_carve_take(carve, S * 4);
    }
    const esa_view patches = esa_nn_take(dit->nn, carve, f32, N,
                                         volume * esa_max64(c->in_channels, c->out_channels));
    dit->patch_in = esa_view_of(patches.data, type, dit->x.device, N, volume * c->in_channels);
    dit->patch_out = esa_view_of(patches.data, f32, dit->x.device, N, volume * c->out_channels);
    esa_view *const vector[4] = { &dit->sum, &dit->silu, &dit->more, &dit->between };
    for (int32_t i = 0; i < 4; i++) *vector[i] = esa_nn_take(dit->nn, carve, f32, 1, d);
    for (int32_t i = 0; i < 2; i++) {
        dit->e[i] = esa_nn_take(dit->nn, carve, f32, 1, 6 * d);
        dit->sinusoid[i] = esa_nn_take(dit->nn, carve, f32, 1, ESA_HUNYUAN_WAVE);
    }
    dit->cos = esa_carve_take(carve, N * half * 4);
    dit->sin = esa_carve_take(carve, N * half * 4);
    dit->perm = moved ? esa_carve_take(carve, N * 4) : NULL;
}

/* Makes the order of tokens and the rotations in host memory, and copies them to the device. */
static esa_status make_tables(esa_hunyuan_dit *dit, const esa_layout *layout, int32_t mode)
{
    esa_nn *nn = dit->nn;
    const int64_t N = dit->tokens, table = N * (dit->config.head_dim / 2) * 4;
    /* esa_order_build gives the order of all rows; text stays where it is, behind the video. */
    const int64_t order = dit->perm ? (N + dit->text_rows) * 4 : 0, bytes = 2 * table + order;
    float *cos = esa_mem_alloc(&nn->ctx->mem, bytes);
    if (!cos) return esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for the rotations");
    float *sin = cos + table / 4;
    int32_t *perm = order ? (int32_t *)(sin + table / 4) : NULL;
    if (perm) esa_order_build(perm, N + dit->text_rows, layout, 0, mode);
    esa_rope_axes(cos, sin, dit->grid, perm, dit->config.axis, dit->config.theta);
    esa_status status = esa_nn_upload(nn, dit->cos, cos, table);
    if (!status) status = esa_nn_upload(nn, dit->sin, sin, table);
    if (!status && perm) status = esa_nn_upload(nn, dit->perm, perm, N * 4);
    esa_mem_free(&nn->ctx->mem, cos, bytes);
    return status;
}

void esa_hunyuan_dit_set_room(esa_hunyuan_dit *dit, const esa_dit_room *room)
{
    dit->room_known = room != NULL;
    dit->given = room ? *room : (esa_dit_room){ 0 };
}

int64_t esa_hunyuan_dit_bytes(const esa_hunyuan_dit *dit) { return dit->room_bytes; }

/* Places the text of a branch; only counts its size if carve->base is NULL. */
static void place_text(const esa_hunyuan_dit *dit, hunyuan_text *t, esa_carve *carve)
{
    const esa_hunyuan_config *c = &dit->config;
    t->states = esa_nn_take(dit->nn, carve, dit->nn->ops->dtype, dit->text_rows, c->text_dim);
    t->mean = esa_nn_take(dit->nn, carve, ESA_DTYPE_F32, 1, c->text_dim);
    t->pooled = esa_nn_take(dit->nn, carve, ESA_DTYPE_F32, 1, c->pooled_dim);
    t->key = esa_carve_take(carve, 4 * dit->text_rows);
    t->length = esa_carve_take(carve, 4);
}

/* The texts of all branches, with what alignment adds. */
static int64_t text_bytes(const esa_hunyuan_dit *dit, int32_t branches)
{
    hunyuan_text text;
    esa_carve carve = { 0 };
    place_text(dit, &text, &carve);
    return branches * (carve.used + 1024);
}

/* ---------------------------------------------------------------- one video */

esa_status esa_hunyuan_dit_begin(esa_hunyuan_dit *dit, const int32_t latent[3], esa_layout *layout,
                                 int32_t selector, int32_t mode, int32_t branches)
{
    esa_ctx *ctx = dit->nn->ctx;
    esa_hunyuan_dit_end(dit);
    ESA_TRY(esa_hunyuan_dit_layout(dit, latent, layout, selector, mode));
    if (branches < 1 || branches > 16)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "branches is %d, expected 1 to 16", branches);
    dit->tokens = 1;
    for (int32_t i = 0; i < 3; i++) {
        dit->latent[i] = latent[i];
        dit->grid[i] = layout->grid_q[i];
        dit->tokens *= dit->grid[i];
    }
    dit->text_rows = layout->text_back_q;
    const int32_t moved = layout->order_applied && !esa_order_is_identity(layout, 0, mode);
    esa_carve carve = { 0 };
    place(dit, &carve, moved);
    ESA_TRY(esa_dit_leave_room(dit->nn, dit->store, dit->room_known ? &dit->given : NULL,
                               carve.used + text_bytes(dit, branches),
                               (dit->tokens + dit->text_rows) * dit->d, !layout->order_applied));
    ESA_TRY(esa_nn_alloc(dit->nn, &dit->room, carve.used, "the transformer's activations"));
    dit->room_bytes = carve.used;
    carve = (esa_carve){ .base = dit->room };
    place(dit, &carve, moved);
    ESA_TRY(make_tables(dit, layout, mode));
    dit->text = esa_mem_zalloc(&ctx->mem, branches * (int64_t)sizeof *dit->text);
    if (!dit->text)
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the transformer's text");
    dit->branches = branches;
    return ESA_OK;
}

/* room: [T][text_dim] in host memory. */
static esa_status write_text(esa_hunyuan_dit *dit, const hunyuan_text *t, const esa_text *text,
                             float *room)
{
    esa_nn *nn = dit->nn;
    const int64_t width = dit->config.text_dim, T = dit->text_rows;
    const int32_t length = (int32_t)(dit->tokens + text->valid);
    memset(room, 0, (size_t)(T * width) * 4);
    memcpy(room, text->data, (size_t)(text->rows * width) * 4);
    ESA_TRY(esa_nn_write(nn, &t->states, room));
    for (int64_t c = 0; c < width; c++) {
        double sum = 0;
        for (int64_t r = 0; r < text->valid; r++) sum += (double)text->data[r * width + c];
        room[c] = (float)(sum / (double)text->valid);
    }
    ESA_TRY(esa_nn_write(nn, &t->mean, room));
    ESA_TRY(esa_nn_write(nn, &t->pooled, text->pooled));
    for (int64_t r = 0; r < T; r++) room[r] = r < text->valid ? 0.0f : -INFINITY;
    ESA_TRY(esa_nn_upload(nn, t->key, room, 4 * T));
    return esa_nn_upload(nn, t->length, &length, 4);
}

static esa_status make_text(esa_hunyuan_dit *dit, hunyuan_text *t, const esa_text *text)
{
    const esa_allocator *mem = &dit->nn->ctx->mem;
    esa_carve carve = { 0 };
    place_text(dit, t, &carve);
    ESA_TRY(esa_nn_alloc(dit->nn, &t->room, carve.used, "the text's states"));
    t->room_bytes = carve.used;
    carve = (esa_carve){ .base = t->room };
    place_text(dit, t, &carve);
    const int64_t bytes = 4 * dit->text_rows * esa_max64(dit->config.text_dim, 1);
    float *room = esa_mem_alloc(mem, bytes);
    if (!room) return esa_fail(dit->nn->ctx, ESA_ERR_MEMORY, "out of memory for the text's states");
    const esa_status status = write_text(dit, t, text, room);
    esa_mem_free(mem, room, bytes);
    return status;
}

esa_status esa_hunyuan_dit_text(esa_hunyuan_dit *dit, int32_t branch, const esa_text *text)
{
    if (branch < 0 || branch >= dit->branches || text->valid < 1 || text->rows < text->valid ||
        text->rows > dit->text_rows || !text->pooled)
        return esa_fail(dit->nn->ctx, ESA_ERR_ARGUMENT,
                        "text of %lld rows, %lld of them of the prompt, for branch %d, expected 1 "
                        ".. %lld rows and branch 0 .. %d",
                        (long long)text->rows, (long long)text->valid, branch,
                        (long long)dit->text_rows, dit->branches - 1);
    hunyuan_text *t = &dit->text[branch];
    drop_text(dit, t);
    const esa_status status = make_text(dit, t, text);
    if (status) drop_text(dit, t);
    return status;
}
