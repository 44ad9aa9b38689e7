/* http_page.c - the page: files that travel inside the command, under a strict policy of contents.
 * SPDX-License-Identifier: Apache-2.0 */
#include "serve/http.h"

#include <string.h>

/* From the build: cmake/embed.cmake. */
struct esa_asset {
    const char *name;
    const unsigned char *bytes;
    unsigned long size;
};
extern const struct esa_asset esa_assets[];

/* blob: because a video element cannot send a key: with one, the page fetches the file and shows
 * what it got. */
static const char policy[] =
    "default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; style-src 'self'; "
    "script-src 'self'; connect-src 'self'; object-src 'none'; base-uri 'none'; form-action "
    "'none'; frame-ancestors 'none'";

static const char *type_of(const char *name)
{
    static const char *const types[][2] = {
        { ".html", "text/html; charset=utf-8" },
        { ".css", "text/css; charset=utf-8" },
        { ".js", "text/javascript; charset=utf-8" },
        { ".svg", "image/svg+xml" },
        { ".png", "image/png" },
    };
    const char *dot = strrchr(name, '.');
    for (size_t i = 0; dot && i < sizeof types / sizeof types[0]; i++)
        if (strcmp(dot, types[i][0]) == 0) return types[i][1];
    return "application/octet-stream";
}

/* Those of the page, and what it shares with the report; the rest is the report's. */
static int is_served(const char *name)
{
    return strncmp(name, "serve", 5) == 0 || strcmp(name, "theme.css") == 0 ||
           strcmp(name, "common.js") == 0;
}

int http_asset(http_exchange *x, const char *url, enum MHD_Result *result)
{
    const char *name = strcmp(url, "/") == 0 ? "serve.html" : url + 1;
    for (const struct esa_asset *a = esa_assets; a->name; a++) {
        if (strcmp(a->name, name) != 0 || !is_served(name)) continue;
        struct MHD_Response *response = x->http->mhd.create_response_from_buffer(
            a->size, (void *)(uintptr_t)a->bytes, MHD_RESPMEM_PERSISTENT);
        if (response) {
            http_header(x, response, "Content-Type", type_of(name));
            http_header(x, response, "Content-Security-Policy", policy);
            http_header(x, response, "Cache-Control", "no-cache");
        }
        *result = http_send(x, 200, response);
        return 1;
    }
    return 0;
}
