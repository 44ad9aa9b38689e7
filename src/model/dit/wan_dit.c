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
#include "model/dit/wan_dit_internal.h"

#include <math.h>
#include <string.h>

static esa_status run_patches(esa_wan_dit *dit, const esa_view *rows, float *latent,
                              int32_t channels, int32_t gather)
{
    esa_patch_args a = {
        .rows = *rows, .latent = latent, .perm = dit->perm, .channels = channels, .gather = gather
    };
    memcpy(a.size, dit->latent, sizeof a.size);
    memcpy(a.patch, dit->config.patch, sizeof a.patch);
    return dit->nn->ops->patches(dit->nn, &a);
}

/* ---------------------------------------------------------------- the parts of a block */

/* The norm of x into a, as input of the layer next. */
static esa_norm_args norm_for(const esa_wan_dit *dit, const esa_linear *next, const float *scale,
                              const float *shift)
{
    return (esa_norm_args){ .y = dit->nn->ops->input(dit->nn, &dit->a, next),
                            .x = dit->x,
                            .norm = ESA_NORM_LAYER,
                            .eps = (float)dit->config.eps,
                            .scale = scale,
                            .shift = shift };
}

/* a: the normed input. Leaves the input of cross-attention in a, or in x without its norm. */
static esa_status self_attention(esa_wan_dit *dit, esa_session *session, int32_t layer,
                                 const float *e)
{
    const wan_block *b = &dit->block[layer];
    const wan_attn *w = &b->self;
    const esa_nn_ops *op = dit->nn->ops;
    const int64_t d = dit->d;
    const esa_linear *const l[3] = { &w->q, &w->k, &w->v };
    const esa_view a = op->input(dit->nn, &dit->a, &w->q);
    const esa_qk_args qk = { .q = dit->qkv[0],
                             .k = dit->qkv[1],
                             .q_weight = w->norm_q.data,
                             .k_weight = w->norm_k.data,
                             .cos = dit->cos,
                             .sin = dit->sin,
                             .D = dit->config.head_dim,
                             .eps = (float)dit->config.eps };
    esa_view o = dit->o;
    ESA_TRY(op->qkv(dit->nn, dit->qkv, &a, l));
    ESA_TRY(op->qk(dit->nn, &qk));
    ESA_TRY(esa_dit_attend(dit->nn, session, layer, dit->qkv, &o, dit->config.heads));
    const esa_view attended = o;
    ESA_TRY(esa_dit_input(dit->nn, &o, &attended, &dit->a, &w->out));
    esa_norm_args n = norm_for(dit, &b->cross.q, NULL, NULL);
    n.weight = b->norm2_weight.data;
    n.bias = b->norm2_bias.data;
    n.gate = e + 2 * d;
    if (!dit->config.cross_norm) n.norm = ESA_NORM_NONE;
    return op->linear_add(dit->nn, &n, &o, &w->out, &dit->flat);
}

/* x += out of the attention of q, in flat, over the image; the bias of out comes with the text. */
static esa_status image_attention(esa_wan_dit *dit, int32_t layer)
{
    const wan_text *p = &dit->picture;
    const int64_t D = dit->config.head_dim, R = p->rows;
    esa_linear out = dit->block[layer].cross.out;
    out.bias.data = NULL;
    const esa_norm_args n = { .x = dit->x, .norm = ESA_NORM_NONE };
    const esa_biased_args attention = { .o = dit->o,
                                        .q = dit->flat,
                                        .k = esa_view_rows(p->kv, 2 * layer * R, R),
                                        .v = esa_view_rows(p->kv, (2 * layer + 1) * R, R),
                                        .heads = dit->config.heads,
                                        .D = D,
                                        .scale = (float)(1 / sqrt((double)D)) };
    esa_view o;
    ESA_TRY(dit->nn->ops->biased(dit->nn, &attention));
    ESA_TRY(esa_dit_input(dit->nn, &o, &dit->o, &dit->a, &out));
    return dit->nn->ops->linear_add(dit->nn, &n, &o, &out, &dit->more);
}

