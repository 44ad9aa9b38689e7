/* experiment_results.c - what an experiment found: speed.json from the records of its clips,
 * quality.json from their frames.
 * SPDX-License-Identifier: Apache-2.0 */
#include "experiment/experiment.h"
#include "core/folders.h"
#include "core/json_reader.h"

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
    int64_t count; /* per variant: the evaluation prompts */
    char **text;   /* [variants][count]: the record as it stands in work/clips */
    cli_value **value;
} clips;

static void clips_free(clips *c, const experiment *e)
{
    for (int64_t i = 0; i < e->variants * c->count; i++) {
        if (c->text) free(c->text[i]);
        if (c->value) cli_value_free(c->value[i]);
    }
    free(c->text);
    free(c->value);
}

static int clips_load(clips *c, const experiment *e, const char *what)
{
    const size_t all = (size_t)(e->variants * e->evaluation.count);
    *c = (clips){ e->evaluation.count, calloc(all, sizeof *c->text),
                  calloc(all, sizeof *c->value) };
    if (!c->text || !c->value) return cli_fail("%s: out of memory", what);
    for (int v = 0; v < e->variants; v++)
        for (int64_t i = 0; i < c->count; i++) {
            char path[EXPERIMENT_PATH];
            const int64_t at = v * c->count + i;
            experiment_path(e, path, "work/clips/%s-%03lld.json", e->variant[v].name, (long long)i);
            if (!(c->value[at] = cli_value_load(path, &c->text[at], what))) return CLI_FAILED;
        }
    return CLI_OK;
}

static const cli_value *clip(const clips *c, int v, int64_t i)
{
    return c->value[v * c->count + i];
}

/* Mean of the steps from the first one on; NaN: there are none. */
static double step_mean(const cli_value *record, int64_t first)
{
    const cli_value *steps = cli_value_at(record, "record.step_seconds");
    double sum = 0;
    int64_t n = 0, at = 0;
    for (const cli_value *s = steps ? steps->child : NULL; s; s = s->next)
        if (at++ >= first && s->type == CLI_JSON_NUMBER) {
            sum += s->number;
            n++;
        }
    return n ? sum / (double)n : (double)NAN;
}

/* Steps that ran dense because they are the first: as the sparse clips say. */
static int64_t warmup_of(const experiment *e, const clips *c)
{
    int64_t most = 0;
    for (int v = 1; v < e->variants; v++)
        for (int64_t i = 0; i < c->count; i++) {
            const double w = cli_value_number(clip(c, v, i), "record.warmup_steps");
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
    cli_json_real(json, "median", middle);
    cli_json_real(json, "lowest", n ? x[0] : (double)NAN);
    cli_json_real(json, "highest", n ? x[n - 1] : (double)NAN);
    cli_json_close(json);
}

static double mean_of(const clips *c, int v, const char *key, double otherwise)
{
    double sum = 0;
    int64_t n = 0;
    for (int64_t i = 0; i < c->count; i++) {
        const double x = cli_value_number(clip(c, v, i), key);
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
    cli_json_text(json, "name", v->name);
    cli_json_text(json, "method", cli_name(name, METHODS, v->method));
    cli_json_real(json, "budget", v->budget);
}

static void json_sizes(cli_json *json, const experiment *e)
{
    cli_json_int(json, "frames", e->clip.frames);
    cli_json_int(json, "height", e->clip.height);
    cli_json_int(json, "width", e->clip.width);
    cli_json_int(json, "steps", e->clip.steps);
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
    cli_json_int(json, "clips", c->count);
    cli_json_real(json, "density", mean_of(c, v, "record.density", 1));
    for (int k = 0; k < 3; k++) {
        for (int64_t i = 0; i < c->count; i++)
            x[i] = cli_value_number(clip(c, v, i), spreads[k][1]);
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
    for (int64_t i = 0; i < c->count; i++) {
        const char *text = c->text[v * c->count + i];
        size_t bytes = strlen(text);
        while (bytes && text[bytes - 1] == '\n') bytes--;
        cli_json_raw(json, NULL, text, bytes);
    }
    cli_json_close(json);
    cli_json_close(json);
}

static void json_calibration(cli_json *json, const experiment *e, const char *what)
{
    char path[EXPERIMENT_PATH];
    struct stat about;
    cli_json_open(json, "calibration", '{');
    cli_json_text(json, "file",
                  !e->masks[0]    ? NULL
                  : e->clip.masks ? e->masks
                                  : "masks.safetensors");
    cli_json_int(json, "bytes",
                 e->masks[0] && stat(e->masks, &about) == 0 ? (int64_t)about.st_size : 0);
    cli_json_int(json, "prompts", e->calibration.count);
    experiment_path(e, path, "work/calibration.json");
    cli_value *note = stat(path, &about) == 0 ? cli_value_load(path, NULL, what) : NULL;
    cli_json_real(json, "seconds", cli_value_number(note, "seconds"));
    cli_value_free(note);
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
        cli_json_int(json, "format", EXPERIMENT_FORMAT);
        cli_json_text(json, "tag", e->tag);
        cli_machine_json(json, e->maker.ctx, NULL);
        cli_json_text(json, "model", e->maker.info.name);
        json_sizes(json, e);
        cli_json_int(json, "tokens", clip_tokens(&e->clip, &e->maker.info));
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
    cli_json_real(json, "psnr", psnr); /* of equal videos: infinite, null */
    cli_json_real(json, "ssim", ssim);
    cli_json_real(json, "lpips", lpips);
    cli_json_real(json, "flicker", flicker);
}

static void quality_variant(cli_json *json, const experiment *e, const clips *c, int v,
                            const evaluate_result *r)
{
    cli_json_open(json, NULL, '{');
    json_variant(json, &e->variant[v]);
    cli_json_real(json, "density", mean_of(c, v, "record.density", 1));
    cli_json_real(json, "kept_mass", mean_of(c, v, "record.kept_mass", NAN));
    cli_json_int(json, "identical", r->equal);
    cli_json_open(json, "mean", '{');
    json_metrics(json, r->mean[ESA_METRIC_PSNR], r->mean[ESA_METRIC_SSIM],
                 r->mean[ESA_METRIC_LPIPS], r->mean[ESA_METRIC_FLICKER]);
    cli_json_close(json);
    cli_json_open(json, "videos", '[');
    for (int64_t i = 0; i < r->count; i++) {
        const esa_metrics *m = &r->video[i].metrics;
        cli_json_open(json, NULL, '{');
        cli_json_int(json, "index", i);
        cli_json_text(json, "prompt", e->evaluation.line[i]);
        cli_json_text(json, "file", cli_value_text(clip(c, v, i), "file"));
        cli_json_text(json, "reference", cli_value_text(clip(c, 0, i), "file"));
        cli_json_bool(json, "identical", isinf(m->psnr));
        json_metrics(json, m->psnr, m->ssim, m->lpips, m->flicker);
        cli_json_real(json, "psnr_min", m->psnr_min);
        cli_json_real(json, "ssim_min", m->ssim_min);
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
                                     .threads = e->threads };
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
        cli_json_int(json, "format", EXPERIMENT_FORMAT);
        cli_json_text(json, "tag", e->tag);
        cli_json_text(json, "model", e->maker.info.name);
        cli_json_text(json, "config_hash", e->maker.info.config_hash);
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
