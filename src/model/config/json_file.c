/* json_file.c - see json_file.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/config/json_file.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/number.h"
#include "io/mapfile.h"
#include "io/safetensors.h"

static void set_label(esa_json_file *file, const char *label)
{
    const size_t n = strlen(label), keep = n < 200 ? n : 200;
    memcpy(file->label, label + (n - keep), keep);
    file->label[keep] = 0;
}

esa_status esa_json_fail(esa_json_file *file, esa_status status, const char *format, ...)
{
    if (file->status) return file->status;
    char text[300];
    va_list args;
    va_start(args, format);
    esa_text_vformat(text, sizeof text, format, args);
    va_end(args);
    file->status = esa_fail(file->ctx, status, "%s: %s", file->label, text);
    return file->status;
}

/* The end of the number at `at`; *big = 1 if it is an integer that 64 bits cannot hold. */
static const char *number_end(const char *at, const char *end, int *big)
{
    const int negative = *at == '-';
    const uint64_t most = (uint64_t)INT64_MAX + (uint64_t)negative;
    uint64_t n = 0;
    *big = 0;
    for (at += negative; at < end && *at >= '0' && *at <= '9'; at++) {
        const uint64_t digit = (uint64_t)(*at - '0');
        if (n > (most - digit) / 10)
            *big = 1;
        else
            n = 10 * n + digit;
    }
    const char *const whole = at;
    while (at < end && *at && strchr(".eE+-0123456789", *at)) at++;
    if (at > whole) *big = 0; /* a real number */
    return at;
}

/* Copies text to out and writes "e0" behind each integer that 64 bits cannot hold. Returns the
 * length; out NULL: only that. */
static int64_t widen(char *out, const char *text, int64_t bytes)
{
    const char *const end = text + bytes;
    int64_t used = 0;
    for (const char *at = text, *next; at < end; at = next) {
        int big = 0;
        next = at + 1;
        if (*at == '"') {
            while (next < end && *next != '"') next += *next == '\\' && end - next > 1 ? 2 : 1;
            if (next < end) next++;
        } else if (*at == '-' || (*at >= '0' && *at <= '9')) {
            next = number_end(at, end, &big);
        }
        if (out) memcpy(out + used, at, (size_t)(next - at));
        used += next - at;
        if (out && big) memcpy(out + used, "e0", 2);
        used += 2 * big;
    }
    return used;
}

/* Without memory for a part of a long text or number, jansson leaves it out and goes on. So a file
 * is parsed twice, which must give the same. Larger files are vocabularies, for which that takes
 * too long. */
enum { TWICE = 1 << 20 };
static json_t *load(esa_json_file *file, const char *text, int64_t bytes, json_error_t *error)
{
    json_t *root = json_loadb(text, (size_t)bytes, JSON_REJECT_DUPLICATES, error);
    int whole = root || error->text[0]; /* it has no words for a lack of memory */
    if (root && bytes <= TWICE) {
        json_t *again = json_loadb(text, (size_t)bytes, JSON_REJECT_DUPLICATES, NULL);
        whole = json_equal(root, again);
        json_decref(again);
    }
    if (whole) return root;
    json_decref(root);
    esa_json_fail(file, ESA_ERR_MEMORY, "out of memory");
    return NULL;
}

/* Tokenizers write "no limit" as an integer of 31 digits, for which jansson refuses the file. Such
 * numbers are read as reals, and only a reader that wants one of them as an integer refuses it. */
static json_t *load_wide(esa_json_file *file, const char *text, int64_t bytes, json_error_t *error)
{
    const int64_t wide = widen(NULL, text, bytes);
    char *copy = esa_mem_alloc(&file->ctx->mem, wide);
    if (!copy) {
        esa_json_fail(file, ESA_ERR_MEMORY, "out of memory");
        return NULL;
    }
    widen(copy, text, bytes);
    json_t *root = load(file, copy, wide, error);
    esa_mem_free(&file->ctx->mem, copy, wide);
    return root;
}

static esa_status parse(esa_json_file *file, const char *text, int64_t bytes)
{
    json_error_t error;
    json_t *root = load(file, text, bytes, &error);
    if (!root && !file->status && json_error_code(&error) == json_error_numeric_overflow)
        root = load_wide(file, text, bytes, &error);
    if (!root)
        return esa_json_fail(file, ESA_ERR_FORMAT, "is not JSON, line %d: %s", error.line,
                             esa_quote(error.text).text);
    if (!json_is_object(root)) {
        json_decref(root);
        return esa_json_fail(file, ESA_ERR_FORMAT, "is not a JSON object");
    }
    file->root = root;
    return ESA_OK;
}

