/* experiment_outside.c - `esa experiment begin | finish`: experiments whose videos another program
 * makes, such as python -m esa.run_experiment with a diffusers pipeline.
 * SPDX-License-Identifier: Apache-2.0
 *
 * That program and these commands share the folder of the experiment:
 *
 *     work/request.json                  before begin: {"tag", "command", "model": its folder,
 *                                        "skip_calibrate", "settings": as in config.json}
 *     work/clips/<variant>-000.json      a video's entry in speed.json, one per video
 *     work/frames/<variant>/000.safetensors      its frames
 *     work/calibration.json              {"seconds", "tokens": of self-attention}
 *
 * begin writes config.json, or compares the request with the one that is there. finish writes
 * speed.json and quality.json as `esa experiment run` does, and removes work/. */
#include "experiment/experiment.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The one word of begin and finish: the experiment's folder. */
static int parse(experiment *e, const char *path, const char *about, const cli_option *options,
                 int argc, char **argv, int *done)
{
    int words = 0;
    const int status = cli_options(path, "FOLDER", about, options, argc, argv, &words, done);
    if (status || *done) return status;
    if (words != 1) return cli_usage("%s: %d folders were given, expected 1", path + 4, words);
    if (strlen(argv[0]) > 4000) return cli_usage("%s: the name is too long", path + 4);
    snprintf(e->folder, sizeof e->folder, "%s", argv[0]);
    return cli_ctx_new(&e->maker.ctx, e->clip.open.threads);
}

static json_t *load(const experiment *e, const char *name, const char *what)
{
    char path[EXPERIMENT_PATH];
    experiment_path(e, path, "%s", name);
    return cli_json_load(path, NULL, 0, what);
}

static char *copy(const char *text)
{
    char *out = malloc(strlen(text) + 1);
    return out ? strcpy(out, text) : NULL;
}

/* ---------------------------------------------------------------- begin */

static int begin(experiment *e, const json_t *request, const char *what)
{
    const char *tag = cli_json_string(request, "tag"), *model = cli_json_string(request, "model"),
               *command = cli_json_string(request, "command");
    json_t *settings = cli_json_at(request, "settings");
    if (!tag || !model || !command || !json_is_object(settings))
        return cli_fail("%s: work/request.json needs tag, command, model and settings", what);
    e->tag = tag;
    e->command = copy(command);
    e->skip_calibrate = json_is_true(cli_json_at(request, "skip_calibrate"));
    snprintf(e->maker.folder, sizeof e->maker.folder, "%s", model);
    const int status = cli_model_weights(e->weights_hash, model, ESA_PART_ALL, what);
    if (status) return status;
    if (!e->command ||
        json_object_set_new(settings, "weights_hash", json_string(e->weights_hash)) != 0)
        return cli_fail("%s: out of memory", what);
    cli_json *json = experiment_about(e);
    cli_json_add(json, "settings", json_incref(settings));
    return experiment_agree(e, json, what);
}

/* The request was read. work/ goes too unless there is more in it. */
static void forget_request(const experiment *e)
{
    char path[EXPERIMENT_PATH];
    experiment_path(e, path, "work/request.json");
    unlink(path);
    experiment_path(e, path, "work");
    rmdir(path);
}

int cmd_experiment_begin(int argc, char **argv)
{
    static const char what[] = "experiment begin";
    static const cli_option none[] = { { NULL, 0, NULL, NULL, 0, 0, 0, NULL } };
    experiment e = { .variants = 0 };
    int done = 0;
    int status = parse(&e, "esa experiment begin",
                       "Begins an experiment whose videos another program makes. Reads "
                       "FOLDER/work/request.json and writes FOLDER/config.json,\n"
                       "or compares the request with the config.json that is there.",
                       none, argc, argv, &done);
    json_t *request = status || done ? NULL : load(&e, "work/request.json", what);
    if (!status && !done) {
        status = request ? begin(&e, request, what) : CLI_FAILED;
        forget_request(&e);
    }
    json_decref(request);
    esa_ctx_free(e.maker.ctx);
    experiment_free(&e);
    return status;
}

/* ---------------------------------------------------------------- finish */

static int prompts(cli_prompts *out, const json_t *lines, const char *what)
{
    const size_t count = json_array_size(lines);
    if (count && !(out->line = calloc(count, sizeof *out->line)))
        return cli_fail("%s: out of memory", what);
    for (size_t i = 0; i < count; i++) {
        const char *line = json_string_value(json_array_get(lines, i));
        if (!line || !(out->line[out->count] = copy(line)))
            return cli_fail("%s: config.json holds a prompt that is no text", what);
        out->count++;
    }
    return CLI_OK;
}

