/* load.c - esa_frames_load and esa_frames_peek: what a file is shows in its first bytes; a folder
 * is one of PNG.
 * SPDX-License-Identifier: Apache-2.0 */
#include "media/frames.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include "io/mapfile.h"

#define FPS     16.0 /* of what does not say: Wan's */
#define LONGEST 4000 /* of a path */

esa_load_params esa_load_params_default(void)
{
    return (esa_load_params){ .struct_size = sizeof(esa_load_params) };
}

/* A safetensors file begins with the length of its header and an opening brace. */
static int is_tensors(const uint8_t *bytes, int64_t size)
{
    return size >= 10 && bytes[8] == '{' && bytes[4] == 0 && bytes[5] == 0 && bytes[6] == 0 &&
           bytes[7] == 0;
}

esa_status esa_video_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info,
                          const char *name, const uint8_t *bytes, int64_t size, double fps)
{
    if (frames) *frames = NULL;
    if (size >= 8 && memcmp(bytes, "\x89PNG\r\n\x1a\n", 8) == 0)
        return esa_png_read(ctx, frames, info, name, bytes, size, fps);
    if (size >= 10 && memcmp(bytes, "YUV4MPEG2", 9) == 0)
        return esa_y4m_read(ctx, frames, info, name, bytes, size, fps);
    if (size >= 6 && memcmp(bytes, "\x93NUMPY", 6) == 0)
        return esa_npy_read(ctx, frames, info, name, bytes, size, fps);
    if (is_tensors(bytes, size))
        return esa_tensor_video_read(ctx, frames, info, name, bytes, size, fps);
    return ESA_ERR_UNSUPPORTED;
}

static esa_status load_file(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info,
                            const char *path, double fps)
{
    esa_mapped m;
    esa_status status = esa_map_file(ctx, &m, path, path);
    if (status != ESA_OK) return status;
    if (!m.bytes) return esa_fail(ctx, ESA_ERR_FORMAT, "%.200s is empty", path);
    ctx->error[0] = 0;
    if (m.size >= 4 && memcmp(m.bytes, "PK\x03\x04", 4) == 0)
        status = esa_fail(ctx, ESA_ERR_FORMAT,
                          "%.200s is a ZIP archive (.pt and .npz are): save the video with "
                          "safetensors or numpy.save",
                          path);
    else
        status = esa_video_read(ctx, frames, info, path, m.bytes, m.size, fps);
    esa_unmap_file(&m);
    return status == ESA_ERR_UNSUPPORTED && !ctx->error[0]
               ? esa_mp4_read(ctx, frames, info, path, fps)
               : status;
}

/* ---------------------------------------------------------------- folders */

static int is_png(const char *name)
{
    const size_t n = strlen(name);
    return n > 4 && name[0] != '.' && strcasecmp(name + n - 4, ".png") == 0;
}

