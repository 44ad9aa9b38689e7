/* tokenizer.h - text to the ids of a SentencePiece vocabulary, as transformers' T5 tokenizers give
 * them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Read are spiece.model (vocabulary and normalisation, by libsentencepiece) and
 * tokenizer_config.json (which strings are special). Special tokens written out in a text ("</s>",
 * "<extra_id_0>") become their ids, and what stands between them is cut into pieces by itself. At
 * the end comes eos; a text that is too long loses its last tokens, not its eos.
 *
 * Where this differs from transformers: its normaliser goes by graphemes and drops or keeps marks
 * that SentencePiece composes, so texts with letters and accents as separate characters (NFD) may
 * get other ids there. Such text is normalised here the way the vocabulary was trained.
 * docs/engine.md has examples. */
#ifndef ESA_MODEL_TOKENIZER_H
#define ESA_MODEL_TOKENIZER_H

#include "ctx/ctx.h"

typedef struct esa_tokenizer esa_tokenizer;

/* folder: with spiece.model and tokenizer_config.json. vocab: ids must be below it (0: any). ctx is
 * kept. ESA_ERR_IO, ESA_ERR_FORMAT, ESA_ERR_MISMATCH (more pieces than vocab), ESA_ERR_MEMORY;
 * ESA_ERR_UNSUPPORTED in a build without libsentencepiece. */
esa_status esa_tokenizer_open(esa_ctx *ctx, esa_tokenizer **tokenizer, const char *folder,
                              int32_t vocab);
void esa_tokenizer_free(esa_tokenizer *tokenizer);

/* ids[max] gets the ids of text (valid UTF-8) with eos last, *count of them; the rest of ids is
 * filled with pad. *total (NULL allowed) is how many there would be without the limit. max >= 1. */
esa_status esa_tokenizer_encode(esa_tokenizer *tokenizer, const char *text, int32_t *ids,
                                int32_t max, int32_t *count, int32_t *total);

#endif
