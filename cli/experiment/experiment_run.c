/* experiment_run.c - `esa experiment run`: calibrates, makes the clips, measures. Each stage skips
 * what exists already.
 * SPDX-License-Identifier: Apache-2.0 */
#include "experiment/experiment.h"
#include "clip/calibrate.h"
#include "core/folders.h"
#include "core/scratch.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char what[] = "experiment run";

static int exists(const char *path) { return !cli_is_missing(path); }

/* ---------------------------------------------------------------- the work folder */

/* Also what another program leaves there, which makes the videos (experiment_outside.c). */
static const char *const work_names[] = { "request.json",
                                          "calibration.json",
                                          "config.json",
                                          "speed.json",
                                          "quality.json",
                                          "video.mp4",
                                          "video.y4m",
                                          "clips/",
                                          "clips/*-#.json",
                                          "frames/",
                                          "frames/*/",
                                          "frames/*/#.safetensors",
                                          NULL };
static const cli_own work_own = { NULL, NULL, work_names };
static const char *const frame_names[] = { "*/", "*/#.safetensors", NULL };
static const cli_own frames_own = { NULL, NULL, frame_names };

int experiment_check_folders(const experiment *e, const char *who)
{
    char path[EXPERIMENT_PATH];
    experiment_path(e, path, "work");
    int status = cli_scratch_check(path, &work_own, who);
    experiment_path(e, path, "frames");
    if (!status && e->keep_frames) status = cli_scratch_check(path, &frames_own, who);
    return status;
}

/* Locks the folder against other runs. */
static int take_lock(const experiment *e, int *lock)
{
    char path[EXPERIMENT_PATH];
    experiment_path(e, path, "work");
    return cli_scratch_open(lock, path, &work_own, what);
}

/* ---------------------------------------------------------------- calibration */

/* Notes how long calibration took, for speed.json; NaN if an earlier run began it. */
static int note_calibration(const experiment *e, double seconds)
{
    char path[EXPERIMENT_PATH];
    experiment_path(e, path, "work/calibration.json");
    cli_json *json = cli_json_new();
    cli_json_real(json, "seconds", seconds);
    return cli_json_save(json, path);
}

static int calibrate(const experiment *e)
{
    char part[EXPERIMENT_PATH + 8];
    if (!e->masks[0] || exists(e->masks)) {
        if (e->masks[0]) fprintf(stderr, "calibrate: %s is there\n", e->masks);
        return CLI_OK;
    }
    if (e->skip_calibrate)
        return cli_fail("%s: --skip-calibrate, but there is no mask file '%s' (--masks names "
                        "another one; without --skip-calibrate it is made)",
                        what, e->masks);
    snprintf(part, sizeof part, "%s.part", e->masks);
    const int resumed = exists(part);
    calibrate_options o = calibrate_options_default();
    o.clip = e->clip; /* the sizes, noise and blocks of the clips */
    o.clip.open.model = e->maker.folder;
    o.budgets = e->budgets;
    o.prompts_file = e->prompts_file;
    o.num_prompts = e->num_prompts;
    o.output = e->masks;
    const double start = cli_seconds();
    const int status = calibrate_run(&o);
    if (status) return status;
    return e->only_calibrate ? CLI_OK
                             : note_calibration(e, resumed ? (double)NAN : cli_seconds() - start);
}

/* ---------------------------------------------------------------- clips */

static int save(experiment *e, const esa_frames *frames, const char *path)
{
    const esa_status status = e->maker.video.frames_save(e->maker.ctx, frames, path, NULL);
    return cli_status(e->maker.ctx, status, what);
}

/* Makes a clip unless it exists: the video, its uncompressed frames for the comparison, and last
 * the record, which marks the clip as complete. */
static int one_clip(experiment *e, const experiment_variant *v, int64_t index, int64_t clips_left)
{
    char name[160], part[EXPERIMENT_PATH], video[EXPERIMENT_PATH], frames_path[EXPERIMENT_PATH],
        record_path[EXPERIMENT_PATH], label[96];
    const char *ending = cli_video_mp4() ? "mp4" : "y4m";
    snprintf(name, sizeof name, "videos/%s/%03lld.%s", v->name, (long long)index, ending);
    experiment_path(e, video, "%s", name);
    experiment_path(e, part, "work/video.%s", ending);
    experiment_path(e, frames_path, "work/frames/%s/%03lld.safetensors", v->name, (long long)index);
    experiment_path(e, record_path, "work/clips/%s-%03lld.json", v->name, (long long)index);
    if (exists(record_path) && exists(frames_path) && exists(video)) return CLI_OK;
    clip_request r = v->method == METHOD_DENSE ? clip_dense(&e->clip) : e->clip;
    r.method = v->method;
    r.p.session.select.budget = v->budget;
    r.p.prompt = e->evaluation.line[index];
    r.p.masks = v->method == METHOD_CACHED ? e->masks : NULL;
    snprintf(label, sizeof label, "prompt %lld/%lld, %s", (long long)index + 1,
             (long long)e->evaluation.count, v->name);
    esa_frames *frames = NULL;
    clip_record record;
    int status = clip_make(&e->maker, &frames, &record, &r, label, clips_left, 0);
    if (status == CLIP_INTERRUPTED)
        cli_fail("%s: interrupted; the clips before this one are kept; the same command continues "
                 "from there",
                 what);
    if (status) return status;
    /* The record of an older clip without frames: the new clip is complete with its own record. */
    unlink(record_path);
    /* Only after the first clip: settings that cannot work must not occupy the tag. */
    status = experiment_config(e, what, 1);
    if (!status) status = cli_make_folder_of(frames_path, NULL, what);
    if (!status) status = cli_make_folder_of(record_path, NULL, what);
    if (!status) status = save(e, frames, part);
    if (!status)
        status = experiment_move(e, part + strlen(e->folder) + strlen("/work/"), name, what);
    if (!status) status = save(e, frames, frames_path);
    if (!status) {
        cli_json *json = cli_json_new();
        cli_json_compact(json);
        cli_json_fields(json, "index %ld prompt %s file %s", index, r.p.prompt, name);
        cli_json_open(json, "record", '{');
        clip_record_json(json, &record);
        cli_json_close(json);
        status = cli_json_save(json, record_path);
    }
    if (!status)
        fprintf(stderr, "%s: %.1f s, %.3f s/step, density %.3f\n", label, record.stats.seconds,
                clip_step_mean(&record, 1), clip_density(&record));
    e->maker.video.frames_free(frames);
    clip_record_free(&record);
    return status;
}

