/* experiment_run.c - `esa experiment run`: calibrates, makes the clips, measures. Each stage skips
 * what exists already.
 * SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE /* flock */
#include "experiment/experiment.h"
#include "clip/calibrate.h"
#include "core/folders.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static const char what[] = "experiment run";

static int exists(const char *path)
{
    struct stat about;
    return stat(path, &about) == 0;
}

/* ---------------------------------------------------------------- the work folder */

/* Locks the folder against other runs. The lock ends with this process, however it ends. */
static int take_lock(const experiment *e, int *lock)
{
    char path[EXPERIMENT_PATH];
    experiment_path(e, path, "work");
    int status = cli_make_folders(path, NULL, what);
    if (status) return status;
    experiment_path(e, path, "work/lock");
    for (int tries = 0; tries < 100; tries++) {
        struct stat held, there;
        *lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (*lock < 0) return cli_fail("%s: cannot write '%s': %s", what, path, strerror(errno));
        if (flock(*lock, LOCK_EX | LOCK_NB) != 0)
            return errno == EWOULDBLOCK
                       ? cli_fail("%s: another run is working in '%s'", what, e->folder)
                       : cli_fail("%s: cannot lock '%s': %s", what, path, strerror(errno));
        /* If another run ended meanwhile, it has removed the file we locked: try again. */
        if (fstat(*lock, &held) == 0 && stat(path, &there) == 0 && held.st_ino == there.st_ino &&
            held.st_dev == there.st_dev)
            return CLI_OK;
        close(*lock);
        *lock = -1;
        if ((status = cli_make_folder_of(path, NULL, what)) != 0) return status;
    }
    return cli_fail("%s: cannot lock '%s'", what, path);
}

/* Removes a folder with its contents, at most depth levels down. */
static void remove_folder(const char *folder, int depth)
{
    DIR *list = opendir(folder);
    for (struct dirent *d; list && (d = readdir(list)) != NULL;) {
        char path[EXPERIMENT_PATH];
        if (strcmp(d->d_name, ".") == 0 || strcmp(d->d_name, "..") == 0) continue;
        if (snprintf(path, sizeof path, "%s/%s", folder, d->d_name) >= (int)sizeof path) continue;
        if (unlink(path) != 0 && depth > 0) remove_folder(path, depth - 1);
    }
    if (list) closedir(list);
    rmdir(folder);
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
    char path[EXPERIMENT_PATH], frames[EXPERIMENT_PATH];
    if (made && e->keep_frames) {
        experiment_path(e, frames, "frames");
        remove_folder(frames, 2); /* frames of an older run */
        const int status = experiment_move(e, "frames", "frames", who);
        if (status) return status;
    }
    experiment_path(e, path, "work");
    remove_folder(path, 3);
    return CLI_OK;
}

/* Removes the work folder of a run that made nothing: it failed early, or only calibrated. The
 * caller holds the lock. */
static void leave_no_trace(const experiment *e, size_t kept)
{
    char path[EXPERIMENT_PATH];
    int entries = 0;
    experiment_path(e, path, "work");
    DIR *list = opendir(path);
    while (list && readdir(list)) entries++;
    if (list) closedir(list);
    if (entries != 3) return; /* . and .. and the lock */
    experiment_path(e, path, "work/lock");
    unlink(path);
    experiment_path(e, path, "work");
    rmdir(path);
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
    size_t kept = 0;
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
    const int locked = !status;
    if (!status) status = stages(&e, &made);
    if (!status && !e.only_calibrate)
        status = experiment_clean_up(&e, made, what);
    else if (locked)
        leave_no_trace(&e, kept);
    if (lock >= 0) close(lock);
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
