/* hunyuan_dit.c - the forward pass of HunyuanVideo's transformer: patches, blocks, head.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A double block, for each of the streams video and text with weights of their own,
 * (shift1, scale1, gate1, shift2, scale2, gate2) = linear(SiLU(embedding)):
 *   a = LN(x) (1 + scale1) + shift1; q, k, v from a; RMS norm of each head of q and k; the video's
 *   are rotated; attention over both streams
 *   x += gate1 out(attention)
 *   x += gate2 down(gelu(up(LN(x) (1 + scale2) + shift2)))
 * A single block, over the rows of both, (shift, scale, gate) = linear(SiLU(embedding)):
 *   a = LN(x) (1 + scale) + shift; q, k, v as above
 *   x += gate out([attention, gelu(up(a))])
 * The head: (scale, shift) = linear(SiLU(embedding)); LN(x) (1 + scale) + shift of the video;
 * linear to patches of (channel, pt, p, p). */
#include "model/dit/hunyuan_dit.h"
#include "session/session.h"

enum { VIDEO = 0, TEXT, BOTH };

static esa_view rows_of(const esa_hunyuan_dit *hy, const esa_view *v, int32_t which)
{
    return which == BOTH ? *v : esa_hunyuan_rows(hy, v, which);
}

esa_norm_args esa_hunyuan_norm(const esa_hunyuan_dit *hy, int32_t which, const esa_linear *next,
                               const float *scale, const float *shift)
{
    const esa_view a = rows_of(hy, &hy->dit.a, which);
    return (esa_norm_args){ .y = hy->dit.nn->ops->input(hy->dit.nn, &a, next),
                            .x = rows_of(hy, &hy->dit.x, which),
                            .norm = ESA_NORM_LAYER,
                            .eps = ESA_HUNYUAN_EPS,
                            .scale = scale,
                            .shift = shift };
}

esa_status esa_hunyuan_input(esa_hunyuan_dit *hy, esa_view *in, int32_t which, const esa_view *from,
                             const esa_linear *l)
{
    const esa_view a = rows_of(hy, &hy->dit.a, which);
    return esa_dit_input(hy->dit.nn, in, from, &a, l);
}

/* The parts of wide for some rows. */
typedef struct parts {
    esa_view o, qkv[3], last; /* [rows][d] */
    esa_view hidden;          /* [rows][ffn] from column 0; a room as for ops->input */
    esa_view behind;          /* [rows][ffn] behind o */
    esa_view all;             /* [rows][d + ffn]; a room as for ops->input */
} parts;

static parts parts_of(const esa_hunyuan_dit *hy, int32_t which)
{
    const int64_t d = hy->dit.d, ffn = hy->config.ffn;
    const esa_view rows = rows_of(hy, &hy->wide, which);
    parts p = { .hidden = esa_view_cols(rows, 0, ffn), .all = esa_view_cols(rows, 0, d + ffn) };
    esa_view plain = rows;
    plain.scale = NULL;
    p.o = esa_view_cols(plain, 0, d);
    for (int32_t i = 0; i < 3; i++) p.qkv[i] = esa_view_cols(plain, (1 + i) * d, d);
    p.last = esa_view_cols(plain, hy->wide.cols - d, d);
    p.behind = esa_view_cols(plain, d, ffn);
    return p;
}

/* ---------------------------------------------------------------- attention */

static esa_status attend(esa_hunyuan_dit *hy, esa_session *session, int32_t layer,
                         const hunyuan_text *text)
{
    const parts p = parts_of(hy, BOTH);
    esa_view o = p.o;
    esa_session_keys(session, text->length);
    ESA_TRY(esa_dit_attend(&hy->dit, session, layer, p.qkv, &o));
    const esa_act_args back = { .y = p.o, .x = o, .act = ESA_ACT_NONE };
    return o.dtype == p.o.dtype ? ESA_OK : hy->dit.nn->ops->act(hy->dit.nn, &back);
}

/* The norm of q and k; the video's are rotated. */
static esa_status norm_heads(esa_hunyuan_dit *hy, const hunyuan_stream *s, int32_t which)
{
    const parts p = parts_of(hy, which);
    const esa_qk_args qk = { .q = p.qkv[0],
                             .k = p.qkv[1],
                             .q_weight = s->norm_q.data,
                             .k_weight = s->norm_k.data,
                             .cos = which == VIDEO ? hy->dit.cos : NULL,
                             .sin = which == VIDEO ? hy->dit.sin : NULL,
                             .D = hy->config.head_dim,
                             .eps = ESA_HUNYUAN_EPS,
                             .norm = ESA_QK_HEAD_RMS };
    return hy->dit.nn->ops->qk(hy->dit.nn, &qk);
}

