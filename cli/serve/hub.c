/* hub.c - the output folder: one server at a time, and what an earlier one left.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The lock is the system's and ends with the process, however that ends. */
#define _GNU_SOURCE /* flock, strverscmp */
#include "serve/serve.h"
#include "core/folders.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define LOCK_NAME ".esa-serve.lock"

/* Bytes of an id at the begin of a name; 0: it begins with none. */
static size_t id_bytes(const char *name)
{
    static const char prefix[] = "video_gen_";
    const size_t n = sizeof prefix - 1;
    if (strncmp(name, prefix, n) != 0) return 0;
    return strspn(name + n, "0123456789abcdef") >= 32 ? n + 32 : 0;
}

/* 1 for ID-something.XXXXXXXX.tmp: what a writer of ours left when its process was killed. */
static int is_leftover(const char *name)
{
    const size_t n = strlen(name);
    if (!id_bytes(name) || n < 13 || strcmp(name + n - 4, ".tmp") != 0) return 0;
    return name[n - 13] == '.' && strspn(name + n - 12, "0123456789abcdef") == 8;
}

static int take_lock(serve_hub *hub)
{
    char path[SERVE_PATH];
    snprintf(path, sizeof path, "%.4200s/%s", hub->rules.folder, LOCK_NAME);
    hub->lock_file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (hub->lock_file < 0)
        return cli_fail("serve: '%s' cannot be opened: %s", path, strerror(errno));
    if (flock(hub->lock_file, LOCK_EX | LOCK_NB) == 0) return CLI_OK;
    if (errno == EWOULDBLOCK)
        return cli_fail("serve: another server uses the folder '%s'; give --output-dir another",
                        hub->rules.folder);
    return cli_fail("serve: '%s' cannot be locked: %s", path, strerror(errno));
}

static int is_there(const serve_hub *hub, const char *id, const char *ending)
{
    char path[SERVE_PATH];
    serve_job_path(path, hub, id, ending);
    return access(path, R_OK) == 0;
}

/* What became of a job that an earlier server left. */
static void take_up(serve_hub *hub, serve_job *j)
{
    if (j->state == SERVE_RUNNING) {
        j->state = SERVE_FAILED;
        j->code = 500;
        j->files &= SERVE_HAS_PREVIEW;
        snprintf(j->error, sizeof j->error,
                 "The server ended while this video was made; send the request again.");
    } else if (j->state == SERVE_QUEUED && j->model < 0) {
        j->state = SERVE_FAILED;
        j->code = 404;
        snprintf(j->error, sizeof j->error, "The server no longer has the model %.80s.",
                 j->model_name);
    } else if (j->state == SERVE_COMPLETED && !is_there(hub, j->id, ".mp4")) {
        j->state = SERVE_FAILED;
        j->code = 410;
        j->files = 0;
        snprintf(j->error, sizeof j->error, "The file of this video was removed.");
    } else
        return;
    j->completed = (int64_t)time(NULL);
    serve_job_save(hub, j, j->state);
}

static int by_time(const void *a, const void *b)
{
    const serve_job *x = *(serve_job *const *)a, *y = *(serve_job *const *)b;
    return x->created < y->created ? -1 : x->created > y->created;
}

/* A file that only looks like a record is left alone, and said. */
static int read_record(serve_hub *hub, const char *name)
{
    char id[SERVE_ID], path[SERVE_PATH], said[SERVE_LONGEST] = "";
    const size_t n = id_bytes(name);
    if (!n || strcmp(name + n, ".json") != 0) return CLI_OK;
    snprintf(id, sizeof id, "%.*s", (int)n, name);
    serve_job_path(path, hub, id, ".json");
    const cli_hearing before = cli_hear(said, sizeof said);
    json_t *record = cli_json_load(path, NULL, 0, "serve");
    cli_hear(before.text, before.size);
    serve_job *j = record ? serve_record_read(record, id, &hub->rules) : NULL;
    json_decref(record);
    if (!j) {
        fprintf(stderr, "serve: '%s' is left alone: %s\n", path,
                said[0] ? said : "it is no record of this server");
        return CLI_OK;
    }
    if (!serve_job_add(hub, j)) return cli_fail("serve: out of memory");
    take_up(hub, j);
    return CLI_OK;
}

static int read_folder(serve_hub *hub)
{
    int status = CLI_OK;
    struct dirent *entry;
    DIR *folder = opendir(hub->rules.folder);
    if (!folder)
        return cli_fail("serve: '%s' cannot be read: %s", hub->rules.folder, strerror(errno));
    while (!status && (entry = readdir(folder)) != NULL) {
        if (is_leftover(entry->d_name))
            unlinkat(dirfd(folder), entry->d_name, 0);
        else
            status = read_record(hub, entry->d_name);
    }
    closedir(folder);
    if (hub->count) qsort(hub->jobs, (size_t)hub->count, sizeof hub->jobs[0], by_time);
    return status;
}

int serve_hub_open(serve_hub *hub)
{
    hub->lock_file = -1;
    hub->began = cli_seconds();
    pthread_mutex_init(&hub->lock, NULL);
    pthread_mutex_init(&hub->disk, NULL);
    pthread_cond_init(&hub->clerk_wake, NULL);
    pthread_cond_init(&hub->worker_wake, NULL);
    int status = cli_make_folders(hub->rules.folder, NULL, "serve");
    if (!status) status = take_lock(hub);
    if (!status) status = read_folder(hub);
    if (!status) serve_jobs_prune(hub);
    return status;
}

void serve_hub_close(serve_hub *hub)
{
    for (int64_t i = 0; i < hub->count; i++) serve_job_drop(hub->jobs[i]);
    free(hub->jobs);
    hub->jobs = NULL;
    hub->count = hub->room = 0;
    if (hub->lock_file >= 0) close(hub->lock_file);
    pthread_cond_destroy(&hub->worker_wake);
    pthread_cond_destroy(&hub->clerk_wake);
    pthread_mutex_destroy(&hub->disk);
    pthread_mutex_destroy(&hub->lock);
}
