/* http_events.c - GET /v1/videos/{id}/events: a job as it changes, as server-sent events; and who
 * waits for which job.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A connection that has nothing to send is suspended, and resumed when its job changes. What
 * happens while a client is slow is not queued: it gets the state that is then. */
#include "serve/http.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* ---------------------------------------------------------------- listeners */

void http_listen(http_exchange *x, http_listener *l, serve_job *job)
{
    l->http = x->http;
    l->connection = x->connection;
    l->job = serve_job_keep(job);
    l->pinged = cli_seconds();
    const union MHD_ConnectionInfo *info = x->http->mhd.get_connection_info(
        x->connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    l->socket = info ? info->connect_fd : -1;
    l->before = NULL;
    l->next = x->http->listeners;
    if (l->next) l->next->before = l;
    x->http->listeners = l;
}

void http_unlisten(http_listener *l)
{
    serve_http *http = l->http;
    if (l->before)
        l->before->next = l->next;
    else
        http->listeners = l->next;
    if (l->next) l->next->before = l->before;
    serve_job_drop(l->job);
    l->job = NULL;
}

void http_wait(http_listener *l)
{
    l->suspended = 1;
    l->http->mhd.suspend_connection(l->connection);
}

static void wake(http_listener *l)
{
    if (!l->suspended) return;
    l->suspended = 0;
    l->http->mhd.resume_connection(l->connection);
}

void http_changed(void *user, serve_job *job)
{
    const serve_http *http = user;
    for (http_listener *l = http->listeners; l; l = l->next)
        if (l->job == job && (!l->until_end || job->state >= SERVE_COMPLETED)) wake(l);
}

/* 1 if the client has closed its side. */
static int is_gone(int socket)
{
    char byte;
    return socket >= 0 && recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}

void http_tick_listeners(serve_http *http, double now)
{
    pthread_mutex_lock(&http->hub->lock);
    for (http_listener *l = http->listeners; l; l = l->next) {
        if (!l->suspended) continue;
        if (l->until_end && is_gone(l->socket)) l->job->cancel = 1; /* nobody waits for it */
        if (http->hub->stop || now - l->pinged > SERVE_PING_S || is_gone(l->socket)) wake(l);
    }
    pthread_mutex_unlock(&http->hub->lock);
}

/* ---------------------------------------------------------------- the stream */

typedef struct stream {
    http_listener listener;
    char *text; /* owned: what is being sent */
    size_t bytes, sent;
    int64_t version; /* of the job, told last; -1: nothing yet */
    int stage, step, preview, ended;
} stream;

static void event(FILE *out, int64_t id, const char *name, cli_json *json)
{
    size_t bytes;
    cli_json_compact(json);
    char *text = cli_json_take(json, &bytes);
    if (text) fprintf(out, "id: %lld\nevent: %s\ndata: %s\n\n", (long long)id, name, text);
    free(text);
}

static void event_job(FILE *out, const serve_hub *hub, const serve_job *j)
{
    cli_json *json = cli_json_new();
    serve_job_json(json, hub, j);
    event(out, j->version, "job", json);
}

static void event_progress(FILE *out, const serve_job *j)
{
    cli_json *json = cli_json_new();
    cli_json_fields(json,
                    "stage %s step %d steps %d pass %d passes %d progress %d seconds %g "
                    "seconds_left %g density %g",
                    serve_stage_name(j->stage), j->step, j->steps, j->pass, j->passes,
                    serve_job_progress(j), j->seconds, j->seconds_left, j->density);
    event(out, j->version, "progress", json);
}

static void event_preview(FILE *out, const serve_job *j)
{
    char url[160];
    cli_json *json = cli_json_new();
    snprintf(url, sizeof url, "/v1/videos/%s/content?variant=preview&step=%d", j->id, j->preview);
    cli_json_fields(json, "step %d url %s", j->preview, url);
    event(out, j->version, "preview", json);
}

/* Under the lock: the events since the last call, in s->text. */
static void write_events(stream *s, const serve_hub *hub)
{
    const serve_job *j = s->listener.job;
    FILE *out = open_memstream(&s->text, &s->bytes);
    if (!out) return;
    const int first = s->version < 0, ended = j->state >= SERVE_COMPLETED;
    if (first) fputs("retry: 2000\n\n", out);
    if (first && !ended) event_job(out, hub, j);
    if (!first && j->state == SERVE_QUEUED) event_job(out, hub, j); /* moved up in the queue */
    if (j->state == SERVE_RUNNING && (j->stage != s->stage || j->step != s->step))
        event_progress(out, j);
    if (j->preview != s->preview && j->state == SERVE_RUNNING) event_preview(out, j);
    if (ended) event_job(out, hub, j);
    s->version = j->version;
    s->stage = j->stage;
    s->step = j->step;
    s->preview = j->preview;
    s->ended = ended;
    fclose(out);
}

/* Under the lock: sees what there is to send; 0: nothing, and the connection is suspended. */
static int refill(stream *s, serve_hub *hub)
{
    const double now = cli_seconds();
    free(s->text);
    s->text = NULL;
    s->bytes = s->sent = 0;
    if (s->listener.job->version != s->version) write_events(s, hub);
    if (!s->bytes && now - s->listener.pinged > SERVE_PING_S) {
        s->text = strdup(": ping\n\n");
        s->bytes = s->text ? strlen(s->text) : 0;
    }
    if (s->bytes) {
        s->listener.pinged = now;
        return 1;
    }
    http_wait(&s->listener);
    return 0;
}

static ssize_t read_stream(void *user, uint64_t at, char *out, size_t most)
{
    stream *s = user;
    serve_hub *hub = s->listener.http->hub;
    size_t n = 0;
    (void)at;
    pthread_mutex_lock(&hub->lock);
    if (s->sent == s->bytes && (s->ended || hub->stop)) {
        pthread_mutex_unlock(&hub->lock);
        return MHD_CONTENT_READER_END_OF_STREAM;
    }
    if (s->sent < s->bytes || refill(s, hub)) {
        n = s->bytes - s->sent < most ? s->bytes - s->sent : most;
        memcpy(out, s->text + s->sent, n);
        s->sent += n;
    }
    pthread_mutex_unlock(&hub->lock);
    return (ssize_t)n;
}

static void free_stream(void *user)
{
    stream *s = user;
    serve_hub *hub = s->listener.http->hub;
    pthread_mutex_lock(&hub->lock);
    http_unlisten(&s->listener);
    pthread_mutex_unlock(&hub->lock);
    free(s->text);
    free(s);
}

enum MHD_Result http_events(http_exchange *x, const char *id)
{
    serve_hub *hub = x->http->hub;
    stream *s = calloc(1, sizeof *s);
    if (!s) return http_error(x, 500, "", "The server is out of memory.");
    s->version = -1;
    s->stage = s->step = -1;
    pthread_mutex_lock(&hub->lock);
    serve_job *job = serve_job_find(hub, id);
    if (job) http_listen(x, &s->listener, job);
    pthread_mutex_unlock(&hub->lock);
    if (!job) {
        free(s);
        return http_error(x, 404, "", "There is no video '%.60s'.", id);
    }
    struct MHD_Response *response = x->http->mhd.create_response_from_callback(
        MHD_SIZE_UNKNOWN, 4096, read_stream, s, free_stream);
    if (!response) {
        free_stream(s);
        return MHD_NO;
    }
    http_header(x, response, "Content-Type", "text/event-stream; charset=utf-8");
    http_header(x, response, "Cache-Control", "no-store");
    http_header(x, response, "X-Accel-Buffering", "no");
    http_no_limit(x);
    return http_send(x, 200, response);
}
