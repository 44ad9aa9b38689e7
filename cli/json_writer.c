/* json_writer.c - JSON collected in memory; files written to a temporary name and renamed, whole or not at all.
 * SPDX-License-Identifier: Apache-2.0 */
#include "cli.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct cli_json {
    char *text;
    size_t used, room;
    int failed;                     /* out of memory: reported at save */
    int depth;
    char close[16];                 /* closing bracket per level */
    int entries[16];                /* entries written per level */
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
        if (!grown) { j->failed = 1; return; }
        j->text = grown;
        j->room = room;
    }
    memcpy(j->text + j->used, text, n);
    j->used += n;
    j->text[j->used] = 0;
}

static void puts_json(cli_json *j, const char *text) { put(j, text, strlen(text)); }

static void quoted(cli_json *j, const char *text)
{
    puts_json(j, "\"");
    for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
        char code[8];
        if (*p == '"' || *p == '\\') { code[0] = '\\'; code[1] = (char)*p; put(j, code, 2); }
        else if (*p < 0x20) { snprintf(code, sizeof code, "\\u%04x", *p); puts_json(j, code); }
        else put(j, (const char *)p, 1);
    }
    puts_json(j, "\"");
}

/* Comma, line break and indentation in front of an entry, then its key. */
static void entry(cli_json *j, const char *key)
{
    if (!j) return;
    if (j->depth > 0) {
        puts_json(j, j->entries[j->depth - 1]++ ? ",\n" : "\n");
        for (int i = 0; i < j->depth; i++) puts_json(j, "  ");
    }
    if (key) { quoted(j, key); puts_json(j, ": "); }
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
    if (j->entries[j->depth]) {
        puts_json(j, "\n");
        for (int i = 0; i < j->depth; i++) puts_json(j, "  ");
    }
    put(j, &j->close[j->depth], 1);
}

void cli_json_text(cli_json *j, const char *key, const char *value)
{
    entry(j, key);
    if (value) quoted(j, value);
    else puts_json(j, "null");
}

void cli_json_real(cli_json *j, const char *key, double value)
{
    char text[40];
    entry(j, key);
    if (isfinite(value)) snprintf(text, sizeof text, "%.9g", value);
    else snprintf(text, sizeof text, "null");
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

int cli_json_save(cli_json *j, const char *path)
{
    int status = CLI_OK;
    if (path && !j) status = cli_fail("out of memory while writing '%s'", path);
    if (path && j) {
        while (j->depth) cli_json_close(j);
        puts_json(j, "\n");
        status = j->failed ? cli_fail("out of memory while writing '%s'", path) : cli_write_file(path, j->text, j->used);
    }
    if (j) free(j->text);
    free(j);
    return status;
}

int cli_write_file(const char *path, const char *text, size_t bytes)
{
    struct stat about;
    if (stat(path, &about) == 0 && !S_ISREG(about.st_mode)) {   /* a pipe or device is written, never replaced */
        FILE *device = S_ISDIR(about.st_mode) ? NULL : fopen(path, "w");
        if (S_ISDIR(about.st_mode)) errno = EISDIR;
        if (device && fwrite(text, 1, bytes, device) == bytes && fclose(device) == 0) return CLI_OK;
        return cli_fail("cannot write '%s': %s", path, strerror(errno));
    }
    char *name = malloc(strlen(path) + 16);
    if (!name) return cli_fail("out of memory while writing '%s'", path);
    sprintf(name, "%s.XXXXXX", path);
    const int fd = mkstemp(name);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "w");
    if (!file) {
        const int error = errno;
        if (fd >= 0) { close(fd); unlink(name); }
        free(name);
        return cli_fail("cannot write '%s': %s", path, strerror(error));
    }
    const mode_t mask = umask(0);
    umask(mask);
    int ok = fchmod(fd, 0666 & ~mask) == 0;                     /* mkstemp gives 0600; users expect their umask */
    ok = fwrite(text, 1, bytes, file) == bytes && ok;
    ok = fflush(file) == 0 && ok;
    ok = fsync(fd) == 0 && ok;
    ok = fclose(file) == 0 && ok;
    ok = ok && rename(name, path) == 0;
    const int error = errno;
    if (!ok) unlink(name);
    free(name);
    return ok ? CLI_OK : cli_fail("cannot write '%s': %s", path, strerror(error));
}
