/* mask.h - the mask object, layouts and orders, budgets. Knows no kernels.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MASK_MASK_H
#define ESA_MASK_MASK_H

#include "ctx/ctx.h"
#include "rules/rank.h"
#include "rules/rows.h"

/* Per (batch, head, query block) an ascending list of key blocks. */
struct esa_mask {
    esa_allocator mem; /* own copy: a mask may outlive its ctx */
    int64_t B, H, Nq, Nk, nq, nk, cap;
    int32_t block_q, block_k;
    int32_t *count;       /* [B][H][nq] */
    uint16_t *index;      /* [B][H][nq][cap] */
    int32_t device;       /* ESA_DEVICE_*: where count, index, facts and the permutations lie */
    esa_device_heap heap; /* CUDA */
    /* CUDA: [2] blocks that exist, blocks kept; NULL on the CPU, which has `existing` */
    int64_t *facts;
    int32_t *perm_q, *perm_k; /* CUDA: position -> token where the layout moves tokens, else NULL */
    int32_t filled;           /* 0 until a selector or a conversion has written it */
    int32_t runnable, selector, mode;
    int32_t causal; /* 1: made by a causal selection, so it lists no key block of the future */
    double asked;   /* NaN: unknown */
    /* blocks that exist (within kv_len and causal), over all rows; B*H*nq*nk if unknown */
    int64_t existing;
    esa_layout layout; /* resolved: no DEFAULT, no -1 */
};

/* An empty mask of the given geometry, cap = nk. In compat rf_v2 masks nq/nk may exceed
 * ceil(N/block) by one: given explicitly. NULL when out of memory. */
esa_mask *esa_mask_new(const esa_allocator *mem, int64_t B, int64_t H, int64_t Nq, int64_t Nk,
                       int64_t nq, int64_t nk, int32_t block_q, int32_t block_k);
/* An empty mask on the CPU with the geometry and facts of src, without counts; NULL when out of
 * memory. */
esa_mask *esa_mask_like(const esa_allocator *mem, const esa_mask *src);
/* *host = mask itself if it lies on the CPU, else a copy there (in memory of mem), which the caller
 * frees if it is not mask. */
esa_status esa_mask_on_host(const esa_mask **host, const esa_mask *mask, const esa_allocator *mem);
/* Row accessors. */
static inline int64_t esa_mask_row(const esa_mask *m, int64_t b, int64_t h, int64_t i)
{
    return ((m->B == 1 ? 0 : b) * m->H + h) * m->nq + i;
}
/* Overwrites all rows from bits [B][H][nq][ceil(nk/8)] (used where masks rest as bits); bits beyond
 * nk are ignored. */
void esa_mask_set_bits(esa_mask *mask, const uint8_t *bits);
/* Writes row r from a byte flag per key block (non-zero = kept). */
void esa_mask_set_row(esa_mask *mask, int64_t row, const uint8_t *keep);
/* Sum of counts, of a mask on the CPU. */
int64_t esa_mask_kept(const esa_mask *mask);

/* Checks a layout against the lengths and fills every default: DEFAULT order, -1 protection, the k
 * side from the q side. mode and selector decide the defaults (esa.h). Errors are sentences in
 * ctx. */
esa_status esa_layout_resolve(esa_ctx *ctx, esa_layout *out, const esa_layout *in, int64_t Nq,
                              int64_t Nk, int32_t selector, int32_t mode, int32_t causal);
/* 1 if the resolved order is the identity (raster, no compat text move), so nothing needs
 * gathering. */
int32_t esa_order_is_identity(const esa_layout *layout, int32_t side, int32_t mode);
/* The generalised Hilbert curve through t x h x w cells: out[t*h*w] = base + raster index, in
 * walking order. */
void esa_hilbert(int32_t *out, int32_t base, int64_t t, int64_t h, int64_t w);
/* perm[N] of a resolved layout; side 0 q, 1 k. Cannot fail. */
void esa_order_build(int32_t *perm, int64_t N, const esa_layout *layout, int32_t side,
                     int32_t mode);
/* Same geometry, order, grid and text: a mask made for a may be used where b is wanted.
 * order_applied does not count. */
int32_t esa_layout_same(const esa_layout *a, const esa_layout *b);

/* Entropy budgets (b_h = clamp(s E_h, b_min, 1), largest remainder): k[H] block counts of nk, sum
 * exact. scratch: H doubles. */
void esa_budget_entropy(int32_t *k, const double *entropy, int64_t H, int64_t nk, double budget,
                        double *scratch);
/* The same where rows differ (causal): row i sees visible[i] blocks and keeps at least least[i] of
 * them (dense rows: all); the others get one common share of what they see. Sums to total as far as
 * the bounds allow. All arrays [nq]. */
void esa_budget_spread(int32_t *quota, const int32_t *visible, const int32_t *least, int64_t nq,
                       int64_t total);

#endif
