/* session_gpu.c - masks at rest on the GPU, and figures booked when the GPU has run.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/session_gpu.h"
#include "session/session.h"

#include <string.h>

void esa_session_gpu_free(esa_session_gpu *gpu)
{
    esa_ctx *ctx = gpu->ctx;
    if (!ctx || !ctx->cuda) return;
    const esa_cuda_table *table = ctx->cuda->table;
    for (int64_t i = 0; gpu->chunk && i < gpu->chunks; i++)
        if (gpu->chunk[i]) table->release(ctx->cuda_device, gpu->chunk[i]);
    esa_mem_free(&ctx->mem, gpu->chunk, gpu->chunks * (int64_t)sizeof *gpu->chunk);
    if (gpu->facts) table->release(ctx->cuda_device, gpu->facts);
    for (int32_t i = 0; i < ESA_SESSION_PENDING; i++)
        for (int32_t m = 0; m < 3; m++)
            if (gpu->mark[i][m]) table->mark_release(ctx->cuda_device, gpu->mark[i][m]);
    memset(gpu, 0, sizeof *gpu);
    gpu->ctx = ctx;
}

/* ---------------------------------------------------------------- masks at rest */

esa_status esa_session_gpu_alloc(esa_session_gpu *gpu, uint8_t **bits, int64_t bytes)
{
    const esa_cuda *c = gpu->ctx->cuda;
    const esa_status status = esa_cuda_status(gpu->ctx,
                                              c->table->alloc(c->dev, (void **)bits, bytes));
    if (!status) gpu->bytes += bytes;
    return status;
}

void esa_session_gpu_release(esa_session_gpu *gpu, uint8_t *bits, int64_t bytes)
{
    if (!bits) return;
    gpu->ctx->cuda->table->release(gpu->ctx->cuda_device, bits);
    gpu->bytes -= bytes;
}

esa_status esa_session_gpu_cell(esa_session_gpu *gpu, const uint8_t **bits, const uint8_t *host,
                                int64_t cell, int64_t cells, int64_t groups, int64_t cell_bytes)
{
    esa_ctx *ctx = gpu->ctx;
    const esa_cuda *c = ctx->cuda;
    if (!gpu->chunk) {
        gpu->chunks = cells / groups;
        gpu->chunk_bytes = groups * cell_bytes;
        gpu->chunk = esa_mem_zalloc(&ctx->mem, gpu->chunks * (int64_t)sizeof *gpu->chunk);
        if (!gpu->chunk)
            return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the masks of a session");
    }
    uint8_t **chunk = &gpu->chunk[cell / groups];
    if (!*chunk) {
        esa_status status = esa_session_gpu_alloc(gpu, chunk, gpu->chunk_bytes);
        if (!status)
            status = esa_cuda_status(ctx, c->table->upload(c->dev, *chunk,
                                                           host + cell / groups * gpu->chunk_bytes,
                                                           gpu->chunk_bytes, ctx->cuda_stream));
        if (status) {
            esa_session_gpu_release(gpu, *chunk, gpu->chunk_bytes);
            *chunk = NULL;
            return status;
        }
    }
    *bits = *chunk + cell % groups * cell_bytes;
    return ESA_OK;
}

esa_status esa_session_gpu_expand(esa_session_gpu *gpu, esa_mask *mask, const uint8_t *bits)
{
    const esa_cuda *c = gpu->ctx->cuda;
    const esa_cuda_mask view = esa_cuda_mask_view(mask);
    const esa_status status = esa_cuda_status(
        gpu->ctx, c->table->bits_to_lists(c->dev, &view, bits, gpu->ctx->cuda_stream));
    if (!status) mask->filled = 1;
    return status;
}

esa_status esa_session_gpu_rest(esa_session_gpu *gpu, const esa_mask *mask, uint8_t *bits,
                                int64_t *facts)
{
    const esa_cuda *c = gpu->ctx->cuda;
    const esa_cuda_mask view = esa_cuda_mask_view(mask);
    esa_status status = c->table->lists_to_bits(c->dev, &view, bits, gpu->ctx->cuda_stream);
    if (!status) status = c->table->copy(c->dev, facts, mask->facts, 16, gpu->ctx->cuda_stream);
    return esa_cuda_status(gpu->ctx, status);
}

