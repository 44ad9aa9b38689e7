/* cog_family.c - CogVideoX's table: configurations, defaults, shapes for random weights, parts.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/family.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "model/dit/cog_dit.h"
#include "model/t5_text.h"
#include "model/vae/cog_vae.h"

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

/* ---------------------------------------------------------------- transformer */

static const esa_cog_dit *as_dit(const esa_dit *dit) { return (const esa_cog_dit *)dit; }
static esa_cog_dit *use_dit(esa_dit *dit) { return (esa_cog_dit *)dit; }

static esa_status dit_check(const esa_part_env *env, const void *configs)
{
    return esa_cog_dit_check(env, &((const cog_configs *)configs)->dit);
}
static esa_status dit_open(const esa_part_env *env, esa_dit **dit, const void *configs)
{
    return esa_cog_dit_open(env, (esa_cog_dit **)dit, &((const cog_configs *)configs)->dit);
}
static void dit_free(esa_dit *dit) { esa_cog_dit_free(use_dit(dit)); }
static void dit_memory(const esa_dit *dit, int64_t *parameters, int64_t *held, int64_t *mapped)
{
    esa_cog_dit_memory(as_dit(dit), parameters, held, mapped);
}
static esa_store *dit_store(esa_dit *dit) { return esa_cog_dit_store(use_dit(dit)); }
static esa_status dit_layout(const esa_dit *dit, const int32_t latent[3], esa_layout *layout,
                             int32_t selector, int32_t mode)
{
    return esa_cog_dit_layout(as_dit(dit), latent, layout, selector, mode);
}
static void dit_set_room(esa_dit *dit, const esa_dit_room *room)
{
    esa_cog_dit_set_room(use_dit(dit), room);
}
static int64_t dit_text_rows(const esa_dit *dit, const esa_text *text)
{
    (void)dit;
    return text->rows;
}
static esa_status dit_begin(esa_dit *dit, const int32_t latent[3], esa_layout *layout,
                            int32_t selector, int32_t mode, int32_t branches)
{
    return esa_cog_dit_begin(use_dit(dit), latent, layout, selector, mode, branches);
}
static void dit_end(esa_dit *dit) { esa_cog_dit_end(use_dit(dit)); }
static int64_t dit_bytes(const esa_dit *dit) { return esa_cog_dit_bytes(as_dit(dit)); }
static esa_status dit_text(esa_dit *dit, int32_t branch, const esa_text *text)
{
    return esa_cog_dit_text(use_dit(dit), branch, text->data, text->rows);
}
static esa_status dit_forward(esa_dit *dit, const esa_dit_call *c)
{
    return esa_cog_dit_forward(use_dit(dit), c->session, c->branch, c->v, c->x, c->t);
}

/* ---------------------------------------------------------------- VAE */

static esa_status vae_check(const esa_part_env *env, const void *configs)
{
    return esa_cog_vae_check(env, &((const cog_configs *)configs)->vae);
}
static esa_status vae_open(const esa_part_env *env, esa_vae **vae, const void *configs)
{
    return esa_cog_vae_open(env, (esa_cog_vae **)vae, &((const cog_configs *)configs)->vae);
}
static void vae_free(esa_vae *vae) { esa_cog_vae_free((esa_cog_vae *)vae); }
static void vae_memory(const esa_vae *vae, int64_t *parameters, int64_t *held, int64_t *mapped)
{
    esa_cog_vae_memory((const esa_cog_vae *)vae, parameters, held, mapped);
}
static void vae_size(const void *configs, const int32_t latent[3], int32_t size[3])
{
    esa_cog_vae_size(&((const cog_configs *)configs)->vae, latent, size);
}
static esa_status vae_check_sizes(const esa_vae *vae, const int32_t latent[3], int32_t tile)
{
    return esa_cog_vae_check_sizes((const esa_cog_vae *)vae, latent, tile);
}
static int64_t vae_bytes(const esa_vae *vae, const int32_t latent[3], int32_t tile)
{
    return esa_cog_vae_bytes((const esa_cog_vae *)vae, latent, tile);
}
static esa_status vae_frames(esa_vae *vae, const float *latents, const int32_t latent[3],
                             int32_t tile, uint8_t *rgb)
{
    return esa_cog_vae_frames((esa_cog_vae *)vae, latents, latent, tile, rgb);
}

/* ---------------------------------------------------------------- text */

static esa_status text_check(const esa_part_env *env, const void *configs)
{
    return esa_t5_text_check(env, &((const cog_configs *)configs)->text);
}
static esa_status text_open(const esa_part_env *env, esa_text_part **part, const void *configs)
{
    return esa_t5_text_open(env, (esa_t5_text **)part, &((const cog_configs *)configs)->text,
                            ESA_T5_PAD);
}
static void text_free(esa_text_part *part) { esa_t5_text_free((esa_t5_text *)part); }
static void text_memory(const esa_text_part *part, int64_t *parameters, int64_t *held,
                        int64_t *mapped)
{
    esa_t5_text_memory((const esa_t5_text *)part, parameters, held, mapped);
}
static esa_status text_encode(esa_text_part *part, esa_text *text, const char *prompt)
{
    return esa_t5_text_encode((esa_t5_text *)part, text->data, prompt, (int32_t)text->rows,
                              &text->valid);
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
    .text_place = ESA_TEXT_FRONT,
    .sched_group = ESA_SCHED_GROUP_V,
    .frames_first = 1,
    .read = read_configs,
    .describe = describe,
    .shape = fill_shape,
    .shape_names = "cogvideox-2b, cogvideox-5b",
    .guidance = guidance_at,
    .dit = { .check = dit_check,
             .open = dit_open,
             .free = dit_free,
             .memory = dit_memory,
             .store = dit_store,
             .layout = dit_layout,
             .set_room = dit_set_room,
             .text_rows = dit_text_rows,
             .begin = dit_begin,
             .end = dit_end,
             .bytes = dit_bytes,
             .text = dit_text,
             .forward = dit_forward },
    .vae = { .check = vae_check,
             .open = vae_open,
             .free = vae_free,
             .memory = vae_memory,
             .size = vae_size,
             .check_sizes = vae_check_sizes,
             .bytes = vae_bytes,
             .frames = vae_frames },
    .text = { .check = text_check,
              .open = text_open,
              .free = text_free,
              .memory = text_memory,
              .encode = text_encode },
};
