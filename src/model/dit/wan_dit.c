/* wan_dit.c - the forward pass of Wan's transformer: patches, timestep, blocks, head.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A block, with e = table + projection of the timestep
 *                 = (shift1, scale1, gate1, shift2, scale2, gate2):
 *   a = LN(x) (1 + scale1) + shift1
 *   q, k, v from a; RMS norm of q and k over the whole width; rotation
 *   x += gate1 out(attention)
 *   c = LN(x) * w + b
 *   q from c, k and v from the text; norms, no rotation
 *   x += out(attention)
 *   f = LN(x) (1 + scale2) + shift2
 *   x += gate2 down(gelu(up(f)))
 * The head: (shift, scale) = table + timestep embedding; LN(x) (1 + scale) + shift; linear to
 * patches of (pt, ph, pw, channel). */
#include "model/dit/wan_dit.h"

#include <math.h>

/* ---------------------------------------------------------------- the parts of a block */

/* The norm of x into a, as input of the layer next. */
static esa_norm_args norm_for(const esa_wan_dit *wan, const esa_linear *next, const float *scale,
                              const float *shift)
{
    return (esa_norm_args){ .y = wan->dit.nn->ops->input(wan->dit.nn, &wan->dit.a, next),
                            .x = wan->dit.x,
                            .norm = ESA_NORM_LAYER,
                            .eps = (float)wan->config.eps,
                            .scale = scale,
                            .shift = shift };
}

/* a: the normed input. Leaves the input of cross-attention in a, or in x without its norm. */
static esa_status self_attention(esa_wan_dit *wan, esa_session *session, int32_t layer,
                                 const float *e)
{
    const wan_block *b = &wan->block[layer];
    const wan_attn *w = &b->self;
    const esa_nn_ops *op = wan->dit.nn->ops;
    const int64_t d = wan->dit.d;
    const esa_linear *const l[3] = { &w->q, &w->k, &w->v };
    const esa_view a = op->input(wan->dit.nn, &wan->dit.a, &w->q);
    const esa_qk_args qk = { .q = wan->dit.qkv[0],
                             .k = wan->dit.qkv[1],
                             .q_weight = w->norm_q.data,
                             .k_weight = w->norm_k.data,
                             .cos = wan->dit.cos,
                             .sin = wan->dit.sin,
                             .D = wan->config.head_dim,
                             .eps = (float)wan->config.eps };
    esa_view o = wan->dit.o;
    ESA_TRY(op->qkv(wan->dit.nn, wan->dit.qkv, &a, l));
    ESA_TRY(op->qk(wan->dit.nn, &qk));
    ESA_TRY(esa_dit_attend(&wan->dit, session, layer, wan->dit.qkv, &o));
    const esa_view attended = o;
    ESA_TRY(esa_dit_input(wan->dit.nn, &o, &attended, &wan->dit.a, &w->out));
    esa_norm_args n = norm_for(wan, &b->cross.q, NULL, NULL);
    n.weight = b->norm2_weight.data;
    n.bias = b->norm2_bias.data;
    n.gate = e + 2 * d;
    if (!wan->config.cross_norm) n.norm = ESA_NORM_NONE;
    return op->linear_add(wan->dit.nn, &n, &o, &w->out, &wan->dit.flat);
}

/* x += out of the attention of q, in flat, over the image; the bias of out comes with the text. */
static esa_status image_attention(esa_wan_dit *wan, int32_t layer)
{
    const wan_text *p = &wan->picture;
    const int64_t D = wan->config.head_dim, R = p->rows;
    esa_linear out = wan->block[layer].cross.out;
    out.bias.data = NULL;
    const esa_norm_args n = { .x = wan->dit.x, .norm = ESA_NORM_NONE };
    const esa_biased_args attention = { .o = wan->dit.o,
                                        .q = wan->dit.flat,
                                        .k = esa_view_rows(p->kv, 2 * layer * R, R),
                                        .v = esa_view_rows(p->kv, (2 * layer + 1) * R, R),
                                        .heads = wan->config.heads,
                                        .D = D,
                                        .scale = (float)(1 / sqrt((double)D)) };
    esa_view o;
    ESA_TRY(wan->dit.nn->ops->biased(wan->dit.nn, &attention));
    ESA_TRY(esa_dit_input(wan->dit.nn, &o, &wan->dit.o, &wan->dit.a, &out));
    return wan->dit.nn->ops->linear_add(wan->dit.nn, &n, &o, &out, &wan->dit.more);
}

