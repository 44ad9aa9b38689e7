/* nn_args.h - the arguments of the operations of networks as kernels get them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The engine (src/nn), the backend table (backend/engine.h) and the plugin (cuda/cuda.h) share
 * these structs. Pointers are in the memory of the device. Sizes agree: the caller has checked
 * them. Vectors over columns are f32, because diffusers keeps modulation, norms and tables in f32.
 * Views of one operation may have different types. Sums over a row run in f32 in a fixed order, so
 * the same inputs give the same bits. */
#ifndef ESA_BASE_NN_ARGS_H
#define ESA_BASE_NN_ARGS_H

#include "base/view.h"

/* GELU is x/2 (1 + erf(x / sqrt(2))), GELU_TANH its approximation with tanh, QUICK_GELU is
 * x / (1 + e^-1.702x). */
enum { ESA_ACT_NONE = 0, ESA_ACT_SILU, ESA_ACT_GELU_TANH, ESA_ACT_QUICK_GELU, ESA_ACT_GELU };

/* ---------------------------------------------------------------- rows */

enum { ESA_NORM_NONE = 0, ESA_NORM_LAYER, ESA_NORM_RMS };

/* Two steps over each row, in one pass through memory:
 *   1. if add.data is set:  x += gate * add, rounded to the type of x and stored
 *   2. if norm is not NONE: y = norm(x) * weight + bias, then * (1 + scale) + shift
 * LAYER is (x - mean) / sqrt(var + eps), RMS is x / sqrt(mean(x^2) + eps). Step 2 sees x as it is
 * stored. y may be x if step 1 is not done. An F8 y gets its scales: the largest magnitude of the
 * row over ESA_F8_MAX, or 1 if that magnitude is at most ESA_F8_ZERO. */
typedef struct esa_norm_args {
    esa_view y;        /* F32, BF16 or F8; absent with NONE */
    esa_view x;        /* F32 or BF16 */
    esa_view add;      /* of the type of x; may be absent */
    const float *gate; /* [cols] or NULL: 1 */
    int32_t norm;      /* ESA_NORM_* */
    float eps;
    const float *weight, *bias; /* [cols] or NULL */
    const float *scale, *shift; /* [cols] or NULL */
} esa_norm_args;

/* A norm of q and k, then the rotation of pairs of channels of every head, in place. Row r is
 * rotated by row r of cos and sin: the tokens are in the order of the session already. q and k may
 * have different numbers of heads. The norm is over
 *   ALL         the whole row (all heads): RMS, weights [cols]
 *   HEAD_RMS    each head by itself: RMS, weights [D]
 *   HEAD_LAYER  each head by itself: (x - mean) / sqrt(var + eps), weights and biases [D]
 *   NONE        nothing: there is no norm */
enum { ESA_QK_ALL = 0, ESA_QK_HEAD_RMS, ESA_QK_HEAD_LAYER, ESA_QK_NONE };
typedef struct esa_qk_args {
    esa_view q, k;                    /* F32 or BF16, of one type; k may be absent */
    const float *q_weight, *k_weight; /* [cols] or [D] */
    const float *q_bias, *k_bias;     /* [D], for HEAD_LAYER */
    const float *cos, *sin;           /* [rows][D/2]; both NULL: no rotation */
    int64_t D; /* head dimension, even; cols is a multiple of it; not ALL: up to ESA_QK_MAX_D */
    float eps;
    int32_t norm;   /* ESA_QK_* */
    int32_t halves; /* pairs are channels i and i + D/2, not 2i and 2i + 1; not with ALL */
} esa_qk_args;
#define ESA_QK_MAX_D 256

/* y = act(x), or act(gate) * x if gate is present. With act NONE it converts between types; an F8 y
 * gets its scales as in esa_norm_args. y may be x or gate if the types are the same, or if y is F8
 * and its rows begin where those of x or gate begin. */
typedef struct esa_act_args {
    esa_view y;       /* F32, BF16 or F8 */
    esa_view x, gate; /* F32 or BF16, of one type; gate may be absent */
    int32_t act;      /* ESA_ACT_* */
} esa_act_args;

/* ---------------------------------------------------------------- products */

/* y[rows][out] = act(x[rows][in] W^T + bias), accumulated in f32. x and w are both BF16, both F8,
 * or both F32. A single row of x may be F32 with w in BF16. With add the product is added to y, in
 * f32 and rounded once; this needs two rows or more and no activation. */
typedef struct esa_product_args {
    esa_view y;       /* BF16 or F32 */
    esa_view x;       /* [rows][in] */
    esa_view w;       /* [out][in]; F8: one scale for each output row */
    const void *bias; /* [out], F32 if w is F32, else BF16; NULL: none */
    int32_t act;      /* ESA_ACT_*; SiLU costs a pass of its own if there are several rows */
    int32_t fast;     /* 1: sums of F8 products may be kept with fewer bits than f32 has */
    int32_t add;      /* 1: y += product */
} esa_product_args;

