/* select.h - selectors: q and k in, a filled mask out. One file per selector.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_SELECT_SELECT_H
#define ESA_SELECT_SELECT_H

#include "base/args.h"
#include "base/pool.h"
#include "cpu/cpu.h"
#include "mask/mask.h"

/* Block counts of the mask for these params: ceil(N/block), except for compat rf_v2 of release 3.0
 * with text, which pools image and text separately. runnable 0: the blocks are not those of the
 * kernel. */
void esa_select_blocks(const esa_select_params *params, int64_t Nq, int64_t Nk, int64_t *nq,
                       int64_t *nk, int32_t *runnable);
/* The kernel set for args, from the best one of a ctx. Selectors that score tokens take the bf16
 * set for bf16 tensors if it has their slots: its products are as exact. The others score means,
 * which bf16 would round. */
const esa_cpu_kernels *esa_select_kernels(const esa_cpu_kernels *best, const esa_select_args *args);
/* Scratch bytes for esa_select_run with these args. q and k may be unset. */
int64_t esa_select_workspace(const esa_select_args *args);
/* Fills mask, whose geometry must be nq, nk, Hq, B, and its info: filled, runnable, selector, mode,
 * asked, existing, layout. Cannot fail; the caller has checked everything. */
void esa_select_run(const esa_select_args *args, esa_mask *mask, void *ws);

/* Stores selector and params in mask. existing: existing blocks over all rows. */
void esa_select_sign(const esa_select_args *args, esa_mask *mask, int64_t existing);

/* First half of the entropy selector: importance out f32[B,H,nq,nk], entropy f64[B,H] or NULL.
 * Scratch: esa_select_workspace of the same args with params.selector = ENTROPY. */
void esa_select_importance(const esa_select_args *args, float *out, double *entropy, void *ws);
/* Second half of the entropy selector: fills mask from importance f32[B,H,nq,nk] (entropies,
 * budgets, forced blocks, top-k). q and k are not read. Same scratch. */
void esa_select_from_importance(const esa_select_args *args, esa_mask *mask,
                                const float *importance, void *ws);

/* Error scores out f32[levels][B][Hq][nq][nk], with params.selector = ERROR; levels is 2 with tail
 * LEVELS, else 1. */
int64_t esa_select_errors_workspace(const esa_select_args *args);
void esa_select_errors(const esa_select_args *args, float *out, void *ws);
/* The choice alone: fills mask from such scores. q, k and v are not read. Scratch:
 * esa_select_workspace of the same args, or esa_select_errors_workspace. */
void esa_select_from_errors(const esa_select_args *args, esa_mask *mask, const float *errors,
                            void *ws);

/* The adaptive order (rules/order.h): perm_q [B][Hq][Nq] and perm_k [B][Hkv][Nk], position ->
 * token, from q and k. args->perm_q [Nq] and args->perm_k [Nk] are the orders to start from; NULL:
 * raster. Needs params.layout, block_q, block_k and kv_len. Cannot fail. The same bits for any
 * number of threads. */
int64_t esa_adaptive_workspace(const esa_select_args *args);
void esa_adaptive_order(const esa_select_args *args, int32_t *perm_q, int32_t *perm_k, void *ws);

/* Share of the true attention mass that mask keeps (esa_mask_mass): mass f64[B,Hq] over every
 * row_step-th query. Of params it uses scale, causal, kv_len and layout; block sizes and rows come
 * from mask. */
int64_t esa_select_mass_workspace(const esa_select_args *args, const esa_mask *mask);
void esa_select_mass(const esa_select_args *args, const esa_mask *mask, double *mass,
                     int32_t row_step, void *ws);

#endif
