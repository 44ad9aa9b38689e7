/* nn.h - the operations that models are made of: plain functions over f32 rows, no graph. Each
 * family has its own file beside this header.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Conventions: outputs first. Activations are f32, row-major, [rows][cols] with a row pitch ld in
 * elements. Weights come as esa_weight, in the type they are held in. An output may be the same
 * memory as an input if the comment says "in place"; otherwise they must not overlap. The caller (a
 * model part) checks sizes against its config; operations fail only for lack of memory.
 *
 * Threads: every operation splits its rows over the pool of nn->ctx. The pieces do not depend on
 * the number of threads, and each is reduced in a fixed order, so the bits are the same on any
 * number of threads. Operations are called from one thread, and not from inside esa_nn_parallel.
 *
 * Guard: ops do not take the ctx guard; the public call above them holds it. */
#ifndef ESA_NN_NN_H
#define ESA_NN_NN_H

#include "backend/backend.h"
#include "base/nn_args.h"
#include "base/status.h"
#include "ctx/ctx.h"
#include "base/half.h"
#include "base/pool.h"
#include "cpu/cpu.h"

/* A view of a weight in the type it is held in; does not own it. data in a mapped file may be
 * unaligned. */
typedef struct esa_weight {
    const void *data; /* NULL: absent (an optional bias) */
    int32_t dtype;    /* ESA_DTYPE_*, or ESA_BLOCKS_* (base/blocks.h) in host memory */
    int32_t rank;
    int64_t dim[5];
    const float *scale; /* ESA_DTYPE_F8: [dim[0]], or [1] for a vector; else NULL */
    int32_t panel;      /* columns of a panel if it is packed for products (product.h); 0: rows */
    int64_t padded;     /* packed: terms of a column, with those that the kernels need more */
} esa_weight;

/* A linear layer: [out,in] and [out]. */
typedef struct esa_linear {
    esa_weight weight, bias;
} esa_linear;

/* Kinds of work, for the statistics of time spent. SELF is attention through sessions, ATTENTION is
 * esa_nn_attention. */
enum { ESA_NN_GEMM = 0, ESA_NN_SELF, ESA_NN_ATTENTION, ESA_NN_CONV, ESA_NN_OTHER, ESA_NN_KINDS };

typedef struct esa_nn_ops esa_nn_ops;     /* ops.h */
typedef struct esa_nn_marks esa_nn_marks; /* marks.h */

typedef struct esa_nn {
    esa_ctx *ctx;          /* pool, kernels, allocator, error message; must outlive this */
    const esa_backend *be; /* the device that views of operations are on */
    const esa_nn_ops *ops; /* the operations for that device */
    void *scratch;         /* kept between operations; not the ctx's arena, which attention uses */
    int64_t scratch_bytes;
    int64_t held, peak;           /* bytes from esa_nn_alloc with scratch, now and at most */
    double seconds[ESA_NN_KINDS]; /* operations add to it; the reader resets it */
    double self_began;            /* set by self_begin */
    esa_nn_marks *marks;          /* without host memory: where kinds of work begin */
    int32_t preparing;            /* 1: products are measured (ops.h: prepares) */
    int32_t fast;                 /* 1: sums of F8 products may have fewer bits than f32 */
    int32_t bf16;                 /* host memory: 1: products are in bf16 where weights allow it */
} esa_nn;

/* For the CPU. */
void esa_nn_init(esa_nn *nn, esa_ctx *ctx);
/* Moves a new nn to a device (ESA_DEVICE_*). Fails with ESA_ERR_DEVICE or ESA_ERR_UNSUPPORTED if
 * the device cannot run networks; nn stays as it was. */
esa_status esa_nn_use(esa_nn *nn, int32_t device);
/* Chooses the type of products in host memory: ESA_DTYPE_F32 (the default) or BF16. Fails with
 * ESA_ERR_UNSUPPORTED if the ctx's kernels have no bf16 set. Weights that are held in f32 stay in
 * f32. */
esa_status esa_nn_use_dtype(esa_nn *nn, int32_t dtype);
/* 1 if products in bf16 are faster than in f32 with the kernels of this ctx. */
int32_t esa_nn_bf16_pays(const esa_ctx *ctx);
const char *esa_nn_kernels(const esa_nn *nn); /* name of the kernels of products */
/* The kernels of a product with this weight. */
const esa_cpu_kernels *esa_nn_product_set(const esa_nn *nn, const esa_weight *w);
/* Frees scratch and marks. */
void esa_nn_close(esa_nn *nn);
double esa_nn_now(void); /* seconds of a monotonic clock */

/* Allocates memory of the device, 64-byte aligned, and counts it in held and peak. what completes
 * the message "out of memory for ...". */
