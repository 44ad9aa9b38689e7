/* mask_cell.h - one cell (branch, layer, step group) of a mask file: turns stored
 * importance into masks.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Prebuilt and derived masks are both made here from the bytes in the file, so they are
 * identical. The rule (entropies, budgets, forced blocks, top-k) is the second half of the
 * entropy selector, esa_select_from_importance. */
#ifndef ESA_MASKFILE_MASK_CELL_H
#define ESA_MASKFILE_MASK_CELL_H

#include "esa/esa_session.h"
#include "select/select.h"
#include "maskfile/mask_code.h"

typedef struct esa_cell {
    esa_ctx *ctx;
    esa_mask_file_info info; /* geometry, selector, layout */
    esa_code_table table;
    esa_select_args args;
    float *p; /* [H][nq][nk] decoded; rows sum to 1, an all-zero row is uniform */
    int64_t p_bytes;
    esa_mask *mask; /* B = 1 */
    void *ws;
    int64_t ws_bytes;
} esa_cell;

/* Allocates buffers for cells of this geometry. On failure cell is empty. */
esa_status esa_cell_create(esa_ctx *ctx, esa_cell *cell, const esa_mask_file_info *info);
void esa_cell_free(esa_cell *cell);
/* Decode into p: code u8[H][nq][nk] with fine u8[H][nq][esa_fine_bytes(nk)], or half f16[H][nq][nk]
 * at any alignment. */
void esa_cell_load_u8(esa_cell *cell, const uint8_t *code, const uint8_t *fine);
void esa_cell_load_f16(esa_cell *cell, const void *half);
/* Normalised entropy per head of the loaded importance: entropy[H]. */
void esa_cell_entropy(esa_cell *cell, float *entropy);
/* Masks of a budget as bits [H][nq][ceil(nk/8)], and the kept share of p per head: mass[H]. */
void esa_cell_mask(esa_cell *cell, int32_t permille, uint8_t *bits, float *mass);

/* Number of kept blocks in bits of rows x ceil(nk/8) bytes. */
int64_t esa_bits_kept(const uint8_t *bits, int64_t rows, int64_t nk);
/* 1 if no row has a bit at or above nk. */
int32_t esa_bits_clean(const uint8_t *bits, int64_t rows, int64_t nk);

#endif
