/* hunyuan_embed.c - what is computed before the blocks: the embedding of timestep, guidance and
 * pooled text, and the token refiner.
 * SPDX-License-Identifier: Apache-2.0
 *
 *   embedding = mlp(sinusoid(t)) + mlp(sinusoid(1000 guidance)) + mlp(pooled)
 *   c = mlp(sinusoid(t)) + mlp(mean of the prompt's states)      (weights of the refiner's own)
 *   x = proj_in(states); for each refiner block, (gate1, gate2) = linear(SiLU(c)):
 *     x += gate1 out(attention(norm1(x)))        over the rows of the prompt
 *     x += gate2 down(SiLU(up(norm2(x)))) */
#include <math.h>
#include "model/dit/hunyuan_dit.h"

/* to = two(SiLU(one(x))) */
static esa_status run_mlp(esa_hunyuan_dit *hy, const esa_view *to, const esa_view *x,
                          const hunyuan_mlp *m)
{
    const esa_nn_ops *op = hy->dit.nn->ops;
    ESA_TRY(op->linear(hy->dit.nn, &hy->between, x, &m->one, ESA_ACT_SILU));
    return op->linear(hy->dit.nn, to, &hy->between, &m->two, ESA_ACT_NONE);
}

/* sum += two(SiLU(one(x))) */
static esa_status add_mlp(esa_hunyuan_dit *hy, const esa_view *x, const hunyuan_mlp *m)
{
    ESA_TRY(run_mlp(hy, &hy->more, x, m));
    return hy->dit.nn->ops->modulate(hy->dit.nn, hy->sum.data, hy->sum.data, hy->more.data, 1,
                                     hy->dit.d);
}

static esa_status write_waves(esa_hunyuan_dit *hy, double t, double guidance)
{
    esa_timestep_sinusoid(hy->wave[0], ESA_HUNYUAN_WAVE, t);
    esa_timestep_sinusoid(hy->wave[1], ESA_HUNYUAN_WAVE, (double)((float)guidance * 1000.0f));
    for (int32_t i = 0; i < 2; i++)
        ESA_TRY(esa_nn_write(hy->dit.nn, &hy->sinusoid[i], hy->wave[i]));
    return ESA_OK;
}

static esa_status set_silu(esa_hunyuan_dit *hy)
{
    const esa_act_args act = { .y = hy->silu, .x = hy->sum, .act = ESA_ACT_SILU };
    return hy->dit.nn->ops->act(hy->dit.nn, &act);
}

/* ---------------------------------------------------------------- the refiner */

static esa_norm_args norm_with(const esa_hunyuan_dit *hy, const esa_linear *next,
                               const esa_weight *weight, const esa_weight *bias)
{
    esa_norm_args n = esa_hunyuan_norm(hy, 1, next, NULL, NULL);
    n.weight = weight->data;
    n.bias = bias->data;
    return n;
}

static esa_status refine(esa_hunyuan_dit *hy, const hunyuan_refiner *r, const hunyuan_text *text)
{
    esa_nn *nn = hy->dit.nn;
    const esa_nn_ops *op = nn->ops;
    const int64_t d = hy->dit.d, wide = ESA_HUNYUAN_WIDE * d;
    esa_view part[5]; /* columns of wide, rows of the text: output of attention, q, k, v; hidden */
    for (int32_t i = 0; i < 5; i++) {
        const esa_view all = esa_hunyuan_part(hy, i < 4 ? i * d : 0, i < 4 ? d : wide);
        part[i] = esa_hunyuan_rows(hy, &all, 1);
    }
    const esa_view last = esa_hunyuan_part(hy, hy->wide.cols - d, d),
                   t = esa_hunyuan_rows(hy, &last, 1), a = esa_hunyuan_rows(hy, &hy->dit.a, 1);
    const float *gate = hy->e[0].data;
    const esa_view gates = esa_view_cols(hy->e[0], 0, 2 * d);
    const esa_linear *const qkv[3] = { &r->q, &r->k, &r->v };
    const esa_norm_args first = norm_with(hy, &r->q, &r->norm1, &r->bias1);
    esa_norm_args middle = norm_with(hy, &r->up, &r->norm2, &r->bias2),
                  end = { .x = first.x, .norm = ESA_NORM_NONE, .gate = gate + d };
    const esa_biased_args attention = { .o = part[0],
                                        .q = part[1],
                                        .k = part[2],
                                        .v = part[3],
                                        .heads = hy->config.heads,
                                        .D = hy->config.head_dim,
                                        .scale = (float)(1 / sqrt((double)hy->config.head_dim)),
                                        .key = text->key };
    middle.gate = gate;
    ESA_TRY(op->linear(nn, &gates, &hy->silu, &r->gates, ESA_ACT_NONE));
    ESA_TRY(op->norm(nn, &first));
    ESA_TRY(op->qkv(nn, part + 1, &first.y, qkv));
    ESA_TRY(op->biased(nn, &attention));
    ESA_TRY(op->linear_add(nn, &middle, &part[0], &r->out, &t));
    ESA_TRY(op->linear(nn, &part[4], &middle.y, &r->up, ESA_ACT_SILU));
    return op->linear_add(nn, &end, &part[4], &r->down, &a);
}

esa_status esa_hunyuan_embed(esa_hunyuan_dit *hy, const hunyuan_text *text, double t,
                             double guidance)
{
    const esa_view rows = esa_hunyuan_rows(hy, &hy->dit.x, 1);
    ESA_TRY(write_waves(hy, t, guidance));
    ESA_TRY(run_mlp(hy, &hy->sum, &hy->sinusoid[0], &hy->refine_time));
    ESA_TRY(add_mlp(hy, &text->mean, &hy->refine_text));
    ESA_TRY(set_silu(hy));
    ESA_TRY(hy->dit.nn->ops->linear(hy->dit.nn, &rows, &text->states, &hy->proj_in, ESA_ACT_NONE));
    for (int32_t i = 0; i < hy->config.refiners; i++) ESA_TRY(refine(hy, &hy->refiner[i], text));
    ESA_TRY(run_mlp(hy, &hy->sum, &hy->sinusoid[0], &hy->time));
    if (hy->config.guidance) ESA_TRY(add_mlp(hy, &hy->sinusoid[1], &hy->guidance));
    ESA_TRY(add_mlp(hy, &text->pooled, &hy->pooled));
    return set_silu(hy);
}
