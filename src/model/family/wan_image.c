/* wan_image.c - see wan_image.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/family/wan_image.h"

#include <string.h>
#include "media/resize.h"

/* Of CLIP's image processor. */
static const float mean[3] = { 0.48145466f, 0.4578275f, 0.40821073f },
                   deviation[3] = { 0.26862954f, 0.26130258f, 0.27577711f };

static esa_status lacks_memory(esa_ctx *ctx)
{
    return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the image");
}

/* A scaled picture; the caller frees *bytes of it. */
static esa_status scaled(esa_ctx *ctx, uint8_t **out, int64_t *bytes, const esa_wan_picture *p,
                         int64_t height, int64_t width, int32_t filter)
{
    *bytes = height * width * 3;
    *out = esa_mem_alloc(&ctx->mem, *bytes);
    if (!*out) return lacks_memory(ctx);
    return esa_resize(ctx, *out, height, width, p->rgb, p->height, p->width, filter);
}

/* The middle of the picture as the encoder takes it: rgb [side][side][3], normed. */
static esa_status encoder_input(esa_ctx *ctx, float *rgb, const esa_wan_picture *p, int64_t side)
{
    const int64_t least = p->height < p->width ? p->height : p->width,
                  height = p->height == least ? side : side * p->height / least,
                  width = p->width == least ? side : side * p->width / least,
                  top = (height - side) / 2, left = (width - side) / 2;
    uint8_t *small;
    int64_t bytes;
    const esa_status status = scaled(ctx, &small, &bytes, p, height, width, ESA_RESIZE_BICUBIC);
    for (int64_t i = 0; !status && i < side * side * 3; i++) {
        const int64_t c = i % 3, x = i / 3 % side, y = i / 3 / side;
        const double value = small[((top + y) * width + left + x) * 3 + c] * (1 / 255.0);
        rgb[i] = ((float)value - mean[c]) / deviation[c];
    }
    if (small) esa_mem_free(&ctx->mem, small, bytes);
    return status;
}

static esa_status encode(const esa_part_env *env, const esa_clip_vision_config *config,
                         const float *rgb, esa_image *image)
{
    esa_ctx *ctx = env->nn->ctx;
    esa_part *encoder;
    image->rows = esa_clip_vision_rows(config);
    image->embeds_bytes = 4 * image->rows * config->d;
    image->embeds = esa_mem_alloc(&ctx->mem, image->embeds_bytes);
    if (!image->embeds) return lacks_memory(ctx);
    ESA_TRY(esa_clip_vision_make(env, &encoder, config));
    esa_status status = esa_part_load(encoder, ESA_LOAD_ENCODER);
    if (!status) status = esa_clip_vision_encode(encoder, image->embeds, rgb);
    esa_part_free(encoder);
    return status;
}

esa_status esa_wan_image_states(const esa_part_env *env, const esa_clip_vision_config *config,
                                const esa_wan_picture *picture, esa_image *image)
{
    esa_ctx *ctx = env->nn->ctx;
    const int64_t bytes = (int64_t)4 * config->image * config->image * 3;
    float *rgb = esa_mem_alloc(&ctx->mem, bytes);
    if (!rgb) return lacks_memory(ctx);
    esa_status status = encoder_input(ctx, rgb, picture, config->image);
    if (!status) status = encode(env, config, rgb, image);
    esa_mem_free(&ctx->mem, rgb, bytes);
    return status;
}

/* rgb: room for a frame [height][width][3] of floats. */
static esa_status encode_video(esa_ctx *ctx, esa_vae *vae, const esa_wan_picture *p, float *rgb,
                               int64_t height, int64_t width, float *out, const int32_t latent[3])
{
    uint8_t *small;
    int64_t bytes;
    esa_status status = scaled(ctx, &small, &bytes, p, height, width, ESA_RESIZE_LANCZOS);
    for (int64_t i = 0; !status && i < height * width * 3; i++)
        rgb[i] = 2.0f * ((float)small[i] / 255.0f) - 1.0f;
    if (!status) status = esa_wan_vae_encode_image(vae, out, rgb, latent);
    if (small) esa_mem_free(&ctx->mem, small, bytes);
    return status;
}

esa_status esa_wan_image_condition(const esa_part_env *env, esa_vae *vae,
                                   const esa_wan_vae_config *config, const esa_wan_picture *picture,
                                   const int32_t latent[3], esa_image *image)
{
    esa_ctx *ctx = env->nn->ctx;
    const int64_t frame = (int64_t)latent[1] * latent[2], height = latent[1] * config->factor_s,
                  width = latent[2] * config->factor_s, bytes = 4 * height * width * 3;
    image->condition_bytes = 4 * (config->factor_t + config->z_dim) * latent[0] * frame;
    image->condition = esa_mem_zalloc(&ctx->mem, image->condition_bytes);
    float *rgb = esa_mem_alloc(&ctx->mem, bytes);
    if (!image->condition || !rgb) {
        if (rgb) esa_mem_free(&ctx->mem, rgb, bytes);
        return lacks_memory(ctx);
    }
    for (int64_t c = 0; c < config->factor_t; c++)
        for (int64_t i = 0; i < frame; i++) image->condition[c * latent[0] * frame + i] = 1;
    const esa_status status = encode_video(ctx, vae, picture, rgb, height, width,
                                           image->condition + config->factor_t * latent[0] * frame,
                                           latent);
    esa_mem_free(&ctx->mem, rgb, bytes);
    return status;
}
