/* wan_vae.h - the decoder of Wan's VAE: latents in, frames of pixels out, one after the other. f32.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Every convolution is causal in time, so decoding chunk by chunk with two frames of history per
 * convolution equals one pass over the whole clip. We go one step further and follow every single
 * frame to the end before the next one is begun: a frame of latents runs through the first level;
 * where time doubles, the first of the two frames goes all the way to pixels, then the second.
 * Memory is then two planes of history per convolution and a few planes at work, whatever the
 * number of frames.
 *
 * The one rule that is not plain causality: the doubling in time passes the very first frame on as
 * it is (1 + k * factor frames come out of 1 + k latents) and does not take it into its history.
 *
 * Tiles (diffusers' enable_tiling): every tile is decoded alone over all frames, and neighbours are
 * blended over a quarter of a tile. */
#ifndef ESA_MODEL_WAN_VAE_H
#define ESA_MODEL_WAN_VAE_H

#include "model/config.h"
#include "model/part.h"

typedef struct esa_wan_vae esa_wan_vae;

/* config->temporal and config->dim_mult are in the order of the file (encoder side first). */
esa_status esa_wan_vae_check(const esa_part_env *env, const esa_wan_vae_config *config);
/* env is copied; env->nn must outlive vae. Weights are laid out once for the machine (f32); the
 * file is not kept open. */
esa_status esa_wan_vae_open(const esa_part_env *env, esa_wan_vae **vae,
                            const esa_wan_vae_config *config);
void esa_wan_vae_free(esa_wan_vae *vae);
/* As for the other parts: memory of weights (copies, mapped) and number of parameters. */
void esa_wan_vae_memory(const esa_wan_vae *vae, int64_t *parameters, int64_t *held,
                        int64_t *mapped);

/* Pixels of `latent` (t, h, w) latents: 1 + (t - 1) * factor_t frames of h * factor_s by w *
 * factor_s. */
void esa_wan_vae_size(const esa_wan_vae_config *config, const int32_t latent[3], int32_t frames[3]);
/* The memory that decoding takes besides the weights and the scratch of single operations, to the
 * byte; INT64_MAX when there is not even enough to count. tile as below. */
int64_t esa_wan_vae_bytes(const esa_wan_vae *vae, const int32_t latent[3], int32_t tile);

/* Receives frame after frame: rgb [height][width][out_channels] in [-1, 1], valid for the call. Not
 * ESA_OK: decoding stops with it. */
typedef esa_status (*esa_wan_vae_sink)(void *user, int64_t frame, const float *rgb);

/* latents [z_dim][t][h][w] as the denoising loop leaves them (zero mean, unit variance; the
 * config's statistics are applied here). tile: pixels of a square tile, a multiple of 4 * factor_s,
 * or 0: whole frames; used where a side is longer than it. ESA_ERR_ARGUMENT for sizes below 1 or
 * another tile, ESA_ERR_MEMORY, ESA_ERR_STATE when env's tick says stop (units: latent frames,
 * times tiles). Nothing of a decode is kept. */
esa_status esa_wan_vae_decode(esa_wan_vae *vae, const float *latents, const int32_t latent[3],
                              int32_t tile, esa_wan_vae_sink sink, void *user);

#endif
