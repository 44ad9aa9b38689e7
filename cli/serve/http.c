/* http.c - the HTTP side: the daemon, its connections and their limits, bodies.
 * SPDX-License-Identifier: Apache-2.0
 *
 * libmicrohttpd limits the time without a byte. A client that sends one byte now and then gets past
 * that, so each connection also has a time by which its headers, its body and its answer must be
 * through. main looks at these times and shuts sockets down. */
#include "serve/http.h"

#include <errno.h>
#include <math.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* ---------------------------------------------------------------- connections */

static void set_limit(http_exchange *x, double seconds)
{
    pthread_mutex_lock(&x->http->lock);
    if (x->peer) x->peer->until = cli_seconds() + seconds;
    pthread_mutex_unlock(&x->http->lock);
}

static void on_connection(void *user, struct MHD_Connection *connection, void **context,
                          enum MHD_ConnectionNotificationCode code)
{
    serve_http *http = user;
    http_peer *peer = *context;
    pthread_mutex_lock(&http->lock);
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info = http->mhd.get_connection_info(
            connection, MHD_CONNECTION_INFO_CONNECTION_FD);
        http->connections++;
        peer = calloc(1, sizeof *peer);
        if (peer) {
            peer->socket = info ? info->connect_fd : -1;
            peer->until = cli_seconds() + (double)http->hub->rules.timeout;
            peer->next = http->peers;
            if (peer->next) peer->next->before = peer;
            http->peers = peer;
        }
        *context = peer;
    } else {
        http->connections--;
        if (peer && peer->before) peer->before->next = peer->next;
        if (peer && !peer->before) http->peers = peer->next;
        if (peer && peer->next) peer->next->before = peer->before;
        free(peer);
        *context = NULL;
    }
    pthread_mutex_unlock(&http->lock);
}

/* So many times --timeout from now on. */
static void allow(http_exchange *x, double times)
{
    set_limit(x, times * (double)x->http->hub->rules.timeout);
}

void http_no_limit(http_exchange *x) { set_limit(x, INFINITY); }

/* Gives back what a body takes; the errand may have it by now. */
static void drop_body(http_exchange *x)
{
    pthread_mutex_lock(&x->http->lock);
    x->http->buffered -= x->room;
    pthread_mutex_unlock(&x->http->lock);
    free(x->body);
    x->body = NULL;
    x->bytes = x->room = 0;
}

/* The errand of a connection that is gone, as when the server stops: what it made stays. */
static void drop_errand(http_exchange *x)
{
    serve_hub *hub = x->http->hub;
    if (!x->errand) return;
    pthread_mutex_lock(&hub->lock);
    const int done = x->errand->done;
    if (done)
        serve_job_drop(x->errand->job);
    else
        x->errand->orphan = 1;
    pthread_mutex_unlock(&hub->lock);
    if (done) serve_errand_free(x->errand);
}

static void on_completed(void *user, struct MHD_Connection *connection, void **context,
                         enum MHD_RequestTerminationCode code)
{
    http_exchange *x = *context;
    (void)user, (void)connection, (void)code;
    if (!x) return;
    allow(x, SERVE_IDLE_X + 1);
    if (x->wait.job) {
        pthread_mutex_lock(&x->http->hub->lock);
        http_unlisten(&x->wait);
        pthread_mutex_unlock(&x->http->hub->lock);
    }
    drop_errand(x);
    drop_body(x);
    free(x);
    *context = NULL;
}

/* ---------------------------------------------------------------- requests */

