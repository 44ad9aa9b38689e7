/* esa_tensors.h - reads and writes safetensors files. Part of libesa; needs only libc.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Reading: the file is mapped, so data pointers stay valid until esa_tensors_free. The parser is
 * strict. It refuses wrong sizes, overlaps, gaps, duplicate names, unknown dtypes and wrong offsets
 * with a message before any of them is used.
 *
 * Writing: the data goes to a temporary file beside the target, which is renamed at the end. A
 * failed or abandoned writer leaves no file behind.
 *
 * A file or writer keeps its ctx, which must outlive it. The caller sets struct_size of
 * esa_tensor_info to its sizeof before a call fills it; any other value returns ESA_ERR_VERSION. */
#ifndef ESA_TENSORS_H
#define ESA_TENSORS_H

#include "esa.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct esa_tensors esa_tensors;
typedef struct esa_tensors_writer esa_tensors_writer;

/* dtypes of safetensors. The first three equal ESA_DTYPE_*. */
enum {
    ESA_FILE_F32 = 0,
    ESA_FILE_F16 = 1,
    ESA_FILE_BF16 = 2,
    ESA_FILE_F64 = 3,
    ESA_FILE_I64 = 4,
    ESA_FILE_I32 = 5,
    ESA_FILE_I16 = 6,
    ESA_FILE_I8 = 7,
    ESA_FILE_U8 = 8,
    ESA_FILE_BOOL = 9,
    ESA_FILE_U16 = 10,
    ESA_FILE_U32 = 11,
    ESA_FILE_U64 = 12,
    ESA_FILE_F8_E4M3 = 13,
    ESA_FILE_F8_E5M2 = 14
};
#define ESA_FILE_MAX_RANK 8

typedef struct esa_tensor_info {
    uint32_t struct_size;
    int32_t dtype; /* ESA_FILE_* */
    int32_t rank;  /* 0 .. ESA_FILE_MAX_RANK */
    int32_t reserved0;
    int64_t dim[ESA_FILE_MAX_RANK];
    int64_t bytes;    /* size of data */
    const char *name; /* owned by the file */
    const void *data; /* owned by the file; may be unaligned */
    int64_t reserved[2];
} esa_tensor_info;

/* ---------------------------------------------------------------- reading */

/* On success the caller owns *file and frees it with esa_tensors_free. On failure *file is NULL. */
ESA_API esa_status esa_tensors_open(esa_ctx *ctx, esa_tensors **file, const char *path);

/* The same for a file in memory, with the same checks. bytes must outlive the object. */
ESA_API esa_status esa_tensors_open_memory(esa_ctx *ctx, esa_tensors **file, const void *bytes,
                                           int64_t size);
ESA_API void esa_tensors_free(esa_tensors *file);

/* Tensors are numbered in the order of their data. */
ESA_API int64_t esa_tensors_count(const esa_tensors *file);
ESA_API esa_status esa_tensors_at(const esa_tensors *file, int64_t i, esa_tensor_info *info);

/* ESA_ERR_ARGUMENT if no tensor has that name. */
ESA_API esa_status esa_tensors_find(const esa_tensors *file, const char *name,
                                    esa_tensor_info *info);

/* Keys and values of __metadata__; the strings are owned by the file. esa_tensors_metadata returns
 * NULL for an unknown key. */
ESA_API const char *esa_tensors_metadata(const esa_tensors *file, const char *key);
ESA_API int64_t esa_tensors_metadata_count(const esa_tensors *file);
ESA_API esa_status esa_tensors_metadata_at(const esa_tensors *file, int64_t i, const char **key,
                                           const char **value);

/* ---------------------------------------------------------------- writing */

/* First set the metadata and declare every tensor. Then write the data in the declared order, in
 * pieces of any size. Then call finish. The caller owns *writer; on failure it is NULL. */
ESA_API esa_status esa_tensors_writer_create(esa_ctx *ctx, esa_tensors_writer **writer,
                                             const char *path);
ESA_API esa_status esa_tensors_writer_metadata(esa_tensors_writer *writer, const char *key,
                                               const char *value);
ESA_API esa_status esa_tensors_writer_declare(esa_tensors_writer *writer, const char *name,
                                              int32_t dtype, int32_t rank, const int64_t *dim);
ESA_API esa_status esa_tensors_writer_data(esa_tensors_writer *writer, const void *data,
                                           int64_t bytes);

/* Flushes, syncs and renames the file. The writer then takes no more calls, even after a failure,
 * and must still be freed. */
ESA_API esa_status esa_tensors_writer_finish(esa_tensors_writer *writer);

/* Frees the writer. Removes the temporary file if the writer is not finished. */
ESA_API void esa_tensors_writer_free(esa_tensors_writer *writer);

#ifdef __cplusplus
}
#endif
#endif
