/* wan_vae_run.h - what the decoder and the encoder of Wan's VAE share: planes, their histories, and
 * the blocks made of them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Planes: the inputs of convolutions are planes with a border of one pixel of zeros. The border is
 * set when the plane is made and never written again. Planes are passed on: a norm fills one, it
 * becomes the newest of a convolution's history, and two frames later it is spare for the next norm
 * of that shape. The stream between blocks has no border.
 *
 * A dry run takes the same path without computing and only counts. The memory that it counts is
 * allocated as one block, from which planes and buffers are taken.
 *
 * Planes are of the type of the device's activations. Level 0 has the size of the latents, and each
 * level doubles it. */
#ifndef ESA_MODEL_WAN_VAE_RUN_H
#define ESA_MODEL_WAN_VAE_RUN_H

#include "model/vae/wan_vae.h"

typedef struct wan_vae_plane {
    char *data;              /* (height + 2) x (width + 2) x channels; NULL: none */
    int32_t level, channels; /* the level gives the size */
} wan_vae_plane;

typedef struct wan_vae_run {
    esa_nn *nn;
    const esa_nn_planes *op;
    int32_t dry;
    int64_t element;       /* bytes of a plane's element */
    char *block;           /* the memory of the run */
    int64_t size, used;    /* bytes of the block; taken so far */
    int64_t height, width; /* size of the latents */
    wan_vae_plane *kept;   /* [slots][ESA_VAE_KEPT]: older, newer */
    wan_vae_plane *spare;  /* [spare_cap] */
    int64_t spare_count, spare_cap, list_bytes;
    void *stream[ESA_CONFIG_MAX_LEVELS], *temp[ESA_CONFIG_MAX_LEVELS];
    void *qkv; /* of the attention */
} wan_vae_run;

/* A plane or a part of the stream as output of a convolution. */
typedef struct wan_vae_target {
    void *y;
    int64_t row;
    const void *residual;
    int64_t residual_row;
} wan_vae_target;

static inline int64_t esa_wan_vae_high(const wan_vae_run *r, int32_t level)
{
    return r->height << level;
}
static inline int64_t esa_wan_vae_wide(const wan_vae_run *r, int32_t level)
{
    return r->width << level;
}
static inline int64_t esa_wan_vae_pitch(const wan_vae_run *r, const wan_vae_plane *p)
{
    return (esa_wan_vae_wide(r, p->level) + 2) * p->channels;
}
/* The first pixel of a plane, behind its border. */
static inline void *esa_wan_vae_inside(const wan_vae_run *r, const wan_vae_plane *p)
{
    return p->data ? p->data + r->element * (esa_wan_vae_pitch(r, p) + p->channels) : NULL;
}

/* Lists for `slots` histories and as many planes as `more` says besides; freed by the caller. */
esa_status esa_wan_vae_lists(wan_vae_run *r, int32_t slots, int64_t more);
void esa_wan_vae_lists_free(wan_vae_run *r);
/* In a dry run memory is only counted, and the pointer is never dereferenced. */
esa_status esa_wan_vae_take(wan_vae_run *r, void *out, int64_t bytes);
esa_status esa_wan_vae_plane_take(wan_vae_run *r, wan_vae_plane *out, int32_t level,
                                  int32_t channels);
void esa_wan_vae_plane_give(wan_vae_run *r, wan_vae_plane *p);
/* Adds the newest frame to a slot's history; the oldest becomes spare. */
void esa_wan_vae_remember(wan_vae_run *r, int32_t slot, const wan_vae_plane *p);

esa_status esa_wan_vae_convolve(wan_vae_run *r, const esa_conv *conv, const wan_vae_target *to,
                                int32_t dtype, const void *const x[3], int64_t x_row,
                                int32_t level);
/* A convolution of one frame without a border. */
esa_status esa_wan_vae_mix(wan_vae_run *r, const esa_conv *conv, const wan_vae_target *to,
                           const void *x, int32_t level);
/* A convolution over its history and p. Does not add p to the history. */
esa_status esa_wan_vae_causal(wan_vae_run *r, const esa_conv *conv, int32_t slot,
                              const wan_vae_plane *p, const wan_vae_target *to, int32_t dtype);
/* Norm, SiLU and causal convolution of the stream x. */
esa_status esa_wan_vae_norm_conv(wan_vae_run *r, const float *gamma, const esa_conv *conv,
                                 int32_t slot, int32_t level, const void *x,
                                 const wan_vae_target *to, int32_t dtype);
/* From the stream to y, which may be the stream itself. */
esa_status esa_wan_vae_res_block(wan_vae_run *r, const wan_vae_res *b, int32_t level, void *y,
                                 int64_t y_row);
/* Attention over the pixels of the frame at level 0, with one head as wide as the stream. */
esa_status esa_wan_vae_attend(wan_vae_run *r, const wan_vae_attention *a);

#endif
