/* vae.h - the VAE of any family: turns latents into frames of pixels.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     esa_vae_make(env, &vae, &esa_wan_vae_kind, &config);     // compares the file
 *     esa_vae_load(vae);                                       // packs the weights
 *     esa_vae_frames(vae, latents, latent, tile, rgb);
 *
 * Latents are [z_dim][t][h][w] in the memory of the device of nn, as the denoising loop leaves
 * them; the config's statistics are applied here. tile: side of a square tile in pixels, used if a
 * side is longer than it; 0 for whole frames. */
#ifndef ESA_MODEL_VAE_H
#define ESA_MODEL_VAE_H

#include "model/config/config.h"
#include "model/part/part.h"

typedef struct esa_vae esa_vae;
typedef struct esa_vae_kind esa_vae_kind; /* vae_kind.h */

/* The kinds. Their configurations are esa_wan_vae_config, esa_cog_vae_config and
 * esa_hunyuan_vae_config; lists of levels are in the order of the file, encoder side first. */
extern const esa_vae_kind esa_wan_vae_kind, esa_cog_vae_kind, esa_hunyuan_vae_kind;

/* Opens the file and compares it with the config; copies it. */
esa_status esa_vae_make(const esa_part_env *env, esa_vae **vae, const esa_vae_kind *kind,
                        const void *config);
/* Packs the weights for the device of nn, and closes the file. */
esa_status esa_vae_load(esa_vae *vae);
void esa_vae_free(esa_vae *vae); /* accepts NULL */
void esa_vae_memory(const esa_vae *vae, int64_t *parameters, int64_t *held, int64_t *mapped);

/* Frames, height and width that latents (t, h, w) give. */
void esa_vae_size(const esa_vae_kind *kind, const void *config, const int32_t latent[3],
                  int32_t size[3]);
/* ESA_ERR_ARGUMENT for sizes and tiles that the decoder does not take; decoding checks them too. */
esa_status esa_vae_check_sizes(const esa_vae *vae, const int32_t latent[3], int32_t tile);
/* The exact memory of the device that esa_vae_frames needs, without the weights and the scratch of
 * single operations; INT64_MAX if there is not enough memory to count it. */
int64_t esa_vae_bytes(const esa_vae *vae, const int32_t latent[3], int32_t tile);

/* Receives one frame after the other: rgb [height][width][channels] in host memory, valid during
 * the call. Decoding stops if it fails, and returns its status. */
typedef esa_status (*esa_vae_sink)(void *user, int64_t frame, const float *rgb);

/* sink gets frames in about [-1, 1]. Fails with ESA_ERR_ARGUMENT for wrong sizes, ESA_ERR_MEMORY,
 * or ESA_ERR_STATE if env's tick stops it. Keeps nothing between calls. */
esa_status esa_vae_decode(esa_vae *vae, const float *latents, const int32_t latent[3], int32_t tile,
                          esa_vae_sink sink, void *user);
/* The same with frames as bytes: rgb [frames][height][width][3] in host memory, as diffusers
 * converts them (esa_plane_bytes_args). Fails with ESA_ERR_FORMAT if a pixel is NaN, so that a
 * broken frame does not look like a black one. */
esa_status esa_vae_frames(esa_vae *vae, const float *latents, const int32_t latent[3], int32_t tile,
                          uint8_t *rgb);

/* wan_vae_encode.c, for a VAE of Wan whose config asks for the encoder: out [z_dim][latent[0]]
 * [latent[1]][latent[2]] in host memory = the normed means of the latents of a video whose first
 * frame is rgb, f32 [height][width][3] from -1 to 1, and whose others are 0. */
esa_status esa_wan_vae_encode_image(esa_vae *vae, float *out, const float *rgb,
                                    const int32_t latent[3]);
/* The memory of the device that it needs, without weights; INT64_MAX if it cannot be counted. */
int64_t esa_wan_vae_encode_bytes(const esa_vae *vae, const int32_t latent[3]);

#endif
