/* cog_dit.c - the forward pass of CogVideoX's transformer: patches, timestep, blocks, head.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The sequence x is [text][video]. A block, with e = linear(SiLU(timestep embedding)) = (shift,
 * scale, gate of the video; shift, scale, gate of the text), one e for each norm:
 *   a = (LN(x) w + b) (1 + scale) + shift
 *   q, k, v from a; layer norm of q and k over each head; rotation of the video's (5B)
 *   x += gate out(attention)
 *   f = (LN(x) w + b) (1 + scale) + shift
 *   x += gate down(gelu(up(f)))
 * The head takes the video: LN(x) w + b, then LN of that with another w and b, (1 + scale) + shift,
 * and a linear layer to patches of (channel, ph, pw).
 *
 * Text and video have their own shift, scale and gate, so operations with these run twice, on the
 * rows of each. */
#include "model/dit/cog_dit_internal.h"

#include <string.h>

#define QK_EPS 1e-6f /* of the norms of q and k; no setting of the model */

enum { VIDEO = 0, TEXT = 1, STREAMS = 2 };

/* The rows of a stream. */
static esa_view part_of(const esa_cog_dit *dit, const esa_view *v, int32_t stream)
{
    return stream == TEXT ? esa_view_rows(*v, 0, dit->text_rows)
                          : esa_view_rows(*v, dit->text_rows, dit->tokens);
}

/* ---------------------------------------------------------------- the parts of a block */

/* The norm of a stream of x into a, as input of the layer next. */
static esa_norm_args norm_for(const esa_cog_dit *dit, int32_t stream, const cog_norm *norm,
                              const esa_view *modulation, const esa_linear *next)
{
    const float *e = (const float *)modulation->data + 3 * stream * dit->d;
    const esa_view a = part_of(dit, &dit->a, stream);
    return (esa_norm_args){ .y = dit->nn->ops->input(dit->nn, &a, next),
                            .x = part_of(dit, &dit->x, stream),
                            .norm = ESA_NORM_LAYER,
                            .eps = (float)dit->config.eps,
                            .weight = norm->weight.data,
                            .bias = norm->bias.data,
                            .scale = e + dit->d,
                            .shift = e };
}

static const float *gate_of(const esa_cog_dit *dit, int32_t stream, const esa_view *modulation)
{
    return (const float *)modulation->data + (3 * stream + 2) * dit->d;
}

/* From the normed input in a to *o, the output of attention. */
static esa_status self_attention(esa_cog_dit *dit, esa_session *session, int32_t layer, esa_view *o)
{
    const cog_block *b = &dit->block[layer];
    const esa_nn_ops *op = dit->nn->ops;
    const esa_linear *const l[3] = { &b->q, &b->k, &b->v };
    const esa_view a = op->input(dit->nn, &dit->a, &b->q);
    const esa_qk_args qk = { .q = dit->qkv[0],
                             .k = dit->qkv[1],
                             .q_weight = b->q_norm[0].data,
                             .k_weight = b->k_norm[0].data,
                             .q_bias = b->q_norm[1].data,
                             .k_bias = b->k_norm[1].data,
                             .cos = dit->cos,
                             .sin = dit->sin,
                             .D = dit->config.head_dim,
                             .eps = QK_EPS,
                             .norm = ESA_QK_HEAD_LAYER };
    ESA_TRY(op->qkv(dit->nn, dit->qkv, &a, l));
    ESA_TRY(op->qk(dit->nn, &qk));
    *o = dit->o;
    return esa_dit_attend(dit->nn, session, layer, dit->qkv, o, dit->config.heads);
}

/* Adds the output of attention to x; leaves the normed input of the feed-forward in a. */
static esa_status end_attention(esa_cog_dit *dit, int32_t layer, const esa_view *attended)
{
    const cog_block *b = &dit->block[layer];
    esa_view o;
    ESA_TRY(esa_dit_input(dit->nn, &o, attended, &dit->a, &b->out));
    for (int32_t s = 0; s < STREAMS; s++) {
        const esa_view in = part_of(dit, &o, s), t = part_of(dit, &dit->flat, s);
        esa_norm_args n = norm_for(dit, s, &b->norm[1], &dit->e[1], &b->up);
        n.gate = gate_of(dit, s, &dit->e[0]);
        ESA_TRY(dit->nn->ops->linear_add(dit->nn, &n, &in, &b->out, &t));
    }
    return ESA_OK;
}

static esa_status feed_forward(esa_cog_dit *dit, int32_t layer)
{
    const cog_block *b = &dit->block[layer];
    const esa_view a = dit->nn->ops->input(dit->nn, &dit->a, &b->up);
    for (int32_t s = 0; s < STREAMS; s++) {
        const esa_view in = part_of(dit, &a, s), t = part_of(dit, &dit->o, s);
        const esa_norm_args n = { .x = part_of(dit, &dit->x, s),
                                  .norm = ESA_NORM_NONE,
                                  .gate = gate_of(dit, s, &dit->e[1]) };
        ESA_TRY(dit->nn->ops->feed_forward(dit->nn, &n, &in, &b->up, &b->down, &dit->hidden, &t));
    }
    return ESA_OK;
}

