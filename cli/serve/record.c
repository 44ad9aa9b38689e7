/* record.c - a job as JSON: its record on disk, and as clients see it.
 * SPDX-License-Identifier: Apache-2.0 */
#include "serve/serve.h"

#include <math.h>
#include <string.h>

static const char *const states[] = { "queued", "in_progress", "completed", "failed", "deleted" };

const char *serve_state_name(int state) { return states[state]; }

const char *serve_stage_name(int stage)
{
    static const char *const names[] = { "load", "text", "denoise", "decode", "save" };
    return names[stage];
}

/* ---------------------------------------------------------------- the record */

cli_json *serve_record_make(const serve_job *j)
{
    cli_json *json = cli_json_new();
    cli_json_fields(json, "record %s id %s status %s created_us %ld completed_at %ld model %s",
                    "esa serve 1", j->id, states[j->state], j->created, j->completed,
                    j->model_name);
    cli_json_add(json, "request", json_deep_copy(j->fields));
    if (j->state == SERVE_FAILED) {
        cli_json_open(json, "error", '{');
        cli_json_fields(json, "code %d message %s", j->code, j->error);
        cli_json_close(json);
    }
    cli_json_open(json, "result", '{');
    cli_json_fields(json,
                    "files %d preview %d steps %d frames %d height %d width %d seed %ld fps %g "
                    "seconds %g density %g work %g psnr %g ssim %g dense_seconds %g "
                    "sparse_seconds %g speedup %g ready %g",
                    j->files, j->preview, j->steps, j->frames, j->height, j->width, j->seed, j->fps,
                    j->made_seconds, j->density, j->work, j->psnr, j->ssim, j->dense_seconds,
                    j->sparse_seconds, j->speedup, j->ready);
    cli_json_bool(json, "identical", isinf(j->psnr)); /* JSON has no infinity */
    cli_json_close(json);
    return json;
}

static int64_t whole(const json_t *record, const char *path)
{
    const json_t *at = cli_json_at(record, path);
    return json_is_integer(at) ? json_integer_value(at) : 0;
}

serve_job *serve_record_read(const json_t *record, const char *id, const serve_rules *rules)
{
    const char *kind = cli_json_string(record, "record"), *own = cli_json_string(record, "id"),
               *status = cli_json_string(record, "status"),
               *model = cli_json_string(record, "model"),
               *prompt = cli_json_string(record, "request.prompt");
    int state = -1;
    for (int i = 0; i < SERVE_DELETED && status; i++)
        if (strcmp(status, states[i]) == 0) state = i;
    if (!kind || strcmp(kind, "esa serve 1") != 0 || !own || strcmp(own, id) != 0 || state < 0 ||
        !model || !prompt || !json_is_object(cli_json_at(record, "request.esa")))
        return NULL;
    serve_job *j = serve_job_new();
    if (!j) return NULL;
    snprintf(j->id, sizeof j->id, "%s", id);
    j->fields = json_incref(json_object_get(record, "request"));
    j->prompt = cli_json_string(j->fields, "prompt");
    snprintf(j->model_name, sizeof j->model_name, "%s", model);
    j->model = -1;
    for (int i = 0; i < rules->models; i++)
        if (strcmp(rules->model[i].name, model) == 0) j->model = i;
    j->state = state;
    j->created = whole(record, "created_us");
    j->completed = whole(record, "completed_at");
    j->code = (int)whole(record, "error.code");
    const char *why = cli_json_string(record, "error.message");
    snprintf(j->error, sizeof j->error, "%s", why ? why : "");
    const json_t *r = json_object_get(record, "result");
    j->files = (int)whole(r, "files");
    j->preview = (int)whole(r, "preview");
    j->steps = (int)whole(r, "steps");
    j->frames = (int)whole(r, "frames");
    j->height = (int)whole(r, "height");
    j->width = (int)whole(r, "width");
    j->seed = whole(r, "seed");
    double *const reals[] = { &j->fps,    &j->made_seconds,  &j->density,
                              &j->work,   &j->psnr,          &j->ssim,
                              &j->ready,  &j->dense_seconds, &j->sparse_seconds,
                              &j->speedup };
    static const char *const names[] = { "fps",    "seconds",       "density",
                                         "work",   "psnr",          "ssim",
                                         "ready",  "dense_seconds", "sparse_seconds",
                                         "speedup" };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        *reals[i] = cli_json_number(r, names[i]);
    if (json_is_true(json_object_get(r, "identical"))) j->psnr = INFINITY;
    if (state == SERVE_COMPLETED) j->step = j->steps;
    return j;
}

/* ---------------------------------------------------------------- as clients see it */

/* Whole percents; 100 only when the video is there. The dense pass of a comparison is its first
 * half. */
