/* mask_code.h - how a mask file stores block importance: a logarithm of 8 + 2 bits per block and
 * one float per row.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A row p[nk] is stored as rowmax (f32) and one code per block, with x = log2(rowmax / p):
 *
 *     c  = min(255, round(12 x))                 twelve steps per octave, 21 octaves
 *     f  = floor(48 x + 2)                       two more bits divide each step into four:
 *     c  = f / 4, fine = f % 4
 *     p' = rowmax 2^(-(f - 1.5) / 48)            the decoded value, the middle of a fine step
 *
 * Without the two bits, two blocks in a hundred would move across the threshold of a mask (measured
 * in docs/mask-files.md). At c = 255 they say how small p is: 0, 1 and 2 are one octave each, 3 is
 * zero.
 *
 * Coding and decoding use tables of constants instead of libm, so they give the same bits
 * on every machine. */
#ifndef ESA_MASKFILE_MASK_CODE_H
#define ESA_MASKFILE_MASK_CODE_H

#include <stdint.h>

#define ESA_CODE_LAST 255

/* Bytes of the fine bits of a row. Block j has bits 2 (j % 4) and 2 (j % 4) + 1 of byte j / 4. */
static inline int64_t esa_fine_bytes(int64_t nk) { return (nk + 3) / 4; }

/* Codes integer sums of a recording: code[nk], fine[esa_fine_bytes(nk)]. Returns the largest sum of
 * the row. */
uint64_t esa_code_from_sums(uint8_t *code, uint8_t *fine, const uint64_t *sum, int64_t nk);
/* Codes floats; NaN and negatives count as 0. Returns the largest. */
float esa_code_from_f32(uint8_t *code, uint8_t *fine, const float *p, int64_t nk);
/* p / rowmax for every value of 4 c + fine. */
typedef struct esa_code_table {
    double weight[1024];
} esa_code_table;
void esa_code_table_init(esa_code_table *table);
/* Decodes a row into out[nk]. */
void esa_code_decode(float *out, const uint8_t *code, const uint8_t *fine, float rowmax, int64_t nk,
                     const esa_code_table *table);
/* Normalised entropy of a row of floats >= 0 that sums to 1: -sum p ln p / ln nk. 1 for nk = 1. */
double esa_row_entropy(const float *p, int64_t nk);

#endif
