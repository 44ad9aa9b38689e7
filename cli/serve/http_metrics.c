/* http_metrics.c - /metrics, in the text format of Prometheus.
 * SPDX-License-Identifier: Apache-2.0 */
#include "serve/http.h"

#include <stdlib.h>
#include <string.h>

static void head(FILE *out, const char *name, const char *kind, const char *help)
{
    fprintf(out, "# HELP esa_%s %s\n# TYPE esa_%s %s\n", name, help, name, kind);
}

static void whole(FILE *out, const char *name, const char *kind, const char *help, int64_t value)
{
    head(out, name, kind, help);
    fprintf(out, "esa_%s %lld\n", name, (long long)value);
}

static void real(FILE *out, const char *name, const char *kind, const char *help, double value)
{
    head(out, name, kind, help);
    fprintf(out, "esa_%s %.9g\n", name, value);
}

/* A model's name is the text of a label: a backslash, a quote and a line's end are protected. */
static void put_label(FILE *out, const char *text)
{
    for (; *text; text++) {
        if (*text == '\\' || *text == '"') fputc('\\', out);
        if (*text == '\n')
            fputs("\\n", out);
        else
            fputc(*text, out);
    }
}

static void write_all(FILE *out, const serve_hub *hub, int connections)
{
    const serve_counts *c = &hub->counts;
    const serve_job *job = hub->running;
    int64_t by_state[SERVE_DELETED] = { 0 };
    for (int64_t i = 0; i < hub->count; i++)
        if (hub->jobs[i]->state < SERVE_DELETED) by_state[hub->jobs[i]->state]++;
    head(out, "jobs", "gauge", "Jobs that the server knows, by status.");
    for (int s = 0; s < SERVE_DELETED; s++)
        fprintf(out, "esa_jobs{status=\"%s\"} %lld\n", serve_state_name(s), (long long)by_state[s]);
    whole(out, "videos_total", "counter", "Videos that were made.", c->made);
    whole(out, "videos_failed_total", "counter", "Videos that failed.", c->failed);
    whole(out, "videos_deleted_total", "counter", "Videos that clients deleted.", c->deleted);
    whole(out, "steps_total", "counter", "Denoising steps.", c->steps);
    whole(out, "previews_total", "counter", "Previews.", c->previews);
    real(out, "busy_seconds_total", "counter", "Seconds that the worker spent on videos.",
         c->busy_seconds);
    head(out, "http_answers_total", "counter", "Answers, by the class of their status.");
    for (int i = 1; i < 6; i++)
        fprintf(out, "esa_http_answers_total{class=\"%dxx\"} %lld\n", i, (long long)c->answers[i]);
    whole(out, "http_refusals_total", "counter", "Requests that were refused.", c->refused);
    whole(out, "http_connections", "gauge", "Open connections.", connections);
    whole(out, "queue_length", "gauge", "Jobs that wait.", by_state[SERVE_QUEUED]);
    whole(out, "running", "gauge", "1 while a video is made.", job != NULL);
    whole(out, "running_step", "gauge", "Steps that the running job has done.",
          job ? job->step : 0);
    whole(out, "running_steps", "gauge", "Steps of the running job.", job ? job->steps : 0);
    real(out, "uptime_seconds", "gauge", "Seconds since the server began.",
         cli_seconds() - hub->began);
    head(out, "model_warm", "gauge", "1 for the model that is open.");
    for (int i = 0; i < hub->rules.models; i++) {
        const char *name = hub->rules.model[i].name;
        fputs("esa_model_warm{model=\"", out);
        put_label(out, name);
        fprintf(out, "\"} %d\n", strcmp(name, hub->warm) == 0);
    }
}

enum MHD_Result http_metrics(http_exchange *x)
{
    serve_http *http = x->http;
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    if (!out) return http_error(x, 500, "", "The server is out of memory.");
    pthread_mutex_lock(&http->lock);
    const int connections = http->connections;
    pthread_mutex_unlock(&http->lock);
    pthread_mutex_lock(&http->hub->lock);
    write_all(out, http->hub, connections);
    pthread_mutex_unlock(&http->hub->lock);
    if (fclose(out) != 0) {
        free(text);
        text = NULL;
    }
    return http_text(x, 200, "text/plain; version=0.0.4; charset=utf-8", text, bytes);
}
