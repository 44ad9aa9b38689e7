/* cmd_report.c - `esa report`: turns results folders and mask files into one self-contained HTML
 * page.
 * SPDX-License-Identifier: Apache-2.0 */
#include "report/report.h"
#include "clip/clip.h"
#include "core/folders.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_MASKS 16
#define MAX_PAGE  (1000LL << 20) /* bytes; browsers do not open larger pages */

typedef struct request {
    const char *output, *title, *masks;
    int64_t max_clips, mask_mb;
    int no_videos;
} request;

/* Lists the mask files: those of --masks, otherwise those that the results name, each once. */
static int mask_files(char *names[MAX_MASKS], int *count, const request *q, const report_run *runs,
                      int run_count)
{
    *count = 0;
    for (const char *p = q->masks; p && *p; p += *p == ',') {
        const size_t n = strcspn(p, ",");
        if (n && *count == MAX_MASKS)
            return cli_usage(REPORT_WHAT ": at most %d mask files", MAX_MASKS);
        if (n && !(names[(*count)++] = strndup(p, n)))
            return cli_fail(REPORT_WHAT ": out of memory");
        p += n;
    }
    for (int r = 0; r < run_count && !q->masks && *count < MAX_MASKS; r++) {
        int known = !runs[r].masks;
        for (int i = 0; i < *count && !known; i++) known = strcmp(names[i], runs[r].masks) == 0;
        if (!known && !(names[(*count)++] = strdup(runs[r].masks)))
            return cli_fail(REPORT_WHAT ": out of memory");
    }
    return CLI_OK;
}

static void default_title(char *out, size_t size, const report_run *runs, int count,
                          char *const *masks)
{
    if (count == 0) {
        const char *slash = strrchr(masks[0], '/');
        snprintf(out, size, "Masks: %s", slash ? slash + 1 : masks[0]);
    } else if (count == 1)
        snprintf(out, size, "%s: sparse against dense", runs[0].tag);
    else
        snprintf(out, size, "%s and %d more: sparse against dense", runs[0].tag, count - 1);
}

/* The folder of the page, where videos are converted; "" if the page goes into a pipe or device. */
static void page_folder(char *room, size_t size, const char *output)
{
    struct stat about;
    if (stat(output, &about) == 0 && !S_ISREG(about.st_mode))
        *room = 0;
    else
        cli_folder_of(room, size, output);
}

/* The JSON the page draws from; NULL after a message. */
static char *page_data(const request *q, esa_ctx *ctx, const report_run *runs, int count,
                       char *const *masks, int mask_count, size_t *bytes)
{
    int status = CLI_OK;
    cli_json *json = cli_json_new();
    cli_json_compact(json);
    report_runs_json(json, runs, count);
    cli_json_open(json, "masks", '[');
    for (int i = 0; i < mask_count && !status; i++)
        status = report_masks_json(json, ctx, masks[i], (q->mask_mb << 20) / mask_count);
    cli_json_close(json);
    char *data = cli_json_take(json, bytes);
    if (!status && !data) cli_fail(REPORT_WHAT ": out of memory");
    if (!status) return data;
    free(data);
    return NULL;
}

static void print_summary(const request *q, const report_page *page, size_t bytes)
{
    const report_media *m = &page->media;
    printf("%s: %.1f MB, %d run%s, %lld video%s, %d mask file%s\n", q->output, 1e-6 * (double)bytes,
           page->run_count, page->run_count == 1 ? "" : "s", (long long)m->embedded,
           m->embedded == 1 ? "" : "s", page->mask_count, page->mask_count == 1 ? "" : "s");
    if (m->as_pictures)
        fprintf(stderr,
                "note: %lld video%s shown picture by picture: this FFmpeg has no H.264 encoder "
                "(libx264), and browsers do not play older MPEG-4\n",
                (long long)m->as_pictures, m->as_pictures == 1 ? " is" : "s are");
    if (m->left_out)
        fprintf(stderr, "note: %lld video%s left out, the page says why: %s\n",
                (long long)m->left_out, m->left_out == 1 ? " is" : "s are",
                m->reason ? m->reason : "");
}

