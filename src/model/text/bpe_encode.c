/* bpe_encode.c - see bpe.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>
#include "model/text/bpe.h"
#include "model/text/prompt.h"
#include "model/text/unicode.h"

#define MAX_TEXT (1 << 20) /* bytes */

typedef struct symbol {
    int32_t id, prev, next; /* prev and next: -1 at the ends; id -1: merged into its left one */
} symbol;

typedef struct candidate {
    int32_t rank, at, id; /* the symbol at `at` and its next one may become id */
} candidate;

/* Memory for one call, and where the ids go. */
typedef struct work {
    const esa_bpe *bpe;
    symbol *symbols; /* [bytes of the longest word] */
    candidate *heap; /* [3 * those] */
    int64_t heaped;
    char *normal; /* the normalised text */
    int32_t *chars;
    void (*put)(void *user, int32_t id);
    void *user;
} work;

/* The lower rank first, then the one further left. */
static int32_t before(const candidate *a, const candidate *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static void push(work *w, int32_t at)
{
    const int32_t next = w->symbols[at].next;
    if (next < 0) return;
    const struct esa_bpe_merge *m = esa_bpe_merges_find(&w->bpe->merges, w->symbols[at].id,
                                                        w->symbols[next].id);
    if (!m) return;
    const candidate c = { m->rank, at, m->id };
    int64_t i = w->heaped++;
    for (; i > 0 && before(&c, &w->heap[(i - 1) / 2]); i = (i - 1) / 2)
        w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = c;
}

static candidate pop(work *w)
{
    const candidate top = w->heap[0], last = w->heap[--w->heaped];
    int64_t i = 0;
    for (int64_t child = 1; child < w->heaped; child = 2 * i + 1) {
        if (child + 1 < w->heaped && before(&w->heap[child + 1], &w->heap[child])) child++;
        if (!before(&w->heap[child], &last)) break;
        w->heap[i] = w->heap[child];
        i = child;
    }
    w->heap[i] = last;
    return top;
}

/* Merges the symbols of a word. A candidate that is out of date counts if its two symbols now make
 * the same id by another pair, as in the `tokenizers` package. */
static void merge(work *w, int32_t count)
{
    symbol *s = w->symbols;
    w->heaped = 0;
    for (int32_t i = 0; i + 1 < count; i++) push(w, i);
    while (w->heaped) {
        const candidate c = pop(w);
        const int32_t next = s[c.at].next;
        if (s[c.at].id < 0 || next < 0) continue;
        const struct esa_bpe_merge *m = esa_bpe_merges_find(&w->bpe->merges, s[c.at].id,
                                                            s[next].id);
        if (!m || m->id != c.id) continue;
        s[c.at].id = c.id;
        s[c.at].next = s[next].next;
        s[next].id = -1;
        if (s[c.at].next >= 0) s[s[c.at].next].prev = c.at;
        if (s[c.at].prev >= 0) push(w, s[c.at].prev);
        push(w, c.at);
    }
}

static int32_t whole_word(const esa_bpe *bpe, const char *s, int64_t bytes)
{
    char text[ESA_BPE_MAX_TOKEN];
    int64_t n = 0;
    for (int64_t i = 0; i < bytes; i++) {
        if (n + 2 > ESA_BPE_MAX_TOKEN) return -1;
        n += esa_bpe_byte(text + n, (uint8_t)s[i]);
    }
    return esa_bpe_words_find(&bpe->words, text, n);
}

static void put_word(work *w, const char *s, int64_t bytes)
{
    const esa_bpe *bpe = w->bpe;
    const int32_t whole = bpe->whole_words ? whole_word(bpe, s, bytes) : -1;
    if (whole >= 0) {
        w->put(w->user, whole);
        return;
    }
    const int32_t count = (int32_t)bytes;
    for (int32_t i = 0; i < count; i++)
        w->symbols[i] = (symbol){ bpe->symbol[i == count - 1][(uint8_t)s[i]], i - 1,
                                  i < count - 1 ? i + 1 : -1 };
    merge(w, count);
    for (int32_t i = 0; i >= 0; i = w->symbols[i].next) w->put(w->user, w->symbols[i].id);
}

static void put_words(work *w, const char *s, const char *end)
{
    int32_t inner = 0;
    while (s) {
        const char *word = s;
        s = esa_bpe_word(w->bpe->split, s, end, &word, &inner);
        if (s) put_word(w, word, s - word);
    }
}

/* The longest added token at s, or NULL. */
static const esa_bpe_added *added_at(const esa_bpe *bpe, const char *s, const char *end,
                                     int32_t normalized)
{
    const esa_bpe_added *best = NULL;
    for (int32_t i = 0; i < bpe->added_count; i++) {
        const esa_bpe_added *a = &bpe->added[i];
        if (a->normalized == normalized && a->text[0] == *s &&
            (!best || a->length > best->length) && a->length <= end - s &&
            memcmp(s, a->text, (size_t)a->length) == 0)
            best = a;
    }
    return best;
}

int64_t esa_bpe_normalize(char *out, int32_t *chars, const char *s, int64_t bytes)
{
    int32_t *in = chars + ESA_NFC_GROWTH * bytes, n;
    int64_t count = 0, at = 0;
    for (const char *p = s; p < s + bytes; p += n) in[count++] = esa_utf8_next(p, &n);
    count = esa_text_nfc(chars, in, count);
    for (int64_t i = 0; i < count; i++) {
        int32_t low[2];
        const int32_t k = esa_char_lower(chars[i], low);
        for (int32_t j = 0; j < k; j++) at += esa_utf8_put(out + at, low[j]);
    }
    out[at] = 0;
    return at;
}

/* Puts the ids of [s, end): first those of added tokens, then the words between them. A text is
 * searched twice: as it is, and between those tokens again after its normalisation. */
static void put_text(work *w, const char *s, const char *end, int32_t normalized)
{
    const char *from = s;
    for (;; s++) {
        const esa_bpe_added *token = s < end ? added_at(w->bpe, s, end, normalized) : NULL;
        if (s < end && !token) continue;
        if (s > from && normalized) {
            put_words(w, from, s);
        } else if (s > from && w->bpe->split == ESA_BPE_LLAMA) {
            put_text(w, from, s, 1);
        } else if (s > from) {
            const int64_t n = esa_bpe_normalize(w->normal, w->chars, from, s - from);
            put_text(w, w->normal, w->normal + n, 1);
        }
        if (s == end) return;
        w->put(w->user, token->id);
        from = s + token->length;
        s = from - 1; /* the loop adds one */
    }
}

static esa_status encode(const esa_tokenizer *t, const char *text,
                         void (*put)(void *user, int32_t id), void *user)
{
    const esa_bpe *bpe = (const esa_bpe *)t;
    int64_t bytes;
    ESA_TRY(esa_utf8_check(t->ctx, text, &bytes, NULL));
    if (bytes > MAX_TEXT)
        return esa_fail(t->ctx, ESA_ERR_ARGUMENT, "the prompt has %lld bytes, expected at most %d",
                        (long long)bytes, MAX_TEXT);
    const int64_t longest = bpe->split == ESA_BPE_LLAMA ? bytes : ESA_BPE_NORMAL(bytes);
    esa_carve carve = { NULL, 0 };
    work w = { 0 };
    char *base = NULL;
    for (int32_t pass = 0; pass < 2; pass++) {
        w = (work){ .bpe = bpe, .put = put, .user = user };
        w.symbols = esa_carve_take(&carve, longest * (int64_t)sizeof(symbol));
        w.heap = esa_carve_take(&carve, 3 * longest * (int64_t)sizeof(candidate));
        w.normal = esa_carve_take(&carve, ESA_BPE_NORMAL(bytes));
        w.chars = esa_carve_take(&carve, ESA_BPE_WORK(bytes) * (int64_t)sizeof(int32_t));
        if (pass) break;
        base = esa_mem_alloc(&t->ctx->mem, carve.used);
        if (!base)
            return esa_fail(t->ctx, ESA_ERR_MEMORY, "out of memory to split a prompt into tokens");
        carve = (esa_carve){ base, 0 };
    }
    put_text(&w, text, text + bytes, 0);
    esa_mem_free(&t->ctx->mem, base, carve.used);
    return ESA_OK;
}

static void free_bpe(esa_tokenizer *t)
{
    esa_bpe *bpe = (esa_bpe *)t;
    const esa_allocator *mem = &t->ctx->mem;
    for (int32_t i = 0; i < bpe->added_count; i++)
        esa_mem_free(mem, bpe->added[i].name, bpe->added[i].block_bytes);
    esa_mem_free(mem, bpe->added, ESA_BPE_MAX_ADDED * (int64_t)sizeof(esa_bpe_added));
    esa_mem_free(mem, bpe->words.pool, bpe->words.pool_bytes);
    esa_mem_free(mem, bpe->words.slot, bpe->words.slots * (int64_t)sizeof *bpe->words.slot);
    esa_mem_free(mem, bpe->merges.slot, bpe->merges.slots * (int64_t)sizeof *bpe->merges.slot);
    esa_mem_free(mem, bpe, sizeof *bpe);
}

const esa_tokenizer_kind esa_bpe_kind = { encode, free_bpe };
