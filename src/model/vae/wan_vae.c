/* wan_vae.c - the layers of the decoder: names their tensors, loads and packs them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * One walk over the layers states which tensors are needed. esa_wan_vae_check compares them with
 * the file; esa_wan_vae_open also loads and packs them. */
#include "model/vae/wan_vae.h"

#include <stdio.h>
#include "model/vae/wan_vae_parts.h"
#include "nn/ops.h"

static void conv3d(esa_vae_walk *k, esa_conv *conv, int64_t cout, int64_t cin, int64_t kt,
                   int64_t ks, const char *name)
{
    esa_vae_want_conv(k, (esa_vae_layer){ .conv = conv }, 5,
                      (const int64_t[]){ cout, cin, kt, ks, ks }, name);
}

static void res_block(esa_vae_walk *k, int32_t *slots, esa_vae_res *r, int32_t cin, int32_t cout,
                      const char *prefix)
{
    char name[128];
    r->cin = cin;
    r->cout = cout;
    r->slot = *slots;
    *slots += 2;
    for (int32_t i = 0; i < 2; i++) {
        snprintf(name, sizeof name, "%s.norm%d", prefix, (int)i + 1);
        esa_vae_want_gamma(k, &r->norm[i], i ? cout : cin, 4, name);
        snprintf(name, sizeof name, "%s.conv%d", prefix, (int)i + 1);
        conv3d(k, &r->conv[i], cout, i ? cout : cin, 3, 3, name);
    }
    snprintf(name, sizeof name, "%s.conv_shortcut", prefix);
    if (cin != cout) conv3d(k, &r->shortcut, cout, cin, 1, 1, name);
}

/* The blocks at the size of the latents. */
static void middle(esa_vae_walk *k, int32_t *slots, esa_vae_res mid[2], esa_vae_attention *a,
                   int64_t deep, const char *side)
{
    char name[96];
    snprintf(name, sizeof name, "%s.mid_block.resnets.0", side);
    res_block(k, slots, &mid[0], (int32_t)deep, (int32_t)deep, name);
    snprintf(name, sizeof name, "%s.mid_block.attentions.0.norm", side);
    esa_vae_want_gamma(k, &a->norm, deep, 3, name);
    snprintf(name, sizeof name, "%s.mid_block.attentions.0.to_qkv", side);
    esa_vae_want_conv(k, (esa_vae_layer){ .conv = &a->qkv }, 4,
                      (const int64_t[]){ 3 * deep, deep, 1, 1 }, name);
    snprintf(name, sizeof name, "%s.mid_block.attentions.0.proj", side);
    esa_vae_want_conv(k, (esa_vae_layer){ .conv = &a->proj }, 4,
                      (const int64_t[]){ deep, deep, 1, 1 }, name);
    snprintf(name, sizeof name, "%s.mid_block.resnets.1", side);
    res_block(k, slots, &mid[1], (int32_t)deep, (int32_t)deep, name);
}

/* The encoder from input to output. Its file counts all blocks in one list. Of the last two
 * convolutions, only the channels of the means are used, and the last mixes both halves. */
static void walk_encoder(esa_vae_walk *k, esa_wan_vae *vae)
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
        esa_vae_want_conv(k, (esa_vae_layer){ .conv = &l->down }, 4,
                          (const int64_t[]){ width, width, 3, 3 }, name);
        if (c->temporal[at]) {
            l->slot = e->slots++;
            snprintf(name, sizeof name, "encoder.down_blocks.%d.time_conv", (int)number);
            conv3d(k, &l->time, width, width, 3, 1, name);
        }
        number++;
    }
    middle(k, &e->slots, e->mid, &e->attention, width, "encoder");
    esa_vae_want_gamma(k, &e->norm_out, width, 4, "encoder.norm_out");
    e->out_slot = e->slots++;
    conv3d(k, &e->conv_out, (int64_t)2 * c->z_dim, width, 3, 3, "encoder.conv_out");
    esa_vae_want_conv(k, (esa_vae_layer){ .conv = &e->quant, .half = 1 }, 5,
                      (const int64_t[]){ 2 * c->z_dim, 2 * c->z_dim, 1, 1, 1 }, "quant_conv");
}

/* The decoder from input to output; it uses the levels of the config in reverse order. */
static void walk_layers(esa_vae_walk *k, esa_wan_vae *vae)
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
            esa_vae_want_conv(k, (esa_vae_layer){ .conv = &l->time[0], .second = &l->time[1] }, 5,
                              (const int64_t[]){ 2 * l->cout, l->cout, 3, 1, 1 }, name);
        }
        snprintf(name, sizeof name, "decoder.up_blocks.%d.upsamplers.0.resample.1", (int)i);
        esa_vae_want_conv(k, (esa_vae_layer){ .conv = &l->up, .up2 = 1 }, 4,
                          (const int64_t[]){ width, l->cout, 3, 3 }, name);
    }
    esa_vae_want_gamma(k, &vae->norm_out, vae->level[c->levels - 1].cout, 4, "decoder.norm_out");
    vae->out_slot = vae->slots++;
    conv3d(k, &vae->conv_out, c->out_channels, vae->level[c->levels - 1].cout, 3, 3,
           "decoder.conv_out");
}

/* vae->res_all is allocated; most: at least the number of layers. */
static esa_status read_file(esa_wan_vae *vae, int64_t most, int32_t load)
{
    const esa_wan_vae_config *c = &vae->config;
    const esa_vae_stats stats = { .z_dim = c->z_dim, .std = c->std, .mean = c->mean };
    esa_vae_walk walk;
    ESA_TRY(esa_vae_walk_begin(&walk, &vae->env, most));
    walk.encoder = c->encoder;
    walk_layers(&walk, vae);
    if (c->encoder) walk_encoder(&walk, vae);
    return esa_vae_walk_end(&walk, load ? &vae->held : NULL, &stats);
}

static esa_status open_vae(const esa_part_env *env, esa_wan_vae **out,
                           const esa_wan_vae_config *config, int32_t load)
{
    esa_ctx *ctx = env->nn->ctx;
    const int64_t blocks = (int64_t)config->levels * (config->res_blocks + 1) + 2,
                  most = 32 + 10 * blocks + 4 * config->levels; /* both sides */
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
    const esa_status status = vae->res_all
                                  ? read_file(vae, most, load)
                                  : esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the VAE");
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
    esa_vae_held_free(nn, &vae->held);
    esa_mem_free(&nn->ctx->mem, vae->res_all, vae->res_bytes);
    esa_mem_free(&nn->ctx->mem, vae, sizeof *vae);
}

void esa_wan_vae_memory(const esa_wan_vae *vae, int64_t *parameters, int64_t *held, int64_t *mapped)
{
    *parameters = vae->held.parameters;
    *held = vae->held.bytes;
    *mapped = 0;
}
