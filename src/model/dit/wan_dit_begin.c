/* wan_dit_begin.c - prepares one video: the order of tokens, rotations, memory for activations, and
 * the text of each branch.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/dit/wan_dit_internal.h"

#include <math.h>
#include <string.h>
#include "session/session.h"

/* bytes of the feed-forward's hidden layer; longer sequences run in pieces of this size */
#define HIDDEN_BYTES (INT64_C(64) << 20)
#define MIN_FF_ROWS  512
#define THETA        10000.0

static void drop_text(esa_wan_dit *dit, wan_text *t)
{
    esa_nn_free(dit->nn, t->kv.data, t->kv_bytes);
    esa_nn_free(dit->nn, t->bias, t->bias_bytes);
    *t = (wan_text){ 0 };
}

void esa_wan_dit_end(esa_wan_dit *dit)
{
    for (int32_t i = 0; i < dit->branches; i++) drop_text(dit, &dit->text[i]);
    if (dit->text)
        esa_mem_free(&dit->nn->ctx->mem, dit->text, dit->branches * (int64_t)sizeof *dit->text);
    dit->text = NULL;
    drop_text(dit, &dit->picture);
    dit->branches = 0;
    esa_nn_free(dit->nn, dit->room, dit->room_bytes);
    dit->room = NULL;
    dit->room_bytes = 0;
    dit->tokens = 0;
    dit->prepared = 0;
}

/* q, k, v, the output of attention and the hidden layer. */
static void place_layers(esa_wan_dit *dit, esa_carve *carve)
{
    const esa_nn_ops *op = dit->nn->ops;
    const int32_t type = op->dtype;
    const int64_t N = dit->tokens, d = dit->d, ffn = dit->config.ffn;
    if (!op->joined) {
        const int64_t rows = esa_min64(N, esa_max64(MIN_FF_ROWS, HIDDEN_BYTES / 4 / ffn));
        for (int32_t i = 0; i < 3; i++) dit->qkv[i] = esa_nn_take(dit->nn, carve, type, N, d);
        dit->flat = dit->qkv[0];
        dit->more = dit->qkv[1];
        dit->o = dit->a;
        dit->hidden = esa_nn_take(dit->nn, carve, type, rows, ffn);
        return;
    }
    /* The hidden layer takes the place of q, k and v. */
    const esa_view wide = esa_nn_take(dit->nn, carve, type, N, esa_max64(3 * d, ffn));
    const esa_view all = esa_view_of(wide.data, type, wide.device, N, 3 * d);
    for (int32_t i = 0; i < 3; i++) dit->qkv[i] = esa_view_cols(all, i * d, d);
    dit->flat = esa_view_of(wide.data, type, wide.device, N, d);
    dit->more = esa_view_of((char *)wide.data + N * d * esa_view_element(type), type, wide.device,
                            N, d);
    dit->hidden = esa_view_of(wide.data, type, wide.device, N, ffn);
    dit->o = esa_nn_take(dit->nn, carve, type, N, d);
    dit->a.scale = esa_carve_take(carve, N * 4);
    dit->hidden.scale = esa_carve_take(carve, N * 4);
}

/* Places all buffers; only counts their size if carve->base is NULL. */
static void place(esa_wan_dit *dit, esa_carve *carve, int32_t moved)
{
    const esa_wan_config *c = &dit->config;
    const int32_t type = dit->nn->ops->dtype, wide = ESA_DTYPE_F32;
    const int64_t N = dit->tokens, d = dit->d, half = c->head_dim / 2;
    const int64_t volume = (int64_t)c->patch[0] * c->patch[1] * c->patch[2];
    dit->x = esa_nn_take(dit->nn, carve, type, N, d);
    dit->a = esa_nn_take(dit->nn, carve, type, N, d);
    place_layers(dit, carve);
    dit->patch_in = dit->patch_out = esa_nn_take(
        dit->nn, carve, wide, N, volume * esa_max64(c->in_channels, c->out_channels));
    dit->patch_in = esa_view_of(dit->patch_in.data, type, dit->x.device, N,
                                volume * c->in_channels);
    dit->patch_out = esa_view_of(dit->patch_out.data, wide, dit->x.device, N,
                                 volume * c->out_channels);
    dit->temb = esa_nn_take(dit->nn, carve, wide, 1, d);
    dit->silu = esa_nn_take(dit->nn, carve, wide, 1, d);
    dit->proj = esa_nn_take(dit->nn, carve, wide, 1, 6 * d);
    dit->sinusoid = esa_nn_take(dit->nn, carve, wide, 1, c->freq_dim);
    for (int32_t i = 0; i < 2; i++) dit->e[i] = esa_carve_take(carve, 6 * d * 4);
    dit->cos = esa_carve_take(carve, N * half * 4);
    dit->sin = esa_carve_take(carve, N * half * 4);
    dit->perm = moved ? esa_carve_take(carve, N * 4) : NULL;
    dit->input = c->in_channels > c->out_channels
                     ? esa_carve_take(carve, 4 * N * volume * c->in_channels)
                     : NULL;
}