/* o = softmax(scale q k^T + bias) v for each head; heads lie side by side in the columns. The
 * biases are added to the scores after scale (natural logarithm). A query without keys gives 0.
 * With q_weight, a row of q is first divided by sqrt(mean(q^2) + eps), where the mean is over all
 * heads, and multiplied by q_weight; the contents of q may be lost then. */
enum { ESA_BIASED_MAX_D = 512 };
typedef struct esa_biased_args {
    esa_view o, q, k, v; /* [Nq][heads*D], [Nq][heads*D], [Nk][kv_heads*D] twice; BF16 */
    int64_t heads, D;
    int64_t kv_heads; /* 0: heads; else heads is a multiple, and each serves as many heads of q */
    float scale;
    /* [Nk] or NULL; -INFINITY removes the key, log(c) makes it count as c equal keys */
    const float *key;
    /* [heads][distance_ld] or NULL; query q and key k get distance[h][k - q + center]. With
     * distance_ld 0 all heads share one row. */
    const float *distance;
    int64_t distance_ld, center;
    const float *q_weight; /* [heads*D] or NULL: no norm */
    float eps;
    float *room; /* [Nq] of scratch, with q_weight */
} esa_biased_args;

/* ---------------------------------------------------------------- weights */

/* A matrix of weights in the type of products, from the type of a file or from random numbers. y is
 * contiguous (ld = cols). An F8 y gets its scales as in esa_norm_args; if x is F8 too, its bytes
 * are kept and its scales become those of the rows. */
typedef struct esa_convert_args {
    esa_view y;           /* F32, BF16 or F8 */
    const void *x;        /* [rows][cols], contiguous; NULL: random numbers */
    int32_t x_dtype;      /* ESA_DTYPE_F32, F16, BF16 or F8 */
    int32_t x_scales;     /* F8: 0 (the scale is 1), 1, or one for each row */
    const float *x_scale; /* [x_scales] */
    /* Random: element i of y is mean + deviation * esa_rng_bell(seed, first + i). */
    uint64_t seed;
    int64_t first;
    float mean, deviation;
} esa_convert_args;

/* ---------------------------------------------------------------- patches and latents */

/* Moves between latents f32 [channels][T][H][W] and rows of patches. gather 1: row i gets patch
 * perm[i] in the order (channel, t, h, w). gather 0: the rows hold (t, h, w, channel), or
 * (channel, t, h, w) with channel_first, and are written to the latents. */
typedef struct esa_patch_args {
    esa_view rows; /* [T/pt * H/ph * W/pw][pt*ph*pw*channels]; F32 or BF16 */
    float *latent;
    const int32_t *perm; /* [rows] position -> patch of the grid (t slowest); NULL: identity */
    int32_t channels, gather;
    int32_t size[3], patch[3]; /* T, H, W; pt, ph, pw */
    int32_t channel_first;     /* with gather 0 */
} esa_patch_args;

/* One step of a scheduler (model/sched) for count elements, in f32. EULER: x += dt v. UniPC, in one
 * pass, with the coefficients [0] for the corrector and [1] for the predictor:
 *   m = x - sigma v
 *   if correct:  x = (keep0 last - pull0 m0) - pull0 (rho1 (m1 - m0) / r0 + rho2 (m - m0)), m1 = m0
 *   m0 = m, last = x
 *   x = (keep1 x - pull1 m0) - pull1 (m1 - m0) / r1 / 2
 * Order 1 drops the terms with r. MIX, with m0 from the step before:
 *   m = keep0 x - pull0 v
 *   x = (keep1 x - pull1 d) + sigma noise, where d = m, or rho1 m - rho2 m0 with order[1] = 2
 *   m0 = m
 * Without noise the last sum is left out; m0 may be NULL with order 1. Every operation is rounded
 * to f32 by itself, in the order of model/sched/unipc.c and v_sched.c, so all devices give the same
 * bits. */
enum { ESA_STEP_UNIPC = 0, ESA_STEP_EULER, ESA_STEP_MIX };
typedef struct esa_step_args {
    float *x, *m0, *m1, *last; /* [count]; EULER uses x alone, MIX x and m0 */
    const float *v;            /* [count] */
    const float *noise;        /* [count], MIX only; may be NULL */
    int64_t count;
    int32_t kind;     /* ESA_STEP_* */
    int32_t correct;  /* 0 or 1 */
    int32_t order[2]; /* 1 or 2 */
    float sigma, dt;
    float keep[2], pull[2], r[2];
    float rho1, rho2;
} esa_step_args;

/* Figures of one step: sums over elements, in double. */
typedef struct esa_step_figures {
    double wrong;       /* number of elements of x that are not finite */
    double x_change;    /* sum |x - x_before| */
    double v_size[2];   /* sum |v| of each branch */
    double v_change[2]; /* sum |v - v_before| of each branch */
} esa_step_figures;

/* Reduces the figures on the device. Inputs that are NULL give 0. The order of the sums is fixed.
 */
enum { ESA_STEP_PARTS = 256 };
typedef struct esa_figures_args {
    esa_step_figures *out; /* [1 + ESA_STEP_PARTS]; the first is the result, the rest is scratch */
    const float *x, *x_before;       /* [count] */
    const float *v[2], *v_before[2]; /* [count] */
    int64_t count;
} esa_figures_args;

