/* calibrate.h - calibration: its settings, its size, and the folder from which an interrupted run
 * continues. `esa calibrate` and `esa experiment` call it.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_CALIBRATE_H
#define ESA_CLI_CALIBRATE_H

#include "clip/clip.h"

#define CALIBRATE_PATH   4200
#define CALIBRATE_FORMAT "esa.calibration" /* of the settings */

enum { CALIBRATE_ENTROPY = 0, CALIBRATE_ERROR };
#define CALIBRATE_METHODS "entropy|error"

typedef struct calibrate_options {
    clip_request clip; /* model, sizes, steps, noise, blocks; prompt i starts from its seed + i */
    const char *prompts_file, *output, *json;
    int method;          /* CALIBRATE_*: what is recorded */
    cli_list budgets;    /* entropy */
    cli_list works;      /* error */
    const char *weights; /* error: a work plan, or NULL */
    int32_t exact_rows;  /* error; -1: the recommended number */
    int64_t num_prompts;
    int32_t record_steps; /* 0: as many as the clip has */
    int importance, store_dense, keep_recording, restart;
    int shard_index, shard_count; /* 0, 0: no shard */
} calibrate_options;

/* 5 built-in prompts; budgets 0.7, 0.5, 0.3; importance u8; works: those of the presets, with the
 * recommended exact rows. */
calibrate_options calibrate_options_default(void);
/* Runs the prompts and writes output. CLI_OK; CLI_FAILED or CLIP_INTERRUPTED after a message. */
int calibrate_run(const calibrate_options *options);

/* ---------------------------------------------------------------- what it takes
 * (calibrate_size.c) */

typedef struct calibrate_size {
    int64_t nq, nk;
    int64_t recording_bytes;       /* one recording; the sums take as much memory */
    int64_t masks_bytes;           /* the mask file */
    int64_t work_bytes;            /* the most it needs on disk at once */
    int64_t prompts_per_recording; /* sums hold 255 contributions per cell */
    int64_t recordings;
} calibrate_size;

/* Groups of steps that a resolved request records. */
int64_t calibrate_groups(const clip_request *request);
/* The request of options is resolved; prompts counts those of this run. CLI_FAILED after a message
 * if no recording can hold even one prompt. */
int calibrate_measure(calibrate_size *size, const calibrate_options *options,
                      const esa_model_info *info, int64_t prompts);

/* ---------------------------------------------------------------- the work folder
 * (calibrate_work.c) FILE.part/ holds settings.json, recording.0, recording.1 ... and what a killed
 * run was writing. A recording is replaced whole after every prompt and counts its prompts, so the
 * folder is consistent at any moment. A run locks the folder, and touches no other files in it
 * (core/scratch.h). */

typedef struct calibrate_work {
    char folder[CALIBRATE_PATH]; /* FILE.part */
    char target[CALIBRATE_PATH]; /* FILE: the mask file, or the recording of a shard */
    size_t kept;                 /* length of the part of target's folder that existed before */
    int lock;                    /* cli_scratch_open; -1: none */
    int64_t done;                /* prompts recorded */
    int64_t bytes;               /* size of the recordings in it */
    int complete;                /* 1: an earlier run finished this shard */
} calibrate_work;

/* Makes the folders, takes the lock, compares settings with those of an interrupted run and counts
 * its prompts. CLI_FAILED after a message: another run holds the lock, the folder holds foreign
 * entries, or it was begun with other settings (and --restart was not given). settings is
 * borrowed. */
int calibrate_work_open(calibrate_work *work, const calibrate_options *options,
                        const char *settings, const calibrate_size *size);
/* The path of the i-th recording in the folder. */
void calibrate_recording(char path[CALIBRATE_PATH + 32], const calibrate_work *work, int64_t i);
/* Where the i-th recording of a finished shard goes: FILE.shard-0-of-2.recording,
 * FILE.shard-0-of-2.1.recording; i = -1: its settings, FILE.shard-0-of-2.json. */
void calibrate_shard_file(char path[CALIBRATE_PATH + 64], const calibrate_work *work, int64_t i);
/* Removes the command's files, the lock, and the folder if nothing else is in it. */
void calibrate_work_remove(calibrate_work *work);
/* Releases the lock and keeps an interrupted run. Removes a folder without any recording, and the
 * folders made on the way to it. */
void calibrate_work_close(calibrate_work *work);


/* Says what will be done and what it takes. CLI_FAILED after a message if the disk or the memory
 * cannot hold it. (calibrate_size.c) */
int calibrate_announce(const calibrate_size *size, const calibrate_options *options,
                       const esa_model_info *info, int64_t prompts, const calibrate_work *work);

#endif
