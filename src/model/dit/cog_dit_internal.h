/* cog_dit_internal.h - the struct behind esa_cog_dit: weights (cog_dit_open.c), geometry of one
 * video and activations (cog_dit_begin.c), positions (cog_positions.c).
 * SPDX-License-Identifier: Apache-2.0
 *
 * Letters: R rows of text, N video tokens, S = R + N, d = heads * head_dim, E = time_dim, P = patch
 * area, C channels. Weights and activations are in the memory of nn's device. */
#ifndef ESA_MODEL_COG_DIT_INTERNAL_H
#define ESA_MODEL_COG_DIT_INTERNAL_H

#include "model/dit/cog_dit.h"
#include "model/dit/dit_parts.h"

extern const esa_naming esa_cog_original; /* cog_names.c */

/* CogVideoXLayerNormZero. The layer makes shift, scale, gate of the video, then of the text. */
typedef struct cog_norm {
    esa_linear layer;        /* [6d,E] */
    esa_weight weight, bias; /* [d] f32 */
} cog_norm;

typedef struct cog_block {
    cog_norm norm[2];                /* before attention, before the feed-forward */
    esa_linear q, k, v, out;         /* [d,d]; the biases of q, k, v may be absent */
    esa_weight q_norm[2], k_norm[2]; /* [head_dim] f32: weight, bias */
    esa_linear up, down;             /* [4d,d], [d,4d] */
} cog_block;

struct esa_cog_dit {
    esa_nn *nn;
    esa_cog_config config;
    esa_weights *weights; /* owned */
    esa_store *store;     /* owned; all weights below point into it */
    int64_t d, ffn;
    int32_t room_known; /* 1: given is what esa_cog_dit_set_room got */
    esa_dit_room given;
    int32_t (*tick)(void *user, int64_t done, int64_t total);
    void *tick_user;
    esa_linear patch;         /* [d,C,p,p]; the bias may be absent */
    esa_linear text_proj;     /* [d,text_dim] */
    esa_linear time1, time2;  /* [E,d], [E,E] */
    esa_linear norm_out;      /* [2d,E]: shift, scale of the head */
    esa_weight final_norm[2]; /* [d] f32: weight, bias */
    esa_weight out_norm[2];   /* [d] f32: weight, bias */
    esa_linear proj_out;      /* [P*C_out,d] */
    cog_block *block;         /* [layers] */
    int32_t prepared;         /* 1: the products were measured for this video */
    float *wave;              /* [d] in host memory: the sinusoid of a timestep */

    /* for one video */
    int32_t latent[3], grid[3];
    int64_t tokens, text_rows, rows; /* N, R, S */
    int32_t *perm;                   /* [N] position -> token of the grid; NULL: identity */
    float *cos, *sin;                /* [S][head_dim/2], in sequence order; NULL: no rotation */
    esa_view places;                 /* [N][d] added to the patches, in sequence order; or absent */
    esa_view *text;                  /* [branches] [R][d] each; data NULL: not set */
    int32_t *has_text;               /* [branches] */
    int32_t branches;
    void *room; /* one block for the activations below */
    int64_t room_bytes;
    esa_view x;                    /* [S][d] the residual stream */
    esa_view a;                    /* [S][d] normed input of a layer */
    esa_view o;                    /* [S][d] output of attention */
    esa_view qkv[3];               /* [S][d] each */
    esa_view flat;                 /* [S][d] the product of a layer after attention */
    esa_view patch_in, patch_out;  /* [N][P * C] in the same memory */
    esa_view hidden;               /* [S or fewer][4d] */
    esa_view temb, silu, sinusoid; /* [1][E], [1][E], [1][d] */
    esa_view e[2];                 /* [1][6d]: modulation of the two norms of a block */
    esa_cog_dit_watch watch;
    void *watch_user;
};

/* cog_positions.c: positions of the tokens of a grid (t, h, w), in the order perm (NULL: identity).
 *
 * Rotations of video tokens, cos and sin [tokens][head_dim/2]. A quarter of a head's channels
 * belongs to t, the rest to h and w. The grid is laid over that of the model's own size, which it
 * fills without being distorted, so positions need not be whole numbers. */
void esa_cog_rotations(const esa_cog_config *config, float *cos, float *sin, const int32_t grid[3],
                       const int32_t *perm);
/* Sines and cosines that are added to the patches, out [tokens][d]. A quarter of the channels
 * belongs to t, then come w and h. */
void esa_cog_places(const esa_cog_config *config, float *out, const int32_t grid[3],
                    const int32_t *perm);

#endif
