/* unicode.h - classes of characters, lower case and NFC, as the `tokenizers` package has them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The tables (unicode_tables.c) were made by asking tokenizers 0.23 about every code point. Its
 * parts have different versions of Unicode: classes 16.0, lower case 17.0, NFC 9.0. A character
 * that is newer belongs to no class and stays as it is. */
#ifndef ESA_MODEL_UNICODE_H
#define ESA_MODEL_UNICODE_H

#include <stdint.h>

/* Categories L* and N*, White_Space, everything else. */
enum { ESA_CHAR_OTHER = 0, ESA_CHAR_LETTER, ESA_CHAR_NUMBER, ESA_CHAR_SPACE };
int32_t esa_char_class(int32_t c);

/* Lower case of one character without its neighbours (a final sigma is like any other). Writes one
 * character, or two for U+0130, and returns how many. */
int32_t esa_char_lower(int32_t c, int32_t out[2]);

/* A character becomes at most ESA_NFC_GROWTH others while it is decomposed. */
#define ESA_NFC_GROWTH 4
/* Writes the canonical composition (NFC) of in[count] to out[ESA_NFC_GROWTH * count], and returns
 * how many characters it has. */
int64_t esa_text_nfc(int32_t *out, const int32_t *in, int64_t count);

/* unicode_tables.c. class and mark: first code point of a run in the upper 24 bits, its class or
 * combining class in the lower 8; before the first run, 0. lower: first, last, step, what is added.
 * part: a character and the one or two (else 0) that it decomposes to, sorted. pair: indices into
 * part of those that are composed again, sorted by their two parts. */
extern const int32_t esa_unicode_class_count, esa_unicode_mark_count, esa_unicode_lower_count,
    esa_unicode_part_count, esa_unicode_pair_count;
extern const uint32_t esa_unicode_class[], esa_unicode_mark[];
extern const int32_t esa_unicode_lower[][4];
extern const uint32_t esa_unicode_part[][3];
extern const uint16_t esa_unicode_pair[];

#endif
