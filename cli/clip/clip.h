/* clip.h - one clip: a model opened once, a request, frames and the record of how they were made.
 * `esa generate`, the benchmarks, `esa calibrate` and `esa experiment` all make their clips here.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_CLI_CLIP_H
#define ESA_CLI_CLIP_H

#include "clip/video.h"

enum {
    METHOD_DENSE = 0,
    METHOD_ENTROPY,
    METHOD_RF_V2,
    METHOD_ADA_BSA,
    METHOD_CACHED,
    METHOD_RECORD
};
#define METHODS                                                                                    \
    "dense|entropy|rf_v2|ada_bsa|cached" /* RECORD is no choice of the user's: `esa calibrate`     \
                                            asks for it */
#define CLIP_INTERRUPTED 130             /* exit status after SIGINT, SIGTERM, SIGHUP */

/* ---------------------------------------------------------------- the model (clip.c) */

typedef struct clip_maker {
    cli_video video; /* the engine's functions: frames, metrics, files */
    esa_ctx *ctx;
    esa_model *model;
    esa_model_info info;
    char folder[4200]; /* of the model */
    const char *what;  /* the command, for sentences; borrowed */
} clip_maker;

typedef struct clip_opening {
    int64_t threads; /* 0: one per core */
    int hold;        /* ESA_HOLD_* */
    int parts;       /* ESA_PART_* that will be needed */
    int check;       /* 1: only names and shapes are checked, no model is opened */
    void (*report)(void *user, const char *line); /* NULL, or as in esa_model_params */
} clip_opening;

/* Opens the engine and a model (a name, a folder, or NULL: wan-tiny) and catches signals. opening
 * NULL: all parts, all cores. CLI_OK, or CLI_FAILED after one sentence; clip_close in any case. */
int clip_open(clip_maker *maker, const char *model, const clip_opening *opening, const char *what);
void clip_close(clip_maker *maker);
/* 1 if the built-in prompts are those of wan-tiny. */
int clip_is_tiny(const clip_maker *maker);

/* ---------------------------------------------------------------- requests */

/* Types are those of cli_option, so that options can be read into a request. Strings are borrowed.
 * 0 frames, height, width or steps: the model's own; NaN guidance: the model's own. */
typedef struct clip_request {
    const char *prompt, *negative;
    const char *prompt_embeds; /* instead of a prompt */
    const char *save_embeds, *latents, *save_latents;
    const char *masks;  /* CACHED: mask file */
    const char *record; /* RECORD: recording, added to if it exists */
    int64_t frames, height, width, steps, seed, vae_tile, samples, refresh, dense_first,
        record_groups;
    double guidance, shift, budget, cdf, warmup;
    cli_list window;       /* of order tile3d; count 0: its own */
    cli_list dense_layers; /* further dense layers */
    int method, tail, order, scheduler, step_map;
    int per_branch;    /* RECORD: guidance branches apart */
    int latents_only;  /* 1: nothing is decoded, no frames come back */
    const char *block; /* "QxK"; NULL: see clip_block */
} clip_request;

/* Entropy at 0.5, pooled tail, warm-up 0.2, first layer dense, seed 0. */
clip_request clip_request_default(void);
/* CLI_OK, or CLI_USAGE after one sentence: what can be said against a request before a model is
 * there. */
int clip_request_check(const clip_request *request, const char *what);
/* The order that a request means: what --order says, else hilbert, whose blocks are compact, so
 * that their means can stand in for them (docs/quality.md), and which costs nothing here because
 * tokens are reordered once around the stack. rf_v2 has an order of its own and cached masks bring
 * theirs: ESA_ORDER_DEFAULT. */
int clip_order(const clip_request *request);
/* Fills in the model's own sizes, steps and guidance, and rounds frames down as the engine does. */
void clip_request_resolve(clip_request *request, const clip_maker *maker);

/* Tokens of self-attention of a resolved request, and its blocks: up to CLIP_SHORT tokens small
 * ones, which keep a few blocks per row also in short sequences and which CPU kernels do not mind;
 * beyond, those each selector was described with. */
