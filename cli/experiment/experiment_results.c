/* experiment_results.c - the results of an experiment: speed.json from the records of its clips,
 * quality.json from their frames.
 * SPDX-License-Identifier: Apache-2.0 */
#include "experiment/experiment.h"
#include "core/data.h"
#include "core/folders.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

void experiment_path(const experiment *e, char path[EXPERIMENT_PATH], const char *format, ...)
{
    va_list args;
    const int used = snprintf(path, EXPERIMENT_PATH, "%s/", e->folder);
    va_start(args, format);
    /* the folder's name is at most 4000 bytes long, and the names below are short */
    vsnprintf(path + used, (size_t)(EXPERIMENT_PATH - used), format, args);
    va_end(args);
}

int experiment_move(const experiment *e, const char *from, const char *to, const char *what)
{
    char source[EXPERIMENT_PATH], target[EXPERIMENT_PATH];
    experiment_path(e, source, "work/%s", from);
    experiment_path(e, target, "%s", to);
    const int status = cli_make_folder_of(target, NULL, what);
    if (status) return status;
    return cli_move_file(source, target, what);
}

int experiment_save(const experiment *e, cli_json *json, const char *name, const char *what)
{
    char path[EXPERIMENT_PATH];
    experiment_path(e, path, "work/%s", name);
    const int status = cli_json_save(json, path);
    return status ? status : experiment_move(e, name, name, what);
}

/* ---------------------------------------------------------------- records */

typedef struct clips {
    int64_t count;                        /* clips per variant: the evaluation prompts */
    json_t *records[EXPERIMENT_VARIANTS]; /* per variant: an array of count records */
    double *x;                            /* [count], for numbers of every clip */
} clips;

static void clips_free(clips *c)
{
    for (int v = 0; v < EXPERIMENT_VARIANTS; v++) json_decref(c->records[v]);
    free(c->x);
}

/* Reads the records in work/clips. Call clips_free in any case. */
static int clips_load(clips *c, const experiment *e, const char *what)
{
    *c = (clips){ .count = e->evaluation.count };
    c->x = calloc((size_t)c->count, sizeof *c->x);
    int failed = !c->x;
    for (int v = 0; v < e->variants && !failed; v++) {
        c->records[v] = json_array();
        for (int64_t i = 0; i < c->count && !failed; i++) {
            char path[EXPERIMENT_PATH];
            experiment_path(e, path, "work/clips/%s-%03lld.json", e->variant[v].name, (long long)i);
            json_t *record = cli_json_load(path, NULL, 0, what);
            if (!record) return CLI_FAILED;
            failed = json_array_append_new(c->records[v], record) != 0;
        }
    }
    return failed ? cli_fail("%s: out of memory", what) : CLI_OK;
}

static json_t *clip(const clips *c, int v, int64_t i)
{
    return json_array_get(c->records[v], (size_t)i);
}

/* The mean of the numbers at path over the clips of a variant; NaN if there are none. */
static double mean_of(const clips *c, int v, const char *path)
{
    return measure_mean(c->x, cli_json_column(c->x, c->records[v], path));
}

/* Dense clips and clips without sparse steps have no density: it is 1. */
static double density_of(const clips *c, int v)
{
    const double density = mean_of(c, v, "record.density");
    return isfinite(density) ? density : 1;
}

/* Mean time of the steps from `first` on; NaN if there are none. */
static double step_mean(const json_t *record, int64_t first)
{
    const json_t *steps = cli_json_at(record, "record.step_seconds");
    const int64_t count = (int64_t)json_array_size(steps);
    double sum = 0;
    for (int64_t i = first; i < count; i++)
        sum += json_number_value(json_array_get(steps, (size_t)i));
    return count > first ? sum / (double)(count - first) : (double)NAN;
}

/* The number of steps that run dense as warm-up, as the sparse clips record it. */
static int64_t warmup_of(const experiment *e, const clips *c)
{
    double most = 0;
    for (int v = 1; v < e->variants; v++)
        for (int64_t i = cli_json_column(c->x, c->records[v], "record.warmup_steps") - 1; i >= 0;
             i--)
            most = fmax(most, c->x[i]);
    return (int64_t)most;
}

