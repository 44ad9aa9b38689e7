/* json_file.h - reads a JSON object from a file, and its members with their ranges checked.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The first error is kept (status, and one message in ctx). Later calls then do nothing and return
 * their fallback, so a reader asks for every key and checks the status once. */
#ifndef ESA_MODEL_JSON_FILE_H
#define ESA_MODEL_JSON_FILE_H

#include <jansson.h>
#include "base/status.h"
#include "ctx/ctx.h"

#define ESA_JSON_MAX_BYTES (INT64_C(64) << 20) /* the largest index file in use is 300 KB */
#define ESA_JSON_REQUIRED  INT64_MIN           /* as fallback: the key must exist */

typedef struct esa_json_file {
    esa_ctx *ctx;
    json_t *root;    /* an object; NULL after a failure */
    char label[208]; /* the file's name in messages */
    esa_status status;
} esa_json_file;

/* Both fill file, also on failure; esa_json_file_close accepts both cases. */
esa_status esa_json_file_open(esa_ctx *ctx, esa_json_file *file, const char *path);
esa_status esa_json_file_parse(esa_ctx *ctx, esa_json_file *file, const char *text, int64_t bytes,
                               const char *label);
void esa_json_file_close(esa_json_file *file);

/* Keeps the first failure and returns it; the message is "<label>: <text>". */
esa_status esa_json_fail(esa_json_file *file, esa_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* A key that is absent or null gives fallback, or an error if fallback is ESA_JSON_REQUIRED. */
int64_t esa_json_int(esa_json_file *file, const char *key, int64_t lo, int64_t hi,
                     int64_t fallback);
/* fallback NaN: required */
double esa_json_real(esa_json_file *file, const char *key, double lo, double hi, double fallback);
int32_t esa_json_bool(esa_json_file *file, const char *key, int32_t fallback);
/* fallback NULL: required */
const char *esa_json_text(esa_json_file *file, const char *key, const char *fallback);
/* Reads an array of exactly count integers, or of 1 to max if count is -1, and returns how many.
 * Required if fallback is NULL. */
int32_t esa_json_ints(esa_json_file *file, const char *key, int32_t *out, int32_t count,
                      int32_t max, int64_t lo, int64_t hi, const int32_t *fallback);
/* Fails with ESA_ERR_UNSUPPORTED unless the key has this value or is absent. */
void esa_json_only_text(esa_json_file *file, const char *key, const char *value);
void esa_json_only_bool(esa_json_file *file, const char *key, int32_t value);
void esa_json_only_null(esa_json_file *file, const char *key);

/* The FNV-1a hash of the object with sorted keys, without those that start with '_', as
 * "fnv1a64:%016x". Fails with ESA_ERR_MEMORY. */
void esa_json_hash(esa_json_file *file, char hash[80]);

#endif
