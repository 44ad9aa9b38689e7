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
#include "model/dit/cog_dit.h"

#define QK_EPS 1e-6f /* of the norms of q and k; no setting of the model */

enum { VIDEO = 0, TEXT = 1, STREAMS = 2 };

/* The rows of a stream. */
static esa_view part_of(const esa_cog_dit *cog, const esa_view *v, int32_t stream)
{
    return stream == TEXT ? esa_dit_words(&cog->dit, v) : esa_dit_video(&cog->dit, v);
}

/* ---------------------------------------------------------------- the parts of a block */

/* The norm of a stream of x into a, as input of the layer next. */
static esa_norm_args norm_for(const esa_cog_dit *cog, int32_t stream, const cog_norm *norm,
                              const esa_view *modulation, const esa_linear *next)
{
    const float *e = (const float *)modulation->data + 3 * stream * cog->dit.d;
    const esa_view a = part_of(cog, &cog->dit.a, stream);
    return (esa_norm_args){ .y = cog->dit.nn->ops->input(cog->dit.nn, &a, next),
                            .x = part_of(cog, &cog->dit.x, stream),
                            .norm = ESA_NORM_LAYER,
                            .eps = (float)cog->config.eps,
                            .weight = norm->weight.data,
                            .bias = norm->bias.data,
                            .scale = e + cog->dit.d,
                            .shift = e };
}

static const float *gate_of(const esa_cog_dit *cog, int32_t stream, const esa_view *modulation)
{
    return (const float *)modulation->data + (3 * stream + 2) * cog->dit.d;
}

/* From the normed input in a to *o, the output of attention. */
static esa_status self_attention(esa_cog_dit *cog, esa_session *session, int32_t layer, esa_view *o)
{
    const cog_block *b = &cog->block[layer];
    const esa_nn_ops *op = cog->dit.nn->ops;
    const esa_linear *const l[3] = { &b->q, &b->k, &b->v };
    const esa_view a = op->input(cog->dit.nn, &cog->dit.a, &b->q);
    const esa_qk_args qk = { .q = cog->dit.qkv[0],
                             .k = cog->dit.qkv[1],
                             .q_weight = b->q_norm[0].data,
                             .k_weight = b->k_norm[0].data,
                             .q_bias = b->q_norm[1].data,
                             .k_bias = b->k_norm[1].data,
                             .cos = cog->dit.cos,
                             .sin = cog->dit.sin,
                             .D = cog->config.head_dim,
                             .eps = QK_EPS,
                             .norm = ESA_QK_HEAD_LAYER };
    ESA_TRY(op->qkv(cog->dit.nn, cog->dit.qkv, &a, l));
    ESA_TRY(op->qk(cog->dit.nn, &qk));
    *o = cog->dit.o;
    return esa_dit_attend(&cog->dit, session, layer, cog->dit.qkv, o);
}

/* Adds the output of attention to x; leaves the normed input of the feed-forward in a. */
static esa_status end_attention(esa_cog_dit *cog, int32_t layer, const esa_view *attended)
{
    const cog_block *b = &cog->block[layer];
    esa_view o;
    ESA_TRY(esa_dit_input(cog->dit.nn, &o, attended, &cog->dit.a, &b->out));
    for (int32_t s = 0; s < STREAMS; s++) {
        const esa_view in = part_of(cog, &o, s), t = part_of(cog, &cog->dit.flat, s);
        esa_norm_args n = norm_for(cog, s, &b->norm[1], &cog->e[1], &b->up);
        n.gate = gate_of(cog, s, &cog->e[0]);
        ESA_TRY(cog->dit.nn->ops->linear_add(cog->dit.nn, &n, &in, &b->out, &t));
    }
    return ESA_OK;
}