/* Makes the order of tokens and the rotations in host memory, and copies them to the device. */
static esa_status make_tables(esa_wan_dit *dit, const esa_layout *layout, int32_t mode)
{
    esa_nn *nn = dit->nn;
    const int64_t N = dit->tokens, table = N * (dit->config.head_dim / 2) * 4;
    esa_carve carve = { 0 };
    float *cos = NULL, *sin = NULL;
    int32_t *perm = NULL;
    void *host = NULL;
    for (int32_t pass = 0; pass < 2; pass++) {
        carve = (esa_carve){ .base = host };
        cos = esa_carve_take(&carve, table);
        sin = esa_carve_take(&carve, table);
        perm = dit->perm ? esa_carve_take(&carve, N * 4) : NULL;
        if (pass == 0) host = esa_mem_alloc(&nn->ctx->mem, carve.used);
        if (!host) return esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for the rotations");
    }
    if (perm) esa_order_build(perm, N, layout, 0, mode);
    esa_rope_table(cos, sin, dit->grid, perm, dit->config.head_dim, THETA);
    esa_status status = esa_nn_upload(nn, dit->cos, cos, table);
    if (!status) status = esa_nn_upload(nn, dit->sin, sin, table);
    if (!status && perm) status = esa_nn_upload(nn, dit->perm, perm, N * 4);
    esa_mem_free(&nn->ctx->mem, host, carve.used);
    return status;
}

static esa_status check_positions(const esa_wan_dit *dit, const int32_t latent[3])
{
    static const char *const side[3] = { "frames", "height", "width" };
    for (int32_t i = 0; i < 3; i++) {
        const int32_t p = dit->config.patch[i];
        if (latent[i] / p > dit->config.rope_max)
            return esa_fail(dit->nn->ctx, ESA_ERR_ARGUMENT,
                            "the latents have %d %s, but this model has positions for %lld",
                            latent[i], side[i], (long long)dit->config.rope_max * p);
    }
    return ESA_OK;
}

esa_status esa_wan_dit_layout(const esa_wan_dit *dit, const int32_t latent[3], esa_layout *layout,
                              int32_t selector, int32_t mode)
{
    int64_t tokens;
    ESA_TRY(check_positions(dit, latent));
    ESA_TRY(esa_dit_check_size(dit->nn->ctx, latent, dit->config.patch, &tokens));
    for (int32_t i = 0; i < 3; i++)
        layout->grid_q[i] = layout->grid_k[i] = latent[i] / dit->config.patch[i];
    layout->text_front_q = layout->text_back_q = layout->text_front_k = layout->text_back_k = 0;
    ESA_TRY(esa_layout_resolve(dit->nn->ctx, layout, layout, tokens, tokens, selector, mode, 0));
    /* Adaptive orders differ between heads and layers, so the calls apply them. */
    layout->order_applied = layout->order != ESA_ORDER_ADAPTIVE;
    return ESA_OK;
}

/* ---------------------------------------------------------------- room */

void esa_wan_dit_set_room(esa_wan_dit *dit, const esa_dit_room *room)
{
    dit->room_known = room != NULL;
    dit->given = room ? *room : (esa_dit_room){ 0 };
}

int64_t esa_wan_dit_bytes(const esa_wan_dit *dit) { return dit->room_bytes; }
esa_store *esa_wan_dit_store(esa_wan_dit *dit) { return dit->store; }

/* Text that is not known has as many rows as diffusers takes. */
#define TEXT_ROWS 512

/* Keys, values, bias and states of the text of all branches, with what alignment adds. */
static int64_t text_bytes(const esa_wan_dit *dit, int32_t branches)
{
    const int64_t element = esa_view_element(dit->nn->ops->dtype), d = dit->d,
                  kept = dit->config.layers * 2 * d * element + 4,
                  states = (dit->config.text_dim + 2 * d) * element,
                  rows = dit->given.text_rows ? dit->given.text_rows
                                              : branches * (int64_t)TEXT_ROWS;
    return rows * (kept + states) + branches * INT64_C(1024);
}

/* ---------------------------------------------------------------- one video */

esa_status esa_wan_dit_begin(esa_wan_dit *dit, const int32_t latent[3], esa_layout *layout,
                             int32_t selector, int32_t mode, int32_t branches)
{
    esa_ctx *ctx = dit->nn->ctx;
    esa_wan_dit_end(dit);
    ESA_TRY(esa_wan_dit_layout(dit, latent, layout, selector, mode));
    if (branches < 1 || branches > 16)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "branches is %d, expected 1 to 16", branches);
    dit->tokens = 1;
    for (int32_t i = 0; i < 3; i++) {
        dit->latent[i] = latent[i];
        dit->grid[i] = layout->grid_q[i];
        dit->tokens *= dit->grid[i];
    }
    const int32_t moved = layout->order_applied && !esa_order_is_identity(layout, 0, mode);
    esa_carve carve = { 0 };
    place(dit, &carve, moved);
    ESA_TRY(esa_dit_leave_room(dit->nn, dit->store, dit->room_known ? &dit->given : NULL,
                               carve.used + text_bytes(dit, branches), dit->tokens * dit->d,
                               !layout->order_applied));
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

