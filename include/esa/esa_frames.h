/* esa_frames.h - videos in memory: reading, writing and comparing frames. Library libesa_video.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The rules of esa.h hold here too: a status and one message in the ctx, nothing printed, objects
 * NULL after a failure, params with struct_size. */
#ifndef ESA_FRAMES_H
#define ESA_FRAMES_H

#include "esa.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct esa_frames esa_frames;

/* ---------------------------------------------------------------- frames */

typedef struct esa_frames_info { /* struct_size is set by the caller */
    uint32_t struct_size;
    int32_t frames, height, width;
    double fps;
    const uint8_t *rgb; /* [frames][height][width][3], owned by the object */
    /* Set by esa_frames_peek for what FFmpeg reads: the codec ("h264"), and 1 if every current
     * browser plays the file (MP4 with H.264, 8 bits, 4:2:0). */
    char codec[20];
    int32_t plays_in_browsers;
    int64_t reserved[1];
} esa_frames_info;

/* Copies rgb; NULL makes black frames. On success the caller owns *frames. */
ESA_API esa_status esa_frames_create(esa_ctx *ctx, esa_frames **frames, const uint8_t *rgb,
                                     int32_t count, int32_t height, int32_t width, double fps);
ESA_API void esa_frames_free(esa_frames *frames);
ESA_API esa_status esa_frames_get_info(const esa_frames *frames, esa_frames_info *info);
/* Puts two videos side by side. They must have the same count and height. On success the caller
 * owns *both. */
ESA_API esa_status esa_frames_beside(esa_ctx *ctx, esa_frames **both, const esa_frames *left,
                                     const esa_frames *right);

/* Codecs for MP4. AUTO is H.264 if FFmpeg has an encoder for it, else MPEG-4. LOSSLESS is H.264 in
 * RGB: every pixel is kept, and few browsers play it. */
enum {
    ESA_CODEC_AUTO = 0,
    ESA_CODEC_H264 = 1,
    ESA_CODEC_HEVC = 2,
    ESA_CODEC_AV1 = 3,
    ESA_CODEC_MPEG4 = 4,
    ESA_CODEC_LOSSLESS = 5
};
/* Elements of tensor files: U8 is 0 .. 255, F32 and F16 are in [0, 1]. */
enum { ESA_PIXELS_U8 = 0, ESA_PIXELS_F32 = 1, ESA_PIXELS_F16 = 2 };

typedef struct esa_save_params {
    uint32_t struct_size;
    int32_t quality; /* MP4 except LOSSLESS: 1 .. 100, higher is better; 0: 75 (0) */
    double fps;      /* frames per second, 0.01 .. 1000; 0: those of the frames (0) */
    int32_t codec;   /* ESA_CODEC_*, for .mp4 (AUTO) */
    int32_t pixels;  /* ESA_PIXELS_*, for .safetensors and .npy (U8) */
    int64_t reserved[3];
} esa_save_params;

ESA_API esa_save_params esa_save_params_default(void);
/* Writes a video. The ending of path chooses the format: .mp4 (needs FFmpeg), .y4m, .png (one
 * frame), .npy or .safetensors (a tensor [frames, height, width, 3]; in .safetensors it is called
 * `frames`, and the metadata holds fps). A path that ends in '/' is a folder of 00000.png,
 * 00001.png, ... The video is written under a temporary name and renamed; a failure leaves nothing
 * behind. */
ESA_API esa_status esa_frames_save(esa_ctx *ctx, const esa_frames *frames, const char *path,
                                   const esa_save_params *params);
/* Checks, before any work, that this many frames can be saved to this path: the params, the ending,
 * and that a folder holds nothing else. It does not check permissions or free space. */
ESA_API esa_status esa_frames_save_check(esa_ctx *ctx, const char *path, int64_t frames,
                                         const esa_save_params *params);

typedef struct esa_load_params {
    uint32_t struct_size;
    int32_t reserved0;
    double fps; /* frames per second of files that do not state it (PNG, .npy); 0: 16 (0) */
    int64_t reserved[4];
} esa_load_params;

