/* wan_family.c - Wan's table: configurations, defaults, shapes for random weights, parts.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/family/family.h"

#include <stdio.h>
#include <string.h>
#include "model/family/wan_image.h"

#define FPS         16.0 /* for every Wan */
#define TEXT_TOKENS 512

typedef struct wan_configs {
    esa_wan_config dit, dit_2; /* dit_2: only with a boundary */
    double boundary;           /* as in model_index.json; 0: one transformer */
    esa_wan_vae_config vae;
    esa_umt5_config text;
    int32_t image;                 /* 1: image to video */
    esa_clip_vision_config vision; /* only with dit.image_dim */
} wan_configs;

/* Variants. */
enum { ONE = 0, TWO = 1, IMAGE = 2, IMAGE_TWO = 3 }; /* transformers; with an image */

/* With the defaults of diffusers and of the model cards. */
static const esa_known_model known[] = {
    { "wan-tiny", ONE, 8, 4, 64, 192, 33, 128, 128, 8, 2.5, 0 },
    { "wan-t2v-1.3b", ONE, 30, 12, 128, 4096, 81, 480, 832, 50, 5.0, 0 },
    { "wan-t2v-14b", ONE, 40, 40, 128, 4096, 81, 480, 832, 50, 5.0, 0 },
    { "wan-i2v-14b", IMAGE, 40, 40, 128, 4096, 81, 480, 832, 50, 5.0, 0 },
    { "wan2.2-t2v-a14b", TWO, 40, 40, 128, 4096, 81, 720, 1280, 40, 4.0, 3.0 },
};

/* ---------------------------------------------------------------- configurations */

static esa_status compare(esa_ctx *ctx, const wan_configs *c, int32_t parts)
{
    /* with an image: a mask and the latents of the image behind those of the video */
    const int32_t more = c->image ? c->vae.factor_t + c->vae.z_dim : 0;
    if (c->dit.image_dim && (!c->image || c->vision.d != c->dit.image_dim))
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "the image encoder gives %d features, but the transformer takes %d",
                        c->vision.d, c->dit.image_dim);
    if (c->dit.in_channels != c->vae.z_dim + more || c->dit.out_channels != c->vae.z_dim)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "the transformer takes %d and gives %d latent channels, but the VAE has %d",
                        c->dit.in_channels, c->dit.out_channels, c->vae.z_dim);
    if (c->vae.out_channels != 3)
        return esa_fail(ctx, ESA_ERR_UNSUPPORTED, "the VAE gives %d channels, expected 3 (RGB)",
                        c->vae.out_channels);
    if ((parts & ESA_PART_TEXT) && c->text.d_model != c->dit.text_dim)
        return esa_fail(ctx, ESA_ERR_MISMATCH,
                        "the text encoder gives %d features, but the transformer takes %d",
                        c->text.d_model, c->dit.text_dim);
    return ESA_OK;
}

/* The second transformer has the sizes of the first. */
static esa_status read_second(esa_folder *f, wan_configs *c)
{
    if (!f->index->transformer_2[0] || f->index->boundary <= 0) return ESA_OK;
    ESA_TRY(esa_folder_path(f, "transformer_2/config.json"));
    ESA_TRY(esa_config_wan(f->ctx, &c->dit_2, f->path));
    esa_wan_config same = c->dit_2;
    memcpy(same.hash, c->dit.hash, sizeof same.hash);
    if (memcmp(&same, &c->dit, sizeof same) != 0)
        return esa_fail(f->ctx, ESA_ERR_MISMATCH,
                        "the configurations of transformer and transformer_2 differ");
    c->boundary = f->index->boundary;
    return ESA_OK;
}

static esa_status read_configs(esa_folder *f, void *configs)
{
    wan_configs *c = configs;
    ESA_TRY(esa_folder_path(f, "transformer/config.json"));
    ESA_TRY(esa_config_wan(f->ctx, &c->dit, f->path));
    ESA_TRY(read_second(f, c));
    /* The sizes of a video come from the VAE's config, even if the VAE itself is not used. Without
     * that file they are Wan's. */
    c->vae = (esa_wan_vae_config){
        .z_dim = c->dit.out_channels, .out_channels = 3, .factor_t = 4, .factor_s = 8
    };
    if (esa_folder_has(f, "vae/config.json") || (f->parts & ESA_PART_VAE))
        ESA_TRY(esa_config_wan_vae(f->ctx, &c->vae, f->path));
    c->image = strcmp(f->index->pipeline, "WanImageToVideoPipeline") == 0;
    c->vae.encoder = c->image;
    if (c->image && c->dit.image_dim) {
        ESA_TRY(esa_folder_path(f, "image_encoder/config.json"));
        ESA_TRY(esa_config_clip_vision(f->ctx, &c->vision, f->path));
    }
    if (f->parts & ESA_PART_TEXT) {
        ESA_TRY(esa_folder_path(f, "text_encoder/config.json"));
        ESA_TRY(esa_config_umt5(f->ctx, &c->text, f->path));
        c->text.cleans = 1;
    }
    return compare(f->ctx, c, f->parts);
}

