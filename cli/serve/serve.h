/* serve.h - the server of `esa serve`: what its parts share, who owns what, and which thread may
 * touch it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Threads
 *   main    cmd_serve.c: reads the options, starts the others, ticks, and stops them.
 *   http    libmicrohttpd's one thread (http_*.c): answers from what is in memory and from finished
 *           files. It never waits for a computation or for a write to a disk, so /health is
 *           answered at any time.
 *   clerk   clerk.c: errands that take time, in the order in which they came: reads the bodies of
 *           POST, writes the records of new jobs, deletes.
 *   worker  worker.c: opens models, makes clips, writes videos. It alone touches the engine.
 *
 * One lock, serve_hub.lock, guards every member marked [lock]. Nobody holds it while it writes to a
 * disk, computes, or calls libmicrohttpd, but for suspending and resuming a connection. A job lives
 * as long as somebody holds a reference (serve_job_keep, serve_job_drop, both under the lock).
 *
 * Files. The output folder holds, for a job ID: ID.json (its record, written whole and renamed),
 * ID.mp4, ID-dense.mp4, ID-beside.mp4, ID-preview.png and ID-input. Other files in it are never
 * touched. Every path is made of the folder, an id that the server drew, and one of these endings:
 * nothing that a client sends names a file. */
#ifndef ESA_CLI_SERVE_H
#define ESA_CLI_SERVE_H

#include <pthread.h>
#include <time.h>

#include "clip/clip.h"

#define SERVE_ID       48 /* bytes of an id with its end */
#define SERVE_MODELS   16 /* of --model */
#define SERVE_NAMES    64 /* of --lora, of --masks and of --plan together */
#define SERVE_PATH     4400
#define SERVE_LONGEST  400         /* bytes of a message */
#define SERVE_BODY     (16 << 20)  /* default of --max-body */
#define SERVE_BODIES   (128 << 20) /* bytes of bodies in memory, of all connections together */
#define SERVE_DEPTH    8           /* of JSON */
#define SERVE_EXAMPLES 12          /* prompts of a model that are shown as examples */
#define SERVE_SIDE     8192        /* pixels of a picture's side */
#define SERVE_PROMPT   10000       /* default of --max-prompt, in bytes */
#define SERVE_PIXELS   250000000   /* default of --max-pixels: of all frames of a video */
#define SERVE_CLIENTS  128         /* connections at a time */
#define SERVE_TIMEOUT  15          /* default of --timeout: seconds for the headers of a request */
#define SERVE_BODY_X   4           /* a body may take so many times that, */
#define SERVE_IDLE_X   2           /* a pause so many times, */
#define SERVE_ANSWER_X 40          /* and an answer so many times, but for events and sync */
#define SERVE_PING_S   10          /* seconds between comments in a stream of events */

/* ---------------------------------------------------------------- refusals (refusal.c) */

/* Why a request is refused. code: the HTTP status. */
typedef struct serve_refusal {
    int code;
    char param[64]; /* the field as the client named it; "": none */
    char message[SERVE_LONGEST];
} serve_refusal;

