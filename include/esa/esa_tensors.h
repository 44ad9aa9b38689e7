/* esa_tensors.h - reads and writes safetensors files, and writes other files whole. Part of libesa;
 * needs only libc.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Reading: a file of up to 256 MiB is copied into memory, a larger one is mapped; data pointers
 * stay valid until esa_tensors_free. Headers are always copied. The parser is strict. It refuses
 * wrong sizes, overlaps, gaps, duplicate names, unknown dtypes and wrong offsets with a message
 * before any of them is used. A folder, a pipe and a device are refused.
 *
 * These rules hold for every file that the library reads: mask files, recordings, work plans,
 * LoRAs, videos. Only the weights of models are mapped whatever their size. If another process
 * makes a mapped file shorter, or its disk fails, the next access ends the process by SIGBUS; the
 * library installs no signal handler. So replace files by renaming, as this library does.
 *
 * Writing: the data goes to a temporary file beside the target, which is synced and renamed at the
 * end; then the folder is synced. A failed or abandoned writer leaves no file behind.
 *
 * A file that is replaced, also by esa_file_move, gives its permissions, its POSIX ACL, its owner
 * and its group to the new one, as far as the process may; where the group cannot be kept, the
 * group gets only what everybody has. Its other hard links keep the old contents. Links are
 * followed, but a link is refused as under Linux' fs.protected_symlinks, also where that is off: in
 * a sticky folder where everybody may write, if it belongs neither to this user nor to the folder's
 * owner.
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

/* ---------------------------------------------------------------- other files */

/* Writes a whole file by the rules above: readers see the old file or the new one. A pipe, a device
 * and an open file that /proc lists (/dev/stdout, /dev/fd/3) are written in place, at the end. */
ESA_API esa_status esa_file_write(esa_ctx *ctx, const char *path, const void *data, int64_t bytes);

/* Tells which file a write to path replaces or creates, so that a program can refuse a path before
 * long work: end[size] receives path with its links followed. *in_place (may be NULL) = 1 if path
 * is written in place; end is then path for an open file. ESA_ERR_IO if path is a folder or leads
 * through a link that is refused. */
ESA_API esa_status esa_file_target(esa_ctx *ctx, const char *path, char *end, int64_t size,
                                   int32_t *in_place);

/* Renames a file or a folder within a file system and syncs the folder of `to`. A file with the
 * name `to` is replaced; links are not followed. */
ESA_API esa_status esa_file_move(esa_ctx *ctx, const char *from, const char *to);

#ifdef __cplusplus
}
#endif
#endif
