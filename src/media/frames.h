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

/* Black frames; ESA_ERR_ARGUMENT for sizes out of range, ESA_ERR_MEMORY. */
esa_status esa_frames_new(esa_ctx *ctx, esa_frames **frames, int64_t count, int64_t height,
                          int64_t width, double fps);

/* yuv.c: limited-range BT.601. One frame to full-resolution planes [3][height][width], or to 4:2:0
 * with chroma the mean of 2 x 2 pixels (width and height even). Planes have pitches of their
 * own. */
void esa_rgb_to_yuv444(uint8_t *const plane[3], const int64_t pitch[3], const uint8_t *rgb,
                       int64_t height, int64_t width);
void esa_rgb_to_yuv420(uint8_t *const plane[3], const int64_t pitch[3], const uint8_t *rgb,
                       int64_t height, int64_t width);
/* One frame back, from tight planes; chroma is blended between its samples. cb NULL: grey. */
typedef struct esa_yuv_layout {
    int64_t height, width;
    /* pixels per chroma sample, 1 or 2; planes of ceil(width / across) x ceil(height / down) */
    int across, down;
    /* 1: samples stand on the left one of their pixels (MPEG-2), 0: in the middle (JPEG); in the
     * middle from row to row */
    int left;
    int full; /* 1: full range */
} esa_yuv_layout;
void esa_yuv_to_rgb(uint8_t *rgb, const uint8_t *luma, const uint8_t *cb, const uint8_t *cr,
                    const esa_yuv_layout *layout);
/* fps as a fraction with a denominator of at most 1001. */
void esa_fps_fraction(int32_t *numerator, int32_t *denominator, double fps);

/* y4m.c: YUV4MPEG2, 4:4:4, no loss but the conversion. */
esa_status esa_y4m_save(esa_ctx *ctx, const esa_frames *frames, const char *path, double fps);
/* png.c: one frame. */
esa_status esa_png_save(esa_ctx *ctx, const esa_frames *frames, int64_t frame, const char *path);
/* mp4.c; quality 0 (default) .. 100, codec ESA_CODEC_*. ESA_ERR_UNSUPPORTED without FFmpeg or
 * without that encoder. */
esa_status esa_mp4_save(esa_ctx *ctx, const esa_frames *frames, const char *path, double fps,
                        int32_t quality, int32_t codec);
/* npy.c, tensor_video.c; pixels is an ESA_PIXELS_*. */
esa_status esa_npy_save(esa_ctx *ctx, const esa_frames *frames, const char *path, int32_t pixels);
esa_status esa_tensor_video_save(esa_ctx *ctx, const esa_frames *frames, const char *path,
                                 double fps, int32_t pixels);

/* Readers. frames NULL: only the sizes, into info (frames 0: not known); else both. name is what
 * sentences call the file; fps is used where the file has none. They do not take the guard of ctx;
 * on failure *frames is NULL. */
esa_status esa_y4m_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const char *name,
                        const uint8_t *bytes, int64_t size, double fps);
esa_status esa_npy_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const char *name,
                        const uint8_t *bytes, int64_t size, double fps);
esa_status esa_png_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const char *name,
                        const uint8_t *bytes, int64_t size, double fps);
esa_status esa_tensor_video_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info,
                                 const char *name, const uint8_t *bytes, int64_t size, double fps);
esa_status esa_mp4_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const char *path,
                        double fps);
/* Frame i of frames, which have the size the picture must have. */
esa_status esa_png_read_into(esa_ctx *ctx, esa_frames *frames, int64_t i, const char *name,
                             const uint8_t *bytes, int64_t size);
/* By content: PNG, Y4M, NPY, safetensors; ESA_ERR_UNSUPPORTED and no sentence for anything else
 * (load.c). */
esa_status esa_video_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info,
                          const char *name, const uint8_t *bytes, int64_t size, double fps);

/* tensor_video.c: the one layout of raw videos, [frames, height, width, 3] of ESA_FILE_* elements,
 * a batch of 1 maybe in front. Checks rank, sides, dtype and values and fills frames or info as a
 * reader does. data may be unaligned. */
esa_status esa_layout_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info,
                           const char *name, int32_t dtype, int32_t rank, const int64_t *dim,
                           const uint8_t *data, double fps);
/* out[count] elements of an ESA_PIXELS_* from pixels; their size. */
int64_t esa_layout_write(void *out, const uint8_t *rgb, int64_t count, int32_t pixels);

#endif
