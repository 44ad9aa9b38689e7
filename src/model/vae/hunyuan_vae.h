/* hunyuan_vae.h - the decoder of HunyuanVideo's VAE: turns latents into frames of pixels.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Its group norms have one mean over all frames, so the decoder works layer by layer on all frames
 * of a piece. What a piece is belongs to the model (diffusers' AutoencoderKLHunyuanVideo): 5 frames
 * of latents, the next one 3 frames further on. Each later piece loses its first frame of pixels,
 * the next 4 are blended with the last of the piece before, and 12 are kept. Latents of up to 4
 * frames are one piece. With a tile, each piece is cut into squares too (enable_tiling), which are
 * 3/4 of a tile apart and blended over the rest.
 *
 * Convolutions see copies of the edge around a frame, and of the first frame before it. Attention
 * in the middle block sees all pixels of a frame and of those before it. */
#ifndef ESA_MODEL_HUNYUAN_VAE_H
#define ESA_MODEL_HUNYUAN_VAE_H

#include "model/hunyuan_config.h"
#include "model/vae/tiles.h"

typedef struct esa_hunyuan_vae esa_hunyuan_vae;

esa_status esa_hunyuan_vae_check(const esa_part_env *env, const esa_hunyuan_vae_config *config);
/* Copies env; env->nn must outlive vae. Weights are packed once, for the device of nn; the file is
 * not kept open. */
esa_status esa_hunyuan_vae_open(const esa_part_env *env, esa_hunyuan_vae **vae,
                                const esa_hunyuan_vae_config *config);
void esa_hunyuan_vae_free(esa_hunyuan_vae *vae);
void esa_hunyuan_vae_memory(const esa_hunyuan_vae *vae, int64_t *parameters, int64_t *held,
                            int64_t *mapped);

/* The size of the video that latents (t, h, w) give: frames, height, width. */
void esa_hunyuan_vae_size(const esa_hunyuan_vae_config *config, const int32_t latent[3],
                          int32_t size[3]);
/* ESA_ERR_ARGUMENT for sizes and tiles that the decoder does not take. */
esa_status esa_hunyuan_vae_check_sizes(const esa_hunyuan_vae *vae, const int32_t latent[3],
                                       int32_t tile);
/* The memory that decoding takes on the device, without weights and the scratch of single
 * operations. */
int64_t esa_hunyuan_vae_bytes(const esa_hunyuan_vae *vae, const int32_t latent[3], int32_t tile);

/* Decodes latents [z_dim][t][h][w] on the device of nn, as the denoising loop leaves them. sink
 * gets frames that are not clamped. tile: side of a tile in pixels, a multiple of 4 * factor_s,
 * used if a side is longer than it; 0: whole frames. Fails with ESA_ERR_ARGUMENT, ESA_ERR_MEMORY,
 * or ESA_ERR_STATE if env's tick stops it. */
esa_status esa_hunyuan_vae_decode(esa_hunyuan_vae *vae, const float *latents,
                                  const int32_t latent[3], int32_t tile, esa_vae_sink sink,
                                  void *user);
/* The same with frames as bytes: rgb [frames][height][width][3] in host memory. Fails with
 * ESA_ERR_FORMAT if a pixel is NaN. */
esa_status esa_hunyuan_vae_frames(esa_hunyuan_vae *vae, const float *latents,
                                  const int32_t latent[3], int32_t tile, uint8_t *rgb);

#endif
