/* tensor_video.c - raw videos: the one layout [frames, height, width, 3], in safetensors files.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Bytes 0 .. 255, or numbers in [0, 1], which are what diffusers gives for output_type="np". Values
 * are rounded to 8 bits: x * 255 to nearest, ties to even. Numbers outside of [0, 1] by more than
 * rounding are refused, since a video in [-1, 1] or 0 .. 255 would otherwise be measured without a
 * word. In safetensors the tensor is called `frames` and the metadata may hold `fps`. */
#include "media/frames.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/half.h"
#include "io/safetensors.h"

#define SLACK (0.5 / 255) /* half a level: rounds to a level that exists */

static double element(const uint8_t *data, int32_t dtype, int64_t i)
{
    double d;
    /* F32, F16, BF16 have the numbers of ESA_DTYPE_* */
    if (dtype != ESA_FILE_F64) return esa_load_f32(data, i, dtype);
    memcpy(&d, data + 8 * i, 8);
    return d;
}

static void shape_text(char *out, size_t size, int32_t rank, const int64_t *dim)
{
    size_t used = (size_t)snprintf(out, size, "[");
    for (int32_t i = 0; i < rank && used < size; i++)
        used += (size_t)snprintf(out + used, size - used, "%s%lld", i ? ", " : "",
                                 (long long)dim[i]);
    if (used < size) snprintf(out + used, size - used, "]");
}

static esa_status wrong_shape(esa_ctx *ctx, const char *name, int32_t rank, const int64_t *dim)
{
    char shape[160];
    shape_text(shape, sizeof shape, rank, dim);
    const int64_t *last = dim + (rank >= 4 ? rank - 4 : 0);
    const char *hint = rank == 5 && dim[0] > 1     ? "; save one video per file"
                       : rank >= 4 && last[1] == 3 ? "; channels stand second: permute(0, 2, 3, 1)"
                       : rank >= 4 && last[0] == 3 ? "; channels stand first: permute(1, 2, 3, 0)"
                                                   : "";
    return esa_fail(ctx, ESA_ERR_FORMAT,
                    "%.200s holds a tensor of %s, a video is [frames, height, width, 3]%s", name,
                    shape, hint);
}

esa_status esa_layout_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info,
                           const char *name, int32_t dtype, int32_t rank, const int64_t *dim,
                           const uint8_t *data, double fps)
{
    if (frames) *frames = NULL;
    if ((rank != 4 && !(rank == 5 && dim[0] == 1)) || dim[rank - 1] != 3)
        return wrong_shape(ctx, name, rank, dim);
    dim += rank - 4;
    if (dim[0] < 1 || dim[0] > ESA_FRAMES_MAX_COUNT || dim[1] < 1 || dim[1] > ESA_FRAMES_MAX_SIDE ||
        dim[2] < 1 || dim[2] > ESA_FRAMES_MAX_SIDE)
        return wrong_shape(ctx, name, 4, dim);
    if (dtype != ESA_FILE_U8 && dtype != ESA_FILE_F16 && dtype != ESA_FILE_BF16 &&
        dtype != ESA_FILE_F32 && dtype != ESA_FILE_F64)
        return esa_fail(
            ctx, ESA_ERR_DTYPE,
            "%.200s holds %s, a video is U8 (0 .. 255) or F16, BF16, F32, F64 in [0, 1]", name,
            esa_file_dtype_name(dtype));
    *info = (esa_frames_info){ .struct_size = sizeof *info,
                               .frames = (int32_t)dim[0],
                               .height = (int32_t)dim[1],
                               .width = (int32_t)dim[2],
                               .fps = fps };
    if (!frames) return ESA_OK;
    esa_status status = esa_frames_new(ctx, frames, dim[0], dim[1], dim[2], fps);
    if (status != ESA_OK) return status;
    uint8_t *rgb = (*frames)->rgb;
    const int64_t count = dim[0] * dim[1] * dim[2] * 3;
    if (dtype == ESA_FILE_U8) memcpy(rgb, data, (size_t)count);
    for (int64_t i = 0; i < count && dtype != ESA_FILE_U8; i++) {
        const double x = element(data, dtype, i);
        if (!(x >= -SLACK && x <= 1 + SLACK)) {
            esa_frames_free(*frames);
            *frames = NULL;
            return esa_fail(ctx, ESA_ERR_FORMAT,
                            "%.200s holds the value %g, floating-point videos lie in [0, 1]", name,
                            x);
        }
        rgb[i] = (uint8_t)lrint((x < 0 ? 0 : x > 1 ? 1 : x) * 255);
    }
    return ESA_OK;
}

