/* outpath.c - see outpath.h.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* O_PATH, realpath */
#include "io/outpath.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>
#include "base/status.h"

#define MOST_LINKS 40 /* as in Linux */
#define ACL        "system.posix_acl_access"
#define ACL_BYTES  4096

/* ---------------------------------------------------------------- links */

static esa_status cannot_follow(esa_ctx *ctx, const char *path, int why)
{
    return esa_fail(ctx, ESA_ERR_IO, "%.200s cannot be written: %s", path, strerror(why));
}

/* The target of the link at `at`, and the link's owner. Returns the length of the target; 0: it is
 * no link; -1 with errno. One descriptor serves both, so that nobody can exchange the link between
 * them. */
static ssize_t read_link(char target[PATH_MAX], uid_t *owner, const char *at)
{
    struct stat st;
    const int fd = open(at, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return 0; /* a name that does not exist; what is wrong shows when it is created */
    ssize_t n = fstat(fd, &st) == 0 && S_ISLNK(st.st_mode) ? 1 : 0;
    if (n) n = readlinkat(fd, "", target, PATH_MAX - 1);
    const int why = errno;
    close(fd);
    errno = why;
    if (n > 0) target[n] = 0;
    *owner = st.st_uid;
    return n;
}

/* 1 if a link of this owner in the folder may have been put there to mislead this user. */
static int is_trap(const char *folder, uid_t owner)
{
    struct stat st;
    const mode_t shared = S_ISVTX | S_IWOTH;
    return owner != geteuid() && stat(folder, &st) == 0 && (st.st_mode & shared) == shared &&
           owner != st.st_uid;
}

/* Follows one link. *more = 0 if end is none. Returns an errno, or -1 for a trap. */
static int hop(char end[PATH_MAX], int32_t *more, int32_t *open_file)
{
    char folder[PATH_MAX], target[PATH_MAX];
    uid_t owner;
    const ssize_t n = read_link(target, &owner, end);
    *more = n > 0;
    if (n <= 0) return n < 0 ? errno : 0;
    char *slash = strrchr(end, '/');
    if (slash) slash[1] = 0;
    if (!realpath(slash ? end : ".", folder)) return errno;
    if (is_trap(folder, owner)) return -1;
    *open_file = strncmp(folder, "/proc/", 6) == 0;
    const int room = target[0] == '/' ? snprintf(end, PATH_MAX, "%s", target)
                                      : snprintf(end, PATH_MAX, "%s/%s", folder, target);
    return room < PATH_MAX ? 0 : ENAMETOOLONG;
}

esa_status esa_outpath_follow(esa_ctx *ctx, char end[PATH_MAX], int32_t *open_file,
                              const char *path)
{
    int32_t more = 1;
    *open_file = 0;
    if (!path || !*path) return esa_fail(ctx, ESA_ERR_ARGUMENT, "no output file name was given");
    if (strlen(path) >= PATH_MAX) return cannot_follow(ctx, path, ENAMETOOLONG);
    strcpy(end, path);
    for (int hops = 0; hops < MOST_LINKS; hops++) {
        const int why = hop(end, &more, open_file);
        if (why < 0)
            return esa_fail(ctx, ESA_ERR_IO,
                            "%.200s cannot be written: it is a link of another user in a folder "
                            "where everybody may write: give the name of the file itself",
                            path);
        if (why > 0) return cannot_follow(ctx, path, why);
        if (*open_file) strcpy(end, path);
        if (!more || *open_file) return ESA_OK;
    }
    return cannot_follow(ctx, path, ELOOP);
}

/* ---------------------------------------------------------------- mode and owner */

/* Gives the open file the ACL of the file at end. Returns 0 if it has one that cannot be given. */
static int copy_acl(int fd, const char *end)
{
    char acl[ACL_BYTES];
    const ssize_t n = getxattr(end, ACL, acl, sizeof acl);
    if (n < 0) return errno == ENODATA || errno == ENOTSUP;
    return n == 0 || fsetxattr(fd, ACL, acl, (size_t)n, 0) == 0;
}

/* Gives the open file what esa_outpath_move says of the file that it replaces. */
static void adopt(int fd, const struct stat *old, const char *end)
{
    struct stat new;
    const mode_t mode = old->st_mode & 0777, closed = (mode & 0707) | (mode & 0007) << 3;
    if (fstat(fd, &new) != 0) return;
    int same = old->st_uid == new.st_uid && old->st_gid == new.st_gid;
    same = same || fchown(fd, old->st_uid, old->st_gid) == 0 ||
           fchown(fd, (uid_t)-1, old->st_gid) == 0;
    /* A file system without permissions refuses; the file is then like its others. */
    (void)fchmod(fd, same ? mode : closed);
    if (same && !copy_acl(fd, end)) (void)fchmod(fd, closed);
}

int esa_outpath_create(const char *temp, const char *end)
{
    struct stat old;
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, exists = stat(end, &old) == 0;
    const int fd = open(temp, flags, exists ? 0600 : 0666); /* nobody else opens it before adopt */
    if (fd >= 0 && exists) adopt(fd, &old, end);
    return fd;
}

/* ---------------------------------------------------------------- durability */

void esa_outpath_sync(const char *path)
{
    char folder[PATH_MAX];
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--;
    while (n > 0 && path[n - 1] != '/') n--;
    if (n >= sizeof folder) return;
    memcpy(folder, n ? path : ".", n ? n : 1);
    folder[n ? n : 1] = 0;
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;
    (void)fsync(fd);
    close(fd);
}

int esa_outpath_move(const char *from, const char *to)
{
    struct stat old, new;
    if (lstat(to, &old) == 0 && S_ISREG(old.st_mode) && lstat(from, &new) == 0 &&
        S_ISREG(new.st_mode)) {
        const int fd = open(from, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (fd >= 0) {
            adopt(fd, &old, to);
            close(fd);
        }
    }
    if (rename(from, to) != 0) return errno;
    esa_outpath_sync(to);
    return 0;
}
