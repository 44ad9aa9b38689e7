/* cmd_experiment_collect.c - `esa experiment collect`: the results of many experiments in one
 * table.
 * SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L /* open_memstream */
#include "experiment/experiment.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char what[] = "experiment collect";

#define TEXT_COLUMNS 4
#define COLUMNS      15
enum { PSNR = 7, LPIPS = 9 }; /* among the numbers */
static const char *const heads[COLUMNS] = { "tag",    "model",   "size",           "variant",
                                            "steps",  "clips",   "budget",         "density",
                                            "s/step", "speedup", "sparse speedup", "PSNR",
                                            "SSIM",   "LPIPS",   "flicker" };
static const char *const names[COLUMNS] = { "tag",
                                            "model",
                                            "size",
                                            "variant",
                                            "steps",
                                            "clips",
                                            "budget",
                                            "density",
                                            "seconds_per_step",
                                            "speedup",
                                            "speedup_without_warmup",
                                            "psnr",
                                            "ssim",
                                            "lpips",
                                            "flicker" };

typedef struct row {
    char text[TEXT_COLUMNS][256];
    double number[COLUMNS - TEXT_COLUMNS];
    int equal; /* every video equals its dense one: PSNR is infinite */
} row;

typedef struct rows {
    row *row;
    int64_t count;
} rows;

/* ---------------------------------------------------------------- reading */

static const json_t *variant_of(const json_t *file, const char *name)
{
    size_t i;
    json_t *v;
    json_array_foreach(cli_json_at(file, "variants"), i, v)
    {
        const char *own = cli_json_string(v, "name");
        if (own && strcmp(own, name) == 0) return v;
    }
    return NULL;
}

static int add_row(rows *out, const json_t *speed, const json_t *quality, const json_t *v)
{
    row *grown = realloc(out->row, (size_t)(out->count + 1) * sizeof *grown), r;
    if (!grown) return cli_fail("%s: out of memory", what);
    out->row = grown;
    memset(&r, 0, sizeof r);
    const char *name = cli_json_string(v, "name"), *tag = cli_json_string(speed, "tag"),
               *model = cli_json_string(speed, "model");
    const json_t *q = variant_of(quality, name ? name : "");
    snprintf(r.text[0], sizeof r.text[0], "%s", tag ? tag : "?");
    snprintf(r.text[1], sizeof r.text[1], "%s", model ? model : "?");
    snprintf(r.text[2], sizeof r.text[2], "%gx%gx%g", cli_json_number(speed, "frames"),
             cli_json_number(speed, "height"), cli_json_number(speed, "width"));
    snprintf(r.text[3], sizeof r.text[3], "%s", name ? name : "?");
    const double clips = cli_json_number(v, "clips");
    const double numbers[] = { cli_json_number(speed, "steps"),
                               clips,
                               cli_json_number(v, "budget"),
                               cli_json_number(v, "density"),
                               cli_json_number(v, "step_seconds.median"),
                               cli_json_number(v, "speedup"),
                               cli_json_number(v, "speedup_without_warmup"),
                               cli_json_number(q, "mean.psnr"),
                               cli_json_number(q, "mean.ssim"),
                               cli_json_number(q, "mean.lpips"),
                               cli_json_number(q, "mean.flicker") };
    memcpy(r.number, numbers, sizeof numbers);
    r.equal = q && cli_json_number(q, "identical") == clips;
    out->row[out->count++] = r;
    return CLI_OK;
}

static int load(json_t **value, const char *folder, const char *name, const char *command)
{
    char path[EXPERIMENT_PATH];
    struct stat about;
    snprintf(path, sizeof path, "%.4300s/%s", folder, name);
    *value = NULL;
    if (stat(path, &about) != 0) return CLI_OK;
    if (!(*value = cli_json_load(path, NULL, 0, command))) return CLI_FAILED;
    if (cli_json_number(*value, "format") == EXPERIMENT_FORMAT) return CLI_OK;
    json_decref(*value);
    *value = NULL;
    return cli_fail("%s: '%s' is not of the format this esa reads", command, path);
}

/* The rows of one folder; *complete: it holds both results. Folders without an experiment give
 * none. */
