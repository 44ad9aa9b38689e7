/* wan_vae.c - the layers of the decoder: names their tensors, loads and packs them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * One walk over the layers states which tensors are needed. esa_wan_vae_check compares them with
 * the file; esa_wan_vae_open also loads and packs them. */
#include "model/vae/wan_vae.h"

#include <stdio.h>
#include <string.h>
#include "model/vae/wan_vae_parts.h"
#include "nn/ops.h"

/* One layer of the file, and where its weights go. */
typedef struct vae_piece {
    esa_weight weight, bias;
    esa_conv *conv, *second; /* second gets the upper half of the output channels, if not NULL */
    float **gamma;
    int64_t channels; /* channels of gamma */
    int32_t up2;
    int32_t half; /* 1: only the lower half of the output channels is used */
} vae_piece;

typedef struct vae_walk {
    esa_weights *w;
    vae_piece *piece; /* [cap] */
    int64_t count, cap;
} vae_walk;

static void conv_piece(vae_walk *k, vae_piece piece, int32_t rank, const int64_t *dim,
                       const char *name)
{
    vae_piece *p = &k->piece[k->count++];
    *p = piece;
    esa_weights_want(k->w, &p->weight, 0, rank, dim, "%s.weight", name);
    esa_weights_want(k->w, &p->bias, 0, 1, dim, "%s.bias", name);
}

static void conv3d(vae_walk *k, esa_conv *conv, int64_t cout, int64_t cin, int64_t kt, int64_t ks,
                   const char *name)
{
    conv_piece(k, (vae_piece){ .conv = conv }, 5, (const int64_t[]){ cout, cin, kt, ks, ks }, name);
}

static void norm(vae_walk *k, float **gamma, int64_t channels, int32_t rank, const char *name)
{
    vae_piece *p = &k->piece[k->count++];
    *p = (vae_piece){ .gamma = gamma, .channels = channels };
    esa_weights_want(k->w, &p->weight, ESA_WANT_F32, rank, (const int64_t[]){ channels, 1, 1, 1 },
                     "%s.gamma", name);
}

static void res_block(vae_walk *k, int32_t *slots, esa_vae_res *r, int32_t cin, int32_t cout,
                      const char *prefix)
{
    char name[128];
    r->cin = cin;
    r->cout = cout;
    r->slot = *slots;
    *slots += 2;
    for (int32_t i = 0; i < 2; i++) {
        snprintf(name, sizeof name, "%s.norm%d", prefix, (int)i + 1);
        norm(k, &r->norm[i], i ? cout : cin, 4, name);
        snprintf(name, sizeof name, "%s.conv%d", prefix, (int)i + 1);
        conv3d(k, &r->conv[i], cout, i ? cout : cin, 3, 3, name);
    }
    snprintf(name, sizeof name, "%s.conv_shortcut", prefix);
    if (cin != cout) conv3d(k, &r->shortcut, cout, cin, 1, 1, name);
}

/* The blocks at the size of the latents. */
static void middle(vae_walk *k, int32_t *slots, esa_vae_res mid[2], esa_vae_attention *a,
                   int64_t deep, const char *side)
{
    char name[96];
    snprintf(name, sizeof name, "%s.mid_block.resnets.0", side);
    res_block(k, slots, &mid[0], (int32_t)deep, (int32_t)deep, name);
    snprintf(name, sizeof name, "%s.mid_block.attentions.0.norm", side);
    norm(k, &a->norm, deep, 3, name);
    snprintf(name, sizeof name, "%s.mid_block.attentions.0.to_qkv", side);
    conv_piece(k, (vae_piece){ .conv = &a->qkv }, 4, (const int64_t[]){ 3 * deep, deep, 1, 1 },
               name);
    snprintf(name, sizeof name, "%s.mid_block.attentions.0.proj", side);
    conv_piece(k, (vae_piece){ .conv = &a->proj }, 4, (const int64_t[]){ deep, deep, 1, 1 }, name);
    snprintf(name, sizeof name, "%s.mid_block.resnets.1", side);
    res_block(k, slots, &mid[1], (int32_t)deep, (int32_t)deep, name);
}

/* The encoder from input to output. Its file counts all blocks in one list. Of the last two
 * convolutions, only the channels of the means are used, and the last mixes both halves. */
