/* cmd_experiment_submit.c - `esa experiment submit`: runs an experiment as a Slurm job array, one
 * task per budget.
 * SPDX-License-Identifier: Apache-2.0
 *
 * It writes two scripts: a job that calibrates once, and an array that waits for it, so that no GPU
 * idles during the calibration. Each task is `esa experiment run` with a tag of its own (TAG-b0.5).
 * It makes dense and sparse videos on the same GPU, and continues where it was if Slurm requeues
 * it. */
#include "experiment/experiment.h"
#include "core/folders.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const char what[] = "experiment submit";
#define MAX_OPTIONS 64 /* for sbatch */

typedef struct job {
    experiment *e;
    char **words; /* typed for `run`, without those that each script sets itself */
    int count;
    char **options; /* for sbatch: the words after -- */
    int option_count;
    int64_t gpus;
    char esa[4096];
} job;

/* ---------------------------------------------------------------- the scripts */

/* Writes " --name value", quoted if needed. */
static void put_option(FILE *out, const char *name, const char *value)
{
    fprintf(out, " %s ", name);
    cli_put_word(out, value);
}

static void put_budgets(FILE *out, const job *j, char between)
{
    for (int i = 0; i < j->e->budgets.count; i++) {
        char number[32];
        experiment_number(number, j->e->budgets.real[i]);
        if (i) fputc(between, out);
        fputs(number, out);
    }
}

/* The path of the logs is an argument of sbatch: #SBATCH lines have no quotes, and folders may have
 * any name. */
static void put_head(FILE *out, const job *j, const char *suffix, int array)
{
    fprintf(out, "#!/bin/bash\n#SBATCH --job-name=esa-%s%s\n", j->e->tag, suffix);
    if (j->gpus) fprintf(out, "#SBATCH --gres=gpu:%lld\n", (long long)j->gpus);
    fputs("#SBATCH --cpus-per-task=8\n#SBATCH --mem=64G\n#SBATCH --time=6:00:00\n", out);
    if (array) fprintf(out, "#SBATCH --array=0-%d\n", j->e->budgets.count - 1);
    fputs("#SBATCH --requeue\n#SBATCH --open-mode=append\n\n", out);
}

static void put_run(FILE *out, const job *j)
{
    fputs("exec ", out);
    cli_put_word(out, j->esa);
    fputs(" experiment run", out);
    for (int i = 0; i < j->count; i++) {
        fputc(' ', out);
        cli_put_word(out, j->words[i]);
    }
    put_option(out, "--results", j->e->results);
    if (j->e->masks[0]) put_option(out, "--masks", j->e->masks);
}

static void put_calibrate(FILE *out, const job *j)
{
    put_head(out, j, "-calibrate", 0);
    put_run(out, j);
    fprintf(out, " --only-calibrate --tag %s --budgets ", j->e->tag);
    put_budgets(out, j, ',');
    fputc('\n', out);
}

static void put_array(FILE *out, const job *j)
{
    put_head(out, j, "", 1);
    fputs("budgets=(", out);
    put_budgets(out, j, ' ');
    fputs(")\nbudget=${budgets[$SLURM_ARRAY_TASK_ID]}\n", out);
    put_run(out, j);
    fprintf(out, "%s --tag %s-b\"$budget\" --budget \"$budget\"\n",
            j->e->masks[0] ? " --skip-calibrate" : "", j->e->tag);
}

static char *script(const job *j, void (*put)(FILE *, const job *), size_t *bytes)
{
    char *text = NULL;
    FILE *memory = open_memstream(&text, bytes);
    if (memory) put(memory, j);
    if (memory && fclose(memory) == 0) return text;
    cli_fail("%s: out of memory", what);
    free(text);
    return NULL;
}

/* ---------------------------------------------------------------- sbatch */

/* Runs a command of shell words and reads the first line it prints. Its messages go to our stderr.
 * Returns its exit status, or -1. */
