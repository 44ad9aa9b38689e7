/* mp4_read.c - reads videos through the FFmpeg libraries: the first video stream of a container, as
 * 8-bit RGB. movie_input.c opens the container.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Colours are converted with the matrix and range that the stream names; if it names none, with
 * limited-range BT.601, as swscale does. Chroma is upsampled with full accuracy. */
#include "media/frames.h"

#ifndef ESA_HAVE_FFMPEG

esa_status esa_mp4_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const char *name,
                        const uint8_t *bytes, int64_t size, double fps)
{
    (void)info;
    (void)bytes;
    (void)size;
    (void)fps;
    if (frames) *frames = NULL;
    return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                    "%.200s cannot be read: it is neither Y4M, PNG, NPY nor safetensors, and this "
                    "build has no FFmpeg (libavformat-dev, libavcodec-dev, libswscale-dev)",
                    name);
}

#else

#include "media/movie_input.h"

#include <libswscale/swscale.h>
#include <math.h>
#include <string.h>

typedef struct decoding {
    esa_movie movie;
    esa_movie_input input;
    struct SwsContext *scale;
    int stream;
    int64_t room;     /* frames that fit into *out */
    int64_t expected; /* frames by the words of the file, 0: it does not say */
    esa_frames **out;
    double fps;
} decoding;

/* Makes room for the first frame, then doubles it; the frames so far are kept. What the file says
 * about its number of frames may be wrong, so it only ends the doubling. */
static esa_status grow(decoding *m, int64_t height, int64_t width)
{
    const int64_t count = *m->out ? (*m->out)->count : 0;
    int64_t room = m->room ? 2 * m->room : 1;
    if (m->expected > m->room) room = esa_min64(room, m->expected);
    esa_frames *more;
    ESA_TRY(esa_frames_new(m->movie.ctx, &more, esa_min64(room, ESA_FRAMES_MAX_COUNT), height,
                           width, m->fps));
    m->room = more->count;
    more->count = (int32_t)count;
    if (*m->out) memcpy(more->rgb, (*m->out)->rgb, (size_t)(count * height * width * 3));
    esa_frames_free(*m->out);
    *m->out = more;
    return ESA_OK;
}

static int matrix_of(enum AVColorSpace space)
{
    switch (space) {
    case AVCOL_SPC_BT709: return SWS_CS_ITU709;
    case AVCOL_SPC_FCC: return SWS_CS_FCC;
    case AVCOL_SPC_SMPTE240M: return SWS_CS_SMPTE240M;
    case AVCOL_SPC_BT2020_NCL:
    case AVCOL_SPC_BT2020_CL: return SWS_CS_BT2020;
    default: return SWS_CS_ITU601;
    }
}

static esa_status check_size(const esa_movie *m, int width, int height)
{
    if (width >= 1 && width <= ESA_FRAMES_MAX_SIDE && height >= 1 && height <= ESA_FRAMES_MAX_SIDE)
        return ESA_OK;
    return esa_fail(m->ctx, ESA_ERR_FORMAT, "%.200s has %d x %d pixels, expected sides of 1 .. %d",
                    m->path, width, height, ESA_FRAMES_MAX_SIDE);
}

/* Makes room for one more frame of the size of f. */
static esa_status reserve(decoding *m, const AVFrame *f)
{
    const esa_frames *v = *m->out;
    ESA_TRY(check_size(&m->movie, f->width, f->height));
    if (v && (f->width != v->width || f->height != v->height))
        return esa_fail(m->movie.ctx, ESA_ERR_FORMAT,
                        "%.200s changes its size from %d x %d to %d x %d at frame %d",
                        m->movie.path, v->width, v->height, f->width, f->height, v->count);
    if (v && v->count == ESA_FRAMES_MAX_COUNT)
        return esa_fail(m->movie.ctx, ESA_ERR_FORMAT, "%.200s holds more than %d frames",
                        m->movie.path, ESA_FRAMES_MAX_COUNT);
    return !v || v->count == m->room ? grow(m, f->height, f->width) : ESA_OK;
}

/* Converts the decoded frame to RGB and adds it to the video. */
static esa_status take(decoding *m)
{
    const AVFrame *f = m->movie.frame;
    ESA_TRY(reserve(m, f));
    esa_frames *v = *m->out;
    m->scale = sws_getCachedContext(
        m->scale, f->width, f->height, f->format, f->width, f->height, AV_PIX_FMT_RGB24,
        SWS_BICUBIC | SWS_ACCURATE_RND | SWS_FULL_CHR_H_INT | SWS_FULL_CHR_H_INP, NULL, NULL, NULL);
    if (!m->scale)
        return esa_movie_fail(&m->movie, "its colours cannot be converted", AVERROR(ENOSYS));
    sws_setColorspaceDetails(m->scale, sws_getCoefficients(matrix_of(f->colorspace)),
                             f->color_range == AVCOL_RANGE_JPEG,
                             sws_getCoefficients(SWS_CS_DEFAULT), 1, 0, 1 << 16, 1 << 16);
    uint8_t *to[4] = { v->rgb + (int64_t)v->count * f->height * f->width * 3 };
    const int pitch[4] = { 3 * f->width };
    const int rows = sws_scale(m->scale, (const uint8_t *const *)f->data, f->linesize, 0, f->height,
                               to, pitch);
    if (rows != f->height)
        return esa_movie_fail(&m->movie, "its colours cannot be converted",
                              rows < 0 ? rows : AVERROR_INVALIDDATA);
    v->count++;
    return ESA_OK;
}

