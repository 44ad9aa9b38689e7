/* attention.h - one attention call with everything that can vary, and the list of all such calls
 * (attention.def), each with a name.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The tests on the CPU, on a GPU and on the stand-in, the sanitizer runs and
 * `esa bench attention --case` read this list. */
#ifndef ESA_TESTS_CASES_ATTENTION_H
#define ESA_TESTS_CASES_ATTENTION_H

#include <stdint.h>

typedef struct attention_case {
    int64_t B, Hq, Hkv, Nq, Nk, D;
    int32_t dtype, block_q, block_k, causal, tail;
    int32_t order; /* ADAPTIVE: every head has a random order of its own; text stays in place */
    /* 1: tokens before heads in memory; 2: k and o the other way round than q and v */
    int32_t bsnd;
    int32_t pad;      /* elements left free behind each row; twice as many in k, three times in v */
    int32_t misalign; /* bytes added to every pointer; on a GPU one element if not 0 */
    double density;   /* < 0: dense call without a mask; else each block is kept with this chance */
    double range;     /* inputs uniform in [-range, range]; 0 = 1.5 */
    const int32_t *kv_len;
    int32_t grid[3]; /* with order */
    int32_t text_front, text_back;
    int32_t equal_keys; /* 1: all keys and values inside each block are equal */
    /* Means of a block on the fine level (0: the mask has none), and the chance that a block which
     * is not kept is on it. */
    int32_t fine;
    double refined;
    int32_t broadcast; /* 1: the mask has one batch entry for all */
    int32_t exact_rows;
    int32_t precision; /* 0, 8 or 16 */
    /* Added to every element of k and v: a centre that 8-bit attention takes away. */
    double offset;
    int32_t outliers; /* every so many channels of q and k are eight times as large; 0: none */
    int32_t carry;    /* 0: none; CASE_ADD adds a random d, CASE_MAKE makes one from a random o */
    int32_t carry_format;
    int32_t carry_shared; /* CASE_ADD: 1: d has one batch entry for all, 2: d is 0 */
} attention_case;
enum { CASE_ADD = 1, CASE_MAKE = 2 };

/* What a row of attention.def varies. A row stands for every combination, and the name of a case is
 * that of its row and one part per axis. */
enum {
    SIZES = 1 << 0,        /* awkward lengths; D is 64 and 40 in turn, unless the row gives it */
    EDGES = 1 << 1,        /* lengths around the edges of tiles; f16 and bf16 in turn */
    TILES = 1 << 2,        /* the block sizes of the fast GPU kernels; f16 and bf16 in turn */
    SMALL_TILES = 1 << 3,  /* those with a side of 64 */
    DENSITIES = 1 << 4,    /* 0, 0.15, 0.6, 1; f16 and bf16 in turn */
    ODD_DIMS = 1 << 5,     /* D beside those of the fast kernels */
    BOTH_DIMS = 1 << 6,    /* D 64 and 128 */
    ALL_TYPES = 1 << 7,    /* f32, f16, bf16 */
    SHORT_TYPES = 1 << 8,  /* f16, bf16 */
    TWO_TAILS = 1 << 9,    /* none, pooled */
    THREE_TAILS = 1 << 10, /* and centroid */
    FOUR_TAILS = 1 << 11,  /* and levels */
    EIGHT_TAILS = 1 << 12, /* those of 8 bits: none, pooled, levels */
    AND_DENSE = 1 << 13,   /* also without a mask, which has no tail */
    FINES = 1 << 14,       /* 2, 4, 8 and 16 means per block, where they divide it */
    CAUSAL_TOO = 1 << 15,
    SHARED_TOO = 1 << 16, /* also with one mask for all batch entries */
    LAYOUTS = 1 << 17,    /* bsnd 0, 1, 2 */
    FORMATS = 1 << 18,    /* both formats of a carried difference */
    USES = 1 << 19,       /* it is added, and made */
    AXES = 20,
    CARRIES = FORMATS | USES,
    /* Cases take turns. With TILES: tails if there are exact rows, densities if there is a carry.
     * With ODD_DIMS: three tails. Else: D 40, 64, 72, 128, blocks of 48 and 64, and three densities
     * if there is a carry. Always: 1 to 16 exact rows if there are any. */
    TURNS = 1 << 20,
    ON_GPU = 1 << 21, /* on a GPU only, unless it is named */
    ALWAYS = 1 << 22, /* also where few cases have to do ($ESA_TEST_SMALL) */
    LESS = 1 << 23,   /* at most 2 heads and 1300 keys on the stand-in */
    BITS = 1 << 24    /* compares the bits of two runs, instead of the textbook */
};

typedef struct case_walk {
    int32_t row, at; /* of the next case; start with 0 */
    uint32_t flags;  /* of the row */
    attention_case c;
    char name[120];
} case_walk;

/* 1: w holds the next case of the list; 0: there is none left. */
int case_next(case_walk *w);

#endif
