/* json_reader.c - a strict JSON parser. Nesting is bounded, so that no file can exhaust the stack.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/json_reader.h"
#include "core/cli.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_DEPTH 64

typedef struct parser {
    const char *start, *at, *end;
    const char *fault; /* NULL: none yet */
    int depth;
} parser;

static cli_value *fail(parser *p, const char *fault)
{
    if (!p->fault) p->fault = fault;
    return NULL;
}

static void blanks(parser *p)
{
    while (p->at < p->end && (*p->at == ' ' || *p->at == '\t' || *p->at == '\n' || *p->at == '\r'))
        p->at++;
}

static int take(parser *p, char c)
{
    if (p->at == p->end || *p->at != c) return 0;
    p->at++;
    return 1;
}

/* ---------------------------------------------------------------- text */

static int hex4(parser *p, uint32_t *code)
{
    *code = 0;
    for (int i = 0; i < 4; i++, p->at++) {
        if (p->at == p->end) return 0;
        const char c = *p->at;
        if (c >= '0' && c <= '9')
            *code = *code * 16 + (uint32_t)(c - '0');
        else if (c >= 'a' && c <= 'f')
            *code = *code * 16 + (uint32_t)(c - 'a' + 10);
        else if (c >= 'A' && c <= 'F')
            *code = *code * 16 + (uint32_t)(c - 'A' + 10);
        else
            return 0;
    }
    return 1;
}

static size_t utf8_put(char *out, uint32_t code)
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    size_t n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = n - 1; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 0x3f));
    out[0] = (char)((n == 2 ? 0xc0 : n == 3 ? 0xe0 : 0xf0) | code);
    return n;
}

/* Behind "\u": one character, or two halves of one. */
static int escape_u(parser *p, uint32_t *code)
{
    uint32_t low;
    if (!hex4(p, code)) return 0;
    if (*code >= 0xdc00 && *code < 0xe000) return 0;
    if (*code < 0xd800 || *code >= 0xe000) return *code != 0;
    if (!take(p, '\\') || !take(p, 'u') || !hex4(p, &low) || low < 0xdc00 || low >= 0xe000)
        return 0;
    *code = 0x10000 + ((*code - 0xd800) << 10) + (low - 0xdc00);
    return 1;
}

