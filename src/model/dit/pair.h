/* pair.h - the transformers of a model: one, or in Wan 2.2 A14B two, of which the second takes the
 * steps of little noise.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Both have the same sizes. One of them is active at a time and has the activations. On a device
 * both keep their weights there if they fit. If not, the one that is not active gives what the
 * other lacks, and those weights wait in host memory; a pair then needs little more device memory
 * than one transformer. */
#ifndef ESA_MODEL_PAIR_H
#define ESA_MODEL_PAIR_H

#include "model/dit/dit.h"

typedef struct esa_pair esa_pair;

/* second NULL: there is one transformer. env's transformer_2 and lora_2 belong to the second. */
esa_status esa_pair_make(const esa_part_env *env, esa_pair **pair, const esa_dit_kind *kind,
                         const void *first, const void *second);
esa_status esa_pair_load(esa_pair *pair);
void esa_pair_free(esa_pair *pair); /* accepts NULL */
void esa_pair_memory(const esa_pair *pair, int64_t *parameters, int64_t *held, int64_t *mapped);
/* The active transformer. */
esa_dit *esa_pair_active(const esa_pair *pair);

/* As those of esa_dit. begin makes the first transformer active. texts must live until end. */
void esa_pair_set_room(esa_pair *pair, const esa_dit_room *room);
esa_status esa_pair_begin(esa_pair *pair, const int32_t latent[3], esa_layout *layout,
                          int32_t selector, int32_t mode, int32_t branches);
void esa_pair_end(esa_pair *pair);
esa_status esa_pair_text(esa_pair *pair, int32_t branch, const esa_text *text);
esa_status esa_pair_image(esa_pair *pair, const esa_image *image);
/* Makes the transformer of the call active if it is not. */
esa_status esa_pair_forward(esa_pair *pair, const esa_dit_call *call);

#endif