/* Makes and writes the page of these runs and mask files. */
static int write_page(const request *q, esa_ctx *ctx, const report_run *runs, int count,
                      char *const *masks, int mask_count)
{
    char title[256], room[4200];
    int status = CLI_OK;
    size_t bytes = 0;
    report_text text = { 0 };
    char *data = page_data(q, ctx, runs, count, masks, mask_count, &bytes);
    if (!data) return CLI_FAILED;
    page_folder(room, sizeof room, q->output);
    default_title(title, sizeof title, runs, count, masks);
    report_page page = { .title = q->title ? q->title : title,
                         .runs = runs,
                         .run_count = count,
                         .mask_count = mask_count,
                         .data = data,
                         .data_bytes = bytes,
                         .videos = !q->no_videos,
                         .max_clips = q->max_clips,
                         .media = { .ctx = ctx, .room = room[0] ? room : NULL } };
    report_page_write(&text, &page);
    if (clip_interrupted()) {
        cli_fail(REPORT_WHAT ": interrupted, nothing was written");
        status = CLIP_INTERRUPTED;
    } else if (text.failed)
        status = cli_fail(REPORT_WHAT ": out of memory");
    else if ((int64_t)text.used > MAX_PAGE)
        status = cli_fail(REPORT_WHAT ": the page would have %lld MB, more than browsers open; "
                                      "--max-prompts N shows the videos of fewer prompts",
                          (long long)(text.used >> 20));
    else
        status = cli_write_file(q->output, text.text, text.used);
    if (!status) print_summary(q, &page, text.used);
    report_media_close(&page.media);
    report_text_free(&text);
    free(data);
    return status;
}

static int make_report(const request *q, char **folders, int count)
{
    report_run *runs = calloc((size_t)(count ? count : 1), sizeof *runs);
    char *masks[MAX_MASKS] = { NULL };
    int mask_count = 0, read = 0;
    esa_ctx *ctx = NULL;
    int status = runs ? CLI_OK : cli_fail(REPORT_WHAT ": out of memory");
    for (; read < count && !status; read++) status = report_run_read(&runs[read], folders[read]);
    if (!status) status = mask_files(masks, &mask_count, q, runs, count);
    if (!status && count == 0 && mask_count == 0)
        status = cli_usage(REPORT_WHAT ": --masks names no file");
    if (!status) status = cli_ctx_new(&ctx, 1);
    if (!status) status = write_page(q, ctx, runs, count, masks, mask_count);
    for (int i = 0; i < mask_count; i++) free(masks[i]);
    for (int i = 0; i < read; i++) report_run_free(&runs[i]);
    free(runs);
    esa_ctx_free(ctx);
    return status;
}

int cmd_report(int argc, char **argv)
{
    request q = { .output = "report.html", .max_clips = 100000, .mask_mb = 16 };
    int words = 0, done;
    const cli_option options[] = {
        { "--output", CLI_OUTPUT, &q.output, "FILE", 0, 0, 0, "the page to write (report.html)" },
        { "--masks", CLI_TEXT, &q.masks, "FILE,...", 0, 0, 0,
          "mask files to show (those that the results name)" },
        { "--title", CLI_TEXT, &q.title, "TEXT", 0, 0, 0,
          "heading of the page (made from the tags)" },
        { "--max-prompts", CLI_INT, &q.max_clips, "N", 1, 100000, 0,
          "show the videos of the first N prompts of each folder (all)" },
        { "--no-videos", CLI_FLAG, &q.no_videos, NULL, 0, 0, 0,
          "leave out the videos, for a small page (off)" },
        { "--mask-mb", CLI_INT, &q.mask_mb, "N", 1, 500, 0,
          "most megabytes of mask pictures; the page shows only some layers and steps of larger "
          "files (16)" },
        { NULL, 0, NULL, NULL, 0, 0, 0, NULL },
    };
    int status = cli_options("esa report", "RESULTS... [--output report.html] [options]",
                             "Makes one HTML page from results folders (esa experiment run) and "
                             "mask files: videos side by side, quality against\n"
                             "density and speed, time per step, density and entropy per head, mask "
                             "pictures. The page needs no other file and no network.",
                             options, argc, argv, &words, &done);
    if (status || done) return status;
    if (words == 0 && !q.masks)
        return cli_usage(REPORT_WHAT ": give a results folder or --masks FILE; 'esa report --help' "
                                     "lists the options");
    /* after a signal, the work ends between two videos and removes its scratch folder */
    clip_catch_signals();
    return make_report(&q, argv, words);
}
