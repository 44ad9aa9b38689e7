/* cog_vae.c - the layers of CogVideoX's decoder: names their tensors, loads and packs them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * One walk over the layers states which tensors are needed. esa_cog_vae_check compares them with
 * the file; esa_cog_vae_open also loads and packs them. */
#include "model/vae/cog_vae.h"

#include <stdio.h>
#include "model/vae/cog_vae_parts.h"
#include "nn/ops.h"

#define MID_BLOCKS 2

static void conv3d(esa_vae_walk *k, esa_conv *conv, int64_t cout, int64_t cin, int64_t side,
                   const char *name)
{
    esa_vae_want_conv(k, (esa_vae_layer){ .conv = conv }, 5,
                      (const int64_t[]){ cout, cin, side, side, side }, name);
}

static void norm(esa_vae_walk *k, const esa_cog_vae *vae, cog_vae_norm *n, int32_t channels,
                 const char *prefix)
{
    char name[144];
    n->channels = channels;
    snprintf(name, sizeof name, "%s.norm_layer", prefix);
    esa_vae_want_norm(k, &n->weight, &n->bias, channels, name);
    snprintf(name, sizeof name, "%s.conv_y.conv", prefix);
    conv3d(k, &n->times, channels, vae->config.z_dim, 1, name);
    snprintf(name, sizeof name, "%s.conv_b.conv", prefix);
    conv3d(k, &n->plus, channels, vae->config.z_dim, 1, name);
}

static int32_t new_slot(esa_cog_vae *vae, int32_t level, int32_t channels)
{
    vae->slot[vae->slots] = (cog_vae_slot){ .level = level, .channels = channels };
    return vae->slots++;
}

static void res_block(esa_vae_walk *k, esa_cog_vae *vae, cog_vae_res *r, int32_t level, int32_t cin,
                      int32_t cout, const char *prefix)
{
    char name[128];
    r->cin = cin;
    r->cout = cout;
    for (int32_t i = 0; i < 2; i++) {
        const int32_t slot = new_slot(vae, level, i ? cout : cin);
        if (i == 0) r->slot = slot;
        snprintf(name, sizeof name, "%s.norm%d", prefix, (int)i + 1);
        norm(k, vae, &r->norm[i], i ? cout : cin, name);
        snprintf(name, sizeof name, "%s.conv%d.conv", prefix, (int)i + 1);
        conv3d(k, &r->conv[i], cout, i ? cout : cin, 3, name);
    }
    snprintf(name, sizeof name, "%s.conv_shortcut", prefix);
    if (cin != cout) conv3d(k, &r->shortcut, cout, cin, 1, name);
}

static void walk_level(esa_vae_walk *k, esa_cog_vae *vae, int32_t i, int32_t cin)
{
    const esa_cog_vae_config *c = &vae->config;
    cog_vae_level *l = &vae->level[i];
    char name[96];
    l->res = vae->res_all + i * (c->layers + 1);
    l->res_count = c->layers + 1;
    l->cin = cin;
    l->cout = c->width[c->levels - 1 - i];
    l->doubles_time = 1 << i < c->factor_t;
    for (int32_t r = 0; r < l->res_count; r++) {
        snprintf(name, sizeof name, "decoder.up_blocks.%d.resnets.%d", (int)i, (int)r);
        res_block(k, vae, &l->res[r], i, r ? l->cout : cin, l->cout, name);
    }
    if (i == c->levels - 1) return;
    snprintf(name, sizeof name, "decoder.up_blocks.%d.upsamplers.0.conv", (int)i);
    esa_vae_want_conv(k, (esa_vae_layer){ .conv = &l->up, .up2 = 1 }, 4,
                      (const int64_t[]){ l->cout, l->cout, 3, 3 }, name);
}

/* The decoder from input to output; it uses the levels of the config in reverse order. */
static void walk_layers(esa_vae_walk *k, esa_cog_vae *vae)
{
    const esa_cog_vae_config *c = &vae->config;
    const int32_t deep = c->width[c->levels - 1], last = c->levels - 1;
    char name[96];
    vae->in_slot = new_slot(vae, 0, c->z_dim);
    conv3d(k, &vae->conv_in, deep, c->z_dim, 3, "decoder.conv_in.conv");
    for (int32_t i = 0; i < MID_BLOCKS; i++) {
        snprintf(name, sizeof name, "decoder.mid_block.resnets.%d", (int)i);
        res_block(k, vae, &vae->mid[i], 0, deep, deep, name);
    }
    for (int32_t i = 0; i < c->levels; i++)
        walk_level(k, vae, i, i ? vae->level[i - 1].cout : deep);
    norm(k, vae, &vae->norm_out, c->width[0], "decoder.norm_out");
    vae->out_slot = new_slot(vae, last, c->width[0]);
    conv3d(k, &vae->conv_out, 3, c->width[0], 3, "decoder.conv_out.conv");
}

