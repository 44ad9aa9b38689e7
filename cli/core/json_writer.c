/* json_writer.c - JSON collected in memory; files written to a temporary name and renamed, whole or
 * not at all.
 * SPDX-License-Identifier: Apache-2.0 */
#define _XOPEN_SOURCE 700 /* realpath */
#include "core/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef PATH_MAX
#define PATH_MAX 4096
#endif

struct cli_json {
    char *text;
    size_t used, room;
    int failed;  /* out of memory: reported at save */
    int compact; /* 1: no line breaks */
    int depth;
    char close[16];  /* closing bracket per level */
    int entries[16]; /* entries written per level */
};

cli_json *cli_json_new(void)
{
    cli_json *j = calloc(1, sizeof *j);
    if (j) cli_json_open(j, NULL, '{');
    return j;
}

static void put(cli_json *j, const char *text, size_t n)
{
    if (!j || j->failed) return;
    if (j->used + n + 1 > j->room) {
        const size_t room = 2 * j->room + n + 1024;
        char *grown = realloc(j->text, room);
        if (!grown) {
            j->failed = 1;
            return;
        }
        j->text = grown;
        j->room = room;
    }
    memcpy(j->text + j->used, text, n);
    j->used += n;
    j->text[j->used] = 0;
}

static void puts_json(cli_json *j, const char *text) { put(j, text, strlen(text)); }

int cli_utf8(const unsigned char *p)
{
    const int n = p[0] < 0x80   ? 1
                  : p[0] < 0xc2 ? 0
                  : p[0] < 0xe0 ? 2
                  : p[0] < 0xf0 ? 3
                  : p[0] < 0xf5 ? 4
                                : 0;
    for (int i = 1; i < n; i++)
        if ((p[i] & 0xc0) != 0x80) return 0; /* the end of the text is no continuation either */
    if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f) ||
        (p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] > 0x8f))
        return 0;
    return n;
}

/* File names may be any bytes, JSON is UTF-8: what is none becomes U+FFFD. */
static void quoted(cli_json *j, const char *text)
{
    puts_json(j, "\"");
    for (const unsigned char *p = (const unsigned char *)text; *p;) {
        char code[8];
        const int n = cli_utf8(p);
        if (*p == '"' || *p == '\\') {
            code[0] = '\\';
            code[1] = (char)*p;
            put(j, code, 2);
        } else if (*p < 0x20) {
            snprintf(code, sizeof code, "\\u%04x", *p);
            puts_json(j, code);
        } else if (n)
            put(j, (const char *)p, (size_t)n);
        else
            puts_json(j, "\xef\xbf\xbd");
        p += n ? n : 1;
    }
    puts_json(j, "\"");
}

/* Comma, line break and indentation in front of an entry, then its key. */
static void entry(cli_json *j, const char *key)
{
    if (!j) return;
    if (j->depth > 0) {
        puts_json(j, j->entries[j->depth - 1]++ ? "," : "");
        if (!j->compact) puts_json(j, "\n");
        for (int i = 0; i < j->depth && !j->compact; i++) puts_json(j, "  ");
    }
    if (key) {
        quoted(j, key);
        puts_json(j, ": ");
    }
}

void cli_json_open(cli_json *j, const char *key, char bracket)
{
    if (!j || j->depth == 16) return;
    entry(j, key);
    put(j, &bracket, 1);
    j->close[j->depth] = bracket == '{' ? '}' : ']';
    j->entries[j->depth++] = 0;
}

void cli_json_close(cli_json *j)
{
    if (!j || j->depth == 0) return;
    j->depth--;
    if (j->entries[j->depth] && !j->compact) {
        puts_json(j, "\n");
        for (int i = 0; i < j->depth; i++) puts_json(j, "  ");
    }
    put(j, &j->close[j->depth], 1);
}

void cli_json_text(cli_json *j, const char *key, const char *value)
{
    entry(j, key);
    if (value)
        quoted(j, value);
    else
        puts_json(j, "null");
}

void cli_json_real(cli_json *j, const char *key, double value)
{
    char text[40];
    entry(j, key);
    if (isfinite(value))
        snprintf(text, sizeof text, "%.9g", value);
    else
        snprintf(text, sizeof text, "null");
    puts_json(j, text);
}

void cli_json_int(cli_json *j, const char *key, int64_t value)
{
    char text[40];
    entry(j, key);
    snprintf(text, sizeof text, "%lld", (long long)value);
    puts_json(j, text);
}

void cli_json_bool(cli_json *j, const char *key, int value)
{
    entry(j, key);
    puts_json(j, value ? "true" : "false");
}

void cli_json_raw(cli_json *j, const char *key, const char *text, size_t bytes)
{
    entry(j, key);
    put(j, text, bytes);
}

void cli_json_compact(cli_json *j)
{
    if (j) j->compact = 1;
}

char *cli_json_take(cli_json *j, size_t *bytes)
{
    while (j && j->depth) cli_json_close(j);
    char *text = j && !j->failed ? j->text : NULL;
    *bytes = text ? j->used : 0;
    if (j && !text) free(j->text);
    free(j);
    return text;
}

int cli_json_save(cli_json *j, const char *path)
{
    int status = CLI_OK;
    if (path && !j) status = cli_fail("out of memory while writing '%s'", path);
    if (path && j) {
        while (j->depth) cli_json_close(j);
        puts_json(j, "\n");
        status = j->failed ? cli_fail("out of memory while writing '%s'", path)
                           : cli_write_file(path, j->text, j->used);
    }
    if (j) free(j->text);
    free(j);
    return status;
}

/* ---------------------------------------------------------------- files */

/* Where the links at path lead, into end (path itself if it is none). 1: through /proc, so path
 * stands for a file that is open already; -1: errno says why not. */
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

/* Into a pipe, a device or an open file, which are written and never replaced. */
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

/* A temporary file beside end, then a rename; 0 or an errno. name has room for end and 16 bytes
 * more. */
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
    /* The file that standard output goes to (/dev/stdout, or its name): in turn with what was
     * printed, never replaced under it. */
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
