/* json_file.c - see json_file.h.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/json_file.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "io/safetensors.h"

static void set_label(esa_json_file *file, const char *label)
{
    const size_t n = strlen(label), keep = n < 200 ? n : 200;
    memcpy(file->label, label + (n - keep), keep);
    file->label[keep] = 0;
}

void esa_json_fail(esa_json_file *file, esa_status status, const char *format, ...)
{
    if (file->status != ESA_OK) return;
    char text[300];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    file->status = esa_fail(file->ctx, status, "%s: %s", file->label, text);
}

esa_status esa_json_file_parse(esa_ctx *ctx, esa_json_file *file, const char *text, int64_t bytes,
                               const char *label)
{
    *file = (esa_json_file){ .ctx = ctx };
    set_label(file, label);
    json_error_t error;
    json_t *root = json_loadb(text, (size_t)bytes, JSON_REJECT_DUPLICATES, &error);
    /* Tokenizers write "no limit" as an integer of 31 digits: such a file is read with reals for
     * all numbers. */
    if (!root && json_error_code(&error) == json_error_numeric_overflow)
        root = json_loadb(text, (size_t)bytes, JSON_REJECT_DUPLICATES | JSON_DECODE_INT_AS_REAL,
                          &error);
    if (!root) {
        esa_json_fail(file, ESA_ERR_FORMAT, "not JSON, line %d: %s", error.line,
                      esa_quote(error.text).text);
    } else if (!json_is_object(root)) {
        esa_json_fail(file, ESA_ERR_FORMAT, "a JSON object was expected");
        json_decref(root);
    } else {
        file->root = root;
    }
    return file->status;
}

esa_status esa_json_file_open(esa_ctx *ctx, esa_json_file *file, const char *path)
{
    *file = (esa_json_file){ .ctx = ctx };
    set_label(file, path);
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        esa_json_fail(file, ESA_ERR_IO, "cannot be opened: %s", strerror(errno));
        return file->status;
    }
    struct stat st;
    char *text = NULL;
    int64_t size = 0, got = 0;
    if (fstat(fd, &st) != 0) {
        esa_json_fail(file, ESA_ERR_IO, "cannot be examined: %s", strerror(errno));
    } else if (!S_ISREG(st.st_mode)) {
        esa_json_fail(file, ESA_ERR_IO, "is not a regular file");
    } else if (st.st_size > ESA_JSON_MAX_BYTES) {
        esa_json_fail(file, ESA_ERR_FORMAT, "has %lld bytes, a configuration has at most %lld",
                      (long long)st.st_size, (long long)ESA_JSON_MAX_BYTES);
    } else if (!(text = esa_mem_alloc(&ctx->mem, size = st.st_size))) {
        esa_json_fail(file, ESA_ERR_MEMORY, "out of memory");
    }
    while (file->status == ESA_OK && got < size) {
        const ssize_t n = read(fd, text + got, (size_t)(size - got));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) esa_json_fail(file, ESA_ERR_IO, "cannot be read: %s", strerror(errno));
        if (n == 0) size = got; /* cut short meanwhile: the parser will say */
        if (n > 0) got += n;
    }
    close(fd);
    if (file->status == ESA_OK) {
        char label[sizeof file->label];
        memcpy(label, file->label, sizeof label);
        esa_json_file_parse(ctx, file, text, got, label);
    }
    if (text) esa_mem_free(&ctx->mem, text, st.st_size);
    return file->status;
}

void esa_json_file_close(esa_json_file *file)
{
    if (file->root) json_decref(file->root);
    file->root = NULL;
}

/* The member, or NULL: absent or null. */
static const json_t *member(const esa_json_file *file, const char *key)
{
    const json_t *v = file->status == ESA_OK && file->root ? json_object_get(file->root, key)
                                                           : NULL;
    return json_is_null(v) ? NULL : v;
}

/* A value as it stands in the file, for sentences. */
static esa_quoted shown(const json_t *v)
{
    char text[128] = "";
    const size_t n = json_dumpb(v, text, sizeof text - 1, JSON_COMPACT | JSON_ENCODE_ANY);
    if (n == 0 || n >= sizeof text)
        snprintf(text, sizeof text, "something longer");
    else
        text[n] = 0;
    return esa_quote(text);
}

