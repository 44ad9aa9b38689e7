/* wan_dit.h - the struct of Wan's transformer: its tensors and what one video needs
 * (wan_dit_make.c), its image (wan_dit_image.c), the forward (wan_dit.c).
 * SPDX-License-Identifier: Apache-2.0
 *
 * Letters beside those of dit_kind.h: R rows of folded text. */
#ifndef ESA_MODEL_WAN_DIT_H
#define ESA_MODEL_WAN_DIT_H

#include "model/dit/dit_kind.h"

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

typedef struct esa_wan_dit {
    esa_dit dit;
    esa_wan_config config;
    esa_linear patch; /* [d,C,pt,ph,pw] */
    esa_linear time1, time2, time_proj, text1, text2;
    wan_embedder image;
    esa_linear proj_out; /* [P*C_out, d] */
    esa_weight table;    /* [1,2,d] f32: shift, scale of the head */
    wan_block *block;    /* [blocks] */
    float *wave;         /* [freq_dim] in host memory: the sinusoid of a timestep */

    /* for one video */
    int32_t prepared[2]; /* 1: the products of blocks 0 and 1 were measured; they stand for all */
    wan_text text[ESA_DIT_BRANCHES];
    wan_text picture; /* keys and values of the image; bias NULL */
    float *input;     /* [in_channels][T][H][W]: latents, then what they are conditioned on */
    esa_view temb, silu, proj; /* [1][d], [1][d], [1][6d]: embedding of the timestep */
    esa_view sinusoid;         /* [1][freq_dim] */
    float *e[2];               /* [6d] each: modulation of a block and of the one after it */
} esa_wan_dit;

/* wan_kind.c */
int32_t esa_wan_recognise(esa_weights *w, void *config, char *line, size_t bytes);
/* wan_dit_image.c: kind->image */
esa_status esa_wan_image(esa_dit *dit, const esa_image *image);
/* wan_dit.c: kind->before, block, after, prepare */
esa_status esa_wan_before(esa_dit *dit, const esa_dit_call *call);
esa_status esa_wan_block(esa_dit *dit, const esa_dit_call *call, int32_t i);
esa_status esa_wan_after(esa_dit *dit, const esa_dit_call *call);
esa_status esa_wan_prepare(esa_dit *dit, int32_t i);

#endif