/* Takes all frames that the decoder has ready. */
static esa_status drain(decoding *m)
{
    for (;;) {
        const int error = avcodec_receive_frame(m->movie.codec, m->movie.frame);
        if (error == AVERROR(EAGAIN) || error == AVERROR_EOF) return ESA_OK;
        if (error < 0) return esa_movie_fail(&m->movie, "a frame is damaged", error);
        const esa_status status = take(m);
        av_frame_unref(m->movie.frame);
        if (status) return status;
    }
}

static esa_status start_decoder(decoding *d, const AVStream *stream)
{
    esa_movie *m = &d->movie;
    const AVCodec *decoder = avcodec_find_decoder(stream->codecpar->codec_id);
    if (!decoder)
        return esa_fail(m->ctx, ESA_ERR_UNSUPPORTED,
                        "%.200s cannot be read: this FFmpeg has no decoder for %s", m->path,
                        avcodec_get_name(stream->codecpar->codec_id));
    m->codec = avcodec_alloc_context3(decoder);
    m->frame = av_frame_alloc();
    m->packet = av_packet_alloc();
    if (!m->codec || !m->frame || !m->packet)
        return esa_movie_fail(m, "decoding failed", AVERROR(ENOMEM));
    int error = avcodec_parameters_to_context(m->codec, stream->codecpar);
    m->codec->pkt_timebase = stream->time_base;
    m->codec->thread_count = 1;
    m->codec->err_recognition = AV_EF_EXPLODE;
    if (error >= 0) error = avcodec_open2(m->codec, decoder, NULL);
    return error < 0 ? esa_movie_fail(m, "its decoder cannot be started", error) : ESA_OK;
}

static esa_status decode(decoding *d, const AVStream *stream)
{
    esa_movie *m = &d->movie;
    ESA_TRY(start_decoder(d, stream));
    for (;;) {
        int error = av_read_frame(m->format, m->packet);
        if (error == AVERROR_EOF) break;
        if (error < 0) return esa_movie_fail(m, "it is damaged", error);
        const int ours = m->packet->stream_index == d->stream;
        if (ours) error = avcodec_send_packet(m->codec, m->packet);
        av_packet_unref(m->packet);
        if (error < 0) return esa_movie_fail(m, "a frame is damaged", error);
        if (ours) ESA_TRY(drain(d));
    }
    const int error = avcodec_send_packet(m->codec, NULL);
    if (error < 0 && error != AVERROR_EOF) return esa_movie_fail(m, "decoding failed", error);
    ESA_TRY(drain(d));
    return *d->out ? ESA_OK : esa_fail(m->ctx, ESA_ERR_FORMAT, "%.200s holds no frames", m->path);
}

/* Other profiles of H.264 (10 bits, 4:2:2, 4:4:4) and other containers play in some browsers. */
static int plays_in_browsers(const AVFormatContext *format, const AVCodecParameters *codec)
{
    return strstr(format->iformat->name, "mp4") && codec->codec_id == AV_CODEC_ID_H264 &&
           (codec->format == AV_PIX_FMT_YUV420P || codec->format == AV_PIX_FMT_YUVJ420P);
}

/* Frames by the words of the file: their number, or the duration times the rate. 0: it does not
 * say. */
static int64_t expected_frames(const AVFormatContext *format, const AVStream *stream, double rate)
{
    if (stream->nb_frames > 0) return stream->nb_frames;
    const double seconds = stream->duration > 0
                               ? (double)stream->duration * av_q2d(stream->time_base)
                               : (double)format->duration / AV_TIME_BASE;
    const double count = round(seconds * rate);
    return count >= 1 && count <= ESA_FRAMES_MAX_COUNT ? (int64_t)count : 0;
}

static esa_status read_movie(decoding *d, esa_frames_info *info)
{
    esa_movie *m = &d->movie;
    ESA_TRY(esa_movie_input_open(m, &d->input));
    const int error = avformat_find_stream_info(m->format, NULL);
    if (error < 0) return esa_movie_fail(m, "it is damaged", error);
    d->stream = av_find_best_stream(m->format, AVMEDIA_TYPE_VIDEO, -1, -1, NULL, 0);
    if (d->stream < 0)
        return esa_fail(m->ctx, ESA_ERR_FORMAT, "%.200s holds no video stream", m->path);
    const AVStream *stream = m->format->streams[d->stream];
    const double rate = av_q2d(stream->avg_frame_rate.num ? stream->avg_frame_rate
                                                          : stream->r_frame_rate);
    if (esa_fps_valid(rate)) d->fps = rate;
    d->expected = expected_frames(m->format, stream, d->fps);
    const int counted = stream->nb_frames >= 1 && stream->nb_frames <= ESA_FRAMES_MAX_COUNT;
    *info = esa_frames_sizes(counted ? stream->nb_frames : 0, stream->codecpar->height,
                             stream->codecpar->width, d->fps);
    info->plays_in_browsers = plays_in_browsers(m->format, stream->codecpar);
    snprintf(info->codec, sizeof info->codec, "%s", avcodec_get_name(stream->codecpar->codec_id));
    return d->out ? decode(d, stream)
                  : check_size(m, stream->codecpar->width, stream->codecpar->height);
}

esa_status esa_mp4_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const char *name,
                        const uint8_t *bytes, int64_t size, double fps)
{
    decoding d = { .movie = { .ctx = ctx, .path = name },
                   .input = { .bytes = bytes, .size = size },
                   .out = frames,
                   .fps = fps };
    if (frames) *frames = NULL;
    esa_movie_quiet(); /* the library does not print */
    const esa_status status = read_movie(&d, info);
    sws_freeContext(d.scale);
    esa_movie_free(&d.movie);
    esa_movie_input_close(&d.movie, &d.input);
    esa_movie_loud();
    return esa_frames_drop(status, frames);
}

#endif