/* Fills in a refusal; returns its code. */
int serve_refuse(serve_refusal *refusal, int code, const char *param, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* The object {"error": {...}}. NULL when out of memory. */
cli_json *serve_refusal_json(const serve_refusal *refusal);

/* ---------------------------------------------------------------- what may be asked for */

enum { SERVE_IMAGE_NONE = 0, SERVE_IMAGE_NEEDED = 1 };

/* A model of --model. All but the last three members are constant once the server runs. */
typedef struct serve_model {
    char name[128]; /* as clients name it */
    char folder[SERVE_PATH];
    int known;           /* 1: info is filled in */
    esa_model_info info; /* from a look at its configuration */
    int image;           /* SERVE_IMAGE_* */
    int64_t asked;       /* [lock] videos made with it */
} serve_model;

/* A file that clients may name: a LoRA, a mask file, a work plan. */
enum { SERVE_LORA = 0, SERVE_MASKS = 1, SERVE_PLAN = 2, SERVE_KINDS = 3 };
typedef struct serve_name {
    int kind; /* SERVE_LORA .. */
    char name[64];
    char file[SERVE_PATH];
    double scale; /* LoRA: times what the request asks for */
} serve_name;

/* What is constant while the server runs: read by every thread without the lock. */
typedef struct serve_rules {
    serve_model model[SERVE_MODELS];
    int models;
    serve_name name[SERVE_NAMES];
    int names;
    clip_request usual; /* the server's own defaults of requests (--preset, ...) */
    int method, budget; /* 1: --method, --budget was given */
    char folder[SERVE_PATH];
    char *key; /* of --api-key-file; NULL: none */
    int64_t keep, max_queue, max_body, max_prompt, max_pixels, timeout;
    int64_t started;       /* seconds since 1970 */
    int64_t preview_every; /* steps; 0: no previews */
    int64_t quality;       /* --mp4-quality */
} serve_rules;

/* ---------------------------------------------------------------- requests (wish.c, settings.c) */

/* A request as it is kept: its fields as the client gave them, but checked, with "esa" as an object
 * and without the picture, of which "image": true is left. Owned. */
typedef struct serve_wish {
    json_t *fields;
    unsigned char *image; /* the picture's file */
    size_t image_bytes;
} serve_wish;
void serve_wish_free(serve_wish *wish);

/* Reads the body of a POST: JSON, or multipart/form-data. 0 or the code of the refusal; then *wish
 * is empty. Needs no lock. */
int serve_wish_read(serve_wish *wish, serve_refusal *refusal, const serve_rules *rules,
                    const char *content_type, const char *body, size_t bytes);

/* A part of a body of multipart/form-data; texts point into the body. (multipart.c) */
typedef struct serve_part {
    char name[64];
    int file; /* 1: it has a file name */
    const char *data;
    size_t bytes;
} serve_part;
/* The part at *at, which begins at 0; 1: there is one, 0: there are no more, -1: the body is
 * damaged. boundary: as serve_boundary found it. */
int serve_multipart_next(serve_part *part, size_t *at, const char *body, size_t bytes,
                         const char *boundary);
/* The boundary in a content type; 0 if there is none or it is too long. */
int serve_boundary(char out[80], const char *content_type);

/* What a wish means: the options of `esa generate`. Texts belong to it. */
typedef struct serve_settings {
    clip_request clip; /* model and lora of `open` are filled in */
    int model;         /* of serve_rules */
    int compare, method, budget;
    double fps, seconds;
    int64_t quality, seed;
    cli_texts lora, lora_2;                           /* names, as the request gave them */
    char *texts[CLIP_MAX_OPTIONS + 4 * CLI_MAX_LIST]; /* owned, and what the options point to */
    int text_count;
} serve_settings;
void serve_settings_free(serve_settings *settings);
/* Reads and checks the options of a request. image: the path of its picture, or NULL. 0 or the code
 * of the refusal; then *settings is empty. */
int serve_settings_read(serve_settings *settings, serve_refusal *refusal, const serve_rules *rules,
                        const json_t *fields, const char *image);
/* Removes options that requests, or the server, read in another way. */
void serve_options_drop(cli_option *table, const char *name, int from);
/* The schema of the object "esa", from the same options (for /openapi.json); NULL: out of
 * memory. */
json_t *serve_esa_schema(void);

/* ---------------------------------------------------------------- jobs (jobs.c, record.c) */

enum { SERVE_QUEUED = 0, SERVE_RUNNING, SERVE_COMPLETED, SERVE_FAILED, SERVE_DELETED };
enum { SERVE_AT_LOAD = 0, SERVE_AT_TEXT, SERVE_AT_DENOISE, SERVE_AT_DECODE, SERVE_AT_SAVE };
/* What a job may have written, as bits. */
enum { SERVE_HAS_VIDEO = 1, SERVE_HAS_DENSE = 2, SERVE_HAS_BESIDE = 4, SERVE_HAS_PREVIEW = 8 };

typedef struct serve_job {
    char id[SERVE_ID];
    json_t *fields;     /* of the wish; read under the lock only, as its count of references is */
    const char *prompt; /* of fields */
    int model;          /* of serve_rules; -1: the server no longer has it */
    char model_name[128];
    int64_t created;   /* microseconds since 1970 */
    int64_t completed; /* seconds since 1970; 0: not yet; [lock] as all below */
    int refs;
    int state;  /* SERVE_QUEUED .. */
    int cancel; /* 1: the worker shall stop */
    int code;   /* of the error */
    char error[SERVE_LONGEST];
    /* progress */
    int stage, step, steps, pass, passes;               /* pass 0 of 2 is the dense one */
    double seconds, seconds_left, density, work, began; /* NaN: not known */
    int preview, files; /* the step of the last preview; SERVE_HAS_* */
    int64_t version;    /* grows with every change */
    /* what was made */
    int frames, height, width;
    int64_t seed;
    double fps, made_seconds;
    double psnr, ssim, dense_seconds, sparse_seconds, speedup; /* NaN without compare */
    double ready; /* seconds from taking the job to its first step; NaN: not there yet */
} serve_job;

/* What the clerk shall do; on the way back the answer is filled in. */
enum { SERVE_CREATE = 0, SERVE_DELETE = 1 };
typedef struct serve_errand {
    struct serve_errand *next; /* [lock] */
    int kind;
    char *content_type, *body; /* CREATE: owned */
    size_t bytes;
    char id[SERVE_ID];     /* DELETE */
    int sync;              /* CREATE: 1: the answer waits for the video */
    int done;              /* [lock] 1: the answer is there, or, with sync, the job */
    int orphan;            /* [lock] 1: the connection is gone: whoever ends it frees it */
    serve_refusal refusal; /* code 0: none */
    serve_job *job;        /* CREATE: a reference */
    void *connection;      /* resumed when done */
} serve_errand;
void serve_errand_free(serve_errand *errand); /* drops its job; not under the lock */

/* Counters of /metrics. */
typedef struct serve_counts {
    int64_t answers[6]; /* by the first digit of the status */
    int64_t refused, made, failed, deleted, steps, previews;
    double busy_seconds; /* of the worker with videos */
} serve_counts;

typedef struct serve_hub {
    serve_rules rules;
    pthread_mutex_t lock;
    pthread_mutex_t disk; /* one record is written or removed at a time; taken before lock */
    pthread_cond_t clerk_wake, worker_wake;
    serve_errand *errands; /* [lock] those of the clerk, oldest first */
    serve_job **jobs;      /* [lock] in the order in which they were created */
    int64_t count, room;   /* [lock] */
    serve_job *running;    /* [lock] */
    char warm[128];        /* [lock] the name of the model that is open; "": none */
    int stop;              /* [lock] 1: threads shall end */
    int lock_file;
    double began;
    serve_counts counts; /* [lock] */
    /* Called under the lock after any change of a job, and when an errand is done. */
    void (*changed)(void *user, serve_job *job);
    void (*answered)(void *user, serve_errand *errand);
    void *user;
} serve_hub;

/* Locks the output folder, which no other server may use, and reads its records: jobs that ran are
 * failed, with the reason, and those that waited wait again. CLI_FAILED after a message. */
int serve_hub_open(serve_hub *hub);
void serve_hub_close(serve_hub *hub);
/* Adds a job that waits, with a reference for the caller; 0 or the code of the refusal. Its record
 * and its picture are on disk before. Takes the fields of wish. */
int serve_job_create(serve_hub *hub, serve_job **job, serve_refusal *refusal, serve_wish *wish,
                     const serve_settings *settings);
/* Deletes a job and its files; one that runs is cancelled. 0 or the code of the refusal. */
int serve_job_delete(serve_hub *hub, serve_refusal *refusal, const char *id);
/* [lock] Adds a job to the list, which takes over a reference; 0: out of memory. */
int serve_job_add(serve_hub *hub, serve_job *job);
/* Removes the files of a job again if it was deleted meanwhile. */
void serve_job_clean(serve_hub *hub, serve_job *job);
/* Deletes the oldest finished jobs beyond --keep. */
void serve_jobs_prune(serve_hub *hub);
/* [lock] The job of an id, without a reference; NULL: there is none. */
serve_job *serve_job_find(serve_hub *hub, const char *id);
serve_job *serve_job_keep(serve_job *job);             /* [lock] */
void serve_job_drop(serve_job *job);                   /* [lock] */
void serve_job_change(serve_hub *hub, serve_job *job); /* [lock] counts and tells a change */
int64_t serve_queue_length(const serve_hub *hub);      /* [lock] jobs that wait */
/* [lock] Writes the job as clients see it into the open object. */
void serve_job_json(cli_json *json, const serve_hub *hub, const serve_job *job);
int serve_job_progress(const serve_job *job); /* [lock] 0 .. 100 */
/* [lock] The next job to run, as running, with a reference; NULL: none waits. */
serve_job *serve_job_next(serve_hub *hub);
/* The path of a file of a job: ending ".mp4", "-dense.mp4", ... */
void serve_job_path(char out[SERVE_PATH], const serve_hub *hub, const char *id, const char *ending);
/* Writes the record of a job with a state, unless it was deleted; not under the lock. The job has
 * the state only when the record is on disk: nobody sees a finished video that a crash could make
 * unfinished. CLI_FAILED after a message; then the job is as before. */
int serve_job_save(serve_hub *hub, serve_job *job, int state);
serve_job *serve_job_new(void); /* with one reference; NULL: out of memory */
/* (record.c) The record of a job, made under the lock; NULL when out of memory. A job from one,
 * with one reference; NULL: it is no record of a job with this id. */
cli_json *serve_record_make(const serve_job *job);
serve_job *serve_record_read(const json_t *record, const char *id, const serve_rules *rules);
const char *serve_state_name(int state);
const char *serve_stage_name(int stage);

/* ---------------------------------------------------------------- threads */

void *serve_clerk(void *hub);  /* clerk.c */
void *serve_worker(void *hub); /* worker.c */
/* [lock] Gives the clerk an errand. */
void serve_errand_give(serve_hub *hub, serve_errand *errand);

/* The HTTP side (http.c). CLI_FAILED after a message. */
typedef struct serve_http serve_http;
int serve_http_ready(void); /* whether there is a library for it */
int serve_http_start(serve_http **http, serve_hub *hub, const char *host, int port);
int serve_http_port(const serve_http *http);
void serve_http_tick(serve_http *http); /* about five times a second: limits on time, pings */
void serve_http_stop(serve_http *http); /* the other threads have ended */

#endif
