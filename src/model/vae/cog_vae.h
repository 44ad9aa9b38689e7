/* cog_vae.h - the decoder of CogVideoX's VAE: turns latents into frames of pixels, in batches.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Latents are decoded in batches of two frames; the first has three if their number is odd. A
 * convolution sees the last two frames of the batch before, or its first frame repeated where there
 * is none. Group norms take their statistics from one batch, so the batches are part of the
 * definition, and every layer runs over a whole batch before the next.
 *
 * Norms are guided by the latents: norm(x) * times + plus, where times and plus are convolutions of
 * one pixel over the latents, repeated to the size of x. They are computed at the size of the
 * latents.
 *
 * Where time doubles, frames are repeated, except the first of a batch with an odd number: t
 * latents give 1 + 4 (t - 1) frames if t is odd, else 4 t.
 *
 * Tiles (diffusers' enable_tiling): each tile is decoded alone over all frames; neighbours are
 * blended over a sixth of its height and a fifth of its width, in whole latents. */
#ifndef ESA_MODEL_COG_VAE_H
#define ESA_MODEL_COG_VAE_H

#include "model/config.h"
#include "model/part.h"
#include "model/vae/tiles.h"

typedef struct esa_cog_vae esa_cog_vae;

esa_status esa_cog_vae_check(const esa_part_env *env, const esa_cog_vae_config *config);
/* Copies env; env->nn must outlive vae. Weights are packed once, for the device of nn; the file is
 * not kept open. */
esa_status esa_cog_vae_open(const esa_part_env *env, esa_cog_vae **vae,
                            const esa_cog_vae_config *config);
void esa_cog_vae_free(esa_cog_vae *vae);
void esa_cog_vae_memory(const esa_cog_vae *vae, int64_t *parameters, int64_t *held,
                        int64_t *mapped);

/* Frames, height and width that latents (t, h, w) give. */
void esa_cog_vae_size(const esa_cog_vae_config *config, const int32_t latent[3], int32_t size[3]);
/* ESA_ERR_ARGUMENT for sizes and tiles that the decoder does not take; decoding checks them too.
 * tile: side in pixels, a multiple of 2 factor_s; 0: whole frames. */
esa_status esa_cog_vae_check_sizes(const esa_cog_vae *vae, const int32_t latent[3], int32_t tile);
/* The memory that esa_cog_vae_frames needs, without the weights. */
int64_t esa_cog_vae_bytes(const esa_cog_vae *vae, const int32_t latent[3], int32_t tile);

/* Decodes latents [z_dim][t][h][w], in the memory of the device of nn, as the denoising loop leaves
 * them (the scaling factor is applied here). sink gets frames in [-1, 1]. Fails with
 * ESA_ERR_ARGUMENT for wrong sizes, ESA_ERR_MEMORY, or ESA_ERR_STATE if env's tick stops it. */
esa_status esa_cog_vae_decode(esa_cog_vae *vae, const float *latents, const int32_t latent[3],
                              int32_t tile, esa_vae_sink sink, void *user);
/* The same with frames as bytes: rgb [frames][height][width][3] in host memory. Fails with
 * ESA_ERR_FORMAT if a pixel is NaN. */
esa_status esa_cog_vae_frames(esa_cog_vae *vae, const float *latents, const int32_t latent[3],
                              int32_t tile, uint8_t *rgb);

#endif
