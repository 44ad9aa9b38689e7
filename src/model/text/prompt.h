/* prompt.h - prompts as diffusers' pipelines clean them, before they are cut into tokens.
 * SPDX-License-Identifier: Apache-2.0
 *
 * In this order: HTML character references are replaced, twice ("&amp;lt;" becomes "<"), by the
 * rules of Python's html.unescape; every stretch of white space (Unicode's) becomes one space; none
 * is left at the ends. Where the ftfy package is installed, diffusers runs ftfy.fix_text first,
 * which mends text of broken encodings and straightens quotes; this is not done here: text that
 * needs it has to be mended before. */
#ifndef ESA_MODEL_PROMPT_H
#define ESA_MODEL_PROMPT_H

#include "ctx/ctx.h"

/* Longest prompt in characters. The text encoder sees 512 tokens, and no vocabulary has pieces of
 * more than 16 characters: what stands behind this could not reach the model, so it is refused
 * rather than dropped. */
#define ESA_PROMPT_MAX 8192

/* text (UTF-8, any length) cleaned into a new string in a block of *bytes (from ctx's allocator;
 * free with esa_mem_free). ESA_ERR_ARGUMENT for invalid UTF-8 (with the position) and for more than
 * ESA_PROMPT_MAX characters; ESA_ERR_MEMORY. */
esa_status esa_prompt_clean(esa_ctx *ctx, char **out, int64_t *bytes, const char *text);

/* The character that begins at s, its length in *n; -1 where the bytes are not UTF-8 (overlong
 * forms, surrogates, above U+10FFFF). s ends with a 0. */
int32_t esa_utf8_next(const char *s, int32_t *n);

/* html_entities.c: records "name\0text\0" in order of the names' bytes (with the ';' where they
 * need one), and where they begin: 4096 times the string plus the position in it. */
extern const int32_t esa_html_entity_count;
extern const char *const esa_html_entity_text[];
extern const uint16_t esa_html_entity_at[];

#endif
