/* t5_text.h - turns a prompt into embeddings: cleaning, tokenizer and encoder as one part.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_T5_TEXT_H
#define ESA_MODEL_T5_TEXT_H

#include "model/config.h"
#include "model/part.h"

typedef struct esa_t5_text esa_t5_text;

/* How a family treats prompts. */
enum {
    ESA_T5_CLEAN = 1, /* cleans them first (prompt.h) */
    ESA_T5_PAD = 2    /* encodes the padding too, and without a mask; else its rows are zeros */
};

/* Checks the names and shapes of the encoder, and opens the tokenizer once. */
esa_status esa_t5_text_check(const esa_part_env *env, const esa_umt5_config *config);
/* env->nn must outlive the part. flags: ESA_T5_*. */
esa_status esa_t5_text_open(const esa_part_env *env, esa_t5_text **part,
                            const esa_umt5_config *config, int32_t flags);
void esa_t5_text_free(esa_t5_text *part);
void esa_t5_text_memory(const esa_t5_text *part, int64_t *parameters, int64_t *held,
                        int64_t *mapped);
/* Writes out f32 [rows][d_model]: the states of up to `rows` tokens, then padding. *valid = the
 * number of tokens. Fails with ESA_ERR_ARGUMENT if the prompt is not UTF-8 or longer than
 * ESA_PROMPT_MAX. */
esa_status esa_t5_text_encode(esa_t5_text *part, float *out, const char *prompt, int32_t rows,
                              int64_t *valid);

#endif