esa_status esa_nn_alloc(esa_nn *nn, void **ptr, int64_t bytes, const char *what);
void esa_nn_free(esa_nn *nn, void *ptr, int64_t bytes);
/* Takes a matrix of the device from memory that is being carved up; only counts its bytes, and
 * gives no data, if carve->base is NULL. */
esa_view esa_nn_take(const esa_nn *nn, esa_carve *carve, int32_t dtype, int64_t rows, int64_t cols);
/* The same for memory of the host; it counts if that is the device's. */
esa_status esa_nn_alloc_host(esa_nn *nn, void **ptr, int64_t bytes, const char *what);
void esa_nn_free_host(esa_nn *nn, void *ptr, int64_t bytes);
/* Copies between host and device; read waits. The view's rows are contiguous, F32 or BF16; the host
 * has f32. */
esa_status esa_nn_write(esa_nn *nn, const esa_view *to, const float *from);
esa_status esa_nn_read(esa_nn *nn, float *to, const esa_view *from);
/* Bytes as they are; download waits, copy stays on the device. */
esa_status esa_nn_copy(esa_nn *nn, void *to, const void *from, int64_t bytes);
esa_status esa_nn_upload(esa_nn *nn, void *to, const void *from, int64_t bytes);
esa_status esa_nn_download(esa_nn *nn, void *to, const void *from, int64_t bytes);
/* Makes the ctx's scratch on a device large enough for these bytes and for products, so that no
 * later operation waits to make it larger. *all (may be NULL) receives its size. With bytes < 0 it
 * only says the size for products. */
esa_status esa_nn_reserve(esa_nn *nn, int64_t bytes, int64_t *all);
/* Bytes of that scratch now; they are no part of held. 0 in host memory. */
int64_t esa_nn_reserved(const esa_nn *nn);
/* Gives scratch of at least this many bytes, valid until the next operation that asks for some. */
esa_status esa_nn_scratch(esa_nn *nn, void **ptr, int64_t bytes);

/* Calls fn(arg, first, count, worker) for rows 0 .. rows-1 in pieces of `piece` rows. */
typedef void (*esa_nn_rows_fn)(void *arg, int64_t first, int64_t count, int32_t worker);
void esa_nn_parallel(esa_nn *nn, esa_nn_rows_fn fn, void *arg, int64_t rows, int64_t piece);

/* ---------------------------------------------------------------- weight.c */

/* Converts elements first .. first+count-1 of a weight to dst[count]; any alignment. */
void esa_weight_to_f32(float *dst, const esa_weight *w, int64_t first, int64_t count);
int64_t esa_weight_count(const esa_weight *w);

/* ---------------------------------------------------------------- linear.c */

/* What is done to x W^T + b before it is stored, in this order: activation, times gate, plus
 * residual. NULL fields are skipped. */
typedef struct esa_epilogue {
    int32_t act;           /* ESA_ACT_* */
    const float *gate;     /* [cols]: every row is multiplied by it */
    const float *residual; /* [rows][residual_ld]; may be y itself */
    int64_t residual_ld;
} esa_epilogue;

/* y[rows][w->dim[0]] = x[rows][in] W^T + b with W [out][in]; the further dims of a conv kernel
 * count as part of in. y and x are F32 or BF16, in any mix. No bias if bias or its data is NULL;
 * epilogue may be NULL. */
esa_status esa_nn_linear(esa_nn *nn, const esa_view *y, const esa_view *x, const esa_weight *w,
                         const esa_weight *bias, const esa_epilogue *epilogue);

/* ---------------------------------------------------------------- norm.c */

/* y = (x - mean) / sqrt(var + eps) * weight + bias, then * (1 + scale) + shift; every vector
 * [cols], f32, may be NULL. In place allowed. */
void esa_nn_layer_norm(esa_nn *nn, float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                       int64_t cols, float eps, const float *weight, const float *bias,
                       const float *scale, const float *shift);
/* y = x / sqrt(mean(x^2) + eps) * weight (NULL: 1). In place allowed. */
void esa_nn_rms_norm(esa_nn *nn, float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                     int64_t cols, float eps, const float *weight);
/* The norm of args alone: y is F32 or BF16, x is F32. */
esa_status esa_nn_norm(esa_nn *nn, const esa_norm_args *args);

/* ---------------------------------------------------------------- activation.c */

/* y = gelu_tanh(gate) * x, the gated feed-forward of T5. In place allowed. */
void esa_nn_geglu(esa_nn *nn, float *y, const float *gate, const float *x, int64_t count);
/* SiLU of one element, with the bits that linear layers and norms give. */
float esa_silu(float x);

/* ---------------------------------------------------------------- attention.c */

/* Added to the scores after scale (natural logarithm); NULL parts are skipped. */
typedef struct esa_nn_bias {
    /* [Nk]; -INFINITY removes the key, log(c) makes it count as c equal keys */
    const float *key;
    /* [heads][distance_ld]; query q and key k get distance[h][k - q + center] */
    const float *distance;
    int64_t distance_ld, center;
} esa_nn_bias;

