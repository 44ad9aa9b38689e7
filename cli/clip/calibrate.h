/* calibrate.h - what the files of `esa calibrate` share: its settings, and the folder in which a
 * run can be taken up again.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_CALIBRATE_H
#define ESA_CLI_CALIBRATE_H

#include "clip/clip.h"

#define CALIBRATE_PATH 4200

typedef struct calibrate_options {
    clip_request clip; /* sizes, steps, noise, blocks; its method is RECORD */
    const char *model, *prompts_file, *output, *shard, *json;
    cli_list budgets;
    int64_t num_prompts, seed, record_steps, threads;
    int importance, store_dense, keep_recording, restart, hold;
    int shard_index, shard_count; /* of --shard; 0, 0: none */
} calibrate_options;

/* ---------------------------------------------------------------- what it takes
 * (calibrate_size.c) */

typedef struct calibrate_size {
    int64_t tokens, nq, nk;
    int64_t recording_bytes;       /* of one recording; the sums take as much memory */
    int64_t masks_bytes;           /* of the mask file */
    int64_t work_bytes;            /* on disk at most, while it works */
    int64_t prompts_per_recording; /* sums of 32 bits hold 255 contributions of a cell */
    int64_t recordings;
} calibrate_size;

/* request is resolved; prompts counts those of this run. CLI_FAILED after one sentence where no
 * recording can hold even one prompt. */
int calibrate_measure(calibrate_size *size, const calibrate_options *options,
                      const esa_model_info *info, int64_t prompts);
/* Says what will be done and what it takes; CLI_FAILED after one sentence if the disk (of folder)
 * or the memory cannot hold it. present: bytes of this run that lie there already. */
int calibrate_announce(const calibrate_size *size, const calibrate_options *options,
                       const esa_model_info *info, int64_t prompts, int64_t done,
                       const char *folder, int64_t present);

/* ---------------------------------------------------------------- the work folder
 * (calibrate_work.c) FILE.part/ holds settings.json, recording.0, recording.1 ... and whatever a
 * killed run was writing. Recordings are replaced whole after every prompt and count their prompts
 * themselves, so the folder is right at any moment. The folder is locked while a run works in
 * it. */

typedef struct calibrate_work {
    char folder[CALIBRATE_PATH]; /* FILE.part */
    char target[CALIBRATE_PATH]; /* FILE: the mask file, or the recording of a shard */
    size_t kept;                 /* bytes of target's folder that were there before */
    int lock;                    /* descriptor of the folder, -1: none */
    int64_t done;                /* prompts recorded */
    int64_t bytes;               /* of recordings in it */
    int complete;                /* 1: a shard that was finished by an earlier run */
} calibrate_work;

/* Makes the folders on the way, takes the lock, compares settings with those of an interrupted run
 * and counts its prompts. CLI_FAILED after one sentence: another run is at work, or was begun with
 * other settings (and --restart was not given). settings is borrowed. */
int calibrate_work_open(calibrate_work *work, const calibrate_options *options,
                        const char *settings, const calibrate_size *size);
/* The i-th recording of the folder into path. */
void calibrate_recording(char path[CALIBRATE_PATH + 32], const calibrate_work *work, int64_t i);
/* Where the i-th recording of a finished shard goes: FILE.shard-0-of-2.recording,
 * FILE.shard-0-of-2.1.recording; i = -1: its settings, FILE.shard-0-of-2.json. */
void calibrate_shard_file(char path[CALIBRATE_PATH + 64], const calibrate_work *work, int64_t i);
/* Removes the folder with what is in it. */
void calibrate_work_remove(calibrate_work *work);
/* Lets the lock go; an interrupted run stays as it is. A folder without any recording is removed,
 * and so are folders made on the way to it. */
void calibrate_work_close(calibrate_work *work);

#endif
