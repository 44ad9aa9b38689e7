/* hunyuan_family.c - HunyuanVideo's table: configurations, defaults, a shape for random weights,
 * parts.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/family.h"

#include <stdio.h>
#include <string.h>
#include "model/dit/hunyuan_dit.h"
#include "model/hunyuan_text.h"
#include "model/vae/hunyuan_vae.h"

#define FPS         15.0
#define TEXT_TOKENS 256

typedef struct hunyuan_configs {
    esa_hunyuan_config dit;
    esa_hunyuan_vae_config vae;
    esa_causal_config llama, clip;
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

/* ---------------------------------------------------------------- transformer */

static const esa_hunyuan_dit *as_dit(const esa_dit *dit) { return (const esa_hunyuan_dit *)dit; }
static esa_hunyuan_dit *use_dit(esa_dit *dit) { return (esa_hunyuan_dit *)dit; }
static const esa_hunyuan_config *dit_config(const void *configs)
{
    return &((const hunyuan_configs *)configs)->dit;
}

static esa_status dit_check(const esa_part_env *env, const void *configs)
{
    return esa_hunyuan_dit_check(env, dit_config(configs));
}
static esa_status dit_open(const esa_part_env *env, esa_dit **dit, const void *configs)
{
    return esa_hunyuan_dit_open(env, (esa_hunyuan_dit **)dit, dit_config(configs));
}
static void dit_free(esa_dit *dit) { esa_hunyuan_dit_free(use_dit(dit)); }
static void dit_memory(const esa_dit *dit, int64_t *parameters, int64_t *held, int64_t *mapped)
{
    esa_hunyuan_dit_memory(as_dit(dit), parameters, held, mapped);
}
static esa_store *dit_store(esa_dit *dit) { return esa_hunyuan_dit_store(use_dit(dit)); }
static esa_status dit_layout(const esa_dit *dit, const int32_t latent[3], esa_layout *layout,
                             int32_t selector, int32_t mode)
{
    return esa_hunyuan_dit_layout(as_dit(dit), latent, layout, selector, mode);
}
static void dit_set_room(esa_dit *dit, const esa_dit_room *room)
{
    esa_hunyuan_dit_set_room(use_dit(dit), room);
}
static int64_t dit_text_rows(const esa_dit *dit, const esa_text *text)
{
    (void)dit;
    return text->rows;
}
static esa_status dit_begin(esa_dit *dit, const int32_t latent[3], esa_layout *layout,
                            int32_t selector, int32_t mode, int32_t branches)
{
    return esa_hunyuan_dit_begin(use_dit(dit), latent, layout, selector, mode, branches);
}
static void dit_end(esa_dit *dit) { esa_hunyuan_dit_end(use_dit(dit)); }
static int64_t dit_bytes(const esa_dit *dit) { return esa_hunyuan_dit_bytes(as_dit(dit)); }
static esa_status dit_text(esa_dit *dit, int32_t branch, const esa_text *text)
{
    return esa_hunyuan_dit_text(use_dit(dit), branch, text);
}
static esa_status dit_forward(esa_dit *dit, const esa_dit_call *call)
{
    return esa_hunyuan_dit_forward(use_dit(dit), call);
}

/* ---------------------------------------------------------------- VAE */

static const esa_hunyuan_vae *as_vae(const esa_vae *vae) { return (const esa_hunyuan_vae *)vae; }
static const esa_hunyuan_vae_config *vae_config(const void *configs)
{
    return &((const hunyuan_configs *)configs)->vae;
}

static esa_status vae_check(const esa_part_env *env, const void *configs)
{
    return esa_hunyuan_vae_check(env, vae_config(configs));
}
static esa_status vae_open(const esa_part_env *env, esa_vae **vae, const void *configs)
{
    return esa_hunyuan_vae_open(env, (esa_hunyuan_vae **)vae, vae_config(configs));
}
static void vae_free(esa_vae *vae) { esa_hunyuan_vae_free((esa_hunyuan_vae *)vae); }
static void vae_memory(const esa_vae *vae, int64_t *parameters, int64_t *held, int64_t *mapped)
{
    esa_hunyuan_vae_memory(as_vae(vae), parameters, held, mapped);
}
static void vae_size(const void *configs, const int32_t latent[3], int32_t size[3])
{
    esa_hunyuan_vae_size(vae_config(configs), latent, size);
}
static esa_status vae_check_sizes(const esa_vae *vae, const int32_t latent[3], int32_t tile)
{
    return esa_hunyuan_vae_check_sizes(as_vae(vae), latent, tile);
}
static int64_t vae_bytes(const esa_vae *vae, const int32_t latent[3], int32_t tile)
{
    return esa_hunyuan_vae_bytes(as_vae(vae), latent, tile);
}
static esa_status vae_frames(esa_vae *vae, const float *latents, const int32_t latent[3],
                             int32_t tile, uint8_t *rgb)
{
    return esa_hunyuan_vae_frames((esa_hunyuan_vae *)vae, latents, latent, tile, rgb);
}

/* ---------------------------------------------------------------- text */

static esa_status text_check(const esa_part_env *env, const void *configs)
{
    const hunyuan_configs *c = configs;
    return esa_hunyuan_text_check(env, &c->llama, &c->clip);
}
static esa_status text_open(const esa_part_env *env, esa_text_part **part, const void *configs)
{
    const hunyuan_configs *c = configs;
    return esa_hunyuan_text_open(env, (esa_hunyuan_text **)part, &c->llama, &c->clip);
}
static void text_free(esa_text_part *part) { esa_hunyuan_text_free((esa_hunyuan_text *)part); }
static void text_memory(const esa_text_part *part, int64_t *parameters, int64_t *held,
                        int64_t *mapped)
{
    esa_hunyuan_text_memory((const esa_hunyuan_text *)part, parameters, held, mapped);
}
static esa_status text_encode(esa_text_part *part, esa_text *text, const char *prompt)
{
    return esa_hunyuan_text_encode((esa_hunyuan_text *)part, text, prompt);
}

/* ---------------------------------------------------------------- the table */

static const char *const pipelines[] = { "HunyuanVideoPipeline", NULL };

const esa_family esa_hunyuan_family = {
    .name = "HunyuanVideo",
    .pipelines = pipelines,
    .config_bytes = sizeof(hunyuan_configs),
    .known = known,
    .known_count = (int32_t)(sizeof known / sizeof known[0]),
    .text_place = ESA_TEXT_BACK,
    .sched_group = ESA_SCHED_GROUP_FLOW,
    .sigmas_to_zero = 1,
    .embedded_guidance = 1,
    .read = read_configs,
    .describe = describe,
    .shape = fill_shape,
    .shape_names = "hunyuan-544p, hunyuan-720p",
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
