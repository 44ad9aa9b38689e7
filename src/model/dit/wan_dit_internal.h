/* wan_dit_internal.h - the struct behind esa_wan_dit: weights (wan_dit_open.c), geometry of one
 * video and activations (wan_dit_begin.c).
 * SPDX-License-Identifier: Apache-2.0
 *
 * Letters: N tokens, d = heads * head_dim, P = patch volume, C channels, R rows of folded text. */
#ifndef ESA_MODEL_WAN_DIT_INTERNAL_H
#define ESA_MODEL_WAN_DIT_INTERNAL_H

#include "model/dit/wan_dit.h"

typedef struct wan_linear {
    esa_weight weight, bias;
} wan_linear; /* [out,in], [out] */

typedef struct wan_attn {
    wan_linear q, k, v, out;   /* [d,d] */
    esa_weight norm_q, norm_k; /* [d] f32 */
} wan_attn;

typedef struct wan_block {
    /* [1,6,d] f32: shift, scale, gate of self-attention, then of the feed-forward */
    esa_weight table;
    wan_attn self, cross;
    /* [d] f32, before cross-attention; absent without cross_norm */
    esa_weight norm2_weight, norm2_bias;
    wan_linear up, down; /* [ffn,d], [d,ffn] */
} wan_block;

/* The folded text of one guidance branch: the last row stands for all the equal rows at the end. */
typedef struct wan_text {
    float *kv;   /* [layers][2][R][d]: keys (normed) and values of every layer; owned */
    float *bias; /* [R]: 0, and log(count) in the last */
    int64_t rows, kv_bytes, bias_bytes;
} wan_text;

struct esa_wan_dit {
    esa_nn *nn;
    esa_wan_config config;
    esa_weights *weights; /* owned; all weights below point into it */
    int64_t d;
    int32_t (*tick)(void *user, int64_t done, int64_t total);
    void *tick_user;
    wan_linear patch; /* [d,C,pt,ph,pw] */
    wan_linear time1, time2, time_proj, text1, text2;
    wan_linear proj_out; /* [P*C_out, d] */
    esa_weight table;    /* [1,2,d] f32: shift, scale of the head */
    wan_block *block;    /* [layers] */

    /* for one video */
    int32_t latent[3], grid[3];
    int64_t tokens;
    int32_t *perm;    /* [N] position -> token of the grid; NULL: identity */
    float *cos, *sin; /* [N][head_dim/2], in sequence order */
    wan_text *text;   /* [branches] */
    int32_t branches;
    void *room; /* one block for the activations below */
    int64_t room_bytes;
    float *x;         /* [N][d] the residual stream */
    float *a;         /* [N][d] normed input, then output of attention */
    float *q, *k, *v; /* [N][d] */
    float *patches;   /* [N][P * max(C_in, C_out)] */
    float *hidden;    /* [ff_rows][ffn] */
    int64_t ff_rows;
    float *temb; /* [d], [d] SiLU of it, [6d] projection, [6d] of a block, [freq_dim] */
    esa_wan_dit_watch watch;
    void *watch_user;
};

/* Frees everything that belongs to one video. */
void esa_wan_dit_end(esa_wan_dit *dit);

#endif
