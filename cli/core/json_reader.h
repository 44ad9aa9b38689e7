/* json_reader.h - JSON files read back: a strict parser into a tree, for the commands that look at
 * what others wrote.
 * SPDX-License-Identifier: Apache-2.0
 *
 * RFC 8259 and nothing more: no comments, no NaN, no trailing commas, one value per file, UTF-8.
 * The command line links libesa alone, so this stands beside json_writer.c and needs nothing but
 * libc. */
#ifndef ESA_CLI_JSON_READER_H
#define ESA_CLI_JSON_READER_H

#include <stddef.h>
#include <stdint.h>

enum {
    CLI_JSON_NULL,
    CLI_JSON_BOOL,
    CLI_JSON_NUMBER,
    CLI_JSON_TEXT,
    CLI_JSON_ARRAY,
    CLI_JSON_OBJECT
};

typedef struct cli_value cli_value;
struct cli_value {
    int type;                /* CLI_JSON_* */
    int64_t count;           /* ARRAY, OBJECT: entries */
    double number;           /* NUMBER; BOOL: 0 or 1 */
    char *text;              /* TEXT: decoded, ends in a zero; zeros inside are refused */
    char *key;               /* of an OBJECT's entry */
    cli_value *child, *next; /* first entry; the entry after this one */
};

/* Parses bytes of text, behind which there is a zero. NULL after a failure: error then holds "line
 * 3: ..." (or "out of memory"). Free with cli_value_free. */
cli_value *cli_value_parse(const char *text, size_t bytes, char error[160]);
void cli_value_free(cli_value *value);
/* Reads and parses a file; text (if not NULL) receives the file as it is, ending in a zero, to be
 * freed. NULL after one sentence on stderr, which begins with what. */
cli_value *cli_value_load(const char *path, char **text, const char *what);
/* A whole file in memory, a zero behind it; NULL and errno after a failure (EISDIR for a
 * folder). */
char *cli_read_file(const char *path, size_t *bytes);

/* Entries by path: "machine.cpu", and numbers pick from arrays, "variants.0.psnr". NULL if one of
 * its parts is missing. value may be NULL. */
const cli_value *cli_value_at(const cli_value *value, const char *path);
/* The same, as a number (NaN if it is missing, null or something else) or text (NULL likewise). */
double cli_value_number(const cli_value *value, const char *path);
const char *cli_value_text(const cli_value *value, const char *path);

#endif