/* Makes the clips prompt by prompt, dense and sparse in turn, so that changes of the machine's
 * speed affect all variants alike. */
static int all_clips(experiment *e)
{
    int status = CLI_OK;
    int64_t left = e->evaluation.count * e->variants;
    for (int64_t i = 0; i < e->evaluation.count && !status; i++)
        for (int v = 0; v < e->variants && !status; v++)
            status = one_clip(e, &e->variant[v], i, --left);
    return status;
}

/* ---------------------------------------------------------------- the whole */

int experiment_clean_up(const experiment *e, int made, const char *who)
{
    char path[EXPERIMENT_PATH];
    if (made && e->keep_frames) {
        experiment_path(e, path, "frames");
        cli_scratch_clear(path, &frames_own); /* frames of an older run */
        const int status = experiment_move(e, "frames", "frames", who);
        if (status) return status;
    }
    experiment_path(e, path, "work");
    cli_scratch_clear(path, &work_own);
    return CLI_OK;
}

/* Releases the lock. A run that made nothing, because it failed early or only calibrated, leaves no
 * folder behind. */
static void release(const experiment *e, int *lock, size_t kept)
{
    char path[EXPERIMENT_PATH];
    experiment_path(e, path, "work");
    if (*lock >= 0) cli_scratch_close(lock, path);
    cli_unmake_folders(e->folder, kept);
}

static int open_model(experiment *e, int only_look)
{
    /* Reading the configuration converts no weights. */
    clip_opening opening = e->clip.open;
    if (only_look) opening.hold = ESA_HOLD_FILE;
    return clip_open(&e->maker, &opening, what);
}

int experiment_complete(const experiment *e)
{
    char speed[EXPERIMENT_PATH], quality[EXPERIMENT_PATH];
    experiment_path(e, speed, "speed.json");
    experiment_path(e, quality, "quality.json");
    return exists(speed) && exists(quality);
}

/* Checks the LPIPS weights before the clips are made. */
static int check_lpips(const experiment *e)
{
    esa_lpips *lpips = NULL;
    if (!e->lpips_weights) return CLI_OK;
    const esa_status status = e->maker.video.lpips_open(e->maker.ctx, &lpips, e->lpips_weights);
    e->maker.video.lpips_free(lpips);
    return cli_status(e->maker.ctx, status, what);
}

static int stages(experiment *e, int *made)
{
    int status = open_model(e, 1);
    if (!status) status = experiment_resolve(e, what);
    if (!status && !e->only_calibrate) status = experiment_config(e, what, 0);
    if (!status && !e->only_calibrate) status = check_lpips(e);
    if (!status && !e->only_calibrate && experiment_complete(e)) {
        clip_close(&e->maker);
        return CLI_OK;
    }
    *made = 1;
    clip_close(&e->maker);
    if (!status) status = experiment_check_folders(e, what);
    if (!status) status = calibrate(e);
    if (status || e->only_calibrate) return status;
    status = open_model(e, 0);
    /* The masks were made for these settings: a run that is stopped before its first clip must not
     * continue with others. */
    if (!status && e->masks[0] && !e->clip.p.masks) status = experiment_config(e, what, 1);
    if (!status) status = all_clips(e);
    if (!status) status = experiment_speed(e, what);
    clip_close(&e->maker);
    if (status) return status;
    status = experiment_quality(e, what);
    if (status == CLIP_INTERRUPTED)
        cli_fail("%s: interrupted; all clips are made; the same command compares them", what);
    return status;
}

int cmd_experiment_run(int argc, char **argv)
{
    experiment e;
    size_t kept = (size_t)-1;
    int done = 0, lock = -1, made = 0;
    int status = experiment_parse(
        &e, "esa experiment run",
        "Calibrates, makes every video dense and at each budget, and "
        "measures speed and difference from dense.\n"
        "Results go to results/<tag>/. Finished parts are not made again: "
        "a stopped run continues where it was.",
        NULL, argc, argv, &done);
    if (status || done) {
        experiment_free(&e);
        return status;
    }
    status = cli_make_folders(e.folder, &kept, what);
    if (!status) status = take_lock(&e, &lock);
    if (!status) status = stages(&e, &made);
    if (!status && !e.only_calibrate) status = experiment_clean_up(&e, made, what);
    release(&e, &lock, kept);
    if (!status && e.only_calibrate)
        printf("%s: masks for %d budget%s\n", e.masks, e.budgets.count,
               e.budgets.count > 1 ? "s" : "");
    else if (!status) {
        if (!made) fprintf(stderr, "%s is complete\n", e.folder);
        status = experiment_print(e.folder, what);
    }
    experiment_free(&e);
    return status;
}
