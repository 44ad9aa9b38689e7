/* select.h - selectors: q and k in, a filled mask out. One file per selector; select.c switches.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_SELECT_SELECT_H
#define ESA_SELECT_SELECT_H

#include "base/args.h"
#include "base/pool.h"
#include "cpu/cpu.h"
#include "mask/mask.h"

/* Number of blocks of the mask for these params: ceil(N/block), except compat rf_v2 with text,
 * which pools image and text apart. runnable 0: not the kernel's blocks. */
void esa_select_blocks(const esa_select_params *params, int64_t Nq, int64_t Nk, int64_t *nq,
                       int64_t *nk, int32_t *runnable);
/* Scratch for esa_select_run with these args (pointers q, k need not be set). */
int64_t esa_select_workspace(const esa_select_args *args);
/* Fills mask (geometry must be nq, nk, Hq, B) and its facts: filled, runnable, selector, mode,
 * asked, existing, layout. Cannot fail: all is checked before. */
void esa_select_run(const esa_select_args *args, esa_mask *mask, void *ws);

/* Writes into mask who made it and under which params; existing: blocks that exist over all
 * rows. */
void esa_select_sign(const esa_select_args *args, esa_mask *mask, int64_t existing);

/* Importance of the entropy selector alone: out f32[B,H,nq,nk], entropy f64[B,H] or NULL. Scratch:
 * esa_select_workspace of the same args with params.selector = ENTROPY. */
void esa_select_importance(const esa_select_args *args, float *out, double *entropy, void *ws);
/* The second half of the entropy selector: mask from importance f32[B,H,nq,nk] (entropies, budgets,
 * forced blocks, top-k), as if it had just been measured. q and k are not read. Same scratch. */
void esa_select_from_importance(const esa_select_args *args, esa_mask *mask,
                                const float *importance, void *ws);

/* Share of the true attention mass that mask keeps (esa_mask_mass): mass f64[B,Hq], over every
 * row_step-th query. Of params only scale, causal, kv_len and layout count; block sizes and rows
 * come from mask. */
int64_t esa_select_mass_workspace(const esa_select_args *args, const esa_mask *mask);
void esa_select_mass(const esa_select_args *args, const esa_mask *mask, double *mass,
                     int32_t row_step, void *ws);

#endif
