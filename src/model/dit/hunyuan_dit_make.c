/* hunyuan_dit_make.c - HunyuanVideo's transformer: the table of its functions, its tensors, and
 * what one video needs: positions, memory for activations, the text of each branch.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/dit/hunyuan_dit.h"

#include <math.h>
#include <string.h>

enum { GUIDANCE = 1 }; /* sizes.have */

/* Two layers with SiLU between them. */
/* clang-format off */
#define MLP(field, name, shape, need) \
    { ESA_ROW_LINEAR, AT(field.one), name ".linear_1", shape, 0, need }, \
    { ESA_ROW_LINEAR, AT(field.two), name ".linear_2", "d,d", 0, need }
/* clang-format on */
#define AT(field) offsetof(esa_hunyuan_dit, field)
static const esa_row rows[] = {
    { ESA_ROW_LINEAR, AT(patch), "x_embedder.proj", "d,c,t,h,w", 0, 0 },
    MLP(time, "time_text_embed.timestep_embedder", "d,q", 0),
    MLP(guidance, "time_text_embed.guidance_embedder", "d,q", GUIDANCE),
    MLP(pooled, "time_text_embed.text_embedder", "d,p", 0),
    MLP(refine_time, "context_embedder.time_text_embed.timestep_embedder", "d,q", 0),
    MLP(refine_text, "context_embedder.time_text_embed.text_embedder", "d,x", 0),
    { ESA_ROW_LINEAR, AT(proj_in), "context_embedder.proj_in", "d,x", 0, 0 },
    { ESA_ROW_LINEAR, AT(norm_out), "norm_out.linear", "2d,d", 0, 0 },
    { ESA_ROW_LINEAR, AT(proj_out), "proj_out", "vo,d", 0, 0 },
};
#undef AT
#define AT(field) offsetof(hunyuan_refiner, field)
static const esa_row refiner_rows[] = {
    { ESA_ROW_NORM, AT(norm1), "norm1", "d", 0, 0 },
    { ESA_ROW_NORM, AT(norm2), "norm2", "d", 0, 0 },
    { ESA_ROW_QKV, AT(q), "attn.to_*", "d,d", ESA_WANT_JOIN, 0 },
    { ESA_ROW_QKV_BIAS, AT(q), "attn.to_*", "d", ESA_WANT_JOIN, 0 },
    { ESA_ROW_LINEAR, AT(out), "attn.to_out.0", "d,d", 0, 0 },
    { ESA_ROW_LINEAR, AT(up), "ff.net.0.proj", "rd,d", 0, 0 },
    { ESA_ROW_LINEAR, AT(down), "ff.net.2", "d,rd", 0, 0 },
    { ESA_ROW_LINEAR, AT(gates), "norm_out.linear", "2d,d", 0, 0 },
};
#undef AT
#define AT(field) offsetof(hunyuan_stream, field)
/* The streams of a double block, video and text, and that of a single block. q, k and v are one
 * matrix on devices that can use it. */
static const esa_row video_stream[] = {
    { ESA_ROW_LINEAR, AT(modulation), "norm1.linear", "6d,d", 0, 0 },
    { ESA_ROW_QKV, AT(q), "attn.to_*", "d,d", ESA_WANT_F8 | ESA_WANT_JOIN, 0 },
    { ESA_ROW_QKV_BIAS, AT(q), "attn.to_*", "d", ESA_WANT_JOIN, 0 },
    { ESA_ROW_TENSOR, AT(norm_q), "attn.norm_q.weight", "D", ESA_WANT_F32, 0 },
    { ESA_ROW_TENSOR, AT(norm_k), "attn.norm_k.weight", "D", ESA_WANT_F32, 0 },
    { ESA_ROW_LINEAR, AT(out), "attn.to_out.0", "d,d", ESA_WANT_F8, 0 },
    { ESA_ROW_LINEAR, AT(up), "ff.net.0.proj", "f,d", ESA_WANT_F8, 0 },
    { ESA_ROW_LINEAR, AT(down), "ff.net.2", "d,f", ESA_WANT_F8, 0 },
};
static const esa_row text_stream[] = {
    { ESA_ROW_LINEAR, AT(modulation), "norm1_context.linear", "6d,d", 0, 0 },
    { ESA_ROW_QKV, AT(q), "attn.add_*_proj", "d,d", ESA_WANT_F8 | ESA_WANT_JOIN, 0 },
    { ESA_ROW_QKV_BIAS, AT(q), "attn.add_*_proj", "d", ESA_WANT_JOIN, 0 },
    { ESA_ROW_TENSOR, AT(norm_q), "attn.norm_added_q.weight", "D", ESA_WANT_F32, 0 },
    { ESA_ROW_TENSOR, AT(norm_k), "attn.norm_added_k.weight", "D", ESA_WANT_F32, 0 },
    { ESA_ROW_LINEAR, AT(out), "attn.to_add_out", "d,d", ESA_WANT_F8, 0 },
    { ESA_ROW_LINEAR, AT(up), "ff_context.net.0.proj", "f,d", ESA_WANT_F8, 0 },
    { ESA_ROW_LINEAR, AT(down), "ff_context.net.2", "d,f", ESA_WANT_F8, 0 },
};
static const esa_row single_stream[] = {
    { ESA_ROW_LINEAR, AT(modulation), "norm.linear", "3d,d", 0, 0 },
    { ESA_ROW_QKV, AT(q), "attn.to_*", "d,d", ESA_WANT_F8 | ESA_WANT_JOIN, 0 },
    { ESA_ROW_QKV_BIAS, AT(q), "attn.to_*", "d", ESA_WANT_JOIN, 0 },
    { ESA_ROW_TENSOR, AT(norm_q), "attn.norm_q.weight", "D", ESA_WANT_F32, 0 },
    { ESA_ROW_TENSOR, AT(norm_k), "attn.norm_k.weight", "D", ESA_WANT_F32, 0 },
    { ESA_ROW_LINEAR, AT(up), "proj_mlp", "f,d", ESA_WANT_F8, 0 },
    { ESA_ROW_LINEAR, AT(out), "proj_out", "d,s", ESA_WANT_F8, 0 },
};

