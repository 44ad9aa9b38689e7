/* mask.h - the mask object, layouts and orders, budgets. Knows no kernels.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MASK_MASK_H
#define ESA_MASK_MASK_H

#include "base/engine.h"
#include "ctx/ctx.h"
#include "rules/rank.h"
#include "rules/rows.h"

enum { ESA_FACTS = 3 };     /* existing blocks, kept blocks, blocks on the fine level */
enum { ESA_MAX_FINE = 16 }; /* most means of a block on the fine level */

/* An ascending list of key blocks per (batch, head, query block), and a second one of the blocks on
 * the fine level if the mask has one. */
struct esa_mask {
    esa_allocator mem; /* own copy: the mask may outlive its ctx */
    int64_t B, H, Nq, Nk, nq, nk, cap;
    int32_t block_q, block_k;
    int32_t *count;       /* [B][H][nq] */
    uint16_t *index;      /* [B][H][nq][cap] */
    int32_t fine;         /* means per block on the fine level; 0: no fine level */
    int32_t *fine_count;  /* [B][H][nq]; NULL if fine is 0 */
    uint16_t *fine_index; /* [B][H][nq][cap]; NULL if fine is 0 */
    int32_t device;       /* ESA_DEVICE_*: device of lists, facts and permutations */
    esa_device_heap heap; /* reads and frees memory that the host cannot reach; zeros on the CPU */
    int64_t *facts;       /* [ESA_FACTS] on the device */
    int64_t host_facts[ESA_FACTS]; /* CPU: facts points here */
    /* Position -> token, owned. Adaptive: perm_q [B][H][Nq], perm_k [B][Hkv][Nk], on any device,
     * and `ordered` says whether they are filled. Other orders: [Nq] and [Nk] on CUDA only; NULL if
     * the layout moves no tokens. */
    int32_t *perm_q, *perm_k;
    int64_t Hkv;     /* adaptive: heads of perm_k; else 0 */
    int32_t ordered; /* adaptive: 1 once perm_q and perm_k are filled */
    int32_t filled;  /* 1: a selector or a conversion has written it */
    int32_t runnable, selector, mode;
    int32_t causal; /* 1: made with causal, so it holds no future key block */
    double asked;   /* NaN: unknown */
    /* Blocks within kv_len and causality, over all rows; B*H*nq*nk if unknown. */
    int64_t existing;
    esa_layout layout; /* resolved: no DEFAULT, no -1 */
};

/* Makes an empty mask with cap = nk. nq and nk are given because compat rf_v2 may have one block
 * more than ceil(N/block). NULL if out of memory. */
esa_mask *esa_mask_new(const esa_allocator *mem, int64_t B, int64_t H, int64_t Nq, int64_t Nk,
                       int64_t nq, int64_t nk, int32_t block_q, int32_t block_k);
/* Makes an empty CPU mask with the geometry and info of src, with room for a fine level and for
 * adaptive orders if src has them (fine, Hkv), but without counts and orders. NULL if out of
 * memory. */
esa_mask *esa_mask_like(const esa_allocator *mem, const esa_mask *src);
/* Give a CPU mask room for a fine level, and for adaptive orders with Hkv heads of keys. Orders
 * that it has are dropped. 0 if out of memory: then the mask is as it was. */
int32_t esa_mask_add_fine(esa_mask *mask, int32_t fine);
int32_t esa_mask_add_orders(esa_mask *mask, int64_t Hkv);
/* Bytes of the adaptive order of one side (0: q, 1: k); -1 if that exceeds the address space. */
int64_t esa_mask_order_bytes(const esa_mask *mask, int32_t side);
/* *host is mask itself if it is on the CPU, else a CPU copy allocated from mem. The caller
 * frees a copy. */
esa_status esa_mask_on_host(const esa_mask **host, const esa_mask *mask, const esa_allocator *mem);
/* Number of row i of head h and batch entry b. A mask with B = 1 serves every batch entry. */
static inline int64_t esa_mask_row(const esa_mask *m, int64_t b, int64_t h, int64_t i)
{
    return ((m->B == 1 ? 0 : b) * m->H + h) * m->nq + i;
}
/* Fills all rows from bits [B][H][nq][ceil(nk/8)]. Bits beyond nk are ignored. fine: the same for
 * the fine level; NULL: no block is on it. */
void esa_mask_set_bits(esa_mask *mask, const uint8_t *bits, const uint8_t *fine);
/* The reverse for CPU memory: bits [B][H][nq][ceil(nk/8)] of lists (count, index) of the mask. */
void esa_mask_write_bits(uint8_t *bits, const esa_mask *mask, const int32_t *count,
                         const uint16_t *index);
/* Fills one row from a flag per key block (non-zero: kept). */
void esa_mask_set_row(esa_mask *mask, int64_t row, const uint8_t *keep);
/* Number of kept blocks of a CPU mask, and of blocks on its fine level. */
int64_t esa_mask_kept(const esa_mask *mask);
int64_t esa_mask_fine(const esa_mask *mask);

/* Checks a layout against the lengths and resolves every default: DEFAULT order, -1 protection,
 * the k side from the q side. mode and selector decide the defaults (esa.h). Errors leave a
 * message in ctx. */
ESA_ENGINE esa_status esa_layout_resolve(esa_ctx *ctx, esa_layout *out, const esa_layout *in,
                                         int64_t Nq, int64_t Nk, int32_t selector, int32_t mode,
                                         int32_t causal);
/* Fills in the default of esa_layout.span_align, or checks that both block sizes divide it. */
esa_status esa_span_align(esa_ctx *ctx, int32_t *align, int32_t block_q, int32_t block_k);
/* 1 if the resolved order is the identity, so that nothing is gathered. */
ESA_ENGINE int32_t esa_order_is_identity(const esa_layout *layout, int32_t side, int32_t mode);
/* 1 if the tensors of this side must be gathered: its order moves tokens and is not applied yet. */
static inline int32_t esa_layout_moves(const esa_layout *layout, int32_t side, int32_t mode)
{
    return !layout->order_applied && !esa_order_is_identity(layout, side, mode);
}
/* Generalised Hilbert curve through t x h x w cells: out[t*h*w] = base + raster index,
 * in walking order. */
void esa_hilbert(int32_t *out, int32_t base, int64_t t, int64_t h, int64_t w);
/* Fills perm[N] from a resolved layout; side 0: q, 1: k. Adaptive: the order to start from, which
 * is Hilbert, or raster without a grid. Cannot fail. */
ESA_ENGINE void esa_order_build(int32_t *perm, int64_t N, const esa_layout *layout, int32_t side,
                                int32_t mode);
/* 1 if a mask made for layout a fits layout b: same order, grid and text. order_applied
 * does not matter. */
int32_t esa_layout_same(const esa_layout *a, const esa_layout *b);

/* Splits a budget between heads (rules/budget.h): k[H] blocks out of nk, with the exact sum.
 * scratch: H doubles. */
void esa_budget_entropy(int32_t *k, const double *entropy, int64_t H, int64_t nk, double budget,
                        double *scratch);
/* Spreads the total of one head over its rows, which may differ (causal). Row i sees visible[i]
 * blocks and keeps at least least[i] of them (dense rows: all). The other rows get one common share
 * of what they see. The sum is total as far as the bounds allow. All arrays have nq entries. */
void esa_budget_spread(int32_t *quota, const int32_t *visible, const int32_t *least, int64_t nq,
                       int64_t total);

#endif
