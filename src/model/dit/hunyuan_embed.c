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
#include "model/dit/hunyuan_dit_internal.h"

/* to = two(SiLU(one(x))) */
static esa_status run_mlp(esa_hunyuan_dit *dit, const esa_view *to, const esa_view *x,
                          const hunyuan_mlp *m)
{
    const esa_nn_ops *op = dit->nn->ops;
    ESA_TRY(op->linear(dit->nn, &dit->between, x, &m->one, ESA_ACT_SILU));
    return op->linear(dit->nn, to, &dit->between, &m->two, ESA_ACT_NONE);
}

/* sum += two(SiLU(one(x))) */
static esa_status add_mlp(esa_hunyuan_dit *dit, const esa_view *x, const hunyuan_mlp *m)
{
    ESA_TRY(run_mlp(dit, &dit->more, x, m));
    return dit->nn->ops->modulate(dit->nn, dit->sum.data, dit->sum.data, dit->more.data, 1, dit->d);
}

static esa_status write_waves(esa_hunyuan_dit *dit, double t, double guidance)
{
    float *wave[2] = { dit->wave, dit->wave + ESA_HUNYUAN_WAVE };
    esa_timestep_sinusoid(wave[0], ESA_HUNYUAN_WAVE, t);
    esa_timestep_sinusoid(wave[1], ESA_HUNYUAN_WAVE, (double)((float)guidance * 1000.0f));
    for (int32_t i = 0; i < 2; i++) ESA_TRY(esa_nn_write(dit->nn, &dit->sinusoid[i], wave[i]));
    return ESA_OK;
}

static esa_status set_silu(esa_hunyuan_dit *dit)
{
    const esa_act_args act = { .y = dit->silu, .x = dit->sum, .act = ESA_ACT_SILU };
    return dit->nn->ops->act(dit->nn, &act);
}

/* ---------------------------------------------------------------- the refiner */

static esa_norm_args norm_with(const esa_hunyuan_dit *dit, const esa_linear *next,
                               const esa_weight *weight, const esa_weight *bias)
{
    esa_norm_args n = esa_hunyuan_norm(dit, 1, next, NULL, NULL);
    n.weight = weight->data;
    n.bias = bias->data;
    return n;
}

static esa_status refine(esa_hunyuan_dit *dit, const hunyuan_refiner *r, const hunyuan_text *text)
{
    esa_nn *nn = dit->nn;
    const esa_nn_ops *op = nn->ops;
    const int64_t d = dit->d, wide = ESA_HUNYUAN_WIDE * d;
    esa_view part[5]; /* columns of wide, rows of the text: output of attention, q, k, v; hidden */
    for (int32_t i = 0; i < 5; i++) {
        const esa_view all = esa_hunyuan_part(dit, i < 4 ? i * d : 0, i < 4 ? d : wide);
        part[i] = esa_hunyuan_rows(dit, &all, 1);
    }
    const esa_view last = esa_hunyuan_part(dit, dit->wide.cols - d, d),
                   t = esa_hunyuan_rows(dit, &last, 1), a = esa_hunyuan_rows(dit, &dit->a, 1);
    const float *gate = dit->e[0].data;
    const esa_view gates = esa_view_cols(dit->e[0], 0, 2 * d);
    const esa_linear *const qkv[3] = { &r->q, &r->k, &r->v };
    const esa_norm_args first = norm_with(dit, &r->q, &r->norm1, &r->bias1);
    esa_norm_args middle = norm_with(dit, &r->up, &r->norm2, &r->bias2),
                  end = { .x = first.x, .norm = ESA_NORM_NONE, .gate = gate + d };
    const esa_biased_args attention = { .o = part[0],
                                        .q = part[1],
                                        .k = part[2],
                                        .v = part[3],
                                        .heads = dit->config.heads,
                                        .D = dit->config.head_dim,
                                        .scale = (float)(1 / sqrt((double)dit->config.head_dim)),
                                        .key = text->key };
    middle.gate = gate;
    ESA_TRY(op->linear(nn, &gates, &dit->silu, &r->gates, ESA_ACT_NONE));
    ESA_TRY(op->norm(nn, &first));
    ESA_TRY(op->qkv(nn, part + 1, &first.y, qkv));
    ESA_TRY(op->biased(nn, &attention));
    ESA_TRY(op->linear_add(nn, &middle, &part[0], &r->out, &t));
    ESA_TRY(op->linear(nn, &part[4], &middle.y, &r->up, ESA_ACT_SILU));
    return op->linear_add(nn, &end, &part[4], &r->down, &a);
}

esa_status esa_hunyuan_embed(esa_hunyuan_dit *dit, const hunyuan_text *text, double t,
                             double guidance)
{
    const esa_view rows = esa_hunyuan_rows(dit, &dit->x, 1);
    ESA_TRY(write_waves(dit, t, guidance));
    ESA_TRY(run_mlp(dit, &dit->sum, &dit->sinusoid[0], &dit->refine_time));
    ESA_TRY(add_mlp(dit, &text->mean, &dit->refine_text));
    ESA_TRY(set_silu(dit));
    ESA_TRY(dit->nn->ops->linear(dit->nn, &rows, &text->states, &dit->proj_in, ESA_ACT_NONE));
    for (int32_t i = 0; i < dit->config.refiners; i++) ESA_TRY(refine(dit, &dit->refiner[i], text));
    ESA_TRY(run_mlp(dit, &dit->sum, &dit->sinusoid[0], &dit->time));
    if (dit->config.guidance) ESA_TRY(add_mlp(dit, &dit->sinusoid[1], &dit->guidance));
    ESA_TRY(add_mlp(dit, &text->pooled, &dit->pooled));
    return set_silu(dit);
}
