/* hunyuan_vae.h - the layers of the decoder of HunyuanVideo's VAE (hunyuan_vae.c).
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

#include "model/vae/vae_kind.h"

/* Weights and planes are in the memory of the device of nn. */

typedef struct hunyuan_norm {
    float *weight, *bias; /* [channels] */
    int64_t channels;
} hunyuan_norm;

/* norm1, SiLU, conv1, norm2, SiLU, conv2, plus the input (through shortcut if the number of
 * channels changes). */
typedef struct hunyuan_res {
    hunyuan_norm norm[2];
    esa_conv conv[2], shortcut; /* shortcut.packed NULL: identity */
    int32_t cin, cout;
} hunyuan_res;

/* Res blocks, then doubling in space, and in time if `time` is 1. */
typedef struct hunyuan_level {
    hunyuan_res *res;
    int32_t res_count, cin, cout, time;
    esa_conv up; /* packed is NULL in the last level */
} hunyuan_level;

typedef struct esa_hunyuan_vae {
    esa_vae vae;
    esa_hunyuan_vae_config config;
    esa_conv post_quant, conv_in, conv_out, q, k, v, out; /* q to out: attention, if it is there */
    hunyuan_res mid[2];
    hunyuan_norm attn_norm, norm_out;
    hunyuan_level level[ESA_CONFIG_MAX_LEVELS];
    hunyuan_res *res_all; /* the res blocks of all levels */
} esa_hunyuan_vae;

/* hunyuan_vae_decode.c: decodes a cut into rgb [frames][height][width][3] in host memory. */
esa_status esa_hunyuan_vae_cut(esa_hunyuan_vae *vae, const esa_vae_cut *cut, float *rgb);
/* The memory that it takes on the device. */
int64_t esa_hunyuan_vae_cut_bytes(const esa_hunyuan_vae *vae, int64_t frames, int64_t height,
                                  int64_t width);
/* hunyuan_vae_tile.c: kind->decode and decode_bytes */
esa_status esa_hunyuan_vae_pieces(esa_vae *vae, const float *latents, const int32_t latent[3],
                                  int32_t tile, esa_vae_sink sink, void *user);
int64_t esa_hunyuan_vae_bytes(const esa_vae *vae, const int32_t latent[3], int32_t tile);

static inline int64_t esa_hunyuan_vae_count(const esa_hunyuan_vae_config *c, int64_t latent_frames)
{
    return (latent_frames - 1) * c->factor_t + 1;
}

#endif