ESA_API esa_load_params esa_load_params_default(void);
/* Reads a video from a file or a folder. The content decides, not the name:
 *  - A folder of PNG pictures, all of one size. They are ordered by the numbers in their names, and
 *    by the names where these have none.
 *  - PNG: one frame. Every colour type and depth, interlaced or not. 16 bits are rounded to 8,
 *    transparency is dropped.
 *  - Y4M: 8 bits, 4:2:0, 4:2:2, 4:4:4 or grey, BT.601.
 *  - safetensors, NPY: [frames, height, width, 3] of U8 (0 .. 255), or of F16, F32, F64 or BF16
 *    (safetensors only) in [0, 1]. A batch of 1 may come first. A safetensors file holds a tensor
 *    called `frames`, or only one tensor.
 *  - Anything else: the first video stream that FFmpeg finds in a container that holds its own
 *    pixels: MP4, MOV, MKV, WebM, AVI, FLV, MPEG, Ogg, ASF, MXF, NUT, IVF, DV, GIF, APNG, a bare
 *    stream of H.264, HEVC, AV1, MPEG-1, 2 or 4, or a picture (JPEG, WebP, TIFF, BMP, JPEG 2000,
 *    JPEG XL, QOI, PNM). Files that name other files (playlists, lists, subtitles) are refused:
 *    nothing but the given file is opened.
 *
 * FFmpeg's log level belongs to the process. While any thread reads through FFmpeg it is
 * AV_LOG_QUIET; after the last such call it is what it was before the first, or what the program
 * set meanwhile.
 *
 * Fails with ESA_ERR_IO if the file cannot be read, ESA_ERR_FORMAT if it is damaged or not a video,
 * ESA_ERR_UNSUPPORTED if it needs FFmpeg and this build has none, or for other containers; the
 * message names the file.
 * params may be NULL. On success the caller owns *frames. */
ESA_API esa_status esa_frames_load(esa_ctx *ctx, esa_frames **frames, const char *path,
                                   const esa_load_params *params);
/* Reads only the header: count, sizes and fps. info->rgb is NULL; info->frames is 0 if only
 * decoding can tell the count. */
ESA_API esa_status esa_frames_peek(esa_ctx *ctx, esa_frames_info *info, const char *path,
                                   const esa_load_params *params);

/* ---------------------------------------------------------------- metrics */

/* LPIPS (Zhang, Isola, Efros, Shechtman, Wang 2018), version 0.1, as the Python package `lpips`
 * computes it. */
typedef struct esa_lpips esa_lpips;
/* Opens weights that tools/convert_lpips.py wrote, for AlexNet or VGG16. The object keeps ctx,
 * which must outlive it. Fails with ESA_ERR_IO, ESA_ERR_FORMAT (not such a file) or
 * ESA_ERR_MISMATCH (a tensor is missing or has the wrong shape). */
ESA_API esa_status esa_lpips_open(esa_ctx *ctx, esa_lpips **lpips, const char *path);
ESA_API void esa_lpips_free(esa_lpips *lpips);
ESA_API const char *esa_lpips_net(const esa_lpips *lpips); /* "alex" or "vgg"; static storage */
/* The smallest side, in pixels, of frames that this network can compare. */
ESA_API int32_t esa_lpips_least(const esa_lpips *lpips);

typedef struct esa_metrics { /* struct_size is set by the caller */
    uint32_t struct_size;
    int32_t frames;
    double psnr;               /* dB over all frames; +inf if they are equal */
    double ssim;               /* mean over frames */
    double psnr_min, ssim_min; /* worst frame */
    double lpips, lpips_max;   /* mean over frames, worst frame; NaN if not measured */
    /* How differently the two videos change from frame to frame: the root mean square of
     * (f[t] - f[t-1]) - (r[t] - r[t-1]) in levels of 0 .. 255. NaN for a single frame. */
    double flicker;
    int64_t reserved[1];
} esa_metrics;

/* The values of one frame in the order esa_frames_measure writes them. FLICKER compares the change
 * from the previous frame; it is NaN for the first. */
enum {
    ESA_METRIC_PSNR = 0,
    ESA_METRIC_SSIM = 1,
    ESA_METRIC_LPIPS = 2,
    ESA_METRIC_FLICKER = 3,
    ESA_METRIC_COUNT = 4
};

/* Computes PSNR, SSIM and flicker; LPIPS is NaN. */
ESA_API esa_status esa_frames_compare(esa_ctx *ctx, esa_metrics *metrics,
                                      const esa_frames *reference, const esa_frames *frames);
/* Like esa_frames_compare, but also computes LPIPS and the values of each frame. each is
 * [frames][ESA_METRIC_COUNT], owned by the caller, or NULL. lpips must have been opened with the
 * same ctx, or is NULL. The videos must have the same count and size, with sides of at least 11
 * pixels and, with lpips, esa_lpips_least; else ESA_ERR_SHAPE. progress is called after every frame
 * of LPIPS and may be NULL; a return value other than 0 cancels the call with ESA_ERR_STATE. */
ESA_API esa_status esa_frames_measure(esa_ctx *ctx, esa_metrics *metrics, double *each,
                                      const esa_frames *reference, const esa_frames *frames,
                                      esa_lpips *lpips,
                                      int32_t (*progress)(void *user, int32_t done, int32_t total),
                                      void *user);

#ifdef __cplusplus
}
#endif
#endif