/* o[Nq][heads*D] = softmax(scale q k^T + bias) v per head; q is [Nq][heads*D], k and v are
 * [Nk][kv_heads*D], with their pitches. heads is a multiple of kv_heads. Any D. Scores are kept for
 * one tile of queries at a time, never Nq x Nk. A query without keys gives 0. For text encoders,
 * decoder frames and cross-attention; the self-attention of a transformer uses a session. */
esa_status esa_nn_attention(esa_nn *nn, float *o, int64_t ldo, const float *q, int64_t ldq,
                            const float *k, int64_t ldk, const float *v, int64_t ldv, int64_t Nq,
                            int64_t Nk, int64_t heads, int64_t kv_heads, int64_t D, float scale,
                            const esa_nn_bias *bias);

/* ---------------------------------------------------------------- rope.c */

/* Rotation tables of video tokens: cos and sin f32 [tokens][D/2] for pairs of adjacent channels
 * (2i, 2i+1). Position p of the sequence holds token perm[p] of the grid t x h x w (t slowest);
 * perm NULL is the identity. Channels are split as in Wan: 2*(D/6) each for h and w, the rest for
 * t. */
void esa_rope_table(float *cos, float *sin, const int32_t grid[3], const int32_t *perm, int64_t D,
                    double theta);
/* The same with the channels of each axis given: axis[0] + axis[1] + axis[2] = D, each even. */
void esa_rope_axes(float *cos, float *sin, const int32_t grid[3], const int32_t *perm,
                   const int32_t axis[3], double theta);
/* Rotates x[rows][heads*D] in place. */
void esa_nn_rope(esa_nn *nn, float *x, int64_t ld, int64_t rows, int64_t heads, int64_t D,
                 const float *cos, const float *sin);
/* See esa_qk_args: norms of single heads, and rotations of halves; f32. */
esa_status esa_nn_qk_heads(esa_nn *nn, const esa_qk_args *args);
/* The timestep vector: out[dim] = [cos(t f_j) ..., sin(t f_j) ...], f_j = 10000^(-j/(dim/2)). */
void esa_timestep_sinusoid(float *out, int64_t dim, double t);

/* ---------------------------------------------------------------- conv.c (channels last) */

/* A convolution of stride 1 with its weights packed for this machine. */
typedef struct esa_conv {
    int32_t kt, kh, kw, cin, cout;
    int32_t up2; /* 1: the plane is first doubled in both directions (nearest neighbour) */
    int32_t lanes, blocks;
    int32_t rows; /* kernel rows over all frames */
    int64_t run;  /* floats in a kernel row */
    int64_t bytes;
    float *packed, *bias; /* bias lies inside packed */
    int32_t half;         /* 1: packed is in bf16, for the bf16 set of kernels */
} esa_conv;

/* Packs a weight [cout][cin][kt][kh][kw] or [cout][cin][kh][kw] with odd sizes, and a bias [cout]
 * (0 if it or its data is NULL). up2 needs 3 x 3 taps; the doubling is folded into four kernels of
 * 2 x 2 taps. The weight is not needed afterwards. esa_nn_conv_free frees the result, and accepts a
 * zeroed struct. */
esa_status esa_nn_conv_pack(esa_nn *nn, esa_conv *conv, const esa_weight *w, const esa_weight *bias,
                            int32_t up2);
void esa_nn_conv_free(esa_nn *nn, esa_conv *conv);
/* y = conv(x) + bias (+ residual). x[kt] has one pointer per frame of the kernel, oldest first;
 * NULL is a frame of zeros. Each points to pixel (0, 0) of a plane [height][width][cin] with x_row
 * floats from row to row, surrounded by kh/2 rows and kw/2 pixels that are read too. y is
 * [height][width][cout], or [2 height][2 width][cout] with up2, with y_row floats from row to row.
 * residual is like y, may be y, or NULL. */
esa_status esa_nn_conv(esa_nn *nn, const esa_conv *conv, float *y, int64_t y_row,
                       const float *const *x, int64_t x_row, int64_t height, int64_t width,
                       const float *residual, int64_t residual_row);
/* pixel_norm.c: y = x / max(|x|, 1e-12) * sqrt(channels) * gamma for each pixel, then act
 * (ESA_ACT_NONE or ESA_ACT_SILU). Rows as above. */
void esa_nn_pixel_norm(esa_nn *nn, float *y, int64_t y_row, const float *x, int64_t x_row,
                       int64_t height, int64_t width, int64_t channels, const float *gamma,
                       int32_t act);
/* group_norm.c: see esa_plane_group_args; f32. Sums are in double. */
esa_status esa_nn_group_norm(esa_nn *nn, const esa_plane_group_args *args);

#endif
