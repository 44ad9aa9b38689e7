/* safetensors.h - safetensors files, internal calls. They do not take the ctx guard; their callers
 * hold it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A file is 8 bytes of little-endian header length n, n bytes of JSON (an object, then optional
 * spaces), and the data. Offsets in the header count from the first byte of the data. */
#ifndef ESA_IO_SAFETENSORS_H
#define ESA_IO_SAFETENSORS_H

#include "base/engine.h"
#include "ctx/ctx.h"
#include "esa/esa_tensors.h"
#include "io/mapfile.h"

#define ESA_ST_MAX_HEADER INT64_C(100000000) /* limit of the reference implementation */
#define ESA_ST_ALIGN      64                 /* alignment of the data in files we write */

typedef struct esa_st_entry {
    const char *name;
    int32_t dtype, rank;
    int64_t dim[ESA_FILE_MAX_RANK];
    int64_t begin, end; /* within the data */
    int64_t order;      /* position in the header; orders empty tensors */
} esa_st_entry;

typedef struct esa_st_pair {
    const char *key, *value;
} esa_st_pair;

struct esa_tensors {
    esa_ctx *ctx;
    esa_allocator mem;
    char *label; /* name of the file in messages; owned */
    int64_t label_bytes;
    const uint8_t *bytes; /* the whole file */
    int64_t size;
    esa_mapped file;     /* what bytes is, unless it is the caller's memory */
    int32_t mapped;      /* 1: bytes is the file itself, which can change */
    int fd;              /* of a mapped file while it is opened */
    const uint8_t *head; /* the first `have` bytes while the file is opened; they cannot change */
    int64_t have;
    void *head_copy;     /* owned; NULL: head is bytes */
    int32_t blocks;      /* 1: a GGUF file (gguf.h) */
    const uint8_t *data; /* first byte after the header */
    char *strings;       /* names, keys and values, unescaped; owned */
    int64_t strings_bytes;
    esa_st_entry *entry; /* [count], in the order of their data */
    int64_t count, entry_cap;
    esa_st_entry **by_name; /* [count], sorted */
    esa_st_pair *pair;      /* [pair_count], sorted by key */
    int64_t pair_count, pair_cap;
};

/* Bytes of one element of an ESA_FILE_* dtype (0: unknown), its name in the header (NULL: unknown),
 * and the dtype of a name (-1: unknown). */
int64_t esa_file_dtype_size(int32_t dtype);
ESA_ENGINE const char *esa_file_dtype_name(int32_t dtype);
int32_t esa_file_dtype_from_name(const char *name);
/* Bytes of a tensor, or -1 for overflow or a negative dimension. */
ESA_ENGINE int64_t esa_file_bytes(int32_t dtype, int32_t rank, const int64_t *dim);

/* A name made safe for a message: control bytes replaced, at most ESA_QUOTE_MOST bytes, cut at a
 * whole character. Names of published tensors fit, with the prefixes that tools give them. */
#define ESA_QUOTE_MOST 96
typedef struct esa_quoted {
    char text[ESA_QUOTE_MOST + 8];
} esa_quoted;
ESA_ENGINE esa_quoted esa_quote(const char *name);

/* Like the public calls. On failure *file is NULL. esa_st_open_weights maps the file whatever its
 * size (mapfile.h). */
ESA_ENGINE esa_status esa_st_open(esa_ctx *ctx, esa_tensors **file, const char *path);
ESA_ENGINE esa_status esa_st_open_weights(esa_ctx *ctx, esa_tensors **file, const char *path);
ESA_ENGINE esa_status esa_st_open_memory(esa_ctx *ctx, esa_tensors **file, const void *bytes,
                                         int64_t size);
ESA_ENGINE void esa_st_close(esa_tensors *file);
/* Sorts the names of entries and the keys of pairs for lookup (safetensors_read.c). Refuses a name
 * or key that appears twice. */
esa_status esa_st_index(esa_tensors *file);
/* Opens the file at path, or bytes if path is NULL, with a parser; `kind` is its name in messages.
 * weights: the file is mapped whatever its size. */
typedef struct esa_st_source {
    const char *path;
    const void *bytes; /* [size] */
    int64_t size;
    const char *kind;
    int32_t weights;
    esa_status (*parse)(esa_tensors *file);
} esa_st_source;
esa_status esa_st_open_with(esa_ctx *ctx, esa_tensors **file, const esa_st_source *source);
/* Makes head the first `most` bytes of the file, or all of a shorter one. Parsers call it. */
esa_status esa_st_head(esa_tensors *file, int64_t most);
/* Parses and checks a file by its head (safetensors_read.c). The rest of file is initialised and
 * empty. */
esa_status esa_st_parse(esa_tensors *file);
ESA_ENGINE const esa_st_entry *esa_st_find(const esa_tensors *file,
                                           const char *name);                     /* NULL: none */
ESA_ENGINE const char *esa_st_metadata(const esa_tensors *file, const char *key); /* NULL: none */
static inline const uint8_t *esa_st_data(const esa_tensors *file, const esa_st_entry *entry)
{
    return file->data + entry->begin;
}

/* The writer; esa_tensors.h gives the order of calls. Close removes an unfinished file. */
ESA_ENGINE esa_status esa_st_writer_open(esa_ctx *ctx, esa_tensors_writer **writer,
                                         const char *path);
ESA_ENGINE esa_status esa_st_writer_metadata(esa_tensors_writer *writer, const char *key,
                                             const char *value);
ESA_ENGINE esa_status esa_st_writer_declare(esa_tensors_writer *writer, const char *name,
                                            int32_t dtype, int32_t rank, const int64_t *dim);
ESA_ENGINE esa_status esa_st_writer_data(esa_tensors_writer *writer, const void *data,
                                         int64_t bytes);
/* Writes bytes of declared tensor number `tensor` at offset, in any order, instead of streaming.
 * For files whose tensors grow side by side. Every byte must be written exactly once; only their
 * number is checked. */
esa_status esa_st_writer_put(esa_tensors_writer *writer, int64_t tensor, int64_t offset,
                             const void *data, int64_t bytes);
ESA_ENGINE esa_status esa_st_writer_finish(esa_tensors_writer *writer);
ESA_ENGINE void esa_st_writer_close(esa_tensors_writer *writer);
esa_ctx *esa_st_writer_ctx(const esa_tensors_writer *writer);

#endif
