/* generate.h - what the files of `esa generate` share.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_GENERATE_H
#define ESA_CLI_GENERATE_H

#include "clip.h"

typedef struct generate_options {
    clip_request clip;              /* prompt, settings and attention of each video */
    const char *model, *prompts_file, *out, *dense_out, *beside_out, *output_dir, *json;
    int hold, compare, check;
    int64_t num_prompts, threads, quality;
    double fps;
    cli_list seeds;                 /* one video each */
} generate_options;

/* Runs it all; CLI_OK, CLI_FAILED or CLI_USAGE after one sentence, 130 when interrupted. */
int generate_run(const generate_options *options);

/* A path that can be written, checked before the work begins: an ending that names a format, a folder that exists and may be written.
 * Appends '/' where path is a folder. CLI_FAILED after one sentence. */
int generate_target(char *target, size_t size, const char *path);

#endif