/* Behind the opening quote. What is decoded is never longer than what is written. */
static char *string(parser *p)
{
    static const char plain[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    const char *close = p->at;
    while (close < p->end && *close != '"') close += *close == '\\' ? 2 : 1;
    if (close >= p->end) {
        fail(p, "a string that does not end");
        return NULL;
    }
    char *text = malloc((size_t)(close - p->at) + 4), *out = text;
    if (!text) {
        fail(p, "out of memory");
        return NULL;
    }
    while (!p->fault && *p->at != '"') {
        const int n = cli_utf8((const unsigned char *)p->at);
        const char c = *p->at;
        if ((unsigned char)c < 0x20)
            fail(p, "a control character inside a string");
        else if (n == 0)
            fail(p, "text that is not UTF-8");
        else if (c != '\\') {
            memcpy(out, p->at, (size_t)n);
            out += n;
            p->at += n;
        } else
            p->at++;
        if (p->fault || c != '\\') continue;
        if (take(p, 'u')) {
            uint32_t code;
            if (!escape_u(p, &code))
                fail(p, "a bad \\u escape");
            else
                out += utf8_put(out, code);
        } else {
            const char *which = strchr(plain, *p->at);
            if (!which || *p->at == 0)
                fail(p, "a bad escape");
            else {
                *out++ = meant[which - plain];
                p->at++;
            }
        }
    }
    if (p->fault) {
        free(text);
        return NULL;
    }
    *out = 0;
    p->at++;
    return text;
}

/* ---------------------------------------------------------------- values */

static cli_value *value(parser *p);

static cli_value *make(parser *p, int type)
{
    cli_value *v = calloc(1, sizeof *v);
    if (!v) return fail(p, "out of memory");
    v->type = type;
    return v;
}

static cli_value *word(parser *p, const char *text, int type, double number)
{
    const size_t n = strlen(text);
    if ((size_t)(p->end - p->at) < n || memcmp(p->at, text, n) != 0)
        return fail(p, "an unknown word");
    p->at += n;
    cli_value *v = make(p, type);
    if (v) v->number = number;
    return v;
}

static int digits(parser *p)
{
    const char *from = p->at;
    while (p->at < p->end && *p->at >= '0' && *p->at <= '9') p->at++;
    return p->at > from;
}

static cli_value *number(parser *p)
{
    char copy[64];
    const char *from = p->at;
    take(p, '-');
    int good = take(p, '0') || digits(p);
    if (good && take(p, '.')) good = digits(p);
    if (good && (take(p, 'e') || take(p, 'E'))) {
        if (!take(p, '+')) take(p, '-');
        good = digits(p);
    }
    const size_t n = (size_t)(p->at - from);
    if (!good || n >= sizeof copy) return fail(p, "a bad number");
    memcpy(copy, from, n);
    copy[n] = 0;
    cli_value *v = make(p, CLI_JSON_NUMBER);
    if (v) v->number = strtod(copy, NULL);
    if (v && !isfinite(v->number)) {
        free(v);
        return fail(p, "a number out of range");
    }
    return v;
}

static cli_value *container(parser *p, int type)
{
    const char close = type == CLI_JSON_OBJECT ? '}' : ']';
    cli_value *all = make(p, type), **last = all ? &all->child : NULL;
    if (++p->depth > MAX_DEPTH) fail(p, "nested too deeply");
    blanks(p);
    if (!p->fault && take(p, close)) {
        p->depth--;
        return all;
    }
    while (!p->fault) {
        char *key = NULL;
        blanks(p);
        if (type == CLI_JSON_OBJECT) {
            if (!take(p, '"')) {
                fail(p, "expected a key in quotes");
                break;
            }
            if (!(key = string(p))) break;
            for (const cli_value *v = all->child; v; v = v->next)
                if (strcmp(v->key, key) == 0) fail(p, "a key that stands there twice");
            blanks(p);
            if (!take(p, ':')) fail(p, "expected ':' behind a key");
        }
        cli_value *one = p->fault ? NULL : value(p);
        if (!one) {
            free(key);
            break;
        }
        one->key = key;
        *last = one;
        last = &one->next;
        all->count++;
        blanks(p);
        if (take(p, close)) {
            p->depth--;
            return all;
        }
        if (!take(p, ','))
            fail(p, type == CLI_JSON_OBJECT ? "expected ',' or '}'" : "expected ',' or ']'");
    }
    cli_value_free(all);
    return NULL;
}

static cli_value *value(parser *p)
{
    blanks(p);
    if (p->at == p->end) return fail(p, "the text ends too early");
    switch (*p->at) {
    case '{': p->at++; return container(p, CLI_JSON_OBJECT);
    case '[': p->at++; return container(p, CLI_JSON_ARRAY);
    case 't': return word(p, "true", CLI_JSON_BOOL, 1);
    case 'f': return word(p, "false", CLI_JSON_BOOL, 0);
    case 'n': return word(p, "null", CLI_JSON_NULL, 0);
    case '"': {
        p->at++;
        char *text = string(p);
        cli_value *v = text ? make(p, CLI_JSON_TEXT) : NULL;
        if (v)
            v->text = text;
        else
            free(text);
        return v;
    }
    default: return number(p);
    }
}

cli_value *cli_value_parse(const char *text, size_t bytes, char error[160])
{
    parser p = { text, text, text + bytes, NULL, 0 };
    cli_value *v = value(&p);
    blanks(&p);
    if (v && p.at != p.end) fail(&p, "something behind the value");
    if (!p.fault) return v;
    int64_t line = 1;
    for (const char *c = text; c < p.at && c < p.end; c++) line += *c == '\n';
    snprintf(error, 160, "line %lld: %s", (long long)line, p.fault);
    cli_value_free(v);
    return NULL;
}

void cli_value_free(cli_value *v)
{
    while (v) {
        cli_value *next = v->next;
        cli_value_free(v->child);
        free(v->text);
        free(v->key);
        free(v);
        v = next;
    }
}

/* ---------------------------------------------------------------- files */

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

cli_value *cli_value_load(const char *path, char **text, const char *what)
{
    char error[160];
    size_t bytes;
    char *data = cli_read_file(path, &bytes);
    if (!data) {
        cli_fail("%s: '%s' cannot be read: %s", what, path, strerror(errno));
        return NULL;
    }
    cli_value *v = cli_value_parse(data, bytes, error);
    if (!v) cli_fail("%s: '%s' is not JSON: %s", what, path, error);
    if (v && text)
        *text = data;
    else
        free(data);
    return v;
}

/* ---------------------------------------------------------------- looking things up */

const cli_value *cli_value_at(const cli_value *v, const char *path)
{
    while (v && *path) {
        const size_t n = strcspn(path, ".");
        const cli_value *entry = v->child;
        if (v->type == CLI_JSON_OBJECT)
            while (entry && !(strlen(entry->key) == n && memcmp(entry->key, path, n) == 0))
                entry = entry->next;
        else if (v->type == CLI_JSON_ARRAY && n > 0 && strspn(path, "0123456789") == n)
            for (long i = strtol(path, NULL, 10); entry && i > 0; i--) entry = entry->next;
        else
            entry = NULL;
        v = entry;
        path += n + (path[n] == '.');
    }
    return v;
}

double cli_value_number(const cli_value *v, const char *path)
{
    const cli_value *entry = cli_value_at(v, path);
    return entry && entry->type == CLI_JSON_NUMBER ? entry->number : NAN;
}

const char *cli_value_text(const cli_value *v, const char *path)
{
    const cli_value *entry = cli_value_at(v, path);
    return entry && entry->type == CLI_JSON_TEXT ? entry->text : NULL;
}
