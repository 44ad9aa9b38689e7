/* run_info.h - the settings of a run in a recording or a mask file, written to and read from
 * safetensors metadata.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Both kinds of file use esa_mask_file_info. docs/mask-files.md lists the keys. */
#ifndef ESA_MASKFILE_RUN_INFO_H
#define ESA_MASKFILE_RUN_INFO_H

#include "base/args.h"
#include "esa/esa_session.h"
#include "io/safetensors.h"
#include "rules/selectors.h"

/* Version 1 holds importance and masks of one level. Version 2 adds error scores and the fine
 * level; files that need neither are still written as version 1. */
#define ESA_MASK_FORMAT_VERSION 1
#define ESA_MASK_FORMAT_LEVELS  2
#define ESA_MAX_CELL_AXIS       65535 /* largest L, T, G and number of branches in a file */
#define ESA_MAX_BUDGETS         16

/* 1 if the run chose, or recorded, by error scores; 0: by importance, or it recorded nothing. */
static inline int32_t esa_run_errors(const esa_mask_file_info *f)
{
    return esa_selector_of(f->selector)->records == ESA_RECORDS_ERRORS;
}
/* The format version that these settings need. */
static inline int32_t esa_run_version(const esa_mask_file_info *f)
{
    return esa_run_errors(f) || f->fine ? ESA_MASK_FORMAT_LEVELS : ESA_MASK_FORMAT_VERSION;
}
/* Scores that a recording holds per block: of one mean and, with tail LEVELS, of fine means. */
static inline int32_t esa_run_levels(const esa_mask_file_info *f)
{
    return esa_run_errors(f) && f->tail == ESA_TAIL_LEVELS ? 2 : 1;
}

/* Binds selection of one cell from stored scores: geometry, layout and mode of the run, one batch
 * entry. Views and the selector's own params are left to the caller. */
void esa_run_bind(esa_select_args *args, const esa_ctx *ctx, int32_t selector,
                  const esa_mask_file_info *info);

/* Writes format, version and all fields except budgets, file_bytes and the stored_* counts, which
 * follow from the tensors. */
esa_status esa_run_write(esa_tensors_writer *writer, const esa_mask_file_info *info,
                         const char *format);
/* Reads and checks these fields. Refuses a file of another format with a message that says what the
 * file is. The layout of *info is resolved and fits Nq and Nk. */
esa_status esa_run_read(esa_ctx *ctx, esa_mask_file_info *info, const esa_tensors *file,
                        const char *format);
/* ESA_OK if both runs have the same settings (prompts may differ). Else ESA_ERR_MISMATCH with a
 * message that names both. */
esa_status esa_run_same(esa_ctx *ctx, const esa_mask_file_info *a, const char *name_a,
                        const esa_mask_file_info *b, const char *name_b);

/* 1 if masks and sums of one resolved layout fit the other: esa_layout_same and the same protected
 * frames, which force blocks even where they move no token. */
int32_t esa_run_layout_same(const esa_layout *a, const esa_layout *b);

/* ESA_OK if the given layout matches that of the file (f, name). Fields that the caller leaves open
 * always match. who: the name of the caller in messages. */
esa_status esa_run_check_layout(esa_ctx *ctx, const esa_mask_file_info *f, const char *name,
                                const esa_layout *given, const char *who);

/* Step group of step i: floor(i * groups / steps). */
static inline int32_t esa_step_group(int32_t i, int32_t groups, int32_t steps)
{
    return (int32_t)((int64_t)i * groups / steps);
}
/* Text for messages. */
typedef struct esa_run_text {
    char text[224];
} esa_run_text;
/* esa_run_describe_layout: "grid 21x30x52, order tile3d 2x8x8, text 0 + 512, frame 0 protected",
 * and the key side if it differs. esa_run_describe: "N=32760 (grid 21x30x52), 12 heads, 30 layers,
 * 50 steps"; it leaves out layers or steps that are negative. */
esa_run_text esa_run_describe_layout(const esa_layout *y);
esa_run_text esa_run_describe(int64_t Nq, int64_t Nk, const int32_t grid_q[3], int64_t H,
                              int32_t layers, int32_t steps);

#endif
