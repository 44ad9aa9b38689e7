/* report_media.c - one video inside the page: an MP4 that browsers play as it is; what they do not
 * play made into one, or into a pile of pictures where there is no H.264 encoder.
 * SPDX-License-Identifier: Apache-2.0 */
#include "report/report.h"
#include "clip/clip.h"

#include <dirent.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PICTURES_FPS 16.0 /* folders of pictures carry no rate: Wan's own */
#define MAX_PICTURES 1000

/* A sentence instead of the video. */
__attribute__((format(printf, 3, 4))) static void leave_out(report_text *t, report_media *media,
                                                            const char *format, ...)
{
    char text[600];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    report_puts(t, "<p class=\"why\">");
    report_html(t, text);
    report_puts(t, "</p>");
    media->left_out++;
    free(media->reason);
    media->reason = malloc(strlen(text) + 1);
    if (media->reason) strcpy(media->reason, text);
}

/* ---------------------------------------------------------------- folders of pictures */

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static void free_names(char **names, int count)
{
    for (int i = 0; i < count; i++) free(names[i]);
    free(names);
}

/* The PNG files of a folder, sorted; the count, or -1: out of memory or unreadable. */
static int list_pictures(char ***names, const char *folder)
{
    DIR *d = opendir(folder);
    int count = 0, room = 0, failed = !d;
    *names = NULL;
    for (struct dirent *e; !failed && count < MAX_PICTURES && (e = readdir(d));) {
        const size_t n = strlen(e->d_name);
        if (n < 5 || strcmp(e->d_name + n - 4, ".png") != 0) continue;
        if (count == room) {
            char **grown = realloc(*names, (size_t)(room = 2 * room + 64) * sizeof *grown);
            if (!grown) {
                failed = 1;
                break;
            }
            *names = grown;
        }
        (*names)[count] = malloc(strlen(folder) + n + 2);
        if (!(*names)[count]) {
            failed = 1;
            break;
        }
        sprintf((*names)[count++], "%s/%s", folder, e->d_name);
    }
    if (d) closedir(d);
    if (failed) {
        free_names(*names, count);
        *names = NULL;
        return -1;
    }
    qsort(*names, (size_t)count, sizeof **names, by_name);
    return count;
}

/* Width and height of a PNG; 0: it is none. */
static int png_size(const unsigned char *p, size_t bytes, unsigned *width, unsigned *height)
{
    if (bytes < 24 || memcmp(p, "\x89PNG\r\n\x1a\n", 8) != 0 || memcmp(p + 12, "IHDR", 4) != 0)
        return 0;
    *width = (unsigned)p[16] << 24 | (unsigned)p[17] << 16 | (unsigned)p[18] << 8 | p[19];
    *height = (unsigned)p[20] << 24 | (unsigned)p[21] << 16 | (unsigned)p[22] << 8 | p[23];
    return 1;
}

static void embed_pictures(report_text *t, report_media *media, double *fps, int64_t *frames,
                           const char *folder, double rate, const char *label)
{
    char **names;
    report_text pile = { 0 };
    const int count = list_pictures(&names, folder);
    int64_t bytes = 0;
    if (count <= 0) {
        leave_out(t, media, "'%s' holds no PNG pictures.", folder);
        return;
    }
    report_puts(&pile, "<div class=\"frames\" role=\"img\" aria-label=\"");
    report_html(&pile, label);
    report_puts(&pile, "\">");
    int i = 0;
    for (; i < count; i++) {
        size_t size;
        unsigned width, height;
        char *data = cli_read_file(names[i], &size);
        if (!data || !png_size((const unsigned char *)data, size, &width, &height)) {
            free(data);
            break;
        }
        report_printf(&pile,
                      "<img alt=\"\" width=\"%u\" height=\"%u\" src=\"data:image/png;base64,",
                      width, height);
        report_base64(&pile, data, size);
        report_puts(&pile, "\">");
        bytes += (int64_t)size;
        free(data);
    }
    report_puts(&pile, "</div>");
    if (i < count)
        leave_out(t, media, "'%s' is no PNG picture that can be read.", names[i]);
    else if (pile.failed)
        t->failed = 1;
    else {
        report_put(t, pile.text, pile.used);
        *fps = rate;
        *frames = count;
        media->embedded++;
        media->bytes += bytes;
    }
    report_text_free(&pile);
    free_names(names, count);
}

/* ---------------------------------------------------------------- files */

static void embed_mp4(report_text *t, report_media *media, double *fps, int64_t *frames,
                      const report_mp4 *mp4, const char *data, size_t size, const char *label)
{
    report_puts(t, "<video muted playsinline controls preload=\"auto\"");
    if (mp4->width > 0 && mp4->height > 0)
        report_printf(t, " width=\"%d\" height=\"%d\"", (int)mp4->width, (int)mp4->height);
    report_puts(t, " aria-label=\"");
    report_html(t, label);
    report_puts(t, "\" src=\"data:video/mp4;base64,");
    report_base64(t, data, size);
    report_puts(t, "\"></video>");
    *fps = mp4->fps;
    *frames = mp4->frames;
    media->embedded++;
    media->bytes += (int64_t)size;
}

