/* mapfile.h - the bytes of a file that is read: copied into memory, or mapped.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The rule: a file of up to ESA_READ_MOST bytes is copied, a larger one is mapped. What is copied
 * cannot change. A mapped file can: if it becomes shorter, or its disk fails, the next access ends
 * the process by SIGBUS. So nothing reads a header through a mapping: esa_read_start copies it.
 * Weights of models are mapped whatever their size, because pages of them are given back. */
#ifndef ESA_IO_MAPFILE_H
#define ESA_IO_MAPFILE_H

#include "base/engine.h"
#include "ctx/ctx.h"

#define ESA_READ_MOST (INT64_C(256) << 20)

typedef struct esa_mapped {
    const uint8_t *bytes; /* NULL for an empty file */
    int64_t size;
    void *copy; /* bytes, if the file was copied; NULL: mapped, or empty */
    esa_allocator mem;
} esa_mapped;

/* Gives the bytes of a file by the rule above. Messages call it label. ESA_ERR_IO if it cannot be
 * opened, read or mapped, is not a regular file, or becomes shorter meanwhile; ESA_ERR_MEMORY. m is
 * then empty. */
ESA_ENGINE esa_status esa_map_file(esa_ctx *ctx, esa_mapped *m, const char *path,
                                   const char *label);
ESA_ENGINE void esa_unmap_file(esa_mapped *m);

/* The steps of esa_map_file. The first refuses a folder, a pipe and a device without waiting for
 * them; the caller closes *fd. The second copies the first `bytes` bytes. The third gives the bytes
 * of the open file; weights: mapped whatever their size. */
ESA_ENGINE esa_status esa_open_file(esa_ctx *ctx, int *fd, int64_t *size, const char *path,
                                    const char *label);
ESA_ENGINE esa_status esa_read_start(esa_ctx *ctx, int fd, void *out, int64_t bytes,
                                     const char *label);
esa_status esa_take_file(esa_ctx *ctx, esa_mapped *m, int fd, int64_t size, int32_t weights,
                         const char *label);

#endif
