/* worker.c - the worker's thread: keeps a model open and makes one video after the other.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The model of the last job stays open, with its context: the next job that wants the same one,
 * with the same LoRAs, begins at once. */
#include "serve/serve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define PREVIEWS 8 /* of a video, unless --preview-every says otherwise */

typedef struct worker {
    serve_hub *hub;
    clip_maker maker;
    int open;       /* 1: maker has a model */
    char *key;      /* of it: folder and LoRAs; owned */
    serve_job *job; /* that runs; NULL while a model is opened ahead */
    int pass, stage;
    esa_ctx *pictures; /* for previews, as the maker's context is busy meanwhile */
    char said[SERVE_LONGEST];
} worker;

/* ---------------------------------------------------------------- progress */

static int stage_of(int stage)
{
    switch (stage) {
    case ESA_STAGE_TEXT: return SERVE_AT_TEXT;
    case ESA_STAGE_DENOISE: return SERVE_AT_DENOISE;
    case ESA_STAGE_DECODE: return SERVE_AT_DECODE;
    default: return SERVE_AT_LOAD;
    }
}

/* Under the lock. Tells listeners only what is new: the engine asks several times a step whether it
 * shall go on. */
static void note_progress(worker *w, const esa_progress *p)
{
    serve_job *j = w->job;
    const int stage = stage_of(p->stage), before = j->stage, step = j->step;
    if (stage < w->stage) w->pass++;
    w->stage = stage;
    j->pass = w->pass;
    j->stage = stage;
    j->seconds = cli_seconds() - j->began;
    if (stage == SERVE_AT_DENOISE) {
        j->steps = p->total;
        j->step = p->done;
        j->density = p->density;
        const int left = j->passes > w->pass + 1 ? p->total : 0; /* of the pass that follows */
        j->seconds_left = p->done ? p->unit_seconds * (p->total - p->done + left) : (double)NAN;
        if (isnan(j->ready)) j->ready = j->seconds;
    }
    if (stage == before && step == j->step) return;
    if (step < j->step) w->hub->counts.steps += j->step - step;
    serve_job_change(w->hub, j);
}

static int32_t on_progress(void *user, const esa_progress *p)
{
    worker *w = user;
    pthread_mutex_lock(&w->hub->lock);
    const int stop = w->hub->stop || clip_interrupted() || (w->job && w->job->cancel);
    if (w->job && !stop) note_progress(w, p);
    pthread_mutex_unlock(&w->hub->lock);
    return stop;
}

/* Writes one picture and tells it; a failure costs a preview, not the video. */
static void show(worker *w, const uint8_t *rgb, int32_t height, int32_t width, int step)
{
    char path[SERVE_PATH];
    const cli_video *v = &w->maker.video;
    esa_frames *frames = NULL;
    serve_job_path(path, w->hub, w->job->id, "-preview.png");
    if (v->frames_create(w->pictures, &frames, rgb, 1, height, width, 1)) return;
    const esa_status status = v->frames_save(w->pictures, frames, path, NULL);
    v->frames_free(frames);
    if (status) return;
    pthread_mutex_lock(&w->hub->lock);
    w->job->preview = step;
    w->job->files |= SERVE_HAS_PREVIEW;
    w->hub->counts.previews++;
    serve_job_change(w->hub, w->job);
    pthread_mutex_unlock(&w->hub->lock);
}

static void on_preview(void *user, const esa_preview *p)
{
    show(user, p->rgb, p->height, p->width, p->step);
}

/* ---------------------------------------------------------------- the model */

static char *key_of(const clip_opening *o)
{
    char *key = NULL;
    size_t bytes;
    FILE *text = open_memstream(&key, &bytes);
    if (!text) return NULL;
    fputs(o->model, text);
    for (int i = 0; i < o->lora.count; i++) fprintf(text, "\n1 %s", o->lora.text[i]);
    for (int i = 0; i < o->lora_2.count; i++) fprintf(text, "\n2 %s", o->lora_2.text[i]);
    return fclose(text) == 0 ? key : NULL;
}

static void set_warm(worker *w, const char *name)
{
    pthread_mutex_lock(&w->hub->lock);
    snprintf(w->hub->warm, sizeof w->hub->warm, "%s", name);
    pthread_mutex_unlock(&w->hub->lock);
}

static void close_model(worker *w)
{
    if (!w->open) return;
    set_warm(w, "");
    clip_close(&w->maker);
    free(w->key);
    w->key = NULL;
    w->open = 0;
}

