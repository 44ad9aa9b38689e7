/* cmd_experiment_collect.c - `esa experiment collect`: the results of many experiments in one
 * table.
 * SPDX-License-Identifier: Apache-2.0 */
#include "experiment/experiment.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char what[] = "experiment collect";

typedef struct row {
    json_t *part[3]; /* speed.json, and the variant in speed.json and in quality.json; owned */
} row;
enum { SPEED, VARIANT, QUALITY };

typedef struct rows {
    row *row;
    int64_t count;
} rows;

/* The columns: head in tables, name in CSV files, where the value is, and its form for people. */
static const struct {
    const char *head, *name;
    int part;
    const char *path;
    int digits; /* -1: as many as needed */
    const char *unit;
} columns[] = {
    { "tag", "tag", SPEED, "tag", 0, "" },
    { "model", "model", SPEED, "model", 0, "" },
    { "size", "size", SPEED, NULL, 0, "" },
    { "variant", "variant", VARIANT, "name", 0, "" },
    { "steps", "steps", SPEED, "steps", 0, "" },
    { "clips", "clips", VARIANT, "clips", 0, "" },
    { "budget", "budget", VARIANT, "budget", -1, "" },
    { "density", "density", VARIANT, "density", 3, "" },
    { "s/step", "seconds_per_step", VARIANT, "step_seconds.median", 3, "" },
    { "speedup", "speedup", VARIANT, "speedup", 2, "x" },
    { "sparse speedup", "speedup_without_warmup", VARIANT, "speedup_without_warmup", 2, "x" },
    { "PSNR", "psnr", QUALITY, "mean.psnr", 2, " dB" },
    { "SSIM", "ssim", QUALITY, "mean.ssim", 4, "" },
    { "LPIPS", "lpips", QUALITY, "mean.lpips", 4, "" },
    { "flicker", "flicker", QUALITY, "mean.flicker", 2, "" },
};
enum { SIZE = 2, TEXTS = 4, PSNR = 11, LPIPS = 13, COLUMNS = sizeof columns / sizeof columns[0] };

static double number(const row *r, int c)
{
    return cli_json_number(r->part[columns[c].part], columns[c].path);
}

static void text(char out[256], const row *r, int c)
{
    const json_t *from = r->part[columns[c].part];
    const char *found = c == SIZE ? NULL : cli_json_string(from, columns[c].path);
    if (c == SIZE)
        snprintf(out, 256, "%gx%gx%g", cli_json_number(from, "frames"),
                 cli_json_number(from, "height"), cli_json_number(from, "width"));
    else
        snprintf(out, 256, "%s", found ? found : "?");
}

/* Every video equals its dense one: the PSNR is infinite. */
static int is_equal(const row *r)
{
    return cli_json_number(r->part[QUALITY], "identical") ==
           cli_json_number(r->part[VARIANT], "clips");
}

/* ---------------------------------------------------------------- reading */

static json_t *variant_of(const json_t *file, const char *name)
{
    size_t i;
    json_t *v;
    json_array_foreach(cli_json_at(file, "variants"), i, v)
    {
        const char *own = cli_json_string(v, "name");
        if (name && own && strcmp(own, name) == 0) return v;
    }
    return NULL;
}

static int add_row(rows *out, json_t *speed, const json_t *quality, json_t *v)
{
    row *grown = realloc(out->row, (size_t)(out->count + 1) * sizeof *grown);
    if (!grown) return cli_fail("%s: out of memory", what);
    out->row = grown;
    json_t *q = variant_of(quality, cli_json_string(v, "name"));
    grown[out->count++] = (row){ { json_incref(speed), json_incref(v), json_incref(q) } };
    return CLI_OK;
}

static void rows_free(rows *all)
{
    for (int64_t i = 0; i < all->count; i++)
        for (int k = 0; k < 3; k++) json_decref(all->row[i].part[k]);
    free(all->row);
}

static int load(json_t **value, const char *folder, const char *name, const char *command)
{
    char path[EXPERIMENT_PATH];
    snprintf(path, sizeof path, "%.4300s/%s", folder, name);
    *value = NULL;
    if (cli_is_missing(path)) return CLI_OK;
    if (!(*value = cli_json_load(path, NULL, 0, command))) return CLI_FAILED;
    if (cli_json_number(*value, "format") == EXPERIMENT_FORMAT) return CLI_OK;
    json_decref(*value);
    *value = NULL;
    return cli_fail("%s: '%s' does not have the format this esa reads", command, path);
}

/* Adds the rows of one folder, none if it holds no experiment. *complete: it holds both results. */
static int read_folder(rows *out, const char *folder, const char *command, int *complete)
{
    json_t *speed = NULL, *quality = NULL, *v;
    size_t i;
    int status = load(&speed, folder, "speed.json", command);
    if (!status) status = load(&quality, folder, "quality.json", command);
    json_array_foreach(cli_json_at(speed, "variants"), i, v)
    {
        if (!status) status = add_row(out, speed, quality, v);
    }
    *complete = speed && quality;
    json_decref(speed);
    json_decref(quality);
    return status;
}

static int is_visible(const struct dirent *d) { return d->d_name[0] != '.'; }

