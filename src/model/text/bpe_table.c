/* bpe_table.c - see bpe.h. Hash tables with open addresses, at most half full.
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>
#include "model/text/bpe.h"
#include "model/text/prompt.h"

static uint64_t mixed(uint64_t h)
{
    h ^= h >> 32;
    h *= UINT64_C(0x9e3779b97f4a7c15);
    return h ^ h >> 29;
}

static int64_t slots_for(int64_t count)
{
    int64_t slots = 16;
    while (slots < 2 * count) slots *= 2;
    return slots;
}

int32_t esa_bpe_words_make(const esa_allocator *mem, esa_bpe_words *w, int64_t count, int64_t bytes)
{
    w->slots = slots_for(count);
    w->pool_bytes = bytes;
    w->pool = esa_mem_alloc(mem, bytes);
    w->slot = esa_mem_zalloc(mem, w->slots * (int64_t)sizeof *w->slot);
    return w->pool && w->slot;
}

int32_t esa_bpe_merges_make(const esa_allocator *mem, esa_bpe_merges *m, int64_t count)
{
    m->slots = slots_for(count);
    m->slot = esa_mem_alloc(mem, m->slots * (int64_t)sizeof *m->slot);
    if (!m->slot) return 0;
    for (int64_t i = 0; i < m->slots; i++) m->slot[i].a = -1;
    return 1;
}

/* The slot that holds the string, or the free one where it belongs. */
static int64_t word_slot(const esa_bpe_words *w, const char *text, int64_t bytes)
{
    uint64_t h = UINT64_C(14695981039346656037);
    for (int64_t i = 0; i < bytes; i++) h = (h ^ (uint8_t)text[i]) * UINT64_C(1099511628211);
    int64_t at = (int64_t)(mixed(h) & (uint64_t)(w->slots - 1));
    while (w->slot[at].bytes && (w->slot[at].bytes != bytes ||
                                 memcmp(w->pool + w->slot[at].at, text, (size_t)bytes) != 0))
        at = (at + 1) & (w->slots - 1);
    return at;
}

void esa_bpe_words_add(esa_bpe_words *w, const char *text, int64_t bytes, int32_t id)
{
    struct esa_bpe_word *slot = &w->slot[word_slot(w, text, bytes)];
    if (slot->bytes) return;
    slot->at = w->used;
    slot->bytes = (int32_t)bytes;
    slot->id = id;
    memcpy(w->pool + w->used, text, (size_t)bytes);
    w->used += bytes;
}

int32_t esa_bpe_words_find(const esa_bpe_words *w, const char *text, int64_t bytes)
{
    const struct esa_bpe_word *slot = &w->slot[word_slot(w, text, bytes)];
    return slot->bytes ? slot->id : -1;
}

static int64_t merge_slot(const esa_bpe_merges *m, int32_t a, int32_t b)
{
    const uint64_t h = mixed((uint64_t)(uint32_t)a << 32 | (uint32_t)b);
    int64_t at = (int64_t)(mixed(h) & (uint64_t)(m->slots - 1));
    while (m->slot[at].a >= 0 && (m->slot[at].a != a || m->slot[at].b != b))
        at = (at + 1) & (m->slots - 1);
    return at;
}

void esa_bpe_merges_add(esa_bpe_merges *m, int32_t a, int32_t b, int32_t rank, int32_t id)
{
    m->slot[merge_slot(m, a, b)] = (struct esa_bpe_merge){ a, b, rank, id };
}

const struct esa_bpe_merge *esa_bpe_merges_find(const esa_bpe_merges *m, int32_t a, int32_t b)
{
    const struct esa_bpe_merge *slot = &m->slot[merge_slot(m, a, b)];
    return slot->a >= 0 ? slot : NULL;
}

/* Printable characters of Latin-1 stand for themselves, the other bytes for U+0100 and on. */
int32_t esa_bpe_byte(char out[2], uint8_t byte)
{
    int32_t c = byte;
    if (byte <= 0x20)
        c = 0x100 + byte;
    else if (byte >= 0x7f && byte <= 0xa0)
        c = 0x121 + byte - 0x7f;
    else if (byte == 0xad)
        c = 0x143;
    return esa_utf8_put(out, c);
}
