/* cog_dit.h - the struct of CogVideoX's transformer: its tensors and what one video needs
 * (cog_dit_make.c, cog_positions.c), the forward (cog_dit.c).
 * SPDX-License-Identifier: Apache-2.0
 *
 * Text and video are one sequence, [text][video], and attend to each other in every block. The
 * layout says how many rows of text there are. Text stays in front, whatever order the video has.
 * diffusers runs both guidance branches as one batch; here each is a call of its own, which
 * computes the same. diffusers also has frames before channels in its latents.
 *
 * Letters beside those of dit_kind.h: E = time_dim, p side of a patch. */
#ifndef ESA_MODEL_COG_DIT_H
#define ESA_MODEL_COG_DIT_H

#include "model/dit/dit_kind.h"

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

typedef struct esa_cog_dit {
    esa_dit dit;
    esa_cog_config config;
    esa_linear patch;         /* [d,C,p,p]; the bias may be absent */
    esa_linear text_proj;     /* [d,text_dim] */
    esa_linear time1, time2;  /* [E,d], [E,E] */
    esa_linear norm_out;      /* [2d,E]: shift, scale of the head */
    esa_weight final_norm[2]; /* [d] f32: weight, bias */
    esa_weight out_norm[2];   /* [d] f32: weight, bias */
    esa_linear proj_out;      /* [P*C_out,d] */
    cog_block *block;         /* [blocks] */
    float *wave;              /* [d] in host memory: the sinusoid of a timestep */

    /* for one video */
    int32_t prepared[2];             /* 1: the products of blocks 0 and 1 were measured */
    esa_view places;                 /* [N][d] added to the patches, in sequence order; or absent */
    esa_view text[ESA_DIT_BRANCHES]; /* [R][d] each */
    esa_view temb, silu, sinusoid;   /* [1][E], [1][E], [1][d] */
    esa_view e[2];                   /* [1][6d]: modulation of the two norms of a block */
} esa_cog_dit;

/* cog_kind.c */
int32_t esa_cog_recognise(esa_weights *w, void *config, char *line, size_t bytes);
/* cog_dit.c: kind->before, block, after, prepare */
esa_status esa_cog_before(esa_dit *dit, const esa_dit_call *call);
esa_status esa_cog_block(esa_dit *dit, const esa_dit_call *call, int32_t i);
esa_status esa_cog_after(esa_dit *dit, const esa_dit_call *call);
esa_status esa_cog_prepare(esa_dit *dit, int32_t i);

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
