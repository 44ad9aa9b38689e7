/* cog_family.c - CogVideoX's table: configurations, defaults, shapes for random weights, parts.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/family/family.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define FPS 8.0 /* of both models */

typedef struct cog_configs {
    esa_cog_config dit;
    esa_cog_vae_config vae;
    esa_umt5_config text;
} cog_configs;

/* With the defaults of diffusers. */
static const esa_known_model known[] = {
    { "cogvideox-2b", 0, 30, 30, 64, 4096, 49, 480, 720, 50, 6.0, 0 },
    { "cogvideox-5b", 1, 42, 48, 64, 4096, 49, 480, 720, 50, 6.0, 0 },
};

/* ---------------------------------------------------------------- configurations */

static esa_status compare(esa_ctx *ctx, const cog_configs *c, int32_t parts)
{
    if (c->dit.in_channels != c->vae.z_dim || c->dit.out_channels != c->vae.z_dim)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "the transformer takes %d and gives %d latent channels, but the VAE has %d",
                        c->dit.in_channels, c->dit.out_channels, c->vae.z_dim);
    if ((parts & ESA_PART_TEXT) && c->text.d_model != c->dit.text_dim)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "the text encoder gives %d features, but the transformer takes %d",
                        c->text.d_model, c->dit.text_dim);
    return ESA_OK;
}

static esa_status read_configs(esa_folder *f, void *configs)
{
    cog_configs *c = configs;
    ESA_TRY(esa_folder_path(f, "transformer/config.json"));
    ESA_TRY(esa_config_cog(f->ctx, &c->dit, f->path));
    /* The sizes of a video come from the VAE's config, even if the VAE itself is not used. Without
     * that file they are those of the published models. */
    c->vae = (esa_cog_vae_config){ .z_dim = c->dit.in_channels, .factor_t = 4, .factor_s = 8 };
    if (esa_folder_has(f, "vae/config.json") || (f->parts & ESA_PART_VAE))
        ESA_TRY(esa_config_cog_vae(f->ctx, &c->vae, f->path));
    if (f->parts & ESA_PART_TEXT) {
        ESA_TRY(esa_folder_path(f, "text_encoder/config.json"));
        ESA_TRY(esa_config_t5(f->ctx, &c->text, f->path));
        c->text.pads = 1;
    }
    return compare(f->ctx, c, f->parts);
}

static void describe(const void *configs, esa_facts *facts)
{
    const cog_configs *all = configs;
    const esa_cog_config *c = &all->dit;
    const esa_cog_vae_config *v = &all->vae;
    *facts = (esa_facts){ .info = { .layers = c->layers,
                                    .heads = c->heads,
                                    .head_dim = c->head_dim,
                                    .ffn = 4 * c->heads * c->head_dim,
                                    .latent_channels = c->in_channels,
                                    .patch = { 1, c->patch, c->patch },
                                    .factor = { v->factor_t, v->factor_s, v->factor_s },
                                    .text_dim = c->text_dim,
                                    .text_tokens = c->max_text,
                                    .fps = FPS },
                          .variant = c->rotary,
                          .tile_unit = 2 * v->factor_s };
    snprintf(facts->info.config_hash, sizeof facts->info.config_hash, "%s", c->hash);
}

/* ---------------------------------------------------------------- random weights */

static int32_t fill_shape(const char *name, void *configs, esa_sched_config *sched, int32_t size[3])
{
    cog_configs *c = configs;
    const esa_known_model *m = NULL;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strcmp(known[i].name, name) == 0) m = &known[i];
    if (!m) return 0;
    const int32_t large = m->variant;
    c->dit = (esa_cog_config){ .heads = m->heads,
                               .head_dim = m->head_dim,
                               .layers = m->layers,
                               .in_channels = 16,
                               .out_channels = 16,
                               .patch = 2,
                               .text_dim = m->text_dim,
                               .time_dim = 512,
                               .max_text = 226,
                               .sample_h = m->height / 8,
                               .sample_w = m->width / 8,
                               .attention_bias = 1,
                               .patch_bias = 1,
                               .rotary = large,
                               .spatial_scale = 1.875,
                               .temporal_scale = 1,
                               .eps = 1e-5 };
    snprintf(c->dit.hash, sizeof c->dit.hash, "random");
    c->vae = (esa_cog_vae_config){ .levels = 4,
                                   .width = { 128, 256, 256, 512 },
                                   .z_dim = 16,
                                   .layers = 3,
                                   .groups = 32,
                                   .factor_t = 4,
                                   .factor_s = 8,
                                   .sample_h = m->height,
                                   .sample_w = m->width,
                                   .eps = 1e-6,
                                   .scaling = large ? 0.7 : 1.15258426 };
    *sched = (esa_sched_config){ .kind = large ? ESA_SCHED_DPM : ESA_SCHED_DDIM,
                                 .train_steps = 1000,
                                 .order = 2,
                                 .shift = 1,
                                 .beta_first = 0.00085,
                                 .beta_last = 0.012,
                                 .snr_shift = large ? 1 : 3,
                                 .zero_snr = 1,
                                 .last_is_clean = 1,
                                 .spacing = ESA_SPACING_TRAILING };
    size[0] = m->frames;
    size[1] = m->height;
    size[2] = m->width;
    return 1;
}

/* diffusers' use_dynamic_cfg. t counts steps of training, not of the call, as there. */
static double guidance_at(const esa_generate_params *p, int32_t step, double t)
{
    (void)step;
    if (!p->dynamic_guidance) return p->guidance;
    const double pi = 3.14159265358979323846, n = p->steps;
    return 1 + p->guidance * ((1 - cos(pi * pow((n - t) / n, 5.0))) / 2);
}

/* ---------------------------------------------------------------- the table */

static const char *const pipelines[] = { "CogVideoXPipeline", NULL };

const esa_family esa_cog_family = {
    .name = "CogVideoX",
    .pipelines = pipelines,
    .config_bytes = sizeof(cog_configs),
    .known = known,
    .known_count = (int32_t)(sizeof known / sizeof known[0]),
    .known_default = 0,
    .sched_group = ESA_SCHED_GROUP_V,
    .frames_first = 1,
    .read = read_configs,
    .describe = describe,
    .shape = fill_shape,
    .shape_names = "cogvideox-2b, cogvideox-5b",
    .guidance = guidance_at,
    .dit = &esa_cog_dit_kind,
    .dit_config = offsetof(cog_configs, dit),
    .vae = &esa_cog_vae_kind,
    .vae_config = offsetof(cog_configs, vae),
    .text = &esa_t5_text,
    .text_config = offsetof(cog_configs, text),
};