static esa_status project(esa_hunyuan_dit *hy, const hunyuan_stream *s, int32_t which)
{
    const parts p = parts_of(hy, which);
    const esa_view room = rows_of(hy, &hy->dit.a, which),
                   a = hy->dit.nn->ops->input(hy->dit.nn, &room, &s->q);
    const esa_linear *const l[3] = { &s->q, &s->k, &s->v };
    return hy->dit.nn->ops->qkv(hy->dit.nn, p.qkv, &a, l);
}

/* ---------------------------------------------------------------- blocks */

static esa_status double_begin(esa_hunyuan_dit *hy, const hunyuan_stream *s, int32_t which)
{
    const int64_t d = hy->dit.d;
    const float *e = hy->e[which].data;
    const esa_nn_ops *op = hy->dit.nn->ops;
    const esa_norm_args n = esa_hunyuan_norm(hy, which, &s->q, e + d, e);
    ESA_TRY(op->linear(hy->dit.nn, &hy->e[which], &hy->silu, &s->modulation, ESA_ACT_NONE));
    ESA_TRY(op->norm(hy->dit.nn, &n));
    ESA_TRY(project(hy, s, which));
    return norm_heads(hy, s, which);
}

static esa_status double_end(esa_hunyuan_dit *hy, const hunyuan_stream *s, int32_t which)
{
    const int64_t d = hy->dit.d;
    const float *e = hy->e[which].data;
    const esa_nn_ops *op = hy->dit.nn->ops;
    const parts p = parts_of(hy, which);
    esa_norm_args n = esa_hunyuan_norm(hy, which, &s->up, e + 4 * d, e + 3 * d);
    const esa_norm_args end = { .x = n.x, .norm = ESA_NORM_NONE, .gate = e + 5 * d };
    esa_view o;
    ESA_TRY(esa_hunyuan_input(hy, &o, which, &p.o, &s->out));
    n.gate = e + 2 * d;
    ESA_TRY(op->linear_add(hy->dit.nn, &n, &o, &s->out, &p.last));
    return op->feed_forward(hy->dit.nn, &end, &n.y, &s->up, &s->down, &p.hidden, &p.last);
}

/* `which` are the rows that are computed: all of them, or the video's in the last block, where
 * those of the text are not needed behind attention. */
static esa_status single_end(esa_hunyuan_dit *hy, const hunyuan_stream *s, int32_t which)
{
    const float *e = hy->e[0].data;
    const esa_nn_ops *op = hy->dit.nn->ops;
    const parts p = parts_of(hy, which);
    const esa_view room = rows_of(hy, &hy->dit.a, which), a = op->input(hy->dit.nn, &room, &s->up),
                   in = op->input(hy->dit.nn, &p.all, &s->out);
    esa_view from = p.all, t = room;
    from.scale = t.scale = NULL;
    const esa_norm_args n = { .x = rows_of(hy, &hy->dit.x, which),
                              .norm = ESA_NORM_NONE,
                              .gate = e + 2 * hy->dit.d };
    ESA_TRY(op->linear(hy->dit.nn, &p.behind, &a, &s->up, ESA_ACT_GELU_TANH));
    if (in.dtype != from.dtype) {
        const esa_act_args convert = { .y = in, .x = from, .act = ESA_ACT_NONE };
        ESA_TRY(op->act(hy->dit.nn, &convert));
    }
    return op->linear_add(hy->dit.nn, &n, &in, &s->out, &t);
}

static esa_status run_single(esa_hunyuan_dit *hy, esa_session *session, int32_t i,
                             const hunyuan_text *text)
{
    const hunyuan_stream *s = &hy->stream[hy->config.doubles + i];
    const esa_nn_ops *op = hy->dit.nn->ops;
    const float *e = hy->e[0].data;
    const esa_view to = esa_view_cols(hy->e[0], 0, 3 * hy->dit.d);
    const esa_norm_args n = esa_hunyuan_norm(hy, BOTH, &s->q, e + hy->dit.d, e);
    const int32_t last = i + 1 == hy->dit.blocks && !hy->dit.watch;
    ESA_TRY(op->linear(hy->dit.nn, &to, &hy->silu, &s->modulation, ESA_ACT_NONE));
    ESA_TRY(op->norm(hy->dit.nn, &n));
    ESA_TRY(project(hy, s, BOTH));
    for (int32_t which = VIDEO; which <= TEXT; which++) ESA_TRY(norm_heads(hy, s, which));
    ESA_TRY(attend(hy, session, i, text));
    return single_end(hy, s, last ? VIDEO : BOTH);
}