static void walk_encoder(vae_walk *k, esa_wan_vae *vae)
{
    const esa_wan_vae_config *c = &vae->config;
    esa_vae_encoder *e = &vae->encoder;
    int32_t width = c->base_dim, number = 0;
    char name[96];
    e->in_slot = e->slots++;
    conv3d(k, &e->conv_in, width, c->in_channels, 3, 3, "encoder.conv_in");
    for (int32_t i = c->levels - 1; i >= 0; i--) {
        const int32_t at = c->levels - 1 - i; /* in the order of the config */
        esa_vae_down *l = &e->level[i];
        l->res = e->res_all + at * c->res_blocks;
        l->cin = width;
        l->cout = c->base_dim * c->dim_mult[at];
        l->widest = l->cin > l->cout ? l->cin : l->cout;
        for (int32_t r = 0; r < c->res_blocks; r++) {
            snprintf(name, sizeof name, "encoder.down_blocks.%d", (int)number++);
            res_block(k, &e->slots, &l->res[r], r ? l->cout : l->cin, l->cout, name);
        }
        width = l->cout;
        if (i == 0) break;
        snprintf(name, sizeof name, "encoder.down_blocks.%d.resample.1", (int)number);
        conv_piece(k, (vae_piece){ .conv = &l->down }, 4, (const int64_t[]){ width, width, 3, 3 },
                   name);
        if (c->temporal[at]) {
            l->slot = e->slots++;
            snprintf(name, sizeof name, "encoder.down_blocks.%d.time_conv", (int)number);
            conv3d(k, &l->time, width, width, 3, 1, name);
        }
        number++;
    }
    middle(k, &e->slots, e->mid, &e->attention, width, "encoder");
    norm(k, &e->norm_out, width, 4, "encoder.norm_out");
    e->out_slot = e->slots++;
    conv3d(k, &e->conv_out, (int64_t)2 * c->z_dim, width, 3, 3, "encoder.conv_out");
    conv_piece(k, (vae_piece){ .conv = &e->quant, .half = 1 }, 5,
               (const int64_t[]){ 2 * c->z_dim, 2 * c->z_dim, 1, 1, 1 }, "quant_conv");
}

/* The decoder from input to output; it uses the levels of the config in reverse order. */
static void walk_layers(vae_walk *k, esa_wan_vae *vae)
{
    const esa_wan_vae_config *c = &vae->config;
    const int32_t deep = c->decoder_base_dim * c->dim_mult[c->levels - 1];
    char name[96];
    conv3d(k, &vae->post_quant, c->z_dim, c->z_dim, 1, 1, "post_quant_conv");
    vae->in_slot = vae->slots++;
    conv3d(k, &vae->conv_in, deep, c->z_dim, 3, 3, "decoder.conv_in");
    middle(k, &vae->slots, vae->mid, &vae->attention, deep, "decoder");
    int32_t width = deep;
    for (int32_t i = 0; i < c->levels; i++) {
        esa_vae_level *l = &vae->level[i];
        l->res = vae->res_all + i * (c->res_blocks + 1);
        l->res_count = c->res_blocks + 1;
        l->cin = width;
        l->cout = c->decoder_base_dim * c->dim_mult[c->levels - 1 - i];
        l->widest = l->cin > l->cout ? l->cin : l->cout;
        for (int32_t r = 0; r < l->res_count; r++) {
            snprintf(name, sizeof name, "decoder.up_blocks.%d.resnets.%d", (int)i, (int)r);
            res_block(k, &vae->slots, &l->res[r], r ? l->cout : l->cin, l->cout, name);
        }
        if (i == c->levels - 1) break;
        width = l->cout / 2;
        if (c->temporal[c->levels - 2 - i]) {
            l->slot = vae->slots++;
            snprintf(name, sizeof name, "decoder.up_blocks.%d.upsamplers.0.time_conv", (int)i);
            conv_piece(k, (vae_piece){ .conv = &l->time[0], .second = &l->time[1] }, 5,
                       (const int64_t[]){ 2 * l->cout, l->cout, 3, 1, 1 }, name);
        }
        snprintf(name, sizeof name, "decoder.up_blocks.%d.upsamplers.0.resample.1", (int)i);
        conv_piece(k, (vae_piece){ .conv = &l->up, .up2 = 1 }, 4,
                   (const int64_t[]){ width, l->cout, 3, 3 }, name);
    }
    norm(k, &vae->norm_out, vae->level[c->levels - 1].cout, 4, "decoder.norm_out");
    vae->out_slot = vae->slots++;
    conv3d(k, &vae->conv_out, c->out_channels, vae->level[c->levels - 1].cout, 3, 3,
           "decoder.conv_out");
}

