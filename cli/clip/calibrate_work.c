/* calibrate_work.c - the folder of a calibration: make, compare settings, count, remove.
 * SPDX-License-Identifier: Apache-2.0 */
#include "clip/calibrate.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <esa/esa_tensors.h>
#include "core/folders.h"
#include "core/scratch.h"

static const char what[] = "calibrate";

/* The masks are made here and then moved. */
static const char *const names[] = { "recording.#", "masks", NULL };
static const cli_own own = { "settings.json", CALIBRATE_FORMAT, names };

void calibrate_recording(char path[CALIBRATE_PATH + 32], const calibrate_work *w, int64_t i)
{
    snprintf(path, CALIBRATE_PATH + 32, "%s/recording.%lld", w->folder, (long long)i);
}

void calibrate_shard_file(char path[CALIBRATE_PATH + 64], const calibrate_work *w, int64_t i)
{
    const int stem = (int)strlen(w->target) - (int)strlen(".recording");
    if (i < 0)
        snprintf(path, CALIBRATE_PATH + 64, "%.*s.json", stem, w->target);
    else if (i == 0)
        snprintf(path, CALIBRATE_PATH + 64, "%s", w->target);
    else
        snprintf(path, CALIBRATE_PATH + 64, "%.*s.%lld.recording", stem, w->target, (long long)i);
}

/* Removes a finished shard. The first recording goes first, because it marks the shard as finished;
 * the settings go last. */
static void remove_shard(const calibrate_work *w)
{
    char path[CALIBRATE_PATH + 64];
    int64_t i = 0;
    do calibrate_shard_file(path, w, i++);
    while (unlink(path) == 0);
    calibrate_shard_file(path, w, -1);
    unlink(path);
}

/* ---------------------------------------------------------------- settings */

/* The line that text starts in, without blanks and commas around it. */
static void line_of(char out[120], const char *text)
{
    const size_t before = strspn(text, " \t\n"), n = strcspn(text + before, "\n");
    snprintf(out, 120, "%.*s", (int)(n < 110 ? n : 110), text + before);
    for (size_t i = strlen(out); i > 0 && strchr(" ,", out[i - 1]); i--) out[i - 1] = 0;
}

/* The first line in which two JSON texts differ. */
static void first_difference(char theirs[120], char ours[120], const char *a, const char *b)
{
    const char *line_a = a, *line_b = b;
    while (*a && *a == *b) {
        if (*a == '\n') {
            line_a = a + 1;
            line_b = b + 1;
        }
        a++;
        b++;
    }
    line_of(theirs, line_a);
    line_of(ours, line_b);
}

/* CLI_OK if the file at path says what settings say. */
static int same_settings(const char *path, const char *settings, const char *begun)
{
    char theirs[120], ours[120];
    size_t bytes;
    char *old = cli_read_file(path, &bytes);
    if (!old)
        return cli_fail(
            "%s: '%s' cannot be read: give another --output, or start over with --restart", what,
            path);
    const int same = strcmp(old, settings) == 0;
    first_difference(theirs, ours, old, settings);
    free(old);
    if (same) return CLI_OK;
    if (strncmp(theirs, "\"weights_hash\"", 14) == 0)
        return cli_fail("%s: '%s' was begun with other weights than the model's folder holds "
                        "now; give another --output, or start over with --restart",
                        what, begun);
    return cli_fail("%s: '%s' was begun with other settings: %s there, %s here; finish it, give "
                    "another --output, or start over with --restart",
                    what, begun, theirs, ours);
}

/* ---------------------------------------------------------------- what is there */

/* Prompts in the recording at path; -1 after a message. */
static int64_t prompts_of(esa_ctx *ctx, const char *path)
{
    esa_tensors *file = NULL;
    const esa_status status = esa_tensors_open(ctx, &file, path);
    const char *text = !status ? esa_tensors_metadata(file, "prompts") : NULL;
    const int64_t prompts = text ? strtoll(text, NULL, 10) : -1;
    if (status)
        cli_fail_esa(ctx, status, what);
    else if (prompts < 1)
        cli_fail("%s: '%s' is not a recording: start over with --restart", what, path);
    esa_tensors_free(file);
    return prompts < 1 ? -1 : prompts;
}

/* Recordings are filled in turn; all but the last are full. */
static int count_prompts(calibrate_work *w, const calibrate_size *size)
{
    char path[CALIBRATE_PATH + 32];
    esa_ctx *ctx;
    int status = cli_ctx_new(&ctx, 1);
    w->done = w->bytes = 0;
    for (int64_t i = 0; !status && i < size->recordings; i++) {
        struct stat about;
        calibrate_recording(path, w, i);
        if (cli_is_missing(path)) break;
        if (stat(path, &about) != 0) {
            status = cli_fail("%s: '%s' cannot be read: %s", what, path, strerror(errno));
            break;
        }
        const int64_t prompts = prompts_of(ctx, path);
        if (prompts < 0)
            status = CLI_FAILED;
        else if (w->done != i * size->prompts_per_recording ||
                 prompts > size->prompts_per_recording)
            status = cli_fail("%s: '%s' counts %lld prompts, which this command cannot have "
                              "recorded: start over with --restart",
                              what, path, (long long)prompts);
        w->done += prompts;
        w->bytes += about.st_size;
    }
    esa_ctx_free(ctx);
    return status;
}

/* ---------------------------------------------------------------- open and close */

int calibrate_work_open(calibrate_work *w, const calibrate_options *o, const char *settings,
                        const calibrate_size *size)
{
    char path[CALIBRATE_PATH + 64];
    struct stat about;
    w->lock = -1;
    w->kept = (size_t)-1;
    w->done = w->bytes = 0;
    w->complete = 0;
    if (snprintf(w->folder, sizeof w->folder, "%s.part", w->target) >= (int)sizeof w->folder - 32)
        return cli_fail("%s: a name of %zu bytes cannot be written", what, strlen(w->target));
    if (stat(w->target, &about) == 0 && !S_ISREG(about.st_mode))
        return cli_fail("%s: '%s' is not a regular file and cannot be replaced", what, w->target);
    int status = cli_make_folder_of(w->target, &w->kept, what);
    if (!status) status = cli_scratch_open(&w->lock, w->folder, &own, what);
    if (status) return status;
    if (o->shard_count && o->restart) remove_shard(w);
    if (o->shard_count && !cli_is_missing(w->target)) {
        calibrate_shard_file(path, w, -1);
        status = same_settings(path, settings, w->target);
        w->complete = !status;
        return status;
    }
    calibrate_recording(path, w, 0);
    const int begun = !o->restart && !cli_is_missing(path);
    if (!begun) cli_scratch_clear(w->folder, &own);
    snprintf(path, sizeof path, "%s/%s", w->folder,
             own.marker); /* written before the first recording is */
    status = begun ? same_settings(path, settings, w->folder)
                   : cli_write_file(path, settings, strlen(settings));
    return status ? status : count_prompts(w, size);
}

void calibrate_work_remove(calibrate_work *w) { cli_scratch_remove(&w->lock, w->folder, &own); }

void calibrate_work_close(calibrate_work *w)
{
    char path[CALIBRATE_PATH + 32];
    if (w->lock >= 0) {
        calibrate_recording(path, w, 0);
        if (cli_is_missing(path)) cli_scratch_clear(w->folder, &own);
        cli_scratch_close(&w->lock, w->folder);
    }
    cli_folder_of(path, sizeof path, w->target);
    cli_unmake_folders(path, w->kept); /* stops at the first that holds anything */
}
