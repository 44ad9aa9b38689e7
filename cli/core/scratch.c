/* scratch.c - see scratch.h.
 * SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE /* flock */
#include "core/scratch.h"
#include "core/cli.h"
#include "core/folders.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_SIZE 4700 /* a folder's path and the names below it */
#define LOCK      "lock"

static const char digits[] = "0123456789";

/* ---------------------------------------------------------------- names */

/* 1 for "", and for the ending of a file that is being written: .<8 hex digits>.tmp. */
static int is_end(const char *rest, int *temporary)
{
    if (!*rest) return 1;
    *temporary = 1;
    return *rest == '.' && strlen(rest) == 13 && strspn(rest + 1, "0123456789abcdef") == 8 &&
           strcmp(rest + 9, ".tmp") == 0;
}

static int matches(const char *pattern, const char *name, int *temporary)
{
    for (; *pattern; pattern++) {
        if (*pattern == '#') {
            const size_t n = strspn(name, digits);
            if (!n) return 0;
            name += n;
        } else if (*pattern == '*') {
            for (size_t n = strcspn(name, "/"); n > 0; n--)
                if (matches(pattern + 1, name + n, temporary)) return 1;
            return 0;
        } else if (*pattern != *name++)
            return 0;
    }
    *temporary = 0;
    return is_end(name, temporary);
}

/* ---------------------------------------------------------------- what is in the folder */

/* Called for every entry below the folder, for folders after what they hold. name is the path below
 * the folder, with a / at the end of folders. */
typedef void visit(void *user, const char *path, const char *name, int own, int temporary);

typedef struct walk {
    const char *folder;
    const cli_own *own;
    int marked; /* 1: the files may be the command's own */
    visit *visit;
    void *user;
} walk;

/* 1 if name, with a / at the end of folders, is one that the command writes. */
static int is_own(const walk *w, const struct stat *about, const char *name, int *temporary)
{
    *temporary = 0;
    if (strcmp(name, LOCK) == 0) return S_ISREG(about->st_mode) && about->st_size == 0;
    if (!S_ISREG(about->st_mode) && !S_ISDIR(about->st_mode)) return 0;
    if (w->own->marker && matches(w->own->marker, name, temporary))
        return w->marked || *temporary; /* the marker itself may be about to be written */
    for (const char *const *n = w->own->names; w->marked && *n; n++)
        if (matches(*n, name, temporary)) return !*temporary || S_ISREG(about->st_mode);
    return 0;
}

/* below: "" or the path of a folder in the folder, with a / at its end. */
static void walk_folder(const walk *w, const char *below)
{
    char path[PATH_SIZE], name[PATH_SIZE];
    struct stat about;
    snprintf(path, sizeof path, "%s/%s", w->folder, below);
    DIR *list = opendir(path);
    for (struct dirent *d; list && (d = readdir(list)) != NULL;) {
        int temporary = 0;
        if (strcmp(d->d_name, ".") == 0 || strcmp(d->d_name, "..") == 0) continue;
        if (snprintf(name, sizeof name - 1, "%s%s", below, d->d_name) >= (int)sizeof name - 1 ||
            snprintf(path, sizeof path, "%s/%s", w->folder, name) >= (int)sizeof path ||
            lstat(path, &about) != 0)
            continue; /* longer than any name that is written, or gone by now */
        if (S_ISDIR(about.st_mode)) strcat(name, "/");
        const int own = is_own(w, &about, name, &temporary);
        if (own && S_ISDIR(about.st_mode)) walk_folder(w, name);
        w->visit(w->user, path, name, own, temporary);
    }
    if (list) closedir(list);
}

/* 1 if the folder's marker is that of the command, or if it needs none. */
static int is_marked(const char *folder, const cli_own *own)
{
    char path[PATH_SIZE];
    struct stat about;
    if (!own->marker) return 1;
    if (snprintf(path, sizeof path, "%s/%s", folder, own->marker) >= (int)sizeof path ||
        lstat(path, &about) != 0 || !S_ISREG(about.st_mode))
        return 0;
    json_t *value = json_load_file(path, 0, NULL);
    const char *format = cli_json_string(value, "format");
    const int ours = format && strcmp(format, own->format) == 0;
    json_decref(value);
    return ours;
}

static void walk_all(const char *folder, const cli_own *own, int marked, visit *to, void *user)
{
    const walk w = { folder, own, marked, to, user };
    walk_folder(&w, "");
}

/* ---------------------------------------------------------------- foreign entries */

typedef struct strangers {
    char first[256]; /* in alphabetical order */
    int count;
} strangers;

