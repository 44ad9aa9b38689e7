/* http.h - what the files of the HTTP side share: the exchange, answers, listeners, routes. Built
 * only with libmicrohttpd.
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

/* A connection that waits for changes of a job (http_events.c). All members are [lock] of the
 * hub. */
typedef struct http_listener {
    struct http_listener *next, *before;
    struct serve_http *http;
    struct MHD_Connection *connection;
    serve_job *job; /* a reference */
    int socket;
    int suspended;
    int until_end; /* 1: waits for the end of the job only, and cancels it when the client goes */
    double pinged;
} http_listener;

/* One request and its answer; the HTTP thread owns it. */
typedef struct http_exchange {
    struct serve_http *http;
    struct MHD_Connection *connection;
    http_peer *peer;
    const char *method, *url; /* of the connection */
    char *body;               /* owned */
    size_t bytes, room;
    serve_refusal refusal; /* known before the body came; code 0: none */
    int whole;             /* 1: the body is there */
    serve_errand *errand;  /* the clerk's until it is done; NULL: none */
    http_listener wait;    /* of POST /v1/videos/sync; job NULL: it does not wait */
} http_exchange;

struct serve_http {
    serve_hub *hub;
    serve_mhd mhd;
    struct MHD_Daemon *daemon;
    pthread_mutex_t lock; /* of peers, connections and buffered; taken alone */
    http_peer *peers;
    int connections;
    size_t buffered;          /* bytes of bodies in memory */
    http_listener *listeners; /* [lock] of the hub */
    char *openapi;            /* owned, constant */
    size_t openapi_bytes;
    char host[128]; /* as --host gave it */
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
/* A file of the server's, with Range and If-Range; head: pairs of more headers, ended by NULL. */
enum MHD_Result http_file(http_exchange *x, const char *path, const char *type,
                          const char *const *head);
const char *http_request_header(http_exchange *x, const char *name);
const char *http_argument(http_exchange *x, const char *name);

/* ---------------------------------------------------------------- listeners (http_events.c) */

void http_listen(http_exchange *x, http_listener *listener, serve_job *job); /* [lock] */
void http_unlisten(http_listener *listener);                                 /* [lock] */
void http_wait(http_listener *listener);                                     /* [lock] suspends */
void http_changed(void *http, serve_job *job); /* [lock] wakes those of a job */
void http_tick_listeners(serve_http *http, double now);
/* GET /v1/videos/{id}/events. */
enum MHD_Result http_events(http_exchange *x, const char *id);

/* ---------------------------------------------------------------- the rest */

/* 0, or the refusal of a request for its key, its host or its origin (http_guard.c). */
int http_guard(http_exchange *x, serve_refusal *refusal);
/* Answers a request whose body is whole; comes again when the connection is resumed
 * (http_routes.c). */
enum MHD_Result http_route(http_exchange *x);
/* Routes of one video and of new ones (http_videos.c). rest: behind /v1/videos. */
enum MHD_Result http_videos(http_exchange *x, const char *rest);
/* A file that travels inside the command: the page. 0: there is none of this name (http_page.c). */
int http_asset(http_exchange *x, const char *url, enum MHD_Result *result);
/* /openapi.json, made once (http_openapi.c). CLI_FAILED after a message. */
int http_openapi_make(serve_http *http);
/* /metrics (http_metrics.c). */
enum MHD_Result http_metrics(http_exchange *x);
/* The request may take as long as it takes (http.c). */
void http_no_limit(http_exchange *x);

#endif
