/* generate.h - what the files of `esa generate` share.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_GENERATE_H
#define ESA_CLI_GENERATE_H

#include "clip/clip.h"

typedef struct generate_options {
    clip_request clip; /* model, prompt, settings and attention of each video */
    const char *prompts_file, *out, *dense_out, *beside_out, *output_dir, *json;
    int compare;
    int64_t num_prompts, quality;
    double fps;
    cli_list seeds; /* one video each */
} generate_options;

/* CLI_OK, CLI_FAILED or CLI_USAGE after a message; CLIP_INTERRUPTED after a signal. */
int generate_run(const generate_options *options);

#endif
