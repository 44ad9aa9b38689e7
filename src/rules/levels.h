/* levels.h - the rules of the error selector: block and group sizes, and which level each block
 * gets.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The score of a block is the squared error of the output if the tail stands in for it: e_mean for
 * one mean (or nothing), e_fine for `fine` means. Exact blocks have error 0. Costs are in key
 * columns: an exact block costs Bk, a fine block `fine`, a mean 1 (tails NONE and POOLED: exact
 * costs 1, anything else 0, so that the budget counts blocks).
 *
 * Every block starts at its cheapest level and is raised in steps. A step has a gain (error saved
 * per column) and a weight (columns). A block has one or two steps:
 *
 *     mean -> fine     (e_mean - e_fine) / (fine - 1)
 *     fine -> exact     e_fine / (Bk - fine)
 *     mean -> exact     e_mean / (Bk - 1)
 *
 * It takes the two upper ones if the first gains more per column than the second, else the third.
 * Steps with the largest gains are taken, over all heads and rows of a batch entry, as long as the
 * budget lasts. Equal gains are taken in the order of (head, row, block); the first that does not
 * fit ends the selection. Forced blocks (rules/rows.h) and the block with the largest e_mean of
 * every row (the first of equals) are exact in any case and are paid for first.
 *
 * Pure functions for the CPU and the GPU. */
#ifndef ESA_RULES_LEVELS_H
#define ESA_RULES_LEVELS_H

#include <math.h>
#include <string.h>
#include "base/args.h"
#include "rules/selectors.h"

enum { ESA_LEVEL_EXACT = 0, ESA_LEVEL_FINE = 1, ESA_LEVEL_MEAN = 2 };

typedef struct esa_level_costs {
    int32_t exact, fine, mean; /* columns */
    int32_t levels;            /* 2: with the fine level; 1: without */
} esa_level_costs;

ESA_INLINE esa_level_costs esa_level_costs_of(const esa_select_params *p)
{
    const esa_level_costs with = { p->block_k, p->fine, 1, 2 }, without = { 1, 0, 0, 1 };
    return p->tail == ESA_TAIL_LEVELS ? with : without;
}

/* A gain as a number that sorts like it: gains are never negative, and NaN counts as infinite. */
ESA_INLINE uint32_t esa_gain_key(float gain)
{
    uint32_t bits;
    if (!(gain > 0.0f)) return gain == gain ? 0u : 0x7f800000u;
    memcpy(&bits, &gain, 4);
    return bits;
}

typedef struct esa_level_steps {
    uint32_t key[2];   /* gains, not ascending */
    int32_t weight[2]; /* columns; 0: no such step */
    int32_t via_fine;  /* 1: the first step leads to the fine level, the second to exact */
} esa_level_steps;

ESA_INLINE esa_level_steps esa_level_steps_of(const esa_level_costs *c, float e_mean, float e_fine)
{
    esa_level_steps s = { { 0u, 0u }, { c->exact - c->mean, 0 }, 0 };
    s.key[0] = esa_gain_key(e_mean / (float)(c->exact - c->mean));
    if (c->levels == 1) return s;
    const uint32_t first = esa_gain_key((e_mean - e_fine) / (float)(c->fine - c->mean)),
                   second = esa_gain_key(e_fine / (float)(c->exact - c->fine));
    if (first <= second) return s;
    s.key[0] = first;
    s.key[1] = second;
    s.weight[0] = c->fine - c->mean;
    s.weight[1] = c->exact - c->fine;
    s.via_fine = 1;
    return s;
}

/* Where the selection of a batch entry ends. Blocks are numbered in the order of (head, row,
 * block). A step is taken if its gain is above key, or if it equals key and its block comes before
 * first_out. */
typedef struct esa_level_cut {
    uint32_t key;
    int64_t first_out;
} esa_level_cut;

ESA_INLINE int32_t esa_step_taken(const esa_level_cut *cut, uint32_t key, int64_t block)
{
    return key > cut->key || (key == cut->key && block < cut->first_out);
}

/* ESA_LEVEL_* of a block that is not exact in any case. */
ESA_INLINE int32_t esa_level_of(const esa_level_steps *s, const esa_level_cut *cut, int64_t block)
{
    if (!esa_step_taken(cut, s->key[0], block)) return ESA_LEVEL_MEAN;
    if (s->via_fine && !esa_step_taken(cut, s->key[1], block)) return ESA_LEVEL_FINE;
    return ESA_LEVEL_EXACT;
}

/* The key of the cut is found digit by digit: a round sums the weights of the steps per digit,
 * among the steps whose higher digits are those found so far. Sums of integers do not depend on
 * their order, so any number of threads finds the same cut. Keys have 31 bits. */
enum { ESA_CUT_ROUNDS = 3, ESA_CUT_BINS = 2048 };

ESA_INLINE int32_t esa_cut_shift(int32_t round) { return round == 0 ? 20 : round == 1 ? 9 : 0; }

