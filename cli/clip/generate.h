/* generate.h - what the files of `esa generate` share.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_GENERATE_H
#define ESA_CLI_GENERATE_H

#include "clip/clip.h"

typedef struct generate_options {
    clip_request clip; /* prompt, settings and attention of each video */
    const char *model, *prompts_file, *out, *dense_out, *beside_out, *output_dir, *json;
    int hold, compare, check;
    int64_t num_prompts, threads, quality;
    double fps;
    cli_list seeds; /* one video each */
} generate_options;

/* Runs it all; CLI_OK, CLI_FAILED or CLI_USAGE after one sentence, 130 when interrupted. */
int generate_run(const generate_options *options);

#endif
