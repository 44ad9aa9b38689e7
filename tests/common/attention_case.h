/* attention_case.h - one attention call (cases/attention.h), run and compared with the naive one.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_TESTS_ATTENTION_CASE_H
#define ESA_TESTS_ATTENTION_CASE_H

#include "cases/attention.h"
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

/* All levels this machine has, into level (room for 8); returns their number. native: how many a
 * ctx can be made for by itself. */
int find_test_levels(int32_t *level, int *native);
/* A ctx of a level. */
esa_ctx *level_ctx(int32_t level, int32_t threads);
/* Runs the case on every given level and checks: output and LSE within the bound (twice the error
 * of a naive same-precision attention plus a floor from the data), guard bytes untouched. On a GPU
 * it also runs the case without asking for the LSE. A d that the case makes must be right against
 * the textbook, have the bits that rules/carry.h gives for the output of the same call without a
 * carry, and leave o and the LSE as they were. Returns the number of wrong runs, each printed. */
int check_attention(const attention_case *c, const int32_t *level, int levels, int32_t threads);
/* Runs the case several times, with 1 to 5 threads, on a GPU with a call of another tail in
 * between: the bits must be the same. A carry that is added, if it is 0, must give the bits of the
 * call without it. */
int check_bits(const attention_case *c, const int32_t *level, int levels);
/* Runs the case and returns the error of the output against the textbook, relative in the L2 norm.
 * *lse receives the largest error of the LSE; infinity if an empty row is missing or invented.
 * Fails the test if the call fails or guard bytes changed. */
double attention_error(const attention_case *c, int32_t level, int32_t threads, double *lse);
/* 1 if a d that the case makes has the bits of rules/carry.h (check_attention). */
int made_bits_right(const attention_case *c, int32_t level, int32_t threads);
/* Output bits of the case, for comparing runs: o, LSE and d. The caller frees. bytes receives their
 * number. */
void *attention_bits(const attention_case *c, int32_t level, int32_t threads, int64_t *bytes);
/* Fails the test if the two cases differ in a bit on one of the levels. */
void expect_same_bits(const attention_case *a, const attention_case *b, const int32_t *level,
                      int levels);

#endif
