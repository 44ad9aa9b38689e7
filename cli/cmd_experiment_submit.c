/* cmd_experiment_submit.c - `esa experiment submit`: an experiment as a Slurm job array, one task
 * per budget.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Two scripts: a job that calibrates once, and an array that waits for it, so that no GPU idles
 * while another calibrates. Each task is `esa experiment run` with a tag of its own (TAG-b0.5),
 * makes its dense videos on the GPU its sparse ones run on, and goes on where it was when Slurm
 * requeues it. */
#define _POSIX_C_SOURCE 200809L /* open_memstream */
#include "experiment/experiment.h"
#include "core/folders.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const char what[] = "experiment submit";

typedef struct job {
    experiment *e;
    char **words; /* what was typed for `run`, without what each script says itself */
    int count;
    char **options; /* of sbatch, behind -- */
    int option_count;
    int64_t gpus;
    char esa[4096];
} job;

/* ---------------------------------------------------------------- the scripts */

/* " --name value", quoted as need be. */
static void put_option(FILE *out, const char *name, const char *value)
{
    fprintf(out, " %s ", name);
    experiment_put_word(out, value);
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

/* Where logs go is said on sbatch's command line: #SBATCH lines know no quotes, and folders may
 * have any name. */
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
    experiment_put_word(out, j->esa);
    fputs(" experiment run", out);
    for (int i = 0; i < j->count; i++) {
        fputc(' ', out);
        experiment_put_word(out, j->words[i]);
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

/* Runs sbatch and reads the job's number from its answer. What it says on stderr the user sees. */
static int sbatch(const job *j, char id[64], const char *script_path, const char *suffix,
                  const char *dependency)
{
    char *arg[64 + 8], answer[256] = "", log[EXPERIMENT_PATH], after[128];
    int n = 0, pipes[2], exited = 0;
    snprintf(log, sizeof log, "--output=%.4200s/logs/%%x-%s.log", j->e->folder, suffix);
    arg[n++] = "sbatch";
    arg[n++] = "--parsable";
    arg[n++] = log;
    if (dependency) {
        snprintf(after, sizeof after, "--dependency=afterok:%s", dependency);
        arg[n++] = after;
        arg[n++] = "--kill-on-invalid-dep=yes"; /* a calibration that failed ends the array too */
    }
    for (int i = 0; i < j->option_count; i++) arg[n++] = j->options[i];
    arg[n++] = (char *)script_path;
    arg[n] = NULL;
    if (pipe(pipes) != 0) return cli_fail("%s: %s", what, strerror(errno));
    fflush(stdout);
    const pid_t child = fork();
    if (child < 0) return cli_fail("%s: %s", what, strerror(errno));
    if (child == 0) {
        dup2(pipes[1], STDOUT_FILENO);
        close(pipes[0]);
        close(pipes[1]);
        execvp(arg[0], arg);
        _exit(errno == ENOENT ? 127 : 126);
    }
    close(pipes[1]);
    size_t used = 0;
    for (ssize_t got; used < sizeof answer - 1 &&
                      (got = read(pipes[0], answer + used, sizeof answer - 1 - used)) != 0;) {
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) break;
        used += (size_t)got;
    }
    close(pipes[0]);
    while (waitpid(child, &exited, 0) < 0 && errno == EINTR) continue;
    if (WIFEXITED(exited) && WEXITSTATUS(exited) == 127)
        return cli_fail("%s: sbatch was not found; is this a machine with Slurm? (--dry-run prints "
                        "the scripts)",
                        what);
    if (!WIFEXITED(exited) || WEXITSTATUS(exited) != 0)
        return cli_fail("%s: sbatch refused '%s'", what, script_path);
    /* "123" or "123;cluster" */
    answer[strcspn(answer, ";\n")] = 0;
    if (!answer[0] || strspn(answer, "0123456789") != strlen(answer))
        return cli_fail("%s: sbatch answered '%s', which is no job number", what, answer);
    snprintf(id, 64, "%.60s", answer);
    return CLI_OK;
}

/* The calibration waits in vain without its array. */
static void cancel(const char *id)
{
    const pid_t child = fork();
    if (child == 0) {
        execlp("scancel", "scancel", id, (char *)NULL);
        _exit(127);
    }
    if (child > 0) waitpid(child, NULL, 0);
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
        if (status && first[0]) cancel(first);
    }
    if (!status)
        printf("job %s: %d task%s%s, results in %s/%s-b*; logs in %s/logs; `esa experiment "
               "collect` gathers them\n",
               second, j->e->budgets.count, j->e->budgets.count > 1 ? "s" : "",
               first[0] ? " behind it" : "", j->e->results, j->e->tag, j->e->folder);
    return status;
}

