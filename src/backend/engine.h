/* engine.h - the operations of networks in the backend table, in groups.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A device has a group completely or not at all: a group of esa_backend is NULL, or all its members
 * are set. The CPU has none of them here: its operations live in the engine (src/nn), which uses
 * them for every device with host_memory.
 *
 * The rules of backend.h hold: the caller holds the guard of ctx, arguments are checked, a failure
 * leaves one message in ctx. All functions only enqueue work on the ctx's stream, allocate nothing
 * and do not wait, unless a comment says otherwise. */
#ifndef ESA_BACKEND_ENGINE_H
#define ESA_BACKEND_ENGINE_H

#include "base/nn_args.h"
#include "base/status.h"

/* Work on single rows (nn_args.h). */
typedef struct esa_engine_rows {
    esa_status (*norm)(esa_ctx *ctx, const esa_norm_args *args);
    esa_status (*qk)(esa_ctx *ctx, const esa_qk_args *args);
    esa_status (*act)(esa_ctx *ctx, const esa_act_args *args);
} esa_engine_rows;

/* Matrix products. */
typedef struct esa_engine_products {
    /* Finds the library of products. Fails with ESA_ERR_DEVICE and a message that says how to get
     * it. *name is its version and path; it belongs to ctx. */
    esa_status (*library)(esa_ctx *ctx, const char **name);
    /* Measures the algorithms of the library for products of these sizes, types and alignments, and
     * keeps the fastest for this ctx. The contents of x, its scales and y are lost; w and bias are
     * not touched. Allocates and waits; without memory to measure in, it does nothing. A shape that
     * was prepared before costs nothing. */
    esa_status (*prepare)(esa_ctx *ctx, const esa_product_args *args);
    /* Bytes of ws of any product. */
    int64_t (*workspace)(esa_ctx *ctx);
    /* A shape that was not prepared runs too, with the same bits, but may be slower. */
    esa_status (*product)(esa_ctx *ctx, const esa_product_args *args, void *ws);
} esa_engine_products;

/* Attention with biases: cross-attention, text encoders, frames of decoders. */
typedef struct esa_engine_biased {
    /* ESA_ERR_UNSUPPORTED for D above ESA_BIASED_MAX_D, or above what the GPU's shared memory holds
     * (384 on compute capability 8.6 and 8.9). */
    esa_status (*attention)(esa_ctx *ctx, const esa_biased_args *args);
} esa_engine_biased;

/* Patches, timestep, guidance and the scheduler. */
typedef struct esa_engine_latents {
    esa_status (*patches)(esa_ctx *ctx, const esa_patch_args *args);
    /* e[rows][cols] = table[rows][cols] + add[cols] */
    esa_status (*modulate)(esa_ctx *ctx, float *e, const float *table, const float *add,
                           int64_t rows, int64_t cols);
    /* v = negative + scale (v - negative), each operation rounded to f32. */
    esa_status (*guide)(esa_ctx *ctx, float *v, const float *negative, float scale, int64_t count);
    esa_status (*step)(esa_ctx *ctx, const esa_step_args *args);
    esa_status (*figures)(esa_ctx *ctx, const esa_figures_args *args);
} esa_engine_latents;

/* Planes of decoders. */
typedef struct esa_engine_planes {
    /* Bytes of the packed weights of a convolution; reads kt to up2 only. */
    int64_t (*conv_bytes)(esa_ctx *ctx, const esa_plane_conv_args *args);
    /* Packs weight f32 [cout][cin][kt][kh][kw], which is on the device, into packed. */
    esa_status (*conv_pack)(esa_ctx *ctx, void *packed, const esa_plane_conv_args *args,
                            const float *weight);
    /* ESA_ERR_UNSUPPORTED for sizes of kernels other than nn_args.h names. */
    esa_status (*conv)(esa_ctx *ctx, const esa_plane_conv_args *args);
    esa_status (*pixel_norm)(esa_ctx *ctx, const esa_plane_norm_args *args);
    esa_status (*group_norm)(esa_ctx *ctx, const esa_plane_group_args *args);
    esa_status (*border)(esa_ctx *ctx, const esa_plane_border_args *args);
    esa_status (*from_latents)(esa_ctx *ctx, const esa_plane_latent_args *args);
    esa_status (*to_bytes)(esa_ctx *ctx, const esa_plane_bytes_args *args);
    /* Sets bytes to 0. */
    esa_status (*zero)(esa_ctx *ctx, void *ptr, int64_t bytes);
} esa_engine_planes;

/* Copies between host and device, beside the ctx's stream: weights on their way to the device, and
 * carried differences on their way to the host and back. A lane is one piece of device memory that
 * is filled again and again. Lanes 0 .. ESA_ENGINE_LANES - 1 are for weights and are only fetched.
 * Lanes ESA_CARRY_LANE .. ESA_CARRY_LANE + ESA_CARRY_LANES - 1 are for carried differences. The two
 * groups do not wait for one another. In a group, copies run in the order of their calls: a fetch
 * sees what an earlier store of the group wrote to host memory.
 *
 * Making a difference and storing it:          Fetching one and adding it:
 *
 *     arrive(lane)        the memory is free        fetch(lane, memory, host)    one layer ahead
 *     attention (MAKE) writes the memory            arrive(lane)                 it is there
 *     store(lane, host, memory)                     attention (ADD) reads it
 *     ... the next layer takes another lane         used(lane)
 *
 * Between store and arrive the work may read the memory (the other branch of an anchor adds d), but
 * not write it: `used` after the last reader, as ever. */
enum {
    ESA_ENGINE_LANES = 4,
    ESA_CARRY_LANE = ESA_ENGINE_LANES,
    ESA_CARRY_LANES = 3,
    ESA_TRANSFER_LANES = ESA_CARRY_LANE + ESA_CARRY_LANES
};
typedef struct esa_engine_transfer {
    /* Host memory that the device reads and writes without staging. The caller owns *ptr and gives
     * it to unpin, after `landed` of the lanes that use it; on failure it is NULL. */
    esa_status (*pin)(esa_ctx *ctx, void **ptr, int64_t bytes);
    void (*unpin)(esa_ctx *ctx, void *ptr);
    /* Copies pinned src to dst, which belongs to the lane, after the last `used` of the lane. src
     * must not change before `landed`. */
    esa_status (*fetch)(esa_ctx *ctx, int32_t lane, void *dst, const void *src, int64_t bytes);
    /* A carry lane: copies src, which belongs to the lane, to pinned dst, after the work enqueued
     * so far. Work must not write src before `arrive`, the host not read dst before `landed`. */
    esa_status (*store)(esa_ctx *ctx, int32_t lane, void *dst, const void *src, int64_t bytes);
    /* Work that is enqueued from now on runs after the copies of the lane: it sees what fetch
     * brought, and may write what store has read. */
    esa_status (*arrive)(esa_ctx *ctx, int32_t lane);
    /* The work enqueued so far is the last that reads the lane. */
    esa_status (*used)(esa_ctx *ctx, int32_t lane);
    /* Waits until the copies of the lane are done: host memory they read may change, and host
     * memory they wrote may be read. */
    esa_status (*landed)(esa_ctx *ctx, int32_t lane);
    /* From the type of a file to that of products. Work of the ctx's stream, like operations. */
    esa_status (*convert)(esa_ctx *ctx, const esa_convert_args *args);
    /* Bytes of device memory that are free now. */
    esa_status (*room)(esa_ctx *ctx, int64_t *bytes);
} esa_engine_transfer;

#endif
