/* mask_file.h - an open mask file, and a mask file being written. These calls do not take the ctx
 * guard; the public calls do.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MASKFILE_MASK_FILE_H
#define ESA_MASKFILE_MASK_FILE_H

#include "base/engine.h"
#include "maskfile/mask_cell.h"
#include "maskfile/run_info.h"

/* Masks of one budget for all stored cells. They are in the mapped file, or derived and owned. */
typedef struct esa_budget_masks {
    struct esa_budget_masks *next;
    int32_t permille;
    const uint8_t *bits; /* [cells][H][nq][ceil(nk/8)] */
    const uint8_t *fine; /* the same for the fine level; NULL: the masks have none */
    const uint8_t *mass; /* f32[cells][H] at any alignment; NULL: unknown */
    /* f32[cells] at any alignment: the budget of each cell, 1: it runs dense. NULL: the same for
     * all cells */
    const uint8_t *density;
    uint8_t *owned; /* derived masks: the memory of bits and mass; NULL: mapped */
    int64_t owned_bytes;
} esa_budget_masks;

struct esa_mask_file {
    esa_ctx *ctx;
    esa_allocator mem;
    esa_tensors *tensors; /* owned */
    esa_mask_file_info info;
    int32_t *step_group;   /* [T]; these five share one allocation */
    int32_t *layer_slot;   /* [L] index among the stored layers, -1: not stored */
    int32_t *group_slot;   /* [G] the same for groups */
    int32_t *stored_layer; /* [Ls] */
    int32_t *stored_group; /* [Gs] */
    int64_t index_bytes;
    int64_t cells, cell_bytes; /* branches * Ls * Gs; H nq ceil(nk/8) */
    const uint8_t *importance; /* NULL: none. u8 or f16 [cells][H][nq][nk] */
    const uint8_t *fine;       /* u8 only: [cells][H][nq][esa_fine_bytes(nk)] */
    const uint8_t *rowmax;     /* u8 only: f32[cells][H][nq] at any alignment */
    const uint8_t *entropy;    /* f32[cells][H] at any alignment, or NULL */
    esa_budget_masks *budgets; /* owned list */
};

/* Takes ownership of tensors, even on failure. */
ESA_ENGINE esa_status esa_mask_file_make(esa_ctx *ctx, esa_mask_file **file, esa_tensors *tensors);
/* Fails if file is NULL or belongs to another ctx. */
esa_status esa_mask_file_check_ctx(esa_ctx *ctx, const esa_mask_file *file);
/* Nearest per mille of a budget; -1 and a message if it is not in 0 .. 1. */
int32_t esa_budget_permille(esa_ctx *ctx, double budget);
/* Finds the masks of a budget, and derives them if necessary. */
esa_status esa_mask_file_budget(esa_mask_file *file, const esa_budget_masks **masks,
                                int32_t permille);
/* Number of the cell of layer, step group and branch, or -1: not stored. A file with one branch
 * serves all. */
int64_t esa_mask_file_cell(const esa_mask_file *file, int32_t layer, int32_t group, int32_t branch);
/* ESA_ERR_FORMAT if a row of the cell has bits beyond its key blocks, or a block on both levels. */
esa_status esa_mask_file_check_bits(const esa_mask_file *file, const esa_budget_masks *masks,
                                    int64_t cell);
/* The budget of a cell; 1: it runs dense. */
double esa_mask_file_cell_density(const esa_budget_masks *masks, int64_t cell);
/* 1 if the masks were built for a total work each (selector ERROR); else for a budget each. */
int32_t esa_mask_file_has_works(const esa_mask_file *file);
/* Work of one call with a mask on the host. (mask_work.c) */
double esa_mask_file_mask_work(const esa_mask *mask, int32_t tail, int32_t exact_rows);
/* Work of the exact rows of one sparse call. (mask_work.c) */
double esa_mask_file_exact_work(const esa_mask_file_info *info);
/* *permille = the largest stored work that is not above work. ESA_ERR_MISMATCH if there is none.
 * (mask_work.c) */
esa_status esa_mask_file_pick(esa_mask_file *file, int32_t *permille, double work);
/* Number of blocks of all heads that a selection may keep. */
int64_t esa_mask_file_existing(const esa_mask_file_info *info);
/* Loads the importance of a cell into cell->p. */
void esa_mask_file_load(const esa_mask_file *file, esa_cell *cell, int64_t index);

/* A mask file being written: begin, then cells in any order, then finish, then free. Free abandons
 * an unfinished file. */
typedef struct esa_mask_output {
    esa_ctx *ctx;
    esa_tensors_writer *writer;
    esa_mask_file_info info;
    int64_t cells, cell_bytes;
    /* -1: not in this file */
    int64_t tensor_importance, tensor_fine, tensor_rowmax, tensor_entropy;
    int64_t tensor_bits[ESA_MAX_BUDGETS], tensor_mass[ESA_MAX_BUDGETS];
    int64_t tensor_level[ESA_MAX_BUDGETS], tensor_density[ESA_MAX_BUDGETS];
    uint8_t *bits; /* [2][cell_bytes] scratch */
    float *heads;  /* [H] scratch */
} esa_mask_output;

/* What begin needs besides info. */
typedef struct esa_mask_axes {
    const int32_t *step_group; /* [T] */
    /* Ascending; info.stored_layers and info.stored_groups entries. */
    const int32_t *stored_layer, *stored_group;
    int32_t with_entropy, with_mass, with_density;
} esa_mask_axes;

/* The masks of one cell and budget. */
typedef struct esa_cell_masks {
    const uint8_t *bits, *fine; /* [H][nq][ceil(nk/8)]; fine: NULL if the file has no such level */
    const float *mass;          /* [H]; NULL if the file has none */
    float density;              /* if the file has densities */
} esa_cell_masks;

/* info describes the file to write. On failure no file exists and out needs no free. */
esa_status esa_mask_output_begin(esa_ctx *ctx, esa_mask_output *out, const char *path,
                                 const esa_mask_file_info *info, const esa_mask_axes *axes);
/* Writes entropy, masks and mass of every budget from the importance loaded in cell. */
esa_status esa_mask_output_select(esa_mask_output *out, int64_t index, esa_cell *cell);
/* Writes importance as stored: u8 with fine and rowmax[H][nq], or f16. */
esa_status esa_mask_output_importance(esa_mask_output *out, int64_t index, const void *importance,
                                      const uint8_t *fine, const float *rowmax);
/* Writes finished masks of budget number b. */
esa_status esa_mask_output_masks(esa_mask_output *out, int64_t index, int32_t b,
                                 const esa_cell_masks *masks);
esa_status esa_mask_output_finish(esa_mask_output *out);
void esa_mask_output_free(esa_mask_output *out);

#endif
