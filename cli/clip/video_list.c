/* video_list.c - see video_list.h.
 * SPDX-License-Identifier: Apache-2.0 */
#define _XOPEN_SOURCE 700
#include "clip/video_list.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <esa/esa_tensors.h>

int video_format(const char *path)
{
    char ending[32];
    const size_t n = strlen(path);
    for (int i = 0; i < VIDEO_FORMATS; i++) {
        cli_name(ending, VIDEO_ENDINGS, i);
        const size_t m = strlen(ending);
        if (n > m && strcasecmp(path + n - m, ending) == 0) return i;
    }
    return VIDEO_OTHER;
}

static int has_png(const char *folder)
{
    DIR *d = opendir(folder);
    int found = 0;
    for (struct dirent *e; d && !found && (e = readdir(d));)
        found = e->d_name[0] != '.' && video_format(e->d_name) == VIDEO_PNG;
    if (d) closedir(d);
    return found;
}

/* What a tensor file in a folder holds: 1 a video, 2 latents, 0 neither. A file that cannot be read
 * counts as a video: loading it reports the reason. */
static int tensor_kind(const cli_video *video, esa_ctx *ctx, const char *path, int format)
{
    esa_frames_info info = { .struct_size = sizeof info };
    if (!video->frames_peek(ctx, &info, path, NULL)) return 1;
    if (format == VIDEO_NPY) return 0;
    esa_tensors *file;
    if (esa_tensors_open(ctx, &file, path)) return 1;
    esa_tensor_info latents = { .struct_size = sizeof latents };
    const int kind = !esa_tensors_find(file, "latents", &latents) ? 2 : 0;
    esa_tensors_free(file);
    return kind;
}

/* The last part of a path without its ending; a folder keeps its dots. */
static char *stem_of(const char *path, int format)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--;
    size_t from = n;
    while (from > 0 && path[from - 1] != '/') from--;
    char ending[32] = "";
    if (format != VIDEO_OTHER && format == video_format(path))
        n -= strlen(cli_name(ending, VIDEO_ENDINGS, format));
    char *stem = malloc(n - from + 1);
    if (stem) {
        memcpy(stem, path + from, n - from);
        stem[n - from] = 0;
    }
    return stem;
}

static int add(video_list *list, const char *path, int format, int latents)
{
    if (list->count % 64 == 0) {
        video_entry *more = realloc(list->entry, (size_t)(list->count + 64) * sizeof *more);
        if (!more) return 0;
        list->entry = more;
    }
    video_entry *e = &list->entry[list->count];
    *e = (video_entry){
        .stem = stem_of(path, format), .path = strdup(path), .format = format, .latents = latents
    };
    list->count++;
    return e->stem && e->path;
}

static int by_stem(const void *a, const void *b)
{
    const video_entry *x = a, *y = b;
    const int order = strcmp(x->stem, y->stem);
    return order ? order : (x->format > y->format) - (x->format < y->format);
}

static int scan(video_list *list, const cli_video *video, esa_ctx *ctx, const char *folder,
                int latents, const char *what)
{
    DIR *d = opendir(folder);
    if (!d)
        return cli_fail("%s: the folder '%s' cannot be read: %s", what, folder, strerror(errno));
    int status = CLI_OK;
    for (struct dirent *e; !status && (e = readdir(d));) {
        struct stat about;
        if (e->d_name[0] == '.') continue;
        const size_t room = strlen(folder) + strlen(e->d_name) + 2;
        char *path = malloc(room);
        if (!path) {
            status = cli_fail("%s: out of memory", what);
            break;
        }
        snprintf(path, room, "%s%s%s", folder, folder[strlen(folder) - 1] == '/' ? "" : "/",
                 e->d_name);
        const int format = video_format(path), there = stat(path, &about) == 0;
        int kind = 0;
        if (there && S_ISDIR(about.st_mode))
            kind = has_png(path);
        else if (there && S_ISREG(about.st_mode) && format != VIDEO_OTHER && format != VIDEO_PNG)
            kind = format > VIDEO_NPY ? 1 : tensor_kind(video, ctx, path, format);
        if (kind == 2 && !latents) kind = 0;
        if (kind &&
            !add(list, path, there && S_ISDIR(about.st_mode) ? VIDEO_PNG : format, kind == 2))
            status = cli_fail("%s: out of memory", what);
        free(path);
    }
    closedir(d);
    return status;
}

int video_list_get(video_list *list, const cli_video *video, esa_ctx *ctx, const char *path,
                   int latents, const char *what)
{
    struct stat about;
    memset(list, 0, sizeof *list);
    if (stat(path, &about) != 0)
        return cli_fail("%s: '%s' cannot be opened: %s", what, path, strerror(errno));
    if (!S_ISDIR(about.st_mode)) {
        const int kind = video_format(path) == VIDEO_SAFETENSORS && latents
                             ? tensor_kind(video, ctx, path, VIDEO_SAFETENSORS)
                             : 1;
        return add(list, path, video_format(path), kind == 2) ? CLI_OK
                                                              : cli_fail("%s: out of memory", what);
    }
    int status = scan(list, video, ctx, path, latents, what);
    if (!status && list->count == 0) {
        if (!has_png(path))
            return cli_fail(
                "%s: the folder '%s' holds no videos (files with %s, or folders of PNG)", what,
                path, ".mp4, .mkv, .webm, .avi, .mov, .m4v, .y4m, .safetensors or .npy");
        return add(list, path, VIDEO_PNG, 0) ? CLI_OK : cli_fail("%s: out of memory", what);
    }
    list->folder = 1;
    if (!status) qsort(list->entry, (size_t)list->count, sizeof *list->entry, by_stem);
    return status;
}

void video_list_free(video_list *list)
{
    for (int64_t i = 0; i < list->count; i++) {
        free(list->entry[i].stem);
        free(list->entry[i].path);
    }
    free(list->entry);
    memset(list, 0, sizeof *list);
}