/* ---------------------------------------------------------------- the command */

/* 1 if word is this option; *skip: how many words it takes. */
static int is_option(const char *word, const char *name, int takes, int *skip)
{
    const size_t n = strlen(name);
    if (strncmp(word, name, n) != 0 || (word[n] != 0 && word[n] != '=')) return 0;
    *skip = takes && word[n] == 0 ? 2 : 1;
    return 1;
}

/* What every script passes on: the words as typed, without those it says itself. */
static void keep_words(job *j, int argc, char **argv)
{
    static const struct {
        const char *name;
        int takes;
    } own[] = {
        { "--budget", 1 },  { "--budgets", 1 },        { "--tag", 1 },  { "--masks", 1 },
        { "--results", 1 }, { "--skip-calibrate", 0 }, { "--gpus", 1 }, { "--dry-run", 0 },
    };
    for (int i = 0; i < argc;) {
        int skip = 0;
        for (size_t k = 0; k < sizeof own / sizeof own[0] && !skip; k++)
            is_option(argv[i], own[k].name, own[k].takes, &skip);
        if (!skip) j->words[j->count++] = argv[i];
        i += skip ? skip : 1;
    }
}

/* What would end every task at once is better said here than in a log of tomorrow. */
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

int cmd_experiment_submit(int argc, char **argv)
{
    experiment e;
    job j = { .e = &e, .gpus = 1 };
    int dry = 0, done = 0, own = 0;
    while (own < argc && strcmp(argv[own], "--") != 0) own++;
    j.options = argv + (own < argc ? own + 1 : own);
    j.option_count = argc - own - (own < argc);
    const cli_option more[] = {
        { "--gpus", CLI_INT, &j.gpus, "N", 0, 64, 0, "per task; 0: processors alone (1)" },
        { "--dry-run", CLI_FLAG, &dry, NULL, 0, 0, 0, "print the scripts, submit nothing" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    char **copy = calloc((size_t)own + 1, sizeof *copy);
    j.words = calloc((size_t)own + 1, sizeof *j.words);
    if (!copy || !j.words) {
        free(copy);
        free(j.words);
        return cli_fail("%s: out of memory", what);
    }
    memcpy(copy, argv, (size_t)own * sizeof *copy); /* parsing moves words about */
    int status = experiment_parse(
        &e, "esa experiment submit",
        "Writes and submits a Slurm job array, one task per budget, behind one job that "
        "calibrates. Options of\n"
        "`esa experiment run`; what follows -- goes to sbatch as it is:\n"
        "esa experiment submit --tag x --budgets 0.7,0.5 -- --partition=a100 --time=2:00:00",
        more, own, copy, &done);
    if (!status && !done && e.only_calibrate)
        status = cli_usage("%s: the first job calibrates; only `esa experiment run` takes "
                           "--only-calibrate",
                           what);
    if (!status && !done && j.option_count > 64)
        status = cli_usage("%s: %d options for sbatch, at most 64 are possible", what,
                           j.option_count);
    if (!status && !done) status = check_early(&e);
    if (!status && !done) {
        const ssize_t n = readlink("/proc/self/exe", j.esa, sizeof j.esa - 1);
        if (n > 0)
            j.esa[n] = 0;
        else
            snprintf(j.esa, sizeof j.esa, "esa");
        keep_words(&j, own, argv);
        size_t calibration_bytes = 0, array_bytes = 0;
        const int calibrates = e.masks[0] && !e.skip_calibrate;
        char *calibration = calibrates ? script(&j, put_calibrate, &calibration_bytes) : NULL,
             *array = script(&j, put_array, &array_bytes);
        if (!array || (calibrates && !calibration))
            status = CLI_FAILED;
        else if (!dry)
            status = submit(&j, calibration, calibration_bytes, array, array_bytes);
        else {
            if (calibration) printf("# %s/calibrate.sbatch\n%s\n", e.folder, calibration);
            printf("# %s/array.sbatch%s\n%s", e.folder,
                   calibration ? ", once that has ended well" : "", array);
        }
        free(calibration);
        free(array);
    }
    free(copy);
    free(j.words);
    experiment_free(&e);
    return status;
}