static esa_status cross_attention(esa_wan_dit *wan, int32_t layer, const wan_text *text,
                                  const float *e)
{
    const wan_block *b = &wan->block[layer];
    const esa_nn_ops *op = wan->dit.nn->ops;
    const int64_t d = wan->dit.d, R = text->rows, D = wan->config.head_dim;
    const esa_qk_args qk = {
        .q = wan->dit.flat, .q_weight = b->cross.norm_q.data, .D = D, .eps = (float)wan->config.eps
    };
    const esa_biased_args attention = { .o = wan->dit.o,
                                        .q = wan->dit.flat,
                                        .k = esa_view_rows(text->kv, 2 * layer * R, R),
                                        .v = esa_view_rows(text->kv, (2 * layer + 1) * R, R),
                                        .heads = wan->config.heads,
                                        .D = D,
                                        .scale = (float)(1 / sqrt((double)D)),
                                        .key = text->bias,
                                        /* normed queries also serve the image */
                                        .q_weight = wan->config.image_dim ? NULL : qk.q_weight,
                                        .eps = qk.eps,
                                        .room = wan->dit.a.scale };
    esa_view in = op->input(wan->dit.nn, &wan->dit.a, &b->cross.q), o;
    if (!wan->config.cross_norm)
        ESA_TRY(esa_dit_input(wan->dit.nn, &in, &wan->dit.x, &wan->dit.a, &b->cross.q));
    ESA_TRY(op->linear(wan->dit.nn, &wan->dit.flat, &in, &b->cross.q, ESA_ACT_NONE));
    if (wan->config.image_dim) {
        ESA_TRY(op->qk(wan->dit.nn, &qk));
        ESA_TRY(image_attention(wan, layer));
    }
    ESA_TRY(op->biased(wan->dit.nn, &attention));
    ESA_TRY(esa_dit_input(wan->dit.nn, &o, &wan->dit.o, &wan->dit.a, &b->cross.out));
    const esa_norm_args n = norm_for(wan, &b->up, e + 4 * d, e + 3 * d);
    return op->linear_add(wan->dit.nn, &n, &o, &b->cross.out, &wan->dit.flat);
}

/* Leaves the normed input of the layer next in a, with shift and scale of that layer. */
static esa_status feed_forward(esa_wan_dit *wan, int32_t layer, const float *e,
                               const esa_linear *next, const float *next_e)
{
    const wan_block *b = &wan->block[layer];
    const int64_t d = wan->dit.d;
    const esa_view in = wan->dit.nn->ops->input(wan->dit.nn, &wan->dit.a, &b->up);
    esa_norm_args n = norm_for(wan, next, next_e + d, next_e);
    n.gate = e + 5 * d;
    return wan->dit.nn->ops->feed_forward(wan->dit.nn, &n, &in, &b->up, &b->down, &wan->dit.hidden,
                                          &wan->dit.o);
}

/* ---------------------------------------------------------------- the forward pass */

/* Computes temb, silu and proj from the timestep. */
static esa_status embed_time(esa_wan_dit *wan, double t)
{
    const esa_nn_ops *op = wan->dit.nn->ops;
    const esa_act_args act = { .y = wan->silu, .x = wan->temb, .act = ESA_ACT_SILU };
    esa_timestep_sinusoid(wan->wave, wan->config.freq_dim, t);
    ESA_TRY(esa_nn_write(wan->dit.nn, &wan->sinusoid, wan->wave));
    ESA_TRY(op->linear(wan->dit.nn, &wan->silu, &wan->sinusoid, &wan->time1, ESA_ACT_SILU));
    ESA_TRY(op->linear(wan->dit.nn, &wan->temb, &wan->silu, &wan->time2, ESA_ACT_NONE));
    ESA_TRY(op->act(wan->dit.nn, &act));
    return op->linear(wan->dit.nn, &wan->proj, &wan->silu, &wan->time_proj, ESA_ACT_NONE);
}

/* e of block i; of the head (shift, scale) after the last. */
static esa_status modulate(esa_wan_dit *wan, int32_t i)
{
    const esa_nn_ops *op = wan->dit.nn->ops;
    float *e = wan->e[i % 2];
    return i < wan->config.layers
               ? op->modulate(wan->dit.nn, e, wan->block[i].table.data, wan->proj.data, 1,
                              6 * wan->dit.d)
               : op->modulate(wan->dit.nn, e, wan->table.data, wan->temb.data, 2, wan->dit.d);
}

