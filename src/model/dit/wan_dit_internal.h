/* wan_dit_internal.h - the struct behind esa_wan_dit: weights (wan_dit_open.c), geometry of one
 * video and activations (wan_dit_begin.c).
 * SPDX-License-Identifier: Apache-2.0
 *
 * Letters: N tokens, d = heads * head_dim, P = patch volume, C channels, R rows of folded text.
 * Weights and activations are in the memory of nn's device. */
#ifndef ESA_MODEL_WAN_DIT_INTERNAL_H
#define ESA_MODEL_WAN_DIT_INTERNAL_H

#include "model/dit/wan_dit.h"
#include "model/dit/dit_parts.h"

extern const esa_naming esa_wan_original; /* wan_names.c */

typedef struct wan_attn {
    esa_linear q, k, v, out;   /* [d,d] */
    esa_weight norm_q, norm_k; /* [d] f32 */
    /* cross-attention with an image: keys and values of the image */
    esa_linear image_k, image_v;
    esa_weight norm_image_k;
} wan_attn;

typedef struct wan_block {
    /* [1,6,d] f32: shift, scale, gate of self-attention, then of the feed-forward */
    esa_weight table;
    wan_attn self, cross;
    /* [d] f32, before cross-attention; absent without cross_norm */
    esa_weight norm2_weight, norm2_bias;
    esa_linear up, down; /* [ffn,d], [d,ffn] */
} wan_block;

/* The folded text of one guidance branch: the last row stands for all the equal rows at the end. */
typedef struct wan_text {
    esa_view kv; /* [layers * 2 * R][d]: keys (normed) and values of every layer; owned */
    float *bias; /* [R]: 0, and log(count) in the last */
    int64_t rows, kv_bytes, bias_bytes;
} wan_text;

/* The image embedder: norm, linear, GELU, linear, norm. */
typedef struct wan_embedder {
    esa_weight norm1_weight, norm1_bias; /* [image_dim] */
    esa_linear up, down;                 /* [image_dim, image_dim], [d, image_dim] */
    esa_weight norm2_weight, norm2_bias; /* [d] */
} wan_embedder;

struct esa_wan_dit {
    esa_nn *nn;
    esa_wan_config config;
    esa_weights *weights; /* owned */
    esa_store *store;     /* owned; all weights below point into it */
    int64_t d;
    int32_t room_known; /* 1: given is what esa_wan_dit_set_room got */
    esa_dit_room given;
    int32_t (*tick)(void *user, int64_t done, int64_t total);
    void *tick_user;
    esa_linear patch; /* [d,C,pt,ph,pw] */
    esa_linear time1, time2, time_proj, text1, text2;
    wan_embedder image;
    esa_linear proj_out; /* [P*C_out, d] */
    esa_weight table;    /* [1,2,d] f32: shift, scale of the head */
    wan_block *block;    /* [layers] */
    int32_t prepared;    /* blocks whose products were measured for this video */
    float *wave;         /* [freq_dim] in host memory: the sinusoid of a timestep */

    /* for one video */
    int32_t latent[3], grid[3];
    int64_t tokens;
    int32_t *perm;    /* [N] position -> token of the grid; NULL: identity */
    float *cos, *sin; /* [N][head_dim/2], in sequence order */
    wan_text *text;   /* [branches] */
    wan_text picture; /* keys and values of the image; bias NULL */
    float *input;     /* [in_channels][T][H][W]: latents, then what they are conditioned on */
    int32_t branches;
    void *room; /* one block for the activations below */
    int64_t room_bytes;
    esa_view x;      /* [N][d] the residual stream */
    esa_view a;      /* [N][d] normed input of a layer */
    esa_view o;      /* [N][d] output of attention */
    esa_view qkv[3]; /* [N][d] each */
    esa_view more;   /* [N][d] room beside flat while q is in flat */
    esa_view flat;   /* [N][d] q of cross-attention, then the product of a layer after attention */
    esa_view patch_in, patch_out; /* [N][P * C] in the same memory */
    esa_view hidden;              /* [N or fewer][ffn] */
    esa_view temb, silu, proj;    /* [1][d], [1][d], [1][6d]: embedding of the timestep */
    esa_view sinusoid;            /* [1][freq_dim] */
    float *e[2];                  /* [6d] each: modulation of a block and of the one after it */
    esa_wan_dit_watch watch;
    void *watch_user;
};

/* Measures the products of block i for this video's sizes, if the device can. Blocks 0 and 1 stand
 * for all: others have the sizes and types of one of them. Between begin and end of the block. */
esa_status esa_wan_dit_prepare(esa_wan_dit *dit, int32_t i);
#endif