/* ---------------------------------------------------------------- planes */

/* Planes are [height][width][channels]. A pointer is that of pixel (0, 0), and a pitch (..._row) is
 * the number of elements from row to row. */

/* A convolution of stride 1, as nn.h describes it: y = conv(x) + bias (+ residual). x is surrounded
 * by kh/2 rows and kw/2 pixels that are read too (zeros, or copies of the edge). kh and kw are
 * equal, 1 or 3. */
typedef struct esa_plane_conv_args {
    const void *packed; /* the device's own layout of the weights */
    const float *bias;  /* [cout] */
    int32_t kt, kh, kw, cin, cout;
    int32_t up2; /* 1: the planes are first doubled in both directions; kh is 3 */
    void *y;
    int64_t y_row;
    const void *x[3]; /* [kt] frames, oldest first; NULL: a frame of zeros */
    int64_t x_row;
    int64_t height, width;
    const void *residual; /* like y, may be y; NULL: none */
    int64_t residual_row;
    int32_t dtype;   /* of x: ESA_DTYPE_BF16 */
    int32_t y_dtype; /* of y and residual: ESA_DTYPE_BF16 or F32 */
} esa_plane_conv_args;

/* y = x / max(|x|, 1e-12) * sqrt(channels) * gamma for each pixel, then act. */
typedef struct esa_plane_norm_args {
    void *y;
    int64_t y_row;
    const void *x;
    int64_t x_row;
    int64_t height, width, channels;
    const float *gamma; /* [channels] */
    int32_t act;        /* ESA_ACT_NONE or ESA_ACT_SILU */
    int32_t dtype;      /* ESA_DTYPE_BF16 or F32 */
} esa_plane_norm_args;

/* Group norm over frames [frames][height][width][channels]: y = (x - mean) / sqrt(var + eps) *
 * weight + bias, then act. Mean and variance are those of a group of channels / groups channels in
 * all frames. ..._frame is the number of elements from frame to frame. y may be x.
 *
 * With a guide, the result is multiplied by `times` and increased by `plus` before act. These are
 * f32 planes [][height >> level][width >> level][channels], contiguous. Frame f takes their frame
 * f >> time_level, or, with first_apart, frame 0 for f = 0 and 1 + ((f - 1) >> time_level) for the
 * others. */
typedef struct esa_plane_guide {
    const float *times, *plus; /* NULL: no guide */
    int32_t level, time_level, first_apart;
} esa_plane_guide;
enum { ESA_GROUP_PARTS = 256 };
typedef struct esa_plane_group_args {
    void *y;
    int64_t y_row, y_frame;
    const void *x;
    int64_t x_row, x_frame;
    int64_t frames, height, width, channels, groups;
    const float *weight, *bias; /* [channels] */
    float eps;
    int32_t act;   /* ESA_ACT_NONE or ESA_ACT_SILU */
    int32_t dtype; /* ESA_DTYPE_BF16 or F32 */
    esa_plane_guide guide;
    /* Scratch, at multiples of 8 bytes: ESA_GROUP_BYTES(channels, groups) */
    void *room;
} esa_plane_group_args;
#define ESA_GROUP_BYTES(channels, groups)                                                          \
    ((int64_t)ESA_GROUP_PARTS * (groups) * 16 + (int64_t)(channels) * 8)

/* Where the guide has the values of pixel (y, x) of frame f. */
ESA_INLINE int64_t esa_guide_offset(const esa_plane_group_args *a, int64_t f, int64_t y, int64_t x)
{
    const esa_plane_guide *g = &a->guide;
    const int64_t frame = g->first_apart ? (f ? 1 + ((f - 1) >> g->time_level) : 0)
                                         : f >> g->time_level,
                  high = a->height >> g->level, wide = a->width >> g->level;
    return ((frame * high + (y >> g->level)) * wide + (x >> g->level)) * a->channels;
}

/* Copies the outermost pixels of planes to a border of one pixel around them. */
typedef struct esa_plane_border_args {
    void *x; /* pixel (0, 0) of the first frame */
    int64_t row, frame;
    int64_t frames, height, width, channels;
    int32_t dtype; /* ESA_DTYPE_BF16 or F32 */
} esa_plane_border_args;

/* One frame of latents as a plane: y = latents * scale + shift, by channels. */
typedef struct esa_plane_latent_args {
    void *y;
    int64_t y_row;
    const float *latents; /* pixel (0, 0) of channel 0 */
    int64_t channel, row; /* elements from channel to channel, from row to row */
    int64_t height, width, channels;
    const float *scale, *shift; /* [channels] */
    int32_t dtype;              /* of y: ESA_DTYPE_BF16 or F32 */
} esa_plane_latent_args;

/* Pixels as bytes: x/2 + 0.5, clamped to 0 .. 1, times 255, rounded to nearest (ties to even). */
typedef struct esa_plane_bytes_args {
    uint8_t *bytes; /* [count] */
    const float *x; /* [count] */
    int64_t count;
    int32_t *wrong; /* becomes 1 if some x is NaN; unchanged otherwise */
} esa_plane_bytes_args;

#endif
