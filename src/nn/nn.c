/* nn.c - memory, threads and the type of products for the operations of nn.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "nn/ops.h"

#include <stdio.h>
#include <time.h>
#include "nn/leaf.h"
#include "nn/marks.h"

double esa_nn_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void esa_nn_init(esa_nn *nn, esa_ctx *ctx)
{
    *nn = (esa_nn){ .ctx = ctx, .be = esa_backend_of(ESA_DEVICE_CPU), .ops = &esa_nn_cpu_ops };
}

esa_status esa_nn_use(esa_nn *nn, int32_t device)
{
    const esa_backend *be = esa_backend_of(device);
    const char *library;
    if (!be) return esa_fail(nn->ctx, ESA_ERR_DEVICE, "device %d is not known", device);
    ESA_TRY(be->open(nn->ctx));
    if (be->host_memory) return ESA_OK; /* it is there already */
    if (!be->rows || !be->products || !be->latents || !be->biased || !be->planes || !be->transfer)
        return esa_fail(nn->ctx, ESA_ERR_UNSUPPORTED, "the %s cannot run networks", be->name);
    ESA_TRY(be->products->library(nn->ctx, &library));
    ESA_TRY(esa_nn_marks_make(nn));
    nn->be = be;
    nn->ops = &esa_nn_device_ops;
    return ESA_OK;
}

void esa_nn_close(esa_nn *nn)
{
    esa_nn_marks_free(nn);
    esa_nn_free(nn, nn->scratch, nn->scratch_bytes);
    nn->scratch = NULL;
    nn->scratch_bytes = 0;
}

/* ---------------------------------------------------------------- the type of products */

int32_t esa_nn_bf16_pays(const esa_ctx *ctx)
{
    const esa_cpu_kernels *kern = ctx->kern;
    if (kern->level == ESA_CPU_AVX512BF16) return esa_cpu_bf16_pays();
    return kern->level == ESA_CPU_AMX; /* on Arm it has not been measured */
}

esa_status esa_nn_use_dtype(esa_nn *nn, int32_t dtype)
{
    if (dtype == ESA_DTYPE_BF16 && !nn->ctx->kern->bf16)
        return esa_fail(nn->ctx, ESA_ERR_UNSUPPORTED,
                        "this processor has no bf16 products (kernels: %s)", nn->ctx->kern->name);
    nn->bf16 = dtype == ESA_DTYPE_BF16;
    return ESA_OK;
}

const char *esa_nn_kernels(const esa_nn *nn)
{
    return nn->bf16 ? nn->ctx->kern->bf16->name : nn->ctx->kern->name;
}

const esa_cpu_kernels *esa_nn_product_set(const esa_nn *nn, const esa_weight *w)
{
    const esa_cpu_kernels *kern = nn->ctx->kern;
    const int32_t bf16 = w->panel ? w->dtype == ESA_DTYPE_BF16 : nn->bf16;
    return bf16 ? kern->bf16 : kern;
}

/* ---------------------------------------------------------------- memory */

esa_status esa_nn_alloc(esa_nn *nn, void **ptr, int64_t bytes, const char *what)
{
    const esa_status status = nn->be->alloc(nn->ctx, ptr, bytes);
    if (status == ESA_ERR_MEMORY && nn->be->host_memory)
        return esa_fail(nn->ctx, status, "out of memory for %s: %lld bytes", what,
                        (long long)bytes);
    if (status == ESA_ERR_MEMORY) { /* the device says how much it has */
        char why[160];
        snprintf(why, sizeof why, "%.159s", nn->ctx->error);
        return esa_fail(nn->ctx, status, "out of memory for %s: %s", what, why);
    }
    if (status) return status;
    nn->held += bytes;
    nn->peak = esa_max64(nn->peak, nn->held);
    return ESA_OK;
}

void esa_nn_free(esa_nn *nn, void *ptr, int64_t bytes)
{
    if (!ptr) return;
    nn->be->release(nn->ctx, ptr, bytes);
    nn->held -= bytes;
}

esa_view esa_nn_take(const esa_nn *nn, esa_carve *carve, int32_t dtype, int64_t rows, int64_t cols)
{
    void *data = esa_carve_take(carve, rows * cols * esa_view_element(dtype));
    return esa_view_of(data, dtype, nn->be->device, rows, cols);
}

