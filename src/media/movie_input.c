/* movie_input.c - gives the bytes of one file to the FFmpeg libraries, and nothing else.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Some containers of FFmpeg are lists that name other files: playlists (HLS, DASH, ffconcat),
 * subtitles (VobSub), scripts, patterns of pictures (%d). With them a video of a stranger would
 * show what else lies on this machine. So FFmpeg gets neither the name of the file nor a way to
 * open one:
 *  - It reads through an AVIOContext over bytes that are in memory.
 *  - Only containers that hold their own pictures are read (`containers`).
 *  - A demuxer that asks for another file is refused (`no_other_file`, no protocol). */
#include "media/frames.h"

#ifdef ESA_HAVE_FFMPEG

#include "media/movie_input.h"

#include <libavutil/avstring.h>
#include <pthread.h>
#include <string.h>

#define BUFFER 65536 /* bytes that FFmpeg takes at once */

/* Names of demuxers. Those that this FFmpeg does not know do no harm. */
static const char containers[] =
    "mov,matroska,avi,flv,mpegts,mpeg,ogg,asf,mxf,nut,ivf,dv,gif,apng,yuv4mpegpipe," /* videos */
    "h264,hevc,obu,av1,m4v,mpegvideo,mjpeg,"                             /* bare streams */
    "jpeg_pipe,webp_pipe,tiff_pipe,bmp_pipe,gif_pipe,png_pipe,j2k_pipe," /* single pictures */
    "jpegls_pipe,jpegxl_pipe,qoi_pipe,ppm_pipe,pgm_pipe,pbm_pipe,pam_pipe";

/* ---------------------------------------------------------------- silence */

/* FFmpeg prints to the standard error output, unless its log level forbids it. The level belongs to
 * the whole process, and most of FFmpeg's objects have none of their own, so reading cannot be
 * silenced otherwise; FFmpeg's other switch, the log callback, cannot be read and put back. The
 * readers of all threads therefore share one change: the first one saves the level, the last one
 * restores it. A level that the host sets meanwhile stays. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int readers, saved_level;

void esa_movie_quiet(void)
{
    pthread_mutex_lock(&lock);
    if (readers++ == 0) {
        saved_level = av_log_get_level();
        av_log_set_level(AV_LOG_QUIET);
    }
    pthread_mutex_unlock(&lock);
}

void esa_movie_loud(void)
{
    pthread_mutex_lock(&lock);
    if (--readers == 0 && av_log_get_level() == AV_LOG_QUIET) av_log_set_level(saved_level);
    pthread_mutex_unlock(&lock);
}

/* ---------------------------------------------------------------- what FFmpeg calls */

static int on_read(void *user, uint8_t *to, int count)
{
    esa_movie_input *in = user;
    const int64_t n = esa_min64(count, in->size - in->at);
    if (n <= 0) return AVERROR_EOF;
    memcpy(to, in->bytes + in->at, (size_t)n);
    in->at += n;
    return (int)n;
}

static int64_t on_seek(void *user, int64_t offset, int whence)
{
    esa_movie_input *in = user;
    whence &= ~AVSEEK_FORCE;
    if (whence == AVSEEK_SIZE) return in->size;
    const int64_t from = whence == SEEK_SET ? 0 : whence == SEEK_CUR ? in->at : in->size;
    if (whence != SEEK_SET && whence != SEEK_CUR && whence != SEEK_END) return AVERROR(EINVAL);
    /* neither sum can overflow: from and size are within 0 .. size */
    if (offset < -from || offset > in->size - from) return AVERROR(EINVAL);
    in->at = from + offset;
    return in->at;
}

static int no_other_file(AVFormatContext *format, AVIOContext **io, const char *url, int flags,
                         AVDictionary **options)
{
    (void)format;
    (void)url;
    (void)flags;
    (void)options;
    *io = NULL;
    return AVERROR(EACCES);
}

/* ---------------------------------------------------------------- opening */

static esa_status not_read(const esa_movie *m, const char *container)
{
    return esa_fail(m->ctx, ESA_ERR_UNSUPPORTED,
                    "%.200s is a file of type %.40s, expected a video or a picture that holds its "
                    "own pixels, such as MP4, MKV, WebM, AVI, GIF or JPEG",
                    m->path, container);
}

/* The bytes alone decide the container: the probe gets no name. */
static esa_status find_container(esa_movie *m, esa_container **found, esa_movie_input *input)
{
    const int error = av_probe_input_buffer2(input->io, found, "", NULL, 0, 0);
    if (error == AVERROR_INVALIDDATA || (error >= 0 && !*found))
        return esa_fail(m->ctx, ESA_ERR_FORMAT, "%.200s is not a video file", m->path);
    if (error < 0) return esa_movie_fail(m, "it cannot be opened", error);
    return av_match_list((*found)->name, containers, ',') > 0 ? ESA_OK
                                                              : not_read(m, (*found)->name);
}

esa_status esa_movie_input_open(esa_movie *m, esa_movie_input *input)
{
    esa_container *container = NULL;
    uint8_t *buffer = av_malloc(BUFFER);
    input->io = buffer ? avio_alloc_context(buffer, BUFFER, 0, input, on_read, NULL, on_seek)
                       : NULL;
    if (!input->io) {
        av_free(buffer);
        return esa_movie_fail(m, "it cannot be opened", AVERROR(ENOMEM));
    }
    ESA_TRY(find_container(m, &container, input));
    m->format = avformat_alloc_context();
    if (!m->format) return esa_movie_fail(m, "it cannot be opened", AVERROR(ENOMEM));
    m->format->pb = input->io;
    m->format->io_open = no_other_file;
    /* Demuxers pass these two on to the demuxers that they open themselves. */
    AVDictionary *options = NULL;
    av_dict_set(&options, "format_whitelist", containers, 0);
    av_dict_set(&options, "protocol_whitelist", "none", 0);
    const int error = avformat_open_input(&m->format, "", container, &options);
    av_dict_free(&options);
    if (error == AVERROR_INVALIDDATA)
        return esa_fail(m->ctx, ESA_ERR_FORMAT, "%.200s is not a video file", m->path);
    return error < 0 ? esa_movie_fail(m, "it cannot be opened", error) : ESA_OK;
}

void esa_movie_input_close(esa_movie *m, esa_movie_input *input)
{
    avformat_close_input(&m->format); /* leaves an AVIOContext that it did not open alone */
    if (!input->io) return;
    av_freep(&input->io->buffer);
    avio_context_free(&input->io);
}

#endif
