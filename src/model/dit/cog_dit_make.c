/* cog_dit_make.c - CogVideoX's transformer: the table of its functions, its tensors, and what one
 * video needs: positions, memory for activations, the text of each branch.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/dit/cog_dit.h"

#include <string.h>

enum { ATTENTION_BIAS = 1, PATCH_BIAS = 2 }; /* sizes.have */

#define AT(field) offsetof(esa_cog_dit, field)
static const esa_row rows[] = {
    { ESA_ROW_MATRIX, AT(patch), "patch_embed.proj", "d,c,h,w", 0, 0 },
    { ESA_ROW_TENSOR, AT(patch.bias), "patch_embed.proj.bias", "d", 0, PATCH_BIAS },
    { ESA_ROW_LINEAR, AT(text_proj), "patch_embed.text_proj", "d,x", 0, 0 },
    { ESA_ROW_LINEAR, AT(time1), "time_embedding.linear_1", "E,d", 0, 0 },
    { ESA_ROW_LINEAR, AT(time2), "time_embedding.linear_2", "E,E", 0, 0 },
    { ESA_ROW_NORM, AT(final_norm), "norm_final", "d", 0, 0 },
    { ESA_ROW_LINEAR, AT(norm_out), "norm_out.linear", "2d,E", 0, 0 },
    { ESA_ROW_NORM, AT(out_norm), "norm_out.norm", "d", 0, 0 },
    { ESA_ROW_LINEAR, AT(proj_out), "proj_out", "vo,d", 0, 0 },
};
#undef AT
#define AT(field) offsetof(cog_block, field)
/* q, k and v are one matrix on devices that can use it. */
static const esa_row block_rows[] = {
    { ESA_ROW_LINEAR, AT(norm[0].layer), "norm1.linear", "6d,E", 0, 0 },
    { ESA_ROW_NORM, AT(norm[0].weight), "norm1.norm", "d", 0, 0 },
    { ESA_ROW_LINEAR, AT(norm[1].layer), "norm2.linear", "6d,E", 0, 0 },
    { ESA_ROW_NORM, AT(norm[1].weight), "norm2.norm", "d", 0, 0 },
    { ESA_ROW_QKV, AT(q), "attn1.to_*", "d,d", ESA_WANT_F8 | ESA_WANT_JOIN, 0 },
    { ESA_ROW_QKV_BIAS, AT(q), "attn1.to_*", "d", ESA_WANT_JOIN, ATTENTION_BIAS },
    { ESA_ROW_LINEAR, AT(out), "attn1.to_out.0", "d,d", ESA_WANT_F8, 0 },
    { ESA_ROW_NORM, AT(q_norm), "attn1.norm_q", "D", 0, 0 },
    { ESA_ROW_NORM, AT(k_norm), "attn1.norm_k", "D", 0, 0 },
    { ESA_ROW_LINEAR, AT(up), "ff.net.0.proj", "4d,d", ESA_WANT_F8, 0 },
    { ESA_ROW_LINEAR, AT(down), "ff.net.2", "d,4d", ESA_WANT_F8, 0 },
};

static esa_status make(esa_dit *dit, const void *config)
{
    esa_cog_dit *cog = (esa_cog_dit *)dit;
    const esa_cog_config *c = config;
    cog->config = *c;
    dit->heads = c->heads;
    dit->head_dim = c->head_dim;
    dit->blocks = c->layers;
    dit->in_channels = c->in_channels;
    dit->out_channels = c->out_channels;
    dit->patch[0] = 1;
    dit->patch[1] = dit->patch[2] = c->patch;
    dit->sizes = (esa_sizes){
        .letter = { ['x'] = c->text_dim, ['E'] = c->time_dim, ['D'] = c->head_dim },
        .have = (c->attention_bias ? ATTENTION_BIAS : 0) | (c->patch_bias ? PATCH_BIAS : 0)
    };
    ESA_TRY(esa_part_array(&dit->part, (void **)&cog->block, c->layers, sizeof *cog->block));
    return esa_part_array(&dit->part, (void **)&cog->wave, (int64_t)c->heads * c->head_dim,
                          sizeof *cog->wave);
}

static void want_block(esa_dit *dit, int32_t i)
{
    esa_rows_want(dit->part.weights, ESA_ROWS(block_rows), &((esa_cog_dit *)dit)->block[i],
                  &dit->sizes, "transformer_blocks.%d.", i);
}

/* ---------------------------------------------------------------- one video */

static void end(esa_dit *dit)
{
    esa_cog_dit *cog = (esa_cog_dit *)dit;
    memset(cog->prepared, 0, sizeof cog->prepared);
}