/* Adds the rows of every folder in results, by name, and counts those that are not complete. */
static int read_all(rows *out, const char *results, int *incomplete)
{
    struct dirent **names = NULL;
    const int count = scandir(results, &names, is_visible, alphasort);
    if (count < 0) return cli_fail("%s: cannot read '%s': %s", what, results, strerror(errno));
    int status = CLI_OK, complete = 0;
    for (int i = 0; i < count; i++) {
        char folder[EXPERIMENT_PATH], config[EXPERIMENT_PATH + 16];
        struct stat about;
        const int n = snprintf(folder, sizeof folder, "%s/%s", results, names[i]->d_name);
        free(names[i]);
        if (status || n >= (int)sizeof folder || stat(folder, &about) != 0 ||
            !S_ISDIR(about.st_mode))
            continue;
        status = read_folder(out, folder, what, &complete);
        snprintf(config, sizeof config, "%s/config.json", folder);
        if (status || complete || stat(config, &about) != 0) continue;
        fprintf(stderr, "%s is not complete: running, or stopped\n", folder);
        ++*incomplete;
    }
    free(names);
    return status;
}

/* ---------------------------------------------------------------- writing */

/* A cell as people read it. */
static void show(char out[256], const row *r, int c)
{
    const double x = c < TEXTS ? (double)NAN : number(r, c);
    if (c < TEXTS)
        text(out, r, c);
    else if (c == PSNR && is_equal(r))
        snprintf(out, 256, "equal");
    else if (!isfinite(x))
        snprintf(out, 256, "-");
    else if (columns[c].digits < 0)
        snprintf(out, 256, "%.4g", x);
    else
        snprintf(out, 256, "%.*f%s", columns[c].digits, x, columns[c].unit);
}

/* LPIPS needs weights that few users have: the column is shown if it holds a value. */
static int is_shown(const rows *all, int c)
{
    int shown = c != LPIPS;
    for (int64_t i = 0; i < all->count && !shown; i++) shown = isfinite(number(&all->row[i], c));
    return shown;
}

static void print_table(const rows *all)
{
    char cell[256];
    int shown = 0;
    for (int c = 0; c < COLUMNS; c++) shown += is_shown(all, c);
    cli_table *table = cli_table_new(shown, TEXTS);
    for (int64_t i = -1; i < all->count; i++)
        for (int c = 0; c < COLUMNS; c++) {
            if (!is_shown(all, c)) continue;
            if (i >= 0) show(cell, &all->row[i], c);
            cli_cell(table, "%s", i < 0 ? columns[c].head : cell);
        }
    cli_table_print(table, stdout);
}

/* text with every character `special` preceded by `escape`. */
static void put_escaped(FILE *out, const char *text, char special, char escape)
{
    for (; *text; text++) {
        if (*text == special) fputc(escape, out);
        fputc(*text, out);
    }
}

static void write_markdown(FILE *out, const rows *all)
{
    char cell[256];
    for (int64_t i = -2; i < all->count; i++) {
        for (int c = 0; c < COLUMNS; c++) {
            if (!is_shown(all, c)) continue;
            if (i == -1) {
                fputs(c < TEXTS ? "|---" : "|---:", out);
                continue;
            }
            if (i >= 0) show(cell, &all->row[i], c);
            fputs("| ", out);
            put_escaped(out, i < 0 ? columns[c].head : cell, '|', '\\');
            fputc(' ', out);
        }
        fputs("|\n", out);
    }
}

/* All columns, all digits. An unknown number is empty; the PSNR of equal videos is inf. */
static void write_csv(FILE *out, const rows *all)
{
    char cell[256];
    for (int c = 0; c < COLUMNS; c++) fprintf(out, "%s%s", c ? "," : "", columns[c].name);
    for (int64_t i = 0; i < all->count; i++)
        for (int c = 0; c < COLUMNS; c++) {
            const row *r = &all->row[i];
            fputc(c ? ',' : '\n', out);
            if (c < TEXTS) {
                text(cell, r, c);
                const char *quote = strpbrk(cell, ",\"\n\r") ? "\"" : "";
                fputs(quote, out);
                put_escaped(out, cell, '"', '"');
                fputs(quote, out);
            } else if (c == PSNR && is_equal(r))
                fputs("inf", out);
            else if (isfinite(number(r, c)))
                fprintf(out, "%.9g", number(r, c));
        }
    fputc('\n', out);
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
    rows_free(&all);
    return status;
}

int cmd_experiment_collect(int argc, char **argv)
{
    const char *results = "results", *csv = NULL, *markdown = NULL;
    int done, incomplete = 0;
    const cli_option options[] = {
        { "--results", CLI_TEXT, &results, "DIR", 0, 0, 0,
          "the folder with the experiments (results)" },
        { "--csv", CLI_OUTPUT, &csv, "FILE", 0, 0, 0,
          "also write the table as CSV, with all digits" },
        { "--markdown", CLI_OUTPUT, &markdown, "FILE", 0, 0, 0,
          "also write the table as Markdown" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int status = cli_options("esa experiment collect", "[options]",
                             "Gathers the results of all experiments in one table. It names "
                             "experiments that are not complete and\n"
                             "shows what they have.",
                             options, argc, argv, NULL, &done);
    if (status || done) return status;
    rows all = { NULL, 0 };
    status = read_all(&all, results, &incomplete);
    if (!status && all.count == 0)
        status = cli_fail("%s: '%s' holds no results%s", what, results,
                          incomplete ? " yet" : " (esa experiment run makes them)");
    if (!status && csv) status = save(csv, &all, write_csv);
    if (!status && markdown) status = save(markdown, &all, write_markdown);
    if (!status) print_table(&all);
    rows_free(&all);
    return status;
}
