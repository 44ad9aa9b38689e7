/* wan_vae.h - the layers of Wan's VAE (wan_vae.c), decoder and encoder.
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
 * (1 + k latents give 1 + k * factor frames) and does not add it to its history.. */
#ifndef ESA_MODEL_WAN_VAE_H
#define ESA_MODEL_WAN_VAE_H

#include "model/vae/vae_kind.h"

#define ESA_VAE_KEPT 2 /* frames of history for a causal convolution with 3 taps in time */

/* Weights and planes are in the memory of the device of nn. */

/* norm1, SiLU, conv1, norm2, SiLU, conv2, plus the input (through shortcut if the number of
 * channels changes). */
typedef struct wan_vae_res {
    float *norm[2];             /* gamma */
    esa_conv conv[2], shortcut; /* shortcut.packed NULL: identity */
    int32_t cin, cout;
    int32_t slot; /* history of conv[0]; conv[1] has the next one */
} wan_vae_res;

/* One resolution: res blocks, then doubling in space, and in time if time[] is packed. The file has
 * one convolution to twice the channels, whose halves are the two frames; here it is two
 * convolutions. */
typedef struct wan_vae_level {
    wan_vae_res *res;
    int32_t res_count, cin, cout, widest;
    int32_t slot;         /* history of the doubling in time */
    esa_conv time[2], up; /* up.packed is NULL in the last level */
} wan_vae_level;

typedef struct wan_vae_attention {
    float *norm; /* gamma */
    esa_conv qkv, proj;
} wan_vae_attention;

/* The encoder: from pixels to latents. Level 0 is that of the latents, as in the decoder. A level
 * has res blocks; then the size is halved, and time too if time is packed. */
typedef struct wan_vae_down {
    wan_vae_res *res; /* [res_blocks] */
    int32_t cin, cout, widest;
    int32_t slot;        /* history of the halving in time */
    esa_conv down, time; /* down.packed is NULL in the last level */
} wan_vae_down;
typedef struct wan_vae_encoder {
    esa_conv conv_in, conv_out, quant;         /* quant: its means alone */
    wan_vae_down level[ESA_CONFIG_MAX_LEVELS]; /* [levels], [0] has the size of the latents */
    wan_vae_res mid[2];
    wan_vae_attention attention;
    float *norm_out;
    int32_t slots, in_slot, out_slot;
    wan_vae_res *res_all; /* the res blocks of all levels */
} wan_vae_encoder;

typedef struct esa_wan_vae {
    esa_vae vae;
    esa_wan_vae_config config;
    esa_conv post_quant, conv_in, conv_out;
    wan_vae_res mid[2];
    wan_vae_attention attention;
    float *norm_out;
    wan_vae_encoder encoder; /* only if the config asks for it */
    wan_vae_level level[ESA_CONFIG_MAX_LEVELS];
    int32_t levels, slots;
    int32_t in_slot, out_slot;
    wan_vae_res *res_all; /* the res blocks of all levels */
} esa_wan_vae;

/* wan_vae_decode.c: kind->cut and cut_bytes */
esa_status esa_wan_vae_cut(esa_vae *vae, const esa_vae_cut *cut, esa_vae_sink sink, void *user);
int64_t esa_wan_vae_cut_bytes(const esa_vae *vae, int64_t frames, int64_t height, int64_t width,
                              int32_t bytes);

#endif