esa_status esa_json_file_parse(esa_ctx *ctx, esa_json_file *file, const char *text, int64_t bytes,
                               const char *label)
{
    *file = (esa_json_file){ .ctx = ctx };
    set_label(file, label);
    return parse(file, text, bytes);
}

/* Reads and parses the open file of `size` bytes. */
static esa_status read_open(esa_json_file *file, int fd, int64_t size)
{
    if (size > ESA_JSON_MAX_BYTES)
        return esa_json_fail(file, ESA_ERR_FORMAT, "has %lld bytes, expected at most %lld",
                             (long long)size, (long long)ESA_JSON_MAX_BYTES);
    char *text = esa_mem_alloc(&file->ctx->mem, size);
    if (!text) return esa_json_fail(file, ESA_ERR_MEMORY, "out of memory");
    file->status = esa_read_start(file->ctx, fd, text, size, file->label);
    if (!file->status) parse(file, text, size);
    esa_mem_free(&file->ctx->mem, text, size);
    return file->status;
}

esa_status esa_json_file_open(esa_ctx *ctx, esa_json_file *file, const char *path)
{
    int fd;
    int64_t size;
    *file = (esa_json_file){ .ctx = ctx };
    set_label(file, path);
    file->status = esa_open_file(ctx, &fd, &size, path, file->label);
    if (file->status) return file->status;
    read_open(file, fd, size);
    close(fd);
    return file->status;
}

void esa_json_file_close(esa_json_file *file)
{
    if (file->root) json_decref(file->root);
    file->root = NULL;
}

/* The member, or NULL if it is absent or null. */
static const json_t *member(const esa_json_file *file, const char *key)
{
    const json_t *v = !file->status && file->root ? json_object_get(file->root, key) : NULL;
    return json_is_null(v) ? NULL : v;
}

/* A value as the file has it, for messages. */
static esa_quoted shown(const json_t *v)
{
    char text[128] = "";
    const size_t n = json_dumpb(v, text, sizeof text - 1, JSON_COMPACT | JSON_ENCODE_ANY);
    if (n == 0 || n >= sizeof text)
        snprintf(text, sizeof text, "a longer value");
    else
        text[n] = 0;
    return esa_quote(text);
}

int64_t esa_json_int(esa_json_file *file, const char *key, int64_t lo, int64_t hi, int64_t fallback)
{
    const json_t *v = member(file, key);
    if (!v) {
        if (fallback != ESA_JSON_REQUIRED) return fallback;
        esa_json_fail(file, ESA_ERR_FORMAT, "%s is missing, expected an integer from %lld to %lld",
                      key, (long long)lo, (long long)hi);
        return lo;
    }
    const int64_t n = json_is_integer(v) ? (int64_t)json_integer_value(v) : 0;
    if (json_is_integer(v) && n >= lo && n <= hi) return n;
    esa_json_fail(file, ESA_ERR_FORMAT, "%s is %s, expected an integer from %lld to %lld", key,
                  shown(v).text, (long long)lo, (long long)hi);
    return lo;
}

double esa_json_real(esa_json_file *file, const char *key, double lo, double hi, double fallback)
{
    const json_t *v = member(file, key);
    if (!v) {
        if (!isnan(fallback)) return fallback;
        esa_json_fail(file, ESA_ERR_FORMAT, "%s is missing, expected a number from %g to %g", key,
                      lo, hi);
        return lo;
    }
    const double x = json_is_number(v) ? json_number_value(v) : (double)NAN;
    if (x >= lo && x <= hi) return x;
    esa_json_fail(file, ESA_ERR_FORMAT, "%s is %s, expected a number from %g to %g", key,
                  shown(v).text, lo, hi);
    return lo;
}

int32_t esa_json_bool(esa_json_file *file, const char *key, int32_t fallback)
{
    const json_t *v = member(file, key);
    if (v && !json_is_boolean(v))
        esa_json_fail(file, ESA_ERR_FORMAT, "%s is %s, expected true or false", key, shown(v).text);
    return v && json_is_boolean(v) ? json_is_true(v) : fallback;
}

