/* dit_parts.c - what the forward passes of all transformers share.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/dit/dit_kind.h"

#include <string.h>
#include "session/session.h"

/* bytes of the feed-forward's hidden layer; longer sequences run in pieces of this size */
#define HIDDEN_BYTES (INT64_C(64) << 20)
#define MIN_FF_ROWS  512

/* ---------------------------------------------------------------- memory */

void esa_dit_place_turns(esa_dit *dit, esa_carve *carve, int64_t rows)
{
    const int64_t floats = rows * (dit->head_dim / 2);
    dit->turned = rows;
    dit->host_floats = 2 * floats;
    dit->cos = esa_carve_take(carve, floats * 4);
    dit->sin = esa_carve_take(carve, floats * 4);
}

esa_status esa_dit_write_turns(esa_dit *dit, const float *host)
{
    const int64_t floats = dit->turned * (dit->head_dim / 2);
    ESA_TRY(esa_nn_upload(dit->nn, dit->cos, host, floats * 4));
    return esa_nn_upload(dit->nn, dit->sin, host + floats, floats * 4);
}

void esa_dit_place_layers(esa_dit *dit, esa_carve *carve, int64_t ffn)
{
    esa_nn *nn = dit->nn;
    const int32_t type = nn->ops->dtype;
    const int64_t S = dit->rows, d = dit->d;
    if (!nn->ops->joined) {
        const int64_t rows = esa_min64(S, esa_max64(MIN_FF_ROWS, HIDDEN_BYTES / 4 / ffn));
        for (int32_t i = 0; i < 3; i++) dit->qkv[i] = esa_nn_take(nn, carve, type, S, d);
        dit->flat = dit->qkv[0];
        dit->more = dit->qkv[1];
        dit->o = dit->a;
        dit->hidden = esa_nn_take(nn, carve, type, rows, ffn);
        return;
    }
    /* The hidden layer takes the place of q, k and v. */
    const esa_view wide = esa_nn_take(nn, carve, type, S, esa_max64(3 * d, ffn));
    const esa_view all = esa_view_of(wide.data, type, wide.device, S, 3 * d);
    for (int32_t i = 0; i < 3; i++) dit->qkv[i] = esa_view_cols(all, i * d, d);
    dit->flat = esa_view_of(wide.data, type, wide.device, S, d);
    dit->more = esa_view_of((char *)wide.data + S * d * esa_view_element(type), type, wide.device,
                            S, d);
    dit->hidden = esa_view_of(wide.data, type, wide.device, S, ffn);
    dit->o = esa_nn_take(nn, carve, type, S, d);
    dit->a.scale = esa_carve_take(carve, S * 4);
    dit->hidden.scale = esa_carve_take(carve, S * 4);
}

/* ---------------------------------------------------------------- patches and rows */

esa_view esa_dit_video(const esa_dit *dit, const esa_view *v)
{
    const int64_t first = dit->kind->text_place == ESA_TEXT_FRONT ? dit->text_rows : 0;
    return esa_view_rows(*v, first, dit->tokens);
}

esa_view esa_dit_words(const esa_dit *dit, const esa_view *v)
{
    const int64_t first = dit->kind->text_place == ESA_TEXT_FRONT ? 0 : dit->tokens;
    return esa_view_rows(*v, first, dit->text_rows);
}

esa_status esa_dit_patches(esa_dit *dit, const esa_view *rows, float *latent, int32_t channels,
                           int32_t gather)
{
    esa_patch_args a = { .rows = *rows,
                         .latent = latent,
                         .perm = dit->perm,
                         .channels = channels,
                         .gather = gather,
                         .channel_first = dit->kind->channel_first };
    memcpy(a.size, dit->latent, sizeof a.size);
    memcpy(a.patch, dit->patch, sizeof a.patch);
    return dit->nn->ops->patches(dit->nn, &a);
}

esa_status esa_dit_gather(esa_dit *dit, const float *x)
{
    return esa_dit_patches(dit, &dit->patch_in, (float *)(uintptr_t)x, dit->in_channels, 1);
}

/* ---------------------------------------------------------------- layers */

esa_status esa_dit_input(esa_nn *nn, esa_view *in, const esa_view *x, const esa_view *room,
                         const esa_linear *l)
{
    const esa_view copy = nn->ops->input(nn, room, l);
    *in = x->dtype == copy.dtype || nn->ops->converts ? *x : copy;
    if (in->data == x->data) return ESA_OK;
    const esa_act_args convert = { .y = copy, .x = *x, .act = ESA_ACT_NONE };
    return nn->ops->act(nn, &convert);
}

/* A matrix [rows][heads * head_dim] as attention takes it. */
static esa_tensor heads_of(const esa_nn *nn, const esa_view *v, int32_t heads)
{
    esa_tensor t = esa_tensor_bsnd(v->data, v->dtype, 1, heads, v->rows, v->cols / heads);
    t.device = v->device;
    t.device_index = nn->be->ordinal(nn->ctx);
    t.stride[0] = v->rows * v->ld;
    t.stride[2] = v->ld;
    return t;
}

esa_status esa_dit_attend(esa_dit *dit, esa_session *session, int32_t layer, const esa_view qkv[3],
                          esa_view *o)
{
    esa_nn *nn = dit->nn;
    const int32_t heads = dit->heads;
    esa_view in[3];
    for (int32_t i = 0; i < 3; i++) {
        in[i] = nn->ops->attended(nn, &qkv[i]);
        const esa_act_args convert = { .y = in[i], .x = qkv[i], .act = ESA_ACT_NONE };
        if (in[i].dtype != qkv[i].dtype) ESA_TRY(nn->ops->act(nn, &convert));
    }
    *o = nn->ops->attended(nn, o);
    const esa_tensor q = heads_of(nn, &in[0], heads), k = heads_of(nn, &in[1], heads),
                     v = heads_of(nn, &in[2], heads), out = heads_of(nn, o, heads);
    const esa_qkvo views = { &q, &k, &v, &out, NULL, NULL, 0 };
    ESA_TRY(nn->ops->self_begin(nn));
    ESA_TRY(esa_session_attend(session, layer, ESA_CALL_SELF, &views));
    return nn->ops->self_end(nn);
}

esa_status esa_dit_measure(esa_dit *dit, int32_t i, const esa_linear *first, int32_t *done)
{
    if (!dit->nn->ops->prepares || *done) return ESA_OK;
    if (!esa_store_measures(dit->part.store, first)) return ESA_OK;
    dit->nn->preparing = 1;
    const esa_status status = dit->kind->prepare(dit, i);
    dit->nn->preparing = 0;
    *done = !status;
    return status;
}
