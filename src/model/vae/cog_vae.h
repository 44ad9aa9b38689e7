/* cog_vae.h - the layers of the decoder of CogVideoX's VAE (cog_vae.c).
 * SPDX-License-Identifier: Apache-2.0
 *
 * Latents are decoded in batches of two frames; the first has three if their number is odd. A
 * convolution sees the last two frames of the batch before, or its first frame repeated where there
 * is none. Group norms take their statistics from one batch, so the batches are part of the
 * definition, and every layer runs over a whole batch before the next.
 *
 * Norms are guided by the latents: norm(x) * times + plus, where times and plus are convolutions of
 * one pixel over the latents, repeated to the size of x. They are computed at the size of the
 * latents.
 *
 * Where time doubles, frames are repeated, except the first of a batch with an odd number: t
 * latents give 1 + 4 (t - 1) frames if t is odd, else 4 t. */
#ifndef ESA_MODEL_COG_VAE_H
#define ESA_MODEL_COG_VAE_H

#include "model/vae/vae_kind.h"

#define ESA_COG_KEPT  2 /* frames of history for a convolution with 3 taps in time */
#define ESA_COG_BATCH 2 /* frames of latents in a batch */

/* Weights and planes are in the memory of the device of nn. */

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

typedef struct esa_cog_vae {
    esa_vae vae;
    esa_cog_vae_config config;
    esa_conv conv_in, conv_out;
    cog_vae_res mid[2];
    cog_vae_norm norm_out;
    cog_vae_level level[ESA_CONFIG_MAX_LEVELS];
    cog_vae_slot *slot; /* [slots] */
    int32_t slots, in_slot, out_slot;
    cog_vae_res *res_all; /* the res blocks of all levels */
} esa_cog_vae;

/* cog_vae_decode.c: kind->cut and cut_bytes */
esa_status esa_cog_vae_cut(esa_vae *vae, const esa_vae_cut *cut, esa_vae_sink sink, void *user);
int64_t esa_cog_vae_cut_bytes(const esa_vae *vae, int64_t frames, int64_t height, int64_t width,
                              int32_t bytes);
/* Frames, height and width that latents give. */
void esa_cog_vae_size(const void *config, const int32_t latent[3], int32_t size[3]);

#endif
