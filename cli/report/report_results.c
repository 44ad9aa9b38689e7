/* report_results.c - reads a results folder of `esa experiment`
 * (docs/schemas/experiment-*.schema.json) into a report_run.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Every entry may be missing: an experiment that was stopped after its speed stage still makes a
 * page. */
#include "report/report.h"
#include "core/data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MOST_VARIANTS 4096
#define MOST_BYTES    4e8 /* of clips, steps and heads, over all variants and videos */

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

static int exists(const char *path) { return path && !cli_is_missing(path); }

/* ---------------------------------------------------------------- files */

static int load_files(report_run *r)
{
    int found = 0;
    for (int i = 0; i < 3; i++) {
        char *path = joined(r->folder, report_file_names[i]);
        if (!path) return cli_fail(REPORT_WHAT ": out of memory");
        if (exists(path)) {
            r->value[i] = cli_json_load(path, &r->text[i], 0, REPORT_WHAT);
            const double format = cli_json_number(r->value[i], "format");
            int status = r->value[i] ? CLI_OK : CLI_FAILED;
            if (!status && !(format == 1))
                status = cli_fail(
                    REPORT_WHAT
                    ": '%s' does not have the format this esa reads: \"format\" is not 1",
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
                        "finished (the same command continues it)",
                        r->folder);
    return cli_fail(REPORT_WHAT ": '%s' is not a results folder: it has no config.json, speed.json "
                                "or quality.json (esa experiment run makes one)",
                    r->folder);
}

/* The value at path in the first of the three files that has it, else in the settings. */
static const json_t *value_of(const report_run *r, const char *path)
{
    for (int i = 2; i >= 0; i--) {
        const json_t *v = cli_json_at(r->value[i], path);
        if (json_is_number(v) || json_is_string(v)) return v;
    }
    return cli_json_at(cli_json_at(r->value[REPORT_CONFIG], "settings"), path);
}

static const char *text_of(const report_run *r, const char *path)
{
    return json_string_value(value_of(r, path));
}

static int64_t whole(double x) { return isfinite(x) && x >= 0 && x < 1e15 ? (int64_t)x : 0; }

static int64_t number_of(const report_run *r, const char *path)
{
    return whole(json_number_value(value_of(r, path)));
}

/* ---------------------------------------------------------------- variants */

static report_variant *variant_of(report_run *r, const json_t *v)
{
    const char *name = cli_json_string(v, "name");
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
    const char *method = cli_json_string(v, "method"),
               *tail = cli_json_string(r->value[REPORT_CONFIG], "settings.tail");
    snprintf(n->name, sizeof n->name, "%s", name);
    n->dense = strcmp(method ? method : name, "dense") == 0;
    for (int i = 0; i < REPORT_FIGURES; i++) n->figure[i] = (double)NAN;
    const double budget = n->figure[REPORT_BUDGET] = cli_json_number(v, "budget");
    if (n->dense) n->figure[REPORT_DENSITY] = 1;
    if (n->dense)
        snprintf(n->label, sizeof n->label, "dense");
    else if (isfinite(budget) && method)
        snprintf(n->label, sizeof n->label, "%.32s %g", method, budget);
    else
        snprintf(n->label, sizeof n->label, "%.90s", name);
    snprintf(n->family, sizeof n->family, "%.32s%s%s%.20s%s",
             method && strcmp(method, "cached") == 0 ? "cached masks"
             : method                                ? method
                                                     : name,
             tail ? ", " : "", tail && strcmp(tail, "none") == 0 ? "without " : "",
             tail ? (strcmp(tail, "none") == 0 ? "a" : tail) : "", tail ? " tail" : "");
    for (int64_t c = 0; c < r->clip_count; c++) n->clips[c].psnr = n->clips[c].ssim = (double)NAN;
    return n;
}

/* The clip of a video, or NULL. */
static report_clip *clip_of(report_run *r, report_variant *n, const json_t *video)
{
    const double index = cli_json_number(video, "index");
    if (!(index >= 0 && index < (double)r->clip_count)) return NULL;
    report_clip *clip = &n->clips[(int64_t)index];
    const char *file = cli_json_string(video, "file"), *prompt = cli_json_string(video, "prompt");
    if (file && !clip->video) clip->video = joined(r->folder, file);
    if (prompt && !r->prompts[(int64_t)index]) r->prompts[(int64_t)index] = strdup(prompt);
    return clip;
}

/* The video with the median time. The parts of a clip's time are shown for this one, so that they
 * add up. column has room for a number of every video. */
static const json_t *median_video(const json_t *videos, double *column)
{
    const int64_t used = cli_json_column(column, videos, "record.seconds");
    measure_median(column, used); /* sorts */
    for (size_t i = 0; used && i < json_array_size(videos); i++) {
        const json_t *v = json_array_get(videos, i);
        if (cli_json_number(v, "record.seconds") == column[(used - 1) / 2]) return v;
    }
    return json_array_get(videos, 0);
}

/* Median over the videos of every step: one slow step of one clip is noise of the machine. */
static int step_medians(report_variant *n, const json_t *videos, double *column)
{
    n->step_count = (int64_t)json_array_size(cli_json_at(videos, "0.record.step_seconds"));
    if (n->step_count == 0) return 1;
    n->steps = calloc((size_t)n->step_count, sizeof *n->steps);
    for (int64_t s = 0; n->steps && s < n->step_count; s++) {
        char path[64];
        snprintf(path, sizeof path, "record.step_seconds.%lld", (long long)s);
        n->steps[s] = measure_median(column, cli_json_column(column, videos, path));
    }
    return n->steps != NULL;
}

/* The entries of a row; 0 if the rows of a table differ, so that a table is no larger than its
 * text. */
static int64_t row_size(const json_t *table)
{
    const size_t size = json_array_size(json_array_get(table, 0));
    for (size_t i = 1; i < json_array_size(table); i++)
        if (json_array_size(json_array_get(table, i)) != size) return 0;
    return (int64_t)size;
}

/* [layers][heads], mean over the videos. */
static int head_densities(report_variant *n, const json_t *videos, double *column)
{
    const json_t *table = cli_json_at(videos, "0.record.head_density");
    int known = 0;
    n->layers = (int64_t)json_array_size(table);
    n->heads = row_size(table);
    if (n->dense || n->layers * n->heads == 0) return 1;
    n->head_density = calloc((size_t)(n->layers * n->heads), sizeof *n->head_density);
    if (!n->head_density) return 0;
    for (int64_t l = 0; l < n->layers; l++)
        for (int64_t h = 0; h < n->heads; h++) {
            char path[96];
            snprintf(path, sizeof path, "record.head_density.%lld.%lld", (long long)l,
                     (long long)h);
            const double x = measure_mean(column, cli_json_column(column, videos, path));
            n->head_density[l * n->heads + h] = x;
            known |= isfinite(x);
        }
    if (!known) {
        free(n->head_density);
        n->head_density = NULL;
    }
    return 1;
}

/* Anchors, and the age of what was carried at each step, as in the first video. */
static int carried_steps(report_variant *n, const json_t *videos)
{
    const json_t *carry = cli_json_at(videos, "0.record.carry"),
                 *ages = cli_json_at(carry, "step_age"), *anchors = cli_json_at(carry, "anchors");
    n->carry_count = (int64_t)json_array_size(ages);
    if (!json_array_size(anchors) || !n->carry_count) return 1;
    n->carry = calloc((size_t)n->carry_count, sizeof *n->carry);
    for (int64_t i = 0; n->carry && i < n->carry_count; i++) {
        const json_t *age = json_array_get(ages, (size_t)i);
        n->carry[i] = json_is_number(age) ? json_number_value(age) : (double)NAN;
    }
    for (size_t i = 0; n->carry && i < json_array_size(anchors); i++) {
        const double step = json_number_value(json_array_get(anchors, i));
        if (step >= 0 && step < (double)n->carry_count) n->carry[(int64_t)step] = 0;
    }
    n->figure[REPORT_ANCHORS] = (double)json_array_size(anchors);
    return n->carry != NULL;
}

/* Where the figures of a variant are: in speed.json, in quality.json, or in the record of the video
 * with the median time. */
static const struct {
    int figure;
    const char *path;
} in_speed[] = { { REPORT_SECONDS, "clip_seconds.median" },
                 { REPORT_STEP, "step_seconds.median" },
                 { REPORT_SPARSE_STEP, "step_seconds_sparse.median" },
                 { REPORT_SPEEDUP, "speedup" },
                 { REPORT_SPARSE_SPEEDUP, "speedup_without_warmup" } },
  in_quality[] = { { REPORT_MASS, "kept_mass" },
                   { REPORT_PSNR, "mean.psnr" },
                   { REPORT_SSIM, "mean.ssim" },
                   { REPORT_LPIPS, "mean.lpips" },
                   { REPORT_FLICKER, "mean.flicker" } },
  in_record[] = { { REPORT_TEXT, "record.text_seconds" },
                  { REPORT_DENOISE, "record.denoise_seconds" },
                  { REPORT_ATTENTION, "record.attention_seconds" },
                  { REPORT_SELECT, "record.select_seconds" },
                  { REPORT_DECODE, "record.decode_seconds" },
                  { REPORT_AGE, "record.carry.age" } };

static int read_speed_of(report_run *r, report_variant *n, const json_t *v)
{
    const json_t *videos = cli_json_at(v, "videos");
    double *column = malloc((json_array_size(videos) + 1) * sizeof *column);
    const int ready = column && step_medians(n, videos, column) &&
                      head_densities(n, videos, column) && carried_steps(n, videos);
    const json_t *median = ready ? median_video(videos, column) : NULL;
    free(column);
    for (int i = 0; i < 5; i++)
        n->figure[in_speed[i].figure] = cli_json_number(v, in_speed[i].path);
    for (int i = 0; i < 6; i++)
        n->figure[in_record[i].figure] = cli_json_number(median, in_record[i].path);
    if (n->dense)
        n->figure[REPORT_SPEEDUP] = n->figure[REPORT_SPARSE_SPEEDUP] = 1;
    else
        n->figure[REPORT_DENSITY] = cli_json_number(v, "density");
    const int64_t warmup = whole(cli_json_number(videos, "0.record.warmup_steps"));
    if (!n->dense && warmup > r->warmup) r->warmup = warmup;
    return ready;
}

static void read_quality_of(report_variant *n, const json_t *v)
{
    const size_t videos = json_array_size(cli_json_at(v, "videos"));
    double *density = &n->figure[REPORT_DENSITY];
    if (!isfinite(*density)) *density = cli_json_number(v, "density");
    for (int i = 0; i < 5; i++)
        n->figure[in_quality[i].figure] = cli_json_number(v, in_quality[i].path);
    n->identical = videos > 0 && cli_json_number(v, "identical") == (double)videos;
}

/* Reads the variants of speed.json or quality.json and their clips. */
static int read_variants(report_run *r, int file)
{
    const json_t *all = cli_json_at(r->value[file], "variants");
    for (size_t i = 0; i < json_array_size(all); i++) {
        const json_t *v = json_array_get(all, i), *videos = cli_json_at(v, "videos");
        report_variant *n = variant_of(r, v);
        if (!n) return cli_fail(REPORT_WHAT ": out of memory");
        if (n->seen & 1 << file)
            return cli_fail(REPORT_WHAT ": '%s/%s' names the variant '%s' twice", r->folder,
                            report_file_names[file], n->name);
        n->seen |= 1 << file;
        if (file == REPORT_SPEED && !read_speed_of(r, n, v))
            return cli_fail(REPORT_WHAT ": out of memory");
        if (file == REPORT_QUALITY) read_quality_of(n, v);
        for (size_t k = 0; k < json_array_size(videos); k++) {
            const json_t *video = json_array_get(videos, k);
            report_clip *clip = clip_of(r, n, video);
            if (!clip || file != REPORT_QUALITY) continue;
            clip->psnr = cli_json_number(video, "psnr");
            clip->ssim = cli_json_number(video, "ssim");
            clip->identical = json_is_true(cli_json_at(video, "identical"));
        }
    }
    return CLI_OK;
}

/* ---------------------------------------------------------------- the run */

/* The number of clips: one more than the largest "index". */
static int64_t count_clips(const report_run *r)
{
    int64_t count = 0;
    for (int f = REPORT_SPEED; f <= REPORT_QUALITY; f++) {
        const json_t *all = cli_json_at(r->value[f], "variants");
        for (size_t i = 0; i < json_array_size(all); i++) {
            const json_t *videos = cli_json_at(json_array_get(all, i), "videos");
            for (size_t k = 0; k < json_array_size(videos); k++) {
                const double index = cli_json_number(json_array_get(videos, k), "index");
                if (index >= (double)count && index < 100000) count = (int64_t)index + 1;
            }
        }
    }
    return count;
}

/* A few bytes of a file can ask for gigabytes and hours: a large "index" for a clip of every
 * variant, and each step and head of the first video for one of every other. */
static int check_sizes(const report_run *r)
{
    size_t variants = 0;
    double bytes = 0;
    for (int f = REPORT_SPEED; f <= REPORT_QUALITY; f++) {
        const json_t *all = cli_json_at(r->value[f], "variants");
        variants += json_array_size(all);
        for (size_t i = 0; i < json_array_size(all); i++) {
            const json_t *videos = cli_json_at(json_array_get(all, i), "videos"),
                         *heads = cli_json_at(videos, "0.record.head_density"),
                         *steps = cli_json_at(videos, "0.record.step_seconds"),
                         *ages = cli_json_at(videos, "0.record.carry.step_age");
            const double table = (double)json_array_size(heads) * (double)row_size(heads);
            bytes += (table + (double)json_array_size(steps)) * (double)json_array_size(videos) *
                         (double)sizeof(double) +
                     (double)json_array_size(ages) * (double)sizeof(double) +
                     (double)r->clip_count * (double)sizeof(report_clip);
        }
    }
    if (variants <= MOST_VARIANTS && bytes <= MOST_BYTES) return CLI_OK;
    return cli_fail(REPORT_WHAT ": the results in '%s' have %zu variants and figures of %.0f MB, "
                                "expected at most %d and %.0f MB",
                    r->folder, variants, 1e-6 * bytes, MOST_VARIANTS, 1e-6 * MOST_BYTES);
}

/* Looks for the mask file that a run names in its folder, then relative to the current folder. */
static void find_masks(report_run *r)
{
    const char *named[3] = { cli_json_string(r->value[REPORT_SPEED], "calibration.file"),
                             cli_json_string(r->value[REPORT_CONFIG], "settings.masks"),
                             "masks.safetensors" };
    for (int i = 0; i < 3 && !r->masks; i++) {
        char *path = named[i] ? joined(r->folder, named[i]) : NULL;
        if (exists(path))
            r->masks = path;
        else {
            free(path);
            if (named[i] && i < 2 && exists(named[i])) r->masks = strdup(named[i]);
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
    r->folder = strdup(folder);
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
    r->tag = strdup(tag ? tag : slash ? slash + 1 : r->folder);
    r->model = strdup(model ? model : "model not named");
    r->frames = number_of(r, "frames");
    r->height = number_of(r, "height");
    r->width = number_of(r, "width");
    r->step_count = number_of(r, "steps");
    snprintf(r->setting, sizeof r->setting, "%.80s %lldx%lldx%lld %lld %.80s",
             r->model ? r->model : "", (long long)r->frames, (long long)r->height,
             (long long)r->width, (long long)r->step_count, cpu ? cpu : "");
    r->clip_count = count_clips(r);
    r->prompts = calloc((size_t)(r->clip_count ? r->clip_count : 1), sizeof *r->prompts);
    if (!r->tag || !r->model || !r->prompts) return cli_fail(REPORT_WHAT ": out of memory");
    status = check_sizes(r);
    if (!status) status = read_variants(r, REPORT_SPEED);
    if (!status) status = read_variants(r, REPORT_QUALITY);
    if (status) return status;
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
        free(r->variants[i].carry);
    }
    for (int64_t c = 0; r->prompts && c < r->clip_count; c++) free(r->prompts[c]);
    for (int i = 0; i < 3; i++) {
        free(r->text[i]);
        json_decref(r->value[i]);
    }
    free(r->variants);
    free(r->prompts);
    free(r->folder);
    free(r->tag);
    free(r->model);
    free(r->masks);
    memset(r, 0, sizeof *r);
}
