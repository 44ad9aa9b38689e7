/* vae_frames.c - see vae_frames.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/vae/vae_frames.h"
#include "nn/ops.h"

#define MOST_PIXELS (1 << 20) /* of a side */

esa_status esa_vae_check_sizes(esa_ctx *ctx, const int32_t latent[3], int32_t factor, int32_t tile,
                               int32_t unit)
{
    for (int32_t i = 0; i < 3; i++)
        if (latent[i] < 1 || latent[i] > MOST_PIXELS / factor)
            return esa_fail(ctx, ESA_ERR_ARGUMENT,
                            "the VAE cannot decode latents of %d x %d x %d, expected 1 to %d each",
                            (int)latent[0], (int)latent[1], (int)latent[2],
                            (int)(MOST_PIXELS / factor));
    if (tile < 0 || tile % unit)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "the VAE tile is %d pixels, expected 0 or a multiple of %d", (int)tile,
                        (int)unit);
    return ESA_OK;
}

esa_vae_cut esa_vae_whole(const float *latents, const int32_t latent[3])
{
    const int64_t frame = (int64_t)latent[1] * latent[2];
    return (esa_vae_cut){ .latents = latents,
                          .frames = latent[0],
                          .height = latent[1],
                          .width = latent[2],
                          .row = latent[2],
                          .frame = frame,
                          .channel = latent[0] * frame,
                          .tick_total = latent[0],
                          .clamp = 1 };
}

esa_vae_cut esa_vae_tile(const float *latents, const int32_t latent[3], int32_t factor,
                         const esa_tile *tile)
{
    const int64_t top = tile->top / factor, left = tile->left / factor;
    esa_vae_cut cut = esa_vae_whole(latents + top * latent[2] + left, latent);
    cut.height = tile->height / factor;
    cut.width = tile->width / factor;
    cut.tick_base = tile->number * latent[0];
    cut.tick_total = tile->count * latent[0];
    cut.clamp = 0;
    return cut;
}

esa_status esa_vae_nan(esa_ctx *ctx, int64_t frame)
{
    return esa_fail(ctx, ESA_ERR_FORMAT,
                    "the VAE gave NaN for pixels of frame %lld: its weights are damaged",
                    (long long)frame);
}

esa_status esa_vae_to_bytes(void *bytes, int64_t frame, const float *rgb)
{
    const esa_vae_bytes *b = bytes;
    const int32_t wrong = esa_nn_pixel_bytes(b->rgb + frame * b->elements, rgb, b->elements);
    return wrong ? esa_vae_nan(b->ctx, frame) : ESA_OK;
}
