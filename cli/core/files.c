/* files.c - see files.h.
 * SPDX-License-Identifier: Apache-2.0 */
#define _XOPEN_SOURCE 700
#include "core/files.h"
#include "core/cli.h"

#include <errno.h>
#include <esa/esa_tensors.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_BYTES ((size_t)1 << 30) /* JSON, CSV, pages, videos of a report */

/* ---------------------------------------------------------------- reading */

const char *cli_error_text(int error)
{
    return error == CLI_NOT_A_FILE ? "it is a pipe or a device, expected a file" : strerror(error);
}

int cli_is_missing(const char *path)
{
    struct stat about;
    return stat(path, &about) != 0 &&
           (errno == ENOENT || errno == ENOTDIR || errno == ENAMETOOLONG);
}

/* 0, or the errno of an open path that cannot be read. stream: a pipe can. */
static int wrong_kind(int fd, int stream)
{
    struct stat about;
    if (fstat(fd, &about) != 0) return errno;
    if (S_ISDIR(about.st_mode)) return EISDIR;
    return stream || S_ISREG(about.st_mode) ? 0 : CLI_NOT_A_FILE;
}

static int open_kind(const char *path, int stream)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0) return -1;
    const int error = wrong_kind(fd, stream);
    if (!error) return fd;
    close(fd);
    errno = error;
    return -1;
}

int cli_open_file(const char *path) { return open_kind(path, 0); }

/* Reads fd to its end into *data, which has room for one byte more. Returns 0 or an errno. */
static int read_all(int fd, char **data, size_t *used, size_t most)
{
    for (size_t room = 1 << 16;; room *= 2) {
        char *grown = realloc(*data, room + 1);
        if (!grown) return ENOMEM;
        *data = grown;
        while (*used < room) {
            /* A stream waits for its writer here. A signal ends poll, also where the handler only
             * sets a flag, and would not end read. */
            struct pollfd wait = { .fd = fd, .events = POLLIN };
            if (poll(&wait, 1, -1) < 0) return errno;
            const ssize_t n = read(fd, *data + *used, room - *used);
            if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
            if (n < 0) return errno;
            if (n == 0) return 0;
            *used += (size_t)n;
            if (*used > most) return EFBIG;
        }
    }
}

static char *read_kind(const char *path, size_t *bytes, size_t most, int stream)
{
    char *data = NULL;
    size_t used = 0;
    const int fd = open_kind(path, stream);
    if (fd < 0) return NULL;
    const int error = read_all(fd, &data, &used, most);
    close(fd);
    if (error) {
        free(data);
        errno = error;
        return NULL;
    }
    data[used] = 0;
    *bytes = used;
    return data;
}

char *cli_read_file(const char *path, size_t *bytes)
{
    return read_kind(path, bytes, MOST_BYTES, 0);
}

char *cli_read_stream(const char *path, size_t *bytes, size_t most)
{
    return read_kind(path, bytes, most, 1);
}

/* ---------------------------------------------------------------- writing */

/* 1 if path is standard output itself (/dev/stdout, or its file's name): text is appended to what
 * was printed, and the file is never replaced. */
static int is_stdout(const char *path)
{
    struct stat about, out;
    return stat(path, &about) == 0 && fstat(STDOUT_FILENO, &out) == 0 &&
           about.st_dev == out.st_dev && about.st_ino == out.st_ino && !S_ISDIR(about.st_mode);
}

int cli_write_file(const char *path, const char *text, size_t bytes)
{
    esa_ctx *ctx = NULL;
    if (is_stdout(path)) {
        if (fwrite(text, 1, bytes, stdout) == bytes && fflush(stdout) == 0) return CLI_OK;
        return cli_fail("cannot write '%s': %s", path, strerror(errno));
    }
    int status = cli_ctx_new(&ctx, 1);
    if (!status)
        status = cli_status(ctx, esa_file_write(ctx, path, text, (int64_t)bytes), "output");
    esa_ctx_free(ctx);
    return status;
}

int cli_move_file(const char *from, const char *to, const char *what)
{
    esa_ctx *ctx = NULL;
    int status = cli_ctx_new(&ctx, 1);
    if (!status) status = cli_status(ctx, esa_file_move(ctx, from, to), what);
    esa_ctx_free(ctx);
    return status;
}

int cli_target(char *end, size_t size, int *in_place, const char *path, const char *what)
{
    esa_ctx *ctx = NULL;
    int32_t through = 0;
    int status = cli_ctx_new(&ctx, 1);
    if (!status)
        status = cli_status(ctx, esa_file_target(ctx, path, end, (int64_t)size, &through), what);
    esa_ctx_free(ctx);
    *in_place = through;
    return status;
}
