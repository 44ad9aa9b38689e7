/* report_results.c - a results folder as `esa experiment` leaves it
 * (docs/schemas/experiment-*.schema.json) becomes a report_run.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Everything is asked for by name and may be missing: an experiment that was stopped after its
 * speed stage still makes a page. */
#include "report/report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

const char *const report_file_names[3] = { "config.json", "speed.json", "quality.json" };

static char *joined(const char *folder, const char *name)
{
    const size_t n = strlen(folder);
    const int whole = name[0] == '/';
    char *path = malloc(n + strlen(name) + 2);
    if (path)
        sprintf(path, "%s%s%s", whole ? "" : folder,
                whole || (n && folder[n - 1] == '/') ? "" : "/", name);
    return path;
}

static char *copy(const char *text)
{
    char *out = text ? malloc(strlen(text) + 1) : NULL;
    return out ? strcpy(out, text) : NULL;
}

static int exists(const char *path)
{
    struct stat about;
    return path && stat(path, &about) == 0;
}

/* ---------------------------------------------------------------- files */

static int load_files(report_run *r)
{
    int found = 0;
    for (int i = 0; i < 3; i++) {
        char *path = joined(r->folder, report_file_names[i]);
        if (!path) return cli_fail(REPORT_WHAT ": out of memory");
        if (exists(path)) {
            r->value[i] = cli_value_load(path, &r->text[i], REPORT_WHAT);
            const double format = cli_value_number(r->value[i], "format");
            int status = r->value[i] ? CLI_OK : CLI_FAILED;
            if (!status && !(format == 1))
                status = cli_fail(REPORT_WHAT
                                  ": '%s' is not of the format this esa reads: \"format\" is not 1",
                                  path);
            if (status) {
                free(path);
                return status;
            }
            found += i != REPORT_CONFIG;
        }
        free(path);
    }
    if (found) return CLI_OK;
    if (r->value[REPORT_CONFIG])
        return cli_fail(REPORT_WHAT
                        ": '%s' has no speed.json and no quality.json yet: its experiment has not "
                        "come that far (run its command again, it goes on)",
                        r->folder);
    return cli_fail(REPORT_WHAT ": '%s' is no results folder: no config.json, speed.json or "
                                "quality.json in it (esa experiment run makes one)",
                    r->folder);
}

/* From the first of the three files that knows. */
static double number_of(const report_run *r, const char *path)
{
    for (int i = 2; i >= 0; i--) {
        const double x = cli_value_number(r->value[i], path);
        if (isfinite(x)) return x;
    }
    char inner[96];
    snprintf(inner, sizeof inner, "settings.%s", path);
    return cli_value_number(r->value[REPORT_CONFIG], inner);
}

static const char *text_of(const report_run *r, const char *path)
{
    for (int i = 2; i >= 0; i--) {
        const char *text = cli_value_text(r->value[i], path);
        if (text) return text;
    }
    char inner[96];
    snprintf(inner, sizeof inner, "settings.%s", path);
    return cli_value_text(r->value[REPORT_CONFIG], inner);
}

static int64_t whole(double x) { return isfinite(x) && x >= 0 && x < 1e15 ? (int64_t)x : 0; }

/* ---------------------------------------------------------------- variants */

