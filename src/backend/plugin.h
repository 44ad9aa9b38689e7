/* plugin.h - the GPU of a ctx: the plugin libesa_cuda, which is opened on first use, and scratch.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_BACKEND_PLUGIN_H
#define ESA_BACKEND_PLUGIN_H

#include "ctx/ctx.h"
#include "cuda/cuda.h"

typedef struct esa_cuda {
    /* from dlopen; the code stays loaded after dlclose, because masks may outlive the ctx */
    void *handle;
    const esa_cuda_table *table;
    esa_cuda_device *dev; /* NULL until a call needs the GPU */
    void *arena;          /* scratch kept between calls */
    int64_t arena_bytes, arena_peak;
} esa_cuda;

/* Opens the plugin, but no GPU. That is enough to count GPUs. */
esa_status esa_cuda_plugin(esa_ctx *ctx);
/* Opens the plugin and the GPU on first use. On success ctx->cuda is complete. Fails with
 * ESA_ERR_DEVICE if there is no plugin or no such GPU. */
esa_status esa_cuda_open(esa_ctx *ctx);
/* Returns status. If it is a failure, copies the device's message into ctx. */
esa_status esa_cuda_status(esa_ctx *ctx, esa_status status);
/* *scratch = at least bytes of GPU memory, which the ctx owns. Valid until the next call of this
 * function, which may move it. */
esa_status esa_cuda_scratch(esa_ctx *ctx, void **scratch, int64_t bytes);

#endif