static void place(esa_dit *dit, esa_carve *carve)
{
    esa_cog_dit *cog = (esa_cog_dit *)dit;
    const esa_cog_config *c = &cog->config;
    esa_nn *nn = dit->nn;
    const int32_t type = nn->ops->dtype, f32 = ESA_DTYPE_F32;
    const int64_t d = dit->d;
    esa_dit_place_layers(dit, carve, 4 * d);
    cog->temb = esa_nn_take(nn, carve, f32, 1, c->time_dim);
    cog->silu = esa_nn_take(nn, carve, f32, 1, c->time_dim);
    cog->sinusoid = esa_nn_take(nn, carve, f32, 1, d);
    for (int32_t i = 0; i < 2; i++) cog->e[i] = esa_nn_take(nn, carve, f32, 1, 6 * d);
    if (c->rotary) {
        esa_dit_place_turns(dit, carve, dit->rows);
    } else {
        cog->places = esa_nn_take(nn, carve, type, dit->tokens, d);
        dit->host_floats = dit->tokens * d;
    }
    for (int32_t b = 0; b < dit->branches; b++)
        cog->text[b] = esa_nn_take(nn, carve, type, dit->text_rows, d);
}

/* Text is not rotated: its angles are 0. */
static esa_status positions(esa_dit *dit, float *host, const int32_t *perm)
{
    const esa_cog_dit *cog = (esa_cog_dit *)dit;
    if (!cog->config.rotary) {
        esa_cog_places(&cog->config, host, dit->grid, perm);
        return esa_nn_write(dit->nn, &cog->places, host);
    }
    const int64_t text = dit->text_rows * (dit->head_dim / 2);
    float *cos = host, *sin = host + dit->host_floats / 2;
    for (int64_t i = 0; i < text; i++) cos[i] = 1;
    memset(sin, 0, (size_t)text * 4);
    esa_cog_rotations(&cog->config, cos + text, sin + text, dit->grid, perm);
    return esa_dit_write_turns(dit, host);
}

/* The embeddings, which set_text has on the device for a while. */
static int64_t text_bytes(const esa_dit *dit, int32_t branches)
{
    (void)branches;
    return dit->text_rows * ((const esa_cog_dit *)dit)->config.text_dim *
           esa_view_element(dit->nn->ops->dtype);
}

/* All rows are attended, padding included, as in diffusers. */
static esa_status set_text(esa_dit *dit, int32_t branch, const esa_text *text)
{
    esa_cog_dit *cog = (esa_cog_dit *)dit;
    esa_nn *nn = dit->nn;
    if (text->rows != dit->text_rows)
        return esa_fail(nn->ctx, ESA_ERR_MISMATCH,
                        "the text has %lld rows, but self-attention has places for %lld",
                        (long long)text->rows, (long long)dit->text_rows);
    const int64_t bytes = text_bytes(dit, 1);
    esa_view state = esa_view_of(NULL, nn->ops->dtype, dit->x.device, text->rows,
                                 cog->config.text_dim);
    ESA_TRY(esa_nn_alloc(nn, &state.data, bytes, "the text's states"));
    esa_status status = esa_nn_write(nn, &state, text->data);
    if (!status)
        status = nn->ops->linear(nn, &cog->text[branch], &state, &cog->text_proj, ESA_ACT_NONE);
    esa_nn_free(nn, state.data, bytes);
    return status;
}

/* ---------------------------------------------------------------- the table */

/* Tables of positions, and of words that are not used, in the files of the authors. */
static const char *const ignored[] = { "mixins.pos_embed.", "transformer.word_embeddings.",
                                       "transformer.position_embeddings.", NULL };

const esa_dit_kind esa_cog_dit_kind = { .bytes = sizeof(esa_cog_dit),
                                        .config_bytes = sizeof(esa_cog_config),
                                        .text_place = ESA_TEXT_FRONT,
                                        .channel_first = 1,
                                        .naming = &esa_cog_original,
                                        .ignored = ignored,
                                        .rows = rows,
                                        .row_count = (int32_t)(sizeof rows / sizeof rows[0]),
                                        .recognise = esa_cog_recognise,
                                        .make = make,
                                        .want_block = want_block,
                                        .place = place,
                                        .positions = positions,
                                        .text_bytes = text_bytes,
                                        .text = set_text,
                                        .end = end,
                                        .before = esa_cog_before,
                                        .block = esa_cog_block,
                                        .after = esa_cog_after,
                                        .prepare = esa_cog_prepare };
