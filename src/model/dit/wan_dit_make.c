/* wan_dit_make.c - Wan's transformer: the table of its functions, its tensors, and what one video
 * needs: positions, memory for activations, the text of each branch.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/dit/wan_dit.h"

#include <math.h>
#include <string.h>

#define THETA     10000.0
#define TEXT_ROWS 512 /* of text that is not known, as many as diffusers takes */

enum { IMAGE = 1, CROSS_NORM = 2 }; /* sizes.have */

/* Tensors that diffusers keeps in f32 when the rest is bf16 (time embedder, tables, norms) are held
 * in f32 here too. */
#define AT(field) offsetof(esa_wan_dit, field)
static const esa_row rows[] = {
    { ESA_ROW_LINEAR, AT(patch), "patch_embedding", "d,c,t,h,w", 0, 0 },
    { ESA_ROW_LINEAR, AT(time1), "condition_embedder.time_embedder.linear_1", "d,q", ESA_WANT_F32,
      0 },
    { ESA_ROW_LINEAR, AT(time2), "condition_embedder.time_embedder.linear_2", "d,d", ESA_WANT_F32,
      0 },
    { ESA_ROW_LINEAR, AT(time_proj), "condition_embedder.time_proj", "6d,d", 0, 0 },
    { ESA_ROW_LINEAR, AT(text1), "condition_embedder.text_embedder.linear_1", "d,x", 0, 0 },
    { ESA_ROW_LINEAR, AT(text2), "condition_embedder.text_embedder.linear_2", "d,d", 0, 0 },
    { ESA_ROW_NORM, AT(image.norm1_weight), "condition_embedder.image_embedder.norm1", "i", 0,
      IMAGE },
    { ESA_ROW_LINEAR, AT(image.up), "condition_embedder.image_embedder.ff.net.0.proj", "i,i", 0,
      IMAGE },
    { ESA_ROW_LINEAR, AT(image.down), "condition_embedder.image_embedder.ff.net.2", "d,i", 0,
      IMAGE },
    { ESA_ROW_NORM, AT(image.norm2_weight), "condition_embedder.image_embedder.norm2", "d", 0,
      IMAGE },
    { ESA_ROW_LINEAR, AT(proj_out), "proj_out", "vo,d", 0, 0 },
    { ESA_ROW_TENSOR, AT(table), "scale_shift_table", "1,2,d", ESA_WANT_F32, 0 },
};
#undef AT
#define AT(field) offsetof(wan_block, field)
/* In group 0, because the norm at the end of a block uses the table of the next. */
static const esa_row tables[] = {
    { ESA_ROW_TENSOR, AT(table), "scale_shift_table", "1,6,d", ESA_WANT_F32, 0 },
};
/* q, k and v of self-attention are one matrix on devices that can use it. The keys and values of
 * the text are made once, so they stay as they are. */
static const esa_row block_rows[] = {
    { ESA_ROW_QKV, AT(self.q), "attn1.to_*", "d,d", ESA_WANT_F8 | ESA_WANT_JOIN, 0 },
    { ESA_ROW_QKV_BIAS, AT(self.q), "attn1.to_*", "d", ESA_WANT_JOIN, 0 },
    { ESA_ROW_LINEAR, AT(self.out), "attn1.to_out.0", "d,d", ESA_WANT_F8, 0 },
    { ESA_ROW_TENSOR, AT(self.norm_q), "attn1.norm_q.weight", "d", ESA_WANT_F32, 0 },
    { ESA_ROW_TENSOR, AT(self.norm_k), "attn1.norm_k.weight", "d", ESA_WANT_F32, 0 },
    { ESA_ROW_LINEAR, AT(cross.q), "attn2.to_q", "d,d", ESA_WANT_F8, 0 },
    { ESA_ROW_LINEAR, AT(cross.k), "attn2.to_k", "d,d", 0, 0 },
    { ESA_ROW_LINEAR, AT(cross.v), "attn2.to_v", "d,d", 0, 0 },
    { ESA_ROW_LINEAR, AT(cross.out), "attn2.to_out.0", "d,d", ESA_WANT_F8, 0 },
    { ESA_ROW_TENSOR, AT(cross.norm_q), "attn2.norm_q.weight", "d", ESA_WANT_F32, 0 },
    { ESA_ROW_TENSOR, AT(cross.norm_k), "attn2.norm_k.weight", "d", ESA_WANT_F32, 0 },
    { ESA_ROW_LINEAR, AT(cross.image_k), "attn2.add_k_proj", "d,d", 0, IMAGE },
    { ESA_ROW_LINEAR, AT(cross.image_v), "attn2.add_v_proj", "d,d", 0, IMAGE },
    { ESA_ROW_TENSOR, AT(cross.norm_image_k), "attn2.norm_added_k.weight", "d", ESA_WANT_F32,
      IMAGE },
    { ESA_ROW_NORM, AT(norm2_weight), "norm2", "d", 0, CROSS_NORM },
    { ESA_ROW_LINEAR, AT(up), "ffn.net.0.proj", "f,d", ESA_WANT_F8, 0 },
    { ESA_ROW_LINEAR, AT(down), "ffn.net.2", "d,f", ESA_WANT_F8, 0 },
};

