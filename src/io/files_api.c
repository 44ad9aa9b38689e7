/* files_api.c - the public calls that write, check and move whole files (esa_tensors.h).
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <esa/esa_tensors.h>
#include "base/status.h"
#include "io/outfile.h"
#include "io/outpath.h"

/* Writes to a pipe, a device or an open file, which must not be replaced. */
static esa_status write_through(esa_ctx *ctx, const char *path, const char *data, int64_t bytes)
{
    const int fd = open(path, O_WRONLY | O_APPEND | O_NOCTTY | O_CLOEXEC);
    int why = fd < 0 ? errno : 0;
    while (!why && bytes > 0) {
        const ssize_t n = write(fd, data, (size_t)esa_min64(bytes, INT64_C(1) << 30));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            why = errno;
        } else {
            data += n;
            bytes -= n;
        }
    }
    if (fd >= 0 && close(fd) != 0 && !why) why = errno;
    if (!why) return ESA_OK;
    return esa_fail(ctx, ESA_ERR_IO, "%.200s cannot be written: %s", path, strerror(why));
}

static esa_status replace(esa_ctx *ctx, const char *path, const void *data, int64_t bytes)
{
    esa_outfile out;
    ESA_TRY(esa_outfile_open(ctx, &out, path));
    esa_status status = esa_outfile_write(&out, data, bytes);
    if (!status) status = esa_outfile_commit(&out);
    esa_outfile_close(&out);
    return status;
}

/* *through = 1 if path stands for something that is written in place. */
static esa_status look(esa_ctx *ctx, char end[PATH_MAX], int32_t *through, const char *path)
{
    struct stat st;
    ESA_TRY(esa_outpath_follow(ctx, end, through, path));
    if (stat(end, &st) != 0) return ESA_OK;
    if (S_ISDIR(st.st_mode))
        return esa_fail(ctx, ESA_ERR_IO, "%.200s cannot be written: %s", path, strerror(EISDIR));
    *through |= !S_ISREG(st.st_mode);
    return ESA_OK;
}

static esa_status write_file(esa_ctx *ctx, const char *path, const void *data, int64_t bytes)
{
    char end[PATH_MAX];
    int32_t through;
    if (bytes < 0 || (bytes && !data))
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "data is NULL or bytes is negative (%lld)",
                        (long long)bytes);
    ESA_TRY(look(ctx, end, &through, path));
    return through ? write_through(ctx, path, data, bytes) : replace(ctx, path, data, bytes);
}

esa_status esa_file_write(esa_ctx *ctx, const char *path, const void *data, int64_t bytes)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = write_file(ctx, path, data, bytes);
    esa_ctx_leave(ctx);
    return status;
}

static esa_status target(esa_ctx *ctx, const char *path, char *end, int64_t size, int32_t *in_place)
{
    char found[PATH_MAX];
    int32_t through;
    if (!end || size < 1) return esa_fail(ctx, ESA_ERR_ARGUMENT, "end is NULL or has no room");
    ESA_TRY(look(ctx, found, &through, path));
    if (in_place) *in_place = through;
    if (snprintf(end, (size_t)size, "%s", found) < size) return ESA_OK;
    return esa_fail(ctx, ESA_ERR_ARGUMENT, "the name of %.200s does not fit %lld bytes", path,
                    (long long)size);
}

esa_status esa_file_target(esa_ctx *ctx, const char *path, char *end, int64_t size,
                           int32_t *in_place)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = target(ctx, path, end, size, in_place);
    esa_ctx_leave(ctx);
    return status;
}

static esa_status move(esa_ctx *ctx, const char *from, const char *to)
{
    if (!from || !to) return esa_fail(ctx, ESA_ERR_ARGUMENT, "from or to is NULL");
    const int why = esa_outpath_move(from, to);
    return why ? esa_fail(ctx, ESA_ERR_IO, "%.200s cannot be written: %s", to, strerror(why))
               : ESA_OK;
}

esa_status esa_file_move(esa_ctx *ctx, const char *from, const char *to)
{
    ESA_TRY(esa_ctx_enter(ctx));
    const esa_status status = move(ctx, from, to);
    esa_ctx_leave(ctx);
    return status;
}
