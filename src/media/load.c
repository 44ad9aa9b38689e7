/* load.c - esa_frames_load and esa_frames_peek. The first bytes of a file decide its format; a
 * folder holds PNG pictures.
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctx/engine_door.h"
#include "media/frames.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include "io/mapfile.h"

#define FPS       16.0 /* for files that state none: Wan's */
#define PNG_MAGIC "\x89PNG\r\n\x1a\n"
#define LONGEST   4000 /* bytes of a path */

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
    if (size >= 8 && memcmp(bytes, PNG_MAGIC, 8) == 0)
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
    esa_status status;
    ESA_TRY(esa_map_file(ctx, &m, path, path));
    if (!m.bytes) return esa_fail(ctx, ESA_ERR_FORMAT, "%.200s is empty", path);
    ctx->error[0] = 0;
    if (m.size >= 4 && memcmp(m.bytes, "PK\x03\x04", 4) == 0)
        status = esa_fail(ctx, ESA_ERR_FORMAT,
                          "%.200s is a ZIP archive, as .pt and .npz files are; save the video with "
                          "safetensors or numpy.save",
                          path);
    else
        status = esa_video_read(ctx, frames, info, path, m.bytes, m.size, fps);
    if (status == ESA_ERR_UNSUPPORTED && !ctx->error[0])
        status = esa_mp4_read(ctx, frames, info, path, m.bytes, m.size, fps);
    esa_unmap_file(&m);
    return status;
}

/* ---------------------------------------------------------------- folders */

static int is_png(const char *name)
{
    const size_t n = strlen(name);
    return n > 4 && name[0] != '.' && strcasecmp(name + n - 4, ".png") == 0;
}

/* Orders names with numbers compared as numbers: frame2 comes before frame10. */
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

/* The names of the pictures, in one block: pointers, then text. */
typedef struct names {
    char **name;
    int64_t count, bytes;
} names;

/* Counts the pictures of a folder; *text is the size of their names. */
static int64_t count_pictures(DIR *d, int64_t *text)
{
    int64_t count = 0;
    *text = 0;
    for (struct dirent *e = readdir(d); e; e = readdir(d)) {
        if (!is_png(e->d_name)) continue;
        count++;
        *text += (int64_t)strlen(e->d_name) + 1;
    }
    return count;
}

static esa_status read_names(esa_ctx *ctx, names *out, DIR *d, const char *folder)
{
    int64_t text;
    const int64_t count = count_pictures(d, &text);
    if (!count)
        return esa_fail(ctx, ESA_ERR_FORMAT, "%.200s is a folder without PNG pictures", folder);
    if (count > ESA_FRAMES_MAX_COUNT)
        return esa_fail(ctx, ESA_ERR_FORMAT, "%.200s holds %lld pictures, expected at most %d",
                        folder, (long long)count, ESA_FRAMES_MAX_COUNT);
    out->bytes = count * (int64_t)sizeof(char *) + text;
    out->name = esa_mem_alloc(&ctx->mem, out->bytes);
    if (!out->name)
        return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while reading %.200s", folder);
    char *at = (char *)(out->name + count);
    rewinddir(d);
    for (struct dirent *e = readdir(d); e && out->count < count; e = readdir(d)) {
        const int64_t n = (int64_t)strlen(e->d_name) + 1;
        /* files that were added since may not fit */
        if (!is_png(e->d_name) || n > (char *)out->name + out->bytes - at) continue;
        memcpy(at, e->d_name, (size_t)n);
        out->name[out->count++] = at;
        at += n;
    }
    if (!out->count) return esa_fail(ctx, ESA_ERR_IO, "%.200s changed while it was read", folder);
    qsort(out->name, (size_t)out->count, sizeof *out->name, by_number);
    return ESA_OK;
}