/* ---------------------------------------------------------------- what browsers do not play */

static void remove_scratch(const char *folder, const char *mp4, const char *pictures)
{
    char **names;
    const int count = list_pictures(&names, pictures);
    for (int i = 0; i < count; i++) unlink(names[i]);
    if (count > 0) free_names(names, count);
    unlink(mp4);
    rmdir(pictures);
    rmdir(folder);
}

/* Decoded frames go through a scratch folder beside the page, because nothing is written where the
 * user did not point to: as H.264 if FFmpeg can, else as pictures. */
static void embed_frames(report_text *t, report_media *media, double *fps, int64_t *frames,
                         const esa_frames *clip, const char *path, const char *label)
{
    char folder[4300], mp4_path[4320], pictures[4320];
    if (!media->room) {
        leave_out(t, media,
                  "'%s' must be converted, for which the page needs a folder to lie in; give "
                  "--output a file.",
                  path);
        return;
    }
    snprintf(folder, sizeof folder, "%.4200s/esa-report-XXXXXX", media->room);
    if (!mkdtemp(folder)) {
        leave_out(t, media, "'%s' cannot be converted: %s: %s.", path, media->room,
                  strerror(errno));
        return;
    }
    snprintf(mp4_path, sizeof mp4_path, "%s/clip.mp4", folder);
    snprintf(pictures, sizeof pictures, "%s/pictures/", folder);
    esa_frames_info info = { .struct_size = sizeof info };
    esa_save_params save = media->video.save_params_default();
    save.codec = ESA_CODEC_H264;
    save.quality = 90;
    size_t size;
    report_mp4 mp4;
    const int encoded = media->video.frames_save(media->ctx, clip, mp4_path, &save) == ESA_OK;
    char *data = encoded ? cli_read_file(mp4_path, &size) : NULL;
    if (data && report_mp4_probe(&mp4, (const unsigned char *)data, size) == 0 && mp4.plays) {
        embed_mp4(t, media, fps, frames, &mp4, data, size, label);
        media->converted++;
    } else if (media->video.frames_get_info(clip, &info) == ESA_OK &&
               media->video.frames_save(media->ctx, clip, pictures, NULL) == ESA_OK) {
        pictures[strlen(pictures) - 1] = 0;
        embed_pictures(t, media, fps, frames, pictures, info.fps > 0 ? info.fps : PICTURES_FPS,
                       label);
        media->as_pictures++;
    } else
        leave_out(t, media, "'%s' cannot be converted: %s.", path, esa_ctx_error(media->ctx));
    free(data);
    remove_scratch(folder, mp4_path, pictures);
}

/* Anything the engine reads; why says what is wrong with it as it is. */
static void embed_other(report_text *t, report_media *media, double *fps, int64_t *frames,
                        const char *path, const char *why, const char *label)
{
    esa_frames *clip = NULL;
    if (!media->video.handle &&
        !(cli_video_built() && cli_video_open(&media->video, REPORT_WHAT) == CLI_OK)) {
        leave_out(t, media,
                  "'%s' %s, and this esa was built without the engine that could convert it.", path,
                  why);
        return;
    }
    if (media->video.frames_load(media->ctx, &clip, path, NULL) != ESA_OK)
        leave_out(t, media, "'%s' %s: %s.", path, why, esa_ctx_error(media->ctx));
    else
        embed_frames(t, media, fps, frames, clip, path, label);
    media->video.frames_free(clip);
}

void report_media_close(report_media *media)
{
    if (media->video.handle) cli_video_close(&media->video);
    free(media->reason);
    media->reason = NULL;
}

void report_media_embed(report_text *t, report_media *media, double *fps, int64_t *frames,
                        const char *path, const char *label)
{
    struct stat about;
    report_mp4 mp4;
    size_t size;
    *fps = 0;
    *frames = 0;
    if (clip_interrupted()) return;
    if (stat(path, &about) != 0) {
        leave_out(t, media, "'%s' cannot be read: %s.", path, strerror(errno));
        return;
    }
    if (S_ISDIR(about.st_mode)) {
        embed_pictures(t, media, fps, frames, path, PICTURES_FPS, label);
        return;
    }
    char *data = cli_read_file(path, &size);
    if (!data) {
        leave_out(t, media, "'%s' cannot be read: %s.", path, strerror(errno));
        return;
    }
    const int is_mp4 = report_mp4_probe(&mp4, (const unsigned char *)data, size) == 0;
    if (is_mp4 && mp4.plays) embed_mp4(t, media, fps, frames, &mp4, data, size, label);
    free(data);
    if (is_mp4 && mp4.plays) return;
    char why[80] = "is no MP4 video";
    if (is_mp4) snprintf(why, sizeof why, "is coded as %s, which browsers do not play", mp4.codec);
    embed_other(t, media, fps, frames, path, why, label);
}