static esa_status make(esa_dit *dit, const void *config)
{
    esa_wan_dit *wan = (esa_wan_dit *)dit;
    const esa_wan_config *c = config;
    wan->config = *c;
    dit->heads = c->heads;
    dit->head_dim = c->head_dim;
    dit->blocks = c->layers;
    dit->in_channels = c->in_channels;
    dit->out_channels = c->out_channels;
    for (int32_t i = 0; i < 3; i++) dit->patch[i] = c->patch[i];
    dit->sizes = (esa_sizes){ .letter = { ['f'] = c->ffn,
                                          ['x'] = c->text_dim,
                                          ['q'] = c->freq_dim,
                                          ['i'] = c->image_dim },
                              .have = (c->image_dim ? IMAGE : 0) |
                                      (c->cross_norm ? CROSS_NORM : 0) };
    ESA_TRY(esa_part_array(&dit->part, (void **)&wan->block, c->layers, sizeof *wan->block));
    return esa_part_array(&dit->part, (void **)&wan->wave, c->freq_dim, sizeof *wan->wave);
}

static void want(esa_dit *dit)
{
    esa_wan_dit *wan = (esa_wan_dit *)dit;
    for (int32_t i = 0; i < dit->blocks; i++)
        esa_rows_want(dit->part.weights, ESA_ROWS(tables), &wan->block[i], &dit->sizes,
                      "blocks.%d.", i);
}

static void want_block(esa_dit *dit, int32_t i)
{
    esa_rows_want(dit->part.weights, ESA_ROWS(block_rows), &((esa_wan_dit *)dit)->block[i],
                  &dit->sizes, "blocks.%d.", i);
}

/* ---------------------------------------------------------------- one video */

static void drop_text(esa_wan_dit *wan, wan_text *t)
{
    esa_nn_free(wan->dit.nn, t->kv.data, t->kv_bytes);
    esa_nn_free(wan->dit.nn, t->bias, t->bias_bytes);
    *t = (wan_text){ 0 };
}

static void end(esa_dit *dit)
{
    esa_wan_dit *wan = (esa_wan_dit *)dit;
    for (int32_t i = 0; i < ESA_DIT_BRANCHES; i++) drop_text(wan, &wan->text[i]);
    drop_text(wan, &wan->picture);
    memset(wan->prepared, 0, sizeof wan->prepared);
}

static esa_status check(const esa_dit *dit, const int32_t latent[3])
{
    static const char *const side[3] = { "frames", "height", "width" };
    const int64_t most = ((const esa_wan_dit *)dit)->config.rope_max;
    for (int32_t i = 0; i < 3; i++)
        if (latent[i] / dit->patch[i] > most)
            return esa_fail(dit->nn->ctx, ESA_ERR_ARGUMENT,
                            "the latents have %d %s, but this model has positions for %lld",
                            latent[i], side[i], (long long)most * dit->patch[i]);
    return ESA_OK;
}

