/* causal.h - text encoders with causal attention: LlamaModel and CLIPTextModel.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Llama: RMS norms, rotated queries and keys, heads that share keys, a feed-forward gated by SiLU,
 * no biases. CLIP: layer norms, a table of positions, a feed-forward with quick GELU. A token sees
 * only those before it, so padding behind a text changes nothing: callers give tokens without it.
 */
#ifndef ESA_MODEL_CAUSAL_H
#define ESA_MODEL_CAUSAL_H

#include "model/config/config.h"
#include "model/part/part.h"

/* folder: that of the part, text_encoder or text_encoder_2. With ESA_HOLD_AUTO an encoder of more
 * than 1 GB stays in its file, because each layer is read once per prompt. */
esa_status esa_causal_make(const esa_part_env *env, esa_part **encoder,
                           const esa_causal_config *config, const char *folder);

/* Computes out [n][d], f32 in host memory, from ids[n], n >= 1. Llama: the state after all layers
 * but config.skip, without the last norm. CLIP: the normed state. Fails with ESA_ERR_ARGUMENT for
 * an id outside the vocabulary or more tokens than positions, or ESA_ERR_MEMORY. */
esa_status esa_causal_encode(esa_part *encoder, float *out, const int32_t *ids, int64_t n);

#endif
