/* json.h - a strict pull reader for the JSON subset a safetensors header is made of.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The caller knows the grammar and asks for what must come next; nothing recurses, so nesting
 * cannot exhaust the stack, and nothing is built, so there is no tree to bound. Strings must be
 * UTF-8 without overlong forms, surrogates or NUL; numbers are non-negative integers that fit
 * int64, without sign, fraction, exponent or leading zeros. */
#ifndef ESA_IO_JSON_H
#define ESA_IO_JSON_H

#include <stdint.h>

typedef struct esa_json {
    const char *base, *at, *end; /* the text; nothing beyond end is read */
    /* where unescaped strings go: room for end - base bytes is always enough, because a string
     * with its two quotes is never shorter than its unescaped bytes with their NUL */
    char *strings;
    const char *error; /* NULL, or what was wrong: a phrase, static storage */
} esa_json;

/* The next significant byte without taking it, or -1 at the end. */
int esa_json_peek(esa_json *json);
/* Takes the punctuation c. 0 and an error if something else stands there. */
int esa_json_take(esa_json *json, char c);
/* After an element of an object or array: 1 on ',' (taken), 0 on close (taken), -1 and an error on
 * anything else. */
int esa_json_next(esa_json *json, char close);
/* A string, unescaped, NUL-terminated, at json->strings, which advances. NULL and an error if there
 * is none. */
const char *esa_json_string(esa_json *json);
/* A non-negative integer. 0 and an error if there is none. */
int esa_json_integer(esa_json *json, int64_t *value);

/* Length of the valid UTF-8 character at s (1 .. 4), or 0. */
int esa_utf8_length(const char *s, const char *end);

#endif
