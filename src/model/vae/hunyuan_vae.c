/* hunyuan_vae.c - the layers of the decoder: names their tensors, loads and packs them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * One walk over the layers states which tensors are needed, for the check and for loading. */
#include <stdio.h>
#include "model/vae/hunyuan_vae_parts.h"

/* Convolutions of diffusers' causal class have one more level of names. */
static void conv3d(esa_vae_walk *k, esa_conv *conv, int64_t cout, int64_t cin, int64_t side,
                   int32_t up2, const char *prefix)
{
    char name[128];
    snprintf(name, sizeof name, "%s.conv", prefix);
    esa_vae_want_conv(k, (esa_vae_layer){ .conv = conv, .up2 = up2 }, 5,
                      (const int64_t[]){ cout, cin, side, side, side }, name);
}

static void norm(esa_vae_walk *k, hunyuan_norm *n, int64_t channels, const char *name)
{
    n->channels = channels;
    esa_vae_want_norm(k, &n->weight, &n->bias, channels, name);
}

static void res_block(esa_vae_walk *k, hunyuan_res *r, int32_t cin, int32_t cout,
                      const char *prefix)
{
    char name[112];
    r->cin = cin;
    r->cout = cout;
    for (int32_t i = 0; i < 2; i++) {
        snprintf(name, sizeof name, "%s.norm%d", prefix, (int)i + 1);
        norm(k, &r->norm[i], i ? cout : cin, name);
        snprintf(name, sizeof name, "%s.conv%d", prefix, (int)i + 1);
        conv3d(k, &r->conv[i], cout, i ? cout : cin, 3, 0, name);
    }
    snprintf(name, sizeof name, "%s.conv_shortcut", prefix);
    if (cin != cout) conv3d(k, &r->shortcut, cout, cin, 1, 0, name);
}

static void attention(esa_vae_walk *k, esa_hunyuan_vae *vae, int64_t deep)
{
    static const char *const names[4] = { "to_q", "to_k", "to_v", "to_out.0" };
    esa_conv *const conv[4] = { &vae->q, &vae->k, &vae->v, &vae->out };
    const int64_t dim[2] = { deep, deep };
    char name[96];
    norm(k, &vae->attn_norm, deep, "decoder.mid_block.attentions.0.group_norm");
    for (int32_t i = 0; i < 4; i++) {
        snprintf(name, sizeof name, "decoder.mid_block.attentions.0.%s", names[i]);
        esa_vae_want_conv(k, (esa_vae_layer){ .conv = conv[i] }, 2, dim, name);
    }
}

/* The decoder from input to output; it uses the levels of the config in reverse order. */
static void walk_layers(esa_vae_walk *k, esa_hunyuan_vae *vae)
{
    const esa_hunyuan_vae_config *c = &vae->config;
    const int32_t deep = c->width[c->levels - 1];
    char name[96];
    esa_vae_want_conv(k, (esa_vae_layer){ .conv = &vae->post_quant }, 5,
                      (const int64_t[]){ c->z_dim, c->z_dim, 1, 1, 1 }, "post_quant_conv");
    conv3d(k, &vae->conv_in, deep, c->z_dim, 3, 0, "decoder.conv_in");
    res_block(k, &vae->mid[0], deep, deep, "decoder.mid_block.resnets.0");
    if (c->attention) attention(k, vae, deep);
    res_block(k, &vae->mid[1], deep, deep, "decoder.mid_block.resnets.1");
    for (int32_t i = 0; i < c->levels; i++) {
        hunyuan_level *l = &vae->level[i];
        l->res = vae->res_all + i * (c->res_blocks + 1);
        l->res_count = c->res_blocks + 1;
        l->cin = i ? vae->level[i - 1].cout : deep;
        l->cout = c->width[c->levels - 1 - i];
        for (int32_t r = 0; r < l->res_count; r++) {
            snprintf(name, sizeof name, "decoder.up_blocks.%d.resnets.%d", (int)i, (int)r);
            res_block(k, &l->res[r], r ? l->cout : l->cin, l->cout, name);
        }
        if (i == c->levels - 1) break;
        l->time = i >= c->levels - 3; /* the last two doublings are in time too */
        snprintf(name, sizeof name, "decoder.up_blocks.%d.upsamplers.0.conv", (int)i);
        conv3d(k, &l->up, l->cout, l->cout, 3, 1, name);
    }
    norm(k, &vae->norm_out, c->width[0], "decoder.conv_norm_out");
    conv3d(k, &vae->conv_out, 3, c->width[0], 3, 0, "decoder.conv_out");
}

