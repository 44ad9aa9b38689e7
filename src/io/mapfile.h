/* mapfile.h - the bytes of a file, mapped read-only.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_IO_MAPFILE_H
#define ESA_IO_MAPFILE_H

#include "base/engine.h"
#include "ctx/ctx.h"

typedef struct esa_mapped {
    const uint8_t *bytes; /* NULL for an empty file */
    int64_t size;
} esa_mapped;

/* Maps a file. Messages call it label. ESA_ERR_IO if it cannot be opened or mapped or is not a
 * regular file; m is then empty. */
ESA_ENGINE esa_status esa_map_file(esa_ctx *ctx, esa_mapped *m, const char *path,
                                   const char *label);
ESA_ENGINE void esa_unmap_file(esa_mapped *m);

#endif