const char *esa_json_text(esa_json_file *file, const char *key, const char *fallback)
{
    const json_t *v = member(file, key);
    if (!v && !fallback)
        esa_json_fail(file, ESA_ERR_FORMAT, "%s is missing, expected a string", key);
    if (v && !json_is_string(v))
        esa_json_fail(file, ESA_ERR_FORMAT, "%s is %s, expected a string", key, shown(v).text);
    return v && json_is_string(v) ? json_string_value(v) : (fallback ? fallback : "");
}

int32_t esa_json_ints(esa_json_file *file, const char *key, int32_t *out, int32_t count,
                      int32_t max, int64_t lo, int64_t hi, const int32_t *fallback)
{
    const json_t *v = member(file, key);
    for (int32_t i = 0; i < (count < 0 ? max : count); i++)
        out[i] = fallback && count > 0 ? fallback[i] : (int32_t)lo;
    if (!v && fallback) return count;
    const int64_t n = json_is_array(v) ? (int64_t)json_array_size(v) : -1;
    int good = count < 0 ? n >= 1 && n <= max : n == count;
    for (int64_t i = 0; good && i < n; i++) {
        const json_t *e = json_array_get(v, (size_t)i);
        /* true and false count as 1 and 0: temperal_downsample is a list of them */
        const int64_t x = json_is_integer(e) ? (int64_t)json_integer_value(e)
                                             : (json_is_true(e) ? 1 : 0);
        good = (json_is_integer(e) || (lo == 0 && hi == 1 && json_is_boolean(e))) && x >= lo &&
               x <= hi;
        if (good) out[i] = (int32_t)x;
    }
    if (good) return (int32_t)n;
    if (!v)
        esa_json_fail(file, ESA_ERR_FORMAT, "%s is missing, expected a list", key);
    else
        esa_json_fail(file, ESA_ERR_FORMAT,
                      "%s is %s, expected a list of %s%d integers from %lld to %lld", key,
                      shown(v).text, count < 0 ? "1 to " : "", count < 0 ? max : count,
                      (long long)lo, (long long)hi);
    return count < 0 ? 1 : count;
}

void esa_json_only_text(esa_json_file *file, const char *key, const char *value)
{
    const json_t *v = member(file, key);
    if (v && (!json_is_string(v) || strcmp(json_string_value(v), value) != 0))
        esa_json_fail(file, ESA_ERR_UNSUPPORTED, "%s is %s, expected \"%s\"", key, shown(v).text,
                      value);
}

void esa_json_only_bool(esa_json_file *file, const char *key, int32_t value)
{
    const json_t *v = member(file, key);
    if (v && !(json_is_boolean(v) && json_is_true(v) == value))
        esa_json_fail(file, ESA_ERR_UNSUPPORTED, "%s is %s, expected %s", key, shown(v).text,
                      value ? "true" : "false");
}

void esa_json_only_null(esa_json_file *file, const char *key)
{
    const json_t *v = member(file, key);
    if (v)
        esa_json_fail(file, ESA_ERR_UNSUPPORTED, "%s is %s, expected null or nothing", key,
                      shown(v).text);
}

static int hash_bytes(const char *buffer, size_t size, void *state)
{
    uint64_t h;
    memcpy(&h, state, 8);
    for (size_t i = 0; i < size; i++) h = (h ^ (uint8_t)buffer[i]) * UINT64_C(1099511628211);
    memcpy(state, &h, 8);
    return 0;
}

void esa_json_hash(esa_json_file *file, char hash[80])
{
    uint64_t h = UINT64_C(14695981039346656037);
    /* The kept keys go into an object of our own, and the dump sorts them. */
    json_t *kept = json_object();
    const char *key;
    json_t *value;
    int failed = !kept;
    if (kept && file->root)
        json_object_foreach(file->root, key, value) if (key[0] != '_')
            failed |= json_object_set(kept, key, value);
    if (!failed) failed = json_dump_callback(kept, hash_bytes, &h, JSON_SORT_KEYS | JSON_COMPACT);
    json_decref(kept);
    if (failed) esa_json_fail(file, ESA_ERR_MEMORY, "out of memory");
    snprintf(hash, 80, "fnv1a64:%016llx", (unsigned long long)h);
}
