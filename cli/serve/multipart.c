/* multipart.c - bodies of multipart/form-data (RFC 7578), which lie whole in memory.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Strict where clients agree: each part begins with a Content-Disposition of form-data with a
 * quoted name. Its other headers say nothing that is needed here: what a file is, its content
 * tells. */
#define _GNU_SOURCE /* memmem */
#include "serve/serve.h"

#include <string.h>
#include <strings.h>

#define MOST_HEADERS 4096 /* bytes of the headers of a part */

int serve_boundary(char out[80], const char *content_type)
{
    const char *at = strcasestr(content_type, "boundary=");
    if (!at) return 0;
    at += strlen("boundary=");
    const int quoted = *at == '"';
    if (quoted) at++;
    const size_t n = strcspn(at, quoted ? "\"" : "; \t");
    if (n < 1 || n > 70 || (quoted && at[n] != '"')) return 0;
    memcpy(out, at, n);
    out[n] = 0;
    return 1;
}

/* The value of name="..." in a header line; 0: it is not there or too long. A backslash protects
 * the character behind it. */
static int parameter(char *out, size_t size, const char *line, size_t bytes, const char *name)
{
    const size_t n = strlen(name);
    size_t used = 0;
    for (size_t i = 0; i + n + 2 <= bytes; i++) {
        const int begins = i > 0 && (line[i - 1] == ';' || line[i - 1] == ' ');
        if (!begins || strncasecmp(line + i, name, n) != 0 || line[i + n] != '=' ||
            line[i + n + 1] != '"')
            continue;
        for (i += n + 2; i < bytes && line[i] != '"'; i++) {
            if (line[i] == '\\' && i + 1 < bytes) i++;
            if (used + 1 >= size || !line[i]) return 0;
            out[used++] = line[i];
        }
        out[used] = 0;
        return i < bytes;
    }
    return 0;
}

/* Reads the headers of a part, which end before at + bytes; 0: they are damaged. */
static int read_headers(serve_part *part, const char *at, size_t bytes)
{
    static const char wanted[] = "Content-Disposition:";
    char name[256];
    int found = 0;
    while (bytes) {
        const char *end = memmem(at, bytes, "\r\n", 2);
        const size_t n = end ? (size_t)(end - at) : bytes;
        if (n >= sizeof wanted && strncasecmp(at, wanted, sizeof wanted - 1) == 0) {
            if (found++ || !memmem(at, n, "form-data", 9)) return 0;
            if (!parameter(part->name, sizeof part->name, at, n, "name")) return 0;
            part->file = parameter(name, sizeof name, at, n, "filename") ||
                         memmem(at, n, "filename", 8) != NULL;
        }
        const size_t whole = n + (end ? 2 : 0);
        at += whole;
        bytes -= whole;
    }
    return found;
}

int serve_multipart_next(serve_part *part, size_t *at, const char *body, size_t bytes,
                         const char *boundary)
{
    char mark[80];
    const size_t n = (size_t)snprintf(mark, sizeof mark, "\r\n--%s", boundary);
    memset(part, 0, sizeof *part);
    if (*at == 0) { /* the first boundary may begin the body; what is before it is nobody's */
        const int first = bytes >= n - 2 && memcmp(body, mark + 2, n - 2) == 0;
        const char *found = first ? body : memmem(body, bytes, mark, n);
        if (!found) return -1;
        *at = (size_t)(found - body) + (first ? n - 2 : n);
    }
    const char *p = body + *at;
    size_t left = bytes - *at;
    if (left >= 2 && memcmp(p, "--", 2) == 0) return 0;
    while (left && (*p == ' ' || *p == '\t')) p++, left--;
    if (left < 2 || memcmp(p, "\r\n", 2) != 0) return -1;
    const char *blank = memmem(p, left < MOST_HEADERS ? left : MOST_HEADERS, "\r\n\r\n", 4);
    if (!blank || blank == p || !read_headers(part, p + 2, (size_t)(blank - p) - 2)) return -1;
    part->data = blank + 4;
    left = bytes - (size_t)(part->data - body);
    /* an empty part: its end of line is that of the headers */
    const char *end = memmem(part->data - 2, left + 2, mark, n);
    if (!end) return -1;
    part->bytes = end < part->data ? 0 : (size_t)(end - part->data);
    *at = (size_t)(end - body) + n;
    return 1;
}