static esa_status feed_forward(esa_cog_dit *cog, int32_t layer)
{
    const cog_block *b = &cog->block[layer];
    const esa_view a = cog->dit.nn->ops->input(cog->dit.nn, &cog->dit.a, &b->up);
    for (int32_t s = 0; s < STREAMS; s++) {
        const esa_view in = part_of(cog, &a, s), t = part_of(cog, &cog->dit.o, s);
        const esa_norm_args n = { .x = part_of(cog, &cog->dit.x, s),
                                  .norm = ESA_NORM_NONE,
                                  .gate = gate_of(cog, s, &cog->e[1]) };
        ESA_TRY(cog->dit.nn->ops->feed_forward(cog->dit.nn, &n, &in, &b->up, &b->down,
                                               &cog->dit.hidden, &t));
    }
    return ESA_OK;
}

/* ---------------------------------------------------------------- the forward pass */

/* x = [text][patches + positions] */
static esa_status embed(esa_cog_dit *cog, int32_t branch, const float *latents)
{
    const esa_nn_ops *op = cog->dit.nn->ops;
    const esa_view text = cog->text[branch], video = part_of(cog, &cog->dit.x, VIDEO);
    const int64_t element = esa_view_element(text.dtype);
    ESA_TRY(esa_nn_copy(cog->dit.nn, cog->dit.x.data, text.data, text.rows * text.cols * element));
    ESA_TRY(esa_dit_gather(&cog->dit, latents));
    if (!cog->places.data)
        return op->linear(cog->dit.nn, &video, &cog->dit.patch_in, &cog->patch, ESA_ACT_NONE);
    const esa_norm_args sum = { .x = video, .norm = ESA_NORM_NONE };
    const esa_view t = part_of(cog, &cog->dit.o, VIDEO);
    ESA_TRY(
        esa_nn_copy(cog->dit.nn, video.data, cog->places.data, video.rows * video.cols * element));
    return op->linear_add(cog->dit.nn, &sum, &cog->dit.patch_in, &cog->patch, &t);
}

/* Computes silu, the activation of the timestep's embedding. */
static esa_status embed_time(esa_cog_dit *cog, double t)
{
    const esa_nn_ops *op = cog->dit.nn->ops;
    esa_timestep_sinusoid(cog->wave, cog->dit.d, t);
    ESA_TRY(esa_nn_write(cog->dit.nn, &cog->sinusoid, cog->wave));
    ESA_TRY(op->linear(cog->dit.nn, &cog->temb, &cog->sinusoid, &cog->time1, ESA_ACT_SILU));
    return op->linear(cog->dit.nn, &cog->silu, &cog->temb, &cog->time2, ESA_ACT_SILU);
}

esa_status esa_cog_before(esa_dit *dit, const esa_dit_call *call)
{
    esa_cog_dit *cog = (esa_cog_dit *)dit;
    /* Blocks 0 and 1 stand for all: others have the sizes and types of one of them. */
    for (int32_t i = 0; dit->nn->ops->prepares && i < 2 && i < dit->blocks; i++) {
        if (cog->prepared[i]) continue;
        ESA_TRY(esa_store_begin(dit->part.store, 1 + i));
        ESA_TRY(esa_dit_measure(dit, i, &cog->block[i].q, &cog->prepared[i]));
        ESA_TRY(esa_store_end(dit->part.store, 1 + i));
    }
    ESA_TRY(embed(cog, call->branch, call->x));
    return embed_time(cog, call->t);
}

esa_status esa_cog_block(esa_dit *dit, const esa_dit_call *call, int32_t i)
{
    esa_cog_dit *cog = (esa_cog_dit *)dit;
    const cog_block *b = &cog->block[i];
    const esa_nn_ops *op = dit->nn->ops;
    for (int32_t k = 0; k < 2; k++)
        ESA_TRY(op->linear(dit->nn, &cog->e[k], &cog->silu, &b->norm[k].layer, ESA_ACT_NONE));
    for (int32_t s = 0; s < STREAMS; s++) {
        const esa_norm_args n = norm_for(cog, s, &b->norm[0], &cog->e[0], &b->q);
        ESA_TRY(op->norm(dit->nn, &n));
    }
    esa_view o;
    ESA_TRY(self_attention(cog, call->session, i, &o));
    ESA_TRY(end_attention(cog, i, &o));
    return feed_forward(cog, i);
}

