/* y4m.c - writes YUV4MPEG2: a line of text, then FRAME lines and planes. It is not compressed, and
 * every video tool reads it.
 * SPDX-License-Identifier: Apache-2.0 */
#include "io/outfile.h"
#include "media/frames.h"

#include <stdio.h>
#include <string.h>

static esa_status write_all(esa_outfile *out, const esa_frames *frames, uint8_t *planes, double fps)
{
    const int64_t size = (int64_t)frames->height * frames->width;
    uint8_t *const plane[3] = { planes, planes + size, planes + 2 * size };
    const int64_t pitch[3] = { frames->width, frames->width, frames->width };
    int32_t numerator, denominator;
    char head[160];
    esa_fps_fraction(&numerator, &denominator, fps);
    snprintf(head, sizeof head, "YUV4MPEG2 W%d H%d F%d:%d Ip A1:1 C444 XCOLORRANGE=LIMITED\n",
             frames->width, frames->height, numerator, denominator);
    ESA_TRY(esa_outfile_write(out, head, (int64_t)strlen(head)));
    for (int64_t i = 0; i < frames->count; i++) {
        esa_rgb_to_yuv444(plane, pitch, frames->rgb + i * size * 3, frames->height, frames->width);
        ESA_TRY(esa_outfile_write(out, "FRAME\n", 6));
        ESA_TRY(esa_outfile_write(out, planes, 3 * size));
    }
    return esa_outfile_commit(out);
}

esa_status esa_y4m_save(esa_ctx *ctx, const esa_frames *frames, const char *path, double fps)
{
    const int64_t bytes = (int64_t)frames->height * frames->width * 3;
    esa_outfile out;
    ESA_TRY(esa_outfile_open(ctx, &out, path));
    uint8_t *planes = esa_mem_alloc(&ctx->mem, bytes);
    const esa_status status = planes ? write_all(&out, frames, planes, fps)
                                     : esa_fail(ctx, ESA_ERR_MEMORY,
                                                "out of memory while writing %.200s", path);
    esa_mem_free(&ctx->mem, planes, bytes);
    esa_outfile_close(&out);
    return status;
}