/* Opens the model of a request unless it is open. The old one goes first: both together may not fit
 * into memory. */
static int open_model(worker *w, const clip_opening *opening, const char *name)
{
    clip_opening o = *opening;
    char *key = key_of(&o);
    if (!key) return cli_fail("serve: out of memory");
    if (w->open && strcmp(key, w->key) == 0) {
        free(key);
        set_warm(w, name); /* two names may stand for one folder */
        return CLI_OK;
    }
    close_model(w);
    o.listen = on_progress;
    o.listen_user = w;
    w->open = 1;
    w->key = key;
    const int status = clip_open(&w->maker, &o, "serve");
    if (status)
        close_model(w);
    else
        set_warm(w, name);
    return status;
}

/* ---------------------------------------------------------------- a job */

typedef struct made {
    char path[3][SERVE_PATH]; /* the video, the dense one, both */
    clip_pair pair;
} made;

static int make(worker *w, made *m, serve_settings *s)
{
    clip_request *r = &s->clip;
    const int64_t every = w->hub->rules.preview_every;
    const int steps = w->job->steps;
    if (every) {
        r->p.preview = on_preview;
        r->p.preview_user = w;
        r->p.preview_every = every > 0 ? (int32_t)every
                                       : (steps + PREVIEWS - 1) / PREVIEWS + (steps < 1);
    }
    clip_request probe = *r; /* what cannot run is refused before the dense clip of a comparison */
    if (clip_resolve(&w->maker, &probe)) return CLI_USAGE;
    return clip_pair_make(&w->maker, &m->pair, r, s->compare, 0);
}

static int save(worker *w, made *m, const serve_settings *s)
{
    static const char *const endings[] = { ".mp4", "-dense.mp4", "-beside.mp4" };
    for (int i = 0; i < 3; i++) serve_job_path(m->path[i], w->hub, w->job->id, endings[i]);
    int status = CLI_OK;
    if (m->pair.dense) {
        status = clip_save(&w->maker, m->pair.dense, m->path[1], s->quality, s->fps);
        if (!status)
            status = clip_save_beside(&w->maker, m->pair.dense, m->pair.frames, m->path[2],
                                      s->quality, s->fps);
    }
    return status ? status : clip_save(&w->maker, m->pair.frames, m->path[0], s->quality, s->fps);
}

/* The poster of the finished video: a frame from its middle. */
static void show_poster(worker *w, const made *m)
{
    esa_frames_info f = { .struct_size = sizeof f };
    if (w->maker.video.frames_get_info(m->pair.frames, &f)) return;
    const int64_t frame = (int64_t)f.height * f.width * 3;
    show(w, f.rgb + f.frames / 2 * frame, f.height, f.width, w->job->steps);
}

/* Under the lock. */
static void note_result(serve_job *j, const made *m, const serve_settings *s,
                        const esa_model_info *info)
{
    const clip_pair *pair = &m->pair;
    const esa_generate_stats *t = &pair->record.stats;
    j->frames = t->frames;
    j->height = t->height;
    j->width = t->width;
    j->steps = j->step = t->steps;
    j->fps = s->fps > 0 ? s->fps : info->fps;
    j->density = clip_density(&pair->record);
    j->work = t->session.sparse_calls ? t->session.work : 1;
    j->sparse_seconds = t->seconds;
    j->files |= SERVE_HAS_VIDEO;
    if (!pair->dense) return;
    j->files |= SERVE_HAS_DENSE | SERVE_HAS_BESIDE;
    j->dense_seconds = pair->dense_record.stats.seconds;
    j->speedup = clip_pair_speedup(pair);
    j->psnr = pair->metrics.psnr;
    j->ssim = pair->metrics.ssim;
}

/* The sentence of a message of the command: without "serve: ", with a full stop. */
static void set_error(serve_job *j, int code, const char *text)
{
    if (strncmp(text, "serve: ", 7) == 0) text += 7;
    const size_t n = strlen(text);
    j->code = code;
    snprintf(j->error, sizeof j->error, "%.390s%s", n ? text : "The video could not be made",
             n && text[n - 1] == '.' ? "" : ".");
}

