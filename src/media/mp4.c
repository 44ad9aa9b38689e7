/* mp4.c - writes MP4 through the FFmpeg libraries. The default codec is H.264 if there is an
 * encoder for it, else MPEG-4 part 2.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The file is assembled in memory, where the muxer can go back and fill in its sizes, and then
 * written like every other file. It contains nothing that changes from run to run, such as dates or
 * versions. */
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
        ".y4m and folders of PNG work without it",
        path);
}

#else

#include "media/ffmpeg.h"

#include <string.h>

typedef struct encoding {
    esa_movie movie;
    AVStream *stream;
    AVRational rate;
    int32_t quality, codec;
} encoding;

/* x264's bits depend on the number of its threads, so the number is the same on every machine. */
enum { X264_THREADS = 8 };

/* Lossy settings by quality 0 .. 1, for each family of encoders. */
static void set_quality(AVCodecContext *c, const AVCodec *encoder, double good)
{
    if (encoder->id == AV_CODEC_ID_MPEG4) {
        c->flags |= AV_CODEC_FLAG_QSCALE;
        c->global_quality = FF_QP2LAMBDA * (1 + (int)((1 - good) * 15));
    } else if (encoder->id == AV_CODEC_ID_AV1) {
        c->bit_rate = 0; /* quality alone decides; crf is 0 .. 63 */
        av_opt_set_int(c->priv_data, "crf", 8 + (int)((1 - good) * 48), 0);
        av_opt_set_int(c->priv_data, "cpu-used", 6, 0);
    } else {
        char factor[16];
        snprintf(factor, sizeof factor, "%d", 10 + (int)((1 - good) * 30));
        av_opt_set(c->priv_data, "crf", factor, 0); /* libx264, libx265 */
        /* x264's macroblock tree reads uninitialised memory (seen with 0.164: the bytes depend on
         * earlier uses of the heap). */
        av_opt_set_int(c->priv_data, "mbtree", 0, 0);
        av_opt_set(c->priv_data, "x265-params", "log-level=none:pools=none:frame-threads=1", 0);
        /* for encoders without crf */
        c->bit_rate = (int64_t)(good * 0.6 * c->width * c->height * av_q2d(c->framerate)) + 64000;
    }
}

/* Opens the encoder of that name, or returns NULL. Its log level is raised above every message,
 * because the library does not print. */
static AVCodecContext *open_encoder(const char *name, const esa_frames *frames, AVRational rate,
                                    int32_t quality)
{
    const AVCodec *encoder = avcodec_find_encoder_by_name(name);
    AVCodecContext *c = encoder ? avcodec_alloc_context3(encoder) : NULL;
    if (!c) return NULL;
    const int lossless = strcmp(name, "libx264rgb") == 0;
    av_opt_set_int(c, "log_level_offset", 128, 0); /* above every level, below 256 */
    c->width = frames->width;
    c->height = frames->height;
    c->pix_fmt = lossless ? AV_PIX_FMT_RGB24 : AV_PIX_FMT_YUV420P;
    c->time_base = av_inv_q(rate);
    c->framerate = rate;
    c->color_range = lossless ? AVCOL_RANGE_JPEG : AVCOL_RANGE_MPEG;
    c->colorspace = lossless ? AVCOL_SPC_RGB : AVCOL_SPC_SMPTE170M;
    c->color_primaries = AVCOL_PRI_BT709;
    c->color_trc = AVCOL_TRC_IEC61966_2_1;
    c->thread_count = strncmp(name, "libx264", 7) == 0 ? X264_THREADS : 1;
    c->flags |= AV_CODEC_FLAG_GLOBAL_HEADER | AV_CODEC_FLAG_BITEXACT;
    if (lossless)
        av_opt_set(c->priv_data, "qp", "0", 0);
    else
        set_quality(c, encoder, quality > 0 ? quality / 100.0 : 0.75);
    if (avcodec_open2(c, encoder, NULL) < 0) avcodec_free_context(&c);
    return c;
}

