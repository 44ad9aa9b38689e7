/* esa_tensors.h - files of tensors (safetensors), read and written strictly. Part of libesa: needs
 * nothing but libc.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Reading is by mmap: data pointers stay valid until esa_tensors_free. The header is parsed by a
 * strict parser: sizes, overlaps, gaps, duplicate names, unknown dtypes and lying offsets are
 * refused with a sentence before anything is used. Writing goes to a temporary name beside the
 * target and is renamed when finished; a failed or abandoned writer leaves nothing behind. Structs
 * the library fills (esa_tensor_info here) carry struct_size in: set it to sizeof before the call,
 * or the answer is ESA_ERR_VERSION. A file keeps its ctx, which must outlive it. */
#ifndef ESA_TENSORS_H
#define ESA_TENSORS_H

#include "esa.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct esa_tensors esa_tensors;
typedef struct esa_tensors_writer esa_tensors_writer;

/* safetensors dtypes; the first three equal ESA_DTYPE_*. */
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
    int64_t bytes;
    const char *name; /* owned by the file */
    const void *data; /* owned by the file; may be unaligned: use memcpy or check */
    int64_t reserved[2];
} esa_tensor_info;

ESA_API esa_status esa_tensors_open(esa_ctx *ctx, esa_tensors **file, const char *path);
/* The same checks over bytes in memory, which must outlive the object (fuzzing, embedded data). */
ESA_API esa_status esa_tensors_open_memory(esa_ctx *ctx, esa_tensors **file, const void *bytes,
                                           int64_t size);
ESA_API void esa_tensors_free(esa_tensors *file);
ESA_API int64_t esa_tensors_count(const esa_tensors *file);
/* Tensors in order of their data. */
ESA_API esa_status esa_tensors_at(const esa_tensors *file, int64_t i, esa_tensor_info *info);
/* ESA_ERR_ARGUMENT if there is no tensor of that name. */
ESA_API esa_status esa_tensors_find(const esa_tensors *file, const char *name,
                                    esa_tensor_info *info);
/* Value of a __metadata__ key, or NULL. Owned by the file. */
ESA_API const char *esa_tensors_metadata(const esa_tensors *file, const char *key);
ESA_API int64_t esa_tensors_metadata_count(const esa_tensors *file);
ESA_API esa_status esa_tensors_metadata_at(const esa_tensors *file, int64_t i, const char **key,
                                           const char **value);

/* Declare everything, then write the data in the declared order in pieces of any size, then
 * finish. */
ESA_API esa_status esa_tensors_writer_create(esa_ctx *ctx, esa_tensors_writer **writer,
                                             const char *path);
ESA_API esa_status esa_tensors_writer_metadata(esa_tensors_writer *writer, const char *key,
                                               const char *value);
ESA_API esa_status esa_tensors_writer_declare(esa_tensors_writer *writer, const char *name,
                                              int32_t dtype, int32_t rank, const int64_t *dim);
ESA_API esa_status esa_tensors_writer_data(esa_tensors_writer *writer, const void *data,
                                           int64_t bytes);
/* Flushes, syncs and renames. On any outcome the writer is finished; still free it. */
ESA_API esa_status esa_tensors_writer_finish(esa_tensors_writer *writer);
/* Frees; if not finished, removes the temporary file. */
ESA_API void esa_tensors_writer_free(esa_tensors_writer *writer);

#ifdef __cplusplus
}
#endif
#endif
