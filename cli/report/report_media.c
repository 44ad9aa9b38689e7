/* report_media.c - one video inside the page. An MP4 that browsers play is taken as it is. Anything
 * else is converted to H.264, or to a pile of pictures if there is no H.264 encoder.
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

/* Writes a message in place of the video. */
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

/* Shows the pictures of a folder at rate frames per second. */
static void embed_pictures(report_text *t, report_media *media, const char *folder, double rate)
{
    char **names;
    report_text pile = { 0 };
    const int count = list_pictures(&names, folder);
    if (count <= 0) {
        leave_out(t, media, "'%s' holds no PNG pictures.", folder);
        return;
    }
    report_puts(&pile, "<div class=\"frames\" role=\"img\" aria-label=\"");
    report_html(&pile, media->label);
    report_puts(&pile, "\">");
    int i = 0;
    for (; i < count; i++) {
        size_t size;
        unsigned width, height;
        char *data = cli_read_file(names[i], &size);
        const int good = data && png_size((const unsigned char *)data, size, &width, &height);
        if (good) {
            report_printf(&pile, "<img alt=\"\" width=\"%u\" height=\"%u\" src=\"", width, height);
            report_puts(&pile, "data:image/png;base64,");
            report_base64(&pile, data, size);
            report_puts(&pile, "\">");
        }
        free(data);
        if (!good) break;
    }
    report_puts(&pile, "</div>");
    if (i < count)
        leave_out(t, media, "'%s' is not a readable PNG picture.", names[i]);
    else if (pile.failed)
        t->failed = 1;
    else {
        report_put(t, pile.text, pile.used);
        media->fps = rate;
        media->frames = count;
        media->embedded++;
    }
    report_text_free(&pile);
    free_names(names, count);
}

/* ---------------------------------------------------------------- files */

/* Shows an MP4 file as it is, if all browsers play it. 0: they do not; *info then says what it is,
 * with frames 0 if it is no video. */
static int embed_mp4(report_text *t, report_media *media, const char *path, esa_frames_info *info)
{
    *info = (esa_frames_info){ .struct_size = sizeof *info };
    if (media->video.frames_peek(media->ctx, info, path, NULL) != ESA_OK || !info->frames ||
        !info->plays_in_browsers)
        return 0;
    size_t size;
    char *data = cli_read_file(path, &size);
    if (!data) return 0;
    report_printf(t,
                  "<video muted playsinline controls preload=\"auto\" width=\"%d\" height=\"%d\"",
                  (int)info->width, (int)info->height);
    report_puts(t, " aria-label=\"");
    report_html(t, media->label);
    report_puts(t, "\" src=\"data:video/mp4;base64,");
    report_base64(t, data, size);
    report_puts(t, "\"></video>");
    free(data);
    media->fps = info->fps;
    media->frames = info->frames;
    media->embedded++;
    return 1;
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

/* Shows decoded frames as H.264 if FFmpeg has an encoder, otherwise as pictures. They pass through
 * a scratch folder beside the page: the command writes nothing elsewhere. */
static void embed_frames(report_text *t, report_media *media, const esa_frames *clip,
                         const char *path)
{
    char folder[4300], mp4[4320], pictures[4320];
    if (!media->room) {
        leave_out(t, media, "'%s' must be converted, which needs a folder; give --output a file.",
                  path);
        return;
    }
    snprintf(folder, sizeof folder, "%.4200s/esa-report-XXXXXX", media->room);
    if (!mkdtemp(folder)) {
        leave_out(t, media, "'%s' cannot be converted: %s: %s.", path, media->room,
                  strerror(errno));
        return;
    }
    snprintf(mp4, sizeof mp4, "%s/clip.mp4", folder);
    snprintf(pictures, sizeof pictures, "%s/pictures/", folder);
    esa_frames_info info;
    esa_save_params save = media->video.save_params_default();
    save.codec = ESA_CODEC_H264;
    save.quality = 90;
    if (media->video.frames_save(media->ctx, clip, mp4, &save) == ESA_OK &&
        embed_mp4(t, media, mp4, &info)) {
        remove_scratch(folder, mp4, pictures);
        return;
    }
    info = (esa_frames_info){ .struct_size = sizeof info };
    if (media->video.frames_get_info(clip, &info) == ESA_OK &&
        media->video.frames_save(media->ctx, clip, pictures, NULL) == ESA_OK) {
        pictures[strlen(pictures) - 1] = 0;
        embed_pictures(t, media, pictures, info.fps > 0 ? info.fps : PICTURES_FPS);
        media->as_pictures++;
    } else
        leave_out(t, media, "'%s' cannot be converted: %s.", path, esa_ctx_error(media->ctx));
    remove_scratch(folder, mp4, pictures);
}

static void embed_file(report_text *t, report_media *media, const char *path)
{
    esa_frames_info info;
    esa_frames *clip = NULL;
    if (!media->video.handle &&
        !(cli_video_built() && cli_video_open(&media->video, REPORT_WHAT) == CLI_OK)) {
        leave_out(t, media, "'%s' needs the video engine, and this esa was built without it.",
                  path);
        return;
    }
    if (embed_mp4(t, media, path, &info)) return;
    if (media->video.frames_load(media->ctx, &clip, path, NULL) == ESA_OK)
        embed_frames(t, media, clip, path);
    else if (info.codec[0])
        leave_out(t, media, "'%s' is coded as %s, which browsers do not play: %s.", path,
                  info.codec, esa_ctx_error(media->ctx));
    else
        leave_out(t, media, "'%s' cannot be shown: %s.", path, esa_ctx_error(media->ctx));
    media->video.frames_free(clip);
}

void report_media_close(report_media *media)
{
    if (media->video.handle) cli_video_close(&media->video);
    free(media->reason);
    media->reason = NULL;
}

void report_media_embed(report_text *t, report_media *media, const char *path, const char *label)
{
    struct stat about;
    media->fps = 0;
    media->frames = 0;
    media->label = label;
    if (clip_interrupted()) return;
    if (stat(path, &about) != 0)
        leave_out(t, media, "'%s' cannot be read: %s.", path, strerror(errno));
    else if (S_ISDIR(about.st_mode))
        embed_pictures(t, media, path, PICTURES_FPS);
    else
        embed_file(t, media, path);
}
