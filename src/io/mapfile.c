/* mapfile.c - opens files to read, copies them or maps them; see mapfile.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Replace files by renaming, as our writers do. A process that rewrites a file in place changes it
 * under the readers that have mapped it. */
#include "io/mapfile.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/status.h"

static esa_status check_kind(esa_ctx *ctx, int fd, int64_t *size, const char *label)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return esa_fail(ctx, ESA_ERR_IO, "%.200s cannot be examined: %s", label, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return esa_fail(ctx, ESA_ERR_IO, "%.200s is %s, expected a file", label,
                        S_ISDIR(st.st_mode) ? "a folder" : "not a regular file");
    *size = st.st_size;
    return ESA_OK;
}

esa_status esa_open_file(esa_ctx *ctx, int *fd, int64_t *size, const char *path, const char *label)
{
    /* O_NONBLOCK: a pipe is refused below instead of blocking here. */
    *size = 0;
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (*fd < 0)
        return esa_fail(ctx, ESA_ERR_IO, "%.200s cannot be opened: %s", label, strerror(errno));
    const esa_status status = check_kind(ctx, *fd, size, label);
    if (status) close(*fd);
    return status;
}

esa_status esa_read_start(esa_ctx *ctx, int fd, void *out, int64_t bytes, const char *label)
{
    for (int64_t got = 0; got < bytes;) {
        const int64_t left = esa_min64(bytes - got, INT64_C(1) << 30);
        const ssize_t n = pread(fd, (char *)out + got, (size_t)left, (off_t)got);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            return esa_fail(ctx, ESA_ERR_IO, "%.200s cannot be read: %s", label, strerror(errno));
        if (n == 0)
            return esa_fail(ctx, ESA_ERR_IO,
                            "%.200s became shorter while it was read: it ends at byte %lld, "
                            "expected at least %lld",
                            label, (long long)got, (long long)bytes);
        got += n;
    }
    return ESA_OK;
}

static esa_status copy(esa_ctx *ctx, esa_mapped *m, int fd, int64_t size, const char *label)
{
    void *bytes = esa_mem_alloc(&ctx->mem, size);
    if (!bytes)
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory for the %lld bytes of %.200s",
                        (long long)size, label);
    const esa_status status = esa_read_start(ctx, fd, bytes, size, label);
    if (status)
        esa_mem_free(&ctx->mem, bytes, size);
    else
        *m = (esa_mapped){ bytes, size, bytes, ctx->mem };
    return status;
}

esa_status esa_take_file(esa_ctx *ctx, esa_mapped *m, int fd, int64_t size, int32_t weights,
                         const char *label)
{
    *m = (esa_mapped){ 0 };
    if (size == 0) return ESA_OK;
    if (!weights && size <= ESA_READ_MOST) return copy(ctx, m, fd, size, label);
    void *bytes = mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (bytes == MAP_FAILED)
        return esa_fail(ctx, ESA_ERR_IO, "%.200s cannot be mapped: %s", label, strerror(errno));
    m->bytes = bytes;
    m->size = size;
    return ESA_OK;
}

esa_status esa_map_file(esa_ctx *ctx, esa_mapped *m, const char *path, const char *label)
{
    int fd;
    int64_t size;
    *m = (esa_mapped){ 0 };
    ESA_TRY(esa_open_file(ctx, &fd, &size, path, label));
    const esa_status status = esa_take_file(ctx, m, fd, size, 0, label);
    close(fd);
    return status;
}

void esa_unmap_file(esa_mapped *m)
{
    if (m->copy)
        esa_mem_free(&m->mem, m->copy, m->size);
    else if (m->bytes)
        munmap((void *)(uintptr_t)m->bytes, (size_t)m->size);
    *m = (esa_mapped){ 0 };
}
