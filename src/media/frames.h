/* frames.h - a video in memory, its writers and its readers. The public calls (esa_frames.h) are in
 * frames.c, save.c and load.c.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Frames are 8-bit RGB, [count][height][width][3]. Writers take the finished video, write it under
 * a temporary name and rename it; a failure leaves nothing behind. Nothing here takes the guard of
 * ctx. */
#ifndef ESA_MEDIA_FRAMES_H
#define ESA_MEDIA_FRAMES_H

#include "base/status.h"
#include "ctx/ctx.h"
#include "esa/esa_video.h"

#define ESA_FRAMES_MAX_SIDE  16384
#define ESA_FRAMES_MAX_COUNT 100000

struct esa_frames {
    esa_allocator mem; /* frames may outlive their ctx */
    int32_t count, height, width;
    int32_t reserved0;
    double fps;
    uint8_t *rgb; /* owned */
    int64_t bytes;
};

/* Makes black frames. Fails with ESA_ERR_ARGUMENT for sizes out of range, or ESA_ERR_MEMORY. */
esa_status esa_frames_new(esa_ctx *ctx, esa_frames **frames, int64_t count, int64_t height,
                          int64_t width, double fps);
/* Frees *frames and sets it to NULL, if status is a failure and frames is not NULL; returns
 * status. */
esa_status esa_frames_drop(esa_status status, esa_frames **frames);
/* What peek reports: the sizes without pixels. */
esa_frames_info esa_frames_sizes(int64_t count, int64_t height, int64_t width, double fps);
/* 1 for 0.01 .. 1000 frames a second. */
int esa_fps_valid(double fps);

/* yuv.c: limited-range BT.601. Converts one frame to planes [3][height][width], or to 4:2:0 planes
 * whose chroma is the mean of 2 x 2 pixels (width and height even). pitch: bytes per row of a
 * plane. */
void esa_rgb_to_yuv444(uint8_t *const plane[3], const int64_t pitch[3], const uint8_t *rgb,
                       int64_t height, int64_t width);
void esa_rgb_to_yuv420(uint8_t *const plane[3], const int64_t pitch[3], const uint8_t *rgb,
                       int64_t height, int64_t width);
/* Converts planes without padding back to one frame; chroma is interpolated. cb NULL: grey. */
typedef struct esa_yuv_layout {
    int64_t height, width;
    /* pixels per chroma sample, 1 or 2; planes of ceil(width / across) x ceil(height / down) */
    int across, down;
    /* horizontal place of a chroma sample: 1 on the left one of its pixels (MPEG-2), 0 in the
     * middle (JPEG); vertically it is always in the middle */
    int left;
    int full; /* 1: full range */
} esa_yuv_layout;
void esa_yuv_to_rgb(uint8_t *rgb, const uint8_t *luma, const uint8_t *cb, const uint8_t *cr,
                    const esa_yuv_layout *layout);
/* Writes fps as a fraction with a denominator of at most 1001. */
void esa_fps_fraction(int32_t *numerator, int32_t *denominator, double fps);

/* y4m.c: YUV4MPEG2, 4:4:4. Only the conversion to YUV loses anything. */
esa_status esa_y4m_save(esa_ctx *ctx, const esa_frames *frames, const char *path, double fps);
/* png.c: writes one frame. */
esa_status esa_png_save(esa_ctx *ctx, const esa_frames *frames, int64_t frame, const char *path);
/* mp4.c: quality 1 .. 100 or 0 (75), codec ESA_CODEC_*. Fails with ESA_ERR_UNSUPPORTED without
 * FFmpeg or without that encoder. */
esa_status esa_mp4_save(esa_ctx *ctx, const esa_frames *frames, const char *path, double fps,
                        int32_t quality, int32_t codec);
/* npy.c, tensor_video.c: pixels is an ESA_PIXELS_*. */
esa_status esa_npy_save(esa_ctx *ctx, const esa_frames *frames, const char *path, int32_t pixels);
esa_status esa_tensor_video_save(esa_ctx *ctx, const esa_frames *frames, const char *path,
                                 double fps, int32_t pixels);

/* Readers. With frames NULL they only fill info (frames 0: not known), else both. name is the
 * file's name in messages; fps is used if the file states none. On failure *frames is NULL. */
esa_status esa_y4m_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const char *name,
                        const uint8_t *bytes, int64_t size, double fps);
esa_status esa_npy_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const char *name,
                        const uint8_t *bytes, int64_t size, double fps);
esa_status esa_png_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const char *name,
                        const uint8_t *bytes, int64_t size, double fps);
esa_status esa_tensor_video_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info,
                                 const char *name, const uint8_t *bytes, int64_t size, double fps);
/* mp4_read.c: what FFmpeg reads. Nothing but the bytes is opened. */
esa_status esa_mp4_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const char *name,
                        const uint8_t *bytes, int64_t size, double fps);
/* Reads frame i of frames. The picture must have their size. */
esa_status esa_png_read_into(esa_ctx *ctx, esa_frames *frames, int64_t i, const char *name,
                             const uint8_t *bytes, int64_t size);
/* load.c: reads PNG, Y4M, NPY or safetensors, whichever the first bytes say. Fails with
 * ESA_ERR_UNSUPPORTED and no message if they say none of these. */
esa_status esa_video_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info,
                          const char *name, const uint8_t *bytes, int64_t size, double fps);

/* tensor_video.c: the layout of raw videos, [frames, height, width, 3] of ESA_FILE_* elements, with
 * an optional batch of 1 first. Checks rank, sides, dtype and values, and fills frames or info as a
 * reader does. data may be unaligned. */
esa_status esa_layout_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info,
                           const char *name, int32_t dtype, int32_t rank, const int64_t *dim,
                           const uint8_t *data, double fps);
/* Writes count bytes of rgb as elements of type pixels (ESA_PIXELS_*) and returns their size in
 * bytes. */
int64_t esa_layout_write(void *out, const uint8_t *rgb, int64_t count, int32_t pixels);

#endif