static void json_spread(cli_json *json, const char *key, double *x, int64_t n)
{
    const double median = measure_median(x, n); /* sorts */
    cli_json_open(json, key, '{');
    cli_json_fields(json, "median %g lowest %g highest %g", median, n ? x[0] : (double)NAN,
                    n ? x[n - 1] : (double)NAN);
    cli_json_close(json);
}

static void json_variant(cli_json *json, const experiment_variant *v)
{
    char name[32];
    cli_json_fields(json, "name %s method %s budget %g", v->name,
                    cli_name(name, METHODS, v->method), v->budget);
}

static void json_sizes(cli_json *json, const experiment *e)
{
    cli_json_fields(json, "frames %d height %d width %d steps %d", e->clip.p.frames,
                    e->clip.p.height, e->clip.p.width, e->clip.p.steps);
}

/* ---------------------------------------------------------------- speed */

static void speed_variant(cli_json *json, const experiment *e, const clips *c, int v,
                          int64_t warmup)
{
    static const char *const spreads[][2] = { { "clip_seconds", "record.seconds" },
                                              { "select_seconds", "record.select_seconds" },
                                              { "attention_seconds", "record.attention_seconds" } };
    cli_json_open(json, NULL, '{');
    json_variant(json, &e->variant[v]);
    cli_json_fields(json, "clips %ld density %g", c->count, density_of(c, v));
    for (int k = 0; k < 3; k++)
        json_spread(json, spreads[k][0], c->x, cli_json_column(c->x, c->records[v], spreads[k][1]));
    for (int k = 0; k < 2; k++) {
        int64_t n = 0;
        for (int64_t i = 0; i < c->count; i++) {
            c->x[n] = step_mean(clip(c, v, i), k ? warmup : 0);
            n += isfinite(c->x[n]);
        }
        json_spread(json, k ? "step_seconds_sparse" : "step_seconds", c->x, n);
    }
    /* Dense and sparse clips of a prompt ran one after the other, so prompts are compared. */
    for (int k = 0; k < 2; k++) {
        int64_t n = 0;
        for (int64_t i = 0; i < c->count; i++) {
            const int64_t first = k ? warmup : 0;
            c->x[n] = step_mean(clip(c, 0, i), first) / step_mean(clip(c, v, i), first);
            n += isfinite(c->x[n]);
        }
        cli_json_real(json, k ? "speedup_without_warmup" : "speedup", measure_median(c->x, n));
    }
    cli_json_add(json, "videos", json_incref(c->records[v]));
    cli_json_close(json);
}

static void json_calibration(cli_json *json, const experiment *e, const char *what)
{
    char path[EXPERIMENT_PATH];
    struct stat about;
    cli_json_open(json, "calibration", '{');
    cli_json_fields(json, "file %s bytes %ld prompts %ld",
                    !e->masks[0]      ? NULL
                    : e->clip.p.masks ? e->masks
                                      : "masks.safetensors",
                    e->masks[0] && stat(e->masks, &about) == 0 ? (int64_t)about.st_size : 0,
                    e->calibration.count);
    experiment_path(e, path, "work/calibration.json");
    json_t *note = cli_is_missing(path) ? NULL : cli_json_load(path, NULL, 0, what);
    cli_json_real(json, "seconds", cli_json_number(note, "seconds"));
    json_decref(note);
    cli_json_close(json);
}

int experiment_speed(const experiment *e, const char *what)
{
    clips c;
    int status = clips_load(&c, e, what);
    if (!status) {
        const int64_t warmup = warmup_of(e, &c);
        cli_json *json = cli_json_new();
        cli_json_fields(json, "format %d tag %s", EXPERIMENT_FORMAT, e->tag);
        cli_machine_json(json, e->maker.ctx, NULL);
        cli_json_text(json, "model", e->maker.info.name);
        json_sizes(json, e);
        cli_json_int(json, "tokens", e->clip.tokens);
        json_calibration(json, e, what);
        cli_json_open(json, "variants", '[');
        for (int v = 0; v < e->variants; v++) speed_variant(json, e, &c, v, warmup);
        cli_json_close(json);
        status = experiment_save(e, json, "speed.json", what);
    }
    clips_free(&c);
    return status;
}

