/* json_file.h - a JSON object from a file, and its members with their ranges checked.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The first thing that is wrong is kept (status, one sentence in ctx); later getters do nothing and
 * return their fallback, so a reader of a config asks for everything and looks at status once. */
#ifndef ESA_MODEL_JSON_FILE_H
#define ESA_MODEL_JSON_FILE_H

#include <jansson.h>
#include "ctx/ctx.h"

#define ESA_JSON_MAX_BYTES (INT64_C(64) << 20) /* the largest index file in use is 300 KB */
#define ESA_JSON_REQUIRED  INT64_MIN           /* as fallback: the key must be there */

typedef struct esa_json_file {
    esa_ctx *ctx;
    json_t *root;    /* an object; NULL after a failure */
    char label[208]; /* what sentences call the file */
    esa_status status;
} esa_json_file;

/* Both fill file, also on failure; close accepts either. */
esa_status esa_json_file_open(esa_ctx *ctx, esa_json_file *file, const char *path);
esa_status esa_json_file_parse(esa_ctx *ctx, esa_json_file *file, const char *text, int64_t bytes,
                               const char *label);
void esa_json_file_close(esa_json_file *file);

/* Keeps the first failure: "<label>: <sentence>". */
void esa_json_fail(esa_json_file *file, esa_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* A key that is absent or null gives fallback (ESA_JSON_REQUIRED: an error). */
int64_t esa_json_int(esa_json_file *file, const char *key, int64_t lo, int64_t hi,
                     int64_t fallback);
/* NaN: required */
double esa_json_real(esa_json_file *file, const char *key, double lo, double hi, double fallback);
int32_t esa_json_bool(esa_json_file *file, const char *key, int32_t fallback);
/* NULL: required */
const char *esa_json_text(esa_json_file *file, const char *key, const char *fallback);
/* An array of exactly count (at most max, when count is -1) integers; returns how many. Required if
 * fallback is NULL. */
int32_t esa_json_ints(esa_json_file *file, const char *key, int32_t *out, int32_t count,
                      int32_t max, int64_t lo, int64_t hi, const int32_t *fallback);
/* The key must hold this value or be absent; otherwise ESA_ERR_UNSUPPORTED with the value in the
 * sentence. */
void esa_json_only_text(esa_json_file *file, const char *key, const char *value);
void esa_json_only_bool(esa_json_file *file, const char *key, int32_t value);
void esa_json_only_null(esa_json_file *file, const char *key);

/* FNV-1a over the object in a canonical form (keys sorted, keys that start with '_' left out), as
 * "fnv1a64:%016x". */
void esa_json_hash(const esa_json_file *file, char hash[80]);

#endif
