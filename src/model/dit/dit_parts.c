/* dit_parts.c - see dit_parts.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/dit/dit_parts.h"

#include "session/session.h"

#define MAX_TOKENS (INT64_C(1) << 26) /* 67 million */
#define MAX_SIDE   (1 << 20)

esa_status esa_dit_check_size(esa_ctx *ctx, const int32_t latent[3], const int32_t patch[3],
                              int64_t *tokens)
{
    static const char *const side[3] = { "frames", "height", "width" };
    *tokens = 1;
    for (int32_t i = 0; i < 3; i++) {
        if (latent[i] < patch[i] || latent[i] % patch[i])
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "the latents have %d %s, expected a multiple of %d (the patch)",
                            latent[i], side[i], patch[i]);
        if (latent[i] > MAX_SIDE)
            return esa_fail(ctx, ESA_ERR_ARGUMENT, "the latents have %d %s, expected at most %d",
                            latent[i], side[i], MAX_SIDE);
        *tokens *= latent[i] / patch[i]; /* at most 2^60 */
    }
    if (*tokens > MAX_TOKENS)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "the video has %lld tokens, expected at most %lld",
                        (long long)*tokens, (long long)MAX_TOKENS);
    return ESA_OK;
}

/* What a caller that said nothing will need: attention and selection take less than three
 * activations, adaptive orders three more. */
static int64_t guess_scratch(const esa_nn *nn, int64_t elements, int32_t adaptive)
{
    const esa_backend *be = nn->be;
    return (adaptive ? 6 : 3) * elements * esa_view_element(nn->ops->dtype) +
           (be->products ? be->products->workspace(nn->ctx) : 0);
}

esa_status esa_dit_leave_room(esa_nn *nn, esa_store *store, const esa_dit_room *given,
                              int64_t during, int64_t elements, int32_t adaptive)
{
    if (!given) return esa_store_leave(store, during, guess_scratch(nn, elements, adaptive));
    return esa_store_leave(store, esa_max64(during + given->beside, given->after), given->scratch);
}

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

esa_status esa_dit_attend(esa_nn *nn, esa_session *session, int32_t layer, const esa_view qkv[3],
                          esa_view *o, int32_t heads)
{
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
