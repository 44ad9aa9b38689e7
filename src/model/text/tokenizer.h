/* tokenizer.h - turns text into ids, as transformers' tokenizers do: SentencePiece (T5, UMT5) and
 * byte-level BPE (Llama 3, CLIP).
 * SPDX-License-Identifier: Apache-2.0
 *
 * A folder with spiece.model is read through libsentencepiece (vocabulary and normalisation), with
 * the special strings of tokenizer_config.json. A folder without it, but with tokenizer.json, is
 * byte-level BPE and needs no library; other kinds of tokenizer.json are refused. Special tokens in
 * a text ("</s>", "<|eot_id|>") become their ids, and the text between them is split on its own.
 * The model's frame is added: eos behind a T5 text, bos before one of Llama, both around one of
 * CLIP. A text that is too long loses its last tokens, but not its frame.
 *
 * One difference from transformers, for SentencePiece only: its normaliser works on graphemes, and
 * drops or keeps marks that SentencePiece composes, so text with letters and accents as separate
 * characters (NFD) may get other ids there. Here such text is normalised as in the training of the
 * vocabulary. docs/engine.md has examples. */
#ifndef ESA_MODEL_TOKENIZER_H
#define ESA_MODEL_TOKENIZER_H

#include "base/status.h"
#include "ctx/ctx.h"

typedef struct esa_tokenizer esa_tokenizer;

/* Opens a folder. Ids must be below vocab (0: any). The tokenizer keeps ctx. Fails with ESA_ERR_IO,
 * ESA_ERR_FORMAT, ESA_ERR_MISMATCH (ids beyond vocab), ESA_ERR_MEMORY, or ESA_ERR_UNSUPPORTED (a
 * tokenizer.json of another kind; spiece.model in a build without libsentencepiece). */
esa_status esa_tokenizer_open(esa_ctx *ctx, esa_tokenizer **tokenizer, const char *folder,
                              int32_t vocab);
void esa_tokenizer_free(esa_tokenizer *tokenizer);

/* Writes the ids of text (UTF-8) with their frame to ids[max], and their number to *count; fills
 * the rest of ids with pad. *total (may be NULL) is their number without the limit. max >= 1, and 2
 * for CLIP. Fails with ESA_ERR_ARGUMENT (no room; BPE: text that is not UTF-8 or has more than a
 * megabyte) or ESA_ERR_MEMORY. */
esa_status esa_tokenizer_encode(const esa_tokenizer *tokenizer, const char *text, int32_t *ids,
                                int32_t max, int32_t *count, int32_t *total);

#endif
