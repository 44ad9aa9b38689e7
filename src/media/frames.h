/* frames.h - a video in memory and the files it can become. The calls of esa_video.h are in frames.c and save.c.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Frames are 8-bit RGB, [count][height][width][3]. Writers take the finished video, put it under a temporary name and rename it;
 * after a failure nothing is left. They do not take the guard of ctx. */
#ifndef ESA_MEDIA_FRAMES_H
#define ESA_MEDIA_FRAMES_H

#include "base/ctx.h"
#include "esa/esa_video.h"

#define ESA_FRAMES_MAX_SIDE 16384
#define ESA_FRAMES_MAX_COUNT 100000

struct esa_frames {
    esa_allocator mem;              /* frames may outlive their ctx */
    int32_t count, height, width;
    int32_t reserved0;
    double  fps;
    uint8_t *rgb;                   /* owned */
    int64_t bytes;
};

/* Black frames; ESA_ERR_ARGUMENT for sizes out of range, ESA_ERR_MEMORY. */
esa_status esa_frames_new(esa_ctx *ctx, esa_frames **frames, int64_t count, int64_t height, int64_t width, double fps);

/* yuv.c: limited-range BT.601. One frame to full-resolution planes [3][height][width], or to 4:2:0 with chroma the mean of 2 x 2 pixels
 * (width and height even). Planes have pitches of their own. */
void esa_rgb_to_yuv444(uint8_t *const plane[3], const int64_t pitch[3], const uint8_t *rgb, int64_t height, int64_t width);
void esa_rgb_to_yuv420(uint8_t *const plane[3], const int64_t pitch[3], const uint8_t *rgb, int64_t height, int64_t width);
/* fps as a fraction with a denominator of at most 1001. */
void esa_fps_fraction(int32_t *numerator, int32_t *denominator, double fps);

/* y4m.c: YUV4MPEG2, 4:4:4, no loss but the conversion. */
esa_status esa_y4m_save(esa_ctx *ctx, const esa_frames *frames, const char *path, double fps);
/* png.c: one frame. */
esa_status esa_png_save(esa_ctx *ctx, const esa_frames *frames, int64_t frame, const char *path);
/* mp4.c; quality 0 (default) .. 100. ESA_ERR_UNSUPPORTED without FFmpeg. */
esa_status esa_mp4_save(esa_ctx *ctx, const esa_frames *frames, const char *path, double fps, int32_t quality);

/* deflate.c: a zlib stream (RFC 1950, 1951) of in[bytes] into out, which has room for esa_zlib_bound; the size. table is scratch of
 * ESA_ZLIB_TABLE entries. */
#define ESA_ZLIB_TABLE 16384
int64_t esa_zlib_bound(int64_t bytes);
int64_t esa_zlib_pack(uint8_t *out, const uint8_t *in, int64_t bytes, int64_t *table);

#endif
