/* http_answer.c - answers: texts, JSON, refusals, and files with ranges.
 * SPDX-License-Identifier: Apache-2.0 */
#include "serve/http.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

const char *http_request_header(http_exchange *x, const char *name)
{
    return x->http->mhd.lookup_connection_value(x->connection, MHD_HEADER_KIND, name);
}

const char *http_argument(http_exchange *x, const char *name)
{
    return x->http->mhd.lookup_connection_value(x->connection, MHD_GET_ARGUMENT_KIND, name);
}

void http_header(http_exchange *x, struct MHD_Response *response, const char *name,
                 const char *value)
{
    x->http->mhd.add_response_header(response, name, value);
}

enum MHD_Result http_send(http_exchange *x, int status, struct MHD_Response *response)
{
    serve_hub *hub = x->http->hub;
    if (!response) return MHD_NO; /* out of memory: the connection is closed */
    http_header(x, response, "X-Content-Type-Options", "nosniff");
    http_header(x, response, "Referrer-Policy", "no-referrer");
    http_header(x, response, "Cross-Origin-Resource-Policy", "same-origin");
    pthread_mutex_lock(&hub->lock);
    hub->counts.answers[status / 100 > 5 ? 0 : status / 100]++;
    pthread_mutex_unlock(&hub->lock);
    const enum MHD_Result queued = x->http->mhd.queue_response(x->connection, (unsigned)status,
                                                               response);
    x->http->mhd.destroy_response(response);
    return queued;
}

struct MHD_Response *http_copy(http_exchange *x, const char *text, size_t bytes, const char *type)
{
    /* the library takes the text as not constant, and only reads it in this mode */
    struct MHD_Response *response = x->http->mhd.create_response_from_buffer(
        bytes, (void *)(uintptr_t)text, MHD_RESPMEM_MUST_COPY);
    if (response) http_header(x, response, "Content-Type", type);
    return response;
}

enum MHD_Result http_text(http_exchange *x, int status, const char *type, char *text, size_t bytes)
{
    if (!text) return http_error(x, 500, "", "The server is out of memory.");
    struct MHD_Response *response = x->http->mhd.create_response_from_buffer(bytes, text,
                                                                             MHD_RESPMEM_MUST_FREE);
    if (!response) {
        free(text);
        return MHD_NO;
    }
    http_header(x, response, "Content-Type", type);
    http_header(x, response, "Cache-Control", "no-store");
    return http_send(x, status, response);
}

enum MHD_Result http_json(http_exchange *x, int status, cli_json *json)
{
    size_t bytes = 0;
    cli_json_compact(json);
    char *text = cli_json_take(json, &bytes);
    return http_text(x, status, "application/json", text, bytes);
}

enum MHD_Result http_refuse(http_exchange *x, const serve_refusal *refusal)
{
    size_t bytes = 0;
    cli_json *json = serve_refusal_json(refusal);
    cli_json_compact(json);
    char *text = cli_json_take(json, &bytes);
    static const char none[] = "{\"error\":{\"code\":500,\"type\":\"server_error\",\"message\":"
                               "\"The server is out of memory.\",\"param\":null}}";
    struct MHD_Response *response = text ? http_copy(x, text, bytes, "application/json")
                                         : http_copy(x, none, sizeof none - 1, "application/json");
    free(text);
    if (!response) return MHD_NO;
    http_header(x, response, "Cache-Control", "no-store");
    if (refusal->code == 401) http_header(x, response, "WWW-Authenticate", "Bearer");
    if (refusal->code == 405) http_header(x, response, "Allow", refusal->param);
    if (refusal->code == 429 || refusal->code == 503) http_header(x, response, "Retry-After", "5");
    pthread_mutex_lock(&x->http->hub->lock);
    x->http->hub->counts.refused++;
    pthread_mutex_unlock(&x->http->hub->lock);
    return http_send(x, refusal->code, response);
}

