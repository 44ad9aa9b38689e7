/* session_kept.c - mask bits that a session keeps on the device between calls.
 * SPDX-License-Identifier: Apache-2.0 */
#include "session/session_kept.h"

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
    c->chunk_bytes = groups * file->cell_bytes * (file->info.fine ? 2 : 1);
    c->chunk = esa_mem_zalloc(&c->ctx->mem, c->chunks * (int64_t)sizeof *c->chunk);
    if (!c->chunk)
        return esa_fail(c->ctx, ESA_ERR_MEMORY, "out of memory for the masks of a session");
    c->backend = backend;
    return ESA_OK;
}

/* bits, fine: where those of the layer begin on the host; fine may be NULL. */
static esa_status upload_chunk(esa_session_chunks *c, uint8_t **chunk, const uint8_t *bits,
                               const uint8_t *fine)
{
    const int64_t plane = c->chunk_bytes / (fine ? 2 : 1);
    void *made;
    ESA_TRY(c->backend->alloc(c->ctx, &made, c->chunk_bytes));
    esa_status status = c->backend->upload(c->ctx, made, bits, plane);
    if (!status && fine) status = c->backend->upload(c->ctx, (uint8_t *)made + plane, fine, plane);
    if (status) {
        c->backend->release(c->ctx, made, c->chunk_bytes);
        return status;
    }
    *chunk = made;
    c->bytes += c->chunk_bytes;
    return ESA_OK;
}

esa_status esa_session_chunks_cell(esa_session_chunks *c, const esa_backend *backend,
                                   const uint8_t **bits, const uint8_t **fine,
                                   const esa_mask_file *file, const esa_budget_masks *masks,
                                   int64_t cell)
{
    const int64_t groups = file->info.stored_groups, layer = cell / groups,
                  plane = groups * file->cell_bytes;
    if (backend->host_memory) {
        *bits = masks->bits + cell * file->cell_bytes;
        *fine = masks->fine ? masks->fine + cell * file->cell_bytes : NULL;
        return ESA_OK;
    }
    if (c->backend != backend) ESA_TRY(make_chunks(c, backend, file));
    if (!c->chunk[layer])
        ESA_TRY(upload_chunk(c, &c->chunk[layer], masks->bits + layer * plane,
                             masks->fine ? masks->fine + layer * plane : NULL));
    *bits = c->chunk[layer] + cell % groups * file->cell_bytes;
    *fine = masks->fine ? *bits + plane : NULL;
    return ESA_OK;
}

/* ---------------------------------------------------------------- masks between refreshes */

static void drop_memory(esa_session_chunks *c, esa_session_kept *kept)
{
    if (!kept->bits) return;
    kept->backend->release(c->ctx, kept->bits, kept->bytes);
    if (!kept->backend->host_memory) c->bytes -= kept->bytes;
    kept->bits = kept->fine = NULL;
    kept->facts = NULL;
    kept->perm_q = kept->perm_k = NULL;
    kept->bytes = 0;
}

void esa_session_kept_free(esa_session_chunks *c, esa_session_kept *kept)
{
    drop_memory(c, kept);
    esa_mem_free(&c->ctx->mem, kept->kv_len, kept->kv_bytes);
    kept->kv_len = NULL;
    kept->kv_bytes = 0;
}

void esa_session_kept_forget(esa_session_kept *kept)
{
    kept->made = kept->ordered = kept->diff.made = 0;
    kept->sparse_steps = 0;
    kept->last_step = kept->own_step = kept->made_step = -1;
}

/* Compares lengths by value where the host can read them, because the caller may write new ones
 * into the same array, or the same ones into another. */
int32_t esa_session_kept_fits(const esa_session_kept *kept, const esa_plan *plan)
{
    const int32_t *kv_len = plan->select.kv_len;
    if (!kept->made || !esa_session_same_shapes(&kept->shapes, &plan->shapes)) return 0;
    if (!plan->backend->host_memory) return kept->kv_address == kv_len;
    if (!kept->kv_len != !kv_len) return 0;
    return !kv_len || memcmp(kept->kv_len, kv_len, 4 * (size_t)plan->shapes.B) == 0;
}