/* ---------------------------------------------------------------- figures */

static esa_status record(esa_session_gpu *gpu, int32_t which)
{
    const esa_cuda *c = gpu->ctx->cuda;
    return esa_cuda_status(gpu->ctx, c->table->mark_record(c->dev, gpu->mark[gpu->used][which],
                                                           gpu->ctx->cuda_stream));
}

static esa_status furnish_slot(esa_session_gpu *gpu)
{
    const esa_cuda *c = gpu->ctx->cuda;
    esa_status status = ESA_OK;
    if (!gpu->facts)
        status = c->table->alloc(c->dev, (void **)&gpu->facts, ESA_SESSION_PENDING * 16);
    for (int32_t m = 0; !status && m < 3; m++)
        if (!gpu->mark[gpu->used][m])
            status = c->table->mark_create(c->dev, &gpu->mark[gpu->used][m]);
    return esa_cuda_status(gpu->ctx, status);
}

esa_status esa_session_gpu_begin(esa_session_gpu *gpu)
{
    esa_status status = gpu->used == ESA_SESSION_PENDING ? esa_session_gpu_settle(gpu) : ESA_OK;
    if (!status) status = furnish_slot(gpu);
    if (!status) status = record(gpu, 0);
    return status ? status : record(gpu, 1);
}

esa_status esa_session_gpu_between(esa_session_gpu *gpu) { return record(gpu, 1); }

esa_status esa_session_gpu_end(esa_session_gpu *gpu, esa_session_cell *cell, const int64_t *facts)
{
    const esa_cuda *c = gpu->ctx->cuda;
    esa_status status = record(gpu, 2);
    if (!status && facts)
        status = esa_cuda_status(gpu->ctx, c->table->copy(c->dev, gpu->facts + 2 * gpu->used, facts,
                                                          16, gpu->ctx->cuda_stream));
    if (status) return status;
    gpu->pending[gpu->used++] = (esa_session_pending){ cell, facts != NULL };
    return ESA_OK;
}

static esa_status settle_one(esa_session_gpu *gpu, int32_t i, const int64_t *facts)
{
    const esa_cuda *c = gpu->ctx->cuda;
    const esa_session_pending *p = &gpu->pending[i];
    double select = 0, attention = 0;
    esa_status status = c->table->mark_elapsed(c->dev, &attention, gpu->mark[i][1],
                                               gpu->mark[i][2]);
    if (!status && p->sparse)
        status = c->table->mark_elapsed(c->dev, &select, gpu->mark[i][0], gpu->mark[i][1]);
    if (status) return esa_cuda_status(gpu->ctx, status);
    p->cell->attention_seconds += attention;
    p->cell->select_seconds += select;
    if (p->sparse)
        p->cell->density += facts[2 * i] > 0 ? (double)facts[2 * i + 1] / (double)facts[2 * i]
                                             : 1.0;
    return ESA_OK;
}

esa_status esa_session_gpu_settle(esa_session_gpu *gpu)
{
    if (!gpu->used) return ESA_OK;
    int64_t facts[2 * ESA_SESSION_PENDING];
    esa_ctx *ctx = gpu->ctx;
    esa_status status = ctx->cuda->table->download(ctx->cuda_device, facts, gpu->facts,
                                                   gpu->used * 16, ctx->cuda_stream);
    if (status)
        return esa_fail(ctx, status, "the figures of %d calls could not be read from GPU %d",
                        (int)gpu->used, (int)ctx->cuda_device);
    for (int32_t i = 0; !status && i < gpu->used; i++) status = settle_one(gpu, i, facts);
    gpu->used = 0;
    return status;
}

void esa_session_gpu_forget(esa_session_gpu *gpu) { gpu->used = 0; }