/* Writes all packets that the encoder has ready. */
static esa_status drain(encoding *c)
{
    esa_movie *m = &c->movie;
    for (;;) {
        int error = avcodec_receive_packet(m->codec, m->packet);
        if (error == AVERROR(EAGAIN) || error == AVERROR_EOF) return ESA_OK;
        if (error < 0) return esa_movie_fail(m, "encoding failed", error);
        m->packet->stream_index = c->stream->index;
        if (m->packet->duration == 0) m->packet->duration = 1;
        av_packet_rescale_ts(m->packet, m->codec->time_base, c->stream->time_base);
        error = av_interleaved_write_frame(m->format, m->packet);
        if (error < 0) return esa_movie_fail(m, "the MP4 could not be assembled", error);
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

static esa_status find_encoder(encoding *c, const esa_frames *frames)
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
    for (int i = 0; encoders[c->codec].name[i] && !c->movie.codec; i++)
        c->movie.codec = open_encoder(encoders[c->codec].name[i], frames, c->rate, c->quality);
    if (c->movie.codec) return ESA_OK;
    return esa_fail(
        c->movie.ctx, ESA_ERR_UNSUPPORTED,
        "%.200s cannot be written: this FFmpeg has no encoder for %s that takes %d x %d "
        "pixels; .y4m works without one",
        c->movie.path, encoders[c->codec].what, frames->width, frames->height);
}

static esa_status start_file(encoding *c)
{
    esa_movie *m = &c->movie;
    int error = avformat_alloc_output_context2(&m->format, NULL, "mp4", NULL);
    if (error < 0) return esa_movie_fail(m, "there is no MP4 writer", error);
    m->format->flags |= AVFMT_FLAG_BITEXACT;
    c->stream = avformat_new_stream(m->format, NULL);
    m->frame = av_frame_alloc();
    m->packet = av_packet_alloc();
    if (!c->stream || !m->frame || !m->packet)
        return esa_movie_fail(m, "encoding failed", AVERROR(ENOMEM));
    c->stream->time_base = m->codec->time_base;
    c->stream->avg_frame_rate = c->rate;
    m->frame->format = m->codec->pix_fmt;
    m->frame->width = m->codec->width;
    m->frame->height = m->codec->height;
    error = avcodec_parameters_from_context(c->stream->codecpar, m->codec);
    if (error >= 0) error = av_frame_get_buffer(m->frame, 0);
    if (error >= 0) error = avio_open_dyn_buf(&m->format->pb);
    if (error >= 0) error = avformat_write_header(m->format, NULL);
    return error < 0 ? esa_movie_fail(m, "the MP4 could not be started", error) : ESA_OK;
}

/* Encodes frame i; i == count flushes the encoder. */
static esa_status encode_frame(encoding *c, const esa_frames *frames, int32_t i)
{
    esa_movie *m = &c->movie;
    const int flush = i == frames->count;
    int error = flush ? 0 : av_frame_make_writable(m->frame);
    if (error < 0) return esa_movie_fail(m, "encoding failed", error);
    if (!flush) {
        fill_picture(m->frame, frames, i);
        m->frame->pts = i;
    }
    error = avcodec_send_frame(m->codec, flush ? NULL : m->frame);
    if (error < 0) return esa_movie_fail(m, "encoding failed", error);
    return drain(c);
}

static esa_status encode(encoding *c, const esa_frames *frames)
{
    ESA_TRY(find_encoder(c, frames));
    ESA_TRY(start_file(c));
    for (int32_t i = 0; i <= frames->count; i++) ESA_TRY(encode_frame(c, frames, i));
    const int error = av_write_trailer(c->movie.format);
    return error < 0 ? esa_movie_fail(&c->movie, "the MP4 could not be finished", error) : ESA_OK;
}

/* Encodes into memory; the caller frees *bytes with av_free, also after a failure. */
static esa_status assemble(encoding *c, uint8_t **bytes, int *size, const esa_frames *frames)
{
    const esa_status status = encode(c, frames);
    if (c->movie.format && c->movie.format->pb)
        *size = avio_close_dyn_buf(c->movie.format->pb, bytes);
    if (!status && (*size <= 0 || !*bytes))
        return esa_movie_fail(&c->movie, "the MP4 could not be finished", AVERROR(ENOMEM));
    return status;
}

esa_status esa_mp4_save(esa_ctx *ctx, const esa_frames *frames, const char *path, double fps,
                        int32_t quality, int32_t codec)
{
    if (codec != ESA_CODEC_LOSSLESS && (frames->width % 2 || frames->height % 2))
        return esa_fail(ctx, ESA_ERR_ARGUMENT,
                        "%.200s cannot be written: MP4 needs even sides, and these frames are %d x "
                        "%d; .y4m takes them",
                        path, frames->width, frames->height);
    encoding c = { .movie = { .ctx = ctx, .path = path, .writing = 1 },
                   .quality = quality,
                   .codec = codec };
    esa_outfile out;
    uint8_t *bytes = NULL;
    int size = 0;
    /* The file is opened before the work, which is in vain if it cannot be written. */
    ESA_TRY(esa_outfile_open(ctx, &out, path));
    esa_fps_fraction(&c.rate.num, &c.rate.den, fps);
    esa_status status = assemble(&c, &bytes, &size, frames);
    if (!status) status = esa_outfile_write(&out, bytes, size);
    if (!status) status = esa_outfile_commit(&out);
    esa_outfile_close(&out);
    av_free(bytes);
    esa_movie_free(&c.movie);
    avformat_free_context(c.movie.format);
    return status;
}

#endif
