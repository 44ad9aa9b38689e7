/* save.c - esa_frames_save. The ending of the path chooses the format. A folder of PNG pictures
 * appears whole or not at all.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* renameat2 */
#include "ctx/engine_door.h"
#include "media/frames.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "base/rng.h"
#include "io/outpath.h"

#define LONGEST 4000 /* bytes of a folder's path */

esa_save_params esa_save_params_default(void)
{
    return (esa_save_params){ .struct_size = sizeof(esa_save_params) };
}

/* 1 for NNNNN.png, the names that save_folder gives. */
static int is_ours(const char *name)
{
    const size_t digits = strspn(name, "0123456789");
    return digits >= 5 && strcmp(name + digits, ".png") == 0;
}

/* Counts the entries of folder that are not ours; -1 if it cannot be read. */
static int64_t foreign(const char *folder)
{
    DIR *d = opendir(folder);
    if (!d) return -1;
    int64_t count = 0;
    for (struct dirent *e = readdir(d); e; e = readdir(d))
        count += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 && !is_ours(e->d_name);
    closedir(d);
    return count;
}

/* Removes our pictures and then the folder. */
static void remove_folder(const char *folder)
{
    char path[LONGEST + 300];
    DIR *d = opendir(folder);
    if (d) {
        for (struct dirent *e = readdir(d); e; e = readdir(d)) {
            if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
            snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
            unlink(path);
        }
        closedir(d);
    } else { /* too many open files, say: by their names, which count up */
        for (int64_t i = 0;; i++) {
            snprintf(path, sizeof path, "%s/%05lld.png", folder, (long long)i);
            if (unlink(path) != 0) break;
        }
    }
    rmdir(folder);
}

/* Makes an empty folder beside `folder` and writes its name to temp. Returns 0 on failure, with
 * errno set. */
static int make_beside(char *temp, size_t size, const char *folder)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    esa_rng rng = { (uint64_t)now.tv_nsec ^ (uint64_t)now.tv_sec << 30 ^ (uint64_t)getpid() << 44 };
    for (int attempt = 0; attempt < 100; attempt++) {
        snprintf(temp, size, "%s.%08x.tmp", folder, (unsigned)(esa_rng_next(&rng) >> 32));
        if (mkdir(temp, 0777) == 0) return 1;
        if (errno != EEXIST) break;
    }
    return 0;
}

/* Makes the message of a failed picture name the folder the user gave, not the temporary one. */
static void name_folder(esa_ctx *ctx, const char *temp, const char *folder)
{
    char text[sizeof ctx->error];
    const size_t n = strlen(temp);
    if (strncmp(ctx->error, temp, n) != 0) return;
    snprintf(text, sizeof text, "%.300s%.200s", folder, ctx->error + n);
    memcpy(ctx->error, text, sizeof text);
}

/* Moves the new folder to its place, where there is nothing or an older folder of pictures. The two
 * are exchanged in one step if the system can do that. Otherwise the older one is renamed first,
 * and a process killed between the two renames leaves it under a temporary name. */
static esa_status put_in_place(esa_ctx *ctx, const char *temp, const char *folder)
{
    if (rename(temp, folder) == 0) return ESA_OK; /* nothing, or an empty folder */
#ifdef RENAME_EXCHANGE
    if ((errno == ENOTEMPTY || errno == EEXIST) &&
        renameat2(AT_FDCWD, temp, AT_FDCWD, folder, RENAME_EXCHANGE) == 0) {
        remove_folder(temp);
        return ESA_OK;
    }
    /* The older folder may be gone by now. If not, this sets errno as a plain rename does. */
    if (rename(temp, folder) == 0) return ESA_OK;
#endif
    char old[LONGEST + 40];
    if ((errno == ENOTEMPTY || errno == EEXIST) && make_beside(old, sizeof old, folder)) {
        if (rename(folder, old) == 0) {
            if (rename(temp, folder) == 0) {
                remove_folder(old);
                return ESA_OK;
            }
            const int why = errno;
            if (rename(old, folder) == 0) errno = why;
        } else {
            const int why = errno;
            rmdir(old);
            errno = why;
        }
    }
    return esa_fail(ctx, ESA_ERR_IO, "%.200s cannot be put in place: %s", folder, strerror(errno));
}

/* Writes path without slashes at its end to folder. Fails if a file has that name, or a folder that
 * holds other things than our pictures. */
static esa_status check_folder(esa_ctx *ctx, char folder[LONGEST + 8], const char *path)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--;
    if (n > LONGEST)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "the folder's name has %lld bytes, expected at most %d", (long long)n,
                        LONGEST);
    snprintf(folder, LONGEST + 8, "%.*s", (int)n, path);
    struct stat about;
    if (stat(folder, &about) != 0) return ESA_OK;
    if (!S_ISDIR(about.st_mode))
        return esa_fail(ctx, ESA_ERR_IO, "%.200s is a file and cannot become a folder of pictures",
                        folder);
    const int64_t others = foreign(folder);
    if (others < 0)
        return esa_fail(ctx, ESA_ERR_IO, "%.200s cannot be read: %s", folder, strerror(errno));
    if (others > 0)
        return esa_fail(
            ctx, ESA_ERR_IO,
            "%.200s holds %lld entries that are not pictures of a video; give a new folder", folder,
            (long long)others);
    return ESA_OK;
}

