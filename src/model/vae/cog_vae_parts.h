/* cog_vae_parts.h - the structs and functions that the files of CogVideoX's decoder share.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_COG_VAE_PARTS_H
#define ESA_MODEL_COG_VAE_PARTS_H

#include "model/vae/cog_vae.h"
#include "model/vae/vae_file.h"
#include "model/vae/vae_frames.h"

#define ESA_COG_KEPT  2 /* frames of history for a convolution with 3 taps in time */
#define ESA_COG_BATCH 2 /* frames of latents in a batch */

/* Weights and planes are in the memory of the device of env.nn. */

/* A group norm that is guided by the latents. */
typedef struct cog_vae_norm {
    int32_t channels;
    float *weight, *bias; /* [channels] */
    esa_conv times, plus;
} cog_vae_norm;

/* norm1, SiLU, conv1, norm2, SiLU, conv2, plus the input (through shortcut if the number of
 * channels changes). */
typedef struct cog_vae_res {
    cog_vae_norm norm[2];
    esa_conv conv[2], shortcut; /* shortcut.packed NULL: identity */
    int32_t cin, cout;
    int32_t slot; /* history of conv[0]; conv[1] has the next one */
} cog_vae_res;

/* One resolution: res blocks, then doubling in space, and in time if doubles_time. */
typedef struct cog_vae_level {
    cog_vae_res *res;
    int32_t res_count, cin, cout;
    int32_t doubles_time;
    esa_conv up; /* packed NULL in the last level */
} cog_vae_level;

/* Where the history of a convolution is, and its size. */
typedef struct cog_vae_slot {
    int32_t level, channels;
    char *kept[ESA_COG_KEPT]; /* older, newer; while decoding */
} cog_vae_slot;

struct esa_cog_vae {
    esa_part_env env;
    esa_cog_vae_config config;
    esa_conv conv_in, conv_out;
    cog_vae_res mid[2];
    cog_vae_norm norm_out;
    cog_vae_level level[ESA_CONFIG_MAX_LEVELS];
    cog_vae_slot *slot; /* [slots] */
    int32_t slots, in_slot, out_slot;
    esa_vae_held held;
    cog_vae_res *res_all; /* the res blocks of all levels */
    int64_t res_bytes, slot_bytes;
};

/* cog_vae_decode.c */
esa_status esa_cog_vae_decode_cut(esa_cog_vae *vae, const esa_vae_cut *cut, esa_vae_sink sink,
                                  void *user);
/* The memory that it needs on the device; bytes: 1 if the frames become bytes. */
int64_t esa_cog_vae_cut_bytes(const esa_cog_vae *vae, int64_t frames, int64_t height, int64_t width,
                              int32_t bytes);

#endif
