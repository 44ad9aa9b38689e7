/* movie_input.h - gives the bytes of one file to the FFmpeg libraries, and nothing else; for
 * mp4_read.c, in builds that have FFmpeg.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MEDIA_MOVIE_INPUT_H
#define ESA_MEDIA_MOVIE_INPUT_H

#include "media/ffmpeg.h"

/* FFmpeg before 5.0 does not say that a demuxer is never written. */
#if LIBAVFORMAT_VERSION_MAJOR < 59
typedef AVInputFormat esa_container;
#else
typedef const AVInputFormat esa_container;
#endif

typedef struct esa_movie_input {
    const uint8_t *bytes; /* the whole file */
    int64_t size, at;
    AVIOContext *io; /* owned */
} esa_movie_input;

/* Silences FFmpeg until as many calls of esa_movie_loud have followed. Any threads may do both. */
void esa_movie_quiet(void);
void esa_movie_loud(void);

/* Opens the container in input->bytes and sets m->format. Fails with ESA_ERR_FORMAT, or
 * ESA_ERR_UNSUPPORTED for a container that is not read. In either case the caller calls
 * esa_movie_input_close. */
esa_status esa_movie_input_open(esa_movie *m, esa_movie_input *input);
void esa_movie_input_close(esa_movie *m, esa_movie_input *input);

#endif
