/* mask_code.h - how block importance rests in a file: an 8-bit logarithm per block with one float per row, or half floats.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A row p[nk] is kept as rowmax (f32) and c_j = min(255, round(12 log2(rowmax / p_j))): twelve steps an octave, 21 octaves, code 255
 * is zero. Decoded: p'_j = rowmax 2^(-c_j / 12). Coding and decoding use tables of constants instead of libm, so they give the same
 * bits on every machine. */
#ifndef ESA_SESSION_MASK_CODE_H
#define ESA_SESSION_MASK_CODE_H

#include <stdint.h>

#define ESA_CODE_ZERO 255

/* Integer sums of a recording -> codes. The row's largest sum gets code 0; all zero gives 255 everywhere. Returns the largest. */
uint64_t esa_code_from_sums(uint8_t *code, const uint64_t *sum, int64_t nk);
/* Floats >= 0 -> codes; returns the largest. */
float    esa_code_from_f32(uint8_t *code, const float *p, int64_t nk);
/* 2^(-c/12) for every code, 0 for 255. */
typedef struct esa_code_table { double weight[256]; } esa_code_table;
void     esa_code_table_init(esa_code_table *table);
/* out[nk] = decoded row. */
void     esa_code_decode(float *out, const uint8_t *code, float rowmax, int64_t nk, const esa_code_table *table);
/* Normalised entropy of a row of floats >= 0 that sums to 1: -sum p ln p / ln nk; 1 for nk = 1. */
double   esa_row_entropy(const float *p, int64_t nk);

#endif
