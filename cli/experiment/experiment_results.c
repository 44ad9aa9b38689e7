/* experiment_results.c - what an experiment found: speed.json from the records of its clips,
 * quality.json from their frames.
 * SPDX-License-Identifier: Apache-2.0 */
#include "experiment/experiment.h"
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
    /* agree() bounds the folder's name; names below are short */
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
    return rename(source, target) == 0
               ? CLI_OK
               : cli_fail("%s: cannot write '%s': %s", what, target, strerror(errno));
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
    int64_t count;  /* clips per variant: the evaluation prompts */
    json_t **value; /* [variants][count]: the records in work/clips */
} clips;

static void clips_free(clips *c, const experiment *e)
{
    for (int64_t i = 0; c->value && i < e->variants * c->count; i++) json_decref(c->value[i]);
    free(c->value);
}

static int clips_load(clips *c, const experiment *e, const char *what)
{
    const size_t all = (size_t)(e->variants * e->evaluation.count);
    *c = (clips){ e->evaluation.count, calloc(all, sizeof *c->value) };
    if (!c->value) return cli_fail("%s: out of memory", what);
    for (int v = 0; v < e->variants; v++)
        for (int64_t i = 0; i < c->count; i++) {
            char path[EXPERIMENT_PATH];
            experiment_path(e, path, "work/clips/%s-%03lld.json", e->variant[v].name, (long long)i);
            json_t *record = cli_json_load(path, NULL, 0, what);
            if (!record) return CLI_FAILED;
            c->value[v * c->count + i] = record;
        }
    return CLI_OK;
}

static json_t *clip(const clips *c, int v, int64_t i) { return c->value[v * c->count + i]; }

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

/* Steps that ran dense because they are the first: as the sparse clips say. */
static int64_t warmup_of(const experiment *e, const clips *c)
{
    int64_t most = 0;
    for (int v = 1; v < e->variants; v++)
        for (int64_t i = 0; i < c->count; i++) {
            const double w = cli_json_number(clip(c, v, i), "record.warmup_steps");
            if (isfinite(w) && (int64_t)w > most) most = (int64_t)w;
        }
    return most;
}

/* ---------------------------------------------------------------- numbers of many clips */

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts, NaN left out; the number of values. */
static int64_t sorted(double *x, int64_t n)
{
    int64_t used = 0;
    for (int64_t i = 0; i < n; i++)
        if (isfinite(x[i])) x[used++] = x[i];
    qsort(x, (size_t)used, sizeof *x, ascending);
    return used;
}

static double median(double *x, int64_t n)
{
    n = sorted(x, n);
    return n ? (x[(n - 1) / 2] + x[n / 2]) / 2 : (double)NAN;
}

static void json_spread(cli_json *json, const char *key, double *x, int64_t n)
{
    const double middle = median(x, n);
    n = sorted(x, n);
    cli_json_open(json, key, '{');
    cli_json_fields(json, "median %g lowest %g highest %g", middle, n ? x[0] : (double)NAN,
                    n ? x[n - 1] : (double)NAN);
    cli_json_close(json);
}

static double mean_of(const clips *c, int v, const char *key, double otherwise)
{
    double sum = 0;
    int64_t n = 0;
    for (int64_t i = 0; i < c->count; i++) {
        const double x = cli_json_number(clip(c, v, i), key);
        if (isfinite(x)) {
            sum += x;
            n++;
        }
    }
    return n ? sum / (double)n : otherwise;
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
                          int64_t warmup, double *x)
{
    static const char *const spreads[][2] = { { "clip_seconds", "record.seconds" },
                                              { "select_seconds", "record.select_seconds" },
                                              { "attention_seconds", "record.attention_seconds" } };
    cli_json_open(json, NULL, '{');
    json_variant(json, &e->variant[v]);
    cli_json_fields(json, "clips %ld density %g", c->count, mean_of(c, v, "record.density", 1));
    for (int k = 0; k < 3; k++) {
        for (int64_t i = 0; i < c->count; i++) x[i] = cli_json_number(clip(c, v, i), spreads[k][1]);
        json_spread(json, spreads[k][0], x, c->count);
    }
    for (int64_t i = 0; i < c->count; i++) x[i] = step_mean(clip(c, v, i), 0);
    json_spread(json, "step_seconds", x, c->count);
    for (int64_t i = 0; i < c->count; i++) x[i] = step_mean(clip(c, v, i), warmup);
    json_spread(json, "step_seconds_sparse", x, c->count);
    /* Prompt against prompt: each pair ran one after the other. */
    for (int64_t i = 0; i < c->count; i++)
        x[i] = step_mean(clip(c, 0, i), 0) / step_mean(clip(c, v, i), 0);
    cli_json_real(json, "speedup", median(x, c->count));
    for (int64_t i = 0; i < c->count; i++)
        x[i] = step_mean(clip(c, 0, i), warmup) / step_mean(clip(c, v, i), warmup);
    cli_json_real(json, "speedup_without_warmup", median(x, c->count));
    cli_json_open(json, "videos", '[');
    for (int64_t i = 0; i < c->count; i++) cli_json_add(json, NULL, json_incref(clip(c, v, i)));
    cli_json_close(json);
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
    json_t *note = stat(path, &about) == 0 ? cli_json_load(path, NULL, 0, what) : NULL;
    cli_json_real(json, "seconds", cli_json_number(note, "seconds"));
    json_decref(note);
    cli_json_close(json);
}

int experiment_speed(const experiment *e, const char *what)
{
    clips c;
    double *x = calloc((size_t)e->evaluation.count, sizeof *x);
    int status = clips_load(&c, e, what);
    if (!status && !x) status = cli_fail("%s: out of memory", what);
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
        for (int v = 0; v < e->variants; v++) speed_variant(json, e, &c, v, warmup, x);
        cli_json_close(json);
        status = experiment_save(e, json, "speed.json", what);
    }
    clips_free(&c, e);
    free(x);
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
    cli_json_fields(json, "density %g kept_mass %g identical %ld",
                    mean_of(c, v, "record.density", 1), mean_of(c, v, "record.kept_mass", NAN),
                    r->equal);
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
    clips_free(&c, e);
    return status;
}