static esa_status save_pictures(esa_ctx *ctx, const esa_frames *frames, const char *temp,
                                const char *folder)
{
    char name[LONGEST + 80];
    for (int64_t i = 0; i < frames->count; i++) {
        snprintf(name, sizeof name, "%s/%05lld.png", temp, (long long)i);
        const esa_status status = esa_png_save(ctx, frames, i, name);
        if (!status) continue;
        name_folder(ctx, temp, folder);
        return status;
    }
    ESA_TRY(put_in_place(ctx, temp, folder));
    esa_outpath_sync(folder);
    return ESA_OK;
}

static esa_status save_folder(esa_ctx *ctx, const esa_frames *frames, const char *path)
{
    char folder[LONGEST + 8], temp[LONGEST + 40];
    ESA_TRY(check_folder(ctx, folder, path));
    if (!make_beside(temp, sizeof temp, folder))
        return esa_fail(ctx, ESA_ERR_IO, "%.200s cannot be written: %s", folder, strerror(errno));
    const esa_status status = save_pictures(ctx, frames, temp, folder);
    if (status) remove_folder(temp);
    return status;
}

static int ends_with(const char *path, const char *ending)
{
    const size_t n = strlen(path), m = strlen(ending);
    return n > m && strcasecmp(path + n - m, ending) == 0;
}

static esa_status check(esa_ctx *ctx, const char *path, int64_t frames, const esa_save_params *p)
{
    if (!path || !*path) return esa_fail(ctx, ESA_ERR_ARGUMENT, "frames or path is missing");
    if (p->struct_size != sizeof *p)
        return esa_fail(ctx, ESA_ERR_VERSION,
                        "esa_save_params has struct_size %u, this library expects %u",
                        p->struct_size, (unsigned)sizeof *p);
    if (p->quality < 0 || p->quality > 100)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "quality is %d, expected 0 .. 100", p->quality);
    if (p->fps != 0 && !esa_fps_valid(p->fps))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "fps is %g, expected 0 (the frames' own) or 0.01 .. 1000", p->fps);
    if (p->codec < ESA_CODEC_AUTO || p->codec > ESA_CODEC_LOSSLESS)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "codec is %d, expected 0 .. %d", p->codec,
                        ESA_CODEC_LOSSLESS);
    if (p->pixels < ESA_PIXELS_U8 || p->pixels > ESA_PIXELS_F16)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "pixels is %d, expected 0 .. %d", p->pixels,
                        ESA_PIXELS_F16);
    char folder[LONGEST + 8];
    if (path[strlen(path) - 1] == '/') return check_folder(ctx, folder, path);
    if (ends_with(path, ".mp4") || ends_with(path, ".y4m") || ends_with(path, ".npy") ||
        ends_with(path, ".safetensors"))
        return ESA_OK;
    if (!ends_with(path, ".png"))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "%.200s has no known ending: expected .mp4, .y4m, .png, .safetensors, "
                        ".npy, or a folder (a name that ends in /)",
                        path);
    if (frames > 1)
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "%.200s holds one picture, but the video has %lld frames; give a folder "
                        "(a name that ends in /)",
                        path, (long long)frames);
    return ESA_OK;
}

static esa_status save(esa_ctx *ctx, const esa_frames *frames, const char *path,
                       const esa_save_params *params)
{
    const esa_save_params p = params ? *params : esa_save_params_default();
    if (!frames) return esa_fail(ctx, ESA_ERR_ARGUMENT, "frames or path is missing");
    ESA_TRY(check(ctx, path, frames->count, &p));
    const double fps = p.fps > 0 ? p.fps : frames->fps;
    if (path[strlen(path) - 1] == '/') return save_folder(ctx, frames, path);
    if (ends_with(path, ".mp4")) return esa_mp4_save(ctx, frames, path, fps, p.quality, p.codec);
    if (ends_with(path, ".y4m")) return esa_y4m_save(ctx, frames, path, fps);
    if (ends_with(path, ".npy")) return esa_npy_save(ctx, frames, path, p.pixels);
    if (ends_with(path, ".safetensors"))
        return esa_tensor_video_save(ctx, frames, path, fps, p.pixels);
    return esa_png_save(ctx, frames, 0, path);
}

esa_status esa_frames_save_check(esa_ctx *ctx, const char *path, int64_t frames,
                                 const esa_save_params *params)
{
    ESA_TRY(esa_engine_enter(ctx));
    const esa_save_params p = params ? *params : esa_save_params_default();
    const esa_status status = check(ctx, path, frames, &p);
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_frames_save(esa_ctx *ctx, const esa_frames *frames, const char *path,
                           const esa_save_params *params)
{
    ESA_TRY(esa_engine_enter(ctx));
    const esa_status status = save(ctx, frames, path, params);
    esa_ctx_leave(ctx);
    return status;
}
