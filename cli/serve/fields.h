/* fields.h - the fields of a request that are not under "esa", and what they stand for.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_SERVE_FIELDS_H
#define ESA_CLI_SERVE_FIELDS_H

#include "serve/serve.h"

enum {
    SERVE_IS_TEXT = 0,
    SERVE_IS_NUMBER,
    SERVE_IS_PICTURE,
    SERVE_IS_MORE, /* an object with more fields */
    SERVE_IS_ESA,
    SERVE_IS_ONE /* a number of videos, which is 1 */
};

typedef struct serve_field {
    const char *name;
    int kind;           /* SERVE_IS_* */
    const char *option; /* the option of `esa generate` that it is; NULL: none */
} serve_field;

const serve_field *serve_fields(int *count); /* static storage */
/* (picture.c) Height and width of a PNG, JPEG or WebP picture; 0: it is none of them. */
int serve_picture_size(int32_t size[2], const unsigned char *picture, size_t bytes);

#endif
