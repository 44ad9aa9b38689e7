/* http.h - what the files of the HTTP side share: the exchange, answers, routes. Built only with
 * libmicrohttpd.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_SERVE_HTTP_H
#define ESA_CLI_SERVE_HTTP_H

#include "serve/mhd.h"
#include "serve/serve.h"

/* One connection, from its begin to its end, for the limits on time (http.c). */
typedef struct http_peer {
    struct http_peer *next, *before;
    int socket;
    double until; /* the time when it is shut down, unless it gets on; INFINITY: never */
} http_peer;

/* One request and its answer. The HTTP thread owns it, but for the part `errand` while that is with
 * the clerk (serve.h). */
typedef struct http_exchange {
    struct serve_http *http;
    struct MHD_Connection *connection;
    http_peer *peer;
    const char *method, *url; /* of the connection */
    char *body;               /* owned */
    size_t bytes, room;
    int begun;      /* 1: the headers were seen */
    int too_large;  /* 1: the body is longer than allowed, and is thrown away */
    int waiting;    /* 1: suspended until the errand or the job is done */
    int status;     /* HTTP status of the answer, for the counters */
    serve_errand *errand; /* NULL: none */
} http_exchange;

struct serve_http {
    serve_hub *hub;
    serve_mhd mhd;
    struct MHD_Daemon *daemon;
    pthread_mutex_t lock; /* of the list of peers and of `buffered` */
    http_peer *peers;     /* [lock] */
    int connections;      /* [lock] */
    size_t buffered;      /* [lock] bytes of bodies in memory */
    char host[128];       /* as --host gave it */
    int port;
};

/* ---------------------------------------------------------------- answers (http_answer.c) */

/* Each queues an answer and returns what the handler of libmicrohttpd shall return. */

/* text: owned, freed with the answer; NULL: out of memory (500). */
enum MHD_Result http_text(http_exchange *x, int status, const char *type, char *text, size_t bytes);
/* Takes json; writes it on one line. */
enum MHD_Result http_json(http_exchange *x, int status, cli_json *json);
enum MHD_Result http_refuse(http_exchange *x, const serve_refusal *refusal);
/* The same with the words of one refusal. */
enum MHD_Result http_error(http_exchange *x, int status, const char *param, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Adds headers that every answer has, queues it and gives it up. */
enum MHD_Result http_send(http_exchange *x, int status, struct MHD_Response *response);
struct MHD_Response *http_copy(http_exchange *x, const char *text, size_t bytes, const char *type);
void http_header(http_exchange *x, struct MHD_Response *response, const char *name,
                 const char *value);
/* A file of the server's, with Range and If-Range; head: extra headers, NULL-terminated pairs. */
enum MHD_Result http_file(http_exchange *x, const char *path, const char *type,
                          const char *const *head);
/* A file that travels inside the command: the page. 0: there is none of this name. */
int http_asset(http_exchange *x, const char *url, enum MHD_Result *result);
const char *http_request_header(http_exchange *x, const char *name);
const char *http_argument(http_exchange *x, const char *name);

/* ---------------------------------------------------------------- routes */

/* Answers a request whose body is whole (http_routes.c). */
enum MHD_Result http_route(http_exchange *x);
/* 0, or the refusal of a request for its key, its host or its origin (http_guard.c). */
int http_guard(http_exchange *x, serve_refusal *refusal);
/* GET /v1/videos/{id}/events (http_events.c). */
enum MHD_Result http_events(http_exchange *x, serve_job *job);

#endif
