/* attention_case.h - one attention call with everything that can vary, run and compared with the
 * naive one.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_ATTENTION_CASE_H
#define ESA_TESTS_ATTENTION_CASE_H

#include "esa/esa_carry.h"

/* Levels of the tests alone, beside ESA_CPU_*: the bf16 set with its instructions emulated
 * (bf16_emulated.h), the one over AMX tiles likewise (tiles_emulated.h), the best set with 8-bit
 * attention as in the kernels sm80-8bit (P and v in f16) and sm89-8bit, and on a GPU (on_gpu.h)
 * the kernels it gets by itself and the sm80 ones. */
enum {
    CPU_BF16_EMULATED = 100,
    CPU_SM80 = 101,
    CPU_SM89 = 102,
    CPU_TILES_EMULATED = 103,
    GPU_BEST = 200,
    GPU_SM80 = 201
};

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

/* All levels this machine has, into level (room for 8); returns their number. native: how many a
 * ctx can be made for by itself. */
int find_test_levels(int32_t *level, int *native);
/* A ctx of a level. */
esa_ctx *level_ctx(int32_t level, int32_t threads);
/* Runs the case on every given level and checks: output and LSE within the bound (twice the error
 * of a naive same-precision attention plus a floor from the data), guard bytes untouched. On a GPU
 * it also runs the case without asking for the LSE. A d that the case makes must be right against
 * the textbook, have the bits that rules/carry.h gives for the output of the same call without a
 * carry, and leave o and the LSE as they were. Prints a wrong case and goes on; no_wrong_case, as
 * the teardown of the test, makes it fail. */
int no_wrong_case(void **state);
void check_attention(const attention_case *c, const int32_t *level, int levels, int32_t threads);
/* Runs the case and returns the error of the output against the textbook, relative in the L2 norm.
 * *lse receives the largest error of the LSE; infinity if an empty row is missing or invented.
 * Fails the test if the call fails or guard bytes changed. */
double attention_error(const attention_case *c, int32_t level, int32_t threads, double *lse);
/* 1 if a d that the case makes has the bits of rules/carry.h (check_attention). */
int made_bits_right(const attention_case *c, int32_t level, int32_t threads);
/* Output bits of the case, for comparing runs: o, LSE and d. The caller frees. bytes receives their
 * number. */
void *attention_bits(const attention_case *c, int32_t level, int32_t threads, int64_t *bytes);

#endif
