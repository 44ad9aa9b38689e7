/* json.c - see json.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/json.h"
#include "core/cli.h"
#include "core/files.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 16

struct cli_json {
    json_t *level[MAX_DEPTH]; /* the root, and the objects and arrays open below it */
    int depth;
    int failed; /* out of memory */
    int compact;
};

/* ---------------------------------------------------------------- writing */

cli_json *cli_json_new(void)
{
    cli_json *j = calloc(1, sizeof *j);
    if (j) j->level[j->depth++] = json_object();
    return j;
}

/* jansson's setters take NULL for "out of memory before", and fail. */
void cli_json_add(cli_json *j, const char *key, json_t *value)
{
    json_t *at = j ? j->level[j->depth - 1] : NULL;
    const int failed = key ? json_object_set_new(at, key, value) : json_array_append_new(at, value);
    if (j && failed) j->failed = 1;
}

void cli_json_open(cli_json *j, const char *key, char bracket)
{
    if (!j || j->depth == MAX_DEPTH) return;
    json_t *inner = bracket == '{' ? json_object() : json_array();
    cli_json_add(j, key, inner);
    j->level[j->depth++] = inner;
}

void cli_json_close(cli_json *j)
{
    if (j && j->depth > 1) j->depth--;
}

/* Bytes of the character of UTF-8 that begins here; 0: it is none. */
static size_t character_bytes(const char *text)
{
    static const unsigned least[5] = { 0, 0, 0x80, 0x800, 0x10000 };
    const unsigned char *p = (const unsigned char *)text;
    if (*p < 0x80) return 1;
    const size_t n = *p >= 0xf0 ? 4 : *p >= 0xe0 ? 3 : 2;
    unsigned code = *p & (0x7fu >> n);
    if (*p < 0xc0 || *p > 0xf4) return 0;
    for (size_t i = 1; i < n; i++) { /* a final zero is no continuation */
        if ((p[i] & 0xc0) != 0x80) return 0;
        code = code << 6 | (p[i] & 0x3f);
    }
    return code < least[n] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) ? 0 : n;
}

char *cli_utf8(const char *text)
{
    char *out = malloc(3 * strlen(text) + 1), *at = out;
    while (out && *text) {
        const size_t n = character_bytes(text), bytes = n ? n : 3;
        memcpy(at, n ? text : "\xef\xbf\xbd", bytes);
        at += bytes;
        text += n ? n : 1;
    }
    if (out) *at = 0;
    return out;
}

void cli_json_text(cli_json *j, const char *key, const char *value)
{
    json_t *text = value ? json_string(value) : json_null();
    if (!text) { /* file names may be any bytes */
        char *repaired = cli_utf8(value);
        if (repaired) text = json_string(repaired);
        free(repaired);
    }
    cli_json_add(j, key, text);
}

void cli_json_real(cli_json *j, const char *key, double value)
{
    /* as %.9g writes them: 5, not 5.0 */
    const int whole = fabs(value) < 1e9 && value == rint(value);
    cli_json_add(j, key,
                 whole             ? json_integer((json_int_t)value)
                 : isfinite(value) ? json_real(value)
                                   : json_null());
}

void cli_json_int(cli_json *j, const char *key, int64_t value)
{
    cli_json_add(j, key, json_integer(value));
}

void cli_json_bool(cli_json *j, const char *key, int value)
{
    cli_json_add(j, key, json_boolean(value));
}

void cli_json_fields(cli_json *j, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    for (const char *p = format; *p;) {
        char key[64];
        const size_t n = strcspn(p, " ");
        snprintf(key, sizeof key, "%.*s", (int)n, p);
        p += n + strlen(" %");
        switch (*p) {
        case 'd': cli_json_int(j, key, va_arg(args, int)); break;
        case 'i': cli_json_bool(j, key, va_arg(args, int)); break;
        case 'l': cli_json_int(j, key, va_arg(args, long)); break;
        case 'g': cli_json_real(j, key, va_arg(args, double)); break;
        default: cli_json_text(j, key, va_arg(args, const char *)); break;
        }
        p += strcspn(p, " ");
        p += strspn(p, " ");
    }
    va_end(args);
}

void cli_json_reals(cli_json *j, const char *key, const double *values, int64_t n)
{
    cli_json_open(j, key, '[');
    for (int64_t i = 0; i < n; i++) cli_json_real(j, NULL, values[i]);
    cli_json_close(j);
}