/* Room for a body of so many bytes, or the refusal. */
static int find_room(http_exchange *x, size_t bytes)
{
    serve_http *http = x->http;
    const int64_t most = http->hub->rules.max_body;
    if ((int64_t)bytes > most)
        return serve_refuse(&x->refusal, 413, "", "The body is longer than %lld bytes.",
                            (long long)most);
    if (bytes <= x->room) return 0;
    const size_t room = bytes < 4096 ? 4096 : bytes;
    pthread_mutex_lock(&http->lock);
    const int full = http->buffered + room - x->room > SERVE_BODIES;
    if (!full) http->buffered += room - x->room;
    pthread_mutex_unlock(&http->lock);
    if (full)
        return serve_refuse(&x->refusal, 503, "", "Too many bodies are being sent; try again.");
    char *grown = realloc(x->body, room + 1);
    if (!grown) {
        pthread_mutex_lock(&http->lock);
        http->buffered -= room - x->room;
        pthread_mutex_unlock(&http->lock);
        return serve_refuse(&x->refusal, 500, "", "The server is out of memory.");
    }
    x->body = grown;
    x->room = room;
    return 0;
}

/* What can be refused before the body comes. */
static void check_headers(http_exchange *x)
{
    const char *length = http_request_header(x, "Content-Length");
    pthread_mutex_lock(&x->http->lock);
    const int crowded = x->http->connections > SERVE_CLIENTS;
    pthread_mutex_unlock(&x->http->lock);
    if (crowded)
        serve_refuse(&x->refusal, 503, "", "%d connections are open already; try again later.",
                     SERVE_CLIENTS);
    else if (!http_guard(x, &x->refusal) && length)
        find_room(x, (size_t)strtoull(length, NULL, 10));
}

/* The begin of a request: its headers are there. A refusal is answered when the body has come, as
 * many clients do not look before, unless it is too long or the client waits for a word. */