static void describe(const void *configs, esa_facts *facts)
{
    const wan_configs *all = configs;
    const esa_wan_config *c = &all->dit;
    const esa_wan_vae_config *v = &all->vae;
    *facts = (esa_facts){ .info = { .layers = c->layers,
                                    .heads = c->heads,
                                    .head_dim = c->head_dim,
                                    .ffn = c->ffn,
                                    .latent_channels = c->out_channels,
                                    .patch = { c->patch[0], c->patch[1], c->patch[2] },
                                    .factor = { v->factor_t, v->factor_s, v->factor_s },
                                    .text_dim = c->text_dim,
                                    .text_tokens = TEXT_TOKENS,
                                    .fps = FPS },
                          .variant = (all->boundary > 0 ? TWO : ONE) + (all->image ? IMAGE : 0),
                          .image = all->image,
                          .boundary = all->boundary,
                          .tile_unit = 4 * v->factor_s };
    snprintf(facts->info.config_hash, sizeof facts->info.config_hash, "%s", c->hash);
}

/* ---------------------------------------------------------------- random weights */

typedef struct shape {
    const char *name;
    int32_t layers, heads, ffn, height, width;
    double shift; /* of the noise schedule */
} shape;

/* Wan 2.1 T2V. 81 frames each. */
static const shape shapes[] = {
    { "wan-1.3b-480p", 30, 12, 8960, 480, 832, 3 },
    { "wan-1.3b-720p", 30, 12, 8960, 720, 1280, 5 },
    { "wan-14b-480p", 40, 40, 13824, 480, 832, 3 },
    { "wan-14b-720p", 40, 40, 13824, 720, 1280, 5 },
};

static const shape *find(const char *name)
{
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        if (strcmp(shapes[i].name, name) == 0) return &shapes[i];
    return NULL;
}

static int32_t fill_shape(const char *name, void *configs, esa_sched_config *sched, int32_t size[3])
{
    const shape *s = find(name);
    wan_configs *c = configs;
    if (!s) return 0;
    c->dit = (esa_wan_config){ .heads = s->heads,
                               .head_dim = 128,
                               .layers = s->layers,
                               .ffn = s->ffn,
                               .in_channels = 16,
                               .out_channels = 16,
                               .patch = { 1, 2, 2 },
                               .text_dim = 4096,
                               .freq_dim = 256,
                               .rope_max = 1024,
                               .cross_norm = 1,
                               .eps = 1e-6 };
    snprintf(c->dit.hash, sizeof c->dit.hash, "random");
    c->vae = (esa_wan_vae_config){ .base_dim = 96,
                                   .decoder_base_dim = 96,
                                   .z_dim = c->dit.in_channels,
                                   .levels = 4,
                                   .res_blocks = 2,
                                   .dim_mult = { 1, 2, 4, 4 },
                                   .temporal = { 0, 1, 1 },
                                   .in_channels = 3,
                                   .out_channels = 3,
                                   .factor_t = 4,
                                   .factor_s = 8 };
    for (int32_t i = 0; i < c->dit.in_channels; i++) c->vae.std[i] = 1;
    *sched = (esa_sched_config){
        .kind = ESA_SCHED_UNIPC, .train_steps = 1000, .order = 2, .shift = s->shift
    };
    size[0] = 81;
    size[1] = s->height;
    size[2] = s->width;
    return 1;
}

/* ---------------------------------------------------------------- image */

static esa_status image_check(const esa_part_env *env, const void *configs)
{
    const wan_configs *c = configs;
    esa_part *encoder = NULL;
    const esa_status status = c->dit.image_dim ? esa_clip_vision_make(env, &encoder, &c->vision)
                                               : ESA_OK;
    esa_part_free(encoder);
    return status;
}
static int64_t image_bytes(const esa_vae *vae, const void *configs, const int32_t latent[3])
{
    (void)configs;
    return esa_wan_vae_encode_bytes(vae, latent);
}
static esa_status image_make(const esa_part_env *env, esa_vae *vae, const void *configs,
                             const uint8_t *rgb, const int32_t size[2], const int32_t latent[3],
                             esa_image *image)
{
    const wan_configs *c = configs;
    const esa_wan_picture picture = { rgb, size[0], size[1] };
    if (c->dit.image_dim) ESA_TRY(esa_wan_image_states(env, &c->vision, &picture, image));
    return esa_wan_image_condition(env, vae, &c->vae, &picture, latent, image);
}

/* ---------------------------------------------------------------- the table */

static const char *const pipelines[] = { "WanPipeline", "WanImageToVideoPipeline", NULL };

const esa_family esa_wan_family = {
    .name = "Wan",
    .pipelines = pipelines,
    .config_bytes = sizeof(wan_configs),
    .known = known,
    .known_count = (int32_t)(sizeof known / sizeof known[0]),
    .known_default = 1,
    .sched_group = ESA_SCHED_GROUP_FLOW,
    .read = read_configs,
    .describe = describe,
    .shape = fill_shape,
    .shape_names = "wan-1.3b-480p, wan-1.3b-720p, wan-14b-480p, wan-14b-720p",
    .image_check = image_check,
    .image_bytes = image_bytes,
    .image_make = image_make,
    .dit = &esa_wan_dit_kind,
    .dit_config = offsetof(wan_configs, dit),
    .dit_2_config = offsetof(wan_configs, dit_2),
    .vae = &esa_wan_vae_kind,
    .vae_config = offsetof(wan_configs, vae),
    .text = &esa_t5_text,
    .text_config = offsetof(wan_configs, text),
};