static int methods(experiment *e, const json_t *settings, const char *what)
{
    const json_t *words = cli_json_at(settings, "methods"),
                 *budgets = cli_json_at(settings, "budgets");
    const size_t most = CLI_MAX_LIST;
    if (json_array_size(words) > EXPERIMENT_METHOD_COUNT || json_array_size(budgets) > most ||
        !json_array_size(budgets))
        return cli_fail("%s: config.json holds no methods and budgets of an experiment", what);
    for (size_t i = 0; i < json_array_size(words); i++) {
        const char *word = json_string_value(json_array_get(words, i));
        char name[32];
        int at = 0;
        while (at < EXPERIMENT_METHOD_COUNT && word &&
               strcmp(word, cli_name(name, EXPERIMENT_METHODS, at)) != 0)
            at++;
        if (!word || at == EXPERIMENT_METHOD_COUNT)
            return cli_fail("%s: config.json names an unknown method", what);
        e->methods.whole[e->methods.count++] = at;
    }
    for (size_t i = 0; i < json_array_size(budgets); i++)
        e->budgets.real[e->budgets.count++] = json_number_value(json_array_get(budgets, i));
    experiment_variants(e);
    return CLI_OK;
}

/* A setting as a whole number; 0 if it is none. */
static int32_t whole(const json_t *settings, const char *key)
{
    const double x = cli_json_number(settings, key);
    return x >= 0 && x <= INT32_MAX ? (int32_t)x : 0;
}

/* What experiment_speed and experiment_quality need, from config.json. Texts stay config's. */
static int take_settings(experiment *e, const json_t *config, const char *what)
{
    const json_t *s = cli_json_at(config, "settings");
    const char *model = cli_json_string(s, "model"), *hash = cli_json_string(s, "config_hash");
    e->tag = cli_json_string(config, "tag");
    if (!e->tag || !model || !hash)
        return cli_fail("%s: '%s/config.json' is not that of an experiment", what, e->folder);
    snprintf(e->maker.info.name, sizeof e->maker.info.name, "%s", model);
    snprintf(e->maker.info.config_hash, sizeof e->maker.info.config_hash, "%s", hash);
    e->clip.p.frames = whole(s, "frames");
    e->clip.p.height = whole(s, "height");
    e->clip.p.width = whole(s, "width");
    e->clip.p.steps = whole(s, "steps");
    e->clip.p.masks = cli_json_string(s, "masks");
    e->lpips_weights = cli_json_string(s, "lpips_weights");
    if (e->clip.p.masks)
        snprintf(e->masks, sizeof e->masks, "%.4300s", e->clip.p.masks);
    else
        snprintf(e->masks, sizeof e->masks, "%.4300s/masks.safetensors", e->folder);
    int status = methods(e, s, what);
    if (!status) status = prompts(&e->calibration, cli_json_at(s, "calibration_prompts"), what);
    if (!status) status = prompts(&e->evaluation, cli_json_at(s, "evaluation_prompts"), what);
    if (!status && !e->evaluation.count)
        status = cli_fail("%s: '%s/config.json' names no prompts of videos", what, e->folder);
    return status;
}

static int finish(experiment *e, const json_t *config, const char *what)
{
    char path[EXPERIMENT_PATH];
    int status = experiment_check_folders(e, what);
    if (!status) status = take_settings(e, config, what);
    json_t *note = status ? NULL : load(e, "work/calibration.json", what);
    if (!status && !note) status = CLI_FAILED;
    e->clip.tokens = whole(note, "tokens");
    json_decref(note);
    if (!status && !e->clip.tokens)
        status = cli_fail("%s: work/calibration.json holds no tokens", what);
    if (!status) status = experiment_speed(e, what);
    if (!status) status = experiment_quality(e, what);
    if (!status) status = experiment_clean_up(e, 1, what);
    if (status) return status;
    experiment_path(e, path, "work");
    rmdir(path);
    return CLI_OK;
}

int cmd_experiment_finish(int argc, char **argv)
{
    static const char what[] = "experiment finish";
    experiment e = { .net = EVALUATE_ANY };
    const cli_option options[] = {
        { "--keep-frames", CLI_FLAG, &e.keep_frames, NULL, 0, 0, 0,
          "keep the frames as they were before compression: frames/" },
        { "--threads", CLI_INT, &e.clip.open.threads, "N", 0, ESA_MAX_THREADS, 0,
          "0: one per core (0)" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int done = 0;
    int status = parse(&e, "esa experiment finish",
                       "Measures the videos that another program made for an experiment: writes "
                       "FOLDER/speed.json and FOLDER/quality.json\n"
                       "and prints the table. A complete experiment is only printed.",
                       options, argc, argv, &done);
    json_t *config = NULL;
    if (!status && !done && !experiment_complete(&e)) {
        config = load(&e, "config.json", what);
        status = config ? finish(&e, config, what) : CLI_FAILED;
    }
    if (!status && !done) status = experiment_print(e.folder, what);
    json_decref(config);
    esa_ctx_free(e.maker.ctx);
    experiment_free(&e);
    return status;
}