static void place(esa_dit *dit, esa_carve *carve)
{
    esa_wan_dit *wan = (esa_wan_dit *)dit;
    const esa_wan_config *c = &wan->config;
    const int32_t f32 = ESA_DTYPE_F32;
    const int64_t d = dit->d, area = (int64_t)c->patch[0] * c->patch[1] * c->patch[2];
    esa_dit_place_layers(dit, carve, c->ffn);
    wan->temb = esa_nn_take(dit->nn, carve, f32, 1, d);
    wan->silu = esa_nn_take(dit->nn, carve, f32, 1, d);
    wan->proj = esa_nn_take(dit->nn, carve, f32, 1, 6 * d);
    wan->sinusoid = esa_nn_take(dit->nn, carve, f32, 1, c->freq_dim);
    for (int32_t i = 0; i < 2; i++) wan->e[i] = esa_carve_take(carve, 6 * d * 4);
    esa_dit_place_turns(dit, carve, dit->tokens);
    wan->input = c->in_channels > c->out_channels
                     ? esa_carve_take(carve, 4 * dit->tokens * area * c->in_channels)
                     : NULL;
}

static esa_status positions(esa_dit *dit, float *host, const int32_t *perm)
{
    esa_rope_table(host, host + dit->host_floats / 2, dit->grid, perm, dit->head_dim, THETA);
    return esa_dit_write_turns(dit, host);
}

/* ---------------------------------------------------------------- text */

/* Keys, values, bias and states of the text of all branches, with what alignment adds. */
static int64_t text_bytes(const esa_dit *dit, int32_t branches)
{
    const int64_t element = esa_view_element(dit->nn->ops->dtype), d = dit->d,
                  kept = dit->blocks * 2 * d * element + 4,
                  states = (((const esa_wan_dit *)dit)->config.text_dim + 2 * d) * element,
                  rows = dit->given.text_rows ? dit->given.text_rows
                                              : branches * (int64_t)TEXT_ROWS;
    return rows * (kept + states) + branches * INT64_C(1024);
}

/* embeds[R] becomes keys and values of every layer. state: [R][text_dim], [R][d], [R][d]. */
static esa_status text_states(esa_wan_dit *wan, const wan_text *t, const float *embeds,
                              const esa_view state[3])
{
    esa_nn *nn = wan->dit.nn;
    const esa_nn_ops *op = nn->ops;
    const int64_t R = t->rows;
    ESA_TRY(esa_nn_write(nn, &state[0], embeds));
    ESA_TRY(op->linear(nn, &state[1], &state[0], &wan->text1, ESA_ACT_GELU_TANH));
    ESA_TRY(op->linear(nn, &state[2], &state[1], &wan->text2, ESA_ACT_NONE));
    for (int32_t i = 0; i < wan->config.layers; i++) {
        const wan_attn *a = &wan->block[i].cross;
        const esa_view k = esa_view_rows(t->kv, 2 * i * R, R),
                       v = esa_view_rows(t->kv, (2 * i + 1) * R, R);
        ESA_TRY(
            esa_store_begin(wan->dit.part.store, 1 + i)); /* from here on views point to weights */
        const esa_qk_args norm = { .q = k,
                                   .q_weight = a->norm_k.data,
                                   .D = wan->config.head_dim,
                                   .eps = (float)wan->config.eps };
        if (i < 2) ESA_TRY(esa_dit_measure(&wan->dit, i, &wan->block[i].self.q, &wan->prepared[i]));
        ESA_TRY(op->linear(nn, &k, &state[2], &a->k, ESA_ACT_NONE));
        ESA_TRY(op->linear(nn, &v, &state[2], &a->v, ESA_ACT_NONE));
        ESA_TRY(op->qk(nn, &norm));
        ESA_TRY(esa_store_end(wan->dit.part.store, 1 + i));
    }
    return ESA_OK;
}

