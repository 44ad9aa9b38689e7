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

char *cli_utf8(const char *text)
{
    char *out = malloc(3 * strlen(text) + 1), *at = out;
    for (size_t left; out && (left = strnlen(text, 4)) > 0;) {
        json_t *character = NULL;
        size_t n = 0;
        while (!character && n < left) character = json_stringn(text, ++n);
        if (!character) n = 1;
        const size_t bytes = character ? n : 3;
        memcpy(at, character ? text : "\xef\xbf\xbd", bytes);
        at += bytes;
        text += n;
        json_decref(character);
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

char *cli_json_take(cli_json *j, size_t *bytes)
{
    if (!j) return NULL;
    const size_t flags = JSON_REAL_PRECISION(9) | (j->compact ? JSON_COMPACT : JSON_INDENT(2));
    char *text = j->failed ? NULL : json_dumps(j->level[0], flags);
    *bytes = text ? strlen(text) : 0;
    json_decref(j->level[0]);
    free(j);
    return text;
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

json_t *cli_json_load(const char *path, char **text, size_t flags, const char *what)
{
    json_error_t error;
    size_t bytes;
    char *data = cli_read_file(path, &bytes);
    if (!data) {
        cli_fail("%s: cannot read '%s': %s", what, path, cli_error_text(errno));
        return NULL;
    }
    json_t *value = json_loadb(data, bytes, JSON_REJECT_DUPLICATES | flags, &error);
    if (!value) cli_fail("%s: '%s' is not JSON: line %d: %s", what, path, error.line, error.text);
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
