/* jobs.c - the jobs of the server: creating, finding, deleting, and their files.
 * SPDX-License-Identifier: Apache-2.0 */
#include "serve/serve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* What a job may leave beside its record, which goes last: as long as it is there, the server knows
 * whose the others are. */
static const char *const endings[] = { ".mp4",         "-dense.mp4", "-beside.mp4",
                                       "-preview.png", "-input",     ".json" };

void serve_job_path(char out[SERVE_PATH], const serve_hub *hub, const char *id, const char *ending)
{
    snprintf(out, SERVE_PATH, "%.4200s/%s%s", hub->rules.folder, id, ending);
}

serve_job *serve_job_new(void)
{
    serve_job *j = calloc(1, sizeof *j);
    if (!j) return NULL;
    j->refs = 1;
    j->seconds_left = j->density = j->work = j->psnr = j->ssim = NAN;
    j->dense_seconds = j->sparse_seconds = j->speedup = j->ready = j->made_seconds = NAN;
    return j;
}

serve_job *serve_job_keep(serve_job *j)
{
    j->refs++;
    return j;
}

void serve_job_drop(serve_job *j)
{
    if (!j || --j->refs) return;
    json_decref(j->fields);
    free(j);
}

serve_job *serve_job_find(serve_hub *hub, const char *id)
{
    for (int64_t i = hub->count; i-- > 0;)
        if (strcmp(hub->jobs[i]->id, id) == 0) return hub->jobs[i];
    return NULL;
}

int64_t serve_queue_length(const serve_hub *hub)
{
    int64_t waiting = 0;
    for (int64_t i = 0; i < hub->count; i++) waiting += hub->jobs[i]->state == SERVE_QUEUED;
    return waiting;
}

void serve_job_change(serve_hub *hub, serve_job *job)
{
    job->version++;
    if (hub->changed) hub->changed(hub->user, job);
}

int serve_job_add(serve_hub *hub, serve_job *job)
{
    if (hub->count == hub->room) {
        const int64_t room = 2 * hub->room + 64;
        serve_job **more = realloc(hub->jobs, (size_t)room * sizeof *more);
        if (!more) return 0;
        hub->jobs = more;
        hub->room = room;
    }
    hub->jobs[hub->count++] = job;
    return 1;
}

serve_job *serve_job_next(serve_hub *hub)
{
    for (int64_t i = 0; i < hub->count; i++) {
        serve_job *j = hub->jobs[i];
        if (j->state != SERVE_QUEUED) continue;
        j->state = SERVE_RUNNING;
        j->began = cli_seconds();
        hub->running = serve_job_keep(j);
        serve_job_change(hub, j);
        for (int64_t k = i + 1; k < hub->count; k++) /* each moved up in the queue */
            if (hub->jobs[k]->state == SERVE_QUEUED) serve_job_change(hub, hub->jobs[k]);
        return serve_job_keep(j);
    }
    return NULL;
}

/* ---------------------------------------------------------------- files */

static void remove_files(const serve_hub *hub, const char *id)
{
    char path[SERVE_PATH];
    for (size_t i = 0; i < sizeof endings / sizeof endings[0]; i++) {
        serve_job_path(path, hub, id, endings[i]);
        unlink(path);
    }
}

int serve_job_save(serve_hub *hub, serve_job *job, int state)
{
    char path[SERVE_PATH];
    int status = CLI_OK;
    serve_job_path(path, hub, job->id, ".json");
    pthread_mutex_lock(&hub->disk);
    pthread_mutex_lock(&hub->lock);
    const int before = job->state, deleted = before == SERVE_DELETED;
    if (!deleted) job->state = state;
    cli_json *json = deleted ? NULL : serve_record_make(job);
    job->state = before;
    pthread_mutex_unlock(&hub->lock);
    if (!deleted) status = cli_json_save(json, path);
    pthread_mutex_lock(&hub->lock);
    if (!status && job->state == before && !deleted) job->state = state;
    pthread_mutex_unlock(&hub->lock);
    pthread_mutex_unlock(&hub->disk);
    return status;
}

/* ---------------------------------------------------------------- creating */

static int draw_id(char id[SERVE_ID])
{
    unsigned char bits[16];
    if (getrandom(bits, sizeof bits, 0) != (ssize_t)sizeof bits) return 0;
    size_t n = (size_t)snprintf(id, SERVE_ID, "video_gen_");
    for (size_t i = 0; i < sizeof bits; i++, n += 2)
        snprintf(id + n, SERVE_ID - n, "%02x", bits[i]);
    return 1;
}

/* The sizes of the video as far as they are known before the model is asked. */
static void describe(const serve_hub *hub, serve_job *j, const serve_settings *s)
{
    const serve_model *m = &hub->rules.model[s->model];
    const esa_generate_params *p = &s->clip.p;
    const esa_model_info *i = &m->info;
    j->model = s->model;
    snprintf(j->model_name, sizeof j->model_name, "%s", m->name);
    j->seed = s->seed;
    j->passes = s->compare ? 2 : 1;
    j->width = p->width ? p->width : i->width;
    j->height = p->height ? p->height : i->height;
    j->frames = p->frames ? p->frames : i->frames;
    if (i->factor[0] > 0) j->frames = 1 + (j->frames - 1) / i->factor[0] * i->factor[0];
    j->steps = p->steps                  ? p->steps
               : s->clip.sigmas.count    ? s->clip.sigmas.count
               : s->clip.timesteps.count ? s->clip.timesteps.count
                                         : i->steps;
    j->fps = s->fps > 0 ? s->fps : i->fps;
}