/* The weights of the folded rows: the last stands for `same` rows. */
static esa_status text_bias(esa_wan_dit *wan, wan_text *t, int64_t same)
{
    const esa_allocator *mem = &wan->dit.nn->ctx->mem;
    t->bias_bytes = t->rows * 4;
    ESA_TRY(esa_nn_alloc(wan->dit.nn, (void **)&t->bias, t->bias_bytes, "the text's weights"));
    float *bias = esa_mem_zalloc(mem, t->bias_bytes);
    if (!bias)
        return esa_fail(wan->dit.nn->ctx, ESA_ERR_MEMORY, "out of memory for the text's weights");
    bias[t->rows - 1] = (float)log((double)same);
    const esa_status status = esa_nn_upload(wan->dit.nn, t->bias, bias, t->bias_bytes);
    esa_mem_free(mem, bias, t->bias_bytes);
    return status;
}

/* same: how many equal rows the last one stands for. */
static esa_status make_text(esa_wan_dit *wan, wan_text *t, const float *embeds, int64_t same)
{
    const int32_t type = wan->dit.nn->ops->dtype;
    const int64_t R = t->rows, d = wan->dit.d, all = esa_size_mul(2 * wan->config.layers, R);
    const int64_t width[3] = { wan->config.text_dim, d, d };
    esa_view state[3];
    esa_carve carve = { 0 };
    void *room = NULL;
    t->kv = esa_view_of(NULL, type, wan->dit.x.device, all, d);
    t->kv_bytes = esa_size_mul(esa_size_mul(all, d), esa_view_element(type));
    ESA_TRY(esa_nn_alloc(wan->dit.nn, &t->kv.data, t->kv_bytes, "the text's keys and values"));
    ESA_TRY(text_bias(wan, t, same));
    for (int32_t pass = 0; pass < 2; pass++) {
        carve = (esa_carve){ .base = room };
        for (int32_t i = 0; i < 3; i++)
            state[i] = esa_nn_take(wan->dit.nn, &carve, type, R, width[i]);
        if (pass == 0) ESA_TRY(esa_nn_alloc(wan->dit.nn, &room, carve.used, "the text's states"));
    }
    const esa_status status = text_states(wan, t, embeds, state);
    esa_nn_free(wan->dit.nn, room, carve.used);
    return status;
}

/* Equal rows at the end are folded into one that counts as many. */
static int64_t text_rows(const esa_dit *dit, const esa_text *text)
{
    const int64_t width = ((const esa_wan_dit *)dit)->config.text_dim, rows = text->rows;
    const float *last = text->data + (rows - 1) * width;
    int64_t same = 1;
    while (same < rows && memcmp(last - same * width, last, (size_t)width * 4) == 0) same++;
    return rows - same + 1;
}

/* All rows are attended, padding included, as in diffusers. */
static esa_status set_text(esa_dit *dit, int32_t branch, const esa_text *text)
{
    esa_wan_dit *wan = (esa_wan_dit *)dit;
    wan_text *t = &wan->text[branch];
    drop_text(wan, t);
    t->rows = text_rows(dit, text);
    const esa_status status = make_text(wan, t, text->data, text->rows - t->rows + 1);
    if (status) drop_text(wan, t);
    return status;
}

/* ---------------------------------------------------------------- the table */

const esa_dit_kind esa_wan_dit_kind = { .bytes = sizeof(esa_wan_dit),
                                        .config_bytes = sizeof(esa_wan_config),
                                        .text_place = ESA_TEXT_APART,
                                        .naming = &esa_wan_original,
                                        .rows = rows,
                                        .row_count = (int32_t)(sizeof rows / sizeof rows[0]),
                                        .recognise = esa_wan_recognise,
                                        .make = make,
                                        .want = want,
                                        .want_block = want_block,
                                        .check = check,
                                        .place = place,
                                        .positions = positions,
                                        .text_bytes = text_bytes,
                                        .text_rows = text_rows,
                                        .text = set_text,
                                        .image = esa_wan_image,
                                        .end = end,
                                        .before = esa_wan_before,
                                        .block = esa_wan_block,
                                        .after = esa_wan_after,
                                        .prepare = esa_wan_prepare };