static esa_status cross_attention(esa_wan_dit *dit, int32_t layer, const wan_text *text,
                                  const float *e)
{
    const wan_block *b = &dit->block[layer];
    const esa_nn_ops *op = dit->nn->ops;
    const int64_t d = dit->d, R = text->rows, D = dit->config.head_dim;
    const esa_qk_args qk = {
        .q = dit->flat, .q_weight = b->cross.norm_q.data, .D = D, .eps = (float)dit->config.eps
    };
    const esa_biased_args attention = { .o = dit->o,
                                        .q = dit->flat,
                                        .k = esa_view_rows(text->kv, 2 * layer * R, R),
                                        .v = esa_view_rows(text->kv, (2 * layer + 1) * R, R),
                                        .heads = dit->config.heads,
                                        .D = D,
                                        .scale = (float)(1 / sqrt((double)D)),
                                        .key = text->bias,
                                        /* normed queries also serve the image */
                                        .q_weight = dit->config.image_dim ? NULL : qk.q_weight,
                                        .eps = qk.eps,
                                        .room = dit->a.scale };
    esa_view in = op->input(dit->nn, &dit->a, &b->cross.q), o;
    if (!dit->config.cross_norm)
        ESA_TRY(esa_dit_input(dit->nn, &in, &dit->x, &dit->a, &b->cross.q));
    ESA_TRY(op->linear(dit->nn, &dit->flat, &in, &b->cross.q, ESA_ACT_NONE));
    if (dit->config.image_dim) {
        ESA_TRY(op->qk(dit->nn, &qk));
        ESA_TRY(image_attention(dit, layer));
    }
    ESA_TRY(op->biased(dit->nn, &attention));
    ESA_TRY(esa_dit_input(dit->nn, &o, &dit->o, &dit->a, &b->cross.out));
    const esa_norm_args n = norm_for(dit, &b->up, e + 4 * d, e + 3 * d);
    return op->linear_add(dit->nn, &n, &o, &b->cross.out, &dit->flat);
}

/* Leaves the normed input of the layer next in a, with shift and scale of that layer. */
static esa_status feed_forward(esa_wan_dit *dit, int32_t layer, const float *e,
                               const esa_linear *next, const float *next_e)
{
    const wan_block *b = &dit->block[layer];
    const int64_t d = dit->d;
    const esa_view in = dit->nn->ops->input(dit->nn, &dit->a, &b->up);
    esa_norm_args n = norm_for(dit, next, next_e + d, next_e);
    n.gate = e + 5 * d;
    return dit->nn->ops->feed_forward(dit->nn, &n, &in, &b->up, &b->down, &dit->hidden, &dit->o);
}

/* ---------------------------------------------------------------- the forward pass */

/* Computes temb, silu and proj from the timestep. */
static esa_status embed_time(esa_wan_dit *dit, double t)
{
    const esa_nn_ops *op = dit->nn->ops;
    const esa_act_args act = { .y = dit->silu, .x = dit->temb, .act = ESA_ACT_SILU };
    esa_timestep_sinusoid(dit->wave, dit->config.freq_dim, t);
    ESA_TRY(esa_nn_write(dit->nn, &dit->sinusoid, dit->wave));
    ESA_TRY(op->linear(dit->nn, &dit->silu, &dit->sinusoid, &dit->time1, ESA_ACT_SILU));
    ESA_TRY(op->linear(dit->nn, &dit->temb, &dit->silu, &dit->time2, ESA_ACT_NONE));
    ESA_TRY(op->act(dit->nn, &act));
    return op->linear(dit->nn, &dit->proj, &dit->silu, &dit->time_proj, ESA_ACT_NONE);
}

/* Shows x in grid order to the watcher. */
static esa_status show(esa_wan_dit *dit, int32_t block)
{
    if (!dit->watch) return ESA_OK;
    const esa_allocator *mem = &dit->nn->ctx->mem;
    const int64_t d = dit->d, N = dit->tokens, bytes = N * (2 * d + 1) * 4;
    float *hidden = esa_mem_alloc(mem, bytes), *rows = hidden + N * d;
    int32_t *perm = (int32_t *)(rows + N * d);
    if (!hidden) return esa_fail(dit->nn->ctx, ESA_ERR_MEMORY, "out of memory for a watched block");
    esa_status status = esa_nn_read(dit->nn, rows, &dit->x);
    if (!status && dit->perm) status = esa_nn_download(dit->nn, perm, dit->perm, N * 4);
    for (int64_t i = 0; !status && i < N; i++)
        memcpy(hidden + (dit->perm ? perm[i] : i) * d, rows + i * d, (size_t)d * 4);
    if (!status) dit->watch(dit->watch_user, block, hidden, N, d);
    esa_mem_free(mem, hidden, bytes);
    return status;
}

/* e of block i; of the head (shift, scale) after the last. */
static esa_status modulate(esa_wan_dit *dit, int32_t i)
{
    const esa_nn_ops *op = dit->nn->ops;
    float *e = dit->e[i % 2];
    return i < dit->config.layers
               ? op->modulate(dit->nn, e, dit->block[i].table.data, dit->proj.data, 1, 6 * dit->d)
               : op->modulate(dit->nn, e, dit->table.data, dit->temb.data, 2, dit->d);
}

static esa_status run_block(esa_wan_dit *dit, esa_session *session, int32_t i, const wan_text *text)
{
    const float *e = dit->e[i % 2], *next_e = dit->e[(i + 1) % 2];
    const int32_t last = i + 1 == dit->config.layers;
    ESA_TRY(esa_store_begin(dit->store, 1 + i));
    ESA_TRY(self_attention(dit, session, i, e));
    ESA_TRY(cross_attention(dit, i, text, e));
    ESA_TRY(modulate(dit, i + 1));
    ESA_TRY(feed_forward(dit, i, e, last ? &dit->proj_out : &dit->block[i + 1].self.q, next_e));
    return esa_store_end(dit->store, 1 + i);
}

