/* esa_frames.h - videos as frames in memory: reading, writing and comparing them. Library
 * libesa_video.
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

/* rgb is copied (NULL: black). */
ESA_API esa_status esa_frames_create(esa_ctx *ctx, esa_frames **frames, const uint8_t *rgb,
                                     int32_t count, int32_t height, int32_t width, double fps);
ESA_API void esa_frames_free(esa_frames *frames);
ESA_API esa_status esa_frames_get_info(const esa_frames *frames, esa_frames_info *info);
/* Left and right of one another; both must have the same count and height. */
ESA_API esa_status esa_frames_beside(esa_ctx *ctx, esa_frames **both, const esa_frames *left,
                                     const esa_frames *right);

/* Codecs of MP4. AUTO: H.264, else MPEG-4. LOSSLESS: H.264 of RGB without loss; every pixel comes
 * back, few browsers play it. */
enum {
    ESA_CODEC_AUTO = 0,
    ESA_CODEC_H264 = 1,
    ESA_CODEC_HEVC = 2,
    ESA_CODEC_AV1 = 3,
    ESA_CODEC_MPEG4 = 4,
    ESA_CODEC_LOSSLESS = 5
};
/* Elements of tensor files: bytes 0 .. 255, or numbers in [0, 1]. */
enum { ESA_PIXELS_U8 = 0, ESA_PIXELS_F32 = 1, ESA_PIXELS_F16 = 2 };

typedef struct esa_save_params {
    uint32_t struct_size;
    int32_t quality; /* 0 .. 100, 0: default; lossy formats */
    double fps;      /* 0: the frames' own */
    int32_t codec;   /* ESA_CODEC_*, of MP4 */
    int32_t pixels;  /* ESA_PIXELS_*, of .safetensors and .npy */
    int64_t reserved[3];
} esa_save_params;

ESA_API esa_save_params esa_save_params_default(void);
/* The ending chooses: .mp4 (needs FFmpeg), .y4m, .png (one frame), .safetensors or .npy (a tensor
 * [frames, height, width, 3]; in .safetensors it is called `frames` and fps stands in the
 * metadata), or a path that ends in '/': a folder of 00000.png .. . Written to a temporary name and
 * renamed; on failure nothing is left. */
ESA_API esa_status esa_frames_save(esa_ctx *ctx, const esa_frames *frames, const char *path,
                                   const esa_save_params *params);
/* What can be said against saving so many frames there before they are made: params, the ending, a
 * folder that holds other things. Whether there is room and permission only saving tells. */
ESA_API esa_status esa_frames_save_check(esa_ctx *ctx, const char *path, int64_t frames,
                                         const esa_save_params *params);

typedef struct esa_load_params {
    uint32_t struct_size;
    int32_t reserved0;
    double fps; /* of what does not say (PNG, .npy); 0: 16 */
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
 *  - Anything else: the first video stream that FFmpeg finds (MP4, WebM, MKV, AVI, ...).
 *
 * Fails with ESA_ERR_IO if the file cannot be read, ESA_ERR_FORMAT if it is damaged or not a video,
 * ESA_ERR_UNSUPPORTED if it needs FFmpeg and this build has none; the message names the file.
 * params may be NULL. On success the caller owns *frames. */
ESA_API esa_status esa_frames_load(esa_ctx *ctx, esa_frames **frames, const char *path,
                                   const esa_load_params *params);
/* The same without the pictures: sizes as the file's header says; info->rgb is NULL, info->frames 0
 * where only decoding tells. */
ESA_API esa_status esa_frames_peek(esa_ctx *ctx, esa_frames_info *info, const char *path,
                                   const esa_load_params *params);

/* ---------------------------------------------------------------- metrics */

/* LPIPS (Zhang, Isola, Efros, Shechtman, Wang 2018), version 0.1, as the Python package `lpips`
 * computes it. */
typedef struct esa_lpips esa_lpips;
/* From a file that tools/convert_lpips.py wrote: AlexNet or VGG16, its metadata says which. ctx is
 * kept and must outlive it. ESA_ERR_IO, ESA_ERR_FORMAT (no such file), ESA_ERR_MISMATCH (a tensor
 * is missing or of another shape). */
ESA_API esa_status esa_lpips_open(esa_ctx *ctx, esa_lpips **lpips, const char *path);
ESA_API void esa_lpips_free(esa_lpips *lpips);
ESA_API const char *esa_lpips_net(const esa_lpips *lpips); /* "alex" or "vgg"; static storage */
/* shortest side of a picture it can look at, in pixels */
ESA_API int32_t esa_lpips_least(const esa_lpips *lpips);

typedef struct esa_metrics { /* struct_size is set by the caller */
    uint32_t struct_size;
    int32_t frames;
    double psnr;               /* dB over all frames; +inf for equal ones */
    double ssim;               /* mean over frames */
    double psnr_min, ssim_min; /* worst frame */
    double lpips, lpips_max;   /* mean over frames, worst frame; NaN: not measured */
    /* how differently the videos change from frame to frame: the root of the mean square of
     * (f[t] - f[t-1]) - (r[t] - r[t-1]) in grey levels; 0 for equal changes, NaN for one frame */
    double flicker;
    int64_t reserved[1];
} esa_metrics;

/* Values of one frame, as esa_frames_measure writes them. FLICKER is that of the change from the
 * frame before, NaN for the first. */
enum {
    ESA_METRIC_PSNR = 0,
    ESA_METRIC_SSIM = 1,
    ESA_METRIC_LPIPS = 2,
    ESA_METRIC_FLICKER = 3,
    ESA_METRIC_COUNT = 4
};

/* PSNR, SSIM and flicker; LPIPS stays NaN. */
ESA_API esa_status esa_frames_compare(esa_ctx *ctx, esa_metrics *metrics,
                                      const esa_frames *reference, const esa_frames *frames);
/* The same frame by frame: each [frames][ESA_METRIC_COUNT] unless NULL, of the caller. lpips (of
 * the same ctx) may be NULL. Videos must have the same number of frames and size, sides of at least
 * 11 pixels, with lpips esa_lpips_least: ESA_ERR_SHAPE. progress (may be NULL) is called after
 * every frame of LPIPS; not 0 cancels: ESA_ERR_STATE. */
ESA_API esa_status esa_frames_measure(esa_ctx *ctx, esa_metrics *metrics, double *each,
                                      const esa_frames *reference, const esa_frames *frames,
                                      esa_lpips *lpips,
                                      int32_t (*progress)(void *user, int32_t done, int32_t total),
                                      void *user);

#ifdef __cplusplus
}
#endif
#endif