static esa_status run_block(esa_cog_dit *dit, esa_session *session, int32_t i)
{
    const cog_block *b = &dit->block[i];
    const esa_nn_ops *op = dit->nn->ops;
    ESA_TRY(esa_store_begin(dit->store, 1 + i));
    for (int32_t k = 0; k < 2; k++)
        ESA_TRY(op->linear(dit->nn, &dit->e[k], &dit->silu, &b->norm[k].layer, ESA_ACT_NONE));
    for (int32_t s = 0; s < STREAMS; s++) {
        const esa_norm_args n = norm_for(dit, s, &b->norm[0], &dit->e[0], &b->q);
        ESA_TRY(op->norm(dit->nn, &n));
    }
    esa_view o;
    ESA_TRY(self_attention(dit, session, i, &o));
    ESA_TRY(end_attention(dit, i, &o));
    ESA_TRY(feed_forward(dit, i));
    return esa_store_end(dit->store, 1 + i);
}

/* ---------------------------------------------------------------- the forward pass */

static esa_status run_patches(esa_cog_dit *dit, const esa_view *rows, float *latent,
                              int32_t channels, int32_t gather)
{
    const int32_t p = dit->config.patch;
    esa_patch_args a = { .rows = *rows,
                         .latent = latent,
                         .perm = dit->perm,
                         .channels = channels,
                         .gather = gather,
                         .patch = { 1, p, p },
                         .channel_first = 1 };
    memcpy(a.size, dit->latent, sizeof a.size);
    return dit->nn->ops->patches(dit->nn, &a);
}

/* x = [text][patches + positions] */
static esa_status embed(esa_cog_dit *dit, int32_t branch, const float *latents)
{
    const esa_nn_ops *op = dit->nn->ops;
    const esa_view text = dit->text[branch], video = part_of(dit, &dit->x, VIDEO);
    const int64_t element = esa_view_element(text.dtype);
    ESA_TRY(esa_nn_copy(dit->nn, dit->x.data, text.data, text.rows * text.cols * element));
    ESA_TRY(
        run_patches(dit, &dit->patch_in, (float *)(uintptr_t)latents, dit->config.in_channels, 1));
    if (!dit->places.data)
        return op->linear(dit->nn, &video, &dit->patch_in, &dit->patch, ESA_ACT_NONE);
    const esa_norm_args sum = { .x = video, .norm = ESA_NORM_NONE };
    const esa_view t = part_of(dit, &dit->o, VIDEO);
    ESA_TRY(esa_nn_copy(dit->nn, video.data, dit->places.data, video.rows * video.cols * element));
    return op->linear_add(dit->nn, &sum, &dit->patch_in, &dit->patch, &t);
}

/* Computes silu, the activation of the timestep's embedding. */
static esa_status embed_time(esa_cog_dit *dit, double t)
{
    const esa_nn_ops *op = dit->nn->ops;
    esa_timestep_sinusoid(dit->wave, dit->d, t);
    ESA_TRY(esa_nn_write(dit->nn, &dit->sinusoid, dit->wave));
    ESA_TRY(op->linear(dit->nn, &dit->temb, &dit->sinusoid, &dit->time1, ESA_ACT_SILU));
    return op->linear(dit->nn, &dit->silu, &dit->temb, &dit->time2, ESA_ACT_SILU);
}

/* Shows x to the watcher, with the video in grid order. */
static esa_status show(esa_cog_dit *dit, int32_t block)
{
    if (!dit->watch) return ESA_OK;
    const esa_allocator *mem = &dit->nn->ctx->mem;
    const int64_t d = dit->d, S = dit->rows, R = dit->text_rows, bytes = S * (2 * d + 1) * 4;
    float *hidden = esa_mem_alloc(mem, bytes), *rows = hidden + S * d;
    int32_t *perm = (int32_t *)(rows + S * d);
    if (!hidden) return esa_fail(dit->nn->ctx, ESA_ERR_MEMORY, "out of memory for a watched block");
    esa_status status = esa_nn_read(dit->nn, rows, &dit->x);
    if (!status && dit->perm) status = esa_nn_download(dit->nn, perm, dit->perm, dit->tokens * 4);
    for (int64_t i = 0; !status && i < S; i++) {
        const int64_t to = i < R || !dit->perm ? i : R + perm[i - R];
        memcpy(hidden + to * d, rows + i * d, (size_t)d * 4);
    }
    if (!status) dit->watch(dit->watch_user, block, hidden, S, d);
    esa_mem_free(mem, hidden, bytes);
    return status;
}