enum MHD_Result http_error(http_exchange *x, int status, const char *param, const char *format, ...)
{
    serve_refusal refusal;
    char text[SERVE_LONGEST];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    serve_refuse(&refusal, status, param, "%s", text);
    return http_refuse(x, &refusal);
}

/* ---------------------------------------------------------------- files */

/* Reads "bytes=a-b", "bytes=a-" or "bytes=-n" for a file of size bytes. 1: first and last are set;
 * 0: no range that this server answers, so the whole file is sent; -1: nothing of the file. */
static int range_of(const char *text, int64_t size, int64_t *first, int64_t *last)
{
    char *end;
    if (!text || strncmp(text, "bytes=", 6) != 0 || strchr(text, ',')) return 0;
    text += 6;
    const int suffix = *text == '-';
    if (suffix) text++;
    if (*text < '0' || *text > '9') return 0;
    errno = 0;
    const int64_t a = strtoll(text, &end, 10);
    if (errno) return -1;
    if (suffix) {
        if (*end) return 0;
        *first = a > size ? 0 : size - a;
        *last = size - 1;
        return a > 0 && size > 0 ? 1 : -1;
    }
    if (*end != '-') return 0;
    *first = a;
    *last = size - 1;
    if (end[1]) {
        const char *second = end + 1;
        if (*second < '0' || *second > '9') return 0;
        const int64_t b = strtoll(second, &end, 10);
        if (*end || b < a) return 0;
        if (!errno && b < *last) *last = b;
    }
    return a < size ? 1 : -1;
}

enum MHD_Result http_file(http_exchange *x, const char *path, const char *type,
                          const char *const *head)
{
    struct stat about;
    char tag[64], text[96];
    int64_t first = 0, last = 0;
    const int fd = cli_open_file(path);
    if (fd < 0 || fstat(fd, &about) != 0) {
        if (fd >= 0) close(fd);
        return http_error(x, 404, "", "The file of this video is not there.");
    }
    const int64_t size = about.st_size;
    snprintf(tag, sizeof tag, "\"%llx-%llx-%llx\"", (unsigned long long)about.st_ino,
             (unsigned long long)size, (unsigned long long)about.st_mtime);
    const char *only_if = http_request_header(x, "If-Range"),
               *known = http_request_header(x, "If-None-Match");
    int part = range_of(http_request_header(x, "Range"), size, &first, &last);
    if (only_if && strcmp(only_if, tag) != 0) part = 0;
    int status = part > 0 ? 206 : 200;
    if (known && strcmp(known, tag) == 0) status = 304;
    if (!part || status == 304) {
        first = 0;
        last = size - 1;
    }
    struct MHD_Response *response;
    if (part < 0 && status != 304) {
        close(fd);
        serve_refusal refusal;
        size_t bytes = 0;
        serve_refuse(&refusal, 416, "Range", "The range lies behind the %lld bytes of the file.",
                     (long long)size);
        char *body = cli_json_take(serve_refusal_json(&refusal), &bytes);
        response = http_copy(x, body ? body : "", bytes, "application/json");
        free(body);
        status = 416;
        snprintf(text, sizeof text, "bytes */%lld", (long long)size);
    } else if (status == 304) {
        close(fd);
        response = http_copy(x, "", 0, type);
    } else {
        response = x->http->mhd.create_response_from_fd_at_offset64(
            (uint64_t)(last - first + 1), fd, (uint64_t)first); /* it closes fd */
        if (!response) close(fd);
        if (response) http_header(x, response, "Content-Type", type);
        snprintf(text, sizeof text, "bytes %lld-%lld/%lld", (long long)first, (long long)last,
                 (long long)size);
    }
    if (!response) return MHD_NO;
    http_header(x, response, "Accept-Ranges", "bytes");
    http_header(x, response, "ETag", tag);
    http_header(x, response, "Cache-Control", "private, no-cache");
    if (status == 206 || status == 416) http_header(x, response, "Content-Range", text);
    for (; head && head[0]; head += 2) http_header(x, response, head[0], head[1]);
    return http_send(x, status, response);
}
