/* wan_vae.h - the decoder of Wan's VAE: turns latents into frames of pixels, one after the other.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Every convolution is causal in time, so decoding in chunks with two frames of history per
 * convolution gives the same result as one pass over the whole clip. We go further and follow each
 * single frame to the end before the next one begins: a frame of latents runs through the first
 * level; where time doubles, the first of the two frames goes all the way to pixels, then the
 * second. Memory is then two planes of history per convolution and a few planes in use, for any
 * number of frames.
 *
 * One rule is not plain causality: the doubling in time passes the very first frame on unchanged
 * (1 + k latents give 1 + k * factor frames) and does not add it to its history.
 *
 * Tiles (diffusers' enable_tiling): each tile is decoded alone over all frames, and neighbours are
 * blended over a quarter of a tile. */
#ifndef ESA_MODEL_WAN_VAE_H
#define ESA_MODEL_WAN_VAE_H

#include "model/config.h"
#include "model/part.h"
#include "model/vae/tiles.h"

typedef struct esa_wan_vae esa_wan_vae;

/* config->temporal and config->dim_mult are in the order of the file, encoder side first. */
esa_status esa_wan_vae_check(const esa_part_env *env, const esa_wan_vae_config *config);
/* Copies env; env->nn must outlive vae. Weights are packed once, for the device of nn; the file is
 * not kept open. */
esa_status esa_wan_vae_open(const esa_part_env *env, esa_wan_vae **vae,
                            const esa_wan_vae_config *config);
void esa_wan_vae_free(esa_wan_vae *vae);
/* The number of parameters, and the bytes of weights in copies and in mapped files. */
void esa_wan_vae_memory(const esa_wan_vae *vae, int64_t *parameters, int64_t *held,
                        int64_t *mapped);

/* The size of the video that latents (t, h, w) give: 1 + (t - 1) * factor_t frames of h * factor_s
 * by w * factor_s pixels. */
void esa_wan_vae_size(const esa_wan_vae_config *config, const int32_t latent[3], int32_t frames[3]);
/* ESA_ERR_ARGUMENT for sizes and tiles (as below) that the decoder does not take; decoding checks
 * them too. */
esa_status esa_wan_vae_check_sizes(const esa_wan_vae *vae, const int32_t latent[3], int32_t tile);
/* For such sizes: the exact memory of the device that esa_wan_vae_frames needs, without the weights
 * and the scratch of single operations; INT64_MAX if there is not enough memory to count it. tile
 * as below. */
int64_t esa_wan_vae_bytes(const esa_wan_vae *vae, const int32_t latent[3], int32_t tile);

/* Decodes latents [z_dim][t][h][w], in the memory of the device of nn, as the denoising loop leaves
 * them (zero mean, unit variance; the config's statistics are applied here). tile: side of a square
 * tile in pixels, a multiple of 4 * factor_s, used if a side is longer than it; 0 for whole frames.
 * Fails with ESA_ERR_ARGUMENT for wrong sizes, ESA_ERR_MEMORY, or ESA_ERR_STATE if env's tick stops
 * it (units: latent frames, times tiles). sink gets frames in [-1, 1]. Keeps nothing between calls.
 */
esa_status esa_wan_vae_decode(esa_wan_vae *vae, const float *latents, const int32_t latent[3],
                              int32_t tile, esa_vae_sink sink, void *user);
/* The same with frames as bytes: rgb [frames][height][width][out_channels] in host memory, as
 * diffusers converts them (esa_plane_bytes_args). Fails with ESA_ERR_FORMAT if a pixel is NaN, so
 * that a broken frame does not look like a black one. */
esa_status esa_wan_vae_frames(esa_wan_vae *vae, const float *latents, const int32_t latent[3],
                              int32_t tile, uint8_t *rgb);

/* wan_vae_encode.c, for a VAE whose config asks for the encoder: out [z_dim][latent[0]][latent[1]]
 * [latent[2]] in host memory = the normed means of the latents of a video whose first frame is rgb,
 * f32 [height][width][3] from -1 to 1, and whose others are 0. */
esa_status esa_wan_vae_encode_image(esa_wan_vae *vae, float *out, const float *rgb,
                                    const int32_t latent[3]);
/* The memory of the device that it needs, without weights; INT64_MAX if it cannot be counted. */
int64_t esa_wan_vae_encode_bytes(const esa_wan_vae *vae, const int32_t latent[3]);

#endif