/* The arrays of vae are allocated; most: at least the number of layers. */
static esa_status read_file(esa_cog_vae *vae, int64_t most, int32_t load)
{
    const esa_vae_stats stats = { .z_dim = vae->config.z_dim, .factor = 1 / vae->config.scaling };
    esa_vae_walk walk;
    ESA_TRY(esa_vae_walk_begin(&walk, &vae->env, most));
    walk_layers(&walk, vae);
    return esa_vae_walk_end(&walk, load ? &vae->held : NULL, &stats);
}

static esa_status open_vae(const esa_part_env *env, esa_cog_vae **out,
                           const esa_cog_vae_config *config, int32_t load)
{
    esa_ctx *ctx = env->nn->ctx;
    /* A res block has two norms of three layers, two convolutions and a shortcut. */
    const int64_t blocks = config->levels * (config->layers + 1) + MID_BLOCKS;
    *out = NULL;
    esa_cog_vae *vae = esa_mem_zalloc(&ctx->mem, sizeof *vae);
    if (!vae) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the VAE");
    vae->env = *env;
    vae->config = *config;
    vae->res_bytes = (int64_t)sizeof(cog_vae_res) * config->levels * (config->layers + 1);
    vae->slot_bytes = (int64_t)sizeof(cog_vae_slot) * (2 * blocks + 2);
    vae->res_all = esa_mem_zalloc(&ctx->mem, vae->res_bytes);
    vae->slot = esa_mem_zalloc(&ctx->mem, vae->slot_bytes);
    const esa_status status = vae->res_all && vae->slot
                                  ? read_file(vae, 9 * blocks + config->levels + 5, load)
                                  : esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the VAE");
    if (!status && load)
        *out = vae;
    else
        esa_cog_vae_free(vae);
    return status;
}

esa_status esa_cog_vae_check(const esa_part_env *env, const esa_cog_vae_config *config)
{
    esa_cog_vae *none;
    return open_vae(env, &none, config, 0);
}

esa_status esa_cog_vae_open(const esa_part_env *env, esa_cog_vae **vae,
                            const esa_cog_vae_config *config)
{
    return open_vae(env, vae, config, 1);
}

static void free_norm(esa_nn *nn, cog_vae_norm *n)
{
    esa_nn_conv_free(nn, &n->times);
    esa_nn_conv_free(nn, &n->plus);
}

static void free_res(esa_nn *nn, cog_vae_res *r)
{
    for (int32_t i = 0; i < 2; i++) {
        free_norm(nn, &r->norm[i]);
        esa_nn_conv_free(nn, &r->conv[i]);
    }
    esa_nn_conv_free(nn, &r->shortcut);
}

void esa_cog_vae_free(esa_cog_vae *vae)
{
    if (!vae) return;
    esa_nn *nn = vae->env.nn;
    esa_nn_conv_free(nn, &vae->conv_in);
    esa_nn_conv_free(nn, &vae->conv_out);
    free_norm(nn, &vae->norm_out);
    for (int32_t i = 0; i < MID_BLOCKS; i++) free_res(nn, &vae->mid[i]);
    for (int32_t i = 0; i < vae->config.levels; i++) {
        cog_vae_level *l = &vae->level[i];
        for (int32_t r = 0; r < l->res_count; r++) free_res(nn, &l->res[r]);
        esa_nn_conv_free(nn, &l->up);
    }
    esa_vae_held_free(nn, &vae->held);
    esa_mem_free(&nn->ctx->mem, vae->slot, vae->slot_bytes);
    esa_mem_free(&nn->ctx->mem, vae->res_all, vae->res_bytes);
    esa_mem_free(&nn->ctx->mem, vae, sizeof *vae);
}

void esa_cog_vae_memory(const esa_cog_vae *vae, int64_t *parameters, int64_t *held, int64_t *mapped)
{
    *parameters = vae->held.parameters;
    *held = vae->held.bytes;
    *mapped = 0;
}