static int run_words(char *line, int size, const char *const *words, int count)
{
    char *command = NULL;
    size_t bytes = 0;
    FILE *memory = open_memstream(&command, &bytes);
    if (memory) fprintf(memory, "command -v %s >/dev/null || exit 127;", words[0]);
    for (int i = 0; memory && i < count; i++) {
        fputc(' ', memory);
        cli_put_word(memory, words[i]);
    }
    fflush(stdout);
    FILE *child = memory && fclose(memory) == 0 ? popen(command, "r") : NULL;
    free(command);
    if (!child) return -1;
    if (!fgets(line, size, child)) line[0] = 0;
    const int ended = pclose(child);
    return WIFEXITED(ended) ? WEXITSTATUS(ended) : -1;
}

/* Submits a script and reads the number of the job. */
static int sbatch(const job *j, char id[64], const char *script_path, const char *suffix,
                  const char *dependency)
{
    const char *word[MAX_OPTIONS + 8];
    char answer[256] = "", log[EXPERIMENT_PATH], after[128];
    int n = 0;
    snprintf(log, sizeof log, "--output=%.4200s/logs/%%x-%s.log", j->e->folder, suffix);
    word[n++] = "sbatch";
    word[n++] = "--parsable";
    word[n++] = log;
    if (dependency) {
        snprintf(after, sizeof after, "--dependency=afterok:%s", dependency);
        word[n++] = after;
        word[n++] = "--kill-on-invalid-dep=yes"; /* a failed calibration ends the array too */
    }
    for (int i = 0; i < j->option_count; i++) word[n++] = j->options[i];
    word[n++] = script_path;
    const int ended = run_words(answer, sizeof answer, word, n);
    if (ended == 127)
        return cli_fail("%s: sbatch was not found; is this a machine with Slurm? (--dry-run prints "
                        "the scripts)",
                        what);
    if (ended != 0) return cli_fail("%s: sbatch refused '%s'", what, script_path);
    answer[strcspn(answer, ";\n")] = 0; /* "123" or "123;cluster" */
    if (!answer[0] || strspn(answer, "0123456789") != strlen(answer))
        return cli_fail("%s: sbatch answered '%s', which is not a job number", what, answer);
    snprintf(id, 64, "%.60s", answer);
    return CLI_OK;
}

static int submit(const job *j, const char *calibration, size_t calibration_bytes,
                  const char *array, size_t array_bytes)
{
    char path[EXPERIMENT_PATH], first[64] = "", second[64] = "";
    experiment_path(j->e, path, "logs");
    int status = cli_make_folders(path, NULL, what);
    if (!status && calibration) {
        experiment_path(j->e, path, "calibrate.sbatch");
        status = cli_write_file(path, calibration, calibration_bytes);
        if (!status) status = sbatch(j, first, path, "%j", NULL);
        if (!status) printf("job %s calibrates: %s\n", first, j->e->masks);
    }
    if (!status) {
        experiment_path(j->e, path, "array.sbatch");
        status = cli_write_file(path, array, array_bytes);
        if (!status) status = sbatch(j, second, path, "%A_%a", first[0] ? first : NULL);
        if (status && first[0]) { /* without the array the calibration has no use */
            const char *const cancel[] = { "scancel", first };
            run_words(path, sizeof path, cancel, 2);
        }
    }
    if (!status)
        printf("job %s: %d task%s%s, results in %s/%s-b*; logs in %s/logs; `esa experiment "
               "collect` gathers them\n",
               second, j->e->budgets.count, j->e->budgets.count > 1 ? "s" : "",
               first[0] ? " behind it" : "", j->e->results, j->e->tag, j->e->folder);
    return status;
}

/* ---------------------------------------------------------------- the command */

/* The words every script passes on: those typed, without those that each script sets itself. */
static void keep_words(job *j, int argc, char **argv)
{
    static const char *const own[] = { "--skip-calibrate", "--dry-run", "--budget",
                                       "--budgets",        "--tag",     "--masks",
                                       "--results",        "--gpus" };
    for (int i = 0; i < argc; i++) {
        size_t k = 0;
        while (k < 8 && !cli_given(1, &argv[i], own[k])) k++;
        if (k == 8)
            j->words[j->count++] = argv[i];
        else if (k >= 2 && !strchr(argv[i], '=')) /* the first two are flags */
            i++;
    }
}

