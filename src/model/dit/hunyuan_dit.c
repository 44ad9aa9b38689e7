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
#include <string.h>
#include "model/dit/hunyuan_dit_internal.h"
#include "session/session.h"

enum { VIDEO = 0, TEXT, BOTH };

static esa_view rows_of(const esa_hunyuan_dit *dit, const esa_view *v, int32_t which)
{
    return which == BOTH ? *v : esa_hunyuan_rows(dit, v, which);
}

esa_norm_args esa_hunyuan_norm(const esa_hunyuan_dit *dit, int32_t which, const esa_linear *next,
                               const float *scale, const float *shift)
{
    const esa_view a = rows_of(dit, &dit->a, which);
    return (esa_norm_args){ .y = dit->nn->ops->input(dit->nn, &a, next),
                            .x = rows_of(dit, &dit->x, which),
                            .norm = ESA_NORM_LAYER,
                            .eps = ESA_HUNYUAN_EPS,
                            .scale = scale,
                            .shift = shift };
}

esa_status esa_hunyuan_input(esa_hunyuan_dit *dit, esa_view *in, int32_t which,
                             const esa_view *from, const esa_linear *l)
{
    const esa_view a = rows_of(dit, &dit->a, which);
    return esa_dit_input(dit->nn, in, from, &a, l);
}

/* The parts of wide for some rows. */
typedef struct parts {
    esa_view o, qkv[3], last; /* [rows][d] */
    esa_view hidden;          /* [rows][ffn] from column 0; a room as for ops->input */
    esa_view behind;          /* [rows][ffn] behind o */
    esa_view all;             /* [rows][d + ffn]; a room as for ops->input */
} parts;

static parts parts_of(const esa_hunyuan_dit *dit, int32_t which)
{
    const int64_t d = dit->d, ffn = dit->config.ffn;
    const esa_view rows = rows_of(dit, &dit->wide, which);
    parts p = { .hidden = esa_view_cols(rows, 0, ffn), .all = esa_view_cols(rows, 0, d + ffn) };
    esa_view plain = rows;
    plain.scale = NULL;
    p.o = esa_view_cols(plain, 0, d);
    for (int32_t i = 0; i < 3; i++) p.qkv[i] = esa_view_cols(plain, (1 + i) * d, d);
    p.last = esa_view_cols(plain, dit->wide.cols - d, d);
    p.behind = esa_view_cols(plain, d, ffn);
    return p;
}

/* ---------------------------------------------------------------- attention */

static esa_status attend(esa_hunyuan_dit *dit, esa_session *session, int32_t layer,
                         const hunyuan_text *text)
{
    const parts p = parts_of(dit, BOTH);
    esa_view o = p.o;
    esa_session_keys(session, text->length);
    ESA_TRY(esa_dit_attend(dit->nn, session, layer, p.qkv, &o, dit->config.heads));
    const esa_act_args back = { .y = p.o, .x = o, .act = ESA_ACT_NONE };
    return o.dtype == p.o.dtype ? ESA_OK : dit->nn->ops->act(dit->nn, &back);
}

/* The norm of q and k; the video's are rotated. */
static esa_status norm_heads(esa_hunyuan_dit *dit, const hunyuan_stream *s, int32_t which)
{
    const parts p = parts_of(dit, which);
    const esa_qk_args qk = { .q = p.qkv[0],
                             .k = p.qkv[1],
                             .q_weight = s->norm_q.data,
                             .k_weight = s->norm_k.data,
                             .cos = which == VIDEO ? dit->cos : NULL,
                             .sin = which == VIDEO ? dit->sin : NULL,
                             .D = dit->config.head_dim,
                             .eps = ESA_HUNYUAN_EPS,
                             .norm = ESA_QK_HEAD_RMS };
    return dit->nn->ops->qk(dit->nn, &qk);
}

static esa_status project(esa_hunyuan_dit *dit, const hunyuan_stream *s, int32_t which)
{
    const parts p = parts_of(dit, which);
    const esa_view room = rows_of(dit, &dit->a, which),
                   a = dit->nn->ops->input(dit->nn, &room, &s->q);
    const esa_linear *const l[3] = { &s->q, &s->k, &s->v };
    return dit->nn->ops->qkv(dit->nn, p.qkv, &a, l);
}

/* ---------------------------------------------------------------- blocks */

static esa_status double_begin(esa_hunyuan_dit *dit, const hunyuan_stream *s, int32_t which)
{
    const int64_t d = dit->d;
    const float *e = dit->e[which].data;
    const esa_nn_ops *op = dit->nn->ops;
    const esa_norm_args n = esa_hunyuan_norm(dit, which, &s->q, e + d, e);
    ESA_TRY(op->linear(dit->nn, &dit->e[which], &dit->silu, &s->modulation, ESA_ACT_NONE));
    ESA_TRY(op->norm(dit->nn, &n));
    ESA_TRY(project(dit, s, which));
    return norm_heads(dit, s, which);
}

