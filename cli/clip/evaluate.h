/* evaluate.h - compares videos with their references: pairing, PSNR, SSIM, LPIPS and flicker per
 * frame, per video and on average. `esa evaluate` and `esa experiment` call it.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_EVALUATE_H
#define ESA_CLI_EVALUATE_H

#include "clip/video.h"

#define EVALUATE_NETS "alex|vgg"
enum { EVALUATE_ANY = -1, EVALUATE_ALEX = 0, EVALUATE_VGG = 1 };

typedef struct evaluate_options {
    /* a video each, or a folder of videos each, paired by file stem; borrowed */
    const char *reference, *generated;
    /* NULL: $ESA_MODELS/lpips-<net>.safetensors; LPIPS is left out if it does not exist */
    const char *lpips_weights;
    int net; /* EVALUATE_*; EVALUATE_ANY: what the file of lpips_weights holds, else AlexNet */
    int64_t threads; /* 0: one per core */
    int quiet;       /* 1: no progress */
} evaluate_options;

typedef struct evaluate_video {
    char *name; /* file stem; owned, as the paths */
    char *reference, *generated;
    int32_t frames, height, width;
    esa_metrics metrics; /* the whole video; psnr is +inf if both are equal */
    /* mean of the frames' PSNR (metrics.psnr is that of the mean error); +inf if a frame is equal
     */
    double psnr_mean;
    double *each; /* [frames][ESA_METRIC_COUNT]; NaN: not measured */
} evaluate_video;

typedef struct evaluate_result {
    evaluate_video *video; /* [count], in the order of their names */
    int64_t count;
    /* over the videos; PSNR over those that differ from their reference, +inf if none does; NaN if
     * there is no value */
    double mean[ESA_METRIC_COUNT];
    int64_t equal;         /* videos equal to their reference */
    char net[8];           /* "alex" or "vgg"; "": LPIPS was not measured */
    char lpips_file[1024]; /* the weights */
    char note[2400]; /* why LPIPS was not measured (for some videos) and what to do; "" if it was */
} evaluate_result;

/* CLI_OK, CLI_FAILED after a message, CLIP_INTERRUPTED (clip.h) without one. what names the command
 * in messages. Free the result in any case. */
int evaluate_run(evaluate_result *result, const evaluate_options *options, const char *what);
void evaluate_free(evaluate_result *result);

/* Writes the fields "lpips", "mean" and "videos" into the open object
 * (docs/schemas/evaluate.schema.json); frames 1: with every frame. */
void evaluate_json(cli_json *json, const evaluate_result *result, int frames);
/* A table for people. */
void evaluate_print(FILE *out, const evaluate_result *result);

#endif
