/* recording.h - integer sums of importance, in memory while a session records and in a file.
 * SPDX-License-Identifier: Apache-2.0
 *
 * One contribution is the importance of one call and batch entry, as round(p * 2^24) per block.
 * Sums are integers, so the order of contributions and their split over runs cannot change a bit. A
 * sum holds 255 contributions in 32 bits (255 * 2^24 < 2^32).
 *
 * The file has format "esa.recording", the metadata of a mask file, and these tensors:
 *   dense_layers  I32[n]             layers left out on purpose
 *   count         I32[branches,L,G]  contributions per cell
 *   sums          U32[C,H,nq,nk]     the C cells with count > 0, in that order */
#ifndef ESA_MASKFILE_RECORDING_H
#define ESA_MASKFILE_RECORDING_H

#include "maskfile/run_info.h"

#define ESA_RECORD_ONE  16777216.0 /* 2^24 */
#define ESA_RECORD_MOST 255        /* contributions per cell */

/* The sums in memory. Cell number: (branch * L + layer) * G + group. */
typedef struct esa_recorder {
    esa_ctx *ctx;
    esa_mask_file_info info; /* H = 0 until the first call sets the geometry */
    int32_t *dense_layer;    /* [dense_layers], ascending; owned */
    int32_t dense_layers;
    int64_t cells, blocks; /* branches L G; H nq nk */
    int32_t *count;        /* [cells] */
    uint32_t **sum;        /* [cells], each [H][nq][nk], allocated at the first contribution */
} esa_recorder;

/* info gives everything but the geometry (H, Nq, Nk, nq, nk, layout). dense_layer is copied. On
 * failure the recorder is empty. */
esa_status esa_recorder_create(esa_ctx *ctx, esa_recorder *rec, const esa_mask_file_info *info,
                               const int32_t *dense_layer, int32_t dense_layers);
void esa_recorder_free(esa_recorder *rec);
/* Checks that `more` contributions fit into a cell, and allocates its sums. */
esa_status esa_recorder_reserve(esa_recorder *rec, int64_t cell, int32_t more);
/* Adds p[H][nq][nk] to a reserved cell. */
void esa_recorder_add(esa_recorder *rec, int64_t cell, const float *p);

/* Resets to the state before the first call: no geometry, no sums. Call it only if nothing was
 * added. */
void esa_recorder_forget(esa_recorder *rec);

/* Writes the sums to a recording file. ESA_ERR_STATE if there are none. */
esa_status esa_recorder_save(const esa_recorder *rec, const char *path);
/* Adds the sums of a recording file with the same settings. layout: that of the session params. On
 * failure nothing is added. */
esa_status esa_recorder_load(esa_recorder *rec, const char *path, const esa_layout *layout);

/* A mapped recording file. */
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

/* On failure rec is empty. esa_recording_make takes ownership of tensors, even on failure. */
esa_status esa_recording_open(esa_ctx *ctx, esa_recording *rec, const char *path);
esa_status esa_recording_make(esa_ctx *ctx, esa_recording *rec, esa_tensors *tensors);
void esa_recording_close(esa_ctx *ctx, esa_recording *rec);
/* Opens `count` recordings of one run, checks that they agree, and adds up their prompts in *info.
 * The caller gives *out to esa_recordings_close. */
esa_status esa_recordings_open(esa_ctx *ctx, esa_recording **out, esa_mask_file_info *info,
                               const char *const *path, int32_t count);
void esa_recordings_close(esa_ctx *ctx, esa_recording *rec, int32_t count);
/* Checks that every sum is within count * 2^24. Reads the whole file. */
esa_status esa_recording_check_sums(esa_ctx *ctx, const esa_recording *rec);
/* 1 if the layer was left out on purpose. */
int32_t esa_recording_is_dense(const esa_recording *rec, int32_t layer);
/* Over several recordings: the number of contributions of a cell, and row r (0 .. H * nq - 1) of
 * their sum, written to sum[nk]. */
int64_t esa_recordings_count(const esa_recording *rec, int32_t count, int64_t cell);
void esa_recordings_row(uint64_t *sum, const esa_recording *rec, int32_t count, int64_t cell,
                        int64_t r);

#endif
