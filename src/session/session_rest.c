/* session_rest.c - mask bits that a session keeps on the device between calls.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/session_rest.h"

#include <string.h>
#include "session/session.h"

/* ---------------------------------------------------------------- bits of a mask file */

void esa_session_chunks_free(esa_session_chunks *c)
{
    for (int64_t i = 0; c->chunk && i < c->chunks; i++) {
        if (!c->chunk[i]) continue;
        c->backend->release(c->ctx, c->chunk[i], c->chunk_bytes);
        c->bytes -= c->chunk_bytes;
    }
    esa_mem_free(&c->ctx->mem, c->chunk, c->chunks * (int64_t)sizeof *c->chunk);
    c->chunk = NULL;
    c->backend = NULL;
}

static esa_status make_chunks(esa_session_chunks *c, const esa_backend *backend,
                              const esa_mask_file *file)
{
    const int64_t groups = file->info.stored_groups;
    esa_session_chunks_free(c);
    c->chunks = file->cells / groups;
    c->chunk_bytes = groups * file->cell_bytes;
    c->chunk = esa_mem_zalloc(&c->ctx->mem, c->chunks * (int64_t)sizeof *c->chunk);
    if (!c->chunk)
        return esa_fail(c->ctx, ESA_ERR_MEMORY, "out of memory for the masks of a session");
    c->backend = backend;
    return ESA_OK;
}

static esa_status upload_chunk(esa_session_chunks *c, uint8_t **chunk, const uint8_t *host)
{
    void *made;
    ESA_TRY(c->backend->alloc(c->ctx, &made, c->chunk_bytes));
    const esa_status status = c->backend->upload(c->ctx, made, host, c->chunk_bytes);
    if (status) {
        c->backend->release(c->ctx, made, c->chunk_bytes);
        return status;
    }
    *chunk = made;
    c->bytes += c->chunk_bytes;
    return ESA_OK;
}

esa_status esa_session_chunks_cell(esa_session_chunks *c, const esa_backend *backend,
                                   const uint8_t **bits, const esa_mask_file *file,
                                   const esa_budget_masks *masks, int64_t cell)
{
    const int64_t groups = file->info.stored_groups, layer = cell / groups;
    if (backend->host_memory) {
        *bits = masks->bits + cell * file->cell_bytes;
        return ESA_OK;
    }
    if (c->backend != backend) ESA_TRY(make_chunks(c, backend, file));
    if (!c->chunk[layer])
        ESA_TRY(upload_chunk(c, &c->chunk[layer], masks->bits + layer * c->chunk_bytes));
    *bits = c->chunk[layer] + cell % groups * file->cell_bytes;
    return ESA_OK;
}

/* ---------------------------------------------------------------- masks between refreshes */

static void drop_bits(esa_session_chunks *c, esa_session_rest *rest)
{
    if (!rest->bits) return;
    rest->backend->release(c->ctx, rest->bits, rest->bytes);
    if (!rest->backend->host_memory) c->bytes -= rest->bytes;
    rest->bits = NULL;
    rest->facts = NULL;
    rest->bytes = 0;
}

void esa_session_rest_free(esa_session_chunks *c, esa_session_rest *rest)
{
    drop_bits(c, rest);
    esa_mem_free(&c->ctx->mem, rest->kv_len, rest->kv_bytes);
    rest->kv_len = NULL;
    rest->kv_bytes = 0;
}

/* Compares lengths by value where the host can read them, because the caller may write new ones
 * into the same array, or the same ones into another. */
int32_t esa_session_rest_fits(const esa_session_rest *rest, const esa_plan *plan)
{
    const int32_t *kv_len = plan->select.kv_len;
    if (!rest->made || !esa_session_same_shapes(&rest->shapes, &plan->shapes)) return 0;
    if (!plan->backend->host_memory) return rest->kv_address == kv_len;
    if (!rest->kv_len != !kv_len) return 0;
    return !kv_len || memcmp(rest->kv_len, kv_len, 4 * (size_t)plan->shapes.B) == 0;
}

static esa_status reserve_bits(esa_session_chunks *c, esa_session_rest *rest,
                               const esa_backend *backend, const esa_mask *m)
{
    const int64_t facts_at = esa_ceil_div(m->B * m->H * m->nq * esa_ceil_div(m->nk, 8), 16) * 16;
    if (rest->bits && rest->bytes == facts_at + 16 && rest->backend == backend) return ESA_OK;
    void *made;
    ESA_TRY(backend->alloc(c->ctx, &made, facts_at + 16));
    drop_bits(c, rest);
    rest->backend = backend;
    rest->bits = made;
    rest->facts = (int64_t *)(void *)(rest->bits + facts_at);
    rest->bytes = facts_at + 16;
    if (!backend->host_memory) c->bytes += rest->bytes;
    return ESA_OK;
}

static esa_status reserve_lengths(esa_session_chunks *c, esa_session_rest *rest, int64_t bytes)
{
    if (rest->kv_bytes == bytes) return ESA_OK;
    int32_t *kv_len = bytes ? esa_mem_alloc(&c->ctx->mem, bytes) : NULL;
    if (bytes && !kv_len)
        return esa_fail(c->ctx, ESA_ERR_MEMORY,
                        "out of memory for a mask that is kept between steps");
    esa_mem_free(&c->ctx->mem, rest->kv_len, rest->kv_bytes);
    rest->kv_len = kv_len;
    rest->kv_bytes = bytes;
    return ESA_OK;
}

esa_status esa_session_rest_store(esa_session_chunks *c, esa_session_rest *rest,
                                  const esa_plan *plan, const esa_mask *mask)
{
    const esa_backend *backend = plan->backend;
    const int32_t *kv_len = plan->select.kv_len;
    rest->made = 0;
    ESA_TRY(reserve_bits(c, rest, backend, mask));
    ESA_TRY(reserve_lengths(c, rest, kv_len && backend->host_memory ? 4 * plan->shapes.B : 0));
    ESA_TRY(backend->mask_get_bits(c->ctx, mask, rest->bits, NULL));
    ESA_TRY(backend->copy(c->ctx, rest->facts, mask->facts, 16));
    if (rest->kv_len) memcpy(rest->kv_len, kv_len, (size_t)rest->kv_bytes);
    rest->kv_address = kv_len;
    rest->shapes = plan->shapes;
    rest->made = 1;
    return ESA_OK;
}
