/* backend.c - finds the table of a device, and makes orders and mask copies on any device.
 * SPDX-License-Identifier: Apache-2.0 */
#include "backend/backend.h"

const esa_backend *esa_backend_of(int32_t device)
{
    static const esa_backend *const table[] = {
        [ESA_DEVICE_CPU] = &esa_backend_cpu, [ESA_DEVICE_CUDA] = &esa_backend_cuda
    };
    const int32_t count = (int32_t)(sizeof table / sizeof table[0]);
    return device >= 0 && device < count ? table[device] : NULL;
}

/* ---------------------------------------------------------------- orders */

/* Writes one side's permutation to dst. If the host cannot write there, it is built in host scratch
 * and uploaded. */
static esa_status place_order(esa_ctx *ctx, const esa_backend *be, int32_t *dst,
                              const esa_layout *layout, int32_t side, int32_t mode, int64_t N)
{
    if (be->host_memory) {
        esa_order_build(dst, N, layout, side, mode);
        return ESA_OK;
    }
    void *host;
    ESA_TRY(esa_ctx_scratch(ctx, &host, N * 4));
    esa_order_build(host, N, layout, side, mode);
    return be->upload(ctx, dst, host, N * 4);
}

esa_status esa_backend_orders(esa_ctx *ctx, const esa_backend *be, const int32_t **perm_q,
                              const int32_t **perm_k, void **ws, const esa_layout *layout,
                              int32_t mode, int64_t Nq, int64_t Nk, int64_t bytes)
{
    const int64_t N[2] = { Nq, Nk };
    int32_t *perm[2] = { NULL, NULL };
    for (int32_t placing = 0; placing < 2; placing++) { /* count the bytes, then place the parts */
        esa_carve carve = { placing ? *ws : NULL, 0 };
        for (int32_t side = 0; side < 2; side++)
            if (esa_layout_moves(layout, side, mode))
                perm[side] = esa_carve_take(&carve, N[side] * 4);
        void *const rest = esa_carve_take(&carve, bytes);
        if (placing)
            *ws = rest;
        else
            ESA_TRY(be->scratch(ctx, ws, carve.used));
    }
    for (int32_t side = 0; side < 2; side++)
        if (perm[side]) ESA_TRY(place_order(ctx, be, perm[side], layout, side, mode, N[side]));
    *perm_q = perm[0];
    *perm_k = perm[1];
    return ESA_OK;
}

esa_status esa_backend_order(esa_ctx *ctx, const esa_backend *be, int32_t **perm,
                             const esa_layout *layout, int32_t side, int32_t mode, int64_t N)
{
    void *made;
    *perm = NULL;
    ESA_TRY(be->alloc(ctx, &made, N * 4));
    const esa_status status = place_order(ctx, be, made, layout, side, mode, N);
    if (status)
        be->release(ctx, made, N * 4);
    else
        *perm = made;
    return status;
}

/* ---------------------------------------------------------------- masks */

int32_t esa_backend_mask_here(const esa_ctx *ctx, const esa_backend *be, const esa_mask *mask)
{
    return mask->device == be->device &&
           (be->host_memory || mask->heap.ordinal == ctx->cuda_device);
}

/* *host = the mask itself if it is in host memory, else a copy, which the caller frees. */
static esa_status read_mask(esa_ctx *ctx, const esa_mask **host, const esa_mask *mask)
{
    const esa_status status = esa_mask_on_host(host, mask, &ctx->mem);
    if (status == ESA_ERR_MEMORY) return esa_fail(ctx, status, "out of memory for a mask");
    if (status)
        return esa_fail(ctx, status, "the mask could not be read from GPU %d",
                        (int)mask->heap.ordinal);
    return ESA_OK;
}

static esa_status write_mask(esa_ctx *ctx, const esa_backend *be, esa_mask *m, const esa_mask *host)
{
    const int64_t rows = m->B * m->H * m->nq;
    const int64_t facts[ESA_FACTS] = { host->existing, esa_mask_kept(host), esa_mask_fine(host) };
    ESA_TRY(be->upload(ctx, m->count, host->count, rows * 4));
    ESA_TRY(be->upload(ctx, m->index, host->index, rows * m->cap * 2));
    ESA_TRY(be->upload(ctx, m->facts, facts, sizeof facts));
    if (m->fine) {
        ESA_TRY(be->upload(ctx, m->fine_count, host->fine_count, rows * 4));
        ESA_TRY(be->upload(ctx, m->fine_index, host->fine_index, rows * m->cap * 2));
    }
    if (host->ordered) {
        ESA_TRY(be->upload(ctx, m->perm_q, host->perm_q, esa_mask_order_bytes(m, 0)));
        ESA_TRY(be->upload(ctx, m->perm_k, host->perm_k, esa_mask_order_bytes(m, 1)));
        m->ordered = 1;
    }
    m->filled = 1;
    return ESA_OK;
}

esa_status esa_backend_mask_copy(esa_ctx *ctx, const esa_backend *be, esa_mask **copy,
                                 const esa_mask *mask)
{
    const esa_mask *host;
    esa_mask *m = NULL;
    *copy = NULL;
    ESA_TRY(read_mask(ctx, &host, mask));
    if (be->host_memory && host != mask) { /* read_mask has made the copy */
        *copy = (esa_mask *)host;
        return ESA_OK;
    }
    esa_status status = be->mask_create(ctx, &m, host);
    if (!status) status = write_mask(ctx, be, m, host);
    if (host != mask) esa_mask_free((esa_mask *)host);
    if (status)
        esa_mask_free(m);
    else
        *copy = m;
    return status;
}

static esa_status to_device(esa_ctx *ctx, esa_mask **copy, const esa_mask *mask, int32_t device)
{
    const esa_backend *be = esa_backend_of(device);
    if (!copy || !mask)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "%s is NULL", copy ? "mask" : "copy");
    if (!mask->filled)
        return esa_fail(ctx, ESA_ERR_STATE, "the mask is empty: there is nothing to copy");
    if (!be)
        return esa_fail(ctx, ESA_ERR_DEVICE,
                        "device is %d, expected ESA_DEVICE_CPU or ESA_DEVICE_CUDA", (int)device);
    ESA_TRY(be->open(ctx));
    return esa_backend_mask_copy(ctx, be, copy, mask);
}

esa_status esa_mask_to_device(esa_ctx *ctx, esa_mask **copy, const esa_mask *mask, int32_t device)
{
    if (copy) *copy = NULL;
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = to_device(ctx, copy, mask, device);
    esa_ctx_leave(ctx);
    return status;
}
