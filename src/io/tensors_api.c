/* tensors_api.c - the public calls for safetensors files: argument checks and the ctx
 * guard around safetensors.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/safetensors.h"

#include <stddef.h>
#include <string.h>
#include "base/status.h"

/* Bindings depend on this layout; a change here changes the ABI. */
_Static_assert(sizeof(esa_tensor_info) == 16 + 8 * ESA_FILE_MAX_RANK + 8 + 2 * sizeof(void *) + 16,
               "esa_tensor_info has no padding");
_Static_assert(offsetof(esa_tensor_info, dim) == 16 && offsetof(esa_tensor_info, bytes) == 80,
               "esa_tensor_info offsets");

esa_status esa_tensors_open(esa_ctx *ctx, esa_tensors **file, const char *path)
{
    if (file) *file = NULL;
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = file ? esa_st_open(ctx, file, path)
                                   : esa_fail(ctx, ESA_ERR_ARGUMENT, "file is NULL");
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_tensors_open_memory(esa_ctx *ctx, esa_tensors **file, const void *bytes,
                                   int64_t size)
{
    if (file) *file = NULL;
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = file ? esa_st_open_memory(ctx, file, bytes, size)
                                   : esa_fail(ctx, ESA_ERR_ARGUMENT, "file is NULL");
    esa_ctx_leave(ctx);
    return status;
}

void esa_tensors_free(esa_tensors *file) { esa_st_close(file); }

int64_t esa_tensors_count(const esa_tensors *file) { return file ? file->count : 0; }

static void fill_info(const esa_tensors *file, const esa_st_entry *e, esa_tensor_info *info)
{
    memset(info, 0, sizeof *info);
    info->struct_size = (uint32_t)sizeof *info;
    info->dtype = e->dtype;
    info->rank = e->rank;
    memcpy(info->dim, e->dim, sizeof info->dim);
    info->bytes = e->end - e->begin;
    info->name = e->name;
    info->data = esa_st_data(file, e);
}

esa_status esa_tensors_at(const esa_tensors *file, int64_t i, esa_tensor_info *info)
{
    if (!file || !info) return ESA_ERR_ARGUMENT;
    if (info->struct_size != sizeof *info) return ESA_ERR_VERSION;
    ESA_TRY(esa_ctx_enter(file->ctx));
    esa_status status = ESA_OK;
    if (i >= 0 && i < file->count)
        fill_info(file, &file->entry[i], info);
    else
        status = esa_fail(file->ctx, ESA_ERR_ARGUMENT,
                          "%s: i is %lld, but the file has %lld tensors", file->label, (long long)i,
                          (long long)file->count);
    esa_ctx_leave(file->ctx);
    return status;
}

esa_status esa_tensors_find(const esa_tensors *file, const char *name, esa_tensor_info *info)
{
    if (!file || !name || !info) return ESA_ERR_ARGUMENT;
    if (info->struct_size != sizeof *info) return ESA_ERR_VERSION;
    ESA_TRY(esa_ctx_enter(file->ctx));
    esa_status status = ESA_OK;
    const esa_st_entry *e = esa_st_find(file, name);
    if (e)
        fill_info(file, e, info);
    else
        status = esa_fail(file->ctx, ESA_ERR_ARGUMENT, "%s: there is no tensor '%s'", file->label,
                          esa_quote(name).text);
    esa_ctx_leave(file->ctx);
    return status;
}

const char *esa_tensors_metadata(const esa_tensors *file, const char *key)
{
    return file && key ? esa_st_metadata(file, key) : NULL;
}

int64_t esa_tensors_metadata_count(const esa_tensors *file) { return file ? file->pair_count : 0; }

esa_status esa_tensors_metadata_at(const esa_tensors *file, int64_t i, const char **key,
                                   const char **value)
{
    if (!file || !key || !value || i < 0 || i >= file->pair_count) return ESA_ERR_ARGUMENT;
    *key = file->pair[i].key;
    *value = file->pair[i].value;
    return ESA_OK;
}

esa_status esa_tensors_writer_create(esa_ctx *ctx, esa_tensors_writer **writer, const char *path)
{
    if (writer) *writer = NULL;
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = writer ? esa_st_writer_open(ctx, writer, path)
                                     : esa_fail(ctx, ESA_ERR_ARGUMENT, "writer is NULL");
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_tensors_writer_metadata(esa_tensors_writer *writer, const char *key,
                                       const char *value)
{
    if (!writer) return ESA_ERR_ARGUMENT;
    esa_ctx *ctx = esa_st_writer_ctx(writer);
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = esa_st_writer_metadata(writer, key, value);
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_tensors_writer_declare(esa_tensors_writer *writer, const char *name, int32_t dtype,
                                      int32_t rank, const int64_t *dim)
{
    if (!writer) return ESA_ERR_ARGUMENT;
    esa_ctx *ctx = esa_st_writer_ctx(writer);
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = esa_st_writer_declare(writer, name, dtype, rank, dim);
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_tensors_writer_data(esa_tensors_writer *writer, const void *data, int64_t bytes)
{
    if (!writer) return ESA_ERR_ARGUMENT;
    esa_ctx *ctx = esa_st_writer_ctx(writer);
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = esa_st_writer_data(writer, data, bytes);
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_tensors_writer_finish(esa_tensors_writer *writer)
{
    if (!writer) return ESA_ERR_ARGUMENT;
    esa_ctx *ctx = esa_st_writer_ctx(writer);
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = esa_st_writer_finish(writer);
    esa_ctx_leave(ctx);
    return status;
}

void esa_tensors_writer_free(esa_tensors_writer *writer) { esa_st_writer_close(writer); }
