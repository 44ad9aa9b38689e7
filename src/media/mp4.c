/* mp4.c - MP4 through the FFmpeg libraries: by default H.264 where there is an encoder, else MPEG-4
 * part 2.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The file is put together in memory, where the muxer can go back and fill in its sizes, and then
 * written in one go like every other file. Nothing that changes from run to run (dates, versions)
 * goes into it. */
#include "io/outfile.h"
#include "media/frames.h"

#ifndef ESA_HAVE_FFMPEG

esa_status esa_mp4_save(esa_ctx *ctx, const esa_frames *frames, const char *path, double fps,
                        int32_t quality, int32_t codec)
{
    (void)frames;
    (void)fps;
    (void)quality;
    (void)codec;
    return esa_fail(
        ctx, ESA_ERR_UNSUPPORTED,
        "%.200s cannot be written: this build has no FFmpeg (libavformat-dev, libavcodec-dev); "
        ".y4m and folders of PNG work without",
        path);
}

#else

#include "media/ffmpeg.h"

#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libavutil/opt.h>
#include <string.h>

typedef struct movie {
    esa_ctx *ctx;
    const char *path;
    AVFormatContext *format;
    AVCodecContext *codec;
    AVStream *stream;
    AVFrame *frame;
    AVPacket *packet;
} movie;

static esa_status failed(const movie *m, const char *what, int error)
{
    return esa_ffmpeg_fail(m->ctx, ESA_ERR_IO, m->path, "written", what, error);
}

/* An opened encoder of that name, or NULL. Its messages are pushed below any level: the library
 * does not print. */
static AVCodecContext *open_encoder(const char *name, const esa_frames *frames, AVRational rate,
                                    int32_t quality)
{
    const AVCodec *encoder = avcodec_find_encoder_by_name(name);
    AVCodecContext *c = encoder ? avcodec_alloc_context3(encoder) : NULL;
    if (!c) return NULL;
    const double good = quality > 0 ? quality / 100.0 : 0.75;
    av_opt_set_int(c, "log_level_offset", 128, 0); /* above every level, below 256 */
    c->width = frames->width;
    c->height = frames->height;
    const int lossless = strcmp(name, "libx264rgb") == 0;
    c->pix_fmt = lossless ? AV_PIX_FMT_RGB24 : AV_PIX_FMT_YUV420P;
    c->time_base = av_inv_q(rate);
    c->framerate = rate;
    c->color_range = lossless ? AVCOL_RANGE_JPEG : AVCOL_RANGE_MPEG;
    c->colorspace = lossless ? AVCOL_SPC_RGB : AVCOL_SPC_SMPTE170M;
    c->color_primaries = AVCOL_PRI_BT709;
    c->color_trc = AVCOL_TRC_IEC61966_2_1;
    c->thread_count = 1;
    c->flags |= AV_CODEC_FLAG_GLOBAL_HEADER | AV_CODEC_FLAG_BITEXACT;
    if (encoder->id == AV_CODEC_ID_MPEG4) {
        c->flags |= AV_CODEC_FLAG_QSCALE;
        c->global_quality = FF_QP2LAMBDA * (1 + (int)((1 - good) * 15));
    } else if (lossless) {
        av_opt_set(c->priv_data, "qp", "0", 0);
    } else if (encoder->id == AV_CODEC_ID_AV1) {
        c->bit_rate = 0; /* by quality alone, 0 .. 63 */
        av_opt_set_int(c->priv_data, "crf", 8 + (int)((1 - good) * 48), 0);
        av_opt_set_int(c->priv_data, "cpu-used", 6, 0);
    } else {
        char factor[16];
        snprintf(factor, sizeof factor, "%d", 10 + (int)((1 - good) * 30));
        av_opt_set(c->priv_data, "crf", factor, 0); /* libx264, libx265 */
        /* x264's macroblock tree reads memory it has not written (seen with 0.164: other bytes
         * after other uses of the heap). */
        av_opt_set_int(c->priv_data, "mbtree", 0, 0);
        av_opt_set(c->priv_data, "x265-params", "log-level=none:pools=none:frame-threads=1", 0);
        /* those without crf */
        c->bit_rate = (int64_t)(good * 0.6 * frames->width * frames->height * av_q2d(rate)) + 64000;
    }
    if (avcodec_open2(c, encoder, NULL) < 0) avcodec_free_context(&c);
    return c;
}

/* Everything the encoder has ready goes into the file. */
static esa_status drain(movie *m)
{
    for (;;) {
        int error = avcodec_receive_packet(m->codec, m->packet);
        if (error == AVERROR(EAGAIN) || error == AVERROR_EOF) return ESA_OK;
        if (error < 0) return failed(m, "encoding failed", error);
        m->packet->stream_index = m->stream->index;
        if (m->packet->duration == 0) m->packet->duration = 1;
        av_packet_rescale_ts(m->packet, m->codec->time_base, m->stream->time_base);
        error = av_interleaved_write_frame(m->format, m->packet);
        if (error < 0) return failed(m, "the MP4 could not be put together", error);
    }
}

