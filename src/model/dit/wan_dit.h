/* wan_dit.h - Wan's transformer: latents, timestep and text in, velocity out. f32.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     esa_wan_dit_open(env, &dit, &config);
 // one video size: order, rotation, activations
 *     esa_wan_dit_begin(dit, grid_of_latents, &layout, mode);
 // once per branch: text MLP, K and V of every layer
 *     esa_wan_dit_text(dit, branch, embeds, rows);
 *     per step and branch: esa_session_step(s, i, branch);
 *                          esa_wan_dit_forward(dit, s, branch, v, x, t);
 *
 * Tokens are put into the session's order when latents become patches and back when patches become
 latents; rotations follow. */
#ifndef ESA_MODEL_WAN_DIT_H
#define ESA_MODEL_WAN_DIT_H

#include "esa/esa_session.h"
#include "model/config.h"
#include "model/part.h"

typedef struct esa_wan_dit esa_wan_dit;

esa_status esa_wan_dit_check(const esa_part_env *env, const esa_wan_config *config);
/* env->nn is kept and must outlive dit. */
esa_status esa_wan_dit_open(const esa_part_env *env, esa_wan_dit **dit,
                            const esa_wan_config *config);
/* From one weight file in memory, which must outlive dit (fuzzing); env->folder is not looked
 * at. */
esa_status esa_wan_dit_open_memory(const esa_part_env *env, esa_wan_dit **dit,
                                   const esa_wan_config *config, const void *bytes, int64_t size);
void esa_wan_dit_free(esa_wan_dit *dit);
/* Memory of weights (copies, mapped) and number of parameters. */
void esa_wan_dit_memory(const esa_wan_dit *dit, int64_t *parameters, int64_t *held,
                        int64_t *mapped);

/* Latents are [in_channels][latent[0]][latent[1]][latent[2]] (t, h, w). layout: order, window,
 * protect_first_frame of the session (its own defaults resolved by selector); on return it carries
 * grid_q = grid_k = latent / patch and order_applied = 1, ready for
 * esa_session_params.select.layout. mode: ESA_MODE_* of the selection. branches: how many texts
 * will be given. */
esa_status esa_wan_dit_begin(esa_wan_dit *dit, const int32_t latent[3], esa_layout *layout,
                             int32_t selector, int32_t mode, int32_t branches);
/* embeds f32 [rows][text_dim], rows >= 1; all rows are attended, padding included, as the pipeline
 * does. Trailing rows that are equal bit for bit are folded into one that counts as many. */
esa_status esa_wan_dit_text(esa_wan_dit *dit, int32_t branch, const float *embeds, int64_t rows);
/* v[out_channels][T][H][W] from x[in_channels][T][H][W] at timestep t. The session has been told
 * step and branch. */
esa_status esa_wan_dit_forward(esa_wan_dit *dit, esa_session *session, int32_t branch, float *v,
                               const float *x, double t);

/* Tests and tools look at what leaves each block: hidden f32 [tokens][d] in grid order, block = -1
 * before the first. NULL: nobody. */
typedef void (*esa_wan_dit_watch)(void *user, int32_t block, const float *hidden, int64_t tokens,
                                  int64_t d);
void esa_wan_dit_set_watch(esa_wan_dit *dit, esa_wan_dit_watch watch, void *user);

#endif