static report_variant *variant_of(report_run *r, const cli_value *v)
{
    const char *name = cli_value_text(v, "name");
    if (!name) name = "?";
    for (int i = 0; i < r->variant_count; i++)
        if (strcmp(r->variants[i].name, name) == 0) return &r->variants[i];
    report_variant *grown = realloc(r->variants, (size_t)(r->variant_count + 1) * sizeof *grown),
                   *n;
    if (!grown) return NULL;
    r->variants = grown;
    n = &grown[r->variant_count];
    memset(n, 0, sizeof *n);
    n->clips = calloc((size_t)(r->clip_count ? r->clip_count : 1), sizeof *n->clips);
    if (!n->clips) return NULL;
    r->variant_count++;
    const char *method = cli_value_text(v, "method"),
               *tail = cli_value_text(r->value[REPORT_CONFIG], "settings.tail");
    snprintf(n->name, sizeof n->name, "%s", name);
    n->dense = strcmp(method ? method : name, "dense") == 0;
    n->budget = cli_value_number(v, "budget");
    n->density = n->dense ? 1 : NAN;
    n->mass = n->seconds = n->step_seconds = n->sparse_seconds = n->speedup = n->sparse_speedup =
        n->psnr = n->ssim = n->lpips = n->flicker = NAN;
    n->text_seconds = n->select_seconds = n->attention_seconds = n->denoise_seconds =
        n->decode_seconds = NAN;
    if (n->dense)
        snprintf(n->label, sizeof n->label, "dense");
    else if (isfinite(n->budget) && method)
        snprintf(n->label, sizeof n->label, "%.32s %g", method, n->budget);
    else
        snprintf(n->label, sizeof n->label, "%.90s", name);
    snprintf(n->family, sizeof n->family, "%.32s%s%s%.20s%s",
             method && strcmp(method, "cached") == 0 ? "cached masks"
             : method                                ? method
                                                     : name,
             tail ? ", " : "", tail && strcmp(tail, "none") == 0 ? "without " : "",
             tail ? (strcmp(tail, "none") == 0 ? "a" : tail) : "", tail ? " tail" : "");
    for (int64_t c = 0; c < r->clip_count; c++)
        n->clips[c].psnr = n->clips[c].ssim = n->clips[c].lpips = n->clips[c].flicker = NAN;
    return n;
}

/* The clip a video belongs to, or NULL. */
static report_clip_figures *clip_of(report_run *r, report_variant *n, const cli_value *video)
{
    const double index = cli_value_number(video, "index");
    if (!(index >= 0 && index < (double)r->clip_count)) return NULL;
    report_clip_figures *clip = &n->clips[(int64_t)index];
    const char *file = cli_value_text(video, "file"), *prompt = cli_value_text(video, "prompt");
    if (file && !clip->video) clip->video = joined(r->folder, file);
    if (prompt && !r->prompts[(int64_t)index]) r->prompts[(int64_t)index] = copy(prompt);
    return clip;
}

