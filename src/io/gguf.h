/* gguf.h - reads GGUF files, versions 2 and 3, little-endian.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A file is: "GGUF", the version (u32), the number of tensors and of metadata pairs (u64 each), the
 * pairs, a description of each tensor, zeros up to a multiple of the alignment, and the data.
 *
 * The result is the object of a safetensors file: tensors by name, with dims in the order of
 * safetensors (a GGUF file has the innermost first), and the metadata; values that are not strings
 * are NULL. Two things differ: dtype may be an ESA_BLOCKS_* (base/blocks.h), and GGUF writers drop
 * leading dimensions of 1. So the public calls do not open GGUF files; the engine's weights do.
 *
 * Reading is strict, and everything is checked before any offset is used:
 *  - Numbers of tensors and pairs, lengths of strings and arrays must fit into the file. Names are
 *    UTF-8, not empty, without zero bytes, and unique.
 *  - general.alignment is a power of two up to 1 MiB; without it 32.
 *  - Types are F32, F16, BF16, Q8_0, Q4_K, Q5_K and Q6_K. Others are refused by name. Rows of a
 * type with blocks are whole blocks. A tensor has at most 8 dimensions (GGUF itself says 4, but
 * files of video models have 5).
 *  - Tensors begin at multiples of the alignment and follow one another with less than that between
 *    them and behind the last. They do not overlap and lie inside the file. */
#ifndef ESA_IO_GGUF_H
#define ESA_IO_GGUF_H

#include "io/safetensors.h"

/* 1 if the bytes begin like a GGUF file. */
ESA_ENGINE int32_t esa_gguf_begins(const void *bytes, int64_t size);

/* Maps and checks a file. On success the caller owns *file and frees it with esa_st_close; on
 * failure it is NULL. Fails with ESA_ERR_IO, ESA_ERR_MEMORY, or ESA_ERR_FORMAT and a message that
 * names the file, the tensor or key, what was found and what was expected. */
ESA_ENGINE esa_status esa_gguf_open(esa_ctx *ctx, esa_tensors **file, const char *path);
/* The same for bytes that must outlive the object and do not change while the call runs. */
ESA_ENGINE esa_status esa_gguf_open_memory(esa_ctx *ctx, esa_tensors **file, const void *bytes,
                                           int64_t size);

#endif
