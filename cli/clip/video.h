/* video.h - the engine, opened at run time; models by name; prompts.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_VIDEO_H
#define ESA_CLI_VIDEO_H

#include "core/cli.h"
#include <esa/esa_video.h>

/* ---------------------------------------------------------------- the engine (video.c) */

/* libesa_video needs a BLAS and FFmpeg with about a hundred libraries behind it. Only commands that
 * use the engine open it, so the others start at once and also on machines without those. */
#define CLI_VIDEO_CALLS(X)                                                                         \
    X(video_build_id)                                                                              \
    X(model_params_default)                                                                        \
    X(model_check)                                                                                 \
    X(model_check_file)                                                                            \
    X(model_open)                                                                                  \
    X(model_free)                                                                                  \
    X(model_get_info)                                                                              \
    X(generate_params_default)                                                                     \
    X(generate_resolve)                                                                            \
    X(generate)                                                                                    \
    X(decode_params_default)                                                                       \
    X(decode)                                                                                      \
    X(frames_create)                                                                               \
    X(frames_free)                                                                                 \
    X(frames_get_info)                                                                             \
    X(frames_beside)                                                                               \
    X(frames_compare)                                                                              \
    X(frames_measure)                                                                              \
    X(save_params_default)                                                                         \
    X(frames_save)                                                                                 \
    X(frames_save_check)                                                                           \
    X(load_params_default)                                                                         \
    X(frames_load)                                                                                 \
    X(frames_peek)                                                                                 \
    X(lpips_open)                                                                                  \
    X(lpips_free)                                                                                  \
    X(lpips_net)                                                                                   \
    X(lpips_least)

/* Pointers to the calls of esa_video.h and esa_frames.h, under their names without esa_. */
typedef struct cli_video {
    void *handle;
#define CLI_VIDEO_FIELD(name) __typeof__(&esa_##name) name;
    CLI_VIDEO_CALLS(CLI_VIDEO_FIELD)
#undef CLI_VIDEO_FIELD
} cli_video;

/* CLI_FAILED after a message if the engine was not built, is missing, or comes from another build.
 * what names the command. */
int cli_video_open(cli_video *video, const char *what);
void cli_video_close(cli_video *video);
/* 1 if this command was built with an engine to open. */
int cli_video_built(void);
/* 1 if MP4 can be written. */
int cli_video_mp4(void);

/* ---------------------------------------------------------------- models by name (model_find.c) */

/* The folder of a model. NULL is wan-tiny. A known name is looked up under $ESA_MODELS, beside the
 * command (wan-tiny) and in the local hub cache; any other text is a folder. CLI_FAILED after a
 * message. */
int cli_model_find(char *folder, size_t size, const char *model, const char *what);
/* "fnv1a64:..." of the weights of some parts (ESA_PART_*) of a model folder. It changes when the
 * weights do, and takes a second for tens of gigabytes, because large files are sampled
 * (model_weights.c). CLI_FAILED after a message. */
int cli_model_weights(char out[32], const char *folder, int parts, const char *what);
/* The same of one file; 0 or an errno. */
int cli_file_hash(char out[32], const char *path);
/* The folder of the running command; 0 if it is unknown. */
int cli_own_folder(char *out, size_t size);

/* ---------------------------------------------------------------- prompts (prompts.c) */

typedef struct cli_prompts {
    char **line;
    int64_t count;
} cli_prompts; /* owned strings */
/* One of: text alone; a file with a prompt per line (empty lines and lines that start with # are
 * skipped); the first `number` of the built-in ones for this model (tiny: those wan-tiny knows).
 * CLI_FAILED, CLI_USAGE or, if a signal ended the wait for a stream, CLIP_INTERRUPTED (clip.h),
 * all after a message. */
int cli_prompts_get(cli_prompts *prompts, const char *text, const char *file, int64_t number,
                    int tiny, const char *what);
void cli_prompts_free(cli_prompts *prompts);
#define CLI_PROMPTS 12 /* built in */

#endif
