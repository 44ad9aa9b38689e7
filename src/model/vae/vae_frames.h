/* vae_frames.h - what the decoders of all families share: sizes, pieces of latents, frames as
 * bytes.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_VAE_FRAMES_H
#define ESA_MODEL_VAE_FRAMES_H

#include "model/vae/tiles.h"

/* Fails with ESA_ERR_ARGUMENT for latents (t, h, w) and tiles that a decoder does not take.
 * factor: pixels for each latent, in height and width. unit: a tile has a multiple of it. */
esa_status esa_vae_check_sizes(esa_ctx *ctx, const int32_t latent[3], int32_t factor, int32_t tile,
                               int32_t unit);

/* 1: decodes in tiles of that many pixels; 0: the frames are not larger than a tile. */
static inline int32_t esa_vae_has_tiles(const int32_t latent[3], int32_t factor, int32_t tile)
{
    return tile > 0 && (latent[1] > tile / factor || latent[2] > tile / factor);
}

/* Latents [z_dim][frames][height][width] that lie in larger planes, with the pitches row, frame and
 * channel in floats. */
typedef struct esa_vae_cut {
    const float *latents; /* on the device */
    int64_t frames, height, width;
    int64_t row, frame, channel;
    int64_t tick_base, tick_total; /* the units that env's tick reports */
    int32_t clamp;                 /* 1: clamps to [-1, 1]; 0 for tiles, which are blended first */
    uint8_t *bytes; /* where the frames go as bytes, in host memory; NULL: to a sink */
} esa_vae_cut;

/* All latents in one piece, clamped. */
esa_vae_cut esa_vae_whole(const float *latents, const int32_t latent[3]);
/* The latents of a tile. */
esa_vae_cut esa_vae_tile(const float *latents, const int32_t latent[3], int32_t factor,
                         const esa_tile *tile);

/* The error of a frame with a pixel that is not a number. */
esa_status esa_vae_nan(esa_ctx *ctx, int64_t frame);

/* The user of esa_vae_to_bytes, a sink that writes frames as bytes. */
typedef struct esa_vae_bytes {
    esa_ctx *ctx;
    uint8_t *rgb;     /* [frames][elements] */
    int64_t elements; /* of a frame: height * width * channels */
} esa_vae_bytes;
esa_status esa_vae_to_bytes(void *bytes, int64_t frame, const float *rgb);

#endif