#define CLIP_SHORT 16384
int64_t clip_tokens(const clip_request *request, const esa_model_info *info);
const char *clip_block(const clip_request *request, const esa_model_info *info);

/* Settings most commands share, as rows of an option table (clip_options.c): copies the caller's
 * rows, then the chosen groups of rows, then the end, into table and returns it. */
enum {
    CLIP_OPTIONS_SIZE = 1,    /* --frames --height --width --steps */
    CLIP_OPTIONS_NOISE = 2,   /* --guidance --negative-prompt --scheduler --flow-shift */
    CLIP_OPTIONS_DENSE = 4,   /* --warmup --dense-first-layer --dense-layers */
    CLIP_OPTIONS_BLOCKS = 8,  /* --order --window --block --samples */
    CLIP_OPTIONS_SPARSE = 16, /* --tail --cdf --refresh */
    CLIP_OPTIONS_CACHED = 32, /* --masks --step-map */
    CLIP_OPTIONS_ALL = 63
};
#define CLIP_MAX_OPTIONS 64
const cli_option *clip_options(cli_option table[CLIP_MAX_OPTIONS], const cli_option *own,
                               int groups, clip_request *request);

/* ---------------------------------------------------------------- records */

/* What was measured. Arrays are owned; free with clip_record_free. NaN: not known. */
typedef struct clip_record {
    /* sizes as run; seconds of text, denoising, decoding; session totals; peak_bytes */
    esa_generate_stats stats;
    int32_t steps, layers, heads;
    /* steps at the beginning in which nothing ran sparse; 0 if nothing did at all */
    int32_t warmup;
    double *step_seconds;   /* [steps] */
    double *step_select;    /* [steps] of which choosing blocks */
    double *step_attention; /* [steps] of which attention itself */
    double *layer_density;  /* [layers] mean over its sparse calls, NaN: none ran sparse */
    double *head_density;   /* [layers][heads] likewise; NaN on a GPU */
} clip_record;
void clip_record_free(clip_record *record);
/* Mean seconds of a step: with the warm-up steps, or without. */
double clip_step_mean(const clip_record *record, int with_warmup);
/* Realised density of the sparse calls; 1 if there were none. */
double clip_density(const clip_record *record);
/* Writes the fields of a record into the open object. */
void clip_record_json(cli_json *json, const clip_record *record);

/* ---------------------------------------------------------------- making */

/* What is told while a clip is made (clip_watch.c). */
typedef struct clip_watch {
    const char *label;   /* of the clip */
    int64_t clips_left;  /* clips of the same size behind this one: they count in the time left */
    int32_t quiet;       /* 1: only a terminal hears of it */
    int32_t stage, done; /* last told; stage -1 at first */
} clip_watch;

/* One clip. frames is the caller's (NULL may be given with latents_only). record may be NULL.
 * CLI_OK; CLI_FAILED after one sentence; CLIP_INTERRUPTED without one: the caller knows what is
 * left on disk. After a failure *frames is NULL and the record empty. */
int clip_make(clip_maker *maker, esa_frames **frames, clip_record *record,
              const clip_request *request, const char *label, int64_t clips_left, int quiet);
/* Whether the mask file of a resolved request can be read and has its number of steps; clip_make
 * asks too. */
int clip_check_masks(const clip_maker *maker, const clip_request *request);
/* PSNR and SSIM of frames against reference. */
int clip_compare(clip_maker *maker, esa_metrics *metrics, const esa_frames *reference,
                 const esa_frames *frames);

/* SIGINT, SIGTERM and SIGHUP end the work between two layers and leave nothing behind; the second
 * one ends the process. */
void clip_catch_signals(void);
int clip_interrupted(void);
/* Progress of esa_generate: user is a clip_watch. */
int32_t clip_progress(void *user, const esa_progress *progress);
/* "1:05" or "2:03:04". */
void clip_clock(char out[24], double seconds);

#endif