/* Digit of a key in a round; -1 if its higher digits differ from those of found. */
ESA_INLINE int32_t esa_cut_digit(uint32_t key, uint32_t found, int32_t round)
{
    const int32_t shift = esa_cut_shift(round), above = round == 0 ? 31 : esa_cut_shift(round - 1);
    if (key >> above != found >> above) return -1;
    return (int32_t)(key >> shift & ((1u << (above - shift)) - 1u));
}

/* The digit in which the columns that are left run out, from the highest digit on; -1 if every step
 * fits. *left keeps what the higher digits leave. */
ESA_INLINE int32_t esa_cut_walk(const int64_t *weight, int64_t *left)
{
    for (int32_t d = ESA_CUT_BINS; d-- > 0;) {
        if (weight[d] > *left) return d;
        *left -= weight[d];
    }
    return -1;
}

/* Columns that the budget gives one batch entry. existing: blocks of all heads and rows. */
ESA_INLINE int64_t esa_level_budget(const esa_level_costs *c, double budget, int64_t existing)
{
    return (int64_t)floor(esa_mul(budget, (double)existing * c->exact) + 0.5);
}

/* The selector's own block sizes for Nk keys, where none were given. */
static inline void esa_default_blocks(esa_select_params *p, int64_t Nk)
{
    const esa_selector *s = esa_selector_of(p->selector);
    const int32_t small = s->short_blocks && Nk <= ESA_SHORT_TOKENS;
    if (!p->block_q) p->block_q = small ? ESA_SHORT_BLOCK : s->block_q;
    if (!p->block_k) p->block_k = small ? ESA_SHORT_BLOCK : s->block_k;
}

/* Means per block on the fine level of the masks; 0: they have none. p is checked. */
ESA_INLINE int32_t esa_select_fine(const esa_select_params *p)
{
    return esa_selector_has(p->selector, ESA_TRAIT_WEIGHS_TAIL) && p->tail == ESA_TAIL_LEVELS
               ? p->fine
               : 0;
}

/* Tokens that a mean query and a mean key stand for: the default of a block size, and the size that
 * params ask for or leave open. A group must divide the block, and a mean key must be finer than a
 * fine mean. esa_error_keys reads the chosen number of fine means. */
ESA_INLINE int32_t esa_error_group_q(int32_t block_q) { return block_q >= 128 ? 16 : 8; }
ESA_INLINE int32_t esa_error_group_k(int32_t block_k)
{
    (void)block_k;
    return 4;
}
ESA_INLINE int32_t esa_error_queries(const esa_select_params *p)
{
    return p->group_q > 0 ? p->group_q : esa_error_group_q(p->block_q);
}
/* Means of a fine block: 8, if they are long enough for the groups of mean keys; else 4. */
ESA_INLINE int32_t esa_error_fine(const esa_select_params *p)
{
    const int32_t group = p->group_k > 0 ? p->group_k : esa_error_group_k(p->block_k),
                  part = p->block_k / 8;
    if (p->fine) return p->fine;
    return part > group && part % group == 0 ? 8 : 4;
}
/* A group of keys, halved until a fine mean of params is longer than it and a multiple of it. */
ESA_INLINE int32_t esa_error_group_fits(const esa_select_params *p, int32_t group)
{
    if (p->tail == ESA_TAIL_LEVELS && p->fine > 0) {
        const int32_t part = p->block_k / p->fine;
        while (group > 1 && (2 * group > part || part % group != 0)) group /= 2;
    }
    return group;
}
ESA_INLINE int32_t esa_error_keys(const esa_select_params *p)
{
    return p->group_k > 0 ? p->group_k : esa_error_group_fits(p, esa_error_group_k(p->block_k));
}

/* Scores are recorded once for many videos, so they may cost more than those of a running model.
 * Where params leave the groups open, a recording has about 32 means a block, which is the most
 * that the tensor cores of a GPU take. Short blocks belong to short videos, and single keys are
 * worth more there than the time they cost. */
ESA_INLINE int32_t esa_record_group(int32_t block)
{
    int32_t group = 1;
    while (group < 16 && block / (2 * group) >= 32) group *= 2;
    return group;
}
ESA_INLINE int32_t esa_record_group_k(int32_t block_k)
{
    return block_k <= ESA_SHORT_BLOCK ? 1 : esa_record_group(block_k);
}
/* Fills the blocks, fine means and groups of a recording that are open. */
static inline void esa_record_sizes(esa_select_params *p, int64_t Nk)
{
    esa_default_blocks(p, Nk);
    if (!esa_selector_has(p->selector, ESA_TRAIT_WEIGHS_TAIL)) return;
    if (p->tail == ESA_TAIL_LEVELS) p->fine = esa_error_fine(p);
    if (!p->group_q) p->group_q = esa_record_group(p->block_q);
    if (!p->group_k) p->group_k = esa_error_group_fits(p, esa_record_group_k(p->block_k));
}

#endif
