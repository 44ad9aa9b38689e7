/* json.h - JSON of the command line, on jansson.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Writing goes through cli_json, which remembers the open objects and arrays and repairs what
 * jansson refuses: NaN and infinities become null, bytes that are not UTF-8 become U+FFFD. Keys
 * keep the order in which they were added; reals have nine digits. Reading gives a json_t, asked
 * for its entries by path. */
#ifndef ESA_CLI_JSON_H
#define ESA_CLI_JSON_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

/* ---------------------------------------------------------------- writing */

/* An object under construction. The functions take NULL, and remember when memory runs out: the
 * functions that end the construction report it. key is NULL inside an array. */
typedef struct cli_json cli_json;
cli_json *cli_json_new(void);
void cli_json_open(cli_json *json, const char *key, char bracket); /* '{' or '[' */
void cli_json_close(cli_json *json);
void cli_json_text(cli_json *json, const char *key, const char *value); /* NULL: null */
void cli_json_real(cli_json *json, const char *key, double value);      /* not finite: null */
void cli_json_int(cli_json *json, const char *key, int64_t value);
void cli_json_bool(cli_json *json, const char *key, int value);
/* Adds a value made elsewhere and takes over its reference. */
void cli_json_add(cli_json *json, const char *key, json_t *value);
/* Adds several entries: "frames %d bytes %ld fps %g model %s dense %i". %d is an int, %ld an
 * int64_t, %g a real, %s a text or NULL, %i an int that becomes true or false. */
void cli_json_fields(cli_json *json, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Adds an array of n numbers. */
void cli_json_reals(cli_json *json, const char *key, const double *values, int64_t n);
void cli_json_ints(cli_json *json, const char *key, const int32_t *values, int64_t n);
/* Writes the text on one line. */
void cli_json_compact(cli_json *json);
/* Frees json and gives its text, which the caller frees; NULL when out of memory. */
char *cli_json_take(cli_json *json, size_t *bytes);
/* Frees json. Writes it to path, unless that is NULL. CLI_FAILED after a message; then the file is
 * as it was before. */
int cli_json_save(cli_json *json, const char *path);
/* A copy of text in which bytes that are not UTF-8 are U+FFFD; the caller frees it. NULL when out
 * of memory. */
char *cli_utf8(const char *text);

/* ---------------------------------------------------------------- reading */

/* Reads a file of strict JSON without duplicate keys; json_decref frees it. text (may be NULL)
 * receives the file as it is, to be freed. flags: more of jansson's decoding flags, or 0. NULL
 * after a message, which begins with what. */
json_t *cli_json_load(const char *path, char **text, size_t flags, const char *what);
/* The entry at a path: "machine.cpu"; numbers pick from arrays, "variants.0.psnr". NULL if a part
 * is missing. value may be NULL. */
json_t *cli_json_at(const json_t *value, const char *path);
/* The same as a number (NaN if it is no number) or as text (NULL if it is none). */
double cli_json_number(const json_t *value, const char *path);
const char *cli_json_string(const json_t *value, const char *path);
/* Copies the finite numbers at path of every entry of an array into out; returns their count. */
int64_t cli_json_column(double *out, const json_t *array, const char *path);

#endif
