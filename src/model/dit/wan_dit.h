/* wan_dit.h - Wan's transformer: computes the velocity from latents, timestep and text.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     esa_wan_dit_open(env, &dit, &config);
 *     esa_wan_dit_begin(dit, latent, &layout, selector, mode, branches);  // for one video size
 *     esa_wan_dit_text(dit, branch, embeds, rows);                        // once for each branch
 *     for each step and branch: esa_session_step(s, i, branch);
 *                               esa_wan_dit_forward(dit, s, branch, v, x, t);
 *
 * Tokens are put into the session's order when latents become patches, and back when patches become
 * latents. The rotations follow the same order. x and v are f32 in the memory of nn's device; what
 * lies between them has the type of the device's activations. */
#ifndef ESA_MODEL_WAN_DIT_H
#define ESA_MODEL_WAN_DIT_H

#include "esa/esa_session.h"
#include "model/family.h"

typedef struct esa_wan_dit esa_wan_dit;

/* wan_kind.c: whether an opened file holds a transformer of Wan (ESA_KIND_*, family.h). *config =
 * its configuration as far as names and shapes tell it, and line = what it is, unless it is OTHER.
 */
int32_t esa_wan_kind(esa_weights *w, esa_wan_config *config, char *line, size_t bytes);

esa_status esa_wan_dit_check(const esa_part_env *env, const esa_wan_config *config);
/* dit keeps env->nn, which must outlive it. */
esa_status esa_wan_dit_open(const esa_part_env *env, esa_wan_dit **dit,
                            const esa_wan_config *config);
/* Opens one weight file in memory, which must outlive dit; for fuzzing. Does not use env->folder.
 */
esa_status esa_wan_dit_open_memory(const esa_part_env *env, esa_wan_dit **dit,
                                   const esa_wan_config *config, const void *bytes, int64_t size);
void esa_wan_dit_free(esa_wan_dit *dit);
/* The number of parameters, and the bytes of weights in copies and in mapped files. */
void esa_wan_dit_memory(const esa_wan_dit *dit, int64_t *parameters, int64_t *held,
                        int64_t *mapped);

/* begin makes the weights leave that much free; NULL: it estimates. */
void esa_wan_dit_set_room(esa_wan_dit *dit, const esa_dit_room *room);
/* The store of the weights, for its device memory (store.h). */
esa_store *esa_wan_dit_store(esa_wan_dit *dit);
/* The layout that begin makes, without any memory. */
esa_status esa_wan_dit_layout(const esa_wan_dit *dit, const int32_t latent[3], esa_layout *layout,
                              int32_t selector, int32_t mode);

/* Prepares for latents [in_channels][latent[0]][latent[1]][latent[2]] (t, h, w). layout gives
 * order, window and protect_first_frame of the session; the selector's defaults are filled in. On
 * return it has grid_q = grid_k = latent / patch and order_applied = 1, ready for
 * esa_session_params.select.layout. mode: ESA_MODE_* of the selection. branches: the number of
 * texts. */
esa_status esa_wan_dit_begin(esa_wan_dit *dit, const int32_t latent[3], esa_layout *layout,
                             int32_t selector, int32_t mode, int32_t branches);
/* Frees what begin and text have made; begin does it too. */
void esa_wan_dit_end(esa_wan_dit *dit);
/* Bytes that begin has allocated. */
int64_t esa_wan_dit_bytes(const esa_wan_dit *dit);
/* How many rows are left of embeds f32 [rows][text_dim] when equal ones at the end are folded. */
int64_t esa_wan_dit_text_rows(const esa_wan_dit *dit, const float *embeds, int64_t rows);
/* Sets the text of a branch: embeds f32 [rows][text_dim], rows >= 1. All rows are attended, padding
 * included, as in diffusers. Equal rows at the end are folded into one that counts as many. */
esa_status esa_wan_dit_text(esa_wan_dit *dit, int32_t branch, const float *embeds, int64_t rows);
/* For a transformer with an image (wan_dit_image.c): embeds f32 [rows][image_dim] of the image, and
 * condition, f32 [in_channels - out_channels][T][H][W] in host memory, which follows the latents in
 * the input. embeds NULL: the config has no image_dim. For one video, after begin. */
esa_status esa_wan_dit_image(esa_wan_dit *dit, const float *embeds, int64_t rows,
                             const float *condition);
/* Computes v[out_channels][T][H][W] from x[out_channels][T][H][W] at timestep t. esa_session_step
 * must have been called for this step and branch. */
esa_status esa_wan_dit_forward(esa_wan_dit *dit, esa_session *session, int32_t branch, float *v,
                               const float *x, double t);

/* For tests and tools: called with the output of each block, hidden f32 [tokens][d] in grid order,
 * and with block = -1 for the input of the first. May be NULL. */
typedef void (*esa_wan_dit_watch)(void *user, int32_t block, const float *hidden, int64_t tokens,
                                  int64_t d);
void esa_wan_dit_set_watch(esa_wan_dit *dit, esa_wan_dit_watch watch, void *user);

#endif
