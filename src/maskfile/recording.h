/* recording.h - integer sums of importance: in a running session, and in a file.
 * SPDX-License-Identifier: Apache-2.0
 *
 * One contribution is the importance of one call and batch entry, as round(p * 2^24) per block.
 * Sums are integers, so neither the order of contributions nor how they were split over runs can
 * change a bit. A sum holds 255 contributions in 32 bits (255 * 2^24 < 2^32).
 *
 * File: format "esa.recording", metadata as in a mask file, tensors
 *   dense_layers I32[n]               layers that were left out on purpose
 *   count        I32[branches,L,G]    contributions per cell
 *   sums         U32[C,H,nq,nk]       of the C cells with count > 0, in that order */
#ifndef ESA_MASKFILE_RECORDING_H
#define ESA_MASKFILE_RECORDING_H

#include "maskfile/run_info.h"

#define ESA_RECORD_ONE  16777216.0 /* 2^24 */
#define ESA_RECORD_MOST 255        /* contributions of one cell */

/* Sums in memory. Cells are numbered (branch * L + layer) * G + group. */
typedef struct esa_recorder {
    esa_ctx *ctx;
    esa_mask_file_info info; /* H = 0 until the first call fixes the geometry */
    int32_t *dense_layer;    /* [dense_layers], ascending; owned */
    int32_t dense_layers;
    int64_t cells, blocks; /* branches L G; H nq nk */
    int32_t *count;        /* [cells] */
    uint32_t **sum;        /* [cells], each [H][nq][nk], made at the first contribution */
} esa_recorder;

/* info gives everything but geometry (H, Nq, Nk, nq, nk, layout). dense_layer is copied. On failure
 * the recorder is empty. */
esa_status esa_recorder_create(esa_ctx *ctx, esa_recorder *rec, const esa_mask_file_info *info,
                               const int32_t *dense_layer, int32_t dense_layers);
void esa_recorder_free(esa_recorder *rec);
/* Makes sure `more` contributions fit into a cell and its memory exists. */
esa_status esa_recorder_reserve(esa_recorder *rec, int64_t cell, int32_t more);
/* Adds p[H][nq][nk] to a reserved cell. */
void esa_recorder_add(esa_recorder *rec, int64_t cell, const float *p);

/* Back to before the first call: no geometry, no memory for sums. Only while nothing has been
 * added. */
void esa_recorder_forget(esa_recorder *rec);

/* A recording file, mapped. */
typedef struct esa_recording {
    esa_tensors *tensors; /* owned */
    esa_mask_file_info info;
    int32_t *count; /* [cells]; owned */
    int64_t *slot;  /* [cells] index into sums, -1: none; owned */
    int64_t cells, blocks;
    const uint8_t *sums;        /* u32, any alignment */
    const uint8_t *dense_layer; /* i32[dense_layers], any alignment */
    int32_t dense_layers;
} esa_recording;

/* On failure rec is empty; make takes tensors over in any case. */
esa_status esa_recording_open(esa_ctx *ctx, esa_recording *rec, const char *path);
esa_status esa_recording_make(esa_ctx *ctx, esa_recording *rec, esa_tensors *tensors);
void esa_recording_close(esa_ctx *ctx, esa_recording *rec);
/* Opens `count` recordings of one run into *out (an array to be given to esa_recordings_close),
 * checks that they agree, and adds up prompts into *info. */
esa_status esa_recordings_open(esa_ctx *ctx, esa_recording **out, esa_mask_file_info *info,
                               const char *const *path, int32_t count);
void esa_recordings_close(esa_ctx *ctx, esa_recording *rec, int32_t count);
/* Every sum within count * 2^24: reads the whole file. */
esa_status esa_recording_check_sums(esa_ctx *ctx, const esa_recording *rec);
/* 1 if the layer was left out on purpose. */
int32_t esa_recording_is_dense(const esa_recording *rec, int32_t layer);
/* Contributions of a cell over several recordings, and one row of their sum: row r of H * nq into
 * sum[nk]. */
int64_t esa_recordings_count(const esa_recording *rec, int32_t count, int64_t cell);
void esa_recordings_row(uint64_t *sum, const esa_recording *rec, int32_t count, int64_t cell,
                        int64_t r);

#endif