/* embeds[R] becomes keys and values of every layer. state: [R][text_dim], [R][d], [R][d]. */
static esa_status text_states(esa_wan_dit *dit, const wan_text *t, const float *embeds,
                              const esa_view state[3])
{
    esa_nn *nn = dit->nn;
    const esa_nn_ops *op = nn->ops;
    const int64_t R = t->rows;
    ESA_TRY(esa_nn_write(nn, &state[0], embeds));
    ESA_TRY(op->linear(nn, &state[1], &state[0], &dit->text1, ESA_ACT_GELU_TANH));
    ESA_TRY(op->linear(nn, &state[2], &state[1], &dit->text2, ESA_ACT_NONE));
    for (int32_t i = 0; i < dit->config.layers; i++) {
        const wan_attn *a = &dit->block[i].cross;
        const esa_view k = esa_view_rows(t->kv, 2 * i * R, R),
                       v = esa_view_rows(t->kv, (2 * i + 1) * R, R);
        ESA_TRY(esa_store_begin(dit->store, 1 + i)); /* from here on views point to weights */
        const esa_qk_args norm = { .q = k,
                                   .q_weight = a->norm_k.data,
                                   .D = dit->config.head_dim,
                                   .eps = (float)dit->config.eps };
        if (i < 2) ESA_TRY(esa_wan_dit_prepare(dit, i));
        ESA_TRY(op->linear(nn, &k, &state[2], &a->k, ESA_ACT_NONE));
        ESA_TRY(op->linear(nn, &v, &state[2], &a->v, ESA_ACT_NONE));
        ESA_TRY(op->qk(nn, &norm));
        ESA_TRY(esa_store_end(dit->store, 1 + i));
    }
    return ESA_OK;
}

/* The weights of the folded rows: the last stands for `same` rows. */
static esa_status text_bias(esa_wan_dit *dit, wan_text *t, int64_t same)
{
    const esa_allocator *mem = &dit->nn->ctx->mem;
    t->bias_bytes = t->rows * 4;
    ESA_TRY(esa_nn_alloc(dit->nn, (void **)&t->bias, t->bias_bytes, "the text's weights"));
    float *bias = esa_mem_zalloc(mem, t->bias_bytes);
    if (!bias)
        return esa_fail(dit->nn->ctx, ESA_ERR_MEMORY, "out of memory for the text's weights");
    bias[t->rows - 1] = (float)log((double)same);
    const esa_status status = esa_nn_upload(dit->nn, t->bias, bias, t->bias_bytes);
    esa_mem_free(mem, bias, t->bias_bytes);
    return status;
}

/* same: how many equal rows the last one stands for. */
static esa_status make_text(esa_wan_dit *dit, wan_text *t, const float *embeds, int64_t same)
{
    const int32_t type = dit->nn->ops->dtype;
    const int64_t R = t->rows, d = dit->d, all = esa_size_mul(2 * dit->config.layers, R);
    const int64_t width[3] = { dit->config.text_dim, d, d };
    esa_view state[3];
    esa_carve carve = { 0 };
    void *room = NULL;
    t->kv = esa_view_of(NULL, type, dit->x.device, all, d);
    t->kv_bytes = esa_size_mul(esa_size_mul(all, d), esa_view_element(type));
    ESA_TRY(esa_nn_alloc(dit->nn, &t->kv.data, t->kv_bytes, "the text's keys and values"));
    ESA_TRY(text_bias(dit, t, same));
    for (int32_t pass = 0; pass < 2; pass++) {
        carve = (esa_carve){ .base = room };
        for (int32_t i = 0; i < 3; i++) state[i] = esa_nn_take(dit->nn, &carve, type, R, width[i]);
        if (pass == 0) ESA_TRY(esa_nn_alloc(dit->nn, &room, carve.used, "the text's states"));
    }
    const esa_status status = text_states(dit, t, embeds, state);
    esa_nn_free(dit->nn, room, carve.used);
    return status;
}

int64_t esa_wan_dit_text_rows(const esa_wan_dit *dit, const float *embeds, int64_t rows)
{
    const int64_t width = dit->config.text_dim;
    int64_t same = 1;
    while (same < rows && memcmp(embeds + (rows - 1 - same) * width, embeds + (rows - 1) * width,
                                 (size_t)width * 4) == 0)
        same++;
    return rows - same + 1;
}

esa_status esa_wan_dit_text(esa_wan_dit *dit, int32_t branch, const float *embeds, int64_t rows)
{
    if (branch < 0 || branch >= dit->branches || rows < 1 || rows > INT32_MAX)
        return esa_fail(dit->nn->ctx, ESA_ERR_ARGUMENT,
                        "text of %lld rows for branch %d, expected 1 .. %d rows and branch 0 .. %d",
                        (long long)rows, branch, INT32_MAX, dit->branches - 1);
    wan_text *t = &dit->text[branch];
    drop_text(dit, t);
    t->rows = esa_wan_dit_text_rows(dit, embeds, rows);
    const esa_status status = make_text(dit, t, embeds, rows - t->rows + 1);
    if (status) drop_text(dit, t);
    return status;
}
