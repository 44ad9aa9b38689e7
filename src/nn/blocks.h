/* blocks.h - expands weights that are stored in blocks (base/blocks.h) to f32.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_NN_BLOCKS_H
#define ESA_NN_BLOCKS_H

#include "base/blocks.h"

/* dst = elements first .. first+count-1 of the blocks at src, which may have any alignment. dtype
 * is an ESA_BLOCKS_*. first and count need not be multiples of a block. Same bits as the gguf
 * package of Python, on every processor: each product and sum is rounded to f32. */
void esa_blocks_to_f32(float *dst, const void *src, int32_t dtype, int64_t first, int64_t count);

#endif