static double mean_of(const cli_value *videos, const char *path)
{
    double sum = 0;
    int64_t count = 0;
    for (const cli_value *v = videos ? videos->child : NULL; v; v = v->next) {
        const double x = cli_value_number(v, path);
        if (isfinite(x)) {
            sum += x;
            count++;
        }
    }
    return count ? sum / (double)count : NAN;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The video whose time is the median: what is said about parts of a clip's time is said about this
 * one, so that they add up. */
static const cli_value *median_video(const cli_value *videos)
{
    double *seconds = videos && videos->count ? malloc((size_t)videos->count * sizeof *seconds)
                                              : NULL;
    const cli_value *best = videos ? videos->child : NULL;
    int64_t used = 0;
    for (const cli_value *v = videos ? videos->child : NULL; v && seconds; v = v->next) {
        const double x = cli_value_number(v, "record.seconds");
        if (isfinite(x)) seconds[used++] = x;
    }
    if (used) {
        qsort(seconds, (size_t)used, sizeof *seconds, ascending);
        for (const cli_value *v = videos->child; v; v = v->next)
            if (cli_value_number(v, "record.seconds") == seconds[(used - 1) / 2]) {
                best = v;
                break;
            }
    }
    free(seconds);
    return best;
}

/* Median over the videos of every step: one slow step of one clip is noise of the machine. */
static int step_medians(report_variant *n, const cli_value *videos)
{
    const cli_value *first = cli_value_at(videos, "0.record.step_seconds");
    if (!first || first->type != CLI_JSON_ARRAY || first->count == 0) return 1;
    double *column = malloc((size_t)videos->count * sizeof *column);
    n->steps = calloc((size_t)first->count, sizeof *n->steps);
    if (!column || !n->steps) {
        free(column);
        return 0;
    }
    n->step_count = first->count;
    for (int64_t s = 0; s < n->step_count; s++) {
        int64_t used = 0;
        char path[64];
        snprintf(path, sizeof path, "record.step_seconds.%lld", (long long)s);
        for (const cli_value *v = videos->child; v; v = v->next) {
            const double x = cli_value_number(v, path);
            if (isfinite(x)) column[used++] = x;
        }
        qsort(column, (size_t)used, sizeof *column, ascending);
        n->steps[s] = used ? (column[(used - 1) / 2] + column[used / 2]) / 2 : NAN;
    }
    free(column);
    return 1;
}

/* [layers][heads], mean over the videos. */
static int head_densities(report_variant *n, const cli_value *videos)
{
    const cli_value *table = cli_value_at(videos, "0.record.head_density"),
                    *row = table ? table->child : NULL;
    int known = 0;
    if (n->dense || !row || row->type != CLI_JSON_ARRAY || row->count == 0) return 1;
    n->layers = table->count;
    n->heads = row->count;
    n->head_density = calloc((size_t)(n->layers * n->heads), sizeof *n->head_density);
    if (!n->head_density) return 0;
    for (int64_t l = 0; l < n->layers; l++)
        for (int64_t h = 0; h < n->heads; h++) {
            char path[96];
            snprintf(path, sizeof path, "record.head_density.%lld.%lld", (long long)l,
                     (long long)h);
            const double x = mean_of(videos, path);
            n->head_density[l * n->heads + h] = x;
            known |= isfinite(x);
        }
    if (!known) {
        free(n->head_density);
        n->head_density = NULL;
    }
    return 1;
}

static int read_speed(report_run *r)
{
    const cli_value *all = cli_value_at(r->value[REPORT_SPEED], "variants");
    for (const cli_value *v = all ? all->child : NULL; v; v = v->next) {
        report_variant *n = variant_of(r, v);
        const cli_value *videos = cli_value_at(v, "videos");
        if (!n || !step_medians(n, videos) || !head_densities(n, videos)) return 0;
        const cli_value *median = median_video(videos);
        if (!n->dense) n->density = cli_value_number(v, "density");
        n->seconds = cli_value_number(v, "clip_seconds.median");
        n->step_seconds = cli_value_number(v, "step_seconds.median");
        n->sparse_seconds = cli_value_number(v, "step_seconds_sparse.median");
        n->speedup = n->dense ? 1 : cli_value_number(v, "speedup");
        n->sparse_speedup = n->dense ? 1 : cli_value_number(v, "speedup_without_warmup");
        n->text_seconds = cli_value_number(median, "record.text_seconds");
        n->denoise_seconds = cli_value_number(median, "record.denoise_seconds");
        n->attention_seconds = cli_value_number(median, "record.attention_seconds");
        n->select_seconds = cli_value_number(median, "record.select_seconds");
        n->decode_seconds = cli_value_number(median, "record.decode_seconds");
        const int64_t warmup = whole(cli_value_number(videos, "0.record.warmup_steps"));
        if (!n->dense && warmup > r->warmup) r->warmup = warmup;
        for (const cli_value *video = videos ? videos->child : NULL; video; video = video->next)
            clip_of(r, n, video);
    }
    return 1;
}

static int read_quality(report_run *r)
{
    const cli_value *all = cli_value_at(r->value[REPORT_QUALITY], "variants");
    for (const cli_value *v = all ? all->child : NULL; v; v = v->next) {
        report_variant *n = variant_of(r, v);
        const cli_value *videos = cli_value_at(v, "videos");
        if (!n) return 0;
        if (!isfinite(n->density)) n->density = cli_value_number(v, "density");
        n->mass = cli_value_number(v, "kept_mass");
        n->psnr = cli_value_number(v, "mean.psnr");
        n->ssim = cli_value_number(v, "mean.ssim");
        n->lpips = cli_value_number(v, "mean.lpips");
        n->flicker = cli_value_number(v, "mean.flicker");
        n->identical = videos && videos->count > 0 &&
                       cli_value_number(v, "identical") == (double)videos->count;
        for (const cli_value *video = videos ? videos->child : NULL; video; video = video->next) {
            report_clip_figures *clip = clip_of(r, n, video);
            if (!clip) continue;
            clip->psnr = cli_value_number(video, "psnr");
            clip->ssim = cli_value_number(video, "ssim");
            clip->lpips = cli_value_number(video, "lpips");
            clip->flicker = cli_value_number(video, "flicker");
            const cli_value *identical = cli_value_at(video, "identical");
            clip->identical = identical && identical->type == CLI_JSON_BOOL &&
                              identical->number == 1;
        }
    }
    return 1;
}

/* ---------------------------------------------------------------- the run */

/* Clips are numbered by "index": one more than the largest. */
static int64_t count_clips(const report_run *r)
{
    int64_t count = 0;
    for (int f = REPORT_SPEED; f <= REPORT_QUALITY; f++) {
        const cli_value *all = cli_value_at(r->value[f], "variants");
        for (const cli_value *v = all ? all->child : NULL; v; v = v->next) {
            const cli_value *videos = cli_value_at(v, "videos");
            for (const cli_value *video = videos ? videos->child : NULL; video;
                 video = video->next) {
                const double index = cli_value_number(video, "index");
                if (index >= 0 && index < 100000 && (int64_t)index >= count)
                    count = (int64_t)index + 1;
            }
        }
    }
    return count;
}

/* The mask file a run names lies in its folder, or where it was given: seen from the folder the
 * experiment was started in, most often this one. */
static void find_masks(report_run *r)
{
    const char *named[3] = { cli_value_text(r->value[REPORT_SPEED], "calibration.file"),
                             cli_value_text(r->value[REPORT_CONFIG], "settings.masks"),
                             "masks.safetensors" };
    for (int i = 0; i < 3 && !r->masks; i++) {
        char *path = named[i] ? joined(r->folder, named[i]) : NULL;
        if (exists(path))
            r->masks = path;
        else {
            free(path);
            if (named[i] && i < 2 && exists(named[i])) r->masks = copy(named[i]);
        }
    }
}

static void dense_first(report_run *r)
{
    for (int i = 1; i < r->variant_count; i++)
        if (r->variants[i].dense && !r->variants[0].dense) {
            const report_variant dense = r->variants[i];
            memmove(r->variants + 1, r->variants, (size_t)i * sizeof dense);
            r->variants[0] = dense;
        }
}

int report_run_read(report_run *r, const char *folder)
{
    memset(r, 0, sizeof *r);
    r->folder = copy(folder);
    if (!r->folder) return cli_fail(REPORT_WHAT ": out of memory");
    struct stat about;
    if (stat(folder, &about) != 0) return cli_fail(REPORT_WHAT ": there is no folder '%s'", folder);
    if (!S_ISDIR(about.st_mode))
        return cli_fail(REPORT_WHAT
                        ": '%s' is a file, expected a results folder (mask files go with --masks)",
                        folder);
    for (size_t n = strlen(r->folder); n > 1 && r->folder[n - 1] == '/'; n--) r->folder[n - 1] = 0;
    int status = load_files(r);
    if (status) return status;
    const char *slash = strrchr(r->folder, '/'), *tag = text_of(r, "tag"),
               *model = text_of(r, "model"), *cpu = text_of(r, "machine.cpu");
    r->tag = copy(tag ? tag : slash ? slash + 1 : r->folder);
    r->model = copy(model ? model : "model not named");
    r->frames = whole(number_of(r, "frames"));
    r->height = whole(number_of(r, "height"));
    r->width = whole(number_of(r, "width"));
    r->step_count = whole(number_of(r, "steps"));
    snprintf(r->setting, sizeof r->setting, "%.80s %lldx%lldx%lld %lld %.80s",
             r->model ? r->model : "", (long long)r->frames, (long long)r->height,
             (long long)r->width, (long long)r->step_count, cpu ? cpu : "");
    r->clip_count = count_clips(r);
    r->prompts = calloc((size_t)(r->clip_count ? r->clip_count : 1), sizeof *r->prompts);
    if (!r->tag || !r->model || !r->prompts || !read_speed(r) || !read_quality(r))
        return cli_fail(REPORT_WHAT ": out of memory");
    if (r->variant_count == 0)
        return cli_fail(REPORT_WHAT ": the results in '%s' name no variants", folder);
    dense_first(r);
    find_masks(r);
    return CLI_OK;
}

void report_run_free(report_run *r)
{
    for (int i = 0; i < r->variant_count; i++) {
        for (int64_t c = 0; c < r->clip_count; c++) free(r->variants[i].clips[c].video);
        free(r->variants[i].clips);
        free(r->variants[i].steps);
        free(r->variants[i].head_density);
    }
    for (int64_t c = 0; r->prompts && c < r->clip_count; c++) free(r->prompts[c]);
    for (int i = 0; i < 3; i++) {
        free(r->text[i]);
        cli_value_free(r->value[i]);
    }
    free(r->variants);
    free(r->prompts);
    free(r->folder);
    free(r->tag);
    free(r->model);
    free(r->masks);
    memset(r, 0, sizeof *r);
}
