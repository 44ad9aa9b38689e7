/* tensor_file.c - see tensor_file.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/run/tensor_file.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "io/safetensors.h"
#include "nn/nn.h"

/* Writes a shape as "[512, 192]"; a side of -1 is "any". */
static void shape_text(char *out, size_t size, int32_t rank, const int64_t *dim)
{
    size_t used = (size_t)snprintf(out, size, "[");
    for (int32_t i = 0; i < rank && used < size; i++)
        used += dim[i] < 0 ? (size_t)snprintf(out + used, size - used, "%sany", i ? ", " : "")
                           : (size_t)snprintf(out + used, size - used, "%s%lld", i ? ", " : "",
                                              (long long)dim[i]);
    if (used < size) snprintf(out + used, size - used, "]");
}

/* data: the bytes of the tensor that info describes, at any alignment. */
static esa_status convert(esa_ctx *ctx, esa_loaded *out, const esa_st_entry *info, const void *data,
                          const char *path, int32_t rank, const int64_t *expected)
{
    const int32_t front = info->rank - rank;
    int fits = front >= 0;
    for (int32_t i = 0; i < info->rank && fits; i++)
        fits = i < front ? info->dim[i] == 1
                         : info->dim[i] >= 1 &&
                               (expected[i - front] < 0 || info->dim[i] == expected[i - front]);
    if (!fits) {
        char got[160], want[160];
        shape_text(got, sizeof got, info->rank, info->dim);
        shape_text(want, sizeof want, rank, expected);
        return esa_fail(ctx, ESA_ERR_MISMATCH, "%.160s: tensor %.60s is %s, expected %s", path,
                        info->name, got, want);
    }
    if (info->dtype != ESA_FILE_F32 && info->dtype != ESA_FILE_F16 && info->dtype != ESA_FILE_BF16)
        return esa_fail(ctx, ESA_ERR_DTYPE, "%.160s: tensor %.60s is neither F32, F16 nor BF16",
                        path, info->name);
    int64_t count = 1;
    for (int32_t i = 0; i < rank; i++) {
        out->dim[i] = info->dim[front + i];
        count *= out->dim[i];
    }
    out->bytes = count * 4;
    out->data = esa_mem_alloc(&ctx->mem, out->bytes);
    if (!out->data)
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for %.60s of %.160s", info->name, path);
    const esa_weight w = { .data = data, .dtype = info->dtype, .rank = 1, .dim = { count } };
    esa_weight_to_f32(out->data, &w, 0, count);
    for (int64_t i = 0; i < count; i++)
        if (!isfinite(out->data[i]))
            return esa_fail(ctx, ESA_ERR_FORMAT,
                            "%.160s: tensor %.60s holds values that are not finite", path,
                            info->name);
    return ESA_OK;
}

esa_status esa_loaded_read(esa_ctx *ctx, esa_loaded *out, const char *path, const char *name,
                           int32_t rank, const int64_t *expected)
{
    esa_tensors *file;
    *out = (esa_loaded){ 0 };
    ESA_TRY(esa_st_open(ctx, &file, path));
    const esa_st_entry *info = esa_st_find(file, name);
    const esa_status status = info ? convert(ctx, out, info, esa_st_data(file, info), path, rank,
                                             expected)
                                   : esa_fail(ctx, ESA_ERR_MISMATCH,
                                              "%.200s has no tensor named %s", path, name);
    esa_st_close(file);
    if (status) esa_loaded_free(ctx, out);
    return status;
}

void esa_loaded_free(esa_ctx *ctx, esa_loaded *tensor)
{
    esa_mem_free(&ctx->mem, tensor->data, tensor->bytes);
    *tensor = (esa_loaded){ 0 };
}

static esa_status write_all(esa_tensors_writer *writer, const esa_to_save *tensors, int32_t count,
                            int32_t rank)
{
    for (int32_t i = 0; i < count; i++)
        ESA_TRY(esa_st_writer_declare(writer, tensors[i].name, ESA_FILE_F32, rank, tensors[i].dim));
    for (int32_t i = 0; i < count; i++) {
        int64_t bytes = 4;
        for (int32_t d = 0; d < rank; d++) bytes *= tensors[i].dim[d];
        ESA_TRY(esa_st_writer_data(writer, tensors[i].data, bytes));
    }
    return esa_st_writer_finish(writer);
}

esa_status esa_loaded_write(esa_ctx *ctx, const char *path, const esa_to_save *tensors,
                            int32_t count, int32_t rank)
{
    esa_tensors_writer *writer = NULL;
    ESA_TRY(esa_st_writer_open(ctx, &writer, path));
    const esa_status status = write_all(writer, tensors, count, rank);
    esa_st_writer_close(writer);
    return status;
}
