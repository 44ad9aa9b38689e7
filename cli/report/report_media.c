/* report_media.c - one video inside the page. An MP4 that browsers play is taken as it is. Anything
 * else is converted to H.264, or to a pile of pictures if there is no H.264 encoder.
 * SPDX-License-Identifier: Apache-2.0 */
#define _XOPEN_SOURCE 700 /* realpath */
#include "report/report.h"
#include "clip/clip.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PICTURES_FPS 16.0 /* folders of pictures carry no rate: Wan's own */
#define MAX_PICTURES 1000
#define PATH_SIZE    4800

/* Writes a message in place of the video. */
__attribute__((format(printf, 3, 4))) static void leave_out(report_text *t, report_media *media,
                                                            const char *format, ...)
{
    char text[600];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    report_printf(t, "<p class=\"why\">%s</p>", text);
    media->left_out++;
    free(media->reason);
    media->reason = malloc(strlen(text) + 1);
    if (media->reason) strcpy(media->reason, text);
}

/* Results may come from a stranger, and pages are passed on: only what lies in the folder of the
 * results goes into the page, also behind links. 1: path does; 0: a message stands in its place. */
static int is_inside(report_text *t, report_media *media, const char *folder, const char *path)
{
    char whole[PATH_MAX], real[PATH_MAX];
    if (!realpath(path, real) || !realpath(folder, whole)) {
        leave_out(t, media, "'%s' cannot be read: %s.", path, strerror(errno));
        return 0;
    }
    const size_t n = strcmp(whole, "/") == 0 ? 0 : strlen(whole);
    if (strncmp(real, whole, n) == 0 && real[n] == '/') return 1;
    leave_out(t, media, "'%s' is left out: it lies outside the results folder '%s'.", path, folder);
    return 0;
}

/* ---------------------------------------------------------------- folders of pictures */

static int is_png(const struct dirent *d)
{
    const size_t n = strlen(d->d_name);
    return n > 4 && strcmp(d->d_name + n - 4, ".png") == 0;
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

/* Shows the pictures of a folder at rate frames per second. They must lie in root. */
static void embed_pictures(report_text *t, report_media *media, const char *root,
                           const char *folder, double rate)
{
    struct dirent **names = NULL;
    report_text pile = { 0 };
    int told = 0;
    const int found = scandir(folder, &names, is_png, alphasort),
              count = found < MAX_PICTURES ? found : MAX_PICTURES;
    if (count <= 0) {
        free(names);
        leave_out(t, media, "'%s' holds no PNG pictures.", folder);
        return;
    }
    report_printf(&pile, "<div class=\"frames\" role=\"img\" aria-label=\"%s\">", media->label);
    int i = 0;
    for (; i < count; i++) {
        size_t size;
        unsigned width, height;
        char path[PATH_SIZE];
        snprintf(path, sizeof path, "%s/%s", folder, names[i]->d_name);
        told = !is_inside(t, media, root, path);
        if (told) break;
        char *data = cli_read_file(path, &size);
        const int good = data && png_size((const unsigned char *)data, size, &width, &height);
        if (good) {
            report_printf(&pile,
                          "<img alt=\"\" width=\"%u\" height=\"%u\" "
                          "src=\"data:image/png;base64,",
                          width, height);
            report_base64(&pile, data, size);
            report_puts(&pile, "\">");
        }
        free(data);
        if (!good) break;
    }
    report_puts(&pile, "</div>");
    if (i < count && !told)
        leave_out(t, media, "'%s/%s' is not a readable PNG picture.", folder, names[i]->d_name);
    else if (pile.failed)
        t->failed = 1;
    else if (i == count) {
        report_put(t, pile.text, pile.used);
        media->fps = rate;
        media->frames = count;
        media->embedded++;
    }
    report_text_free(&pile);
    for (i = 0; i < found; i++) free(names[i]);
    free(names);
}

/* ---------------------------------------------------------------- files */

/* Shows an MP4 file as it is, if all browsers play it. 0: they do not; *info then says what it is,
 * with frames 0 if it is no video. */
static int embed_mp4(report_text *t, report_media *media, const char *path, esa_frames_info *info)
{
    *info = (esa_frames_info){ .struct_size = sizeof *info };
    if (media->video.frames_peek(media->ctx, info, path, NULL) || !info->frames ||
        !info->plays_in_browsers)
        return 0;
    size_t size;
    char *data = cli_read_file(path, &size);
    if (!data) return 0;
    report_printf(t,
                  "<video muted playsinline controls preload=\"auto\" width=\"%d\" height=\"%d\" "
                  "aria-label=\"%s\" src=\"data:video/mp4;base64,",
                  info->width, info->height, media->label);
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
    struct dirent **names = NULL;
    const int count = scandir(pictures, &names, is_png, NULL);
    for (int i = 0; i < count; i++) {
        char path[PATH_SIZE];
        snprintf(path, sizeof path, "%s/%s", pictures, names[i]->d_name);
        unlink(path);
        free(names[i]);
    }
    free(names);
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
    if (!media->video.frames_save(media->ctx, clip, mp4, &save) &&
        embed_mp4(t, media, mp4, &info)) {
        remove_scratch(folder, mp4, pictures);
        return;
    }
    info = (esa_frames_info){ .struct_size = sizeof info };
    if (!media->video.frames_get_info(clip, &info) &&
        !media->video.frames_save(media->ctx, clip, pictures, NULL)) {
        pictures[strlen(pictures) - 1] = 0;
        embed_pictures(t, media, folder, pictures, info.fps > 0 ? info.fps : PICTURES_FPS);
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
        !(cli_video_built() && !cli_video_open(&media->video, REPORT_WHAT))) {
        leave_out(t, media, "'%s' needs the video engine, and this esa was built without it.",
                  path);
        return;
    }
    if (embed_mp4(t, media, path, &info)) return;
    if (!media->video.frames_load(media->ctx, &clip, path, NULL))
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

void report_media_embed(report_text *t, report_media *media, const char *folder, const char *path,
                        const char *label)
{
    struct stat about;
    media->fps = 0;
    media->frames = 0;
    media->label = label;
    if (clip_interrupted()) return;
    if (!is_inside(t, media, folder, path)) return;
    if (stat(path, &about) != 0)
        leave_out(t, media, "'%s' cannot be read: %s.", path, strerror(errno));
    else if (S_ISDIR(about.st_mode))
        embed_pictures(t, media, folder, path, PICTURES_FPS);
    else
        embed_file(t, media, path);
}
