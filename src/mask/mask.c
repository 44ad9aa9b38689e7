/* mask.c - the mask object: memory, rows, info. convert.c converts to and from the caller's arrays.
 * SPDX-License-Identifier: Apache-2.0
 *
 * count int32[B][H][nq] and index uint16[B][H][nq][cap] are two allocations, and so are the lists
 * of the fine level and the two adaptive orders. The mask keeps a copy of the allocator, so it may
 * outlive its ctx. cap = nk: a row can always hold every block, so filling a mask never
 * allocates. */
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

int64_t esa_mask_order_bytes(const esa_mask *m, int32_t side)
{
    return esa_size_mul(esa_size_mul(m->B, side ? m->Hkv : m->H),
                        esa_size_mul(side ? m->Nk : m->Nq, (int64_t)sizeof(int32_t)));
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

static void free_orders(esa_mask *mask)
{
    esa_mem_free(&mask->mem, mask->perm_q, esa_mask_order_bytes(mask, 0));
    esa_mem_free(&mask->mem, mask->perm_k, esa_mask_order_bytes(mask, 1));
    mask->perm_q = mask->perm_k = NULL;
}

void esa_mask_free(esa_mask *mask)
{
    if (!mask) return;
    const esa_allocator mem = mask->mem;
    if (mask->heap.release) {
        void *const part[] = { mask->count, mask->index,  mask->fine_count, mask->fine_index,
                               mask->facts, mask->perm_q, mask->perm_k };
        for (size_t i = 0; i < sizeof part / sizeof part[0]; i++)
            if (part[i]) mask->heap.release(mask->heap.ordinal, part[i]);
    } else {
        esa_mem_free(&mem, mask->count, count_bytes(mask));
        esa_mem_free(&mem, mask->index, index_bytes(mask));
        esa_mem_free(&mem, mask->fine_count, count_bytes(mask));
        esa_mem_free(&mem, mask->fine_index, index_bytes(mask));
        free_orders(mask);
    }
    esa_mem_free(&mem, mask, (int64_t)sizeof *mask);
}

int32_t esa_mask_add_fine(esa_mask *mask, int32_t fine)
{
    int32_t *count = esa_mem_zalloc(&mask->mem, count_bytes(mask));
    uint16_t *index = esa_mem_alloc(&mask->mem, index_bytes(mask));
    if (!count || !index) {
        esa_mem_free(&mask->mem, count, count_bytes(mask));
        esa_mem_free(&mask->mem, index, index_bytes(mask));
        return 0;
    }
    mask->fine = fine;
    mask->fine_count = count;
    mask->fine_index = index;
    return 1;
}

int32_t esa_mask_add_orders(esa_mask *mask, int64_t Hkv)
{
    const esa_mask sizes = {
        .B = mask->B, .H = mask->H, .Nq = mask->Nq, .Nk = mask->Nk, .Hkv = Hkv
    };
    const int64_t q_bytes = esa_mask_order_bytes(&sizes, 0),
                  k_bytes = esa_mask_order_bytes(&sizes, 1);
    int32_t *q = esa_mem_alloc(&mask->mem, q_bytes), *k = esa_mem_alloc(&mask->mem, k_bytes);
    if (!q || !k) {
        esa_mem_free(&mask->mem, q, q_bytes);
        esa_mem_free(&mask->mem, k, k_bytes);
        return 0;
    }
    free_orders(mask);
    mask->Hkv = Hkv;
    mask->perm_q = q;
    mask->perm_k = k;
    mask->ordered = 0;
    return 1;
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
    if ((src->fine && !esa_mask_add_fine(m, src->fine)) ||
        (src->Hkv && !esa_mask_add_orders(m, src->Hkv))) {
        esa_mask_free(m);
        return NULL;
    }
    return m;
}

/* Copies the lists, orders and facts of a mask on a device to a CPU mask of the same geometry. */
static esa_status download(esa_mask *copy, const esa_mask *mask)
{
    const esa_device_heap *dev = &mask->heap;
    const int64_t counts = count_bytes(copy), indices = index_bytes(copy);
    int64_t facts[ESA_FACTS];
    ESA_TRY(dev->download(dev->ordinal, copy->count, mask->count, counts, NULL));
    ESA_TRY(dev->download(dev->ordinal, copy->index, mask->index, indices, NULL));
    ESA_TRY(dev->download(dev->ordinal, facts, mask->facts, (int64_t)sizeof facts, NULL));
    copy->existing = facts[0];
    if (mask->fine) {
        ESA_TRY(dev->download(dev->ordinal, copy->fine_count, mask->fine_count, counts, NULL));
        ESA_TRY(dev->download(dev->ordinal, copy->fine_index, mask->fine_index, indices, NULL));
    }
    if (mask->ordered) {
        ESA_TRY(dev->download(dev->ordinal, copy->perm_q, mask->perm_q,
                              esa_mask_order_bytes(mask, 0), NULL));
        ESA_TRY(dev->download(dev->ordinal, copy->perm_k, mask->perm_k,
                              esa_mask_order_bytes(mask, 1), NULL));
        copy->ordered = 1;
    }
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

/* Fills the lists (count, index) of the mask from bits. */
static void lists_from_bits(const esa_mask *mask, int32_t *count, uint16_t *index,
                            const uint8_t *bits)
{
    const int64_t rows = mask->B * mask->H * mask->nq, pitch = esa_ceil_div(mask->nk, 8);
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *b = bits + r * pitch; /* [ceil(nk/8)] */
        uint16_t *list = index + r * mask->cap;
        int32_t n = 0;
        for (int64_t byte = 0; byte < pitch; byte++) {
            if (!b[byte]) continue; /* most bytes of a sparse mask are 0 */
            const int64_t end = esa_min64(mask->nk, 8 * byte + 8);
            for (int64_t j = 8 * byte; j < end; j++)
                if (b[byte] >> (j & 7) & 1) list[n++] = (uint16_t)j;
        }
        count[r] = n;
    }
}

void esa_mask_set_bits(esa_mask *mask, const uint8_t *bits, const uint8_t *fine)
{
    lists_from_bits(mask, mask->count, mask->index, bits);
    if (mask->fine_count && fine)
        lists_from_bits(mask, mask->fine_count, mask->fine_index, fine);
    else if (mask->fine_count)
        memset(mask->fine_count, 0, (size_t)count_bytes(mask));
    mask->filled = 1;
}

void esa_mask_write_bits(uint8_t *bits, const esa_mask *mask, const int32_t *count,
                         const uint16_t *index)
{
    const int64_t rows = mask->B * mask->H * mask->nq, pitch = esa_ceil_div(mask->nk, 8);
    memset(bits, 0, (size_t)(rows * pitch));
    for (int64_t r = 0; r < rows; r++)
        for (int32_t c = 0; c < count[r]; c++) {
            const uint16_t j = index[r * mask->cap + c];
            bits[r * pitch + j / 8] |= (uint8_t)(1u << (j % 8));
        }
}

static int64_t listed(const esa_mask *mask, const int32_t *count)
{
    const int64_t rows = mask->B * mask->H * mask->nq;
    int64_t n = 0;
    for (int64_t r = 0; r < rows; r++) n += count[r];
    return n;
}

int64_t esa_mask_kept(const esa_mask *mask) { return listed(mask, mask->count); }

int64_t esa_mask_fine(const esa_mask *mask)
{
    return mask->fine_count ? listed(mask, mask->fine_count) : 0;
}

esa_status esa_mask_get_info(const esa_mask *mask, esa_mask_info *info)
{
    if (!mask || !info) return ESA_ERR_ARGUMENT;
    if (info->struct_size != sizeof *info) return ESA_ERR_VERSION;
    int64_t existing = mask->existing, kept = 0, fine = 0;
    if (mask->heap.download && mask->filled) {
        int64_t facts[ESA_FACTS];
        ESA_TRY(mask->heap.download(mask->heap.ordinal, facts, mask->facts, (int64_t)sizeof facts,
                                    NULL));
        existing = facts[0];
        kept = facts[1];
        fine = mask->fine ? facts[2] : 0;
    } else if (mask->filled) {
        kept = esa_mask_kept(mask);
        fine = esa_mask_fine(mask);
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
    r.fine = mask->fine;
    r.fine_blocks = fine;
    r.layout = mask->layout;
    *info = r;
    return ESA_OK;
}