static void finish(worker *w, int status, const made *m, const serve_settings *s)
{
    serve_hub *hub = w->hub;
    serve_job *j = w->job;
    pthread_mutex_lock(&hub->lock);
    const int stopped = clip_interrupted() || hub->stop;
    j->made_seconds = cli_seconds() - j->began;
    j->completed = (int64_t)time(NULL);
    if (!status)
        note_result(j, m, s, &w->maker.info);
    else
        set_error(j,
                  stopped               ? 503
                  : status == CLI_USAGE ? 400
                                        : 500,
                  stopped     ? "The server was stopped while this video was made"
                  : j->cancel ? "The client that waited for this video went away"
                              : w->said);
    pthread_mutex_unlock(&hub->lock);
    w->said[0] = 0;
    const int lost = serve_job_save(hub, j, status ? SERVE_FAILED : SERVE_COMPLETED);
    pthread_mutex_lock(&hub->lock);
    if (lost && j->state != SERVE_DELETED) {
        set_error(j, 507, w->said);
        j->state = SERVE_FAILED;
    }
    hub->counts.busy_seconds += j->made_seconds;
    hub->counts.made += j->state == SERVE_COMPLETED;
    hub->counts.failed += j->state == SERVE_FAILED;
    hub->running = NULL;
    serve_job_change(hub, j);
    serve_job_drop(j); /* the reference of running */
    pthread_mutex_unlock(&hub->lock);
    serve_job_clean(hub, j);
}

/* Reads the request again: a job may come from a server that ran before. */
static int run(worker *w, made *m, serve_settings *s)
{
    serve_refusal refusal;
    char input[SERVE_PATH];
    serve_job *j = w->job;
    serve_job_path(input, w->hub, j->id, "-input");
    const int image = json_is_true(json_object_get(j->fields, "image"));
    if (serve_settings_read(s, &refusal, &w->hub->rules, j->fields, image ? input : NULL)) {
        snprintf(w->said, sizeof w->said, "%s", refusal.message);
        return CLI_USAGE;
    }
    if (j->cancel) return CLI_FAILED;
    int status = serve_job_save(w->hub, j, SERVE_RUNNING);
    if (!status) status = open_model(w, &s->clip.open, w->hub->rules.model[s->model].name);
    if (!status) status = make(w, m, s);
    if (status) return status;
    pthread_mutex_lock(&w->hub->lock);
    j->stage = SERVE_AT_SAVE;
    serve_job_change(w->hub, j);
    pthread_mutex_unlock(&w->hub->lock);
    status = save(w, m, s);
    if (!status) show_poster(w, m);
    return status;
}

static void run_job(worker *w, serve_job *job)
{
    static made m; /* large; there is one worker */
    serve_settings s;
    memset(&m, 0, sizeof m);
    memset(&s, 0, sizeof s);
    w->job = job;
    w->pass = w->stage = 0;
    w->said[0] = 0;
    const int status = run(w, &m, &s);
    finish(w, status, &m, &s);
    if (m.pair.frames || m.pair.dense) clip_pair_free(&w->maker, &m.pair);
    serve_settings_free(&s);
    w->job = NULL;
    serve_jobs_prune(w->hub);
}

/* Opens the first model while nobody waits. */
static void warm_up(worker *w)
{
    const serve_rules *rules = &w->hub->rules;
    clip_opening o = rules->usual.open;
    o.model = rules->model[0].folder;
    w->said[0] = 0;
    if (open_model(w, &o, rules->model[0].name) && !clip_interrupted())
        fprintf(stderr, "esa: %s\n", w->said); /* the job that needs it fails with this, too */
    w->said[0] = 0;
}

void *serve_worker(void *user)
{
    static worker w; /* there is one; the maker is large */
    serve_hub *hub = user;
    serve_job *job = NULL;
    w = (worker){ .hub = hub };
    cli_hear(w.said, sizeof w.said);
    int status = cli_ctx_new(&w.pictures, 1);
    pthread_mutex_lock(&hub->lock);
    const int idle = serve_queue_length(hub) == 0;
    pthread_mutex_unlock(&hub->lock);
    if (!status && idle) warm_up(&w);
    pthread_mutex_lock(&hub->lock);
    /* After a signal the jobs that wait keep waiting: for the server that starts next. */
    while (!status && !hub->stop && !clip_interrupted()) {
        job = serve_job_next(hub);
        if (!job) {
            pthread_cond_wait(&hub->worker_wake, &hub->lock);
            continue;
        }
        pthread_mutex_unlock(&hub->lock);
        run_job(&w, job);
        pthread_mutex_lock(&hub->lock);
        serve_job_drop(job);
    }
    pthread_mutex_unlock(&hub->lock);
    close_model(&w);
    esa_ctx_free(w.pictures);
    cli_hear(NULL, 0);
    return NULL;
}
