/* cmd_experiment.c - `esa experiment`: its commands, and the options of `run` and `submit`.
 * SPDX-License-Identifier: Apache-2.0 */
#include "experiment/experiment.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int cmd_experiment(int argc, char **argv)
{
    static const cli_command table[] = {
        { "run", cmd_experiment_run,
          "calibrate, then time and compare videos at each budget; writes results/<tag>/" },
        { "submit", cmd_experiment_submit,
          "run an experiment as a Slurm job array, one task per budget" },
        { "collect", cmd_experiment_collect, "gather results/*/ into one table (CSV, Markdown)" },
        { "begin", cmd_experiment_begin,
          "for videos of another program: write or compare config.json" },
        { "finish", cmd_experiment_finish,
          "for videos of another program: write speed.json and quality.json" },
        { NULL, NULL, NULL },
    };
    return cli_dispatch(
        "esa experiment",
        "Whole experiments: calibration, speed and quality, on this machine or a cluster.", table,
        argc, argv);
}

void experiment_number(char out[32], double budget) { snprintf(out, 32, "%.4g", budget); }

/* A tag is the name of a folder and part of job names: letters, digits and . _ + -, and it must not
 * look like an option or a hidden folder. */
static int tag_is_good(const char *tag)
{
    static const char first[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_";
    if (!*tag || strlen(tag) > 200 || !strchr(first, *tag)) return 0;
    for (const char *c = tag; *c; c++)
        if (!strchr(first, *c) && !strchr(".+-", *c)) return 0;
    return 1;
}

static int no_pair(const cli_list *list, const char *path, const char *option)
{
    for (int i = 0; i < list->count; i++)
        for (int j = 0; j < i; j++)
            if (fabs(list->real[i] - list->real[j]) <
                0.0005) { /* mask files count in thousandths */
                return cli_usage("%s: %s names %g twice", path, option, list->real[i]);
            }
    return CLI_OK;
}

static int agree(experiment *e, const char *path, int numbered)
{
    int cached = 0;
    for (int i = 0; i < e->methods.count; i++) {
        e->methods.real[i] = (double)e->methods.whole[i];
        cached |= e->methods.whole[i] == 0;
    }
    if (!e->tag)
        return cli_usage("%s: --tag NAME is required: the results go to results/NAME", path);
    if (!tag_is_good(e->tag))
        return cli_usage(
            "%s: --tag was given '%s', expected letters, digits and . _ + -, a letter or "
            "digit first",
            path, e->tag);
    if (e->prompts_file && numbered)
        return cli_usage("%s: give --prompts or --num-prompts, not both", path);
    if (e->skip_calibrate && e->only_calibrate)
        return cli_usage("%s: give --skip-calibrate or --only-calibrate, not both", path);
    if (!cached && (e->skip_calibrate || e->only_calibrate || e->clip.p.masks))
        return cli_usage(
            "%s: --masks, --skip-calibrate and --only-calibrate go with --method cached", path);
    int status = no_pair(&e->budgets, path, "--budget");
    for (int i = 0; i < e->methods.count; i++)
        for (int j = 0; j < i; j++)
            if (e->methods.whole[i] == e->methods.whole[j])
                return cli_usage("%s: --method names one method twice", path);
    clip_request one = e->clip;
    for (int i = 0; i < e->methods.count && !status; i++) {
        one.method = clip_method(EXPERIMENT_METHODS, e->methods.whole[i]);
        status = clip_request_check(&one, path);
    }
    if (status) return status;
    snprintf(e->folder, sizeof e->folder, "%s/%s", e->results, e->tag);
    if (cached && e->clip.p.masks)
        snprintf(e->masks, sizeof e->masks, "%s", e->clip.p.masks);
    else if (cached)
        snprintf(e->masks, sizeof e->masks, "%.4300s/masks.safetensors", e->folder);
    if (strlen(e->folder) > 4000 || strlen(e->masks) > 4000)
        return cli_usage("%s: the name of a folder is too long", path);
    return CLI_OK;
}

/* The command as it can be typed again; NULL when out of memory. */
static char *spoken_command(const char *path, int argc, char **argv)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *memory = open_memstream(&text, &bytes);
    if (!memory) return NULL;
    fputs(path, memory);
    for (int i = 0; i < argc; i++) {
        fputc(' ', memory);
        cli_put_word(memory, argv[i]);
    }
    if (fclose(memory) == 0) return text;
    free(text);
    return NULL;
}