void cli_json_ints(cli_json *j, const char *key, const int32_t *values, int64_t n)
{
    cli_json_open(j, key, '[');
    for (int64_t i = 0; i < n; i++) cli_json_int(j, NULL, values[i]);
    cli_json_close(j);
}

void cli_json_compact(cli_json *j)
{
    if (j) j->compact = 1;
}

typedef struct sink {
    char *text;
    size_t used, room;
    int failed;
} sink;

static int put(const char *text, size_t bytes, void *user)
{
    sink *s = user;
    if (s->used + bytes >= s->room && !s->failed) {
        const size_t room = 2 * (s->room + bytes) + 256;
        char *more = realloc(s->text, room);
        if (!more)
            s->failed = 1;
        else {
            s->text = more;
            s->room = room;
        }
    }
    if (s->failed) return -1;
    memcpy(s->text + s->used, text, bytes);
    s->used += bytes;
    s->text[s->used] = 0;
    return 0;
}

/* json_dumps forgets that there was no memory for a part of a key and goes on, so the text is put
 * together here. */
char *cli_json_take(cli_json *j, size_t *bytes)
{
    if (!j) return NULL;
    const size_t flags = JSON_REAL_PRECISION(9) | (j->compact ? JSON_COMPACT : JSON_INDENT(2));
    sink s = { .failed = j->failed };
    if (s.failed || json_dump_callback(j->level[0], put, &s, flags) || s.failed) {
        free(s.text);
        s = (sink){ .text = NULL };
    }
    *bytes = s.used;
    json_decref(j->level[0]);
    free(j);
    return s.text;
}

int cli_json_save(cli_json *j, const char *path)
{
    size_t bytes;
    char *text = cli_json_take(j, &bytes);
    int status = CLI_OK;
    if (path && !text) status = cli_fail("out of memory while writing '%s'", path);
    if (path && text) {
        text[bytes] = '\n'; /* in place of the final zero: the length is given */
        status = cli_write_file(path, text, bytes + 1);
    }
    free(text);
    return status;
}

/* ---------------------------------------------------------------- reading */

/* Without memory for a part of a long text or number jansson leaves it out and goes on, so the text
 * is parsed twice, which must give the same. Where it stops, it has no words for that. */
static json_t *load(const char *data, size_t bytes, size_t flags, json_error_t *error)
{
    json_t *value = json_loadb(data, bytes, flags, error),
           *again = value ? json_loadb(data, bytes, flags, NULL) : NULL;
    const int same = json_equal(value, again);
    json_decref(again);
    if (same || (!value && error->text[0])) return value;
    json_decref(value);
    snprintf(error->text, sizeof error->text, "out of memory");
    return NULL;
}

json_t *cli_json_load(const char *path, char **text, size_t flags, const char *what)
{
    json_error_t error;
    size_t bytes;
    char *data = cli_read_file(path, &bytes);
    if (!data) {
        cli_fail("%s: cannot read '%s': %s", what, path, cli_error_text(errno));
        return NULL;
    }
    json_t *value = load(data, bytes, JSON_REJECT_DUPLICATES | flags, &error);
    if (!value && strcmp(error.text, "out of memory") == 0)
        cli_fail("%s: out of memory while reading '%s'", what, path);
    else if (!value)
        cli_fail("%s: '%s' is not JSON: line %d: %s", what, path, error.line, error.text);
    if (value && text)
        *text = data;
    else
        free(data);
    return value;
}

json_t *cli_json_at(const json_t *value, const char *path)
{
    json_t *at = (json_t *)(uintptr_t)value;
    while (at && *path) {
        char key[64];
        const size_t n = strcspn(path, ".");
        snprintf(key, sizeof key, "%.*s", (int)n, path);
        at = json_is_array(at) ? json_array_get(at, strtoul(key, NULL, 10))
                               : json_object_get(at, key);
        path += n + (path[n] == '.');
    }
    return at;
}

double cli_json_number(const json_t *value, const char *path)
{
    const json_t *at = cli_json_at(value, path);
    return json_is_number(at) ? json_number_value(at) : (double)NAN;
}

const char *cli_json_string(const json_t *value, const char *path)
{
    return json_string_value(cli_json_at(value, path));
}

int64_t cli_json_column(double *out, const json_t *array, const char *path)
{
    int64_t count = 0;
    for (size_t i = 0; i < json_array_size(array); i++) {
        const double x = cli_json_number(json_array_get(array, i), path);
        if (isfinite(x)) out[count++] = x;
    }
    return count;
}
