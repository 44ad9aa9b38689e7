/* rules.h - what all selectors share: which blocks a row sees, which ones it must keep, how it
 * picks the others. Private to src/select.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_SELECT_RULES_H
#define ESA_SELECT_RULES_H

#include "base/half.h"
#include "rules/selectors.h"
#include "select/select.h"

#define ESA_LOG2E 1.4426950408889634

/* The rules of one batch entry. All its heads share them. */
typedef struct esa_rules {
    int64_t kv_len;   /* keys that exist */
    int64_t existing; /* key blocks that exist: ceil(kv_len / Bk) */
    int64_t seen;     /* sum of visible */
    int32_t *visible; /* [nq] key blocks 0 .. visible-1 hold a key that a query of the block sees */
    /* [nq] blocks diagonal .. visible-1 are on the causal diagonal and forced */
    int32_t *diagonal;
    int32_t *least;  /* [nq] forced blocks of the row, at least 1 if anything is visible */
    uint8_t *dense;  /* [nq] 1: the row keeps every block it sees */
    uint8_t *column; /* [nk] 1: every row keeps this column */
} esa_rules;

/* Scratch of one worker for picking a row. */
typedef struct esa_picker {
    uint8_t *keep, *allow; /* [nk] */
    uint64_t *key;         /* [nk] */
} esa_picker;

void esa_rules_carve(esa_rules *rules, esa_carve *carve, const esa_select_args *args);
/* Fills the rules of batch entry b: visibility always; text, first frame and diagonal in fixed
 * mode. Compat rf_v2 has its own. */
void esa_rules_fill(esa_rules *rules, const esa_select_args *args, int64_t b);

void esa_picker_carve(esa_picker *picker, esa_carve *carve, int64_t nk);
/* Sets picker->keep[nk] to the blocks of row i: the forced ones, then the best by value[visible] up
 * to quota. The best block is always kept. */
void esa_rules_pick(esa_picker *picker, const esa_rules *rules, const float *value, int64_t i,
                    int64_t quota, int64_t nk);
/* Sets keep to the forced blocks of row i and returns their number. */
int64_t esa_rules_forced(uint8_t *keep, const esa_rules *rules, int64_t i, int64_t nk);

/* kv_len of a batch entry, 0 .. Nk. */
int64_t esa_args_kv_len(const esa_select_args *args, int64_t b);
/* First element of q or k of a query head. */
const void *esa_args_q(const esa_select_args *args, int64_t b, int64_t h);
const void *esa_args_k(const esa_select_args *args, int64_t b, int64_t h);

/* Number of heads to process at once so that `bytes` per head stay within `limit`. *kv_heads: how
 * many kv heads they can touch. */
int64_t esa_args_window(const esa_select_args *args, int64_t bytes, int64_t limit,
                        int64_t *kv_heads);
/* kern->stats for any group size. */
void esa_block_stats(const esa_cpu_kernels *kern, float *top, float *sum, int64_t ld_out,
                     const float *s, int64_t ld, int64_t rows, int64_t keys, int64_t group);
/* Masses of a row relative to its maximum, from statistics per block: mass[n]. Returns their sum, 0
 * if the row is empty. */
double esa_row_masses(double *mass, float *top, const float *tops, const float *sums, int64_t n);

/* One pair per selector, each in its own file. ws has the size that carve counted. */
#define ESA_SELECTOR_FUNCTIONS(ID, id, ...)                                                        \
    void esa_##id##_carve(const esa_select_args *args, esa_carve *carve);                          \
    void esa_##id##_run(const esa_select_args *args, esa_mask *mask, void *ws);
ESA_SELECTORS(ESA_SELECTOR_FUNCTIONS)
#undef ESA_SELECTOR_FUNCTIONS

#endif
