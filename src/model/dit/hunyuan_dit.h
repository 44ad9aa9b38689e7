/* hunyuan_dit.h - the struct of HunyuanVideo's transformer: its tensors and what one video needs
 * (hunyuan_dit_make.c), what is computed before the blocks (hunyuan_embed.c), the forward
 * (hunyuan_dit.c).
 * SPDX-License-Identifier: Apache-2.0
 *
 * Self-attention runs over [video][text][padding], of which the rows of the prompt are attended.
 * Blocks of two kinds follow one another: double ones, where video and text have weights of their
 * own, and single ones. A session counts them in this order.
 *
 * Letters beside those of dit_kind.h: T = R, rows of text. */
#ifndef ESA_MODEL_HUNYUAN_DIT_H
#define ESA_MODEL_HUNYUAN_DIT_H

#include "model/dit/dit_kind.h"

#define ESA_HUNYUAN_WAVE 256 /* length of the sinusoid of a timestep */
#define ESA_HUNYUAN_EPS  1e-6f
#define ESA_HUNYUAN_WIDE 4 /* the refiner's hidden layer is this much wider than d */

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

typedef struct esa_hunyuan_dit {
    esa_dit dit;
    esa_hunyuan_config config;
    esa_linear patch; /* [d,C,pt,p,p] */
    hunyuan_mlp time, guidance, pooled, refine_time, refine_text;
    esa_linear proj_in; /* [d,text_dim] */
    hunyuan_refiner *refiner;
    hunyuan_stream *stream; /* [2 * doubles + singles]: video and text of each double block */
    esa_linear norm_out, proj_out;   /* [2d,d], [P * C, d] */
    float wave[2][ESA_HUNYUAN_WAVE]; /* sinusoids of timestep and guidance */

    /* for one video */
    hunyuan_text text[ESA_DIT_BRANCHES];
    int32_t prepared[2][2]; /* [kind of block][F8]: its products were measured */
    /* [S][d + widest]: attention writes its first d columns, q, k and v lie behind them; the hidden
     * layer of a double block begins at column 0, that of a single one behind the first d */
    esa_view wide;
    esa_view sum, silu, more, between; /* [1][d] f32: embeddings of timestep, guidance and text */
    esa_view e[2];                     /* [1][6d] f32: modulation of video and of text */
    esa_view sinusoid[2];              /* [1][WAVE] f32 */
} esa_hunyuan_dit;

/* hunyuan_kind.c */
int32_t esa_hunyuan_recognise(esa_weights *w, void *config, char *line, size_t bytes);
/* hunyuan_dit.c: kind->before, block, after, prepare */
esa_status esa_hunyuan_before(esa_dit *dit, const esa_dit_call *call);
esa_status esa_hunyuan_block(esa_dit *dit, const esa_dit_call *call, int32_t i);
esa_status esa_hunyuan_after(esa_dit *dit, const esa_dit_call *call);
esa_status esa_hunyuan_prepare(esa_dit *dit, int32_t i);

/* hunyuan_embed.c: fills silu with SiLU of the embedding of timestep, guidance and pooled vector,
 * and the rows of text of x with the refined states. */
esa_status esa_hunyuan_embed(esa_hunyuan_dit *hy, const hunyuan_text *text, double t,
                             double guidance);

/* Rows of the video or of the text. */
static inline esa_view esa_hunyuan_rows(const esa_hunyuan_dit *hy, const esa_view *v, int32_t text)
{
    return text ? esa_dit_words(&hy->dit, v) : esa_dit_video(&hy->dit, v);
}
/* Columns of wide. */
static inline esa_view esa_hunyuan_part(const esa_hunyuan_dit *hy, int64_t first, int64_t count)
{
    esa_view v = esa_view_cols(hy->wide, first, count);
    v.scale = NULL;
    return v;
}
/* The norm of x into a, as input of the layer next; text 0, 1, or 2 for all rows. */
esa_norm_args esa_hunyuan_norm(const esa_hunyuan_dit *hy, int32_t text, const esa_linear *next,
                               const float *scale, const float *shift);
/* *in = columns of wide as input of a layer, in a if it takes another type. rows as above. */
esa_status esa_hunyuan_input(esa_hunyuan_dit *hy, esa_view *in, int32_t text, const esa_view *from,
                             const esa_linear *l);

#endif
