/* outfile.h - writes a file that appears complete or not at all. The data goes to a temporary file
 * beside the target, which is synced and renamed.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_IO_OUTFILE_H
#define ESA_IO_OUTFILE_H

#include "base/engine.h"
#include "ctx/ctx.h"

#define ESA_OUTFILE_BUFFER INT64_C(262144) /* small writes are collected up to this size */

typedef struct esa_outfile {
    esa_ctx *ctx;
    int fd;            /* -1: closed */
    char *path, *temp; /* owned; temp exists on disk while fd >= 0 */
    int64_t path_bytes, temp_bytes;
    uint8_t *buffer; /* owned */
    int64_t fill;
    int64_t written; /* bytes written so far, buffered ones included */
} esa_outfile;

/* Creates the temporary file. out may be uninitialised. On failure no file exists and out
 * needs no close. */
ESA_ENGINE esa_status esa_outfile_open(esa_ctx *ctx, esa_outfile *out, const char *path);
ESA_ENGINE esa_status esa_outfile_write(esa_outfile *out, const void *data, int64_t bytes);
/* Writes bytes at a position, after flushing the buffer. Do not
 * call esa_outfile_write afterwards. */
esa_status esa_outfile_put(esa_outfile *out, int64_t at, const void *data, int64_t bytes);
/* Flushes, syncs and renames. On failure the temporary file is removed and the
 * target is unchanged. */
ESA_ENGINE esa_status esa_outfile_commit(esa_outfile *out);
/* Removes the temporary file if it still exists and ends writing. */
void esa_outfile_discard(esa_outfile *out);
/* Discards and frees. */
ESA_ENGINE void esa_outfile_close(esa_outfile *out);

#endif
