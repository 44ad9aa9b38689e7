/* prompt.h - cleans prompts as diffusers' pipelines do, before they are split into tokens.
 * SPDX-License-Identifier: Apache-2.0
 *
 * First, HTML character references are replaced, twice ("&amp;lt;" becomes "<"), by the rules of
 * Python's html.unescape. Then every run of white space (Unicode's) becomes one space, and those at
 * the ends are removed. If the ftfy package is installed, diffusers also runs ftfy.fix_text, which
 * repairs broken encodings and straightens quotes; this is not done here. */
#ifndef ESA_MODEL_PROMPT_H
#define ESA_MODEL_PROMPT_H

#include "base/status.h"
#include "ctx/ctx.h"

/* Longest prompt in characters. The text encoder reads 512 tokens, and no vocabulary has pieces of
 * more than 16 characters. Text beyond this could not reach the model, so it is refused instead of
 * dropped. */
#define ESA_PROMPT_MAX 8192

/* Cleans text (UTF-8, any length) into a new string in a block of *bytes from ctx's allocator; free
 * it with esa_mem_free. Fails with ESA_ERR_ARGUMENT for invalid UTF-8 (with the position) and for
 * more than ESA_PROMPT_MAX characters, or with ESA_ERR_MEMORY. */
esa_status esa_prompt_clean(esa_ctx *ctx, char **out, int64_t *bytes, const char *text);

/* The same without cleaning: text is only checked. */
esa_status esa_prompt_copy(esa_ctx *ctx, char **out, int64_t *bytes, const char *text);

/* Puts text into the template of HunyuanVideoPipeline, for its Llama encoder. Nothing is cleaned.
 * With the vocabulary of Llama 3, the first ESA_HUNYUAN_CROP ids (<|begin_of_text|> included) come
 * from the template; their states are dropped. Memory and errors as above. */
#define ESA_HUNYUAN_CROP 95
esa_status esa_prompt_hunyuan(esa_ctx *ctx, char **out, int64_t *bytes, const char *text);

/* The character at s, with its length in *n; -1 if the bytes are not UTF-8 (overlong forms,
 * surrogates, above U+10FFFF). s ends with a 0. */
int32_t esa_utf8_next(const char *s, int32_t *n);
/* Writes the character c as UTF-8 (1 to 4 bytes, no final 0), and returns its length. */
int32_t esa_utf8_put(char *out, int32_t c);
/* Counts the bytes and the characters (chars may be NULL) of text. Fails with ESA_ERR_ARGUMENT and
 * the position of the first byte that is not UTF-8. */
esa_status esa_utf8_check(esa_ctx *ctx, const char *text, int64_t *bytes, int64_t *chars);

/* html_entities.c: records "name\0text\0", sorted by the bytes of the names (which include the ';'
 * if it is required), and their positions: 4096 * string + offset in it. */
extern const int32_t esa_html_entity_count;
extern const char *const esa_html_entity_text[];
extern const uint16_t esa_html_entity_at[];

#endif