int64_t esa_layout_write(void *out, const uint8_t *rgb, int64_t count, int32_t pixels)
{
    if (pixels == ESA_PIXELS_U8) memcpy(out, rgb, (size_t)count);
    for (int64_t i = 0; i < count && pixels != ESA_PIXELS_U8; i++) {
        const float x = (float)rgb[i] / 255.0f;
        const uint16_t half = esa_f32_to_f16(x);
        if (pixels == ESA_PIXELS_F32)
            memcpy((uint8_t *)out + 4 * i, &x, 4);
        else
            memcpy((uint8_t *)out + 2 * i, &half, 2);
    }
    return count * (pixels == ESA_PIXELS_U8 ? 1 : pixels == ESA_PIXELS_F32 ? 4 : 2);
}

/* ---------------------------------------------------------------- safetensors */

static double metadata_fps(const esa_tensors *file, double fps)
{
    const char *text = esa_st_metadata(file, "fps");
    char *end;
    const double x = text ? strtod(text, &end) : 0;
    return text && end != text && *end == 0 && x >= 0.01 && x <= 1000 ? x : fps;
}

esa_status esa_tensor_video_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info,
                                 const char *name, const uint8_t *bytes, int64_t size, double fps)
{
    esa_tensors *file;
    if (frames) *frames = NULL;
    esa_status status = esa_st_open_memory(ctx, &file, bytes, size);
    if (status != ESA_OK) { /* its sentence is about "the file in memory": ours has a name */
        static const char label[] = "the file in memory";
        const size_t n = strncmp(ctx->error, label, sizeof label - 1) == 0 ? sizeof label - 1 : 0;
        char why[300];
        snprintf(why, sizeof why, "%s%.290s", n ? "" : ": ", ctx->error + n);
        return esa_fail(ctx, status, "%.190s%s", name, why);
    }
    const esa_st_entry *e = esa_st_find(file, "frames");
    if (!e && file->count == 1) e = &file->entry[0];
    if (!e)
        status = esa_fail(ctx, ESA_ERR_FORMAT,
                          "%.200s holds %lld tensors and none called frames: no video", name,
                          (long long)file->count);
    else
        status = esa_layout_read(ctx, frames, info, name, e->dtype, e->rank, e->dim,
                                 esa_st_data(file, e), metadata_fps(file, fps));
    esa_st_close(file);
    return status;
}

esa_status esa_tensor_video_save(esa_ctx *ctx, const esa_frames *frames, const char *path,
                                 double fps, int32_t pixels)
{
    static const int32_t dtypes[] = { ESA_FILE_U8, ESA_FILE_F32, ESA_FILE_F16 };
    const int64_t count = (int64_t)frames->height * frames->width * 3, room = 4 * count;
    const int64_t dim[4] = { frames->count, frames->height, frames->width, 3 };
    char rate[32];
    snprintf(rate, sizeof rate, "%.10g", fps);
    uint8_t *row = esa_mem_alloc(&ctx->mem, room);
    if (!row) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while writing %.200s", path);
    esa_tensors_writer *writer = NULL;
    esa_status status = esa_st_writer_open(ctx, &writer, path);
    if (status == ESA_OK) status = esa_st_writer_metadata(writer, "format", "esa-frames-1");
    if (status == ESA_OK) status = esa_st_writer_metadata(writer, "fps", rate);
    if (status == ESA_OK) status = esa_st_writer_declare(writer, "frames", dtypes[pixels], 4, dim);
    for (int64_t i = 0; i < frames->count && status == ESA_OK; i++)
        status = esa_st_writer_data(writer, row,
                                    esa_layout_write(row, frames->rgb + i * count, count, pixels));
    if (status == ESA_OK) status = esa_st_writer_finish(writer);
    esa_st_writer_close(writer);
    esa_mem_free(&ctx->mem, row, room);
    return status;
}