/* Finds what would end every task at once before anything is submitted. */
static int check_early(const experiment *e)
{
    char folder[4200];
    const int status = cli_model_find(folder, sizeof folder, e->clip.open.model, what);
    if (status) return status;
    const int numbered = strspn(e->eval_prompts, "0123456789") == strlen(e->eval_prompts);
    const char *files[] = { e->prompts_file, numbered ? NULL : e->eval_prompts, e->lpips_weights,
                            e->skip_calibrate ? e->masks : NULL };
    for (int i = 0; i < 4; i++)
        if (files[i] && access(files[i], R_OK) != 0)
            return cli_fail("%s: cannot read '%s': %s", what, files[i], strerror(errno));
    return CLI_OK;
}

/* Prints the scripts if dry, otherwise submits them. */
static int make_scripts(job *j, int dry)
{
    const experiment *e = j->e;
    const ssize_t n = readlink("/proc/self/exe", j->esa, sizeof j->esa - 1);
    if (n <= 0) snprintf(j->esa, sizeof j->esa, "esa");
    size_t calibration_bytes = 0, array_bytes = 0;
    const int calibrates = e->masks[0] && !e->skip_calibrate;
    char *calibration = calibrates ? script(j, put_calibrate, &calibration_bytes) : NULL,
         *array = script(j, put_array, &array_bytes);
    int status = CLI_OK;
    if (!array || (calibrates && !calibration))
        status = CLI_FAILED;
    else if (!dry)
        status = submit(j, calibration, calibration_bytes, array, array_bytes);
    else {
        if (calibration) printf("# %s/calibrate.sbatch\n%s\n", e->folder, calibration);
        printf("# %s/array.sbatch%s\n%s", e->folder,
               calibration ? ", once that has ended well" : "", array);
    }
    free(calibration);
    free(array);
    return status;
}

int cmd_experiment_submit(int argc, char **argv)
{
    experiment e;
    job j = { .e = &e, .gpus = 1 };
    int dry = 0, done = 0, own = 0;
    while (own < argc && strcmp(argv[own], "--") != 0) own++;
    j.options = argv + (own < argc ? own + 1 : own);
    j.option_count = argc - own - (own < argc);
    const cli_option more[] = {
        { "--gpus", CLI_INT, &j.gpus, "N", 0, 64, 0, "GPUs per task; 0: CPU only (1)" },
        { "--dry-run", CLI_FLAG, &dry, NULL, 0, 0, 0,
          "print the scripts and submit nothing (off)" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    char **copy = calloc((size_t)own + 1, sizeof *copy);
    j.words = calloc((size_t)own + 1, sizeof *j.words);
    if (!copy || !j.words) {
        free(copy);
        free(j.words);
        return cli_fail("%s: out of memory", what);
    }
    memcpy(copy, argv, (size_t)own * sizeof *copy); /* parsing reorders words */
    int status = experiment_parse(
        &e, "esa experiment submit",
        "Writes and submits a Slurm job array with one task per budget, which waits for one job "
        "that calibrates.\n"
        "Takes the options of `esa experiment run`. What follows -- goes to sbatch as it is:\n"
        "esa experiment submit --tag x --budgets 0.7,0.5 -- --partition=a100 --time=2:00:00",
        more, own, copy, &done);
    if (!status && !done && e.only_calibrate)
        status = cli_usage("%s: the first job calibrates; only `esa experiment run` takes "
                           "--only-calibrate",
                           what);
    if (!status && !done && j.option_count > MAX_OPTIONS)
        status = cli_usage("%s: %d options for sbatch, at most %d are possible", what,
                           j.option_count, MAX_OPTIONS);
    if (!status && !done) status = check_early(&e);
    if (!status && !done) {
        keep_words(&j, own, argv);
        status = make_scripts(&j, dry);
    }
    free(copy);
    free(j.words);
    experiment_free(&e);
    return status;
}
