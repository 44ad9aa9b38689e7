/* http_videos.c - the routes of videos: new ones, the list, one, its file, its end.
 * SPDX-License-Identifier: Apache-2.0 */
#include "serve/http.h"

#include <stdlib.h>
#include <string.h>

static int is_method(const http_exchange *x, const char *name)
{
    return strcmp(x->method, name) == 0 ||
           (strcmp(name, "GET") == 0 && strcmp(x->method, "HEAD") == 0);
}

static enum MHD_Result wrong_method(http_exchange *x, const char *allowed)
{
    return http_error(x, 405, allowed, "'%.80s' takes %s only.", x->url, allowed);
}

static enum MHD_Result no_video(http_exchange *x, const char *id)
{
    return http_error(x, 404, "", "There is no video '%.60s'.", id);
}

/* ---------------------------------------------------------------- errands */

/* Gives the clerk an errand and suspends the connection until it is done. */
static enum MHD_Result send_errand(http_exchange *x, int kind, const char *id)
{
    serve_hub *hub = x->http->hub;
    const char *type = http_request_header(x, "Content-Type");
    serve_errand *e = calloc(1, sizeof *e);
    if (e) e->content_type = strdup(type ? type : "");
    if (!e || !e->content_type) {
        serve_errand_free(e);
        return http_error(x, 500, "", "The server is out of memory.");
    }
    e->kind = kind;
    e->connection = x->connection;
    if (id) snprintf(e->id, sizeof e->id, "%s", id);
    if (kind == SERVE_CREATE) {
        e->body = x->body;
        e->bytes = x->bytes;
        x->body = NULL; /* its room counts until the request ends */
    }
    pthread_mutex_lock(&hub->lock);
    const int stop = hub->stop;
    if (!stop) {
        x->errand = e;
        x->http->mhd.suspend_connection(x->connection);
        serve_errand_give(hub, e);
    }
    pthread_mutex_unlock(&hub->lock);
    if (!stop) return MHD_YES;
    serve_errand_free(e);
    return http_error(x, 503, "", "The server is stopping.");
}

static enum MHD_Result answer_job(http_exchange *x, const serve_job *job)
{
    serve_hub *hub = x->http->hub;
    cli_json *json = cli_json_new();
    pthread_mutex_lock(&hub->lock);
    serve_job_json(json, hub, job);
    pthread_mutex_unlock(&hub->lock);
    return http_json(x, 200, json);
}

static enum MHD_Result create(http_exchange *x)
{
    if (!x->errand) return send_errand(x, SERVE_CREATE, NULL);
    return x->errand->refusal.code ? http_refuse(x, &x->errand->refusal)
                                   : answer_job(x, x->errand->job);
}

static enum MHD_Result delete_video(http_exchange *x, const char *id)
{
    if (!x->errand) return send_errand(x, SERVE_DELETE, id);
    if (x->errand->refusal.code) return http_refuse(x, &x->errand->refusal);
    cli_json *json = cli_json_new();
    cli_json_fields(json, "id %s object %s", id, "video.deleted");
    cli_json_bool(json, "deleted", 1);
    return http_json(x, 200, json);
}

/* ---------------------------------------------------------------- POST /v1/videos/sync */

/* The state of the job, and how long it took. Suspends the connection if it has not ended. */
static int wait_for(http_exchange *x, serve_job *job, double *seconds)
{
    serve_hub *hub = x->http->hub;
    pthread_mutex_lock(&hub->lock);
    if (!x->wait.job) {
        http_listen(x, &x->wait, job);
        x->wait.until_end = 1;
    }
    const int state = job->state;
    *seconds = job->made_seconds;
    if (state < SERVE_COMPLETED && !hub->stop) http_wait(&x->wait);
    pthread_mutex_unlock(&hub->lock);
    return state;
}

static enum MHD_Result sync_video(http_exchange *x)
{
    serve_hub *hub = x->http->hub;
    char path[SERVE_PATH], time[32];
    double seconds = 0;
    if (!x->errand) return send_errand(x, SERVE_CREATE, NULL);
    if (x->errand->refusal.code) return http_refuse(x, &x->errand->refusal);
    serve_job *job = x->errand->job;
    http_no_limit(x);
    const int state = wait_for(x, job, &seconds);
    if (state < SERVE_COMPLETED && hub->stop)
        return http_error(x, 503, "", "The server is stopping.");
    if (state < SERVE_COMPLETED) return MHD_YES;
    if (state == SERVE_DELETED) return http_error(x, 409, "", "The video was deleted.");
    if (state == SERVE_FAILED) return http_error(x, 500, "", "%s", job->error);
    snprintf(time, sizeof time, "%.3f", seconds);
    const char *const head[] = { "X-Request-Id",       job->id, "X-Model", job->model_name,
                                 "X-Inference-Time-S", time,    NULL };
    serve_job_path(path, hub, job->id, ".mp4");
    return http_file(x, path, "video/mp4", head);
}

/* ---------------------------------------------------------------- the list */

/* A whole number of an argument; 0: it is none in this range. */
static int number(const char *text, int64_t lo, int64_t hi, int64_t *out)
{
    char *end;
    if (!text) return 1;
    *out = strtoll(text, &end, 10);
    return *text && (*text == '-' || (*text >= '0' && *text <= '9')) && !*end && *out >= lo &&
           *out <= hi;
}

