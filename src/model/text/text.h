/* text.h - the text part of a model: one or two pairs of a tokenizer and an encoder, which turn a
 * prompt into embeddings.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     esa_text_make(env, &part, &esa_t5_text, &config);   compares the files, opens the tokenizers
 *     esa_text_load(part);                                loads the encoders
 *     esa_text_encode(part, &text, "a prompt"); */
#ifndef ESA_MODEL_TEXT_H
#define ESA_MODEL_TEXT_H

#include "model/part/part.h"
#include "model/text/tokenizer.h"

typedef struct esa_text_part esa_text_part;

/* How a family turns prompts into embeddings. */
typedef struct esa_text_kind {
    int32_t encoders; /* 1 or 2 */
    /* Makes encoder i (part.h); *vocab = the ids that its tokenizer may give. */
    esa_status (*make)(const esa_part_env *env, esa_part **encoder, int32_t *vocab,
                       const void *config, int32_t i);
    /* As esa_text_encode. */
    esa_status (*encode)(esa_text_part *part, esa_text *text, const char *prompt);
} esa_text_kind;

extern const esa_text_kind esa_t5_text; /* t5_text.c; config: esa_umt5_config */
/* hunyuan_text.c; config: esa_causal_config[2], of Llama and CLIP. As HunyuanVideoPipeline does it,
 * nothing is cleaned. Llama gets the prompt in its template, and the states of the template's first
 * ESA_HUNYUAN_CROP tokens are dropped. CLIP gets the prompt alone. */
extern const esa_text_kind esa_hunyuan_text;

struct esa_text_part {
    const esa_text_kind *kind;
    const void *config;
    esa_ctx *ctx;
    int32_t loaded; /* 1: encode may be called */
    esa_tokenizer *words[2];
    esa_part *encoder[2];
};

/* Fails for files that do not fit, and for tokenizers that cannot be opened. config must outlive
 * the part. */
esa_status esa_text_make(const esa_part_env *env, esa_text_part **part, const esa_text_kind *kind,
                         const void *config);
esa_status esa_text_load(esa_text_part *part);
void esa_text_free(esa_text_part *part); /* accepts NULL */
void esa_text_memory(const esa_text_part *part, int64_t *parameters, int64_t *held,
                     int64_t *mapped);
/* Fills text->data [rows], pooled and valid; the caller has set data to zero. Fails with
 * ESA_ERR_ARGUMENT if the prompt is not UTF-8 or longer than ESA_PROMPT_MAX. */
esa_status esa_text_encode(esa_text_part *part, esa_text *text, const char *prompt);

/* Fails with ESA_ERR_ARGUMENT if there is no id, or one outside the vocabulary. */
esa_status esa_text_check_ids(esa_ctx *ctx, const int32_t *ids, int64_t n, int32_t vocab);

#endif
