/* mp4_read.c - videos through the FFmpeg libraries: the first video stream of any container they
 * know, as 8-bit RGB.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Colours are converted with the matrix and range the stream names (BT.601 limited where it names
 * none, as swscale does), chroma upsampled with full accuracy. Only the file itself is opened: no
 * playlists that lead elsewhere, no network. */
#include "media/frames.h"

#ifndef ESA_HAVE_FFMPEG

esa_status esa_mp4_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const char *path,
                        double fps)
{
    (void)info;
    (void)fps;
    if (frames) *frames = NULL;
    return esa_fail(ctx, ESA_ERR_UNSUPPORTED,
                    "%.200s cannot be read: it is neither Y4M, PNG, NPY nor safetensors, and this "
                    "build has no FFmpeg "
                    "(libavformat-dev, libavcodec-dev, libswscale-dev)",
                    path);
}

#else

#include "media/ffmpeg.h"

#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libavutil/opt.h>
#include <libswscale/swscale.h>
#include <string.h>

typedef struct movie {
    esa_ctx *ctx;
    const char *path;
    AVFormatContext *format;
    AVCodecContext *codec;
    AVFrame *frame;
    AVPacket *packet;
    struct SwsContext *scale;
    int stream;
    int64_t room; /* frames that fit into *out */
    esa_frames **out;
    double fps;
} movie;

static esa_status failed(const movie *m, const char *what, int error)
{
    return esa_ffmpeg_fail(m->ctx, ESA_ERR_FORMAT, m->path, "read", what, error);
}