static int read_folder(rows *out, const char *folder, const char *command, int *complete)
{
    json_t *speed = NULL, *quality = NULL;
    int status = load(&speed, folder, "speed.json", command);
    if (!status) status = load(&quality, folder, "quality.json", command);
    size_t i;
    json_t *v;
    json_array_foreach(cli_json_at(speed, "variants"), i, v) if (!status)
        status = add_row(out, speed, quality, v);
    *complete = speed && quality;
    json_decref(speed);
    json_decref(quality);
    return status;
}

static int ascending(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* The folders in results, by name. */
static int list_folders(char ***names_out, int64_t *count, const char *results)
{
    DIR *list = opendir(results);
    if (!list) return cli_fail("%s: cannot read '%s': %s", what, results, strerror(errno));
    int status = CLI_OK;
    for (struct dirent *d; !status && (d = readdir(list)) != NULL;) {
        char path[EXPERIMENT_PATH], **grown;
        struct stat about;
        if (d->d_name[0] == '.' ||
            snprintf(path, sizeof path, "%s/%s", results, d->d_name) >= (int)sizeof path)
            continue;
        if (stat(path, &about) != 0 || !S_ISDIR(about.st_mode)) continue;
        char *copy = malloc(strlen(path) + 1);
        grown = copy ? realloc(*names_out, (size_t)(*count + 1) * sizeof *grown) : NULL;
        if (!grown) {
            free(copy);
            status = cli_fail("%s: out of memory", what);
            break;
        }
        *names_out = grown;
        grown[(*count)++] = strcpy(copy, path);
    }
    closedir(list);
    if (*count) qsort(*names_out, (size_t)*count, sizeof **names_out, ascending);
    return status;
}

/* ---------------------------------------------------------------- writing */

/* A cell as people read it. */
static void show(char out[256], const row *r, int column)
{
    static const struct {
        int digits;
        const char *unit;
    } forms[COLUMNS - TEXT_COLUMNS] = {
        { 0, "" },  { 0, "" },    { -1, "" }, { 3, "" }, { 3, "" }, { 2, "x" },
        { 2, "x" }, { 2, " dB" }, { 4, "" },  { 4, "" }, { 2, "" },
    };
    const int n = column - TEXT_COLUMNS;
    if (n < 0)
        snprintf(out, 256, "%s", r->text[column]);
    else if (n == PSNR && r->equal)
        snprintf(out, 256, "equal");
    else if (!isfinite(r->number[n]))
        snprintf(out, 256, "-");
    else if (forms[n].digits < 0)
        snprintf(out, 256, "%.4g", r->number[n]);
    else
        snprintf(out, 256, "%.*f%s", forms[n].digits, r->number[n], forms[n].unit);
}

/* LPIPS needs weights that not everybody has: without a single value its column would only be in
 * the way. */
static int is_shown(const rows *all, int column)
{
    if (column != TEXT_COLUMNS + LPIPS) return 1;
    for (int64_t i = 0; i < all->count; i++)
        if (isfinite(all->row[i].number[LPIPS])) return 1;
    return 0;
}

static void print_table(const rows *all)
{
    char cell[256];
    int shown = 0;
    for (int c = 0; c < COLUMNS; c++) shown += is_shown(all, c);
    cli_table *table = cli_table_new(shown, TEXT_COLUMNS);
    for (int c = 0; c < COLUMNS; c++)
        if (is_shown(all, c)) cli_cell(table, "%s", heads[c]);
    for (int64_t i = 0; i < all->count; i++)
        for (int c = 0; c < COLUMNS; c++) {
            if (!is_shown(all, c)) continue;
            show(cell, &all->row[i], c);
            cli_cell(table, "%s", cell);
        }
    cli_table_print(table, stdout);
}

static void write_markdown(FILE *out, const rows *all)
{
    char cell[256];
    for (int c = 0; c < COLUMNS; c++)
        if (is_shown(all, c)) fprintf(out, "| %s ", heads[c]);
    fputs("|\n", out);
    for (int c = 0; c < COLUMNS; c++)
        if (is_shown(all, c)) fputs(c < TEXT_COLUMNS ? "|---" : "|---:", out);
    fputs("|\n", out);
    for (int64_t i = 0; i < all->count; i++) {
        for (int c = 0; c < COLUMNS; c++) {
            if (!is_shown(all, c)) continue;
            show(cell, &all->row[i], c);
            fputs("| ", out);
            for (const char *at = cell; *at; at++) {
                if (*at == '|') fputc('\\', out);
                fputc(*at, out);
            }
            fputc(' ', out);
        }
        fputs("|\n", out);
    }
}

/* All columns, all digits; empty: not known; inf: the PSNR of equal videos. */
static void write_csv(FILE *out, const rows *all)
{
    for (int c = 0; c < COLUMNS; c++) fprintf(out, "%s%s", c ? "," : "", names[c]);
    fputc('\n', out);
    for (int64_t i = 0; i < all->count; i++) {
        const row *r = &all->row[i];
        for (int c = 0; c < COLUMNS; c++) {
            const int n = c - TEXT_COLUMNS;
            if (c) fputc(',', out);
            if (n < 0 && !strpbrk(r->text[c], ",\"\n\r"))
                fputs(r->text[c], out);
            else if (n < 0) {
                fputc('"', out);
                for (const char *at = r->text[c]; *at; at++) {
                    if (*at == '"') fputc('"', out);
                    fputc(*at, out);
                }
                fputc('"', out);
            } else if (n == PSNR && r->equal)
                fputs("inf", out);
            else if (isfinite(r->number[n]))
                fprintf(out, "%.9g", r->number[n]);
        }
        fputc('\n', out);
    }
}

static int save(const char *path, const rows *all, void (*write)(FILE *, const rows *))
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *memory = open_memstream(&text, &bytes);
    if (memory) write(memory, all);
    const int failed = !memory || fclose(memory) != 0;
    const int status = failed ? cli_fail("%s: out of memory", what)
                              : cli_write_file(path, text, bytes);
    free(text);
    return status;
}

