/* recording.h - integer sums of scores, in memory while a session records and in a file.
 * SPDX-License-Identifier: Apache-2.0
 *
 * There are two kinds. Selector ENTROPY records the importance of blocks, selector ERROR their
 * error scores, on one or two levels. One contribution is what one call and batch entry score:
 *
 *   importance  round(p * 2^24) per block, in 32 bits
 *   errors      round(min(e, 2^16) * 2^40) per block and level, in 64 bits; NaN counts as 2^16
 *
 * Sums are integers, so the order of contributions and their split over runs cannot change a bit. A
 * sum holds 255 contributions (255 * 2^24 < 2^32, 255 * 2^56 < 2^64). An error of 2^-41 counts as
 * nothing: blocks with so small an error are the last to be computed.
 *
 * The file has format "esa.recording", the metadata of a mask file, and these tensors:
 *   dense_layers  I32[n]              layers left out on purpose
 *   count         I32[branches,L,G]   contributions per cell
 *   sums          U32[C,H,nq,nk]      the C cells with count > 0, in that order
 *                 U64[C,levels,H,nq,nk]  of errors: one mean, then fine means */
#ifndef ESA_MASKFILE_RECORDING_H
#define ESA_MASKFILE_RECORDING_H

#include <string.h>
#include "maskfile/run_info.h"

#define ESA_RECORD_ONE       16777216.0      /* 2^24 */
#define ESA_RECORD_ERROR_ONE 1099511627776.0 /* 2^40 */
#define ESA_RECORD_ERROR_TOP 65536.0         /* 2^16: larger errors count as this */
#define ESA_RECORD_MOST      255             /* contributions per cell */

/* Largest value that one contribution adds, and bytes of a sum. */
static inline uint64_t esa_record_top(const esa_mask_file_info *f)
{
    return esa_run_errors(f) ? UINT64_C(1) << 56 : UINT64_C(1) << 24;
}
static inline int64_t esa_record_width(const esa_mask_file_info *f)
{
    return esa_run_errors(f) ? 8 : 4;
}

/* The sums in memory. Cell number: (branch * L + layer) * G + group. */
typedef struct esa_recorder {
    esa_ctx *ctx;
    esa_mask_file_info info;  /* H = 0 until the first call sets the geometry */
    esa_mask_file_info asked; /* as created: 0 where the selector has its own sizes */
    int32_t *dense_layer;     /* [dense_layers], ascending; owned */
    int32_t dense_layers;
    int64_t cells, blocks; /* branches L G; levels H nq nk */
    int64_t width;         /* bytes of a sum */
    int32_t *count;        /* [cells] */
    void **sum; /* [cells], each [levels][H][nq][nk], allocated at the first contribution */
} esa_recorder;

/* info gives everything but the geometry (H, Nq, Nk, nq, nk, layout). Sizes of blocks and groups,
 * and fine, may be 0: the selector's own. dense_layer is copied. On failure the recorder is
 * empty. */
esa_status esa_recorder_create(esa_ctx *ctx, esa_recorder *rec, const esa_mask_file_info *info,
                               const int32_t *dense_layer, int32_t dense_layers);
void esa_recorder_free(esa_recorder *rec);
/* Fills in the sizes of blocks and groups, and fine, that info leaves open, for Nk keys. */
void esa_recorder_sizes(esa_mask_file_info *info, int64_t Nk);
/* Checks that `more` contributions fit into a cell, and allocates its sums. */
esa_status esa_recorder_reserve(esa_recorder *rec, int64_t cell, int32_t more);
/* Adds p[H][nq][nk] to a reserved cell; of errors the second level is at p + level_stride. */
void esa_recorder_add(esa_recorder *rec, int64_t cell, const float *p, int64_t level_stride);

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
    int32_t *count;        /* [cells]; owned */
    int64_t *slot;         /* [cells] index into sums, -1: none; owned */
    int64_t cells, blocks; /* as in esa_recorder */
    int64_t width;
    const uint8_t *sums;        /* u32 or u64, any alignment */
    const uint8_t *dense_layer; /* i32[dense_layers], any alignment */
    int32_t dense_layers;
} esa_recording;

/* On failure rec is empty. esa_recording_make takes ownership of tensors, even on failure. */
esa_status esa_recording_open(esa_ctx *ctx, esa_recording *rec, const char *path);
esa_status esa_recording_make(esa_ctx *ctx, esa_recording *rec, esa_tensors *tensors);
void esa_recording_close(esa_ctx *ctx, esa_recording *rec);
/* Declares the metadata and tensors of a recording with `used` cells. */
esa_status esa_recording_declare(esa_tensors_writer *w, const esa_mask_file_info *f,
                                 int64_t dense_layers, int64_t used);
/* Sum number i of sums at any alignment. */
static inline uint64_t esa_recording_sum(const uint8_t *sums, int64_t i, int64_t width)
{
    uint64_t wide;
    uint32_t narrow;
    if (width == 8) {
        memcpy(&wide, sums + 8 * i, 8);
        return wide;
    }
    memcpy(&narrow, sums + 4 * i, 4);
    return narrow;
}
/* Opens `count` recordings of one run, checks that they agree, and adds up their prompts in *info.
 * The caller gives *out to esa_recordings_close. */
esa_status esa_recordings_open(esa_ctx *ctx, esa_recording **out, esa_mask_file_info *info,
                               const char *const *path, int32_t count);
void esa_recordings_close(esa_ctx *ctx, esa_recording *rec, int32_t count);
/* Checks that every sum is within what count contributions can give. Reads the whole file. */
esa_status esa_recording_check_sums(esa_ctx *ctx, const esa_recording *rec);
/* 1 if the layer was left out on purpose. */
int32_t esa_recording_is_dense(const esa_recording *rec, int32_t layer);
/* Over several recordings: the number of contributions of a cell, and row r (0 .. levels * H * nq -
 * 1) of their sum, written to sum[nk]. A sum that does not fit 64 bits is the largest number, in
 * any order of the recordings. */
int64_t esa_recordings_count(const esa_recording *rec, int32_t count, int64_t cell);
void esa_recordings_row(uint64_t *sum, const esa_recording *rec, int32_t count, int64_t cell,
                        int64_t r);

#endif