static enum MHD_Result begin(serve_http *http, struct MHD_Connection *connection, const char *url,
                             const char *method, void **context)
{
    http_exchange *x = calloc(1, sizeof *x);
    if (!x) return MHD_NO;
    const union MHD_ConnectionInfo *info = http->mhd.get_connection_info(
        connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    x->http = http;
    x->connection = connection;
    x->peer = info ? info->socket_context : NULL;
    x->url = url;
    x->method = method;
    *context = x;
    allow(x, SERVE_BODY_X);
    check_headers(x);
    const int early = x->refusal.code == 413 || http_request_header(x, "Expect");
    return x->refusal.code && early ? http_refuse(x, &x->refusal) : MHD_YES;
}

/* A piece of the body. A body whose length was not announced may turn out too long: the rest of it
 * is thrown away, and of one that does not end, the connection. */
static enum MHD_Result take_piece(http_exchange *x, const char *data, size_t *bytes)
{
    const size_t n = *bytes;
    *bytes = 0;
    if (x->refusal.code) {
        x->bytes += n;
        return (int64_t)x->bytes > 2 * x->http->hub->rules.max_body ? MHD_NO : MHD_YES;
    }
    const size_t room = x->bytes + n > x->room ? 2 * (x->bytes + n) : x->room;
    const int64_t most = x->http->hub->rules.max_body;
    if (find_room(x, x->bytes + n > (size_t)most || room <= (size_t)most ? room : (size_t)most)) {
        const serve_refusal why = x->refusal;
        drop_body(x);
        x->refusal = why;
        return MHD_YES;
    }
    memcpy(x->body + x->bytes, data, n);
    x->bytes += n;
    return MHD_YES;
}

static enum MHD_Result on_request(void *user, struct MHD_Connection *connection, const char *url,
                                  const char *method, const char *version, const char *data,
                                  size_t *bytes, void **context)
{
    http_exchange *x = *context;
    (void)version;
    if (!x) return begin(user, connection, url, method, context);
    if (*bytes) return take_piece(x, data, bytes);
    if (!x->whole++) allow(x, SERVE_ANSWER_X);
    return x->refusal.code ? http_refuse(x, &x->refusal) : http_route(x);
}

/* Under the lock of the hub. */
static void on_answered(void *user, serve_errand *errand)
{
    serve_http *http = user;
    if (!errand->orphan) {
        http->mhd.resume_connection(errand->connection);
        return;
    }
    serve_job_drop(errand->job);
    serve_errand_free(errand);
}

/* ---------------------------------------------------------------- the daemon */

/* The address of --host and --port: a number, or a name of this machine. */
static int find_address(struct addrinfo **found, const char *host, int port)
{
    char number[16];
    const struct addrinfo hints = { .ai_family = AF_UNSPEC,
                                    .ai_socktype = SOCK_STREAM,
                                    .ai_flags = AI_PASSIVE | AI_NUMERICSERV };
    snprintf(number, sizeof number, "%d", port);
    const int wrong = getaddrinfo(host, number, &hints, found);
    return wrong ? cli_fail("serve: --host is '%s': %s", host, gai_strerror(wrong)) : CLI_OK;
}

/* Errors of single connections, such as a client that went away, concern nobody. */
static void no_log(void *user, const char *format, va_list args)
{
    (void)user, (void)format, (void)args;
}

int serve_http_ready(void)
{
    serve_mhd mhd;
    return serve_mhd_open(&mhd);
}

int serve_http_start(serve_http **out, serve_hub *hub, const char *host, int port)
{
    struct addrinfo *address = NULL;
    serve_http *http = calloc(1, sizeof *http);
    *out = http;
    if (!http) return cli_fail("serve: out of memory");
    pthread_mutex_init(&http->lock, NULL);
    http->hub = hub;
    snprintf(http->host, sizeof http->host, "%s", host);
    hub->user = http;
    hub->changed = http_changed;
    hub->answered = on_answered;
    int status = http_openapi_make(http);
    if (!status) status = serve_mhd_open(&http->mhd);
    if (!status) status = find_address(&address, host, port);
    if (status) return status;
    unsigned flags = MHD_USE_AUTO | MHD_USE_INTERNAL_POLLING_THREAD | MHD_ALLOW_SUSPEND_RESUME |
                     MHD_USE_ERROR_LOG;
    if (address->ai_family == AF_INET6) flags |= MHD_USE_IPv6;
    errno = 0;
    http->daemon = http->mhd.start_daemon(
        flags, (uint16_t)port, NULL, NULL, on_request, http, MHD_OPTION_EXTERNAL_LOGGER, no_log,
        NULL, MHD_OPTION_SOCK_ADDR, address->ai_addr, MHD_OPTION_NOTIFY_CONNECTION, on_connection,
        http, MHD_OPTION_NOTIFY_COMPLETED, on_completed, http, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)(SERVE_IDLE_X * hub->rules.timeout), MHD_OPTION_CONNECTION_LIMIT,
        (unsigned)SERVE_CLIENTS + 16, MHD_OPTION_END);
    freeaddrinfo(address);
    if (!http->daemon)
        return cli_fail("serve: cannot listen on %s port %d: %s", host, port,
                        errno ? strerror(errno) : "libmicrohttpd did not start");
    const union MHD_DaemonInfo *info = http->mhd.get_daemon_info(http->daemon,
                                                                 MHD_DAEMON_INFO_BIND_PORT);
    http->port = info ? info->port : port;
    return CLI_OK;
}

int serve_http_port(const serve_http *http) { return http->port; }

void serve_http_tick(serve_http *http)
{
    const double now = cli_seconds();
    pthread_mutex_lock(&http->lock);
    for (http_peer *p = http->peers; p; p = p->next) {
        if (p->until > now || p->socket < 0) continue;
        shutdown(p->socket, SHUT_RDWR);
        p->until = INFINITY;
    }
    pthread_mutex_unlock(&http->lock);
    http_tick_listeners(http, now);
}

/* Suspended connections must be resumed before the daemon stops; they end by themselves when they
 * see hub->stop. */
void serve_http_stop(serve_http *http)
{
    if (!http) return;
    if (http->daemon) {
        http_tick_listeners(http, cli_seconds());
        http->mhd.stop_daemon(http->daemon);
    }
    free(http->openapi);
    pthread_mutex_destroy(&http->lock);
    free(http);
}