static esa_status make(esa_dit *dit, const void *config)
{
    esa_hunyuan_dit *hy = (esa_hunyuan_dit *)dit;
    const esa_hunyuan_config *c = config;
    hy->config = *c;
    dit->heads = c->heads;
    dit->head_dim = c->head_dim;
    dit->blocks = c->doubles + c->singles;
    dit->in_channels = c->in_channels;
    dit->out_channels = c->out_channels;
    for (int32_t i = 0; i < 3; i++) dit->patch[i] = c->patch[i];
    dit->sizes = (esa_sizes){ .letter = { ['f'] = c->ffn,
                                          ['s'] = (int64_t)c->heads * c->head_dim + c->ffn,
                                          ['x'] = c->text_dim,
                                          ['p'] = c->pooled_dim,
                                          ['q'] = ESA_HUNYUAN_WAVE,
                                          ['r'] = ESA_HUNYUAN_WIDE,
                                          ['D'] = c->head_dim },
                              .have = c->guidance ? GUIDANCE : 0 };
    ESA_TRY(
        esa_part_array(&dit->part, (void **)&hy->refiner, 1 + c->refiners, sizeof *hy->refiner));
    return esa_part_array(&dit->part, (void **)&hy->stream, 2 * c->doubles + c->singles,
                          sizeof *hy->stream);
}

static void want(esa_dit *dit)
{
    esa_hunyuan_dit *hy = (esa_hunyuan_dit *)dit;
    for (int32_t i = 0; i < hy->config.refiners; i++)
        esa_rows_want(dit->part.weights, ESA_ROWS(refiner_rows), &hy->refiner[i], &dit->sizes,
                      "context_embedder.token_refiner.refiner_blocks.%d.", i);
}

static void want_block(esa_dit *dit, int32_t i)
{
    esa_hunyuan_dit *hy = (esa_hunyuan_dit *)dit;
    esa_weights *w = dit->part.weights;
    const int32_t doubles = hy->config.doubles, single = i - doubles;
    if (single >= 0) {
        esa_rows_want(w, ESA_ROWS(single_stream), &hy->stream[doubles + i], &dit->sizes,
                      "single_transformer_blocks.%d.", single);
        return;
    }
    esa_rows_want(w, ESA_ROWS(video_stream), &hy->stream[2 * i], &dit->sizes,
                  "transformer_blocks.%d.", i);
    esa_rows_want(w, ESA_ROWS(text_stream), &hy->stream[2 * i + 1], &dit->sizes,
                  "transformer_blocks.%d.", i);
}

/* ---------------------------------------------------------------- one video */

static void drop_text(esa_hunyuan_dit *hy, hunyuan_text *t)
{
    esa_nn_free(hy->dit.nn, t->room, t->room_bytes);
    *t = (hunyuan_text){ 0 };
}

static void end(esa_dit *dit)
{
    esa_hunyuan_dit *hy = (esa_hunyuan_dit *)dit;
    for (int32_t i = 0; i < ESA_DIT_BRANCHES; i++) drop_text(hy, &hy->text[i]);
    memset(hy->prepared, 0, sizeof hy->prepared);
}

static void place(esa_dit *dit, esa_carve *carve)
{
    esa_hunyuan_dit *hy = (esa_hunyuan_dit *)dit;
    esa_nn *nn = dit->nn;
    const int32_t f32 = ESA_DTYPE_F32;
    const int64_t S = dit->rows, d = dit->d,
                  widest = esa_max64(ESA_HUNYUAN_WIDE * d, hy->config.ffn);
    hy->wide = esa_nn_take(nn, carve, nn->ops->dtype, S, d + widest);
    if (nn->ops->joined) {
        dit->a.scale = esa_carve_take(carve, S * 4);
        hy->wide.scale = esa_carve_take(carve, S * 4);
    }
    esa_view *const vector[4] = { &hy->sum, &hy->silu, &hy->more, &hy->between };
    for (int32_t i = 0; i < 4; i++) *vector[i] = esa_nn_take(nn, carve, f32, 1, d);
    for (int32_t i = 0; i < 2; i++) {
        hy->e[i] = esa_nn_take(nn, carve, f32, 1, 6 * d);
        hy->sinusoid[i] = esa_nn_take(nn, carve, f32, 1, ESA_HUNYUAN_WAVE);
    }
    esa_dit_place_turns(dit, carve, dit->tokens);
}