/* The caller frees out->name, also after a failure. */
static esa_status list(esa_ctx *ctx, names *out, const char *folder)
{
    *out = (names){ NULL, 0, 0 };
    DIR *d = opendir(folder);
    if (!d) return esa_fail(ctx, ESA_ERR_IO, "%.200s cannot be read: %s", folder, strerror(errno));
    const esa_status status = read_names(ctx, out, d, folder);
    closedir(d);
    return status;
}

/* Picture i, whose bytes are m. The first one gives the size and makes the frames. */
static esa_status read_picture(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info,
                               const names *n, int64_t i, const char *path, const esa_mapped *m,
                               double fps)
{
    if (m->size < 8 || memcmp(m->bytes, PNG_MAGIC, 8) != 0)
        return esa_fail(ctx, ESA_ERR_FORMAT, "%.200s is not a PNG file", path);
    if (i == 0) {
        ESA_TRY(esa_png_read(ctx, NULL, info, path, m->bytes, m->size, fps));
        info->frames = (int32_t)n->count;
        if (!frames) return ESA_OK;
        ESA_TRY(esa_frames_new(ctx, frames, n->count, info->height, info->width, fps));
    }
    return esa_png_read_into(ctx, *frames, i, path, m->bytes, m->size);
}

static esa_status load_pictures(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info,
                                const names *n, const char *folder, double fps)
{
    char path[LONGEST + 300];
    const char *slash = folder[strlen(folder) - 1] == '/' ? "" : "/";
    for (int64_t i = 0; i < (frames ? n->count : 1); i++) {
        esa_mapped m;
        snprintf(path, sizeof path, "%s%s%s", folder, slash, n->name[i]);
        ESA_TRY(esa_map_file(ctx, &m, path, path));
        const esa_status status = read_picture(ctx, frames, info, n, i, path, &m, fps);
        esa_unmap_file(&m);
        if (status) return status;
    }
    return ESA_OK;
}

static esa_status load_folder(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info,
                              const char *folder, double fps)
{
    names n;
    esa_status status = list(ctx, &n, folder);
    if (!status) status = load_pictures(ctx, frames, info, &n, folder, fps);
    esa_mem_free(&ctx->mem, n.name, n.bytes);
    return esa_frames_drop(status, frames);
}

/* ---------------------------------------------------------------- the calls */

static esa_status load(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const char *path,
                       const esa_load_params *params)
{
    const esa_load_params p = params ? *params : esa_load_params_default();
    struct stat about;
    if (p.struct_size != sizeof p)
        return esa_fail(ctx, ESA_ERR_VERSION,
                        "esa_load_params has struct_size %u, this library expects %u",
                        p.struct_size, (unsigned)sizeof p);
    if (p.fps != 0 && !esa_fps_valid(p.fps))
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "fps is %g, expected 0 or 0.01 .. 1000", p.fps);
    if (!path || !*path) return esa_fail(ctx, ESA_ERR_ARGUMENT, "no file name was given");
    if (strlen(path) > LONGEST)
        return esa_fail(ctx, ESA_ERR_ARGUMENT, "the path has %lld bytes, expected at most %d",
                        (long long)strlen(path), LONGEST);
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
    ESA_TRY(esa_engine_enter(ctx));
    const esa_status status = frames ? load(ctx, frames, &info, path, params)
                                     : esa_fail(ctx, ESA_ERR_ARGUMENT, "frames is NULL");
    esa_ctx_leave(ctx);
    return status;
}

esa_status esa_frames_peek(esa_ctx *ctx, esa_frames_info *info, const char *path,
                           const esa_load_params *params)
{
    esa_status status;
    ESA_TRY(esa_engine_enter(ctx));
    if (!info)
        status = esa_fail(ctx, ESA_ERR_ARGUMENT, "info is NULL");
    else if (info->struct_size != sizeof *info)
        status = esa_fail(ctx, ESA_ERR_VERSION,
                          "esa_frames_info has struct_size %u, this library expects %u",
                          info->struct_size, (unsigned)sizeof *info);
    else
        status = load(ctx, NULL, info, path, params);
    esa_ctx_leave(ctx);
    return status;
}