static esa_status double_end(esa_hunyuan_dit *dit, const hunyuan_stream *s, int32_t which)
{
    const int64_t d = dit->d;
    const float *e = dit->e[which].data;
    const esa_nn_ops *op = dit->nn->ops;
    const parts p = parts_of(dit, which);
    esa_norm_args n = esa_hunyuan_norm(dit, which, &s->up, e + 4 * d, e + 3 * d);
    const esa_norm_args end = { .x = n.x, .norm = ESA_NORM_NONE, .gate = e + 5 * d };
    esa_view o;
    ESA_TRY(esa_hunyuan_input(dit, &o, which, &p.o, &s->out));
    n.gate = e + 2 * d;
    ESA_TRY(op->linear_add(dit->nn, &n, &o, &s->out, &p.last));
    return op->feed_forward(dit->nn, &end, &n.y, &s->up, &s->down, &p.hidden, &p.last);
}

/* `which` are the rows that are computed: all of them, or the video's in the last block, where
 * those of the text are not needed behind attention. */
static esa_status single_end(esa_hunyuan_dit *dit, const hunyuan_stream *s, int32_t which)
{
    const float *e = dit->e[0].data;
    const esa_nn_ops *op = dit->nn->ops;
    const parts p = parts_of(dit, which);
    const esa_view room = rows_of(dit, &dit->a, which), a = op->input(dit->nn, &room, &s->up),
                   in = op->input(dit->nn, &p.all, &s->out);
    esa_view from = p.all, t = room;
    from.scale = t.scale = NULL;
    const esa_norm_args n = { .x = rows_of(dit, &dit->x, which),
                              .norm = ESA_NORM_NONE,
                              .gate = e + 2 * dit->d };
    ESA_TRY(op->linear(dit->nn, &p.behind, &a, &s->up, ESA_ACT_GELU_TANH));
    if (in.dtype != from.dtype) {
        const esa_act_args convert = { .y = in, .x = from, .act = ESA_ACT_NONE };
        ESA_TRY(op->act(dit->nn, &convert));
    }
    return op->linear_add(dit->nn, &n, &in, &s->out, &t);
}

static esa_status run_single(esa_hunyuan_dit *dit, esa_session *session, int32_t i,
                             const hunyuan_text *text)
{
    const hunyuan_stream *s = &dit->stream[dit->config.doubles + i];
    const esa_nn_ops *op = dit->nn->ops;
    const float *e = dit->e[0].data;
    const esa_view to = esa_view_cols(dit->e[0], 0, 3 * dit->d);
    const esa_norm_args n = esa_hunyuan_norm(dit, BOTH, &s->q, e + dit->d, e);
    const int32_t last = i + 1 == dit->blocks && !dit->watch;
    ESA_TRY(op->linear(dit->nn, &to, &dit->silu, &s->modulation, ESA_ACT_NONE));
    ESA_TRY(op->norm(dit->nn, &n));
    ESA_TRY(project(dit, s, BOTH));
    for (int32_t which = VIDEO; which <= TEXT; which++) ESA_TRY(norm_heads(dit, s, which));
    ESA_TRY(attend(dit, session, i, text));
    return single_end(dit, s, last ? VIDEO : BOTH);
}

static esa_status run_double(esa_hunyuan_dit *dit, esa_session *session, int32_t i,
                             const hunyuan_text *text)
{
    const hunyuan_stream *s = &dit->stream[2 * i];
    for (int32_t which = VIDEO; which <= TEXT; which++)
        ESA_TRY(double_begin(dit, &s[which], which));
    ESA_TRY(attend(dit, session, i, text));
    for (int32_t which = VIDEO; which <= TEXT; which++) ESA_TRY(double_end(dit, &s[which], which));
    return ESA_OK;
}

/* ---------------------------------------------------------------- products are measured once */

