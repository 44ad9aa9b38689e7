/* device.h - the GPU of a ctx: the plugin, opened when first needed, and its scratch.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_ATTN_DEVICE_H
#define ESA_ATTN_DEVICE_H

#include "ctx/ctx.h"
#include "cuda/cuda.h"
#include "mask/mask.h"

typedef struct esa_cuda {
    void *handle; /* of the plugin, which itself stays in memory: masks may outlive the ctx */
    const esa_cuda_table *table;
    esa_cuda_device *dev; /* NULL until a call needs the GPU */
    void *arena;          /* scratch kept between calls */
    int64_t arena_bytes, arena_peak;
} esa_cuda;

/* Opens plugin and GPU if that has not been done; ctx->cuda is usable afterwards. ESA_ERR_DEVICE
 * and a sentence otherwise. */
esa_status esa_cuda_open(esa_ctx *ctx);
void esa_cuda_close(esa_ctx *ctx);
/* Gives the scratch back. */
void esa_cuda_trim(esa_ctx *ctx);
/* Carries a status of the table into ctx, with the device's sentence. */
esa_status esa_cuda_status(esa_ctx *ctx, esa_status status);
/* At least bytes of GPU scratch, kept in the ctx. */
esa_status esa_cuda_scratch(esa_ctx *ctx, void **scratch, int64_t bytes);

/* *mask = an empty mask on the GPU: geometry, facts and layout of like (which may lie anywhere),
 * the permutations of its layout built and uploaded. NULL and a sentence in ctx on failure.
 * ctx->cuda must be open. */
esa_status esa_cuda_mask_like(esa_ctx *ctx, esa_mask **mask, const esa_mask *like);
/* *copy = a filled mask, wherever it lies, on the GPU. */
esa_status esa_cuda_mask_copy(esa_ctx *ctx, esa_mask **copy, const esa_mask *mask);
/* The device arrays of a mask on the GPU. */
esa_cuda_mask esa_cuda_mask_view(const esa_mask *mask);

#endif
