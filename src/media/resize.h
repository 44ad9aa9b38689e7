/* resize.h - scales pictures as Pillow does, so that models see what they were trained on.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each output pixel is a weighted mean of input pixels. When a picture becomes smaller the filter
 * becomes wider by the same factor (antialias). Columns first, then rows; bytes between the passes
 * and after them, weights of 22 bits. Pillow 13 begins with the rows if a picture loses more of its
 * height than of its width; the bytes then differ by a few levels from ours and from those of older
 * versions. */
#ifndef ESA_MEDIA_RESIZE_H
#define ESA_MEDIA_RESIZE_H

#include "ctx/ctx.h"

enum { ESA_RESIZE_BICUBIC = 0, ESA_RESIZE_LANCZOS = 1 };

/* to [height][width][3] = from [from_height][from_width][3]. Fails with ESA_ERR_MEMORY. */
esa_status esa_resize(esa_ctx *ctx, uint8_t *to, int64_t height, int64_t width, const uint8_t *from,
                      int64_t from_height, int64_t from_width, int32_t filter);

#endif
