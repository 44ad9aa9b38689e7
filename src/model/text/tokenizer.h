/* tokenizer.h - turns text into the ids of a SentencePiece vocabulary, as transformers' T5
 * tokenizers do.
 * SPDX-License-Identifier: Apache-2.0
 *
 * It reads spiece.model (vocabulary and normalisation, through libsentencepiece) and
 * tokenizer_config.json (the special strings). Special tokens in a text ("</s>", "<extra_id_0>")
 * become their ids, and the text between them is split into pieces on its own. The last id is eos;
 * a text that is too long loses its last tokens, but not its eos.
 *
 * One difference from transformers: its normaliser works on graphemes, and drops or keeps marks
 * that SentencePiece composes, so text with letters and accents as separate characters (NFD) may
 * get other ids there. Here such text is normalised as in the training of the vocabulary.
 * docs/engine.md has examples. */
#ifndef ESA_MODEL_TOKENIZER_H
#define ESA_MODEL_TOKENIZER_H

#include "base/status.h"
#include "ctx/ctx.h"

typedef struct esa_tokenizer esa_tokenizer;

/* Opens a folder with spiece.model and tokenizer_config.json. Ids must be below vocab (0: any). The
 * tokenizer keeps ctx. Fails with ESA_ERR_IO, ESA_ERR_FORMAT, ESA_ERR_MISMATCH (more pieces than
 * vocab), ESA_ERR_MEMORY, or ESA_ERR_UNSUPPORTED in a build without libsentencepiece. */
esa_status esa_tokenizer_open(esa_ctx *ctx, esa_tokenizer **tokenizer, const char *folder,
                              int32_t vocab);
void esa_tokenizer_free(esa_tokenizer *tokenizer);

/* Writes the ids of text (valid UTF-8), eos last, to ids[max], and their number to *count; fills
 * the rest of ids with pad. *total (may be NULL) is their number without the limit. max >= 1. */
esa_status esa_tokenizer_encode(esa_tokenizer *tokenizer, const char *text, int32_t *ids,
                                int32_t max, int32_t *count, int32_t *total);

#endif
