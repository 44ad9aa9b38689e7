/* tensor_video.c - raw videos: the layout [frames, height, width, 3], and safetensors files of it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Elements are bytes 0 .. 255, or numbers in [0, 1] as diffusers gives them for output_type="np".
 * Numbers are rounded to 8 bits: x * 255 to nearest, ties to even. Numbers outside [0, 1] by more
 * than rounding are refused, because a video in [-1, 1] or 0 .. 255 would otherwise be measured
 * wrongly without notice. In safetensors the tensor is called `frames`, and the metadata may hold
 * `fps`. */
#include "media/frames.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/half.h"
#include "base/number.h"
#include "io/safetensors.h"

#define SLACK (0.5 / 255) /* half a level: still rounds to 0 .. 255 */

static double element(const uint8_t *data, int32_t dtype, int64_t i)
{
    double d;
    /* ESA_FILE_F32, _F16 and _BF16 have the numbers of ESA_DTYPE_* */
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
                       : rank >= 4 && last[1] == 3 ? "; channels come second: permute(0, 2, 3, 1)"
                       : rank >= 4 && last[0] == 3 ? "; channels come first: permute(1, 2, 3, 0)"
                                                   : "";
    return esa_fail(ctx, ESA_ERR_FORMAT,
                    "%.200s holds a tensor of shape %s, expected [frames, height, width, 3]%s",
                    name, shape, hint);
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
            "%.200s holds %s, expected U8 (0 .. 255), or F16, BF16, F32 or F64 in [0, 1]", name,
            esa_file_dtype_name(dtype));
    *info = esa_frames_sizes(dim[0], dim[1], dim[2], fps);
    if (!frames) return ESA_OK;
    ESA_TRY(esa_frames_new(ctx, frames, dim[0], dim[1], dim[2], fps));
    uint8_t *rgb = (*frames)->rgb;
    const int64_t count = dim[0] * dim[1] * dim[2] * 3;
    if (dtype == ESA_FILE_U8) memcpy(rgb, data, (size_t)count);
    for (int64_t i = 0; i < count && dtype != ESA_FILE_U8; i++) {
        const double x = element(data, dtype, i);
        if (!(x >= -SLACK && x <= 1 + SLACK))
            return esa_frames_drop(
                esa_fail(ctx, ESA_ERR_FORMAT,
                         "%.200s holds the value %g, floating-point videos must lie in [0, 1]",
                         name, x),
                frames);
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
    const double x = text ? esa_number_read(text, &end) : 0;
    return text && end != text && *end == 0 && esa_fps_valid(x) ? x : fps;
}

/* Passes on the failure of esa_st_open_memory, with our name instead of "the file in memory". */
static esa_status name_file(esa_ctx *ctx, esa_status status, const char *name)
{
    static const char label[] = "the file in memory";
    const size_t n = strncmp(ctx->error, label, sizeof label - 1) == 0 ? sizeof label - 1 : 0;
    char why[300];
    snprintf(why, sizeof why, "%s%.290s", n ? "" : ": ", ctx->error + n);
    return esa_fail(ctx, status, "%.190s%s", name, why);
}

esa_status esa_tensor_video_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info,
                                 const char *name, const uint8_t *bytes, int64_t size, double fps)
{
    esa_tensors *file;
    if (frames) *frames = NULL;
    esa_status status = esa_st_open_memory(ctx, &file, bytes, size);
    if (status) return name_file(ctx, status, name);
    const esa_st_entry *e = esa_st_find(file, "frames");
    if (!e && file->count == 1) e = &file->entry[0];
    if (!e)
        status = esa_fail(ctx, ESA_ERR_FORMAT,
                          "%.200s holds %lld tensors, and none of them is called frames", name,
                          (long long)file->count);
    else
        status = esa_layout_read(ctx, frames, info, name, e->dtype, e->rank, e->dim,
                                 esa_st_data(file, e), metadata_fps(file, fps));
    esa_st_close(file);
    return status;
}

static esa_status write_all(esa_tensors_writer *writer, const esa_frames *frames, uint8_t *row,
                            double fps, int32_t pixels)
{
    static const int32_t dtypes[] = { ESA_FILE_U8, ESA_FILE_F32, ESA_FILE_F16 };
    const int64_t count = (int64_t)frames->height * frames->width * 3;
    const int64_t dim[4] = { frames->count, frames->height, frames->width, 3 };
    char rate[32];
    esa_text_format(rate, sizeof rate, "%.10g", fps);
    ESA_TRY(esa_st_writer_metadata(writer, "format", "esa-frames-1"));
    ESA_TRY(esa_st_writer_metadata(writer, "fps", rate));
    ESA_TRY(esa_st_writer_declare(writer, "frames", dtypes[pixels], 4, dim));
    for (int64_t i = 0; i < frames->count; i++)
        ESA_TRY(esa_st_writer_data(writer, row,
                                   esa_layout_write(row, frames->rgb + i * count, count, pixels)));
    return esa_st_writer_finish(writer);
}

esa_status esa_tensor_video_save(esa_ctx *ctx, const esa_frames *frames, const char *path,
                                 double fps, int32_t pixels)
{
    const int64_t room = (int64_t)frames->height * frames->width * 3 * 4;
    uint8_t *row = esa_mem_alloc(&ctx->mem, room);
    if (!row) return esa_fail(ctx, ESA_ERR_MEMORY, "out of memory while writing %.200s", path);
    esa_tensors_writer *writer = NULL;
    esa_status status = esa_st_writer_open(ctx, &writer, path);
    if (!status) status = write_all(writer, frames, row, fps, pixels);
    esa_st_writer_close(writer);
    esa_mem_free(&ctx->mem, row, room);
    return status;
}
