/* tokenizer_kind.h - what the kinds of tokenizers (SentencePiece, byte-level BPE) have in common.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A kind's object begins with struct esa_tokenizer. Its open function sets kind and ctx, and the
 * ids that frame a text. tokenizer.c does the rest: it frames, cuts and pads. */
#ifndef ESA_MODEL_TOKENIZER_KIND_H
#define ESA_MODEL_TOKENIZER_KIND_H

#include "model/text/tokenizer.h"

typedef struct esa_tokenizer_kind {
    /* Calls put for every id of text, in order, without the frame. */
    esa_status (*encode)(const esa_tokenizer *t, const char *text,
                         void (*put)(void *user, int32_t id), void *user);
    void (*free)(esa_tokenizer *t); /* accepts an object that was opened in part */
} esa_tokenizer_kind;

struct esa_tokenizer {
    const esa_tokenizer_kind *kind;
    esa_ctx *ctx;
    int32_t bos, eos; /* put around a text; -1: none */
    int32_t pad;      /* behind it; -1: unknown */
    int32_t largest;  /* the largest id */
};

/* sp_tokenizer.c: spiece.model and tokenizer_config.json of a folder. */
esa_status esa_sp_tokenizer_open(esa_ctx *ctx, esa_tokenizer **tokenizer, const char *folder);
/* bpe_open.c: tokenizer.json and tokenizer_config.json of a folder. */
esa_status esa_bpe_open(esa_ctx *ctx, esa_tokenizer **tokenizer, const char *folder);
/* The same from the text of tokenizer.json alone; the padding stays unknown. For tests. */
esa_status esa_bpe_open_memory(esa_ctx *ctx, esa_tokenizer **tokenizer, const char *text,
                               int64_t bytes);

/* A token in tokenizer_config.json is a string, or an object with a string as its content (as older
 * versions of transformers write it). NULL if it is neither. */
const char *esa_token_content(const void *json);

#endif
