/* cog_dit.h - CogVideoX's transformer: computes the velocity from latents, timestep and text.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     esa_cog_dit_open(env, &dit, &config);
 *     esa_cog_dit_begin(dit, latent, &layout, selector, mode, branches);  // for one video size
 *     esa_cog_dit_text(dit, branch, embeds, rows);                        // once for each branch
 *     for each step and branch: esa_session_step(s, i, branch);
 *                               esa_cog_dit_forward(dit, s, branch, v, x, t);
 *
 * Text and video are one sequence, [text][video], and attend to each other in every block. The
 * layout says how many rows of text there are. Video tokens are put into the session's order when
 * latents become patches, and back when patches become latents; text stays in front. diffusers runs
 * both guidance branches as one batch; here each is a call of its own, which computes the same.
 *
 * x and v are f32 [channels][T][H][W] in the memory of nn's device (diffusers has frames before
 * channels); what lies between them has the type of the device's activations. */
#ifndef ESA_MODEL_COG_DIT_H
#define ESA_MODEL_COG_DIT_H

#include "esa/esa_session.h"
#include "model/family.h"

typedef struct esa_cog_dit esa_cog_dit;

/* cog_kind.c: whether an opened file holds a transformer of CogVideoX (ESA_KIND_*, family.h).
 * *config = its configuration as far as names and shapes tell it, and line = what it is, unless it
 * is OTHER. */
int32_t esa_cog_kind(esa_weights *w, esa_cog_config *config, char *line, size_t bytes);

esa_status esa_cog_dit_check(const esa_part_env *env, const esa_cog_config *config);
/* dit keeps env->nn, which must outlive it. */
esa_status esa_cog_dit_open(const esa_part_env *env, esa_cog_dit **dit,
                            const esa_cog_config *config);
void esa_cog_dit_free(esa_cog_dit *dit);
/* The functions below are those of esa_dit_ops (family.h). */
void esa_cog_dit_memory(const esa_cog_dit *dit, int64_t *parameters, int64_t *held,
                        int64_t *mapped);
void esa_cog_dit_set_room(esa_cog_dit *dit, const esa_dit_room *room);
esa_store *esa_cog_dit_store(esa_cog_dit *dit);

/* layout: text_front_q is set. Fails with ESA_ERR_ARGUMENT for sizes that the patches do not
 * divide. */
esa_status esa_cog_dit_layout(const esa_cog_dit *dit, const int32_t latent[3], esa_layout *layout,
                              int32_t selector, int32_t mode);
esa_status esa_cog_dit_begin(esa_cog_dit *dit, const int32_t latent[3], esa_layout *layout,
                             int32_t selector, int32_t mode, int32_t branches);
void esa_cog_dit_end(esa_cog_dit *dit);
int64_t esa_cog_dit_bytes(const esa_cog_dit *dit);
/* Sets the text of a branch: embeds f32 [rows][text_dim]. rows must be the layout's. All rows are
 * attended, padding included, as in diffusers. */
esa_status esa_cog_dit_text(esa_cog_dit *dit, int32_t branch, const float *embeds, int64_t rows);
/* Computes v[out_channels][T][H][W] from x[in_channels][T][H][W] at timestep t. */
esa_status esa_cog_dit_forward(esa_cog_dit *dit, esa_session *session, int32_t branch, float *v,
                               const float *x, double t);

/* For tests and tools: called with the output of each block, hidden f32 [text + tokens][d] with the
 * video in grid order, and with block = -1 for the input of the first. May be NULL. */
typedef void (*esa_cog_dit_watch)(void *user, int32_t block, const float *hidden, int64_t rows,
                                  int64_t d);
void esa_cog_dit_set_watch(esa_cog_dit *dit, esa_cog_dit_watch watch, void *user);

#endif
