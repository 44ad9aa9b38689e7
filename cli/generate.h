/* generate.h - what the files of `esa generate` share (`esa bench video` uses the progress).
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_GENERATE_H
#define ESA_CLI_GENERATE_H

#include "video.h"

enum { METHOD_DENSE = 0, METHOD_ENTROPY, METHOD_RF_V2, METHOD_ADA_BSA, METHOD_CACHED };
#define METHODS "dense|entropy|rf_v2|ada_bsa|cached"

typedef struct generate_options {
    const char *model, *prompt, *prompts_file, *negative, *masks, *block, *out, *dense_out, *beside_out, *output_dir, *json;
    const char *prompt_embeds, *save_embeds, *latents, *save_latents;
    int method, tail, order, scheduler, hold, compare, check, step_map;
    int64_t num_prompts, frames, height, width, steps, seed, threads, refresh, dense_first, vae_tile, quality, samples;
    double budget, guidance, shift, warmup, cdf, fps;
    cli_list window;
} generate_options;

/* Runs it all; CLI_OK, CLI_FAILED or CLI_USAGE after one sentence, 130 when interrupted. */
int generate_run(const generate_options *options);

/* A path that can be written, checked before the work begins: an ending that names a format, a folder that exists and may be written.
 * Appends '/' where path is a folder. CLI_FAILED after one sentence. */
int generate_target(char *target, size_t size, const char *path);

/* Progress for esa_generate: user is a generate_watch. Prints nothing unless the terminal or the log should hear of it. */
typedef struct generate_watch {
    const char *label;              /* of the video */
    int32_t stage, done;            /* last told */
    int32_t quiet;                  /* 1: only a terminal hears of it */
} generate_watch;
int32_t generate_progress(void *user, const esa_progress *progress);
/* SIGINT, SIGTERM and SIGHUP end the work between two layers and leave nothing behind. */
void generate_catch_signals(void);
int  generate_interrupted(void);

#endif
