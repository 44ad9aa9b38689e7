/* ffmpeg.h - one sentence for what the FFmpeg libraries could not do; for mp4.c and mp4_read.c, in
 * builds that have them.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MEDIA_FFMPEG_H
#define ESA_MEDIA_FFMPEG_H

#include "media/frames.h"

#include <errno.h>
#include <libavutil/error.h>

/* Puts "<path> cannot be <done>: <what>: <FFmpeg's words for error>" into the ctx. Returns
 * ESA_ERR_MEMORY if that is what was missing, else status. */
static inline esa_status esa_ffmpeg_fail(esa_ctx *ctx, esa_status status, const char *path,
                                         const char *done, const char *what, int error)
{
    char why[AV_ERROR_MAX_STRING_SIZE] = "";
    av_strerror(error, why, sizeof why);
    return esa_fail(ctx, error == AVERROR(ENOMEM) ? ESA_ERR_MEMORY : status,
                    "%.200s cannot be %s: %s: %s", path, done, what, why);
}

#endif
