/* sp_shim.h - a C interface to the parts of libsentencepiece that we use. It lets no exception out.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef ESA_MODEL_SP_SHIM_H
#define ESA_MODEL_SP_SHIM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct esa_sp esa_sp;

/* Reads the bytes of a model's file and keeps none of them. Returns 0, or -1 with the library's
 * reason in why. */
int32_t esa_sp_open(esa_sp **sp, const void *bytes, size_t size, char *why, size_t why_size);
void esa_sp_close(esa_sp *sp);
int32_t esa_sp_size(const esa_sp *sp);                    /* pieces, ids are 0 .. size - 1 */
int32_t esa_sp_find(const esa_sp *sp, const char *piece); /* id, or -1 */
/* Calls put for every id of text, in order. A run of byte pieces (some vocabularies spell unknown
 * characters with them) counts as one unknown piece, as in transformers' fast tokenizers. Returns 0
 * or -1. */
int32_t esa_sp_encode(const esa_sp *sp, const char *text, size_t bytes,
                      void (*put)(void *user, int32_t id), void *user);

#ifdef __cplusplus
}
#endif
#endif
