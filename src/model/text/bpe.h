/* bpe.h - a byte-level BPE vocabulary and how a text is split before it is used.
 * SPDX-License-Identifier: Apache-2.0
 *
 * bpe_open.c and bpe_read.c fill the struct from tokenizer.json, bpe_table.c holds its tables,
 * bpe_split.c finds words, bpe_encode.c makes ids. */
#ifndef ESA_MODEL_BPE_H
#define ESA_MODEL_BPE_H

#include "model/text/tokenizer_kind.h"

#define ESA_BPE_MAX       (1 << 20) /* entries of vocab, and merges; Llama 3 has 280,147 merges */
#define ESA_BPE_MAX_TOKEN 1024      /* bytes of one entry; Llama 3 has 128 */
#define ESA_BPE_MAX_ADDED 4096      /* added tokens; Llama 3 has 256 */

/* How a text becomes words. */
enum {
    ESA_BPE_LLAMA = 0, /* Llama 3: everything is part of some word */
    ESA_BPE_CLIP,      /* CLIP: NFC and lower case, white space only separates */
    ESA_BPE_CLIP_NAMES /* CLIP as transformers 5 writes it: names of special tokens are matched */
};

/* Strings and their ids. */
typedef struct esa_bpe_words {
    char *pool; /* the strings one after the other, without a final 0 */
    int64_t pool_bytes, used;
    struct esa_bpe_word {
        int64_t at;
        int32_t bytes, id; /* bytes 0: a free slot */
    } *slot;
    int64_t slots; /* a power of two */
} esa_bpe_words;

/* Pairs of ids that are merged. */
typedef struct esa_bpe_merges {
    struct esa_bpe_merge {
        int32_t a, b, rank, id; /* a -1: a free slot */
    } *slot;
    int64_t slots;
} esa_bpe_merges;

typedef struct esa_bpe_added {
    char *name;       /* as the file has it; the block of block_bytes holds both strings */
    const char *text; /* as it is looked for; length without the final 0 */
    int64_t block_bytes, length;
    int32_t id, normalized;
} esa_bpe_added;

typedef struct esa_bpe {
    esa_tokenizer base;
    int32_t split;          /* ESA_BPE_LLAMA, ... */
    int32_t whole_words;    /* a word of the vocabulary is not taken apart (ignore_merges) */
    int32_t symbol[2][256]; /* ids of single bytes: inside a word, and as its last byte */
    esa_bpe_words words;
    esa_bpe_merges merges;
    esa_bpe_added *added; /* [ESA_BPE_MAX_ADDED] */
    int32_t added_count;
} esa_bpe;

/* bpe_table.c. The first two make room for count entries and return 0 without memory; a string that
 * is added twice keeps its first id, a pair that is added twice its last. */
int32_t esa_bpe_words_make(const esa_allocator *mem, esa_bpe_words *w, int64_t count,
                           int64_t bytes);
int32_t esa_bpe_merges_make(const esa_allocator *mem, esa_bpe_merges *m, int64_t count);
void esa_bpe_words_add(esa_bpe_words *w, const char *text, int64_t bytes, int32_t id);
void esa_bpe_merges_add(esa_bpe_merges *m, int32_t a, int32_t b, int32_t rank, int32_t id);
int32_t esa_bpe_words_find(const esa_bpe_words *w, const char *text, int64_t bytes); /* or -1 */
const struct esa_bpe_merge *esa_bpe_merges_find(const esa_bpe_merges *m, int32_t a, int32_t b);
/* Vocabularies write a byte as one printable character. Writes it as UTF-8, returns its length. */
int32_t esa_bpe_byte(char out[2], uint8_t byte);

/* bpe_split.c. Finds the next word of [s, end), valid UTF-8: sets *word to its first byte, and
 * returns its end; NULL if there is none. *inner (0 at the start) is its own. */
const char *esa_bpe_word(int32_t split, const char *s, const char *end, const char **word,
                         int32_t *inner);

/* bpe_encode.c: the function table, and NFC with lower case. The result of n bytes has at most
 * ESA_BPE_NORMAL(n) bytes with its final 0: NFC makes UTF-8 at most three times as long, lower case
 * 1.5 times (test_unicode.c goes through all characters). work has ESA_BPE_WORK(n) characters. */
extern const esa_tokenizer_kind esa_bpe_kind;
#define ESA_BPE_NORMAL(n) (5 * (n) + 1)
#define ESA_BPE_WORK(n)   (5 * (n))
int64_t esa_bpe_normalize(char *out, int32_t *work, const char *s, int64_t bytes);

#endif
