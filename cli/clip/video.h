/* video.h - what `esa generate` and `esa bench video` are made of: the engine opened at run time,
 * models by name, prompts, progress.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_VIDEO_H
#define ESA_CLI_VIDEO_H

#include "core/cli.h"
#include <esa/esa_video.h>

/* ---------------------------------------------------------------- the engine (video.c) */

/* libesa_video brings a BLAS and FFmpeg with some hundred libraries of its own; it is opened by the
 * commands that need it, so that the others start at once and on machines without those. */
typedef struct cli_video {
    void *handle;
    const uint32_t *(*abi)(void);
    esa_model_params (*model_params)(void);
    esa_status (*model_check)(esa_ctx *, const char *, const esa_model_params *);
    esa_status (*model_open)(esa_ctx *, esa_model **, const char *, const esa_model_params *);
    void (*model_free)(esa_model *);
    esa_status (*model_info)(const esa_model *, esa_model_info *);
    esa_generate_params (*generate_params)(void);
    esa_status (*generate)(esa_model *, esa_frames **, const esa_generate_params *,
                           esa_generate_stats *);
    esa_status (*frames_create)(esa_ctx *, esa_frames **, const uint8_t *, int32_t, int32_t,
                                int32_t, double);
    void (*frames_free)(esa_frames *);
    esa_status (*frames_info)(const esa_frames *, esa_frames_info *);
    esa_status (*frames_beside)(esa_ctx *, esa_frames **, const esa_frames *, const esa_frames *);
    esa_save_params (*save_params)(void);
    esa_status (*frames_save)(esa_ctx *, const esa_frames *, const char *, const esa_save_params *);
    esa_status (*frames_save_check)(esa_ctx *, const char *, int64_t, const esa_save_params *);
    esa_load_params (*load_params)(void);
    esa_status (*frames_load)(esa_ctx *, esa_frames **, const char *, const esa_load_params *);
    esa_status (*frames_peek)(esa_ctx *, esa_frames_info *, const char *, const esa_load_params *);
    esa_decode_params (*decode_params)(void);
    esa_status (*decode)(esa_model *, esa_frames **, const esa_decode_params *);
    esa_status (*lpips_open)(esa_ctx *, esa_lpips **, const char *);
    void (*lpips_free)(esa_lpips *);
    const char *(*lpips_net)(const esa_lpips *);
    int32_t (*lpips_least)(const esa_lpips *);
    esa_status (*compare)(esa_ctx *, esa_metrics *, const esa_frames *, const esa_frames *);
    esa_status (*measure)(esa_ctx *, esa_metrics *, double *, const esa_frames *,
                          const esa_frames *, esa_lpips *, int32_t (*)(void *, int32_t, int32_t),
                          void *);
} cli_video;

/* CLI_FAILED after one sentence where the engine was not built, is not there, or is of another
 * build. what names the command. */
int cli_video_open(cli_video *video, const char *what);
void cli_video_close(cli_video *video);
/* 1 if this command was built with an engine to open. */
int cli_video_built(void);
/* 1 if MP4 can be written. */
int cli_video_mp4(void);

/* ---------------------------------------------------------------- models by name (model_find.c) */

/* The folder of a model: NULL is wan-tiny; a known name is looked up under $ESA_MODELS, beside the
 * command (wan-tiny) and in the local hub cache; anything else is a folder. CLI_FAILED after one
 * sentence, also for families the engine does not run. */
int cli_model_find(char *folder, size_t size, const char *model, const char *what);
/* "fnv1a64:..." of the weights of some parts (ESA_PART_*) of a model folder, to tell whether they
 * are still the same; a second for tens of gigabytes, because large files are only sampled
 * (model_weights.c). CLI_FAILED after one sentence. */
int cli_model_weights(char out[32], const char *folder, int parts, const char *what);
/* The folder the running command lies in; 0 if that cannot be found out. */
int cli_own_folder(char *out, size_t size);
/* Of the pipeline class in an error's text, the family and how to run it in Python; NULL if there
 * is none. */
const char *cli_model_family(const char *text);

/* ---------------------------------------------------------------- prompts (prompts.c) */

typedef struct cli_prompts {
    char **line;
    int64_t count;
} cli_prompts; /* owned strings */
/* One of: text alone; a file with a prompt per line (empty lines and lines that start with # are
 * skipped); the first `number` of the built-in ones for this model (tiny: those wan-tiny knows).
 * CLI_FAILED or CLI_USAGE after one sentence. */
int cli_prompts_get(cli_prompts *prompts, const char *text, const char *file, int64_t number,
                    int tiny, const char *what);
void cli_prompts_free(cli_prompts *prompts);
#define CLI_PROMPTS 12 /* built in */

#endif
