/* gpu_kit.h - what the tests with views on the GPU share.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_CUDA_GPU_KIT_H
#define ESA_TESTS_CUDA_GPU_KIT_H

#include "common/on_gpu.h"
#include "select/kit.h"

static inline void must(const esa_ctx *ctx, esa_status status)
{
    if (status) fail_msg("%s: %s", esa_status_name(status), esa_ctx_error(ctx));
}

static inline void refused(const esa_ctx *ctx, esa_status got, esa_status want, const char *word)
{
    if (got != want)
        fail_msg("%s instead of %s: %s", esa_status_name(got), esa_status_name(want),
                 esa_ctx_error(ctx));
    if (!strstr(esa_ctx_error(ctx), word))
        fail_msg("\"%s\" does not mention \"%s\"", esa_ctx_error(ctx), word);
}

/* A copy of host values on the GPU, to be given back with esa_device_free. */
static inline esa_tensor gpu_tensor(esa_ctx *ctx, const void *host, int32_t dtype, int64_t b,
                                    int64_t h, int64_t n, int64_t d)
{
    void *data = NULL;
    const int64_t bytes = b * h * n * d * esa_dtype_size(dtype);
    must(ctx, esa_device_alloc(ctx, &data, bytes));
    must(ctx, esa_device_upload(ctx, data, host, bytes));
    esa_tensor t = esa_tensor_bnsd(data, dtype, b, h, n, d);
    t.device = ESA_DEVICE_CUDA;
    return t;
}

/* Bytes of GPU memory that are free; through a ctx of its own, as the test's may be in any
 * state. */
static inline int64_t gpu_free_bytes(void)
{
    esa_ctx *ctx = kit_ctx(1);
    esa_device_info info = { .struct_size = sizeof info };
    must(ctx, esa_device_get_info(ctx, &info));
    esa_ctx_free(ctx);
    return info.free_memory;
}

#endif