/* Places the parts of a kept mask in base, or only counts their bytes. */
static int64_t place(esa_session_kept *kept, void *base, const esa_mask *m)
{
    esa_carve carve = { base, 0 };
    const int64_t plane = m->B * m->H * m->nq * esa_ceil_div(m->nk, 8);
    kept->bits = esa_carve_take(&carve, plane);
    kept->fine = m->fine ? esa_carve_take(&carve, plane) : NULL;
    kept->facts = esa_carve_take(&carve, ESA_FACTS * 8);
    kept->perm_q = m->Hkv ? esa_carve_take(&carve, esa_mask_order_bytes(m, 0)) : NULL;
    kept->perm_k = m->Hkv ? esa_carve_take(&carve, esa_mask_order_bytes(m, 1)) : NULL;
    return carve.used;
}

static esa_status reserve_memory(esa_session_chunks *c, esa_session_kept *kept,
                                 const esa_backend *backend, const esa_mask *m)
{
    esa_session_kept sizes;
    const int64_t bytes = place(&sizes, NULL, m);
    if (kept->bits && kept->bytes == bytes && kept->backend == backend) {
        place(kept, kept->bits, m); /* equal sizes may be parts of other sizes */
        return ESA_OK;
    }
    void *made;
    ESA_TRY(backend->alloc(c->ctx, &made, bytes));
    drop_memory(c, kept);
    kept->backend = backend;
    kept->bytes = bytes;
    place(kept, made, m);
    if (!backend->host_memory) c->bytes += kept->bytes;
    return ESA_OK;
}

static esa_status reserve_lengths(esa_session_chunks *c, esa_session_kept *kept, int64_t bytes)
{
    if (kept->kv_bytes == bytes) return ESA_OK;
    int32_t *kv_len = bytes ? esa_mem_alloc(&c->ctx->mem, bytes) : NULL;
    if (bytes && !kv_len)
        return esa_fail(c->ctx, ESA_ERR_MEMORY,
                        "out of memory for a mask that is kept between steps");
    esa_mem_free(&c->ctx->mem, kept->kv_len, kept->kv_bytes);
    kept->kv_len = kv_len;
    kept->kv_bytes = bytes;
    return ESA_OK;
}

static esa_status copy_order(esa_session_chunks *c, const esa_backend *backend, int32_t *perm_q,
                             int32_t *perm_k, const int32_t *from_q, const int32_t *from_k,
                             const esa_mask *like)
{
    ESA_TRY(backend->copy(c->ctx, perm_q, from_q, esa_mask_order_bytes(like, 0)));
    return backend->copy(c->ctx, perm_k, from_k, esa_mask_order_bytes(like, 1));
}

esa_status esa_session_kept_note(esa_session_chunks *c, esa_session_kept *kept,
                                 const esa_plan *plan)
{
    const int32_t *kv_len = plan->select.kv_len;
    kept->made = kept->diff.made = 0;
    ESA_TRY(
        reserve_lengths(c, kept, kv_len && plan->backend->host_memory ? 4 * plan->shapes.B : 0));
    if (kept->kv_len) memcpy(kept->kv_len, kv_len, (size_t)kept->kv_bytes);
    kept->kv_address = kv_len;
    kept->shapes = plan->shapes;
    kept->made = 1;
    return ESA_OK;
}

esa_status esa_session_kept_store(esa_session_chunks *c, esa_session_kept *kept,
                                  const esa_plan *plan, const esa_mask *mask)
{
    const esa_backend *backend = plan->backend;
    kept->made = kept->ordered = kept->diff.made = 0;
    ESA_TRY(reserve_memory(c, kept, backend, mask));
    ESA_TRY(backend->mask_get_bits(c->ctx, mask, kept->bits, kept->fine));
    ESA_TRY(backend->copy(c->ctx, kept->facts, mask->facts, ESA_FACTS * 8));
    if (mask->ordered)
        ESA_TRY(
            copy_order(c, backend, kept->perm_q, kept->perm_k, mask->perm_q, mask->perm_k, mask));
    kept->ordered = mask->ordered;
    return esa_session_kept_note(c, kept, plan);
}

esa_status esa_session_kept_order(esa_session_chunks *c, const esa_session_kept *kept,
                                  esa_mask *mask)
{
    mask->ordered = 0;
    ESA_TRY(
        copy_order(c, kept->backend, mask->perm_q, mask->perm_k, kept->perm_q, kept->perm_k, mask));
    mask->ordered = 1;
    return ESA_OK;
}

esa_status esa_session_kept_mask(esa_session_chunks *c, const esa_session_kept *kept,
                                 esa_mask *mask)
{
    if (kept->ordered) ESA_TRY(esa_session_kept_order(c, kept, mask));
    return kept->backend->mask_set_bits(c->ctx, mask, kept->bits, kept->fine);
}
