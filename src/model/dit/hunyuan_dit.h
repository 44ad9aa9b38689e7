/* hunyuan_dit.h - HunyuanVideo's transformer: computes the velocity from latents, timestep,
 * guidance and text.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     esa_hunyuan_dit_open(env, &dit, &config);
 *     esa_hunyuan_dit_begin(dit, latent, &layout, selector, mode, branches);  // for one video size
 *     esa_hunyuan_dit_text(dit, branch, &text);                               // for each branch
 *     for each step and branch: esa_session_place(s, i, branch); esa_hunyuan_dit_forward(dit,
 * &call);
 *
 * Self-attention runs over [video][text][padding]: layout->text_back_q rows of text, of which those
 * of the prompt are attended. Blocks of two kinds follow one another: double ones, where video and
 * text have weights of their own, and single ones. A session counts them in this order. The tokens
 * of the video are in the session's order between the first and the last layer. */
#ifndef ESA_MODEL_HUNYUAN_DIT_H
#define ESA_MODEL_HUNYUAN_DIT_H

#include "model/family.h"
#include "model/hunyuan_config.h"

typedef struct esa_hunyuan_dit esa_hunyuan_dit;

/* hunyuan_kind.c: the sizes of the published model; its hash is empty. */
extern const esa_hunyuan_config esa_hunyuan_published;
/* Whether an opened file holds a transformer of HunyuanVideo (ESA_KIND_*,
 * family.h). *config = its configuration as far as names and shapes tell it, and line = what it is,
 * unless it is OTHER. */
int32_t esa_hunyuan_kind(esa_weights *w, esa_hunyuan_config *config, char *line, size_t bytes);

/* The functions of esa_dit_ops (family.h), where their rules are. */
esa_status esa_hunyuan_dit_check(const esa_part_env *env, const esa_hunyuan_config *config);
esa_status esa_hunyuan_dit_open(const esa_part_env *env, esa_hunyuan_dit **dit,
                                const esa_hunyuan_config *config);
void esa_hunyuan_dit_free(esa_hunyuan_dit *dit);
void esa_hunyuan_dit_memory(const esa_hunyuan_dit *dit, int64_t *parameters, int64_t *held,
                            int64_t *mapped);
esa_store *esa_hunyuan_dit_store(esa_hunyuan_dit *dit);
esa_status esa_hunyuan_dit_layout(const esa_hunyuan_dit *dit, const int32_t latent[3],
                                  esa_layout *layout, int32_t selector, int32_t mode);
void esa_hunyuan_dit_set_room(esa_hunyuan_dit *dit, const esa_dit_room *room);
esa_status esa_hunyuan_dit_begin(esa_hunyuan_dit *dit, const int32_t latent[3], esa_layout *layout,
                                 int32_t selector, int32_t mode, int32_t branches);
void esa_hunyuan_dit_end(esa_hunyuan_dit *dit);
int64_t esa_hunyuan_dit_bytes(const esa_hunyuan_dit *dit);
/* text->rows may be fewer than the layout has; the rest is padding. */
esa_status esa_hunyuan_dit_text(esa_hunyuan_dit *dit, int32_t branch, const esa_text *text);
esa_status esa_hunyuan_dit_forward(esa_hunyuan_dit *dit, const esa_dit_call *call);

/* For tests: called with the output of each block, f32 [tokens][d], the video in grid order and
 * then the text, and with block = -1 for the input of the first. May be NULL. */
typedef void (*esa_hunyuan_dit_watch)(void *user, int32_t block, const float *hidden,
                                      int64_t tokens, int64_t d);
void esa_hunyuan_dit_set_watch(esa_hunyuan_dit *dit, esa_hunyuan_dit_watch watch, void *user);

#endif
