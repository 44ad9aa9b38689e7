/* wan_vae_parts.h - the structs and functions that the files of the VAE decoder share.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_WAN_VAE_PARTS_H
#define ESA_MODEL_WAN_VAE_PARTS_H

#include "model/vae/wan_vae.h"
#include "model/vae/vae_file.h"
#include "model/vae/vae_frames.h"

#define ESA_VAE_KEPT 2 /* frames of history for a causal convolution with 3 taps in time */

/* Weights and planes are in the memory of the device of env.nn. */

/* norm1, SiLU, conv1, norm2, SiLU, conv2, plus the input (through shortcut if the number of
 * channels changes). */
typedef struct esa_vae_res {
    float *norm[2];             /* gamma */
    esa_conv conv[2], shortcut; /* shortcut.packed NULL: identity */
    int32_t cin, cout;
    int32_t slot; /* history of conv[0]; conv[1] has the next one */
} esa_vae_res;

/* One resolution: res blocks, then doubling in space, and in time if time[] is packed. The file has
 * one convolution to twice the channels, whose halves are the two frames; here it is two
 * convolutions. */
typedef struct esa_vae_level {
    esa_vae_res *res;
    int32_t res_count, cin, cout, widest;
    int32_t slot;         /* history of the doubling in time */
    esa_conv time[2], up; /* up.packed is NULL in the last level */
} esa_vae_level;

typedef struct esa_vae_attention {
    float *norm; /* gamma */
    esa_conv qkv, proj;
} esa_vae_attention;

/* The encoder: from pixels to latents. Level 0 is that of the latents, as in the decoder. A level
 * has res blocks; then the size is halved, and time too if time is packed. */
typedef struct esa_vae_down {
    esa_vae_res *res; /* [res_blocks] */
    int32_t cin, cout, widest;
    int32_t slot;        /* history of the halving in time */
    esa_conv down, time; /* down.packed is NULL in the last level */
} esa_vae_down;
typedef struct esa_vae_encoder {
    esa_conv conv_in, conv_out, quant;         /* quant: its means alone */
    esa_vae_down level[ESA_CONFIG_MAX_LEVELS]; /* [levels], [0] has the size of the latents */
    esa_vae_res mid[2];
    esa_vae_attention attention;
    float *norm_out;
    int32_t slots, in_slot, out_slot;
    esa_vae_res *res_all;
} esa_vae_encoder;

struct esa_wan_vae {
    esa_part_env env;
    esa_wan_vae_config config;
    esa_conv post_quant, conv_in, conv_out;
    esa_vae_res mid[2];
    esa_vae_attention attention;
    float *norm_out;
    esa_vae_encoder encoder; /* only if the config asks for it */
    esa_vae_level level[ESA_CONFIG_MAX_LEVELS];
    int32_t levels, slots;
    int32_t in_slot, out_slot;
    esa_vae_held held;
    esa_vae_res *res_all; /* the res blocks of all levels */
    int64_t res_bytes;
};

/* wan_vae_decode.c: applies the statistics and decodes. */
esa_status esa_vae_decode_cut(esa_wan_vae *vae, const esa_vae_cut *cut, esa_vae_sink sink,
                              void *user);
/* The memory that esa_vae_decode_cut needs on the device; bytes: 1 if the frames become bytes. */
int64_t esa_vae_cut_bytes(const esa_wan_vae *vae, int64_t frames, int64_t height, int64_t width,
                          int32_t bytes);

/* wan_vae_tile.c */
esa_status esa_vae_decode_tiled(esa_wan_vae *vae, const float *latents, const int32_t latent[3],
                                int32_t tile, esa_vae_sink sink, void *user);
int64_t esa_vae_tiled_bytes(const esa_wan_vae *vae, const int32_t latent[3], int32_t tile);

#endif
