/* tensor_file.h - reads and writes single f32 tensors in safetensors files: the embeddings and
 * latents of a run.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_TENSOR_FILE_H
#define ESA_MODEL_TENSOR_FILE_H

#include "base/status.h"
#include "ctx/ctx.h"

#define ESA_TENSOR_FILE_RANK 5

typedef struct esa_loaded { /* the caller of esa_loaded_read owns data */
    float *data;
    int64_t bytes;
    int64_t dim[ESA_TENSOR_FILE_RANK];
} esa_loaded;

/* Reads tensor `name` of the file (F32, F16 or BF16) as f32 with rank dims; dimensions of 1 (a
 * batch) may come first. Sides of expected that are not -1 must agree, and every value must be
 * finite. On success the caller frees *out with esa_loaded_free. */
esa_status esa_loaded_read(esa_ctx *ctx, esa_loaded *out, const char *path, const char *name,
                           int32_t rank, const int64_t *expected);
void esa_loaded_free(esa_ctx *ctx, esa_loaded *tensor);

/* Writes count tensors of one rank, whole or not at all. */
typedef struct esa_to_save {
    const char *name;
    const float *data;
    int64_t dim[ESA_TENSOR_FILE_RANK];
} esa_to_save;
esa_status esa_loaded_write(esa_ctx *ctx, const char *path, const esa_to_save *tensors,
                            int32_t count, int32_t rank);

#endif