static esa_status prepare_stream(esa_hunyuan_dit *dit, const hunyuan_stream *s, int32_t which,
                                 int32_t single)
{
    esa_nn *nn = dit->nn;
    const esa_nn_ops *op = nn->ops;
    const parts p = parts_of(dit, which);
    const esa_view room = rows_of(dit, &dit->a, which), a = op->input(nn, &room, &s->up);
    esa_view t = room;
    t.scale = NULL;
    ESA_TRY(project(dit, s, which));
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

/* Before the block i runs: x keeps its contents, a and wide do not. */
static esa_status prepare(esa_hunyuan_dit *dit, int32_t i)
{
    const int32_t single = i >= dit->config.doubles;
    const hunyuan_stream *s = &dit->stream[single ? dit->config.doubles + i : 2 * i];
    int32_t *done = &dit->prepared[single][s->q.weight.dtype == ESA_DTYPE_F8];
    if (!dit->nn->ops->prepares || *done || !esa_store_measures(dit->store, &s->q)) return ESA_OK;
    dit->nn->preparing = 1;
    esa_status status = prepare_stream(dit, s, single ? BOTH : VIDEO, single);
    if (!status && !single) status = prepare_stream(dit, s + 1, TEXT, 0);
    dit->nn->preparing = 0;
    *done = !status;
    return status;
}

/* ---------------------------------------------------------------- the forward pass */

/* Shows x to the watcher, the video in grid order. */
static esa_status show(esa_hunyuan_dit *dit, int32_t block)
{
    if (!dit->watch) return ESA_OK;
    const esa_allocator *mem = &dit->nn->ctx->mem;
    const int64_t d = dit->d, N = dit->tokens, S = N + dit->text_rows, bytes = S * (2 * d + 1) * 4;
    float *hidden = esa_mem_alloc(mem, bytes), *rows = hidden + S * d;
    int32_t *perm = (int32_t *)(rows + S * d);
    if (!hidden) return esa_fail(dit->nn->ctx, ESA_ERR_MEMORY, "out of memory for a watched block");
    esa_status status = esa_nn_read(dit->nn, rows, &dit->x);
    if (!status && dit->perm) status = esa_nn_download(dit->nn, perm, dit->perm, N * 4);
    for (int64_t i = 0; !status && i < S; i++)
        memcpy(hidden + (dit->perm && i < N ? perm[i] : i) * d, rows + i * d, (size_t)d * 4);
    if (!status) dit->watch(dit->watch_user, block, hidden, S, d);
    esa_mem_free(mem, hidden, bytes);
    return status;
}

static esa_status run_patches(esa_hunyuan_dit *dit, const esa_view *rows, float *latent,
                              int32_t channels, int32_t gather)
{
    esa_patch_args a = { .rows = *rows,
                         .latent = latent,
                         .perm = dit->perm,
                         .channels = channels,
                         .gather = gather,
                         .channel_first = 1 };
    memcpy(a.size, dit->latent, sizeof a.size);
    memcpy(a.patch, dit->config.patch, sizeof a.patch);
    return dit->nn->ops->patches(dit->nn, &a);
}

static esa_status run_head(esa_hunyuan_dit *dit, float *v)
{
    const esa_nn_ops *op = dit->nn->ops;
    const float *e = dit->e[0].data;
    const esa_view to = esa_view_cols(dit->e[0], 0, 2 * dit->d);
    const esa_norm_args n = esa_hunyuan_norm(dit, VIDEO, &dit->proj_out, e, e + dit->d);
    ESA_TRY(op->linear(dit->nn, &to, &dit->silu, &dit->norm_out, ESA_ACT_NONE));
    ESA_TRY(op->norm(dit->nn, &n));
    ESA_TRY(op->linear(dit->nn, &dit->patch_out, &n.y, &dit->proj_out, ESA_ACT_NONE));
    return run_patches(dit, &dit->patch_out, v, dit->config.out_channels, 0);
}

static esa_status run_block(esa_hunyuan_dit *dit, esa_session *session, int32_t i,
                            const hunyuan_text *text)
{
    ESA_TRY(esa_store_begin(dit->store, 1 + i));
    ESA_TRY(prepare(dit, i));
    ESA_TRY((i < dit->config.doubles ? run_double : run_single)(dit, session, i, text));
    return esa_store_end(dit->store, 1 + i);
}

static esa_status forward(esa_hunyuan_dit *dit, const esa_dit_call *c)
{
    const hunyuan_text *text = &dit->text[c->branch];
    const esa_view video = esa_hunyuan_rows(dit, &dit->x, VIDEO);
    ESA_TRY(esa_hunyuan_embed(dit, text, c->t, c->guidance));
    ESA_TRY(run_patches(dit, &dit->patch_in, (float *)(uintptr_t)c->x, dit->config.in_channels, 1));
    ESA_TRY(dit->nn->ops->linear(dit->nn, &video, &dit->patch_in, &dit->patch, ESA_ACT_NONE));
    ESA_TRY(show(dit, -1));
    for (int32_t i = 0; i < dit->blocks; i++) {
        ESA_TRY(run_block(dit, c->session, i, text));
        ESA_TRY(show(dit, i));
        ESA_TRY(dit->nn->ops->pace(dit->nn));
        if (dit->tick && dit->tick(dit->tick_user, i + 1, dit->blocks))
            return esa_fail(dit->nn->ctx, ESA_ERR_STATE, "cancelled");
    }
    return run_head(dit, c->v);
}

esa_status esa_hunyuan_dit_forward(esa_hunyuan_dit *dit, const esa_dit_call *call)
{
    if (call->branch < 0 || call->branch >= dit->branches || !dit->text[call->branch].room)
        return esa_fail(dit->nn->ctx, ESA_ERR_STATE, "the transformer has no text for branch %d",
                        call->branch);
    return forward(dit, call);
}
