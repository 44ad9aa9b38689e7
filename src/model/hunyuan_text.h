/* hunyuan_text.h - turns a prompt into the texts of HunyuanVideo: states of Llama and the pooled
 * vector of CLIP.
 * SPDX-License-Identifier: Apache-2.0
 *
 * As HunyuanVideoPipeline does it: nothing is cleaned. Llama gets the prompt in its template, and
 * the states of the template's first ESA_HUNYUAN_CROP tokens are dropped. CLIP gets the prompt
 * alone. */
#ifndef ESA_MODEL_HUNYUAN_TEXT_H
#define ESA_MODEL_HUNYUAN_TEXT_H

#include "model/family.h"
#include "model/hunyuan_config.h"

typedef struct esa_hunyuan_text esa_hunyuan_text;

/* Checks the names and shapes of both encoders, and opens both tokenizers once. */
esa_status esa_hunyuan_text_check(const esa_part_env *env, const esa_causal_config *llama,
                                  const esa_causal_config *clip);
/* env->nn must outlive the part. */
esa_status esa_hunyuan_text_open(const esa_part_env *env, esa_hunyuan_text **part,
                                 const esa_causal_config *llama, const esa_causal_config *clip);
void esa_hunyuan_text_free(esa_hunyuan_text *part);
void esa_hunyuan_text_memory(const esa_hunyuan_text *part, int64_t *parameters, int64_t *held,
                             int64_t *mapped);
/* Fills text->data with the states of up to text->rows tokens behind the template, text->valid with
 * their number, and text->pooled. Fails with ESA_ERR_ARGUMENT if the prompt is not UTF-8. */
esa_status esa_hunyuan_text_encode(esa_hunyuan_text *part, esa_text *text, const char *prompt);

#endif