static esa_status forward(esa_wan_dit *dit, esa_session *session, const wan_text *text, float *v,
                          const float *x, double t)
{
    const esa_wan_config *c = &dit->config;
    const esa_nn_ops *op = dit->nn->ops;
    if (dit->input) { /* the condition lies behind the latents already */
        const int64_t sample = (int64_t)4 * c->out_channels * dit->latent[0] * dit->latent[1] *
                               dit->latent[2];
        ESA_TRY(esa_nn_copy(dit->nn, dit->input, x, sample));
        x = dit->input;
    }
    ESA_TRY(run_patches(dit, &dit->patch_in, (float *)(uintptr_t)x, c->in_channels, 1));
    ESA_TRY(op->linear(dit->nn, &dit->x, &dit->patch_in, &dit->patch, ESA_ACT_NONE));
    ESA_TRY(embed_time(dit, t));
    ESA_TRY(modulate(dit, 0));
    const esa_norm_args first = norm_for(dit, &dit->block[0].self.q, dit->e[0] + dit->d, dit->e[0]);
    ESA_TRY(op->norm(dit->nn, &first));
    ESA_TRY(show(dit, -1));
    for (int32_t i = 0; i < c->layers; i++) {
        ESA_TRY(run_block(dit, session, i, text));
        ESA_TRY(show(dit, i));
        ESA_TRY(op->pace(dit->nn));
        if (dit->tick && dit->tick(dit->tick_user, i + 1, c->layers))
            return esa_fail(dit->nn->ctx, ESA_ERR_STATE, "cancelled");
    }
    const esa_view a = op->input(dit->nn, &dit->a, &dit->proj_out);
    ESA_TRY(op->linear(dit->nn, &dit->patch_out, &a, &dit->proj_out, ESA_ACT_NONE));
    return run_patches(dit, &dit->patch_out, v, c->out_channels, 0);
}

/* Calls every layer of block i once, with the sizes of this video. */
static esa_status prepare_layers(esa_wan_dit *dit, int32_t i)
{
    const wan_block *b = &dit->block[i];
    const esa_nn_ops *op = dit->nn->ops;
    esa_nn *nn = dit->nn;
    const esa_norm_args n = { .x = dit->x, .norm = ESA_NORM_NONE };
    const esa_linear *const qkv[3] = { &b->self.q, &b->self.k, &b->self.v };
    const esa_view in[4] = { op->input(nn, &dit->a, &b->self.q),
                             op->input(nn, &dit->a, &b->cross.q), op->input(nn, &dit->a, &b->up),
                             op->input(nn, &dit->a, &dit->proj_out) };
    const esa_linear *const out[2] = { &b->self.out, &b->cross.out };
    ESA_TRY(op->linear(nn, &dit->x, &dit->patch_in, &dit->patch, ESA_ACT_NONE));
    ESA_TRY(op->qkv(nn, dit->qkv, &in[0], qkv));
    for (int32_t k = 0; k < 2; k++) {
        esa_norm_args sum = n;
        esa_view o;
        if (k == 0) sum.gate = dit->e[0]; /* only self-attention has one */
        ESA_TRY(esa_dit_input(dit->nn, &o, &dit->o, &dit->a, out[k]));
        ESA_TRY(op->linear_add(nn, &sum, &o, out[k], &dit->flat));
    }
    ESA_TRY(op->linear(nn, &dit->flat, &in[1], &b->cross.q, ESA_ACT_NONE));
    ESA_TRY(op->feed_forward(nn, &n, &in[2], &b->up, &b->down, &dit->hidden, &dit->o));
    return op->linear(nn, &dit->patch_out, &in[3], &dit->proj_out, ESA_ACT_NONE);
}

esa_status esa_wan_dit_prepare(esa_wan_dit *dit, int32_t i)
{
    if (!dit->nn->ops->prepares || dit->prepared > i) return ESA_OK;
    dit->nn->preparing = esa_store_measures(dit->store, &dit->block[i].self.q);
    const esa_status status = dit->nn->preparing ? prepare_layers(dit, i) : ESA_OK;
    dit->nn->preparing = 0;
    if (!status) dit->prepared = i + 1;
    return status;
}

esa_status esa_wan_dit_forward(esa_wan_dit *dit, esa_session *session, int32_t branch, float *v,
                               const float *x, double t)
{
    if (branch < 0 || branch >= dit->branches || !dit->text[branch].kv.data)
        return esa_fail(dit->nn->ctx, ESA_ERR_STATE, "the transformer has no text for branch %d",
                        branch);
    if (dit->config.image_dim && !dit->picture.kv.data)
        return esa_fail(dit->nn->ctx, ESA_ERR_STATE, "the transformer has no image");
    return forward(dit, session, &dit->text[branch], v, x, t);
}
