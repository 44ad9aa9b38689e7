/* hunyuan_vae_parts.h - the structs and functions that the files of HunyuanVideo's VAE share.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_HUNYUAN_VAE_PARTS_H
#define ESA_MODEL_HUNYUAN_VAE_PARTS_H

#include "model/vae/hunyuan_vae.h"
#include "model/vae/vae_file.h"
#include "model/vae/vae_frames.h"

/* Weights and planes are in the memory of the device of env.nn. */

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

struct esa_hunyuan_vae {
    esa_part_env env;
    esa_hunyuan_vae_config config;
    esa_conv post_quant, conv_in, conv_out, q, k, v, out; /* q to out: attention, if it is there */
    hunyuan_res mid[2];
    hunyuan_norm attn_norm, norm_out;
    hunyuan_level level[ESA_CONFIG_MAX_LEVELS];
    esa_vae_held held;
    hunyuan_res *res_all; /* the res blocks of all levels */
    int64_t res_bytes;
};

/* A piece of latents [z_dim][frames][height][width] that lies in larger planes, with the pitches
 * row, frame and channel in floats. */
typedef struct hunyuan_cut {
    const float *latents; /* on the device */
    int64_t frames, height, width;
    int64_t row, frame, channel;
} hunyuan_cut;

/* hunyuan_vae_decode.c: decodes a piece into rgb [frames][height][width][3] in host memory. */
esa_status esa_hunyuan_vae_cut(esa_hunyuan_vae *vae, const hunyuan_cut *cut, float *rgb);
/* The memory that it takes on the device. */
int64_t esa_hunyuan_vae_cut_bytes(const esa_hunyuan_vae *vae, int64_t frames, int64_t height,
                                  int64_t width);
static inline int64_t esa_hunyuan_vae_count(const esa_hunyuan_vae_config *c, int64_t latent_frames)
{
    return (latent_frames - 1) * c->factor_t + 1;
}

#endif
