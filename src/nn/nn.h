/* nn.h - the operations models are made of: plain functions over f32 rows, no graph. One file per
 * family beside this header.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Conventions: outputs first. Activations are f32, row-major, [rows][cols] with a row pitch ld in
 * elements. Weights come as esa_weight, in whatever type they are held. An output may be the very
 * same memory as an input where the comment says "in place"; otherwise they do not overlap. Sizes
 * are checked by the caller (the model part, against its config); ops fail only for memory.
 *
 * Threads: every op splits its rows over the pool of nn->ctx in pieces that do not depend on the
 * number of threads, and reduces inside one piece in a fixed order: the same bits whatever the
 * number of threads. Ops are called from one thread; not from inside esa_nn_parallel.
 *
 * Guard: ops do not take the guard of the ctx (they stand below public calls).
 * esa_session_attention and esa_attention do, so a model part that calls those runs on a ctx whose
 * guard is free: the engine's inner ctx (see model/part.h). */
#ifndef ESA_NN_NN_H
#define ESA_NN_NN_H

#include "ctx/ctx.h"
#include "base/half.h"
#include "base/pool.h"
#include "cpu/cpu.h"

/* A weight as it is held: never owns. data may be unaligned when it lies in a mapped file. */
typedef struct esa_weight {
    const void *data; /* NULL: absent (an optional bias) */
    int32_t dtype;    /* ESA_DTYPE_* */
    int32_t rank;
    int64_t dim[5];
} esa_weight;

/* Time spent, for the statistics of the engine. */
enum {
    ESA_NN_GEMM = 0,
    ESA_NN_SELF /* sessions */,
    ESA_NN_ATTENTION /* esa_nn_attention */,
    ESA_NN_CONV,
    ESA_NN_OTHER,
    ESA_NN_KINDS
};

typedef struct esa_nn {
    esa_ctx *ctx;  /* pool, kernels, allocator, error text; must outlive this */
    void *scratch; /* of ops, kept between calls; not the ctx's arena, which attention uses */
    int64_t scratch_bytes;
    int64_t held, peak;           /* bytes from esa_nn_alloc, now and at most, scratch included */
    double seconds[ESA_NN_KINDS]; /* added to by ops; reset by whoever reads */
    int32_t entered;              /* depth of esa_nn_enter */
    int32_t blas_threads;         /* what the BLAS had before it */
} esa_nn;

void esa_nn_init(esa_nn *nn, esa_ctx *ctx);
/* Frees scratch. */
void esa_nn_close(esa_nn *nn);
/* Around a stretch of work with matrix products: the BLAS runs one thread inside each of our
 * workers (a setting of the process, put back by leave). Pairs may nest. */
void esa_nn_enter(esa_nn *nn);
void esa_nn_leave(esa_nn *nn);
double esa_nn_now(void); /* seconds of a clock that never goes back */

/* Memory that counts into held and peak, 64-byte aligned. what completes the sentence "out of
 * memory for ..." */
esa_status esa_nn_alloc(esa_nn *nn, void **ptr, int64_t bytes, const char *what);
void esa_nn_free(esa_nn *nn, void *ptr, int64_t bytes);
/* Scratch of at least bytes; valid until the next op that asks. */
esa_status esa_nn_scratch(esa_nn *nn, void **ptr, int64_t bytes);

/* fn(arg, first, count, worker) over 0 .. rows-1 in pieces of `piece` rows. */
typedef void (*esa_nn_rows_fn)(void *arg, int64_t first, int64_t count, int32_t worker);
void esa_nn_parallel(esa_nn *nn, esa_nn_rows_fn fn, void *arg, int64_t rows, int64_t piece);

/* ---------------------------------------------------------------- weight.c */

/* dst[count] f32 from elements first .. of a weight; any alignment. */
void esa_weight_to_f32(float *dst, const esa_weight *w, int64_t first, int64_t count);
int64_t esa_weight_count(const esa_weight *w);

/* ---------------------------------------------------------------- linear.c: matrix products on
 * CBLAS */

enum { ESA_ACT_NONE = 0, ESA_ACT_SILU, ESA_ACT_GELU_TANH };

/* What happens to x W^T + b on its way out; NULL fields are skipped. In this order: activation,
 * times gate, plus residual. */
typedef struct esa_epilogue {
    int32_t act;           /* ESA_ACT_* */
    const float *gate;     /* [cols]: every row is multiplied by it */
    const float *residual; /* [rows][residual_ld]; may be y itself */
    int64_t residual_ld;
} esa_epilogue;

/* y[rows][w->dim[0]] = x[rows][in] W^T + b, W [out][in] (further dims of a conv kernel count into
 * in). bias NULL or with data NULL: none. epilogue NULL: none. */
esa_status esa_nn_linear(esa_nn *nn, float *y, int64_t ldy, const float *x, int64_t ldx,
                         int64_t rows, const esa_weight *w, const esa_weight *bias,
                         const esa_epilogue *epilogue);
/* C[m][n] = alpha A[m][k] B + beta C, B [k][n] or with trans_b [n][k]; rows of C over the pool. */
void esa_nn_gemm(esa_nn *nn, float *c, int64_t ldc, const float *a, int64_t lda, const float *b,
                 int64_t ldb, int64_t m, int64_t n, int64_t k, int32_t trans_b, float alpha,
                 float beta);