/* By the first number in the name, then by the name: frame2 stands before frame10. */
static int by_number(const void *a, const void *b)
{
    const char *x = *(char *const *)a, *y = *(char *const *)b;
    while (*x && *y) {
        const size_t p = strspn(x, "0123456789"), q = strspn(y, "0123456789");
        if (p && q) {
            const char *u = x, *v = y;
            while (*u == '0' && u < x + p - 1) u++;
            while (*v == '0' && v < y + q - 1) v++;
            const size_t m = (size_t)(x + p - u), n = (size_t)(y + q - v);
            if (m != n) return m < n ? -1 : 1;
            const int order = strncmp(u, v, m);
            if (order) return order;
            x += p;
            y += q;
            continue;
        }
        if (*x != *y) return (unsigned char)*x < (unsigned char)*y ? -1 : 1;
        x++;
        y++;
    }
    if (*x || *y) return *x ? 1 : -1;
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* The names of the pictures in one block: pointers, then text. */
typedef struct names {
    char **name;
    int64_t count, bytes;
} names;

static esa_status list(esa_ctx *ctx, names *out, const char *folder)
{
    *out = (names){ NULL, 0, 0 };
    DIR *d = opendir(folder);
    if (!d) return esa_fail(ctx, ESA_ERR_IO, "%.200s cannot be read: %s", folder, strerror(errno));
    int64_t text = 0, count = 0;
    for (struct dirent *e; (e = readdir(d));)
        if (is_png(e->d_name)) {
            count++;
            text += (int64_t)strlen(e->d_name) + 1;
        }
    const int64_t bytes = count * (int64_t)sizeof(char *) + text;
    esa_status status = ESA_OK;
    char **name = NULL;
    if (!count)
        status = esa_fail(ctx, ESA_ERR_FORMAT, "%.200s is a folder without PNG pictures", folder);
    else if (count > ESA_FRAMES_MAX_COUNT)
        status = esa_fail(ctx, ESA_ERR_FORMAT, "%.200s holds %lld pictures, expected at most %d",
                          folder, (long long)count, ESA_FRAMES_MAX_COUNT);
    else if (!(name = esa_mem_alloc(&ctx->mem, bytes)))
        status = esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while reading %.200s", folder);
    if (status == ESA_OK) {
        char *at = (char *)(name + count);
        int64_t i = 0;
        rewinddir(d);
        for (struct dirent *e; i < count && (e = readdir(d));) {
            const int64_t n = (int64_t)strlen(e->d_name) + 1;
            /* files that came meanwhile may not fit */
            if (!is_png(e->d_name) || n > (char *)name + bytes - at) continue;
            memcpy(at, e->d_name, (size_t)n);
            name[i++] = at;
            at += n;
        }
        qsort(name, (size_t)i, sizeof *name, by_number);
        *out = (names){ name, i, bytes };
        if (i == 0) status = esa_fail(ctx, ESA_ERR_IO, "%.200s changed while it was read", folder);
    }
    closedir(d);
    return status;
}

static esa_status picture(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const names *n,
                          int64_t i, const char *path, double fps)
{
    esa_mapped m;
    esa_status status = esa_map_file(ctx, &m, path, path);
    if (status != ESA_OK) return status;
    if (m.size < 8 || memcmp(m.bytes, "\x89PNG\r\n\x1a\n", 8) != 0)
        status = esa_fail(ctx, ESA_ERR_FORMAT, "%.200s is no PNG", path);
    else if (i == 0) {
        status = esa_png_read(ctx, NULL, info, path, m.bytes, m.size, fps);
        info->frames = (int32_t)n->count;
        if (status == ESA_OK && frames)
            status = esa_frames_new(ctx, frames, n->count, info->height, info->width, fps);
    }
    if (status == ESA_OK && frames)
        status = esa_png_read_into(ctx, *frames, i, path, m.bytes, m.size);
    esa_unmap_file(&m);
    return status;
}

static esa_status load_folder(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info,
                              const char *folder, double fps)
{
    char path[LONGEST + 300];
    names n;
    esa_status status = list(ctx, &n, folder);
    const int64_t last = frames ? n.count : esa_min64(n.count, 1);
    for (int64_t i = 0; i < last && status == ESA_OK; i++) {
        snprintf(path, sizeof path, "%s%s%s", folder, folder[strlen(folder) - 1] == '/' ? "" : "/",
                 n.name[i]);
        status = picture(ctx, frames, info, &n, i, path, fps);
    }
    esa_mem_free(&ctx->mem, n.name, n.bytes);
    if (status != ESA_OK && frames) {
        esa_frames_free(*frames);
        *frames = NULL;
    }
    return status;
}

/* ---------------------------------------------------------------- the calls */

static esa_status load(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const char *path,
                       const esa_load_params *params)
{
    const esa_load_params p = params ? *params : esa_load_params_default();
    struct stat about;
    if (p.struct_size != sizeof p)
        return esa_fail(ctx, ESA_ERR_VERSION, "esa_load_params has %u bytes, expected %u",
                        p.struct_size, (unsigned)sizeof p);
    if (p.fps != 0 && !(p.fps >= 0.01 && p.fps <= 1000))
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "fps was given %g, expected 0 or 0.01 .. 1000",
                        p.fps);
    if (!path || !*path) return esa_fail(ctx, ESA_ERR_ARGUMENT, "no file name was given");
    if (strlen(path) > LONGEST)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "a path of %lld bytes is too long",
                        (long long)strlen(path));
    if (stat(path, &about) != 0)
        return esa_fail(ctx, ESA_ERR_IO, "%.200s cannot be opened: %s", path, strerror(errno));
    return (S_ISDIR(about.st_mode) ? load_folder : load_file)(ctx, frames, info, path,
                                                              p.fps > 0 ? p.fps : FPS);
}

esa_status esa_frames_load(esa_ctx *ctx, esa_frames **frames, const char *path,
                           const esa_load_params *params)
{
    esa_frames_info info;
    if (frames) *frames = NULL;
    esa_status status = esa_ctx_enter(ctx);
    if (status != ESA_OK) return status;
    if (!frames)
        status = esa_fail(ctx, ESA_ERR_ARGUMENT, "frames is NULL");
    else
        status = load(ctx, frames, &info, path, params);
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_frames_peek(esa_ctx *ctx, esa_frames_info *info, const char *path,
                           const esa_load_params *params)
{
    esa_status status = esa_ctx_enter(ctx);
    if (status != ESA_OK) return status;
    if (!info)
        status = esa_fail(ctx, ESA_ERR_ARGUMENT, "info is NULL");
    else if (info->struct_size != sizeof *info)
        status = esa_fail(ctx, ESA_ERR_VERSION, "esa_frames_info has %u bytes, expected %u",
                          info->struct_size, (unsigned)sizeof *info);
    else
        status = load(ctx, NULL, info, path, params);
    esa_ctx_leave(ctx);
    return status;
}
