/* mask.c - the mask object: memory, rows, info. convert.c converts to and from the caller's arrays.
 * SPDX-License-Identifier: Apache-2.0
 *
 * count int32[B][H][nq] and index uint16[B][H][nq][cap] are two allocations. The mask keeps a copy
 * of the allocator, so it may outlive its ctx. cap = nk: a row can always hold every block, so
 * filling a mask never allocates. */
#include <math.h>
#include <string.h>
#include "base/status.h"
#include "mask/mask.h"

static int64_t count_bytes(const esa_mask *m)
{
    return esa_size_mul(esa_size_mul(esa_size_mul(m->B, m->H), m->nq), (int64_t)sizeof(int32_t));
}

static int64_t index_bytes(const esa_mask *m)
{
    return esa_size_mul(esa_size_mul(esa_size_mul(esa_size_mul(m->B, m->H), m->nq), m->cap),
                        (int64_t)sizeof(uint16_t));
}

esa_mask *esa_mask_new(const esa_allocator *mem, int64_t B, int64_t H, int64_t Nq, int64_t Nk,
                       int64_t nq, int64_t nk, int32_t block_q, int32_t block_k)
{
    esa_mask *m = esa_mem_zalloc(mem, (int64_t)sizeof *m);
    if (!m) return NULL;
    m->mem = *mem;
    m->B = B;
    m->H = H;
    m->Nq = Nq;
    m->Nk = Nk;
    m->nq = nq;
    m->nk = nk;
    m->cap = nk;
    m->block_q = block_q;
    m->block_k = block_k;
    m->runnable = 1;
    m->selector = -1;
    m->mode = ESA_MODE_FIXED;
    m->asked = (double)NAN;
    m->layout = esa_layout_default();
    m->layout.order = ESA_ORDER_RASTER;
    m->layout.protect_first_frame = 0;
    m->existing = esa_size_mul(esa_size_mul(esa_size_mul(B, H), nq), nk);
    m->facts = m->host_facts;
    m->host_facts[0] = m->existing;
    m->count = esa_mem_zalloc(mem, count_bytes(m));
    m->index = esa_mem_alloc(mem, index_bytes(m));
    if (!m->count || !m->index) {
        esa_mask_free(m);
        return NULL;
    }
    return m;
}

void esa_mask_free(esa_mask *mask)
{
    if (!mask) return;
    const esa_allocator mem = mask->mem;
    if (mask->heap.release) {
        void *const part[] = { mask->count, mask->index, mask->facts, mask->perm_q, mask->perm_k };
        for (size_t i = 0; i < sizeof part / sizeof part[0]; i++)
            if (part[i]) mask->heap.release(mask->heap.ordinal, part[i]);
    } else {
        esa_mem_free(&mem, mask->count, count_bytes(mask));
        esa_mem_free(&mem, mask->index, index_bytes(mask));
    }
    esa_mem_free(&mem, mask, (int64_t)sizeof *mask);
}

esa_mask *esa_mask_like(const esa_allocator *mem, const esa_mask *src)
{
    esa_mask *m = esa_mask_new(mem, src->B, src->H, src->Nq, src->Nk, src->nq, src->nk,
                               src->block_q, src->block_k);
    if (!m) return NULL;
    m->filled = src->filled;
    m->runnable = src->runnable;
    m->selector = src->selector;
    m->mode = src->mode;
    m->causal = src->causal;
    m->asked = src->asked;
    m->existing = src->existing;
    m->layout = src->layout;
    return m;
}

/* Copies the lists and facts of a mask on a device to a CPU mask of the same geometry. */
static esa_status download(esa_mask *copy, const esa_mask *mask)
{
    const esa_device_heap *dev = &mask->heap;
    int64_t facts[2];
    ESA_TRY(dev->download(dev->ordinal, copy->count, mask->count, count_bytes(copy), NULL));
    ESA_TRY(dev->download(dev->ordinal, copy->index, mask->index, index_bytes(copy), NULL));
    ESA_TRY(dev->download(dev->ordinal, facts, mask->facts, (int64_t)sizeof facts, NULL));
    copy->existing = facts[0];
    return ESA_OK;
}

esa_status esa_mask_on_host(const esa_mask **host, const esa_mask *mask, const esa_allocator *mem)
{
    *host = mask;
    if (!mask->heap.download) return ESA_OK;
    esa_mask *copy = esa_mask_like(mem, mask);
    if (!copy) return ESA_ERR_MEMORY;
    const esa_status status = download(copy, mask);
    if (status)
        esa_mask_free(copy);
    else
        *host = copy;
    return status;
}

void esa_mask_set_row(esa_mask *mask, int64_t row, const uint8_t *keep)
{
    uint16_t *list = mask->index + row * mask->cap; /* [cap] */
    int32_t n = 0;
    for (int64_t j = 0; j < mask->nk; j++)
        if (keep[j]) list[n++] = (uint16_t)j;
    mask->count[row] = n;
}

void esa_mask_set_bits(esa_mask *mask, const uint8_t *bits)
{
    const int64_t rows = mask->B * mask->H * mask->nq, pitch = esa_ceil_div(mask->nk, 8);
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *b = bits + r * pitch; /* [ceil(nk/8)] */
        uint16_t *list = mask->index + r * mask->cap;
        int32_t n = 0;
        for (int64_t byte = 0; byte < pitch; byte++) {
            if (!b[byte]) continue; /* most bytes of a sparse mask are 0 */
            const int64_t end = esa_min64(mask->nk, 8 * byte + 8);
            for (int64_t j = 8 * byte; j < end; j++)
                if (b[byte] >> (j & 7) & 1) list[n++] = (uint16_t)j;
        }
        mask->count[r] = n;
    }
    mask->filled = 1;
}

int64_t esa_mask_kept(const esa_mask *mask)
{
    const int64_t rows = mask->B * mask->H * mask->nq;
    int64_t kept = 0;
    for (int64_t r = 0; r < rows; r++) kept += mask->count[r];
    return kept;
}

esa_status esa_mask_get_info(const esa_mask *mask, esa_mask_info *info)
{
    if (!mask || !info) return ESA_ERR_ARGUMENT;
    if (info->struct_size != sizeof *info) return ESA_ERR_VERSION;
    int64_t existing = mask->existing, kept = 0;
    if (mask->heap.download && mask->filled) {
        int64_t facts[2];
        ESA_TRY(mask->heap.download(mask->heap.ordinal, facts, mask->facts, (int64_t)sizeof facts,
                                    NULL));
        existing = facts[0];
        kept = facts[1];
    } else if (mask->filled) {
        kept = esa_mask_kept(mask);
    }
    esa_mask_info r;
    memset(&r, 0, sizeof r);
    r.struct_size = sizeof r;
    r.block_q = mask->block_q;
    r.block_k = mask->block_k;
    r.device = mask->device;
    r.B = mask->B;
    r.H = mask->H;
    r.Nq = mask->Nq;
    r.Nk = mask->Nk;
    r.nq = mask->nq;
    r.nk = mask->nk;
    r.density_asked = mask->asked;
    r.kept = kept;
    /* If no block exists (kv_len 0 everywhere), none was dropped. */
    r.density = existing > 0 ? (double)kept / (double)existing : 1.0;
    r.selector = mask->selector;
    r.mode = mask->mode;
    r.runnable = mask->runnable;
    r.layout = mask->layout;
    *info = r;
    return ESA_OK;
}