/* The same in the calling worker alone, for use inside esa_nn_parallel. */
void esa_nn_gemm_one(float *c, int64_t ldc, const float *a, int64_t lda, const float *b,
                     int64_t ldb, int64_t m, int64_t n, int64_t k, int32_t trans_b, float alpha,
                     float beta);

/* ---------------------------------------------------------------- norm.c */

/* y = (x - mean) / sqrt(var + eps) * weight + bias, then * (1 + scale) + shift; every vector
 * [cols], f32, may be NULL. In place allowed. */
void esa_nn_layer_norm(esa_nn *nn, float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                       int64_t cols, float eps, const float *weight, const float *bias,
                       const float *scale, const float *shift);
/* y = x / sqrt(mean(x^2) + eps) * weight (NULL: 1). In place allowed. */
void esa_nn_rms_norm(esa_nn *nn, float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                     int64_t cols, float eps, const float *weight);

/* ---------------------------------------------------------------- activation.c; in place
 * allowed */

/* y = gelu_tanh(gate) * x: the gated feed-forward of T5. */
void esa_nn_geglu(esa_nn *nn, float *y, const float *gate, const float *x, int64_t count);
/* One element, as linear layers and norms compute it. */
float esa_silu(float x);

/* ---------------------------------------------------------------- attention.c: text, decoder
 * frames, cross-attention */

/* What is added to scores (natural units, after scale); NULL parts are skipped. */
typedef struct esa_nn_bias {
    /* [Nk]: -INFINITY: the key does not exist; log(c): it stands for c equal keys */
    const float *key;
    /* [heads][distance_ld]: by position, distance[h][k - q + center] for query q and key k */
    const float *distance;
    int64_t distance_ld, center;
} esa_nn_bias;

/* o[Nq][heads*D] = softmax(scale q k^T + bias) v per head; q, k, v are [rows][heads*D] with their
 * pitches. Any D. Scores exist for a tile of queries at a time, never Nq x Nk. A query without keys
 * gives 0. For the self-attention of a transformer use a session. */
esa_status esa_nn_attention(esa_nn *nn, float *o, int64_t ldo, const float *q, int64_t ldq,
                            const float *k, int64_t ldk, const float *v, int64_t ldv, int64_t Nq,
                            int64_t Nk, int64_t heads, int64_t D, float scale,
                            const esa_nn_bias *bias);

/* ---------------------------------------------------------------- rope.c */

/* Rotation tables of video tokens: cos, sin f32 [tokens][D/2], pairs are adjacent channels (2i,
 * 2i+1). Position p of the sequence holds token perm[p] of the grid t x h x w (t slowest); perm
 * NULL: identity. Axis dimensions as Wan: h and w take 2*(D/6), t the rest. */
void esa_rope_table(float *cos, float *sin, const int32_t grid[3], const int32_t *perm, int64_t D,
                    double theta);
/* x[rows][heads*D] rotated in place. */
void esa_nn_rope(esa_nn *nn, float *x, int64_t ld, int64_t rows, int64_t heads, int64_t D,
                 const float *cos, const float *sin);
/* Timestep vector: out[dim] = [cos(t f_j) ..., sin(t f_j) ...], f_j = 10000^(-j/(dim/2)). */
void esa_timestep_sinusoid(float *out, int64_t dim, double t);

/* ---------------------------------------------------------------- conv.c: planes of pixels,
 * channels last */

/* A convolution of stride 1 with its weights laid out for the machine. rows: kernel rows over all
 * frames; run: floats of one. */
typedef struct esa_conv {
    int32_t kt, kh, kw, cin, cout;
    int32_t up2; /* 1: of the plane with every pixel doubled in both directions (nearest) */
    int32_t lanes, blocks, rows;
    int64_t run, bytes;
    float *packed, *bias; /* bias lies inside packed */
} esa_conv;

/* From a weight [cout][cin][kt][kh][kw] or [cout][cin][kh][kw] with odd sizes and bias [cout] (NULL
 * or data NULL: 0). up2 needs 3 x 3 without kt: the doubling is folded into four kernels of 2 x 2
 * taps. The weight is not needed afterwards. Free with esa_nn_conv_free (zeroed structs are
 * fine). */
esa_status esa_nn_conv_pack(esa_nn *nn, esa_conv *conv, const esa_weight *w, const esa_weight *bias,
                            int32_t up2);
void esa_nn_conv_free(esa_nn *nn, esa_conv *conv);
/* y = conv(x) + bias (+ residual). x[kt]: one pointer per frame of the kernel, oldest first, NULL
 * for a frame of zeros, each to pixel (0, 0) of a plane [height][width][cin] with x_row floats from
 * row to row, around which kh/2 rows and kw/2 pixels can be read (zeros). y [height][width][cout]
 * ([2 height][2 width][cout] with up2), y_row floats from row to row. residual: like y, or NULL;
 * may be y. */
esa_status esa_nn_conv(esa_nn *nn, const esa_conv *conv, float *y, int64_t y_row,
                       const float *const *x, int64_t x_row, int64_t height, int64_t width,
                       const float *residual, int64_t residual_row);
/* pixel_norm.c: y = x / max(|x|, 1e-12) * sqrt(channels) * gamma, pixel by pixel, then act
 * (ESA_ACT_NONE or ESA_ACT_SILU); rows as above. */
void esa_nn_pixel_norm(esa_nn *nn, float *y, int64_t y_row, const float *x, int64_t x_row,
                       int64_t height, int64_t width, int64_t channels, const float *gamma,
                       int32_t act);

#endif
