/* hunyuan_dit_internal.h - the struct behind esa_hunyuan_dit: weights (hunyuan_dit_open.c), one
 * video (hunyuan_dit_begin.c), what is computed before the blocks (hunyuan_embed.c).
 * SPDX-License-Identifier: Apache-2.0
 *
 * Letters: N tokens of the video, T rows of text, S = N + T, d = heads * head_dim, C channels.
 * Weights and activations are in the memory of nn's device. */
#ifndef ESA_MODEL_HUNYUAN_DIT_INTERNAL_H
#define ESA_MODEL_HUNYUAN_DIT_INTERNAL_H

#include "model/dit/hunyuan_dit.h"
#include "model/dit/dit_parts.h"

#define ESA_HUNYUAN_WAVE 256 /* length of the sinusoid of a timestep */
#define ESA_HUNYUAN_EPS  1e-6f
#define ESA_HUNYUAN_WIDE 4 /* the refiner's hidden layer is this much wider than d */

extern const esa_naming esa_hunyuan_original; /* hunyuan_names.c */

/* Two layers with SiLU between them. */
typedef struct hunyuan_mlp {
    esa_linear one, two;
} hunyuan_mlp;

/* A stream of a double block, video or text; a single block has one. */
typedef struct hunyuan_stream {
    esa_linear modulation;     /* [6d,d], or [3d,d] in a single block */
    esa_linear q, k, v;        /* [d,d] */
    esa_weight norm_q, norm_k; /* [head_dim] f32 */
    esa_linear out;            /* [d,d], or [d, d + ffn] in a single block */
    esa_linear up, down;       /* [ffn,d], [d,ffn]; a single block has no down */
} hunyuan_stream;

typedef struct hunyuan_refiner {
    esa_weight norm1, bias1, norm2, bias2;    /* [d] f32 */
    esa_linear q, k, v, out, up, down, gates; /* gates [2d,d] */
} hunyuan_refiner;

/* The text of one branch. */
typedef struct hunyuan_text {
    void *room; /* owned: the rest lies in it */
    int64_t room_bytes;
    esa_view states; /* [T][text_dim] */
    esa_view mean;   /* [1][text_dim] f32: of the rows of the prompt */
    esa_view pooled; /* [1][pooled_dim] f32 */
    float *key;      /* [T]: 0 for rows of the prompt, else -inf */
    int32_t *length; /* [1]: N + rows of the prompt */
} hunyuan_text;

struct esa_hunyuan_dit {
    esa_nn *nn;
    esa_hunyuan_config config;
    esa_weights *weights; /* owned */
    esa_store *store;     /* owned; all weights below point into it */
    int64_t d;
    int32_t blocks;     /* doubles + singles */
    int32_t room_known; /* 1: given is what set_room got */
    esa_dit_room given;
    int32_t (*tick)(void *user, int64_t done, int64_t total);
    void *tick_user;
    esa_linear patch; /* [d,C,pt,p,p] */
    hunyuan_mlp time, guidance, pooled, refine_time, refine_text;
    esa_linear proj_in; /* [d,text_dim] */
    hunyuan_refiner *refiner;
    hunyuan_stream *stream; /* [2 * doubles + singles]: video and text of each double block */
    esa_linear norm_out, proj_out; /* [2d,d], [volume * C, d] */
    float *wave; /* [2][WAVE] in host memory: sinusoids of timestep and guidance */

    /* for one video */
    int32_t latent[3], grid[3];
    int64_t tokens, text_rows; /* N, T */
    int32_t *perm;             /* [N] position -> token of the grid; NULL: identity */
    float *cos, *sin;          /* [N][head_dim/2], in sequence order */
    hunyuan_text *text;        /* [branches] */
    int32_t branches;
    int32_t prepared[2][2]; /* [kind of block][F8]: its products were measured */
    void *room;             /* one block for the activations below */
    int64_t room_bytes;
    esa_view x; /* [S][d] the residual stream */
    esa_view a; /* [S][d] normed input of a layer */
    /* [S][d + widest]: attention writes its first d columns, q, k and v lie behind them; the hidden
     * layer of a double block begins at column 0, that of a single one behind the first d */
    esa_view wide;
    esa_view patch_in, patch_out;      /* [N][volume * C] in the same memory */
    esa_view sum, silu, more, between; /* [1][d] f32: embeddings of timestep, guidance and text */
    esa_view e[2];                     /* [1][6d] f32: modulation of video and of text */
    esa_view sinusoid[2];              /* [1][WAVE] f32 */
    esa_hunyuan_dit_watch watch;
    void *watch_user;
};

/* hunyuan_embed.c: fills silu with SiLU of the embedding of timestep, guidance and pooled vector,
 * and the rows of text of x with the refined states. */
esa_status esa_hunyuan_embed(esa_hunyuan_dit *dit, const hunyuan_text *text, double t,
                             double guidance);

/* Rows of the video or of the text. */
static inline esa_view esa_hunyuan_rows(const esa_hunyuan_dit *dit, const esa_view *v, int32_t text)
{
    return text ? esa_view_rows(*v, dit->tokens, dit->text_rows)
                : esa_view_rows(*v, 0, dit->tokens);
}
/* Columns of wide. */
static inline esa_view esa_hunyuan_part(const esa_hunyuan_dit *dit, int64_t first, int64_t count)
{
    esa_view v = esa_view_cols(dit->wide, first, count);
    v.scale = NULL;
    return v;
}
/* The norm of x into a, as input of the layer next; text 0, 1, or 2 for all rows. */
esa_norm_args esa_hunyuan_norm(const esa_hunyuan_dit *dit, int32_t text, const esa_linear *next,
                               const float *scale, const float *shift);
/* *in = columns of wide as input of a layer, in a if it takes another type. rows as above. */
esa_status esa_hunyuan_input(esa_hunyuan_dit *dit, esa_view *in, int32_t text, const esa_view *from,
                             const esa_linear *l);

#endif