static esa_status run_double(esa_hunyuan_dit *hy, esa_session *session, int32_t i,
                             const hunyuan_text *text)
{
    const hunyuan_stream *s = &hy->stream[2 * i];
    for (int32_t which = VIDEO; which <= TEXT; which++) ESA_TRY(double_begin(hy, &s[which], which));
    ESA_TRY(attend(hy, session, i, text));
    for (int32_t which = VIDEO; which <= TEXT; which++) ESA_TRY(double_end(hy, &s[which], which));
    return ESA_OK;
}

/* ---------------------------------------------------------------- products are measured once */

static esa_status prepare_stream(esa_hunyuan_dit *hy, const hunyuan_stream *s, int32_t which,
                                 int32_t single)
{
    esa_nn *nn = hy->dit.nn;
    const esa_nn_ops *op = nn->ops;
    const parts p = parts_of(hy, which);
    const esa_view room = rows_of(hy, &hy->dit.a, which), a = op->input(nn, &room, &s->up);
    esa_view t = room;
    t.scale = NULL;
    ESA_TRY(project(hy, s, which));
    if (single) {
        const esa_view in = op->input(nn, &p.all, &s->out);
        ESA_TRY(op->linear(nn, &p.behind, &a, &s->up, ESA_ACT_GELU_TANH));
        return op->linear(nn, &t, &in, &s->out, ESA_ACT_NONE);
    }
    const esa_view converted = op->input(nn, &room, &s->out),
                   o = converted.dtype == p.o.dtype ? p.o : converted,
                   down = op->input(nn, &p.hidden, &s->down);
    esa_view hidden = p.hidden;
    hidden.scale = NULL;
    ESA_TRY(op->linear(nn, &p.last, &o, &s->out, ESA_ACT_NONE));
    /* as feed_forward calls them */
    ESA_TRY(op->linear(nn, &hidden, &a, &s->up,
                       down.dtype == hidden.dtype ? ESA_ACT_GELU_TANH : ESA_ACT_NONE));
    return op->linear(nn, &p.last, &down, &s->down, ESA_ACT_NONE);
}

/* x keeps its contents, a and wide do not. */
esa_status esa_hunyuan_prepare(esa_dit *dit, int32_t i)
{
    esa_hunyuan_dit *hy = (esa_hunyuan_dit *)dit;
    const int32_t doubles = hy->config.doubles;
    if (i >= doubles) return prepare_stream(hy, &hy->stream[doubles + i], BOTH, 1);
    ESA_TRY(prepare_stream(hy, &hy->stream[2 * i], VIDEO, 0));
    return prepare_stream(hy, &hy->stream[2 * i + 1], TEXT, 0);
}

/* ---------------------------------------------------------------- the forward pass */

esa_status esa_hunyuan_before(esa_dit *dit, const esa_dit_call *call)
{
    esa_hunyuan_dit *hy = (esa_hunyuan_dit *)dit;
    const esa_view video = esa_hunyuan_rows(hy, &dit->x, VIDEO);
    ESA_TRY(esa_hunyuan_embed(hy, &hy->text[call->branch], call->t, call->guidance));
    ESA_TRY(esa_dit_gather(dit, call->x));
    return dit->nn->ops->linear(dit->nn, &video, &dit->patch_in, &hy->patch, ESA_ACT_NONE);
}

esa_status esa_hunyuan_block(esa_dit *dit, const esa_dit_call *call, int32_t i)
{
    esa_hunyuan_dit *hy = (esa_hunyuan_dit *)dit;
    const hunyuan_text *text = &hy->text[call->branch];
    const int32_t doubles = hy->config.doubles, single = i >= doubles;
    const esa_linear *q = &hy->stream[single ? doubles + i : 2 * i].q;
    ESA_TRY(esa_dit_measure(dit, i, q, &hy->prepared[single][q->weight.dtype == ESA_DTYPE_F8]));
    return (single ? run_single : run_double)(hy, call->session, i, text);
}

esa_status esa_hunyuan_after(esa_dit *dit, const esa_dit_call *call)
{
    esa_hunyuan_dit *hy = (esa_hunyuan_dit *)dit;
    const esa_nn_ops *op = hy->dit.nn->ops;
    const float *e = hy->e[0].data;
    const esa_view to = esa_view_cols(hy->e[0], 0, 2 * hy->dit.d);
    const esa_norm_args n = esa_hunyuan_norm(hy, VIDEO, &hy->proj_out, e, e + hy->dit.d);
    ESA_TRY(op->linear(hy->dit.nn, &to, &hy->silu, &hy->norm_out, ESA_ACT_NONE));
    ESA_TRY(op->norm(hy->dit.nn, &n));
    ESA_TRY(op->linear(hy->dit.nn, &hy->dit.patch_out, &n.y, &hy->proj_out, ESA_ACT_NONE));
    return esa_dit_patches(dit, &dit->patch_out, call->v, dit->out_channels, 0);
}
