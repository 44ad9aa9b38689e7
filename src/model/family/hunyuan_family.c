/* hunyuan_family.c - HunyuanVideo's table: configurations, defaults, a shape for random weights,
 * parts.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/family/family.h"

#include <stdio.h>
#include <string.h>

#define FPS         15.0
#define TEXT_TOKENS 256

typedef struct hunyuan_configs {
    esa_hunyuan_config dit;
    esa_hunyuan_vae_config vae;
    esa_causal_config llama, clip; /* in the order of the text part */
} hunyuan_configs;

/* With the size of the original's smaller setting, and the other defaults of diffusers. */
static const esa_known_model known[] = {
    { "hunyuan-video", 0, 60, 24, 128, 4096, 129, 544, 960, 50, 6.0, 0 },
};

/* ---------------------------------------------------------------- configurations */

static esa_status compare(esa_ctx *ctx, const hunyuan_configs *c, int32_t parts)
{
    if (c->dit.in_channels != c->vae.z_dim || c->dit.out_channels != c->vae.z_dim)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "the transformer takes %d and gives %d latent channels, but the VAE has %d",
                        c->dit.in_channels, c->dit.out_channels, c->vae.z_dim);
    if ((parts & ESA_PART_TEXT) && c->llama.d != c->dit.text_dim)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "the text encoder gives %d features, but the transformer takes %d",
                        c->llama.d, c->dit.text_dim);
    if ((parts & ESA_PART_TEXT) && c->clip.d != c->dit.pooled_dim)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "the second text encoder gives %d features, but the transformer takes %d",
                        c->clip.d, c->dit.pooled_dim);
    return ESA_OK;
}

static esa_status read_configs(esa_folder *f, void *configs)
{
    hunyuan_configs *c = configs;
    ESA_TRY(esa_folder_path(f, "transformer/config.json"));
    ESA_TRY(esa_config_hunyuan(f->ctx, &c->dit, f->path));
    /* The sizes of a video come from the VAE's config, even if the VAE itself is not used. */
    c->vae = (esa_hunyuan_vae_config){ .z_dim = c->dit.in_channels, .factor_t = 4, .factor_s = 8 };
    if (esa_folder_has(f, "vae/config.json") || (f->parts & ESA_PART_VAE))
        ESA_TRY(esa_config_hunyuan_vae(f->ctx, &c->vae, f->path));
    if (f->parts & ESA_PART_TEXT) {
        ESA_TRY(esa_folder_path(f, "text_encoder/config.json"));
        ESA_TRY(esa_config_llama(f->ctx, &c->llama, f->path));
        ESA_TRY(esa_folder_path(f, "text_encoder_2/config.json"));
        ESA_TRY(esa_config_clip_text(f->ctx, &c->clip, f->path));
    }
    return compare(f->ctx, c, f->parts);
}

static void describe(const void *configs, esa_facts *facts)
{
    const hunyuan_configs *all = configs;
    const esa_hunyuan_config *c = &all->dit;
    const esa_hunyuan_vae_config *v = &all->vae;
    *facts = (esa_facts){ .info = { .layers = c->doubles + c->singles,
                                    .heads = c->heads,
                                    .head_dim = c->head_dim,
                                    .ffn = c->ffn,
                                    .latent_channels = c->in_channels,
                                    .patch = { c->patch[0], c->patch[1], c->patch[2] },
                                    .factor = { v->factor_t, v->factor_s, v->factor_s },
                                    .text_dim = c->text_dim,
                                    .text_tokens = TEXT_TOKENS,
                                    .fps = FPS },
                          .pooled_dim = c->pooled_dim,
                          .tile_unit = 4 * v->factor_s };
    snprintf(facts->info.config_hash, sizeof facts->info.config_hash, "%s", c->hash);
}

/* ---------------------------------------------------------------- random weights */

static int32_t fill_shape(const char *name, void *configs, esa_sched_config *sched, int32_t size[3])
{
    const int32_t large = strcmp(name, "hunyuan-720p") == 0;
    hunyuan_configs *c = configs;
    if (!large && strcmp(name, "hunyuan-544p") != 0) return 0;
    c->dit = esa_hunyuan_published;
    snprintf(c->dit.hash, sizeof c->dit.hash, "random");
    c->vae = (esa_hunyuan_vae_config){ .z_dim = 16,
                                       .levels = 4,
                                       .res_blocks = 2,
                                       .groups = 32,
                                       .width = { 128, 256, 512, 512 },
                                       .attention = 1,
                                       .factor_t = 4,
                                       .factor_s = 8,
                                       .scaling = 0.476986 };
    *sched = (esa_sched_config){
        .kind = ESA_SCHED_EULER, .train_steps = 1000, .order = 2, .shift = 7
    };
    size[0] = 129;
    size[1] = large ? 720 : 544;
    size[2] = large ? 1280 : 960;
    return 1;
}

/* ---------------------------------------------------------------- the table */

static const char *const pipelines[] = { "HunyuanVideoPipeline", NULL };

const esa_family esa_hunyuan_family = {
    .name = "HunyuanVideo",
    .pipelines = pipelines,
    .config_bytes = sizeof(hunyuan_configs),
    .known = known,
    .known_count = (int32_t)(sizeof known / sizeof known[0]),
    .sched_group = ESA_SCHED_GROUP_FLOW,
    .sigmas_to_zero = 1,
    .embedded_guidance = 1,
    .read = read_configs,
    .describe = describe,
    .shape = fill_shape,
    .shape_names = "hunyuan-544p, hunyuan-720p",
    .dit = &esa_hunyuan_dit_kind,
    .dit_config = offsetof(hunyuan_configs, dit),
    .vae = &esa_hunyuan_vae_kind,
    .vae_config = offsetof(hunyuan_configs, vae),
    .text = &esa_hunyuan_text,
    .text_config = offsetof(hunyuan_configs, llama),
};
