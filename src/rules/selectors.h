/* selectors.h - what a selector is: one row each. Whoever must know asks the row, and names no
 * selector.
 * SPDX-License-Identifier: Apache-2.0
 *
 * docs/selectors.md says how to add one. Columns of a row:
 *
 *   ID, id    ESA_SELECT_ID; its name, which also begins the names of its functions. Its traits
 *             are ESA_TRAITS_ID: ESA_TRAIT_* of esa_session.h and ESA_ROW_*
 *   work      the price of one selection: a case of esa_work_select in rules/work.h
 *   Bq, Bk    default block sizes
 *   short     1: up to ESA_SHORT_TOKENS keys both default sizes are ESA_SHORT_BLOCK
 *   exact     exact rows per query block of a model run without carry: two are worth more than the
 *             blocks that they cost
 *   order     ESA_ORDER_* of a model run. In a single call TILE is the default where there is a
 *             grid, and RASTER stands for the others
 *   tail      ESA_TAIL_* of a model run
 *   carry     ESA_CARRY_* of a model run
 *   records   what a session of mode RECORD sums
 *   protects  whether frame 0 is kept whole where the layout leaves it open
 *
 * Pure functions for the CPU and the GPU, except for esa_selector_of, which is for the host. */
#ifndef ESA_RULES_SELECTORS_H
#define ESA_RULES_SELECTORS_H

#include "base/inline.h"
#include "esa/esa_session.h"

/* Traits that only the library asks for, above those of esa_session.h. */
enum {
    ESA_ROW_PUBLIC = 0xffff,
    ESA_ROW_KEEPS_ALL = 1 << 16,    /* keeps every block, whatever the budget is */
    ESA_ROW_GRID_COMPAT = 1 << 17,  /* compat modes force rows and columns by the grid of q */
    ESA_ROW_ROUNDS_UP = 1 << 18,    /* a row's share of the budget is rounded up, not to nearest */
    ESA_ROW_ONE_TOTAL = 1 << 19,    /* the budget of all rows together is rounded, not each one's */
    ESA_ROW_CUTS_MASS = 1 << 20,    /* cdf_threshold drops blocks even at budget 1 */
    ESA_ROW_KEEPS_ENDS = 1 << 21,   /* obeys keep_sink and keep_recent */
    ESA_ROW_HEAD_BUDGETS = 1 << 22, /* splits its budget between the heads */
    ESA_ROW_SPREADS = 1 << 23,      /* every head has the same budget, spread over its rows */
    ESA_ROW_SQUARE_CAUSAL = 1 << 24 /* causal compat modes need as many queries as keys */
};
enum { ESA_WORK_NOTHING, ESA_WORK_SAMPLES, ESA_WORK_BLOCKS, ESA_WORK_GROUPS, ESA_WORK_MEANS };
enum { ESA_RECORDS_NOTHING, ESA_RECORDS_IMPORTANCE, ESA_RECORDS_ERRORS };
enum { ESA_PROTECTS_GIVEN, ESA_PROTECTS_NEVER, ESA_PROTECTS_ALWAYS }; /* GIVEN: a given picture */

/* Sets of traits. */
#define ESA_TRAITS_FULL    (ESA_TRAITS_USUAL | ESA_ROW_KEEPS_ALL)
#define ESA_TRAITS_USUAL   (ESA_TRAIT_CENTROID | ESA_TRAIT_CAUSAL | ESA_TRAIT_COMPAT)
#define ESA_TRAITS_ENTROPY (ESA_TRAITS_USUAL | ESA_ROW_HEAD_BUDGETS)
#define ESA_TRAITS_RF_V2                                                                           \
    (ESA_TRAITS_USUAL | ESA_ROW_SPREADS | ESA_ROW_GRID_COMPAT | ESA_ROW_ROUNDS_UP)
#define ESA_TRAITS_ADA_BSA                                                                         \
    (ESA_TRAITS_USUAL | ESA_ROW_SPREADS | ESA_ROW_ONE_TOTAL | ESA_ROW_CUTS_MASS |                  \
     ESA_ROW_KEEPS_ENDS | ESA_ROW_SQUARE_CAUSAL)
#define ESA_TRAITS_RANDOM (ESA_TRAITS_USUAL | ESA_ROW_SPREADS | ESA_TRAIT_BLIND)
#define ESA_TRAITS_ERROR                                                                           \
    (ESA_TRAIT_READS_V | ESA_TRAIT_WEIGHS_TAIL | ESA_TRAIT_ADAPTIVE | ESA_TRAIT_SPENDS)

/* clang-format off */
#define ESA_SELECTORS(ROW) \
/*      ID,      id,      work,     Bq, Bk, short, exact, order, tail, carry, records, protects */ \
    ROW(FULL,    full,    NOTHING, 128, 128, 0, 0, HILBERT,  POOLED, OFF,  NOTHING,    GIVEN)      \
    ROW(ENTROPY, entropy, SAMPLES, 256, 128, 0, 0, HILBERT,  POOLED, OFF,  IMPORTANCE, GIVEN)      \
    ROW(RF_V2,   rf_v2,   BLOCKS,  128, 128, 0, 0, TILE,     POOLED, OFF,  NOTHING,    ALWAYS)     \
    ROW(ADA_BSA, ada_bsa, GROUPS,  128, 128, 0, 0, HILBERT,  POOLED, OFF,  NOTHING,    GIVEN)      \
    ROW(RANDOM,  random,  NOTHING, 128, 128, 0, 0, HILBERT,  POOLED, OFF,  NOTHING,    GIVEN)      \
    ROW(ERROR,   error,   MEANS,   128, 128, 1, 2, ADAPTIVE, LEVELS, AUTO, ERRORS,     NEVER)
/* A row as esa_selector. */
#define ESA_ROW(ID, id, work, Bq, Bk, few, exact, order, tail, carry, records, protects)           \
    { #id, ESA_TRAITS_##ID, ESA_WORK_##work, Bq, Bk, few, exact, ESA_ORDER_##order,                \
      ESA_TAIL_##tail, ESA_CARRY_##carry, ESA_RECORDS_##records, ESA_PROTECTS_##protects },
/* clang-format on */

#define ESA_ONE_SELECTOR(ID, ...) ESA_COUNTED_##ID,
enum { ESA_SELECTORS(ESA_ONE_SELECTOR) ESA_SELECTOR_COUNT };
#undef ESA_ONE_SELECTOR

/* 1 if the selector has the trait. selector may be any number: -1 stands for masks that the caller
 * made. */
ESA_INLINE int32_t esa_selector_has(int32_t selector, int32_t trait)
{
#define ESA_HAS(ID, ...) | ((ESA_TRAITS_##ID & trait) != 0 ? 1u << ESA_SELECT_##ID : 0u)
    const uint32_t set = 0u ESA_SELECTORS(ESA_HAS); /* a constant where trait is one */
#undef ESA_HAS
    return selector >= 0 && selector < ESA_SELECTOR_COUNT && (set >> selector & 1u);
}

typedef struct esa_selector {
    const char *name;
    int32_t traits, work, block_q, block_k, short_blocks, exact_rows;
    int32_t order, tail, carry, records, protects;
} esa_selector;

/* The row of a selector. Other numbers have one of zeros, without a name. */
static inline const esa_selector *esa_selector_of(int32_t selector)
{
    static const esa_selector rows[ESA_SELECTOR_COUNT + 1] = { ESA_SELECTORS(ESA_ROW) };
    return &rows[selector >= 0 && selector < ESA_SELECTOR_COUNT ? selector : ESA_SELECTOR_COUNT];
}

#endif
