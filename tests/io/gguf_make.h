/* gguf_make.h - makes small GGUF files in memory, right and wrong ones, for tests and fuzzing.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Calls follow the order of the file: gguf_begin, the metadata, the tensors, gguf_data. Nothing is
 * checked but the room. */
#ifndef ESA_TESTS_IO_GGUF_MAKE_H
#define ESA_TESTS_IO_GGUF_MAKE_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct gguf_make {
    uint8_t bytes[6000];
    size_t size;
} gguf_make;

static inline void gguf_put(gguf_make *m, const void *data, size_t bytes)
{
    if (bytes > sizeof m->bytes - m->size) abort();
    if (bytes) memcpy(m->bytes + m->size, data, bytes);
    m->size += bytes;
}

static inline void gguf_byte(gguf_make *m, uint8_t value) { gguf_put(m, &value, 1); }
static inline void gguf_u32(gguf_make *m, uint32_t value) { gguf_put(m, &value, 4); }
static inline void gguf_u64(gguf_make *m, uint64_t value) { gguf_put(m, &value, 8); }

static inline void gguf_string(gguf_make *m, const char *text)
{
    gguf_u64(m, strlen(text));
    gguf_put(m, text, strlen(text));
}

static inline gguf_make gguf_begin(uint32_t version, uint64_t tensors, uint64_t pairs)
{
    gguf_make m = { .size = 0 };
    gguf_put(&m, "GGUF", 4);
    gguf_u32(&m, version);
    gguf_u64(&m, tensors);
    gguf_u64(&m, pairs);
    return m;
}

/* A key and the type of its value, which follows. */
static inline void gguf_key(gguf_make *m, const char *key, uint32_t type)
{
    gguf_string(m, key);
    gguf_u32(m, type);
}

static inline void gguf_text(gguf_make *m, const char *key, const char *value)
{
    gguf_key(m, key, 8);
    gguf_string(m, value);
}

/* dim: innermost first, as in the file. */
static inline void gguf_tensor(gguf_make *m, const char *name, uint32_t rank, const uint64_t *dim,
                               uint32_t type, uint64_t offset)
{
    gguf_string(m, name);
    gguf_u32(m, rank);
    for (uint32_t i = 0; i < rank; i++) gguf_u64(m, dim[i]);
    gguf_u32(m, type);
    gguf_u64(m, offset);
}

static inline void gguf_pad(gguf_make *m, size_t bytes)
{
    while (bytes--) gguf_byte(m, (uint8_t)(m->size * 7));
}

/* Bytes of data after the padding. */
static inline void gguf_data(gguf_make *m, size_t alignment, size_t bytes)
{
    gguf_pad(m, (alignment - m->size % alignment) % alignment);
    gguf_pad(m, bytes);
}

#endif
