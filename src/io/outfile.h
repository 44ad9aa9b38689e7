/* outfile.h - a file that appears whole or not at all: written under a temporary name beside its
 * target, synced, renamed.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_IO_OUTFILE_H
#define ESA_IO_OUTFILE_H

#include "ctx/ctx.h"

#define ESA_OUTFILE_BUFFER INT64_C(262144) /* small writes are gathered to this size */

typedef struct esa_outfile {
    esa_ctx *ctx;
    int fd;            /* -1: closed */
    char *path, *temp; /* owned; temp exists on disk while fd >= 0 */
    int64_t path_bytes, temp_bytes;
    uint8_t *buffer; /* owned */
    int64_t fill;
    int64_t written; /* bytes given so far */
} esa_outfile;

/* Creates the temporary file. On failure nothing is on disk and out frees cleanly. out needs no
 * preparation. */
esa_status esa_outfile_open(esa_ctx *ctx, esa_outfile *out, const char *path);
esa_status esa_outfile_write(esa_outfile *out, const void *data, int64_t bytes);
/* Bytes at a position; what write gathered goes out first. Not to be followed by write. */
esa_status esa_outfile_put(esa_outfile *out, int64_t at, const void *data, int64_t bytes);
/* Flushes, syncs, renames. On failure the temporary file is removed and the target is as before. */
esa_status esa_outfile_commit(esa_outfile *out);
/* Removes the temporary file if it still exists; writing is over. */
void esa_outfile_discard(esa_outfile *out);
/* Discards and frees. */
void esa_outfile_close(esa_outfile *out);

#endif
