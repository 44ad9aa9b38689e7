/* json.h - a strict pull reader for the JSON subset of a safetensors header.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The caller knows the grammar and asks for the next item. Nothing recurses, so nesting cannot
 * exhaust the stack; nothing is built, so there is no tree to limit. Strings must be UTF-8 without
 * overlong forms, surrogates or NUL. Numbers are non-negative integers that fit int64, without
 * sign, fraction, exponent or leading zeros. */
#ifndef ESA_IO_JSON_H
#define ESA_IO_JSON_H

#include <stdint.h>

typedef struct esa_json {
    const char *base, *at, *end; /* the text; never read beyond end */
    /* Receives unescaped strings. end - base bytes are always enough: a string with its two quotes
     * is never shorter than its unescaped bytes with their NUL. */
    char *strings;
    const char *error; /* NULL, or what was wrong; static storage */
} esa_json;

/* Returns the next significant byte without taking it, or -1 at the end. */
int esa_json_peek(esa_json *json);
/* Takes the punctuation c. Returns 0 and sets error if it is not there. */
int esa_json_take(esa_json *json, char c);
/* Goes on after an element of an object or array. Returns 1 after ',', 0 after close, or -1 and
 * sets error. */
int esa_json_next(esa_json *json, char close);
/* Reads a string to json->strings, unescaped and NUL-terminated. Returns NULL and sets error if
 * there is none. */
const char *esa_json_string(esa_json *json);
/* Reads a non-negative integer. Returns 0 and sets error if there is none. */
int esa_json_integer(esa_json *json, int64_t *value);

/* Length of the valid UTF-8 character at s (1 .. 4), or 0. */
int esa_utf8_length(const char *s, const char *end);

#endif
