/* wan_dit_image.c - the image of Wan's models of image to video: keys and values of its states for
 * every layer, and the condition behind the latents.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/dit/wan_dit.h"

#include <string.h>

/* state: [R][image_dim] three times, [R][d] twice. */
enum { EMBEDS, NORMED, HIDDEN, WIDE, STATE, STATES };

static esa_status embed(esa_wan_dit *wan, const float *embeds, const esa_view state[STATES])
{
    esa_nn *nn = wan->dit.nn;
    const esa_nn_ops *op = nn->ops;
    const wan_embedder *e = &wan->image;
    /* the norms of diffusers' image embedder have the default eps of torch */
    const esa_norm_args first = { .y = state[NORMED],
                                  .x = state[EMBEDS],
                                  .norm = ESA_NORM_LAYER,
                                  .eps = 1e-5f,
                                  .weight = e->norm1_weight.data,
                                  .bias = e->norm1_bias.data },
                        last = { .y = state[STATE],
                                 .x = state[WIDE],
                                 .norm = ESA_NORM_LAYER,
                                 .eps = 1e-5f,
                                 .weight = e->norm2_weight.data,
                                 .bias = e->norm2_bias.data };
    const esa_act_args gelu = { .y = state[HIDDEN], .x = state[HIDDEN], .act = ESA_ACT_GELU };
    ESA_TRY(esa_nn_write(nn, &state[EMBEDS], embeds));
    ESA_TRY(op->norm(nn, &first));
    ESA_TRY(op->linear(nn, &state[HIDDEN], &state[NORMED], &e->up, ESA_ACT_NONE));
    ESA_TRY(op->act(nn, &gelu));
    ESA_TRY(op->linear(nn, &state[WIDE], &state[HIDDEN], &e->down, ESA_ACT_NONE));
    return op->norm(nn, &last);
}

static esa_status fill(esa_wan_dit *wan, const float *embeds, const esa_view state[STATES])
{
    esa_nn *nn = wan->dit.nn;
    const esa_nn_ops *op = nn->ops;
    const wan_text *p = &wan->picture;
    const int64_t R = p->rows;
    ESA_TRY(embed(wan, embeds, state));
    for (int32_t i = 0; i < wan->config.layers; i++) {
        const wan_attn *a = &wan->block[i].cross;
        const esa_view k = esa_view_rows(p->kv, 2 * i * R, R),
                       v = esa_view_rows(p->kv, (2 * i + 1) * R, R);
        ESA_TRY(
            esa_store_begin(wan->dit.part.store, 1 + i)); /* from here on views point to weights */
        const esa_qk_args norm = { .q = k,
                                   .q_weight = a->norm_image_k.data,
                                   .D = wan->config.head_dim,
                                   .eps = (float)wan->config.eps };
        ESA_TRY(op->linear(nn, &k, &state[STATE], &a->image_k, ESA_ACT_NONE));
        ESA_TRY(op->linear(nn, &v, &state[STATE], &a->image_v, ESA_ACT_NONE));
        ESA_TRY(op->qk(nn, &norm));
        ESA_TRY(esa_store_end(wan->dit.part.store, 1 + i));
    }
    return ESA_OK;
}

static esa_status make_picture(esa_wan_dit *wan, const float *embeds)
{
    wan_text *p = &wan->picture;
    const int32_t type = wan->dit.nn->ops->dtype, device = wan->dit.nn->be->device;
    const int64_t R = p->rows, d = wan->dit.d, image = wan->config.image_dim,
                  all = esa_size_mul(2 * wan->config.layers, R);
    const int64_t width[STATES] = { image, image, image, d, d };
    esa_view state[STATES];
    esa_carve carve = { 0 };
    void *room = NULL;
    p->kv = esa_view_of(NULL, type, device, all, d);
    p->kv_bytes = esa_size_mul(esa_size_mul(all, d), esa_view_element(type));
    ESA_TRY(esa_nn_alloc(wan->dit.nn, &p->kv.data, p->kv_bytes, "the image's keys and values"));
    for (int32_t pass = 0; pass < 2; pass++) {
        carve = (esa_carve){ .base = room };
        for (int32_t i = 0; i < STATES; i++)
            state[i] = esa_view_of(esa_carve_take(&carve, R * width[i] * esa_view_element(type)),
                                   type, device, R, width[i]);
        if (pass == 0) ESA_TRY(esa_nn_alloc(wan->dit.nn, &room, carve.used, "the image's states"));
    }
    const esa_status status = fill(wan, embeds, state);
    esa_nn_free(wan->dit.nn, room, carve.used);
    return status;
}

/* Keys and values of the image's states, and the condition behind the latents. */
esa_status esa_wan_image(esa_dit *dit, const esa_image *image)
{
    esa_wan_dit *wan = (esa_wan_dit *)dit;
    const esa_wan_config *c = &wan->config;
    const int64_t frame = (int64_t)dit->latent[0] * dit->latent[1] * dit->latent[2];
    if (!wan->input || !image->embeds != !c->image_dim)
        return esa_fail(dit->nn->ctx, ESA_ERR_STATE,
                        "an image was given to a transformer that takes none, or half of one");
    ESA_TRY(esa_nn_upload(dit->nn, wan->input + c->out_channels * frame, image->condition,
                          4 * (c->in_channels - c->out_channels) * frame));
    if (!image->embeds) return ESA_OK;
    wan->picture.rows = image->rows;
    return make_picture(wan, image->embeds);
}
