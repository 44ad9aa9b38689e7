/* plan.h - `esa calibrate --plan`: measures a work plan, clip by clip.
 * SPDX-License-Identifier: Apache-2.0
 *
 * For every prompt: a dense clip, in which the error of each layer and step at several densities is
 * measured; then clips in which only one group of layers, or one group of steps, is sparse; their
 * final latents say how much an error there moves the result. From both follows the plan. Clips
 * with the plan at several works give its quality curve, if wanted with more prompts, and held-out
 * prompts check a work that was asked for. */
#ifndef ESA_CLI_PLAN_H
#define ESA_CLI_PLAN_H

#include "clip/clip.h"

#define PLAN_PATH   4200
#define PLAN_POINTS 8 /* densities of the error curves */
#define PLAN_WORKS  8 /* works of the quality curve, less those that a size cannot reach */

typedef struct plan_options {
    clip_request clip; /* method error; prompt i starts from its seed + i */
    const char *prompts_file, *output, *json;
    int64_t num_prompts;   /* prompts that are measured */
    int64_t curve_prompts; /* prompts of the quality curve, measured ones first; 0: only these */
    int64_t held_out;      /* prompts after these, for the check */
    int64_t groups;        /* groups of layers and of steps that are made sparse alone */
    double quality;        /* 0: not asked for */
    double speedup;        /* 0: not asked for; else the work is 1 / speedup */
    int restart;
} plan_options;

/* Measures and writes output. CLI_OK; CLI_FAILED or CLIP_INTERRUPTED after a message. The same call
 * continues an interrupted run. */
int plan_run(const plan_options *options);

/* ---------------------------------------------------------------- results so far (plan_state.c)
 * FILE.part/state.json holds the settings and the numbers of every finished clip by name. It is
 * rewritten whole after each clip. A run locks the folder, and touches no other files in it
 * (core/scratch.h). */

typedef struct plan_state {
    char folder[PLAN_PATH];
    json_t *runs; /* name -> array of numbers as text; owned */
    char *settings;
    int lock; /* cli_scratch_open; -1: none */
} plan_state;

/* Makes the folder, takes the lock and reads what an earlier run left. CLI_FAILED after a message:
 * another run holds the lock, the folder holds foreign entries, or it has other settings. Takes
 * settings over; call plan_state_close in any case. */
int plan_state_open(plan_state *state, const char *output, char *settings, int restart);
/* Copies the numbers of a run to out[count]; 0 if it is not there. */
int plan_state_get(const plan_state *state, const char *name, double *out, int64_t count);
/* Adds a run and writes the file. */
int plan_state_put(plan_state *state, const char *name, const double *values, int64_t count);
/* The path of a file in the folder. */
void plan_state_path(char path[PLAN_PATH + 64], const plan_state *state, const char *name);
/* Releases the lock and keeps what was measured. */
void plan_state_close(plan_state *state);
/* Removes the command's files, the lock, and the folder if nothing else is in it. */
void plan_state_remove(plan_state *state);

#endif
