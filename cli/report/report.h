/* report.h - the parts of `esa report`, which turns results folders and mask files into one
 * self-contained HTML page.
 * SPDX-License-Identifier: Apache-2.0
 *
 *   report_results.c   reads a results folder into a report_run: figures and videos
 *   report_data.c      writes runs as the JSON that the page draws from
 *   report_media.c     puts one video into the page
 *   report_masks.c     writes a mask file as JSON: densities, entropies, and bits as base64
 *   report_page.c      fills in the template cli/report/page/page.html
 *   report_carry.c     writes the table of anchors into it
 *   report_text.c      the growing text they all write to */
#ifndef ESA_CLI_REPORT_H
#define ESA_CLI_REPORT_H

#include "core/cli.h"
#include "clip/video.h"

#define REPORT_WHAT "report" /* begins every message */

/* ---------------------------------------------------------------- text (report_text.c) */

typedef struct report_text { /* all zeros: an empty text */
    char *text;
    size_t used, room;
    int failed; /* out of memory; checked at the end */
} report_text;
void report_put(report_text *t, const char *text, size_t bytes);
void report_puts(report_text *t, const char *text);
/* Takes %s, %d, %u, %ld and %g alone. %s goes through report_html. */
void report_printf(report_text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Escapes & < > " for elements and quoted attributes; bytes that are not UTF-8 become U+FFFD. */
void report_html(report_text *t, const char *text);
void report_base64(report_text *t, const void *data, size_t bytes);
void report_text_free(report_text *t);

/* ---------------------------------------------------------------- results (report_results.c) */

/* Figures of a variant; NaN if unknown. SPARSE_ figures leave out the warm-up steps. The seconds of
 * the parts are those of the clip with the median time, and ATTENTION includes SELECT. */
enum {
    REPORT_BUDGET,
    REPORT_DENSITY,
    REPORT_MASS,
    REPORT_SECONDS,
    REPORT_STEP,
    REPORT_SPARSE_STEP,
    REPORT_SPEEDUP,
    REPORT_SPARSE_SPEEDUP,
    REPORT_PSNR,
    REPORT_SSIM,
    REPORT_LPIPS,
    REPORT_FLICKER,
    REPORT_ANCHORS,
    REPORT_AGE,
    REPORT_TEXT,
    REPORT_SELECT,
    REPORT_ATTENTION,
    REPORT_DENOISE,
    REPORT_DECODE,
    REPORT_FIGURES
};

typedef struct report_clip { /* one clip of one variant */
    char *video;             /* file or folder of pictures, or NULL */
    double psnr, ssim;       /* NaN if unknown */
    int identical;           /* 1: equal to the dense video, bit for bit */
} report_clip;

typedef struct report_variant { /* one way of running: dense, or a method at a budget */
    char name[64];              /* as in the files: "dense", "b0.5" */
    char label[96];             /* as shown: "cached 0.5" */
    /* "cached masks, pooled tail": variants of a family differ only in their budget */
    char family[96];
    int dense, identical;
    int seen; /* bit f: file f names it */
    double figure[REPORT_FIGURES];
    double *steps; /* [step_count]: seconds of every denoising step */
    int64_t step_count;
    double *head_density; /* [layers][heads] as measured, or NULL */
    int64_t layers, heads;
    /* [carry_count], or NULL if nothing was carried: steps since the anchor, 0 at an anchor; NaN:
     * the step carried nothing */
    double *carry;
    int64_t carry_count;
    report_clip *clips; /* [clip_count of the run] */
} report_variant;

typedef struct report_run {
    char *folder, *tag, *model;
    /* model, size, steps and machine: charts join runs with the same setting by a line */
    char setting[256];
    char *masks; /* the mask file it names, or NULL if there is none */
    int64_t frames, height, width, step_count, warmup;
    char **prompts; /* [clip_count]; unknown prompts are NULL */
    int64_t clip_count;
    report_variant *variants; /* the dense one first */
    int variant_count;
    char *text[3]; /* config.json, speed.json, quality.json as they are; NULL if missing */
    json_t *value[3];
} report_run;

enum { REPORT_CONFIG = 0, REPORT_SPEED = 1, REPORT_QUALITY = 2 };
extern const char *const report_file_names[3];

/* Reads a results folder. One of speed.json and quality.json may be missing, and config.json. Call
 * report_run_free in any case. */
int report_run_read(report_run *run, const char *folder);
void report_run_free(report_run *run);

/* ---------------------------------------------------------------- videos (report_media.c) */

typedef struct report_media { /* the videos of a page */
    esa_ctx *ctx;             /* the caller's */
    const char *room;         /* the page's folder, where videos are converted; NULL: none */
    cli_video video;          /* the engine, opened for the first video */
    const char *label;        /* what the current video shows */
    double fps;               /* rate and frames of the last video */
    int64_t frames;
    int64_t embedded;    /* videos in the page */
    int64_t as_pictures; /* those shown as pictures, because there is no encoder */
    int64_t left_out;
    char *reason; /* why the last one was left out, or NULL; owned */
} report_media;
/* Writes the element that shows path (<video> or a pile of <img>), and sets fps and frames of
 * media. If the video cannot be shown, or does not lie in folder, it writes a message in its place,
 * sets frames to 0 and counts it. label describes the video for screen readers. After a signal
 * (clip_interrupted) it does nothing. */
void report_media_embed(report_text *t, report_media *media, const char *folder, const char *path,
                        const char *label);
void report_media_close(report_media *media);

/* ---------------------------------------------------------------- mask files (report_masks.c) */

/* Adds the object of one mask file with at most limit bytes of mask bits. For larger files it picks
 * layers and steps evenly, and the page says so. */
int report_masks_json(cli_json *json, esa_ctx *ctx, const char *path, int64_t limit);

/* ---------------------------------------------------------------- the page (report_data.c,
 * report_page.c) */

/* Adds "runs". */
void report_runs_json(cli_json *json, const report_run *runs, int count);
typedef struct report_page {
    const char *title;
    const report_run *runs;
    int run_count;
    int mask_count;
    const char *data; /* the JSON: {"runs": [...], "masks": [...]} */
    size_t data_bytes;
    int videos;         /* 0: no videos in the page */
    int64_t max_clips;  /* prompts of each run whose videos are shown */
    report_media media; /* what became of the videos */
} report_page;
void report_page_write(report_text *t, report_page *page);
/* Between the files: the colour of a variant, as a style; and a name of a run's part, behind the
 * run's tag if there are several runs. */
const char *report_tone(char out[32], const report_page *page, int run, int variant);
void report_name(report_text *t, const report_page *page, int run, const char *name);
/* The card with a row of anchors for each variant that has some (report_carry.c). */
void report_carry(report_text *t, const report_page *page);

#endif