/* The part of a tensor for output channels first .. first + count - 1. */
static esa_weight part_of(const esa_weight *w, int64_t first, int64_t count)
{
    esa_weight out = *w;
    if (!w->data) return out;
    out.data = (const char *)w->data +
               first * (esa_weight_count(w) / w->dim[0]) * esa_dtype_size(w->dtype);
    out.dim[0] = count;
    return out;
}

static esa_status pack_convs(esa_wan_vae *vae, const vae_walk *k)
{
    esa_nn *nn = vae->env.nn;
    for (int64_t i = 0; i < k->count; i++) {
        const vae_piece *p = &k->piece[i];
        if (p->gamma) continue;
        const int64_t n = p->second || p->half ? p->weight.dim[0] / 2 : p->weight.dim[0];
        const esa_weight w = part_of(&p->weight, 0, n), b = part_of(&p->bias, 0, n);
        ESA_TRY(nn->ops->planes->conv_pack(nn, p->conv, &w, &b, p->up2));
        if (!p->second) continue;
        const esa_weight w2 = part_of(&p->weight, n, n), b2 = part_of(&p->bias, n, n);
        ESA_TRY(nn->ops->planes->conv_pack(nn, p->second, &w2, &b2, p->up2));
    }
    return ESA_OK;
}

/* The norms, then the statistics of the latents, from host to the device. */
static esa_status place_vectors(esa_wan_vae *vae, const vae_walk *k, float *host)
{
    esa_nn *nn = vae->env.nn;
    const int32_t z = vae->config.z_dim;
    int64_t at = 0;
    for (int64_t i = 0; i < k->count; i++) {
        const vae_piece *p = &k->piece[i];
        if (!p->gamma) continue;
        esa_weight_to_f32(host + at, &p->weight, 0, p->channels);
        *p->gamma = vae->vectors + at;
        at += p->channels;
    }
    vae->scale = vae->vectors + at;
    vae->shift = vae->scale + z;
    for (int32_t c = 0; c < z; c++) {
        host[at + c] = (float)vae->config.std[c];
        host[at + z + c] = (float)vae->config.mean[c];
    }
    return esa_nn_upload(nn, vae->vectors, host, vae->vector_bytes);
}

static esa_status pack(esa_wan_vae *vae, const vae_walk *k)
{
    esa_nn *nn = vae->env.nn;
    vae->vector_bytes = (int64_t)8 * vae->config.z_dim;
    for (int64_t i = 0; i < k->count; i++) vae->vector_bytes += 4 * k->piece[i].channels;
    ESA_TRY(esa_nn_alloc(nn, (void **)&vae->vectors, vae->vector_bytes, "the norms of the VAE"));
    float *host = esa_mem_alloc(&nn->ctx->mem, vae->vector_bytes);
    if (!host) return esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for the norms of the VAE");
    const esa_status status = place_vectors(vae, k, host);
    esa_mem_free(&nn->ctx->mem, host, vae->vector_bytes);
    return status ? status : pack_convs(vae, k);
}

/* walk->piece and vae->res_all are allocated; walk->w is freed by the caller. */
static esa_status read_file(esa_wan_vae *vae, vae_walk *walk, int32_t load)
{
    const esa_part_env *env = &vae->env;
    const int64_t held = env->nn->held - env->nn->scratch_bytes;
    ESA_TRY(env->random ? esa_weights_open_random(env->nn->ctx, &walk->w, "vae")
                        : esa_weights_open_part(env->nn->ctx, &walk->w, env->folder, "vae",
                                                "diffusion_pytorch_model", "vae"));
    walk_layers(walk, vae);
    if (vae->config.encoder) {
        walk_encoder(walk, vae);
    } else {
        esa_weights_ignore(walk->w, "encoder.");
        esa_weights_ignore(walk->w, "quant_conv.");
    }
    ESA_TRY(esa_weights_check(walk->w, env->report, env->report_user));
    if (!load) return ESA_OK;
    /* Packing copies every weight, so the file is only mapped and not copied a second time. */
    ESA_TRY(esa_weights_load(walk->w, ESA_HOLD_FILE));
    ESA_TRY(pack(vae, walk));
    vae->parameters = esa_weights_parameters(walk->w);
    vae->held = env->nn->held - env->nn->scratch_bytes - held;
    return ESA_OK;
}