/* ---------------------------------------------------------------- loading */

/* vae->res_all is allocated; most: at least the number of layers. */
static esa_status read_file(esa_hunyuan_vae *vae, int64_t most, int32_t load)
{
    const esa_vae_stats stats = { .z_dim = vae->config.z_dim, .factor = 1 / vae->config.scaling };
    esa_vae_walk walk;
    ESA_TRY(esa_vae_walk_begin(&walk, &vae->env, most));
    walk_layers(&walk, vae);
    return esa_vae_walk_end(&walk, load ? &vae->held : NULL, &stats);
}

static esa_status open_vae(const esa_part_env *env, esa_hunyuan_vae **out,
                           const esa_hunyuan_vae_config *config, int32_t load)
{
    esa_ctx *ctx = env->nn->ctx;
    const int64_t blocks = (int64_t)config->levels * (config->res_blocks + 1);
    *out = NULL;
    esa_hunyuan_vae *vae = esa_mem_zalloc(&ctx->mem, sizeof *vae);
    if (!vae) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the VAE");
    vae->env = *env;
    vae->config = *config;
    vae->res_bytes = (int64_t)sizeof(hunyuan_res) * blocks;
    vae->res_all = esa_mem_zalloc(&ctx->mem, vae->res_bytes);
    const esa_status status = vae->res_all
                                  ? read_file(vae, 16 + (blocks + 2) * 5 + config->levels, load)
                                  : esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the VAE");
    if (!status && load)
        *out = vae;
    else
        esa_hunyuan_vae_free(vae);
    return status;
}

esa_status esa_hunyuan_vae_check(const esa_part_env *env, const esa_hunyuan_vae_config *config)
{
    esa_hunyuan_vae *none;
    return open_vae(env, &none, config, 0);
}

esa_status esa_hunyuan_vae_open(const esa_part_env *env, esa_hunyuan_vae **vae,
                                const esa_hunyuan_vae_config *config)
{
    return open_vae(env, vae, config, 1);
}

static void free_res(esa_nn *nn, hunyuan_res *r)
{
    esa_nn_conv_free(nn, &r->conv[0]);
    esa_nn_conv_free(nn, &r->conv[1]);
    esa_nn_conv_free(nn, &r->shortcut);
}

void esa_hunyuan_vae_free(esa_hunyuan_vae *vae)
{
    if (!vae) return;
    esa_nn *nn = vae->env.nn;
    esa_conv *single[] = { &vae->post_quant, &vae->conv_in, &vae->conv_out, &vae->q,
                           &vae->k,          &vae->v,       &vae->out };
    for (size_t i = 0; i < sizeof single / sizeof single[0]; i++) esa_nn_conv_free(nn, single[i]);
    free_res(nn, &vae->mid[0]);
    free_res(nn, &vae->mid[1]);
    for (int32_t i = 0; i < vae->config.levels; i++) {
        hunyuan_level *l = &vae->level[i];
        for (int32_t r = 0; r < l->res_count; r++) free_res(nn, &l->res[r]);
        esa_nn_conv_free(nn, &l->up);
    }
    esa_vae_held_free(nn, &vae->held);
    esa_mem_free(&nn->ctx->mem, vae->res_all, vae->res_bytes);
    esa_mem_free(&nn->ctx->mem, vae, sizeof *vae);
}

void esa_hunyuan_vae_memory(const esa_hunyuan_vae *vae, int64_t *parameters, int64_t *held,
                            int64_t *mapped)
{
    *parameters = vae->held.parameters;
    *held = vae->held.bytes;
    *mapped = 0;
}
