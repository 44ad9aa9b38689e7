/* experiment.h - what the files of `esa experiment` share.
 * SPDX-License-Identifier: Apache-2.0
 *
 * An experiment is a folder, results/<tag>/:
 *
 *     config.json                   the settings, written when the masks or the first clip are
 *                                   there; a later run must ask for the same
 *     masks.safetensors             calibration, unless --masks names another file
 *     videos/<variant>/000.mp4 ..   variant dense, then b0.5 ...
 *     speed.json, quality.json      at the end (docs/schemas/experiment-*.schema.json)
 *     work/                         until then: the lock, one record per finished clip, frames as
 *                                   they were before compression
 *
 * Every file appears whole. Files that exist are not made again, so a killed run continues where it
 * stopped. */
#ifndef ESA_CLI_EXPERIMENT_H
#define ESA_CLI_EXPERIMENT_H

#include "clip/clip.h"
#include "clip/evaluate.h"

#define EXPERIMENT_PATH    4400
#define EXPERIMENT_METHODS "cached|entropy|rf_v2|ada_bsa|error"
enum { EXPERIMENT_METHOD_COUNT = 5 };
#define EXPERIMENT_FORMAT   1
#define EXPERIMENT_VARIANTS (1 + EXPERIMENT_METHOD_COUNT * CLI_MAX_LIST)

typedef struct experiment_variant {
    char name[64]; /* dense, b0.5, entropy-b0.5: also the folder under videos/ */
    int method;    /* METHOD_* */
    double budget; /* 1: dense */
} experiment_variant;

typedef struct experiment {
    /* from the command line */
    clip_request clip; /* model and settings; its masks: --masks */
    const char *tag, *results, *prompts_file, *eval_prompts, *lpips_weights;
    cli_list budgets, methods; /* methods: numbers in EXPERIMENT_METHODS */
    int64_t num_prompts;
    int skip_calibrate, only_calibrate, keep_frames, net;
    char *command; /* as typed; owned */
    /* derived */
    char folder[EXPERIMENT_PATH]; /* results/tag */
    char masks[EXPERIMENT_PATH];  /* the mask file; "": no method reads one */
    cli_prompts calibration, evaluation;
    experiment_variant variant[EXPERIMENT_VARIANTS];
    int variants;          /* the first is dense */
    char weights_hash[32]; /* hash of the model's weight files */
    clip_maker maker;      /* its info stays valid after it is closed */
} experiment;

/* ---------------------------------------------------------------- options (cmd_experiment.c) */

/* Reads the options of `run`, and those of more (may be NULL), and checks what can be checked
 * without a model. *done: --help was printed. Call experiment_free in any case. */
int experiment_parse(experiment *e, const char *path, const char *about, const cli_option *more,
                     int argc, char **argv, int *done);
void experiment_free(experiment *e);
/* Writes a budget as in names: "0.5" of b0.5. */
void experiment_number(char out[32], double budget);

/* ---------------------------------------------------------------- settings
 * (experiment_config.c) */

/* Fills in prompts, sizes and variants. The model must be open. */
int experiment_resolve(experiment *e, const char *what);
/* Fills in the variants of all methods and budgets, dense first. */
void experiment_variants(experiment *e);
/* The beginning of config.json, up to the settings. */
cli_json *experiment_about(const experiment *e);
/* Writes json as config.json, or compares its settings with those of the file that is there. Frees
 * json. CLI_FAILED after a message that names the first setting that differs. */
int experiment_agree(const experiment *e, cli_json *json, const char *what);
/* write 0: compares the settings with config.json if it exists; CLI_FAILED after a message that
 * names the first difference. write 1: writes config.json if it does not exist. */
int experiment_config(const experiment *e, const char *what, int write);

/* ---------------------------------------------------------------- results
 * (experiment_results.c) */

/* Writes the path of a file of the experiment: its folder, then format. */
void experiment_path(const experiment *e, char path[EXPERIMENT_PATH], const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Renames work/from to `to`. Files are written in work/ first, so that a killed run leaves no
 * unfinished file elsewhere. */
int experiment_move(const experiment *e, const char *from, const char *to, const char *what);
/* Writes a JSON file that way and frees json. */
int experiment_save(const experiment *e, cli_json *json, const char *name, const char *what);
/* Write speed.json from the records of the clips, and quality.json by comparing their frames. */
int experiment_speed(const experiment *e, const char *what);
int experiment_quality(const experiment *e, const char *what);

/* ---------------------------------------------------------------- one table of many
 * (cmd_experiment_collect.c) */

int cmd_experiment_run(int argc, char **argv);
int cmd_experiment_submit(int argc, char **argv);
int cmd_experiment_collect(int argc, char **argv);
int cmd_experiment_begin(int argc, char **argv);
int cmd_experiment_finish(int argc, char **argv);
/* 1 if both results exist. */
int experiment_complete(const experiment *e);
/* CLI_FAILED after a message if work/, or frames/ which is to be replaced, holds foreign entries.
 */
int experiment_check_folders(const experiment *e, const char *what);
/* Empties work/, whose frames become frames/ if they are to be kept. */
int experiment_clean_up(const experiment *e, int made, const char *what);
/* Prints the rows of one experiment as `collect` does. */
int experiment_print(const char *folder, const char *what);

#endif