esa_status esa_nn_alloc_host(esa_nn *nn, void **ptr, int64_t bytes, const char *what)
{
    if (nn->be->host_memory) return esa_nn_alloc(nn, ptr, bytes, what);
    *ptr = esa_mem_alloc(&nn->ctx->mem, bytes);
    return *ptr ? ESA_OK
                : esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for %s: %lld bytes", what,
                           (long long)bytes);
}

void esa_nn_free_host(esa_nn *nn, void *ptr, int64_t bytes)
{
    if (nn->be->host_memory)
        esa_nn_free(nn, ptr, bytes);
    else
        esa_mem_free(&nn->ctx->mem, ptr, bytes);
}

esa_status esa_nn_write(esa_nn *nn, const esa_view *to, const float *from)
{
    const int64_t count = to->rows * to->cols;
    if (to->dtype == ESA_DTYPE_F32) return nn->be->upload(nn->ctx, to->data, from, count * 4);
    uint16_t *half = esa_mem_alloc(&nn->ctx->mem, count * 2);
    if (!half) return esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for a copy to the device");
    esa_nn_leaf_get(nn->ctx->kern->level)->to_bf16(half, from, count);
    const esa_status status = nn->be->upload(nn->ctx, to->data, half, count * 2);
    esa_mem_free(&nn->ctx->mem, half, count * 2);
    return status;
}

esa_status esa_nn_read(esa_nn *nn, float *to, const esa_view *from)
{
    const int64_t count = from->rows * from->cols;
    if (from->dtype == ESA_DTYPE_F32) return nn->be->download(nn->ctx, to, from->data, count * 4);
    uint16_t *half = esa_mem_alloc(&nn->ctx->mem, count * 2);
    if (!half) return esa_fail(nn->ctx, ESA_ERR_MEMORY, "out of memory for a copy from the device");
    const esa_status status = nn->be->download(nn->ctx, half, from->data, count * 2);
    if (!status) esa_nn_leaf_get(nn->ctx->kern->level)->from_bf16(to, half, count);
    esa_mem_free(&nn->ctx->mem, half, count * 2);
    return status;
}

esa_status esa_nn_copy(esa_nn *nn, void *to, const void *from, int64_t bytes)
{
    return nn->be->copy(nn->ctx, to, from, bytes);
}

esa_status esa_nn_upload(esa_nn *nn, void *to, const void *from, int64_t bytes)
{
    return nn->be->upload(nn->ctx, to, from, bytes);
}

esa_status esa_nn_download(esa_nn *nn, void *to, const void *from, int64_t bytes)
{
    return nn->be->download(nn->ctx, to, from, bytes);
}

esa_status esa_nn_reserve(esa_nn *nn, int64_t bytes, int64_t *all)
{
    void *scratch;
    const int64_t size = nn->be->host_memory
                             ? 0
                             : esa_max64(bytes, nn->be->products->workspace(nn->ctx));
    if (all) *all = size;
    return bytes < 0 || !size ? ESA_OK : nn->be->scratch(nn->ctx, &scratch, size);
}

int64_t esa_nn_reserved(const esa_nn *nn)
{
    int64_t bytes = 0;
    if (!nn->be->host_memory) esa_device_memory(nn->ctx, &bytes, NULL);
    return bytes;
}

esa_status esa_nn_scratch(esa_nn *nn, void **ptr, int64_t bytes)
{
    if (bytes > nn->scratch_bytes) {
        esa_nn_free(nn, nn->scratch, nn->scratch_bytes);
        nn->scratch = NULL;
        nn->scratch_bytes = 0;
        ESA_TRY(esa_nn_alloc(nn, &nn->scratch, bytes, "scratch"));
        nn->scratch_bytes = bytes;
    }
    *ptr = nn->scratch;
    return ESA_OK;
}

typedef struct rows_job {
    esa_nn_rows_fn fn;
    void *arg;
    int64_t rows, piece;
} rows_job;

static void run_piece(void *arg, int64_t item, int32_t worker)
{
    const rows_job *j = arg;
    const int64_t first = item * j->piece;
    j->fn(j->arg, first, esa_min64(j->piece, j->rows - first), worker);
}

void esa_nn_parallel(esa_nn *nn, esa_nn_rows_fn fn, void *arg, int64_t rows, int64_t piece)
{
    rows_job job = { fn, arg, rows, piece };
    esa_pool_run(nn->ctx->pool, run_piece, &job, esa_ceil_div(rows, piece));
}
