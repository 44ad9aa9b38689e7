/* bpe_split.c - see bpe.h. The regular expressions of Llama 3 and CLIP, written out.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Llama 3:
 *   (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|
 *   \s*[\r\n]+|\s+(?!\S)|\s+
 * CLIP:
 *   's|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+
 * CLIP as transformers 5 writes it tries <\|startoftext\|> and <\|endoftext\|> first. */
#include <string.h>
#include "model/text/bpe.h"
#include "model/text/prompt.h"
#include "model/text/unicode.h"

enum { AT_END = -1 };

/* The class of the character at s, with its length in *n; AT_END at the end. */
static int32_t class_at(const char *s, const char *end, int32_t *n)
{
    *n = 0;
    return s < end ? esa_char_class(esa_utf8_next(s, n)) : AT_END;
}

/* Behind the run of characters of one class. */
static const char *run_end(const char *s, const char *end, int32_t class)
{
    int32_t n;
    while (class_at(s, end, &n) == class) s += n;
    return s;
}

/* The length of 's, 't, 're, 've, 'm, 'll or 'd at s, or 0. In any case (fold), a long s (U+017F)
 * is an s. */
static int32_t contraction(const char *s, const char *end, int32_t fold)
{
    const int64_t left = end - s;
    if (left < 2 || s[0] != '\'') return 0;
    if (fold && left >= 3 && memcmp(s + 1, "\xc5\xbf", 2) == 0) return 3;
    const char up = fold ? 0x20 : 0, a = (char)(s[1] | up);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    const char b = left >= 3 ? (char)(s[2] | up) : 0;
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

static int32_t is_break(char c) { return c == '\r' || c == '\n'; }

/* The end of the white space word at s. */
static const char *space_end(const char *s, const char *end)
{
    const char *stop = run_end(s, end, ESA_CHAR_SPACE), *last = s;
    for (const char *p = stop; p > s; p--)
        if (is_break(p[-1])) return p; /* up to the last line break of the run */
    if (stop == end) return stop;
    int32_t n;
    for (const char *p = s; p < stop; p += n) { /* the last one goes with what follows */
        last = p;
        esa_utf8_next(p, &n);
    }
    return last > s ? last : stop;
}

static const char *llama_end(const char *s, const char *end)
{
    int32_t n, n2;
    const int32_t k = contraction(s, end, 1);
    if (k) return s + k;
    const int32_t class = class_at(s, end, &n), next = class_at(s + n, end, &n2);
    if (class == ESA_CHAR_LETTER) return run_end(s, end, ESA_CHAR_LETTER);
    if (class == ESA_CHAR_NUMBER) {
        const char *p = s;
        for (int32_t i = 0; i < 3 && class_at(p, end, &n) == ESA_CHAR_NUMBER; i++) p += n;
        return p;
    }
    if (next == ESA_CHAR_LETTER && !is_break(*s)) return run_end(s + n, end, ESA_CHAR_LETTER);
    if (class == ESA_CHAR_OTHER || (*s == ' ' && next == ESA_CHAR_OTHER)) {
        const char *p = run_end(s + (class == ESA_CHAR_SPACE), end, ESA_CHAR_OTHER);
        while (p < end && is_break(*p)) p++;
        return p;
    }
    return space_end(s, end);
}

static const char *clip_end(const char *s, const char *end)
{
    int32_t n;
    const int32_t k = contraction(s, end, 0), class = class_at(s, end, &n);
    if (k) return s + k;
    return class == ESA_CHAR_NUMBER ? s + n : run_end(s, end, class);
}

/* A name of a special token is one word for the first expression, and three for the second, which
 * the byte level brings along: "<|", "endoftext", "|>". Returns the length of the name at s. */
static int32_t name_at(const char *s, const char *end)
{
    static const char *const names[] = { "<|startoftext|>", "<|endoftext|>" };
    for (int32_t i = 0; i < 2; i++) {
        const int32_t n = (int32_t)strlen(names[i]);
        if (end - s >= n && memcmp(s, names[i], (size_t)n) == 0) return n;
    }
    return 0;
}

const char *esa_bpe_word(int32_t split, const char *s, const char *end, const char **word,
                         int32_t *inner)
{
    if (split != ESA_BPE_LLAMA) s = run_end(s, end, ESA_CHAR_SPACE);
    *word = s;
    if (s == end) return NULL;
    if (split == ESA_BPE_LLAMA) return llama_end(s, end);
    if (*inner > 0) { /* within a name: *inner bytes are left */
        const int32_t part = *inner == 2 ? 2 : *inner - 2;
        *inner -= part;
        return s + part;
    }
    const int32_t name = split == ESA_BPE_CLIP_NAMES ? name_at(s, end) : 0;
    if (!name) return clip_end(s, end);
    *inner = name - 2;
    return s + 2;
}