/* ---------------------------------------------------------------- the commands */

int experiment_print(const char *folder, const char *command)
{
    rows all = { NULL, 0 };
    int complete = 0;
    const int status = read_folder(&all, folder, command, &complete);
    if (!status) print_table(&all);
    free(all.row);
    return status;
}

int cmd_experiment_collect(int argc, char **argv)
{
    const char *results = "results", *csv = NULL, *markdown = NULL;
    int done, incomplete = 0;
    const cli_option options[] = {
        { "--results", CLI_TEXT, &results, "DIR", 0, 0, 0, "where experiments are kept (results)" },
        { "--csv", CLI_OUTPUT, &csv, "FILE", 0, 0, 0, "also write the table as CSV, all digits" },
        { "--markdown", CLI_TEXT, &markdown, "FILE", 0, 0, 0, "also write it as Markdown" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int status = cli_options("esa experiment collect", "[options]",
                             "Gathers the results of all experiments into one table. Experiments "
                             "that are not complete are named and, as far as\n"
                             "they are, shown.",
                             options, argc, argv, NULL, &done);
    if (status || done) return status;
    char **folder = NULL;
    int64_t count = 0;
    rows all = { NULL, 0 };
    status = list_folders(&folder, &count, results);
    for (int64_t i = 0; i < count && !status; i++) {
        char config[EXPERIMENT_PATH];
        struct stat about;
        int complete = 0;
        status = read_folder(&all, folder[i], what, &complete);
        snprintf(config, sizeof config, "%.4300s/config.json", folder[i]);
        if (status || complete || stat(config, &about) != 0) continue;
        fprintf(stderr, "%s is not complete: running, or stopped\n", folder[i]);
        incomplete++;
    }
    for (int64_t i = 0; i < count; i++) free(folder[i]);
    free(folder);
    if (!status && all.count == 0)
        status = cli_fail("%s: '%s' holds no results%s", what, results,
                          incomplete ? " yet" : " (esa experiment run makes them)");
    if (!status && csv) status = save(csv, &all, write_csv);
    if (!status && markdown) status = save(markdown, &all, write_markdown);
    if (!status) print_table(&all);
    free(all.row);
    return status;
}