/* The two norms and the last layer, for the video. */
static esa_status run_head(esa_cog_dit *dit, float *v)
{
    const esa_nn_ops *op = dit->nn->ops;
    const esa_view x = part_of(dit, &dit->x, VIDEO), a = part_of(dit, &dit->a, VIDEO);
    esa_view e = dit->e[0];
    e.cols = e.ld = 2 * dit->d;
    const esa_norm_args final = { .y = x,
                                  .x = x,
                                  .norm = ESA_NORM_LAYER,
                                  .eps = (float)dit->config.eps,
                                  .weight = dit->final_norm[0].data,
                                  .bias = dit->final_norm[1].data };
    esa_norm_args out = final;
    out.y = op->input(dit->nn, &a, &dit->proj_out);
    out.weight = dit->out_norm[0].data;
    out.bias = dit->out_norm[1].data;
    out.shift = e.data;
    out.scale = (const float *)e.data + dit->d;
    ESA_TRY(op->linear(dit->nn, &e, &dit->silu, &dit->norm_out, ESA_ACT_NONE));
    ESA_TRY(op->norm(dit->nn, &final));
    ESA_TRY(op->norm(dit->nn, &out));
    ESA_TRY(op->linear(dit->nn, &dit->patch_out, &out.y, &dit->proj_out, ESA_ACT_NONE));
    return run_patches(dit, &dit->patch_out, v, dit->config.out_channels, 0);
}

static esa_status forward(esa_cog_dit *dit, esa_session *session, int32_t branch, float *v,
                          const float *x, double t)
{
    ESA_TRY(embed(dit, branch, x));
    ESA_TRY(embed_time(dit, t));
    ESA_TRY(show(dit, -1));
    for (int32_t i = 0; i < dit->config.layers; i++) {
        ESA_TRY(run_block(dit, session, i));
        ESA_TRY(show(dit, i));
        ESA_TRY(dit->nn->ops->pace(dit->nn));
        if (dit->tick && dit->tick(dit->tick_user, i + 1, dit->config.layers))
            return esa_fail(dit->nn->ctx, ESA_ERR_STATE, "cancelled");
    }
    return run_head(dit, v);
}

/* Calls every layer of block i once for each stream, with the sizes of this video. */
static esa_status prepare_layers(esa_cog_dit *dit, int32_t i)
{
    const cog_block *b = &dit->block[i];
    esa_nn *nn = dit->nn;
    const esa_nn_ops *op = nn->ops;
    const esa_linear *const qkv[3] = { &b->q, &b->k, &b->v };
    const esa_view a = op->input(nn, &dit->a, &b->q), up = op->input(nn, &dit->a, &b->up),
                   video = part_of(dit, &dit->x, VIDEO), head = part_of(dit, &dit->a, VIDEO);
    esa_view o;
    ESA_TRY(op->linear(nn, &video, &dit->patch_in, &dit->patch, ESA_ACT_NONE));
    ESA_TRY(op->qkv(nn, dit->qkv, &a, qkv));
    ESA_TRY(esa_dit_input(dit->nn, &o, &dit->o, &dit->a, &b->out));
    for (int32_t s = 0; s < STREAMS; s++) {
        const esa_norm_args n = { .x = part_of(dit, &dit->x, s),
                                  .norm = ESA_NORM_NONE,
                                  .gate = gate_of(dit, s, &dit->e[0]) };
        const esa_view in = part_of(dit, &o, s), flat = part_of(dit, &dit->flat, s),
                       from = part_of(dit, &up, s), t = part_of(dit, &dit->o, s);
        ESA_TRY(op->linear_add(nn, &n, &in, &b->out, &flat));
        ESA_TRY(op->feed_forward(nn, &n, &from, &b->up, &b->down, &dit->hidden, &t));
    }
    const esa_view last = op->input(nn, &head, &dit->proj_out);
    return op->linear(nn, &dit->patch_out, &last, &dit->proj_out, ESA_ACT_NONE);
}

static esa_status prepare(esa_cog_dit *dit, int32_t i)
{
    ESA_TRY(esa_store_begin(dit->store, 1 + i));
    dit->nn->preparing = esa_store_measures(dit->store, &dit->block[i].q);
    const esa_status status = dit->nn->preparing ? prepare_layers(dit, i) : ESA_OK;
    dit->nn->preparing = 0;
    ESA_TRY(status);
    return esa_store_end(dit->store, 1 + i);
}

/* Measures the products for this video's sizes, once, if the device can. Blocks 0 and 1 stand for
 * all: others have the sizes and types of one of them. */
static esa_status prepare_all(esa_cog_dit *dit)
{
    const int32_t count = dit->config.layers < 2 ? dit->config.layers : 2;
    if (!dit->nn->ops->prepares || dit->prepared) return ESA_OK;
    for (int32_t i = 0; i < count; i++) ESA_TRY(prepare(dit, i));
    dit->prepared = 1;
    return ESA_OK;
}

esa_status esa_cog_dit_forward(esa_cog_dit *dit, esa_session *session, int32_t branch, float *v,
                               const float *x, double t)
{
    if (branch < 0 || branch >= dit->branches || !dit->has_text[branch])
        return esa_fail(dit->nn->ctx, ESA_ERR_STATE, "the transformer has no text for branch %d",
                        branch);
    ESA_TRY(prepare_all(dit));
    return forward(dit, session, branch, v, x, t);
}
