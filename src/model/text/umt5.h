/* umt5.h - the UMT5 encoder: token ids in, hidden states out. f32.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Per layer: T5 norm (no mean, no bias), attention without scale whose scores get a learned bias by
 * distance (a table of its own in every layer: half of the buckets for each direction, near
 * distances one by one, far ones by their logarithm), then a feed-forward gated by GELU(tanh); a
 * norm at the end. Padding is a matter of the caller: give the tokens that are there, and no
 * others. That is what a padding mask computes, since masked keys have weight 0 and the states of
 * padding are thrown away. */
#ifndef ESA_MODEL_UMT5_H
#define ESA_MODEL_UMT5_H

#include "model/config.h"
#include "model/part.h"

typedef struct esa_umt5 esa_umt5;

esa_status esa_umt5_check(const esa_part_env *env, const esa_umt5_config *config);
/* env is copied; env->nn must outlive it. With ESA_HOLD_AUTO an encoder of more than 1 GB stays in
 * its file whatever its type: every layer is read once per prompt, so a copy of it would be
 * waste. */
esa_status esa_umt5_open(const esa_part_env *env, esa_umt5 **encoder,
                         const esa_umt5_config *config);
void esa_umt5_free(esa_umt5 *encoder);
void esa_umt5_memory(const esa_umt5 *encoder, int64_t *parameters, int64_t *held, int64_t *mapped);

/* out [n][d_model] from ids[n], n >= 1. ESA_ERR_ARGUMENT for an id outside the vocabulary,
 * ESA_ERR_MEMORY. */
esa_status esa_umt5_encode(esa_umt5 *encoder, float *out, const int32_t *ids, int64_t n);

/* Bucket of a key `distance` = key - query away. */
int32_t esa_umt5_bucket(const esa_umt5_config *config, int64_t distance);

#endif