int64_t esa_json_int(esa_json_file *file, const char *key, int64_t lo, int64_t hi, int64_t fallback)
{
    const json_t *v = member(file, key);
    if (!v) {
        if (fallback != ESA_JSON_REQUIRED) return fallback;
        esa_json_fail(file, ESA_ERR_FORMAT,
                      "%s is missing, a number from %lld to %lld was expected", key, (long long)lo,
                      (long long)hi);
        return lo;
    }
    const int64_t n = json_is_integer(v) ? (int64_t)json_integer_value(v) : 0;
    if (json_is_integer(v) && n >= lo && n <= hi) return n;
    esa_json_fail(file, ESA_ERR_FORMAT, "%s is %s, a whole number from %lld to %lld was expected",
                  key, shown(v).text, (long long)lo, (long long)hi);
    return lo;
}

double esa_json_real(esa_json_file *file, const char *key, double lo, double hi, double fallback)
{
    const json_t *v = member(file, key);
    if (!v) {
        if (!isnan(fallback)) return fallback;
        esa_json_fail(file, ESA_ERR_FORMAT, "%s is missing, a number from %g to %g was expected",
                      key, lo, hi);
        return lo;
    }
    const double x = json_is_number(v) ? json_number_value(v) : (double)NAN;
    if (x >= lo && x <= hi) return x;
    esa_json_fail(file, ESA_ERR_FORMAT, "%s is %s, a number from %g to %g was expected", key,
                  shown(v).text, lo, hi);
    return lo;
}

int32_t esa_json_bool(esa_json_file *file, const char *key, int32_t fallback)
{
    const json_t *v = member(file, key);
    if (v && !json_is_boolean(v))
        esa_json_fail(file, ESA_ERR_FORMAT, "%s is %s, true or false was expected", key,
                      shown(v).text);
    return v && json_is_boolean(v) ? json_is_true(v) : fallback;
}

const char *esa_json_text(esa_json_file *file, const char *key, const char *fallback)
{
    const json_t *v = member(file, key);
    if (!v && !fallback)
        esa_json_fail(file, ESA_ERR_FORMAT, "%s is missing, a text was expected", key);
    if (v && !json_is_string(v))
        esa_json_fail(file, ESA_ERR_FORMAT, "%s is %s, a text was expected", key, shown(v).text);
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
        /* truth values are numbers here: temperal_downsample is a list of them */
        const int64_t x = json_is_integer(e) ? (int64_t)json_integer_value(e)
                                             : (json_is_true(e) ? 1 : 0);
        good = (json_is_integer(e) || (lo == 0 && hi == 1 && json_is_boolean(e))) && x >= lo &&
               x <= hi;
        if (good) out[i] = (int32_t)x;
    }
    if (good) return (int32_t)n;
    if (!v)
        esa_json_fail(file, ESA_ERR_FORMAT, "%s is missing, a list was expected", key);
    else
        esa_json_fail(file, ESA_ERR_FORMAT,
                      "%s is %s, a list of %s%d numbers from %lld to %lld was expected", key,
                      shown(v).text, count < 0 ? "1 to " : "", count < 0 ? max : count,
                      (long long)lo, (long long)hi);
    return count < 0 ? 1 : count;
}

void esa_json_only_text(esa_json_file *file, const char *key, const char *value)
{
    const json_t *v = member(file, key);
    if (v && (!json_is_string(v) || strcmp(json_string_value(v), value) != 0))
        esa_json_fail(file, ESA_ERR_UNSUPPORTED, "%s is %s, the engine runs \"%s\"", key,
                      shown(v).text, value);
}

void esa_json_only_bool(esa_json_file *file, const char *key, int32_t value)
{
    const json_t *v = member(file, key);
    if (v && !(json_is_boolean(v) && json_is_true(v) == value))
        esa_json_fail(file, ESA_ERR_UNSUPPORTED, "%s is %s, the engine runs %s", key, shown(v).text,
                      value ? "true" : "false");
}

void esa_json_only_null(esa_json_file *file, const char *key)
{
    const json_t *v = member(file, key);
    if (v)
        esa_json_fail(file, ESA_ERR_UNSUPPORTED, "%s is %s, the engine runs models without it", key,
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

void esa_json_hash(const esa_json_file *file, char hash[80])
{
    uint64_t h = UINT64_C(14695981039346656037);
    /* Keys one by one, sorted by insertion into an object of our own: dumping sorts. */
    json_t *kept = json_object();
    const char *key;
    json_t *value;
    if (kept && file->root)
        json_object_foreach(file->root, key, value) if (key[0] != '_')
            json_object_set(kept, key, value);
    if (kept) json_dump_callback(kept, hash_bytes, &h, JSON_SORT_KEYS | JSON_COMPACT);
    json_decref(kept);
    snprintf(hash, 80, "fnv1a64:%016llx", (unsigned long long)h);
}
