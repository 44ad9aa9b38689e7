/* plugin.h - the GPU of a ctx: the plugin libesa_cuda, opened when first needed, and its scratch.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_BACKEND_PLUGIN_H
#define ESA_BACKEND_PLUGIN_H

#include "ctx/ctx.h"
#include "cuda/cuda.h"

typedef struct esa_cuda {
    void *handle; /* from dlopen; the code itself stays loaded, because masks may outlive the ctx */
    const esa_cuda_table *table;
    esa_cuda_device *dev; /* NULL until a call needs the GPU */
    void *arena;          /* scratch kept between calls */
    int64_t arena_bytes, arena_peak;
} esa_cuda;

/* Opens the plugin without a GPU: enough to count GPUs. */
esa_status esa_cuda_plugin(esa_ctx *ctx);
/* Opens plugin and GPU on first use; ctx->cuda is complete afterwards. ESA_ERR_DEVICE and a message
 * otherwise. */
esa_status esa_cuda_open(esa_ctx *ctx);
/* Carries a status of the table into ctx, with the device's message. */
esa_status esa_cuda_status(esa_ctx *ctx, esa_status status);
/* At least bytes of GPU scratch, kept in the ctx. */
esa_status esa_cuda_scratch(esa_ctx *ctx, void **scratch, int64_t bytes);

#endif