static esa_status positions(esa_dit *dit, float *host, const int32_t *perm)
{
    const esa_hunyuan_config *c = &((esa_hunyuan_dit *)dit)->config;
    esa_rope_axes(host, host + dit->host_floats / 2, dit->grid, perm, c->axis, c->theta);
    return esa_dit_write_turns(dit, host);
}

/* ---------------------------------------------------------------- text */

/* Places the text of a branch; only counts its size if carve->base is NULL. */
static void place_text(const esa_hunyuan_dit *hy, hunyuan_text *t, esa_carve *carve)
{
    const esa_hunyuan_config *c = &hy->config;
    t->states = esa_nn_take(hy->dit.nn, carve, hy->dit.nn->ops->dtype, hy->dit.text_rows,
                            c->text_dim);
    t->mean = esa_nn_take(hy->dit.nn, carve, ESA_DTYPE_F32, 1, c->text_dim);
    t->pooled = esa_nn_take(hy->dit.nn, carve, ESA_DTYPE_F32, 1, c->pooled_dim);
    t->key = esa_carve_take(carve, 4 * hy->dit.text_rows);
    t->length = esa_carve_take(carve, 4);
}

/* With what alignment adds. */
static int64_t text_bytes(const esa_dit *dit, int32_t branches)
{
    hunyuan_text text;
    esa_carve carve = { 0 };
    place_text((const esa_hunyuan_dit *)dit, &text, &carve);
    return branches * (carve.used + 1024);
}

/* room: [T][text_dim] in host memory. */
static esa_status write_text(esa_hunyuan_dit *hy, const hunyuan_text *t, const esa_text *text,
                             float *room)
{
    esa_nn *nn = hy->dit.nn;
    const int64_t width = hy->config.text_dim, T = hy->dit.text_rows;
    const int32_t length = (int32_t)(hy->dit.tokens + text->valid);
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

static esa_status make_text(esa_hunyuan_dit *hy, hunyuan_text *t, const esa_text *text)
{
    const esa_allocator *mem = &hy->dit.nn->ctx->mem;
    esa_carve carve = { 0 };
    place_text(hy, t, &carve);
    ESA_TRY(esa_nn_alloc(hy->dit.nn, &t->room, carve.used, "the text's states"));
    t->room_bytes = carve.used;
    carve = (esa_carve){ .base = t->room };
    place_text(hy, t, &carve);
    const int64_t bytes = 4 * hy->dit.text_rows * esa_max64(hy->config.text_dim, 1);
    float *room = esa_mem_alloc(mem, bytes);
    if (!room)
        return esa_fail(hy->dit.nn->ctx, ESA_ERR_MEMORY, "out of memory for the text's states");
    const esa_status status = write_text(hy, t, text, room);
    esa_mem_free(mem, room, bytes);
    return status;
}

/* text->rows may be fewer than the layout has; the rest is padding. */
static esa_status set_text(esa_dit *dit, int32_t branch, const esa_text *text)
{
    esa_hunyuan_dit *hy = (esa_hunyuan_dit *)dit;
    hunyuan_text *t = &hy->text[branch];
    if (text->valid < 1 || text->rows < text->valid || text->rows > dit->text_rows || !text->pooled)
        return esa_fail(dit->nn->ctx, ESA_ERR_ARGUMENT,
                        "text of %lld rows, %lld of them of the prompt, expected 1 .. %lld rows",
                        (long long)text->rows, (long long)text->valid, (long long)dit->text_rows);
    drop_text(hy, t);
    const esa_status status = make_text(hy, t, text);
    if (status) drop_text(hy, t);
    return status;
}

/* ---------------------------------------------------------------- the table */

const esa_dit_kind esa_hunyuan_dit_kind = { .bytes = sizeof(esa_hunyuan_dit),
                                            .config_bytes = sizeof(esa_hunyuan_config),
                                            .text_place = ESA_TEXT_BACK,
                                            .channel_first = 1,
                                            .naming = &esa_hunyuan_original,
                                            .rows = rows,
                                            .row_count = (int32_t)(sizeof rows / sizeof rows[0]),
                                            .recognise = esa_hunyuan_recognise,
                                            .make = make,
                                            .want = want,
                                            .want_block = want_block,
                                            .place = place,
                                            .positions = positions,
                                            .text_bytes = text_bytes,
                                            .text = set_text,
                                            .end = end,
                                            .before = esa_hunyuan_before,
                                            .block = esa_hunyuan_block,
                                            .after = esa_hunyuan_after,
                                            .prepare = esa_hunyuan_prepare };
