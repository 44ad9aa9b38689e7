/* outfile.c - atomic file writer; see outfile.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The temporary name is <target>.<8 hex digits>.tmp in the same folder, so that the rename stays on
 * one file system and is atomic. A target with a very long name gets esa-<8 hex digits>.tmp. A
 * killed process leaves the temporary file behind, never a damaged target. Links are followed
 * first; the file they lead to is replaced (outpath.h). */
#include "io/outfile.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "base/rng.h"
#include "base/status.h"
#include "io/outpath.h"

/* Longest name of a target that is part of its temporary name, which needs 13 more bytes of 255. */
#define LONGEST_NAME 240

static esa_status cannot_write(esa_ctx *ctx, const char *path, int why)
{
    return esa_fail(ctx, ESA_ERR_IO, "%.200s cannot be written: %s", path, strerror(why));
}

void esa_outfile_discard(esa_outfile *out)
{
    if (out->fd < 0) return;
    close(out->fd);
    out->fd = -1;
    unlink(out->temp);
}

static esa_status create_temp(esa_ctx *ctx, esa_outfile *out)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    esa_rng rng = { (uint64_t)now.tv_nsec ^ (uint64_t)now.tv_sec << 30 ^ (uint64_t)getpid() << 44 ^
                    (uint64_t)(uintptr_t)out };
    const char *slash = strrchr(out->path, '/');
    const int folder = slash ? (int)(slash + 1 - out->path) : 0;
    for (int attempt = 0; attempt < 100; attempt++) {
        const unsigned mark = (unsigned)(esa_rng_next(&rng) >> 32);
        if (strlen(out->path) - (size_t)folder <= LONGEST_NAME)
            snprintf(out->temp, (size_t)out->temp_bytes, "%s.%08x.tmp", out->path, mark);
        else
            snprintf(out->temp, (size_t)out->temp_bytes, "%.*sesa-%08x.tmp", folder, out->path,
                     mark);
        out->fd = esa_outpath_create(out->temp, out->path);
        if (out->fd >= 0) return ESA_OK;
        if (errno != EEXIST) break;
    }
    return cannot_write(ctx, out->path, errno);
}

/* Allocates the buffers and creates the temporary file. end: path with its links followed. */
static esa_status open_temp(esa_ctx *ctx, esa_outfile *out, const char *path, const char *end)
{
    const int64_t n = (int64_t)strlen(end);
    out->path_bytes = n + 1;
    out->path = esa_mem_alloc(&ctx->mem, out->path_bytes);
    out->temp_bytes = n + 24;
    out->temp = esa_mem_alloc(&ctx->mem, out->temp_bytes);
    out->buffer = esa_mem_alloc(&ctx->mem, ESA_OUTFILE_BUFFER);
    if (!out->path || !out->temp || !out->buffer)
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while creating %.200s", path);
    memcpy(out->path, end, (size_t)n + 1);
    return create_temp(ctx, out);
}

esa_status esa_outfile_open(esa_ctx *ctx, esa_outfile *out, const char *path)
{
    memset(out, 0, sizeof *out);
    out->ctx = ctx;
    out->fd = -1;
    char end[PATH_MAX];
    int32_t open_file;
    struct stat st;
    ESA_TRY(esa_outpath_follow(ctx, end, &open_file, path));
    if (open_file)
        return esa_fail(ctx, ESA_ERR_IO,
                        "%.200s refers to an open file and cannot be replaced: give the name of "
                        "the file itself",
                        path);
    /* Never rename over a device node or a folder. */
    if (stat(end, &st) == 0 && !S_ISREG(st.st_mode))
        return esa_fail(ctx, ESA_ERR_IO, "%.200s is %s and cannot be replaced by a file", path,
                        S_ISDIR(st.st_mode) ? "a folder" : "not a regular file");
    const esa_status status = open_temp(ctx, out, path, end);
    if (status) esa_outfile_close(out);
    return status;
}

static esa_status check_open(const esa_outfile *out)
{
    if (out->fd >= 0) return ESA_OK;
    return esa_fail(out->ctx, ESA_ERR_STATE, "%.200s is no longer being written",
                    out->path ? out->path : "the file");
}

static esa_status put(esa_outfile *out, const uint8_t *data, int64_t bytes)
{
    while (bytes > 0) {
        const ssize_t n = write(out->fd, data, (size_t)esa_min64(bytes, INT64_C(1) << 30));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return esa_fail(out->ctx, ESA_ERR_IO, "%.200s cannot be written: %s", out->path,
                            n < 0 ? strerror(errno) : "no byte was accepted");
        data += n;
        bytes -= n;
    }
    return ESA_OK;
}

static esa_status flush(esa_outfile *out)
{
    const int64_t fill = out->fill;
    out->fill = 0;
    return put(out, out->buffer, fill);
}

esa_status esa_outfile_write(esa_outfile *out, const void *data, int64_t bytes)
{
    ESA_TRY(check_open(out));
    const uint8_t *from = data;
    out->written += bytes;
    if (bytes > ESA_OUTFILE_BUFFER - out->fill) {
        ESA_TRY(flush(out));
        if (bytes >= ESA_OUTFILE_BUFFER) return put(out, from, bytes);
    }
    if (bytes > 0) memcpy(out->buffer + out->fill, from, (size_t)bytes);
    out->fill += bytes;
    return ESA_OK;
}

esa_status esa_outfile_put(esa_outfile *out, int64_t at, const void *data, int64_t bytes)
{
    ESA_TRY(check_open(out));
    ESA_TRY(flush(out));
    const uint8_t *from = data;
    out->written += bytes;
    while (bytes > 0) {
        const ssize_t n = pwrite(out->fd, from, (size_t)esa_min64(bytes, INT64_C(1) << 30),
                                 (off_t)at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return esa_fail(out->ctx, ESA_ERR_IO, "%.200s cannot be written: %s", out->path,
                            n < 0 ? strerror(errno) : "no byte was accepted");
        from += n;
        at += n;
        bytes -= n;
    }
    return ESA_OK;
}

static esa_status flush_and_sync(esa_outfile *out)
{
    ESA_TRY(flush(out));
    return fsync(out->fd) == 0 ? ESA_OK : cannot_write(out->ctx, out->path, errno);
}

esa_status esa_outfile_commit(esa_outfile *out)
{
    ESA_TRY(check_open(out));
    const esa_status status = flush_and_sync(out);
    if (status) {
        esa_outfile_discard(out);
        return status;
    }
    const int closed = close(out->fd), why = errno;
    out->fd = -1;
    if (closed != 0) {
        unlink(out->temp);
        return cannot_write(out->ctx, out->path, why);
    }
    if (rename(out->temp, out->path) != 0) {
        const int reason = errno;
        unlink(out->temp);
        return esa_fail(out->ctx, ESA_ERR_IO, "%.200s cannot be renamed into place: %s", out->path,
                        strerror(reason));
    }
    esa_outpath_sync(out->path);
    return ESA_OK;
}

void esa_outfile_close(esa_outfile *out)
{
    esa_outfile_discard(out);
    if (!out->ctx) return;
    esa_mem_free(&out->ctx->mem, out->path, out->path_bytes);
    esa_mem_free(&out->ctx->mem, out->temp, out->temp_bytes);
    esa_mem_free(&out->ctx->mem, out->buffer, ESA_OUTFILE_BUFFER);
    out->path = out->temp = NULL;
    out->buffer = NULL;
}