static enum MHD_Result list_videos(http_exchange *x)
{
    serve_hub *hub = x->http->hub;
    const char *after = http_argument(x, "after"), *order = http_argument(x, "order"),
               *most = http_argument(x, "limit");
    const char *first = NULL, *last = NULL;
    int64_t limit = 20, at = 0, taken = 0;
    if (!number(most, 0, 100, &limit))
        return http_error(x, 400, "limit", "'limit' must be a whole number in 0 .. 100.");
    const int rising = order && strcmp(order, "asc") == 0;
    if (order && !rising && strcmp(order, "desc") != 0)
        return http_error(x, 400, "order", "'order' must be asc or desc.");
    cli_json *json = cli_json_new();
    cli_json_text(json, "object", "list");
    cli_json_open(json, "data", '[');
    pthread_mutex_lock(&hub->lock);
    const int64_t count = hub->count;
    int known = !after;
    for (; at < count && !known; at++) {
        const serve_job *j = hub->jobs[rising ? at : count - 1 - at];
        known = strcmp(j->id, after) == 0;
    }
    for (; known && at < count && taken < limit; at++, taken++) {
        const serve_job *j = hub->jobs[rising ? at : count - 1 - at];
        cli_json_open(json, NULL, '{');
        serve_job_json(json, hub, j);
        cli_json_close(json);
        if (!first) first = j->id;
        last = j->id;
    }
    cli_json_close(json);
    cli_json_fields(json, "first_id %s last_id %s has_more %i", first, last, known && at < count);
    pthread_mutex_unlock(&hub->lock);
    if (known) return http_json(x, 200, json);
    size_t bytes;
    free(cli_json_take(json, &bytes));
    return http_error(x, 404, "after", "There is no video '%.60s' to begin after.", after);
}

/* ---------------------------------------------------------------- one video */

static enum MHD_Result read_video(http_exchange *x, const char *id)
{
    serve_hub *hub = x->http->hub;
    cli_json *json = cli_json_new();
    size_t bytes = 0;
    pthread_mutex_lock(&hub->lock);
    const serve_job *job = serve_job_find(hub, id);
    const int runs = job && job->state < SERVE_COMPLETED;
    if (job) serve_job_json(json, hub, job);
    pthread_mutex_unlock(&hub->lock);
    cli_json_compact(json);
    char *text = cli_json_take(json, &bytes);
    if (!job || !text) {
        free(text);
        return job ? http_error(x, 500, "", "The server is out of memory.") : no_video(x, id);
    }
    struct MHD_Response *response = http_copy(x, text, bytes, "application/json");
    free(text);
    if (response) http_header(x, response, "Cache-Control", "no-store");
    if (response && runs) http_header(x, response, "openai-poll-after-ms", "500");
    return http_send(x, 200, response);
}

static enum MHD_Result content(http_exchange *x, const char *id)
{
    static const struct {
        const char *name, *ending, *type;
        int has;
    } variants[] = {
        { "sparse", ".mp4", "video/mp4", SERVE_HAS_VIDEO },
        { "dense", "-dense.mp4", "video/mp4", SERVE_HAS_DENSE },
        { "beside", "-beside.mp4", "video/mp4", SERVE_HAS_BESIDE },
        { "preview", "-preview.png", "image/png", SERVE_HAS_PREVIEW },
    };
    serve_hub *hub = x->http->hub;
    const char *asked = http_argument(x, "variant");
    char path[SERVE_PATH], why[SERVE_LONGEST] = "", name[128];
    int v = 0;
    if (asked && strcmp(asked, "video") != 0 && strcmp(asked, "0") != 0)
        while (v < 4 && strcmp(asked, variants[v].name) != 0) v++;
    if (v == 4)
        return http_error(x, 400, "variant", "'variant' must be sparse, dense, beside or preview.");
    pthread_mutex_lock(&hub->lock);
    const serve_job *job = serve_job_find(hub, id);
    const int state = job ? job->state : SERVE_DELETED, has = job && job->files & variants[v].has;
    if (job) snprintf(why, sizeof why, "%s", job->error);
    pthread_mutex_unlock(&hub->lock);
    if (!job) return no_video(x, id);
    if (!has && state == SERVE_FAILED) return http_error(x, 422, "", "%s", why);
    if (!has && state < SERVE_COMPLETED && variants[v].has != SERVE_HAS_PREVIEW)
        return http_error(x, 404, "", "The video is not finished.");
    if (!has) return http_error(x, 404, "variant", "This video has no such variant.");
    serve_job_path(path, hub, id, variants[v].ending);
    snprintf(name, sizeof name, "inline; filename=\"%s%s\"", id, variants[v].ending);
    const char *const head[] = { "Content-Disposition", name, NULL };
    return http_file(x, path, variants[v].type, head);
}

enum MHD_Result http_videos(http_exchange *x, const char *rest)
{
    char id[SERVE_ID];
    if (!*rest) {
        if (is_method(x, "POST")) return create(x);
        return is_method(x, "GET") ? list_videos(x) : wrong_method(x, "GET, HEAD, POST");
    }
    if (strcmp(rest, "/sync") == 0)
        return is_method(x, "POST") ? sync_video(x) : wrong_method(x, "POST");
    const char *end = strchr(++rest, '/');
    const size_t n = end ? (size_t)(end - rest) : strlen(rest);
    if (n >= sizeof id || strspn(rest, "abcdefghijklmnopqrstuvwxyz0123456789_") < n)
        return no_video(x, rest);
    snprintf(id, sizeof id, "%.*s", (int)n, rest);
    if (!end && is_method(x, "DELETE")) return delete_video(x, id);
    if (!end) return is_method(x, "GET") ? read_video(x, id) : wrong_method(x, "GET, HEAD, DELETE");
    const int file = strcmp(end, "/content") == 0;
    if (!file && strcmp(end, "/events") != 0)
        return http_error(x, 404, "", "There is nothing at '%.100s'.", x->url);
    if (!is_method(x, "GET")) return wrong_method(x, "GET, HEAD");
    return file ? content(x, id) : http_events(x, id);
}