int serve_job_progress(const serve_job *j)
{
    if (j->state == SERVE_COMPLETED) return 100;
    if (j->state != SERVE_RUNNING || j->steps < 1) return 0;
    const double pass = j->stage < SERVE_AT_DENOISE   ? 0
                        : j->stage > SERVE_AT_DENOISE ? 0.97
                                                      : 0.95 * j->step / j->steps;
    const int passes = j->passes > 0 ? j->passes : 1;
    const int percent = (int)(100 * (j->pass + pass) / passes);
    return percent > 99 ? 99 : percent;
}

static int64_t queue_position(const serve_hub *hub, const serve_job *job)
{
    int64_t before = 0;
    if (job->state != SERVE_QUEUED) return 0;
    for (int64_t i = 0; i < hub->count && hub->jobs[i] != job; i++)
        before += hub->jobs[i]->state == SERVE_QUEUED;
    return before + 1;
}

/* A field of the request as text, or NULL. */
static const char *asked(const serve_job *j, const char *name)
{
    return json_string_value(json_object_get(json_object_get(j->fields, "esa"), name));
}

static void compare_json(cli_json *json, const serve_job *j)
{
    if (!(j->files & SERVE_HAS_DENSE)) {
        cli_json_text(json, "compare", NULL);
        return;
    }
    cli_json_open(json, "compare", '{');
    cli_json_fields(json, "psnr %g ssim %g dense_seconds %g sparse_seconds %g speedup %g", j->psnr,
                    j->ssim, j->dense_seconds, j->sparse_seconds, j->speedup);
    cli_json_bool(json, "identical", isinf(j->psnr));
    cli_json_close(json);
}

static void own_json(cli_json *json, const serve_hub *hub, const serve_job *j)
{
    cli_json_open(json, "esa", '{');
    cli_json_int(json, "queue_position", queue_position(hub, j));
    cli_json_text(json, "stage", j->state == SERVE_RUNNING ? serve_stage_name(j->stage) : NULL);
    cli_json_fields(json, "step %d steps %d seconds_left %g density %g work %g seed %ld preset %s",
                    j->step, j->steps, j->state == SERVE_RUNNING ? j->seconds_left : (double)NAN,
                    j->density, j->work, j->seed, asked(j, "preset"));
    cli_json_fields(json, "seconds_to_first_step %g", j->ready);
    cli_json_int(json, "preview_step", j->preview);
    compare_json(json, j);
    cli_json_open(json, "variants", '[');
    if (j->files & SERVE_HAS_VIDEO) cli_json_text(json, NULL, "sparse");
    if (j->files & SERVE_HAS_DENSE) cli_json_text(json, NULL, "dense");
    if (j->files & SERVE_HAS_BESIDE) cli_json_text(json, NULL, "beside");
    if (j->files & SERVE_HAS_PREVIEW) cli_json_text(json, NULL, "preview");
    cli_json_close(json);
    cli_json_add(json, "settings", json_deep_copy(json_object_get(j->fields, "esa")));
    cli_json_add(json, "request", json_deep_copy(j->fields));
    cli_json_close(json);
}

void serve_job_json(cli_json *json, const serve_hub *hub, const serve_job *j)
{
    char size[32], seconds[32], file[SERVE_ID + 8];
    const double length = j->fps > 0 ? j->frames / j->fps : 0;
    snprintf(size, sizeof size, "%dx%d", j->width, j->height);
    snprintf(seconds, sizeof seconds, "%.0f", length < 1.5 ? 1 : rint(length));
    snprintf(file, sizeof file, "%s.mp4", j->id);
    cli_json_fields(json,
                    "id %s object %s model %s prompt %s status %s progress %d size %s "
                    "seconds %s quality %s created_at %ld",
                    j->id, "video", j->model_name, j->prompt, states[j->state],
                    serve_job_progress(j), j->width ? size : NULL, j->frames ? seconds : NULL,
                    "standard", j->created / 1000000);
    if (j->completed)
        cli_json_int(json, "completed_at", j->completed);
    else
        cli_json_text(json, "completed_at", NULL);
    cli_json_text(json, "expires_at", NULL);
    cli_json_text(json, "remixed_from_video_id", NULL);
    if (j->state == SERVE_FAILED || j->state == SERVE_DELETED) {
        cli_json_open(json, "error", '{');
        cli_json_fields(json, "code %s message %s",
                        j->state == SERVE_DELETED ? "deleted" : "generation_failed",
                        j->state == SERVE_DELETED ? "The video was deleted." : j->error);
        cli_json_close(json);
    } else
        cli_json_text(json, "error", NULL);
    cli_json_fields(json,
                    "media_type %s file_name %s inference_time_s %g fps %g num_frames %d "
                    "duration_s %g",
                    "video/mp4", j->state == SERVE_COMPLETED ? file : NULL, j->made_seconds, j->fps,
                    j->frames, length);
    own_json(json, hub, j);
}
