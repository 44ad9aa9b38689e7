/* folders.c - see folders.h.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* O_TMPFILE */
#include "core/folders.h"
#include "core/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_SIZE 4200

void cli_folder_of(char *out, size_t size, const char *path)
{
    snprintf(out, size, "%s", path);
    size_t n = strlen(out);
    while (n > 1 && out[n - 1] == '/') out[--n] = 0;
    char *slash = strrchr(out, '/');
    if (!slash)
        snprintf(out, size, ".");
    else
        slash[slash == out] = 0;
}

void cli_unmake_folders(const char *folder, size_t kept)
{
    char path[PATH_SIZE];
    snprintf(path, sizeof path, "%s", folder);
    for (size_t n = strlen(path); n > kept; n--) {
        if (path[n] != '/' && path[n] != 0) continue;
        path[n] = 0;
        if (path[n - 1] != '/' && rmdir(path) != 0) return;
    }
}

int cli_make_folders(const char *folder, size_t *kept, const char *what)
{
    char path[PATH_SIZE];
    struct stat about;
    size_t there = 0;
    int made = 0;
    if (snprintf(path, sizeof path, "%s", folder) >= (int)sizeof path)
        return cli_fail("%s: a folder's name of %zu bytes is too long", what, strlen(folder));
    for (size_t n = 1; n <= strlen(folder); n++) {
        if (folder[n] != '/' && folder[n] != 0) continue;
        path[n] = 0;
        const int exists = stat(path, &about) == 0;
        const int why = exists ? ENOTDIR : mkdir(path, 0777) == 0 ? 0 : errno;
        if (exists && S_ISDIR(about.st_mode)) {
            if (!made) there = n;
        } else if (why == EEXIST) {
            there = n; /* another process has made it, or stat failed: it is not ours to remove */
        } else if (why) {
            cli_unmake_folders(folder, there);
            return cli_fail("%s: the folder '%s' cannot be made: %s: %s", what, folder, path,
                            strerror(why));
        } else
            made = 1;
        path[n] = folder[n];
    }
    if (kept) *kept = there;
    return CLI_OK;
}

int cli_make_folder_of(const char *path, size_t *kept, const char *what)
{
    char folder[PATH_SIZE];
    size_t there = 0;
    cli_folder_of(folder, sizeof folder, path);
    int status = cli_make_folders(folder, &there, what);
    if (kept) *kept = there;
    if (!status) status = cli_folder_ready(path, what);
    if (status) cli_unmake_folders(folder, there);
    return status;
}

/* Only an attempt tells: access() finds /proc writable. A file without a name leaves nothing behind
 * when the process is killed; where the file system has none, one with a name is made and removed.
 */
static int can_create(const char *folder)
{
    char probe[PATH_SIZE + 16];
    int fd = open(folder, O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    if (fd < 0) {
        snprintf(probe, sizeof probe, "%s/esa.XXXXXX", folder);
        fd = mkstemp(probe);
        if (fd < 0) return 0;
        unlink(probe);
    }
    close(fd);
    return 1;
}

int cli_folder_ready(const char *path, const char *what)
{
    char folder[PATH_SIZE];
    struct stat about;
    if (strlen(path) >= sizeof folder)
        return cli_fail("%s: a name of %zu bytes cannot be written", what, strlen(path));
    cli_folder_of(folder, sizeof folder, path);
    if (stat(folder, &about) == 0 && !S_ISDIR(about.st_mode))
        return cli_fail("%s: '%s' cannot be written: '%s' is not a folder", what, path, folder);
    if (can_create(folder)) return CLI_OK;
    return cli_fail("%s: '%s' cannot be written: no file can be created in '%s': %s", what, path,
                    folder, strerror(errno));
}

int cli_file_ready(const char *path, const char *what)
{
    char end[PATH_MAX];
    struct stat about;
    int in_place = 0;
    if (!path) return CLI_OK;
    if (!*path) return cli_fail("%s: an empty name cannot be written", what);
    if (stat(path, &about) == 0 && S_ISDIR(about.st_mode))
        return cli_fail("%s: '%s' cannot be written: it is a folder", what, path);
    const int status = cli_target(end, sizeof end, &in_place, path, what);
    if (status) return status;
    /* A regular file is replaced by a new one beside it, also behind a link. The rest is written
     * through: a pipe, a device, or an open file. */
    if (!in_place) return cli_folder_ready(end, what);
    return access(path, W_OK) == 0
               ? CLI_OK
               : cli_fail("%s: '%s' cannot be written: %s", what, path, strerror(errno));
}
