/* text_part.h - turns a prompt into embeddings: cleaning, tokenizer and encoder as one part.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_TEXT_PART_H
#define ESA_MODEL_TEXT_PART_H

#include "model/config.h"
#include "model/part.h"

typedef struct esa_text_part esa_text_part;

/* Checks the names and shapes of the encoder, and opens the tokenizer once. */
esa_status esa_text_part_check(const esa_part_env *env, const esa_umt5_config *config);
/* env->nn must outlive the part. */
esa_status esa_text_part_open(const esa_part_env *env, esa_text_part **part,
                              const esa_umt5_config *config);
void esa_text_part_free(esa_text_part *part);
void esa_text_part_memory(const esa_text_part *part, int64_t *parameters, int64_t *held,
                          int64_t *mapped);
/* Writes out f32 [rows][d_model]: the states of up to `rows` tokens, then zeros. Fails with
 * ESA_ERR_ARGUMENT if the prompt is not UTF-8 or longer than ESA_PROMPT_MAX. */
esa_status esa_text_part_encode(esa_text_part *part, float *out, const char *prompt, int32_t rows);

#endif
