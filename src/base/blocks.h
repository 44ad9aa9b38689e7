/* blocks.h - types of weights that are stored in blocks, as GGUF files have them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A block holds the codes of 32 or 256 neighbours of a row with their scales, all little-endian:
 *
 *   Q8_0   32 elements in  34 bytes: d (f16), 32 codes (i8); the value is d * code
 *   Q4_K  256 elements in 144 bytes: d, dmin (f16), 12 bytes with eight scales and eight minima of
 * 6 bits, 128 bytes with codes of 4 bits; the value is (d * scale) * code - dmin * min Q5_K  256
 * elements in 176 bytes: the same with 32 bytes between, the fifth bits of the codes Q6_K  256
 * elements in 210 bytes: 128 bytes with the lower 4 bits of the codes, 64 bytes with the upper 2,
 * 16 scales (i8), d (f16); the value is (d * scale) * (code - 32)
 *
 * Types of the engine alone: neither ESA_DTYPE_* nor ESA_FILE_* of the public headers have them.
 * The numbers serve as both. */
#ifndef ESA_BASE_BLOCKS_H
#define ESA_BASE_BLOCKS_H

#include <stddef.h>
#include <stdint.h>
#include "base/inline.h"

enum {
    ESA_BLOCKS_Q8_0 = 32,
    ESA_BLOCKS_Q4_K = 33,
    ESA_BLOCKS_Q5_K = 34,
    ESA_BLOCKS_Q6_K = 35,
    ESA_BLOCKS_MOST = 256 /* elements of the largest block */
};

/* Elements of a block; 0 if the type is not stored in blocks. */
ESA_INLINE int64_t esa_blocks_elements(int32_t dtype)
{
    return dtype == ESA_BLOCKS_Q8_0                               ? 32
           : dtype >= ESA_BLOCKS_Q4_K && dtype <= ESA_BLOCKS_Q6_K ? 256
                                                                  : 0;
}

/* Bytes of a block; 0 if the type is not stored in blocks. */
ESA_INLINE int64_t esa_blocks_bytes(int32_t dtype)
{
    return dtype == ESA_BLOCKS_Q8_0   ? 34
           : dtype == ESA_BLOCKS_Q4_K ? 144
           : dtype == ESA_BLOCKS_Q5_K ? 176
           : dtype == ESA_BLOCKS_Q6_K ? 210
                                      : 0;
}

/* The name of the type; NULL if it is not stored in blocks. */
ESA_INLINE const char *esa_blocks_name(int32_t dtype)
{
    return dtype == ESA_BLOCKS_Q8_0   ? "Q8_0"
           : dtype == ESA_BLOCKS_Q4_K ? "Q4_K"
           : dtype == ESA_BLOCKS_Q5_K ? "Q5_K"
           : dtype == ESA_BLOCKS_Q6_K ? "Q6_K"
                                      : NULL;
}

#endif