/* ---------------------------------------------------------------- quality */

static void json_metrics(cli_json *json, double psnr, double ssim, double lpips, double flicker)
{
    /* the PSNR of equal videos is infinite: null */
    cli_json_fields(json, "psnr %g ssim %g lpips %g flicker %g", psnr, ssim, lpips, flicker);
}

static void quality_variant(cli_json *json, const experiment *e, const clips *c, int v,
                            const evaluate_result *r)
{
    cli_json_open(json, NULL, '{');
    json_variant(json, &e->variant[v]);
    cli_json_fields(json, "density %g kept_mass %g identical %ld", density_of(c, v),
                    mean_of(c, v, "record.kept_mass"), r->equal);
    cli_json_open(json, "mean", '{');
    json_metrics(json, r->mean[ESA_METRIC_PSNR], r->mean[ESA_METRIC_SSIM],
                 r->mean[ESA_METRIC_LPIPS], r->mean[ESA_METRIC_FLICKER]);
    cli_json_close(json);
    cli_json_open(json, "videos", '[');
    for (int64_t i = 0; i < r->count; i++) {
        const esa_metrics *m = &r->video[i].metrics;
        cli_json_open(json, NULL, '{');
        cli_json_fields(json, "index %ld prompt %s file %s reference %s identical %i", i,
                        e->evaluation.line[i], cli_json_string(clip(c, v, i), "file"),
                        cli_json_string(clip(c, 0, i), "file"), isinf(m->psnr) != 0);
        json_metrics(json, m->psnr, m->ssim, m->lpips, m->flicker);
        cli_json_fields(json, "psnr_min %g ssim_min %g", m->psnr_min, m->ssim_min);
        cli_json_close(json);
    }
    cli_json_close(json);
    cli_json_close(json);
}

static int measure(cli_json *json, const experiment *e, const clips *c, const char *what,
                   char net[8], char note[2400])
{
    int status = CLI_OK;
    cli_json_open(json, "variants", '[');
    for (int v = 1; v < e->variants && !status; v++) {
        char dense[EXPERIMENT_PATH], sparse[EXPERIMENT_PATH];
        evaluate_result r;
        experiment_path(e, dense, "work/frames/dense");
        experiment_path(e, sparse, "work/frames/%s", e->variant[v].name);
        const evaluate_options o = { .reference = dense,
                                     .generated = sparse,
                                     .lpips_weights = e->lpips_weights,
                                     .net = e->net,
                                     .threads = e->clip.open.threads };
        fprintf(stderr, "quality: %s\n", e->variant[v].name);
        status = evaluate_run(&r, &o, what);
        if (!status && r.count != c->count)
            status = cli_fail("%s: '%s' holds %lld videos, expected %lld", what, sparse,
                              (long long)r.count, (long long)c->count);
        if (!status) {
            quality_variant(json, e, c, v, &r);
            snprintf(net, 8, "%s", r.net);
            snprintf(note, 2400, "%s", r.note);
        }
        evaluate_free(&r);
    }
    cli_json_close(json);
    return status;
}

int experiment_quality(const experiment *e, const char *what)
{
    char net[8] = "", note[2400] = "";
    clips c;
    int status = clips_load(&c, e, what);
    if (!status) {
        cli_json *json = cli_json_new();
        cli_json_fields(json, "format %d tag %s model %s config_hash %s", EXPERIMENT_FORMAT, e->tag,
                        e->maker.info.name, e->maker.info.config_hash);
        json_sizes(json, e);
        status = measure(json, e, &c, what, net, note);
        cli_json_text(json, "lpips", net[0] ? net : NULL);
        if (status)
            cli_json_save(json, NULL);
        else
            status = experiment_save(e, json, "quality.json", what);
        if (!status && note[0]) fprintf(stderr, "%s\n", note);
    }
    clips_free(&c);
    return status;
}
