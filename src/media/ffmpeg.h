/* ffmpeg.h - what writing and reading through the FFmpeg libraries share; for mp4.c and mp4_read.c,
 * in builds that have FFmpeg.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MEDIA_FFMPEG_H
#define ESA_MEDIA_FFMPEG_H

#include "media/frames.h"

#include <errno.h>
#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libavutil/error.h>
#include <libavutil/opt.h>

typedef struct esa_movie {
    esa_ctx *ctx;
    const char *path;
    int writing; /* 0: reading */
    AVFormatContext *format;
    AVCodecContext *codec;
    AVFrame *frame;
    AVPacket *packet;
} esa_movie;

/* Fails with "<path> cannot be written: <what>: <FFmpeg's text for error>", or "read". The status
 * is ESA_ERR_MEMORY if FFmpeg ran out of memory, else ESA_ERR_IO, or ESA_ERR_FORMAT for reading. */
static inline esa_status esa_movie_fail(const esa_movie *m, const char *what, int error)
{
    char why[AV_ERROR_MAX_STRING_SIZE] = "";
    av_strerror(error, why, sizeof why);
    const esa_status status = error == AVERROR(ENOMEM) ? ESA_ERR_MEMORY
                              : m->writing             ? ESA_ERR_IO
                                                       : ESA_ERR_FORMAT;
    return esa_fail(m->ctx, status, "%.200s cannot be %s: %s: %s", m->path,
                    m->writing ? "written" : "read", what, why);
}

/* Frees everything but the format, which writing and reading close differently. */
static inline void esa_movie_free(esa_movie *m)
{
    av_packet_free(&m->packet);
    av_frame_free(&m->frame);
    avcodec_free_context(&m->codec);
}

#endif