/* The two norms and the last layer, for the video. */
esa_status esa_cog_after(esa_dit *dit, const esa_dit_call *call)
{
    esa_cog_dit *cog = (esa_cog_dit *)dit;
    const esa_nn_ops *op = cog->dit.nn->ops;
    const esa_view x = part_of(cog, &cog->dit.x, VIDEO), a = part_of(cog, &cog->dit.a, VIDEO);
    esa_view e = cog->e[0];
    e.cols = e.ld = 2 * cog->dit.d;
    const esa_norm_args final = { .y = x,
                                  .x = x,
                                  .norm = ESA_NORM_LAYER,
                                  .eps = (float)cog->config.eps,
                                  .weight = cog->final_norm[0].data,
                                  .bias = cog->final_norm[1].data };
    esa_norm_args out = final;
    out.y = op->input(cog->dit.nn, &a, &cog->proj_out);
    out.weight = cog->out_norm[0].data;
    out.bias = cog->out_norm[1].data;
    out.shift = e.data;
    out.scale = (const float *)e.data + cog->dit.d;
    ESA_TRY(op->linear(cog->dit.nn, &e, &cog->silu, &cog->norm_out, ESA_ACT_NONE));
    ESA_TRY(op->norm(cog->dit.nn, &final));
    ESA_TRY(op->norm(cog->dit.nn, &out));
    ESA_TRY(op->linear(cog->dit.nn, &cog->dit.patch_out, &out.y, &cog->proj_out, ESA_ACT_NONE));
    return esa_dit_patches(dit, &dit->patch_out, call->v, dit->out_channels, 0);
}

/* Calls every layer of block i once for each stream, with the sizes of this video. */
esa_status esa_cog_prepare(esa_dit *dit, int32_t i)
{
    esa_cog_dit *cog = (esa_cog_dit *)dit;
    const cog_block *b = &cog->block[i];
    esa_nn *nn = cog->dit.nn;
    const esa_nn_ops *op = nn->ops;
    const esa_linear *const qkv[3] = { &b->q, &b->k, &b->v };
    const esa_view a = op->input(nn, &cog->dit.a, &b->q), up = op->input(nn, &cog->dit.a, &b->up),
                   video = part_of(cog, &cog->dit.x, VIDEO),
                   head = part_of(cog, &cog->dit.a, VIDEO);
    esa_view o;
    ESA_TRY(op->linear(nn, &video, &cog->dit.patch_in, &cog->patch, ESA_ACT_NONE));
    ESA_TRY(op->qkv(nn, cog->dit.qkv, &a, qkv));
    ESA_TRY(esa_dit_input(cog->dit.nn, &o, &cog->dit.o, &cog->dit.a, &b->out));
    for (int32_t s = 0; s < STREAMS; s++) {
        const esa_norm_args n = { .x = part_of(cog, &cog->dit.x, s),
                                  .norm = ESA_NORM_NONE,
                                  .gate = gate_of(cog, s, &cog->e[0]) };
        const esa_view in = part_of(cog, &o, s), flat = part_of(cog, &cog->dit.flat, s),
                       from = part_of(cog, &up, s), t = part_of(cog, &cog->dit.o, s);
        ESA_TRY(op->linear_add(nn, &n, &in, &b->out, &flat));
        ESA_TRY(op->feed_forward(nn, &n, &from, &b->up, &b->down, &cog->dit.hidden, &t));
    }
    const esa_view last = op->input(nn, &head, &cog->proj_out);
    return op->linear(nn, &cog->dit.patch_out, &last, &cog->proj_out, ESA_ACT_NONE);
}