int experiment_parse(experiment *e, const char *path, const char *about, const cli_option *more,
                     int argc, char **argv, int *done)
{
    memset(e, 0, sizeof *e);
    e->clip = clip_request_default();
    e->results = "results";
    e->budgets = (cli_list){ 1, { 0.5 }, { 0 } };
    e->methods = (cli_list){ 1, { 0 }, { 0 } };
    e->num_prompts = 5;
    e->eval_prompts = "3";
    e->net = EVALUATE_ANY;
    const cli_option own[] = {
        { "--tag", CLI_TEXT, &e->tag, "NAME", 0, 0, 0,
          "name of the experiment and of its folder; required" },
        { "--budget", CLI_REALS, &e->budgets, "X,...", 0, 1, 0,
          "fractions of key blocks to keep (0.5)" },
        { "--budgets", CLI_REALS, &e->budgets, "X,...", 0, 1, 0, "the same as --budget" },
        { "--method", CLI_CHOICES, &e->methods, EXPERIMENT_METHODS, 0, 0, 0,
          "one or more, with commas; only cached is calibrated (cached)" },
        { "--prompts", CLI_TEXT, &e->prompts_file, "FILE", 0, 0, 0,
          "a file with calibration prompts, one per line (the built-in prompts)" },
        { "--num-prompts", CLI_INT, &e->num_prompts, "N", 1, CLI_PROMPTS, 0,
          "calibrate with the first N built-in prompts (5)" },
        { "--eval-prompts", CLI_TEXT, &e->eval_prompts, "N|FILE", 0, 0, 0,
          "prompts of the videos: N built-in ones that the calibration does not use, or a file "
          "(3)" },
        { "--seed", CLI_INT, &e->clip.p.seed, "N", 0, 9e15, 0, "seed of the noise (0)" },
        { "--skip-calibrate", CLI_FLAG, &e->skip_calibrate, NULL, 0, 0, 0,
          "use the mask file that exists already (off)" },
        { "--only-calibrate", CLI_FLAG, &e->only_calibrate, NULL, 0, 0, 0,
          "make the mask file and stop (off)" },
        { "--results", CLI_TEXT, &e->results, "DIR", 0, 0, 0,
          "the folder with the experiments (results)" },
        { "--lpips", CLI_TEXT, &e->lpips_weights, "FILE", 0, 0, 0,
          "weights of LPIPS, as for `esa evaluate` ($ESA_MODELS/lpips-NET.safetensors)" },
        { "--lpips-weights", CLI_TEXT, &e->lpips_weights, "FILE", 0, 0, 0, "the same as --lpips" },
        { "--lpips-net", CLI_CHOICE, &e->net, EVALUATE_NETS, 0, 0, 0,
          "network of LPIPS (that of the weights, else alex)" },
        { "--keep-frames", CLI_FLAG, &e->keep_frames, NULL, 0, 0, 0,
          "keep the uncompressed frames in frames/ (off)" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    cli_option mine[CLIP_MAX_OPTIONS], table[CLIP_MAX_OPTIONS];
    int used = 0;
    for (const cli_option *o = own; o->name; o++) mine[used++] = *o;
    for (const cli_option *o = more; o && o->name; o++) mine[used++] = *o;
    memset(&mine[used], 0, sizeof mine[used]);
    const int numbered = cli_given(argc, argv, "--num-prompts");
    const char *name = strncmp(path, "esa ", 4) == 0 ? path + 4 : path;
    if (cli_given(argc, argv, "--budget") && cli_given(argc, argv, "--budgets"))
        return cli_usage("%s: --budget and --budgets are the same option; give one", name);
    e->command = spoken_command(path, argc, argv);
    if (!e->command) return cli_fail("%s: out of memory", name);
    clip_options(table, mine, CLIP_OPTIONS_ALL & ~CLIP_OPTIONS_WORK, &e->clip);
    const int status = cli_options(path, "--tag NAME [options]", about, table, argc, argv, NULL,
                                   done);
    return status || *done ? status : agree(e, name, numbered);
}

void experiment_free(experiment *e)
{
    cli_prompts_free(&e->calibration);
    cli_prompts_free(&e->evaluation);
    free(e->command);
}