static void fill_picture(AVFrame *to, const esa_frames *frames, int64_t i)
{
    const uint8_t *rgb = frames->rgb + i * frames->height * frames->width * 3;
    const int64_t pitch[3] = { to->linesize[0], to->linesize[1], to->linesize[2] },
                  line = (int64_t)frames->width * 3;
    if (to->format == AV_PIX_FMT_YUV420P)
        esa_rgb_to_yuv420(to->data, pitch, rgb, frames->height, frames->width);
    else
        for (int64_t y = 0; y < frames->height; y++)
            memcpy(to->data[0] + y * pitch[0], rgb + y * line, (size_t)line);
}

static esa_status encode(movie *m, const esa_frames *frames, AVRational rate, int32_t quality,
                         int32_t codec)
{
    static const struct {
        const char *what, *name[4];
    } encoders[] = {
        [ESA_CODEC_AUTO] = { "H.264 or MPEG-4", { "libx264", "libopenh264", "mpeg4" } },
        [ESA_CODEC_H264] = { "H.264", { "libx264", "libopenh264" } },
        [ESA_CODEC_HEVC] = { "HEVC", { "libx265" } },
        [ESA_CODEC_AV1] = { "AV1", { "libaom-av1" } },
        [ESA_CODEC_MPEG4] = { "MPEG-4", { "mpeg4" } },
        [ESA_CODEC_LOSSLESS] = { "lossless H.264", { "libx264rgb" } },
    };
    for (int i = 0; encoders[codec].name[i] && !m->codec; i++)
        m->codec = open_encoder(encoders[codec].name[i], frames, rate, quality);
    if (!m->codec)
        return esa_fail(m->ctx, ESA_ERR_UNSUPPORTED,
                        "%.200s cannot be written: this FFmpeg has no encoder for %s that takes %d "
                        "x %d pixels; .y4m works without",
                        m->path, encoders[codec].what, frames->width, frames->height);
    int error = avformat_alloc_output_context2(&m->format, NULL, "mp4", NULL);
    if (error < 0) return failed(m, "no MP4 writer", error);
    m->format->flags |= AVFMT_FLAG_BITEXACT;
    m->stream = avformat_new_stream(m->format, NULL);
    m->frame = av_frame_alloc();
    m->packet = av_packet_alloc();
    if (!m->stream || !m->frame || !m->packet) return failed(m, "encoding failed", AVERROR(ENOMEM));
    m->stream->time_base = m->codec->time_base;
    m->stream->avg_frame_rate = rate;
    m->frame->format = m->codec->pix_fmt;
    m->frame->width = m->codec->width;
    m->frame->height = m->codec->height;
    error = avcodec_parameters_from_context(m->stream->codecpar, m->codec);
    if (error >= 0) error = av_frame_get_buffer(m->frame, 0);
    if (error >= 0) error = avio_open_dyn_buf(&m->format->pb);
    if (error >= 0) error = avformat_write_header(m->format, NULL);
    if (error < 0) return failed(m, "the MP4 could not be started", error);
    for (int32_t i = 0; i <= frames->count; i++) { /* the last turn flushes */
        if (i < frames->count) {
            error = av_frame_make_writable(m->frame);
            if (error < 0) return failed(m, "encoding failed", error);
            fill_picture(m->frame, frames, i);
            m->frame->pts = i;
        }
        error = avcodec_send_frame(m->codec, i < frames->count ? m->frame : NULL);
        if (error < 0) return failed(m, "encoding failed", error);
        const esa_status status = drain(m);
        if (status != ESA_OK) return status;
    }
    error = av_write_trailer(m->format);
    return error < 0 ? failed(m, "the MP4 could not be finished", error) : ESA_OK;
}

esa_status esa_mp4_save(esa_ctx *ctx, const esa_frames *frames, const char *path, double fps,
                        int32_t quality, int32_t codec)
{
    if (codec != ESA_CODEC_LOSSLESS && (frames->width % 2 || frames->height % 2))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "%.200s cannot be written: MP4 needs even sides, these frames are %d x %d; "
                        ".y4m takes them",
                        path, frames->width, frames->height);
    movie m = { .ctx = ctx, .path = path };
    esa_outfile out;
    /* first: no work for a place that cannot be written */
    esa_status status = esa_outfile_open(ctx, &out, path);
    if (status != ESA_OK) return status;
    int32_t numerator, denominator;
    esa_fps_fraction(&numerator, &denominator, fps);
    status = encode(&m, frames, (AVRational){ numerator, denominator }, quality, codec);
    uint8_t *bytes = NULL;
    int size = 0;
    if (m.format && m.format->pb) size = avio_close_dyn_buf(m.format->pb, &bytes);
    if (status == ESA_OK && (size <= 0 || !bytes))
        status = failed(&m, "the MP4 could not be finished", AVERROR(ENOMEM));
    if (status == ESA_OK) status = esa_outfile_write(&out, bytes, size);
    if (status == ESA_OK) status = esa_outfile_commit(&out);
    esa_outfile_close(&out);
    av_free(bytes);
    av_packet_free(&m.packet);
    av_frame_free(&m.frame);
    avcodec_free_context(&m.codec);
    avformat_free_context(m.format);
    return status;
}

#endif
