/* folders.c - see folders.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/folders.h"
#include "core/cli.h"

#include <errno.h>
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
        if (exists && S_ISDIR(about.st_mode)) {
            if (!made) there = n;
        } else if (exists || (mkdir(path, 0777) != 0 && errno != EEXIST)) {
            const int why = exists ? ENOTDIR : errno;
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
    cli_folder_of(folder, sizeof folder, path);
    return cli_make_folders(folder, kept, what);
}

int cli_folder_ready(const char *path, const char *what)
{
    char folder[PATH_SIZE];
    struct stat about;
    cli_folder_of(folder, sizeof folder, path);
    if (stat(folder, &about) != 0)
        return cli_fail("%s: '%s' cannot be written: %s: %s", what, path, folder, strerror(errno));
    if (!S_ISDIR(about.st_mode))
        return cli_fail("%s: '%s' cannot be written: %s is no folder", what, path, folder);
    if (access(folder, W_OK | X_OK) != 0)
        return cli_fail("%s: '%s' cannot be written: %s: %s", what, path, folder, strerror(errno));
    return CLI_OK;
}

int cli_file_ready(const char *path, const char *what)
{
    struct stat about;
    if (!path) return CLI_OK;
    if (!*path) return cli_fail("%s: an empty name cannot be written", what);
    if (stat(path, &about) != 0) return cli_folder_ready(path, what);
    return S_ISDIR(about.st_mode)
               ? cli_fail("%s: '%s' cannot be written: it is a folder", what, path)
               : CLI_OK;
}