/* Twice the room; frames so far are kept. */
static esa_status grow(movie *m, int64_t height, int64_t width)
{
    const int64_t room = m->room ? 2 * m->room : 64, count = *m->out ? (*m->out)->count : 0;
    esa_frames *more;
    const esa_status status = esa_frames_new(m->ctx, &more, esa_min64(room, ESA_FRAMES_MAX_COUNT),
                                             height, width, m->fps);
    if (status != ESA_OK) return status;
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

static esa_status take(movie *m)
{
    const AVFrame *f = m->frame;
    esa_frames *v = *m->out;
    if (v && (f->width != v->width || f->height != v->height))
        return esa_fail(m->ctx, ESA_ERR_FORMAT,
                        "%.200s changes its size from %d x %d to %d x %d at frame %d", m->path,
                        v->width, v->height, f->width, f->height, v->count);
    if (v && v->count == ESA_FRAMES_MAX_COUNT)
        return esa_fail(m->ctx, ESA_ERR_FORMAT, "%.200s holds more than %d frames", m->path,
                        ESA_FRAMES_MAX_COUNT);
    if (!v || v->count == m->room) {
        const esa_status status = grow(m, f->height, f->width);
        if (status != ESA_OK) return status;
        v = *m->out;
    }
    m->scale = sws_getCachedContext(
        m->scale, f->width, f->height, f->format, f->width, f->height, AV_PIX_FMT_RGB24,
        SWS_BICUBIC | SWS_ACCURATE_RND | SWS_FULL_CHR_H_INT | SWS_FULL_CHR_H_INP, NULL, NULL, NULL);
    if (!m->scale) return failed(m, "its colours cannot be converted", AVERROR(ENOSYS));
    sws_setColorspaceDetails(m->scale, sws_getCoefficients(matrix_of(f->colorspace)),
                             f->color_range == AVCOL_RANGE_JPEG,
                             sws_getCoefficients(SWS_CS_DEFAULT), 1, 0, 1 << 16, 1 << 16);
    uint8_t *to[4] = { v->rgb + (int64_t)v->count * f->height * f->width * 3 };
    const int pitch[4] = { 3 * f->width };
    const int rows = sws_scale(m->scale, (const uint8_t *const *)f->data, f->linesize, 0, f->height,
                               to, pitch);
    if (rows != f->height)
        return failed(m, "its colours cannot be converted", rows < 0 ? rows : AVERROR_INVALIDDATA);
    v->count++;
    return ESA_OK;
}

/* Everything the decoder has ready. */
static esa_status drain(movie *m)
{
    for (;;) {
        const int error = avcodec_receive_frame(m->codec, m->frame);
        if (error == AVERROR(EAGAIN) || error == AVERROR_EOF) return ESA_OK;
        if (error < 0) return failed(m, "a frame is damaged", error);
        const esa_status status = take(m);
        av_frame_unref(m->frame);
        if (status != ESA_OK) return status;
    }
}

static esa_status decode(movie *m, const AVStream *stream)
{
    const AVCodec *decoder = avcodec_find_decoder(stream->codecpar->codec_id);
    if (!decoder)
        return esa_fail(m->ctx, ESA_ERR_UNSUPPORTED,
                        "%.200s cannot be read: this FFmpeg has no decoder for %s", m->path,
                        avcodec_get_name(stream->codecpar->codec_id));
    m->codec = avcodec_alloc_context3(decoder);
    m->frame = av_frame_alloc();
    m->packet = av_packet_alloc();
    if (!m->codec || !m->frame || !m->packet) return failed(m, "decoding", AVERROR(ENOMEM));
    int error = avcodec_parameters_to_context(m->codec, stream->codecpar);
    m->codec->pkt_timebase = stream->time_base;
    m->codec->thread_count = 1;
    m->codec->err_recognition = AV_EF_EXPLODE;
    if (error >= 0) error = avcodec_open2(m->codec, decoder, NULL);
    if (error < 0) return failed(m, "its decoder cannot be started", error);
    for (;;) {
        error = av_read_frame(m->format, m->packet);
        if (error == AVERROR_EOF) break;
        if (error < 0) return failed(m, "it is damaged", error);
        const int ours = m->packet->stream_index == m->stream;
        if (ours) error = avcodec_send_packet(m->codec, m->packet);
        av_packet_unref(m->packet);
        if (error < 0) return failed(m, "a frame is damaged", error);
        const esa_status status = ours ? drain(m) : ESA_OK;
        if (status != ESA_OK) return status;
    }
    error = avcodec_send_packet(m->codec, NULL);
    if (error < 0 && error != AVERROR_EOF) return failed(m, "decoding", error);
    const esa_status status = drain(m);
    if (status != ESA_OK) return status;
    return *m->out ? ESA_OK : esa_fail(m->ctx, ESA_ERR_FORMAT, "%.200s holds no frames", m->path);
}

/* Other profiles of H.264 (10 bits, 4:2:2, 4:4:4) and other containers play in some browsers. */
static int plays_in_browsers(const AVFormatContext *format, const AVCodecParameters *codec)
{
    return strstr(format->iformat->name, "mp4") && codec->codec_id == AV_CODEC_ID_H264 &&
           (codec->format == AV_PIX_FMT_YUV420P || codec->format == AV_PIX_FMT_YUVJ420P);
}

static esa_status read_movie(movie *m, esa_frames_info *info)
{
    AVDictionary *options = NULL;
    av_dict_set(&options, "protocol_whitelist", "file", 0);
    char url[4200];
    snprintf(url, sizeof url, "file:%s", m->path); /* a name with a colon is a name */
    int error = avformat_open_input(&m->format, url, NULL, &options);
    av_dict_free(&options);
    if (error == AVERROR_INVALIDDATA)
        return esa_fail(m->ctx, ESA_ERR_FORMAT, "%.200s is no video", m->path);
    if (error < 0) return failed(m, "it cannot be opened", error);
    error = avformat_find_stream_info(m->format, NULL);
    if (error < 0) return failed(m, "it is damaged", error);
    m->stream = av_find_best_stream(m->format, AVMEDIA_TYPE_VIDEO, -1, -1, NULL, 0);
    if (m->stream < 0) return esa_fail(m->ctx, ESA_ERR_FORMAT, "%.200s holds no video", m->path);
    AVStream *stream = m->format->streams[m->stream];
    const double rate = av_q2d(stream->avg_frame_rate.num ? stream->avg_frame_rate
                                                          : stream->r_frame_rate);
    if (rate >= 0.01 && rate <= 1000) m->fps = rate;
    *info = (esa_frames_info){
        .struct_size = sizeof *info,
        .frames = stream->nb_frames <= ESA_FRAMES_MAX_COUNT ? (int32_t)stream->nb_frames : 0,
        .height = stream->codecpar->height,
        .width = stream->codecpar->width,
        .fps = m->fps,
        .plays_in_browsers = plays_in_browsers(m->format, stream->codecpar)
    };
    snprintf(info->codec, sizeof info->codec, "%s", avcodec_get_name(stream->codecpar->codec_id));
    return m->out ? decode(m, stream) : ESA_OK;
}

esa_status esa_mp4_read(esa_ctx *ctx, esa_frames **frames, esa_frames_info *info, const char *path,
                        double fps)
{
    movie m = { .ctx = ctx, .path = path, .out = frames, .fps = fps };
    if (frames) *frames = NULL;
    /* FFmpeg reports through a level of the process; a library does not print. It is put back
     * below. */
    const int level = av_log_get_level();
    av_log_set_level(AV_LOG_QUIET);
    const esa_status status = read_movie(&m, info);
    av_log_set_level(level);
    sws_freeContext(m.scale);
    av_packet_free(&m.packet);
    av_frame_free(&m.frame);
    avcodec_free_context(&m.codec);
    avformat_close_input(&m.format);
    if (status != ESA_OK && frames) {
        esa_frames_free(*frames);
        *frames = NULL;
    }
    return status;
}

#endif
