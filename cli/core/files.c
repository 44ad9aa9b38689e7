/* files.c - see files.h.
 * SPDX-License-Identifier: Apache-2.0 */
#define _XOPEN_SOURCE 700 /* realpath */
#include "core/files.h"
#include "core/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef PATH_MAX
#define PATH_MAX 4096
#endif

char *cli_read_file(const char *path, size_t *bytes)
{
    struct stat about;
    FILE *file = fopen(path, "rb");
    char *data = NULL;
    size_t used = 0, room = 0;
    if (!file) return NULL;
    int error = fstat(fileno(file), &about) != 0 ? errno : S_ISDIR(about.st_mode) ? EISDIR : 0;
    if (!error) room = (size_t)(about.st_size > 0 ? about.st_size : 0) + 1;
    while (!error) {
        char *grown = realloc(data, room + 1);
        if (!grown) {
            error = ENOMEM;
            break;
        }
        data = grown;
        errno = 0;
        used += fread(data + used, 1, room - used, file);
        if (ferror(file)) error = errno ? errno : EIO;
        if (used < room) break; /* the end */
        room *= 2;
    }
    fclose(file);
    if (error) {
        free(data);
        errno = error;
        return NULL;
    }
    data[used] = 0;
    *bytes = used;
    return data;
}

/* ---------------------------------------------------------------- writing */

/* Follows the links at path into end. Returns 1 if they lead through /proc, so that path stands for
 * an open file; -1 with errno on failure. */
static int follow_links(char end[PATH_MAX], const char *path)
{
    char folder[PATH_MAX], target[PATH_MAX];
    struct stat about;
    errno = ENAMETOOLONG;
    if (strlen(path) >= PATH_MAX) return -1;
    strcpy(end, path);
    for (int hop = 0; hop < 40; hop++) {
        if (lstat(end, &about) != 0 || !S_ISLNK(about.st_mode)) return 0;
        const ssize_t n = readlink(end, target, sizeof target - 1);
        if (n < 0) return -1;
        target[n] = 0;
        char *slash = strrchr(end, '/');
        if (slash) slash[1] = 0;
        if (!realpath(slash ? end : ".", folder)) return -1;
        if (strncmp(folder, "/proc/", 6) == 0) return 1;
        errno = ENAMETOOLONG;
        if ((target[0] == '/' ? snprintf(end, PATH_MAX, "%s", target)
                              : snprintf(end, PATH_MAX, "%s/%s", folder, target)) >= PATH_MAX)
            return -1;
    }
    errno = ELOOP;
    return -1;
}

/* Writes to a pipe, a device or an open file, which must not be replaced. */
static int write_through(const char *path, const char *text, size_t bytes)
{
    const int fd = open(path, O_WRONLY | O_APPEND | O_NOCTTY | O_CLOEXEC);
    int error = fd < 0 ? errno : 0;
    while (!error && bytes > 0) {
        const ssize_t n = write(fd, text, bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            error = errno;
        else {
            text += n;
            bytes -= (size_t)n;
        }
    }
    if (fd >= 0 && close(fd) != 0 && !error) error = errno;
    return error ? cli_fail("cannot write '%s': %s", path, strerror(error)) : CLI_OK;
}

/* Writes a temporary file beside end and renames it; returns 0 or an errno. name has room for end
 * and 16 more bytes. */
static int replace(const char *end, char *name, const char *text, size_t bytes)
{
    const char *slash = strrchr(end, '/');
    const int folder = slash ? (int)(slash + 1 - end) : 0;
    if (strlen(end + folder) <= 240)
        sprintf(name, "%s.XXXXXX", end);
    else
        sprintf(name, "%.*sesa-XXXXXX", folder, end);
    const int fd = mkstemp(name);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "w");
    if (!file) {
        const int error = errno;
        if (fd >= 0) {
            close(fd);
            unlink(name);
        }
        return error;
    }
    const mode_t mask = umask(0);
    umask(mask);
    int ok = fchmod(fd, 0666 & ~mask) == 0; /* mkstemp gives 0600; users expect their umask */
    ok = ok && fwrite(text, 1, bytes, file) == bytes;
    ok = ok && fflush(file) == 0;
    ok = ok && fsync(fd) == 0;
    int error = ok ? 0 : errno;
    if (fclose(file) != 0 && !error) error = errno;
    if (!error && rename(name, end) != 0) error = errno;
    if (error) unlink(name);
    return error;
}

int cli_write_file(const char *path, const char *text, size_t bytes)
{
    struct stat about, out;
    char end[PATH_MAX];
    const int exists = stat(path, &about) == 0;
    if (exists && S_ISDIR(about.st_mode))
        return cli_fail("cannot write '%s': %s", path, strerror(EISDIR));
    /* Standard output itself (/dev/stdout, or the file's name): append to what was printed, and
     * never replace the file. */
    if (exists && fstat(STDOUT_FILENO, &out) == 0 && about.st_dev == out.st_dev &&
        about.st_ino == out.st_ino) {
        if (fwrite(text, 1, bytes, stdout) == bytes && fflush(stdout) == 0) return CLI_OK;
        return cli_fail("cannot write '%s': %s", path, strerror(errno));
    }
    const int open_file = follow_links(end, path);
    if (open_file < 0) return cli_fail("cannot write '%s': %s", path, strerror(errno));
    if (open_file || (exists && !S_ISREG(about.st_mode))) return write_through(path, text, bytes);
    char *name = malloc(strlen(end) + 16);
    if (!name) return cli_fail("out of memory while writing '%s'", path);
    const int error = replace(end, name, text, bytes);
    free(name);
    return error ? cli_fail("cannot write '%s': %s", path, strerror(error)) : CLI_OK;
}