esa_status esa_wan_before(esa_dit *dit, const esa_dit_call *call)
{
    esa_wan_dit *wan = (esa_wan_dit *)dit;
    const esa_wan_config *c = &wan->config;
    const esa_nn_ops *op = dit->nn->ops;
    const float *x = call->x;
    if (c->image_dim && !wan->picture.kv.data)
        return esa_fail(dit->nn->ctx, ESA_ERR_STATE, "the transformer has no image");
    if (wan->input) { /* the condition lies behind the latents already */
        const int64_t sample = (int64_t)4 * c->out_channels * dit->latent[0] * dit->latent[1] *
                               dit->latent[2];
        ESA_TRY(esa_nn_copy(dit->nn, wan->input, x, sample));
        x = wan->input;
    }
    ESA_TRY(esa_dit_gather(dit, x));
    ESA_TRY(op->linear(dit->nn, &dit->x, &dit->patch_in, &wan->patch, ESA_ACT_NONE));
    ESA_TRY(embed_time(wan, call->t));
    ESA_TRY(modulate(wan, 0));
    const esa_norm_args first = norm_for(wan, &wan->block[0].self.q, wan->e[0] + dit->d, wan->e[0]);
    return op->norm(dit->nn, &first);
}

esa_status esa_wan_block(esa_dit *dit, const esa_dit_call *call, int32_t i)
{
    esa_wan_dit *wan = (esa_wan_dit *)dit;
    const float *e = wan->e[i % 2], *next_e = wan->e[(i + 1) % 2];
    const int32_t last = i + 1 == dit->blocks;
    ESA_TRY(self_attention(wan, call->session, i, e));
    ESA_TRY(cross_attention(wan, i, &wan->text[call->branch], e));
    ESA_TRY(modulate(wan, i + 1));
    return feed_forward(wan, i, e, last ? &wan->proj_out : &wan->block[i + 1].self.q, next_e);
}

esa_status esa_wan_after(esa_dit *dit, const esa_dit_call *call)
{
    esa_wan_dit *wan = (esa_wan_dit *)dit;
    const esa_nn_ops *op = dit->nn->ops;
    const esa_view a = op->input(dit->nn, &dit->a, &wan->proj_out);
    ESA_TRY(op->linear(dit->nn, &dit->patch_out, &a, &wan->proj_out, ESA_ACT_NONE));
    return esa_dit_patches(dit, &dit->patch_out, call->v, dit->out_channels, 0);
}

/* Calls every layer of block i once, with the sizes of this video. */
esa_status esa_wan_prepare(esa_dit *dit, int32_t i)
{
    esa_wan_dit *wan = (esa_wan_dit *)dit;
    const wan_block *b = &wan->block[i];
    const esa_nn_ops *op = wan->dit.nn->ops;
    esa_nn *nn = wan->dit.nn;
    const esa_norm_args n = { .x = wan->dit.x, .norm = ESA_NORM_NONE };
    const esa_linear *const qkv[3] = { &b->self.q, &b->self.k, &b->self.v };
    const esa_view in[4] = { op->input(nn, &wan->dit.a, &b->self.q),
                             op->input(nn, &wan->dit.a, &b->cross.q),
                             op->input(nn, &wan->dit.a, &b->up),
                             op->input(nn, &wan->dit.a, &wan->proj_out) };
    const esa_linear *const out[2] = { &b->self.out, &b->cross.out };
    ESA_TRY(op->linear(nn, &wan->dit.x, &wan->dit.patch_in, &wan->patch, ESA_ACT_NONE));
    ESA_TRY(op->qkv(nn, wan->dit.qkv, &in[0], qkv));
    for (int32_t k = 0; k < 2; k++) {
        esa_norm_args sum = n;
        esa_view o;
        if (k == 0) sum.gate = wan->e[0]; /* only self-attention has one */
        ESA_TRY(esa_dit_input(wan->dit.nn, &o, &wan->dit.o, &wan->dit.a, out[k]));
        ESA_TRY(op->linear_add(nn, &sum, &o, out[k], &wan->dit.flat));
    }
    ESA_TRY(op->linear(nn, &wan->dit.flat, &in[1], &b->cross.q, ESA_ACT_NONE));
    ESA_TRY(op->feed_forward(nn, &n, &in[2], &b->up, &b->down, &wan->dit.hidden, &wan->dit.o));
    return op->linear(nn, &wan->dit.patch_out, &in[3], &wan->proj_out, ESA_ACT_NONE);
}