static esa_status open_vae(const esa_part_env *env, esa_wan_vae **out,
                           const esa_wan_vae_config *config, int32_t load)
{
    esa_ctx *ctx = env->nn->ctx;
    /* both sides */
    vae_walk walk = { .cap = 32 + (int64_t)(config->levels * (config->res_blocks + 1) + 2) * 10 +
                             4 * config->levels };
    *out = NULL;
    esa_wan_vae *vae = esa_mem_zalloc(&ctx->mem, sizeof *vae);
    if (!vae) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the VAE");
    vae->env = *env;
    vae->config = *config;
    vae->levels = config->levels;
    vae->res_bytes = (int64_t)sizeof(esa_vae_res) * config->levels * (2 * config->res_blocks + 1);
    vae->res_all = esa_mem_zalloc(&ctx->mem, vae->res_bytes);
    if (vae->res_all)
        vae->encoder.res_all = vae->res_all + config->levels * (config->res_blocks + 1);
    walk.piece = esa_mem_zalloc(&ctx->mem, walk.cap * (int64_t)sizeof(vae_piece));
    const esa_status status = vae->res_all && walk.piece
                                  ? read_file(vae, &walk, load)
                                  : esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the VAE");
    esa_weights_free(walk.w);
    esa_mem_free(&ctx->mem, walk.piece, walk.cap * (int64_t)sizeof(vae_piece));
    if (!status && load)
        *out = vae;
    else
        esa_wan_vae_free(vae);
    return status;
}

esa_status esa_wan_vae_check(const esa_part_env *env, const esa_wan_vae_config *config)
{
    esa_wan_vae *none;
    return open_vae(env, &none, config, 0);
}

esa_status esa_wan_vae_open(const esa_part_env *env, esa_wan_vae **vae,
                            const esa_wan_vae_config *config)
{
    return open_vae(env, vae, config, 1);
}

static void free_res(esa_nn *nn, esa_vae_res *r)
{
    esa_nn_conv_free(nn, &r->conv[0]);
    esa_nn_conv_free(nn, &r->conv[1]);
    esa_nn_conv_free(nn, &r->shortcut);
}

void esa_wan_vae_free(esa_wan_vae *vae)
{
    if (!vae) return;
    esa_nn *nn = vae->env.nn;
    esa_vae_encoder *e = &vae->encoder;
    esa_conv *single[] = {
        &vae->post_quant, &vae->conv_in, &vae->conv_out, &vae->attention.qkv, &vae->attention.proj,
        &e->conv_in,      &e->conv_out,  &e->quant,      &e->attention.qkv,   &e->attention.proj
    };
    for (size_t i = 0; i < sizeof single / sizeof single[0]; i++) esa_nn_conv_free(nn, single[i]);
    for (int32_t i = 0; i < 2; i++) {
        free_res(nn, &vae->mid[i]);
        free_res(nn, &e->mid[i]);
    }
    for (int32_t i = 0; i < vae->levels; i++) {
        for (int32_t r = 0; r < vae->config.res_blocks && e->level[i].res; r++)
            free_res(nn, &e->level[i].res[r]);
        esa_nn_conv_free(nn, &e->level[i].down);
        esa_nn_conv_free(nn, &e->level[i].time);
    }
    for (int32_t i = 0; i < vae->levels; i++) {
        esa_vae_level *l = &vae->level[i];
        for (int32_t r = 0; r < l->res_count; r++) free_res(nn, &l->res[r]);
        esa_nn_conv_free(nn, &l->time[0]);
        esa_nn_conv_free(nn, &l->time[1]);
        esa_nn_conv_free(nn, &l->up);
    }
    esa_nn_free(nn, vae->vectors, vae->vector_bytes);
    esa_mem_free(&nn->ctx->mem, vae->res_all, vae->res_bytes);
    esa_mem_free(&nn->ctx->mem, vae, sizeof *vae);
}

void esa_wan_vae_memory(const esa_wan_vae *vae, int64_t *parameters, int64_t *held, int64_t *mapped)
{
    *parameters = vae->parameters;
    *held = vae->held;
    *mapped = 0;
}
