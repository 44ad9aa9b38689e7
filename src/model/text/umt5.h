/* umt5.h - the T5 and UMT5 encoders: turn token ids into hidden states.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each layer has a T5 norm (no mean, no bias), attention without scale, and a feed-forward gated by
 * GELU(tanh); a norm ends the stack. Scores get a learned bias by distance, from a table of each
 * layer (UMT5) or of the first layer for all (T5): half of the buckets for each direction, one
 * bucket for each near distance, far distances by their logarithm. Every token is attended. Without
 * padding the result is that of a padding mask, because masked keys have weight 0 and the states of
 * padding are dropped. */
#ifndef ESA_MODEL_UMT5_H
#define ESA_MODEL_UMT5_H

#include "model/config/config.h"
#include "model/part/part.h"

/* With ESA_HOLD_AUTO an encoder of more than 1 GB stays in its file, whatever its type: each layer
 * is read once per prompt, so a copy would not pay. */
esa_status esa_umt5_make(const esa_part_env *env, esa_part **encoder,
                         const esa_umt5_config *config);

/* Computes out [n][d_model], f32 in host memory, from ids[n], n >= 1, when the encoder is loaded.
 * Fails with ESA_ERR_ARGUMENT for an id outside the vocabulary, or ESA_ERR_MEMORY. */
esa_status esa_umt5_encode(esa_part *encoder, float *out, const int32_t *ids, int64_t n);

/* The bucket for distance = key - query. */
int32_t esa_umt5_bucket(const esa_umt5_config *config, int64_t distance);

#endif