static void note_stranger(void *user, const char *path, const char *name, int own, int temporary)
{
    strangers *s = user;
    (void)path;
    (void)temporary;
    if (own) return;
    if (!s->count++ || strcmp(name, s->first) < 0)
        snprintf(s->first, sizeof s->first, "%.255s", name);
}

int cli_scratch_check(const char *folder, const cli_own *own, const char *what)
{
    strangers s = { .count = 0 };
    char more[64] = "";
    walk_all(folder, own, is_marked(folder, own), note_stranger, &s);
    if (!s.count) return CLI_OK;
    if (s.count > 1)
        snprintf(more, sizeof more, " and %d more entr%s", s.count - 1, s.count > 2 ? "ies" : "y");
    return cli_fail("%s: the folder '%s' is for unfinished work, but it holds '%s'%s, which this "
                    "command did not write; move that away, or give another name",
                    what, folder, s.first, more);
}

/* ---------------------------------------------------------------- removing */

static void remove_temporary(void *user, const char *path, const char *name, int own, int temporary)
{
    (void)user;
    (void)name;
    if (own && temporary) unlink(path);
}

/* user: the marker's name, which stays for now */
static void remove_own(void *user, const char *path, const char *name, int own, int temporary)
{
    (void)temporary;
    if (!own || strcmp(name, LOCK) == 0 || (user && strcmp(name, user) == 0)) return;
    if (name[strlen(name) - 1] == '/')
        rmdir(path); /* fails if it holds more */
    else
        unlink(path);
}

void cli_scratch_clear(const char *folder, const cli_own *own)
{
    char marker[64];
    snprintf(marker, sizeof marker, "%s", own->marker ? own->marker : "");
    if (own->marker) walk_all(folder, own, 1, remove_own, marker);
    walk_all(folder, own, 1, remove_own, NULL);
}

/* ---------------------------------------------------------------- the lock */

static int lock_path(char path[PATH_SIZE], const char *folder)
{
    return snprintf(path, PATH_SIZE, "%s/" LOCK, folder) < PATH_SIZE;
}

/* Two runs may make and remove the folder at the same time, so the locked file must still have its
 * name. */
static int take_lock(int *lock, const char *folder, const char *what)
{
    char path[PATH_SIZE];
    struct stat held, named;
    if (!lock_path(path, folder))
        return cli_fail("%s: a folder's name of %zu bytes is too long", what, strlen(folder));
    for (int attempt = 0; attempt < 100; attempt++) {
        const int status = cli_make_folders(folder, NULL, what);
        if (status) return status;
        *lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
        if (*lock < 0 && errno == ENOENT) continue;
        if (*lock < 0) return cli_fail("%s: cannot write '%s': %s", what, path, strerror(errno));
        if (flock(*lock, LOCK_EX | LOCK_NB) != 0) {
            const int why = errno;
            close(*lock);
            *lock = -1;
            return why == EWOULDBLOCK
                       ? cli_fail("%s: another run is working in '%s'", what, folder)
                       : cli_fail("%s: cannot lock '%s': %s", what, path, strerror(why));
        }
        if (fstat(*lock, &held) == 0 && lstat(path, &named) == 0 && held.st_ino == named.st_ino &&
            held.st_dev == named.st_dev)
            return CLI_OK;
        close(*lock);
        *lock = -1;
    }
    return cli_fail("%s: the folder '%s' comes and goes: is another run working in it?", what,
                    folder);
}

int cli_scratch_open(int *lock, const char *folder, const cli_own *own, const char *what)
{
    *lock = -1;
    int status = take_lock(lock, folder, what);
    if (status) return status;
    status = cli_scratch_check(folder, own, what);
    if (status)
        cli_scratch_close(lock, folder);
    else
        walk_all(folder, own, 1, remove_temporary, NULL);
    return status;
}

int cli_scratch_close(int *lock, const char *folder)
{
    char path[PATH_SIZE];
    struct stat about;
    /* an empty file, or it is not the one that take_lock made */
    if (*lock >= 0 && fstat(*lock, &about) == 0 && S_ISREG(about.st_mode) && about.st_size == 0 &&
        lock_path(path, folder))
        unlink(path);
    if (*lock >= 0) close(*lock);
    *lock = -1;
    return rmdir(folder) == 0 || errno == ENOENT; /* fails if it holds anything */
}

void cli_scratch_remove(int *lock, const char *folder, const cli_own *own)
{
    cli_scratch_clear(folder, own);
    if (!cli_scratch_close(lock, folder))
        fprintf(stderr, "note: '%s' could not be removed; nothing in it is needed\n", folder);
}
