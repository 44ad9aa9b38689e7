/* mapfile.c - maps a file read-only; see mapfile.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The map is private. If another process truncates the file while it is mapped, access
 * faults, as with every mmap reader. Replace files by renaming, as our writers do; do not
 * rewrite them in place. */
#include "io/mapfile.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static esa_status map_open(esa_ctx *ctx, esa_mapped *m, int fd, const char *label)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return esa_fail(ctx, ESA_ERR_IO, "%.200s cannot be examined: %s", label, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return esa_fail(ctx, ESA_ERR_IO, "%.200s is %s, expected a file", label,
                        S_ISDIR(st.st_mode) ? "a folder" : "not a regular file");
    if (st.st_size == 0) return ESA_OK;
    void *bytes = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (bytes == MAP_FAILED)
        return esa_fail(ctx, ESA_ERR_IO, "%.200s cannot be mapped: %s", label, strerror(errno));
    *m = (esa_mapped){ bytes, st.st_size };
    return ESA_OK;
}

esa_status esa_map_file(esa_ctx *ctx, esa_mapped *m, const char *path, const char *label)
{
    *m = (esa_mapped){ NULL, 0 };
    /* O_NONBLOCK: a pipe is refused below instead of blocking here. */
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return esa_fail(ctx, ESA_ERR_IO, "%.200s cannot be opened: %s", label, strerror(errno));
    const esa_status status = map_open(ctx, m, fd, label);
    close(fd);
    return status;
}

void esa_unmap_file(esa_mapped *m)
{
    if (m->bytes) munmap((void *)(uintptr_t)m->bytes, (size_t)m->size);
    *m = (esa_mapped){ NULL, 0 };
}
