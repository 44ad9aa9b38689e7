/* causal.h - text encoders with causal attention: LlamaModel and CLIPTextModel.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Llama: RMS norms, rotated queries and keys, heads that share keys, a feed-forward gated by SiLU,
 * no biases. CLIP: layer norms, a table of positions, a feed-forward with quick GELU. A token sees
 * only those before it, so padding behind a text changes nothing: callers give tokens without it.
 */
#ifndef ESA_MODEL_CAUSAL_H
#define ESA_MODEL_CAUSAL_H

#include "model/hunyuan_config.h"
#include "model/part.h"

typedef struct esa_causal esa_causal;

/* folder: that of the part, text_encoder or text_encoder_2. */
esa_status esa_causal_check(const esa_part_env *env, const esa_causal_config *config,
                            const char *folder);
/* Copies env; env->nn must outlive the encoder. With ESA_HOLD_AUTO an encoder of more than 1 GB
 * stays in its file, because each layer is read once per prompt. */
esa_status esa_causal_open(const esa_part_env *env, esa_causal **encoder,
                           const esa_causal_config *config, const char *folder);
void esa_causal_free(esa_causal *encoder);
void esa_causal_memory(const esa_causal *encoder, int64_t *parameters, int64_t *held,
                       int64_t *mapped);

/* Computes out [n][d], f32 in host memory, from ids[n], n >= 1. Llama: the state after all layers
 * but config.skip, without the last norm. CLIP: the normed state. Fails with ESA_ERR_ARGUMENT for
 * an id outside the vocabulary or more tokens than positions, or ESA_ERR_MEMORY. */
esa_status esa_causal_encode(esa_causal *encoder, float *out, const int32_t *ids, int64_t n);

#endif