/* Why a new job cannot be taken now; under the lock. */
static int full(serve_hub *hub, serve_refusal *refusal)
{
    if (hub->stop) return serve_refuse(refusal, 503, "", "The server is stopping.");
    if (serve_queue_length(hub) >= hub->rules.max_queue)
        return serve_refuse(refusal, 429, "", "%lld videos wait already; try again later.",
                            (long long)hub->rules.max_queue);
    return 0;
}

static int write_files(serve_hub *hub, serve_job *j, const serve_wish *wish)
{
    char path[SERVE_PATH];
    serve_job_path(path, hub, j->id, "-input");
    int status = CLI_OK;
    if (wish->image) status = cli_write_file(path, (const char *)wish->image, wish->image_bytes);
    return status ? status : serve_job_save(hub, j, SERVE_QUEUED);
}

int serve_job_create(serve_hub *hub, serve_job **out, serve_refusal *refusal, serve_wish *wish,
                     const serve_settings *settings)
{
    struct timespec now;
    char said[SERVE_LONGEST] = "";
    *out = NULL;
    pthread_mutex_lock(&hub->lock);
    int code = full(hub, refusal);
    pthread_mutex_unlock(&hub->lock);
    if (code) return code;
    serve_job *j = serve_job_new();
    if (!j || !draw_id(j->id)) {
        free(j);
        return serve_refuse(refusal, 500, "", "The server is out of memory.");
    }
    clock_gettime(CLOCK_REALTIME, &now);
    j->created = (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
    j->fields = wish->fields;
    wish->fields = NULL;
    j->prompt = cli_json_string(j->fields, "prompt");
    describe(hub, j, settings);
    const cli_hearing before = cli_hear(said, sizeof said);
    const int failed = write_files(hub, j, wish);
    cli_hear(before.text, before.size);
    pthread_mutex_lock(&hub->lock);
    if (failed)
        code = serve_refuse(refusal, 507, "", "The job cannot be written: %.300s.", said);
    else if (!serve_job_add(hub, serve_job_keep(j)))
        code = serve_refuse(refusal, 500, "", "The server is out of memory.");
    else
        *out = j;
    if (code) j->refs = 1;
    pthread_cond_signal(&hub->worker_wake);
    pthread_mutex_unlock(&hub->lock);
    if (!code) return 0;
    remove_files(hub, j->id);
    serve_job_drop(j);
    return code;
}

/* ---------------------------------------------------------------- deleting */

/* Takes a job out of the list; under the lock. The list's reference passes to the caller. */
static void take_out(serve_hub *hub, serve_job *j)
{
    int64_t at = 0;
    while (hub->jobs[at] != j) at++;
    memmove(hub->jobs + at, hub->jobs + at + 1,
            (size_t)(hub->count - at - 1) * sizeof hub->jobs[0]);
    hub->count--;
    j->cancel = 1;
    j->state = SERVE_DELETED;
    j->files = 0;
    serve_job_change(hub, j);
    for (int64_t k = at; k < hub->count; k++)
        if (hub->jobs[k]->state == SERVE_QUEUED) serve_job_change(hub, hub->jobs[k]);
}

/* The worker removes what it writes after this, when it sees that the job is deleted. */
static void forget(serve_hub *hub, serve_job *j)
{
    pthread_mutex_lock(&hub->disk);
    remove_files(hub, j->id);
    pthread_mutex_unlock(&hub->disk);
    pthread_mutex_lock(&hub->lock);
    serve_job_drop(j);
    pthread_mutex_unlock(&hub->lock);
}

int serve_job_delete(serve_hub *hub, serve_refusal *refusal, const char *id)
{
    pthread_mutex_lock(&hub->lock);
    serve_job *j = serve_job_find(hub, id);
    if (j) take_out(hub, j);
    if (j) hub->counts.deleted++;
    pthread_mutex_unlock(&hub->lock);
    if (!j) return serve_refuse(refusal, 404, "", "There is no video '%.60s'.", id);
    forget(hub, j);
    return 0;
}

void serve_job_clean(serve_hub *hub, serve_job *job)
{
    pthread_mutex_lock(&hub->disk);
    pthread_mutex_lock(&hub->lock);
    const int deleted = job->state == SERVE_DELETED;
    pthread_mutex_unlock(&hub->lock);
    if (deleted) remove_files(hub, job->id);
    pthread_mutex_unlock(&hub->disk);
}

void serve_jobs_prune(serve_hub *hub)
{
    for (;;) {
        serve_job *oldest = NULL;
        int64_t finished = 0;
        pthread_mutex_lock(&hub->lock);
        for (int64_t i = 0; i < hub->count; i++) {
            serve_job *j = hub->jobs[i];
            if (j->state != SERVE_COMPLETED && j->state != SERVE_FAILED) continue;
            if (!finished++) oldest = j;
        }
        if (finished <= hub->rules.keep) oldest = NULL;
        if (oldest) take_out(hub, oldest);
        pthread_mutex_unlock(&hub->lock);
        if (!oldest) return;
        forget(hub, oldest);
    }
}
